"""Modules for gated activations scaled by row, which lie between the two grouped products of experts.

Legend: T rows (all leading dims together), F features.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...kernels import glu_named, scaled_glu
from ...kernels.glu.reference import Glu
from ..dense.activations import ScaledGlu, activation_named
from ..dense.products import cast, dtype_of_products, in_transform, rows_of

__all__ = ["ScaledClampedQGeGLU", "ScaledSwiGLU", "glu_options", "scaled_activation"]


class ScaledSwiGLU(nn.Module):
    """``y[t] = s[t] silu(g[t]) l[t]``, where g is the first half of the input's features and l the second.

    ======  =========  ==========================================
    input   [..., 2F]  output of the first product
    scales  [...]      s, one per row: routing probabilities
    y       [..., F]   dtype of the input, or autocast's
    ======  =========  ==========================================

    glu_interleave_size          None; other layouts of g and l are refused
    activation_recompute_in_mlp  no effect: forward saves only the input and the scales, and backward always recomputes
                                 the activation

    The result is computed in fp32 and rounded once. The gradient of the scales is summed in fp32 in a fixed order. The
    name and the arguments are Transformer Engine's; unlike there, scales are not rounded to the dtype of the input.
    """

    num_extra_inputs = 1
    activation = "swiglu"

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        if glu_interleave_size is not None:
            raise ValueError(
                f"{type(self).__name__} does not support glu_interleave_size={glu_interleave_size}: the first half of "
                f"the features is the gate; reorder the rows of the weight in front of it"
            )
        self.glu = glu_options(type(self).__name__, self.activation)

    def forward(self, input: Tensor, scales: Tensor) -> Tensor:
        """[..., 2F] and [...] -> [..., F]. Raises ``ValueError`` for shapes that do not match."""
        return scaled_activation(input, scales, self.glu)

    def extra_repr(self) -> str:
        """The parameters of the activation, if any."""
        _, alpha, limit, offset = self.glu
        return "" if limit is None else f"limit={limit}, alpha={alpha}, glu_linear_offset={offset}"


class ScaledClampedQGeGLU(ScaledSwiGLU):
    """``y[t] = s[t] c sigmoid(alpha c) (clamp(l[t], -limit, limit) + glu_linear_offset)`` for ``c = min(g[t], limit)``.

    This is GPT-OSS's activation. Shapes and other arguments are those of ``ScaledSwiGLU``.
    """

    activation = "clamped_swiglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)
        params = {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
        self.glu = glu_options(type(self).__name__, self.activation, params)


def glu_options(owner: str, activation: str, params: Mapping[str, float] | None = None) -> Glu:
    """A gated activation, given by Transformer Engine's name.

    Only "clamped_swiglu" takes ``params``: ``limit``, ``alpha`` and ``glu_linear_offset``. Raises ``ValueError`` for
    unknown names and parameters, and for an ungated activation.
    """
    params = dict(params or {})
    offset = params.pop("glu_linear_offset", None)
    if offset is not None and activation != "clamped_swiglu":
        raise ValueError(f"{owner}: glu_linear_offset is of clamped_swiglu alone, and the activation is '{activation}'")
    if not activation_named(activation, params).gated:
        raise ValueError(f"{owner} needs a gated activation, as swiglu, geglu or clamped_swiglu; got '{activation}'")
    numbers = {} if offset is None else {"linear_offset": offset}
    return glu_named(activation, **params, **numbers)


def scaled_activation(input: Tensor, scales: Tensor | None, glu: Glu) -> Tensor:
    """See ``ScaledSwiGLU``. ``scales`` None: 1."""
    if input.dim() == 0 or input.shape[-1] % 2 or (scales is not None and scales.shape != input.shape[:-1]):
        raise ValueError(
            f"a scaled activation needs an input [..., 2 features] and a scale for each of its rows; got "
            f"{tuple(input.shape)} and {None if scales is None else tuple(scales.shape)}"
        )
    input = cast(input, dtype_of_products(input))
    rows = rows_of(input)
    row_scales = None if scales is None else scales.reshape(-1)
    if torch.compiler.is_compiling() or in_transform():
        # A compiler fuses visible operations and chooses what to save; transforms differentiate them.
        output = scaled_glu(rows, row_scales, glu)
    else:
        output = ScaledGlu.apply(rows, row_scales, glu)
    scaled: Tensor = output.reshape(*input.shape[:-1], input.shape[-1] // 2)
    return scaled
