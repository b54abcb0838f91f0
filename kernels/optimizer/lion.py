"""Lion on flat shards."""

from collections.abc import Sequence

from .flat_update import FlatUpdate
from .reference import UpdateRow

__all__ = ["LionUpdate"]


class LionUpdate(FlatUpdate):
    """Steps of Lion: ``update = LionUpdate(tensors)``, then ``update(options)`` each step, with ``LionOptions``.

    With ``g`` the gradient, ``p`` the master, and ``m`` the moment, a row's ``exp_avg``::

        g = g / divisor                                       and -g under ``maximize``
        p = p - lr weight_decay p
        p = p - lr sign(beta1 m + (1 - beta1) g)
        m = beta2 m + (1 - beta2) g

    Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.
    """

    moments = (1, 1)

    def __init__(self, tensors: Sequence[UpdateRow], *, maximize: bool = False) -> None:
        super().__init__(tensors, "lion", maximize=maximize)
