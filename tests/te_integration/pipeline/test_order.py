"""Orders of pipeline schedules: what is accepted, what an entry means, and which entry an error is about."""

import dataclasses
import decimal
import doctest
import fractions
import itertools
import math
import random

import numpy as np
import orders
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maingrad.te_integration.pipeline import order as schedule_module
from maingrad.te_integration.pipeline.order import Kind, ScheduleError, parse_order

MEANINGLESS = [0, -0.5, 1.5, -1.25, math.nan, math.inf, -math.inf, True, False, "1", None, 0.5, -0.0, 1j, 2.0001]


def refusal(check):
    """The library's error; None where the library accepts the order."""
    try:
        check()
    except ScheduleError as error:
        return error
    return None


def fault_of(order, num_chunks):
    """The index in the library's refusal; None where the library accepts the order."""
    error = refusal(lambda: parse_order(order, num_chunks=num_chunks))
    if error is None:
        return None
    assert f"entry {error.index} " in str(error).splitlines()[0]
    return error.index


def triples(schedule):
    return [(entry.kind, entry.chunk, entry.microbatch) for entry in schedule.entries]


# ---- What an order means. ----


def test_each_kind_of_each_chunk_counts_its_own_microbatches():
    schedule = parse_order([1, 1, -1, -1, -1.5, -1.5])
    assert triples(schedule) == [(kind, 1, microbatch) for kind in Kind for microbatch in (0, 1)]
    assert [entry.index for entry in schedule.entries] == [0, 1, 2, 3, 4, 5]
    assert schedule.num_microbatches == 2
    assert schedule.delayed_chunks == {1}


def test_a_real_interleaved_order():
    order = orders.INTERLEAVED_3_CHUNKS_8_MICROBATCHES
    schedule = parse_order(order)
    assert (schedule.num_chunks, schedule.num_microbatches, len(order)) == (3, 8, 72)
    assert schedule.delayed_chunks == {1, 2, 3}
    assert len(set(triples(schedule))) == 72
    assert schedule.order == order


def test_left_out_wgrads_follow_their_dgrads():
    schedule = parse_order([1, 2, -2, -1, -1.5, 1, 2, -2, -1, -1.5])
    assert [(step.number, step.microbatch, step.index, step.implied) for step in schedule.steps] == [
        (1, 0, 0, False),
        (2, 0, 1, False),
        (-2, 0, 2, False),
        (-2.5, 0, 2, True),
        (-1, 0, 3, False),
        (-1.5, 0, 4, False),
        (1, 1, 5, False),
        (2, 1, 6, False),
        (-2, 1, 7, False),
        (-2.5, 1, 7, True),
        (-1, 1, 8, False),
        (-1.5, 1, 9, False),
    ]


@pytest.mark.parametrize("to_number", [float, np.float32, np.float64, fractions.Fraction])
def test_numbers_of_other_types_mean_what_they_are_equal_to(to_number):
    schedule = parse_order([to_number(1), to_number(-1), to_number(-1.5)])
    assert schedule == parse_order([1, -1, -1.5])
    assert [type(entry.chunk) for entry in schedule.entries] == [int] * 3
    assert fault_of([np.int8(1), np.int8(-128), np.int64(-1)], 1) == 1
    with pytest.raises(ScheduleError, match=r"dgrad of chunk 128, microbatch 0\) is about chunk 128 of 1"):
        parse_order([np.int8(-128)], num_chunks=1)


def test_a_schedule_is_frozen_and_hashable():
    schedule = parse_order(iter([1, -1]))
    assert {schedule: 1}[parse_order((1, -1))] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.num_chunks = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.entries[0].chunk = 2


# ---- Layers. ----


