"""Grouped products: one linear layer per expert, each on its group of rows.

Legend: E experts, T rows, N output features, K input features. Expert e has the rows offsets[e] to offsets[e + 1] of
every tensor with rows; rows from offsets[E] on are padding. Offsets stay on the device. The host does not read them,
so it does not wait, and a captured CUDA graph may be replayed with other split sizes.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..compat import HAS_TRITON, adjacent_columns, runs_on_triton
from ..experts import PerExpert
from ..tuning import config_of
from .reference import (
    grouped_bias_grad_reference,
    grouped_linear_reference,
    grouped_scale_grad_reference,
    grouped_wgrad_accumulate_reference,
)

if HAS_TRITON:
    from .gemm_triton import GemmConfig, default_gemm_config, grouped_gemm_triton
    from .reductions_triton import (
        grouped_bias_grad_triton,
        grouped_scale_grad_triton,
    )
    from .wgrad_config import WgradConfig, default_wgrad_config
    from .wgrad_triton import grouped_wgrad_triton

__all__ = [
    "PerExpert",
    "group_offsets",
    "grouped_bias_grad",
    "grouped_dgrad",
    "grouped_linear",
    "grouped_scale_grad",
    "grouped_wgrad_accumulate",
]


def group_offsets(splits: Tensor) -> Tensor:
    """``[0, s_0, s_0 + s_1, ...]``: splits [E] int32 or int64 -> offsets [E + 1] int64 on the same device."""
    if splits.dim() != 1 or splits.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"splits must be [experts], int32 or int64; got {tuple(splits.shape)}, {splits.dtype}")
    offsets = splits.new_zeros(splits.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(splits, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def grouped_linear(
    x: Tensor,
    weights: PerExpert,
    offsets: Tensor,
    *,
    bias: PerExpert | None = None,
    bias_scale: Tensor | None = None,
    out: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """``y[t] = x[t] W_e^T + s[t] b_e`` for row t of expert e; pad rows are zeros.

    ==========  ==========================  ===================================================================
    x           [T, K]                      bf16, fp16, fp32 or fp64
    weights     [E, N, K], or E x [N, K]    dtype of ``x``
    offsets     [E + 1]                     int32 or int64, ascending from 0, at most T; on the device of ``x``
    bias        [E, N], or E x [N]          b, dtype of ``x``; None: no bias
    bias_scale  [T]                         s; None: 1
    out         [T, N]                      written and returned; None: allocated
    transposed                              each weight is stored [K, N]: ``y[t] = x[t] W_e + s[t] b_e``
    ==========  ==========================  ===================================================================

    Sums over K, scale and bias are computed in fp32, and rounded once. Raises ``ValueError`` for shapes that do not
    match and ``TypeError`` for operands of different dtypes.
    """
    op = "grouped_dgrad" if transposed else "grouped_linear"
    if bias_scale is not None and bias is None:
        raise ValueError(f"{op} got a bias_scale and no bias")
    n, k = _shape_of_weights(op, x, weights, offsets, contracted=int(not transposed))
    features = k if transposed else n
    _check_per_expert(op, "bias", bias, offsets, (features,), x.dtype)
    _check_rows(op, "bias_scale", bias_scale, (x.shape[0],))
    if out is None:
        out = x.new_empty(x.shape[0], features)
    else:
        _check_written(op, "out", out, (x.shape[0], features), x, x.dtype)
    if not runs_on_triton(op, x):
        if transposed:
            weights = [weight.t() for weight in weights]
        grouped_linear_reference(x, weights, offsets, out, bias=bias, bias_scale=bias_scale)
        return out
    grouped_gemm_triton(
        adjacent_columns(x),
        alike(weights),
        offsets,
        out,
        config_of(GemmConfig, default_gemm_config, x.device, x.dtype, op, len(weights), x.shape[0], n, k),
        transposed=not transposed,
        bias=None if bias is None else alike(bias),
        bias_scale=None if bias_scale is None else bias_scale.contiguous(),
    )
    return out


def grouped_dgrad(dy: Tensor, weights: PerExpert, offsets: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``dx[t] = dy[t] W_e`` for row t of expert e; pad rows are zeros.

    =======  ==========================  ========================
    dy       [T, N]                      gradient of the output
    weights  [E, N, K], or E x [N, K]    dtype of ``dy``
    offsets  [E + 1]                     as in ``grouped_linear``
    out      [T, K]                      written and returned
    =======  ==========================  ========================
    """
    return grouped_linear(dy, weights, offsets, out=out, transposed=True)


