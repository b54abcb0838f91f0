"""How each function of torch runs on a sharded gradient. The function's name decides which of four cases applies.

==============  ==========================================================================================
plain           reads no values (shape, dtype, hooks), or changes each element in place: runs as on a plain tensor
element-wise    also copies, views and changes of dtype: the result is a shard of the same elements
over all ranks  norms, sums, extrema, ``any``, ``all``: the result is that of the whole gradient; collective
refused         needs rows, columns, positions or another order of elements: ``RuntimeError`` that names the function
==============  ==========================================================================================

Within an optimizer's step only norms are over all ranks, and all other functions run as on plain tensors.
"""

import math
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Never

import torch
from torch import Tensor, nn

from ..torch_internals import DisableTorchFunctionSubclass, foreach_norms
from .over_ranks import everyone_of, extremum, max_over, mean_and_variance, norms, reduced, sums, whole
from .shard_info import ShardInfo

__all__ = ["HANDLING", "NORMS", "Handling", "refuse", "shard_of"]


class Handling(Enum):
    """How a function runs if no function of this file replaces it; see above."""

    PLAIN = auto()
    ELEMENTWISE = auto()
    REFUSED = auto()


def shard_of(tensor: Any) -> ShardInfo | None:
    """Which shard of which gradient ``tensor`` is; None for a parameter and for a plain tensor."""
    return None if isinstance(tensor, nn.Parameter) else getattr(tensor, "shard", None)


class _Handlings(dict[Any, "Handling | Callable[..., Any]"]):
    def __missing__(self, func: Any) -> "Handling | Callable[..., Any]":
        self[func] = handling = _handling_of(func)
        return handling


HANDLING = _Handlings()
"""How each function runs if an argument is a sharded gradient: a ``Handling``, or a function that replaces torch's."""


def _handling_of(func: Any) -> "Handling | Callable[..., Any]":
    if func in NORMS:
        return NORMS[func]
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return (
            Handling.REFUSED
            if attribute in _ATTRIBUTES_OF_ORDER
            else _ELEMENTWISE_ATTRIBUTES.get(attribute, Handling.PLAIN)
        )
    if name in _OWN:
        return _OWN[name]
    if name in _QUESTIONS or (name.startswith(("_foreach_", "_fused_", "_amp_")) and name.endswith("_")):
        return Handling.PLAIN
    if name.startswith("_foreach_"):
        return Handling.REFUSED if name == "_foreach_max" else Handling.ELEMENTWISE
    bare = name.strip("_")
    if name.endswith("_") and not name.endswith("__"):  # in place
        return Handling.PLAIN if bare in _FILLS or _is_elementwise(bare) else Handling.REFUSED
    if name.startswith("__"):
        if bare.startswith("i") and _is_elementwise(_OPERATORS.get(bare[1:], bare[1:])):
            return Handling.PLAIN
        if not _is_elementwise(_OPERATORS.get(bare, bare)):
            bare = bare.removeprefix("r")
        bare = _OPERATORS.get(bare, bare)
    return Handling.ELEMENTWISE if _is_elementwise(bare) else Handling.REFUSED


def _is_elementwise(name: str) -> bool:
    if name in _SAME_ELEMENTS:
        return True
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


_WORDS_SAME_ELEMENTS = """
    clone detach alias contiguous to type type_as float double half bfloat16 int long short bool byte char cfloat
    cdouble chalf cpu cuda conj resolve_conj resolve_neg real imag isclose isreal
    view view_as reshape reshape_as flatten ravel squeeze unsqueeze pin_memory
    subtract multiply divide absolute negative floor_divide positive fix greater less greater_equal less_equal not_equal
    arccos arcsin arctan arccosh arcsinh arctanh dropout rrelu relu6 selu softsign logsigmoid tanhshrink
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like
"""
_SAME_ELEMENTS = frozenset(_WORDS_SAME_ELEMENTS.split())
"""Element-wise functions, and functions that keep all elements in their order, without torch's tag ``pointwise``."""

_WORDS_FILLS = "copy fill zero normal uniform bernoulli exponential random log_normal cauchy requires_grad detach"
_FILLS = frozenset(_WORDS_FILLS.split())
"""Functions that overwrite each element in place, and in-place functions that read no element."""

_OPERATORS = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "pos": "positive",
}

_ATTRIBUTES_OF_ORDER = frozenset(["T", "H", "mT", "mH"])
_ELEMENTWISE_ATTRIBUTES = dict.fromkeys(("real", "imag", "data"), Handling.ELEMENTWISE)

