"""``HostState``: whose memory copies and updates use, and what each waits for. Streams of a GPU are simulated.

A simulated stream knows the operations behind which its next one runs. Copies run at once, as on a GPU without delays.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from maingrad.ddp.optimizer import host_state
from maingrad.ddp.optimizer.host_state import HostState, Member

NUMEL = 100
NUM_BUCKETS = 5


class Stream:
    """What runs on it next runs behind ``before``; all streams append to one log."""

    device = torch.device("cpu")

    def __init__(self, log: "list[Operation]") -> None:
        self.before: set[Operation] = set()
        self.log = log
        self.is_synchronized = False

    def run(self, name: str) -> None:
        operation = Operation(name, frozenset(self.before))
        self.before |= {operation}
        self.log.append(operation)

    def wait_stream(self, other: "Stream") -> None:
        self.before |= other.before

    def wait_event(self, event: "set[Operation]") -> None:
        self.before |= event

    def record_event(self) -> "set[Operation]":
        return set(self.before)

    def synchronize(self) -> None:
        self.is_synchronized = True


class Operation:
    def __init__(self, name: str, before: "frozenset[Operation]") -> None:
        self.name, self.before = name, before

    def is_behind(self, name: str) -> bool:
        return name in {each.name for each in self.before}


class Device:
    """The streams of one ``HostState``: the main one, and those of copies."""

    state: HostState

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Operation] = []
        self.main = Stream(self.log)
        self.step = 0
        self.captures = False
        device = self

        class Copies(host_state._Copies):
            def __init__(self, _: torch.device) -> None:
                self._stream: Any = Stream(device.log)

            def start(self, pairs: Any, after: Any = None) -> Any:
                self.name = device.name_of(self, pairs)
                return super().start(pairs, after)

        @contextmanager
        def on_stream(stream: Stream) -> Iterator[None]:
            copies = next(each for each in (self.state._to_device, self.state._to_host) if each._stream is stream)
            stream.run(copies.name)
            yield

        monkeypatch.setattr(host_state, "_Copies", Copies)
        monkeypatch.setattr(host_state, "OnStream", on_stream)
        monkeypatch.setattr(host_state, "current_stream", lambda _: self.main)
        monkeypatch.setattr(host_state, "is_capturing", lambda: self.captures)
        self.owners = [torch.zeros(NUMEL) for _ in range(NUM_BUCKETS)]
        self.homes = [torch.full((NUMEL,), float(index)) for index in range(NUM_BUCKETS)]
        members = [Member(owner, index, 0) for index, owner in enumerate(self.owners)]
        self.state = HostState(torch.device("cpu"), members)

    def name_of(self, copies: Any, pairs: Any) -> str:
        way = "in" if copies is self.state._to_device else "out"
        home = pairs[0][way == "in"]
        bucket = next(index for index, each in enumerate(self.homes) if each is home)
        return f"{way} {bucket} of step {self.step}"

    def homes_of(self, owner: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": next(home for each, home in zip(self.owners, self.homes, strict=True) if each is owner)}

    def take_step(self, *passes: list[int]) -> None:
        """A step adds 1 to the state of each bucket, in these passes."""
        for buckets in passes or (list(range(NUM_BUCKETS)),):
            for bucket, members in self.state.visits([self.owners[index] for index in buckets], self.homes_of):
                (owner,) = members
                self.main.run(f"update {bucket} of step {self.step}")
                self.state.place(owner, "exp_avg", self.homes[int(str(bucket))]).add_(1.0)
        self.step += 1

    def find(self, name: str) -> Operation:
        (found,) = (each for each in self.log if each.name == name)
        return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_the_state_of_each_bucket_passes_through_the_memory_of_two(device: Device) -> None:
    for _ in range(3):
        device.take_step()
    for index, home in enumerate(device.homes):
        assert torch.equal(home, torch.full((NUMEL,), index + 3.0))
    places = [
        device.state.place(owner, "exp_avg", home) for owner, home in zip(device.owners, device.homes, strict=True)
    ]
    assert len({place.data_ptr() for place in places}) == 2
    assert all(one.data_ptr() != other.data_ptr() for one, other in itertools.pairwise(places))


def test_updates_wait_for_their_state_and_copies_for_updates(device: Device) -> None:
    for step in range(2):
        device.take_step()
        for bucket in range(NUM_BUCKETS):
            update = device.find(f"update {bucket} of step {step}")
            assert update.is_behind(f"in {bucket} of step {step}")
            assert device.find(f"out {bucket} of step {step}").is_behind(f"update {bucket} of step {step}")
            if bucket:
                assert not update.is_behind(f"out {bucket - 1} of step {step}"), "it goes back beside the next update"
            if bucket and step:
                ahead = device.find(f"in {bucket} of step {step}")
                assert not ahead.is_behind(f"update {bucket - 1} of step {step}"), "and the next comes beside this one"
    device.main.run("the next forward")
    assert not device.find("the next forward").is_behind(f"out {NUM_BUCKETS - 1} of step 1"), "nor does that wait"


def test_a_copy_waits_until_its_memory_and_its_state_are_back(device: Device) -> None:
    """Passes take buckets in another order than the last step's: two have one turn behind each other."""
    device.take_step([4], [0, 1, 2], [3])
    for bucket, earlier in ((2, 0), (0, 4)):
        assert device.find(f"in {bucket} of step 0").is_behind(f"out {earlier} of step 0"), "the memory"
    device.take_step([3], [4], [0, 1, 2])
    for bucket in range(NUM_BUCKETS):
        assert device.find(f"in {bucket} of step 1").is_behind(f"out {bucket} of step 0"), "the state"


