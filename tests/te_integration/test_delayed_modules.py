"""Delayed against undelayed, for every module and what it can be combined with: the same bits after three steps."""

import itertools

import pytest
from modules import FACTORIES
from stepping import Stack, assert_bitwise, train

from maingrad.launch import simulate

VARIANTS = [
    {"tied": tied, "frozen": frozen, "bias": bias} for tied, frozen, bias in itertools.product([False, True], repeat=3)
]


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_delayed_is_bitwise_undelayed(kind: str, microbatches: int, fuse: bool, variant: dict[str, bool]) -> None:
    """Every weight frozen leaves nothing to delay: the queue is checked to be used in the other cases."""
    all_frozen = variant["tied"] and variant["frozen"] and kind != "LayerNormMLP"

    def run(how: str) -> list:
        def one_rank() -> object:
            return train(Stack(kind, fuse=fuse, delay=how == "module", **variant), microbatches, how)

        return simulate(one_rank, 2)

    plain = run("now")
    for how in ("module",) if all_frozen else ("module", "queue"):
        for one, other in zip(plain, run(how), strict=True):
            assert_bitwise(one, other, same_buckets=how == "queue")
