"""``ProductScaling``: scales of one product in one forward and its backwards, and where their amaxes are recorded."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...ddp.buckets.iteration_ends import is_in_wrapper, num_changes, was_trained_in
from ...ddp.torch_internals import NO_BACKWARD, current_backward
from ...kernels.quantized import QuantSpec
from ..recipes import DelayedScaling, Operand, amax_group_now
from .amax_history import OPERANDS, AmaxRow, commit, commit_after_backward

__all__ = ["ProductScaling", "ScalingUse", "versions_of"]


class _Graph:
    """A forward of training whose backward has not come: it lives as long as the forward's graph."""

    __slots__ = ("__weakref__",)


class ScalingUse:
    """What the host knows of a module's scaling."""

    def __init__(self) -> None:
        self.recipe: DelayedScaling | None = None
        """The recipe of the last forward whose amaxes count; None: there is none yet."""
        self.group: dist.ProcessGroup | None = None
        """``amax_reduction_group`` of that forward."""
        self.recorded = True
        """Row 0 may hold amaxes: those of this process, or of a state that was loaded."""
        self.frozen = False
        """All of these are of backwards in which nothing of the module was trained."""
        self.weights_now: Callable[[], Sequence[Tensor]] | None = None
        """Without a wrapper: the module's trained weights."""
        self.weights_before: Sequence[tuple[int, int]] | None = None
        """Their versions after the last backward. None: it has left no ``.grad`` in some, or a step has come."""
        self.optimized = False
        """Without a wrapper: whether an optimizer was seen to step."""
        self.num_unseen = 0
        """Steps that seem to be skipped, while no optimizer was seen."""
        self.rows: list[AmaxRow] = []
        """In a wrapper: of forwards since the last end of an iteration."""
        self.awaited: weakref.WeakSet[_Graph] = weakref.WeakSet()
        """Without a wrapper: forwards whose backwards have not come."""
        self._wrapped = (-1, False)
        self._many = 64

    def is_in_wrapper(self, module: nn.Module) -> bool:
        """Whether a wrapper of ours updates the scales."""
        if self._wrapped[0] != num_changes():
            self._wrapped = num_changes(), is_in_wrapper(module)
        return self._wrapped[1]

    def add(self, row: AmaxRow) -> None:
        """Keep a row until the end of the iteration. Rows of backwards that train nothing may come without an end."""
        if len(self.rows) >= self._many and current_backward() == NO_BACKWARD:
            self.rows = [old for old in self.rows if old.waits or not old.has_graph or was_trained_in(old.backward)]
            self._many = 2 * len(self.rows) + 64
        self.rows.append(row)

    def record_row(self, row: AmaxRow, *, frozen: bool = False) -> None:
        """A row is in row 0 of the history now."""
        self.frozen = frozen and (self.frozen or not self.recorded)
        self.recorded = True
        self.recipe, self.group = row.recipe, row.group
        weights = () if self.weights_now is None else self.weights_now()
        shows = bool(weights) and all(weight.grad is not None for weight in weights)
        self.weights_before = versions_of(weights) if shows else None

    def record_step(self) -> None:
        """An optimizer steps over the module's weights."""
        self.optimized, self.weights_before = True, None

    def record_loaded(self) -> None:
        """Other amaxes are in row 0."""
        self.recorded, self.frozen, self.weights_before = True, False, None
        self.rows = [row for row in self.rows if row.waits]

    def __reduce__(self) -> Any:
        return ScalingUse, ()  # a copied module has its own graphs, group and wrapper


def versions_of(weights: Sequence[Tensor]) -> list[tuple[int, int]]:
    """They change where a weight is changed or replaced."""
    return [(id(weight), weight._version) for weight in weights]


class ProductScaling:
    """What quantises the operands of one product in one forward and its backward.

    recipe   says elements and scales
    scales   [n] the module's
    product  its number in the module
    history  [L, n] gets the amaxes; None: this forward records none
    use      the module's, with a ``history``
    waits    amaxes wait for the end of the iteration, in a wrapper. False: for the backward alone
    """

    __slots__ = ("_first", "_graph", "_has_weight", "_history", "_row", "_scales", "_use", "_waits", "recipe")

    def __init__(
        self,
        recipe: DelayedScaling,
        scales: Tensor,
        product: int,
        history: Tensor | None = None,
        use: ScalingUse | None = None,
        *,
        waits: bool = False,
    ) -> None:
        self.recipe = recipe
        self._scales, self._history, self._use, self._waits = scales, history, use, waits
        self._first = len(OPERANDS) * product
        self._has_weight = False
        self._graph = _Graph()
        self._row: AmaxRow | None = None
        if use is not None:
            self._row = AmaxRow(self._first, recipe, amax_group_now(), self._graph, scales.device)
            if waits:
                use.add(self._row)
            else:
                use.awaited.add(self._graph)

    def __eq__(self, other: object) -> bool:
        """Whether the same scales quantise: copies of a weight are kept by it."""
        return (
            isinstance(other, ProductScaling)
            and self.recipe == other.recipe
            and self._scales is other._scales
            and self._first == other._first
            and (self._row is None) is (other._row is None)  # a copy that is found again is not recorded
        )

    def __hash__(self) -> int:
        return hash((self.recipe, id(self._scales), self._first))

    def specs(self, operand: Operand) -> tuple[QuantSpec, QuantSpec]:
        """The recipe's."""
        return self.recipe.specs(operand)

    def scale_of(self, operand: Operand) -> Tensor:
        """0-dim fp32."""
        return self._scales[self._first + OPERANDS[operand]]

    def amax_of(self, operand: Operand) -> Tensor | None:
        """See ``Recipe``. A weight that the backward quantises again is recorded once."""
        if self._row is None or (operand == "weight" and self._has_weight):
            return None
        self._has_weight = self._has_weight or operand == "weight"
        return self._row.values[OPERANDS[operand]]

    def forward_done(self, *, has_graph: bool) -> None:
        """The forward has recorded. Without a graph no backward will come."""
        if self._row is None or has_graph:
            return
        self._row.has_graph = False
        if not self._waits:
            assert self._history is not None and self._use is not None, "it records"
            commit([(self._history, self._row)])
            self._use.record_row(self._row, frozen=True)

    def enter_backward(self, *, trains: bool, frozen: bool) -> None:
        """A backward is about to record.

        trains  it brings a gradient of a weight; or, where all are ``frozen``, perhaps of others' weights
        """
        row = self._row
        if row is None:
            return
        assert self._history is not None and self._use is not None, "it records"
        task = current_backward()
        if row.backward not in (NO_BACKWARD, task):
            row = self._row = row.again(self._graph)
            if self._waits:
                self._use.add(row)
        row.backward = task
        self._use.awaited.discard(self._graph)
        if not self._waits and trains:
            commit_after_backward(self._use, self._history, row, frozen=frozen)
