"""What the timeline records of forwards, gathers and waits.

Bounds are lengths of sleeps, not speeds. Each sleep begins after the mark that it is measured from, so that a machine
that stops for a moment anywhere can only make a span longer.
"""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.collectives.in_flight import InFlight
from maingrad.ddp.collectives.timeline import Timeline
from maingrad.launch import simulate

NAP = 0.02


class SlowWork:
    """A collective that sleeps on a thread of its own, as gloo's run on threads."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def finish_in(self, seconds: float) -> None:
        threading.Timer(seconds, self._done.set).start()

    def wait(self) -> None:
        self._done.wait()


class BrokenWork:
    def wait(self) -> None:
        raise RuntimeError("a peer is gone")


def recording(*, threads: bool = True) -> Timeline:
    return Timeline(torch.device("cpu"), collectives_have_threads=threads)


def watch(timeline: Timeline, collective: str, work: object, bucket: str = "bucket 0") -> InFlight:
    return timeline.launch(bucket, collective, lambda: 64, lambda: InFlight(work, ()))


def slow(timeline: Timeline, collective: str, seconds: float, bucket: str = "bucket 0") -> InFlight:
    """A collective that ends ``seconds`` after its launch."""

    def start() -> InFlight:
        work = SlowWork()
        work.finish_in(seconds)
        return InFlight(work, ())

    return timeline.launch(bucket, collective, lambda: 64, start)


def test_forwards_inside_a_forward_are_a_part_of_it() -> None:
    timeline = recording()
    timeline.forward_started()
    timeline.forward_started()
    timeline.forward_ended()
    time.sleep(NAP)
    timeline.forward_ended()
    timeline.forward_ended()  # of a forward that had begun before the recording
    timeline.backward_ended(True)  # so had its backward
    timeline.close()
    assert timeline.backwards == []
    (forward,) = timeline.forwards
    assert forward.end - forward.start >= NAP


@pytest.mark.parametrize("threads", [True, False])
def test_gathers_and_reductions_are_kept_apart(threads: bool) -> None:
    timeline = recording(threads=threads)
    for collective in ("reduce_scatter", "all_gather", "all_to_all", "all_reduce"):
        slow(timeline, collective, NAP).wait()
    timeline.close()
    assert [span.collective for span in timeline.buckets] == ["reduce_scatter", "all_to_all", "all_reduce"]
    (gather,) = timeline.gathers
    assert (gather.bucket, gather.collective, gather.nbytes) == ("bucket 0", "all_gather", 64)
    assert gather.finished - gather.launched >= 0.99 * NAP
    assert [wait.collective for wait in timeline.waits] == ["reduce_scatter", "all_gather", "all_to_all", "all_reduce"]
    ends = [timeline.buckets[0].finished, gather.finished, *(span.finished for span in timeline.buckets[1:])]
    assert all(end <= wait.end for end, wait in zip(ends, timeline.waits, strict=True)), "when somebody knew of it"


def test_a_wait_is_as_long_as_somebody_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline, work = recording(), SlowWork()
    wait_for = timeline.wait

    def finish_while_somebody_waits(bucket: str, collective: str, order: Callable[[], None]) -> None:
        def begin_and_wait() -> None:
            work.finish_in(NAP)
            order()

        wait_for(bucket, collective, begin_and_wait)

    monkeypatch.setattr(timeline, "wait", finish_while_somebody_waits)
    began = time.perf_counter()
    flight = watch(timeline, "all_gather", work)
    time.sleep(3 * NAP)  # computation, which the collective lies under
    flight.wait()
    elapsed = time.perf_counter() - began
    timeline.close()
    (wait,), (gather,) = timeline.waits, timeline.gathers
    assert 0.99 * NAP <= wait.end - wait.start <= elapsed - 3 * NAP
    assert 3.99 * NAP <= gather.finished - gather.launched <= elapsed


def test_what_is_under_way_at_the_end_is_finished_there() -> None:
    timeline = recording()
    flight = slow(timeline, "all_gather", NAP)
    slow(timeline, "all_gather", NAP, "bucket 1")
    timeline.close()
    assert [span.bucket for span in timeline.gathers] == ["bucket 0", "bucket 1"]
    assert all(span.finished - span.launched >= 0.99 * NAP for span in timeline.gathers)
    flight.wait()
    timeline.wait("bucket 0", "all_gather", lambda: None)
    assert timeline.waits == [], "after the recording"
    spans = [*timeline.gathers]
    timeline._watcher = None
    timeline.close()
    assert timeline.gathers == spans, "each once"


@pytest.mark.parametrize("threads", [True, False])
def test_a_collective_that_is_watched_keeps_its_memory(threads: bool) -> None:
    timeline, memory = recording(threads=threads), torch.ones(2)
    work = SlowWork()
    work.finish_in(0.0)
    flight = timeline.launch("bucket 0", "all_gather", lambda: 64, lambda: InFlight(work, (memory,)))
    assert len(flight.tensors) == 1 and flight.tensors[0] is memory
    flight.wait()
    timeline.close()


def test_a_block_that_raises_ends_the_recording() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))

    def record() -> None:
        with model.record_timeline() as timeline:
            recorded.append(timeline)
            model(torch.ones(1, 2)).sum().backward()
            raise KeyError

    recorded: list[Timeline] = []
    with pytest.raises(KeyError):
        record()
    (timeline,) = recorded
    assert len(timeline.forwards) == len(timeline.backwards) == 1
    assert not model.observer.recording
    model(torch.ones(1, 2))
    assert len(timeline.forwards) == 1


def test_forwards_behind_one_that_raised_are_recorded() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    with model.record_timeline() as timeline:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(1, 3))
        model(torch.ones(1, 2)).sum().backward()
    assert len(timeline.forwards) == 2
    assert timeline.forwards[0].end <= timeline.forwards[1].start


def test_a_backward_begins_anew_behind_one_that_failed() -> None:
    timeline = recording()
    timeline.backward_started()
    time.sleep(NAP)
    second = time.perf_counter()
    timeline.backward_started()
    timeline.backward_ended(True)
    timeline.close()
    (backward,) = timeline.backwards
    assert backward.end - backward.start <= time.perf_counter() - second


def test_a_backward_that_began_before_the_recording_is_not_recorded() -> None:
    timeline = recording()
    timeline.backward_ended(True)
    timeline.backward_started()
    timeline.backward_ended(False)
    timeline.backward_ended(True)
    timeline.close()
    assert [span.synced for span in timeline.backwards] == [False]


def test_a_bucket_that_nothing_has_made_ready_is_ready_when_it_is_launched() -> None:
    """An unused parameter's: an earlier iteration's readiness is not its own."""
    timeline = recording()
    timeline.bucket_ready("bucket 0")
    for _ in range(2):
        slow(timeline, "all_reduce", 0.0).wait()
    timeline.close()
    used, unused = timeline.buckets
    assert used.ready < used.launched
    assert unused.ready == unused.launched


def test_alone_there_is_nothing_to_wait_for() -> None:
    timeline = recording()
    flight = watch(timeline, "all_gather", None)
    assert flight.work is None
    timeline.close()
    (gather,) = timeline.gathers
    assert (gather.collective, gather.launched) == ("none", gather.finished)


@pytest.mark.parametrize("threads", [True, False])
def test_a_failed_collective_fails_for_whoever_waits(threads: bool) -> None:
    timeline = recording(threads=threads)
    flight = watch(timeline, "all_gather", BrokenWork())
    with pytest.raises(RuntimeError, match="a peer is gone"):
        flight.wait()
    slow(timeline, "all_gather", 0.0, "bucket 1").wait()
    timeline.close()
    assert [gather.bucket for gather in timeline.gathers] == ["bucket 1"], "what failed has no end to record"


def test_named_stretches_are_recorded() -> None:
    timeline = recording()
    with timeline.phase("the update"):
        time.sleep(NAP)
    timeline.close()
    (phase,) = timeline.phases
    assert phase.name == "the update"
    assert phase.end - phase.start >= NAP


@pytest.mark.parametrize("sharded", [False, True])
def test_a_timeline_counts_the_bytes_of_whole_buckets(sharded: bool) -> None:
    def on_each_rank() -> None:
        config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, overlap_grad_reduce=True)
        ddp = DistributedDataParallel(nn.Linear(16, 16), config)
        with ddp.record_timeline() as timeline:
            ddp(torch.ones(1, 16)).sum().backward()
            ddp.finish_grad_sync()
        (bucket,) = ddp.buckets
        assert [span.nbytes for span in timeline.buckets] == [4 * bucket.layout.numel]

    simulate(on_each_rank, 2)
