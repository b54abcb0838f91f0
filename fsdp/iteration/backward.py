"""What is known of a backward that is under way, and whether it trains.

``backward()`` delivers gradients to all leaves that it reaches. ``autograd.grad`` and ``backward(inputs=...)`` go
through a model for what they are asked for, which parameters mostly are not: then they are no part of an iteration.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ...ddp.contract.demand import Demand, demand
from ..unit.forwards import ForwardTrace, UnitForward
from ..unit.unit import Unit

__all__ = ["Backward", "Entered", "delivers_to_any"]


class Entered(NamedTuple):
    """A unit that a backward is in."""

    task: int
    """The graph task that has entered it first."""
    forwards: set[UnitForward]
    """Those that it has entered, and not passed."""
    trains: bool
    """It brings the unit gradients."""


class Backward:
    """One backward.

    task   the outermost graph task
    final  it is the iteration's last, if it is one of an iteration
    """

    __slots__ = ("entered", "final", "keeps_graph", "recomputed", "task", "tasks", "trains")

    def __init__(self, task: int, *, final: bool) -> None:
        self.task = task
        self.final = final
        self.tasks: set[int] = set()
        """Graph tasks whose end will be heard of, nested ones too."""
        self.entered: dict[Unit, Entered] = {}
        """The units that it is in."""
        self.recomputed: dict[int, ForwardTrace] = {}
        """By graph task: forwards that ran again in it."""
        self.keeps_graph = False
        """``create_graph=True``: what it read is read again."""
        self.trains = False
        """It is one of an iteration. Otherwise it only goes through the model: for ``autograd.grad``, or because all of
        it was frozen in its forward."""


def delivers_to_any(params: Iterable[Tensor]) -> bool:
    """Whether a ``backward(inputs=...)`` under way names one of these, whole parameters, that its graph has."""
    trained = [param for param in params if param.requires_grad]
    return any(demand(get_gradient_edge(param).node) is Demand.ACCUMULATE for param in trained)
