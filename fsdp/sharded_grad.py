"""Gradients of sharded parameters, whose norms are those of the whole gradients.

torch's own ``clip_grad_norm_``, ``get_total_norm`` and ``GradScaler`` ask each gradient for a norm, or whether it has
Inf or NaN. Here the answer covers the shards of all ranks, and so is equal on all of them.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass, _disabled_torch_function_impl
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves

from ..ddp.rank_grid import RankGrid
from .sharded_param import ShardedParameter, ShardInfo, local_shape

__all__ = ["HeldGrad", "ShardedGrad", "changed_too_early", "in_flight", "make_held_grads", "make_sharded_grad"]


class _Sums(Protocol):
    def arrive(self) -> None: ...


in_flight: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Sums (``GradShard``) that a reduction under way is about to change: between an iteration's microbatches."""


class ShardedGrad(Tensor):
    """This rank's shard of a gradient: ``.grad`` of a ``ShardedParameter``, of the same shape.

    **Norms are global**, over the shards of all ranks, each element counted once: ``g.norm()``, ``torch.norm``,
    ``torch.linalg.vector_norm``, ``torch.linalg.norm``, ``torch._foreach_norm``; and so are
    ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm``. Powers are summed in fp64, over all ranks of the
    outermost unit: the norm of an expert, whose unit has a mesh of its own, is that of all ranks' experts at its place.
    They are collective: all ranks call them, in the same order; a list costs one. So is the check for Inf and NaN of
    ``torch.amp.GradScaler``, which then skips alike on all ranks. Norms along some dims, and of matrices, raise
    ``RuntimeError``.

    **All else is local**: element-wise functions, and reductions like ``sum`` and ``isnan().any()`` too, see the rank's
    own elements, of which there may be none, and return plain tensors. In place they change this one.
    Between an iteration's microbatches whatever is done to it comes after the reductions under way.

    A deep copy is a shard of its own memory. It is not pickled, as its process groups cannot be.
    """

    shard: ShardInfo
    sums: "Callable[[], _Sums | None] | None" = None
    """Weakly, what it shows a part of."""

    is_sparse = False  # optimizers ask each gradient: no call into torch for that

    @staticmethod  # torch looks it up for each tensor of a list: nothing is bound
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if in_flight:
            _arrive(args, kwargs)
        over_ranks = _OVER_RANKS.get(func)
        if over_ranks is not None:
            return over_ranks(*args, **kwargs)
        if len(types) > 1 and torch.is_grad_enabled() and ShardedParameter in types:
            return NotImplemented  # the parameter has something to say about that
        return _disabled_torch_function_impl(func, types, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGrad({self.shard}):\n{self.detach()!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedGrad":
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        copied = make_sharded_grad(self.detach().clone().view(-1), self.shard)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a sharded gradient is not pickled ({self.shard}): save grad.detach() for this rank's elements alone; "
            f"copy it by copy.deepcopy()"
        )


def _arrive(args: Any, kwargs: Any) -> None:
    for leaf in tree_leaves((args, kwargs)):
        sums = leaf.sums() if isinstance(leaf, ShardedGrad) and leaf.sums is not None else None
        if sums is not None:
            sums.arrive()


def make_sharded_grad(flat_view: Tensor, info: ShardInfo) -> ShardedGrad:
    """The sharded gradient that is ``flat_view`` [end - start]: it shares the memory and the version counter."""
    if flat_view.shape != (info.numel,):
        raise ValueError(f"a shard of {info} is one dim of {info.numel}, got {tuple(flat_view.shape)}")
    grad: ShardedGrad = Tensor._make_subclass(ShardedGrad, flat_view.view(local_shape(info)), False)
    grad.shard = info
    return grad


class HeldGrad(ShardedGrad):
    """``.grad`` while an iteration's gradients are elsewhere: zeros that have the memory of one element.

    To set ``.grad`` to None gives the iteration up; whatever else would change it raises ``RuntimeError``.
    """

    @staticmethod
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_"):
            changed = tree_leaves(args[0] if args else None)
            found = next((each for each in changed if isinstance(each, HeldGrad)), None)
            if found is not None:
                raise RuntimeError(changed_too_early(found.shard))
        return ShardedGrad.__torch_function__(func, types, args, kwargs)


def make_held_grads(params: Sequence[ShardedParameter]) -> list[HeldGrad]:
    """Zeros in the shape of each shard, of one dtype on one device: all of them are one element."""
    zero = torch.zeros((), dtype=params[0].dtype, device=params[0].device)
    zeros: list[HeldGrad] = []
    for param in params:
        grad: HeldGrad = Tensor._make_subclass(HeldGrad, zero.expand(local_shape(param.shard)), False)
        grad.shard = param.shard
        zeros.append(grad)
    return zeros


def changed_too_early(info: ShardInfo) -> str:
    """The error of who changes ``.grad`` between an iteration's microbatches."""
    return (
        f".grad of parameter '{info.name}' was changed in the middle of an iteration, when gradients of earlier "
        f"microbatches are not in it yet: clip, scale and zero gradients after the last backward, or give the "
        f"iteration up by zero_grad(set_to_none=True) of all parameters"
    )


# torch.nn.utils.clip_grad_norm_ asks for all norms at once for the classes in this list alone, else for one at a time.
if ShardedGrad not in _foreach_utils._foreach_supported_types:
    _foreach_utils._foreach_supported_types.append(ShardedGrad)


# ---- Functions that see all ranks' shards, with the signatures of torch's. ----


def _foreach_norm(self: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    by_grid: dict[Any, list[int]] = {}
    with DisableTorchFunctionSubclass():
        for index, tensor in enumerate(self):
            by_grid.setdefault(_key_of(tensor), []).append(index)
    norms: dict[int, Tensor] = {}
    for key, indices in by_grid.items():
        tensors = [self[index] for index in indices]
        norms_of = _norms_over_ranks if key is not None else torch._foreach_norm
        found: Iterable[Tensor] = norms_of(tensors, ord, dtype=dtype)
        norms |= zip(indices, found, strict=True)
    return [norms[index] for index in range(len(self))]


def _vector_norm(
    input: Tensor,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    _check_whole(input, "torch.linalg.vector_norm", dim, out)
    return _norm(input, ord, keepdim, dtype)


def _linalg_norm(
    input: Tensor,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    _check_whole(input, "torch.linalg.norm", dim, out)
    if ord not in (None, "fro") and input.ndim > 1:
        raise _refusal(input, f"torch.linalg.norm(ord={ord!r}), which is one of matrices,")
    return _norm(input, 2 if ord in (None, "fro") else ord, keepdim, dtype)


def _torch_norm(
    input: Tensor,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    _check_whole(input, "norm()", dim, out)
    if p == "nuc":
        raise _refusal(input, "norm(p='nuc'), which is one of matrices,")
    return _norm(input, 2 if p in (None, "fro") else p, keepdim, dtype)


def _tensor_norm(
    self: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    return _torch_norm(self, p, dim, keepdim, dtype=dtype)


def _matrix_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    raise _refusal(input, "a norm of matrices")


def _check_and_unscale(self: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    with torch.no_grad(), DisableTorchFunctionSubclass():
        torch._amp_foreach_non_finite_check_and_unscale_(self, found_inf, inv_scale)  # type: ignore[arg-type]
        grids = [_everyone(grad.shard) for grad in self if isinstance(grad, ShardedGrad)]
        for grid in {grid[:2]: grid for grid in grids}.values():
            found_inf.copy_(_reduced(found_inf.reshape(1), grid, _max).view_as(found_inf))


_OVER_RANKS: dict[Any, Callable[..., Any]] = {
    torch._foreach_norm: _foreach_norm,
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _torch_norm,
    Tensor.norm: _tensor_norm,
    torch.linalg.matrix_norm: _matrix_norm,
    torch.nuclear_norm: _matrix_norm,
    torch.frobenius_norm: _matrix_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _check_and_unscale,
}


# ---- Their arithmetic. ----


def _norm(grad: Tensor, ord: float, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    norm = _norms_over_ranks([grad], ord, dtype)[0]
    return norm.view([1] * grad.ndim) if keepdim else norm


def _norms_over_ranks(grads: Sequence[Tensor], ord: float, dtype: torch.dtype | None) -> Sequence[Tensor]:
    """The norm of each whole gradient of one grid and device, 0-dim tensors of ``dtype`` or of the gradient's own.

    Powers are summed in fp64 over the ranks; empty shards add nothing.
    """
    ord = float(ord)
    with torch.no_grad(), DisableTorchFunctionSubclass():
        shards = [grad.shard for grad in grads]  # type: ignore[attr-defined]
        everyone = _everyone(shards[0])
        local = _local_norms(grads, ord)
        if math.isinf(ord):
            whole = _extremum_over_ranks(local, everyone, largest=ord > 0)
        else:
            powers = _divided(local if ord == 0 else local.pow(ord), [shard.num_replicas for shard in shards])
            whole = _reduced(powers, everyone, RankGrid.sum)
            whole = whole if ord == 0 else whole.pow(1 / ord)
        dtypes = [dtype or grad.dtype.to_real() for grad in grads]
        if len(set(dtypes)) == 1:
            return whole.to(dtypes[0]).unbind()
        return [norm.to(own) for norm, own in zip(whole.unbind(), dtypes, strict=True)]


def _local_norms(grads: Sequence[Tensor], ord: float) -> Tensor:
    """[grads] fp64: of this rank's elements. Where it has none, what changes no sum, maximum or minimum."""
    held = [grad.abs() if grad.is_complex() else grad for grad in grads if grad.numel()]
    norms = iter(torch._foreach_norm(held, ord, dtype=torch.float64) if held else ())
    if len(held) == len(grads):
        return torch.stack(tuple(norms))
    # 0 to a negative power is infinite, and an infinite norm's power is 0.
    nothing = torch.full((), 0.0 if ord >= 0 else math.inf, dtype=torch.float64, device=grads[0].device)
    return torch.stack([next(norms) if grad.numel() else nothing for grad in grads])


def _divided(powers: Tensor, num_replicas: Sequence[int]) -> Tensor:
    """Each power by how many ranks bring the same."""
    if len(set(num_replicas)) == 1:
        return powers if num_replicas[0] == 1 else powers / num_replicas[0]
    return torch.stack(torch._foreach_div(powers.unbind(), [float(count) for count in num_replicas]))


def _extremum_over_ranks(norms: Tensor, grid: RankGrid, *, largest: bool) -> Tensor:
    """Largest or smallest of the ranks' norms. NaN wins, which backends' maxima do not promise: it travels beside."""
    sign = 1.0 if largest else -1.0
    isnan = norms.isnan()
    both = torch.stack([(norms * sign).masked_fill(isnan, 0.0), isnan.to(norms.dtype)])
    values, nans = _reduced(both, grid, _max).unbind()
    return (values * sign).masked_fill(nans > 0, math.nan)


def _max(grid: RankGrid, value: Tensor) -> Tensor:
    """Maximum of a small tensor over all ranks, in place."""
    for group in grid.axes:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value


def _reduced(value: Tensor, grid: RankGrid, reduce: Callable[[RankGrid, Tensor], Tensor]) -> Tensor:
    """``value`` reduced over the ranks, on a device that they talk over: shards may be offloaded to the host."""
    devices = [device for group in grid.axes for device in group._device_types]
    if not devices or any(device.type == value.device.type for device in devices):
        return reduce(grid, value)
    return reduce(grid, value.to(devices[0])).to(value.device)


def _key_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Equal for gradients whose norms take one collective; None for tensors that are no shards."""
    if not isinstance(tensor, ShardedGrad):
        return None
    everyone = _everyone(tensor.shard)
    return everyone.inner, everyone.outer, tensor.device


def _everyone(info: ShardInfo) -> RankGrid:
    """The ranks that a norm covers."""
    if info.everyone is None:
        raise RuntimeError(
            f"ranks hold different numbers of parameters whose units have meshes of their own (experts), so that norms "
            f"over all ranks and the check for Inf do not go together ({info}): give every rank as many experts, or "
            f"take grad.detach() for this rank's elements alone"
        )
    return info.everyone


# ---- Refusals. ----


def _check_whole(grad: Tensor, what: str, dim: Any, out: Tensor | None) -> None:
    if dim is not None:
        raise _refusal(grad, f"{what} along dims")
    if out is not None:
        raise _refusal(grad, f"{what} with out=")


def _refusal(grad: Tensor, what: str) -> RuntimeError:
    shards: Iterable[ShardInfo] = [grad.shard] if isinstance(grad, ShardedGrad) else []
    held = "".join(f" ({shard})" for shard in shards)
    return RuntimeError(
        f"{what} is not defined over the shards of a gradient{held}: ask for the norm of all its elements, or take "
        f"grad.detach() for this rank's elements alone"
    )
