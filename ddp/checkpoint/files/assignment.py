"""Which rank writes what: boxes that several ranks hold alike are written by the one with the least to write so far."""

from collections.abc import Mapping, Sequence

import torch

from .boxes import Part
from .manifest import Stored, StoredBox

__all__ = ["assign", "stored_tensors"]


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


def stored_tensors(writers: Mapping[Part, int]) -> dict[str, tuple[tuple[int, ...], dict[str, Stored]]]:
    """Shape, and sections with their boxes, of each tensor that is written.

    Raises ``ValueError`` where ranks hold different tensors under one name.
    """
    kinds: dict[tuple[str, str], tuple[torch.dtype, tuple[int, ...]]] = {}
    boxes: dict[str, dict[str, list[StoredBox]]] = {}
    for part, rank in writers.items():
        kind = part.dtype, part.shape
        known = kinds.setdefault((part.name, part.section), kind)
        if known != kind:
            raise ValueError(f"ranks disagree on '{part.name}': one has {known}, another {kind}")
        boxes.setdefault(part.name, {}).setdefault(part.section, []).append(StoredBox(rank, *part.box))
    tensors = {}
    for name, sections in boxes.items():
        stored = {}
        for section, own in sections.items():
            dtype, shape = kinds[name, section]
            as_model = section != "model" and own == sections.get("model")
            stored[section] = Stored(dtype, () if as_model else tuple(own))
        tensors[name] = shape, stored
    return tensors
