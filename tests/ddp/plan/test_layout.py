"""The plan of gradient memory: properties over random models, and a few exact numbers."""

import dataclasses
import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from maingrad.ddp.plan.layout import (
    BUSBW_ALIGNMENT,
    PARAM_ALIGNMENT,
    GradPlan,
    ParamSpec,
    default_bucket_numel,
    plan_gradients,
)

DTYPES = ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float16, torch.float16))
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> list[ParamSpec]:
    count = draw(st.integers(1, 25))
    specs = []
    for index in range(count):
        param_dtype, grad_dtype = draw(st.sampled_from(DTYPES))
        specs.append(
            ParamSpec(
                name=f"layer.{index}",
                shape=draw(SHAPES),
                param_dtype=param_dtype,
                grad_dtype=grad_dtype,
                grid_name=draw(st.sampled_from(("dense", "expert"))),
                delayed=draw(st.booleans()),
                own_bucket=draw(st.integers(0, 9)) == 0,
            )
        )
    return specs


def spec(name: str, *shape: int, delayed: bool = False, own_bucket: bool = False) -> ParamSpec:
    return ParamSpec(
        name=name,
        shape=shape,
        param_dtype=torch.bfloat16,
        grad_dtype=torch.float32,
        delayed=delayed,
        own_bucket=own_bucket,
    )


def names(plan: GradPlan) -> list[list[str]]:
    return [[slot.spec.name for slot in bucket.slots] for bucket in plan.buckets]


@given(models(), st.integers(1, 9), st.integers(1, 3000), st.booleans())
def test_every_plan_is_sound(specs: list[ParamSpec], degree: int, bucket_numel: int, busbw: bool) -> None:
    plan = plan_gradients(specs, shard_degree=degree, bucket_numel=bucket_numel, pad_for_bus_bandwidth=busbw)

    placed = [slot.spec for bucket in plan.buckets for slot in bucket.slots]
    assert sorted(s.name for s in placed) == sorted(s.name for s in specs), "each parameter exactly once"
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))

    for buffer in plan.buffers:
        assert [bucket.index for bucket in buffer.buckets] == sorted(bucket.index for bucket in buffer.buckets)
        position = 0
        for bucket in buffer.buckets:
            assert bucket.start == position
            position = bucket.end
            end = bucket.start
            for slot in bucket.slots:
                assert slot.start % PARAM_ALIGNMENT == 0
                assert slot.start >= end, "parameters do not overlap"
                end = slot.end
                assert (slot.spec.param_dtype, slot.spec.grad_dtype, slot.spec.grid_name) == (
                    buffer.param_dtype,
                    buffer.grad_dtype,
                    buffer.grid_name,
                )
                assert slot.spec.delayed is bucket.delayed, "delayed and undelayed never mix"
                assert not slot.spec.own_bucket or len(bucket.slots) == 1
            assert end <= bucket.end
            alignment = math.lcm(degree, BUSBW_ALIGNMENT if busbw else 128)
            assert bucket.numel % alignment == 0
            between = (PARAM_ALIGNMENT - 1) * (len(bucket.slots) - 1)
            assert bucket.padding <= between + (alignment - 1 if end > bucket.start else alignment)
            shards = [bucket.shard(rank) for rank in range(degree)]
            assert (shards[0][0], shards[-1][1]) == (0, bucket.numel)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(shards))
            held = [slot.spec.numel for slot in bucket.slots]
            assert sum(held[:-1]) < bucket_numel, "a bucket is closed once it is large enough"
        assert buffer.numel == position
    assert plan.padding == plan.numel - sum(s.numel for s in specs)


@given(models(), st.integers(1, 9), st.integers(1, 3000))
def test_buckets_launch_in_the_order_in_which_they_fill(specs: list[ParamSpec], degree: int, bucket_numel: int) -> None:
    plan = plan_gradients(specs, shard_degree=degree, bucket_numel=bucket_numel)
    reached = {s.name: place for place, s in enumerate(specs)}
    full = [(b.delayed, max(reached[slot.spec.name] for slot in b.slots)) for b in plan.buckets]
    assert full == sorted(full)


