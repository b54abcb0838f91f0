"""``HostState``: optimizer state in page-locked host memory, which passes through the device bucket by bucket.

Copies of the next bucket's state to the device, and of the last one's back, run beside an update, on two streams. A
captured step copies on its own stream.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...ddp.collectives.streams import is_capturing
from ...ddp.optimizer.state_forms import StateCopies
from .optimizer_watch import bucket_of

__all__ = ["HostState"]

_ALIGNED = 64
"""Elements at whose multiples a parameter's state begins."""


class HostState:
    """Device memory for the state of two buckets, which buckets use by turns.

    params  of the optimizer, on one device. Those that are not sharded are one more bucket
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        device = self._device = params[0].device
        buckets: dict[Any, list[Tensor]] = {}
        for param in params:
            buckets.setdefault(bucket_of(param), []).append(param)
        self._number: dict[Tensor, int] = {}
        """The bucket of each parameter."""
        self._start: dict[Tensor, int] = {}
        self._most = 0
        for number, members in enumerate(buckets.values()):
            end = 0
            for param in members:
                self._number[param], self._start[param] = number, end
                end += -(-param.numel() // _ALIGNED) * _ALIGNED
            self._most = max(self._most, end)
        self._memory: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        """By turn: [elements] by key."""
        self._to_device, self._to_host = StateCopies(device), StateCopies(device)
        self._free: list[torch.cuda.Event | None] = [None, None]
        """By turn: its state is back on the host."""
        self._returned: dict[int, torch.cuda.Event | None] = {}
        """By bucket: the same."""
        self._was_captured = False

    def by_bucket(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        """These parameters, bucket by bucket."""
        found: dict[int, list[Tensor]] = {}
        for param in params:
            found.setdefault(self._number[param], []).append(param)
        return [found[number] for number in sorted(found)]

    def place(self, param: Tensor, key: str, home: Tensor) -> Tensor:
        """Device memory for the state ``key`` of ``param``, which has its home on the host."""
        memory = self._memory[self._number[param] % 2]
        if key not in memory:
            memory[key] = torch.empty(self._most, dtype=home.dtype, device=self._device)
            self._to_device.follow()  # whatever had this memory before, on the current stream
        start = self._start[param]
        return memory[key][start : start + home.numel()].view(home.shape)

    @contextmanager
    def visit(self, param: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Around the update of the bucket of ``param``: its state is on the device.

        pairs  each tensor on the host, with its place on the device
        """
        arriving = [(place, home) for home, place in pairs]
        if is_capturing():
            self._was_captured = True
            _copy(arriving)
            yield
            _copy(pairs)
            return
        number = self._number[param]
        if self._was_captured:  # the copies of a replay run on the current stream
            self._to_device.follow()
        self._to_device.start(arriving, (self._free[number % 2], self._returned.get(number)))
        self._to_device.join()
        yield
        self._to_host.follow()
        self._free[number % 2] = self._returned[number] = self._to_host.start(pairs)

    def join(self) -> None:
        """The current stream, which is to replay a captured step, waits for an eager step's copies."""
        self._to_host.join()

    def wait(self) -> None:
        """The host waits for the last step's copies."""
        self._to_host.wait()


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
