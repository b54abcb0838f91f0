"""Locates the matrix of each expert for a kernel: a base address and a stride, or a table of addresses.

A packed tensor is evenly spaced. So are separate tensors in one buffer, in either order (a gradient buffer holds them
in reverse). Only tensors at irregular addresses need a table, which is created once for each set of addresses.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["Experts", "PerExpert", "device_table", "locate_experts"]

PerExpert: TypeAlias = Tensor | Sequence[Tensor]
"""One tensor per expert: one packed tensor [E, ...], or E separate tensors."""


class Experts(NamedTuple):
    """The tensor of expert e starts at ``base + (first + step * e) * stride`` elements, or at ``table[e]``.

    base        [rows, columns] or [columns]: the tensor at the lowest address; all have its dtype and row stride
    table       [experts] int64 byte addresses on the device, 0 for an expert without tensor. None: evenly spaced
    stride      elements between adjacent experts in memory
    first, step  0 and 1, or number of experts - 1 and -1
    aligned     every address and row is a multiple of 16 bytes
    """

    base: Tensor
    table: Tensor | None
    stride: int
    first: int
    step: int
    aligned: bool

    @property
    def argument(self) -> tuple[Tensor, Tensor | None, int, int, int]:
        """What ``expert_pointer`` takes: one argument of a kernel."""
        return self[:5]

    @property
    def form(self) -> tuple[bool, int, int, int, bool]:
        """For a key of ``Launches``."""
        return self.table is None, *self[2:]


def locate_experts(tensors: Tensor | Sequence[Tensor | None]) -> Experts:
    """Locate tensors of equal shape, dtype and row stride; at least one is not None."""
    if isinstance(tensors, Tensor):
        spaced = Experts(tensors[0], None, tensors.stride(0), 0, 1, aligned=False)
    else:
        spaced = _locate_discrete(tensors)
    return spaced._replace(aligned=_is_aligned(spaced, tensors))


def _locate_discrete(tensors: Sequence[Tensor | None]) -> Experts:
    present = [tensor for tensor in tensors if tensor is not None]
    base, size = present[0], present[0].element_size()
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    if len(present) == len(addresses):
        distance = addresses[1] - addresses[0] if len(addresses) > 1 else size
        even = all(addresses[0] + e * distance == address for e, address in enumerate(addresses))
        if even and distance and distance % size == 0:
            backwards = distance < 0
            base = present[-1] if backwards else base
            last = len(addresses) - 1
            return Experts(base, None, abs(distance) // size, last * backwards, -1 if backwards else 1, aligned=False)
    return Experts(base, device_table(tuple(addresses), base.device), 0, 0, 1, aligned=False)


def _is_aligned(spaced: Experts, tensors: Tensor | Sequence[Tensor | None]) -> bool:
    size, base = spaced.base.element_size(), spaced.base
    rows = all(stride * size % 16 == 0 for stride in base.stride()[:-1])
    if spaced.table is None:
        return rows and base.data_ptr() % 16 == 0 and spaced.stride * size % 16 == 0
    return rows and all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


class _Table(NamedTuple):
    values: Tensor
    filled: torch.cuda.Event
    stream: torch.cuda.Stream


def device_table(values: tuple[int, ...], device: torch.device) -> Tensor:
    """``values`` as a cached int64 tensor on ``device``, which must not be written: equal values give the same tensor.

    On CUDA the values are copied from pinned memory, asynchronously. Raises ``RuntimeError`` in a graph capture for
    values that no eager run has cached: the memory would belong to the graph.
    """
    if device.type != "cuda":
        return _host_table(values)
    table = _cuda_table(values, device)
    stream = torch.cuda.current_stream(device)
    if torch.cuda.is_current_stream_capturing():
        # A capture starts with a synchronisation, and must not wait for events from outside. The graph keeps the
        # address, also when the cache has let go of the table.
        _captured[values, device] = table
    elif stream != table.stream:
        stream.wait_event(table.filled)
        table.values.record_stream(stream)
    return table.values


_captured: dict[tuple[tuple[int, ...], torch.device], _Table] = {}
"""Tables that a graph reads, kept for the life of the process: a few bytes for each set of addresses."""


@functools.lru_cache(maxsize=1024)
def _host_table(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@functools.lru_cache(maxsize=1024)
def _cuda_table(values: tuple[int, ...], device: torch.device) -> _Table:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a grouped product over discrete tensors met new addresses in a CUDA graph capture: run one eager "
            "iteration with the same tensors first, or pack the experts' tensors into one"
        )
    pinned = torch.tensor(values, dtype=torch.int64, pin_memory=True)
    filled = torch.cuda.Event()
    stream = torch.cuda.current_stream(device)
    table = pinned.to(device, non_blocking=True)
    filled.record(stream)
    return _Table(table, filled, stream)
