"""Versions of torch and Triton: their private names, and whether a Triton kernel runs an operation.

A version that lacks a private name loses what needs it, and nothing else.
A name without an underscore stays from version to version; a private one may go in any. An import never fails for it:
where the name is absent, one warning says what is slower or missing, and a fallback takes the name's place. Where
nothing correct is possible without the name, the fallback is a stand-in, and using it raises ``RuntimeError``.

Names are fetched at import, or by a function that ``on_first_use`` returns. Neither runs in traced code: a compiler
would stop at the warning.
"""

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "HAS_TRITON",
    "TESTED_TORCH",
    "adjacent_columns",
    "capability_of",
    "device_of",
    "on_first_use",
    "private_name",
    "raise_where_absent",
    "requested_names",
    "runs_on_triton",
    "spelling_of",
    "warn_of_loss",
]

TESTED_TORCH = "2.11, 2.13 or 2.14"
"""Versions of torch that everything is tested with, for errors."""

requested_names: dict[str, bool] = {}
"""Every private name that was asked for, in all its spellings, and whether something else can take its place."""

_ABSENT: Any = object()
_STAND_IN: Any = object()


class _StandIn:
    """Takes the place of a function or class: making an object of it, or calling it, raises ``RuntimeError``."""

    name = ""
    loss = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"torch {torch.__version__} has no {cls.name}: {cls.loss}; use torch {TESTED_TORCH}")


def private_name(*spellings: str, loss: str, use: Any = _ABSENT, fallback: Any = _STAND_IN) -> Any:
    """The object behind the first of ``spellings`` that exists; ``fallback`` and one warning where none does.

    spellings  dotted names, from the package on: the name in different versions
    loss       what is slower or missing without the name: a sentence without its full stop
    use        returned in place of the object, where the name exists
    fallback   what to use without the name. By default a class that raises ``RuntimeError`` where it is called
    """
    spelling = spelling_of(*spellings, loss=loss)
    requested_names[" or ".join(spellings)] = fallback is not _STAND_IN
    if spelling is not None:
        return _find(spelling) if use is _ABSENT else use
    if fallback is not _STAND_IN:
        return fallback
    name = " or ".join(spellings)
    return type(name.rpartition(".")[2], (_StandIn,), {"name": name, "loss": loss})


def on_first_use(*spellings: str, loss: str, fallback: Any = _STAND_IN) -> Callable[[], Any]:
    """A function that returns ``private_name`` of the same arguments: for names whose import takes long."""
    requested_names[" or ".join(spellings)] = fallback is not _STAND_IN
    return functools.cache(lambda: private_name(*spellings, loss=loss, fallback=fallback))


def spelling_of(*spellings: str, loss: str) -> str | None:
    """The first of ``spellings`` that exists; None and one warning where none does."""
    requested_names[" or ".join(spellings)] = True
    for spelling in spellings:
        if _find(spelling) is not _ABSENT:
            return spelling
    warn_of_loss(f"has no {' or '.join(spellings)}", loss, spellings[0].partition(".")[0])
    return None


def warn_of_loss(fact: str, loss: str, package: str = "torch") -> None:
    """Warn that this version of ``package`` lacks a name. ``fact`` follows the version in the sentence."""
    version = getattr(sys.modules.get(package), "__version__", "")
    warnings.warn(f"{package} {version} {fact}: {loss}", RuntimeWarning, stacklevel=4)


def raise_where_absent(*fetched: Any) -> None:
    """Raise the ``RuntimeError`` of the first stand-in among what ``private_name`` has returned."""
    for each in fetched:
        if isinstance(each, type) and issubclass(each, _StandIn):
            each()


def _find(spelling: str) -> Any:
    """The object with a dotted name, or ``_ABSENT``. Imports the modules on the way."""
    first, *rest = spelling.split(".")
    path, found = first, _imported(first)
    for part in rest:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except Exception:  # AttributeError, or what a module's own __getattr__ raises
            found = _imported(path)
    return found


def _imported(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except Exception:  # whatever a module of another version raises while it is imported
        return _ABSENT


# ---- Triton kernels, or plain PyTorch. ----

HAS_TRITON: bool = importlib.util.find_spec("triton") is not None and private_name(
    "triton.tools.tensor_descriptor.TensorDescriptor",
    loss="all kernels run as plain PyTorch, slowly",
    use=True,
    fallback=False,
)
"""False without Triton, which publishes wheels for Linux on x86-64 only, and with one whose names are others."""


def runs_on_triton(operation: str, tensor: Tensor) -> bool:
    """Whether a Triton kernel runs ``operation`` on ``tensor``: on CUDA, and not for fp64, where it gains nothing.

    On CUDA without Triton the reference runs, which may wait for the device; a warning says so once per ``operation``.
    """
    if not tensor.is_cuda or tensor.dtype is torch.float64:
        return False
    if not HAS_TRITON:
        _warn_without_triton(operation)
    return HAS_TRITON


@functools.cache
def _warn_without_triton(operation: str) -> None:
    warnings.warn(
        f"{operation} runs as plain PyTorch, slowly and with waits for the device, without a Triton that fits: "
        f"pip install triton",
        RuntimeWarning,
        stacklevel=4,
    )


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the device of ``tensor`` current: Triton launches on the current CUDA device."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def adjacent_columns(tensor: Tensor) -> Tensor:
    """The tensor, copied unless its columns are adjacent; rows may have any stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