def test_layers_are_split_over_chunks():
    layers = list("abcdef")
    order = [1, 2, 3, -3, -2, -1]
    assert parse_order(order, num_layers=6).split_layers(layers) == [["a", "b"], ["c", "d"], ["e", "f"]]
    uneven = parse_order(order, num_layers_per_chunk=[3, 1, 2])
    assert uneven.num_layers_per_chunk == (3, 1, 2)
    assert uneven.split_layers(layers) == [["a", "b", "c"], ["d"], ["e", "f"]]
    with pytest.raises(ValueError, match=r"5 layers for chunks of \[3, 1, 2\], which are 6"):
        uneven.split_layers(layers[:5])
    with pytest.raises(ValueError, match="give parse_order num_layers_per_chunk or num_layers"):
        parse_order(order).split_layers(layers)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_layers": 7}, "7 layers do not split evenly over 3 chunks: give num_layers_per_chunk"),
        ({"num_layers": 0}, "num_layers must be a positive int, not 0"),
        ({"num_layers": True}, "num_layers must be a positive int, not True"),
        ({"num_layers": 6.0}, "num_layers must be a positive int, not 6.0"),
        ({"num_layers_per_chunk": [2, 0, 1]}, "each entry of num_layers_per_chunk must be a positive int, not 0"),
        ({"num_layers_per_chunk": [2, True, 1]}, "positive int, not True"),
        ({"num_layers_per_chunk": [2, 2, 2], "num_layers": 6}, "not both"),
        ({"num_layers_per_chunk": [2, 2, 2], "num_layers": 0}, "not both"),
        ({"num_layers_per_chunk": [2, 2], "num_chunks": 3}, "has 2 entries, num_chunks is 3"),
        ({"num_layers_per_chunk": [2, 2, 2], "num_chunks": 2}, "has 3 entries, num_chunks is 2"),
        ({"num_chunks": 0}, "num_chunks must be a positive int, not 0"),
        ({"num_chunks": True}, "num_chunks must be a positive int, not True"),
    ],
)
def test_bad_layer_and_chunk_numbers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse_order([1, 2, 3, -3, -2, -1], **arguments)


def test_layer_counts_are_a_list():
    with pytest.raises(TypeError):
        parse_order([1, -1], num_layers_per_chunk=6)


def test_layer_counts_say_which_chunks_there_are():
    with pytest.raises(ScheduleError, match=r"entry 1 \(3: forward of chunk 3, microbatch 0\) is about chunk 3 of 2"):
        parse_order([1, 3, -3, -1], num_layers_per_chunk=[4, 4])


# ---- Refusals, in words. ----


@pytest.mark.parametrize("number", MEANINGLESS, ids=repr)
@pytest.mark.parametrize("place", [0, 3, 5])
def test_what_is_no_entry_is_refused_by_name(number, place):
    order = [1, 1, -1, -1, -1.5, -1.5]
    order[place] = number
    with pytest.raises(ScheduleError) as caught:
        parse_order(order)
    assert caught.value.index == place
    assert str(caught.value).startswith(f"entry {place} is {number!r}")


@pytest.mark.parametrize("number", [torch.tensor(1), decimal.Decimal(1), np.bool_(1), [1], np.float64("nan")], ids=str)
def test_what_only_looks_like_a_number_is_refused(number):
    assert fault_of([1, number, -1], 1) == 1


@pytest.mark.parametrize("number", [pytest.param(10**5000, id="10^5000"), -(10**400), 2**31, 1e308, -(2.0**60)])
def test_numbers_beyond_all_chunks_are_refused_at_once(number):
    with pytest.raises(ScheduleError, match="chunk") as caught:
        parse_order([1, number, -1])
    assert caught.value.index == 1
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("order", ["1", b"1", 1, None, 1.5])
def test_an_order_is_a_list(order):
    with pytest.raises(TypeError):
        parse_order(order)


def test_an_empty_order_is_refused():
    with pytest.raises(ValueError, match="the order is empty"):
        parse_order([])


