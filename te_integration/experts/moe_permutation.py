"""Sort tokens by expert before a ``GroupedLinear`` or ``GroupedMLP``, and undo the sort after it.

Legend: T tokens, k experts per token, E experts, R = T k rows, D features. Counts are computed on the device: the host
reads nothing and does not wait, so a step may be captured in a CUDA graph.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import permute_rows, unpermute_rows
from ...kernels.permutation.operators import permute_rows_op, unpermute_rows_op
from ..dense.products import refuse_in_transform

__all__ = ["RowIdMap", "moe_permute", "moe_permute_with_probs", "moe_unpermute", "row_id_map"]


class RowIdMap(NamedTuple):
    """Maps copies of tokens to rows. Rows are sorted by expert."""

    places: Tensor
    """[T, k] int64: copy j of token t is row ``places[t, j]``."""
    copies: Tensor
    """[R] int64, the inverse of ``places``: row r is copy j of token t, and ``copies[r] = t k + j``."""
    splits: Tensor
    """[E] int64: number of rows of each expert; ``m_splits`` of a grouped layer."""


def row_id_map(expert_ids: Tensor, num_experts: int) -> RowIdMap:
    """Sort the choices ``expert_ids`` [T, k], integers in [0, E], by expert; the sort is stable.

    An id of E drops the copy: its row lies behind the last expert, where grouped layers write zeros. Raises
    ``ValueError`` for other shapes and dtypes; the values are not checked.
    """
    if expert_ids.dim() != 2 or not expert_ids.shape[1] or expert_ids.is_floating_point() or num_experts < 1:
        raise ValueError(
            f"row_id_map needs integer expert_ids [tokens, k] and at least one expert; got {tuple(expert_ids.shape)}, "
            f"{expert_ids.dtype}, num_experts={num_experts}"
        )
    # The number of passes of a radix sort grows with the width of its keys.
    keys = expert_ids.reshape(-1).to(torch.int16 if num_experts < 2**15 else torch.int32)
    sorted_keys, copies = torch.sort(keys, stable=True)
    places = torch.empty_like(copies).scatter_(0, copies, torch.arange(len(copies), device=copies.device))
    # A histogram would use atomics; a search in the sorted ids does not.
    bounds = torch.arange(num_experts + 1, device=keys.device, dtype=keys.dtype)
    splits = torch.searchsorted(sorted_keys, bounds).diff()
    return RowIdMap(places.view_as(expert_ids), copies, splits)


def moe_permute(inp: Tensor, expert_ids: Tensor, num_experts: int) -> tuple[Tensor, RowIdMap]:
    """Copy each token to the rows of its experts.

    ==========  ==========  ===================================
    inp         [T, D]      tokens
    expert_ids  [T, k]      see ``row_id_map``
    rows        [R, D]      sorted by expert; first result
    map                     for ``moe_unpermute``; second result
    ==========  ==========  ===================================

    The gradient of a token is the sum over its copies, computed in fp32 in a fixed order and rounded once. The name is
    Transformer Engine's (``map_type="index"``). Raises ``ValueError`` if ids and tokens do not match in shape.
    """
    rows, _, sorting = _permuted("moe_permute", inp, None, expert_ids, num_experts)
    return rows, sorting


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, expert_ids: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, RowIdMap]:
    """``moe_permute`` that also permutes probabilities: ``probs`` [T, k] -> [R], the second result."""
    if probs.shape != expert_ids.shape:
        raise ValueError(
            f"moe_permute_with_probs needs a probability for each choice: probs {tuple(probs.shape)}, "
            f"expert_ids {tuple(expert_ids.shape)}"
        )
    return _permuted("moe_permute_with_probs", inp, probs, expert_ids, num_experts)


def moe_unpermute(inp: Tensor, sorting: RowIdMap) -> Tensor:
    """Sum the rows of each token, in fp32, rounded once: ``inp`` [R, D] -> [T, D]. See ``moe_permute``."""
    refuse_in_transform("moe_unpermute")
    if torch.compiler.is_compiling():
        of_graph: Tensor = unpermute_rows_op(inp, sorting.places)
        return of_graph
    output: Tensor = _Unpermute.apply(inp, sorting.places)
    return output


def _permuted(
    name: str, inp: Tensor, probs: Tensor | None, expert_ids: Tensor, num_experts: int
) -> tuple[Tensor, Any, RowIdMap]:
    refuse_in_transform(name)
    if inp.dim() != 2 or expert_ids.shape[:1] != inp.shape[:1]:
        raise ValueError(
            f"moe_permute needs tokens [T, D] and expert_ids [T, k]; got {tuple(inp.shape)}, {tuple(expert_ids.shape)}"
        )
    sorting = row_id_map(expert_ids, num_experts)
    if torch.compiler.is_compiling():
        return permute_rows_op(inp, sorting.places), _row_probs(probs, sorting.copies), sorting
    rows, row_probs = _Permute.apply(inp, probs, sorting.places, sorting.copies)
    return rows, row_probs, sorting


def _row_probs(probs: Tensor | None, copies: Tensor) -> Tensor | None:
    """probs [T, k] -> [R]."""
    return None if probs is None else probs.reshape(-1).index_select(0, copies)


class _Permute(torch.autograd.Function):
    """inp [T, D], probs [T, k] or None, places, copies -> rows [R, D], probs [R] or None."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, probs: Tensor | None, places: Tensor, copies: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(places)
        ctx.set_materialize_grads(False)
        return permute_rows(inp, places), _row_probs(probs, copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        d_rows, d_row_probs = grads
        needs_inp, needs_probs, *_ = ctx.needs_input_grad
        d_inp = d_probs = None
        if needs_inp and d_rows is not None:
            d_inp = _Unpermute.apply(d_rows, places)
        if needs_probs and d_row_probs is not None:
            d_probs = d_row_probs.index_select(0, places.reshape(-1)).view_as(places)
        return d_inp, d_probs, None, None


class _Unpermute(torch.autograd.Function):
    """rows [R, D], places -> [T, D]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return unpermute_rows(rows, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        (places,) = ctx.saved_tensors
        rows, _ = _Permute.apply(grads[0], None, places, None)
        return rows, None
