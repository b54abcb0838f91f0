"""Flat ranges as boxes: every element once, few boxes, each of them a view of the flat memory."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maingrad.ddp.checkpoint.files.boxes import Box, boxes_of_range, check_tiling, flat_range

SHAPES = st.lists(st.integers(1, 6), max_size=5).map(tuple)


@st.composite
def shape_and_cuts(draw: st.DrawFn, num_cuts: int) -> tuple[tuple[int, ...], list[int]]:
    shape = draw(SHAPES)
    return shape, sorted(draw(st.integers(0, math.prod(shape))) for _ in range(num_cuts))


@given(shape_and_cuts(2))
def test_boxes_are_the_range_and_few(drawn: tuple[tuple[int, ...], list[int]]) -> None:
    shape, (start, end) = drawn
    flat = torch.arange(math.prod(shape))
    whole = flat.view(shape)
    boxes = boxes_of_range(shape, start, end)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    seen = []
    for box in boxes:
        region = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        assert tuple(region.shape) == box.sizes
        assert torch.equal(region, flat[box.start : box.end].view(box.sizes))
        assert flat_range(shape, box.offsets, box.sizes) == (box.start, box.end)
        seen += region.flatten().tolist()
    assert seen == list(range(start, end))


@given(shape_and_cuts(3))
def test_boxes_of_ranges_that_follow_each_other_tile_the_tensor(drawn: tuple[tuple[int, ...], list[int]]) -> None:
    shape, cuts = drawn
    edges = [0, *cuts, math.prod(shape)]
    boxes = [
        (box.offsets, box.sizes)
        for start, end in itertools.pairwise(edges)
        for box in boxes_of_range(shape, start, end)
    ]
    check_tiling(shape, reversed(boxes))
    for index in range(len(boxes)):
        with pytest.raises(ValueError, match="missing"):
            check_tiling(shape, boxes[:index] + boxes[index + 1 :])
        with pytest.raises(ValueError, match="there twice"):
            check_tiling(shape, [*boxes, boxes[index]])


def test_the_drawing_in_the_docstring() -> None:
    assert boxes_of_range((4, 5), 3, 17) == [
        Box((0, 3), (1, 2), 3),
        Box((1, 0), (2, 5), 5),
        Box((3, 0), (1, 2), 15),
    ]


def test_the_bound_on_boxes_is_reached() -> None:
    """From a cube's second element to the last but one: a box out of every dim, and back."""
    for dims in range(1, 6):
        assert len(boxes_of_range((3,) * dims, 1, 3**dims - 1)) == 2 * dims - 1


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)])
def test_a_tensor_without_elements_is_one_empty_box(shape: tuple[int, ...]) -> None:
    (box,) = boxes_of_range(shape, 0, 0)
    assert box == Box((0,) * len(shape), shape, 0)
    check_tiling(shape, [(box.offsets, box.sizes)])


def test_a_scalar_is_one_box() -> None:
    assert boxes_of_range((), 0, 1) == [Box((), (), 0)]
    assert boxes_of_range((), 0, 0) == []
    with pytest.raises(ValueError, match=r"elements \[0, 1\) are missing"):
        check_tiling((), [])


@pytest.mark.parametrize("start, end", [(-1, 2), (3, 2), (0, 7), (7, 7)])
def test_a_range_outside_the_tensor_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=r"not in a tensor of shape \[2, 3\]"):
        boxes_of_range((2, 3), start, end)


@pytest.mark.parametrize(
    "offsets, sizes",
    [((0, 0), (2, 2)), ((1, 1), (1, 3)), ((0,), (3,)), ((-1, 0), (1, 3)), ((0, 3), (0, 1))],
)
def test_a_box_whose_elements_do_not_follow_each_other_is_refused(
    offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="are no run of elements"):
        flat_range((2, 3), offsets, sizes)
