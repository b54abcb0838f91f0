"""Which rank writes what: boxes that several ranks hold alike are written by the one with the least to write so far."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .boxes import Box, Part
from .manifest import Stored, StoredBox

__all__ = ["Offer", "assign", "stored_tensors"]


class Offer(NamedTuple):
    """A part that a rank could write."""

    name: str
    section: str
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype

    @classmethod
    def of(cls, part: Part) -> "Offer":
        """The offer of ``part``."""
        return cls(part.name, part.section, part.shape, part.box, part.dtype)


def assign(offers: Sequence[Sequence[Offer]]) -> list[list[Offer]]:
    """What each rank writes of what all ranks offer. Alike on all ranks."""
    holders: dict[Offer, list[int]] = {}
    for rank, each in enumerate(offers):
        for offer in each:
            holders.setdefault(offer, []).append(rank)
    mine: list[list[Offer]] = [[] for _ in offers]
    nbytes = [0] * len(offers)
    for offer, ranks in holders.items():
        rank = min(ranks, key=nbytes.__getitem__)
        mine[rank].append(offer)
        nbytes[rank] += offer.box.numel * offer.dtype.itemsize
    return mine


def stored_tensors(assigned: Sequence[Sequence[Offer]]) -> dict[str, tuple[tuple[int, ...], dict[str, Stored]]]:
    """Shape, and sections with their boxes, of each tensor that is written.

    Raises ``ValueError`` where ranks hold different tensors under one name.
    """
    kinds: dict[tuple[str, str], tuple[torch.dtype, tuple[int, ...]]] = {}
    boxes: dict[tuple[str, str], list[StoredBox]] = {}
    for rank, each in enumerate(assigned):
        for name, section, shape, box, dtype in each:
            known = kinds.setdefault((name, section), (dtype, shape))
            if known != (dtype, shape):
                raise ValueError(f"ranks disagree on '{name}': one has {known}, another {(dtype, shape)}")
            boxes.setdefault((name, section), []).append(StoredBox(rank, *box))
    tensors: dict[str, tuple[tuple[int, ...], dict[str, Stored]]] = {}
    for (name, section), (dtype, shape) in kinds.items():
        own = boxes[name, section]
        as_model = section != "model" and own == boxes.get((name, "model"))
        tensors.setdefault(name, (shape, {}))[1][section] = Stored(dtype, () if as_model else tuple(own))
    return tensors
