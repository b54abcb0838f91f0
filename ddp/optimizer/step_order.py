"""The order in which a step updates buckets, so that updates hide the last reductions and the first gather.

Backward completes buckets in launch order, and the next forward reads them in about the reverse order::

    reductions under way    | .. n-2 | n-1 |
    update                  | 0 .. n/2     | n-1 | n/2 .. n-2 |
    gathers                                      | n-1 | n-2 | n-3 ..        forward waits for n-1 only
"""

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["NO_CLOSURE", "step_order"]

NO_CLOSURE = (
    "DistributedOptimizer.step() takes no closure: gradients are reduced once per iteration; run what is in it, then "
    "step(). An optimizer that calls closures (LBFGS) is a stock optimizer with use_distributed_optimizer=False; its "
    "closure begins with zero_grad() and returns the loss averaged over ranks"
)

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
    half = 0 if reduced else len(others) // 2
    passes = [others[:half], [last], others[half:]] if gathers else [others[:half], [*others[half:], last]]
    return [members for members in passes if members]
