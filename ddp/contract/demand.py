"""What the running backward wants of a weight's gradient: a fused one is a side effect, and not always wanted."""

import enum
from typing import Any

import torch

from ..torch_internals import delivers_to_all, will_execute

__all__ = ["Demand", "delivers", "demand", "goes_on_to"]


class Demand(enum.Enum):
    """What the running backward wants of a weight's gradient."""

    ACCUMULATE = "backward(): deliver it to the parameter"
    NOTHING = "the gradient is not asked for: autograd.grad(loss, inputs), backward(inputs=...)"
    RETURN = "autograd.grad(loss, weight), or a graph of the gradient: hand it to the caller, side effects forbidden"


def demand(weight_node: Any) -> Demand:
    """Ask the engine what it will do with the weight's gradient; ``weight_node`` is ``ctx.next_functions[i][0]``.

    A fused weight gradient is a side effect, and only ``backward()`` may have it.
    """
    if torch.is_grad_enabled():
        return Demand.RETURN  # create_graph=True: the gradient must be differentiable itself
    try:
        wanted = will_execute(weight_node)
    except RuntimeError:
        return Demand.RETURN  # the engine refuses the question exactly where autograd.grad captures this leaf
    return Demand.ACCUMULATE if wanted else Demand.NOTHING


def goes_on_to(node: Any) -> bool:
    """Whether the running backward will execute this node; raises ``RuntimeError`` for a leaf that ``autograd.grad``
    captures."""
    return will_execute(node)


def delivers() -> bool:
    """Whether the running backward is a plain ``backward()``, which delivers gradients to all leaves that it reaches.

    False in ``autograd.grad`` and ``backward(inputs=...)``, and in what is nested in them. That is the call's own, and
    does not depend on the graph. In a hook on a tensor that such a call captures, and does not go past, it is True.
    """
    return delivers_to_all()
