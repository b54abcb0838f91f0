"""The ranks that save and load together, and the comparison of their calls."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from ..collectives.agreement import gather, run_and_gather, run_on_all_ranks
from ..collectives.failure_report import FailureReporter
from ..collectives.rank_grid import RankGrid
from .files.manifest import new_id

__all__ = ["CheckpointRanks", "check_same_call"]

T = TypeVar("T")
U = TypeVar("U")


class CheckpointRanks(NamedTuple):
    """The ranks that save and load together."""

    axes: tuple[dist.ProcessGroup, ...]
    """Groups of more than one rank that join the ranks: inside an instance, then across. Empty without a wrapper."""
    place: int
    """Index of this rank in the order in which ``run_and_gather`` returns what the ranks tell."""
    num_writers: int
    """The first so many ranks write: one instance, which holds all of the model and the optimizer, or all ranks."""
    failures: FailureReporter | None
    """Names the rank that is gone, in errors."""

    @property
    def leave_ranks_out(self) -> bool:
        """Whether the program has ranks that are none of these."""
        size = math.prod(group.size() for group in self.axes)
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > size

    @property
    def writes(self) -> bool:
        """Whether this rank writes: the others hold the same values."""
        return self.place < self.num_writers

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of all."""
        return self.place == 0

    @classmethod
    def alone(cls) -> "CheckpointRanks":
        """This process alone."""
        return cls((), 0, 1, failures=None)

    @classmethod
    def of_grid(cls, grid: RankGrid, failures: FailureReporter, *, instances_alike: bool = True) -> "CheckpointRanks":
        """The ranks of a grid. Where its instances hold the same values, the first one writes."""
        place = grid.outer_rank * grid.inner_size + grid.inner_rank
        return cls(tuple(grid.axes), place, grid.inner_size if instances_alike else grid.size, failures)

    def run_on_all_ranks(self, action: Callable[[], T], what: str) -> T:
        """Run ``action`` on every rank. Where it raises on one rank, all raise; see ``agreement.alike``."""
        return run_on_all_ranks(action, self.axes, self.failures, what)

    def run_and_gather(self, action: Callable[[], T], telling: Callable[[T], U], what: str) -> tuple[T, list[U]]:
        """``alike``, and return what every rank tells of its result; see ``agreement.run_and_gather``."""
        return run_and_gather(action, telling, self.axes, self.failures, what)


def check_same_call(
    path: str | os.PathLike[str],
    optimizer: object,
    ranks: CheckpointRanks,
    expert_axes: Sequence[dist.ProcessGroup] | None,
    what: str,
) -> tuple[Path, str, int, int]:
    """The absolute path, an id that no other call has, which set of experts this rank holds, and the number of sets.

    The set is -1 on a rank without experts, and 0 where all ranks hold the same. Raises ``ValueError`` on all ranks
    unless they were given one path, and all an optimizer or none.

    expert_axes  groups that join the ranks with the same experts; None: all ranks hold the same
    what         name of the call, for errors

    Collective over ``ranks``.
    """
    experts = -1  # else the smallest rank that holds the same
    if expert_axes is not None:
        experts = min(gather(dist.get_rank(), expert_axes, ranks.failures, "the comparison of experts between ranks"))

    def call() -> tuple[str, bool, str, int]:
        if not os.fspath(path):
            raise ValueError(f"{what} was given '' as its path: name a folder")
        return os.path.realpath(path), optimizer is not None, new_id(), experts

    _, calls = ranks.run_and_gather(call, lambda said: said, f"the beginning of {what}")
    paths, has_optimizer, ids, all_experts = zip(*calls, strict=True)
    other = next((each for each in paths if each != paths[0]), None)
    if other is not None:
        raise ValueError(
            f"all ranks save to and load from one folder; the first one has '{paths[0]}', another '{other}'"
        )
    if len(set(has_optimizer)) > 1:
        raise ValueError("some ranks give an optimizer and some do not: all of them, or none")
    known = sorted({*all_experts} - {-1})
    place = (known.index(experts) if experts >= 0 else -1, len(known)) if len(known) > 1 else (0, 1)
    return Path(paths[0]), ids[0], *place
