"""Forwards of units, and the autograd hooks that tell ``Root`` when backward enters and passes each of them.

Autograd runs the nodes of a graph in the reverse of the order in which forward made them. So backward enters a unit's
forward when it reaches the first of the forward's outputs. Backward has passed the forward when it reaches the first of
the forward's inputs. The units of one outermost forward are entered in reverse order::

    forward    outermost( block 0 | block 1 | block 2 )      trace: [block 0, block 1, block 2, outermost]
    backward   enter outermost | enter 2 | enter 1, pass 2 | enter 0, pass 1 | pass 0 | end of backward

``ForwardTrace`` is that order. It follows from the forwards alone, and so is the same on all ranks. It does not depend
on which outputs, and graphs with them, the program has kept.

An output of block 1 is an input of block 2, as a rule: one tensor with two hooks, of which the one that enters block 1
came first. So backward is in both units for a moment, and ``Root`` gathers ahead only when it has passed block 2.

``backward()`` delivers gradients to all leaves that it reaches. ``autograd.grad`` and ``backward(inputs=...)`` deliver
gradients to the given inputs alone. If these are not parameters, the backward is no part of an iteration.

A recompute of code inside a unit runs while backward is in the unit, whose modules register the whole parameters then.
A recompute around a unit calls the unit again, inside backward. Where it is not reentrant, hooks of the first forward
have entered the unit before: the recompute finds it gathered, and no backward comes through hooks of its own. A
reentrant one has left no hooks in its first forward. Then the recompute gathers the unit and frees it, unless it came
last. The nested backward enters the unit, gathers it again, and leaves it at its end. Neither gather is ahead of use.
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ...ddp.buckets.graph_walk import differentiable_tensors
from ...ddp.contract.delay_blocks import delay_blocks
from ...ddp.contract.main_grad import Demand, demand
from ...ddp.torch_internals import current_backward, delivers_to_all, tree_leaves, tree_map, will_execute
from ..unit.unit import Unit

if TYPE_CHECKING:
    from ..unit.weight_unit import WeightUnit
    from .root import Root

__all__ = [
    "Backward",
    "BackwardEnd",
    "BackwardHooks",
    "ForwardTrace",
    "UnitForward",
    "delivers_to_any",
    "with_params_copied",
]


class UnitForward:
    """One forward of a unit, and where backward is in the graph that the forward may have left.

    around  the units inside whose forwards it ran, the outermost first
    """

    __slots__ = ("around", "delays", "entered", "index", "num_blocks", "passed", "trains", "unit")

    def __init__(self, unit: Unit, around: tuple[Unit, ...]) -> None:
        self.unit = unit
        self.around = around
        self.num_blocks = -1 if delay_blocks.queue is not None else delay_blocks.num_entered
        """Number of ``delayed_wgrad`` blocks entered before the forward; -1 if the forward began inside a block."""
        self.delays = False
        """A part of the forward ran under ``delayed_wgrad``, here or perhaps on another rank."""
        self.trains = True
        """The model was not frozen: a backward through this forward belongs to an iteration."""
        self.index = -1
        """Index in its trace; -1 while the forward runs, and if it left no graph."""
        self.entered = -1
        """Id of the last graph task that has reached the outputs; -1: none."""
        self.passed = -1
        """Id of the last graph task that has reached the inputs; -1: none."""


class ForwardTrace:
    """The forwards of units inside one outermost forward, or inside the recomputes of one graph task, as they ended.

    task  id of the graph task that recomputes; a recomputed forward is passed once. -1: not a recompute
    """

    __slots__ = ("_forwards", "_forwards_of", "asked", "awaits_backward", "task")

    def __init__(self, task: int) -> None:
        self.task = task
        self._forwards: list[UnitForward] = []
        self._forwards_of: dict[int, list[UnitForward]] = {}
        self.asked: list[WeightUnit] = []
        """Weights that modules have asked for in these forwards, and that no backward has passed."""
        self.awaits_backward = False
        """An outermost forward that trains has ended, and no backward has reached it."""

    @property
    def has_graph(self) -> bool:
        """A forward has left a graph."""
        return bool(self._forwards)

    def add(self, forward: UnitForward) -> None:
        """Append a forward that has ended and left a graph."""
        forward.index = len(self._forwards)
        self._forwards.append(forward)
        self._forwards_of.setdefault(id(forward.unit), []).append(forward)

    def comes_again(self, forward: UnitForward, task: int) -> bool:
        """Graph task ``task``, which has passed ``forward``, has still to pass another forward of the unit."""
        mine = self._forwards_of[id(forward.unit)]
        return len(mine) > 1 and not all(self.is_passed(other, task) for other in mine)

    def before(self, forward: UnitForward, task: int, count: int) -> list[UnitForward]:
        """The next forwards that graph task ``task`` will pass after ``forward``, at most ``count``, in that order.

        A forward that the task has entered and not passed is among them.
        """
        found: list[UnitForward] = []
        for index in range(forward.index - 1, -1, -1):
            if len(found) == count:
                break
            if not self.is_passed(self._forwards[index], task):
                found.append(self._forwards[index])
        return found

    def is_passed(self, forward: UnitForward, task: int) -> bool:
        """Graph task ``task`` has passed ``forward``; any task, of a recomputed forward."""
        return forward.passed == task if self.task == -1 else forward.passed != -1


class BackwardHooks:
    """The autograd hooks on the inputs and outputs of one forward.

    Hooks on outputs own this object. Hooks on inputs refer to it weakly: recompute makes graphs that no backward
    reaches, over inputs that live on.
    """

    __slots__ = ("__weakref__", "_inputs", "forward", "listens", "trace")

    def __init__(self, forward: UnitForward, trace: ForwardTrace) -> None:
        self.forward = forward
        self.trace = trace
        self.listens = False
        """``watch_inputs`` was called, and ``watch_outputs`` is due: not without grad mode or parameters."""
        self._inputs: set[int] = set()
        """``id`` of inputs that require gradients, and of what they are views of: all live while forward runs."""

    def watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Register the hooks that tell that backward has passed the forward."""
        self.listens = True
        for tensor in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(tensor, Tensor):
                self._watch_input(tensor)
            elif tensor is not None and not isinstance(tensor, (bool, int, float, str)):
                for leaf in tree_leaves(tensor):
                    if isinstance(leaf, Tensor):
                        self._watch_input(leaf)

    def watch_outputs(self, outputs: Any) -> tuple[Any, bool]:
        """Register the hooks that tell that backward enters the forward.

        Returns the outputs, and whether they have a graph.

        Outputs may be replaced: by views, if they are inputs, and by copies with a graph, if they have none.
        """
        tensors = _tensors_of(outputs)
        if any(id(tensor) in self._inputs for tensor in tensors):
            # An output that is an input has one hook for entering and one for passing. The view orders these.
            outputs = tree_map(lambda leaf: leaf.view_as(leaf) if id(leaf) in self._inputs else leaf, outputs)
            tensors = _tensors_of(outputs)
        if (
            self.forward.unit.needs_graph
            and self.forward.trains
            and not any(tensor.grad_fn is not None for tensor in tensors)
        ):
            # This rank has used frozen parameters alone. Another rank may have used trained ones: backward must enter
            # the unit on both.
            outputs = tree_map(_with_graph, outputs)
            tensors = _tensors_of(outputs)
        opened = False
        for tensor in tensors:
            if tensor.grad_fn is not None:
                self._watch_output(tensor)
                opened = True
                base = tensor._base
                if base is not None and base.grad_fn is not None and id(base) not in self._inputs:
                    # The program may write to the view in place. Backward then comes to the tensor behind it alone.
                    self._watch_output(base)
        return outputs, opened

    def _watch_output(self, tensor: Tensor) -> None:
        handle = tensor.register_hook(partial(self._on_output, _behind(tensor.grad_fn)))
        # The module's own hooks come after it: one may run a backward inside the unit (an equilibrium model's).
        hooks: Any = handle.hooks_dict_ref()
        for key in [key for key in hooks if key != handle.id]:
            hooks[key] = hooks.pop(key)  # torch calls them in the order in which they came in

    def _watch_input(self, tensor: Tensor) -> None:
        if not tensor.requires_grad:
            return
        self._inputs.add(id(tensor))
        if tensor._base is not None:
            self._inputs.add(id(tensor._base))
        # A leaf's hook may run before other nodes of the forward's graph. A unit with leaf inputs alone is passed when
        # backward ends.
        if tensor.grad_fn is not None and tensor.device == self.forward.unit.device:
            tensor.register_hook(partial(_on_input, weakref.ref(self)))

    def _on_output(self, behind: Any, _: Tensor) -> None:
        """Hook on an output: backward is about to enter the forward's graph; ``behind``: a node of that graph."""
        task = current_backward()
        if self.forward.entered == task:  # another output of the same forward
            return
        plain = delivers_to_all()
        if plain and behind is not None and not will_execute(behind):
            return  # autograd.grad was asked for the output itself, and goes no further
        self.forward.entered = task
        self.forward.unit.root.pre_backward(self.forward, self.trace, task, delivers=plain)

    def on_input(self) -> None:
        """Hook on an input: backward has passed the forward.

        Autograd runs nodes in the reverse order of their creation, and every node of the forward was created after the
        nodes of its inputs. So the first input that is reached tells that all nodes of the forward have run.
        """
        forward, task = self.forward, current_backward()
        if forward.entered == task and forward.passed != task:
            forward.passed = task
            forward.unit.root.post_backward(forward, self.trace, task)


