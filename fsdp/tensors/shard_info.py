"""Which elements of which parameter a rank holds, and the shape in which it holds them."""

import math
from typing import NamedTuple

from ...ddp.collectives.rank_grid import RankGrid

__all__ = ["ShardInfo", "local_shape"]


class ShardInfo(NamedTuple):
    """Which elements of which parameter a shard holds."""

    name: str
    """Fully qualified in the root once that is known, in the unit before: replace it by ``info._replace(name=...)``."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """This rank holds the elements start..end of the flattened parameter; none where they are equal."""
    end: int
    grid: RankGrid
    num_replicas: int
    """How many ranks of ``grid`` hold these same elements: the outer size for HSDP, 1 where no two do."""
    unit: str
    """Name of the module that was fully sharded; empty for the outermost."""
    everyone: RankGrid | None
    """The ranks of the outermost unit, which norms of gradients cover: experts have a ``grid`` of their own. None where
    these hold different numbers of such parameters."""

    @property
    def numel(self) -> int:
        """Elements of this rank."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"elements {self.start} to {self.end} of {self.name!r} {self.shape}"


def local_shape(info: ShardInfo) -> tuple[int, ...]:
    """Shape of the rank's shard: as many dims as the parameter has, as rules for weight decay go by them.

    ``(rows, *rest)`` where it is whole rows, ``(n, 1, ..., 1)`` where it is not, ``(n,)`` for one dim. A scalar is
    ``()`` where it is and ``(0,)`` elsewhere.
    """
    if not info.shape:
        return () if info.numel else (0,)
    rest = info.shape[1:]
    row = math.prod(rest)
    if info.numel == 0:
        return (0, *rest)
    if info.start % row == 0 and info.end % row == 0:
        return (info.numel // row, *rest)
    return (info.numel, *(1 for _ in rest))
