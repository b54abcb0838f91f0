"""``LayerNormLinear``: a normalisation, computed by torch's kernels, followed by a linear layer.

Legend: K ``in_features``, N ``out_features``.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..te_arguments import refuse_unsupported
from .linear import SplitLinear, brought
from .linear_options import InitMethod, ParametersSplit, one_dtype

__all__ = ["LayerNormLinear", "NormalizingModule"]

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


class LayerNormLinear(SplitLinear, NormalizingModule):
    """``y = norm(x) W^T + b``, with ``main_grad += dy^T norm(x)`` as one GEMM.

    =================  ============  ========================================
    x                  [..., K]      input
    layer_norm_weight  [K]           see ``NormalizingModule``
    layer_norm_bias    [K] or None   None for RMSNorm
    weight             [N, K]
    bias               [N] or None
    y                  [..., N]      output
    =================  ============  ========================================

    eps                      added to the variance
    normalization            "LayerNorm" or "RMSNorm"
    zero_centered_gamma      ``layer_norm_weight`` is gamma - 1
    return_layernorm_output  also return ``norm(x)`` [..., K], as the last result
    others                   see ``Linear``

    Names of arguments and parameters are those of Transformer Engine. Its other arguments are accepted if their value
    has no effect, and refused by name otherwise. Raises ``ValueError`` for an unknown ``normalization``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_bias: bool = False,
        init_method: InitMethod | None = None,
        parameters_split: ParametersSplit | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        parallel_mode: Literal["column"] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
        name: str | None = None,
        **unsupported: Any,
    ) -> None:
        refuse_unsupported("LayerNormLinear", unsupported)
        super().__init__()
        dtype = one_dtype("LayerNormLinear", dtype, params_dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.init_method = init_method
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.save_original_input = save_original_input
        self.add_normalization(in_features, eps, normalization, zero_centered_gamma, device, dtype)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()
        self.split_parameters(parameters_split)
        if parallel_mode not in (None, "column"):
            raise ValueError(
                f"LayerNormLinear(parallel_mode={parallel_mode!r}): a rank with a slice of the features cannot "
                f"normalise them; it is 'column'"
            )
        modes = () if parallel_mode is None else (parallel_mode,)
        brought.cut_over_ranks(self, modes, tp_group, tp_size, sequence_parallel)
        self.set_wgrad_options(fuse=fuse_wgrad_accumulation, delay=delay_wgrad_compute, name=name)

    def reset_parameters(self) -> None:
        """Initialise all parameters anew: after ``to_empty``, or to start over."""
        self.reset_normalization()
        super().reset_parameters()

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., K] -> [..., N]; or a tuple of output, bias and normalised input, as the options ask for.

        ``is_first_microbatch`` has no effect: backward knows which write is the first of an iteration.
        """
        normalized = self.normalize(input)
        output, bias = self.linear(normalized)
        return self.results(output, bias, normalized)

    def sizes(self) -> str:
        """The sizes of the layer, by the names of the constructor's arguments."""
        return f"in_features={self.in_features}, out_features={self.out_features}, normalization={self.normalization}"
