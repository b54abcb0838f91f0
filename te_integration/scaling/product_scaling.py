"""``ProductScaling``: scales of one product in one forward and its backwards, and where their amaxes are recorded."""

from torch import Tensor

from ...ddp.torch_internals import NO_BACKWARD, current_backward
from ...kernels.quantized import QuantSpec
from ..recipes import DelayedScaling, Operand, amax_group_now
from .amax_history import AmaxRow, ScalingUse, commit, commit_after_backward
from .scaled_module import OPERANDS

__all__ = ["ProductScaling"]


class _Graph:
    """A forward of training whose backward has not come: it lives as long as the forward's graph."""

    __slots__ = ("__weakref__",)


class ProductScaling:
    """Quantises the operands of one product in one forward and its backward.

    recipe   says elements and scales
    scales   [n] the module's
    product  its number in the module
    use      the module's, whose history gets the amaxes; None: this forward records none
    waits    amaxes wait for the end of the iteration, in a wrapper. False: for the backward alone
    """

    __slots__ = ("_first", "_graph", "_has_weight", "_row", "_scales", "_use", "_waits", "recipe")

    def __init__(
        self,
        recipe: DelayedScaling,
        scales: Tensor,
        product: int,
        use: ScalingUse | None = None,
        *,
        waits: bool = False,
    ) -> None:
        self.recipe = recipe
        self._scales, self._use, self._waits = scales, use, waits
        self._first = len(OPERANDS) * product
        self._has_weight = False
        self._graph = _Graph()
        self._row: AmaxRow | None = None
        if use is not None:
            self._row = AmaxRow(use, self._first, recipe, amax_group_now(), self._graph, scales.device)
            if waits:
                use.add(self._row)
            else:
                use.awaited.add(self._graph)

    def __eq__(self, other: object) -> bool:
        """Return True if the same scales quantise: copies of a weight are kept by it."""
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
            self._row.frozen = True
            commit([self._row])

    def enter_backward(self, *, trains: bool, frozen: bool) -> None:
        """A backward is about to record.

        trains  it brings a gradient of a weight; or, where all are ``frozen``, perhaps of others' weights
        """
        row, use = self._row, self._use
        if row is None or use is None:
            return
        task = current_backward()
        if row.backward not in (NO_BACKWARD, task):
            row = self._row = row.again(use, self._graph)
            if self._waits:
                use.add(row)
        row.backward = task
        use.awaited.discard(self._graph)
        if not self._waits and trains:
            row.frozen = frozen
            commit_after_backward(row)
