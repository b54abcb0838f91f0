"""Bytes on one rank, at rest and on the wire, from a plan's integers alone.

With N elements of a buffer (padding included) in shards of N/s, p and g bytes for an element of parameter and gradient:

    parameters  N p            masters   4 N/s  under bf16 and fp16 parameters; others are their own masters
    gradients   N g            moments   8 N/s  AdamW's two, fp32; other optimizers have other numbers of them

and summed over the buffers of a plan. The degree s is 1 under plain data parallelism, the number of ranks under ZeRO-1,
the ranks of an instance under hybrid; experts have their own.
"""

from typing import NamedTuple

import torch

from ...ddp.collectives.placements import Placements
from ...ddp.plan.layout import BucketLayout, GradPlan

__all__ = ["RankBytes", "Traffic", "bucket_traffic", "held_numels", "rank_bytes"]

_HALF = (torch.bfloat16, torch.float16)


class RankBytes(NamedTuple):
    """Bytes on one rank, padding included. Not counted: AdamW's step counters, 4 bytes for each flat tensor."""

    parameters: int
    gradients: int
    masters: int
    """fp32 copies of half-precision parameters; 0 where parameters are fp32 themselves."""
    moments: int
    """Elementwise state of the optimizer: of AdamW the first and second moments, fp32. Of the rank that has most, where
    parameters are kept whole."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class Traffic(NamedTuple):
    """Bytes that each rank sends in each collective of one bucket, by algorithms that send as little as possible."""

    reduce_inside: int
    """Reduction of gradients over the ranks of an instance."""
    reduce_across: int
    """Reduction of what is reduced inside, over the instances, once a step."""
    gather: int
    """All-gather of parameters over the ranks of an instance."""
    gather_across: int
    """All-gather of the instance's shard over the instances, once a step."""
    scratch: int
    """Bytes that the reduction inside needs beside the bucket while it is in flight; they are not sent."""


def rank_bytes(plan: GradPlan, *, keep_params_whole: bool = False, states: int = 2) -> RankBytes:
    """What every rank holds between steps. Shards are equal, so it is the same everywhere.

    keep_params_whole  moments exist for parameters only, not for padding
    states             elements of optimizer state for each element of a parameter
    """
    parameters = gradients = masters = moments = 0
    for buffer in plan.buffers:
        parameters += buffer.numel * buffer.param_dtype.itemsize
        gradients += buffer.numel * buffer.grad_dtype.itemsize
        owned = sum(bucket.numel // bucket.shard_degree for bucket in buffer.buckets)
        is_half = buffer.param_dtype in _HALF
        masters += 4 * owned if is_half else 0
        if keep_params_whole:
            owned = max(map(sum, zip(*map(held_numels, buffer.buckets), strict=True)))
        moments += states * (4 if is_half else buffer.param_dtype.itemsize) * owned
    return RankBytes(parameters, gradients, masters, moments)


def held_numels(layout: BucketLayout) -> list[int]:
    """Number of parameter elements (without padding) in each rank's shard."""
    size = layout.numel // layout.shard_degree
    held = [0] * layout.shard_degree
    for slot in layout.slots:
        start, end = slot.start - layout.start, slot.end - layout.start
        for rank in range(start // size, -(-end // size)):
            held[rank] += max(0, min(end, (rank + 1) * size) - max(start, rank * size))
    return held


def bucket_traffic(
    bucket: BucketLayout,
    placements: Placements,
    *,
    inner_size: int,
    outer_size: int = 1,
    wire_dtype: torch.dtype | None = None,
    trainable: bool = True,
) -> Traffic:
    """What one reduction and one gather of a bucket send, over ``outer_size`` instances of ``inner_size`` ranks.

    wire_dtype  gradients are sent in this dtype (all-to-all) and summed on arrival; None: in their own dtype
    trainable   False: there are no gradients
    """
    spec, across = bucket.slots[0].spec, placements.outer.scatters
    params, grads = bucket.numel * spec.param_dtype.itemsize, bucket.numel * spec.grad_dtype.itemsize * trainable
    if not placements.inner.scatters:
        return Traffic(_others(2 * grads, inner_size), _others(2 * grads, outer_size), 0, 0, 0)
    on_wire = bucket.numel * (wire_dtype or spec.grad_dtype).itemsize * trainable
    shard = grads // inner_size
    return Traffic(
        reduce_inside=_others(on_wire, inner_size),
        reduce_across=_others(shard if across else 2 * shard, outer_size),
        gather=_others(params, inner_size),
        gather_across=_others(params // inner_size, outer_size) if across else 0,
        scratch=0 if wire_dtype is None or inner_size == 1 else 2 * on_wire,
    )


def _others(nbytes: int, size: int) -> int:
    """Bytes of all but one of ``size`` equal parts: what a rank sends to the other ranks."""
    return nbytes * (size - 1) // size
