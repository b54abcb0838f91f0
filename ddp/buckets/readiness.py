"""Decides when each parameter's last contribution is in, and hands full buckets to the launcher.

Nothing is learnt from earlier iterations or counted in calls. A parameter is ready when its hook has run in the final
microbatch and none of its delayed weight gradients is pending. Under reentrant recompute a hook can run more than once
in a backward; then, and for a parameter that several modules own, ready means that the outermost backward has ended.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import DistributedDataParallelConfig
from ..contract.main_grad import take_grad_of_backward
from ..contract.module import listen_to_foreign_delays
from ..contract.record import GradRecord
from ..torch_internals import call_when_backward_ends, current_backward, current_raw_stream, is_profiling
from .bucket import Bucket, Phase
from .graph_walk import differentiable_tensors, walk_graph
from .launcher import BucketLauncher
from .wiring import WiredParam

__all__ = ["Readiness"]


class Readiness:
    """What the hooks of one wrapper know, and what they do about it."""

    def __init__(
        self,
        wired: Sequence[WiredParam],
        launcher: BucketLauncher,
        config: DistributedDataParallelConfig,
        device: torch.device,
    ) -> None:
        self._wired = wired
        self._launcher = launcher
        self._overlap = config.overlap_grad_reduce
        self._find_unused = config.find_unused_parameters
        self._raw_stream: Callable[[], int] | None = None
        """The current CUDA stream, as cheaply as torch tells it; None on other devices."""
        if device.type == "cuda":
            self._raw_stream = partial(current_raw_stream, device.index)

        # State of the iteration.
        self.sync = True
        """False for every microbatch but the final one."""
        self.completes: frozenset[int] | None = None
        """``id`` of the records whose last contribution this backward brings; None: all that it reaches."""

        # State of the backward.
        self._outer_task: int | None = None  # the graph task that reached the outputs; None outside and where unknown
        self._recomputes: bool | None = None  # reentrant recompute was seen; None before the first forward
        self._unused: list[WiredParam] | None = None  # what no final forward reaches; None: no such forward yet
        self._passed: list[tuple[Bucket, GradRecord]] = []  # ready when the outermost backward ends

    def reset(self) -> None:
        """Start a new iteration."""
        self._passed.clear()
        self._unused = None

    def watch(self, outputs: Any) -> None:
        """After a forward: watch for the moment when backward enters, and find out what it will reach."""
        if not (self._overlap or self._launcher.observer.recording):
            return
        tensors = differentiable_tensors(outputs)
        find_unused = self._find_unused and self.sync
        if find_unused or self._recomputes is None:
            walk = walk_graph(tensors)
            self._recomputes = bool(self._recomputes) or walk.recomputes
            if find_unused:
                # Several forwards may feed one backward: unused is what none of them reaches.
                candidates = self._wired if self._unused is None else self._unused
                hidden = walk.recomputes
                self._unused = [w for w in candidates if not hidden and id(w.owned.param) not in walk.leaves]
        here = weakref.ref(self)

        def backward_enters(_: Tensor) -> None:
            live = here()
            if live is not None:
                live._on_backward_start()

        for tensor in tensors:
            if tensor.grad_fn is not None:  # a hook on a leaf, a returned parameter say, would stay for ever
                tensor.register_hook(backward_enters)

    def grad_hook(self, bucket: Bucket, record: GradRecord) -> Callable[[Tensor], None]:
        """The post-accumulate-grad hook of one parameter. It holds nothing that holds the parameter."""
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

    def expect_delayed(self, wired: WiredParam) -> None:
        """Hear of this parameter's delayed weight gradients: our modules tell the record, foreign ones call back."""
        # The record keeps this function: all that it refers to is weak, or a cycle would keep the buckets.
        here, bucket, record = weakref.ref(self), weakref.ref(wired.bucket), weakref.ref(wired.record)

        def computed() -> None:
            readiness, live_bucket, live_record = here(), bucket(), record()
            if readiness is not None and live_bucket is not None and live_record is not None:
                readiness.on_delayed_wgrad(live_bucket, live_record)

        wired.record.on_delayed_wgrad = computed
        listen_to_foreign_delays(wired.owned.param, wired.record, [module for module, _ in wired.owned.owners])

    def on_grad(self, param: Tensor, bucket: Bucket, record: GradRecord) -> None:
        """A parameter's gradient of one backward is complete: in ``.grad``, in ``main_grad``, or queued."""
        take_grad_of_backward(param, record)
        if bucket.idle or self._raw_stream is not None:
            self._note_write(bucket)
        if not (self.sync and self._overlap) or not self._is_last(record):
            return
        nested = self._outer_task is not None and current_backward() != self._outer_task
        if nested:
            self._recomputes = True
        if record.shared or self._recomputes:
            if not record.passed:
                record.passed = True
                self._passed.append((bucket, record))
        else:
            self._mark_ready(bucket, record)

    def on_delayed_wgrad(self, bucket: Bucket, record: GradRecord) -> None:
        """A delayed weight gradient has been computed; the parameter may have waited for this one."""
        self._note_write(bucket)
        if record.awaits_delayed and not record.pending:
            self._mark_ready(bucket, record)

    def complete(self, wired: WiredParam) -> None:
        """No backward of this iteration comes to this parameter any more."""
        self._mark_ready(wired.bucket, wired.record)

    def complete_passed(self) -> None:
        """The outermost backward has ended."""
        passed, self._passed = self._passed, []
        for bucket, record in passed:
            self._mark_ready(bucket, record)

    def _on_backward_start(self) -> None:
        task = current_backward()
        if task == self._outer_task:
            return  # another output of the same forward
        self._outer_task = task
        # A callback queued here ends with the outermost backward; queued from a parameter's hook it would end with a
        # nested one.
        call_when_backward_ends(self._on_backward_end)
        self._launcher.observer.backward_started()
        if self.sync and self._overlap:
            unused, self._unused = self._unused, None
            for wired in unused or ():
                if self._is_last(wired.record):
                    self._mark_ready(wired.bucket, wired.record)

    def _is_last(self, record: GradRecord) -> bool:
        return self.completes is None or id(record) in self.completes

    def _on_backward_end(self) -> None:
        self._outer_task = None
        self.complete_passed()
        self._launcher.observer.backward_ended(self.sync)

    def _note_write(self, bucket: Bucket) -> None:
        if bucket.idle:
            bucket.phase = Phase.ACCUMULATING
        if self._raw_stream is not None:
            bucket.streams.add(self._raw_stream())

    def _mark_ready(self, bucket: Bucket, record: GradRecord) -> None:
        if record.pending:
            record.awaits_delayed = True
            return
        bucket.mark_ready(record)
        if bucket.phase is Phase.READY:
            self._launcher.note_ready(bucket)
