"""Muon's work on each rank: matrices, FLOPs of their iterations, and the padding that keeps them whole."""

from collections.abc import Iterable
from dataclasses import dataclass

from ...ddp.torch_grads.muon import update_flops
from ...ddp.torch_grads.muon_groups import MuonGroups
from .rank_bytes import PlacedBucket

__all__ = ["MuonShares", "muon_shares"]


@dataclass(frozen=True, kw_only=True)
class MuonShares:
    """What each rank of an instance has of the matrices. Without shards one entry, which holds for every rank."""

    numels: tuple[int, ...]
    """Elements of matrices on each rank."""
    flops: tuple[float, ...]
    """FLOPs of a step's iterations on each rank."""
    padding: int
    """Elements of padding in the buckets of matrices, all ranks together."""

    @property
    def largest_over_mean(self) -> float:
        """The largest rank's FLOPs over the mean: how much longer all wait for it."""
        return max(self.flops) * len(self.flops) / sum(self.flops)

    @property
    def padding_share(self) -> float:
        """Padding over the matrices' elements."""
        return self.padding / sum(self.numels)


def muon_shares(muon: MuonGroups, buckets: Iterable[PlacedBucket]) -> MuonShares:
    """Count what ranks have of each matrix."""
    group_of = {name: group for group in muon.groups for name in group["params"]}
    numels: list[int] = []
    flops: list[float] = []
    padding = 0
    for bucket in buckets:
        layout = bucket.layout
        if not numels:
            numels, flops = [0] * layout.shard_degree, [0.0] * layout.shard_degree
        has_matrices = False
        for slot in layout.slots:
            group = group_of.get(slot.spec.name)
            if group is None:
                continue
            has_matrices = True
            whole = update_flops(slot.spec.shape, group)
            for rank, shard in enumerate(map(layout.shard, range(layout.shard_degree))):
                held = slot.range.counted_from(layout.start).intersect(shard).numel
                numels[rank] += held
                flops[rank] += whole * held / slot.spec.numel
        padding += layout.padding if has_matrices else 0
    return MuonShares(numels=tuple(numels), flops=tuple(flops), padding=padding)
