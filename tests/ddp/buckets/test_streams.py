"""Which CUDA stream waits for which: told by streams that only note what they are asked, without a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loops import loss_of, make_batches, make_model, wrap
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.buckets import reducer, released
from maingrad.ddp.buckets.bucket import Phase
from maingrad.ddp.buckets.bucket_params import _records_of
from maingrad.ddp.buckets.buffer import ReleasableBuffer
from maingrad.ddp.buckets.reducer import BucketLauncher
from maingrad.ddp.buckets.released import GradPool, ReleasedBucket
from maingrad.ddp.collectives.in_flight import InFlight
from maingrad.launch import simulate
from maingrad.te_integration import WgradQueue, delayed_wgrad

GPU = torch.device("cuda", 0)


class Stream:
    """Notes in ``notes`` what it waits for. ``cuda_stream`` is its raw address."""

    def __init__(self, name: str, raw: int, notes: list[str]) -> None:
        self.name, self.cuda_stream, self.notes, self.device = name, raw, notes, GPU

    def wait_stream(self, other: "Stream") -> None:
        self.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "Event") -> None:
        self.notes.append(f"{self.name} waits for {event.behind}")


class Event:
    behind = "nothing"

    def record(self, stream: Stream) -> None:
        stream.notes.append(f"event on {stream.name}")
        self.behind = f"an event on {stream.name}"


class Streams:
    """The streams of a GPU. ``current`` may be set."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.current = self.of("main", 1)
        self.num_made = 0

    def of(self, name: str, raw: int) -> Stream:
        return Stream(name, raw, self.notes)

    def new(self, device: torch.device) -> Stream | None:
        if device.type == "cpu":
            return None
        self.num_made += 1
        return self.of(f"reductions {self.num_made}", 100 + self.num_made)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def taken(self) -> list[str]:
        taken = self.notes.copy()
        self.notes.clear()
        return taken


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    for module in (reducer, released):
        monkeypatch.setattr(module, "current_stream", lambda device: made.current)
    monkeypatch.setattr(reducer, "communication_stream", made.new)
    monkeypatch.setattr(reducer, "OnStream", made.on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda raw, device: made.of(f"stream {raw}", raw))
    return made


def launcher_of(streams: Streams, num_collectives: int = 1) -> tuple[BucketLauncher, Any]:
    """A launcher whose reductions note their beginning and their second half, and a wrapper with its buckets."""
    ddp = wrap(nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)]), bucket_size=16)

    def flight(number: int) -> Any:
        def wait() -> None:
            streams.notes.append(f"{number} ends on {streams.current.name}")

        return SimpleNamespace(wait=wait)

    def reduction(number: int) -> Any:
        def start(grad_data: object, into: object) -> Any:
            streams.notes.append(f"{number} begins on {streams.current.name}")
            return flight(number)

        return SimpleNamespace(name="sum", num_collectives=num_collectives, start=start, wire_nbytes=lambda *_: 0)

    reductions = [reduction(number) for number in range(len(ddp.buckets))]
    assert len(reductions) == 3
    return BucketLauncher(ddp.buckets, reductions, None, ddp.failures, device=GPU), ddp


def test_a_reduction_waits_for_every_stream_that_has_written_and_the_current_one_goes_on(streams: Streams) -> None:
    launcher, ddp = launcher_of(streams)
    ddp.buckets[0].streams |= {1, 7}
    launcher.launch(ddp.buckets[0])
    name = "reductions 1"
    assert streams.taken() == [
        f"{name} waits for main", f"{name} waits for stream 7",
        f"0 begins on {name}", f"0 ends on {name}", f"event on {name}",
    ]  # fmt: skip
    launcher.wait()
    assert streams.taken() == [f"main waits for an event on {name}"]
    assert [bucket.phase for bucket in ddp.buckets[:2]] == [Phase.REDUCED, Phase.IDLE]
    launcher.wait()
    assert streams.taken() == []


def test_a_second_collective_runs_beside_the_next_buckets_first(streams: Streams) -> None:
    launcher, _ = launcher_of(streams, num_collectives=2)
    assert launcher.waits_launch_nothing, "on a GPU a launch issues them all"
    assert launcher.stream is not None
    launcher.launch_rest()
    begun = [note for note in streams.taken() if "begins" in note]
    assert begun == ["0 begins on reductions 1", "1 begins on reductions 2", "2 begins on reductions 1"]


def test_a_stream_waits_for_what_another_one_has_waited_for(streams: Streams) -> None:
    """``release_grads``: a backward waits for the oldest reductions, on the stream that it runs on."""
    launcher, ddp = launcher_of(streams)
    launcher.launch_rest()
    backward = streams.of("backward", 2)
    streams.taken()
    with streams.on(backward):
        launcher.wait_for_all_but(1)
        assert streams.taken() == ["backward waits for an event on reductions 1"] * 2
        launcher.wait_for(ddp.buckets[0])
        assert streams.taken() == []
    expected: list[list[str]] = [[], ["main waits for backward"], ["main waits for an event on reductions 1"]]
    for bucket, noted in zip(ddp.buckets, expected, strict=True):
        for notes in (noted, []):
            launcher.wait_for(bucket)
            assert streams.taken() == notes


