"""Adam and AdamW on flat shards."""

from collections.abc import Sequence

from .flat_update import FlatUpdate
from .reference import UpdateRow

__all__ = ["AdamUpdate"]


class AdamUpdate(FlatUpdate):
    """Steps of AdamW: ``update = AdamUpdate(tensors)``, then ``update(options)`` each step, with ``AdamOptions``.

    With ``t`` the steps taken, this one included, ``g`` the gradient, ``p`` the master, ``m`` and ``v`` the moments::

        g = g / divisor                                       and -g under ``maximize``
        p = p - lr weight_decay p                             where ``decoupled``; else g = g + weight_decay p
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        p = p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    On CUDA, masters and moments in fp32 get the bits that ``torch.optim.AdamW(fused=True)`` gives; elsewhere the powers
    of beta differ from CUDA's by an ulp, which the bias corrections magnify.

    AdamW: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """

    moments = (2, 2)

    def __init__(
        self,
        tensors: Sequence[UpdateRow],
        *,
        decoupled: bool = True,
        maximize: bool = False,
        grads_move: bool = False,
    ) -> None:
        """
        decoupled  AdamW's weight decay; False: Adam's, which is added to the gradient
        """
        super().__init__(tensors, "adamw" if decoupled else "adam", maximize=maximize, grads_move=grads_move)
