"""Simulated gathers that keep to the letter of ``torch.distributed``: nothing is there before somebody has waited."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from maingrad.launch.simulation.group import SimulatedProcessGroup, SimulatedWork

__all__ = ["strict_gathers"]

_GATHERS = ("all_gather_single", "_allgather_base")  # the second: before torch 2.13


class _Gather:
    """The handle of one: what arrives is NaN until ``wait``, and what is sent must stay as it was."""

    def __init__(self, start: Any, group: SimulatedProcessGroup, output: Tensor, shard: Tensor, opts: Any) -> None:
        self.output, self._shard = output, shard
        self.is_over = False
        self._sent = shard.detach().clone()
        self._arriving = output.detach().clone()
        self._work: SimulatedWork = start(group, self._arriving, self._sent.clone(), opts)
        output.data.fill_(torch.nan)
        shard.data.copy_(self._sent)

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        if not self.is_over:
            self.is_over = True
            assert torch.equal(self._shard, self._sent), "somebody has written to what a gather under way was sending"
            self.output.data.copy_(self._arriving)
        return True


@contextmanager
def strict_gathers() -> Iterator[list[int]]:
    """Around ``simulate``: gathers into one tensor are strict, and none overtakes another over the same memory.

    Yields the sizes of those that were launched.
    """
    launched: list[int] = []
    under_way: dict[int, _Gather] = {}
    plain = {name: getattr(SimulatedProcessGroup, name) for name in _GATHERS if hasattr(SimulatedProcessGroup, name)}

    def strict(start: Any) -> Any:
        def gather(self: SimulatedProcessGroup, output: Tensor, shard: Tensor, opts: Any = None) -> _Gather:
            before = under_way.get(output.data_ptr())
            assert before is None or before.is_over, "a gather into memory that another one is still writing to"
            launched.append(output.numel())
            under_way[output.data_ptr()] = started = _Gather(start, self, output, shard, opts)
            return started

        return gather

    for name, start in plain.items():
        setattr(SimulatedProcessGroup, name, strict(start))
    try:
        yield launched
    finally:
        for name, start in plain.items():
            setattr(SimulatedProcessGroup, name, start)
