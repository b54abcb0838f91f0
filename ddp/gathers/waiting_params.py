"""Parameters that wait for their gather at their first use.

While a gather is in flight, the class of its parameters is the *waiting class*: a subclass of their own class that adds
``__torch_function__``. torch calls that before any of its functions reads the parameter: in a module's forward, in
``state_dict``, in an average over a list of parameters. torch's lazy modules change a parameter's class too.
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

__all__ = ["Gather", "can_wait", "gathers_of", "have_wait", "let_go", "reads_no_values", "waited_for"]

_GATHER = "_maingrad_gather"


class Gather(Protocol):
    """What a parameter waits for; ``ParamGather`` is one."""

    guards: bool
    """Its parameters have the waiting class."""

    def arrive(self) -> None:
        """Return when the parameters may be read."""
        ...


def can_wait(cls: Any) -> bool:
    """Whether parameters of class ``cls`` can get a waiting class.

    False for a class with a ``__torch_function__`` of its own, and where Python refuses to assign ``__class__``.
    """
    return issubclass(cls, _WaitsForGather) or _can_be_put_off_and_on(cls)


def have_wait(param: Tensor, gather: Gather, threads: ReaderThreads) -> None:
    """Have ``param`` wait for ``gather`` at each use, until ``let_go``.

    threads  is told of each thread that reads
    """
    param.__dict__[_GATHER] = gather  # before the waiting class, which reads it
    if not isinstance(param, _WaitsForGather):
        param.__class__ = _waiting_class(type(param), threads)


def let_go(param: Tensor) -> None:
    """Give ``param`` its own class back."""
    if isinstance(param, _WaitsForGather):
        param.__class__ = type(param).__bases__[0]
    param.__dict__.pop(_GATHER, None)


def gathers_of(values: Iterable[Any]) -> list[Any]:
    """The gathers that parameters among ``values`` wait for, each once."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, _WaitsForGather):
            gather = value.__dict__.get(_GATHER)
            if gather is not None and gather not in found:
                found.append(gather)
    return found


def waited_for(value: Any) -> Any:
    """``value``, after its gather where it is a parameter that waits."""
    if isinstance(value, _WaitsForGather):
        gather = value.__dict__.get(_GATHER)
        if gather is not None:
            gather.arrive()
    return value


class _Look:
    """``__torch_function__`` of waiting classes, as a descriptor: each look at it notes the thread that reads."""

    def __init__(self, threads: ReaderThreads) -> None:
        self._threads = weakref.ref(threads)

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        threads = self._threads()
        if threads is not None:
            threads.note()
        return _asked


def _asked(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """``__torch_function__``: torch calls this instead of ``func``."""
    kwargs = kwargs or {}
    if func not in reads_no_values():
        params = list(_waiting_among((args, kwargs)))
        for param in params or tree_leaves((args, kwargs)):
            waited_for(param)
        if params and not any(isinstance(param, _WaitsForGather) for param in params):
            return func(*args, **kwargs)
    # ``func`` reads no values, or the waiting class stays because other threads read: act as the own class would.
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
    """Mixed into a parameter's own class while its gather is in flight."""

    # Copies and pickles are made of type(self), which must be the parameter's own class then.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_in_own_class(waited_for(self)), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _in_own_class(waited_for(self)).__reduce_ex__(protocol)


def _waiting_among(value: Any) -> Iterator[Any]:
    """Parameters that wait, in a torch function's arguments: in tuples, lists and dicts.

    ``tree_leaves`` knows more containers and takes four times as long (13 us more for four arguments).
    """
    if isinstance(value, _WaitsForGather):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _waiting_among(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _waiting_among(each)


def _in_own_class(param: Any) -> Any:
    """``param``, or, while it has the waiting class, a new parameter of its own class over the same memory."""
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
        return False  # the class's own __torch_function__ would be hidden
    try:
        probe: Any = make_subclass(cls, torch.empty(0))
        probe.__class__ = type(cls.__name__, (cls, _WaitsForGather), {})
    except TypeError:
        return False
    return True


def _waiting_class(cls: type, threads: ReaderThreads) -> Any:
    """The waiting class of ``cls``."""
    waiting = threads.classes.get(cls)
    if waiting is None:
        # cls is the first base, where let_go() finds it. So the mixin's methods are set on the class itself, to come
        # before those of cls.
        members = {name: getattr(_WaitsForGather, name) for name in ("__deepcopy__", "__reduce_ex__")}
        members["__torch_function__"] = _Look(threads)
        waiting = threads.classes[cls] = type(f"Gathering{cls.__name__}", (cls, _WaitsForGather), members)
    return waiting


@functools.cache
def reads_no_values() -> frozenset[Any]:
    """torch's functions over a parameter or a gradient that read no values, so that nothing waits."""
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
