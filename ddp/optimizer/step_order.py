"""The order in which a step updates buckets, so that updates hide the last reductions and the first gathers.

Backward completes buckets in launch order, and the next forward reads them in about the reverse order::

    reductions under way    | .. n-2 |   n-1   |
    update                  | 0 .. 3n/4        | n-1 | 3n/4 .. n-2 |
    gathers                                          |     n-1     | n-2 | n-3 ..       forward waits for n-1 and n-2

    all reduced, as behind a norm over all gradients
    update                  | n-1 | n/2 .. n-2 |   0 .. n/2    |
    gathers                       |     n-1    | n-2 | n-3 ..         forward begins behind the updates
"""

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["step_order"]

T = TypeVar("T")


def step_order(buckets: Sequence[T], *, reduced: bool, gathers: bool, at_once: bool = False) -> list[list[T]]:
    """Cut buckets, given in launch order, into passes of the optimizer.

    reduced  whether all gradients are reduced: then no update needs to come before the last bucket's
    gathers  whether updated parameters are gathered under the updates and the forward that follow
    at_once  there is one pass, as where several passes would hide nothing
    """
    if at_once or (reduced and not gathers):
        return [list(buckets)]
    *others, last = buckets
    half, most = len(others) // 2, len(others) * 3 // 4
    if not gathers:
        passes = [others[:most], [*others[most:], last]]
    elif reduced:
        passes = [[last], others[half:], others[:half]]
    else:
        passes = [others[:most], [last], others[most:]]
    return [members for members in passes if members]
