"""``StaticBuffers``: memory that eager code fills before a replay, and whose place the graphs have captured."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["StaticBuffers"]


class StaticBuffers:
    """Buffers for inputs and gradients of outputs, given out anew once the captured order needs the last user no more.

    ``take`` and ``give_back`` are called while an order is captured, entry by entry. A buffer that is given back after
    entry i serves entries behind i. Replays in the captured order then never fill a buffer that is still to be read.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = {}
        self.nbytes = 0
        """Memory of all buffers."""

    def take(self, like: Tensor) -> Tensor:
        """A buffer of the shape, strides, dtype and device of ``like``, with any content."""
        free = self._free.get(_kind(like))
        if free:
            return free.pop()
        with torch.no_grad():
            buffer = torch.empty_like(like, requires_grad=False)
        self.nbytes += buffer.nbytes
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """No entry from here on reads ``buffer``."""
        self._free.setdefault(_kind(buffer), []).append(buffer)


def _kind(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
