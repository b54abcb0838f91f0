"""Weight gradients in compiled graphs: an operator whose side effect a compiler must keep, once and in order.

A module under ``torch.compile`` computes its product, and the gradients of its input and bias, by operations that the
compiler sees and fuses. The weight gradient is one call of the operator ``maingrad::wgrad`` in the compiled backward.
The call runs ``WgradHandle.deliver``, which writes as an eager backward does. Three properties matter:

- The operator has an *ordered effect*. A compiler may drop an operator without results that are used, merge two equal
  calls, or compute a call again to save memory. Each would lose or repeat a gradient, and none happens with an effect.
- ``main_grad`` is no argument. Accumulators are views of one bucket, and a write to one of them would count as a write
  to what other blocks have saved. A ``key`` stands for the module, and the weight is found at run time.
- No flag and no first write of an iteration is part of the graph, so that microbatches need no second graph.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ...ddp.collectives.streams import is_capturing
from ...ddp.contract.delayed import add_to_grad
from ...ddp.contract.main_grad import WgradProduct, is_foreign, is_fusable, record_of
from ...ddp.contract.module import forms_of
from ...ddp.torch_internals import current_backward, has_tensor_hooks, will_execute
from ...kernels.quantized import Quantized, restored
from .. import recipes
from ..torch_internals import (
    Opaque,
    current_autograd_node,
    is_compiled_autograd_on,
    let_traces_call,
    make_effectful_op,
)
from ..wgrad_queue import WgradQueue
from .linear import LinearModule, ProductUse, brought
from .products import dtype_of_products, in_transform
from .quantized_linear import HALF, QuantizedWgrad, warn_of_dtype

__all__ = [
    "ExecutionMode",
    "WgradHandle",
    "can_compile",
    "handle_in_backward",
    "handle_of",
    "key_of",
    "mode_and_recipe",
    "mode_of",
    "named_by",
    "refuse_graphs_of_torch",
    "run_outside_graph",
    "wgrad",
]

ExecutionMode: TypeAlias = Literal["graph", "break", "autograd"]
"""How a product runs in traced code: in the graph with a ``wgrad`` operator, in a graph break, or by plain autograd."""

_FORGOTTEN = -2
"""Marker for the recipe's number: the recompute of a reentrant checkpoint runs outside ``autocast``. Break the graph,
so that eager code raises the error."""
_HAS_STATE = -3
"""Marker for the recipe's number: the recipe keeps scales and amaxes, which eager code records."""

