"""Ranges of a flattened tensor from the ranks that have them to the ranks that want them.

Shards here end anywhere in a parameter; DTensors are cut between rows. Both are ranges of the flattened parameter, so
that one all-to-all makes the one of the other, and each element travels once::

    parameter of 5 rows of 4      0    4    8    12   16   20
    this library, 2 ranks         |---- rank 0 -----|--- rank 1 ---|          any element
    Shard(0), 2 ranks             |--- rank 0 ----|---- rank 1 ----|          rows: torch.chunk
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...ddp.collectives.in_flight import device_types_of
from ...ddp.plan.ranges import Range

__all__ = ["device_of", "exchange", "rows_of_rank"]


def rows_of_rank(num_rows: int, rank: int, size: int) -> Range:
    """Which rows one of ``size`` ranks has under DTensor's ``Shard(0)``: as ``torch.chunk`` cuts them, for the last
    ranks fewer or none."""
    step = -(-num_rows // size)
    return Range(min(rank * step, num_rows), min((rank + 1) * step, num_rows))


def exchange(have: Tensor, haves: Sequence[Range], wants: Sequence[Range], group: dist.ProcessGroup | None) -> Tensor:
    """Send every rank of ``group`` what it wants. Collective; None: this rank alone.

    have   [haves[rank].numel], contiguous, on any device
    haves  by rank of the group: ranges that follow each other without overlap, some of them empty
    wants  by rank of the group: all of it lies in ``haves``

    Returns [wants[rank].numel] new memory on the device of ``have``. Values are copied bit by bit.
    """
    if group is None or group.size() == 1:
        (mine,), (wanted,) = haves, wants
        return have[wanted.start - mine.start : wanted.end - mine.start].clone()
    rank = group.rank()
    mine, wanted = haves[rank], wants[rank]
    sent = [mine.intersect(want) for want in wants]
    received = [wanted.intersect(other) for other in haves]
    itemsize, device = have.element_size(), device_of(group, have)
    # As bytes, since not every backend knows every dtype.
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
    """The tensor's, or one that the group talks over where the tensor was offloaded to the host."""
    device_types = device_types_of(group)
    if not device_types or tensor.device.type in device_types:
        return tensor.device
    return torch.device(device_types[0])