_WORDS_QUESTIONS = """
    size stride numel nelement dim ndimension element_size storage_offset is_contiguous is_floating_point is_complex
    is_signed is_inference is_conj is_neg is_shared is_pinned is_same_size is_set_to get_device dim_order has_names
    data_ptr storage untyped_storage _typed_storage storage_type __len__ __dlpack_device__ __dir__ result_type
    retain_grad register_hook register_post_accumulate_grad_hook record_stream _is_view can_cast
    new new_empty new_empty_strided new_zeros new_ones new_full new_tensor _has_compatible_shallow_copy_type
"""
_QUESTIONS = frozenset(_WORDS_QUESTIONS.split())


# ---- Norms, with the signatures of torch's. ----


def _foreach_norm(self: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    by_grid: dict[Any, list[int]] = {}
    with DisableTorchFunctionSubclass():
        for index, tensor in enumerate(self):
            by_grid.setdefault(_key_of(tensor), []).append(index)
    found: dict[int, Tensor] = {}
    for key, indices in by_grid.items():
        tensors = [self[index] for index in indices]
        if key is None:
            found |= zip(indices, foreach_norms(tensors, ord, dtype=dtype), strict=True)
        else:
            found |= zip(indices, _norms(tensors, ord, dtype), strict=True)
    return [found[index] for index in range(len(self))]


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
        refuse(input, f"torch.linalg.norm(ord={ord!r}), which is one of matrices,")
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
        refuse(input, "norm(p='nuc'), which is one of matrices,")
    return _norm(input, 2 if p in (None, "fro") else p, keepdim, dtype)


def _tensor_norm(
    self: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    return _torch_norm(self, p, dim, keepdim, dtype=dtype)


def _matrix_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    refuse(input, "a norm of matrices")


def _check_and_unscale(self: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    with torch.no_grad(), DisableTorchFunctionSubclass():
        torch._amp_foreach_non_finite_check_and_unscale_(self, found_inf, inv_scale)  # type: ignore[arg-type]
        grids = [everyone_of(shard) for grad in self if (shard := shard_of(grad)) is not None]
        for grid in {grid[:2]: grid for grid in grids}.values():
            found_inf.copy_(reduced(found_inf.reshape(1), grid, max_over).view_as(found_inf))


NORMS: dict[Any, Callable[..., Any]] = {
    foreach_norms: _foreach_norm,
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _torch_norm,
    Tensor.norm: _tensor_norm,
    torch.linalg.matrix_norm: _matrix_norm,
    torch.nuclear_norm: _matrix_norm,
    torch.frobenius_norm: _matrix_norm,
    getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None): _check_and_unscale,
}


def _norm(grad: Tensor, ord: float, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    norm = _norms([grad], ord, dtype)[0]
    return norm.view([1] * grad.ndim) if keepdim else norm


def _norms(grads: Sequence[Tensor], ord: float, dtype: torch.dtype | None) -> list[Tensor]:
    with torch.no_grad(), DisableTorchFunctionSubclass():
        return norms(grads, [_known(grad) for grad in grads], ord, dtype)


def _key_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Gradients with equal keys share one collective for their norms. None for a tensor that is not a shard."""
    shard = shard_of(tensor)
    if shard is None:
        return None
    everyone = everyone_of(shard)
    return everyone.inner, everyone.outer, tensor.device


# ---- Other reductions: of all elements, without dims. ----


def _over_all(name: str, compute: Callable[..., Tensor]) -> Callable[..., Any]:
    """A reduction with torch's signature that calls ``compute(values, shard, **options)``, and refuses dims and out."""

    def reduction(
        input: Tensor, *args: Any, dim: Any = None, keepdim: bool = False, out: Any = None, **options: Any
    ) -> Tensor:
        for given in (*args, dim, options.pop("axis", None)):
            if given is not None and given != ():
                refuse(input, f"{name}() along dims" if not isinstance(given, bool) else f"{name}({given})")
        if out is not None:
            refuse(input, f"{name}() with out=")
        with torch.no_grad(), DisableTorchFunctionSubclass():
            found = compute(input, _known(input), **options)
            return found.view([1] * input.ndim) if keepdim else found

    return reduction


def _sum(values: Tensor, shard: ShardInfo, *, dtype: torch.dtype | None = None) -> Tensor:
    kept = values.dtype if values.is_floating_point() or values.is_complex() else torch.int64
    return sums([values], shard)[0].to(dtype or kept)


def _mean(values: Tensor, shard: ShardInfo, *, dtype: torch.dtype | None = None) -> Tensor:
    return mean_and_variance(values, shard, None)[0].to(dtype or values.dtype)


def _var(values: Tensor, shard: ShardInfo, *, correction: float = 1, unbiased: bool | None = None) -> Tensor:
    chosen = correction if unbiased is None else float(unbiased)
    return mean_and_variance(values, shard, chosen)[1].to(values.dtype.to_real())


def _std(values: Tensor, shard: ShardInfo, **options: Any) -> Tensor:
    return _var(values, shard, **options).sqrt()


def _max(values: Tensor, shard: ShardInfo) -> Tensor:
    return extremum(values, shard, largest=True).to(values.dtype)


def _min(values: Tensor, shard: ShardInfo) -> Tensor:
    return extremum(values, shard, largest=False).to(values.dtype)


def _any(values: Tensor, shard: ShardInfo) -> Tensor:
    return extremum(values != 0, shard, largest=True) > 0


def _all(values: Tensor, shard: ShardInfo) -> Tensor:
    return extremum(values != 0, shard, largest=False) > 0


def _count_nonzero(values: Tensor, shard: ShardInfo) -> Tensor:
    return sums([values != 0], shard)[0].long()


def _extremum_or_elementwise(name: str) -> Callable[..., Any]:
    """``max`` or ``min``: element-wise of two tensors, over all ranks of one."""
    over_all, of_two = _over_all(name, {"max": _max, "min": _min}[name]), {"max": torch.maximum, "min": torch.minimum}

    def extremum_or_elementwise(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        other = args[0] if args else kwargs.get("other")
        return of_two[name](input, other) if isinstance(other, Tensor) else over_all(input, *args, **kwargs)

    return extremum_or_elementwise


def _dot(input: Tensor, tensor: Tensor) -> Tensor:
    return (input * tensor).sum()


def _alike_everywhere(compare: Callable[..., bool]) -> Callable[..., bool]:
    def compared(input: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> bool:
        shard = shard_of(input) or shard_of(other)
        assert shard is not None, "one of them is a sharded gradient"
        with torch.no_grad(), DisableTorchFunctionSubclass():
            same = compare(input, other, *args, **kwargs)
            return extremum(torch.full((1,), float(same), device=input.device), shard, largest=False).item() > 0

    return compared


def _one_element(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A conversion to a Python number, for parameters of one element. One rank has the element; all get its value."""

    def number(input: Tensor, *args: Any) -> Any:
        shard = _known(input)
        if math.prod(shard.shape) != 1:
            refuse(input, "the value of a tensor with more than one element")
        with torch.no_grad(), DisableTorchFunctionSubclass():
            return read(whole(input, shard).view(()), *args)

    return number


def _fill_where(self: Tensor, index: Any, value: Any) -> None:
    """``grad[mask] = value`` is element-wise; other indices are refused. If ``self`` is plain, ``value`` is a shard."""
    if shard_of(self) is None:
        with DisableTorchFunctionSubclass():
            self[index] = value
        return
    if not (isinstance(index, Tensor) and index.dtype is torch.bool and index.shape == self.shape):
        refuse(self, "an index")
    self.masked_fill_(index, value)


_OVER_ALL: dict[str, Callable[..., Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": _std,
    "amax": _max,
    "amin": _min,
    "any": _any,
    "all": _all,
    "count_nonzero": _count_nonzero,
}

_OWN: dict[str, Callable[..., Any]] = {
    **{name: _over_all(name, compute) for name, compute in _OVER_ALL.items()},
    "max": _extremum_or_elementwise("max"),
    "min": _extremum_or_elementwise("min"),
    "dot": _dot,
    "equal": _alike_everywhere(torch.equal),
    "allclose": _alike_everywhere(torch.allclose),
    "item": _one_element(Tensor.item),
    "__bool__": _one_element(Tensor.__bool__),
    "__float__": _one_element(Tensor.__float__),
    "__int__": _one_element(Tensor.__int__),
    "__setitem__": _fill_where,
}


# ---- Refusals. ----


def _known(grad: Tensor) -> ShardInfo:
    shard = shard_of(grad)
    assert shard is not None, "called for a sharded gradient"
    return shard


def _check_whole(grad: Tensor, what: str, dim: Any, out: Tensor | None) -> None:
    if dim is not None:
        refuse(grad, f"{what} along dims")
    if out is not None:
        refuse(grad, f"{what} with out=")


def refuse(grad: Any, what: str) -> Never:
    """Raise ``RuntimeError``: ``what`` is not defined on shards of a gradient."""
    shard = shard_of(grad)
    which = "" if shard is None else f" ({shard})"
    raise RuntimeError(
        f"{what} is not defined over the shards of a gradient{which}: element-wise functions, views of all elements, "
        f"norms and sums of all are, and torch.nn.utils.get_total_norm(grads) of several gradients; take "
        f"grad.full_tensor() for the whole one, on all ranks together, or grad.to_local() for this rank's elements "
        f"alone"
    )
