"""Mixins by which modules name their fused and delayed weights, and how providers hear of foreign ``backward_dw``."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..torch_internals import weak_method
from .main_grad import absorb_grad, is_delayed, mark_delayed, record_of
from .record import GradRecord
from .torch_wrappers import is_sharded_by_torch

__all__ = [
    "DelayedWgradModule",
    "FusedWgradModule",
    "forms_of",
    "has_shard",
    "is_sharded",
    "listen_to_foreign_delays",
    "record_shard",
    "take_grad_of_backward_dw",
]

_SHARD = "_maingrad_shard"


class FusedWgradModule:
    """Mixin of modules that deliver weight gradients through a ``WgradTarget``."""

    matrix_rows: Sequence[int] | None = None
    """Rows of each matrix, where the weight is several, one below the other: Muon orthogonalises each apart."""
    slices: Literal["local", "shown", "refused"] = "refused"
    """What becomes of a weight that torch's tensor parallelism has cut (``ddp/plan/tensor_parallel``).

    "local"    the module multiplies local tensors, by ``multiply_slice``
    "shown"    its forward sees DTensors, and autograd delivers the weight gradient
    "refused"  wrappers raise
    """

    def fused_wgrad_weights(self) -> Iterable[str]:
        """Names of the module's own parameters whose gradient this module writes to ``main_grad``."""
        raise NotImplementedError(f"{type(self).__name__} must name its fused weights")


class DelayedWgradModule(FusedWgradModule):
    """Mixin of leaf modules that can compute weight gradients after the main backward, in ``backward_dw``.

    Method names and mark are those of Transformer Engine and Megatron: a foreign provider reads the mark when it wraps,
    and registers a function that runs at the end of each ``backward_dw``.
    """

    wgrad_queue: Any = None
    """This module's own queue of delayed weight gradients. None: weight gradients are computed in backward."""

    def delayed_wgrad_weights(self) -> Iterable[str]:
        """Names of the module's own parameters whose gradient ``backward_dw`` computes."""
        raise NotImplementedError(f"{type(self).__name__} must name its delayed weights")

    def mark_delayed_weights(self) -> None:
        """Set the mark for foreign providers. Call it whenever the parameters are made."""
        for name in self.delayed_wgrad_weights():
            mark_delayed(getattr(self, name))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        module = super()._apply(fn, recurse)  # type: ignore[misc]  # nn.Module's; to_empty makes new parameters
        self.mark_delayed_weights()
        return module

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]  # nn.Module's; a copied parameter has no mark
        self.__dict__.pop("_after_backward_dw", None)
        self.mark_delayed_weights()

    def need_backward_dw(self) -> bool:
        """Whether delayed weight gradients of this module are pending."""
        return self.wgrad_queue is not None and len(self.wgrad_queue) > 0

    def backward_dw(self) -> None:
        """Compute this module's delayed weight gradients of the oldest microbatch. No-op where none is pending."""
        if not self.need_backward_dw():
            return
        self.wgrad_queue.drain_oldest_microbatch()
        for hook in self.__dict__.get("_after_backward_dw", ()):
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, fn: Callable[[], None]) -> None:
        """Call ``fn()`` at the end of each ``backward_dw``."""
        self.__dict__.setdefault("_after_backward_dw", []).append(fn)


def record_shard(whole: Tensor, shard: Tensor) -> None:
    """Remember that outside of forwards modules register ``shard`` in place of the parameter ``whole``."""
    setattr(whole, _SHARD, TensorWeakRef(shard))


def has_shard(param: Tensor) -> bool:
    """Whether ``param`` is the whole form of a sharded parameter."""
    return hasattr(param, _SHARD)


def forms_of(weight: Tensor) -> Iterator[Tensor]:
    """The parameters that a module may have registered for a product's weight: ``weight``, and its shard."""
    yield weight
    reference = getattr(weight, _SHARD, None)
    shard = None if reference is None else reference()
    if shard is not None:
        yield shard


def is_sharded(weight: Tensor) -> bool:
    """Whether ``maingrad.fsdp`` or torch has sharded the weight."""
    return any(hasattr(form, "shard") for form in forms_of(weight)) or is_sharded_by_torch(weight)


def listen_to_foreign_delays(param: Tensor, record: GradRecord, owners: Iterable[tuple[Any, str]]) -> None:
    """Have foreign modules that delay ``param`` report each ``backward_dw`` to ``record``.

    owners  the modules that register ``param``, and the names by which they do
    """
    for module, local in owners:
        register = getattr(module, "register_wgrad_accumulation_and_reduce_hooks", None)
        if register is None or isinstance(module, FusedWgradModule):
            continue
        owner = type(module).__name__
        # A foreign module keeps the function and may outlive the wrapper: the function must not keep the buckets alive.
        if is_delayed(param):
            record.foreign_delayer = owner
            register(partial(weak_method(take_grad_of_backward_dw, param, record), owner))
        elif "weight" in local and param.dim() > 1:  # not of a norm: a module that delays at all delays these
            register(partial(weak_method(_refuse_without_mark, param, record), f"{owner}.{local}"))


def _refuse_without_mark(param: Tensor, record: GradRecord, weight: str) -> None:
    """A foreign module has computed a gradient that nobody has waited for."""
    if record_of(param) is not record:
        return
    raise RuntimeError(
        f"parameter '{record.name}': backward_dw() has computed the gradient of {weight}, which was taken for complete "
        f"after backward: the module marks weights and biases that it makes, and copies of these, and parameters that "
        f"were put into it later, have no mark; set param.skip_backward_post_hook = True on its weights and biases "
        f"before the model is wrapped"
    )


def take_grad_of_backward_dw(param: Tensor, record: GradRecord, owner: str) -> None:
    """The foreign module ``owner`` has run its ``backward_dw`` for its oldest microbatch.

    Raises ``RuntimeError`` where no backward has announced this gradient: its bucket may be reduced already.
    """
    if record_of(param) is not record:
        return  # of a wrapper whose place another one has taken
    mine = next((pending for pending in record.pending if pending.owner == owner), None)
    if mine is None:
        raise RuntimeError(
            f"parameter '{record.name}': {owner}.backward_dw() ran more often than backwards of this parameter, and "
            f"gradients count once a backward: a module of others that delays is used once in a forward, its weights "
            f"are not tied to another that delays, and torch.autograd.grad is not called through it; build it with "
            f"delay_wgrad_compute=False"
        )
    absorb_grad(param, record)
    if any(pending.part_in_grad for pending in record.pending if pending is not mine):
        # ``absorb_grad`` took the parts of later microbatches too. Their backward_dw must find a tensor to add to: for
        # None it would assign its memory without these parts.
        param.grad = torch.zeros_like(param)
    record.delayed_wgrad_done(mine)
