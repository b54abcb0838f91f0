"""A watcher of iterations that notes what it is told."""

from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp.buckets.iteration_ends import IterationWatcher, was_trained_in

__all__ = ["Watcher"]


class Watcher(IterationWatcher):
    """``told``: what it was told, with the model; of an iteration's end the number of backwards."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def ended(self, model: nn.Module, axes: Sequence[dist.ProcessGroup], trained: Collection[int]) -> None:
        assert all(map(was_trained_in, trained))
        self.told.append(("ended", model, len(trained)))

    def stepped(self, model: nn.Module, found_inf: Tensor | None) -> None:
        self.told.append(("stepped", model, found_inf))

    def discarded(self, model: nn.Module, *, skipped: bool) -> None:
        self.told.append(("discarded", model, skipped))
