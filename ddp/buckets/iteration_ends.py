"""Tells rooms above ``ddp`` of a model's iterations: their ends, their steps, and what was given up.

Both wrappers note their models here, and call these functions, each at one point of the order of collectives.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from ..collectives.failure_report import FailureReporter
from ..collectives.rank_grid import RankGrid

__all__ = [
    "IterationWatcher",
    "TrainedBackwards",
    "discard_iteration",
    "end_iteration",
    "forget_model",
    "forward_number",
    "is_in_wrapper",
    "is_watched",
    "num_changes",
    "record_forward",
    "record_model",
    "record_optimizer",
    "record_step",
    "was_trained_in",
    "watch_iterations",
]


class IterationWatcher(ABC):
    """Told of the iterations of all models in wrappers."""

    @abstractmethod
    def ended(self, model: nn.Module, axes: Sequence[dist.ProcessGroup], trained: Collection[int]) -> None:
        """All gradients of an iteration are reduced.

        axes     the groups that join the model's ranks: inside an instance, then across
        trained  numbers of the backwards that brought gradients of the model in this iteration, and were not given up
        """

    @abstractmethod
    def stepped(self, model: nn.Module, found_inf: Tensor | None) -> None:
        """An optimizer takes its step over the reduced gradients; the device skips it where ``found_inf`` is not 0."""

    @abstractmethod
    def discarded(self, model: nn.Module, *, skipped: bool) -> None:
        """The reduced gradients are gone.

        skipped  an optimizer trains the model. If it has not stepped since ``ended``, then the step was skipped
        """


class TrainedBackwards(set[int]):
    """Numbers of the backwards that brought gradients of one model in its iteration. Its provider clears it."""

    def __init__(self) -> None:
        super().__init__()
        _trained.append(weakref.ref(self, _trained.remove))


_trained: "list[weakref.ref[TrainedBackwards]]" = []


def was_trained_in(backward: int) -> bool:
    """Whether any model got gradients in this backward, and has not ended its iteration or given it up since."""
    return any(backward in alive for each in _trained if (alive := each()) is not None)


_watchers: list[IterationWatcher] = []
_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_optimized: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_num_changes = 0
_num_forwards = 0


def watch_iterations(watcher: IterationWatcher) -> None:
    """Have ``watcher`` told from now on. Twice is once."""
    if watcher not in _watchers:
        _watchers.append(watcher)


def is_watched() -> bool:
    """Whether there is a watcher. Providers count backwards for watchers alone."""
    return bool(_watchers)


def record_model(model: nn.Module) -> None:
    """``model`` is in a wrapper from now on, which ends its iterations."""
    global _num_changes
    _models.add(model)
    _num_changes += 1


def forget_model(model: nn.Module) -> None:
    """``model`` is in no wrapper any more."""
    global _num_changes
    _models.discard(model)
    _optimized.discard(model)
    _num_changes += 1


def num_changes() -> int:
    """A number that changes when a model is noted or forgotten."""
    return _num_changes


def is_in_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is part of a model in a wrapper. Walks all such models."""
    return any(part is module for model in list(_models) for part in model.modules())


def record_forward() -> None:
    """A wrapper's forward begins, or has ended: modules that run before and after it belong to different ones."""
    global _num_forwards
    _num_forwards += 1


def forward_number() -> int:
    """A number that forwards of modules share that belong to one forward of their wrapper."""
    return _num_forwards


def end_iteration(model: nn.Module, grid: RankGrid, failures: FailureReporter, trained: Collection[int]) -> None:
    """All gradients of an iteration are reduced, and nobody has computed since. Collective over the grid."""
    axes = tuple(grid.axes)
    with failures.watch("the agreement at the end of an iteration"):
        for watcher in _watchers:
            watcher.ended(model, axes, trained)


def record_optimizer(model: nn.Module) -> None:
    """An optimizer is seen to train ``model``: in an iteration without a step, that step was skipped from now on."""
    _optimized.add(model)


def record_step(model: nn.Module, found_inf: Tensor | None = None) -> None:
    """See ``IterationWatcher.stepped``."""
    for watcher in _watchers:
        _optimized.add(model)
        watcher.stepped(model, found_inf)


def discard_iteration(model: nn.Module) -> None:
    """See ``IterationWatcher.discarded``."""
    for watcher in _watchers:
        watcher.discarded(model, skipped=model in _optimized)
