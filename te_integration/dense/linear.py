"""``Linear``: an ``nn.Linear`` that computes its weight gradient by one GEMM into ``main_grad``.

Legend: T rows (all leading dims of the input together), K ``in_features``, N ``out_features``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..te_arguments import refuse_unsupported
from .linear_module import InitMethod, one_dtype
from .split_linear import ParametersSplit, SplitLinear

__all__ = ["Linear"]


class Linear(SplitLinear, nn.Linear):
    """``y = x W^T + b``, with ``main_grad += dy^T x`` as one GEMM.

    =========  ============  =====================================
    x          [..., K]      input
    weight     [N, K]        ``nn.Linear``'s own
    bias       [N] or None   ``nn.Linear``'s own
    y          [..., N]      output
    =========  ============  =====================================

    Backward: ``dx = dy W``, ``dW = dy^T x`` written to ``weight.main_grad``, ``db = sum over rows of dy``.

    fuse_wgrad_accumulation  True: write the weight gradient to ``weight.main_grad``, which a provider (maingrad's or
                             Megatron-core's ``DistributedDataParallel``) attaches before the first backward; backward
                             raises ``RuntimeError`` without it. False: autograd delivers the weight gradient
    delay_wgrad_compute      backward computes ``dx`` and ``db`` only. ``backward_dw()`` computes ``dW`` of the oldest
                             pending microbatch and adds it to ``main_grad``, or to ``.grad`` if unfused
    params_dtype             Transformer Engine's name of ``dtype``
    init_method              initialises the weight instead of ``nn.Linear``; the bias is then 0
    return_bias              return ``(x W^T, bias)``; the caller adds the bias
    parameters_split         split the weight along N into several parameters, in this order: names with equal sizes, or
                             name -> size. ``"query_"`` gives ``query_weight`` and ``query_bias``. Each slice has its
                             own ``main_grad``; there is no ``weight``
    save_original_input      under autocast, save the input itself for backward instead of its cast copy
    name                     the layer's name in error messages

    Parameter names and state dict are those of ``nn.Linear`` and Transformer Engine. Other arguments of Transformer
    Engine are accepted if their value has no effect, and refused by name otherwise. The fused backward is Megatron-LM's
    ``gradient_accumulation_fusion``. ``torch.compile`` takes the layer into its graph: see ``compiled_linear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        params_dtype: torch.dtype | None = None,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        parameters_split: ParametersSplit | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        **unsupported: Any,
    ) -> None:
        refuse_unsupported("Linear", unsupported)
        super().__init__(in_features, out_features, bias, device, one_dtype("Linear", dtype, params_dtype))
        if init_method is not None:
            self.init_method = init_method
            self.reset_parameters()
        self.return_bias = return_bias
        self.save_original_input = save_original_input
        self.split_parameters(parameters_split)
        self.set_wgrad_options(fuse=fuse_wgrad_accumulation, delay=delay_wgrad_compute, name=name)

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[..., K] -> [..., N]; with ``return_bias`` a pair of output and bias.

        ``is_first_microbatch`` has no effect: backward knows which write is the first of an iteration.
        """
        output, bias = self.linear(input)
        return (output, bias) if self.return_bias else output

    def sizes(self) -> str:
        """The sizes of the layer, by the names of the constructor's arguments."""
        return f"in_features={self.in_features}, out_features={self.out_features}"
