"""How many bytes of whole gradients may be written or on their way."""

import pytest

from maingrad.fsdp.unit.plan import pool_limit


@pytest.mark.parametrize(("sizes", "limit"), [([40], 80), ([10] * 4, 60), ([30, 10], 70), ([], 0)])
@pytest.mark.sampled(4)
def test_several_buckets_of_a_unit_need_half_a_unit_more(sizes: list[int], limit: int) -> None:
    assert pool_limit(sizes) == limit
