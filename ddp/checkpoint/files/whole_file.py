"""Files whose name means that they are whole, and files that are opened only if they fit into memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["TEMPORARY", "open_small_file", "whole_file"]

TEMPORARY = ".tmp"
"""Suffix of the name that a file has before."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write the file ``path`` under a temporary name; it gets its own when the block has ended without an error.

    Raises ``OSError`` with the file's name.
    """
    staging = path.with_name(f"{path.name}{TEMPORARY}")
    try:
        with staging.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # the error of a write does not name the file
        raise OSError(error.errno, error.strerror, str(staging)) from error
    staging.replace(path)


def open_small_file(path: Path, most_bytes: int) -> BinaryIO:
    """Open ``path``: no pipe, which would keep its reader waiting, and no device, which never ends.

    Raises ``OSError``, and ``ValueError`` for what is no regular file or is longer.
    """
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError("it is no regular file")
    if size > most_bytes:
        raise ValueError(f"it has {size} bytes, and {most_bytes} at most are read")
    return path.open("rb")
