"""The ranks that save and load together, and the comparison of their calls."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ..collectives.failure_report import FailureReporter, run_and_gather
from ..collectives.rank_grid import RankGrid

__all__ = ["CheckpointRanks"]

T = TypeVar("T")
U = TypeVar("U")


class CheckpointRanks(NamedTuple):
    """The ranks that save and load together; without a grid, this process alone."""

    grid: RankGrid = RankGrid(None, None, None)
    failures: FailureReporter | None = None
    """Names the rank that is gone, in errors."""
    instances_alike: bool = True
    """Whether each instance holds all of the model and the optimizer: then the first one writes."""
    experts: RankGrid | None = None
    """The ranks that hold the same experts as this one; None: all ranks do."""

    @property
    def place(self) -> int:
        """Index of this rank in the order in which ``run_and_gather`` returns what the ranks tell."""
        return self.grid.outer_rank * self.grid.inner_size + self.grid.inner_rank

    @property
    def num_writers(self) -> int:
        """The first so many ranks write; the others hold the same values."""
        return self.grid.inner_size if self.instances_alike else self.grid.size

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of all."""
        return self.place == 0

    def run_on_all_ranks(self, action: Callable[[], T], what: str) -> T:
        """Run ``action`` on every rank. Where it raises on one rank, all raise; see ``agreement.alike``."""
        return self.run_and_gather(action, lambda _: None, what)[0]

    def run_and_gather(self, action: Callable[[], T], telling: Callable[[T], U], what: str) -> tuple[T, list[U]]:
        """``alike``, and return what every rank tells of its result; see ``agreement.run_and_gather``."""
        return run_and_gather(action, telling, self.grid.axes, self.failures, what)
