"""The way of a gradient from the hook of its parameter to the reduced bucket, top to bottom.

Backward has written ``main_grad``, or has left ``.grad``. Parameters 9 and 8 lie in bucket 0, 7 and 6 in bucket 1::

    backward's stream    dW9 hook  dW8 hook   dW7 hook  dW6 hook                       step
                                        |                    |                         ^  ^
    reduction's stream                  +-> reduce bucket 0  +--> reduce bucket 1      |  |
                                                       event 0 ------------- event 1 --+--+

The steps are those of ``docs/by_hand.py``:

    4    the hook runs: ``.grad``, if there is one, goes into ``main_grad``    every microbatch
    5.1  is this the parameter's last gradient of the iteration?               the microbatch outside ``no_sync``
    5.2  the bucket counts its parameters; with the last one it is ready
    6.1  ready buckets are launched in the plan's order
    6.2  the step, or the first read of ``.grad``, launches what is left: all, without ``overlap_grad_reduce``
    6.3  a launch: the collectives start on a stream of their own (``collectives/reduction.py``), backward goes on
    7    the step, or the first read, waits: ``Bucket.reduced`` holds this rank's part of the sum

On CPUs there are no streams: gloo's threads reduce, and step 7 waits for them on the host.

Readiness does not depend on earlier iterations, and does not count calls. All ranks must issue the collectives of a
group in one order, but may see gradients in different orders. So a ready bucket waits for its predecessors in the plan.

A delayed weight gradient (``contract/delayed.py``) is written after its hook. ``on_delayed_wgrad`` goes on with 5.2.

What else may happen has a file of its own: parameters that a forward does not use (``graph_walk.py``), gradients whose
memory is freed (``released.py``), NaN (``nan_check.py``), several backwards for one iteration (``wrapper/parts.py``).
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..collectives.failure_report import FailureReporter
from ..collectives.in_flight import InFlight
from ..collectives.reduction import GradReduction
from ..collectives.step_check import StepCheck
from ..collectives.streams import OnStream, communication_stream, current_stream
from ..collectives.timeline import UNOBSERVED, Observer
from ..config import DistributedDataParallelConfig
from ..contract.main_grad import take_grad_of_backward
from ..contract.record import GradRecord
from ..torch_grads.shown_params import ShownGrads
from ..torch_internals import (
    NO_BACKWARD,
    call_when_backward_ends,
    current_backward,
    current_raw_stream,
    is_profiling,
    weak_method,
)
from .bucket import Bucket, BucketParam, Phase
from .graph_walk import differentiable_tensors, walk_graph
from .iteration_ends import TrainedBackwards, is_watched, record_forward

__all__ = ["BucketLauncher", "Readiness"]


# ---- Steps 4 and 5: hooks.


class Readiness:
    """The hooks of one wrapper and their state: decides when each parameter's last contribution is written.

    A parameter is ready when its hook has run in the final microbatch and none of its delayed weight gradients is
    pending. Under reentrant recompute a hook can run several times in a backward. In this case, and for a parameter
    that several modules own, the parameter is ready when the outermost backward has ended.

    check_launch    called before an iteration's first launch: raises where the model was changed
    enter_backward  called when a backward reaches an output of the model
    """

    def __init__(
        self,
        bucket_params: Sequence[BucketParam],
        launcher: "BucketLauncher",
        config: DistributedDataParallelConfig,
        device: torch.device,
        steps: StepCheck,
        shown: ShownGrads,
        check_launch: Callable[[], None],
        enter_backward: Callable[[], None],
    ) -> None:
        self._bucket_params = bucket_params
        self._shown = shown
        self._enter_backward = enter_backward
        self._steps = steps
        self._check_launch = check_launch
        self._launcher = launcher
        self._overlap = config.overlap_grad_reduce
        self._find_unused = config.find_unused_parameters
        self._raw_stream: Callable[[], int] | None = None
        """Returns the current CUDA stream's handle, by torch's cheapest way; None on other devices."""
        if device.type == "cuda":
            self._raw_stream = partial(current_raw_stream, device.index)

        # State of the iteration.
        self.sync = True
        """Whether this is the final microbatch of the iteration."""
        self.completes: frozenset[int] | None = None
        """``id`` of the records that this backward completes. None means all that it reaches."""
        self.trained = TrainedBackwards()
        self._checked = False  # the model was checked before this iteration's first launch

        # State of the backward.
        self._outer_task: int | None = None
        """Graph task of the outermost backward; None outside backward, and where unknown."""
        self._walked = False  # a forward's graph was walked
        self._recomputes = False  # a reentrant recompute was seen
        self._unused: list[BucketParam] | None = None
        """Parameters that no forward of the final microbatch reaches; None: there was no such forward yet."""
        self._passed: dict[int, tuple[Bucket, GradRecord]] = {}
        """By ``id``: records whose hook ran and may run again. They get ready when the outermost backward ends."""
        self._counts = False  # this backward has brought a parameter's gradient; one of ``autograd.grad`` brings none

    def reset(self) -> None:
        """Start a new iteration."""
        self._passed.clear()
        self.trained.clear()
        self._unused = None
        self._checked = self._counts = False  # a backward that raised never reported its end
        self._outer_task = None

    def listen(self, reopen: Callable[[], None]) -> list[RemovableHandle]:
        """Have gradients of every parameter reported here, delayed ones too. Returns the parameters' hooks.

        reopen  called before a write to a bucket that was launched
        """
        hooks = []
        for entry in self._bucket_params:
            entry.record.reopen = reopen
            entry.record.on_delayed_wgrad = weak_method(self.on_delayed_wgrad, entry.bucket, entry.record)
            hook = self._grad_hook(entry.bucket, entry.record)
            hooks.append(entry.owned.param.register_post_accumulate_grad_hook(hook))
        return hooks

    # ---- Between forward and the first hook. ----

    @torch.compiler.disable
    def expect_backward(self, outputs: Any, *, trains: bool) -> None:
        """After a forward: have backward's start noticed, and find out which parameters backward will reach.

        trains  the model is in training mode
        """
        record_forward()
        self._counts = False
        tensors = differentiable_tensors(outputs)
        find_unused = self._find_unused and self.sync
        if find_unused or (self._overlap and not self._walked):
            self._walk(tensors, find_unused)
        here = weakref.ref(self)
        noted = trains and any(tensor.grad_fn is not None for tensor in tensors)
        if noted:
            self._steps.record_forward()

        def backward_enters(_: Tensor) -> None:
            nonlocal noted
            live = here()
            if live is None:
                return
            if noted:
                noted = False
                live._steps.record_use()
            live._on_backward_start()

        for tensor in tensors:
            if tensor.grad_fn is not None:  # a hook on a leaf (a returned parameter) would never be freed
                tensor.register_hook(backward_enters)

    def _walk(self, outputs: Sequence[Tensor], find_unused: bool) -> None:
        walk = walk_graph(outputs)
        self._walked = True
        self._recomputes |= walk.recomputes
        if find_unused:
            # Several forwards may feed one backward: a parameter is unused if no forward reaches it.
            candidates = self._bucket_params if self._unused is None else self._unused
            hidden = walk.recomputes
            self._unused = [w for w in candidates if not hidden and id(w.owned.param) not in walk.leaves]

    def _on_backward_start(self) -> None:
        task = current_backward()
        if task == self._outer_task:
            return  # another output of the same forward
        self._enter_backward()
        self._outer_task = task
        # A callback queued here runs at the end of the outermost backward. Queued from a parameter's hook, it could run
        # at the end of a nested backward.
        call_when_backward_ends(self._on_backward_end)
        self._launcher.observer.backward_started()
        if self.sync and self._overlap:
            unused, self._unused = self._unused, None
            for entry in unused or ():
                if self._is_last(entry.record):
                    self._mark_ready(entry.bucket, entry.record)

    # ---- The hook. ----

    def _grad_hook(self, bucket: Bucket, record: GradRecord) -> Callable[[Tensor], None]:
        """The post-accumulate-grad hook of one parameter. The hook holds no reference that leads to the parameter."""
        here = weakref.ref(self)
        profiling = is_profiling

        def hook(param: Tensor) -> None:
            live = here()
            if live is None:
                return
            if profiling():
                with torch.profiler.record_function(f"maingrad::grad {record.name} -> bucket {bucket.index}"):
                    live.on_grad(param, bucket, record)
            else:
                live.on_grad(param, bucket, record)

        return hook

    def on_grad(self, param: Tensor, bucket: Bucket, record: GradRecord) -> None:
        """In the hook: a parameter's gradient of one backward is in ``.grad``, in ``main_grad``, or in a queue."""
        if not self._counts:
            self._begin_to_count(param, record)
        # Step 4: ``main_grad`` holds the sum of all microbatches so far.
        if self._shown.active:
            self._shown.take_added(record)
        take_grad_of_backward(param, record)
        if is_watched():
            self.trained.add(current_backward())
        if bucket.idle or self._raw_stream is not None:
            self._note_write(bucket)
        # Step 5.1: the last gradient? Not under ``no_sync``; not yet where the hook may run again in this backward.
        if not (self.sync and self._overlap) or not self._is_last(record):
            return
        nested = self._outer_task is not None and current_backward() != self._outer_task
        if nested:
            self._recomputes = True
        if record.shared or self._recomputes:
            self._passed[id(record)] = bucket, record
        else:
            self._mark_ready(bucket, record)

    def _begin_to_count(self, param: Tensor, record: GradRecord) -> None:
        """A backward brings its first gradient. If it came through no output of the wrapper, notice its end here."""
        self._counts = True
        if self._outer_task is not None:
            return
        call_when_backward_ends(self._show)
        if not self._shown.active:
            return
        arrived = None
        if not self._shown.holds(record):
            arrived, param.grad = param.grad, None
        if self._shown.is_cleared:
            if record.consumer_wrote:
                raise RuntimeError(
                    f"parameter '{record.name}' got a gradient after every .grad was set to None, in a backward of a "
                    f"module that was called directly: call the wrapper, or model.zero_grad() before"
                )
            self._enter_backward()
            self._counts = True
        elif (name := self._shown.first_cleared) is not None:
            raise RuntimeError(
                f".grad of parameter '{name}' was set to None or replaced, and others were not, before a backward of a "
                f"module that was called directly: call the wrapper, which discards that one's gradient"
            )
        if arrived is not None:
            param.grad = arrived

    def _note_write(self, bucket: Bucket) -> None:
        """The bucket holds a gradient, or a backward has queued one that is written later.

        CUDA: the current stream has written it, and a launch waits for this stream. Autograd runs a parameter's hook on
        the stream of the parameter's forward, where the backward has written ``main_grad``, also if this backward has
        returned None. A delayed gradient is reported where it was computed.
        """
        if bucket.idle:
            bucket.phase = Phase.ACCUMULATING
        if self._raw_stream is not None:
            bucket.streams.add(self._raw_stream())

    def _is_last(self, record: GradRecord) -> bool:
        return self.completes is None or id(record) in self.completes

    def _mark_ready(self, bucket: Bucket, record: GradRecord) -> None:
        """Step 5.2: the last gradient is written. If a delayed one is pending, its ``on_delayed_wgrad`` calls again."""
        if record.closed is not None:
            return  # its bucket was launched already, with what this backward has brought so far
        if record.pending:
            record.awaits_delayed = True
            return
        bucket.mark_ready(record)  # step 5.2 of docs/by_hand.py: one parameter more
        if bucket.phase is Phase.READY:
            self._check_once()
            self._launcher.on_bucket_ready(bucket)

    def _check_once(self) -> None:
        """Before an iteration's first launch: the model is what it was."""
        if not self._checked:
            self._check_launch()
            self._checked = True

    # ---- Behind the last hook. ----

    def _on_backward_end(self) -> None:
        self._outer_task = None
        self.complete_passed()
        self._launcher.observer.backward_ended(self.sync)
        self._show()

    def complete_passed(self) -> None:
        """The outermost backward has ended: no hook of it runs again."""
        passed, self._passed = self._passed, {}
        for bucket, record in passed.values():
            self._mark_ready(bucket, record)

    def _show(self) -> None:
        """A backward is over. If it was the iteration's last, ``.grad`` shows its gradients."""
        counts, self._counts = self._counts, False
        if counts and self._shown.active:
            self._shown.show_again()
        if counts and self.sync and self.completes is None:
            self._check_once()
            if self._overlap:
                self._launcher.on_backward_over()
            self._shown.show()

    def on_delayed_wgrad(self, bucket: Bucket, record: GradRecord) -> None:
        """A delayed weight gradient was computed: the parameter may be ready now."""
        self._note_write(bucket)
        if record.foreign_delayer and not record.pending:
            self._shown.show_late(record)
        if record.awaits_delayed:
            self._mark_ready(bucket, record)
        self._launcher.launch_ready()

    def complete(self, entry: BucketParam) -> None:
        """No further backward of this iteration reaches this parameter."""
        self._mark_ready(entry.bucket, entry.record)

    @property
    def has_failed(self) -> bool:
        """Whether the last backward has raised: no backward runs, and the end of the last one was never reported."""
        return self._outer_task is not None and current_backward() == NO_BACKWARD

    def check_backward_over(self, caller: str) -> None:
        """Raise ``RuntimeError`` in a hook of a backward through the model, whose gradients are not complete yet."""
        task = current_backward()
        if task != NO_BACKWARD and (self._counts or task == self._outer_task):
            raise RuntimeError(
                f"{caller} in a hook, while a backward is under way: other ranks' gradients are added after it; step "
                f"and read .grad after the backward. An optimizer that steps in hooks needs maingrad.fsdp.fully_shard"
            )


