"""The reference implementation of the dense weight gradient, and of every grouped operation: a loop over experts.

Slow, simple, and correct on any device.

Legend: E experts, T rows, N output features, K input features. Expert e has the rows offsets[e] to offsets[e + 1];
rows from offsets[E] on are padding. The host reads the split sizes, so it waits for a GPU.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = [
    "grouped_bias_grad_reference",
    "grouped_linear_reference",
    "grouped_scale_grad_reference",
    "grouped_wgrad_accumulate_reference",
    "wgrad_accumulate_reference",
]


def wgrad_accumulate_reference(dy: Tensor, x: Tensor, main_grad: Tensor, *, overwrite: bool = False) -> None:
    """``main_grad = dy^T x`` or ``main_grad += dy^T x``: one product, then one addition.

    dy         [T, N]  gradient of the output
    x          [T, K]  input of the forward
    main_grad  [N, K]  accumulator, written in place

    The product is computed in the widest dtype of operands and accumulator: bf16 operands are summed over T in fp32,
    and are not rounded to bf16 before an fp32 accumulator. If all dtypes are fp32, the result equals, bit for bit, the
    product of autograd plus the addition of a hook.
    """
    dtype = torch.promote_types(torch.promote_types(dy.dtype, x.dtype), main_grad.dtype)
    product = _product(dy.to(dtype).t(), x.to(dtype))
    if overwrite:
        main_grad.copy_(product)
    else:
        main_grad.add_(product)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if not torch.is_autocast_enabled(a.device.type):
        return a @ b
    with torch.autocast(a.device.type, enabled=False):  # it would round the product
        return a @ b


def _rows(offsets: Tensor) -> Iterator[slice]:
    ends: list[int] = offsets.tolist()
    return (slice(start, end) for start, end in itertools.pairwise(ends))


def grouped_linear_reference(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    offsets: Tensor,
    out: Tensor,
    *,
    bias: Tensor | Sequence[Tensor] | None = None,
    bias_scale: Tensor | None = None,
) -> None:
    """``out[t] = x[t] W_e^T + s[t] b_e``: x [T, K], W_e [N, K], b_e [N], s [T], out [T, N]; pad rows are zeros.

    For half precision, products, scale and bias are computed in fp32, and rounded once.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    out.zero_()
    for expert, rows in enumerate(_rows(offsets)):
        y = _product(x[rows].to(dtype), weights[expert].to(dtype).t())
        if bias is not None:
            b = bias[expert].to(dtype)
            y += b if bias_scale is None else bias_scale[rows, None].to(dtype) * b
        out[rows] = y.to(out.dtype)


def grouped_wgrad_accumulate_reference(
    dy: Tensor, x: Tensor, main_grads: Sequence[Tensor | None], offsets: Tensor, overwrite: Sequence[bool]
) -> None:
    """``G_e = beta_e G_e + dy_e^T x_e``: dy [T, N], x [T, K], G_e [N, K] or None; beta_e is 0 where overwritten."""
    for rows, main_grad, once in zip(_rows(offsets), main_grads, overwrite, strict=True):
        if main_grad is not None:
            wgrad_accumulate_reference(dy[rows], x[rows], main_grad, overwrite=once)


def grouped_bias_grad_reference(dy: Tensor, offsets: Tensor, out: Tensor, *, scale: Tensor | None = None) -> None:
    """``out[e] = sum over the rows of expert e of s[t] dy[t]``, summed in fp32: dy [T, N], s [T], out [E, N]."""
    dtype = torch.promote_types(dy.dtype, torch.float32)
    for expert, rows in enumerate(_rows(offsets)):
        part = dy[rows].to(dtype)
        out[expert] = (part if scale is None else part * scale[rows, None].to(dtype)).sum(0).to(out.dtype)


def grouped_scale_grad_reference(dy: Tensor, bias: Tensor | Sequence[Tensor], offsets: Tensor, out: Tensor) -> None:
    """``out[t] = sum over n of dy[t, n] b_e[n]``, in fp32: dy [T, N], b_e [N], out [T]; pad rows are zero."""
    dtype = torch.promote_types(dy.dtype, torch.float32)
    out.zero_()
    for expert, rows in enumerate(_rows(offsets)):
        out[rows] = _product(dy[rows].to(dtype), bias[expert].to(dtype)).to(out.dtype)
