"""What every module with linear layers has beside its products: options, names, initial values, states.

The way of a gradient does not lead through this file. It begins in ``linear.py``.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...ddp.contract.module import DelayedWgradModule
from ..scaling.scaled_module import ScaledModule
from ..te_arguments import drop_extra_state
from ..wgrad_queue import WgradQueue

__all__ = ["InitMethod", "LinearOptions", "ParametersSplit", "one_dtype", "reset_linear", "split_sizes"]

InitMethod = Callable[[Tensor], Any]
ParametersSplit: TypeAlias = Sequence[str] | Mapping[str, int]


class LinearOptions(ScaledModule, DelayedWgradModule):
    """The options of ``LinearModule``, its weights' names, and what it says of itself.

    Defaults are class attributes, because ``convert_linears`` changes the class of a module without a constructor call.
    """

    fuse_wgrad_accumulation = False
    return_bias = False
    save_original_input = False
    init_method: InitMethod | None = None
    label: str | None = None
    weight_names: tuple[str, ...] = ("weight",)
    _has_been_quantized = False
    transposed = False
    """The single weight is stored [K, N], as that of ``Conv1D``."""
    ignores_recipes = False
    """Computes without a recipe, whatever ``autocast`` is around: for heads, whose errors are the loss's own."""
    needs_provider = True
    """A fused product raises where no provider gave the weight a ``main_grad``. False: autograd delivers there."""
    _wgrad_handle: Any
    _wgrad_key: Tensor

    def set_wgrad_options(self, *, fuse: bool, delay: bool, name: str | None) -> None:
        """Set the options. Constructors call this after they have created the parameters."""
        self.fuse_wgrad_accumulation = fuse
        self.label = name
        if delay:
            self.wgrad_queue = WgradQueue()
            self.mark_delayed_weights()
        self.make_handle()

    def make_handle(self) -> None:
        """Make the object by which compiled code names this module. Call it for each new or converted module."""
        raise NotImplementedError(f"{type(self).__name__} is no LinearModule")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_wgrad_handle" in state:
            self.make_handle()  # a copy is a module of its own

    def weights_of(self, product: int) -> tuple[str, ...]:
        """Names of the weights of one of the module's products."""
        return self.weight_names

    def fused_wgrad_weights(self) -> Iterable[str]:
        """Names of the fused weights."""
        return self.weight_names if self.fuse_wgrad_accumulation else ()

    def delayed_wgrad_weights(self) -> Iterable[str]:
        """Names of the weights that the module delays into its own queue."""
        return self.weight_names if self.wgrad_queue is not None else ()

    def check_input(self, input: Tensor, weight: Tensor) -> None:
        """Raise ``ValueError`` for an input of other features, or of another dtype than the weight's."""
        features = weight.shape[0 if self.transposed else 1]
        if input.shape[-1:] != (features,):
            raise ValueError(f"{self.describe()} takes {features} features in the last dim, got {tuple(input.shape)}")
        if input.dtype is not weight.dtype and not torch.is_autocast_enabled(input.device.type):
            raise ValueError(
                f"{self.describe()}: the input is {input.dtype} and the weight {weight.dtype}; cast one or use autocast"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        drop_extra_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def describe(self) -> str:
        """The layer's name in error messages."""
        return self.label or f"{getattr(self, '_unfused', type(self)).__name__}({self.sizes()})"

    def sizes(self) -> str:
        """The sizes of the layer, by the names of the constructor's arguments."""
        raise NotImplementedError(f"{type(self).__name__} must say its sizes")

    def extra_repr(self) -> str:
        """The sizes, and what happens to the weight gradient."""
        return (
            f"{self.sizes()}, fuse_wgrad_accumulation={self.fuse_wgrad_accumulation}, "
            f"delay_wgrad_compute={self.wgrad_queue is not None}"
        )


def reset_linear(weight: Tensor, bias: Tensor | None, init_method: InitMethod | None) -> None:
    """Initialise like ``nn.Linear``. An ``init_method`` initialises the weight [N, K] instead; the bias is then 0."""
    if init_method is not None:
        init_method(weight)
        if bias is not None:
            nn.init.zeros_(bias)
        return
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] else 0
        nn.init.uniform_(bias, -bound, bound)


def one_dtype(module: str, dtype: torch.dtype | None, params_dtype: torch.dtype | None) -> torch.dtype | None:
    """Merge ``dtype`` (PyTorch's name) and ``params_dtype`` (Transformer Engine's name for the same argument)."""
    if dtype is not None and params_dtype is not None and dtype is not params_dtype:
        raise ValueError(f"{module} got dtype={dtype} and params_dtype={params_dtype}: they are one argument")
    return dtype or params_dtype


def split_sizes(parameters_split: ParametersSplit, out_features: int) -> dict[str, int]:
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