# ---- Steps 6 and 7: reductions.


class BucketLauncher:
    """The reduction of one iteration's gradients.

    buckets        in launch order
    reductions     one for each bucket, in the same order
    before_launch  called with each bucket before it is reduced, on the reduction's stream
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        reductions: Sequence[GradReduction],
        before_launch: Callable[[Bucket], None] | None,
        failures: FailureReporter,
        *,
        device: torch.device,
    ) -> None:
        self.observer: Observer = UNOBSERVED
        self._buckets = buckets
        self._reductions = reductions
        self._before_launch = before_launch
        self._failures = failures
        self._device = device
        # Reductions run on streams of their own, so that the compute stream never waits for a collective. Where a
        # reduction has two collectives, a bucket's second one runs beside the next bucket's first one.
        num_streams = max([1, *(reduction.num_collectives for reduction in reductions)])
        self.waits_launch_nothing = device.type == "cuda" or num_streams == 1
        """False on CPUs where reductions have two collectives: a wait begins the second one, so all ranks wait in one
        order."""
        streams = [communication_stream(device) for _ in range(num_streams)]
        self._streams = [stream for stream in streams if stream is not None]
        self._reduced = [torch.cuda.Event() for _ in buckets] if self._streams else []
        self._next = 0
        self._all_came = False  # no backward of the iteration is to come: only delayed gradients hold buckets back
        self._in_flight: dict[int, InFlight] = {}
        self._waited_on: dict[int, torch.cuda.Stream] = {}  # in a backward, or a drain: other streams are still to wait

    def __del__(self) -> None:
        # The launcher may die while reductions run. Freed memory returns to the stream that allocated it, and this
        # stream must not reuse the memory before the reduction has ended.
        if vars(self).get("_reduced") and self._in_flight and not sys.is_finalizing():
            for index in self._in_flight:
                current_stream(self._device).wait_event(self._reduced[index])

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """CUDA: a stream of reductions. Small collectives behind them run here too, so that groups keep one order."""
        return self._streams[0] if self._streams else None

    # ---- Whose turn has come. ----

    def on_bucket_ready(self, bucket: Bucket) -> None:
        """``bucket`` is ready: launch every ready bucket whose turn has come."""
        self.observer.bucket_ready(bucket.name)
        self.launch_ready()

    def on_backward_over(self) -> None:
        """A backward is over, perhaps the iteration's last: parameters that it has not reached are unused.

        Launched here, all ranks' reductions come before whatever collectives the program issues next.
        """
        self._all_came = True
        self.launch_ready()

    def launch_ready(self) -> None:
        """Step 6.1: launch while the plan's next bucket is ready. Called too when a delayed gradient was computed."""
        while self._next < len(self._buckets) and self._is_ready(self._buckets[self._next]):
            self._launch_next()

    def _is_ready(self, bucket: Bucket) -> bool:
        return bucket.phase is Phase.READY or (self._all_came and not any(record.pending for record in bucket.records))

    def launch_rest(self) -> None:
        """Step 6.2: launch all buckets that are left, ready or not. Gradients of unused parameters are zeros."""
        while self._next < len(self._buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        self.launch(bucket)

    # ---- One bucket. ----

    def launch(self, bucket: Bucket, start: Callable[[Tensor], InFlight] | None = None) -> None:
        """Step 6.3: launch this bucket now. The caller makes sure that all ranks launch in one order.

        start  reduces the bucket's ``grad_data``; None: the bucket's own reduction
        """
        reduction = self._reductions[bucket.index]
        begin = partial(start or partial(reduction.start, into=bucket.into), bucket.grad_data)
        label: AbstractContextManager[object] = nullcontext()
        if is_profiling():
            label = torch.profiler.record_function(f"maingrad::launch {reduction.name} {bucket.name}")
        with label:
            bucket.begin_reduction()  # from here on a write of ``main_grad`` raises
            if not self._streams:
                with self._failures.watch(reduction.name, bucket.name):
                    self._in_flight[bucket.index] = self._reduce(bucket, reduction, begin)
                return
            stream = self._streams[bucket.index % len(self._streams)]
            # Every contribution that a hook has reported is already queued on one of these streams.
            current = current_stream(self._device)
            stream.wait_stream(current)
            for raw in bucket.streams:
                if raw != current.cuda_stream:
                    stream.wait_stream(torch.cuda.ExternalStream(raw, device=self._device))
            with OnStream(stream), self._failures.watch(reduction.name, bucket.name):
                flight = self._reduce(bucket, reduction, begin)
                flight.wait()  # makes this stream wait, and issues the collectives after the first one
                self._reduced[bucket.index].record(stream)
            self._in_flight[bucket.index] = flight

    def _reduce(self, bucket: Bucket, reduction: GradReduction, begin: Callable[[], InFlight]) -> InFlight:
        """Start the bucket's first collective, on the current stream. Backward goes on."""
        # Step 6.3 of docs/by_hand.py.
        for record in bucket.records:
            record.zero_unwritten()
        if self._before_launch is not None:
            self._before_launch(bucket)
        nbytes = partial(reduction.wire_nbytes, bucket.layout.numel, bucket.grad_data.dtype)
        return self.observer.launch(bucket.name, reduction.name, nbytes, begin)

    def wait(self) -> None:
        """Step 7: make the current stream (CUDA) or this thread (CPU) wait for every launched reduction."""
        for bucket in self._buckets:
            self.wait_for(bucket)

    def wait_for(self, bucket: Bucket) -> None:
        """Wait, as ``wait`` does, for one bucket's reduction."""
        flight = self._in_flight.get(bucket.index)
        if flight is None:
            waited = self._waited_on.pop(bucket.index, None)
            if waited is not None and waited != (current := current_stream(self._device)):
                current.wait_stream(waited)
            return
        name = self._reductions[bucket.index].name
        if self._reduced:
            order = partial(current_stream(self._device).wait_event, self._reduced[bucket.index])
            self.observer.wait(bucket.name, name, order)
        else:
            with self._failures.watch(name, bucket.name):
                flight.wait()
        del self._in_flight[bucket.index]
        bucket.end_reduction()

    def wait_for_all_but(self, num_latest: int) -> None:
        """Wait, as ``wait`` does, for the oldest reductions under way.

        Nothing is done where waits begin second collectives: ranks come here at different times.
        """
        if self.waits_launch_nothing:
            for index in list(self._in_flight)[:-num_latest]:
                self.wait_for(self._buckets[index])
                if self._streams:
                    self._waited_on[index] = current_stream(self._device)

    def reset(self) -> None:
        """Launch all buckets again: in a new iteration, or in one that goes on."""
        self.wait()  # on this stream, where another one has waited
        self._next = 0
        self._all_came = False

    def forget(self) -> None:
        """A capture has failed: what was launched in it has not run. On CPUs it has, and is waited for."""
        self._waited_on.clear()
        for bucket in self._buckets:
            flight = self._in_flight.pop(bucket.index, None)
            if flight is not None and not self._streams:
                flight.wait()
            if bucket.phase is Phase.REDUCING:
                bucket.phase = Phase.REDUCED
