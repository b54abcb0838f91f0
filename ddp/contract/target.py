"""``choose_target``: which kind of target takes the weight gradients of a product. A forward chooses, backward asks."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from .delayed import DelayedTarget, WgradQueueLike
from .main_grad import Demand, Place, WgradProduct, WgradTarget, demand, has_main_grad
from .torch_wrappers import TorchShardedTarget, TorchShards

__all__ = ["AutogradTarget", "Target", "choose_target"]


class Target(Protocol):
    """What a product asks of its target: see ``WgradTarget``."""

    def serves(self, weights: Sequence[Tensor], queue: object | None) -> bool:
        """Whether a forward of these weights, delayed into ``queue`` or not, may use this target."""

    def demand(self, weight_node: Any) -> Demand:
        """Who asks for a weight's gradient."""

    def resolve(self, wanted: Sequence[bool]) -> list[Place | None]:
        """Where the gradients go."""

    def deliver(self, places: Sequence[Place | None], operands: Sequence[Any], backward: int) -> list[Tensor | None]:
        """Compute the gradients, now or later. Returns what autograd gets."""


class AutogradTarget:
    """Autograd delivers the gradients. The other kinds deliver some themselves."""

    demand = staticmethod(demand)

    def serves(self, weights: Sequence[Tensor], queue: object | None) -> bool:
        """See ``Target``."""
        return queue is None

    def resolve(self, wanted: Sequence[bool]) -> list[Place | None]:
        """There is no place but autograd's."""
        return [None] * len(wanted)

    def deliver(self, places: Sequence[Place | None], operands: Sequence[Any], backward: int) -> list[Tensor | None]:
        """Never called: nothing has a place."""
        raise AssertionError("resolve has given no place")


captured: Callable[[WgradTarget], Target] | None = None
"""While a layer is captured: what makes the ``CapturedTarget`` around another target. ``capturing.noting`` sets it."""


def choose_target(
    weights: Sequence[Tensor],
    names: Sequence[str],
    wgrad: WgradProduct,
    owner: str,
    *,
    fused: bool,
    queue: WgradQueueLike | None,
) -> Target:
    """The target of a product's weights; arguments as those of ``WgradTarget`` and ``DelayedTarget``.

    ======================  ========================================================================================
    kind                    when
    ======================  ========================================================================================
    ``AutogradTarget``      the gradients are neither fused nor delayed
    ``WgradTarget``         fused: backward writes ``main_grad``
    ``DelayedTarget``       they wait in ``queue``
    ``TorchShardedTarget``  fused, of weights that torch's FSDP2 has gathered
    ``CapturedTarget``      around each of the last three, while ``make_graphed_callables`` captures the layer
    ======================  ========================================================================================
    """
    target: WgradTarget
    if queue is not None:
        target = DelayedTarget(weights, names, wgrad, owner, fused=fused, queue=queue)
    elif not fused:
        return AutogradTarget()
    else:
        shards = [None if has_main_grad(weight) else TorchShards.of(weight) for weight in weights]
        if any(shards):
            target = TorchShardedTarget(weights, names, wgrad, owner, shards)
        else:
            target = WgradTarget(weights, names, wgrad, owner)
    return target if captured is None else captured(target)
