"""The normalisation before a linear layer, computed by torch's kernels.

Legend: K features, the last dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["NormalizingModule"]

_KINDS = ("LayerNorm", "RMSNorm")
_HALF = (torch.bfloat16, torch.float16)


class NormalizingModule(nn.Module):
    """Base of modules that normalise their input: ``normalize``, and two parameters with Transformer Engine's names.

    ===================  ===========  ==================================================================
    layer_norm_weight    [K]          gamma; initially 1, or 0 with ``zero_centered_gamma``
    layer_norm_bias      [K] or None  beta; initially 0; None for RMSNorm
    ===================  ===========  ==================================================================

    LayerNorm: ``(x - mean(x)) / sqrt(var(x) + eps) * gamma + beta``; RMSNorm: ``x / sqrt(mean(x^2) + eps) * gamma``.
    With ``zero_centered_gamma`` the parameter is gamma - 1, so that weight decay pulls gamma to 1.
    """

    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None
    return_bias: bool
    return_layernorm_output: bool

    def add_normalization(
        self, features: int, eps: float, normalization: str, zero_centered_gamma: bool, device: Any, dtype: Any
    ) -> None:
        """Create the parameters, uninitialised. Raises ``ValueError`` for an unknown ``normalization``."""
        if normalization not in _KINDS:
            raise ValueError(f"unknown normalization '{normalization}': it is one of {', '.join(_KINDS)}")
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        with_bias = normalization == "LayerNorm"
        self.layer_norm_weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype)) if with_bias else None
        self.register_parameter("layer_norm_bias", bias)

    def reset_normalization(self) -> None:
        """Initialise the parameters: gamma 1, beta 0."""
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def normalize(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., K], equal to ``nn.LayerNorm`` and ``nn.RMSNorm``, also under autocast."""
        gamma, beta = self.layer_norm_weight, self.layer_norm_bias
        if self.zero_centered_gamma:
            # In bf16, 1 + gamma would round a small gamma away.
            gamma = (gamma.float() if gamma.dtype in _HALF else gamma) + 1
        if self.normalization == "RMSNorm":
            wide = torch.promote_types(x.dtype, gamma.dtype)  # the fused kernel takes one dtype
            return F.rms_norm(x.to(wide), gamma.shape, gamma.to(wide), self.eps).to(x.dtype)
        if gamma.dtype is self.layer_norm_weight.dtype:
            return F.layer_norm(x, gamma.shape, gamma, beta, self.eps)
        beta = None if beta is None else beta.float()
        return F.layer_norm(x.float(), gamma.shape, gamma, beta, self.eps).to(x.dtype)

    def results(self, output: Tensor, bias: Tensor | None, normalized: Tensor) -> Any:
        """Return the output as forward does: alone, or in a tuple with what the options ask for beside it."""
        if not (self.return_bias or self.return_layernorm_output):
            return output
        more = (bias,) if self.return_bias else ()
        return (output, *more, normalized) if self.return_layernorm_output else (output, *more)
