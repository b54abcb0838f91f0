"""Which rank writes what: boxes that several ranks hold alike are written by the one with the least to write so far."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist

from ...collectives.failure_report import FailureReporter
from .boxes import Box, Part, check_tiling
from .rank_file import file_name

__all__ = ["Assignment", "StoredBox", "assign_parts"]


class StoredBox(NamedTuple):
    """A box of a tensor in the data files."""

    file: str
    box: Box


class Assignment(NamedTuple):
    """What one rank writes; on the first rank of the group, what all ranks write too."""

    parts: Sequence[Part]
    file: str
    """Name of this rank's data file."""
    tensors: Mapping[str, Sequence[StoredBox]] = {}
    """By key, on the first rank."""
    notes: Sequence[Any] = ()
    """What each rank told, on the first rank."""


class _Offer(NamedTuple):
    """A part that a rank could write."""

    key: str
    shape: tuple[int, ...]
    box: Box
    itemsize: int


def assign_parts(
    parts: Sequence[Part], note: Any, group: dist.ProcessGroup | None, failures: FailureReporter | None
) -> Assignment:
    """Decide on the first rank which parts each rank writes. Collective over ``group``; None: this rank alone.

    note  anything that can be pickled, for the first rank

    Raises ``ValueError`` on all ranks for elements that no rank holds, or that ranks hold in different boxes.
    """
    offers = [_Offer(part.key, part.shape, part.box, part.data.itemsize) for part in parts]
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    told: list[Any] = [(offers, note)]
    answers: list[Any] = []
    if group is not None:
        first = dist.get_global_rank(group, 0)
        told = [None] * size if rank == 0 else []
        with failures.watch("the offers for a checkpoint") if failures is not None else nullcontext():
            dist.gather_object((offers, note), told or None, dst=first, group=group)
    if rank == 0:
        try:
            answers = _decide([each for each, _ in told])
        except ValueError as error:
            answers = [error] * size
    if group is not None:
        received: list[Any] = [None]
        with failures.watch("the assignment of a checkpoint") if failures is not None else nullcontext():
            dist.scatter_object_list(received, answers or None, src=first, group=group)
    mine = answers[0] if rank == 0 else received[0]
    if isinstance(mine, Exception):
        raise mine
    chosen = [parts[index] for index in mine]
    if rank:
        return Assignment(chosen, file_name(rank))
    tensors: dict[str, list[StoredBox]] = {}
    for writer, indices in enumerate(answers):
        for offer in (told[writer][0][index] for index in indices):
            tensors.setdefault(offer.key, []).append(StoredBox(file_name(writer), offer.box))
    return Assignment(chosen, file_name(0), tensors, [each for _, each in told])


def _decide(offers: Sequence[Sequence[_Offer]]) -> list[list[int]]:
    """For each rank, the indices of its offers that it writes."""
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, each in enumerate(offers):
        for index, offer in enumerate(each):
            holders.setdefault((offer.key, offer.box), []).append((rank, index))
            shapes[offer.key] = offer.shape
    boxes: dict[str, list[Box]] = {key: [] for key in shapes}
    mine: list[list[int]] = [[] for _ in offers]
    nbytes = [0] * len(offers)
    for (key, box), places in holders.items():
        rank, index = min(places, key=lambda place: nbytes[place[0]])
        mine[rank].append(index)
        nbytes[rank] += math.prod(box.sizes) * offers[rank][index].itemsize
        boxes[key].append(box)
    for key, shape in shapes.items():
        try:
            check_tiling(shape, boxes[key])
        except ValueError as error:
            raise ValueError(f"'{key}' of shape {list(shape)} is not held by all ranks together: {error}") from None
    return mine
