"""Memory that ``init_fn`` has not written: recognised by the bits that it was filled with before.

A version counter alone would not do, because a program writes through ``param.data`` too, whose counter is another.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Unwritten", "fill_unwritten"]


class Unwritten(NamedTuple):
    """One tensor that came from the meta device, and that somebody is to write."""

    module: nn.Module
    name: str
    """Of the tensor in the module."""
    is_buffer: bool
    version: int
    """Of the tensor, before anybody wrote."""

    @classmethod
    def of(cls, module: nn.Module, name: str, *, is_buffer: bool) -> "Unwritten":
        """The tensor that the module registers now, which ``fill_unwritten`` has filled."""
        return cls(module, name, is_buffer, getattr(module, name)._version)

    @property
    def missing(self) -> str | None:
        """What nobody has written, in words; None: all is written, or the program has registered another tensor."""
        tensor = (self.module._buffers if self.is_buffer else self.module._parameters).get(self.name)
        if tensor is None or tensor.is_meta or not _can_hold_marks(tensor):
            return None if tensor is None or not tensor.is_meta else "is on it still"
        bits, mark = _bits(tensor.detach())
        marked = int((bits == mark).sum())
        if not marked:
            return None
        if not _is_unmistakable(tensor) and (marked < bits.numel() or tensor._version != self.version):
            return None
        return "has no value" if marked == bits.numel() else f"has no value in {marked} of {bits.numel()} elements"


@torch.no_grad()
def fill_unwritten(tensor: Tensor) -> Tensor:
    """Fill ``tensor`` with the bits by which ``Unwritten`` knows it; NaN, if it is floating-point. Returns it."""
    if _can_hold_marks(tensor):
        bits, mark = _bits(tensor)
        bits.fill_(mark)
    return tensor


_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _can_hold_marks(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.element_size() in (1, 2, 4, 8, 16)


def _is_unmistakable(tensor: Tensor) -> bool:
    """Whether no program writes an element with the bits of the mark, except by chance of one in 2^32."""
    return (tensor.is_floating_point() and tensor.element_size() > 1) or tensor.element_size() >= 4


def _bits(tensor: Tensor) -> tuple[Tensor, int]:
    """The elements as integers, in the same memory, and the mark: of floats a NaN that no computation makes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    size = tensor.element_size()
    byte = b"\xff" if tensor.is_floating_point() else b"\xa5"
    return tensor.view(_AS_INTEGERS[size]), int.from_bytes(byte * size, "little", signed=size > 1)
