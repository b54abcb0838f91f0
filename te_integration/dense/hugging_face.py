"""Fused subclasses of Hugging Face's classes, and the first of them: ``Conv1D``, whose weight is stored [in, out].

transformers is never imported. The fused class is a subclass of the class of the given module, so that ``isinstance``
stays true. Legend: T rows, K input features (``nx``), N output features (``nf``).
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .linear import LinearModule

__all__ = ["FusedConv1D", "MadeClass", "fused_conv1d_class", "is_conv1d_class", "is_of_transformers"]


class MadeClass:
    """Mixin of classes that are made at run time of another class.

    No Python module contains such a class, so that its objects are pickled by what made it.
    """

    _unfused: type
    """The other class, whose name errors say."""
    _made_by: tuple[Any, ...]
    """A function and its arguments, which return this class."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new, self._made_by, self.__getstate__()


def _new(make: Callable[..., Any], *arguments: Any) -> Any:
    cls = make(*arguments)
    return cls.__new__(cls)


def is_of_transformers(what: Any) -> bool:
    """Whether transformers defines a class or function."""
    return str(getattr(what, "__module__", "")).partition(".")[0] == "transformers"


def is_conv1d_class(cls: type) -> bool:
    """Whether ``cls`` is ``Conv1D`` of transformers. The file that defines the class differs between versions."""
    return cls.__name__ == "Conv1D" and is_of_transformers(cls)


@functools.cache
def fused_conv1d_class(base: type) -> type[nn.Module]:
    """The fused class of ``base``, cached so that all modules of one ``base`` have the same type."""
    members = {"_unfused": base, "_made_by": (fused_conv1d_class, base), "__doc__": FusedConv1D.__doc__}
    return type(f"Fused{base.__name__}", (FusedConv1D, base), members)


class FusedConv1D(MadeClass, LinearModule, nn.Module):
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

    slices = "shown"
    weight: Tensor
    bias: Tensor

    fuse_wgrad_accumulation = True
    transposed = True

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return self.multiply(x, (self.weight,), self.bias, self.queue_now())

    def sizes(self) -> str:
        """Its sizes, by the names of its arguments."""
        return f"nf={self.weight.shape[1]}, nx={self.weight.shape[0]}"
