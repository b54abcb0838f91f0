"""Samples of matrices show each value, and many pairs."""

from itertools import product

from sampling import is_its_turn, sample


def matrix(*lengths: int) -> list[dict[str, int]]:
    axes = "abcd"[: len(lengths)]
    return [dict(zip(axes, numbers, strict=True)) for numbers in product(*map(range, lengths))]


def test_each_value_comes_first() -> None:
    places = matrix(4, 3, 2, 1)
    kept = [places[index] for index in sample(places, 4)]
    assert [{place[axis] for place in kept} for axis in "abcd"] == [{0, 1, 2, 3}, {0, 1, 2}, {0, 1}, {0}]


def test_then_pairs_of_values() -> None:
    places = matrix(2, 2, 2)
    kept = [places[index] for index in sample(places, 6)]
    assert all(len({(place[one], place[other]) for place in kept}) == 4 for one, other in ("ab", "ac", "bc"))


def test_of_one_long_axis_they_lie_far_apart() -> None:
    assert sample(matrix(101), 5) == {0, 25, 50, 75, 100}


def test_no_more_than_there_are() -> None:
    assert sample(matrix(3), 5) == {0, 1, 2}


def test_each_test_has_one_turn_of_four_and_shares_are_alike() -> None:
    tests = [f"tests/test_{number}.py::test" for number in range(400)]
    turns = [{test for test in tests if is_its_turn(test, f"{turn}/4")} for turn in range(7, 11)]
    assert sum(map(len, turns)) == len(set.union(*turns)) == 400
    assert all(80 < len(each) < 120 for each in turns)
    assert {test for test in tests if is_its_turn(test, "3/4")} == turns[0]
    assert all(is_its_turn(test, "0/1") for test in tests)
