"""What the running backward does with a weight's gradient, and whether a write to ``main_grad`` is allowed."""

import enum
from typing import Any

import torch

from ..torch_internals import will_execute
from . import capturing

__all__ = ["Demand", "demand"]


class Demand(enum.Enum):
    """What the running backward does with a weight's gradient."""

    ACCUMULATE = "backward(): deliver it to the parameter"
    NOTHING = "the gradient is not asked for: autograd.grad(loss, inputs), backward(inputs=...)"
    RETURN = "autograd.grad(loss, weight), or create_graph=True: return it to the caller, without a side effect"


def demand(weight_node: Any) -> Demand:
    """Ask the engine what it will do with a weight's gradient; ``weight_node`` is ``ctx.next_functions[i][0]``.

    Only ``ACCUMULATE`` allows a write to ``main_grad``. A backward that is captured asks for every gradient of its
    layer, and each replay asks the engine again.
    """
    if capturing.active is not None:
        return Demand.ACCUMULATE
    if torch.is_grad_enabled():
        return Demand.RETURN  # create_graph=True: the gradient itself must be differentiable
    try:
        wanted = will_execute(weight_node)
    except RuntimeError:
        return Demand.RETURN  # the engine raises exactly where autograd.grad captures this leaf
    return Demand.ACCUMULATE if wanted else Demand.NOTHING
