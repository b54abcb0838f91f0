"""The buckets of a unit that share one round: those of delayed gradients are reduced later than the others."""

from typing import NamedTuple

from ..unit.bucket import ShardedBucket
from ..unit.round import Round
from ..unit.unit import Unit

__all__ = ["GradSet", "rounds_of"]


class GradSet(NamedTuple):
    """The buckets of a unit that share one round."""

    round: Round
    buckets: tuple[ShardedBucket, ...]

    @property
    def has_pending(self) -> bool:
        """Whether delayed gradients of the round are yet to be computed."""
        return any(bucket.has_pending for bucket in self.buckets)


def rounds_of(unit: Unit) -> list[GradSet]:
    """The unit's buckets in one round, and the buckets of delayed gradients in another, which is sent later."""
    found: list[GradSet] = []
    for delayed in (False, True):
        buckets = tuple(bucket for bucket in unit.buckets if bucket.trainable and bucket.delayed is delayed)
        if buckets:
            grad_set = GradSet(Round(unit.label, reduces_once=buckets[0].reduces_once, delayed=delayed), buckets)
            for bucket in buckets:
                bucket.round = grad_set.round
            found.append(grad_set)
    return found
