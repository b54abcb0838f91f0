"""The auxiliary loss of a Hugging Face model with experts, without padding.

``transformers`` leaves padding out of it where the model gets an ``attention_mask``. ``maingrad train`` gives none,
because attention would then cross documents and take a slower kernel. The loss is therefore computed again from the
router logits that the model returns, by the function that its module has for it.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .loss import find_padding

__all__ = ["RouterLoss"]

_FUNCTION = "load_balancing_loss_func"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


class RouterLoss:
    """The weighted auxiliary loss of one model of ``transformers``."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = getattr(model, "config", None)
        text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
        found = [getattr(each, name, None) for each in (config, text) for name in _COEFFICIENTS]
        self._coefficient = next((float(value) for value in found if value is not None), 0.0)
        self._num_experts, self._top_k = (getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok"))
        known = self._num_experts is not None and self._top_k is not None
        self._function = _function_of(model) if known else None
        self.counts_padding = bool(getattr(text, "output_router_logits", False)) and self._function is None
        """Whether the model's class computes the loss in a way of its own, so that padding would count."""

    def of(self, outputs: Any, targets: Tensor) -> Tensor | None:
        """The loss of a forward with ``targets`` [B, T], times its coefficient; None: the model has computed none."""
        loss = getattr(outputs, "aux_loss", None)
        if not isinstance(loss, Tensor):
            return None
        if self._function is not None:
            is_input = find_padding(targets).logical_not()
            # The function divides by the number of inputs. Where there is none, the loss has the weight 0.
            is_input = is_input | is_input.any().logical_not()
            loss = self._function(outputs.router_logits, self._num_experts, self._top_k, is_input)
        return self._coefficient * loss


def _function_of(model: nn.Module) -> Callable[..., Any] | None:
    """The module's function with the arguments that most architectures have; None: there is none."""
    function = getattr(sys.modules.get(type(model).__module__), _FUNCTION, None)
    if function is None or list(inspect.signature(function).parameters) != _ARGUMENTS:
        return None
    found: Callable[..., Any] = function
    return found
