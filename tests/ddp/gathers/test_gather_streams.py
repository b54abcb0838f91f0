"""Which CUDA stream waits for a gather: told by streams that know behind which work they are, without a GPU."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp.collectives import streams
from maingrad.ddp.collectives.failure_report import FailureReporter
from maingrad.ddp.collectives.in_flight import InFlight
from maingrad.ddp.collectives.rank_grid import RankGrid
from maingrad.ddp.collectives.streams import OnStream, capture_number, capturing, current_stream, is_capturing
from maingrad.ddp.collectives.timeline import Observer
from maingrad.ddp.gathers import param_gather
from maingrad.ddp.gathers.param_gather import ParamGather

GPUS = [torch.device("cuda", index) for index in range(2)]


class Stream:
    """A stream of the GPU ``device``, behind the work in ``before``."""

    def __init__(self, device: torch.device = GPUS[0]) -> None:
        self.device, self.device_index, self.cuda_stream = device, device.index, id(self)
        self.before: set[str] = set()
        self.waited: list[Event] = []

    def wait_stream(self, other: "Stream") -> None:
        self.before |= other.before

    def wait_event(self, event: "Event") -> None:
        self.before |= event.before
        self.waited.append(event)

    @property
    def num_waits(self) -> int:
        return len(self.waited)


class Event:
    def __init__(self, *, external: bool = False) -> None:
        self.external, self.before = external, set[str]()

    def record(self, stream: Stream) -> None:
        self.before = set(stream.before)


class Cuda:
    """What the library asks of ``torch.cuda``. As there, a stream that becomes the current one brings its GPU along."""

    def __init__(self) -> None:
        self.current = {gpu.index: Stream(gpu) for gpu in GPUS}
        self.device = 0
        self.is_captured = False
        self.num_objects = 0
        self.log: list[str] = []

    def set_stream(self, stream: Stream) -> None:
        self.current[stream.device_index], self.device = stream, stream.device_index

    def set_device(self, index: int) -> None:
        self.device = index

    def current_stream(self, device: torch.device) -> Stream:
        self.num_objects += 1
        return self.current[device.index]

    def run(self, name: str) -> None:
        self.current[self.device].before.add(name)
        self.log.append(name)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    for name in ("set_stream", "set_device", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.is_captured)
    for module in (streams, param_gather):
        monkeypatch.setattr(module, "current_raw_stream", lambda index: found.current[index or 0].cuda_stream)
    # The bucket is the CPU's, and its streams are those of the first GPU.
    monkeypatch.setattr(param_gather, "current_stream", lambda _: current_stream(GPUS[0]))
    monkeypatch.setattr(streams, "_known", {})
    return found


def test_a_block_on_a_stream_leaves_everything_as_it_was(cuda: Cuda) -> None:
    """Of another GPU too, which is the current one in the block."""
    before = [current_stream(gpu) for gpu in GPUS]
    for gpu in GPUS:
        side = Stream(gpu)

        def raise_on_it(side: Any = side) -> None:
            with OnStream(side):
                assert cuda.current[side.device_index] is side
                assert cuda.device == side.device_index
                raise KeyError

        with pytest.raises(KeyError):
            raise_on_it()
        assert cuda.device == 0
        assert [current_stream(gpu) for gpu in GPUS] == before


def test_an_object_is_made_once_for_each_stream_of_each_gpu(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        assert current_stream(GPUS[0]) is cuda.current[0]
    assert cuda.num_objects == 1
    monkeypatch.setattr(streams, "current_raw_stream", lambda index: 0)  # each GPU's default stream
    assert [current_stream(gpu) for gpu in GPUS] == list(cuda.current.values())


def test_a_backward_on_a_thread_of_autograds_belongs_to_the_capture_of_its_stream(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with ThreadPoolExecutor(1) as other:
        with capturing():
            number = capture_number()
            assert number
            assert (other.submit(capture_number).result(), other.submit(is_capturing).result()) == (0, False)
            cuda.is_captured = True
            assert (other.submit(capture_number).result(), other.submit(is_capturing).result()) == (number, True)
            theirs = capturing()
            other.submit(theirs.__enter__).result()
            assert capture_number() == number, "another thread captures too"
            other.submit(theirs.__exit__, None, None, None).result()
        assert capture_number() is None, "somebody else captures"
        assert not is_capturing()


class Launches(Observer):
    """Collectives that have begun on the current stream, and the waits for them."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.waits: list[tuple[str, str]] = []

    def launch(self, bucket: str, collective: str, nbytes: Any, start: Callable[[], InFlight]) -> InFlight:
        self.cuda.run(collective)
        return InFlight(SimpleNamespace(wait=lambda: None), start().tensors)

    def wait(self, bucket: str, collective: str, order: Callable[[], object]) -> None:
        self.waits.append((bucket, collective))
        order()


