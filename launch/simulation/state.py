"""State that a real rank has per process: random state, default dtype, grad mode, autocast, device.

Random generators and the default dtype belong to the process, so they are exchanged whenever another rank goes on
(`ProcessState`). Grad mode, autocast and default devices belong to the thread. A new rank's thread copies them once
from the thread that called ``simulate`` (`ThreadState`), as a forked process would.
"""

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

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
    numpy: "_NumpyState | None"
    """None until numpy.random is imported."""
    dtype: torch.dtype

    @classmethod
    def capture(cls) -> "ProcessState":
        cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        return cls(
            torch.default_generator.get_state(),
            tuple(generator.get_state() for generator in cuda),
            random.getstate(),
            _NumpyState.capture(),
            torch.get_default_dtype(),
        )

    def restore(self) -> None:
        torch.default_generator.set_state(self.torch_cpu)
        for generator, state in zip(torch.cuda.default_generators, self.torch_cuda, strict=False):
            generator.set_state(state)
        random.setstate(self.python)
        if self.numpy is not None:
            self.numpy.restore()
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)


class _NumpyState:
    """The state of numpy's default generator. numpy takes 0.1 ms to tell it, as long as all else of a change of ranks:
    it is asked only where the generator has drawn."""

    _last: "ClassVar[_NumpyState | None]" = None
    """What was told or set last."""

    def __init__(self, state: Any, words: bytes | None) -> None:
        self.state = state
        """``numpy.random.get_state(legacy=False)``."""
        self._words = words
        """The generator's memory, in which each draw changes something; None: it cannot be compared."""

    @classmethod
    def capture(cls) -> "_NumpyState | None":
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is None:
            return None
        generator, words = numpy_random.get_bit_generator(), None
        if isinstance(generator, numpy_random.MT19937):  # 624 words and a position
            words = ctypes.string_at(generator.ctypes.state_address, 625 * 4)
        if cls._last is None or words is None or words != cls._last._words:
            state = numpy_random.get_state(legacy=False)
            # A second normal number, which lies ready, is taken without a change of the words.
            cls._last = cls(state, None if state["has_gauss"] else words)
        return cls._last

    def restore(self) -> None:
        if self is not self.capture():
            sys.modules["numpy.random"].set_state(self.state)
            type(self)._last = self


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
