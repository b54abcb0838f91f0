"""``ShardedOptimizer``: groups with an optimizer class each over parameters of ``fully_shard``, as one optimizer."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...ddp.torch_grads.around_optimizer import AroundOptimizer
from ...ddp.torch_grads.muon import Muon
from .optimizer_state import translate_state_dicts
from .optimizer_watch import buckets_of, check_class
from .sharded_muon import ShardedMuon

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(AroundOptimizer):
    """One optimizer of several classes: ``make_optimizer`` returns it for a sharded model whose groups have their own.

    ``maingrad.ddp.Muon`` updates matrices that shards cut (``ShardedMuon``); the other classes are elementwise.

    classes  for each optimizer class, its options and its groups, with ``"params"``, by their index among all groups

    Raises ``RuntimeError`` for a class, a subclass of ``Muon`` too, whose parameters shards cut.
    """

    elementwise = True  # the constructor checks each class by itself

    def __init__(
        self, classes: Sequence[tuple[type[torch.optim.Optimizer], Mapping[str, Any], Mapping[int, dict[str, Any]]]]
    ) -> None:
        inners = [
            (ShardedMuon if cls is Muon else cls)(list(groups.values()), **options) for cls, options, groups in classes
        ]
        for inner in inners:
            check_class(inner, buckets_of(inner))
        super().__init__(inners, [list(groups) for _, _, groups in classes], lambda state: defaultdict(dict, state))
        translate_state_dicts(self)

    _step_supports_amp_scaling = False
    """A scaler unscales gradients itself, and skips the step."""

    @property
    def classes_of_groups(self) -> list[type[torch.optim.Optimizer]]:
        """The class of each group; checkpoints name it."""
        return [getattr(cls, "optimizer_class", cls) for cls in super().classes_of_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run the step of each class, without its hooks: those of this optimizer have run. Collective."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._share()
        for inner in self._inners:
            inspect.unwrap(type(inner).step)(inner)
        return loss
