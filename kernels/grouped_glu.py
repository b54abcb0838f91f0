"""Grouped products that have the gated activation between them in their epilogues: one kernel for both, each way.

Legend: E experts, T rows, K input features of the first product, F features of the activation's output, N output
features of the second. ``offsets`` are as in ``grouped``.
"""

import functools

import torch
from torch import Tensor

from .compat import HAS_TRITON, runs_on_triton
from .experts import PerExpert
from .grouped import adjacent_columns, alike, check_per_expert, check_weights
from .grouped_glu_reference import grouped_dgrad_glu_reference, grouped_linear_glu_reference
from .scaled_glu import check_halves, resolve_glu

if HAS_TRITON:
    from .grouped_gemm_triton import GemmConfig
    from .grouped_glu_triton import (
        default_glu_backward_config,
        default_glu_config,
        grouped_dgrad_glu_triton,
        grouped_linear_glu_triton,
    )
    from .triton_support import capability_of

__all__ = ["grouped_dgrad_scaled_glu_backward", "grouped_linear_scaled_glu"]


def grouped_linear_scaled_glu(
    x: Tensor,
    weights: PerExpert,
    offsets: Tensor,
    probs: Tensor | None = None,
    *,
    activation: str = "swiglu",
    limit: float = 7.0,
    alpha: float = 1.702,
    linear_offset: float = 1.0,
    bias: PerExpert | None = None,
) -> tuple[Tensor, Tensor]:
    """``h[t] = x[t] W_e^T + b_e`` and ``a[t] = p[t] act(g[t]) l[t]``, g and l the halves of h; pad rows are zeros.

    =======  ===========================  ==================================================================
    x        [T, K]                       bf16, fp16, fp32 or fp64
    weights  [E, 2F, K], or E x [2F, K]   dtype of ``x``
    offsets  [E + 1]                      as in ``grouped_linear``
    probs    [T]                          p, any floating dtype, or None: ones; pad rows may have any, NaN too
    bias     [E, 2F], or E x [2F]         b, dtype of ``x``; None: none is added
    h        [T, 2F]                      dtype of ``x``, rounded once: what the gradients need
    a        [T, F]                       dtype of ``x``, computed in fp32 from the rounded ``h``
    =======  ===========================  ==================================================================

    What ``grouped_linear`` and then ``scaled_glu`` give (the same bits where both products sum in one order), without
    reading h again. The activations and their numbers are those of ``scaled_glu``. Not differentiable: gradients are
    ``grouped_dgrad_scaled_glu_backward``, ``grouped_dgrad`` and ``grouped_wgrad_accumulate``.

    Raises ``ValueError`` for an unknown activation, an odd number of weight rows, and shapes that do not fit together;
    ``TypeError`` for operands of different dtypes.
    """
    op = "grouped_linear_scaled_glu"
    glu = resolve_glu(op, activation, limit, alpha, linear_offset)
    features, _ = check_weights(op, x, weights, offsets, contracted=1)
    if features % 2:
        raise ValueError(f"{op} needs weights of two halves, [2 features, K] for each expert; got {features} rows")
    check_per_expert(op, "bias", bias, offsets, (features,), x.dtype)
    _check_probs(op, probs, x)
    if not runs_on_triton(op, x):
        return grouped_linear_glu_reference(x, weights, offsets, probs, glu, bias=bias)
    h, a = x.new_empty(x.shape[0], features), x.new_empty(x.shape[0], features // 2)
    grouped_linear_glu_triton(
        adjacent_columns(x),
        alike(weights),
        offsets,
        None if probs is None else probs.contiguous(),
        h,
        a,
        glu,
        _config(x.device, x.dtype, x.shape[0] / len(weights), backward=False),
        bias=None if bias is None else alike(bias),
    )
    return h, a


def grouped_dgrad_scaled_glu_backward(
    dy: Tensor,
    weights: PerExpert,
    offsets: Tensor,
    h: Tensor,
    probs: Tensor | None = None,
    *,
    activation: str = "swiglu",
    limit: float = 7.0,
    alpha: float = 1.702,
    linear_offset: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``h`` and ``probs`` where ``y[t] = W_e a[t]`` and a is their activation; pad rows are zeros.

    =======  =========================  =======================================================================
    dy       [T, N]                     gradient of y, bf16, fp16, fp32 or fp64
    weights  [E, N, F], or E x [N, F]   of the second product, dtype of ``dy``
    offsets  [E + 1]                    as in ``grouped_linear``
    h        [T, 2F]                    what the first product gave, dtype of ``dy``; pad rows may hold anything
    probs    [T]                        as in the forward
    dh       [T, 2F]                    dtype of ``dy``
    dprobs   [T]                        fp32 (fp64 for fp64), in an order fixed by the shapes; None where probs is
    =======  =========================  =======================================================================

    What ``grouped_dgrad`` and then ``scaled_glu_backward`` give: ``da = dy W_e`` is rounded to the dtype of ``dy`` and
    not stored. ``dprobs`` sums the same terms in another order. Raises as ``grouped_linear_scaled_glu``.
    """
    op = "grouped_dgrad_scaled_glu_backward"
    glu = resolve_glu(op, activation, limit, alpha, linear_offset)
    _, features = check_weights(op, dy, weights, offsets, contracted=0)
    check_halves(op, h, probs)
    if h.shape != (dy.shape[0], 2 * features) or h.dtype is not dy.dtype or h.device != dy.device:
        raise ValueError(
            f"{op} needs h {(dy.shape[0], 2 * features)}, {dy.dtype} on {dy.device}; got {tuple(h.shape)}, {h.dtype} "
            f"on {h.device}"
        )
    if not runs_on_triton(op, dy):
        return grouped_dgrad_glu_reference(dy, weights, offsets, h, probs, glu)
    dh = h.new_empty(h.shape)
    dprobs = grouped_dgrad_glu_triton(
        adjacent_columns(dy),
        alike(weights),
        offsets,
        adjacent_columns(h),
        None if probs is None else probs.contiguous(),
        dh,
        glu,
        _config(dy.device, dy.dtype, dy.shape[0] / len(weights), backward=True),
    )
    return dh, dprobs


@functools.lru_cache(maxsize=4096)
def _config(device: torch.device, dtype: torch.dtype, rows_per_expert: float, *, backward: bool) -> "GemmConfig":
    choose = default_glu_backward_config if backward else default_glu_config
    return choose(dtype, capability_of(device), rows_per_expert)


def _check_probs(op: str, probs: Tensor | None, x: Tensor) -> None:
    if probs is None:
        return
    if not probs.is_floating_point():
        raise TypeError(f"{op} needs probs of a floating dtype, got {probs.dtype}")
    if probs.shape != x.shape[:1] or probs.device != x.device:
        raise ValueError(f"{op} needs probs ({x.shape[0]},) on {x.device}, got {tuple(probs.shape)} on {probs.device}")
