"""Bytes on one rank, at rest and on the wire, from a plan's integers alone.

With N elements of a buffer (padding included) in shards of N/s, p and g bytes for an element of parameter and gradient:

    parameters  N p            masters   4 N/s  under bf16 and fp16 parameters; others are their own masters
    gradients   N g            moments   8 N/s  AdamW's two, fp32; other optimizers have other numbers of them

and summed over the buffers of a plan. The degree s is 1 under plain data parallelism, the number of ranks under ZeRO-1,
the ranks of an instance under hybrid; experts have their own.
"""

from typing import NamedTuple

import torch

from ...ddp.plan.layout import BucketLayout, GradPlan

__all__ = ["BucketTraffic", "RankBytes", "bucket_traffic", "rank_bytes"]

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


class BucketTraffic(NamedTuple):
    """Bytes that each rank sends for one bucket in one step, by algorithms that send as little as possible."""

    reduce_inside: int
    """Reduction of gradients over the ranks of an instance."""
    reduce_across: int
    """All-reduce of what is reduced inside, over the instances."""
    gather: int
    """All-gather of parameters."""
    scratch: int
    """Bytes that the reduction needs beside the bucket while it is in flight."""

    @property
    def total(self) -> int:
        """Bytes sent."""
        return self.reduce_inside + self.reduce_across + self.gather


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
        masters += 4 * owned if buffer.param_dtype in _HALF else 0
        master_itemsize = 4 if buffer.param_dtype in _HALF else buffer.param_dtype.itemsize
        moments += states * master_itemsize * (_most_of_parameters(buffer.buckets) if keep_params_whole else owned)
    return RankBytes(parameters, gradients, masters, moments)


def bucket_traffic(
    bucket: BucketLayout,
    *,
    inner_size: int,
    outer_size: int = 1,
    scatters: bool,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    wire_dtype: torch.dtype | None = None,
) -> BucketTraffic:
    """What one step of a bucket costs, over ``outer_size`` instances of ``inner_size`` ranks.

    scatters    True: gradients are reduce-scattered and parameters gathered; False: gradients are all-reduced
    wire_dtype  gradients are sent in this dtype (all-to-all) and summed on arrival; None: in their own dtype
    """
    nbytes, shard = bucket.numel * grad_dtype.itemsize, bucket.numel // bucket.shard_degree * grad_dtype.itemsize
    if not scatters:
        return BucketTraffic(_others(2 * nbytes, inner_size), _others(2 * nbytes, outer_size), 0, 0)
    on_wire = bucket.numel * (wire_dtype or grad_dtype).itemsize
    return BucketTraffic(
        reduce_inside=_others(on_wire, inner_size),
        reduce_across=_others(2 * shard, outer_size),
        gather=_others(bucket.numel * param_dtype.itemsize, inner_size),
        scratch=0 if wire_dtype is None or inner_size == 1 else 2 * on_wire,
    )


def _others(nbytes: int, size: int) -> int:
    """All of ``size`` equal parts but one's own."""
    return nbytes * (size - 1) // size


def _most_of_parameters(buckets: tuple[BucketLayout, ...]) -> int:
    """Largest number of parameter elements that one rank holds in its shards of all buckets."""
    degree = buckets[0].shard_degree
    held = [0] * degree
    for bucket in buckets:
        size = bucket.numel // degree
        for slot in bucket.slots:
            held[min((slot.start - bucket.start) // size, degree - 1)] += slot.spec.numel
    return max(held)
