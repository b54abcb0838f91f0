"""Samples of matrices show each value, and many pairs."""

from itertools import product

from sampling import sample


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