def grouped_wgrad_accumulate(
    dy: Tensor,
    x: Tensor,
    main_grads: Tensor | Sequence[Tensor | None],
    offsets: Tensor,
    *,
    overwrite: bool | Sequence[bool] = False,
) -> None:
    """``G_e = beta_e G_e + dy_e^T x_e`` in place, over the rows of expert e.

    ==========  ==========================  ===========================================================================
    dy          [T, N]                      gradient of the output, bf16, fp16, fp32 or fp64
    x           [T, K]                      input of the forward, dtype of ``dy``
    main_grads  [E, N, K], or E x [N, K]    G: fp32 or the dtype of ``dy``, adjacent columns, any row stride. None: a
                                            frozen expert, which is skipped
    offsets     [E + 1]                     as in ``grouped_linear``
    overwrite   bool, or E x bool           beta_e = 0: G_e is write-only and may hold anything, NaN included
    ==========  ==========================  ===========================================================================

    G_e of an expert without rows stays unchanged if beta_e = 1, and becomes 0 if beta_e = 0. Sums are fp32, in an order
    that depends on shapes only. Raises ``ValueError`` and ``TypeError`` like ``grouped_linear``, and ``ValueError``
    with shape and stride for a G_e of wrong shape, dtype or layout.
    """
    op = "grouped_wgrad_accumulate"
    num_experts = offsets.shape[0] - 1
    _check_operands(op, dy, x)
    if len(main_grads) != num_experts:
        raise ValueError(f"{op} got {len(main_grads)} main_grads for {num_experts} experts")
    if not isinstance(overwrite, bool) and len(overwrite) != num_experts:
        raise ValueError(f"{op} got {len(overwrite)} overwrite bits for {num_experts} experts")
    for expert, grad in enumerate(main_grads[:1] if isinstance(main_grads, Tensor) else main_grads):
        if grad is not None:
            shape = dy.shape[1], x.shape[1]
            _check_written(op, f"main_grad of expert {expert}", grad, shape, dy, torch.float32, dy.dtype)
    bits = [overwrite] * num_experts if isinstance(overwrite, bool) else overwrite
    if not runs_on_triton(op, dy):
        grouped_wgrad_accumulate_reference(dy, x, list(main_grads), offsets, bits)
        return
    tuned = "grouped_wgrad_overwrite" if all(bits) else op
    sizes = num_experts, dy.shape[0], dy.shape[1], x.shape[1]
    config = config_of(WgradConfig, default_wgrad_config, dy.device, dy.dtype, tuned, *sizes)
    for here in by_layout(main_grads):
        grouped_wgrad_triton(adjacent_columns(dy), adjacent_columns(x), here, offsets, overwrite, config)


