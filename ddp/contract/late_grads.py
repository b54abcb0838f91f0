"""Refuses an optimizer's step while a delayed weight gradient that goes to ``.grad`` is not computed yet.

This is for parameters without a wrapper of ours; a wrapper's records count delayed gradients themselves. Without this
check the step would lack the gradient, and the gradient would be added to the next iteration's.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["record_lost", "record_over", "record_waiting"]


class Waiting(Protocol):
    """A delayed weight gradient (``DelayedWgrad``)."""

    weights: Callable[[], Sequence[Tensor]]

    @property
    def owner(self) -> str:
        """The module that delays."""


class _Lost(NamedTuple):
    owner: str
    weights: Callable[[], Sequence[Tensor]]


# Globals, because torch's step hook serves every optimizer of the process.
_waiting: "weakref.WeakSet[Any]" = weakref.WeakSet()
_lost: list[_Lost] = []


def record_waiting(entry: Waiting) -> None:
    """Refuse steps over the entry's weights until ``record_over``."""
    _register_once()
    _waiting.add(entry)


def record_over(entry: Waiting) -> None:
    """The entry was computed, or given up."""
    _waiting.discard(entry)


def record_lost(entry: Waiting) -> None:
    """The entry's queue was freed: refuse the next step over its weights, which lacks this gradient for good."""
    _waiting.discard(entry)
    _lost.append(_Lost(entry.owner, entry.weights))


@functools.cache
def _register_once() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _waiting and not _lost:
        return
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    step = f"{type(optimizer).__name__}.step()"
    _lost[:] = [entry for entry in _lost if entry.weights()]
    for lost in _lost:
        if _serves_one_of(lost.weights(), params):
            _lost.remove(lost)
            raise RuntimeError(
                f"{step} without a delayed weight gradient of {lost.owner}, whose WgradQueue was let go before it was "
                f"drained: keep the queue, and drain() it before the step; zero_grad() begins this iteration anew"
            )
    for entry in _waiting:
        if _serves_one_of(entry.weights(), params):
            raise RuntimeError(
                f"{step} while a delayed weight gradient of {entry.owner} is pending: it would be missing here, and "
                f"be added to the next iteration's .grad; call backward_dw() or drain its WgradQueue before the step, "
                f"or clear() the queue to give it up"
            )


def _serves_one_of(weights: Iterable[Tensor], params: set[int]) -> bool:
    return any(id(weight) in params for weight in weights)