def _behind(node: Any) -> Any:
    """The first node to which ``node`` hands a gradient on; None: there is none."""
    return next((following for following, _ in node.next_functions if following is not None), None)


def _on_input(reference: "weakref.ref[BackwardHooks]", grad: Tensor) -> None:
    hooks = reference()
    if hooks is not None:
        hooks.on_input()


class Backward:
    """One backward, with the recomputes in it.

    task   id of the outermost graph task; recomputes may run graph tasks inside
    final  outside ``no_sync``: if the backward belongs to an iteration, it is the last
    """

    __slots__ = ("entered", "final", "keeps_graph", "recomputed", "task", "tasks", "trains")

    def __init__(self, task: int, *, final: bool) -> None:
        self.task = task
        self.final = final
        self.tasks: dict[int, list[Unit]] = {}
        """By graph task, nested ones too: the units that it entered first, and leaves by a callback at its end."""
        self.entered: dict[Unit, set[UnitForward]] = {}
        """The units that the backward has entered and not passed, with those of their forwards that it has entered and
        not passed: none if it has reached the unit's parameters past the outputs."""
        self.recomputed: dict[int, ForwardTrace] = {}
        """By graph task: the forwards that were recomputed in it."""
        self.keeps_graph = False
        """``create_graph=True``: a later backward reads the same whole parameters."""
        self.trains = False
        """The backward belongs to an iteration. False: it only goes through the model, for ``autograd.grad``, or
        because the whole model was frozen in the forward."""


class BackwardEnd:
    """Callback of autograd at the end of a graph task. If the task fails, autograd deletes it without a call.

    here  the model's ``Root``
    """

    __slots__ = ("_called", "_here", "_task")

    def __init__(self, here: "weakref.ref[Root]", task: int) -> None:
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


def delivers_to_any(params: Iterable[Tensor]) -> bool:
    """The ``backward(inputs=...)`` under way names one of ``params``, whole parameters."""
    trained = [param for param in params if param.requires_grad]
    return any(demand(get_gradient_edge(param).node) is Demand.ACCUMULATE for param in trained)


def with_params_copied(outputs: Any) -> Any:
    """The outputs of a forward, with a copy in place of each parameter: a parameter has no node for a hook, either."""
    if type(outputs) is Tensor or not any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves(outputs)):
        return outputs
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, nn.Parameter) else leaf, outputs)


def _with_graph(leaf: Any) -> Any:
    """A copy with a graph that leads to no parameter."""
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    return leaf.detach().requires_grad_().clone()


def _tensors_of(outputs: Any) -> list[Tensor]:
    return [outputs] if type(outputs) is Tensor else differentiable_tensors(outputs)
