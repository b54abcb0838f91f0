"""Writes a file that has its name only when all of its bytes are on the disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["TEMPORARY", "whole_file"]

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
