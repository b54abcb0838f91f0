"""The ``maingrad`` command, and ``python -m maingrad``."""

import importlib.metadata
import sys
from collections.abc import Sequence

from maingrad import __version__

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, or print the versions for ``--version``; returns the exit status, as ``launch.cli.main`` does.

    pip makes the ``maingrad`` command with the core alone, too. Without the packages of the extra ``launch``, one line
    on stderr names the missing package and the remedy, and the status is 2.
    """
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"maingrad {__version__}, torch {importlib.metadata.version('torch')}")
        return 0
    try:
        from maingrad.launch.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "maingrad":  # a fault, and no missing package
            raise
        remedy = "pip install '.[launch]' in the clone, or 'maingrad[launch]' where maingrad is installed"
        print(f"maingrad: error: the package {error.name} is missing; {remedy}", file=sys.stderr)
        return 2
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
