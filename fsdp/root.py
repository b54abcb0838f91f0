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

import torch
from torch import nn
from torch.autograd import Variable

from ..ddp.failure_report import FailureReporter
from ..ddp.rank_grid import RankGrid, all_groups, with_separate_gather
from ..ddp.timeline import Timeline
from .grad_rounds import GradRounds
from .order import BackwardOrder, ForwardOrder
from .sharded_bucket import BucketEvents, ShardedBucket
from .unit import Unit, Use
from .unit_gathers import UnitGathers

__all__ = ["Root"]

KEPT_UNITS = 2
"""Units at the start of forward that stay gathered from a microbatch's backward to the next one's forward."""


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
        self._connect(trainable)
        self.gathers = UnitGathers(units, self.device)
        if self._copy_engines:
            self.gathers.map_memory(KEPT_UNITS + 1)
        self.grads = GradRounds(units, trainable, self._unit_of, self.failures, self.device)

        # Forward.
        self._running: list[Unit] = []  # units whose forward is, each inside the one before
        self._checked = False  # this iteration's first forward has found all units as they were made
        self.forward_order: ForwardOrder[Unit] = ForwardOrder()
        self.backward_order: BackwardOrder[Use] = BackwardOrder()

        # Backward.
        self.sync = True
        """False in every microbatch but the iteration's last."""
        self._final = True  # what it was in the last backward, also for weight gradients that are computed after it
        self._task: int | None = None  # the outermost graph task; None outside
        self._tasks: set[int] = set()  # those whose end will be heard of
        self._entered: list[Unit] = []
        self._keeps_graph = False  # backward(create_graph=True): what it read is read again

    # ---- Forward. ----

    def enter_forward(self, unit: Unit) -> None:
        """A unit's forward starts: gather it, and what comes next; its parameters are there for the current stream."""
        recomputes = torch._C._current_graph_task_id() != -1
        following: Unit | None = None
        if not recomputes:
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
        self._running.append(unit)

    def leave_forward(self, unit: Unit, use: Use | None) -> None:
        """A unit's forward is over; ``use``: it left a graph."""
        self._running.pop()
        if use is not None:
            use.around = tuple(self._running)
            self.backward_order.push(use)
        if unit.entered is None:
            reshards = unit.reshard_after_forward
            if reshards is None:
                reshards = unit is not self.units[0]
            # What backward begins with stays.
            if use is None or (reshards and not self.forward_order.came_last(unit)):
                self.gathers.release(unit)
        if not self._running and torch._C._current_graph_task_id() == -1:
            if use is None:
                self.gathers.release_all()
            if self.timeline is not None:
                self.timeline.forward_ended()

    def _begin(self) -> None:
        """The outermost forward starts."""
        if self.timeline is not None:
            self.timeline.forward_started()
        if self._task is not None:
            self.abandon()
        self._check_units()
        self.forward_order.begin()
        self.backward_order.begin()
        self.grads.begin()
        self.gathers.notice_changes()

    def _check_units(self) -> None:
        """Once in an iteration, and before every forward that is none's."""
        trains = torch.is_grad_enabled()
        if trains and self._checked:
            return
        with torch._C.DisableTorchFunctionSubclass():  # no value is read: shards need not ask who asks them
            for unit in self.units:
                unit.check()
        self._checked = trains

    # ---- Backward. ----

    def enter_backward(self, use: Use) -> None:
        """Backward has reached the outputs of a unit's forward."""
        unit = use.unit
        self._enter(unit)
        self.backward_order.enter(use)
        self.gathers.gather(unit)
        if all(other is unit or other in use.around for other in self._entered):
            self._prefetch_backward(unit, use, 1)  # otherwise that one leaves next, lets its parameters go, and does it
        self.gathers.arrive(unit)
        unit.show_in_backward()
        if torch.is_grad_enabled():
            self._keeps_graph = True

    def leave_backward(self, unit: Unit, use: Use | None) -> None:
        """Backward has passed the unit's inputs, or ended."""
        if unit.entered is None:
            return
        unit.entered = None
        self._entered.remove(unit)
        unit.hide_after_backward()
        if not self._keeps_graph and (self.sync or unit not in self.forward_order.first(KEPT_UNITS)):
            self.gathers.release(unit)
        if use is not None:
            self._prefetch_backward(unit, use, 2)  # before the reduction, which it would wait behind
        for kind in unit.kinds:
            awaits_delayed = any(bucket.has_pending for bucket in kind)
            for bucket in kind:
                if awaits_delayed:
                    self.grads.await_delayed(bucket)
                else:
                    self.grads.pass_bucket(bucket, final=self.sync)

    def _enter(self, unit: Unit) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            if self._task is None:
                self._task = task
                self._final = self.sync
                if self.grads.left_over:
                    self.grads.drop_what_was_cleared()
                if self.timeline is not None:
                    self.timeline.backward_started()
            self._tasks.add(task)
            Variable._execution_engine.queue_callback(_BackwardEnd(weakref.ref(self), task))
        if unit.entered is None:
            unit.entered = task
            self._entered.append(unit)

    def _prefetch_backward(self, unit: Unit, use: Use, count: int) -> None:
        if unit.backward_prefetch is not None:
            for other in unit.backward_prefetch:
                self.gathers.gather(other)
            return
        if count > 1 and any(other in use.around[1:] for other in self._entered):
            count = 1  # the unit around it still has its parameters
        for following in self.backward_order.before(use, count):
            if unit not in following.around:  # inside of what is left: done
                self.gathers.gather(following.unit)

    def end_backward(self, task: int) -> None:
        """A graph task is over, and with it every unit that it entered."""
        for unit in [unit for unit in self._entered if unit.entered == task]:
            self.leave_backward(unit, None)
        self._tasks.discard(task)
        if task != self._task:
            return
        self._task = None
        self._checked = self._checked and not self.sync
        if self.timeline is not None:
            self.timeline.backward_ended(self.sync)
        if not self._keeps_graph:  # otherwise a graph of these gradients reads the parameters: until the next forward
            self._let_go_after_backward()
        self._keeps_graph = False
        if not self.sync:
            self.grads.left_over = True
        elif not self.grads.has_pending:
            self.grads.finish()

    def _let_go_after_backward(self) -> None:
        """Release what the next forward does not begin with; with the next microbatch's first units at hand, gather."""
        if self.sync:
            self.gathers.release_all()
            return
        self.gathers.release_all(but=self.forward_order.first(KEPT_UNITS))
        for unit in self.forward_order.first(KEPT_UNITS + 1):
            self.gathers.gather(unit)

    def backward_failed(self, task: int) -> None:
        """A graph task was given up before its end: the modules have their shards again. The rest can wait."""
        for unit in self._entered:
            if unit.entered == task:
                unit.hide_after_backward()

    def abandon(self) -> None:
        """Give up what a backward that failed has left: what it did not reduce is lost."""
        self._task = None
        self._checked = False
        self._tasks.clear()
        self._keeps_graph = False
        for unit in self._entered:
            unit.entered = None
            unit.hide_after_backward()
        self._entered.clear()
        self.grads.discard()
        self.gathers.release_all()

    def _make_room(self, bucket: ShardedBucket) -> None:
        self.grads.make_room(bucket)

    def _on_grad(self, bucket: ShardedBucket) -> None:
        unit = self._unit_of[id(bucket)]
        if unit.entered is None:  # the graph came to the parameter another way, or again
            if not unit.arrived:
                raise RuntimeError(
                    f"backward came to '{bucket.name}' of {unit.label} past the outputs of its forward, and whole "
                    f"parameters were not there: return from forward all that the loss uses (a penalty too), or "
                    f"pass reshard_after_forward=False"
                )
            self._enter(unit)

    def _on_delayed_wgrad(self, bucket: ShardedBucket) -> None:
        self.grads.note_stream(bucket)
        if not bucket.awaits_delayed or bucket.has_pending:
            return
        kind = next(kind for kind in self._unit_of[id(bucket)].kinds if bucket in kind)
        if any(other.has_pending for other in kind):
            return
        for other in kind:
            self.grads.pass_bucket(other, final=self._final)
        if self._final and self._task is None and not self.grads.has_pending:
            self.grads.finish()

    # ---- Set-up. ----

    @property
    def timeline(self) -> Timeline | None:
        """The recording under way."""
        return self.grads.launcher.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self.grads.launcher.timeline = self.gathers.timeline = timeline

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
