"""Sends ranges of a flattened tensor from the ranks that have them to the ranks that want them; and compares before.

Shards of this library end at any element; DTensors end between rows. Both are ranges of the flattened parameter. So one
all-to-all converts between them, and each element is sent once::

    parameter of 5 rows of 4      0    4    8    12   16   20
    this library, 2 ranks         |---- rank 0 -----|--- rank 1 ---|          any element
    Shard(0), 2 ranks             |--- rank 0 ----|---- rank 1 ----|          rows: torch.chunk
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...ddp.collectives.failure_report import gather
from ...ddp.collectives.rank_grid import RankGrid, device_types_of
from ...ddp.plan.cut import Range
from ..tensors.parameter import ShardedParameter

__all__ = ["device_of", "disagreement", "exchange", "rows_of_rank"]


def rows_of_rank(num_rows: int, rank: int, size: int) -> Range:
    """The rows of one of ``size`` ranks under DTensor's ``Shard(0)``, which cuts as ``torch.chunk``: every rank has
    ceil(num_rows / size) rows, the last ranks fewer or none."""
    step = -(-num_rows // size)
    return Range(min(rank * step, num_rows), min((rank + 1) * step, num_rows))


def exchange(have: Tensor, haves: Sequence[Range], wants: Sequence[Range], group: dist.ProcessGroup | None) -> Tensor:
    """Send every rank of ``group`` the elements that it wants. Collective. ``group`` None: this rank alone.

    have   [haves[rank].numel] this rank's elements, contiguous, on any device
    haves  for each rank of the group, the range that it has; ascending, without overlap, perhaps empty
    wants  for each rank of the group, the range that it wants, which lies in the union of ``haves``

    Returns [wants[rank].numel], new memory on the device of ``have``. Values are copied bit by bit.
    """
    if group is None or group.size() == 1:
        (mine,), (wanted,) = haves, wants
        return have[wanted.start - mine.start : wanted.end - mine.start].clone()
    rank = group.rank()
    mine, wanted = haves[rank], wants[rank]
    sent = [mine.intersect(want) for want in wants]
    received = [wanted.intersect(other) for other in haves]
    itemsize, device = have.element_size(), device_of(group, have)
    # Sent as bytes: not every backend supports every dtype.
    out = torch.empty(wanted.numel, dtype=have.dtype, device=device)
    source = torch.cat([have[part.start - mine.start : part.end - mine.start] for part in sent]).to(device)
    dist.all_to_all_single(
        out.view(torch.uint8),
        source.view(torch.uint8),
        [part.numel * itemsize for part in received],
        [part.numel * itemsize for part in sent],
        group=group,
    )
    return out.to(have.device)


def device_of(group: dist.ProcessGroup, tensor: Tensor) -> torch.device:
    """The tensor's device if the group's backend supports it; else (offloaded) a device that the backend supports."""
    device_types = device_types_of(group)
    if not device_types or tensor.device.type in device_types:
        return tensor.device
    return torch.device(device_types[0])


def disagreement(said: Mapping[ShardedParameter, Sequence[str]], complaints: Sequence[str]) -> str | None:
    """Words for why this rank or another cannot exchange; None if all can. Collective over the parameters' ranks.

    An exchange of a parameter's elements is a collective over the ranks that share the parameter. If one rank has no
    such tensor, the others would wait for ever; if one rank has another rank's tensor, the others would get wrong
    elements. So ranks compare before, and all of them raise.

    said        for each parameter, what this rank has of it; to be equal on all ranks that share the parameter
    complaints  why this rank cannot exchange
    """
    by_grid: dict[Any, tuple[RankGrid, list[str]]] = {}
    for param, texts in said.items():
        grid = param.shard.grid
        by_grid.setdefault((grid.inner, grid.outer), (grid, []))[1].extend(texts)
    answers = [
        gather(("\n\t".join(complaints), texts), grid.axes, None, "the comparison of state dicts")
        for grid, texts in by_grid.values()
    ]
    for everyone in answers:
        complaining = [(rank, complaint) for rank, (complaint, _) in everyone.items() if complaint]
        if complaining:
            rank, complaint = complaining[0]
            return complaint if len(complaining) == len(everyone) else f"{complaint} (on rank {rank})"
    for everyone in answers:
        (first, (_, ours)), *others = everyone.items()
        for other, (_, theirs) in others:
            for here, there in zip_longest(ours, theirs, fillvalue="nothing"):
                if here != there:
                    return f"state dicts differ between ranks: rank {first} has {here}, where rank {other} has {there}"
    return None
