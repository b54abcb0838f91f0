"""Fails where the host reads a tensor's values, which on a GPU would wait for everything queued before it.

The CPU runs the same Python, so that the operations tell, without a GPU: those that read a scalar back, whose result's
shape depends on values, or that copy to the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostSync", "NoHostSync", "cuda_waits_are_errors"]


@contextmanager
def cuda_waits_are_errors() -> Iterator[None]:
    """torch's own check, on a GPU: whatever makes the host wait for the device raises in here."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


_READS = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.equal,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten._unique2,
    torch.ops.aten.index,
}
_METHODS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}


class HostSync(AssertionError):
    """The host read a tensor."""


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _READS:
            raise HostSync(str(func))
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS:
            raise HostSync(str(func))
        return func(*args, **(kwargs or {}))


class NoHostSync:
    """In this block ``HostSync`` is raised by whatever reads values."""

    def __enter__(self) -> None:
        self._modes = (_Operations(), _Methods())
        for mode in self._modes:
            mode.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)