def test_a_captured_step_is_whole_in_itself(device: Device) -> None:
    """No event of an eager step is in the graph, which begins and ends with the stream of the capture."""
    device.take_step()
    device.captures = True
    device.main.run("begin of the capture")
    begun = len(device.log)
    waited: list[object] = []
    for copies in (device.state._to_device, device.state._to_host):
        stream: Any = copies._stream
        stream.before = set()  # what is before the capture is in no graph
        stream.wait_event = waited.append
    device.take_step()
    assert not [event for event in waited if event is not None and not any(o in device.log[begun:] for o in event)]
    assert device.find("in 0 of step 1").is_behind("begin of the capture")
    device.main.run("end of the capture")
    end = device.find("end of the capture")
    assert all(end.is_behind(f"out {bucket} of step 1") for bucket in range(NUM_BUCKETS))


def test_an_eager_step_behind_replays_waits_for_them(device: Device) -> None:
    """A replay's copies run on the stream that replays."""
    device.captures = True
    device.take_step()
    device.captures = False
    device.main.run("replay")
    device.take_step()
    assert device.find("in 0 of step 1").is_behind("replay")


def test_the_host_waits_before_a_replay_for_an_eager_step_alone(device: Device) -> None:
    device.take_step()
    for expected in (True, False):
        device.main.is_synchronized = False
        device.state.prepare_replay()
        assert device.main.is_synchronized is expected
    device.main.run("read")
    assert all(device.find("read").is_behind(f"out {bucket} of step 0") for bucket in range(NUM_BUCKETS))
    device.captures = True
    device.take_step()
    device.main.is_synchronized = False
    device.state.prepare_replay()
    assert not device.main.is_synchronized, "the capture has copied nothing"


def test_memory_may_have_been_somebody_elses(device: Device) -> None:
    """A copy into memory that was free a moment ago waits for who had it, on the main stream."""
    device.main.run("the last use of the memory")
    device.take_step()
    assert device.find("in 0 of step 0").is_behind("the last use of the memory")
    assert device.find("in 1 of step 0").is_behind("the last use of the memory")


@pytest.mark.parametrize("order", [1, -1])
def test_memory_is_that_of_the_largest_bucket(order: int) -> None:
    """Of elements, and of scales, which another bucket may have more of."""
    members = [Member(torch.zeros(500), 0, 2), Member(torch.zeros(3), 1, 200)][::order]
    state = HostState(torch.device("cpu"), members)
    for member in members:
        numel, num_scales = member.owner.numel(), member.num_scales
        codes = state.place(member.owner, "exp_avg", torch.zeros(numel, dtype=torch.uint8))
        scales = state.place(member.owner, "exp_avg_scale", torch.zeros(num_scales))
        assert (codes.numel(), scales.numel()) == (numel, num_scales)
        assert (codes.untyped_storage().nbytes(), scales.untyped_storage().nbytes()) == (512, 256 * 4)


def test_members_of_a_bucket_begin_where_kernels_read_sixteen_bytes_at_once() -> None:
    """Codes of 8 bits and their scales, of members of any length."""
    members = [Member(torch.zeros(numel), 0, num_scales) for numel, num_scales in ((3, 1), (70, 2), (1, 1))]
    state = HostState(torch.device("cpu"), [*members, Member(torch.zeros(5), 1, 1)])
    for key, homes in (
        ("exp_avg", [torch.zeros(member.owner.numel(), dtype=torch.uint8) for member in members]),
        ("exp_avg_scale", [torch.zeros(member.num_scales) for member in members]),
    ):
        places = [state.place(member.owner, key, home) for member, home in zip(members, homes, strict=True)]
        assert all(place.data_ptr() % 16 == places[0].data_ptr() % 16 for place in places)
        starts = [(place.data_ptr() - places[0].data_ptr()) // place.itemsize for place in places]
        ends = [start + home.numel() for start, home in zip(starts, homes, strict=True)]
        assert all(end <= start for end, start in zip(ends[:-1], starts[1:], strict=True)), "they do not overlap"
