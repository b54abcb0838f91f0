"""``Linear``: ``nn.Linear`` whose weight gradient is one GEMM into ``main_grad``, in backward or later.

Legend: T rows (all leading dims of the input together), K ``in_features``, N ``out_features``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ddp.main_grad import DelayedWgradModule, check_delayable, is_fusable
from .fused_linear import fused_linear, run_outside_graph
from .te_arguments import refuse_unsupported
from .wgrad_queue import WgradQueue, active_queue

__all__ = ["Linear"]


class Linear(DelayedWgradModule, nn.Linear):
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

    # Also for modules that became Linear by a change of class.
    fuse_wgrad_accumulation = False
    return_bias = False
    save_original_input = False
    weight_names: tuple[str, ...] = ("weight",)
    bias_names: tuple[str, ...] = ("bias",)
    label: str | None = None

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
        init_method: Callable[[Tensor], Any] | None = None,
        return_bias: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        **unsupported: Any,
    ) -> None:
        refuse_unsupported("Linear", unsupported)
        if dtype is not None and params_dtype is not None and dtype is not params_dtype:
            raise ValueError(f"Linear got dtype={dtype} and params_dtype={params_dtype}: they are one argument")
        super().__init__(in_features, out_features, bias, device, dtype or params_dtype)
        if init_method is not None:
            init_method(self.weight)
            if self.bias is not None:
                nn.init.zeros_(self.bias)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.return_bias = return_bias
        self.save_original_input = save_original_input
        self.label = name
        if parameters_split is not None:
            self._split(_split_sizes(parameters_split, out_features))
        if delay_wgrad_compute:
            self.wgrad_queue = WgradQueue()
            self.mark_delayed_weights()

    def fused_wgrad_weights(self) -> Iterable[str]:
        """The weights, where they are fused."""
        return self.weight_names if self.fuse_wgrad_accumulation else ()

    def delayed_wgrad_weights(self) -> Iterable[str]:
        """The weights, where they are delayed by the module itself."""
        return self.weight_names if self.wgrad_queue is not None else ()

    def forward(self, input: Tensor) -> Any:
        """[..., K] -> [..., N]; with ``return_bias`` a pair of it and the bias."""
        if self.weight_names == ("weight",):
            weights: tuple[Tensor, ...] = (self.weight,)
            bias: Tensor | None = self.bias
        else:
            weights = tuple([getattr(self, name) for name in self.weight_names])
            parts = [getattr(self, name) for name in self.bias_names]
            bias = None if parts[0] is None else torch.cat(parts)
        added = None if self.return_bias else bias
        output = self._multiply(input, weights, added)
        return (output, bias) if self.return_bias else output

    def _multiply(self, input: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
        queue = self.wgrad_queue if self.wgrad_queue is not None else active_queue()
        if (self.fuse_wgrad_accumulation or queue is not None) and torch.is_grad_enabled():
            needing = [weight for weight in weights if weight.requires_grad]
            if needing and torch.compiler.is_compiling() and self.weight_names[0] in self._parameters:
                output: Tensor = run_outside_graph(Linear._multiply, self, input, weights, bias)
                return output
            if needing and all(map(is_fusable, needing)):
                if queue is not None and self.wgrad_queue is None:
                    check_delayable(needing, self.describe())
                return fused_linear(
                    input,
                    weights,
                    bias,
                    self.describe(),
                    fused=self.fuse_wgrad_accumulation,
                    queue=queue,
                    save_original_input=self.save_original_input,
                )
        return F.linear(input, weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    def _split(self, sizes: Mapping[str, int]) -> None:
        """Replace weight and bias by their slices."""
        self.weight_names = tuple(f"{name}_weight" for name in sizes)
        self.bias_names = tuple(f"{name}_bias" for name in sizes)
        for whole, names in ((self.weight, self.weight_names), (self.bias, self.bias_names)):
            slices = [None] * len(sizes) if whole is None else whole.detach().split(list(sizes.values()))
            for name, part in zip(names, slices, strict=True):
                self.register_parameter(name, None if part is None else nn.Parameter(part.clone()))
        del self.weight, self.bias

    def describe(self) -> str:
        """For errors: which layer this is."""
        return self.label or f"Linear(in_features={self.in_features}, out_features={self.out_features})"

    def extra_repr(self) -> str:
        """``nn.Linear``'s, and what happens to the weight gradient."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={getattr(self, self.bias_names[0]) is not None}, "
            f"fuse_wgrad_accumulation={self.fuse_wgrad_accumulation}, "
            f"delay_wgrad_compute={self.wgrad_queue is not None}"
        )


def _split_sizes(parameters_split: Sequence[str] | Mapping[str, int], out_features: int) -> dict[str, int]:
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
