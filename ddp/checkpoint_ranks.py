"""What ranks say to each other around a checkpoint: errors are raised alike everywhere, so that nobody waits alone."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from .rank_grid import RankGrid

__all__ = ["CheckpointRanks", "check_same_call", "place_of_experts", "saying"]

T = TypeVar("T")

_KINDS: tuple[type[Exception], ...] = (
    FileNotFoundError,
    FileExistsError,
    OSError,
    ValueError,
    TypeError,
    RuntimeError,
)
"""Errors that keep their class on the way to other ranks; any other becomes the last one."""


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

    @classmethod
    def of_grid(cls, grid: RankGrid) -> "CheckpointRanks":
        """Ranks whose instances hold the same: the first instance writes."""
        group = grid.inner if grid.inner_size > 1 else None
        first = grid.outer_rank == 0
        return cls(tuple(grid.axes), group, writes=first, leads=first and grid.inner_rank == 0)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in one order everywhere."""
        values = [value]
        for group in self.axes:
            parts: list[list[T]] = [[]] * group.size()
            dist.all_gather_object(parts, values, group=group)
            values = [each for part in parts for each in part]
        return values

    def alike(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank. Where it raises on any, all raise what the first of them raised."""
        if not self.axes:
            return action()
        result: Any = None
        cause: Exception | None = None
        mine: tuple[int, str, int] | None = None
        try:
            result = action()
        except Exception as error:
            mine, cause = (_kind_of(error), str(error) or type(error).__name__, dist.get_rank()), error
        answers = self.gather(mine)
        failures = [answer for answer in answers if answer is not None]
        if failures:
            kind, text, rank = failures[0]
            if len({answer and answer[1] for answer in answers}) > 1:
                text += f" (on rank {rank})"
            raise _KINDS[kind](text) from cause
        return result  # type: ignore[no-any-return]


def _kind_of(error: BaseException) -> int:
    return next((index for index, kind in enumerate(_KINDS) if isinstance(error, kind)), len(_KINDS) - 1)


def saying(error: BaseException, more: str) -> BaseException:
    """An error of the same kind that says more. What is no ``Exception`` (Ctrl-C) stays as it is."""
    return _KINDS[_kind_of(error)](f"{error}{more}") if isinstance(error, Exception) else error


def place_of_experts(expert_axes: Sequence[dist.ProcessGroup] | None, ranks: CheckpointRanks) -> tuple[int, int]:
    """(index, count): which of so many sets of experts this rank holds, -1 for none; (0, 1) where all have the same.

    expert_axes  groups that join the ranks with the same experts; None: this one has none of its own

    Collective over ``ranks``.
    """
    first = -1
    if expert_axes is not None:
        first = dist.get_rank()
        for group in expert_axes:  # the smallest rank that holds these experts stands for them
            firsts = [0] * group.size()
            dist.all_gather_object(firsts, first, group=group)
            first = min(firsts)
    known = sorted(set(ranks.gather(first)) - {-1})
    if len(known) <= 1:
        return 0, 1
    return known.index(first) if first >= 0 else -1, len(known)


def check_same_call(path: str, optimizer: object, ranks: CheckpointRanks) -> None:
    """Raise ``ValueError`` on all ranks unless they were given one path, and all an optimizer or none. Collective."""
    calls: Sequence[tuple[str, bool]] = ranks.gather((path, optimizer is not None))
    other = next((call for call in calls if call[0] != calls[0][0]), None)
    if other is not None:
        raise ValueError(
            f"all ranks save to and load from one folder; the first one has '{calls[0][0]}', another '{other[0]}'"
        )
    if len(set(calls)) > 1:
        raise ValueError("some ranks give an optimizer and some do not: all of them, or none")
