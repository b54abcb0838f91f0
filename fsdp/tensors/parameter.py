"""``ShardedParameter``: what a module's parameter is outside the forward of its unit.

A sharded parameter is a range of the flattened parameter. It is a view of its bucket's flat shard on this rank.

``FreedParameter`` is the class of a whole parameter that a program has kept from ``unsharded()``, until the unit is
gathered again: it has no memory, and its reads raise.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...ddp.buckets.buffer import ReleasableBuffer
from ...ddp.collectives.reduction import GradReduction
from ...ddp.collectives.streams import current_stream
from ...ddp.plan.cut import Range
from ...ddp.plan.layout import ParamSlot
from ...ddp.plan.model_slice import model_slice_of
from ...ddp.plan.owned_params import OwnedParam, is_slice
from ...ddp.torch_grads.grad_reads import name_of
from ...ddp.torch_grads.over_ranks import ShardInfo, local_shape
from ...ddp.torch_grads.sharded_grad import adopt_grad
from ...ddp.torch_internals import (
    DisableTorchFunctionSubclass,
    disabled_torch_function,
    grad_of_tensor,
    is_forward_ad_enabled,
    let_optimizers_take,
    make_subclass,
    reads_no_values,
    tree_leaves,
)

__all__ = [
    "ShardInfo",
    "ShardedPair",
    "ShardedParameter",
    "WholeParams",
    "call_grad_hooks",
    "flat_of",
    "grad_hook_keys",
    "local_shape",
    "make_pair",
]

_HOOKS = "_maingrad_grad_hooks"


_is_grad_enabled, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled


def _in_function() -> bool:
    """The forward of a ``torch.autograd.Function`` runs; False under ``inference_mode()``, which looks alike."""
    return not (is_forward_ad_enabled() or _is_grad_enabled() or _is_inference())


class _Guard:
    """``__torch_function__`` of sharded parameters, which torch looks up before each call with one.

    With grad mode the lookup finds ``_checked``. Without grad mode it finds torch's own default, so that optimizers and
    other updates run as fast as over plain parameters. ``torch.autograd.Function.apply`` looks nothing up and switches
    grad mode off for its forward, which means whole parameters: there the lookup finds a stricter check.
    """

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        if _is_grad_enabled():
            return _checked
        # As _in_function has it, without a call: optimizers come here for each parameter and operation.
        return disabled_torch_function if is_forward_ad_enabled() or _is_inference() else _checked_in_function


def _plainly(access: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``access(*args, **kwargs)`` as on a plain tensor: without ``_checked``, which takes microseconds."""
    return disabled_torch_function(access, (), args, kwargs)


_grad: Any = grad_of_tensor


