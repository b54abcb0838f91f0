"""Shard borders cut no atom: properties over random parameters; small cases against every possible order."""

import itertools
import math
import time
from collections.abc import Sequence
from random import Random

import pytest
import torch
from atoms import ONE_BUCKET, models, spec, starts
from hypothesis import given, settings
from hypothesis import strategies as st

from maingrad.ddp.plan.atoms import ParamSize, arrange, atom_of, cuts_an_atom, least_shard_numel, walk
from maingrad.ddp.plan.cut import round_up
from maingrad.ddp.plan.dealing import deal
from maingrad.ddp.plan.layout import PARAM_ALIGNMENT, BucketLayout, BufferLayout, ParamSlot, ParamSpec, plan_gradients


def cut_inside(bucket: BucketLayout, slot: ParamSlot) -> list[int]:
    """Offsets into the parameter at which the bucket's shard borders cut it."""
    size = bucket.numel // bucket.shard_degree
    borders = [bucket.start + size * number for number in range(1, bucket.shard_degree)]
    return [border - slot.start for border in borders if slot.start < border < slot.end]


# ---- Atoms. ----


@pytest.mark.parametrize(
    ("shape", "kind", "atom"),
    [
        ((7, 15), "element", 1),
        ((7, 15), "row", 15),
        ((7, 15), "whole", 105),
        ((7, 15), 3, 45),
        ((7, 15), 9, 135),
        ((32, 5, 4), "row", 20),
        ((32, 5, 4), 2, 40),
        ((9,), "row", 1),
        ((9,), 4, 4),
        ((9,), "whole", 9),
        ((), "row", 1),
        ((), "whole", 1),
        ((), 128, 128),
        ((4, 0), "row", 1),
        ((4, 0), 2, 1),
        ((0, 4), "whole", 1),
    ],
)
def test_atoms_of_shapes(shape: tuple[int, ...], kind: object, atom: int) -> None:
    assert atom_of(shape, kind) == atom  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["rows", None, 1.5, True])
def test_other_kinds_are_refused(kind: object) -> None:
    with pytest.raises(ValueError, match="an atom is 'element', 'block', 'row', 'whole' or a number of rows, got"):
        atom_of((4, 4), kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, -2])
def test_a_block_without_rows_is_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"at least one row, got {rows}"):
        atom_of((4, 4), rows)


