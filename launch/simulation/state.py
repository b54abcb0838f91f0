"""State that a real rank has per process: random state, default dtype, grad mode, autocast, device.

Random generators and the default dtype belong to the process, so they are exchanged whenever another rank goes on
(`ProcessState`). Grad mode, autocast and default devices belong to the thread. A new rank's thread copies them once
from the thread that called ``simulate`` (`ThreadState`), as a forked process would.
"""

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["ProcessState", "ThreadState"]

_AUTOCAST_DEVICES = ("cpu", "cuda")


class ProcessState(NamedTuple):
    """The process's default random state and dtype at one moment."""

    torch_cpu: Tensor
    torch_cuda: tuple[Tensor, ...]
    """One generator state per device; empty until the process has used CUDA."""
    python: Any
    numpy: Any
    """numpy's generator state; None until numpy.random is imported."""
    dtype: torch.dtype

    @classmethod
    def capture(cls) -> "ProcessState":
        numpy_random = sys.modules.get("numpy.random")
        cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        return cls(
            torch.default_generator.get_state(),
            tuple(generator.get_state() for generator in cuda),
            random.getstate(),
            None if numpy_random is None else numpy_random.get_state(),
            torch.get_default_dtype(),
        )

    def restore(self) -> None:
        torch.default_generator.set_state(self.torch_cpu)
        for generator, state in zip(torch.cuda.default_generators, self.torch_cuda, strict=False):
            generator.set_state(state)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)


class ThreadState(NamedTuple):
    """The thread-local modes of torch that a forked process would keep."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    device: torch.device
    cuda_device: int | None

    @classmethod
    def capture(cls) -> "ThreadState":
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES),
            torch.get_default_device(),
            torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        )

    def run(self, fn: Callable[[], Any]) -> Any:
        """Call ``fn`` in a fresh thread as if it ran in the captured one."""
        if self.cuda_device is not None:
            torch.cuda.set_device(self.cuda_device)
        if torch.get_default_device() != self.device:
            torch.set_default_device(self.device)
        # A backward must run on this thread: a thread of the autograd engine cannot pass the baton.
        torch.autograd.set_multithreading_enabled(False)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad and not self.inference):
            return fn()
