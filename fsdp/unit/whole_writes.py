"""Writes to whole parameters in a forward: found at its end, and brought to the shards before the memory is freed.

In plain PyTorch a module may write its parameters in forward (``nn.Embedding(max_norm=...)``, a codebook, ActNorm's
first batch). Here forward sees whole parameters, whose memory is freed afterwards or overwritten by the next gather.
torch counts in-place writes in ``_version``. Gathers do not raise it, because they write to another tensor of the same
memory. A write through ``.data`` does not raise it either: each unit's first forward in training, and the first one in
evaluation, compare values, and such a write raises ``RuntimeError``.
"""

from collections.abc import Sequence

import torch

from ...ddp.buckets.replicas import bits_of, written_from_local_data
from ...ddp.collectives.streams import is_capturing
from ...ddp.torch_internals import DisableTorchFunctionSubclass
from .pair import ShardedPair

__all__ = ["WholeWrites", "write_back"]


class WholeWrites:
    """Finds writes to the whole parameters of a unit.

    pairs   the unit's parameters
    served  writes are brought to the shards: all ranks write alike, or there is one rank. False: writes are refused
    """

    def __init__(self, pairs: Sequence[ShardedPair], *, served: bool) -> None:
        self._pairs = pairs
        self._wholes = [pair.whole for pair in pairs]
        self._served = served
        self._compared: set[tuple[bool, bool]] = set()  # kinds of forwards: with gradients, of a module in training
        self._first: list[tuple[int, int]] | None = None  # values before the first forward, while it runs
        self.note()

    def note(self) -> None:
        """Leave out of the shards all that was written so far."""
        self._versions = [whole._version for whole in self._wholes]

    def forward_begins(self, *, training: bool) -> None:
        """The whole parameters are registered, and their gather has arrived; ``training``: the module's mode."""
        kind = torch.is_grad_enabled(), training
        if kind not in self._compared and not is_capturing():
            self._compared.add(kind)
            self._first = self._values()

    def forward_ends(self) -> None:
        """Bring the forward's writes to the shards, while the whole parameters have memory.

        Raises ``RuntimeError`` for the first written parameter if writes are refused, or were not counted.
        """
        first, self._first = self._first, None
        if first is not None:
            self._check_uncounted(first)
        self.take_over()

    def forward_failed(self) -> bool:
        """``forward_ends`` after a forward that has raised, or that a recompute has stopped early. Raises nothing.

        Returns whether whole parameters hold writes that are refused.
        """
        self._first = None
        before = self._versions
        if self._served:
            self.take_over()
            return False
        self.note()
        return self._versions != before

    def take_over(self) -> None:
        """Bring writes to the shards; also after a backward, which may recompute a forward."""
        versions = [whole._version for whole in self._wholes]
        if versions == self._versions:
            return
        before, self._versions = self._versions, versions
        written = [pair for pair, old, new in zip(self._pairs, before, versions, strict=True) if old != new]
        if not self._served:
            shard = written[0].sharded.shard
            unit = f"unit '{shard.unit}'" if shard.unit else "the outermost unit"
            raise written_from_local_data(shard.name, f'fully_shard(..., forward_writes="alike") of {unit}')
        write_back(written)

    def _check_uncounted(self, before: list[tuple[int, int]]) -> None:
        """Raise ``RuntimeError`` for a parameter whose values have changed, and whose version has not."""
        for pair, version, old, new in zip(self._pairs, self._versions, before, self._values(), strict=True):
            if old != new and pair.whole._version == version:
                raise RuntimeError(
                    f"parameter '{pair.sharded.shard.name}' was written in the forward through .data, which is not "
                    f"noticed in later forwards: the write would be lost when the whole parameter is freed. Write to "
                    f"the parameter itself, under torch.no_grad()"
                )

    def _values(self) -> list[tuple[int, int]]:
        """A checksum and the address of each whole parameter."""
        addresses = [whole.data_ptr() for whole in self._wholes]
        return list(zip(bits_of(self._wholes), addresses, strict=True))


@torch.no_grad()
def write_back(pairs: Sequence[ShardedPair]) -> None:
    """Copy this rank's part of whole parameters to the shards.

    An element stays if it is rounded to the whole parameter's element: shards may have a wider dtype.
    """
    for pair in pairs:
        info = pair.sharded.shard
        with DisableTorchFunctionSubclass():  # reentrant checkpointing runs forwards in that of a Function
            sharded = pair.sharded.detach()
        part = pair.whole.detach().reshape(-1)[info.start : info.end].view(sharded.shape).to(sharded.device)
        if part.dtype is not sharded.dtype:
            same = sharded.to(part.dtype) == part
            part = torch.where(same, sharded, part.to(sharded.dtype))
        sharded.copy_(part)