_named: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""What graphs name, by the number in its key. Its owners keep it alive."""
_numbers = itertools.count()


def key_of(each: Any) -> Tensor:
    """A new name for graphs: a 0-dim tensor with a number, on the CPU, since reading it waits for no device.

    A graph has the key as an input, so that modules, and dispatchers, of several blocks share one graph.
    """
    number = next(_numbers)
    _named[number] = each
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def named_by(key: Tensor) -> Any:
    """What ``key_of`` has named; None where it is gone."""
    return _named.get(int(key.item()))


class WgradHandle(Opaque):  # type: ignore[misc]  # torch's class, or object
    """A module as compiled code sees it. The handle holds the module weakly.

    Traced code asks for the ``mode`` of a product, and is compiled again where ``guarded`` changes. A compiler runs
    both as they are: tracing what they read would take as long as tracing a plain layer. The operator gets ``key``
    instead of the handle: graphs save tensors from forward to backward wherever they save anything, under recompute
    too.

    Each module makes its own handle. A copy of a module makes a new one.
    """

    def __init__(self, module: LinearModule) -> None:
        self.key = key_of(self)
        self._module: Callable[[], LinearModule | None] = weakref.ref(module)
        self._places: dict[int, int] = {}
        """Number of a weight -> index of its node among those that the compiled backward leads to."""

    @property
    def module(self) -> LinearModule:
        """The module, while it lives."""
        module = self._module()
        assert module is not None, "it is being traced, or delivers its gradients"
        return module

    @property
    def is_live(self) -> bool:
        """False where the module was freed."""
        return self._module() is not None

    def mode(self, product: int, delayed: bool) -> ExecutionMode:
        """How a product runs, as far as the module's parameters and torch's modes decide it. Traced code calls this.

        Breaks: a foreign provider needs a placeholder as the gradient. Delayed gradients without our provider need
        checks of the forward's surroundings. A weight that is no parameter is computed from others.
        """
        if self.recipe() == _FORGOTTEN:
            return "break"
        if not torch.is_grad_enabled() or in_transform():
            return "autograd"
        own, names = self.module.__dict__["_parameters"], self.module.weights_of(product)
        if not all(name in own for name in names):
            return "break"
        needing = {_grad_receiver(own[name]) for name in names} - {"nobody"}
        if not needing or "autograd" in needing or ("unknown" in needing and not self.module.needs_provider):
            return "autograd"
        if not can_compile() or "foreign" in needing or (delayed and "unknown" in needing):
            return "break"
        return "graph"

    def recipe(self, dtype: torch.dtype | None = None) -> int:
        """The number of the recipe by which a product in ``dtype`` is quantised; -1: none. Traced code calls this.

        The markers ask for a graph break.
        """
        module = self.module
        if module.ignores_recipes:
            return -1
        recipe = recipes.recipe_now()
        if recipe is not None and dtype is not None:
            if dtype not in HALF:
                warn_of_dtype(recipe, dtype, module.describe())
                return -1
            module._has_been_quantized = True
        elif recipe is None and module._has_been_quantized and recipes.is_recomputed_without_region():
            return _FORGOTTEN
        return _HAS_STATE if isinstance(recipe, recipes.DelayedScaling) else recipes.number_of(recipe)

    def guarded(self) -> list[Any]:
        """What ``mode`` depends on, but for the grad mode, at which compilers look themselves.

        Compilers do not look at hooks. torch 2.11 does not look whether a parameter was thawed, and would go on without
        a gradient. Other values compile the code again.
        """
        if not self.is_live:
            return []
        module = self.module
        recipe = self.recipe() if recipes.may_be_any or module._has_been_quantized else -1
        return [recipe, in_transform(), can_compile(), *map(_grad_receiver, module.__dict__["_parameters"].values())]

    def deliver(self, product: int, operands: Sequence[Any], recipe: int) -> None:
        """In a compiled backward: write the weight gradients of a product.

        product   index of the product in the module
        operands  gradient of the output [T, N] and input of the forward [T, K]; of grouped products the experts'
                  offsets too
        recipe    by which both are quantised, and transposed; -1: none
        """
        module = self.module
        dy, x, *offsets = operands
        left, right = (x, dy) if module.transposed else (dy, x)
        computed_by = module.wgrad_product if recipe < 0 else QuantizedWgrad
        self.deliver_by(computed_by, product, (left, right, *offsets))

    def deliver_by(self, computed_by: type[WgradProduct], product: int, operands: Sequence[Any]) -> None:
        """``deliver`` for what the class ``computed_by`` makes of its ``operands``."""
        registered = self.registered(product)
        wanted = self._weights_wanted(registered, product * len(registered))
        weights = [param if weight is None else weight for param, weight in zip(registered, wanted, strict=True)]
        use = self.use(computed_by, product, weights)
        for weight, name in zip(wanted, self.module.weights_of(product), strict=True):
            if weight is not None:
                _check_in_graph(weight, f"{use.owner}, {name}")
        mine = [weight is not None and weight.requires_grad for weight in wanted]  # False: frozen after the forward
        places = use.target.resolve(mine)
        unwritten = [want and place is None for want, place in zip(mine, places, strict=True)]
        if True in unwritten:  # FSDP2 has no accumulator, and takes ``.grad`` after this graph
            gradients = use.wgrad.gradients(unwritten, weights[0].dtype, *operands)
            for weight, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    add_to_grad(weight, gradient, None)
        if any(places):
            use.target.deliver(places, operands, current_backward())

    def only_weight_wanted(self) -> Tensor | None:
        """The weight of a module with one, if this backward accumulates its gradient."""
        (weight,) = self._weights_wanted(self.registered(0), 0)
        return weight

    def registered(self, product: int) -> list[Tensor]:
        """The module's parameters of one product."""
        own = self.module.__dict__["_parameters"]
        return [own[name] for name in self.module.weights_of(product)]

    def use(self, computed_by: type[WgradProduct], product: int, weights: Sequence[Tensor]) -> ProductUse:
        """The ``ProductUse`` of a product whose gradients the class ``computed_by`` computes."""
        module = self.module
        # Without a queue the forward was fused, whatever the option says by now: only such a forward leads here.
        fused = module.fuse_wgrad_accumulation or module.wgrad_queue is None
        return module.use(product, weights, fused, module.wgrad_queue, computed_by=computed_by)

    def _weights_wanted(self, registered: Sequence[Tensor], first: int) -> list[Tensor | None]:
        """Return, for each parameter of a product, the weight whose gradient this backward accumulates, or None.

        registered  the module's parameters; a sharded one stands for the whole weight of the forward
        first       number of the first of them among the module's weights

        Raises ``RuntimeError`` where the backward returns the gradient of a weight to the caller (``autograd.grad``).
        """
        assert current_autograd_node is not None, "can_compile was asked"
        node = current_autograd_node()
        following = () if node is None else node.next_functions
        return [
            self._wanted(number, param, following) if param.requires_grad else None
            for number, param in enumerate(registered, first)
        ]

    def _wanted(self, number: int, param: Tensor, following: Sequence[tuple[Any, int]]) -> Tensor | None:
        likely = self._places.get(number, 0)  # where the last backward found the weight: nearly always there again
        for place in itertools.chain((likely,), range(len(following))):
            weight = _weight_behind(following, place, param)
            if weight is not None:
                break
        else:
            raise RuntimeError(
                f"{self.module.describe()}: the compiled backward does not lead to the weight that the module holds "
                f"now; leave the module's parameters in place between forward and backward"
            )
        self._places[number] = place
        try:
            return weight if will_execute(following[place][0]) else None
        except RuntimeError:
            raise RuntimeError(
                f"{self.module.describe()}: autograd.grad(loss, weight) of a compiled fused layer, whose weight "
                f"gradient goes into main_grad; call backward(), or run this forward outside torch.compile"
            ) from None

    def __deepcopy__(self, memo: dict[int, Any]) -> "WgradHandle":
        # torch 2.11 copies opaque objects while it traces. A copied module replaces the handle in __setstate__.
        copy = object.__new__(WgradHandle)
        copy._module, copy.key, copy._places = self._module, self.key, {}
        return copy

    def __reduce__(self) -> Any:
        return type(None), ()