class ShardedParameter(nn.Parameter):
    """This rank's shard of a parameter, of shape ``local_shape(shard)``; ``make_sharded`` makes one.

    Without grad mode (optimizers, averages) a sharded parameter is a plain tensor of the rank's own elements, perhaps
    of none. Among several ranks it refuses random draws in place, and with them torch's random initialisers. With grad
    mode, functions that use its values raise ``RuntimeError``: the whole parameter exists in the module only while the
    unit's forward runs. Functions that read no values (shape, dtype, grad, hooks), ``detach()`` and ``data`` are
    allowed. The forward of a ``torch.autograd.Function`` means the whole parameter: there ``detach()``, ``data`` and
    addresses of a sharded one raise as well.

    A sharded parameter stays in the unit's memory: new ``data``, as from ``module.half()``, raises ``RuntimeError``
    too. Norms of a sharded parameter are of the rank's own elements; norms of its gradient are global.

    A deep copy has memory of its own. Pickling raises ``TypeError``, because process groups cannot be pickled.
    """

    shard: ShardInfo

    __torch_function__ = _Guard()

    @property  # zero_grad() reads it with grad mode
    def grad(self) -> Tensor | None:
        """The gradient of these elements, or None."""
        return disabled_torch_function(_grad.__get__, (), (self,))  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        _plainly(_grad.__set__, self, None if grad is None else adopt_grad(grad, self.shard))

    @grad.deleter
    def grad(self) -> None:
        _plainly(_grad.__delete__, self)

    @property
    def data(self) -> Tensor:
        """A plain tensor of the same memory and version counter. Setting other memory raises ``RuntimeError``.

        ``data`` of a plain parameter has a version counter of its own. Here the counter is shared, because the unit
        gathers again when the shard's version has changed.
        """
        if _in_function():
            _refuse_in_function(Tensor.data.__get__, self)  # type: ignore[attr-defined]
        return _plainly(Tensor.detach, self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, data: Tensor) -> None:
        mine, other = (_plainly(Tensor.detach, tensor) for tensor in (self, data))
        if _place_of(mine) != _place_of(other):
            raise RuntimeError(
                f"a sharded parameter stays in the memory of its unit ({self.shard}, {mine.dtype} on {mine.device}; "
                f"given {other.dtype} on {other.device}): convert and move a module before fully_shard, and change "
                f"values in place, param.data.copy_(...)"
            )

    def register_post_accumulate_grad_hook(self, hook: Callable[["ShardedParameter"], None]) -> RemovableHandle:
        """Call ``hook(param)`` once in each iteration, when ``.grad`` is complete. An optimizer may step in the hook.

        Returns a handle, whose ``remove()`` removes the hook.
        """
        hooks = self.__dict__.setdefault(_HOOKS, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def register_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Raises ``RuntimeError``: backward computes gradients of whole parameters, and calls no hook of a shard."""
        raise RuntimeError(
            f"register_hook on a sharded parameter ({self.shard}): backward leads to the whole one, and no hook of the "
            f"shard is called; use register_post_accumulate_grad_hook, which is called when .grad is complete"
        )

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Tensor:
        """As ``Tensor.copy_``, of this rank's elements. Raises ``RuntimeError`` for the whole parameter."""
        info = self.shard
        if src.shape == info.shape and src.shape != self.shape:
            raise RuntimeError(
                f"copy_() of a whole tensor {tuple(src.shape)} to the parameter {info.name!r}, of which this rank has "
                f"elements {info.start} to {info.end} alone: copy it within model.unsharded(writeback=True), or call "
                f"model.load_state_dict()"
            )
        return super().copy_(src, non_blocking)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedParameter({self.shard}, requires_grad={self.requires_grad}):\n{self.detach()!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedParameter":
        return make_sharded(self.detach().clone().view(-1), self.shard, self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a sharded parameter is not pickled ({self.shard}): save the model's state_dict(), or param.detach() for "
            f"this rank's elements alone; copy it by copy.deepcopy()"
        )


def _refusing_draws(name: str) -> Callable[..., Tensor]:
    """``ShardedParameter``'s method ``name``, which torch has for draws in place."""
    draw = getattr(Tensor, name)

    def method(self: ShardedParameter, *args: Any, **kwargs: Any) -> Tensor:
        # Ranks with one seed draw the same numbers, each for other elements; ``xavier_uniform_`` and its like compute
        # their bounds from the shard's shape. Both train, and nobody sees it.
        if self.shard.grid.inner_size > 1:
            info = self.shard
            raise RuntimeError(
                f"{name}() on the parameter {info.name!r} {info.shape} while it is sharded: ranks with equal seeds "
                f"draw equal numbers for different elements. Initialise before sharding, by init_fn, or with "
                f"model.unsharded(writeback=True). Draws for this rank's elements alone take param.data"
            )
        return _plainly(draw, self, *args, **kwargs)  # type: ignore[no-any-return]

    method.__name__, method.__doc__ = name, draw.__doc__
    return method


for _name in ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"):
    setattr(ShardedParameter, _name, _refusing_draws(_name))


def call_grad_hooks(params: Iterable[ShardedParameter]) -> None:
    """Call the post-accumulate-grad hooks of ``params``, whose gradients are complete."""
    for param in params:
        hooks = param.__dict__.get(_HOOKS)
        for hook in list(hooks.values()) if hooks else ():
            hook(param)


def grad_hook_keys(params: Iterable[ShardedParameter]) -> list[int]:
    """Numbers of the hooks that ``call_grad_hooks`` would call: another hook has another number."""
    return [key for param in params if (hooks := param.__dict__.get(_HOOKS)) for key in hooks]


def make_sharded(flat_view: Tensor, info: ShardInfo, requires_grad: bool) -> ShardedParameter:
    """A sharded parameter in the memory of ``flat_view`` [end - start], with the same version counter."""
    if flat_view.shape != (info.numel,):
        raise ValueError(f"a shard of {info} is one dim of {info.numel}, got {tuple(flat_view.shape)}")
    param: ShardedParameter = make_subclass(ShardedParameter, flat_view.view(local_shape(info)), requires_grad)
    param.shard = info
    return param


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


let_optimizers_take(ShardedParameter)


def _checked(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """torch calls this instead of ``func`` with grad mode. Raises ``RuntimeError`` if ``func`` reads values."""
    kwargs = kwargs or {}
    if func in _ALLOWED:
        return disabled_torch_function(func, types, args, kwargs)
    info = _sharded_among(args, kwargs).shard
    if func in (torch.autograd.grad, torch.autograd.backward):
        raise RuntimeError(
            f"{name_of(func)} asks for the gradient of the parameter {info.name!r}, which is sharded: the loss depends "
            f"on the whole one. Call backward() without inputs and read .grad. A penalty on gradients of parameters "
            f"needs DistributedDataParallel, with ZeRO-1 at most"
        )
    writes = func.__name__.endswith("_") and not func.__name__.endswith("__")
    raise RuntimeError(
        f"{name_of(func)} {_used_outside(info)}{'; unsharded(writeback=True) keeps writes' if writes else ''}. What is "
        f"meant for the shard itself goes under torch.no_grad(), or takes param.detach()"
    )


def _checked_in_function(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """As ``_checked``, in the forward of a ``torch.autograd.Function``; what leads to values is refused too."""
    kwargs = kwargs or {}
    if func in _ALLOWED_IN_FUNCTION:
        return disabled_torch_function(func, types, args, kwargs)
    return _refuse_in_function(func, _sharded_among(args, kwargs))


def _refuse_in_function(func: Any, used: ShardedParameter) -> NoReturn:
    raise RuntimeError(
        f"{name_of(func)}, in the forward of a torch.autograd.Function, {_used_outside(used.shard)}. Where "
        f"the shard itself is meant, give the function param.detach()"
    )


def _sharded_among(args: Any, kwargs: Any) -> ShardedParameter:
    return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedParameter))


def _used_outside(info: ShardInfo) -> str:
    unit = f"its unit {info.unit!r}" if info.unit else "the outermost unit, which it belongs to,"
    return (
        f"uses the parameter {info.name!r} outside the forward of {unit} while it is sharded: this rank holds only "
        f"elements {info.start} to {info.end} of {info.shape}. Use it inside that forward, make one unit of all "
        f"modules that use it, or read it whole within unsharded()"
    )


def _named(names: str) -> set[Any]:
    """The methods of tensors, and functions of torch, of these names."""
    return {getattr(place, name) for place in (Tensor, torch) for name in names.split() if hasattr(place, name)}


_ALLOWED_IN_FUNCTION = reads_no_values() | _named(
    """
    is_shared is_pinned is_set_to __format__ new_tensor result_type _has_compatible_shallow_copy_type
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like
    """
)
# The initialisers read values under a ``no_grad`` of their own.
_ALLOWED_IN_FUNCTION |= {nn.init.normal_, nn.init.uniform_, nn.init.constant_}
# Views and addresses, by which a program comes to the values.
_ALLOWED = _ALLOWED_IN_FUNCTION | _named(
    "detach data_ptr storage untyped_storage _typed_storage record_stream __dlpack_device__"
)


def flat_of(tensor: Tensor) -> Tensor:
    """A plain tensor of one dim: with the same memory and version where ``tensor`` is contiguous, else a copy."""
    with DisableTorchFunctionSubclass():
        return tensor.detach().reshape(-1)


# ---- Whole parameters that a program has kept from ``unsharded()``: their reads raise while they have no memory. ----


_NAME = "_maingrad_freed"


class FreedParameter(nn.Parameter):
    """A whole parameter without memory. Functions that use its values, and views of it, raise ``RuntimeError``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOWED_IN_FUNCTION:
            return disabled_torch_function(func, types, args, kwargs or {})
        used = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FreedParameter))
        raise RuntimeError(
            f"{name_of(func)} uses the parameter {used.__dict__[_NAME]!r}, which was whole within unsharded() "
            f"or unshard(), and is sharded again: it has no memory now. Keep a copy from the block "
            f"(param.detach().clone(), state_dict()), or read the parameter in a block of its own"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FreedParameter({self.__dict__[_NAME]!r}, {list(self.shape)}, without memory)"


class WholeParams(ReleasableBuffer):
    """The memory of a bucket's whole parameters, which a program may have been given to read (``unsharded()``)."""

    params: tuple[nn.Parameter, ...] = ()
    """The whole parameters, views of the memory."""
    _refuses_reads = False

    def take(self) -> None:
        """Give the parameters memory: they may be read."""
        super().take()
        if self._refuses_reads:
            self._refuses_reads = False
            for param in self.params:
                param.__class__ = nn.Parameter
                del param.__dict__[_NAME]

    def leave(self, names: Sequence[str]) -> None:
        """Leave the memory to views that the program has kept, which go on reading it.

        The parameters themselves, of these names, refuse to be read until ``take``. The caller then calls ``release``.
        """
        self._refuses_reads = True
        if self.pool is None:  # ranks take and free memory of a pool in one order
            self._begin_anew()
        for param, name in zip(self.params, names, strict=True):
            param.__dict__[_NAME] = name
            param.__class__ = FreedParameter

    def _begin_anew(self) -> None:
        if self.data.is_cuda:
            # The last view may be dropped at any time. The memory then returns to its stream, which has not waited for
            # the program's reads.
            self.data.record_stream(current_stream(self.data.device))
        places = [(param.storage_offset(), param.shape) for param in self.params]
        numel, self.data = self.data.numel(), self.data.new_empty(0)
        self._storage = self.data.untyped_storage()
        for param in self.params:
            param.data = self.data
        # The old memory is free now, unless the program has kept a view: the new one does not come beside it.
        self.data = self.data.new_empty(numel)
        self._storage = self.data.untyped_storage()
        for param, (place, shape) in zip(self.params, places, strict=True):
            param.data = self.data[place : place + shape.numel()].view(shape)


# ---- A parameter in both forms. ----


class ShardedPair(NamedTuple):
    """One parameter in its two forms, sharded and whole."""

    name: str
    """The parameter's name in its unit."""
    before: nn.Parameter
    """The user's parameter before sharding. Its memory is freed."""
    places: tuple[tuple[weakref.ref[nn.Module], str], ...]
    """The modules that register the parameter, and its name in each. The references are weak: modules own the unit."""
    sharded: ShardedParameter
    whole: nn.Parameter


def make_pair(
    entry: OwnedParam,
    slot: ParamSlot,
    shard: Tensor,
    mine: Range,
    whole_params: Tensor,
    reduction: GradReduction,
    unit: str,
) -> ShardedPair:
    """The parameter ``entry``, which lies in ``slot`` of its bucket, as views of the bucket's flat tensors.

    shard         [mine.numel] this rank's elements ``mine`` of the bucket
    whole_params  [n] memory of the whole parameters
    unit          the unit's name, for errors
    """
    part = Range(slot.start, slot.end).intersect(mine)
    offset = part.start - mine.start
    if not part.numel:
        part, offset = Range(slot.start, slot.start), 0
    info = ShardInfo(
        entry.name,
        tuple(entry.param.shape),
        part.start - slot.start,
        part.end - slot.start,
        reduction.grid,
        reduction.num_replicas,
        unit,
        reduction.grid,
        is_slice(entry.param),
        model_slice=model_slice_of(entry.param),
        place=slot.start,
        bucket_numel=whole_params.numel(),
    )
    # ``.data``: a version of its own tells which parameter a program has written. Autograd must not see a view.
    sharded = make_sharded(shard[offset : offset + part.numel].data, info, entry.param.requires_grad)
    whole = nn.Parameter(whole_params[slot.start : slot.end].view(slot.spec.shape).data, entry.param.requires_grad)
    # What torch does not set: Megatron's marks, and the user's attributes.
    marks: dict[str, Any] = dict(entry.param.__dict__)
    whole.__dict__.update(marks)
    marks.pop("shard", None)
    sharded.__dict__.update(marks)
    places = tuple((weakref.ref(module), local) for module, local in entry.owners)
    return ShardedPair(entry.name, entry.param, places, sharded, whole)
