"""The weight gradient of an embedding, added to its accumulator row by row.

Legend: T tokens, V rows of the weight (the vocabulary), D features.
"""

import torch
from torch import Tensor

from ..compat import HAS_TRITON, device_of, runs_on_triton
from .reference import embedding_wgrad_reference

if HAS_TRITON:
    from .embedding_triton import embedding_wgrad_triton

__all__ = ["embedding_wgrad_accumulate"]


def embedding_wgrad_accumulate(dy: Tensor, tokens: Tensor, main_grad: Tensor, *, overwrite: bool = False) -> None:
    """``main_grad[v] = beta * main_grad[v] + sum over t with tokens[t] = v of dy[t]``, in place.

    =========  ======  =============================================================================
    dy         [T, D]  gradient of the output, bf16, fp16, fp32 or fp64; any strides
    tokens     [T]     ids below V, any integer dtype. Negative ids, as of padding, add nothing
    main_grad  [V, D]  accumulator, contiguous
    overwrite          beta = 0: rows that no token names become 0, and ``main_grad`` may hold anything
    =========  ======  =============================================================================

    On CUDA only the rows of ``main_grad`` that tokens name are read and written; beta = 0 clears all of them before, by
    one memset. There is no tensor of [V, D] beside ``main_grad``, and beside ``dy`` no more than parts of sums: at most
    1/8 of its rows, in fp32. Rows are summed in fp32 and rounded once; equal inputs give equal bits. The host reads
    nothing. Elsewhere the reference runs.

    Raises ``ValueError`` for shapes that do not match, and for ``tokens`` that are no integers.
    """
    if dy.dim() != 2 or tokens.shape != dy.shape[:1] or main_grad.dim() != 2 or main_grad.shape[1] != dy.shape[1]:
        raise ValueError(
            f"embedding_wgrad_accumulate needs dy [T, D], tokens [T] and main_grad [V, D]; "
            f"got {tuple(dy.shape)}, {tuple(tokens.shape)} and {tuple(main_grad.shape)}"
        )
    if tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype is torch.bool:
        raise ValueError(f"embedding_wgrad_accumulate needs tokens that are integers; got {tokens.dtype}")
    if dy.numel() == 0:
        if overwrite:
            main_grad.zero_()
    elif runs_on_triton("embedding_wgrad_accumulate", main_grad) and dy.dtype is not torch.float64:
        # Fewer bits sort faster.
        ids = tokens.to(torch.int32) if main_grad.shape[0] < 2**31 else tokens.to(torch.int64)
        with device_of(dy):
            embedding_wgrad_triton(dy, ids, main_grad, overwrite=overwrite)
    else:
        embedding_wgrad_reference(dy, tokens.to(torch.int64), main_grad, overwrite=overwrite)
