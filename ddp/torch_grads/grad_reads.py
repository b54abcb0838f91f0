"""How each function of torch runs on a sharded gradient. The function's name decides which of four cases applies.

=============  =====================================================================================================
norms          norms of all elements, and the check for Inf: one collective for a whole list of gradients
reads nothing  shape, dtype, hooks: runs as on a plain tensor
element-wise   also copies and changes of dtype: runs on this rank's elements, and the result is a shard of them
other          ``RuntimeError``, which names ``full_tensor()``
=============  =====================================================================================================
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Never

import torch
from torch import Tensor, nn

from ..torch_internals import (
    DisableTorchFunctionSubclass,
    disabled_torch_function,
    tree_leaves,
    tree_map,
)
from .over_ranks import ShardInfo, everyone_of, max_over, norms, reduced

__all__ = ["NORMS", "name_of", "on_elements", "reads_nothing", "shard_of", "writes"]


def shard_of(tensor: Any) -> ShardInfo | None:
    """Which shard of which gradient ``tensor`` is; None for a parameter and for a plain tensor."""
    return None if isinstance(tensor, nn.Parameter) else getattr(tensor, "shard", None)


# ---- Norms. A function returns NotImplemented where other elements than all, or an order of 0 or less, are asked for.


def _foreach_norm(func: Any, self: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> Any:
    if not ord > 0:
        return NotImplemented
    by_grid: dict[Any, list[int]] = {}
    with DisableTorchFunctionSubclass():
        for index, tensor in enumerate(self):
            by_grid.setdefault(_key_of(tensor), []).append(index)
    found: dict[int, Tensor] = {}
    for key, indices in by_grid.items():
        tensors = [self[index] for index in indices]
        of_these = func(tensors, ord, dtype=dtype) if key is None else _norms(tensors, ord, dtype)
        found |= zip(indices, of_these, strict=True)
    return [found[index] for index in range(len(self))]


def _key_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Gradients with equal keys share one collective for their norms. None for a tensor that is not a shard."""
    shard = shard_of(tensor)
    if shard is None:
        return None
    return *everyone_of(shard).groups, tensor.device


def _norms(grads: Sequence[Any], ord: float, dtype: torch.dtype | None) -> list[Tensor]:
    with torch.no_grad(), DisableTorchFunctionSubclass():
        return norms(grads, [grad.shard for grad in grads], ord, dtype)


def _norm(
    func: Any, input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *more: Any, **options: Any
) -> Any:
    shape, ord = input.shard.shape, options.pop("p", ord)
    of_matrix = func is torch.linalg.norm and ord not in (None, "fro") and len(shape) > 1
    ord = 2 if ord in (None, "fro") else ord
    if more or of_matrix or isinstance(ord, str) or not ord > 0 or (dim, options.get("out")) != (None, None):
        return NotImplemented
    norm = _norms([input], ord, options.get("dtype"))[0]
    return norm.view([1] * len(shape)) if keepdim else norm


def _check_and_unscale(func: Any, self: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    with torch.no_grad(), DisableTorchFunctionSubclass():
        func(self, found_inf, inv_scale)
        grids = [everyone_of(shard) for grad in self if (shard := shard_of(grad)) is not None]
        for grid in {grid.groups: grid for grid in grids}.values():
            found_inf.copy_(reduced(found_inf.reshape(1), grid, max_over).view_as(found_inf))


NORMS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm], _norm),
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _check_and_unscale,
}
"""By torch's function: what runs in its place. It is given torch's function first."""


# ---- Element-wise functions. ----