@pytest.mark.parametrize(
    "order, num_chunks, index, words",
    [
        (
            [-1, 1],
            None,
            0,
            "entry 0 (-1: dgrad of chunk 1, microbatch 0) comes before its forward: before this entry "
            "chunk 1 has 0 forward, 0 dgrad, 0 wgrad",
        ),
        (
            [1, 1, -1, -1.5, -1.5, -1],
            None,
            4,
            "entry 4 (-1.5: wgrad of chunk 1, microbatch 1) comes before its dgrad: before this entry "
            "chunk 1 has 2 forward, 1 dgrad, 1 wgrad",
        ),
        (
            [1, 1, -1, -1, -1.5],
            None,
            3,
            "entry 3 (-1: dgrad of chunk 1, microbatch 1) has no wgrad: chunk 1 has 2 forward, 2 dgrad, 1 wgrad",
        ),
        (
            [1, 2, 1, -2, 2, -1, -1],
            None,
            4,
            "entry 4 (2: forward of chunk 2, microbatch 1) has no dgrad: chunk 2 has 2 forward, 1 dgrad, 0 wgrad",
        ),
        (
            [1, 2, 1, -2, -1, -1],
            None,
            2,
            "entry 2 (1: forward of chunk 1, microbatch 1) is a microbatch that chunk 2 does not run: "
            "chunk 1 has 2 forward, 2 dgrad, 0 wgrad; chunk 2 has 1 forward, 1 dgrad, 0 wgrad",
        ),
        ([1, -1], 2, 0, "chunk 2 does not run: chunk 1 has 1 forward, 1 dgrad, 0 wgrad; chunk 2 has 0 forward"),
        ([1, 3, -3, -1], None, 0, "is a microbatch that chunk 2 does not run"),
        ([1, -1], 10**9, 0, "is a microbatch that chunk 2 does not run"),
        ([1, 2, -1, -2], 1, 1, "entry 1 (2: forward of chunk 2, microbatch 0) is about chunk 2 of 1"),
    ],
)
def test_a_refusal_names_the_entry_the_chunk_and_the_counts(order, num_chunks, index, words):
    with pytest.raises(ScheduleError) as caught:
        parse_order(order, num_chunks=num_chunks)
    assert caught.value.index == index
    assert str(caught.value).startswith(f"entry {index} ({order[index]}: ")
    assert words in str(caught.value)


# ---- The picture. ----


def test_the_pictures_in_the_documentation():
    results = doctest.testmod(schedule_module)
    assert results.attempted > 0
    assert results.failed == 0


def test_an_order_is_drawn_with_one_row_per_chunk():
    assert str(parse_order([1, 2, 1, -2, 2, -1, -1.5, -2, -1, -1.5])).splitlines() == [
        "entry     0  1  2  3  4  5  6  7  8  9",
        "chunk 1  F0  . F1  .  . D0 W0  . D1 W1",
        "chunk 2   . F0  . B0 F1  .  . B1  .  .",
    ]


def test_a_long_order_is_drawn_in_blocks():
    picture = str(parse_order(orders.INTERLEAVED_3_CHUNKS_8_MICROBATCHES))
    blocks = picture.split("\n\n")
    assert [len(block.splitlines()) for block in blocks] == [4, 4]
    assert max(map(len, picture.splitlines())) <= 120
    cells = [row.split()[2:] for block in blocks for row in block.splitlines()[1:]]
    entries = [cell for row in cells for cell in row if cell != "."]
    assert sorted(entries) == sorted(
        f"{kind}{microbatch}" for kind in "FDW" for microbatch in range(8) for _ in range(3)
    )


# ---- Chunks of one pipeline. ----


def test_connected_chunks_wait_for_each_other():
    parse_order([1, 2, -2, -1]).check_connected()
    parse_order(orders.INTERLEAVED_3_CHUNKS_8_MICROBATCHES).check_connected()
    apart = parse_order([1, 2, 2, 1, -2, -1, -2, -1])
    error = refusal(apart.check_connected)
    assert error.index == 2
    assert "comes before the forward of chunk 1 of the same microbatch, of which there are 1 so far" in str(error)
    error = refusal(parse_order([1, 2, -1, -2]).check_connected)
    assert error.index == 2
    assert "comes before the dgrad of chunk 2 of the same microbatch, of which there are 0 so far" in str(error)


# ---- Properties. ----

ALPHABET = [sign for chunk in (1, 2, 3, 4, 5) for sign in (chunk, -chunk, -chunk - 0.5)]


