"""What each collective does to tensors, given every rank's tensors at once.

An operation is a function of one `Payload` per rank, in the order of the group's ranks. All inputs are read before the
first output is written, so outputs may alias inputs in all ways that torch.distributed allows. Outputs are written
through ``.data``: as with a real backend, autograd and version counters do not see the writes.

Reductions are pairwise by rank, a balanced tree over rank order, level by level; an odd rank out moves up a level:

    5 ranks: ((r0 + r1) + (r2 + r3)) + r4        6 ranks: ((r0 + r1) + (r2 + r3)) + (r4 + r5)

Each addition rounds to the tensor's dtype. Two ranks give r0 + r1, bitwise what gloo gives. AVG divides the sum.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Operation",
    "Payload",
    "all_gather",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_op_name",
    "reduce_scatter",
    "reduce_to_root",
    "scatter",
]


class Payload(NamedTuple):
    """One rank's tensors in a collective. Each operation's docstring says what its lists hold."""

    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()
    reduce_op: Any = None
    root: int = 0
    """Rank within the group."""


Operation = Callable[[Sequence[Payload]], None]

_PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduce_op_name(reduce_op: Any) -> str:
    """SUM, AVG, ...: the name of a ``torch.distributed.ReduceOp``."""
    for name in _PAIRWISE:
        if reduce_op == getattr(dist.ReduceOp, name, None):
            return name
    raise ValueError(f"simulated ranks cannot reduce with {reduce_op}")


def _reduced(tensors: Sequence[Tensor], reduce_op: Any) -> Tensor:
    """The reduction of one tensor per rank: a fresh tensor, or that of a group's only rank itself."""
    name = reduce_op_name(reduce_op)
    level = [tensor.data for tensor in tensors]
    if name == "PREMUL_SUM":
        if not hasattr(reduce_op, "factor"):
            raise ValueError("simulated ranks cannot reduce with PREMUL_SUM: this version of torch hides its factor")
        level = [tensor * reduce_op.factor for tensor in level]
    combine = _PAIRWISE[name]
    while len(level) > 1:
        pairs = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    total = level[0]
    if name == "AVG" and len(tensors) > 1:
        total = total / len(tensors) if total.is_floating_point() else total // len(tensors)
    return total


def _write(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each value to its destination. No copy may change a later value: the values are clones or sums."""
    for destination, value in pairs:
        if destination.numel() != value.numel():
            raise ValueError(f"a tensor of {value.numel()} elements arrives where {destination.numel()} are expected")
        if destination.dtype != value.dtype:
            raise TypeError(f"a {value.dtype} tensor arrives where {destination.dtype} is expected")
        destination.data.copy_(value.reshape(destination.shape))


def reduce(payloads: Sequence[Payload]) -> None:
    """``inputs`` and ``outputs``: tensors, reduced one by one; all ranks get the results."""
    totals = [_reduced(same, payloads[0].reduce_op) for same in zip(*(p.inputs for p in payloads), strict=True)]
    _write(pair for p in payloads for pair in zip(p.outputs, totals, strict=True))


def reduce_to_root(payloads: Sequence[Payload]) -> None:
    """``inputs`` and ``outputs``: one tensor. The root gets the result; the other ranks' tensors stay unchanged."""
    root = payloads[payloads[0].root]
    _write([(root.outputs[0], _reduced([p.inputs[0] for p in payloads], root.reduce_op))])


def reduce_scatter(payloads: Sequence[Payload]) -> None:
    """``inputs``: for each result, one chunk per rank; ``outputs``: the results."""
    _write(
        [
            (output, _reduced([p.inputs[k][rank] for p in payloads], payload.reduce_op))
            for rank, payload in enumerate(payloads)
            for k, output in enumerate(payload.outputs)
        ]
    )


def all_gather(payloads: Sequence[Payload]) -> None:
    """``inputs``: tensors; ``outputs``: for each input, one tensor per rank."""
    values = [[tensor.data.clone() for tensor in p.inputs] for p in payloads]
    _write(
        (place, values[rank][k])
        for payload in payloads
        for k, places in enumerate(payload.outputs)
        for rank, place in enumerate(places)
    )


def broadcast(payloads: Sequence[Payload]) -> None:
    """``outputs``: tensors; the root's overwrite those of all other ranks."""
    root = payloads[payloads[0].root]
    _write(
        pair
        for payload in payloads
        if payload is not root
        for pair in zip(payload.outputs, (tensor.data for tensor in root.outputs), strict=True)
    )


def scatter(payloads: Sequence[Payload]) -> None:
    """The root's ``inputs``: one tensor per rank; ``outputs``: one tensor."""
    values = [tensor.data.clone() for tensor in payloads[payloads[0].root].inputs]
    _write((payload.outputs[0], value) for payload, value in zip(payloads, values, strict=True))


def gather(payloads: Sequence[Payload]) -> None:
    """``inputs``: one tensor; the root's ``outputs``: one tensor per rank."""
    values = [payload.inputs[0].data.clone() for payload in payloads]
    _write(zip(payloads[payloads[0].root].outputs, values, strict=True))


def all_to_all(payloads: Sequence[Payload]) -> None:
    """``inputs``: one tensor to each rank; ``outputs``: one tensor from each rank."""
    values = [[tensor.data.clone() for tensor in p.inputs] for p in payloads]
    _write((payload.outputs[s], values[s][rank]) for rank, payload in enumerate(payloads) for s in range(len(payloads)))


def barrier(payloads: Sequence[Payload]) -> None:
    """Moves no data."""
