"""Which stream a delayed weight gradient runs on, and what it waits for, on fake streams that record the calls.

What the kernels do with it is for a GPU to show; that nothing is captured when an entry is made can be seen anywhere.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maingrad.ddp.contract.delayed import DelayedWgrad
from maingrad.te_integration import WgradQueue


class Device:
    """Stands for a GPU: its current stream, and everything that happened on it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.current = self.stream("producer")
        self.finished = self.captures = False  # a capture has begun on the producing stream; others join by waiting
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current.is_captured())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "Event", self.event)

    def stream(self, name: str) -> Any:
        awaited: list[Any] = []

        def wait_stream(other: Any) -> None:
            self.events.append((name, "waits for", other.name))
            awaited.append(other)

        def is_captured() -> bool:
            return self.captures and (name == "producer" or any(other.is_captured() for other in awaited))

        return SimpleNamespace(name=name, wait_stream=wait_stream, is_captured=is_captured)

    def event(self) -> Any:
        def query() -> bool:
            assert not self.captures, "CUDA raises"
            return self.finished

        return SimpleNamespace(record=lambda stream: self.events.append((stream.name, "records")), query=query)

    def entry(self) -> DelayedWgrad:
        operand = SimpleNamespace(is_cuda=True, device="cuda:0", _version=0)
        operand.tensors = (operand,)
        operand.record_stream = lambda stream: self.events.append((stream.name, "keeps memory"))

        def write(entry: DelayedWgrad, dy: Any, x: Any) -> None:
            assert entry.backward == 1 and dy is operand and x is operand
            self.events.append((self.current.name, "writes"))

        return DelayedWgrad(write, (operand, operand), (), "layer", backward=1)


def test_17_it_runs_on_the_stream_of_the_moment_after_the_one_that_made_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    queue = WgradQueue()
    queue.put(device.entry())
    device.current = device.stream("drain")
    queue.drain()
    assert device.events == [("drain", "waits for", "producer"), ("drain", "writes"), ("drain", "records")]


def test_17_its_tensors_live_until_the_other_stream_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the tensors were freed earlier, the next kernel of the stream that made them could get their memory."""
    device = Device(monkeypatch)
    queue = WgradQueue()
    for _ in range(2):
        queue.put(device.entry())
    device.current = device.stream("drain")
    queue.drain()
    assert len(queue._retired) == 2 and all(entry._operands is not None for entry in queue._retired)
    device.finished = True
    queue.put(device.entry())
    queue.drain()
    assert queue._retired == []


def test_on_its_own_stream_it_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    entry = device.entry()
    entry.run()
    assert device.events == [("producer", "writes")]
    assert entry._operands is None


def test_a_capture_asks_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that drains its queue on another stream is captured: the allocator keeps the memory, also of trials."""
    device = Device(monkeypatch)
    queue, producer = WgradQueue(), device.current
    for device.captures in (False, True, True):
        device.current = producer
        queue.put(device.entry())
        device.current = device.stream("drain")
        queue.drain()
    captured = [("drain", "waits for", "producer"), ("drain", "writes"), *[("drain", "keeps memory")] * 2]
    assert device.events[3:] == 2 * captured
    assert len(queue._retired) == 1, "the trial's, which nobody may ask"
    device.captures, device.finished = False, True
    queue.put(device.entry())
    queue.drain()
    assert queue._retired == []
