"""Boxes: the parts of a tensor that files and ranks hold, each by its offsets and sizes along every dim.

A rank of a sharded model holds a range of the flattened tensor, which is a few boxes. Elements [3, 17) of a [4, 5]
tensor are the end of row 0, rows 1 and 2, and the start of row 3::

    . . . a a        offsets (0, 3), sizes (1, 2)
    b b b b b        offsets (1, 0), sizes (2, 5)
    b b b b b
    c c . . .        offsets (3, 0), sizes (1, 2)

The elements of each of these boxes are consecutive, so that each is a view of the flat memory. A column slice of a
matrix is one box too, and no range.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Box", "Part", "boxes_of_range", "check_tiling", "parts_of_range"]


class Box(NamedTuple):
    """Elements [offset, offset + size) along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def intersect(self, other: "Box") -> "Box | None":
        """The elements that are in both boxes of one tensor; None: no element is."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if min(sizes, default=1) > 0 else None

    def view_of(self, inner: "Box", data: Tensor) -> Tensor:
        """The elements of ``inner``, which is in this box, as a view of this box's elements ``data``."""
        return data[
            tuple(
                slice(start - offset, start - offset + size)
                for offset, start, size in zip(self.offsets, inner.offsets, inner.sizes, strict=True)
            )
        ]

    def split(self, most: int) -> "Iterator[Box]":
        """Blocks along the first dim, of about ``most`` elements each: one row at least."""
        if not self.sizes or self.numel <= most:
            yield self
            return
        rows = max(1, most * self.sizes[0] // self.numel)
        for start in range(0, self.sizes[0], rows):
            taken = min(rows, self.sizes[0] - start)
            yield Box((self.offsets[0] + start, *self.offsets[1:]), (taken, *self.sizes[1:]))

    def _ends(self) -> list[int]:
        return [offset + size for offset, size in zip(self.offsets, self.sizes, strict=True)]


class Part(NamedTuple):
    """A box of a checkpoint's tensor, in this rank's memory: to be saved, or to be filled by a load."""

    name: str
    """Name of the parameter or buffer in the checkpoint."""
    section: str
    """Which tensor of it: "model", "master", or "state.KEY" of the optimizer."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Where the box begins in the whole tensor."""
    data: Tensor
    """The elements, in the box's sizes."""
    dtype: torch.dtype
    """A save rounds the elements to this dtype when it writes them."""

    @property
    def box(self) -> Box:
        """Where in the tensor the elements are."""
        return Box(self.offsets, tuple(self.data.shape))

    @classmethod
    def whole(cls, name: str, section: str, tensor: Tensor) -> "Part":
        """All elements of a tensor."""
        return cls(name, section, tuple(tensor.shape), (0,) * tensor.ndim, tensor, tensor.dtype)


def parts_of_range(name: str, section: str, shape: tuple[int, ...], start: int, flat: Tensor) -> list[Part]:
    """Elements [start, start + flat.numel()) of a flattened tensor, which are in ``flat``."""
    parts, at = [], 0
    for box in boxes_of_range(shape, start, start + flat.numel()):
        parts.append(Part(name, section, shape, box.offsets, flat[at : at + box.numel].view(box.sizes), flat.dtype))
        at += box.numel
    return parts


def boxes_of_range(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Elements [start, end) of a row-major tensor of this shape as at most 2 N - 1 boxes, in ascending order.

    An empty range has no box; a tensor without elements is one empty box.
    Raises ``ValueError`` where the range reaches outside the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= start <= end <= numel:
        raise ValueError(f"elements [{start}, {end}) are not in a tensor of shape {list(shape)}")
    if numel == 0:
        return [Box((0,) * len(shape), tuple(shape))]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    boxes = []
    while start < end:
        # The box extends along the outermost dim of which a whole step starts at ``start`` and ends in the range.
        dim, steps = len(shape), 1
        for dim, stride in enumerate(strides):
            if start % stride == 0 and start + stride <= end:
                steps = min((end - start) // stride, shape[dim] - start // stride % shape[dim])
                break
        offsets = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        sizes = (*(1 for _ in shape[:dim]), *((steps, *shape[dim + 1 :]) if shape else ()))
        boxes.append(Box(offsets, sizes))
        start += boxes[-1].numel
    return boxes


def check_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise ``ValueError`` unless every element of the tensor is in exactly one of the boxes."""
    everything = Box((0,) * len(shape), tuple(shape))
    for box in boxes:
        if len(box.offsets) != len(shape) or (box.numel and everything.intersect(box) != box):
            raise ValueError(f"offsets {list(box.offsets)} and sizes {list(box.sizes)} are not in shape {list(shape)}")
    # Boxes are compared in their order along the dim in which most of them begin at places of their own: each with
    # those that have not ended. So 1,000 ranks' slices of rows are not half a million comparisons.
    begins = [{box.offsets[dim] for box in boxes} for dim in range(len(shape))]
    dim = max(range(len(shape)), key=lambda each: len(begins[each]), default=0)
    not_ended: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]) if shape else ():
        not_ended = [other for other in not_ended if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        twice = next(filter(None, map(box.intersect, not_ended)), None)
        if twice is not None:
            raise ValueError(f"{twice.numel} elements from {list(twice.offsets)} on are there twice")
        not_ended.append(box)
    missing = math.prod(shape) - sum(box.numel for box in boxes)
    if missing:
        raise ValueError(f"{abs(missing)} elements are {'missing' if missing > 0 else 'there twice'}")
