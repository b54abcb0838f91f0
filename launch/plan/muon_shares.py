"""Muon's work by ranks, and the padding that keeps its matrices whole."""

from collections.abc import Iterable
from typing import NamedTuple

from ...ddp.torch_grads.muon import update_flops
from ...ddp.torch_grads.muon_groups import MuonGroups
from .rank_bytes import PlacedBucket

__all__ = ["MuonShares", "muon_shares"]


class MuonShares(NamedTuple):
    """What Muon's matrices cost the ranks of an instance."""

    flops: list[float]
    """FLOPs of a step's iterations on each rank. Without shards one entry, which holds for every rank."""
    padding_share: float
    """Padding in the buckets of matrices over the matrices' elements."""

    @property
    def largest_over_mean(self) -> float:
        """The largest rank's FLOPs over the mean: how much longer all wait for it."""
        return max(self.flops) * len(self.flops) / sum(self.flops)


def muon_shares(muon: MuonGroups, buckets: Iterable[PlacedBucket]) -> MuonShares:
    """Count what ranks have of each matrix."""
    group_of = {name: group for group in muon.groups for name in group["params"]}
    layouts = [bucket.layout for bucket in buckets]
    flops = [0.0] * layouts[0].shard_degree
    numel = padding = 0
    for layout in layouts:
        matrices = [slot for slot in layout.slots if slot.spec.name in group_of]
        for slot in matrices:
            place = slot.range.counted_from(layout.start)
            of_element = update_flops(slot.spec.shape, group_of[slot.spec.name]) / slot.spec.numel
            for rank in range(layout.shard_degree):
                flops[rank] += of_element * place.intersect(layout.shard(rank)).numel
        numel += sum(slot.spec.numel for slot in matrices)
        padding += layout.padding if matrices else 0
    return MuonShares(flops, padding / numel)
