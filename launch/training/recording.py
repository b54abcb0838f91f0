"""Records two steps of a run: facts about the first step, and the times of a later step.

A recording begins with a step and ends after the next forward, which overlaps the gathers of updated parameters.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ...ddp.collectives.timeline import Timeline
from .metrics import MetricsWriter, observed_facts, timeline_record
from .runtime import Runtime
from .wrapping import Wrapped

__all__ = ["OPTIMIZER_PHASE", "WGRAD_PHASE", "StepRecorder"]

OPTIMIZER_PHASE = "optimizer"
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
        if self._timeline is None and step in (self._observed_step, self._timeline_step):
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
            facts = observed_facts(self._wrapped, timeline, self._runtime)
            self._metrics.write("observed", step=self._step, **facts, unit=self._unit)
        if self._step == self._timeline_step:
            self._metrics.write("timeline", **timeline_record(timeline, self._step))

    def close(self) -> None:
        """End of the run: write a pending recording, if its step is complete."""
        self.forward_ended()
        self._timeline = None
        self._open.close()
