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
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...plan.cut import Box

__all__ = ["Box", "Part", "Parts", "boxes_of_range", "check_tiling", "part_of_whole", "parts_of_range"]


class Part(NamedTuple):
    """A box of a parameter or buffer, with its master and state, which a rank holds: to be saved, or to be filled."""

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    dtypes: tuple[tuple[str, torch.dtype], ...]
    """What is there, "model", "master" or "state.KEY" of the optimizer, and the dtype that a save rounds it to."""


Parts = dict[Part, dict[str, Tensor]]
"""Parts, and the elements of "model", "master", "state.KEY" in this rank's memory, in the box's sizes."""


def parts_of_range(
    name: str, shape: tuple[int, ...], start: int, flat: Mapping[str, Tensor], **dtypes: torch.dtype
) -> Parts:
    """Elements from ``start`` of flattened tensors, which are in ``flat``.

    dtypes  that a save rounds to, where these are not the dtypes of ``flat``
    """
    kinds = tuple((section, dtypes.get(section, data.dtype)) for section, data in flat.items())
    parts, at = {}, 0
    for box in boxes_of_range(shape, start, start + max(map(Tensor.numel, flat.values()), default=0)):
        views = {section: data[at : at + box.numel].view(box.sizes) for section, data in flat.items()}
        parts[Part(name, shape, box, kinds)] = views
        at += box.numel
    return parts


def part_of_whole(name: str, section: str, tensor: Tensor) -> Parts:
    """All elements of a tensor."""
    shape = tuple(tensor.shape)
    return {Part(name, shape, Box((0,) * len(shape), shape), ((section, tensor.dtype),)): {section: tensor}}


def boxes_of_range(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Elements [start, end) of a row-major tensor of this shape as at most 2 N - 1 boxes, in ascending order.

    An empty range has no box; a tensor without elements is one empty box.
    Raises ``ValueError`` where the range reaches outside the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= start <= end <= numel:
        raise ValueError(f"elements [{start}, {end}) are not in a tensor of shape {list(shape)}")
    if end - start == numel:
        return [Box((0,) * len(shape), tuple(shape))]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    boxes = []
    while start < end:
        # The box extends along the outermost dim of which a whole step starts at ``start`` and ends in the range.
        dim = next(dim for dim, stride in enumerate(strides) if start % stride == 0 and start + stride <= end)
        offsets = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        steps = min((end - start) // strides[dim], shape[dim] - offsets[dim])
        boxes.append(Box(offsets, (*[1] * dim, steps, *shape[dim + 1 :])))
        start += boxes[-1].numel
    return boxes


def check_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise ``ValueError`` unless every element of the tensor is in exactly one of the boxes.

    Each place along each dim gets a random weight, and an element the product of its places' weights. The boxes' sums
    of weights add up to the tensor's where they tile it, and else with a chance of 1 in 2^55 (Schwartz 1980).
    """
    for box in boxes:
        if not all(
            0 <= at <= at + size <= length for at, size, length in zip(box.offsets, box.sizes, shape, strict=True)
        ):
            raise ValueError(f"offsets {list(box.offsets)} and sizes {list(box.sizes)} are not in shape {list(shape)}")
    missing = math.prod(shape) - sum(box.numel for box in boxes)
    if missing:
        raise ValueError(f"{abs(missing)} elements are {'missing' if missing > 0 else 'there twice'}")
    before: dict[tuple[int, int], int] = defaultdict(lambda: secrets.randbits(61))  # weights along a dim up to a place

    def weight(box: Box) -> int:
        sides = enumerate(zip(box.offsets, box.ends, strict=True))
        return math.prod(before[dim, end] - before[dim, at] for dim, (at, end) in sides)

    if sum(map(weight, boxes)) != weight(Box((0,) * len(shape), tuple(shape))):
        raise ValueError("elements are there twice, and as many are missing")
