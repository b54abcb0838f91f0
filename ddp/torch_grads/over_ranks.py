"""A rank's shard of a gradient: which elements it has; norms over the shards of all ranks, and whole gradients.

Each element counts once: a sum of powers is divided by the number of ranks with the same elements. Norms cover all
ranks of the outermost unit, also for experts, whose mesh is smaller (``fsdp/iteration/connect.py``). A whole gradient
is gathered from the ranks of its own mesh.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives.rank_grid import RankGrid, device_types_of, group_size
from ..plan.cut import Range
from ..plan.model_slice import ModelSlice

__all__ = ["ShardInfo", "everyone_of", "local_shape", "max_over", "norms", "reduced", "whole", "whole_of_slices"]


class ShardInfo(NamedTuple):
    """Which elements of which parameter are in a shard."""

    name: str
    """The parameter's name in the outermost unit once that is known, in the shard's own unit before."""
    shape: tuple[int, ...]
    """The shape of the whole parameter; of a slice of tensor parallelism that of the slice, which ``grid`` shares."""
    start: int
    """The shard is elements [start, end) of the flattened parameter; it has no elements if they are equal."""
    end: int
    grid: RankGrid
    num_replicas: int
    """Number of ranks of ``grid`` with these same elements: the outer size under HSDP, 1 without replicas."""
    unit: str
    """Name of the unit's module in the outermost unit; empty for the outermost."""
    everyone: RankGrid | None
    """The ranks of the outermost unit, over which norms of gradients are computed, and with tensor parallelism those
    that hold the other slices; ``grid`` has fewer. None if ranks hold different numbers of expert parameters."""

    is_slice: bool = False
    """The parameter is a slice of tensor parallelism: it has Megatron-core's mark ``tensor_model_parallel``."""
    flat: bool = False
    """The program sees the whole parameter, and works with tensors of its shape: shards have one dim. False: the
    program sees shards, and works with tensors of a shard's shape."""
    has_whole: bool = True
    """All ranks' elements together are a tensor of ``shape``. False: each rank has a tensor of its own."""
    model_slice: ModelSlice | None = None
    """What ``grid`` shares of the parameter that tensor-parallel ranks hold together; None: nobody said."""
    copies: int = 1
    """Number of tensor-parallel ranks with these same elements."""
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

    @property
    def cut_slice(self) -> ModelSlice | None:
        """``model_slice``, if other ranks hold the rest of the parameter."""
        found = self.model_slice
        return None if found is None or found.dim is None or group_size(found.group) == 1 else found

    @property
    def is_cut(self) -> bool:
        """Whether tensor-parallel ranks hold the rest of the parameter, also where nobody said which."""
        if self.model_slice is not None:
            return self.cut_slice is not None and self.model_slice.grad != "expert"  # experts are whole matrices
        return self.is_slice and self.everyone is not None and self.everyone.leaves_ranks_out

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


# ---- Norms and whole gradients. Every function here but ``everyone_of`` is collective: all ranks call it, in one
# ---- order.


