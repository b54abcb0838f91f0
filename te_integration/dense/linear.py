"""``Linear``: an ``nn.Linear`` that computes its weight gradient by one GEMM into ``main_grad``.

Legend: T rows (all leading dims of the input together), K ``in_features``, N ``out_features``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..te_arguments import refuse_unsupported
from .linear_module import InitMethod, LinearModule, one_dtype, reset_linear

__all__ = ["Linear", "ParametersSplit", "SplitLinear"]

ParametersSplit: TypeAlias = Sequence[str] | Mapping[str, int]


class SplitLinear(LinearModule):
    """Mixin of modules with one product. The parameters are ``weight`` and ``bias``, or slices of both along N."""

    bias_names: tuple[str, ...] = ("bias",)
    weight: Tensor
    bias: Any  # Tensor | None, for which nn.Linear says Tensor

    def split_parameters(self, parameters_split: ParametersSplit | None) -> None:
        """Replace the initialised weight and bias by slices, if ``parameters_split`` is not None."""
        if parameters_split is None:
            return
        sizes = _split_sizes(parameters_split, self.weight.shape[0])
        self.weight_names = tuple(f"{name}_weight" for name in sizes)
        self.bias_names = tuple(f"{name}_bias" for name in sizes)
        for whole, names in ((self.weight, self.weight_names), (self.bias, self.bias_names)):
            slices = [None] * len(sizes) if whole is None else whole.detach().split(list(sizes.values()))
            for name, part in zip(names, slices, strict=True):
                parameter = None if part is None else nn.Parameter(part.clone())
                self.register_parameter(name, parameter)  # type: ignore[attr-defined]  # nn.Module's
        del self.weight, self.bias

    def reset_parameters(self) -> None:
        """Initialise the weights and biases again, for example after ``to_empty``."""
        for weight_name, bias_name in zip(self.weight_names, self.bias_names, strict=True):
            reset_linear(getattr(self, weight_name), getattr(self, bias_name), self.init_method)

    def linear(self, input: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [..., K] -> ``x W^T + b`` [..., N], and b. With ``return_bias``, b is not added."""
        if self.weight_names == ("weight",):
            weights: tuple[Tensor, ...] = (self.weight,)
            bias: Tensor | None = self.bias
        else:
            weights = tuple(getattr(self, name) for name in self.weight_names)
            parts = [getattr(self, name) for name in self.bias_names]
            bias = None if parts[0] is None else torch.cat(parts)
        return self.multiply(input, weights, None if self.return_bias else bias, self.queue_now()), bias

    def extra_repr(self) -> str:
        """The sizes, and what happens to the weight gradient."""
        return f"{super().extra_repr()}, bias={getattr(self, self.bias_names[0]) is not None}"


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


def _split_sizes(parameters_split: ParametersSplit, out_features: int) -> dict[str, int]:
    """Parameter name without its trailing underscores -> rows."""
    if isinstance(parameters_split, str) or not parameters_split:
        raise ValueError(f"parameters_split must name one or more slices, got {parameters_split!r}")
    if isinstance(parameters_split, Mapping):
        sizes = dict(parameters_split)
    else:
        if out_features % len(parameters_split):
            raise ValueError(
                f"parameters_split: {out_features} output features do not divide into {len(parameters_split)} slices"
            )
        sizes = dict.fromkeys(parameters_split, out_features // len(parameters_split))
    stripped = {name.rstrip("_"): size for name, size in sizes.items()}
    if len(stripped) != len(parameters_split) or "" in stripped:
        raise ValueError(f"parameters_split must name each slice differently, got {list(parameters_split)}")
    if sum(stripped.values()) != out_features or min(stripped.values()) < 1:
        raise ValueError(f"parameters_split: sizes {stripped} do not add up to {out_features} output features")
    return stripped
