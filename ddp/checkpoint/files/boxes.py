"""Boxes: the parts of a tensor that files and ranks hold, each by its offsets and sizes along every dim.

A rank of a sharded model holds a range of the flattened tensor, which is a few boxes. Elements [3, 17) of a [4, 5]
tensor are the end of row 0, rows 1 and 2, and the start of row 3::

    . . . a a        offsets (0, 3), sizes (1, 2)
    b b b b b        offsets (1, 0), sizes (2, 5)
    b b b b b
    c c . . .        offsets (3, 0), sizes (1, 2)

The elements of each of these boxes are consecutive, so that each is a view of the flat memory. A column slice of a
matrix is one box too, and no range.

A tensor-parallel rank flattens its local tensor, which is some boxes of the whole one (``ModelSlice``). Files and
manifests have boxes of whole tensors only: each box of the local tensor is cut where these boxes meet, and moved to
where its elements are in the whole.
"""

import math
import operator
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...plan.cut import Box
from ...plan.model_slice import ModelSlice

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
    name: str,
    shape: tuple[int, ...],
    start: int,
    flat: Mapping[str, Tensor],
    cut: ModelSlice | None = None,
    **dtypes: torch.dtype,
) -> Parts:
    """Elements from ``start`` of flattened tensors of this shape, which are in ``flat``.

    cut     what these tensors are of the whole ones; None: all
    dtypes  that a save rounds to, where these are not the dtypes of ``flat``
    """
    kinds = tuple((section, dtypes.get(section, data.dtype)) for section, data in flat.items())
    parts, at = Parts(), 0
    for box in boxes_of_range(shape, start, start + max(map(Tensor.numel, flat.values()), default=0)):
        views = {section: data[at : at + box.numel].view(box.sizes) for section, data in flat.items()}
        parts |= _parts_of_box(name, shape, box, kinds, views, cut)
        at += box.numel
    return parts


def part_of_whole(name: str, section: str, tensor: Tensor, cut: ModelSlice | None = None) -> Parts:
    """All elements of a tensor.

    cut  what the tensor is of the whole one; None: all
    """
    shape = tuple(tensor.shape)
    box = Box((0,) * len(shape), shape)
    return _parts_of_box(name, shape, box, ((section, tensor.dtype),), {section: tensor}, cut)


def _parts_of_box(
    name: str,
    shape: tuple[int, ...],
    box: Box,
    kinds: tuple[tuple[str, torch.dtype], ...],
    views: Mapping[str, Tensor],
    cut: ModelSlice | None,
) -> Parts:
    """The elements ``views`` of a box of the local tensor, as boxes of the whole one."""
    if cut is None:
        return {Part(name, shape, box, kinds): dict(views)}
    return {
        Part(name, cut.shape, there, kinds): {section: box.view_of(here, view) for section, view in views.items()}
        for here, there in _in_whole(box, cut)
    }


def _in_whole(box: Box, cut: ModelSlice) -> Iterator[tuple[Box, Box]]:
    """The parts of a box of the local tensor, each where it is in the local tensor, and in the whole one."""
    if not math.prod(cut.shape):
        yield box, Box((0,) * len(cut.shape), cut.shape)  # stored, so that its dtype is known
    at = 0  # along the dim that is cut, where ``block`` begins in the local tensor
    for block in cut.boxes:
        offsets = tuple(at if dim == cut.dim else 0 for dim in range(len(block.sizes)))
        here = box.intersect(Box(offsets, block.sizes))
        if here is not None:
            moved = map(operator.sub, map(operator.add, here.offsets, block.offsets), offsets)
            yield here, Box(tuple(moved), here.sizes)
        if cut.dim is not None:
            at += block.sizes[cut.dim]


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