@pytest.fixture
def job(cuda: Cuda) -> Iterator[Any]:
    """A gather, the parameter that it brings, and the stream that it runs on."""
    flat = torch.zeros(4)
    param = nn.Parameter(flat.view(2, 2))
    gather = ParamGather("bucket 0", flat, [param], RankGrid(None, None, None), FailureReporter())
    cuda.run("update")
    yield SimpleNamespace(gather=gather, param=param, side=Stream(), main=cuda.current[0], launches=Launches(cuda))
    gather.forget_capture()


def read(cuda: Cuda, param: Tensor, stream: Stream) -> set[str]:
    """Behind which work a stream of the program is that reads the parameter now."""
    with OnStream(stream):  # type: ignore[arg-type]
        param.sum()
    return stream.before


def start(cuda: Cuda, job: Any, **options: Any) -> None:
    job.gather.start(job.side, job.launches, fill=lambda: cuda.run("fill"), **options)
    job.gather.guard()


def test_a_gather_is_behind_the_update_and_its_readers_are_behind_it(cuda: Cuda, job: Any) -> None:
    start(cuda, job)
    assert cuda.log == ["update", "fill", "all_gather"]
    assert job.side.before == set(cuda.log)
    assert job.main.before == {"update"}, "nobody has waited yet"
    assert "all_gather" in read(cuda, job.param, Stream())
    assert "all_gather" in job.main.before, "parameters are plain from here on, and ask nobody to wait"
    assert job.launches.waits == [("bucket 0", "all_gather")]
    assert not job.gather.under_way
    late = Stream()
    with OnStream(late):  # type: ignore[arg-type]
        job.gather.wait()
    assert "all_gather" in late.before


def test_who_has_ordered_the_stream_says_so(cuda: Cuda, job: Any) -> None:
    start(cuda, job, ordered=True)
    assert job.side.before == {"fill", "all_gather"}


def test_a_stream_waits_once_for_each_gather(cuda: Cuda, job: Any) -> None:
    for number in (1, 2):
        start(cuda, job)
        for _ in range(3):
            job.gather.wait()
        assert job.main.num_waits == number


def test_memory_that_goes_back_to_its_stream_is_behind_the_gather(cuda: Cuda, job: Any) -> None:
    for done in (False, True):
        flat = torch.zeros(4)
        gather = ParamGather("bucket 1", flat, [], RankGrid(None, None, None), FailureReporter())
        gather.start(job.side, job.launches)
        if done:
            gather.wait()
        before = job.main.num_waits
        del gather
        assert job.main.num_waits == before + (not done)
        assert "all_gather" in job.main.before


def test_waits_in_a_graph_are_for_the_gather_before_it(cuda: Cuda, job: Any) -> None:
    """Where parameters wait at their first read, that read is in the graph; else the graph begins with the wait."""
    job.gather.wait_in_graph()
    assert job.main.num_waits == 0, "no gather has begun yet"
    start(cuda, job)
    cuda.is_captured = True
    job.gather.wait_in_graph()
    assert job.main.num_waits == 0
    read(cuda, job.param, job.main)
    assert job.main.num_waits == 1
    job.gather.wait()
    captured = Stream()
    with OnStream(captured):  # type: ignore[arg-type]
        job.gather.wait()
        assert captured.num_waits == 0, "a plain read in the capture: the graph has waited at its beginning"
        job.gather.wait_in_graph()
        assert captured.num_waits == 1
    cuda.is_captured = False
    job.gather.leave_graph()
    assert job.main.num_waits == 2, "what was captured has ordered nothing yet"
    cuda.run("next update")
    job.gather.start(job.side, job.launches)
    assert "next update" in captured.waited[0].before, "a replay waits for the latest gather"
    job.gather.wait_in_graph()
    assert job.main.num_waits == 3, "no parameter waits at its first read"


def test_a_gather_in_a_graph_is_under_way_with_each_replay(cuda: Cuda, job: Any) -> None:
    start(cuda, job)
    job.gather.leave_capture()
    assert not job.gather.under_way
    reader = Stream()
    for number in (1, 2):
        job.gather.record_replay(job.launches)
        assert job.gather.under_way
        job.gather.guard()
        read(cuda, job.param, reader)
        assert len(job.launches.waits) == number
        assert reader.num_waits == job.main.num_waits == number
        assert not job.gather.under_way
    job.gather.leave_capture()
    job.gather.record_replay(job.launches)


@pytest.mark.parametrize("in_graph", [False, True])
def test_an_event_of_a_gather_outside_of_graphs_is_an_external_one(cuda: Cuda, job: Any, in_graph: bool) -> None:
    """Each replay then waits for the gather that was started last; inside of a graph there is no other."""
    gather = ParamGather("b", torch.zeros(4), [], RankGrid(None, None, None), FailureReporter(), in_graph=in_graph)
    gather.start(job.side, job.launches)
    event = gather._event
    assert isinstance(event, Event) and event.external is not in_graph
    gather.forget_capture()
    assert not gather.under_way
    gather.wait()
    assert job.main.num_waits == 0
