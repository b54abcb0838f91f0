"""Permutations of rows as operators of compiled graphs, each the other's derivative."""

from typing import Any

import torch
from torch import Tensor

from ..operators import define_operator, library
from .permute import permute_rows, unpermute_rows

__all__ = ["permute_rows_op", "unpermute_rows_op"]

permute_rows_op = define_operator(
    "permute_rows(Tensor x, Tensor row_id_map) -> Tensor",
    permute_rows,
    lambda x, row_id_map: x.new_empty(row_id_map.numel(), x.shape[1]),
)
"""``permute_rows``: [T, D] -> [T k, D]. Differentiable."""

unpermute_rows_op = define_operator(
    "unpermute_rows(Tensor rows, Tensor row_id_map) -> Tensor",
    unpermute_rows,
    lambda rows, row_id_map: rows.new_empty(row_id_map.shape[0], rows.shape[1]),
)
"""``unpermute_rows``: [T k, D] -> [T, D]. Differentiable."""


def _keep_map(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _permute_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return unpermute_rows_op(grad, *ctx.saved_tensors), None


def _unpermute_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return permute_rows_op(grad, *ctx.saved_tensors), None


torch.library.register_autograd("maingrad::permute_rows", _permute_grad, setup_context=_keep_map, lib=library)
torch.library.register_autograd("maingrad::unpermute_rows", _unpermute_grad, setup_context=_keep_map, lib=library)
