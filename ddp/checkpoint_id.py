"""The id of a save: it is in the manifest, in the metadata and at the head of every data file.

Files of two saves look alike: same names, same sizes. Without an id, weights of one step would be loaded with the
moments of another where somebody copied files together, or where two jobs wrote into one folder. Checkpoints of before
there were ids have none anywhere, and torch gives its own metadata ids of another form.
"""

import uuid
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["check_head", "head_of", "known_id", "new_id"]

_PREFIX = "maingrad-"
_HEAD_BYTES = 64
"""Torch aligns tensors in a file to as many."""


def new_id() -> str:
    """An id that no other save has."""
    return f"{_PREFIX}{uuid.uuid4().hex}"


def known_id(value: Any) -> str | None:
    """The id that this is; None for anything else, such as torch's own."""
    is_one = isinstance(value, str) and value.startswith(_PREFIX) and len(value) == len(_PREFIX) + 32
    return value if is_one else None


def head_of(save_id: str, name: str) -> bytes:
    """What the data file of this name begins with. No reader goes there: the metadata says where each tensor lies."""
    return f"{save_id} {name}\n".encode().ljust(_HEAD_BYTES - 1) + b"\n"


def check_head(file: BinaryIO, path: Path, save_id: str | None) -> None:
    """Raise ``ValueError`` unless the data file ``file``, at ``path``, is of this save; None: of one without ids."""
    file.seek(0)
    head = file.read(_HEAD_BYTES)
    found_id, _, name = head.split(b"\n", 1)[0].decode("ascii", "replace").partition(" ")
    found = known_id(found_id)
    if found != save_id:
        raise ValueError(
            f"the data file '{path}' is of another save than the manifest beside it ({found or 'one without an id'}, "
            f"and {save_id or 'one without an id'}): files of two checkpoints are mixed in this folder"
        )
    if found is not None and name not in ("", path.name):  # saves of before it was noted have none
        raise ValueError(
            f"the data file '{path}' was written as '{name}': files of this checkpoint have been renamed, and each has "
            f"other elements; give it its name again"
        )
