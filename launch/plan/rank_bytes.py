"""Bytes on one rank, at rest and on the wire, from the integers of buckets alone.

    n  elements of a bucket, padding included       p  bytes per element of the parameters in a forward
    s  shards of the bucket                         g  bytes per element of a gradient
    i  ranks of an instance

What one bucket takes on one rank:

                  DistributedDataParallel           maingrad.fsdp
    parameters    p n                               p n    where they are kept whole
                                                    p n/i  where the optimizer is sharded across as well
    gradients     g n                               g n    where they are kept whole
                  g n/s  with release_grads         g n/s  the shards
                                                    4 n/s  copies for .grad, where gradients are not fp32
                                                    g n/i  sums inside, with several instances
    masters       4 n/s  under half precision       4 n/s
    moments       8 n/s                             8 for each of the rank's elements, without padding

With compact state moments take half of that, or a quarter and 4 bytes for 256 elements of a parameter in each moment of
8 bits. .grad is no copy. Under bf16 masters are

    remainders    2 n/s                             2 for each of the rank's elements, without padding
    shards                                          2 n/s

Moments are AdamW's two, fp32; other optimizers have other numbers of them. s is 1 under plain data parallelism, the
number of ranks under ZeRO-1, the ranks of an instance under hybrid; experts have their own. Under FSDP s is i, and all
ranks where the optimizer is sharded across instances as well.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...ddp.collectives.reduction import Placement, Placements
from ...ddp.plan.layout import BucketLayout
from ...kernels.optimizer.eight_bits import blocks_of

__all__ = ["PlacedBucket", "RankBytes", "Traffic", "rank_bytes"]

_FP32 = 4  # bytes of an element of masters and moments


class RankBytes(NamedTuple):
    """Bytes on one rank, padding included. Not counted: AdamW's step counters, 4 bytes for each flat tensor."""

    parameters: int
    gradients: int
    masters: int
    """fp32 copies of half-precision parameters, or compact remainders of bf16 ones; FSDP's shards, with their
    remainders; 0 where DDP's parameters are fp32 themselves."""
    moments: int
    """Elementwise state of the optimizer: of AdamW the first and second moments. Of the rank that has most."""

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


