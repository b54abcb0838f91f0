"""In which order a step updates buckets, so that the reductions still under way and the first gather are hidden by it.

Backward fills buckets in launch order, and the next forward reads them in about the reverse one::

    reductions under way    | .. n-2 | n-1 |
    update                  | 0 .. n/2     | n-1 | n/2 .. n-2 |
    gathers                                      | n-1 | n-2 | n-3 ..        forward waits for n-1 only
"""

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["step_order"]

T = TypeVar("T")


def step_order(buckets: Sequence[T], *, reduced: bool, gathers: bool) -> list[list[T]]:
    """Cut buckets, given in launch order, into passes of the optimizer.

    reduced  all gradients are there: nothing is to be hidden before the bucket that is needed first
    gathers  updated parameters are gathered under what follows
    """
    *others, last = buckets
    half = 0 if reduced else len(others) // 2
    passes = [others[:half], [last], others[half:]] if gathers else [others[:half], [*others[half:], last]]
    return [members for members in passes if members]
