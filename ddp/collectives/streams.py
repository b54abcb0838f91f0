"""The current CUDA stream, blocks on another one, and whether work is captured instead of run.

Streams are found at less host time than by ``torch.cuda``'s functions. Each launch of a bucket and each gather asks for
the current stream several times, and ``torch.cuda.current_stream()`` makes a new object each time. Here each stream's
object is made once, and later calls find it by the stream's raw address. What this and ``OnStream`` save was never
measured alone.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from ..torch_internals import current_raw_stream

__all__ = ["OnStream", "capture_number", "capturing", "communication_stream", "current_stream", "is_capturing"]

_known: dict[tuple[int, int], torch.cuda.Stream] = {}
"""Stream objects by device index and raw address. torch never frees its streams, so an address means one stream."""


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream of a CUDA device that has an index."""
    index: int = device.index
    raw: int = current_raw_stream(index)
    stream = _known.get((index, raw))
    if stream is None:
        stream = _known[index, raw] = torch.cuda.current_stream(device)
    return stream


def communication_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A new stream for collectives; None on a CPU.

    Its kernels go first where a multiprocessor becomes free. Behind an optimizer's update, which has more programs than
    fit, the last reduction of an iteration would begin when the update ends.
    """
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


class OnStream:
    """A ``with`` block on ``stream``, as ``torch.cuda.stream``."""

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._device: int = torch.cuda.current_device()
        self._before = current_stream(self._stream.device)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        torch.cuda.set_stream(self._before)
        if self._device != self._stream.device_index:
            torch.cuda.set_device(self._device)


# ``torch.cuda.is_current_stream_capturing()`` asks one stream, and does not tell who captures. Here is what this
# library captures: whoever captures does the effects on the host again at each replay.

_capturing: list[tuple[int, int]] = []
"""The threads that capture, with the number of the capture. Ranks may be threads, and each captures for itself."""
_numbers = itertools.count(1)


@contextmanager
def capturing() -> Iterator[None]:
    """The block captures."""
    entry = threading.get_ident(), next(_numbers)
    _capturing.append(entry)
    try:
        yield
    finally:
        _capturing.remove(entry)


def capture_number() -> int | None:
    """Which ``capturing`` block the caller's work belongs to; 0: none, the work runs now; None: somebody else captures.

    What one capture computes is not there before its graph runs, and is overwritten when the graph runs again: it must
    not be kept for work outside.
    """
    by_thread = dict(_capturing)
    number = by_thread.get(threading.get_ident(), 0)
    if number == 0 and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return max(by_thread.values(), default=None)  # a backward of CUDA's, on a thread of autograd's
    return number


def is_capturing() -> bool:
    """Whether the caller's work belongs to a ``capturing`` block: on its thread, or in a backward of it.

    CUDA's backwards run on threads of autograd's, where the captured stream is the current one.
    """
    return bool(_capturing) and bool(capture_number())
