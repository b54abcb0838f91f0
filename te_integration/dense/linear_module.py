"""The base of all modules with linear layers: how each product runs, and which weights are fused or delayed.

Products run by ``fused_linear``. A plain layer knows no recipes and no compiled code: both bring functions of their
own, and ``te_integration/__init__.py`` imports them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ddp.contract.delayed import queue_of_block
from ...ddp.contract.main_grad import check_delayable, is_fusable
from ...ddp.contract.module import DelayedWgradModule
from ...ddp.contract.target import DenseWgrad, WgradProduct
from ...ddp.contract.torch_wrappers import record_without_grad, refuse_delay_in_recompute
from ..scaling.scaled_module import ScaledModule
from ..te_arguments import drop_extra_state
from ..wgrad_queue import WgradQueue
from .fused_linear import ProductUse, fused_linear, in_transform

__all__ = ["InitMethod", "LinearModule", "brought", "one_dtype", "reset_linear"]

InitMethod = Callable[[Tensor], Any]


class _Brought:
    """What other files bring for all modules: they set each attribute when they are imported."""

    recipe_of_forward: Callable[["LinearModule", Tensor], Any]
    """The recipe of a forward of this input; None: there is none. Of ``quantized_linear.py``."""
    quantized_product: Callable[..., Tensor | None]
    """``LinearModule.fused_product`` under a recipe, which comes first. Of ``quantized_linear.py``."""
    product_in_trace: Callable[..., Tensor | None]
    """``LinearModule.fused_product`` in code that a compiler traces. Of ``compiled_linear.py``."""
    name_for_graphs: Callable[["LinearModule"], None]
    """Makes the object by which compiled code names a module. Of ``compiled_wgrad.py``."""


brought = _Brought()


class LinearModule(ScaledModule, DelayedWgradModule):
    """Mixin of modules with one or more products ``x W^T``.

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
    """The single weight is stored [K, N]."""
    ignores_recipes = False
    """Computes without a recipe, whatever ``autocast`` is around: for heads, whose errors are the loss's own."""
    needs_provider = True
    """A fused product raises where no provider gave the weight a ``main_grad``. False: autograd delivers there."""
    wgrad_product: type[WgradProduct] = DenseWgrad
    """Computes the weight gradients of a product."""
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
        brought.name_for_graphs(self)

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

    def queue_now(self) -> WgradQueue | None:
        """The queue for weight gradients of the current forward: the module's own, else that of ``delayed_wgrad``."""
        queue: WgradQueue | None = queue_of_block() if self.wgrad_queue is None else self.wgrad_queue
        return queue

    def multiply(
        self,
        input: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        queue: WgradQueue | None,
        *,
        product: int = 0,
        only_save: bool = False,
    ) -> Tensor:
        """``x W^T + b``: x [..., K], weights [N_i, K] each (slices of W along N), b [N] -> [..., N]."""
        output = self.fused_product(input, weights, bias, queue, product, only_save)
        if output is None:
            output = F.linear(input, weights[0] if len(weights) == 1 else torch.cat(tuple(weights)), bias)
        return output

    def fused_product(
        self,
        input: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        queue: WgradQueue | None,
        product: int = 0,
        only_save: bool = False,
    ) -> Tensor | None:
        """Compute the product so that its weight gradients are fused or delayed. None: plain autograd computes it.

        product    index of the product in the module
        only_save  see ``ProductUse``
        """
        if torch.compiler.is_compiling():
            return brought.product_in_trace(self, input, weights, bias, queue, product, only_save)
        recipe = brought.recipe_of_forward(self, input)
        if recipe is not None:
            return brought.quantized_product(recipe, self, input, weights, bias, queue, product, only_save)
        fused, queue = self.delivery(weights, queue)
        if not fused and queue is None:
            return None
        self.check_input(input, weights[0])
        return fused_linear(input, weights, bias, self.use(product, weights, fused, queue, only_save))

    def delivery(self, weights: Sequence[Tensor], queue: WgradQueue | None) -> tuple[bool, WgradQueue | None]:
        """Return whether this forward's weight gradients go into ``main_grad``, and the queue that they wait in.

        (False, None): autograd delivers them, because the options say so, no weight needs a gradient, or a transform, a
        hook or a tensor subclass must see the gradient.
        """
        fused = self.fuse_wgrad_accumulation
        if not fused and queue is None:
            return False, None
        if not torch.is_grad_enabled():
            if queue is not None:
                record_without_grad(self)
            return False, None
        needing = [weight for weight in weights if weight.requires_grad]
        if not needing or in_transform() or not all(map(is_fusable, needing)):
            return False, None
        if queue is not None:
            if queue is not self.wgrad_queue:
                check_delayable(needing, self.describe())
            refuse_delay_in_recompute(self, self.describe)
        return fused, queue

    def check_input(self, input: Tensor, weight: Tensor) -> None:
        """Raise ``ValueError`` for an input of other features, or of another dtype than the weight's."""
        features = weight.shape[0 if self.transposed else 1]
        if input.shape[-1:] != (features,):
            raise ValueError(f"{self.describe()} takes {features} features in the last dim, got {tuple(input.shape)}")
        if input.dtype is not weight.dtype and not torch.is_autocast_enabled(input.device.type):
            raise ValueError(
                f"{self.describe()}: the input is {input.dtype} and the weight {weight.dtype}; cast one or use autocast"
            )

    def use(
        self,
        product: int,
        weights: Sequence[Tensor],
        fused: bool,
        queue: WgradQueue | None,
        only_save: bool = False,
        computed_by: type[WgradProduct] | None = None,
    ) -> ProductUse:
        """The object of the last forward if nothing has changed.

        A new one in each forward would cost a tiny layer (64 x 64, 16 rows) 3 % of its forward and backward.
        """
        uses: dict[Any, ProductUse | None] = self.__dict__.setdefault("_uses", {})
        key = product, fused, only_save, computed_by
        use = uses.get(key)
        if use is None or not use.serves(weights, fused, queue):
            use = uses[key] = ProductUse(
                weights,
                self.weights_of(product),
                (computed_by or self.wgrad_product)(weights),
                self.describe(),
                fused=fused,
                queue=queue,
                transposed=self.transposed,
                save_original_input=self.save_original_input,
                only_save=only_save,
            )
        return use

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        drop_extra_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def describe(self) -> str:
        """The layer's name in error messages."""
        return self.label or f"{type(self).__name__}({self.sizes()})"

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
