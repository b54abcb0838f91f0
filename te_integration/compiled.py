"""Weight gradients in compiled graphs: an operator whose side effect a compiler must keep, once and in order.

A module under ``torch.compile`` computes its product, and the gradients of its input and bias, by operations that the
compiler sees and fuses. The weight gradient is one call of the operator ``maingrad::wgrad`` in the compiled backward.
The call runs ``CompilableModule.deliver_wgrad``, which writes as an eager backward does. Three properties matter:

- The operator has an *ordered effect*. A compiler may drop an operator without results that are used, merge two equal
  calls, or compute a call again to save memory. Each would lose or repeat a gradient, and none happens with an effect.
- ``main_grad`` is no argument. Accumulators are views of one bucket, and a write to one of them would count as a write
  to what other blocks have saved. A ``key`` stands for the module, and the weight is found at run time.
- No flag and no first write of an iteration is part of the graph, so that microbatches need no second graph.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from ..ddp.collectives.streams import is_capturing
from ..ddp.contract.module import forms_of
from ..ddp.torch_internals import will_execute
from ..kernels.quantized import Quantized, restored
from .recipes import recipe_of
from .torch_internals import (
    Opaque,
    current_autograd_node,
    is_compiled_autograd_on,
    let_traces_call,
    make_effectful_op,
)

__all__ = ["CompilableModule", "ExecutionMode", "WgradHandle", "can_compile", "weights_wanted", "wgrad"]

ExecutionMode: TypeAlias = Literal["graph", "break", "autograd"]
"""How a product runs in traced code: in the graph with a ``wgrad`` operator, in a graph break, or by plain autograd."""


class CompilableModule(Protocol):
    """The methods that a ``WgradHandle`` needs of its module."""

    def deliver_wgrad(self, product: int, operands: Sequence[Any]) -> None:
        """In a compiled backward: write the weight gradients of a product.

        product   index of the product in the module
        operands  gradient of the output [T, N] and input of the forward [T, K], or both quantised; of grouped products
                  the experts' offsets too
        """

    def execution_mode(self, product: int, delayed: bool) -> ExecutionMode:
        """How a product runs in traced code. A compiler runs this method and does not trace it."""

    def recipe_now(self, dtype: torch.dtype | None = None) -> int:
        """The number of the recipe by which a product in traced code is quantised; -1: none. Below: a graph break."""

    def mode_guards(self) -> list[Any]:
        """Return what ``execution_mode`` depends on. A compiler runs this method before compiled code."""

    def describe(self) -> str:
        """The module's name in error messages."""


_handles: "weakref.WeakValueDictionary[int, WgradHandle]" = weakref.WeakValueDictionary()
"""Handles by the number in their ``key``. Modules own them."""
_numbers = itertools.count()


class WgradHandle(Opaque):  # type: ignore[misc]  # torch's class, or object
    """A module as compiled code sees it. The handle holds the module weakly.

    Traced code asks for the ``mode`` of a product, and is compiled again where ``guarded`` changes. A compiler runs
    both as they are: tracing what they read would take as long as tracing a plain layer. The operator gets ``key``
    instead of the handle: graphs save tensors from forward to backward wherever they save anything, under recompute
    too.

    Each module makes its own handle. A copy of a module makes a new one.
    """

    def __init__(self, module: CompilableModule) -> None:
        number = next(_numbers)
        self.key = torch.tensor(number, dtype=torch.int64, device="cpu")
        """A 0-dim tensor with a number that no other handle has, on the CPU: reading it waits for no device."""
        _handles[number] = self
        self.module: Callable[[], CompilableModule | None] = weakref.ref(module)
        """Returns the module; None where it was freed."""
        self.places: dict[int, int] = {}
        """Number of a weight -> index of its node among those that the compiled backward leads to."""

    def mode(self, product: int, delayed: bool) -> ExecutionMode:
        """``execution_mode`` of the module. Traced code calls this."""
        return self._traced.execution_mode(product, delayed)

    def recipe(self, dtype: torch.dtype) -> int:
        """``recipe_now`` of the module. Traced code calls this."""
        return self._traced.recipe_now(dtype)

    @property
    def _traced(self) -> CompilableModule:
        module = self.module()
        assert module is not None, "it is being traced"
        return module

    def guarded(self) -> list[Any]:
        """``mode_guards`` of the module: other values compile the code again."""
        module = self.module()
        return [] if module is None else module.mode_guards()

    def __deepcopy__(self, memo: dict[int, Any]) -> "WgradHandle":
        # torch 2.11 copies opaque objects while it traces. A copied module replaces the handle in __setstate__.
        copy = object.__new__(WgradHandle)
        copy.module, copy.key, copy.places = self.module, self.key, {}
        return copy

    def __reduce__(self) -> Any:
        return type(None), ()


