"""Records two steps of a run: facts about the first step, and the times of a later step.

A recording begins with a step and ends after the next forward, which overlaps the gathers of updated parameters.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ...ddp.collectives.timeline import BucketSpan, GatherSpan, Timeline
from .metrics import MetricsWriter, timeline_record
from .runtime import Runtime, versions
from .wrapping import Wrapped

__all__ = ["WGRAD_PHASE", "StepRecorder"]

WGRAD_PHASE = "weight gradients"
_TIMELINE_STEP = 10  # allocations and connections exist by then


class StepRecorder:
    """Writes ``observed`` and ``timeline`` records.

    first_step  first step of the run
    num_steps   number of steps of the run; a short run records times early, so that another forward follows
    unit        name of a token: "token" or "byte"
    """

    def __init__(
        self,
        wrapped: Wrapped,
        runtime: Runtime,
        metrics: MetricsWriter,
        *,
        first_step: int,
        num_steps: int,
        unit: str,
    ) -> None:
        self._wrapped, self._runtime, self._metrics, self._unit = wrapped, runtime, metrics, unit
        self._observed_step = first_step
        # The first recording covers a part of the second step: the next one begins with the third, or is the same.
        self._timeline_step = first_step + (min(_TIMELINE_STEP, num_steps - 2) if num_steps >= 4 else 0)
        self._open = ExitStack()
        self._timeline: Timeline | None = None
        self._step = first_step
        self._stepped = False

    def step_begins(self, step: int) -> None:
        """Call this before the first forward of a step."""
        if step in (self._observed_step, self._timeline_step):
            self._timeline = self._open.enter_context(self._wrapped.model.record_timeline())
            self._step, self._stepped = step, False

    @property
    def is_recording(self) -> bool:
        """Whether a recording has begun and not ended."""
        return self._timeline is not None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record a named span of a step."""
        if self._timeline is None:
            yield
            return
        with self._timeline.phase(name):
            yield

    def step_ended(self) -> None:
        """Call this after the optimizer step and ``zero_grad``: the next forward ends the recording."""
        self._stepped = True

    def forward_ended(self) -> None:
        """Call this after a forward of the wrapper, in training or validation."""
        timeline = self._timeline
        if timeline is None or not self._stepped:
            return
        self._timeline = None
        self._open.close()
        if self._step == self._observed_step:
            facts = _observed_facts(self._wrapped, timeline, self._runtime)
            self._metrics.write("observed", step=self._step, **facts, unit=self._unit)
        if self._step == self._timeline_step:
            self._metrics.write("timeline", **timeline_record(timeline, self._step))

    def close(self) -> None:
        """End of the run: write a pending recording, if its step is complete."""
        self.forward_ended()
        self._timeline = None
        self._open.close()


def _observed_facts(wrapped: Wrapped, timeline: Timeline, runtime: Runtime) -> dict[str, Any]:
    """What the first step did, as read from tensors, counters and the spans of ``timeline``."""
    parameters, records = wrapped.parameters, wrapped.records
    fused = [record for record in records if record.num_fused_writes]
    synced = Counter(span.synced for span in timeline.backwards)
    return {
        "world_size": runtime.world_size,
        "backend": runtime.backend,
        "device": str(runtime.device),
        "num_parameters": sum(parameter.numel for parameter in parameters),
        "parameter_dtypes": _counts(parameter.dtype for parameter in parameters),
        "main_grad_dtypes": _counts(record.view.dtype for record in records),
        "fused_weights": len(fused),
        "fused_writes": sum(record.num_fused_writes for record in fused),
        "delayed_weights": sum(parameter.delayed for parameter in parameters),
        "hook_written_parameters": sum(record.num_hook_writes > 0 for record in records),
        "microbatches_no_sync": synced[False],
        "microbatches_synced": synced[True],
        "num_buckets": len({span.bucket for span in timeline.buckets}),
        "collectives": _counts([*(b.collective for b in timeline.buckets), *(g.collective for g in timeline.gathers)]),
        "buckets": [_sent(span) for span in timeline.buckets],
        "gathers": [_sent(span) for span in timeline.gathers],
        "versions": versions(),
    }


def _sent(span: BucketSpan | GatherSpan) -> dict[str, Any]:
    return {"bucket": span.bucket, "collective": span.collective, "nbytes": span.nbytes}


def _counts(names: Iterable[Any]) -> dict[str, int]:
    """How often each name occurs; dtypes are named without their module."""
    return dict(sorted(Counter(str(name).removeprefix("torch.") for name in names).items()))
