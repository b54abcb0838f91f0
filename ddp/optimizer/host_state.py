"""``HostState``: optimizer state in page-locked host memory, which passes through the device bucket by bucket.

Copies of the next bucket's state to the device, and of the last one's back, run beside an update, on two streams. In a
captured step they are branches of its graph.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives.streams import OnStream, current_stream, is_capturing
from ..plan.cut import round_up
from .steps import SCALES

__all__ = ["HostState", "Member"]

_ALIGNED = 64
"""Elements at whose multiples a member's state begins: kernels read 16 bytes at once."""


class Member(NamedTuple):
    """A tensor that has state."""

    owner: Tensor
    bucket: Hashable
    num_scales: int
    """Number of scales of each moment in 8 bits; 0: moments have none."""


class HostState:
    """Device memory for the state of two buckets, which buckets use by turns.

    members  bucket by bucket, in the order in which steps come to them
    """

    def __init__(self, device: torch.device, members: Iterable[Member]) -> None:
        self._device = device
        self._bucket: dict[Tensor, Hashable] = {}
        self._starts: dict[Tensor, tuple[int, int]] = {}
        """First element and first scale of each member, among those of its bucket."""
        ends: dict[Hashable, tuple[int, int]] = {}
        for owner, bucket, num_scales in members:
            numel, scales = self._starts[owner] = ends.get(bucket, (0, 0))
            ends[bucket] = numel + round_up(owner.numel(), _ALIGNED), scales + round_up(num_scales, _ALIGNED)
            self._bucket[owner] = bucket
        self._turns = {bucket: place % 2 for place, bucket in enumerate(ends)}
        """The turn of each bucket, the same in every step: a captured step finds the tables of eager ones."""
        self._most = tuple(map(max, zip((0, 0), *ends.values(), strict=True)))
        """Elements and scales of the largest bucket."""
        self._memory: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        """By turn and key of the state: device memory."""
        self._places: dict[tuple[Tensor, str], Tensor] = {}
        """Views of this memory, by owner and key."""
        self._to_device, self._to_host = _Copies(device), _Copies(device)
        self._free: list[torch.cuda.Event | None] = [None, None]
        """By turn: the state that was last in its memory is back on the host, and so is that of its other buckets."""
        self._was_captured = False
        self._is_eager = False
        """Whether an eager step's copies may be under way."""

    def place(self, owner: Tensor, key: str, home: Tensor) -> Tensor:
        """Device memory for the state ``key`` of a member, which has its home on the host: always the same."""
        here, are_scales = (owner, key), key in SCALES
        if here not in self._places:
            memory = self._memory[self._turns[self._bucket[owner]]]
            if key not in memory:
                memory[key] = torch.empty(self._most[are_scales], dtype=home.dtype, device=self._device)
                self._to_device.follow()  # whatever had this memory before, on the current stream
            start = self._starts[owner][are_scales]
            self._places[here] = memory[key][start : start + home.numel()].view(home.shape)
        return self._places[here]

    def visits(
        self, owners: Iterable[Tensor], homes_of: Callable[[Tensor], Mapping[str, Tensor]]
    ) -> Iterator[tuple[Hashable, list[Tensor]]]:
        """Each bucket of these members, with the members, while their state is on the device: one step.

        homes_of  gives the state of a member on the host, by key
        """
        captured = is_capturing()
        self._was_captured, self._is_eager = self._was_captured or captured, not captured
        if self._was_captured:  # a replay's copies run on the current stream; events of a capture mean nothing outside
            self._to_device.follow()
            self._free = [None, None]
        members: dict[Hashable, list[Tensor]] = {}
        for owner in owners:
            members.setdefault(self._bucket[owner], []).append(owner)
        for bucket, turn in self._turns.items():
            if bucket not in members:
                continue
            homes = [(owner, *entry) for owner in members[bucket] for entry in homes_of(owner).items()]
            pairs = [(home, self.place(owner, key, home)) for owner, key, home in homes]
            self._to_device.start([(place, home) for home, place in pairs], self._free[turn])
            self._to_device.join()
            yield bucket, members[bucket]
            self._to_host.follow()
            self._free[turn] = self._to_host.start(pairs)
        if self._was_captured:
            self._to_host.join()

    def prepare_replay(self) -> None:
        """Before the replay of a captured step: wait on the host for an eager step's copies.

        The replay reads this state, and the host takes it to the memory of the capture where a load has replaced it.
        """
        if self._is_eager:
            self.wait()
            self._is_eager = False

    def wait(self) -> None:
        """The host waits for the last step's copies."""
        self._to_host.wait()


class _Copies:
    """Copies on a CUDA stream of their own; on CPUs at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow(self) -> None:
        """What comes next waits for the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(current_stream(self._stream.device))

    def join(self) -> None:
        """The current stream waits for these copies."""
        if self._stream is not None:
            current_stream(self._stream.device).wait_stream(self._stream)

    def wait(self) -> None:
        """The host waits for these copies, and for the current stream, on which those of a replay run."""
        if self._stream is not None:
            self.join()
            current_stream(self._stream.device).synchronize()

    def start(
        self, pairs: Sequence[tuple[Tensor, Tensor]], after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """Copy into the first tensor of each pair from the second, behind ``after``. Returns an event behind that."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        if after is not None:
            self._stream.wait_event(after)
        with OnStream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        behind: torch.cuda.Event = self._stream.record_event()
        return behind
