"""SGD with momentum on flat shards."""

from collections.abc import Sequence

from .flat_update import FlatUpdate
from .reference import UpdateRow

__all__ = ["SGDUpdate"]


class SGDUpdate(FlatUpdate):
    """Steps of SGD: ``update = SGDUpdate(tensors)``, then ``update(options)`` each step, with ``SGDOptions``.

    With ``g`` the gradient, ``p`` the master, and ``b`` the momentum buffer, a row's ``exp_avg``::

        g = g / divisor                                       and -g under ``maximize``
        g = g + weight_decay p
        b = momentum b + (1 - dampening) g                    in the first step b = g
        g = g + momentum b                                    with ``nesterov``; else g = b
        p = p - lr g

    A row without ``exp_avg`` has no momentum: ``p = p - lr g``. Its group's momentum is 0.

    On CUDA, masters and buffers in fp32 get the bits of ``torch.optim.SGD(fused=True)`` without a ``divisor``. With
    one, and with ``maximize``, torch's compiler rounds some elements of a thread once more than others, and those
    differ by an ulp.
    """

    moments = (0, 1)

    def __init__(self, tensors: Sequence[UpdateRow], *, maximize: bool = False) -> None:
        super().__init__(tensors, "sgd", maximize=maximize)
