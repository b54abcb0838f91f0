"""Reference implementations: the permutation of tokens by expert, and the weight gradient of an embedding.

Legend: T tokens, k copies of each, D features, V rows of an embedding's weight.
"""

import torch
from torch import Tensor

__all__ = ["embedding_grad", "embedding_wgrad_reference", "permute_rows_reference", "unpermute_rows_reference"]


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


def embedding_grad(dy: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """The dense gradient [V, D] of an embedding, as autograd computes it: dy [T, D]; tokens [T], not the negative ones.

    Differentiable.
    """
    dy = dy.masked_fill((tokens < 0)[:, None], 0.0)
    grad: Tensor = torch.ops.aten.embedding_dense_backward(dy, tokens.clamp(min=0), vocabulary, -1, False)
    return grad


def embedding_wgrad_reference(dy: Tensor, tokens: Tensor, main_grad: Tensor, *, overwrite: bool) -> None:
    """See ``embedding_wgrad_accumulate``; tokens [T] int64. A dense sum in fp32 or wider, then one addition.

    If all dtypes are fp32, the result equals, bit for bit, the gradient of autograd plus the addition of a hook.
    """
    dtype = torch.promote_types(torch.promote_types(dy.dtype, main_grad.dtype), torch.float32)
    summed = embedding_grad(dy.to(dtype), tokens, main_grad.shape[0])
    if overwrite:
        main_grad.copy_(summed)
    else:
        main_grad.add_(summed)