def _name_for_graphs(module: LinearModule) -> None:
    module._wgrad_handle = WgradHandle(module)
    module._wgrad_key = module._wgrad_handle.key


brought.name_for_graphs = _name_for_graphs


def _grad_receiver(param: Tensor | None) -> str:
    """Who takes the gradient of a parameter: "nobody"; "autograd" alone; "ours", "foreign", "unknown" providers."""
    if param is None or not param.requires_grad:
        return "nobody"
    if not is_fusable(param):
        return "autograd"
    if record_of(param) is not None:
        return "ours"
    return "foreign" if is_foreign(param) else "unknown"


def _check_in_graph(weight: Tensor, owner: str) -> None:
    """Raise ``RuntimeError`` where autograd must have the gradient, for a reason that came after the compilation."""
    hooked = has_tensor_hooks(weight)
    if hooked or is_foreign(weight):
        what = "a hook (register_hook)" if hooked else "a main_grad of others"
        raise RuntimeError(
            f"{owner}: the weight got {what} after the layer was compiled, and the compiled backward has no "
            f"gradient to hand over; call torch.compiler.reset() then, so that the layer is compiled again"
        )


def _weight_behind(following: Sequence[tuple[Any, int]], place: int, param: Tensor) -> Tensor | None:
    """The tensor of the accumulating node at ``place``, if it is ``param`` or the whole weight of that shard."""
    leaf: Tensor | None = getattr(following[place][0], "variable", None) if place < len(following) else None
    if leaf is param or (leaf is not None and any(form is param for form in forms_of(leaf))):
        return leaf
    return None


# ---- In traced code. ----


def mode_of(module: LinearModule, weights: Sequence[Tensor], queue: WgradQueue | None, product: int) -> ExecutionMode:
    """How a product of these weights runs, whose gradients go into ``queue``.

    The queue of a ``delayed_wgrad`` block is a graph break: it may be another one in each forward, while a module's own
    queue stays.
    """
    if not (module.fuse_wgrad_accumulation or queue is not None):
        return "autograd"
    mode: ExecutionMode = module._wgrad_handle.mode(product, queue is not None)
    if mode == "graph":
        if queue is not module.wgrad_queue:
            return "break"
        for weight in weights:
            if not isinstance(weight, nn.Parameter):  # torch.func.functional_call brought another one
                return "autograd"
    return mode


