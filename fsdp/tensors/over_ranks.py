"""Sums, extrema and norms of gradients over the shards of all ranks: arithmetic on local tensors, and its collectives.

Each element counts once, however many ranks hold it. Sums are of fp64, over all ranks of the outermost unit, so that an
expert's, whose unit has a mesh of its own, is that of all ranks' experts at its place. All of it is collective: all
ranks call it, in the same order.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...ddp.collectives.in_flight import device_types_of
from ...ddp.collectives.rank_grid import RankGrid
from .shard_info import ShardInfo

__all__ = ["everyone_of", "extremum", "max_over", "mean_and_variance", "norms", "reduced", "sums", "whole"]


def norms(grads: Sequence[Tensor], shards: Sequence[ShardInfo], ord: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each whole gradient of one grid and device, 0-dim tensors of ``dtype`` or of the gradient's own.

    Powers are summed in fp64 over the ranks; empty shards add nothing.
    """
    ord = float(ord)
    everyone = everyone_of(shards[0])
    local = _local_norms(grads, ord)
    if math.isinf(ord):
        found = _extremum_over_ranks(local, everyone, largest=ord > 0)
    else:
        powers = _divided(local if ord == 0 else local.pow(ord), [shard.num_replicas for shard in shards])
        found = reduced(powers, everyone, RankGrid.sum)
        found = found if ord == 0 else found.pow(1 / ord)
    dtypes = [dtype or grad.dtype.to_real() for grad in grads]
    if len(set(dtypes)) == 1:
        return list(found.to(dtypes[0]).unbind())
    return [norm.to(own) for norm, own in zip(found.unbind(), dtypes, strict=True)]


def sums(terms: Sequence[Tensor], shard: ShardInfo) -> Tensor:
    """[terms] fp64 (complex128): each tensor's elements of all ranks summed, in one collective."""
    wide = torch.complex128 if any(term.is_complex() for term in terms) else torch.float64
    local = torch.stack([term.sum(dtype=wide) for term in terms]) / shard.num_replicas
    together = torch.view_as_real(local) if local.is_complex() else local
    found = reduced(together, everyone_of(shard), RankGrid.sum)
    return torch.view_as_complex(found) if local.is_complex() else found


def mean_and_variance(values: Tensor, shard: ShardInfo, correction: float | None) -> tuple[Tensor, Tensor]:
    """Of all elements, 0-dim; ``correction`` None: the mean alone, and as many collectives less (NaN then)."""
    total, count = sums([values, values.new_ones((), dtype=torch.float64).expand(values.shape)], shard).unbind()
    mean = total / count
    if correction is None:
        return mean, torch.full_like(mean, math.nan)
    squares = sums([(values.to(mean.dtype) - mean).abs().square()], shard)[0]
    return mean, squares / (count.real - correction).clamp_min(0)


def extremum(values: Tensor, shard: ShardInfo, *, largest: bool) -> Tensor:
    """The largest or smallest of all elements, 0-dim fp64; NaN where one is NaN."""
    nothing = torch.full((), -math.inf if largest else math.inf, dtype=torch.float64, device=values.device)
    local = (values.amax() if largest else values.amin()).double() if values.numel() else nothing
    return _extremum_over_ranks(local.view(1), everyone_of(shard), largest=largest)[0]


def max_over(grid: RankGrid, value: Tensor) -> Tensor:
    """Maximum of a small tensor over all ranks, in place."""
    for group in grid.axes:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value


def whole(values: Tensor, shard: ShardInfo) -> Tensor:
    """All ranks' elements in the parameter's shape, on every rank."""
    flat = values.new_zeros(math.prod(shard.shape))
    flat[shard.start : shard.end] = values.reshape(-1)
    grid = shard.grid if shard.num_replicas == 1 else shard.grid._replace(outer=None)
    # Nobody else has the elements: their bytes are summed with zeros, which keeps any dtype and value as it is.
    return (
        reduced(flat.view(torch.uint8) if flat.numel() else flat, grid, RankGrid.sum).view(flat.dtype).view(shard.shape)
    )


def reduced(value: Tensor, grid: RankGrid, reduce: Callable[[RankGrid, Tensor], Tensor]) -> Tensor:
    """``value`` reduced over the ranks, on a device that they talk over: shards may be offloaded to the host."""
    device_types = [device_type for group in grid.axes for device_type in device_types_of(group)]
    if not device_types or value.device.type in device_types:
        return reduce(grid, value)
    return reduce(grid, value.to(device_types[0])).to(value.device)


def everyone_of(info: ShardInfo) -> RankGrid:
    """The ranks that a norm or a sum covers."""
    if info.everyone is None:
        raise RuntimeError(
            f"ranks hold different numbers of parameters whose units have meshes of their own (experts), so that norms "
            f"and sums over all ranks and the check for Inf do not go together ({info}): give every rank as many "
            f"experts, or take grad.to_local() for this rank's elements alone"
        )
    return info.everyone


def _local_norms(grads: Sequence[Tensor], ord: float) -> Tensor:
    """[grads] fp64: of this rank's elements. Where it has none, what changes no sum, maximum or minimum."""
    held = [grad.abs() if grad.is_complex() else grad for grad in grads if grad.numel()]
    found = iter(torch._foreach_norm(held, ord, dtype=torch.float64) if held else ())
    if len(held) == len(grads):
        return torch.stack(tuple(found))
    # 0 to a negative power is infinite, and an infinite norm's power is 0.
    nothing = torch.full((), 0.0 if ord >= 0 else math.inf, dtype=torch.float64, device=grads[0].device)
    return torch.stack([next(found) if grad.numel() else nothing for grad in grads])


def _divided(powers: Tensor, num_replicas: Sequence[int]) -> Tensor:
    """Each power by how many ranks bring the same."""
    if len(set(num_replicas)) == 1:
        return powers if num_replicas[0] == 1 else powers / num_replicas[0]
    return torch.stack(torch._foreach_div(powers.unbind(), [float(count) for count in num_replicas]))


def _extremum_over_ranks(values: Tensor, grid: RankGrid, *, largest: bool) -> Tensor:
    """Largest or smallest of the ranks' values. NaN wins, which backends' maxima do not promise: it travels beside."""
    sign = 1.0 if largest else -1.0
    isnan = values.isnan()
    both = torch.stack([(values * sign).masked_fill(isnan, 0.0), isnan.to(values.dtype)])
    found, nans = reduced(both, grid, max_over).unbind()
    return (found * sign).masked_fill(nans > 0, math.nan)
