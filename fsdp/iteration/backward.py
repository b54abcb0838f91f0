"""The state of a backward under way: the units that it has entered, and whether it brings gradients of parameters.

``backward()`` delivers gradients to all leaves that it reaches. ``autograd.grad`` and ``backward(inputs=...)`` deliver
gradients to the given inputs alone. If these are not parameters, the backward is no part of an iteration.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ...ddp.contract.target import Demand, demand
from ..unit.forwards import ForwardTrace, UnitForward
from ..unit.unit import Unit

__all__ = ["Backward", "BackwardEnd", "Entered", "delivers_to_any"]


class Entered(NamedTuple):
    """A unit that a backward has entered and not passed."""

    task: int
    """Id of the graph task that has entered the unit first."""
    forwards: set[UnitForward]
    """The forwards of the unit that the backward has entered and not passed."""
    trains: bool
    """The backward brings gradients of the unit's parameters."""


class Backward:
    """One backward.

    task   id of the outermost graph task; recomputes may run graph tasks inside
    final  outside ``no_sync``: if the backward belongs to an iteration, it is the last
    """

    __slots__ = ("entered", "final", "keeps_graph", "recomputed", "task", "tasks", "trains")

    def __init__(self, task: int, *, final: bool) -> None:
        self.task = task
        self.final = final
        self.tasks: set[int] = set()
        """Graph tasks, nested ones too, with a callback at their end."""
        self.entered: dict[Unit, Entered] = {}
        """The units that the backward has entered and not passed."""
        self.recomputed: dict[int, ForwardTrace] = {}
        """By graph task: the forwards that were recomputed in it."""
        self.keeps_graph = False
        """``create_graph=True``: a later backward reads the same whole parameters."""
        self.trains = False
        """The backward belongs to an iteration. False: it only goes through the model, for ``autograd.grad``, or
        because the whole model was frozen in the forward."""


def delivers_to_any(params: Iterable[Tensor]) -> bool:
    """Whether the ``backward(inputs=...)`` under way names one of ``params``, whole parameters."""
    trained = [param for param in params if param.requires_grad]
    return any(demand(get_gradient_edge(param).node) is Demand.ACCUMULATE for param in trained)


class BackwardEnd:
    """Callback of autograd at the end of a graph task. If the task fails, autograd deletes it without a call.

    here  the model's ``Root``
    """

    __slots__ = ("_called", "_here", "_task")

    def __init__(self, here: "weakref.ref[Any]", task: int) -> None:
        self._here = here
        self._task = task
        self._called = False

    def __call__(self) -> None:
        self._called = True
        live = self._here()
        if live is not None:
            live.end_backward(self._task)

    def __del__(self) -> None:
        live = None if self._called else self._here()
        if live is not None:
            live.backward_failed(self._task)
