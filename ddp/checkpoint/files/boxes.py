"""A range of a flattened tensor as boxes of the tensor: how a flat shard is written in the tensor's own coordinates.

Elements [3, 17) of a [4, 5] tensor are the end of row 0, rows 1 and 2, and the start of row 3::

    . . . a a        offsets (0, 3), sizes (1, 2)
    b b b b b        offsets (1, 0), sizes (2, 5)
    b b b b b
    c c . . .        offsets (3, 0), sizes (1, 2)

Each box is a run of consecutive elements itself, so that it is a view of the flat memory, and the boxes of ranges that
follow each other tile the tensor.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["Box", "TensorSlice", "boxes_of_range", "check_tiling", "flat_range"]


class Box(NamedTuple):
    """A box of an N-d tensor, of consecutive elements in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Its first element in the flattened tensor."""

    @property
    def end(self) -> int:
        """First element behind it in the flattened tensor."""
        return self.start + math.prod(self.sizes)


class TensorSlice(NamedTuple):
    """Elements [start, end) of a stored tensor, as this rank holds them."""

    path: tuple[str, ...]
    """Where the tensor stands in the nested dict that DCP's tools read: ("model", "0.weight")."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    end: int
    data: Tensor
    """The elements: [end - start], or, where they are all, of the tensor's shape."""

    @property
    def key(self) -> str:
        """The name in the file, which DCP makes of ``path``."""
        return ".".join(self.path)

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """Each box with its view of ``data``, in the box's sizes."""
        for box in boxes_of_range(self.shape, self.start, self.end):
            if self.data.shape == box.sizes:
                yield box, self.data
            else:
                yield box, self.data[box.start - self.start : box.end - self.start].view(box.sizes)


def boxes_of_range(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Elements [start, end) of a row-major tensor of this shape as at most 2 N - 1 boxes, in ascending order.

    An empty range has no box, but for a tensor without elements, which is one empty box itself.
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
        # The outermost dim along which a whole step begins here and fits: the box extends as far as it can there.
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


def flat_range(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """[start, end) of a box in the flattened tensor.

    Raises ``ValueError`` where it reaches outside the tensor, or where its elements do not follow each other.
    """
    inside = len(shape) == len(offsets) == len(sizes) and all(
        min(offset, size) >= 0 and offset + size <= whole
        for whole, offset, size in zip(shape, offsets, sizes, strict=True)
    )
    # Behind the first dim of more than one step every dim must be whole.
    first = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    if not inside or tuple(sizes[first + 1 :]) != tuple(shape[first + 1 :]):
        raise ValueError(
            f"offsets {list(offsets)} and sizes {list(sizes)} are no run of elements of shape {list(shape)}"
        )
    start = sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))
    return start, start + math.prod(sizes)


def check_tiling(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Raise ``ValueError`` unless the boxes (offsets, sizes) hold every element of the tensor exactly once."""
    position, numel = 0, math.prod(shape)
    for start, end in sorted(flat_range(shape, offsets, sizes) for offsets, sizes in boxes):
        if start != position:
            what = "missing" if start > position else "there twice"
            raise ValueError(f"elements [{min(start, position)}, {max(start, position)}) are {what}")
        position = end
    if position != numel:
        raise ValueError(f"elements [{position}, {numel}) are missing")
