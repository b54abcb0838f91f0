"""CUDA streams at the host cost that hooks can bear: torch makes an object each time, and looks up devices.

A stream's object is made once; what is asked for every time is its number.
"""

from types import TracebackType

import torch

from ..torch_internals import current_raw_stream

__all__ = ["OnStream", "current_stream"]

_known: dict[tuple[int, int], torch.cuda.Stream] = {}
"""By device and number, which is the address of a stream that torch never frees, or one that its owner keeps."""


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream of a CUDA device that has an index."""
    index: int = device.index
    raw: int = current_raw_stream(index)
    stream = _known.get((index, raw))
    if stream is None:
        stream = _known[index, raw] = torch.cuda.current_stream(device)
    return stream


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
