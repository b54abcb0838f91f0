"""The rule table of linear layers whose weight is a slice: which products of local tensors make which DTensor.

===================  ===========  ============  ==============================  ============
x                    W [N, K]     y             dx                              dW
===================  ===========  ============  ==============================  ============
Replicate            Shard(0)     Shard(last)   Partial: a sum over the ranks   slice
Shard(last)          Shard(1)     Partial       Shard(last)                     slice
Shard(another dim)   Replicate    as x          as x                            partial
Replicate            Replicate    Replicate     Replicate                       partial
===================  ===========  ============  ==============================  ============

Where torch's ``ColwiseParallel`` would make the DTensor x of a plain tensor, and sum its gradient behind the layer's
backward, the layer takes the plain tensor, and sums under its own product for dW. Layers to which one parent gives
one input (query, key and value; gate and up) share one sum.

In the last row each rank has all rows, and multiplies its part of them for dW. Everything else goes through torch's
dispatch, and autograd delivers the weight gradient.
"""

import functools
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ....kernels.compat import private_name
from ...contract.module import FusedWgradModule
from .hugging_face import calls_inner_forward
from .layouts import from_local, to_local
from .localize import layouts_of

__all__ = ["multiplies", "multiply", "share_inputs", "take_plain_inputs"]

_prepare_input = private_name(
    "torch.distributed.tensor.parallel.ColwiseParallel._prepare_input_fn",
    loss="the sum of an input's gradient over tensor-parallel ranks overlaps nothing",
    fallback=None,
)
_PLAIN = "_maingrad_sums_over"
"""Attribute of modules that take plain inputs: name, size and own place of the ranks over which dx is summed."""
_SHARED = "_maingrad_shared_input"
"""Attribute of modules that take plain inputs: the ``SharedInput`` of the layers beside them."""
_INSIDE = "_maingrad_shares_inside"
"""Attribute of their parent: the same, and the forward that it had on the instance."""


def multiplies(module: nn.Module) -> bool:
    """Whether ``multiply`` may serve forwards of this module."""
    return isinstance(module, FusedWgradModule) and module.slices == "local"


