"""The reference implementation of the permutation of tokens by expert.

Legend: T tokens, k copies of each, D features.
"""

import torch
from torch import Tensor

__all__ = ["permute_rows_reference", "unpermute_rows_reference"]


def permute_rows_reference(x: Tensor, row_id_map: Tensor, out: Tensor) -> None:
    """``out[map[t, j]] = x[t]``: x [T, D], map [T, k] a permutation of T k rows, out [T k, D]."""
    for rows in row_id_map.unbind(1):
        out[rows] = x


def unpermute_rows_reference(rows: Tensor, row_id_map: Tensor, out: Tensor) -> None:
    """``out[t] = sum over j of rows[map[t, j]]``, in fp32, in order of j, rounded once: rows [T k, D], out [T, D]."""
    total = torch.zeros_like(out, dtype=torch.promote_types(out.dtype, torch.float32))
    for places in row_id_map.unbind(1):
        total += rows[places]
    out.copy_(total)
