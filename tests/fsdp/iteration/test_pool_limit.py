"""How many bytes of whole gradients may be written or on their way."""

import pytest

from maingrad.fsdp.unit.plan import num_to_end, pool_limit


@pytest.mark.parametrize(("sizes", "limit"), [([40], 80), ([10] * 4, 60), ([30, 10], 70), ([], 0)])
@pytest.mark.sampled(4)
def test_several_buckets_of_a_unit_need_half_a_unit_more(sizes: list[int], limit: int) -> None:
    assert pool_limit(sizes) == limit


@pytest.mark.parametrize(
    ("written", "launched", "number"),
    [(20, [20, 20], 0), (21, [20, 20], 1), (20, [30, 20], 1), (60, [20, 20], 2), (61, [20], 1), (61, [], 0)],
)
@pytest.mark.sampled(6)
def test_as_few_reductions_end_as_make_room_in_the_pool(written: int, launched: list[int], number: int) -> None:
    """The oldest first; a bucket that is larger than the pool waits for all."""
    assert num_to_end(written, launched, limit=60) == number
