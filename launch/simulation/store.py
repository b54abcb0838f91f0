"""The key-value store of simulated ranks: a dict, whose waits pass the baton."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
else:
    Store = dist.Store

from .schedule import Scheduler, current_rank

__all__ = ["SimulatedStore", "Store"]


class _Key:
    """A wait for a key until some rank sets it."""

    def __init__(self, values: dict[str, bytes], key: str) -> None:
        self._values = values
        self._key = key

    @property
    def done(self) -> bool:
        return self._key in self._values

    def describe(self) -> str:
        return f"key {self._key!r} of the store"

    def missing(self) -> Sequence[int]:
        return ()


class SimulatedStore(Store):
    """One store for all ranks. Values are bytes, counters are decimal digits, as in torch's own stores."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        rank = current_rank()
        if rank is None:
            raise RuntimeError("a thread that is not a simulated rank waits for the store of simulated ranks")
        for key in keys:
            self._scheduler.wait(rank, _Key(self._values, key))

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        expected = expected_value.encode() if isinstance(expected_value, str) else bytes(expected_value)
        if self._values.get(key, b"") == expected:
            self.set(key, desired_value)
        return self._values.get(key, expected)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def set_timeout(self, timeout: Any) -> None:
        """Does nothing: a wait that cannot end is reported at once as a deadlock."""
