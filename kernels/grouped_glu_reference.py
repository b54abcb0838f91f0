"""The plain PyTorch oracle of the grouped products with a gated activation: the two operations, one after the other.

Legend: T rows, F features of the activation's output. Offsets are read by the host.
"""

from torch import Tensor

from .experts import PerExpert
from .grouped_reference import grouped_dgrad_reference, grouped_linear_reference
from .scaled_glu_reference import Glu, scaled_glu_backward_reference, scaled_glu_reference

__all__ = ["grouped_dgrad_glu_reference", "grouped_linear_glu_reference"]


def grouped_linear_glu_reference(
    x: Tensor, weights: PerExpert, offsets: Tensor, probs: Tensor | None, glu: Glu, *, bias: PerExpert | None = None
) -> tuple[Tensor, Tensor]:
    """``h[t] = x[t] W_e^T + b_e``, rounded, and ``a[t] = p[t] glu(h[t])``: [T, K] -> [T, 2F], [T, F]."""
    h = x.new_empty(x.shape[0], weights[0].shape[0])
    grouped_linear_reference(x, weights, offsets, h, bias=bias)
    a = scaled_glu_reference(h, probs, glu)
    a[int(offsets[-1]) :] = 0  # a pad row may have any probability
    return h, a


def grouped_dgrad_glu_reference(
    dy: Tensor, weights: PerExpert, offsets: Tensor, h: Tensor, probs: Tensor | None, glu: Glu
) -> tuple[Tensor, Tensor | None]:
    """``da[t] = dy[t] W_e``, rounded, and the activation's gradients of it: [T, N] -> [T, 2F], [T]."""
    da = dy.new_empty(h.shape[0], h.shape[1] // 2)
    grouped_dgrad_reference(dy, weights, offsets, da)
    dh, dprobs = scaled_glu_backward_reference(da, h, probs, glu)
    used = int(offsets[-1])
    dh[used:] = 0
    if dprobs is not None:
        dprobs[used:] = 0
    return dh, dprobs