def multiply(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward's output from local tensors; None: no rule applies.

    Raises ``TypeError`` for a plain input, of which nobody says what it is of the whole.
    """
    x, layouts = args[0] if args else None, layouts_of(module)
    if isinstance(x, Tensor) and not isinstance(x, DTensor):
        if _PLAIN in module.__dict__:
            y, layout = _multiply_columns(module, x), layouts["weight"]
            return from_local(y, layout.mesh, Shard(x.dim() - 1), (*x.shape[:-1], layout.shape[0]))
        if calls_inner_forward(module):  # transformers unwraps the input of a module that is to run on local tensors
            return type(module).forward(module, *args, **kwargs)
        raise TypeError(
            f"{module.describe()}: its weight is a slice of tensor parallelism, and its input a plain tensor: call the "
            f"module as parallelize_module has prepared it, which makes a DTensor of the input"
        )
    if x is None or len(args) > 1 or kwargs or "weight" not in layouts:
        return None
    at: Placement
    out: Placement
    (at,) = x.placements
    weight, mesh, last = layouts["weight"], layouts["weight"].mesh, x.dim() - 1
    bias, cut = module.bias, weight.placement
    bias_cut = Replicate() if bias is None or "bias" not in layouts else layouts["bias"].placement
    if at == Replicate() and cut == Shard(0) and (bias is None or bias_cut == Shard(0)):
        y, out = module.multiply_slice(to_local(x, Partial()), bias), Shard(last)
    elif bias_cut != Replicate():
        return None
    elif at == Shard(last) and cut == Shard(1):
        # The sum over the ranks has the bias once. A factor keeps it in each rank's graph, by a gradient of zeros.
        once = None if bias is None else bias * float(mesh.get_local_rank() == 0)
        y, out = module.multiply_slice(to_local(x, at), once), Partial()
    elif cut == Replicate() and at == Replicate():
        y, out = _multiply_part(module, to_local(x, at), mesh), at
    elif cut == Replicate() and isinstance(at, Shard) and at.dim != last:
        y, out = module.multiply_slice(to_local(x, at), bias), at
    else:
        return None
    return from_local(y, mesh, out, (*x.shape[:-1], weight.shape[0]))


def _multiply_columns(module: Any, x: Tensor) -> Any:
    shared: SharedInput | None = module.__dict__.get(_SHARED)
    # Without a gradient of x nothing is summed. What no_grad hands on would carry none to a layer that has one.
    # Products of a leaf may go backward one by one, each of which frees its graph. A compiler's are one graph.
    sums = x.requires_grad and torch.is_grad_enabled() and (torch.compiler.is_compiling() or not x.is_leaf)
    if shared is None or not shared.is_open or not sums:
        return module.multiply_columns(x, module.bias, *module.__dict__[_PLAIN], shares=False)
    state = _state_of(x)
    if shared.input is x and shared.state == state:
        return module.multiply_slice(shared.handed_on, module.bias)
    y, handed_on = module.multiply_columns(x, module.bias, *module.__dict__[_PLAIN], shares=True)
    shared.input, shared.state, shared.handed_on = x, state, handed_on
    return y


def _state_of(x: Tensor) -> tuple[Any, ...]:
    """What may part two products of one tensor: changes in place, and autocast, whose dtype the input is handed on in.

    A compiler refuses changes in place of what was handed on.
    """
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return autocast, None if torch.compiler.is_compiling() else x._version


class SharedInput:
    """The input that a module gives to several of its layers, while its forward runs."""

    is_open = False
    input: Tensor | None = None
    state: tuple[Any, ...] = ()
    """``_state_of`` the input when it was handed on."""
    handed_on: Tensor | None = None
    """The input for all layers but the first; its gradient comes to the first one's sum."""


def share_inputs(module: nn.Module) -> None:
    """Have layers that take plain inputs share one sum of the input's gradient with those beside them."""
    for parent in module.modules():
        layers = [each for each in parent.children() if _PLAIN in each.__dict__ and _SHARED not in each.__dict__]
        if len(layers) < 2 or len({each.__dict__[_PLAIN] for each in layers}) > 1:
            continue
        shared = SharedInput()
        for each in layers:
            each.__dict__[_SHARED] = shared
        # No hooks: those that run after an error as well are compiled anew for each module.
        parent.__dict__[_INSIDE] = shared, parent.__dict__.get("forward")
        parent.__dict__["forward"] = MethodType(_forward_that_shares, parent)


def _forward_that_shares(parent: nn.Module, *args: Any, **kwargs: Any) -> Any:
    shared, around = parent.__dict__[_INSIDE]
    shared.is_open = True
    try:
        return type(parent).forward(parent, *args, **kwargs) if around is None else around(*args, **kwargs)
    finally:
        shared.is_open, shared.input, shared.handed_on = False, None, None


def take_plain_inputs(module: Any) -> None:
    """Have plain inputs reach a layer that torch's ``ColwiseParallel`` has cut, if its input is whole on each rank."""
    layouts = layouts_of(module)
    if {layout.placement for layout in layouts.values()} != {Shard(0)}:
        return
    for key, hook in module._forward_pre_hooks.items():
        if _makes_copies(hook):
            module._forward_pre_hooks[key] = functools.partial(_unless_plain, hook)
            group = layouts["weight"].mesh.get_group()
            module.__dict__[_PLAIN] = group.group_name, group.size(), group.rank()


def _makes_copies(hook: Any) -> bool:
    """Whether this is the hook of ``ColwiseParallel`` whose inputs are whole on each rank."""
    names = getattr(getattr(hook, "__code__", None), "co_freevars", ())
    made = dict(zip(names, hook.__closure__, strict=True))["input_fn"].cell_contents if "input_fn" in names else None
    whole = ((Replicate(),), (Replicate(),))
    return isinstance(made, functools.partial) and made.func is _prepare_input and made.args == whole


def _unless_plain(hook: Any, module: nn.Module, inputs: Any) -> Any:
    return inputs if multiplies(module) and not isinstance(inputs[0], DTensor) else hook(module, inputs)


def _multiply_part(module: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The product of all rows, of which this rank's part alone reaches the weight's gradient."""
    weight, bias, rank = module.weight.detach(), module.bias, mesh.get_local_rank()
    rows = x.reshape(-1, x.shape[-1]).tensor_split(mesh.size())
    y = [F.linear(each, weight, bias if bias is None else bias.detach()) for each in rows]
    y[rank] = module.multiply_slice(rows[rank], bias)
    return torch.cat(y).view(*x.shape[:-1], weight.shape[0])
