"""Where backward is: one forward of a unit whose graph is open, and the hooks that tell when backward comes and goes.

Autograd runs the nodes of a graph in the reverse of the order in which forward made them. So backward comes to a unit
with the outputs of its forward, and has passed it with the first of its inputs; the units of one forward in reverse::

    forward   outermost( stem | block 0 | block 1 | head )      a trace: [block 0, block 1, outermost]
    backward             outermost is entered | block 1 | block 0 | ...

A trace says which uses there are, and in which order backward comes to them. It follows from the forward alone: whether
somebody kept the outputs, and the graph with them, changes nothing.
"""

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...ddp.buckets.graph_walk import differentiable_tensors
from ...ddp.contract.demand import delivers, goes_on_to
from ...ddp.torch_internals import current_backward, tree_leaves, tree_map

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["BackwardHooks", "ForwardTrace", "UnitForward"]


class UnitForward:
    """One forward of a unit.

    around  the units that it ran inside, the outermost first
    """

    __slots__ = ("around", "delays", "entered", "index", "passed", "trains", "unit")

    def __init__(self, unit: "Unit", around: "tuple[Unit, ...]") -> None:
        self.unit = unit
        self.around = around
        self.delays = False
        """Some of it ran under ``delayed_wgrad``."""
        self.trains = True
        """Its backward is one of an iteration: the model was not frozen meanwhile."""
        self.index = -1
        """Place in its trace; -1 until forward has ended, and for good where it left no graph."""
        self.entered = -1
        """The graph task that has reached its outputs last."""
        self.passed = -1
        """The graph task that has reached its inputs last."""


class ForwardTrace:
    """The uses of units in one outermost forward, or in one recomputed part of it, as their forwards ended.

    task  the graph task that it was recomputed in, whose parts follow each other here, each passed once; -1 outside of
          backward
    """

    __slots__ = ("_forwards", "_forwards_of", "task")

    def __init__(self, task: int) -> None:
        self.task = task
        self._forwards: list[UnitForward] = []
        self._forwards_of: dict[int, list[UnitForward]] = {}

    def add(self, forward: UnitForward) -> None:
        """A forward has ended, and left a graph."""
        forward.index = len(self._forwards)
        self._forwards.append(forward)
        self._forwards_of.setdefault(id(forward.unit), []).append(forward)

    def comes_again(self, forward: UnitForward, task: int) -> bool:
        """Whether a backward that has passed ``use`` has another use of the same unit before it."""
        mine = self._forwards_of[id(forward.unit)]
        return len(mine) > 1 and not all(self._is_passed(other, task) for other in mine)

    def before(self, forward: UnitForward, task: int, count: int) -> list[UnitForward]:
        """The uses that a backward has not passed after this one, the next one first, at most ``count``.

        Where it has entered another since it entered this one, that is the first of them.
        """
        found: list[UnitForward] = []
        for index in range(forward.index - 1, -1, -1):
            if len(found) == count:
                break
            if not self._is_passed(self._forwards[index], task):
                found.append(self._forwards[index])
        return found

    def _is_passed(self, forward: UnitForward, task: int) -> bool:
        return forward.passed == task if self.task == -1 else forward.passed != -1


class BackwardHooks:
    """What autograd's hooks of one use share: those on outputs own it, those on inputs refer to it weakly."""

    __slots__ = ("__weakref__", "_inputs", "forward", "trace")

    def __init__(self, forward: UnitForward, trace: ForwardTrace) -> None:
        self.forward = forward
        self.trace = trace
        self._inputs: set[int] = set()  # ``id`` of those that have gradients, while forward runs

    def watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hear when backward has passed the use."""
        for tensor in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(tensor, Tensor):
                self._watch_input(tensor)
            elif tensor is not None and not isinstance(tensor, (bool, int, float, str)):
                for leaf in tree_leaves(tensor):
                    if isinstance(leaf, Tensor):
                        self._watch_input(leaf)

    def watch_outputs(self, outputs: Any) -> tuple[Any, bool]:
        """Hear when backward comes to the use; returns the outputs, and whether they have a graph."""
        tensors = _tensors_of(outputs)
        if any(id(tensor) in self._inputs for tensor in tensors):
            # Backward must leave the unit after it has entered it, on ranks where it only hands something on too.
            outputs = tree_map(lambda leaf: leaf.view_as(leaf) if id(leaf) in self._inputs else leaf, outputs)
            tensors = _tensors_of(outputs)
        self._inputs.clear()
        if (
            self.forward.unit.needs_graph
            and self.forward.trains
            and not any(tensor.grad_fn is not None for tensor in tensors)
        ):
            # Another rank may have used what it trains, and this one what is frozen: backward comes to it on both.
            outputs = tree_map(_with_graph, outputs)
            tensors = _tensors_of(outputs)
        opened = False
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._on_output, _behind(tensor.grad_fn)))
                opened = True
        return outputs, opened

    def _watch_input(self, tensor: Tensor) -> None:
        if not tensor.requires_grad:
            return
        self._inputs.add(id(tensor))
        # A leaf's hook may run before all of the forward's graph has: such a unit is passed when backward ends.
        if tensor.grad_fn is not None and tensor.device == self.forward.unit.device:
            # Weakly: recompute makes graphs that no backward comes to, over inputs that live on.
            tensor.register_hook(partial(_on_input, weakref.ref(self)))

    def _on_output(self, behind: Any, _: Tensor) -> None:
        """Backward is about to enter the forward's graph; ``behind``: a node that it has there."""
        task = current_backward()
        if self.forward.entered == task:  # another output of the same forward
            return
        plain = delivers()
        if plain and behind is not None and not goes_on_to(behind):
            return  # autograd.grad for the output itself
        self.forward.entered = task
        self.forward.unit.root.enter_backward(self.forward, self.trace, task, delivers=plain)

    def on_input(self) -> None:
        """Backward has left it: autograd runs later nodes first, and all of the forward's are later than its inputs'.

        That holds for all parts of the forward, those that no input leads to as well, and with several inputs already
        for the first that is reached.
        """
        forward, task = self.forward, current_backward()
        if forward.entered == task and forward.passed != task:
            forward.passed = task
            forward.unit.root.leave_backward(forward, self.trace, task)


def _behind(node: Any) -> Any:
    """The first that a graph's node hands a gradient on to."""
    return next((following for following, _ in node.next_functions if following is not None), None)


def _on_input(reference: "weakref.ref[BackwardHooks]", grad: Tensor) -> None:
    hooks = reference()
    if hooks is not None:
        hooks.on_input()


class _WithGraph(torch.autograd.Function):
    """A copy that has a graph, which leads nowhere."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def _with_graph(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    return _WithGraph.apply(leaf, leaf.new_zeros((), requires_grad=True))  # type: ignore[no-untyped-call]


def _tensors_of(outputs: Any) -> list[Tensor]:
    return [outputs] if type(outputs) is Tensor else differentiable_tensors(outputs)
