"""The ``maingrad`` command, and ``python -m maingrad``."""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, as ``maingrad.launch.cli.main`` does.

    pip makes the ``maingrad`` command with the core alone, too. Without the packages of the extra ``launch``, one line
    on stderr names the missing package and the remedy, and the status is 2.
    """
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
