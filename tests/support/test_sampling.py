"""Samples of matrices show each value, and many pairs."""

from itertools import product

import pytest
from sampling import is_its_turn, sample


def matrix(*lengths: int) -> list[dict[str, int]]:
    axes = "abcd"[: len(lengths)]
    return [dict(zip(axes, numbers, strict=True)) for numbers in product(*map(range, lengths))]


def test_each_value_comes_first() -> None:
    places = matrix(4, 3, 2, 1)
    kept = [places[index] for index in sample(places, 4, "0/4")]
    assert [{place[axis] for place in kept} for axis in "abcd"] == [{0, 1, 2, 3}, {0, 1, 2}, {0, 1}, {0}]


def test_then_pairs_of_values() -> None:
    places = matrix(2, 2, 2)
    kept = [places[index] for index in sample(places, 6, "0/4")]
    assert all(len({(place[one], place[other]) for place in kept}) == 4 for one, other in ("ab", "ac", "bc"))


def test_of_one_long_axis_they_lie_far_apart() -> None:
    assert sample(matrix(101), 5, "0/4") == {0, 25, 50, 75, 100}


def test_no_more_than_there_are() -> None:
    assert sample(matrix(3), 5, "0/4") == {0, 1, 2}


def test_the_next_turns_take_others_and_show_each_value_too() -> None:
    places = matrix(5, 4, 2)
    turns = [sample(places, 5, f"{turn}/4") for turn in range(4)]
    assert sum(map(len, turns)) == len(set.union(*turns)) == 20 and sample(places, 5) == set.union(*turns)
    for kept in turns:
        assert [len({places[index][axis] for index in kept}) for axis in "abc"] == [5, 4, 2]


def test_all_turns_together_show_each_pair_of_values() -> None:
    places = matrix(4, 3, 2)
    kept = [places[index] for index in sample(places, 4)]
    assert [len({(place[one], place[other]) for place in kept}) for one, other in ("ab", "ac", "bc")] == [12, 8, 6]


@pytest.mark.parametrize("turns", [4, 12])
def test_a_test_that_has_one_turn_of_several_comes_to_all_samples(turns: int) -> None:
    places = matrix(5, 4, 2)
    own = [sample(places, 5, f"{2 + turns * again}/{turns}") for again in range(4)]
    assert set.union(*own) == sample(places, 5)


def test_of_few_samples_a_turn_runs_one() -> None:
    places = matrix(3, 2)
    turns = [sample(places, 3, f"{turn}/4") for turn in range(4)]
    assert turns[0] == turns[2] and turns[1] == turns[3] and len(turns[0] | turns[1]) == 6


def test_each_test_has_one_turn_of_four_and_shares_are_alike() -> None:
    tests = [f"tests/test_{number}.py::test" for number in range(400)]
    turns = [{test for test in tests if is_its_turn(test, f"{turn}/4")} for turn in range(7, 11)]
    assert sum(map(len, turns)) == len(set.union(*turns)) == 400
    assert all(80 < len(each) < 120 for each in turns)
    assert {test for test in tests if is_its_turn(test, "3/4")} == turns[0]
    assert all(is_its_turn(test, "0/1") for test in tests)
