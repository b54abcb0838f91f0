"""``python -m maingrad``: the command line."""

import sys

from maingrad.launch.__main__ import main

sys.exit(main())