def launcher_that_another_stream_awaits(streams: Streams) -> tuple[BucketLauncher, Any]:
    """It has launched all buckets, and backward's stream waits for all but one of them."""
    launcher, ddp = launcher_of(streams)
    launcher.launch_rest()
    with streams.on(streams.of("backward", 2)):
        launcher.wait_for_all_but(1)
    streams.taken()
    return launcher, ddp


def test_an_iteration_that_is_given_up_ends_on_the_stream_that_gives_it_up(streams: Streams) -> None:
    """It zeroes what the reductions have read and written."""
    launcher, _ = launcher_that_another_stream_awaits(streams)
    launcher.reset()
    assert streams.taken() == [*["main waits for backward"] * 2, "main waits for an event on reductions 1"]


def test_after_a_capture_that_failed_nothing_is_waited_for(streams: Streams) -> None:
    launcher, ddp = launcher_that_another_stream_awaits(streams)
    launcher.forget()
    launcher.wait()
    assert streams.taken() == []
    assert {bucket.phase for bucket in ddp.buckets} == {Phase.REDUCED}


def test_after_a_capture_that_failed_a_cpu_waits_for_what_has_run() -> None:
    ddp, waited = wrap(make_model()), list[str]()
    (bucket,) = ddp.buckets
    work = SimpleNamespace(wait=lambda: waited.append(bucket.phase.value))
    ddp._launcher.launch(bucket, lambda grads: InFlight(work, (grads,)))
    ddp.forget_iteration()
    assert waited == ["reducing"]
    assert bucket.phase is Phase.IDLE


def in_turn(numbers: list[int]) -> Callable[[], int]:
    rest = [*numbers]
    return lambda: rest.pop(0) if len(rest) > 1 else rest[0]


def test_every_stream_on_which_a_gradient_arrives_is_noted(streams: Streams) -> None:
    ddp = wrap(make_model())
    (bucket,) = ddp.buckets
    first, second = make_batches(2)
    queue = WgradQueue()
    ddp.readiness._raw_stream = in_turn([7, 8])
    with ddp.no_sync():
        loss_of(ddp, first).backward()
    assert bucket.streams == {7, 8}
    with delayed_wgrad(queue):
        loss = loss_of(ddp, second)
    loss.backward()
    ddp.readiness._raw_stream = in_turn([9])
    queue.drain()
    assert bucket.streams == {7, 8, 9}
    ddp.zero_grad()
    assert bucket.streams == set()


@pytest.mark.parametrize("own", [False, True])
def test_memory_that_is_released_is_waited_for_by_whom_it_returns_to(own: bool, streams: Streams) -> None:
    ddp = wrap(make_model())
    (layout,) = ddp.plan.buckets
    memory = ReleasableBuffer(layout.numel, torch.float32, torch.device("cpu"))
    by_name = {entry.owned.name: entry.owned for entry in ddp.bucket_params}
    bucket = ReleasedBucket(layout, memory, _records_of(layout, memory.data, by_name), (0, layout.numel), GradPool())
    home, other = streams.current, streams.of("other", 2)
    bucket.make_room()
    memory.stream = home  # as ``take`` notes it on a GPU
    streams.current = home if own else other
    bucket.make_room()
    assert streams.taken() == ([] if own else ["other waits for main"])
    bucket.streams |= {1, 7}
    bucket.reset()
    assert sorted(streams.taken()) == sorted([*([] if own else ["main waits for other"]), "main waits for stream 7"])
    assert not memory.resident
    bucket.streams |= {7}
    bucket.reset()
    assert streams.taken() == [], "there is no memory"


@pytest.mark.parametrize("instances", [1, 2])
def test_a_step_waits_bucket_by_bucket_where_no_wait_begins_a_second_collective(instances: int) -> None:
    """On CPUs reductions inside of instances and across them are two collectives, and the wait begins the second."""

    def check() -> bool:
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            num_distributed_optimizer_instances=instances,
        )
        return DistributedDataParallel(nn.Linear(2, 2), config).can_wait_by_bucket

    assert simulate(check, 4) == [instances == 1] * 4


@pytest.mark.parametrize("instances", [1, 2])
def test_a_backward_waits_for_memory_where_no_wait_begins_a_second_collective(instances: int) -> None:
    """For all reductions but the latest two. Ranks come to such waits at different times, in an order of their own."""

    def check() -> list[str]:
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            release_grads=True,
            bucket_size=1,
            num_distributed_optimizer_instances=instances,
        )
        model = DistributedDataParallel(nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)]), config)
        model(torch.ones(1, 8)).sum().backward()
        phases = [bucket.phase.value for bucket in model.buckets]
        model.finish_grad_sync()
        assert {bucket.phase for bucket in model.buckets} == {Phase.REDUCED}
        return phases

    expected = ["reduced"] * 3 + ["reducing"] * 3 if instances == 1 else ["reducing"] * 6
    assert simulate(check, 4) == [expected] * 4