def norms(grads: Sequence[Tensor], shards: Sequence[ShardInfo], ord: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each whole gradient: 0-dim tensors of ``dtype``, or of the gradient's own dtype. One collective.

    Ranks have different numbers of gradients without a whole: the first norm is that of all of them together, and a
    norm of norms is not changed by the others, which are zeros, or for inf the same.

    grads   local shards of gradients, all on one device, perhaps empty
    shards  for each gradient, which shard it is; ``everyone`` is the same for all
    ord     order p of the norm, above 0: (sum |g|^p)^(1/p), the maximum for inf

    Powers are summed over the ranks in fp64.
    """
    ord = float(ord)
    everyone = everyone_of(shards[0])
    local, has_whole = _local_norms(grads, ord), shards[0].has_whole
    if math.isinf(ord):
        local = local if has_whole else local.amax()[None]
        found = _maximum_over_ranks(local, everyone).expand(len(grads))
    else:
        powers = _divided(local.pow(ord), [shard.num_replicas * shard.copies for shard in shards])
        powers = powers if has_whole else powers.sum()[None]
        found = reduced(powers, everyone, RankGrid.sum).pow(1 / ord)
        found = torch.cat([found, found.new_zeros(len(grads) - len(found))])
    dtypes = [dtype or grad.dtype.to_real() for grad in grads]
    if len(set(dtypes)) == 1:
        return list(found.to(dtypes[0]).unbind())
    return [norm.to(own) for norm, own in zip(found.unbind(), dtypes, strict=True)]


def max_over(grid: RankGrid, value: Tensor) -> Tensor:
    """Elementwise maximum of a small tensor over all ranks of ``grid``, in place. Returns ``value``."""
    for group in grid.axes:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value


def whole(values: Tensor, shard: ShardInfo) -> Tensor:
    """All ranks' elements in the parameter's shape, plain, on every rank. Slices become the parameter of all slices."""
    return whole_of_slices(_whole_of_grid(values, shard), shard.cut_slice)


def whole_of_slices(local: Tensor, found: ModelSlice | None) -> Tensor:
    """The parameter of which tensor-parallel ranks have slices; ``local`` is this rank's, or a copy."""
    if found is None or found.dim is None:
        return local
    slices = local.new_zeros(found.shape)
    views = found.views_of(slices)
    torch._foreach_copy_(views, local.detach().split([view.shape[found.dim] for view in views], found.dim))
    return _joined(slices, RankGrid(None, None, None, tensor=found.group))


def _whole_of_grid(values: Tensor, shard: ShardInfo) -> Tensor:
    if shard.num_replicas == shard.grid.size > 1:
        return values.reshape(shard.shape).clone()  # every rank has all of them
    flat = values.new_zeros(math.prod(shard.shape))
    flat[shard.start : shard.end] = values.reshape(-1)
    grid = shard.grid if shard.num_replicas == 1 else shard.grid._replace(outer=None)
    return _joined(flat, grid).view(shard.shape)


def _joined(values: Tensor, grid: RankGrid) -> Tensor:
    """All ranks' elements: where one rank has an element, the others have zeros."""
    bits = values.view(-1)  # a sum of bytes with zeros copies every dtype bit by bit
    bits = bits.view(torch.uint8) if bits.numel() else bits
    return reduced(bits, grid, RankGrid.sum).view(values.dtype).view(values.shape)


def reduced(value: Tensor, grid: RankGrid, reduce: Callable[[RankGrid, Tensor], Tensor]) -> Tensor:
    """``reduce(grid, value)`` on a device that the grid's groups use; shards may be offloaded to the host."""
    device_types = [device_type for group in grid.axes for device_type in device_types_of(group)]
    if not device_types or value.device.type in device_types:
        return reduce(grid, value)
    return reduce(grid, value.to(device_types[0])).to(value.device)


def everyone_of(info: ShardInfo) -> RankGrid:
    """The ranks over which a norm is computed. Raises ``RuntimeError`` if ranks differ in their experts, and
    where ranks outside hold the rest of the parameter."""
    if info.everyone is None:
        raise RuntimeError(
            f"ranks hold different numbers of parameters whose units have meshes of their own (experts), so that norms "
            f"over all ranks and the check for Inf do not go together ({info}): give every rank as many experts, or "
            f"take grad.to_local() for this rank's elements alone"
        )
    if info.model_slice is None and info.is_cut:
        raise RuntimeError(
            f"norms and the check for Inf would cover this rank's slice alone: parameter {info.name!r} is a "
            f"slice of tensor parallelism (tensor_model_parallel = True), whose other slices are on ranks outside the "
            f"outermost unit's; say tensor_parallel_group where the model is wrapped. If every rank holds the whole "
            f"parameter, set the mark to False before"
        )
    return info.everyone


def _local_norms(grads: Sequence[Tensor], ord: float) -> Tensor:
    """[len(grads)] fp64: norms of this rank's elements, 0 of an empty shard."""
    filled = [grad.abs() if grad.is_complex() else grad for grad in grads if grad.numel()]
    found = iter(torch._foreach_norm(filled, ord, dtype=torch.float64) if filled else ())
    if len(filled) == len(grads):
        return torch.stack(tuple(found))
    nothing = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    return torch.stack([next(found) if grad.numel() else nothing for grad in grads])


def _divided(powers: Tensor, num_replicas: Sequence[int]) -> Tensor:
    """Each power divided by the number of ranks that add the same power."""
    if len(set(num_replicas)) == 1:
        return powers if num_replicas[0] == 1 else powers / num_replicas[0]
    return torch.stack(torch._foreach_div(powers.unbind(), [float(count) for count in num_replicas]))


def _maximum_over_ranks(values: Tensor, grid: RankGrid) -> Tensor:
    """Elementwise maximum over the ranks; NaN if any rank has NaN.

    Backends do not promise how their maximum treats NaN. So a flag for NaN is reduced beside the values.
    """
    both = torch.stack([values, values.isnan().to(values.dtype)])
    found, nans = reduced(both, grid, max_over).unbind()
    return found.masked_fill(nans > 0, math.nan)