def mode_and_recipe(
    module: LinearModule, weights: Sequence[Tensor], queue: WgradQueue | None, product: int, input: Tensor
) -> tuple[ExecutionMode, int]:
    """The ``mode_of`` a product that a recipe may quantise, and the recipe's number; -1: none.

    Breaks: a block that the traced code itself enters (what a compiler does not trace cannot see it), and products
    that autograd delivers. Products in fp32, and empty ones, are computed as without a recipe.
    """
    mode = mode_of(module, weights, queue, product)
    if not recipes.may_be_any:
        return mode, -1
    if recipes.blocks_in_trace:
        return "break", -1
    number: int = module._wgrad_handle.recipe(dtype_of_products(input))
    if number == -1 or (number >= 0 and input.numel() == 0):
        return mode, -1
    if mode == "autograd" and not (torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)):
        mode = "graph"  # no weight gradient will come
    if number < 0 or mode != "graph":
        return "break", -1
    return "graph", number


def _run(forward: Callable[..., Any], module: Any, *args: Any, **options: Any) -> Any:
    return forward(module, *args, **options)


# A graph break, for what a compiled graph cannot hold. The caller passes its forward, because type(module).forward may
# belong to a subclass.
run_outside_graph: Callable[..., Any] = torch.compiler.disable(_run)


# ---- The operator. ----


def _deliver(
    operands: Sequence[Tensor],
    key: Tensor,
    product: int,
    recipe: int = -1,
    columns: int = 0,
    after: Tensor | None = None,
) -> None:
    refuse_graphs_of_torch(operands[0])
    handle_in_backward(key).deliver(product, operands if recipe < 0 else _quantized(operands, recipe, columns), recipe)


def refuse_graphs_of_torch(operand: Tensor) -> None:
    """Raise ``RuntimeError`` where ``torch.compile`` captures what writes a weight gradient."""
    if operand.is_cuda and torch.cuda.is_current_stream_capturing() and not is_capturing():
        raise RuntimeError(
            "torch.compile's own CUDA graphs (mode='reduce-overhead' or 'max-autotune') would replay a fused layer's "
            "weight gradient without the provider's flags: compile without them (mode='max-autotune-no-cudagraphs'), "
            "and capture the whole step with maingrad.ddp.GraphedTrainingStep"
        )


def handle_in_backward(key: Tensor) -> WgradHandle:
    """The handle of a compiled backward's ``key``. Raises ``RuntimeError`` under ``create_graph=True``."""
    handle = handle_of(key)
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{handle.module.describe()}: backward(create_graph=True) through a compiled fused layer; call the layer "
            f"outside torch.compile, or build it with fuse_wgrad_accumulation=False"
        )
    return handle


def handle_of(key: Tensor) -> WgradHandle:
    """The handle with this ``key``. Raises ``RuntimeError`` where the module is gone."""
    handle: WgradHandle | None = named_by(key)
    if handle is None or not handle.is_live:
        raise RuntimeError(
            "a module was freed between its compiled forward and the backward, and its weight gradients have no place: "
            "keep the model until the last backward"
        )
    return handle


def _quantized(tensors: Sequence[Tensor], recipe: int, columns: int) -> list[Quantized]:
    """The transposed copies of the gradient of the output and of the input, from their tensors."""
    half = len(tensors) // 2
    specs = [recipes.recipe_of(recipe).spec(operand, columns=True) for operand in ("grad", "input")]
    return [restored(part, spec, columns) for part, spec in zip((tensors[:half], tensors[half:]), specs, strict=True)]


_ARGUMENTS = "Tensor[] operands, Tensor key, int product, int recipe=-1, SymInt columns=0, Tensor? after=None"
wgrad = (
    make_effectful_op("wgrad", _ARGUMENTS, _deliver)
    if let_traces_call(WgradHandle, ("mode", "recipe"), guarded=WgradHandle.guarded)
    else None
)
"""``wgrad(operands, key, product)``: the operator. None where this torch cannot compile it: see ``can_compile``.

Under a recipe operands are the tensors of the two transposed quantised copies, and ``columns`` what they contract.
It runs behind what computes ``after``, whose elements it does not read.
"""


def can_compile() -> bool:
    """Return True if this torch keeps the operator's effect. Else fused layers are graph breaks: the import has warned.

    Compiled autograd keeps no effect; a fused layer is a graph break there, without a warning.
    """
    return wgrad is not None and not is_compiled_autograd_on()
