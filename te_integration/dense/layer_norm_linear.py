"""``LayerNormLinear``: a normalisation followed by a linear layer.

Legend: K ``in_features``, N ``out_features``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..te_arguments import refuse_unsupported
from .linear import SplitLinear
from .linear_options import InitMethod, ParametersSplit, one_dtype
from .normalization import NormalizingModule

__all__ = ["LayerNormLinear"]


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