@given(st.integers(0, 40), st.integers(0, 90), st.integers(1, 40), st.integers(1, 40))
def test_a_cut_is_a_border_inside_an_atom(start: int, numel: int, atom: int, shard: int) -> None:
    atoms = [set(range(first, min(first + atom, numel))) for first in range(0, numel, atom)]
    owners = [{(start + element) // shard for element in elements} for elements in atoms]
    assert cuts_an_atom(start, numel, atom, shard) is any(len(ranks) > 1 for ranks in owners)


@pytest.mark.parametrize(("numel", "start"), [(192, 0), (193, 64), (320, 64), (321, None), (384, None)])
def test_a_parameter_starts_where_one_border_comes_between_its_atoms_and_no_second_one_comes(
    numel: int, start: int | None
) -> None:
    """Shards of 192 elements are no number of atoms of 128: a second border would lie inside of one."""
    found = walk([ParamSize(numel, 128)], 192)
    assert found == (None if start is None else ([start], start + numel))


def test_two_atoms_that_do_not_end_before_the_next_border_start_there() -> None:
    """Two atoms of 96 elements are a shard. Behind 64 elements a border would come inside of the second one."""
    assert walk([ParamSize(64, 64), ParamSize(192, 96)], 192) == ([0, 192], 384)


def test_parameters_without_elements_take_no_place() -> None:
    sizes = [ParamSize(0, 1), ParamSize(192, 96), ParamSize(0, 96), ParamSize(64, 64)]
    assert walk(sizes, 192) == ([0, 192, 0, 0], 384)
    assert least_shard_numel([0, 0], [1, 96], 2, 64) == arrange([0, 0], [1, 96], 2, 64).shard_numel == 64


@pytest.mark.parametrize(("atom", "starts"), [(1, [0, 128]), (64, [0, 128]), (128, [0, 192])])
def test_of_equal_parameters_the_first_comes_first(atom: int, starts: list[int]) -> None:
    assert walk([ParamSize(128, atom), ParamSize(128, atom)], 192) == (starts, starts[1] + 128)


def test_a_single_element_fills_what_others_leave() -> None:
    assert walk([ParamSize(1, 1), ParamSize(192, 64)], 192) == ([192, 0], 193)


def test_no_border_at_an_odd_element_is_between_atoms_of_64() -> None:
    """With more ranks than 128 shards have any length."""
    assert walk([ParamSize(128, 64)], 97) is None


def test_the_bound_counts_no_alignment_behind_the_last_parameter() -> None:
    assert least_shard_numel([65, 1], [1, 1], 1, 1) == arrange([65, 1], [1, 1], 1, 1).shard_numel == 129


# ---- Plans. ----


@given(models(), st.integers(1, 40), st.sampled_from((1500, 20_000, ONE_BUCKET)), st.booleans())
def test_every_plan_is_sound(specs: list[ParamSpec], degree: int, bucket_numel: int, busbw: bool) -> None:
    plan = plan_gradients(specs, shard_degree=degree, bucket_numel=bucket_numel, pad_for_bus_bandwidth=busbw)

    placed = [slot.spec for bucket in plan.buckets for slot in bucket.slots]
    assert sorted(s.name for s in placed) == sorted(s.name for s in specs), "each parameter exactly once"
    reached = {s.name: place for place, s in enumerate(specs)}
    for buffer in plan.buffers:
        for bucket in buffer.buckets:
            assert bucket.numel % math.lcm(degree, 2**16 if busbw else 128) == 0
            assert bucket.numel > 0
            order = [reached[slot.spec.name] for slot in bucket.slots]
            assert order == sorted(order), "slots are listed as backward reaches them, wherever they lie"
            end = bucket.start
            for slot in sorted(bucket.slots, key=lambda slot: (slot.start, slot.end)):
                assert slot.start % PARAM_ALIGNMENT == 0
                assert slot.start >= end, "parameters do not overlap"
                end = slot.end
                assert all(offset % slot.spec.atom == 0 for offset in cut_inside(bucket, slot))
            assert end <= bucket.end
    assert plan.padding == plan.numel - sum(s.numel for s in specs)

    again = plan_gradients(list(specs), shard_degree=degree, bucket_numel=bucket_numel, pad_for_bus_bandwidth=busbw)
    assert (again, again.fingerprint) == (plan, plan.fingerprint)


@given(models(), st.integers(1, 40))
def test_shards_are_between_the_bound_and_layouts_that_always_exist(specs: list[ParamSpec], degree: int) -> None:
    numels, atoms = [s.numel for s in specs], [s.atom for s in specs]
    multiple = 128 // math.gcd(128, degree)
    shard_numel = arrange(numels, atoms, degree, multiple).shard_numel

    bound = least_shard_numel(numels, atoms, degree, multiple)
    assert bound % multiple == 0
    assert max(min(numel, atom) for numel, atom in zip(numels, atoms, strict=True)) <= bound
    assert sum(numels) <= degree * bound
    assert bound <= shard_numel

    piles = [0] * degree  # every parameter whole
    sizes = [round_up(numel, PARAM_ALIGNMENT) for numel in numels]
    for size, shard in zip(sizes, deal(sizes, sizes, [0] * degree), strict=True):
        piles[shard] += size
    assert shard_numel <= round_up(max(1, *piles), math.lcm(PARAM_ALIGNMENT, multiple))

    position = 0  # every shard a multiple of every atom
    for numel, atom in zip(numels, atoms, strict=True):
        position = round_up(position, math.lcm(atom, PARAM_ALIGNMENT)) + numel
    assert shard_numel <= round_up(max(1, -(-position // degree)), math.lcm(multiple, *atoms))


@given(models(), st.integers(1, 40), st.sampled_from((1500, ONE_BUCKET)))
def test_element_atoms_lie_in_order_as_tightly_as_alignment_lets_them(
    specs: list[ParamSpec], degree: int, bucket_numel: int
) -> None:
    elements = [spec(s.name, *s.shape, grid_name=s.grid_name) for s in specs]
    plan = plan_gradients(elements, shard_degree=degree, bucket_numel=bucket_numel)
    for bucket in plan.buckets:
        position = bucket.start
        for slot in bucket.slots:
            assert slot.start == round_up(position, PARAM_ALIGNMENT)
            position = slot.end
        alignment = math.lcm(degree, 128)
        assert bucket.numel == max(round_up(position - bucket.start, alignment), alignment)


@given(models(), st.integers(1, 12))
def test_atoms_that_nobody_cuts_change_nothing(specs: list[ParamSpec], degree: int) -> None:
    elements = plan_gradients([spec(s.name, *s.shape, grid_name=s.grid_name) for s in specs], shard_degree=degree)
    cut = [
        offset % by_name.atom
        for bucket in elements.buckets
        for slot in bucket.slots
        for by_name in [next(s for s in specs if s.name == slot.spec.name)]
        for offset in cut_inside(bucket, slot)
    ]
    plan = plan_gradients(specs, shard_degree=degree)
    if not any(cut):
        assert starts(plan) == starts(elements)
        assert plan.numel == elements.numel
    if degree == 1:
        assert not cut


@given(models(), st.integers(1, 12))
def test_whole_is_stronger_than_any_atom(specs: list[ParamSpec], degree: int) -> None:
    elements = [spec(s.name, *s.shape, grid_name=s.grid_name) for s in specs]
    whole = plan_gradients(elements, shard_degree=degree, keep_params_whole=True)
    plan = plan_gradients(specs, shard_degree=degree, keep_params_whole=True)
    assert starts(plan) == starts(whole)
    assert plan.numel == whole.numel


def test_ranks_that_disagree_about_an_atom_are_found_out() -> None:
    plans = [plan_gradients([spec("w", 64, 64, atom=atom)], shard_degree=2) for atom in (1, 64)]
    assert starts(plans[0]) == starts(plans[1])
    assert plans[0].fingerprint != plans[1].fingerprint


def test_the_start_moves_for_one_border() -> None:
    # Rows of 192: the border at 640 would cut the fourth. The bias in front moves it to between the third and fourth.
    plan = plan_gradients([spec("up", 6, 192, atom=192), spec("bias", 64)], shard_degree=2)
    assert starts(plan) == {"up": 64, "bias": 0}
    assert plan.numel == 2 * 640


def test_several_borders_make_shards_a_multiple_of_the_atom() -> None:
    # Eight shards of at least 1440 elements: 7 rows of 192 are 1344, 8 are 1536.
    plan = plan_gradients([spec("up", 60, 192, atom=192)], shard_degree=8)
    assert plan.numel == 8 * 1536


def test_parameters_that_may_be_cut_lie_across_borders() -> None:
    # 768 and 512 fill a shard; whole parameters of 768 would leave 512 empty in each, where no other fits whole.
    whole = [spec(f"whole{i}", 768, atom=768) for i in range(4)]
    plan = plan_gradients([*whole, *(spec(f"free{i}", 1024) for i in range(2))], shard_degree=4)
    assert plan.padding == 0
    assert plan.numel == 4 * 1280


def test_parameters_are_aligned_where_borders_are_not() -> None:
    """A sixteenth of a bucket is a multiple of 8."""
    for first, second, at, shard_numel in (((150, 30), (576, 72), [704, 0], 216), ((5, 1), (144, 72), [0, 576], 72)):
        specs = [spec("first", first[0], atom=first[1]), spec("second", second[0], atom=second[1])]
        plan = plan_gradients(specs, shard_degree=16)
        assert (list(starts(plan).values()), plan.numel) == (at, 16 * shard_numel)


@pytest.mark.parametrize(
    ("numels", "atoms", "degree", "shard_numel"),
    [
        ([720, 640, 1152], [144, 160, 96], 3, 960),  # a multiple of both atoms of most elements
        ([672, 864, 768, 1728, 576, 1056], [96, 96, 96, 192, 96, 96], 3, 1984),  # of the alignment alone
        ([1280, 1344, 3520, 320, 960], [320, 192, 320, 320, 320], 3, 2560),  # of the atom of most elements
    ],
)
def test_shards_are_multiples_of_what_makes_them_short(
    numels: list[int], atoms: list[int], degree: int, shard_numel: int
) -> None:
    assert arrange(numels, atoms, degree, 8).shard_numel == shard_numel


@pytest.mark.parametrize(
    ("numels", "atoms", "degree", "multiple", "shard_numel"),
    [([2, 7000], [1, 1000], 2, 1, 7040), ([9000, 12000, 1088], [1000, 1000, 64], 3, 64, 12032)],
)
def test_parameters_stay_whole_where_multiples_of_every_atom_are_longer(
    numels: list[int], atoms: list[int], degree: int, multiple: int, shard_numel: int
) -> None:
    assert arrange(numels, atoms, degree, multiple).shard_numel == shard_numel


def test_experts_on_other_ranks_have_borders_of_their_own() -> None:
    specs = [spec("dense", 6, 192, atom=192), spec("expert", 5, 320, atom=320, grid_name="expert")]
    plan = plan_gradients(specs, shard_degree={"dense": 4, "expert": 2})
    assert {buffer.grid_name: buffer.numel for buffer in plan.buffers} == {"dense": 4 * 384, "expert": 2 * 960}


def test_a_border_inside_an_atom_is_found() -> None:  # by the helper that the tests above rely on
    def bucket(start: int, atom: int) -> BucketLayout:
        slots = (ParamSlot(spec=spec("weight", 100, atom=atom), start=start),)
        return BucketLayout(index=0, start=0, end=256, shard_degree=2, slots=slots)

    assert [cut_inside(b, b.slots[0]) for b in (bucket(64, 16), bucket(28, 100), bucket(128, 100))] == [[64], [], []]


def test_memory_order_is_free() -> None:
    slots = (ParamSlot(spec=spec("a", 64), start=64), ParamSlot(spec=spec("b", 64), start=0))
    bucket = BucketLayout(index=0, start=0, end=128, shard_degree=2, slots=slots)
    buffer = BufferLayout(param_dtype=torch.bfloat16, grad_dtype=torch.float32, grid_name="dense", buckets=(bucket,))
    assert (buffer.numel, bucket.padding) == (128, 0)


# ---- The shortest shards, by trying every order. ----


def shortest(numels: Sequence[int], atoms: Sequence[int], degree: int) -> int:
    """Length of the shortest possible shards, a multiple of 64: tries every length and every order of parameters."""
    for shard in itertools.count(PARAM_ALIGNMENT, PARAM_ALIGNMENT):
        if shard * degree < sum(numels):
            continue
        for order in itertools.permutations(range(len(numels))):
            position = 0
            for index in order:
                start = round_up(position, PARAM_ALIGNMENT)
                while cuts_an_atom(start, numels[index], atoms[index], shard):
                    start += PARAM_ALIGNMENT
                    if start > shard * degree:
                        break
                position = start + numels[index]
            if position <= shard * degree:
                return shard
    raise AssertionError


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from((64, 96, 128, 192, 320)), st.sampled_from((1, 2, 99))),
             min_size=1, max_size=4),
    st.integers(2, 6),
)  # fmt: skip
def test_shards_are_about_as_short_as_can_be(blocks: list[tuple[int, int, int]], degree: int) -> None:
    numels = [rows * width for rows, width, _ in blocks]
    atoms = [min(rows * width, width * rows_together) for rows, width, rows_together in blocks]
    best = shortest(numels, atoms, degree)
    assert best <= arrange(numels, atoms, degree, PARAM_ALIGNMENT).shard_numel <= 4 / 3 * best


def excess(num_parameters: tuple[int, int], num_units: int, degree: int) -> float:
    """Mean excess of shards over the lower bound, in percent, over units of random rows and blocks."""
    total = 0.0
    for seed in range(num_units):
        random = Random(seed)
        count = random.randint(*num_parameters)
        widths = random.sample([64, 128, 576, 768, 1000, 1024, 1536, 2880, 4096, 7168, 2047], random.randint(1, 4))
        numels, atoms = [], []
        for _ in range(count):
            width = random.choice(widths)
            numels.append(width * random.choice([random.randint(1, 6000), random.randint(1, 100), width]))
            atoms.append(random.choice([1, width, width, 16 * width, numels[-1]] if seed % 2 else [1, width, width]))
        multiple = 128 // math.gcd(128, degree)
        shard_numel = arrange(numels, atoms, degree, multiple).shard_numel
        total += shard_numel / least_shard_numel(numels, atoms, degree, multiple) - 1
    return 100 * total / num_units


@pytest.mark.parametrize(
    ("num_parameters", "num_units", "degree", "percent"),
    [((2, 25), 60, 8, 0.073), ((2, 25), 60, 64, 1.625), ((60, 400), 40, 64, 0.055), ((60, 400), 10, 1024, 0.001)],
)
@pytest.mark.sampled(3)
def test_shards_are_hardly_longer_than_the_bound(
    num_parameters: tuple[int, int], num_units: int, degree: int, percent: float
) -> None:
    """Limits are a little above the measured excess: a rule of the search that stops working fails here."""
    assert excess(num_parameters, num_units, degree) < percent


# ---- Time. ----


def test_a_thousand_parameters_on_a_thousand_ranks_take_less_than_a_second() -> None:
    widths = (576, 768, 1000, 1024, 1536, 2047, 2880, 4096, 7168)
    specs = [spec(f"w{i}", 1 + i * 7919 % 6000, width := widths[i % 9], atom=width) for i in range(1000)]
    for degree in (8, 1000, 1024):
        began = time.process_time()
        plan = plan_gradients(specs, shard_degree=degree, bucket_numel=ONE_BUCKET)
        assert time.process_time() - began < 1
        assert len(plan.buckets) == 1
