"""The id of a save: it is in the manifest and at the head of every data file, and torch's metadata has it too.

Files of two saves look alike: same names, same sizes. Checksums tell them apart while tensors are read, when the model
is partly overwritten; ids do before.
"""

import uuid
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["check_head", "head_of", "is_id", "new_id"]

_PREFIX = "maingrad-"
_HEAD_BYTES = 64
"""Torch aligns tensors in a file to as many."""


def new_id() -> str:
    """An id that no other save has."""
    return f"{_PREFIX}{uuid.uuid4().hex}"


def is_id(value: Any) -> bool:
    """Whether it is one."""
    return isinstance(value, str) and value.startswith(_PREFIX) and len(value) == len(_PREFIX) + 32


def head_of(save_id: str, name: str) -> bytes:
    """What the data file of this name begins with. No reader goes there: the index says where each tensor lies."""
    return f"{save_id} {name}\n".encode().ljust(_HEAD_BYTES - 1) + b"\n"


def check_head(file: BinaryIO, path: Path, save_id: str) -> None:
    """Raise ``ValueError`` unless the data file ``file``, at ``path``, is of this save."""
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
