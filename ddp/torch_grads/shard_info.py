"""Which elements of a parameter are in a rank's shard, and the shape of the shard."""

import math
from typing import Any, NamedTuple

from ..collectives.rank_grid import RankGrid
from ..plan.cut import Range

__all__ = ["ShardInfo", "local_shape"]


class ShardInfo(NamedTuple):
    """Which elements of which parameter are in a shard."""

    name: str
    """The parameter's name in the outermost unit once that is known, in the shard's own unit before."""
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    start: int
    """The shard is elements [start, end) of the flattened parameter; it has no elements if they are equal."""
    end: int
    grid: RankGrid
    num_replicas: int
    """Number of ranks of ``grid`` with these same elements: the outer size under HSDP, 1 without replicas."""
    unit: str
    """Name of the unit's module in the outermost unit; empty for the outermost."""
    everyone: RankGrid | None
    """The ranks of the outermost unit, over which norms of gradients are computed; an expert's ``grid`` has fewer.
    None if ranks hold different numbers of expert parameters."""

    is_slice: bool = False
    """The parameter is a slice of tensor parallelism: it has Megatron-core's mark ``tensor_model_parallel``."""
    flat: bool = False
    """The program sees the whole parameter, and works with tensors of its shape: shards have one dim. False: the
    program sees shards, and works with tensors of a shard's shape."""
    has_whole: bool = True
    """All ranks' elements together are a tensor of ``shape``. False: each rank has a tensor of its own."""
    place: int = 0
    """Element of its bucket with which the parameter begins, and ``bucket_numel``, the bucket's number of elements: the
    ranges of all ranks follow. 0 where nobody asks for them."""
    bucket_numel: int = 0

    @property
    def numel(self) -> int:
        """Number of elements of the shard."""
        return self.end - self.start

    @property
    def elements(self) -> Range:
        """``start`` and ``end``."""
        return Range(self.start, self.end)

    def cut(self, values: Any) -> Any:
        """The shard's elements [numel] of a tensor in the parameter's shape."""
        return values.reshape(-1)[self.start : self.end]

    def is_same_shard(self, other: "ShardInfo") -> bool:
        """Whether both are the same elements of tensors of one shape; names, grids and units may differ."""
        return self[1:4] == other[1:4]

    def __str__(self) -> str:
        return f"elements {self.start} to {self.end} of {self.name!r} {self.shape}"


def local_shape(info: ShardInfo) -> tuple[int, ...]:
    """Shape of the shard. It has as many dims as the parameter, because rules for weight decay ask for ``ndim``.

    ``(rows, *rest)`` if the shard is whole rows, else ``(n, 1, ..., 1)``; ``(n,)`` for a parameter of one dim. A scalar
    has shape ``()`` on the rank that has it, and ``(0,)`` on other ranks. A ``flat`` shard has one dim, unless it is
    the whole parameter.
    """
    if info.flat:
        return info.shape if math.prod(info.shape) == info.numel else (info.numel,)
    if not info.shape:
        return () if info.numel else (0,)
    rest = info.shape[1:]
    row = math.prod(rest)
    if info.numel == 0:
        return (0, *rest)
    if info.start % row == 0 and info.end % row == 0:
        return (info.numel // row, *rest)
    return (info.numel, *(1 for _ in rest))