def _deliver(operands: Sequence[Tensor], key: Tensor, product: int, recipe: int = -1, columns: int = 0) -> None:
    if operands[0].is_cuda and torch.cuda.is_current_stream_capturing() and not is_capturing():
        raise RuntimeError(
            "torch.compile's own CUDA graphs (mode='reduce-overhead' or 'max-autotune') would replay a fused layer's "
            "weight gradient without the provider's flags: compile without them (mode='max-autotune-no-cudagraphs'), "
            "and capture the whole step with maingrad.ddp.GraphedTrainingStep"
        )
    handle = _handles.get(int(key.item()))
    module = None if handle is None else handle.module()
    if module is None:
        raise RuntimeError(
            "a module was freed between its compiled forward and the backward, and its weight gradients have no place: "
            "keep the model until the last backward"
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{module.describe()}: backward(create_graph=True) through a compiled fused layer; call the layer outside "
            f"torch.compile, or build it with fuse_wgrad_accumulation=False"
        )
    module.deliver_wgrad(product, operands if recipe < 0 else _quantized(operands, recipe, columns))


def _quantized(tensors: Sequence[Tensor], recipe: int, columns: int) -> list[Quantized]:
    """The transposed copies of the gradient of the output and of the input, from their tensors."""
    half = len(tensors) // 2
    specs = [recipe_of(recipe).spec(operand, columns=True) for operand in ("grad", "input")]
    return [restored(part, spec, columns) for part, spec in zip((tensors[:half], tensors[half:]), specs, strict=True)]


_ARGUMENTS = "Tensor[] operands, Tensor key, int product, int recipe=-1, SymInt columns=0"
wgrad = (
    make_effectful_op("wgrad", _ARGUMENTS, _deliver)
    if let_traces_call(WgradHandle, ("mode", "recipe"), guarded=WgradHandle.guarded)
    else None
)
"""``wgrad(operands, key, product)``: the operator. None where this torch cannot compile it: see ``can_compile``.

Under a recipe operands are the tensors of the two transposed quantised copies, and ``columns`` what they contract.
"""


def can_compile() -> bool:
    """Return True if this torch keeps the operator's effect. Else fused layers are graph breaks: the import has warned.

    Compiled autograd keeps no effect; a fused layer is a graph break there, without a warning.
    """
    return wgrad is not None and not is_compiled_autograd_on()


def weights_wanted(handle: WgradHandle, registered: Sequence[Tensor], first: int = 0) -> list[Tensor | None]:
    """Return, for each parameter of a module, the weight whose gradient this compiled backward accumulates, or None.

    registered  the module's parameters; a sharded one stands for the whole weight of the forward
    first       number of the first of them among the weights that ``handle`` remembers

    Raises ``RuntimeError`` where the backward returns the gradient of a weight to the caller (``autograd.grad``).
    """
    assert current_autograd_node is not None, "can_compile was asked"
    node = current_autograd_node()
    following = () if node is None else node.next_functions
    return [
        _wanted(handle, number, param, following) if param.requires_grad else None
        for number, param in enumerate(registered, first)
    ]


def _wanted(handle: WgradHandle, number: int, param: Tensor, following: Sequence[tuple[Any, int]]) -> Tensor | None:
    module = handle.module()
    assert module is not None, "it delivers its gradients"
    likely = handle.places.get(number, 0)  # where the last backward found the weight: nearly always there again
    for place in itertools.chain((likely,), range(len(following))):
        weight = _weight_behind(following, place, param)
        if weight is not None:
            break
    else:
        raise RuntimeError(
            f"{module.describe()}: the compiled backward does not lead to the weight that the module holds now; leave "
            f"the module's parameters in place between forward and backward"
        )
    handle.places[number] = place
    try:
        return weight if will_execute(following[place][0]) else None
    except RuntimeError:
        raise RuntimeError(
            f"{module.describe()}: autograd.grad(loss, weight) of a compiled fused layer, whose weight gradient goes "
            f"into main_grad; call backward(), or run this forward outside torch.compile"
        ) from None


def _weight_behind(following: Sequence[tuple[Any, int]], place: int, param: Tensor) -> Tensor | None:
    """The tensor of the accumulating node at ``place``, if it is ``param`` or the whole weight of that shard."""
    leaf: Tensor | None = getattr(following[place][0], "variable", None) if place < len(following) else None
    if leaf is param or (leaf is not None and any(form is param for form in forms_of(leaf))):
        return leaf
    return None
