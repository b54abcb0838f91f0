"""Where simulated ranks meet: which rank has arrived at which collective, and which calls do not match.

The process groups of one set of ranks share a `SharedGroup`. The n-th collective that a rank launches on a group meets
the n-th of every other member; the rank that arrives last moves the data. Point-to-point transfers are matched by
sender, receiver and tag, in launch order. As with gloo and NCCL, a send is done once its receive has been posted.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...ddp.torch_internals import tree_leaves
from ...kernels.compat import private_name
from ..simulation import collectives as move
from .collectives import Operation, Payload
from .schedule import SimulatedRank

__all__ = ["CollectiveMismatchError", "Pending", "SharedGroup", "Transfer", "describe_launch"]


_DisableTorchDispatch: Any = private_name(
    "torch._C._DisableTorchDispatch",
    loss="modes of the rank that arrives last see the data that simulated ranks exchange",
    fallback=nullcontext,
)


class CollectiveMismatchError(RuntimeError):
    """Two ranks launched different collectives at the same position of a group. The message names both."""


def _describe_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def describe_launch(name: str, tensors: Sequence[Tensor], detail: str = "") -> str:
    return " ".join(filter(None, (name, detail, ", ".join(map(_describe_tensor, tensors)))))


def _share(payload: Payload) -> str:
    inputs, outputs = (", ".join(map(_describe_tensor, tree_leaves(list(side)))) for side in payload[:2])
    return f"{inputs or 'nothing'} for {outputs or 'nothing'}"


class Pending:
    """An operation that some of its ranks have launched. It is done once all of them have."""

    def __init__(self, shared: "SharedGroup", description: str) -> None:
        self.shared = shared
        self.description = description
        self.done = False
        self.waiters: list[tuple[SimulatedRank, Callable[[], None]]] = []
        """Callbacks for when the operation is done, each with the rank on whose thread it runs."""

    def describe(self) -> str:
        return f"{self.description} of {self.shared.describe()}"

    def missing(self) -> Sequence[int]:
        raise NotImplementedError

    def complete(self) -> None:
        self.done = True
        for rank, callback in self.waiters:
            rank.deliveries.append(callback)
        self.waiters.clear()


class _Collective(Pending):
    """The collective at one position of a group, which its members join one by one."""

    def __init__(self, shared: "SharedGroup", signature: str, sequence: int, first: int) -> None:
        super().__init__(shared, f"{signature}, sequence {sequence}")
        self.signature = signature
        self.sequence = sequence
        self.first = first
        self.payloads: dict[int, Payload] = {}

    def missing(self) -> Sequence[int]:
        return [member for rank, member in enumerate(self.shared.members) if rank not in self.payloads]


class Transfer(Pending):
    """One side of a point-to-point transfer. ``source`` is None for a receive from anyone."""

    def __init__(
        self, shared: "SharedGroup", name: str, tensor: Tensor, source: int | None, target: int, tag: int
    ) -> None:
        peer = target if name == "send" else source
        who = "anyone" if peer is None else f"rank {shared.members[peer]}"
        detail = f"{'to' if name == 'send' else 'from'} {who}, tag {tag},"
        super().__init__(shared, describe_launch(name, [tensor], detail))
        self.tensor = tensor
        self.source = source
        self.target = target
        self.tag = tag
        self._missing = [] if peer is None else [shared.members[peer]]

    def missing(self) -> Sequence[int]:
        return self._missing


class SharedGroup:
    """The state that the members of one process group share."""

    def __init__(self, name: str, members: tuple[int, ...]) -> None:
        self.name = name
        self.members = members
        self._launched = [0] * len(members)
        self._collectives: dict[int, _Collective] = {}
        self._sends: list[Transfer] = []
        self._receives: list[Transfer] = []

    def describe(self) -> str:
        return f"group {self.name!r} (ranks {', '.join(map(str, self.members))})"

    def unfinished(self) -> list[Pending]:
        """Operations that not every rank has joined."""
        return [*self._collectives.values(), *self._sends, *self._receives]

    def join(self, rank: int, signature: str, operation: Operation, payload: Payload) -> _Collective:
        """Enter member ``rank``'s next collective; the last member to enter moves the data of all."""
        sequence = self._launched[rank]
        self._launched[rank] += 1
        collective = self._collectives.get(sequence)
        if collective is None:
            collective = self._collectives[sequence] = _Collective(self, signature, sequence, self.members[rank])
        elif collective.signature != signature:
            raise CollectiveMismatchError(
                f"sequence {sequence} of {self.describe()}: rank {collective.first} launched {collective.signature}, "
                f"but rank {self.members[rank]} launched {signature}"
            )
        collective.payloads[rank] = payload
        if len(collective.payloads) == len(self.members):
            del self._collectives[sequence]
            payloads = [collective.payloads[member] for member in range(len(self.members))]
            try:
                _move(operation, payloads)
            except Exception as error:
                shares = [f"rank {self.members[r]} brought {_share(p)}" for r, p in enumerate(payloads)]
                raise RuntimeError("\n  ".join([f"{collective.describe()}: {error}", *shares])) from error
            collective.payloads.clear()
            collective.complete()
        return collective

    def transfer(self, mine: Transfer, *, sending: bool) -> None:
        """Match ``mine`` with the first fitting transfer of the other side, or leave it until one comes."""
        others, own = (self._receives, self._sends) if sending else (self._sends, self._receives)
        for other in others:
            send, receive = (mine, other) if sending else (other, mine)
            if (send.target, send.tag) == (receive.target, receive.tag) and receive.source in (None, send.source):
                others.remove(other)
                break
        else:
            own.append(mine)
            return
        if send.tensor.numel() != receive.tensor.numel() or send.tensor.dtype != receive.tensor.dtype:
            raise CollectiveMismatchError(
                f"{self.describe()}: rank {self.members[send.source or 0]} launched {send.description}, but rank "
                f"{self.members[receive.target]} launched {receive.description}"
            )
        receive.source = send.source
        _move(move.broadcast, [Payload(outputs=[send.tensor]), Payload(outputs=[receive.tensor])])
        send.complete()
        receive.complete()


def _move(operation: Operation, payloads: Sequence[Payload]) -> None:
    """Run ``operation`` unaffected by the modes of the thread that arrives last."""
    on_cuda = torch.cuda.is_initialized()
    if on_cuda:  # Each rank launches on streams of its own: a device synchronization orders them.
        torch.cuda.synchronize()
    # A real backend works outside this thread, where this thread's modes do not see it. Grad mode and autocast do not
    # matter here: the operations work on .data and call nothing that autocast changes.
    with _DisableTorchDispatch(), torch._C.DisableTorchFunction():
        operation(payloads)
    if on_cuda:
        torch.cuda.synchronize()