def on_elements(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on this rank's elements. Results are shards of the same elements; what it writes keeps its class.

    Raises ``RuntimeError`` where these elements do not give the result.
    """
    name, values = func.__name__, [*args, *kwargs.values()]
    if func is Tensor.__setitem__ and _masks_all(*values[:2]):
        return values[0].masked_fill_(*values[1:])
    alone = not any(isinstance(each, Tensor) for each in values[1:])
    if not _keeps_elements(func) or (alone and name in ("max", "min")) or (name == "where" and len(values) == 1):
        _refuse(_first(values), name_of(func))
    written = values[0] if writes(func) else kwargs.get("out")
    if name.startswith("_foreach_"):
        rows = list(zip(*(each for each in values if isinstance(each, list | tuple)), strict=True))
        likes = [_first(row) for row in rows]

        def local(given: Any) -> Any:
            if not isinstance(given, list | tuple):
                return given
            beside = zip(given, likes, rows, strict=True)
            return [_part(func, each, like, written and row[0]) for each, like, row in beside]

        made = disabled_torch_function(func, (), tuple(map(local, args)), {key: local(kwargs[key]) for key in kwargs})
        return made if written else [each if like is None else like.marked(each) for each, like in zip(made, likes)]  # noqa: B905
    like = _first(values)
    if name not in ("to", "type_as"):  # which take no elements of the other tensor
        args, kwargs = tree_map(lambda leaf: _part(func, leaf, like, written), (args, kwargs))
    made = disabled_torch_function(func, (), args, kwargs)
    return made if written is not None else tree_map(like.marked, made)


def _masks_all(grad: Any, index: Any) -> bool:
    """Whether ``index`` is a mask of all elements. A mask of fewer dims chooses rows, and ``masked_fill_`` columns."""
    like = _first((grad, index))
    return getattr(index, "dtype", None) is torch.bool and index.shape in (like.shape, like.shard.shape)


def _part(func: Any, operand: Any, like: Any, written: Any) -> Any:
    """This rank's elements of an operand beside the shard ``like``; ``func`` changes ``written``.

    A plain tensor of the shard's shape is these elements. One that broadcasts to the parameter's shape is cut.
    """
    if not isinstance(operand, Tensor) or like is None:
        return operand
    shard = like.shard
    if shard_of(operand) is not None:
        if not operand.shard.is_same_shard(shard) or operand.shape != like.shape:  # type: ignore[attr-defined]
            _refuse(like, f"{name_of(func)} of shards of different elements, the other one {operand.shard},")  # type: ignore[attr-defined]
        return operand
    sizes = zip(reversed(operand.shape), reversed(shard.shape))  # noqa: B905
    fits = operand.ndim <= len(shard.shape) and all(size in (1, whole) for size, whole in sizes)
    if operand.shape == like.shape and not (fits and shard.flat):
        return operand
    if operand is written or not fits:
        _refuse(like, f"{name_of(func)} with a tensor of {tuple(operand.shape)}")
    return operand if operand.ndim == 0 else shard.cut(operand.expand(shard.shape)).view(like.shape)


def _first(given: Any) -> Any:
    """The first shard; None without one."""
    return next((leaf for leaf in tree_leaves(given) if shard_of(leaf) is not None), None)


# ---- Which case applies. ----


@functools.cache
def reads_nothing(func: Any) -> bool:
    """Whether ``func`` runs as on a plain tensor."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in ("T", "H", "mT", "mH", "real", "imag")
    return name in _QUESTIONS or name.startswith(("_fused_", "_amp_"))


@functools.cache
def _keeps_elements(func: Any) -> bool:
    """Whether ``func`` is element-wise, or keeps all elements in their order."""
    name = func.__name__
    if name == "__get__":
        return func.__self__.__name__ in ("real", "imag")
    bare = name.strip("_").removeprefix("foreach_")
    return name not in _NO_ELEMENTS and (_is_elementwise(bare) or _is_elementwise(_in_place_or_reversed(name)))


@functools.cache
def writes(func: Any) -> bool:
    """Whether ``func`` changes its first argument in place."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and _is_elementwise(_in_place_or_reversed(name)))
    return name.endswith("_") and name not in _QUESTIONS


def _in_place_or_reversed(name: str) -> str:
    """The operator ``add`` of ``__iadd__`` and ``__radd__``; nothing for other names."""
    return name.strip("_")[1:] if name.startswith(("__i", "__r")) else ""


def _is_elementwise(name: str) -> bool:
    name = _OPERATORS.get(name, name)
    if name in _SAME_ELEMENTS:
        return True
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def name_of(func: Any) -> str:
    """What a program calls ``func``, which torch has passed to ``__torch_function__``."""
    if func.__name__ in ("__get__", "__set__", "__delete__"):  # of an attribute such as Tensor.T
        return f"Tensor.{getattr(func.__self__, '__name__', 'an attribute')}"
    return f"{func.__name__}()"


def _refuse(grad: Any, what: str) -> Never:
    raise RuntimeError(
        f"{what} is not defined over the shards of a gradient ({grad.shard}): take grad.full_tensor() on all ranks "
        f"together, or grad.to_local() for this rank's elements"
    )


_WORDS_SAME_ELEMENTS = """
    clone detach alias contiguous to type type_as float double half bfloat16 int long short bool byte char cfloat
    cdouble chalf cpu cuda conj resolve_conj resolve_neg real imag isclose isreal pin_memory
    subtract multiply divide absolute negative floor_divide positive fix greater less greater_equal less_equal not_equal
    arccos arcsin arctan arccosh arcsinh arctanh dropout rrelu relu6 selu softsign log_sigmoid tanhshrink
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like
    copy fill zero normal uniform bernoulli exponential random log_normal cauchy
"""
_SAME_ELEMENTS = frozenset(_WORDS_SAME_ELEMENTS.split())
"""Element-wise functions, and functions that keep all elements in their order, without torch's tag ``pointwise``."""

_WORDS_NO_ELEMENTS = "_foreach_max equal __bool__ __float__ __int__ __long__ __complex__ __index__"
_NO_ELEMENTS = frozenset(_WORDS_NO_ELEMENTS.split())
"""Functions with the name or the tag of element-wise ones, which they are not."""

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

_WORDS_QUESTIONS = """
    size stride numel nelement dim ndimension element_size storage_offset is_contiguous is_floating_point is_complex
    is_signed is_inference is_conj is_neg is_shared is_pinned is_same_size is_set_to get_device dim_order has_names
    data_ptr storage untyped_storage _typed_storage storage_type __len__ __dlpack_device__ __dir__ result_type
    retain_grad register_hook register_post_accumulate_grad_hook record_stream _is_view can_cast requires_grad_ detach_
    new new_empty new_empty_strided new_zeros new_ones new_full new_tensor _has_compatible_shallow_copy_type
"""
_QUESTIONS = frozenset(_WORDS_QUESTIONS.split())
