"""Which rank writes what: boxes that several ranks hold alike are written by the one with the least to write so far."""

from collections.abc import Mapping, Sequence

import torch

from .boxes import Part
from .manifest import StoredBox

__all__ = ["assign", "stored_tensors"]

Stored = tuple[tuple[int, ...], dict[str, torch.dtype], tuple[StoredBox, ...]]
"""Shape, dtypes and boxes of a ``SavedTensor``."""


def assign(held: Sequence[Sequence[Part]]) -> dict[Part, int]:
    """The rank that writes each part, of what each rank holds. Alike on all ranks."""
    holders: dict[Part, list[int]] = {}
    for rank, parts in enumerate(held):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    writers: dict[Part, int] = {}
    nbytes = [0] * len(held)
    for part, ranks in holders.items():
        writers[part] = rank = min(ranks, key=nbytes.__getitem__)
        nbytes[rank] += part.nbytes
    return writers


def stored_tensors(writers: Mapping[Part, int]) -> dict[str, Stored]:
    """What is written of each tensor. Raises ``ValueError`` where ranks hold different tensors under one name."""
    parts: dict[str, list[Part]] = {}
    for part in writers:
        parts.setdefault(part.name, []).append(part)
    tensors = {}
    for name, own in parts.items():
        (shape, dtypes), *others = {(part.shape, part.dtypes): None for part in own}
        if others:
            raise ValueError(f"ranks disagree on '{name}': one has {(shape, dtypes)}, another {others[0]}")
        tensors[name] = shape, dict(dtypes), tuple(StoredBox(writers[part], *part.box) for part in own)
    return tensors
