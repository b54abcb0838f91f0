"""The permutation of tokens into the order of their experts, and its transpose.

Legend: T tokens, k experts per token, D features. ``row_id_map`` [T, k] holds the row of copy j of token t. It is a
permutation of T k rows, so each row is written once: there are no atomic additions, and results are reproducible.
"""

import torch
from torch import Tensor

from ..compat import HAS_TRITON, adjacent_columns, device_of, runs_on_triton
from .reference import permute_rows_reference, unpermute_rows_reference

if HAS_TRITON:
    from .triton_kernels import permute_triton

__all__ = ["permute_rows", "unpermute_rows"]


def permute_rows(x: Tensor, row_id_map: Tensor) -> Tensor:
    """``y[map[t, j]] = x[t]``.

    ==========  ========  ==============================================================
    x           [T, D]    tokens, any floating dtype
    row_id_map  [T, k]    int32 or int64, a permutation of 0 .. T k - 1 (not checked)
    y           [T k, D]  rows, dtype of ``x``
    ==========  ========  ==============================================================

    Raises ``ValueError`` for shapes and dtypes that do not match.
    """
    _check("permute_rows", x, row_id_map, x.shape[0])
    return _run("permute_rows", x, row_id_map, row_id_map.numel())


def unpermute_rows(rows: Tensor, row_id_map: Tensor) -> Tensor:
    """``x[t] = sum over j of rows[map[t, j]]``, summed in fp32 (fp64 for fp64) in order of j and rounded once.

    ==========  ========  ======================================
    rows        [T k, D]  any floating dtype
    row_id_map  [T, k]    as in ``permute_rows``
    x           [T, D]    dtype of ``rows``
    ==========  ========  ======================================

    ``permute_rows`` and ``unpermute_rows`` are gradients of each other. Raises ``ValueError`` like ``permute_rows``.
    """
    _check("unpermute_rows", rows, row_id_map, rows.shape[0] // max(1, row_id_map.shape[-1]))
    return _run("unpermute_rows", rows, row_id_map, row_id_map.shape[0])


def _run(op: str, source: Tensor, row_id_map: Tensor, length: int) -> Tensor:
    inverse = op == "unpermute_rows"
    out = source.new_empty(length, source.shape[1])
    if runs_on_triton(op, source):
        with device_of(source):
            permute_triton(adjacent_columns(source), row_id_map.contiguous(), out, inverse=inverse)
    else:
        (unpermute_rows_reference if inverse else permute_rows_reference)(source, row_id_map, out)
    return out


def _check(op: str, x: Tensor, row_id_map: Tensor, num_tokens: int) -> None:
    if x.dim() != 2 or row_id_map.dim() != 2 or row_id_map.shape[0] != num_tokens or not row_id_map.shape[1]:
        raise ValueError(
            f"{op} needs two dims and a row_id_map [tokens, k]; got {tuple(x.shape)} and {tuple(row_id_map.shape)}"
        )
    if op == "unpermute_rows" and x.shape[0] != row_id_map.numel():
        raise ValueError(f"{op} needs a row for each entry of row_id_map, {row_id_map.numel()}; got {x.shape[0]}")
    if row_id_map.dtype not in (torch.int32, torch.int64) or row_id_map.device != x.device:
        raise ValueError(
            f"{op} needs a row_id_map of int32 or int64 on {x.device}; got {row_id_map.dtype} on {row_id_map.device}"
        )
