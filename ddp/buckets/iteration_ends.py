"""What rooms above ``ddp`` do once an iteration, on all ranks of a model, after its gradients are reduced.

Both wrappers note their models here, and call ``end_iteration`` at one point of the order of collectives.
"""

import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn

from ..collectives.failure_report import FailureReporter
from ..collectives.rank_grid import RankGrid

__all__ = ["end_iteration", "ends", "forget_model", "is_in_wrapper", "note_model", "num_changes"]

ends: list[Callable[[nn.Module, Sequence[dist.ProcessGroup]], None]] = []
"""Called with a wrapped model and the groups that join its ranks: inside an instance, then across."""

_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_num_changes = 0


def note_model(model: nn.Module) -> None:
    """``model`` is in a wrapper from now on, which ends its iterations."""
    global _num_changes
    _models.add(model)
    _num_changes += 1


def forget_model(model: nn.Module) -> None:
    """``model`` is in no wrapper any more."""
    global _num_changes
    _models.discard(model)
    _num_changes += 1


def num_changes() -> int:
    """A number that changes when a model is noted or forgotten."""
    return _num_changes


def is_in_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is part of a model in a wrapper. Walks all such models."""
    return any(part is module for model in list(_models) for part in model.modules())


def end_iteration(model: nn.Module, grid: RankGrid, failures: FailureReporter) -> None:
    """All gradients of an iteration are reduced, and nobody has computed since. Collective over the grid."""
    axes = tuple(grid.axes)
    with failures.watch("the agreement at the end of an iteration"):
        for end in ends:
            end(model, axes)