@given(orders.rules(), st.integers(0, 2**32))
def test_valid_orders_are_accepted_with_the_counters_meaning(rules, seed):
    rng = random.Random(seed)
    for _ in range(5):
        order = orders.draw_order(rules, rng)
        schedule = parse_order(order, num_chunks=rules.num_chunks)
        assert orders.fault(order, rules.num_chunks) is None
        assert schedule.order == order
        assert schedule.num_microbatches == rules.num_microbatches
        for index, entry in enumerate(schedule.entries):
            assert entry.microbatch == order[:index].count(order[index])
        # Each microbatch of each chunk computes all three kinds once, in causal order.
        steps = [(step.chunk, step.microbatch, step.kind) for step in schedule.steps]
        assert len(set(steps)) == len(steps) == 3 * rules.num_chunks * rules.num_microbatches
        by_microbatch = sorted(steps, key=lambda step: step[:2])
        assert [kind for _, _, kind in by_microbatch] == list(Kind) * (rules.num_chunks * rules.num_microbatches)


@pytest.mark.in_turn
@given(orders.rules(), st.integers(0, 2**32))
def test_every_single_entry_change_is_valid_or_refused_where_it_is_wrong(rules, seed):
    rng = random.Random(seed)
    order = orders.draw_order(rules, rng)
    for changed in orders.single_entry_changes(order, [*ALPHABET, *MEANINGLESS], rng, each=40):
        expected = orders.fault(changed, rules.num_chunks)
        assert fault_of(changed, rules.num_chunks) == expected, changed


@pytest.mark.in_turn
def test_single_entry_changes_of_the_real_order():
    order = orders.INTERLEAVED_3_CHUNKS_8_MICROBATCHES
    changes = orders.single_entry_changes(order, [*ALPHABET, *MEANINGLESS], random.Random(0), each=400)
    faults = [orders.fault(changed, 3) for changed in changes]
    assert [fault_of(changed, 3) for changed in changes] == faults
    assert None in faults
    assert len({*faults}) >= 72  # nearly every place is at fault once


@given(orders.rules(), st.integers(0, 2**32))
def test_the_entry_at_fault_ends_the_first_prefix_that_nothing_can_finish(rules, seed):
    """What the index means, said without the rules: it is as far as one can read and still hope."""
    rng = random.Random(seed)
    order = [rng.choice(ALPHABET[: 3 * rules.num_chunks]) for _ in range(rng.randrange(1, 12))]
    delayed = frozenset(chunk for chunk in range(1, rules.num_chunks + 1) if -chunk - 0.5 in order)
    index = fault_of(order, rules.num_chunks)

    def can_be_finished(prefix):
        return fault_of(orders.finished(prefix, rules.num_chunks, delayed), rules.num_chunks) is None

    lengths = [length for length in range(len(order) + 1) if can_be_finished(order[:length])]
    assert lengths == list(range(len(lengths)))  # once hopeless, hopeless for good
    if len(lengths) <= len(order):
        assert index == lengths[-1]


@pytest.mark.in_turn
@pytest.mark.parametrize("num_chunks, longest", [(1, 7), (2, 5)])
@pytest.mark.sampled(1)
def test_all_short_orders_against_the_rules_by_brute_force(num_chunks, longest):
    alphabet = ALPHABET[: 3 * num_chunks]
    accepted = 0
    for length in range(1, longest + 1):
        for order in itertools.product(alphabet, repeat=length):
            expected = orders.fault(order, num_chunks)
            assert fault_of(order, num_chunks) == expected, order
            accepted += expected is None
    assert accepted > 0


@given(orders.rules(connected=True), st.integers(0, 2**32))
def test_the_check_across_chunks_against_brute_force(rules, seed):
    rng = random.Random(seed)
    order = orders.draw_order(rules, rng)
    parse_order(order, num_chunks=rules.num_chunks).check_connected()
    for changed in orders.single_entry_changes(order, ALPHABET, rng, each=10):
        if not changed or orders.fault(changed, rules.num_chunks) is not None:
            continue
        schedule = parse_order(changed, num_chunks=rules.num_chunks)
        expected = None
        for index, number in enumerate(changed):
            chunk, before = int(abs(number)), changed[:index]
            waits_for = {chunk: chunk - 1, -chunk: -chunk - 1}.get(number, 0)
            exists = 1 <= abs(waits_for) <= rules.num_chunks
            if exists and before.count(waits_for) <= before.count(number):
                expected = index
                break
        error = refusal(schedule.check_connected)
        assert expected == (None if error is None else error.index)
