"""``Root``: the life of a unit in an iteration. It decides when to gather, free and reduce the units of a model.

    compute   | forward k        | forward k+1      |   ...   | backward k+1       | backward k         |
    gathers   |  k+1             |  k+2             |         |  k          | k-1  |             | k-2  |
    reduces                                                   |       k+2          |  k+1               |

The order of the methods is that of an iteration. ``FSDPModule`` calls the first two, and hooks of autograd
(``hooks.py``) the others. Step 5 is called by the gradient itself, from inside a backward. Comments have the numbers of
these steps, here and in ``rounds.py``. These two files and ``hooks.py`` tell a unit's round; what they call in other
files is said where they call it::

    pre_forward     1  gather the unit and the next one, and wait     UnitGathers, below; ShardedBucket.fill
                    2  modules register the whole parameters          Registration (../unit/registration.py)
    post_forward    3  modules register the shards; free the memory   UnitGathers.release
    pre_backward    4  modules register the whole parameters, for a
                       recompute; gather the unit, and the next one
    (first write)   5  whole gradients take memory                    GradRounds.make_room (rounds.py), by the record
    post_backward   6  as 3; gather ahead
                    7  keep the gradients, or launch their reduction  GradRounds.leave
    end_backward    8  send what is left; .grad is complete           GradRounds, GradShard (../unit/grad_shard.py)

``begin`` comes first, in step 1 of the outermost unit: it gives up an iteration that has failed, and drops gathers that
are older than the shards.

Where placements keep parameters whole (ZeRO-2), ``release`` frees nothing, and the later gathers of an iteration find
the unit gathered. After an iteration ``notice_changes`` says that it is not. So step 1 of the next forward gathers what
the optimizer has changed, once. Steps 5 to 8 are those of ZeRO-3.

Gathers and reductions run on streams and communicators of their own. The host waits only with a backend without
streams (gloo). The gathers' stream owns the memory of whole parameters. Before this stream uses memory again, it waits
for the streams that have read the earlier contents.
"""

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from ...ddp.buckets.buffer import Meter
from ...ddp.buckets.iteration_ends import is_watched, record_forward
from ...ddp.collectives.failure_report import FailureReporter
from ...ddp.collectives.streams import communication_stream, current_stream
from ...ddp.collectives.timeline import UNOBSERVED, Observer
from ...ddp.contract.delay_blocks import delay_blocks
from ...ddp.gathers.gathered_models import record_gathered_model
from ...ddp.torch_internals import (
    NO_BACKWARD,
    DisableTorchFunctionSubclass,
    call_when_backward_ends,
    current_backward,
)
from ..unit.bucket import ShardedBucket
from ..unit.plan import cast_floating, cast_inputs
from ..unit.unit import Unit
from .connect import connect_units, map_memory, ranks_of_model, use_copy_engines
from .hooks import (
    Backward,
    BackwardEnd,
    BackwardHooks,
    ForwardTrace,
    UnitForward,
    delivers_to_any,
    with_params_copied,
)
from .parts import RootParts
from .rounds import GradRounds
from .weights import WeightAsks

__all__ = ["Root", "UnitGathers"]

KEPT_UNITS = 2
"""Number of units, from the start of forward, that stay gathered between two microbatches."""


