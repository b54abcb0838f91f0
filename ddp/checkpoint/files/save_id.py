"""The id of a save, which stands in the manifest, at the head of every data file, and in torch's metadata.

Files of two saves have the same names and sizes. Ids tell them apart before a load changes the model; checksums would
tell only while tensors are read, when the model is partly overwritten.
"""

import uuid
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["check_head", "head_of", "is_id", "may_be_head", "new_id"]

_PREFIX = "maingrad-"
_HEAD_BYTES = 64
"""Torch aligns tensors in a file to this number of bytes."""


def new_id() -> str:
    """An id that no other save has."""
    return f"{_PREFIX}{uuid.uuid4().hex}"


def is_id(value: Any) -> bool:
    """Whether ``value`` is an id of a save."""
    return isinstance(value, str) and value.startswith(_PREFIX) and len(value) == len(_PREFIX) + 32


def head_of(save_id: str, name: str) -> bytes:
    """The first bytes of the data file ``name``. Readers of tensors skip the head: the index has their positions."""
    return f"{save_id} {name}\n".encode().ljust(_HEAD_BYTES - 1) + b"\n"


def may_be_head(file: BinaryIO) -> bool:
    """Whether a data file begins with the id of some save, as far as it was written: it may be empty."""
    found = file.read(len(_PREFIX))
    return _PREFIX.encode().startswith(found)


def check_head(file: BinaryIO, path: Path, save_id: str) -> None:
    """Raise ``ValueError`` unless the data file ``file``, at ``path``, belongs to this save and has its own name."""
    file.seek(0)
    head = file.read(_HEAD_BYTES)
    found, _, name = head.split(b"\n", 1)[0].decode("ascii", "replace").partition(" ")
    if found != save_id:
        raise ValueError(
            f"the data file '{path}' is of another save than the manifest beside it "
            f"({found if is_id(found) else 'one without an id'}, and {save_id}): files of two checkpoints are mixed in "
            f"this folder"
        )
    if name != path.name:
        raise ValueError(
            f"the data file '{path}' was written as '{name}': files of this checkpoint have been renamed, and each has "
            f"other elements; give it its name again"
        )
