"""Converts row counts per expert to offsets on the device. Counts on the host are checked; counts on a GPU are not."""

import itertools
from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from ...ddp.collectives.streams import is_capturing
from ...kernels import group_offsets
from ...kernels.grouped.operators import group_offsets_op

__all__ = ["row_offsets"]


def row_offsets(
    m_splits: Tensor | Sequence[int], num_experts: int, rows: int, device: torch.device, owner: str
) -> Tensor:
    """``[0, m_0, m_0 + m_1, ...]`` of ``num_experts`` experts, [E + 1] int64 on ``device``.

    A list must have one count per expert, none negative, and must add up to ``rows``. A tensor [E] of int32 or int64
    may add up to less: the remaining rows are padding behind the last expert. A tensor on the CPU is checked; a tensor
    on a GPU, or in a compiled graph, is never read by the host. Raises ``ValueError`` with ``owner`` and the counts.
    """
    if isinstance(m_splits, Tensor):
        if m_splits.dim() != 1 or m_splits.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{owner}: m_splits must be ints, or a tensor [experts] of int32 or int64; got "
                f"{tuple(m_splits.shape)}, {m_splits.dtype}"
            )
        if m_splits.shape[0] != num_experts:
            raise ValueError(f"{owner} has {num_experts} experts, and m_splits counts for {m_splits.shape[0]}")
        if m_splits.device.type != "cpu" or torch.compiler.is_compiling():
            if m_splits.device != device:
                raise ValueError(f"{owner}: m_splits is on {m_splits.device}, and the rows on {device}")
            if torch.compiler.is_compiling():
                of_graph: Tensor = group_offsets_op(m_splits)
                return of_graph
            return group_offsets(m_splits)
        counts: list[int] = m_splits.tolist()
        padded = True
    else:
        counts = [index(count) for count in m_splits]
        padded = False
    return _to_device(_checked(counts, num_experts, rows, padded, owner), device, owner)


def _checked(counts: Sequence[int], num_experts: int, rows: int, padded: bool, owner: str) -> list[int]:
    """The offsets for counts on the host."""
    if len(counts) != num_experts:
        raise ValueError(f"{owner} has {num_experts} experts, and m_splits counts for {len(counts)}")
    if min(counts) < 0:
        expert = next(expert for expert, count in enumerate(counts) if count < 0)
        raise ValueError(f"{owner}: m_splits must not be negative, got {counts[expert]} for expert {expert}")
    total = sum(counts)
    if total > rows or (total < rows and not padded):
        remedy = "" if total > rows else "; a tensor of splits may leave rows over, a list may not"
        raise ValueError(f"{owner}: m_splits add up to {total} rows, and the input has {rows}{remedy}")
    return list(itertools.accumulate(counts, initial=0))


def _to_device(offsets: list[int], device: torch.device, owner: str) -> Tensor:
    if device.type != "cuda":
        if is_capturing():
            raise RuntimeError(
                f"{owner}: on a CPU the host reads the rows of each expert, and replays of a graph would keep the first"
            )
        return torch.tensor(offsets, dtype=torch.int64, device=device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{owner}: m_splits on the host during a CUDA graph capture would be those of every replay; give a tensor "
            f"on {device}"
        )
    # A copy from pinned memory is asynchronous; the allocator keeps the memory until the copy is done.
    return torch.tensor(offsets, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
