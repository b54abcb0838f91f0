"""Buckets that are split because their parameters' atoms do not go together."""

import itertools
import math
from collections.abc import Sequence

import pytest
from atoms import ONE_BUCKET, models, spec, starts
from hypothesis import given
from hypothesis import strategies as st

from maingrad.ddp.plan.atoms import least_shard_numel, split
from maingrad.ddp.plan.layout import ParamSpec, plan_gradients


@given(models(), st.integers(1, 40), st.sampled_from((0.0, 0.05, 0.5, 1e9)), st.sampled_from((1500, ONE_BUCKET)))
def test_split_buckets_hold_the_same_parameters_with_less_padding(
    specs: list[ParamSpec], degree: int, most: float, bucket_numel: int
) -> None:
    joined = plan_gradients(specs, shard_degree=degree, bucket_numel=bucket_numel)
    plan = plan_gradients(specs, shard_degree=degree, bucket_numel=bucket_numel, max_atom_padding=most)
    assert sorted(starts(plan)) == sorted(s.name for s in specs)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    holder = {slot.spec.name: bucket.index for bucket in joined.buckets for slot in bucket.slots}
    for bucket in plan.buckets:
        assert len({holder[slot.spec.name] for slot in bucket.slots}) == 1, "no bucket joins what was apart"
    reached = {s.name: place for place, s in enumerate(specs)}
    last = [max(reached[slot.spec.name] for slot in bucket.slots) for bucket in plan.buckets]
    assert last == sorted(last)
    for buffer in plan.buffers:
        assert [bucket.index for bucket in buffer.buckets] == sorted(bucket.index for bucket in buffer.buckets)
        for bucket in buffer.buckets:
            order = [reached[slot.spec.name] for slot in bucket.slots]
            assert order == sorted(order)
    if most == 1e9 or degree == 1 or all(s.atom == 1 for s in specs):
        assert plan == joined


def bound_numel(specs: Sequence[ParamSpec], degree: int) -> int:
    multiple = 128 // math.gcd(128, degree)
    return degree * least_shard_numel([s.numel for s in specs], [s.atom for s in specs], degree, multiple)


@given(models(most=6), st.integers(2, 12), st.sampled_from((0.0, 0.1)))
def test_splits_gain_something_and_are_needed(specs: list[ParamSpec], degree: int, most: float) -> None:
    alike = [spec(s.name, *s.shape, atom=s.atom) for s in specs]
    plan = plan_gradients(alike, shard_degree=degree, bucket_numel=ONE_BUCKET, max_atom_padding=most)
    numel = sum(s.numel for s in specs)
    groups = [[slot.spec for slot in bucket.slots] for bucket in plan.buckets]
    if len(groups) > 1:
        assert bound_numel(alike, degree) > (1 + most) * numel
        split_numel = sum(bound_numel(group, degree) for group in groups)
        assert split_numel < bound_numel(alike, degree)
        for one, other in itertools.combinations(groups, 2):
            rest = split_numel - bound_numel(one, degree) - bound_numel(other, degree)
            assert rest + bound_numel([*one, *other], degree) > max(split_numel, int((1 + most) * numel))


def test_rows_of_two_widths_apart() -> None:
    # A twelfth is 1157: two rows of both widths' common multiple, 960. Apart two rows of 320 and three of 192 do.
    specs = [spec("wide", 24, 320, atom=320), spec("narrow", 32, 192, atom=192), spec("bias", 64)]
    assert plan_gradients(specs, shard_degree=12).numel == 12 * 1920
    for most in (0.06, 0.0):
        plan = plan_gradients(specs, shard_degree=12, max_atom_padding=most)
        assert [[slot.spec.name for slot in bucket.slots] for bucket in plan.buckets] == [["wide"], ["narrow", "bias"]]
        assert [bucket.numel for bucket in plan.buckets] == [12 * 640, 12 * 576]


def test_what_ends_at_multiples_for_bus_bandwidth_is_not_split_for_less() -> None:
    """A bucket more would cost 2^16 elements more on each shard."""
    specs = [spec("wide", 24, 320, atom=320), spec("narrow", 32, 192, atom=192)]
    plan = plan_gradients(specs, shard_degree=12, max_atom_padding=0.06, pad_for_bus_bandwidth=True)
    assert [bucket.numel for bucket in plan.buckets] == [3 * 2**16]


def test_one_bucket_where_two_or_three_gain_nothing() -> None:
    # Joined two by two as long as that costs nothing, the five end in three buckets as large as one for all.
    numels, atoms = [4480, 24192, 5440, 2208, 4352], [320, 576, 320, 192, 512]
    apart = [[0, 2], [1, 3], [4]]
    bounds = [
        16 * least_shard_numel([numels[i] for i in group], [atoms[i] for i in group], 16, 8)
        for group in (*apart, range(5))
    ]
    assert sum(bounds[:-1]) == bounds[-1]
    assert split(numels, atoms, 16, 8, 0.05) == [[0, 1, 2, 3, 4]]


def test_what_is_joined_for_less_padding_is_joined_no_further_for_more() -> None:
    numels, atoms = [960, 1280, 1152], [320, 160, 192]
    both, third, everything = (
        12 * least_shard_numel([numels[i] for i in group], [atoms[i] for i in group], 12, 8)
        for group in ([0, 1], [2], range(3))
    )
    assert 1.5 * sum(numels) < both + third < everything, "more than is allowed either way"
    assert split(numels, atoms, 12, 8, 0.5) == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("numels", "atoms", "most", "parts"),
    [
        ([1728, 12480, 12800, 10560, 576], [192, 320, 320, 320, 32], 0.02, [[1, 2, 3], [0, 4]]),  # for nothing
        ([5376, 2100, 2320, 3500], [192, 100, 80, 100], 0.5, [[0], [1, 2, 3]]),  # within what is allowed
    ],
)
def test_atoms_share_a_bucket_where_it_costs_no_more_than_is_allowed(
    numels: list[int], atoms: list[int], most: float, parts: list[list[int]]
) -> None:
    assert split(numels, atoms, 16, 8, most) == parts


def test_of_many_atoms_the_finest_stay_together() -> None:
    """Thirteen: the coarsest eleven are tried apart."""
    numels = [171, 147, 294, 504, 140, 185, 120, 63, 180, 280, 174, 288, 168]
    atoms = [57, 49, 42, 56, 28, 37, 40, 21, 45, 35, 58, 36, 24]
    assert split(numels, atoms, 16, 8, 0.05) == [[3], [0, 1, 2, *range(4, 13)]]
