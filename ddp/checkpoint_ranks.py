"""The ranks that save and load together, and what they compare before they do."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from .agreement import alike, gather
from .checkpoint_id import new_id
from .failure_report import FailureReporter
from .rank_grid import RankGrid

__all__ = ["CheckpointRanks", "SameCall", "check_same_call", "place_of_experts"]

T = TypeVar("T")


class CheckpointRanks(NamedTuple):
    """The ranks that save and load together."""

    axes: tuple[dist.ProcessGroup, ...]
    """Groups of more than one rank that join them: inside an instance, then across. None for a model on its own."""
    group: dist.ProcessGroup | None
    """The ranks of one instance, which hold all of the model and the optimizer between them; None: this one alone."""
    writes: bool
    """Whether this rank is of the first instance: the others hold the same."""
    leads: bool
    """Whether this rank is the first of all."""
    failures: FailureReporter | None
    """Says which rank is gone, where one is."""

    @classmethod
    def alone(cls) -> "CheckpointRanks":
        """This process, whatever others there are."""
        return cls((), None, writes=True, leads=True, failures=None)

    @classmethod
    def of_grid(cls, grid: RankGrid, failures: FailureReporter) -> "CheckpointRanks":
        """Ranks whose instances hold the same: the first instance writes."""
        group = grid.inner if grid.inner_size > 1 else None
        first = grid.outer_rank == 0
        return cls(tuple(grid.axes), group, writes=first, leads=first and grid.inner_rank == 0, failures=failures)

    def gather(self, value: T, what: str) -> list[T]:
        """Every rank's value, in one order everywhere; see ``agreement.gather``."""
        return gather(value, self.axes, self.failures, what)

    def alike(self, action: Callable[[], T], what: str) -> T:
        """Run ``action`` on every rank. Where it raises on any, all raise; see ``agreement.alike``."""
        return alike(action, self.axes, self.failures, what)


def place_of_experts(expert_axes: Sequence[dist.ProcessGroup] | None, ranks: CheckpointRanks) -> tuple[int, int]:
    """(index, count): which of so many sets of experts this rank holds, -1 for none; (0, 1) where all have the same.

    expert_axes  groups that join the ranks with the same experts; None: this one has none of its own

    Collective over ``ranks``.
    """
    what, first = "the comparison of experts between ranks", -1
    if expert_axes is not None:  # the smallest rank that holds these experts stands for them
        first = min(gather(dist.get_rank(), expert_axes, ranks.failures, what))
    known = sorted(set(ranks.gather(first, what)) - {-1})
    if len(known) <= 1:
        return 0, 1
    return known.index(first) if first >= 0 else -1, len(known)


class SameCall(NamedTuple):
    """A save or a load, as all ranks know it."""

    path: Path
    """Absolute."""
    id: str
    """Its own: no other call has it."""


def check_same_call(path: str | os.PathLike[str], optimizer: object, ranks: CheckpointRanks, what: str) -> SameCall:
    """Raises ``ValueError`` on all ranks unless they were given one path, and all an optimizer or none.

    what  the call, for errors

    Collective.
    """

    def absolute() -> Path:
        if not os.fspath(path):
            raise ValueError(f"{what} was given '' as its path: name a folder")
        return Path(os.path.realpath(path))

    target = ranks.alike(absolute, f"the beginning of {what}")
    said = ranks.gather(
        ((str(target), optimizer is not None), new_id()), f"the comparison of calls of {what} between ranks"
    )
    calls = [call for call, _ in said]
    other = next((call for call in calls if call[0] != calls[0][0]), None)
    if other is not None:
        raise ValueError(
            f"all ranks save to and load from one folder; the first one has '{calls[0][0]}', another '{other[0]}'"
        )
    if len(set(calls)) > 1:
        raise ValueError("some ranks give an optimizer and some do not: all of them, or none")
    _, first_id = said[0]
    return SameCall(target, first_id)
