"""How each function of torch runs on a sharded gradient. The function's name decides which of three cases applies.

=============  =====================================================================================================
reads nothing  shape, dtype, hooks: runs as on a plain tensor
element-wise   also copies, views and changes of dtype: runs on this rank's elements, and the result is a shard of them
whole          everything else: torch's own function on the gathered gradients. Collective
=============  =====================================================================================================

Norms of all elements, and the check for Inf, take one collective for a whole list of gradients. They are the first
things below. ``grad_functions.py`` runs the other functions.
"""

import functools
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Never

import torch
from torch import Tensor, nn

from ..torch_internals import DisableTorchFunctionSubclass, foreach_norms
from .over_ranks import everyone_of, max_over, norms, reduced
from .shard_info import ShardInfo

__all__ = ["NORMS", "VIEWS", "Handling", "handling_of", "name_of", "refuse", "shard_of", "writes"]


def shard_of(tensor: Any) -> ShardInfo | None:
    """Which shard of which gradient ``tensor`` is; None for a parameter and for a plain tensor."""
    return None if isinstance(tensor, nn.Parameter) else getattr(tensor, "shard", None)


# ---- Norms. A function returns NotImplemented where other elements than all are asked for. ----


def _foreach_norm(func: Any, self: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
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
    everyone = everyone_of(shard)
    return everyone.inner, everyone.outer, tensor.device


def _norms(grads: Sequence[Any], ord: float, dtype: torch.dtype | None) -> list[Tensor]:
    with torch.no_grad(), DisableTorchFunctionSubclass():
        return norms(grads, [grad.shard for grad in grads], ord, dtype)


def _norm(func: Any, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(("input", "ord", "dim", "keepdim"), args))  # noqa: B905
    given |= {{"self": "input", "p": "ord"}.get(name, name): value for name, value in kwargs.items()}
    grad, ord = given["input"], given.get("ord")
    of_matrix = func is torch.linalg.norm and ord not in (None, "fro") and len(grad.shard.shape) > 1
    ord = 2 if ord in (None, "fro") else ord
    if len(args) > 4 or of_matrix or isinstance(ord, str) or (given.get("dim"), given.get("out")) != (None, None):
        return NotImplemented
    norm = _norms([grad], ord, given.get("dtype"))[0]
    return norm.view([1] * len(grad.whole_shape or grad.shape)) if given.get("keepdim") else norm


def _check_and_unscale(func: Any, self: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    with torch.no_grad(), DisableTorchFunctionSubclass():
        func(self, found_inf, inv_scale)
        grids = [everyone_of(shard) for grad in self if (shard := shard_of(grad)) is not None]
        for grid in {grid[:2]: grid for grid in grids}.values():
            found_inf.copy_(reduced(found_inf.reshape(1), grid, max_over).view_as(found_inf))


NORMS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm], _norm),
    foreach_norms: _foreach_norm,
    getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None): _check_and_unscale,
}
"""By torch's function: what runs in its place. It is given torch's function first."""


# ---- The three cases. ----


class Handling(Enum):
    """How a function runs; see the top of this file."""

    PLAIN = auto()
    ELEMENTWISE = auto()
    WHOLE = auto()


@functools.cache
def handling_of(func: Any) -> Handling:
    """How ``func`` runs if an argument is a sharded gradient, and ``func`` is none of ``NORMS``."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _ATTRIBUTES.get(getattr(getattr(func, "__self__", None), "__name__", ""), Handling.PLAIN)
    if name in _QUESTIONS or name.startswith(("_fused_", "_amp_")):
        return Handling.PLAIN
    if name in _NEEDS_WHOLE:
        return Handling.WHOLE
    bare = name.strip("_").removeprefix("foreach_")
    known = _is_elementwise(bare) or _is_elementwise(_in_place_or_reversed(name))
    return Handling.ELEMENTWISE if known else Handling.WHOLE


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
    if name in _SAME_ELEMENTS or name in VIEWS:
        return True
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def name_of(func: Any) -> str:
    """What a program calls ``func``, which torch has passed to ``__torch_function__``."""
    if func.__name__ in ("__get__", "__set__", "__delete__"):  # of an attribute such as Tensor.T
        return f"Tensor.{getattr(func.__self__, '__name__', 'an attribute')}"
    return f"{func.__name__}()"


def refuse(grad: Any, what: str) -> Never:
    """Raise ``RuntimeError``: ``what`` is not defined on shards of a gradient."""
    raise RuntimeError(
        f"{what} is not defined over the shards of a gradient ({grad.shard}): change gradients by element-wise "
        f"functions in place, take grad.full_tensor() for the whole one, on all ranks together, or grad.to_local() for "
        f"this rank's elements alone"
    )


VIEWS = frozenset(["view", "view_as", "reshape", "reshape_as", "flatten", "ravel"])
"""Functions that may change the shape, and keep all elements in their order."""

_WORDS_SAME_ELEMENTS = """
    clone detach alias contiguous to type type_as float double half bfloat16 int long short bool byte char cfloat
    cdouble chalf cpu cuda conj resolve_conj resolve_neg real imag isclose isreal pin_memory
    subtract multiply divide absolute negative floor_divide positive fix greater less greater_equal less_equal not_equal
    arccos arcsin arctan arccosh arcsinh arctanh dropout rrelu relu6 selu softsign logsigmoid tanhshrink
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like
    equal allclose copy fill zero normal uniform bernoulli exponential random log_normal cauchy
"""
_SAME_ELEMENTS = frozenset(_WORDS_SAME_ELEMENTS.split())
"""Element-wise functions, and functions that keep all elements in their order, without torch's tag ``pointwise``."""

_WORDS_NEEDS_WHOLE = """
    _foreach_max
    __bool__ __float__ __int__ __long__ __complex__ __index__ __deepcopy__
"""
_NEEDS_WHOLE = frozenset(_WORDS_NEEDS_WHOLE.split())
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

_ATTRIBUTES = {
    **dict.fromkeys(["T", "H", "mT", "mH"], Handling.WHOLE),
    **dict.fromkeys(["real", "imag", "data"], Handling.ELEMENTWISE),
}

_WORDS_QUESTIONS = """
    size stride numel nelement dim ndimension element_size storage_offset is_contiguous is_floating_point is_complex
    is_signed is_inference is_conj is_neg is_shared is_pinned is_same_size is_set_to get_device dim_order has_names
    data_ptr storage untyped_storage _typed_storage storage_type __len__ __dlpack_device__ __dir__ result_type
    retain_grad register_hook register_post_accumulate_grad_hook record_stream _is_view can_cast requires_grad_ detach_
    new new_empty new_empty_strided new_zeros new_ones new_full new_tensor _has_compatible_shallow_copy_type
"""
_QUESTIONS = frozenset(_WORDS_QUESTIONS.split())
