"""CUDA streams at the host cost that hooks can bear: torch makes an object each time, and looks up devices.

A stream's object is made once; what is asked for every time is its number.
"""

from types import TracebackType

import torch

__all__ = ["OnStream", "current_stream"]

_known: dict[tuple[int, int], torch.cuda.Stream] = {}
"""By device and number, which is the address of a stream that torch never frees, or one that its owner keeps."""


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream of a CUDA device that has an index."""
    index: int = device.index
    raw: int = torch._C._cuda_getCurrentRawStream(index)
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
        self._device: int = torch._C._cuda_getDevice()
        self._before = current_stream(self._stream.device)
        _set_stream(self._stream)

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        _set_stream(self._before)
        if self._device != self._stream.device_index:
            torch._C._cuda_setDevice(self._device)


def _set_stream(stream: torch.cuda.Stream) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
