"""Bytes that a fully sharded model takes on one rank and sends, computed from the sizes of its units alone.

    n  elements of a bucket, padding included       c  bytes per element of the parameters in a forward
    s  shards of the bucket                         a  bytes per element of the parameters at rest
    i  ranks of an instance, o  instances           g  bytes per element of a gradient

What one bucket takes on one rank:

    shards            a n/s   the optimizer's masters      gradient shards     g n/s
    whole parameters  c n     where they are kept whole   sums inside         g n/i  with several instances
    instance's shard  c n/i   where the optimizer is      copies for .grad    a n/s  where a and g differ
                              sharded across as well      whole gradients     g n    where they are kept whole
    moments           2 a     for each of the rank's elements, without padding

s is i, and i o where the optimizer is sharded across instances as well.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...ddp.collectives.placements import Placement, Placements
from ...ddp.plan.layout import BucketLayout
from .rank_bytes import RankBytes, held_numels

__all__ = ["PlacedBucket", "sharded_rank_bytes"]


class PlacedBucket(NamedTuple):
    """One bucket of a unit and the ranks that it is sharded over."""

    layout: BucketLayout
    trainable: bool
    rest_dtype: torch.dtype
    """Dtype of the shards."""
    placements: Placements
    inner_size: int
    outer_size: int

    @property
    def param_nbytes(self) -> int:
        """Bytes of the whole parameters."""
        return self.layout.numel * self.layout.slots[0].spec.param_dtype.itemsize

    @property
    def grad_nbytes(self) -> int:
        """Bytes of the whole gradients."""
        return self.layout.numel * self.layout.slots[0].spec.grad_dtype.itemsize if self.trainable else 0

    @property
    def keeps_grads(self) -> bool:
        """Whether whole gradients keep their memory between steps."""
        return self.placements.inner.gradient is Placement.WHOLE

    @property
    def shard_nbytes(self) -> int:
        """Bytes of one rank's shard."""
        return self.layout.numel // self.layout.shard_degree * self.rest_dtype.itemsize

    @property
    def kept_params(self) -> int:
        """Bytes of whole parameters, or of an instance's shard of them, that stay in memory between steps."""
        kept = self.param_nbytes if self.placements.inner.parameter is Placement.WHOLE else 0
        return kept + (self.param_nbytes // self.inner_size if self._scatters_across else 0)

    @property
    def kept_grads(self) -> int:
        """Bytes of gradients that stay in memory between steps, from the end of the first step on."""
        if not self.trainable:
            return 0
        numel, degree = self.layout.numel, self.layout.shard_degree
        grad_dtype = self.layout.slots[0].spec.grad_dtype
        kept = numel // degree * grad_dtype.itemsize
        if self.rest_dtype is not grad_dtype:
            kept += self.shard_nbytes
        if self.outer_size > 1:
            kept += self.grad_nbytes // self.inner_size
        return kept + (self.grad_nbytes if self.keeps_grads else 0)

    @property
    def _scatters_across(self) -> bool:
        return self.placements.outer.scatters and self.outer_size > 1


def sharded_rank_bytes(buckets: Iterable[PlacedBucket], *, states: int = 2) -> RankBytes:
    """What the fullest rank holds between steps. Ranks differ in the bytes of the moments alone.

    states  elements of optimizer state for each element of a parameter
    """
    parameters = gradients = shards = 0
    moments: list[int] = []
    for bucket in buckets:
        parameters += bucket.kept_params
        gradients += bucket.kept_grads
        shards += bucket.shard_nbytes
        moments += [0] * (bucket.layout.shard_degree - len(moments))
        if bucket.trainable:
            for rank, numel in enumerate(held_numels(bucket.layout)):
                moments[rank] += states * bucket.rest_dtype.itemsize * numel
    return RankBytes(parameters, gradients, shards, max(moments, default=0))
