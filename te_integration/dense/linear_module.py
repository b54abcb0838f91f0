"""The base of all modules with linear layers: how each product runs, and which weights are fused or delayed."""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ddp.contract.delayed import queue_of_block
from ...ddp.contract.main_grad import check_delayable, is_foreign, is_fusable, record_of
from ...ddp.contract.module import DelayedWgradModule
from ...ddp.contract.target import WgradTarget
from ...ddp.contract.torch_ddp import record_without_grad, refuse_delay_in_recompute
from ...ddp.torch_internals import current_backward
from ...kernels.quantized import Quantized
from ...kernels.wgrad import WgradOperand
from .. import recipes
from ..compiled import ExecutionMode, WgradHandle, can_compile, weights_wanted
from ..scaling.delayed_scaling import ScaledModule
from ..te_arguments import drop_extra_state
from ..wgrad_queue import WgradQueue
from .compiled_linear import compiled_linear
from .fused_linear import LinearUse, cast, dtype_of_products, fused_linear, rows_of, run_outside_graph
from .quantized_linear import HALF, quantized_linear, takes_recipe, warn_of_dtype
from .transforms import in_transform

__all__ = ["InitMethod", "LinearModule", "one_dtype", "reset_linear"]

InitMethod = Callable[[Tensor], Any]