@given(models(), st.integers(1, 9), st.integers(1, 3000))
def test_equal_inputs_give_equal_fingerprints_and_others_do_not(
    specs: list[ParamSpec], degree: int, bucket_numel: int
) -> None:
    plan = plan_gradients(specs, shard_degree=degree, bucket_numel=bucket_numel)
    again = plan_gradients(list(specs), shard_degree=degree, bucket_numel=bucket_numel)
    assert plan.fingerprint == again.fingerprint
    renamed = [*specs[:-1], ParamSpec(name="other", shape=(7, 15), param_dtype=torch.float32, grad_dtype=torch.float32)]
    assert plan_gradients(renamed, shard_degree=degree, bucket_numel=bucket_numel).fingerprint != plan.fingerprint


def test_the_docstrings_picture() -> None:
    plan = plan_gradients(
        [spec("head.weight", 60), spec("norm.weight", 40), spec("up.weight", 5, 10)], shard_degree=2, bucket_numel=100
    )
    first, second = plan.buckets
    assert names(plan) == [["head.weight", "norm.weight"], ["up.weight"]]
    assert [slot.start for slot in first.slots] == [0, 64]
    assert (first.start, first.end, first.padding) == (0, 128, 28)
    assert (second.start, second.end, second.padding) == (128, 256, 78)
    assert (first.shard(0), first.shard(1)) == ((0, 64), (64, 128))


def test_delayed_buckets_come_last_and_tied_embeddings_alone() -> None:
    specs = [spec("a", 4, delayed=True), spec("b", 4), spec("tied", 4, own_bucket=True), spec("c", 4, delayed=True)]
    assert names(plan_gradients(specs)) == [["b"], ["tied"], ["a", "c"]]


def test_stacks_of_matrices_and_others_share_no_bucket() -> None:
    stack = dataclasses.replace(spec("experts", 4, 8, 8), atom=64, matrices=True)
    plan = plan_gradients([spec("a", 4), stack, spec("b", 4)], shard_degree=2)
    assert names(plan) == [["experts"], ["a", "b"]]
    assert [bucket.keeps_matrices_whole for bucket in plan.buckets] == [True, False]


def test_a_bucket_of_stacks_waits_for_even_shards_alone() -> None:
    """Four matrices on two ranks are even. With three, a bucket waits until one matrix less is hardly shorter."""
    for experts, per_bucket in ((4, [1] * 22), (3, [11, 11])):
        stacks = [dataclasses.replace(spec(f"{index}", experts, 8, 8), atom=64, matrices=True) for index in range(22)]
        plan = plan_gradients(stacks, shard_degree=2, bucket_numel=1)
        assert [len(bucket.slots) for bucket in plan.buckets] == per_bucket


def test_the_default_bucket_grows_with_the_ranks() -> None:
    assert default_bucket_numel(8) == 40_000_000
    assert default_bucket_numel(1024) == 1_024_000_000


def test_the_default_is_that_of_the_buffers_ranks() -> None:
    specs = [spec(f"{index}", 1_000_000) for index in range(50)]
    assert len(plan_gradients(specs).buckets) == 2
    assert len(plan_gradients(specs, shard_degree=60).buckets) == 1
    experts = [dataclasses.replace(each, name=f"e{each.name}", grid_name="expert") for each in specs]
    plan = plan_gradients([*specs, *experts], shard_degree={"dense": 60, "expert": 1})
    assert {buffer.grid_name: len(buffer.buckets) for buffer in plan.buffers} == {"dense": 1, "expert": 2}


def test_whole_parameters_keep_their_matrices_whole() -> None:
    for keep in (True, False):
        (bucket,) = plan_gradients([spec("w", 4, 4)], shard_degree=2, keep_params_whole=keep).buckets
        assert bucket.keeps_matrices_whole is keep


def test_a_scalar_and_an_empty_parameter_get_a_place() -> None:
    plan = plan_gradients([spec("scalar"), spec("empty", 0)], shard_degree=3)
    (bucket,) = plan.buckets
    assert [slot.spec.numel for slot in bucket.slots] == [1, 0]
    assert bucket.numel == 384


def test_degrees_by_group() -> None:
    expert = ParamSpec(name="e", shape=(10,), param_dtype=torch.float32, grad_dtype=torch.float32, grid_name="expert")
    plan = plan_gradients([spec("d", 10), expert], shard_degree={"dense": 6, "expert": 2})
    assert {buffer.grid_name: buffer.buckets[0].shard_degree for buffer in plan.buffers} == {"dense": 6, "expert": 2}
