"""Boxes of tensors: of flat ranges, of slices along any dim, and what two of them have in common."""

import itertools
import math
import time
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maingrad.ddp.checkpoint.files.boxes import Box, boxes_of_range, check_tiling, part_of_whole, parts_of_range
from maingrad.ddp.plan.model_slice import ModelSlice

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
    parts = parts_of_range("w", shape, start, {"model": flat[start:end]})
    for box, (part, data) in zip(boxes, parts.items(), strict=True):
        region = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        assert tuple(region.shape) == box.sizes
        assert part.box == box and torch.equal(data["model"], region)
        assert data["model"].data_ptr() == flat[region.flatten()[0] :].data_ptr(), "a view of the flat memory"
        seen += region.flatten().tolist()
    assert seen == list(range(start, end))


@given(shape_and_cuts(3))
def test_boxes_of_ranges_that_follow_each_other_tile_the_tensor(drawn: tuple[tuple[int, ...], list[int]]) -> None:
    shape, cuts = drawn
    edges = [0, *cuts, math.prod(shape)]
    boxes = [box for start, end in itertools.pairwise(edges) for box in boxes_of_range(shape, start, end)]
    check_tiling(shape, boxes[::-1])
    for index in range(len(boxes)):
        with pytest.raises(ValueError, match="missing"):
            check_tiling(shape, boxes[:index] + boxes[index + 1 :])
        with pytest.raises(ValueError, match="there twice"):
            check_tiling(shape, [*boxes, boxes[index]])


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut along every dim, as tensor parallelism cuts columns and sharding rows."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    cells = itertools.product(*(itertools.pairwise(each) for each in edges))
    return shape, [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]


@given(grids(), st.randoms())
def test_cuts_along_any_dim_tile_the_tensor(drawn: tuple[tuple[int, ...], list[Box]], random: Random) -> None:
    shape, boxes = drawn
    random.shuffle(boxes)
    check_tiling(shape, boxes)
    index = random.randrange(len(boxes))
    with pytest.raises(ValueError, match="missing"):
        check_tiling(shape, boxes[:index] + boxes[index + 1 :])
    with pytest.raises(ValueError, match="there twice"):
        check_tiling(shape, [*boxes, boxes[index]])
    # As many elements as the tensor has, and one of them twice in place of another.
    if len(boxes) > 1 and boxes[0].sizes == boxes[1].sizes:
        with pytest.raises(ValueError, match="there twice"):
            check_tiling(shape, [boxes[0], *boxes[:1], *boxes[2:]])


@given(grids(), grids())
def test_two_boxes_have_in_common_what_is_in_both(one: Any, other: Any) -> None:
    (shape, boxes), (_, others) = one, other
    for first, second in itertools.product(boxes, others):
        if len(first.offsets) != len(second.offsets):
            continue
        larger = tuple(a + b for a, b in zip(shape, other[0], strict=True))
        marks = torch.zeros(larger, dtype=torch.int)
        everything = Box((0,) * len(larger), larger)
        everything.view_of(first, marks).add_(1)
        everything.view_of(second, marks).add_(1)
        both = first.intersect(second)
        assert (both is None) == (not (marks == 2).any())
        if both is not None:
            assert (everything.view_of(both, marks) == 2).all() and both.numel == (marks == 2).sum()
            assert torch.equal(first.view_of(both, everything.view_of(first, marks)), everything.view_of(both, marks))


def test_the_drawing_in_the_docstring() -> None:
    assert boxes_of_range((4, 5), 3, 17) == [
        Box((0, 3), (1, 2)),
        Box((1, 0), (2, 5)),
        Box((3, 0), (1, 2)),
    ]


def test_the_bound_on_boxes_is_reached() -> None:
    """From a cube's second element to the last but one: a box out of every dim, and back."""
    for dims in range(1, 6):
        assert len(boxes_of_range((3,) * dims, 1, 3**dims - 1)) == 2 * dims - 1


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)])
def test_a_tensor_without_elements_is_one_empty_box(shape: tuple[int, ...]) -> None:
    (box,) = boxes_of_range(shape, 0, 0)
    assert box == Box((0,) * len(shape), shape)
    check_tiling(shape, [box])


def test_a_slice_of_a_tensor_without_elements_is_stored() -> None:
    """So that its dtype is known."""
    cut = ModelSlice((0, 6), (Box((0, 3), (0, 3)),), 1, None, "slice")
    (part,) = part_of_whole("w", "model", torch.empty(0, 3), cut)
    assert part.shape == (0, 6)
    assert part.dtypes == (("model", torch.float32),)
    check_tiling((0, 6), [part.box])


@pytest.mark.parametrize("dim", [0, 1])
def test_a_load_writes_into_a_slice_of_several_blocks(dim: int) -> None:
    """As a fused projection has it. The parts are the parameter's memory, whichever dim is cut."""
    whole = torch.arange(64.0).view(8, 8)
    boxes = tuple(Box((start, 0), (2, 8)) if dim == 0 else Box((0, start), (8, 2)) for start in (2, 6))
    cut = ModelSlice((8, 8), boxes, dim, None, "slice")
    mine = torch.zeros(cut.local_shape)
    for part, views in part_of_whole("w", "model", mine, cut).items():
        views["model"].copy_(whole[tuple(map(slice, part.box.offsets, part.box.ends))])
    assert torch.equal(mine, torch.cat([whole.narrow(dim, start, 2) for start in (2, 6)], dim))


def test_a_scalar_is_one_box() -> None:
    assert boxes_of_range((), 0, 1) == [Box((), ())]
    assert boxes_of_range((), 0, 0) == []
    with pytest.raises(ValueError, match="1 elements are missing"):
        check_tiling((), [])


@pytest.mark.parametrize("start, end", [(-1, 2), (3, 2), (0, 7), (7, 7)])
def test_a_range_outside_the_tensor_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=r"not in a tensor of shape \[2, 3\]"):
        boxes_of_range((2, 3), start, end)


@pytest.mark.parametrize(
    "offsets, sizes",
    [((0, 0), (2, 4)), ((1, 1), (1, 3)), ((0,), (3,)), ((-1, 0), (1, 3)), ((0, 3), (1, 1)), ((0, 0), (2, 3, 1))],
)
def test_a_box_outside_the_tensor_is_refused(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"are not in shape \[2, 3\]|zip\(\)"):
        check_tiling((2, 3), [Box(offsets, sizes)])


def test_slices_of_ten_thousand_ranks_are_compared_in_little_time() -> None:
    """Not each with all others, in whichever dim they are cut."""
    for shape in ((4096, 1024), (1, 2**22), (2**22, 1)):
        edges = [index * math.prod(shape) // 10_000 for index in range(10_001)]
        boxes = [box for start, end in itertools.pairwise(edges) for box in boxes_of_range(shape, start, end)]
        began = time.process_time()
        check_tiling(shape, boxes)
        assert time.process_time() - began < 3.0


def test_boxes_of_many_dims_are_compared_in_little_time() -> None:
    """A hostile manifest: each dim is cut."""
    shape = (2,) * 40
    began = time.process_time()
    check_tiling(shape, boxes_of_range(shape, 0, 2**39 - 1) + boxes_of_range(shape, 2**39 - 1, 2**40))
    assert time.process_time() - began < 3.0
