"""Writes a range of a flattened tensor as boxes of the tensor, which torch.distributed.checkpoint (DCP) needs.

Elements [3, 17) of a [4, 5] tensor are the end of row 0, rows 1 and 2, and the start of row 3::

    . . . a a        offsets (0, 3), sizes (1, 2)
    b b b b b        offsets (1, 0), sizes (2, 5)
    b b b b b
    c c . . .        offsets (3, 0), sizes (1, 2)

The elements of each box are consecutive, so that each box is a view of the flat memory. The boxes of ranges that
follow each other tile the tensor.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ...plan.ranges import Range

__all__ = ["Box", "TensorSlice", "boxes_of_range", "check_tiling", "flat_range"]


class Box(NamedTuple):
    """A box of an N-d tensor whose elements are consecutive in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """First element of the box in the flattened tensor."""

    @property
    def end(self) -> int:
        """First element behind the box in the flattened tensor."""
        return self.start + math.prod(self.sizes)


class TensorSlice(NamedTuple):
    """Elements [start, end) of a checkpoint's tensor, in this rank's memory: to be saved, or to be filled by a load."""

    path: tuple[str, ...]
    """Keys of the tensor in the nested dict that DCP's tools read: ("model", "0.weight")."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    end: int
    data: Tensor
    """[end - start] the elements; or all elements, in the tensor's shape."""

    @property
    def range(self) -> Range:
        """The elements, counted in the flattened tensor."""
        return Range(self.start, self.end)

    @property
    def key(self) -> str:
        """The tensor's name in the files, which DCP makes of ``path``."""
        return ".".join(self.path)

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """Each box, with the box's elements as a view of ``data`` in the box's sizes."""
        for box in boxes_of_range(self.shape, self.start, self.end):
            if self.data.shape == box.sizes:
                yield box, self.data
            else:
                yield box, self.data[box.start - self.start : box.end - self.start].view(box.sizes)


def boxes_of_range(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Elements [start, end) of a row-major tensor of this shape as at most 2 N - 1 boxes, in ascending order.

    An empty range has no box; a tensor without elements is one empty box.
    Raises ``ValueError`` where the range reaches outside the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= start <= end <= numel:
        raise ValueError(f"elements [{start}, {end}) are not in a tensor of shape {list(shape)}")
    if numel == 0:
        return [Box((0,) * len(shape), tuple(shape), 0)]
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
        boxes.append(Box(offsets, sizes, start))
        start = boxes[-1].end
    return boxes


def flat_range(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Range:
    """The elements of a box, counted in the flattened tensor.

    Raises ``ValueError`` where the box reaches outside the tensor, or where its elements are not consecutive.
    """
    inside = len(shape) == len(offsets) == len(sizes) and all(
        min(offset, size) >= 0 and offset + size <= whole
        for whole, offset, size in zip(shape, offsets, sizes, strict=True)
    )
    # Behind the first dim of more than one step, the box must have all of every dim.
    first = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    if not inside or tuple(sizes[first + 1 :]) != tuple(shape[first + 1 :]):
        raise ValueError(
            f"offsets {list(offsets)} and sizes {list(sizes)} are no run of elements of shape {list(shape)}"
        )
    start = sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))
    return Range(start, start + math.prod(sizes))


def check_tiling(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Raise ``ValueError`` unless every element of the tensor is in exactly one of the boxes (offsets, sizes)."""
    position, numel = 0, math.prod(shape)
    for start, end in sorted(flat_range(shape, offsets, sizes) for offsets, sizes in boxes):
        if start != position:
            what = "missing" if start > position else "there twice"
            raise ValueError(f"elements [{min(start, position)}, {max(start, position)}) are {what}")
        position = end
    if position != numel:
        raise ValueError(f"elements [{position}, {numel}) are missing")
