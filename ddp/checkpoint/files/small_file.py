"""Opens a file that fits into memory, if it is one: a pipe would keep its reader waiting, and a device never ends."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_small_file"]


def open_small_file(path: Path, most_bytes: int) -> BinaryIO:
    """Open ``path``. Raises ``OSError``, and ``ValueError`` for what is no regular file or is longer."""
    # O_NONBLOCK: to open a pipe would wait for its writer.
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115  the caller closes
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and found.st_size <= most_bytes:
        return file
    file.close()
    if stat.S_ISREG(found.st_mode):
        raise ValueError(f"it has {found.st_size} bytes, and {most_bytes} at most are read")
    raise ValueError("it is no regular file")
