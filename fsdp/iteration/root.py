"""What the units of one model share: streams, the order of gathers and reductions, the pool of gradients.

    compute   | forward k        | forward k+1      |   ...   | backward k+1       | backward k         |
    gathers   |  k+1             |  k+2             |         |  k          | k-1  |             | k-2  |
    reduces                                                   |       k+2          |  k+1               |

Gathers and reductions run on streams and communicators of their own. In backward the next gather is issued before the
unit's reduction. Nothing here waits on the host but what a backend without streams (gloo) makes it wait for.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ...ddp.collectives.failure_report import FailureReporter
from ...ddp.collectives.observer import Observer
from ...ddp.collectives.rank_grid import RankGrid, all_groups, with_separate_gather
from ...ddp.contract.delayed import delay_blocks
from ...ddp.torch_internals import DisableTorchFunctionSubclass, call_when_backward_ends, current_backward
from ..unit.bucket import BucketEvents, ShardedBucket
from ..unit.unit import Unit
from ..unit.uses import Passage, Trace, Use
from .backward import Backward, Entered, delivers_to_any
from .gathers import UnitGathers
from .order import ForwardOrder
from .parts import RootParts
from .rounds import GradRounds

__all__ = ["Root"]

KEPT_UNITS = 2
"""Units at the start of forward that stay gathered from a microbatch's backward to the next one's forward."""


class _Running(NamedTuple):
    """A forward that is under way."""

    unit: Unit
    trace: Trace
    num_blocks: int
    """Of ``delayed_wgrad``, entered before it; -1 where it began in one."""


class Root:
    """The state of one model: its units, and where its iteration stands.

    module  of the outermost unit; held weakly, as it owns this
    units   the outermost first, then in the order of ``named_modules``
    """

    def __init__(self, module: nn.Module, units: list[Unit]) -> None:
        self.module = weakref.ref(module)
        self.units = units
        self.buckets = [bucket for unit in reversed(units) for bucket in unit.buckets]  # about backward's order
        self.device = units[0].device
        self._unit_of = {id(bucket): unit for unit in units for bucket in unit.buckets}
        self.failures = FailureReporter()
        self._join_ranks()
        trainable = [bucket for bucket in self.buckets if bucket.trainable]
        self._trains = bool(trainable)
        self._connect(trainable)
        self.gathers = UnitGathers(units, self.device)
        if self._copy_engines:
            self.gathers.map_memory(KEPT_UNITS + 1)
        self.grads = GradRounds(units, trainable, self.failures, self.device)

        self.sync = True
        """False in every microbatch but the iteration's last."""
        self.parts = RootParts(self)
        """The parts of the model that take turns, where it is one of them or holds them."""
        self.forward_order: ForwardOrder[Unit] = ForwardOrder()
        self._running: list[_Running] = []  # forwards, each inside the one before
        self._checked = False  # this iteration's first forward has found all units as they were made
        self._frozen = False  # all of the model was, for the last outermost forward
        self._backward: Backward | None = None
        self._named = (-1, False)  # a graph task that asks for gradients, and whether it asks for parameters

    # ---- Forward. ----

    def enter_forward(self, unit: Unit) -> Passage:
        """A unit's forward starts: gather it, and what comes next; its parameters are there for the current stream."""
        task = current_backward()
        following: Unit | None = None
        if task == -1:  # not recomputed
            if not self._running:
                self._begin()
            following = self.forward_order.enter(unit)
        self.gathers.gather(unit)
        if unit.forward_prefetch is not None:
            for other in unit.forward_prefetch:
                self.gathers.gather(other)
        elif following is not None:
            self.gathers.gather(following)
        self.gathers.arrive(unit)
        around = tuple(running.unit for running in self._running)
        passage = Passage(Use(unit, around), self._trace_of(task))
        # What is recomputed goes by what is frozen now, as it does without units.
        passage.use.trains = not (self._frozen if task == -1 else self._is_frozen())
        trace = passage.trace
        num_blocks = -1 if delay_blocks.queue is not None else delay_blocks.num_entered
        self._running.append(_Running(unit, trace, num_blocks))
        return passage

    def leave_forward(self, unit: Unit, passage: Passage | None) -> None:
        """A unit's forward is over; ``passage``: it left a graph."""
        running = self._running.pop()
        if passage is not None:
            # Whether this rank has delayed something or not: another may have.
            passage.use.delays = running.num_blocks != delay_blocks.num_entered
            passage.trace.add(passage.use)
        if self._backward is None or unit not in self._backward.entered:
            reshards = unit.reshard_after_forward
            if reshards is None:
                reshards = unit is not self.units[0]
            # What backward begins with stays.
            if passage is None or (reshards and not self.forward_order.came_last(unit)):
                self.gathers.release(unit)
        if not self._running and current_backward() == -1:
            if passage is None:
                self.gathers.release_all()
            self.observer.forward_ended()

    def _trace_of(self, task: int) -> Trace:
        """Of the forward that is under way, or of what this graph task has recomputed so far."""
        if self._running and self._running[-1].trace.task == task:
            return self._running[-1].trace
        if task == -1 or self._backward is None:
            return Trace(task)
        return self._backward.recomputed.setdefault(task, Trace(task))

    def _begin(self) -> None:
        """The outermost forward starts."""
        self.observer.forward_started()
        if self._backward is not None:
            self.abandon()
        self.grads.check_delays_are_over("a forward")  # which gathers
        self._check_units()
        self.forward_order.begin()
        self.grads.begin()
        self.gathers.notice_changes()

    def _check_units(self) -> None:
        """Once in an iteration, and before every forward that is none's."""
        trains = torch.is_grad_enabled()
        self._frozen = self._is_frozen()
        if self._frozen or (trains and self._checked):
            return
        with DisableTorchFunctionSubclass():  # no value is read: shards need not ask who asks them
            for unit in self.units:
                unit.check()
        self._checked = trains

    def _is_frozen(self) -> bool:
        """All that the model trains is frozen for now: a backward only goes through."""
        with DisableTorchFunctionSubclass():
            return self._trains and all(unit.registered.is_frozen for unit in self.units)

    # ---- Backward. ----

    def enter_backward(self, use: Use, trace: Trace, task: int, *, delivers: bool) -> None:
        """Backward, in this graph task, has reached the outputs of a unit's forward."""
        unit = use.unit
        trains = use.trains and (delivers or self._is_named_in(task))
        backward = self._enter(unit, task, trains=trains, delays=use.delays)
        uses = backward.entered[unit].uses
        uses.add(use)
        self.gathers.gather(unit)
        if all(other is unit or other in use.around for other in backward.entered):
            self._prefetch(use, trace, task, 1)  # otherwise that one leaves next, lets its parameters go, and does it
        self.gathers.arrive(unit)
        unit.registered.show_in_backward(frozen=not any(entered.trains for entered in uses))
        if torch.is_grad_enabled():
            backward.keeps_graph = True

    def leave_backward(self, use: Use, trace: Trace, task: int) -> None:
        """Backward, in this graph task, has passed the inputs of a unit's forward."""
        unit, backward = use.unit, self._backward
        if backward is None or unit not in backward.entered:
            return
        entered = backward.entered[unit]
        entered.uses.discard(use)
        if entered.uses or trace.comes_again(use, task):
            return
        self._let_go_of(unit, backward)
        self._prefetch(use, trace, task, 2)  # before the reduction, which it would wait behind
        if entered.trains:
            self.grads.leave(unit, final=backward.final)

    def _is_named_in(self, task: int) -> bool:
        """``backward(inputs=...)`` is for whole parameters that somebody has kept: asked once in a graph task."""
        if self._named[0] != task:
            self._named = task, delivers_to_any(pair.whole for bucket in self.buckets for pair in bucket.pairs)
        return self._named[1]

    def _enter(self, unit: Unit, task: int, *, trains: bool, delays: bool) -> Backward:
        backward = self._backward
        if backward is None:
            self.grads.check_delays_are_over("a backward")  # which gathers
            backward = self._backward = Backward(task, final=self.sync)
            self.observer.backward_started()
        if trains and not backward.trains:
            backward.trains = True
            self.grads.backward_began()
        if task not in backward.tasks:
            backward.tasks.add(task)
            call_when_backward_ends(_BackwardEnd(weakref.ref(self), task))
        entered = backward.entered.setdefault(unit, Entered(task, set(), trains))
        if trains:
            backward.entered[unit] = entered._replace(trains=True)
            self.grads.enter(unit, waits=delays)
        return backward

    def _let_go_of(self, unit: Unit, backward: Backward) -> None:
        """Backward needs the unit's parameters no more."""
        del backward.entered[unit]
        unit.registered.hide_after_backward()
        if not backward.keeps_graph and (backward.final or unit not in self.forward_order.first(KEPT_UNITS)):
            self.gathers.release(unit)

    def _prefetch(self, use: Use, trace: Trace, task: int, count: int) -> None:
        """Gather what backward comes to next."""
        unit, backward = use.unit, self._backward
        assert backward is not None, "it has come to the unit"
        if unit.backward_prefetch is not None:
            for other in unit.backward_prefetch:
                self.gathers.gather(other)
            return
        if count > 1 and any(other in use.around[1:] for other in backward.entered):
            count = 1  # the unit around it still has its parameters
        for following in trace.before(use, task, count):
            if unit not in following.around:  # inside of what is left: done
                self.gathers.gather(following.unit)

    def end_backward(self, task: int) -> None:
        """A graph task is over, and with it every unit that it entered."""
        backward = self._backward
        if backward is None:
            return
        for unit in [unit for unit, entered in backward.entered.items() if entered.task == task]:
            trained = backward.entered[unit].trains
            self._let_go_of(unit, backward)
            if trained:
                self.grads.leave(unit, final=backward.final)
        backward.tasks.discard(task)
        if task != backward.task:
            return
        self._backward = None
        self._checked = self._checked and not (backward.final and backward.trains)
        self.observer.backward_ended(backward.final and backward.trains)
        if not backward.keeps_graph:  # otherwise a graph of these gradients reads them: until the next forward
            self._let_go_after_backward(final=backward.final)
        if backward.trains:
            self.grads.backward_ended(final=backward.final)

    def _let_go_after_backward(self, *, final: bool) -> None:
        """Release what the next forward does not begin with; with the next microbatch's first units at hand, gather."""
        if final:
            self.gathers.release_all()
            self.gathers.expect_step()
            return
        self.gathers.release_all(but=self.forward_order.first(KEPT_UNITS))
        for unit in self.forward_order.first(KEPT_UNITS + 1):
            self.gathers.gather(unit)

    def backward_failed(self, task: int) -> None:
        """A graph task was given up before its end: the modules have their shards again. The rest can wait."""
        for unit, entered in () if self._backward is None else self._backward.entered.items():
            if entered.task == task:
                unit.registered.hide_after_backward()

    def abandon(self) -> None:
        """Give up what a backward that failed has left: what it did not reduce is lost."""
        backward, self._backward = self._backward, None
        self._checked = False
        for unit in () if backward is None else backward.entered:
            unit.registered.hide_after_backward()
        self.grads.give_up()
        self.gathers.release_all()

    def _make_room(self, bucket: ShardedBucket) -> None:
        self.grads.make_room(bucket)

    def _on_grad(self, bucket: ShardedBucket) -> None:
        unit = self._unit_of[id(bucket)]
        if self._backward is None or unit not in self._backward.entered:
            # The graph came to the parameter another way, or again.
            if not unit.arrived:
                raise RuntimeError(
                    f"backward came to '{bucket.name}' of {unit.label} past the outputs of its forward, and whole "
                    f"parameters were not there: return from forward all that the loss uses (a penalty too), or "
                    f"pass reshard_after_forward=False"
                )
            self._enter(unit, current_backward(), trains=True, delays=False)

    def _on_delayed_wgrad(self, bucket: ShardedBucket) -> None:
        self.grads.delayed_wgrad_done(bucket)

    # ---- Set-up. ----

    @property
    def observer(self) -> Observer:
        """Who is told what an iteration does."""
        return self.grads.launcher.observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        self.grads.launcher.observer = self.gathers.observer = observer

    def _join_ranks(self) -> None:
        """Groups of their own for gathers, and what gradients are divided by: an expert has seen all ranks' tokens."""
        grids: dict[int, RankGrid] = {}
        self._copy_engines = any(unit.copy_engines for unit in self.units)
        size = self.units[0].grid.size
        with self.failures.watch("the making of process groups"):
            for bucket in self.buckets:
                grid = bucket.reduction.grid
                joined = grids.setdefault(id(grid.inner), grid)
                if joined.inner is joined.gather:
                    joined = grids[id(grid.inner)] = with_separate_gather(joined, copy_engines=self._copy_engines)
                bucket.reduction.grid = grid._replace(gather=joined.gather)
                bucket.reduction.factor = 1.0 / size
        self.failures.groups = all_groups([bucket.reduction.grid for bucket in self.buckets])

    def _connect(self, trainable: list[ShardedBucket]) -> None:
        here = weakref.ref(self)
        events = BucketEvents(
            partial(_on, here, Root._make_room),
            partial(_on, here, Root._on_grad),
            partial(_on, here, Root._on_delayed_wgrad),
        )
        numbers = {id(bucket): index for index, bucket in enumerate(trainable)}
        for unit in self.units:
            unit.root_reference = here
            for bucket in unit.buckets:
                bucket.connect(numbers.get(id(bucket), -1), self.failures, events)


def _on(here: "weakref.ref[Root]", event: Callable[[Root, ShardedBucket], None], bucket: ShardedBucket) -> None:
    live = here()
    if live is not None:
        event(live, bucket)


class _BackwardEnd:
    """What the engine calls at the end of a graph task; it lets it go uncalled where backward fails."""

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
