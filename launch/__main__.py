"""``python -m maingrad.launch`` and the ``maingrad`` command."""

import sys

from .cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
