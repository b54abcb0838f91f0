"""Parameters that wait for their gather at their first use.

While a gather is in flight, the class of its parameters is the *waiting class*: a subclass of their own class that adds
``__torch_function__``. torch calls that before any of its functions reads the parameter: in a module's forward, in
``state_dict``, in an average over a list of parameters. torch's lazy modules change a parameter's class too.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..torch_internals import DisableTorchFunctionSubclass, disabled_torch_function, make_subclass, tree_leaves

__all__ = ["have_wait", "let_go", "reads_no_values", "waiting_class"]

_WAIT = "_maingrad_wait"


def have_wait(param: Tensor, wait: Callable[[], object]) -> None:
    """Have ``param`` call ``wait`` at its next use, which calls ``let_go``. Its class must have a ``waiting_class``."""
    param.__dict__[_WAIT] = wait  # before the waiting class, which reads it
    param.__class__ = waiting_class(type(param))


def let_go(param: Tensor) -> None:
    """Give ``param`` its own class back."""
    cls: Any = type(param)  # read once: another thread may do the same
    if issubclass(cls, _WaitsForGather):
        param.__class__ = cls.__bases__[1]
    param.__dict__.pop(_WAIT, None)


def _after_gather(value: Any) -> Any:
    """``value``, after its gather where it is a parameter that waits."""
    if isinstance(value, _WaitsForGather):
        value.__dict__.get(_WAIT, bool)()  # no longer there where another thread has waited
    return value


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
        for value in tree_leaves((args, kwargs)):
            _after_gather(value)
        return func(*args, **kwargs)

    # Copies and pickles are made of type(self), which must be the parameter's own class then.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_after_gather(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _after_gather(self).__reduce_ex__(protocol)


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
