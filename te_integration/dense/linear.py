"""``Linear``: ``nn.Linear`` whose weight gradient is one GEMM into ``main_grad``, in backward or later.

Legend: T rows (all leading dims of the input together), K ``in_features``, N ``out_features``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .linear_module import InitMethod, one_dtype
from .split_linear import ParametersSplit, SplitLinear
from .te_arguments import refuse_unsupported

__all__ = ["Linear"]


class Linear(SplitLinear, nn.Linear):
    """``y = x W^T + b``, with ``main_grad += dy^T x`` as one GEMM.

    =========  ============  =====================================
    x          [..., K]      input
    weight     [N, K]        ``nn.Linear``'s own
    bias       [N] or None   ``nn.Linear``'s own
    y          [..., N]      output
    =========  ============  =====================================

    Backward: ``dx = dy W``, ``dW = dy^T x`` straight into ``weight.main_grad``, ``db = sum over rows of dy``.

    fuse_wgrad_accumulation  write the weight gradient into ``weight.main_grad``, which a provider (our
                             ``DistributedDataParallel``, Megatron-core's) must have attached by the time of backward:
                             ``RuntimeError`` otherwise. False: autograd delivers it, as ``nn.Linear`` does
    delay_wgrad_compute      backward computes ``dx`` and ``db`` only; ``backward_dw()`` computes the oldest pending
                             microbatch's ``dW``, into ``main_grad`` or, unfused, added to ``.grad``
    params_dtype             another name of ``dtype``, Transformer Engine's
    init_method              called with the weight instead of ``nn.Linear``'s initialisation; the bias becomes zeros
    return_bias              return ``(x W^T, bias)`` and leave the addition to the caller
    parameters_split         the weight is several parameters, slices of N in this order: names with equal sizes, or
                             name -> size. ``"query_"`` is the parameter ``query_weight`` (and ``query_bias``); each has
                             its own ``main_grad`` and there is no ``weight`` then
    save_original_input      under autocast, keep the input as it came instead of its cast copy
    name                     for errors

    Parameter names and state dict are ``nn.Linear``'s and Transformer Engine's; other arguments of Transformer Engine's
    are accepted where they have no effect, and refused by name otherwise. The fused backward is Megatron-LM's
    ``gradient_accumulation_fusion``. Under ``torch.compile`` a fused layer is a graph break: see ``run_outside_graph``.
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
        """[..., K] -> [..., N]; with ``return_bias`` a pair of it and the bias.

        ``is_first_microbatch`` is accepted and changes nothing: which write overwrites is known in backward.
        """
        output, bias = self.linear(input)
        return (output, bias) if self.return_bias else output

    def sizes(self) -> str:
        """Its sizes, by the names of its arguments."""
        return f"in_features={self.in_features}, out_features={self.out_features}"
