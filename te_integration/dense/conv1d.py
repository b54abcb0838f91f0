"""Fused weight gradients for Hugging Face's ``Conv1D``: a linear layer whose weight is stored [in, out].

transformers is never imported. The fused class is a subclass of the class of the given module, so that ``isinstance``
stays true. Legend: T rows, K input features (``nx``), N output features (``nf``).
"""

import functools
from typing import Any

from torch import Tensor, nn

from .linear import LinearModule

__all__ = ["FusedConv1D", "fused_conv1d_class", "is_conv1d_class"]


def is_conv1d_class(cls: type) -> bool:
    """Whether ``cls`` is ``Conv1D`` of transformers. The file that defines the class differs between versions."""
    return cls.__name__ == "Conv1D" and cls.__module__.partition(".")[0] == "transformers"


@functools.cache
def fused_conv1d_class(base: type) -> type[nn.Module]:
    """The fused class of ``base``, cached so that all modules of one ``base`` have the same type."""
    return type(f"Fused{base.__name__}", (FusedConv1D, base), {"_unfused": base, "__doc__": FusedConv1D.__doc__})


class FusedConv1D(LinearModule, nn.Module):
    """``y = x W + b`` with ``main_grad += x^T dy`` as one GEMM in backward.

    =========  ========  ========================================
    x          [..., K]  input
    weight     [K, N]    ``Conv1D``'s own, and so its main_grad
    bias       [N]       ``Conv1D``'s own
    y          [..., N]  output
    =========  ========  ========================================

    Backward: ``dx = dy W^T``, ``dW = x^T dy`` written to ``weight.main_grad``, ``db = sum over rows of dy``.
    This class is a mixin; ``fused_conv1d_class`` combines it with ``Conv1D``.
    """

    _unfused: type
    weight: Tensor
    bias: Tensor

    fuse_wgrad_accumulation = True
    transposed = True

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return self.multiply(x, (self.weight,), self.bias, self.queue_now())

    def describe(self) -> str:
        """For errors: which layer this is."""
        return f"Conv1D({self.sizes()})"

    def sizes(self) -> str:
        """Its sizes, by the names of its arguments."""
        return f"nf={self.weight.shape[1]}, nx={self.weight.shape[0]}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by the base class: the fused class is made at run time and no Python module contains it."""
        return _new_fused_conv1d, (self._unfused,), self.__getstate__()  # type: ignore[no-untyped-call]


def _new_fused_conv1d(base: type) -> nn.Module:
    cls = fused_conv1d_class(base)
    return cls.__new__(cls)
