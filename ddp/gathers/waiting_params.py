"""Parameters that wait for their gather at their first use.

While a bucket's gather is in flight its parameters belong to a subclass of their class whose only addition is
``__torch_function__``: torch calls it before any of its functions sees the parameter, wherever that happens (a module's
forward, ``state_dict``, an average over a list of parameters that somebody kept). torch's lazy modules change a
parameter's class in the same way.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ..torch_internals import DisableTorchFunctionSubclass, disabled_torch_function, make_subclass, tree_leaves
from .reader_threads import ReaderThreads

__all__ = ["Gather", "can_wait", "gathers_of", "have_wait", "let_go", "waited_for"]

_GATHER = "_maingrad_gather"


class Gather(Protocol):
    """What a parameter waits for."""

    guards: bool
    """Parameters wait for it."""

    def arrive(self) -> None:
        """Return when it may be read."""
        ...


def can_wait(cls: Any) -> bool:
    """Whether this class of parameters can be put off and on: not one of a fixed shape, or that has a
    ``__torch_function__`` itself."""
    return issubclass(cls, _WaitsForGather) or _can_be_put_off_and_on(cls)


def have_wait(param: Tensor, gather: Gather, threads: ReaderThreads) -> None:
    """Have ``param`` wait for ``gather`` at each use, until ``let_go``.

    threads  hear of each one that looks
    """
    param.__dict__[_GATHER] = gather  # before the class, which looks for it
    if not isinstance(param, _WaitsForGather):
        param.__class__ = _waiting_class(type(param), threads)


def let_go(param: Tensor) -> None:
    """Give ``param`` its own class back."""
    if isinstance(param, _WaitsForGather):
        param.__class__ = type(param).__bases__[0]
    param.__dict__.pop(_GATHER, None)


def gathers_of(values: Iterable[Any]) -> list[Any]:
    """What the parameters among these wait for, each once."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, _WaitsForGather):
            gather = value.__dict__.get(_GATHER)
            if gather is not None and gather not in found:
                found.append(gather)
    return found


def waited_for(value: Any) -> Any:
    """``value``; a parameter when its gather has arrived."""
    if isinstance(value, _WaitsForGather):
        gather = value.__dict__.get(_GATHER)
        if gather is not None:
            gather.arrive()
    return value


class _Look:
    """``__torch_function__`` of parameters that wait: torch looks it up before each of its functions sees one."""

    def __init__(self, threads: ReaderThreads) -> None:
        self._threads = weakref.ref(threads)

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        threads = self._threads()
        if threads is not None:
            threads.note()
        return _asked


def _asked(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """What torch calls instead of ``func``."""
    kwargs = kwargs or {}
    if func not in _metadata():
        params = list(_waiting_among((args, kwargs)))
        for param in params or tree_leaves((args, kwargs)):
            waited_for(param)
        if params and not any(isinstance(param, _WaitsForGather) for param in params):
            return func(*args, **kwargs)
    # Nothing was read, or the class stays on for other threads' sake: go on as if their own class were asked.
    others = tuple(each for each in types if not issubclass(each, _WaitsForGather))
    for other in others:
        result = other.__torch_function__(func, others, args, kwargs)
        if result is not NotImplemented:
            return result
    if others:
        return NotImplemented
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class _WaitsForGather:
    """Mixed in front of a parameter's own class while its gather is in flight."""

    # Python functions that build a tensor of type(self), and so must not see this class.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_in_own_class(waited_for(self)), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _in_own_class(waited_for(self)).__reduce_ex__(protocol)


def _waiting_among(value: Any) -> Iterator[Any]:
    """Parameters that wait, in what a torch function is given. ``tree_leaves`` finds them everywhere, but takes ten
    times as long."""
    if isinstance(value, _WaitsForGather):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _waiting_among(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _waiting_among(each)


def _in_own_class(param: Any) -> Any:
    """``param`` itself where its class was given back; else another one of its own class over the same memory."""
    if not isinstance(param, _WaitsForGather):
        return param
    waiting: Any = param
    with DisableTorchFunctionSubclass():
        twin: Any = make_subclass(type(waiting).__bases__[0], waiting.data, waiting.requires_grad)
    twin.__dict__.update((name, value) for name, value in waiting.__dict__.items() if name != _GATHER)
    return twin


@functools.cache
def _can_be_put_off_and_on(cls: Any) -> bool:
    if cls.__torch_function__ is not disabled_torch_function:
        return False  # it has something to say itself
    try:
        probe: Any = make_subclass(cls, torch.empty(0))
        probe.__class__ = type(cls.__name__, (cls, _WaitsForGather), {})
    except TypeError:
        return False
    return True


def _waiting_class(cls: type, threads: ReaderThreads) -> Any:
    """``cls`` with the wait before it."""
    waiting = threads.classes.get(cls)
    if waiting is None:
        # The wait comes first in the order of lookup, and cls first among the bases, where let_go() finds it again.
        members = {name: getattr(_WaitsForGather, name) for name in ("__deepcopy__", "__reduce_ex__")}
        members["__torch_function__"] = _Look(threads)
        waiting = threads.classes[cls] = type(f"Gathering{cls.__name__}", (cls, _WaitsForGather), members)
    return waiting


@functools.cache
def _metadata() -> frozenset[Any]:
    """What torch may be asked about a parameter without waiting for its values."""
    properties = """
        shape dtype device layout ndim requires_grad grad grad_fn grad_dtype is_leaf _version is_cuda is_cpu is_meta
        is_sparse is_quantized output_nr names _backward_hooks _post_accumulate_grad_hooks
    """
    methods = """
        size stride numel nelement dim element_size storage_offset is_contiguous is_floating_point is_complex get_device
        requires_grad_ register_hook register_post_accumulate_grad_hook
    """
    found = [getattr(torch.Tensor, name) for name in properties.split() if hasattr(torch.Tensor, name)]
    accessors = [access for entry in found for access in (entry.__get__, entry.__set__)]
    return frozenset([*accessors, *(getattr(torch.Tensor, name) for name in methods.split())])