def grouped_bias_grad(
    dy: Tensor, offsets: Tensor, *, scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """``db[e] = sum over the rows of expert e of s[t] dy[t]``: dy [T, N], s [T] -> db [E, N] of ``dtype``.

    Summed in fp32, in an order that depends on shapes and offsets only. ``dtype`` None: that of ``dy``.
    """
    _check_rows("grouped_bias_grad", "scale", scale, (dy.shape[0],))
    out = dy.new_empty(offsets.shape[0] - 1, dy.shape[1], dtype=dtype)
    run = grouped_bias_grad_triton if runs_on_triton("grouped_bias_grad", dy) else grouped_bias_grad_reference
    run(dy, offsets, out, scale=scale)
    return out


def grouped_scale_grad(dy: Tensor, bias: PerExpert, offsets: Tensor) -> Tensor:
    """``ds[t] = sum over n of dy[t, n] b_e[n]``: dy [T, N], b [E, N] or E x [N] -> ds [T] fp32; pad rows are zero."""
    _check_per_expert("grouped_scale_grad", "bias", bias, offsets, (dy.shape[1],))
    out = dy.new_empty(dy.shape[0], dtype=torch.promote_types(dy.dtype, torch.float32))
    run = grouped_scale_grad_triton if runs_on_triton("grouped_scale_grad", dy) else grouped_scale_grad_reference
    run(dy, bias, offsets, out)
    return out


# ---- Kernels. ----


def by_layout(main_grads: Tensor | Sequence[Tensor | None]) -> Iterator[Tensor | list[Tensor | None]]:
    """The accumulators of one row stride and dtype, for a launch of their own; nearly always these are all."""
    if isinstance(main_grads, Tensor):
        if main_grads.numel():
            yield main_grads
        return
    kinds = {(grad.stride(0), grad.dtype) for grad in main_grads if grad is not None and grad.numel()}
    for kind in kinds:
        yield [grad if grad is not None and (grad.stride(0), grad.dtype) == kind else None for grad in main_grads]


def alike(tensors: PerExpert) -> PerExpert:
    """The tensors with adjacent columns and equal row strides, copied if necessary."""
    if isinstance(tensors, Tensor):
        return adjacent_columns(tensors)
    strides = {tensor.stride() for tensor in tensors}
    if len(strides) == 1 and next(iter(strides))[-1] == 1:
        return tensors
    return [tensor.contiguous() for tensor in tensors]


# ---- Arguments. ----


def _shape_of_weights(op: str, x: Tensor, weights: PerExpert, offsets: Tensor, *, contracted: int) -> tuple[int, int]:
    """N and K; ``contracted`` is the dim of [N, K] that the last dim of ``x`` must match."""
    shape = tuple(weights[0].shape) if len(weights) else ()
    if len(shape) != 2:
        raise ValueError(f"{op} needs weights [experts, N, K], or one [N, K] for each expert; got {shape} for each")
    _check_per_expert(op, "weights", weights, offsets, shape, x.dtype)
    if x.dim() != 2 or x.shape[1] != shape[contracted]:
        raise ValueError(f"{op} needs {shape[contracted]} features in the last dim, got rows {tuple(x.shape)}")
    return shape


def _check_operands(op: str, dy: Tensor, x: Tensor) -> None:
    if dy.dim() != 2 or x.dim() != 2 or dy.shape[0] != x.shape[0]:
        raise ValueError(f"{op} needs dy [T, N] and x [T, K]; got {tuple(dy.shape)} and {tuple(x.shape)}")
    if dy.dtype is not x.dtype:
        raise TypeError(f"{op} needs dy and x of one dtype; got {dy.dtype} and {x.dtype}")


def _check_per_expert(
    op: str,
    name: str,
    given: PerExpert | None,
    offsets: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> None:
    if given is None:
        return
    num_experts = offsets.shape[0] - 1
    shapes = {tuple(given.shape[1:])} if isinstance(given, Tensor) else {tuple(each.shape) for each in given}
    if len(given) != num_experts or shapes != {shape}:
        raise ValueError(f"{op} needs {name} {shape} for each of {num_experts} experts; got {len(given)} of {shapes}")
    dtypes = {given.dtype} if isinstance(given, Tensor) else {each.dtype for each in given}
    if dtype is not None and dtypes != {dtype}:
        raise TypeError(f"{op} needs {name} and rows of one dtype; got {sorted(map(str, dtypes))} and {dtype}")


def _check_rows(op: str, name: str, given: Tensor | None, shape: tuple[int, ...]) -> None:
    if given is not None and given.shape != shape:
        raise ValueError(f"{op} needs {name} {shape}; got {tuple(given.shape)}")


def _check_written(
    op: str, name: str, given: Tensor, shape: tuple[int, int], beside: Tensor, *dtypes: torch.dtype
) -> None:
    is_apart = given.dim() == 2 and given.stride(1) != 1 < given.numel()
    if given.shape != shape or is_apart or given.dtype not in dtypes or given.device != beside.device:
        raise ValueError(
            f"{op}: {name} must be {shape} with adjacent columns, {' or '.join(map(str, dict.fromkeys(dtypes)))} on "
            f"{beside.device}; got {tuple(given.shape)}, stride {given.stride()}, {given.dtype} on {given.device}"
        )