class Root:
    """The units of one model, and the state of the model's iteration.

    module  the outermost unit's module, which owns this object; the reference is weak
    units   the outermost first, then in the order of ``named_modules``
    """

    def __init__(self, module: nn.Module, units: list[Unit]) -> None:
        self.module = weakref.ref(module)
        self.units = units
        self.buckets = [bucket for unit in reversed(units) for bucket in unit.buckets]  # about backward's order
        self.device = units[0].device
        self.failures = FailureReporter()
        self.copy_engines = use_copy_engines(units, self.buckets, self.failures)
        """Gathers run on copy engines."""
        connect_units(module, units, self.buckets, weakref.ref(self), self.failures, copy_engines=self.copy_engines)
        self._mapped = False
        self.gathers = UnitGathers(units, self.device)
        trained = [bucket for bucket in self.buckets if bucket.trainable]
        self.grads = GradRounds(units, trained, ranks_of_model(units), self.failures)
        for unit in units:
            unit.join_logs(self.grads.steps)

        self.sync = True
        """False within ``no_sync``, which ``parts`` has: in every microbatch but the iteration's last."""
        self.parts = RootParts(self)
        """The interface of a pipeline schedule that runs the model, or parts of the model, by turns."""
        self.weights = WeightAsks(self)
        """Serves modules that ask for their weights one by one."""
        self._all_checked = False  # since the last backward: see ``_check_units``
        self._frozen = False  # the whole model was, in the last outermost forward. A backward then only goes through
        self._running: list[BackwardHooks] = []  # of forwards under way, each inside the one before
        self._backward: Backward | None = None

    def gather_by_kernels(self) -> None:
        """Gather by kernels from now on, in memory that torch's allocator chooses."""
        self.copy_engines = False
        for bucket in self.buckets:
            bucket.whole_params.pool = None

    # ---- Forward. ----

    def pre_forward(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A unit's forward starts. Returns its args and kwargs, cast by the policy."""
        # 1. Gather the unit, and ahead of use the unit that came next the last time.
        task = current_backward()
        if task == -1 and not self._running:
            self.begin(unit)
        self.gather_for_forward(unit)
        self.gathers.wait(unit)

        # 2. Modules register the whole parameters. Hooks on inputs will tell that backward has passed the forward.
        forward = UnitForward(unit, tuple(running.forward.unit for running in self._running))
        # A recompute sees what is frozen now, as it does without units.
        forward.trains = not (self._frozen if task == -1 else self._is_frozen())
        hooks = BackwardHooks(forward, self._trace_of(task))
        self._running.append(hooks)
        unit.registered.show_whole(frozen=not forward.trains)
        if unit.num_unshards:
            unit.writes.note()  # writes after unshard() are lost, unless unsharded() writes back
        module = unit.module()
        unit.writes.forward_begins(training=module is not None and module.training)
        if unit.policy.param_dtype is not None and unit.policy.cast_forward_inputs:
            args, kwargs = cast_inputs(args, kwargs, unit.policy.param_dtype)
        if torch.is_grad_enabled() and unit.pairs:
            hooks.watch_inputs(args, kwargs)
        return args, kwargs

    def gather_for_forward(self, unit: Unit) -> None:
        """Gather a unit whose forward starts and, except in a recompute, the one that came next the last time."""
        following: Sequence[Unit] = []
        if current_backward() == NO_BACKWARD:  # a recompute's unit is followed by another one's backward
            predicted = self.gathers.forward_enters(unit)
            following = predicted if unit.forward_prefetch is None else unit.forward_prefetch
        self.gathers.gather(unit)
        for other in following:
            self.gathers.gather(other)

    def post_forward(self, unit: Unit, outputs: Any) -> Any:
        """A unit's forward has ended. Returns its outputs, cast by the policy."""
        # 3. Modules register the shards. The whole parameters are freed, unless backward begins with this unit. Hooks
        # on outputs will tell that backward enters the forward.
        try:
            unit.writes.forward_ends()
        except RuntimeError:
            self.forward_failed(unit, wrote=True)
            raise
        self._show_shards(unit)
        outputs = with_params_copied(outputs)  # the memory of those that forward returns is freed
        if unit.policy.output_dtype is not None:
            outputs = cast_floating(outputs, unit.policy.output_dtype)
        hooks, has_graph = self._running[-1], False
        if hooks.listens:
            outputs, has_graph = hooks.watch_outputs(outputs)
        self._leave_forward(unit, has_graph=has_graph)
        return outputs

    def forward_failed(self, unit: Unit, *, wrote: bool = False) -> None:
        """Forward has raised, or a recompute has stopped it early; ``wrote``: whole parameters hold refused writes."""
        wrote = unit.writes.forward_failed() or wrote
        self._show_shards(unit)
        self._leave_forward(unit, has_graph=False, failed=True)
        for bucket in unit.buckets if wrote else ():
            bucket.record_change()  # the next forward gathers what was there before the write

    def _show_shards(self, unit: Unit) -> None:
        unit.registered.show_shards()
        if torch.is_autocast_enabled(self.device.type):
            # Autocast caches casts of parameters, which would stay in memory. Their gradients would come too late.
            torch.clear_autocast_cache()

    def _leave_forward(self, unit: Unit, *, has_graph: bool, failed: bool = False) -> None:
        """A unit's forward is over; ``has_graph``: hooks on its graph will tell of backward."""
        hooks = self._running.pop()
        if has_graph:
            # Even if this rank has delayed no gradient, another rank may have.
            hooks.forward.delays = hooks.forward.num_blocks != delay_blocks.num_entered
            hooks.trace.add(hooks.forward)
        self.release_after_forward(unit, has_graph=has_graph)
        if not self._running and current_backward() == NO_BACKWARD:
            # A model without parameters of its own has no hooks, and the units in it may wait for backward.
            awaits_backward = has_graph or (hooks.trace.has_graph and not hooks.listens)
            if failed or not awaits_backward:
                self.gathers.release_all()
            module = self.module()
            if hooks.trace.has_graph and not self._frozen and module is not None and module.training:
                hooks.trace.awaits_backward = True
                self.grads.steps.record_forward()  # ranks compare how many of these no backward has used
            self.observer.forward_ended()

    def release_after_forward(self, unit: Unit, *, has_graph: bool) -> None:
        """Free the whole parameters after a forward, unless the backward comes next."""
        in_backward = self._backward is not None and unit in self._backward.entered
        in_forward = any(hooks.forward.unit is unit for hooks in self._running)  # of a module that calls itself
        # The last unit of the forward stays gathered, because backward begins with it. Which one is the last is known
        # from the forward before: the first forward frees it, and its backward gathers it again. If no backward comes,
        # the next forward finds it gathered, or ``notice_changes`` drops it.
        if not (in_backward or in_forward) and (not has_graph or (unit.reshards and not self.gathers.came_last(unit))):
            self.gathers.release(unit)

    @property
    def trace(self) -> ForwardTrace:
        """The trace of the forward under way, or of the recompute."""
        return self._trace_of(current_backward())

    def _trace_of(self, task: int) -> ForwardTrace:
        """The trace of the forward under way, or of the recomputes in this graph task so far."""
        if self._running and self._running[-1].trace.task == task:
            return self._running[-1].trace
        if task == NO_BACKWARD or self._backward is None:
            return ForwardTrace(task)
        return self._backward.recomputed.setdefault(task, ForwardTrace(task))

    def begin(self, unit: Unit) -> None:
        """An outermost forward starts, of this unit."""
        self.observer.forward_started()
        if self.copy_engines and not self._mapped:  # not earlier: a graphed step turns copy engines off
            self._mapped = True
            map_memory(self.units, self.gathers.stream, KEPT_UNITS + 1)
        if self._backward is not None:
            self.abandon()
        self.grads.check_delays_are_over("a forward")  # a forward gathers
        self._check_units(unit)
        record_forward()
        if self.grads.were_mixed:
            self.grads.were_mixed = False
            self.gathers.begin_anew()
        self.gathers.forward_begins()
        self.grads.begin()
        self.gathers.notice_changes()

    def _check_units(self, unit: Unit) -> None:
        """Raise in an outermost forward, of ``unit``, for what the program has changed after ``fully_shard``.

        Where the program calls the units one by one, the first call after a backward checks all of them, and each later
        call its own unit.
        """
        trains = torch.is_grad_enabled()
        self._frozen = self._is_frozen()
        if self._frozen:
            return
        one_by_one = trains and self._all_checked and unit is not self.units[0]
        with DisableTorchFunctionSubclass():  # for speed: the checks read no values of shards
            for each in [unit] if one_by_one else self.units:
                each.check()
        self._all_checked = trains

    def _is_frozen(self) -> bool:
        """The program has frozen all trained parameters for now."""
        with DisableTorchFunctionSubclass():
            return any(unit.trains for unit in self.units) and all(unit.registered.is_frozen for unit in self.units)

    # ---- Backward. ----

    def pre_backward(self, forward: UnitForward, trace: ForwardTrace, task: int, *, delivers: bool) -> None:
        """Backward in graph task ``task`` has reached the outputs of a unit's forward.

        delivers  it is a plain ``backward()``, without inputs
        """
        unit = forward.unit
        if trace.awaits_backward:
            trace.awaits_backward = False
            self.grads.steps.record_use()
        trains = forward.trains and (delivers or delivers_to_any(pair.whole for pair in unit.pairs))
        backward = self.enter(unit, task, trains=trains, delays=forward.delays)
        backward.entered[unit].add(forward)
        # 4. Gather the unit again, and ahead of use the unit that backward enters next.
        self.gathers.gather(unit)
        if all(other is unit or other in forward.around for other in backward.entered):
            # If backward is still in another unit, that unit is passed first, and frees memory and prefetches then.
            self._prefetch(forward, trace, task, 1)
        self.gathers.wait(unit)
        unit.registered.freeze_whole(not any(entered.trains for entered in backward.entered[unit]))
        if torch.is_grad_enabled():
            backward.keeps_graph = True

    def post_backward(self, forward: UnitForward, trace: ForwardTrace, task: int) -> None:
        """Backward in graph task ``task`` has passed the inputs of a unit's forward."""
        unit, backward = forward.unit, self._backward
        if backward is None or unit not in backward.entered:
            return
        backward.entered[unit].discard(forward)
        if backward.entered[unit] or trace.comes_again(forward, task):
            return
        # 6. Free the whole parameters, and gather ahead: a gather that is issued after the reduction waits for it. Two
        # units, since backward may have entered the first of them by now.
        self._leave_unit(unit, backward)
        self._prefetch(forward, trace, task, 2)
        # 7. Keep the gradients, or launch their reduction.
        self.grads.leave(unit, final=backward.final)

    def on_grad(self, bucket: ShardedBucket) -> None:
        """A parameter's gradient of one backward is complete, or a delayed gradient is queued."""
        unit = bucket.unit()
        if unit is None or (self._backward is not None and unit in self._backward.entered):
            return
        # Backward has reached the parameter without entering the unit, or after it has passed the unit.
        if not unit.arrived:
            raise RuntimeError(
                f"backward came to '{bucket.name}' of {unit.label} past the outputs of its forward, after they were "
                f"freed: return from forward all that the loss uses, or pass reshard_after_forward=False. Before the "
                f"autograd.grad of a gradient penalty run all forwards, or use placements='zero2'"
            )
        self.enter(unit, current_backward(), trains=True, delays=False)

    def enter(self, unit: Unit, task: int, *, trains: bool, delays: bool) -> Backward:
        """Note that backward is in the unit; the first unit of a backward begins it."""
        backward = self._backward
        if backward is None:
            self.grads.check_delays_are_over("a backward")  # a backward gathers
            backward = self._backward = Backward(task, final=self.sync)
            self.observer.backward_started()
        if trains and not backward.trains:
            self._all_checked = False
            with DisableTorchFunctionSubclass():
                for each in self.units:  # the program may have changed them since the forward
                    each.registered.check(each.label)
            backward.trains = True
            self.grads.backward_began()
        if trains and is_watched():
            self.grads.trained.add(task)
        if task not in backward.tasks:
            backward.tasks[task] = []
            call_when_backward_ends(BackwardEnd(weakref.ref(self), task))
        if unit not in backward.entered:
            backward.entered[unit] = set()
            backward.tasks[task].append(unit)
            unit.registered.show_whole()  # 4., for a recompute inside the unit
        if trains:
            self.grads.backward_enters(unit, delays=delays)
        return backward

    def leave(self, unit: Unit) -> None:
        """Backward has passed the unit, unless it was not in it: 6. and 7., without a gather ahead."""
        backward = self._backward
        if backward is not None and unit in backward.entered:
            self._leave_unit(unit, backward)
            self.grads.leave(unit, final=backward.final)

    def _leave_unit(self, unit: Unit, backward: Backward) -> None:
        """Backward has passed the unit: register the shards, and free the whole parameters."""
        del backward.entered[unit]
        unit.registered.show_shards()
        unit.writes.take_over()  # a recompute inside the unit may have written
        if not backward.keeps_graph and (backward.final or unit not in self.gathers.first(KEPT_UNITS)):
            self.gathers.release(unit)

    def _prefetch(self, forward: UnitForward, trace: ForwardTrace, task: int, count: int) -> None:
        """Gather the next ``count`` units of backward, or those that the user has named."""
        unit, backward = forward.unit, self._backward
        assert backward is not None, "backward is in the unit"
        if unit.backward_prefetch is not None:
            for other in unit.backward_prefetch:
                self.gathers.gather(other)
            return
        if count > 1 and any(other in forward.around[1:] for other in backward.entered):
            count = 1  # a unit around this one is in memory as well
        for following in trace.before(forward, task, count):
            if unit not in following.around:  # units inside this one are passed
                self.gathers.gather(following.unit)

    def end_backward(self, task: int) -> None:
        """A graph task is over: backward has passed every unit that the task has entered."""
        backward = self._backward
        if backward is None:
            return
        for unit in backward.tasks.get(task, ()):
            self.leave(unit)
        if task != backward.task:
            return
        self._backward = None
        self.observer.backward_ended(backward.final and backward.trains)
        if not backward.keeps_graph:  # with create_graph whole parameters stay until the next forward
            self._release_after_backward(final=backward.final)
        if backward.trains:
            self.grads.backward_ended(final=backward.final)  # 8.

    def _release_after_backward(self, *, final: bool) -> None:
        """Free the whole parameters of all units; between microbatches, gather the units that forward begins with."""
        if final:
            self.gathers.release_all()
            self.gathers.expect_step()
            return
        self.gathers.release_all(but=self.gathers.first(KEPT_UNITS))
        for unit in self.gathers.first(KEPT_UNITS + 1):  # the kept ones, if one was freed, and one ahead of use
            self.gathers.gather(unit)

    # ---- Iterations that end early. ----

    def backward_failed(self, task: int) -> None:
        """A graph task has failed: register the shards. The next forward calls ``abandon`` for the rest."""
        backward = self._backward
        if backward is None:
            return
        for unit in backward.tasks.get(task, ()):
            if unit in backward.entered:
                del backward.entered[unit]
                unit.registered.show_shards()

    def abandon(self) -> None:
        """Give up the iteration after a backward that has failed: gradients that are not reduced are lost.

        What was reduced before, of earlier microbatches too, stays in ``.grad`` until the program clears it.
        """
        backward, self._backward = self._backward, None
        for unit in () if backward is None else backward.entered:
            unit.registered.show_shards()
        self.grads.give_up()
        self.gathers.release_all()

    @property
    def observer(self) -> Observer:
        """Told of forwards, backwards and collectives, for timelines."""
        return self.grads.launcher.observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        self.grads.launcher.observer = self.gathers.observer = observer


# ---- Gathers. ----


class UnitGathers:
    """The gathers of one model: which unit comes next; issue a gather, wait for it, free the whole parameters.

    units   the outermost first
    device  where the model computes
    """

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._units = units
        self._device = device
        self._buckets = [bucket for unit in units for bucket in unit.buckets]
        self.observer: Observer = UNOBSERVED
        self.meter = Meter()
        """Bytes of whole parameters."""
        for bucket in self._buckets:
            bucket.whole_params.meter = self.meter
        self.stream = communication_stream(device)
        self._freed: list[torch.cuda.Event] = []  # of freed units, for which the stream has not waited yet
        # The order in which the last outermost forward, and the current one, have entered units. It predicts which unit
        # comes next. Only the time of a gather depends on the prediction: a wrong one costs a gather. All ranks predict
        # alike, because all run the same units in the same order.
        self._last_order: list[Unit] = []
        self._order: list[Unit] = []

    # ---- Which unit comes next. ----

    def forward_begins(self) -> None:
        """An outermost forward starts."""
        self._last_order, self._order = self._order, []

    def forward_enters(self, unit: Unit) -> list[Unit]:
        """A unit's forward starts. Returns the unit that followed the last time; none if the order has changed."""
        index = len(self._order)
        self._order.append(unit)
        known = index < len(self._last_order) and self._last_order[index] is unit
        return self._last_order[index + 1 : index + 2] if known else []

    def first(self, count: int) -> list[Unit]:
        """The first ``count`` units of the current or last forward, the outermost among them."""
        return self._order[:count]

    def came_last(self, unit: Unit) -> bool:
        """``unit`` is the last of both the last forward and the current one."""
        last = self._last_order
        return bool(last) and len(self._order) == len(last) and last[-1] is unit

    def begin_anew(self) -> None:
        """Ranks may differ in what is gathered and in their order: gather all units anew, and predict nothing."""
        self._last_order, self._order = [], []
        self.record_replay()

    # ---- One unit. ----

    def gather(self, unit: Unit) -> None:
        """Issue the gather of the unit's parameters, unless it was issued before and they were not freed."""
        if unit.gathered:
            return
        if self.stream is not None:
            for event in self._freed:
                self.stream.wait_event(event)
            self._freed.clear()
        unit.gathered = True
        unit.record_gather()
        # 1. and 4. On the gathers' stream: whole parameters take memory, this rank copies its shard into its part
        # (``fill``), and an all-gather brings the other parts. Nothing waits here.
        for bucket in unit.buckets:
            bucket.gather.start(self.stream, self.observer, fill=bucket.fill, ordered=True)

    def wait(self, unit: Unit) -> None:
        """Have the current stream (CUDA), or this thread (CPU), wait for the unit's gather."""
        for bucket in unit.buckets:
            bucket.gather.wait()

    def release(self, unit: Unit, *, was_read: bool = False) -> None:
        """Free the whole parameters, after all work of the current stream so far.

        Nothing happens for a unit that keeps whole parameters at rest, and between ``unshard()`` and ``reshard()``.
        ``was_read``: the program was given them to read (``ShardedBucket.release_params``).
        """
        if not (unit.gathered and unit.releasable) or unit.num_unshards:
            return
        self.wait(unit)
        # 3. and 6. The memory is freed for the host at once. The gathers' stream waits for ``freed`` before using it.
        unit.gathered = False
        for bucket in unit.buckets:
            bucket.release_params(was_read=was_read)
        if unit.freed is not None:
            unit.freed.record(current_stream(self._device))
            self._freed.append(unit.freed)

    def release_all(self, but: Collection[Unit] = ()) -> None:
        """Free the whole parameters of every unit that is not in ``but``."""
        for unit in self._units:
            if unit.gathered and unit not in but:
                self.wait(unit)  # also an unused gather: it reads shards, which the optimizer changes
                self.release(unit)

    # ---- All units. ----

    def expect_step(self) -> None:
        """An iteration is over. The next forward gathers whole parameters again, even if this rank sees no change.

        On a rank whose shards are padding alone the optimizer changes nothing. That rank must gather with the others.
        """
        for bucket in self._buckets:
            if bucket.trainable:
                bucket.record_change()

    def notice_changes(self) -> None:
        """Discard gathers that are older than a change of their shards, so that the next use gathers again.

        Units between ``unshard()`` and ``reshard()`` are gathered at once.
        """
        record_gathered_model(self)
        if not any(bucket.changed for bucket in self._buckets):
            return
        if self.stream is not None:
            self.stream.wait_stream(current_stream(self._device))
        for unit in self._units:
            if unit.gathered and any(bucket.changed for bucket in unit.buckets):
                self.wait(unit)
                self.release(unit)
                unit.gathered = False
                if unit.num_unshards:
                    self.gather(unit)
                    self.wait(unit)

    # ---- Captures: the methods of ``GatheredModel``. ----

    def finish(self) -> None:
        """Wait for the gathers under way."""
        for unit in self._units:
            self.wait(unit)

    def begin_capture(self) -> None:
        """Free all whole parameters; the captured forwards gather each anew."""
        self.release_all()
        self.record_replay()
        self._freed.clear()  # the capture begins when all work is done

    def end_capture(self) -> None:
        """Forget the events of the capture: it has not run."""
        for bucket in self._buckets:
            bucket.gather.forget_capture()
        self.begin_capture()

    def record_replay(self) -> None:
        """The shards may have new values, on all ranks alike, as after a captured iteration that was replayed."""
        for bucket in self._buckets:
            bucket.record_change()
