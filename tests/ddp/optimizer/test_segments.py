"""What each rank updates of flat buckets: segments, and slices of parameters in them. Plans alone, no ranks."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from maingrad.ddp.optimizer.flat_params import FlatBucket, inner_groups, segments_of, slices_of
from maingrad.ddp.plan.cut import Range
from maingrad.ddp.plan.layout import ParamSpec, plan_gradients

SHAPES = {"up": (7, 15), "bias": (15,), "scale": (), "mid": (15, 17), "none": (0, 4), "gain": (17,), "down": (17, 3)}


def spec(name: str, shape: tuple[int, ...], **options: Any) -> ParamSpec:
    return ParamSpec(name=name, shape=shape, param_dtype=torch.float32, grad_dtype=torch.float32, **options)


def flats_of(specs: list[ParamSpec], rank: int, degree: int, **options: Any) -> list[FlatBucket]:
    """Every element of a bucket has its place as its value, which masters have too."""
    flats = []
    for layout in plan_gradients(specs, shard_degree=degree, **options).buckets:
        params, owned = torch.arange(layout.numel).float(), layout.shard(rank)
        views = {
            slot.spec.name: params[slot.start - layout.start : slot.end - layout.start].view(slot.spec.shape)
            for slot in layout.slots
        }
        entries: Any = tuple(
            SimpleNamespace(owned=SimpleNamespace(name=name, param=nn.Parameter(view))) for name, view in views.items()
        )
        bucket: Any = SimpleNamespace(layout=layout, index=layout.index)
        part = params[slice(*owned)]
        flats.append(FlatBucket(bucket, params, Range(*owned), part, part.clone(), -part, entries))
    return flats


def check(flats: list[FlatBucket], group_of: Callable[[Any], int], is_whole: Callable[[Any], bool]) -> dict[str, int]:
    """The number of elements of each parameter that this rank updates, once all is as it should be."""
    segments = segments_of(flats, group_of, is_whole)
    state: dict[Any, Any] = {}
    slices = slices_of(flats, segments, group_of, state)
    assert [held.name for held in slices] == [entry.owned.name for flat in flats for entry in flat.bucket_params]
    for segment in segments:
        assert torch.equal(segment.master.data.view(-1), segment.flat.master[segment.start : segment.end])
        assert torch.equal(segment.grads, -segment.master.data)
        assert segment.master.data_ptr() == segment.flat.master[segment.start :].data_ptr()
        state[segment.master] = {"moment": segment.master.data * 2, "step": torch.tensor(3.0), "row": torch.ones(1, 1)}
    for held in slices:
        whole = held.bucket_param.owned.param.detach().view(-1)
        assert held.view.shape == held.bucket_param.owned.param.shape == held.shape
        assert held.view.data_ptr() == held.bucket_param.owned.param.data_ptr()
        assert torch.equal(held.param, whole[held.start : held.end])
        assert torch.equal(held.master, held.param)
        assert held.group == group_of(held.bucket_param)
        if held.segment is None:
            assert (held.start, held.end, held.offset, held.state(), held.scalars()) == (0, 0, 0, {}, {})
            assert held.updated is None
            continue
        place = slice(held.offset, held.offset + held.end - held.start)
        assert held.updated is held.segment.master
        assert held.segment.group == held.group
        assert torch.equal(held.segment.master.data.view(-1)[place], held.master)
        assert torch.equal(held.state()["moment"], held.master * 2)
        assert held.scalars()["step"] == 3.0
    for flat in flats:
        mine = [segment for segment in segments if segment.flat is flat]
        filled = [held for held in slices if held.segment in mine and held.end > held.start]
        assert sum(held.end - held.start for held in filled) <= flat.owned.numel
        assert bool(mine) is bool(filled), "padding alone has no segment"
        starts = [segment.start for segment in mine]
        assert starts == sorted(starts)
        if mine and not any(map(is_whole, flat.bucket_params)):
            assert [0, *(segment.end for segment in mine)] == [*starts, flat.owned.numel], "padding included"
            groups = [segment.group for segment in mine]
            assert all(one != other for one, other in itertools.pairwise(groups)), "few and long tensors"
    return {held.name: held.end - held.start for held in slices}


GROUPS: dict[str, Callable[[str], int]] = {
    "one group": lambda name: 0,
    "vectors apart": lambda name: int(len(SHAPES[name]) < 2),
    "by turns": lambda name: [*SHAPES].index(name) % 3,
}


@pytest.mark.parametrize("bucket_numel", [1, 200, None])
@pytest.mark.parametrize("degree", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("groups", GROUPS)
def test_ranks_together_update_each_element_once(groups: str, degree: int, bucket_numel: int | None) -> None:
    total = dict.fromkeys(SHAPES, 0)
    for rank in range(degree):
        flats = flats_of([spec(*each) for each in SHAPES.items()], rank, degree, bucket_numel=bucket_numel)
        for name, count in check(flats, lambda entry: GROUPS[groups](entry.owned.name), lambda entry: False).items():
            total[name] += count
    assert total == {name: spec(name, shape).numel for name, shape in SHAPES.items()}


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_whole_parameters_are_segments_in_their_shape(degree: int) -> None:
    owners = dict.fromkeys(SHAPES, 0)
    for rank in range(degree):
        flats = flats_of([spec(*each) for each in SHAPES.items()], rank, degree, keep_params_whole=True)
        check(flats, lambda entry: 0, lambda entry: True)
        segments = segments_of(flats, lambda entry: 0, lambda entry: True)
        for held in slices_of(flats, segments, lambda entry: 0, {}):
            if held.segment is not None:
                owners[held.name] += 1
                assert (held.offset, held.start, held.end) == (0, 0, held.segment.master.numel())
                assert held.segment.master.shape == (held.shape or (1,))
    assert owners == {name: int(spec(name, shape).numel > 0) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("degree", [2, 3])
def test_a_rank_has_whole_matrices_of_a_stack_beside_segments_of_others(degree: int) -> None:
    """In groups of their own: classes of matrices step over the stack alone."""
    specs = [spec("stack", (5, 4, 32), atom=128, matrices=True), spec("up", (7, 15)), spec("bias", (15,))]
    matrices = 0
    for rank in range(degree):
        flats = flats_of(specs, rank, degree)

        def is_stack(entry: Any) -> bool:
            return bool(entry.owned.name == "stack")

        check(flats, lambda entry: int(is_stack(entry)), is_stack)
        for segment in segments_of(flats, lambda entry: int(is_stack(entry)), is_stack):
            if segment.group == 1:
                assert segment.master.shape[1:] == (4, 32)
                matrices += segment.master.shape[0]
    assert matrices == 5


def test_a_group_of_which_this_rank_has_nothing_stays_a_group() -> None:
    flats = flats_of([spec("first", (64,)), spec("last", (64,))], 1, 2)

    def group_of(entry: Any) -> int:
        return 4 if entry.owned.name == "last" else 2

    segments = segments_of(flats, group_of, lambda entry: False)
    groups = inner_groups(segments, {2: {"lr": 0.1, "params": "first"}, 4: {"lr": 0.2}})
    assert [(group["lr"], len(group["params"])) for group in groups] == [(0.1, 0), (0.2, 1)]
    assert groups[1]["params"][0] is segments[0].master
