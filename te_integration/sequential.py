"""``Sequential``: modules in order, with extra inputs for the modules that take them."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..ddp.wrapper.attachment import AroundModule

__all__ = ["Sequential"]


class Sequential(nn.Sequential):
    """``nn.Sequential`` whose modules may take extra inputs beside the output of the previous module.

    A module declares the number by an attribute ``num_extra_inputs`` of its class or instance (default: 0). The extra
    inputs of ``forward`` are handed out in the order of the modules. A nested ``Sequential`` takes the extra inputs of
    all its modules::

        class AddTo(nn.Module):
            num_extra_inputs = 1

            def forward(self, x, residual):
                return x + residual

        block = Sequential(LayerNormMLP(64, 256), AddTo())
        y = block(x, residual)

    ``backward_dw()`` and ``need_backward_dw()`` call those of the modules inside, at any depth. A provider of
    ``main_grad`` registers its functions with these modules, not with the container.

    Keys of the state dict, slicing and ``append`` are ``nn.Sequential``'s.
    """

    @property
    def num_extra_inputs(self) -> int:
        """Number of inputs that ``forward`` takes after the first."""
        return sum(map(_num_extra_inputs, self))

    def forward(self, input: Any, *extra_inputs: Any) -> Any:
        """Run all modules. Raises ``TypeError`` if the number of extra inputs is not what the modules take in sum."""
        if len(extra_inputs) != self.num_extra_inputs:
            raise TypeError(
                f"Sequential got {len(extra_inputs)} extra inputs, and its modules take {self.num_extra_inputs}: each "
                f"module says how many by num_extra_inputs"
            )
        remaining = iter(extra_inputs)
        for op in self:
            input = op(input, *[next(remaining) for _ in range(_num_extra_inputs(op))])
        return input

    def need_backward_dw(self) -> bool:
        """Return True while delayed weight gradients of a module inside are pending."""
        return any(module.need_backward_dw() for module in self._delaying())

    def backward_dw(self) -> None:
        """Call ``backward_dw()`` of each module, last module first; a module that occurs several times runs once."""
        for module in reversed(list(self._delaying())):
            module.backward_dw()

    def _delaying(self) -> Iterator[Any]:
        """The modules that delay, each once. Containers, which only pass the call on, are left out."""
        for module in self.modules():
            if hasattr(module, "backward_dw") and not isinstance(module, Sequential | AroundModule):
                yield module


def _num_extra_inputs(op: nn.Module) -> int:
    return getattr(op, "num_extra_inputs", 0)
