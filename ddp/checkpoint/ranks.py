"""The ranks that save and load together, and the comparison of their calls."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from ..collectives.agreement import run_and_gather
from ..collectives.failure_report import FailureReporter
from ..collectives.rank_grid import RankGrid

__all__ = ["CheckpointRanks"]

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
        return self.run_and_gather(action, lambda _: None, what)[0]

    def run_and_gather(self, action: Callable[[], T], telling: Callable[[T], U], what: str) -> tuple[T, list[U]]:
        """``alike``, and return what every rank tells of its result; see ``agreement.run_and_gather``."""
        return run_and_gather(action, telling, self.axes, self.failures, what)
