"""Layouts in which no parameter is split between shards, and bucket sizes chosen for a number of buckets."""

import dataclasses
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maingrad.ddp.plan.cut import bucket_numel_for, cut, round_up
from maingrad.ddp.plan.dealing import Whole, deal, rows_of, update_cost
from maingrad.ddp.plan.layout import PARAM_ALIGNMENT, BucketLayout, GradPlan, ParamSlot, ParamSpec, plan_gradients
from maingrad.ddp.torch_grads.muon import update_flops

SIZES = st.lists(st.integers(0, 700), min_size=1, max_size=30)


def spec(
    name: str, numel: int, *, delayed: bool = False, own_bucket: bool = False, grid_name: str = "dense"
) -> ParamSpec:
    return ParamSpec(
        name=name,
        shape=(numel,),
        param_dtype=torch.bfloat16,
        grad_dtype=torch.float32,
        grid_name=grid_name,
        delayed=delayed,
        own_bucket=own_bucket,
    )


@st.composite
def models(draw: st.DrawFn) -> list[ParamSpec]:
    return [
        spec(
            f"p{index}",
            numel,
            delayed=draw(st.booleans()),
            own_bucket=draw(st.integers(0, 9)) == 0,
            grid_name=draw(st.sampled_from(("dense", "expert"))),
        )
        for index, numel in enumerate(draw(SIZES))
    ]


def shard_of(bucket: BucketLayout, slot: ParamSlot) -> int:
    return (slot.start - bucket.start) // (bucket.numel // bucket.shard_degree)


def owners(plan: GradPlan) -> dict[str, int]:
    return {slot.spec.name: shard_of(bucket, slot) for bucket in plan.buckets for slot in bucket.slots}


# ---- Parameters that are kept whole. ----


@given(models(), st.integers(1, 9), st.integers(1, 3000), st.booleans())
def test_every_whole_layout_is_sound(specs: list[ParamSpec], degree: int, bucket_numel: int, busbw: bool) -> None:
    plan = plan_gradients(
        specs,
        shard_degree=degree,
        bucket_numel=bucket_numel,
        pad_for_bus_bandwidth=busbw,
        keep_params_whole=True,
    )
    reached = {s.name: place for place, s in enumerate(specs)}
    placed = [slot.spec.name for bucket in plan.buckets for slot in bucket.slots]
    assert sorted(placed) == sorted(reached), "each parameter exactly once"

    for buffer in plan.buffers:
        owner_of_element: list[str | None] = [None] * (0 if busbw else buffer.numel)
        for bucket in buffer.buckets:
            assert bucket.keeps_params_whole
            assert bucket.numel % math.lcm(degree, 2**16 if busbw else 128) == 0
            places = [reached[slot.spec.name] for slot in bucket.slots]
            assert places == sorted(places), "slots come as backward reaches them"
            shards = [bucket.shard(rank) for rank in range(degree)]
            for slot in bucket.slots:
                assert slot.start % PARAM_ALIGNMENT == 0
                start, end = slot.start - bucket.start, slot.end - bucket.start
                assert any(first <= start and end <= last for first, last in shards), "in one shard"
                if not busbw:
                    assert owner_of_element[slot.start : slot.end] == [None] * slot.spec.numel, "overlap"
                    owner_of_element[slot.start : slot.end] = [slot.spec.name] * slot.spec.numel
        if not busbw:
            free = owner_of_element.count(None)
            assert free == sum(bucket.padding for bucket in buffer.buckets)


