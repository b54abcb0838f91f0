"""Parameters that wait for their gather at their first use.

While a gather is in flight, the class of its parameters is the *waiting class*: a subclass of their own class that adds
``__torch_function__``. torch calls that before any of its functions reads the parameter: in a module's forward, in
``state_dict``, in an average over a list of parameters. torch's lazy modules change a parameter's class too.
"""

import copy
import functools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ..torch_internals import DisableTorchFunctionSubclass, disabled_torch_function, make_subclass, tree_leaves

__all__ = ["Gather", "after_gather", "gathers_of", "have_wait", "let_go", "reads_no_values", "waiting_class"]

_GATHER = "_maingrad_gather"


class Gather(Protocol):
    """What a parameter waits for; ``ParamGather`` is one."""

    def wait(self) -> None:
        """Return when the parameters may be read, and have their own class again."""
        ...


def have_wait(param: Tensor, gather: Gather) -> None:
    """Have ``param`` wait for ``gather`` at its next use. Its class must have a ``waiting_class``."""
    param.__dict__[_GATHER] = gather  # before the waiting class, which reads it
    param.__class__ = waiting_class(type(param))


def let_go(param: Tensor) -> None:
    """Give ``param`` its own class back."""
    if isinstance(param, _WaitsForGather):
        param.__class__ = type(param).__bases__[1]
    param.__dict__.pop(_GATHER, None)


def after_gather(value: Any) -> Any:
    """``value``, after its gather where it is a parameter that waits."""
    if isinstance(value, _WaitsForGather):
        value.__dict__[_GATHER].wait()
    return value


def gathers_of(values: Iterable[Any]) -> list[Any]:
    """The gathers that parameters among ``values`` wait for, each once."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, _WaitsForGather):
            gather = value.__dict__[_GATHER]
            if gather not in found:
                found.append(gather)
    return found


class _WaitsForGather:
    """Mixed into a parameter's own class while its gather is in flight."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch calls this instead of ``func``."""
        kwargs = kwargs or {}
        if func in reads_no_values():
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for value in list(_waiting_among((args, kwargs))) or tree_leaves((args, kwargs)):
            after_gather(value)
        return func(*args, **kwargs)

    # Copies and pickles are made of type(self), which must be the parameter's own class then.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(after_gather(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return after_gather(self).__reduce_ex__(protocol)


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


@functools.cache
def waiting_class(cls: Any) -> Any:
    """The waiting class of parameters of class ``cls``.

    None for a class with a ``__torch_function__`` of its own, and where Python refuses to assign ``__class__``.
    """
    if issubclass(cls, _WaitsForGather):
        return cls
    if cls.__torch_function__ is not disabled_torch_function:
        return None  # the class's own __torch_function__ would be hidden
    try:
        waiting = type(f"Gathering{cls.__name__}", (_WaitsForGather, cls), {})
        probe: Any = make_subclass(cls, torch.empty(0))
        probe.__class__ = waiting
    except TypeError:
        return None
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