_FORGOTTEN = -2
"""In place of a recipe's number: a reentrant checkpoint computes again what was quantised. Eager code has the error."""
_HAS_STATE = -3
"""The recipe keeps scales and amaxes, which eager code records."""


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
        self._wgrad_handle = WgradHandle(self)
        self._wgrad_key = self._wgrad_handle.key

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_wgrad_handle" in state:
            self.make_handle()  # a copy is a module of its own

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

    def weights_of(self, product: int) -> tuple[str, ...]:
        """Names of the weights of one of the module's products."""
        return self.weight_names

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
        """Compute the product with ``fused_linear``, which describes the arguments. None: use plain autograd.

        Returns None if no weight needs a gradient, if gradients are neither fused nor delayed, or if a transform, a
        hook or a tensor subclass must see the gradient.
        """
        if torch.compiler.is_compiling():
            product = operator.index(product)  # a graph that begins here, behind a break, would take it for a variable
            mode, recipe_number = self.mode(weights, queue, product), -1
            if recipes.may_be_any:
                mode, recipe_number = self._mode_under_recipe(mode, weights, input)
            if mode == "break":
                arguments = (input, weights, bias, queue, product, only_save)
                output: Tensor | None = run_outside_graph(LinearModule.fused_product, self, *arguments)
                return output
            if mode == "autograd":
                return None
            self._check_input(input, weights[0])
            return compiled_linear(
                input, weights, bias, self._wgrad_key, product, transposed=self.transposed, recipe=recipe_number
            )
        recipe = self._recipe_now(input)
        if recipe is not None:
            return self._quantized_product(input, weights, bias, queue, product, only_save, recipe)
        if not (self.fuse_wgrad_accumulation or queue is not None) or not torch.is_grad_enabled():
            if queue is not None:
                record_without_grad(self)
            return None
        needing = [weight for weight in weights if weight.requires_grad]
        if not needing or in_transform() or not all(map(is_fusable, needing)):
            return None
        if queue is not None and queue is not self.wgrad_queue:
            check_delayable(needing, self.describe())
        self._check_input(input, weights[0])
        return fused_linear(input, weights, bias, self._use(weights, queue, only_save))

    def _recipe_now(self, input: Tensor) -> recipes.Recipe | None:
        """The recipe by which this forward is quantised, if any."""
        recipe = None if self.ignores_recipes else recipes.recipe_now()
        if recipe is None:
            if self._has_been_quantized and recipes.is_recomputed_without_region():
                raise RuntimeError(
                    f"{self.describe()} was quantised under autocast, and a reentrant checkpoint computes it again "
                    f"outside: use torch.utils.checkpoint(use_reentrant=False), or enter autocast in the function"
                )
            return None
        if not takes_recipe(recipe, input, self.describe()):
            return None
        if not self._has_been_quantized:
            self._has_been_quantized = True
        return recipe

    def _quantized_product(
        self,
        input: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        queue: WgradQueue | None,
        product: int,
        only_save: bool,
        recipe: recipes.Recipe,
    ) -> Tensor:
        """``fused_product`` under a recipe."""
        if in_transform():
            raise RuntimeError(f"{self.describe()}: a recipe does not go with transforms of torch.func")
        self._check_input(input, weights[0])
        trains = torch.is_grad_enabled()
        if queue is not None and not trains:
            record_without_grad(self)
        needing = [weight for weight in weights if weight.requires_grad]
        fused = self.fuse_wgrad_accumulation or queue is not None
        writes = trains and fused and bool(needing) and all(map(is_fusable, needing))
        if writes and queue is not None and queue is not self.wgrad_queue:
            check_delayable(needing, self.describe())
        use = self._use(weights, queue if writes else None, only_save)
        if not isinstance(recipe, recipes.DelayedScaling):
            return quantized_linear(input, weights, bias, use, recipe, writes)
        scaling = self.scaling_of(recipe, product, input.device)
        output = quantized_linear(input, weights, bias, use, scaling, writes)
        scaling.forward_done(has_graph=output.requires_grad)
        return output

    def _check_input(self, input: Tensor, weight: Tensor) -> None:
        features = weight.shape[0 if self.transposed else 1]
        if input.shape[-1:] != (features,):
            raise ValueError(f"{self.describe()} takes {features} features in the last dim, got {tuple(input.shape)}")
        if input.dtype is not weight.dtype and not torch.is_autocast_enabled(input.device.type):
            raise ValueError(
                f"{self.describe()}: the input is {input.dtype} and the weight {weight.dtype}; cast one or use autocast"
            )

    def mode(self, weights: Sequence[Tensor], queue: WgradQueue | None, product: int) -> ExecutionMode:
        """In traced code: how a product of these weights runs, whose gradients go into ``queue``.

        The queue of a ``delayed_wgrad`` block is a graph break: it may be another one in each forward, while a module's
        own queue stays.
        """
        if not (self.fuse_wgrad_accumulation or queue is not None):
            return "autograd"
        mode: ExecutionMode = self._wgrad_handle.mode(product, queue is not None)
        if mode == "graph":
            if queue is not self.wgrad_queue:
                return "break"
            for weight in weights:
                if not isinstance(weight, nn.Parameter):  # torch.func.functional_call brought another one
                    return "autograd"
        return mode

    def _mode_under_recipe(
        self, mode: ExecutionMode, weights: Sequence[Tensor], input: Tensor
    ) -> tuple[ExecutionMode, int]:
        """In traced code, where a recipe may be on: how a product of this ``mode`` runs, and the recipe's number.

        Breaks: a block that the traced code itself enters (what a compiler does not trace cannot see it), and products
        that autograd delivers. Products in fp32, and empty ones, are computed as without a recipe.
        """
        if recipes.blocks_in_trace:
            return "break", -1
        number: int = self._wgrad_handle.recipe(dtype_of_products(input))
        if number == -1 or (number >= 0 and input.numel() == 0):
            return mode, -1
        if mode == "autograd" and not (torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)):
            mode = "graph"  # no weight gradient will come
        if number < 0 or mode != "graph":
            return "break", -1
        return "graph", number

    def recipe_now(self, dtype: torch.dtype | None = None) -> int:
        """The number of the running forward's recipe, for a product in ``dtype``. A compiler does not trace this."""
        if self.ignores_recipes:
            return recipes.number_of(None)
        recipe = recipes.recipe_now()
        if recipe is not None and dtype is not None:
            if dtype not in HALF:
                warn_of_dtype(recipe, dtype, self.describe())
                return recipes.number_of(None)
            self._has_been_quantized = True
        elif recipe is None and self._has_been_quantized and recipes.is_recomputed_without_region():
            return _FORGOTTEN
        if isinstance(recipe, recipes.DelayedScaling):
            return _HAS_STATE
        return recipes.number_of(recipe)

    def execution_mode(self, product: int, delayed: bool) -> ExecutionMode:
        """How a product runs in traced code, as far as the module's parameters and torch's modes decide it.

        Breaks: a foreign provider needs a placeholder as the gradient. Delayed gradients without our provider need
        checks of the forward's surroundings. A weight that is no parameter is computed from others.
        """
        if self.recipe_now() == _FORGOTTEN:
            return "break"
        if not torch.is_grad_enabled() or in_transform():
            return "autograd"
        own, names = self.__dict__["_parameters"], self.weights_of(product)
        if not all(name in own for name in names):
            return "break"
        needing = {_grad_receiver(own[name]) for name in names} - {"nobody"}
        if not needing or "autograd" in needing:
            return "autograd"
        if not can_compile() or "foreign" in needing or (delayed and "unknown" in needing):
            return "break"
        return "graph"

    def mode_guards(self) -> list[Any]:
        """What ``execution_mode`` depends on, but for the grad mode, at which compilers look themselves.

        Compilers do not look at hooks. torch 2.11 does not look whether a parameter was thawed, and would go on without
        a gradient.
        """
        recipe = self.recipe_now() if recipes.may_be_any or self._has_been_quantized else -1
        return [recipe, in_transform(), can_compile(), *map(_grad_receiver, self.__dict__["_parameters"].values())]

    def deliver_wgrad(self, product: int, operands: Sequence[Any]) -> None:
        """In a compiled backward: the weight gradients of a product, for gradient of the output and input."""
        own = self.__dict__["_parameters"]
        registered = [own[name] for name in self.weights_of(product)]
        dy, x = operands
        sizes = [each.shape[0] for each in registered]
        parts: Sequence[WgradOperand] = (dy,)
        if not isinstance(dy, Quantized):
            dy, x = rows_of(dy), cast(rows_of(x), dy.dtype)
            parts = (dy,) if len(registered) == 1 else dy.split(sizes, dim=1)
        elif len(registered) > 1:
            ends = list(itertools.accumulate(sizes))
            parts = [dy.rows(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        for number, weight in enumerate(weights_wanted(self._wgrad_handle, registered, product), product):
            if weight is not None:
                left, right = parts[number - product], x
                if self.transposed:
                    left, right = right, left
                self._target(number, weight).deliver_in_graph(left, right, current_backward())

    def _target(self, number: int, weight: Tensor) -> WgradTarget:
        targets = self._wgrad_handle.targets
        target: WgradTarget | None = targets.get(number)
        fused, queue = self._graph_delivery()
        if target is None or not target.serves(weight, fused):
            target = targets[number] = WgradTarget(weight, self.describe(), fused=fused, queue=queue)
        return target

    def _graph_delivery(self) -> tuple[bool, WgradQueue | None]:
        """What a compiled backward does with weight gradients: fused or not, and the queue.

        Without a queue the forward was fused, whatever the option says by now: only such a forward leads here.
        """
        return self.fuse_wgrad_accumulation or self.wgrad_queue is None, self.wgrad_queue

    def _use(self, weights: Sequence[Tensor], queue: WgradQueue | None, only_save: bool) -> LinearUse:
        """The object of the last forward if nothing has changed.

        A new one in each forward would cost a tiny layer (64 x 64, 16 rows) 3 % of its forward and backward.
        """
        if queue is not None:
            refuse_delay_in_recompute(self, self.describe)
        uses: dict[tuple[int, bool], LinearUse | None] = self.__dict__.setdefault("_uses", {})
        key = id(weights[0]), only_save
        use = uses.get(key)
        if use is None or not use.serves(weights, self.fuse_wgrad_accumulation, queue):
            if len(uses) > 8:  # torch.func.functional_call brings new weights in each forward
                uses.clear()
            use = uses[key] = LinearUse(
                weights,
                self.describe(),
                fused=self.fuse_wgrad_accumulation,
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


def _grad_receiver(param: Tensor | None) -> str:
    """Who takes the gradient of a parameter: "nobody"; "autograd" alone; "ours", "foreign", "unknown" providers."""
    if param is None or not param.requires_grad:
        return "nobody"
    if not is_fusable(param):
        return "autograd"
    if record_of(param) is not None:
        return "ours"
    return "foreign" if is_foreign(param) else "unknown"


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