@dataclass(frozen=True, kw_only=True)
class PlacedBucket:
    """One bucket, and the ranks that hold and reduce it."""

    layout: BucketLayout
    placements: Placements
    inner_size: int
    outer_size: int = 1
    columns: int = 1
    """Sets of ranks with equal gradients among those of an instance: each reduces the shards of its ranks alone."""
    wire_dtype: torch.dtype | None = None
    """Gradients are sent in this dtype (all-to-all) and summed on arrival. None: in their own dtype."""
    trainable: bool = True
    """False: there are no gradients."""
    releases_grads: bool = False
    """Whether gradients have memory only until they are reduced, and shards of their own, as with ``release_grads``."""
    own_shards: bool = False
    """Whether shards are tensors of their own, as under FSDP. False: parts of whole tensors, as under DDP."""
    compact: torch.dtype | None = None
    """Dtype of moments, where masters of bf16 parameters are these with remainders of 16 bits. None: all are fp32."""
    states: Mapping[str, int]
    """Elements of optimizer state for each element of a parameter, by name."""

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of the parameters in a forward."""
        return self.layout.slots[0].spec.param_dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype in which gradients are accumulated."""
        return self.layout.slots[0].spec.grad_dtype

    @property
    def param_nbytes(self) -> int:
        """Bytes of the whole parameters."""
        return self.layout.numel * self.param_dtype.itemsize

    @property
    def grad_nbytes(self) -> int:
        """Bytes of the whole gradients."""
        return self.layout.numel * self.grad_dtype.itemsize * self.trainable

    @property
    def keeps_grads(self) -> bool:
        """Whether whole gradients keep their memory between steps."""
        return self.placements.inner.gradient is Placement.WHOLE and not self.releases_grads

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the elements that one rank's optimizer updates, in fp32."""
        return self.layout.numel // self.layout.shard_degree * _FP32

    @property
    def kept_params(self) -> int:
        """Bytes of whole parameters, or of an instance's shard of them, that stay in memory between steps."""
        kept = self.param_nbytes if self.placements.inner.parameter is Placement.WHOLE else 0
        scatters_across = self.placements.outer.scatters and self.outer_size > 1
        return kept + (self.param_nbytes // self.inner_size if scatters_across else 0)

    @property
    def kept_grads(self) -> int:
        """Bytes of gradients that stay in memory between steps, from the end of the first step on."""
        kept = self.grad_nbytes if self.keeps_grads else 0
        if self.releases_grads:
            kept = self.grad_nbytes // self.layout.shard_degree
        if self.own_shards and self.trainable:
            kept += self.grad_nbytes // self.layout.shard_degree
            kept += self.shard_nbytes if self.grad_dtype is not torch.float32 and self.compact is None else 0
            kept += self.grad_nbytes // self.inner_size if self.outer_size > 1 else 0
        return kept

    @property
    def master_nbytes(self) -> int:
        """Bytes of a rank's masters that are tensors of their own, without remainders."""
        if self.has_remainders:
            return self.shard_nbytes // 2 if self.own_shards else 0
        return self.shard_nbytes if self.own_shards or self.param_dtype is not torch.float32 else 0

    @property
    def has_remainders(self) -> bool:
        """Whether masters are parameters with remainders."""
        return self.compact is not None and self.param_dtype is torch.bfloat16

    @property
    def held_numels(self) -> list[int]:
        """Number of elements on each rank that the optimizer updates."""
        return self._updated(dict.fromkeys(self.states, 1))

    @property
    def moment_numels(self) -> list[int]:
        """Number of elements of optimizer state on each rank."""
        return self._updated(self.states)

    @property
    def moment_blocks(self) -> list[int]:
        """Number of blocks on each rank that have a scale in a moment of 8 bits, over all moments."""
        return self._count(lambda name, numel: self.states[name] * blocks_of(numel))

    def _updated(self, states: Mapping[str, int]) -> list[int]:
        degree = self.layout.shard_degree
        of_each = {states[slot.spec.name] for slot in self.layout.slots}
        if not self.own_shards and not self.layout.keeps_matrices_whole and len(of_each) == 1:
            return [self.layout.numel // degree * of_each.pop()] * degree
        return self._count(lambda name, numel: states[name] * numel)  # without padding

    def _count(self, counted: Callable[[str, int], int]) -> list[int]:
        """On each rank: the sum over parameters of a function of a name and of the elements that the rank holds."""
        size = self.layout.numel // self.layout.shard_degree
        held = [0] * self.layout.shard_degree
        for slot in self.layout.slots if self.trainable else ():
            start, end = slot.start - self.layout.start, slot.end - self.layout.start
            for rank in range(start // size, -(-end // size)):
                numel = max(0, min(end, (rank + 1) * size) - max(start, rank * size))
                held[rank] += counted(slot.spec.name, numel)
        return held

    @property
    def traffic(self) -> Traffic:
        """What one reduction and one gather of the bucket send."""
        inside, across = (axis.scatters for axis in self.placements)
        column = self.inner_size // self.columns
        on_wire = self.layout.numel * (self.wire_dtype or self.grad_dtype).itemsize * self.trainable // self.columns
        shard = self.grad_nbytes // self.inner_size
        packed = self.grad_nbytes // self.columns if self.columns > 1 and column > 1 else 0
        return Traffic(  # an all-reduce sends twice what a reduce-scatter sends
            reduce_inside=_others(on_wire if inside else 2 * on_wire, column),
            reduce_across=_others(shard if across else 2 * shard, self.outer_size),
            gather=_others(self.param_nbytes, self.inner_size) if inside else 0,
            gather_across=_others(self.param_nbytes // self.inner_size, self.outer_size) if across else 0,
            scratch=packed + (2 * on_wire if self.wire_dtype and column > 1 else 0),
        )


def rank_bytes(buckets: Iterable[PlacedBucket]) -> RankBytes:
    """What the fullest rank holds between steps. Ranks differ in the bytes of moments and remainders alone."""
    buckets = list(buckets)
    size = max((len(bucket.held_numels) for bucket in buckets), default=0)
    parameters = gradients = masters = 0
    moments: Counter[int] = Counter()
    remainders: Counter[int] = Counter()
    for bucket in buckets:
        parameters += bucket.kept_params
        gradients += bucket.kept_grads
        masters += bucket.master_nbytes
        width = _FP32 if bucket.compact is None else bucket.compact.itemsize
        numels, blocks, held = bucket.moment_numels, bucket.moment_blocks, bucket.held_numels
        for rank in range(size):
            shard = rank * len(held) // size  # slices have fewer shards, each on one rank of every slice
            moments[rank] += width * numels[shard] + (_FP32 * blocks[shard] if bucket.compact is torch.uint8 else 0)
            remainders[rank] += 2 * held[shard] if bucket.has_remainders else 0
    fullest = max(moments, key=lambda rank: moments[rank] + remainders[rank], default=0)
    return RankBytes(parameters, gradients, masters + remainders[fullest], moments[fullest])


def _others(nbytes: int, size: int) -> int:
    """Bytes of all but one of ``size`` equal parts: what a rank sends to the other ranks."""
    return nbytes * (size - 1) // size
