"""``ParamSync``: the gathers of a model's updated parameters, and every reader's wait for them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import torch

from ..collectives.reduction import placements_of
from ..collectives.streams import communication_stream
from ..gathers.gathered_models import GatheredModel, record_gathered_model
from ..gathers.param_gather import ParamGather, guard_reads
from ..wrapper.data_parallel import DistributedDataParallel
from .flat_params import FlatBucket

__all__ = ["CapturedUpdates", "ParamSync"]


class ParamSync(GatheredModel):
    """What a step calls after it has updated parameters, bucket by bucket.

    Captures and replays of other steps concern it in nothing: parameters are gathered after its own update alone.

    model  its parameters lie in ``flats``
    flats  in launch order; each bucket whose ranks hold shards gets a gather
    """

    def __init__(self, model: DistributedDataParallel, flats: Sequence[FlatBucket]) -> None:
        self._model = model
        self.gathers = [
            ParamGather(
                flat.bucket.name,
                flat.params,
                [entry.owned.param for entry in flat.bucket_params],
                model.grids[flat.bucket.layout.grid_name],
                model.failures,
            )
            for flat in reversed(flats)
            if placements_of(model.ddp_config).inner.gathers and model.grids[flat.bucket.layout.grid_name].size > 1
        ]
        """In the order in which the forward reads parameters."""
        self.stream = communication_stream(model.device) if self.gathers else None
        """Gathers run on this stream."""
        self._overlaps = model.ddp_config.overlap_param_gather
        self._updated: set[ParamGather] = set()  # of this step, so far
        self._started: list[ParamGather] = []  # the same, in the order of the forward
        self._captured: CapturedUpdates | None = None
        self.num_published = 0
        """Steps so far whose Python ran."""

    @property
    def overlaps(self) -> bool:
        """Whether gathers run under what follows the step."""
        return self._overlaps and bool(self.gathers)

    @property
    def is_captured(self) -> bool:
        """Whether a ``captured`` block runs."""
        return self._captured is not None

    def begin_step(self) -> None:
        """A step begins."""
        self._updated, self._started = set(), []
        record_gathered_model(self)

    def record_updated(self, flats: Sequence[FlatBucket]) -> None:
        """These buckets are up to date on this rank. A gather starts when the gathers that forward needs before run."""
        mine = [gather for gather in self.gathers if any(gather.flat is flat.params for flat in flats)]
        if self._captured is not None:
            self._captured.note(mine)
            return
        self._updated.update(mine)
        waiting = self.gathers[len(self._started) :]
        self._start(list(takewhile(self._updated.__contains__, waiting)))

    def publish(self) -> None:
        """All parameters of this rank are up to date: start the other gathers, and have readers wait for them."""
        self.num_published += 1
        if self._captured is None:
            self._publish(guarded=False)
        else:
            self._refuse_reads()

    def _publish(self, *, guarded: bool) -> None:
        self._start(self.gathers[len(self._started) :])
        self._started = []
        if not self._overlaps:
            self.finish()
        elif not guarded:
            guard_reads(self._model.module.modules(), self.gathers)

    def start_and_finish(self) -> None:
        """Gather all parameters now."""
        self._start(self.gathers)
        self.finish()

    def start_again(self) -> None:
        """Before a capture: gather parameters that are up to date already, so that the captured reads wait for it.

        Collective, as the capture is: all ranks capture in the same call.
        """
        self.finish()
        self._publish(guarded=False)

    def finish(self) -> None:
        """Wait for the gathers under way."""
        for gather in self.gathers:
            gather.wait()

    # ---- Captured steps: all but the gathers is in the graph. ----

    @contextmanager
    def captured(self) -> Iterator["CapturedUpdates"]:
        """A step of this block is captured, and its gathers are not: ``publish_replayed`` comes after each replay."""
        self._captured = CapturedUpdates()
        try:
            yield self._captured
        finally:
            self._captured = None
            for gather in self.gathers:
                gather.allow_reads()
                gather.leave_graph()

    def _refuse_reads(self) -> None:
        """In a capture, behind the update: shards of other ranks come behind the replay, and no read can wait."""
        why = (
            "the captured function has read a parameter of {name} after optimizer.step(), and gathers of updated "
            "parameters come behind the graph: do what reads them (an average of weights, a norm, an evaluation) "
            "between two calls of the graphed step, where each read waits"
        )
        guard_reads(self._model.module.modules(), self.gathers, why)

    def wait_in_graph(self) -> None:
        """At the start of a capture under ``captured``.

        In the graph, a parameter's first read waits for the gather that was started last before a replay.
        """
        for gather in self.gathers:
            gather.wait_in_graph()

    def start_replayed(self, updates: "CapturedUpdates") -> None:
        """After a replay of the step with these updates: start each gather as soon as its bucket is up to date."""
        for gather in self.gathers:  # in the order of the forward: gathers run one after the other
            self._start([gather], after=updates.events.get(gather))

    def publish_replayed(self, launch: Callable[[], None] | None) -> None:
        """A captured step was replayed. Readers that wait since an earlier replay go on to.

        launch  replays the graph of ``start_replayed``; None: that was called
        """
        guarded = bool(self.gathers) and all(gather.guards for gather in self.gathers)
        if launch is not None:
            launch()
            for gather in self.gathers:
                gather.record_replay(self._model.observer)
            self._started = self.gathers
        self._publish(guarded=guarded)

    def _start(self, gathers: Sequence[ParamGather], *, after: torch.cuda.Event | None = None) -> None:
        """Start gathers behind the current stream's work, or behind ``after`` alone."""
        self._started = [*self._started, *gathers]
        if after is not None and self.stream is not None:
            self.stream.wait_event(after)
        for gather in gathers:  # step 9 of docs/by_hand.py
            gather.start(self.stream, self._model.observer, ordered=after is not None)


class CapturedUpdates:
    """When each gather may run after a replay of one captured step."""

    def __init__(self) -> None:
        self.events: dict[ParamGather, torch.cuda.Event] = {}
        """Every replay records the event when the gather's bucket is up to date. Empty on CPUs."""

    def note(self, gathers: Sequence[ParamGather]) -> None:
        """The buckets of these gathers are up to date, in the capture."""
        if gathers and gathers[0].flat.is_cuda:
            event = torch.cuda.Event(external=True)
            event.record()
            self.events.update(dict.fromkeys(gathers, event))
