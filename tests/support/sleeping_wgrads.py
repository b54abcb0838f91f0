"""Fused weight gradients that take long, and how much of the reductions' time lies under them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from delayed_group import CollectiveInterval
from torch import Tensor

from maingrad.te_integration.dense import products as dense_products

__all__ = ["SLEEP", "Wgrad", "share_under", "sleeping_wgrads"]

SLEEP = 0.05


class Wgrad(NamedTuple):
    """One product, in seconds of ``time.perf_counter``."""

    start: float
    end: float


@contextmanager
def sleeping_wgrads() -> Iterator[list[Wgrad]]:
    """Every fused weight gradient takes 50 ms longer, and is noted."""
    real, intervals = dense_products.wgrad_accumulate, []

    def slow(dy: Tensor, x: Tensor, accumulator: Tensor, *, overwrite: bool = False) -> None:
        start = time.perf_counter()
        time.sleep(SLEEP)
        real(dy, x, accumulator, overwrite=overwrite)
        intervals.append(Wgrad(start, time.perf_counter()))

    dense_products.wgrad_accumulate = slow
    try:
        yield intervals
    finally:
        dense_products.wgrad_accumulate = real


def share_under(wgrads: Sequence[Wgrad], collectives: Sequence[CollectiveInterval]) -> float:
    """The share of the collectives' time during which a weight gradient is computed."""
    inside = sum(max(0.0, min(w.end, c.end) - max(w.start, c.start)) for c in collectives for w in wgrads)
    return inside / sum(c.end - c.start for c in collectives)
