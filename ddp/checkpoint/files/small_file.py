"""Opens a file that fits into memory, if it is one: a pipe would keep its reader waiting, and a device never ends."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_small_file"]


def open_small_file(path: Path, most_bytes: int) -> BinaryIO:
    """Open ``path``. Raises ``OSError``, and ``ValueError`` for what is no regular file or is longer."""
    # O_NONBLOCK: to open a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size <= most_bytes:
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(found.st_mode):
        raise ValueError(f"it has {found.st_size} bytes, and {most_bytes} at most are read")
    raise ValueError("it is no regular file")
