"""``CompilableLinear``: how the products of a module with linear layers run in code that ``torch.compile`` traces.

Eager code makes the handle, and asks nothing else. Traced code asks ``mode_and_recipe`` of each product. A compiled
backward calls ``deliver_wgrad``: see ``te_integration/compiled.py``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...ddp.contract.main_grad import is_foreign, is_fusable, record_of
from ...ddp.torch_internals import current_backward
from .. import recipes
from ..compiled import ExecutionMode, WgradHandle, can_compile, weights_wanted
from ..wgrad_queue import WgradQueue
from .fused_linear import ProductUse, dtype_of_products, in_transform
from .quantized_linear import HALF, warn_of_dtype

__all__ = ["CompilableLinear"]

_FORGOTTEN = -2
"""In place of a recipe's number: a reentrant checkpoint computes again what was quantised. Eager code has the error."""
_HAS_STATE = -3
"""The recipe keeps scales and amaxes, which eager code records."""


class CompilableLinear:
    """Mixin of modules with one or more products ``x W^T``, which traced code names by a ``WgradHandle``."""

    fuse_wgrad_accumulation: bool
    wgrad_queue: Any
    weight_names: tuple[str, ...]
    transposed: bool
    ignores_recipes: bool
    _has_been_quantized: bool

    def make_handle(self) -> None:
        """Make the object by which compiled code names this module. Call it for each new or converted module."""
        self._wgrad_handle = WgradHandle(self)
        self._wgrad_key = self._wgrad_handle.key

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]  # nn.Module's
        if "_wgrad_handle" in state:
            self.make_handle()  # a copy is a module of its own

    def weights_of(self, product: int) -> tuple[str, ...]:
        """Names of the weights of one of the module's products."""
        return self.weight_names

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

    def mode_and_recipe(
        self, weights: Sequence[Tensor], queue: WgradQueue | None, product: int, input: Tensor
    ) -> tuple[ExecutionMode, int]:
        """In traced code: the ``mode`` of a product that a recipe may quantise, and the recipe's number; -1: none.

        Breaks: a block that the traced code itself enters (what a compiler does not trace cannot see it), and products
        that autograd delivers. Products in fp32, and empty ones, are computed as without a recipe.
        """
        mode = self.mode(weights, queue, product)
        if not recipes.may_be_any:
            return mode, -1
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
        """In a compiled backward: the weight gradients of a product, for ``dy``, ``x``, and the offsets of experts."""
        own, names = self.__dict__["_parameters"], self.weights_of(product)
        registered = [own[name] for name in names]
        wanted = weights_wanted(self._wgrad_handle, registered, product * len(names))
        weights = [param if weight is None else weight for param, weight in zip(registered, wanted, strict=True)]
        # Without a queue the forward was fused, whatever the option says by now: only such a forward leads here.
        fused = self.fuse_wgrad_accumulation or self.wgrad_queue is None
        target = self._use(product, weights, fused, self.wgrad_queue).target
        assert target is not None, "the forward was fused or delayed"
        dy, x, *offsets = operands
        left, right = (x, dy) if self.transposed else (dy, x)
        target.deliver_in_graph([weight is not None for weight in wanted], (left, right, *offsets), current_backward())

    def _use(
        self, product: int, weights: Sequence[Tensor], fused: bool, queue: WgradQueue | None, only_save: bool = False
    ) -> ProductUse:
        raise NotImplementedError(f"{type(self).__name__} must keep its products' options")

    def describe(self) -> str:
        """The layer's name in error messages."""
        raise NotImplementedError(f"{type(self).__name__} must say its name")


def _grad_receiver(param: Tensor | None) -> str:
    """Who takes the gradient of a parameter: "nobody"; "autograd" alone; "ours", "foreign", "unknown" providers."""
    if param is None or not param.requires_grad:
        return "nobody"
    if not is_fusable(param):
        return "autograd"
    if record_of(param) is not None:
        return "ours"
    return "foreign" if is_foreign(param) else "unknown"
