"""Which ranks a norm of gradients, and the check for Inf, cover: all ranks of the outermost unit.

Units of experts have smaller meshes: the ranks that hold the same experts. A norm over such a mesh alone would differ
between ranks, and ranks would clip by different coefficients. So a norm of an expert's gradient sums over all ranks: it
includes the experts that other ranks hold at the same place of the model.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..ddp.collectives.rank_grid import RankGrid
from .unit.unit import Unit

__all__ = ["ranks_of_norms"]


def ranks_of_norms(units: Sequence[Unit]) -> RankGrid | None:
    """The ranks of the outermost unit. None if ranks hold different numbers of expert parameters. Collective.

    units  all units of the model, the outermost first

    Raises ``ValueError`` on all ranks if a unit's mesh contains a rank that is not in the outermost unit's mesh.
    """
    everyone = units[0].grid
    apart = [unit for unit in units if unit.grid[:2] != everyone[:2]]
    here = {rank for unit in apart for group in unit.grid.axes for rank in dist.get_process_group_ranks(group)}
    count = sum(len(bucket.pairs) for unit in apart for bucket in unit.buckets if bucket.trainable)
    mine = (dist.get_rank() if dist.is_initialized() else 0, here, count)
    found = _gathered(everyone, mine)
    outside = set().union(*[ranks for _, ranks, _ in found]) - {rank for rank, _, _ in found}
    if outside:
        raise ValueError(
            f"a unit's mesh has ranks {sorted(outside)}, which are not among the outermost unit's: gradients are "
            f"averaged over the outermost unit's ranks, which must be all that have seen tokens"
        )
    return everyone if len({count for _, _, count in found}) == 1 else None


def _gathered(grid: RankGrid, mine: Any) -> list[Any]:
    found = [mine]
    for group in grid.axes:
        parts: list[list[Any]] = [[]] * group.size()
        dist.all_gather_object(parts, found, group=group)
        found = [entry for part in parts for entry in part]
    return found