@given(models(), st.integers(1, 9), st.integers(1, 3000))
def test_padding_of_whole_layouts_is_bounded(specs: list[ParamSpec], degree: int, bucket_numel: int) -> None:
    plan = plan_gradients(specs, shard_degree=degree, bucket_numel=bucket_numel, keep_params_whole=True)
    for buffer in plan.buffers:
        for bucket in buffer.buckets:
            sizes = [round_up(slot.spec.numel, PARAM_ALIGNMENT) for slot in bucket.slots]
            # The fullest shard is at most (1 - 1/degree) of the largest parameter above the mean, then it is aligned.
            shard_alignment = math.lcm(64, 128 // math.gcd(128, degree))
            assert bucket.numel <= sum(sizes) + (degree - 1) * max(sizes) + degree * shard_alignment

        for delayed in (False, True):
            alike = [b for b in buffer.buckets if b.delayed is delayed and not b.slots[0].spec.own_bucket]
            held = [[slot.spec.numel for slot in bucket.slots] for bucket in alike]
            assert sum(sum(each) < degree * max(each) for each in held) <= 1, "one bucket that cannot be balanced"


def test_whole_parameters_by_hand() -> None:
    # 60, 40 and 50 elements take 64 each. Two shards: 60 to the first, 50 to the second, 40 where the cost is lower.
    plan = plan_gradients([spec("head", 60), spec("norm", 40), spec("up", 50)], shard_degree=2, keep_params_whole=True)
    (bucket,) = plan.buckets
    assert {slot.spec.name: slot.start for slot in bucket.slots} == {"head": 0, "norm": 128, "up": 192}
    assert (bucket.numel, bucket.padding) == (256, 106)
    assert [slot.spec.name for slot in bucket.slots] == ["head", "norm", "up"]


def test_the_largest_are_dealt_first() -> None:
    # Dealt in their order, 1 1 1 3 on two shards would come to 2 and 4; from the largest down to 3 and 3.
    assert deal([64, 64, 64, 192], [64, 64, 64, 192], [0, 0]) == [1, 1, 1, 0]
    plan = plan_gradients(
        [spec("a", 64), spec("b", 64), spec("c", 64), spec("d", 192)], shard_degree=2, keep_params_whole=True
    )
    assert plan.padding == 0


def test_the_costliest_goes_to_the_rank_that_has_least() -> None:
    assert deal([192, 64, 128], [3, 1, 2], [0, 0, 0]) == [0, 2, 1]
    assert deal([192, 64, 128], [3, 1, 2], [9, 7, 3]) == [2, 0, 1]


def test_equal_costs_within_the_shortest_shard() -> None:
    """Piles of elements are 192 + 64 and 128 + 128, and their costs 2 and 10; 192 and 64 swap with nothing longer."""
    assert deal([192, 128, 128, 64], [1, 5, 5, 1], [0, 0]) == [1, 0, 0, 1]
    assert deal([64] * 4, [4, 3, 2, 1], [0, 0]) == [0, 1, 1, 0]
    # With room for it, cost decides: 64 are as costly as 128, and come to the other rank.
    assert deal([128, 64, 64, 128], [4, 4, 1, 1], [0, 0]) == [0, 1, 0, 1]


def test_ranks_are_balanced_over_buckets() -> None:
    """Of two buckets with a large and a small parameter, the second has its large one where the first has not."""
    sizes = (("a", 640), ("b", 320), ("c", 512), ("d", 256))
    specs = [spec(name, numel, delayed=name in "cd") for name, numel in sizes]
    plan = plan_gradients(specs, shard_degree=2, keep_params_whole=True)
    assert len(plan.buckets) == 2
    assert owners(plan) == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_rows_of_equal_parameters_have_no_padding() -> None:
    """Each layer has two large matrices and one small for four ranks: a row has those of two layers, or of four."""
    layer = (("down", 256), ("up", 256), ("out", 64))
    specs = [spec(f"{index}.{name}", numel) for index in range(8) for name, numel in layer]
    plan = plan_gradients(specs, shard_degree=4, bucket_numel=1, keep_params_whole=True)
    assert plan.padding == 0
    assert [bucket.numel for bucket in plan.buckets] == [1024, 256, 1024, 1024, 256, 1024] or [
        bucket.numel for bucket in plan.buckets
    ] == [1024, 1024, 256, 1024, 1024, 256]


def test_rows_are_as_long_as_their_parameters_have_shards() -> None:
    specs = [spec(f"{grid_name}{index}", 128, grid_name=grid_name) for index in range(4) for grid_name in ("e", "d")]
    plan = plan_gradients(specs, shard_degree={"e": 2, "d": 4}, bucket_numel=1, keep_params_whole=True)
    assert {buffer.grid_name: [len(b.slots) for b in buffer.buckets] for buffer in plan.buffers} == {
        "e": [2, 2],
        "d": [4],
    }


def test_rows_that_share_a_bucket_come_as_backward_reaches_them() -> None:
    specs = [spec(name, numel) for name, numel in (("a", 256), ("b", 64), ("c", 256), ("d", 64))]
    (bucket,) = plan_gradients(specs, shard_degree=2, keep_params_whole=True).buckets
    assert [slot.spec.name for slot in bucket.slots] == ["a", "b", "c", "d"]
    assert (bucket.padding, len({shard_of(bucket, slot) for slot in bucket.slots[::2]})) == (0, 2)


def test_small_rows_fill_the_gaps_of_the_rest() -> None:
    """Six large matrices on four ranks: the two that are no row leave two ranks, which get the row of small ones."""
    params = [Whole(400, 400.0)] * 6 + [Whole(200, 200.0)] * 4
    assert rows_of(params, 1, 4) == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    even = [Whole(400, 400.0)] * 8 + [Whole(200, 200.0)] * 4
    assert rows_of(even, 1, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    two_rows = [Whole(400, 400.0)] * 6 + [Whole(200, 200.0)] * 8
    assert rows_of(two_rows, 1, 4) == [[0, 1, 2, 3], [6, 7, 8, 9], [4, 5, 10, 11, 12, 13]], "the last of one size"
    no_gain = [Whole(576, 576.0)] * 3 + [Whole(640, 640.0)] * 2
    assert rows_of(no_gain, 1, 3) == [[0, 1, 2], [3, 4]], "two of 576 have no place beside the other"


def test_the_work_of_an_update_counts_every_matrix_of_a_stack() -> None:
    assert [update_cost(shape) for shape in ((), (7,), (0,))] == [1.0, 7.0, 0.0]
    assert update_cost((2, 3, 4, 5)) == 6 * update_cost((4, 5)) > 0


def test_whole_stacks_of_matrices_are_rows_as_other_parameters_are() -> None:
    stacks = [dataclasses.replace(spec(f"{n}", 192), shape=(3, 8, 8), atom=64, matrices=True) for n in range(4)]
    plan = plan_gradients(stacks, shard_degree=2, bucket_numel=1, keep_params_whole=True)
    assert [[slot.spec.name for slot in bucket.slots] for bucket in plan.buckets] == [["0", "1"], ["2", "3"]]


def test_rows_come_in_the_order_in_which_backward_completes_them() -> None:
    sizes = {"a": 128, "b": 64, "c": 128}
    assert rows_of([Whole(size, float(size)) for size in sizes.values()], 128, 2) == [[1], [0, 2]]
    plan = plan_gradients(
        [spec(*each) for each in sizes.items()], shard_degree=2, bucket_numel=64, keep_params_whole=True
    )
    assert [[slot.spec.name for slot in bucket.slots] for bucket in plan.buckets] == [["b"], ["a", "c"]]


def test_small_buckets_of_the_rest_take_in_what_makes_their_shards_even() -> None:
    """The last one, 256, has its shard beside two of 128."""
    params = [Whole(size, float(size)) for size in (64, 64, 128, 128, 256)]
    assert rows_of(params, 1, 2) == [[0, 1], [2, 3, 4]]
    more = [Whole(size, float(size)) for size in (384, 256, 320, 128, 128, 64)]
    assert rows_of(more, 200, 2) == [[0, 1, 2, 3, 4, 5]], "two buckets have more padding than one"


def test_where_no_rank_has_room_the_costliest_pile_goes_to_the_rank_that_has_least() -> None:
    """Dealt by costs, 256 finds no room beside the others."""
    assert deal([256, 128, 64], [1.0, 9.0, 7.0], [9.0, 1.0]) == [0, 1, 1]
    assert deal([256, 128, 64], [1.0, 9.0, 7.0], [1.0, 9.0]) == [1, 0, 0]


def test_balance_counts_all_buffers_of_a_group_and_no_other_group() -> None:
    expert = spec("expert", 640, grid_name="expert")
    half = spec("bf16", 640)
    full = ParamSpec(name="fp32", shape=(640,), param_dtype=torch.float32, grad_dtype=torch.float32)
    plan = plan_gradients([expert, half, full], shard_degree=2, keep_params_whole=True)
    assert owners(plan) == {"expert": 0, "bf16": 0, "fp32": 1}


def test_small_buckets_wait_until_shards_can_be_even() -> None:
    # Closed at 1 element, each of these would be its own bucket, and three of its four shards nothing but padding.
    plan = plan_gradients(
        [spec(f"p{i}", 128) for i in range(9)], shard_degree=4, bucket_numel=1, keep_params_whole=True
    )
    assert [len(bucket.slots) for bucket in plan.buckets] == [4, 4, 1]
    assert [bucket.numel for bucket in plan.buckets] == [512, 512, 512]


def test_shards_start_at_multiples_of_64_even_where_nothing_is_in_them() -> None:
    """An eighth of 128 would be 16; the empty parameter goes to rank 1, which has less than rank 0."""
    plan = plan_gradients(
        [spec("weight", 64, own_bucket=True), spec("empty", 0)], shard_degree=8, keep_params_whole=True
    )
    assert [(bucket.numel, bucket.slots[0].start) for bucket in plan.buckets] == [(512, 0), (512, 512 + 64)]


def test_the_last_bucket_takes_in_those_before_it() -> None:
    # 400 at the end: with 4 shards it needs 1600 elements beside it.
    assert cut([100] * 16 + [400], 1, [400] * 16 + [1600]) == [4, 13]
    assert cut([100] * 16 + [400], 1) == [1] * 17
    assert cut([100, 100, 900], 1, [400, 400, 3600]) == [3]


@given(models(), st.integers(1, 3000))
def test_one_rank_lays_out_the_same_either_way(specs: list[ParamSpec], bucket_numel: int) -> None:
    whole = plan_gradients(specs, bucket_numel=bucket_numel, keep_params_whole=True)
    split = plan_gradients(specs, bucket_numel=bucket_numel)
    assert [(b.index, b.start, b.end, b.slots) for b in whole.buckets] == [
        (b.index, b.start, b.end, b.slots) for b in split.buckets
    ]
    assert whole.fingerprint != split.fingerprint, "ranks that disagree about it are found out"


def test_the_shard_of_a_parameter_is_found() -> None:  # by the helper that the tests above rely on
    def bucket(start: int) -> BucketLayout:
        slots = (ParamSlot(spec=spec("weight", 100), start=start),)
        return BucketLayout(index=0, start=0, end=256, shard_degree=2, slots=slots, keeps_params_whole=True)

    assert [shard_of(b, b.slots[0]) for b in (bucket(0), bucket(28), bucket(128), bucket(156))] == [0, 0, 1, 1]


# ---- Published models: the work of Muon on each rank, and padding. ----


def matrices_of(name: str) -> tuple[list[ParamSpec], dict[str, int]]:
    """A model's matrices as backward reaches them, and in how many parts each is orthogonalised."""
    layers, hidden, attention, shapes = {
        "Llama-8B": (32, 4096, (4096, 1024), {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}),
        "Llama-70B": (80, 8192, (8192, 1024), {"gate": (28672, 8192), "up": (28672, 8192), "down": (8192, 28672)}),
        "Qwen3-30B-A3B": (48, 2048, (4096, 512), {"gate_up": (128, 1536, 2048), "down": (128, 2048, 768)}),
    }[name]
    query, key = attention
    layer = {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query), **shapes}
    specs = [
        ParamSpec(
            name=f"{index}.{local}",
            shape=shape,
            param_dtype=torch.bfloat16,
            grad_dtype=torch.float32,
            whole=len(shape) == 2,
            matrices=len(shape) == 3,
            atom=math.prod(shape[-2:]) if len(shape) == 3 else 1,
        )
        for index in reversed(range(layers))
        for local, shape in reversed(layer.items())
    ]
    return specs, {spec.name: 2 if spec.name.endswith("gate_up") else 1 for spec in specs}


@pytest.mark.parametrize("degree", [8, 16, 32, 64])
@pytest.mark.parametrize("name", ["Llama-8B", "Llama-70B", "Qwen3-30B-A3B"])
def test_ranks_have_about_equal_work(name: str, degree: int) -> None:
    """The largest rank's over the mean, and padding. 96 large matrices of Llama-8B on 64 ranks are one and a half."""
    specs, split = matrices_of(name)
    plan = plan_gradients(specs, shard_degree=degree)
    costs, numels = [0.0] * degree, [0] * degree
    for bucket in plan.buckets:
        for slot in bucket.slots:
            groups = {"split": split[slot.spec.name]}
            for rank in range(degree):
                held = slot.range.counted_from(bucket.start).intersect(bucket.shard(rank)).numel
                assert held % (slot.spec.atom if slot.spec.matrices else slot.spec.numel) == 0, "matrices are whole"
                numels[rank] += held
                costs[rank] += update_flops(slot.spec.shape, groups) * held / slot.spec.numel
    elements = sum(numels)
    assert elements == sum(spec.numel for spec in specs)
    assert max(costs) * degree / sum(costs) <= 1.06
    assert max(numels) * degree / elements <= 1.3
    assert plan.padding / elements <= (0.08 if (name, degree) == ("Llama-8B", 64) else 0.02)


# ---- A number of buckets. ----


def count(sizes: Sequence[int], bucket_numel: int) -> int:
    return len(cut(sizes, bucket_numel))


@given(st.lists(SIZES, min_size=1, max_size=2), st.integers(1, 12))
def test_the_size_for_a_number_of_buckets_is_the_smallest(runs: list[list[int]], num_buckets: int) -> None:
    most = max(num_buckets, len(runs))
    sizes = range(1, max(map(sum, runs)) + 2)
    expected = next(size for size in sizes if sum(count(run, size) for run in runs) <= most)
    assert bucket_numel_for(runs, num_buckets) == expected


@given(models(), st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_at_most_so_many_buckets_come_out(specs: list[ParamSpec], num_buckets: int, degree: int, whole: bool) -> None:
    plan = plan_gradients(specs, shard_degree=degree, num_buckets=num_buckets, keep_params_whole=whole)
    for buffer in plan.buffers:
        members = [slot.spec for bucket in buffer.buckets for slot in bucket.slots]
        alone = sum(s.own_bucket for s in members)
        needed = alone + len({s.delayed for s in members if not s.own_bucket})
        assert len(buffer.buckets) <= max(num_buckets, needed)


@pytest.mark.parametrize("num_buckets", [4, 8])
def test_many_unequal_parameters_make_at_most_so_many_buckets(num_buckets: int) -> None:
    drawn = random.Random(0)
    specs = [spec(f"p{i}", 4096 * drawn.randint(4, 40) * drawn.randint(4, 40)) for i in range(300)]
    plan = plan_gradients(specs, shard_degree=2, num_buckets=num_buckets, keep_params_whole=True)
    assert len(plan.buckets) <= num_buckets


@pytest.mark.parametrize(
    ("num_buckets", "lengths"),
    [
        (1, [10]),
        (2, [5, 5]),
        (3, [4, 4, 2]),
        (4, [3, 3, 3, 1]),
        (5, [2, 2, 2, 2, 2]),
        (6, [2, 2, 2, 2, 2]),  # the next more even cut has ten
        (9, [2, 2, 2, 2, 2]),
        (10, [1] * 10),
        (11, [1] * 10),
    ],
)
def test_ten_equal_layers(num_buckets: int, lengths: list[int]) -> None:
    plan = plan_gradients([spec(f"p{i}", 128) for i in range(10)], num_buckets=num_buckets)
    assert [len(bucket.slots) for bucket in plan.buckets] == lengths


def test_a_large_parameter_leaves_the_other_buckets_to_the_small_ones() -> None:
    # A quarter of all, 275, would make two buckets: 1000, and 10 times 10.
    plan = plan_gradients([spec("embedding", 1000), *(spec(f"p{i}", 10) for i in range(10))], num_buckets=4)
    assert [len(bucket.slots) for bucket in plan.buckets] == [1, 4, 4, 2]


def test_the_size_grows_until_the_rest_of_whole_parameters_leaves_no_bucket_too_many() -> None:
    numels = [192, 2112, 192, 448, 2112, 448, 2112, 576, 448, 768, 576]
    specs = [spec(f"p{index}", numel) for index, numel in enumerate(numels)]
    assert len(plan_gradients(specs, shard_degree=2, num_buckets=3, keep_params_whole=True).buckets) == 3


def test_each_buffer_has_so_many_buckets_and_those_apart_count() -> None:
    specs = [spec(f"p{i}", 64) for i in range(6)] + [spec("tied", 64, own_bucket=True)]
    specs += [spec(f"e{i}", 64, grid_name="expert") for i in range(6)]
    plan = plan_gradients(specs, num_buckets=3)
    assert {b.grid_name: [len(bucket.slots) for bucket in b.buckets] for b in plan.buffers} == {
        "dense": [3, 3, 1],
        "expert": [2, 2, 2],
    }


def test_delayed_and_undelayed_have_a_bucket_each_all_the_same() -> None:
    plan = plan_gradients([spec("a", 8), spec("b", 8, delayed=True), spec("c", 8)], num_buckets=1)
    assert [[slot.spec.name for slot in bucket.slots] for bucket in plan.buckets] == [["a", "c"], ["b"]]


@pytest.mark.parametrize("num_buckets", [1, 2])
def test_too_few_buckets_of_whole_parameters_are_as_few_as_can_be(num_buckets: int) -> None:
    specs = [spec("a", 8), spec("b", 8, delayed=True), spec("c", 9), spec("tied", 8, own_bucket=True)]
    plan = plan_gradients(specs, shard_degree=2, num_buckets=num_buckets, keep_params_whole=True)
    assert [[slot.spec.name for slot in bucket.slots] for bucket in plan.buckets] == [["a", "c"], ["tied"], ["b"]]


def test_buckets_of_delayed_parameters_count_where_they_come_between_others() -> None:
    """Four in a row would make two buckets of two; three and one do not."""
    plan = plan_gradients([spec(name, 128, delayed=name == "b") for name in "abcd"], num_buckets=2)
    assert [[slot.spec.name for slot in bucket.slots] for bucket in plan.buckets] == [["a", "c", "d"], ["b"]]
