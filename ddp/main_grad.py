"""The contract between whoever owns gradient memory and whoever computes weight gradients.

A *provider* (our wrappers, Megatron-core's, Megatron-FSDP's) gives each parameter a buffer, ``main_grad``. A *consumer*
(our modules, Transformer Engine's, any ``nn.Module``) either lets autograd leave a gradient in ``.grad`` for the
provider's hook, or writes ``main_grad`` itself and says so on the parameter. The attribute names are Megatron's and
Transformer Engine's, so either side can be theirs; this file is the only one here that reads or writes them.

    provider                                          consumer
    attach() --- main_grad, grad_added_to_main_grad --> WgradTarget.resolve()      (backward, before any GEMM)
    absorb_grad() <------- flag, .grad --------------- WgradTarget.deliver()     (GEMM into main_grad, flag, return)

``GradRecord`` is what our own provider knows of a parameter beyond the shared attributes. A foreign provider has none.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..kernels import wgrad_accumulate
from .delayed_wgrad import DelayedWgrad
from .grad_record import GradRecord
from .placeholder import placeholder
from .return_table import Returned, wgrad_outcome

__all__ = [
    "DelayedWgradModule",
    "FusedWgradModule",
    "WgradQueueLike",
    "WgradTarget",
    "absorb_grad",
    "attach",
    "check_delayable",
    "check_unattached",
    "detach",
    "forget_failed_backward",
    "has_main_grad",
    "is_delayed",
    "is_fusable",
    "listen_to_foreign_delays",
    "record_of",
]

_RECORD = "_maingrad_record"
_OVERWRITTEN_IN = "_maingrad_overwritten_in"


# ---- Provider: the record of one parameter, attaching it, and the hook's truth table. ----


def check_unattached(param: Tensor, name: str) -> None:
    """Raise ``ValueError`` for a parameter that has an accumulator already: it belongs to another provider."""
    if has_main_grad(param):
        raise ValueError(
            f"parameter '{name}' already has a main_grad: it belongs to another DistributedDataParallel or FSDP "
            f"wrapper; wrap a model once, or delete the old wrapper first"
        )


def attach(param: Tensor, record: GradRecord) -> None:
    """Give ``param`` its accumulator; ``check_unattached`` comes first, for all of a model's parameters."""
    param.main_grad = record.view  # type: ignore[attr-defined]
    param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    setattr(param, _RECORD, record)
    if record.shared:
        # Another owner may return uninitialised placeholders; those must be zeros, since what autograd sums with
        # them is a real gradient that the hook adds.
        param.zero_out_wgrad = True  # type: ignore[attr-defined]


def detach(param: Tensor) -> None:
    """Take back everything that ``attach`` gave."""
    for name in ("main_grad", "grad_added_to_main_grad", "zero_out_wgrad", _RECORD):
        param.__dict__.pop(name, None)


def record_of(param: Tensor) -> GradRecord | None:
    """Our provider's record of ``param``, or None where the provider is foreign or absent."""
    return getattr(param, _RECORD, None)


def has_main_grad(param: Tensor) -> bool:
    """Whether any provider has given ``param`` an accumulator (or promises one on demand)."""
    return getattr(param, "main_grad", None) is not None or hasattr(param, "__fsdp_param__")


def absorb_grad(param: Tensor, record: GradRecord) -> None:
    """The post-accumulate-grad hook's truth table: move ``.grad`` into ``main_grad``, clear it, clear the flag.

    ====================  =====  ==================================================================================
    ``.grad``             flag   action
    ====================  =====  ==================================================================================
    real                  False  added (or copied, where it is the first write of an exclusively owned parameter)
    None                  any    nothing to add
    real (tied use)       True   our module wrote and returned None, so that what is there is the other use's: added
    placeholder           True   a foreign module wrote: dropped, unless ``zero_out_wgrad`` promises zeros: added
    ====================  =====  ==================================================================================
    """
    grad = param.grad
    flag = getattr(param, "grad_added_to_main_grad", False)
    if flag:
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    ours, record.consumer_wrote = record.consumer_wrote, False
    if flag and not ours:
        _check_foreign_write(record)
        if not getattr(param, "zero_out_wgrad", False):
            param.grad = None
            return
    if grad is None:
        return
    param.grad = None
    if grad.requires_grad:
        raise RuntimeError(
            f"parameter '{record.name}': backward(create_graph=True) asks for a gradient with a graph of its own, "
            f"which main_grad cannot hold; use torch.autograd.grad(..., create_graph=True) instead"
        )
    if grad.layout is not torch.strided:
        grad = grad.to_dense()  # nn.Embedding(sparse=True)
    if record.open_for_write():
        record.view.copy_(grad)
    else:
        record.view.add_(grad)
    record.num_hook_writes += 1


def _check_foreign_write(record: GradRecord) -> None:
    if record.open_for_write():
        raise RuntimeError(
            f"parameter '{record.name}' was accumulated into by a module that is not ours, into memory that was not "
            f"zeroed because only our modules own it; register the parameter in that module as well, then wrap"
        )


def forget_failed_backward(param: Tensor) -> None:
    """Reset the flag that a backward left set because it failed before the hook."""
    if getattr(param, "grad_added_to_main_grad", False):
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]


# ---- Consumer: one use of one weight by one fused module. ----


class FusedWgradModule:
    """Mixin of modules that write weight gradients through a ``WgradTarget``."""

    def fused_wgrad_weights(self) -> Iterable[str]:
        """Names of the module's own parameters whose gradient this module never leaves to autograd."""
        raise NotImplementedError(f"{type(self).__name__} must name its fused weights")


class DelayedWgradModule(FusedWgradModule):
    """Mixin of leaf modules that can compute weight gradients after the main backward, in ``backward_dw``.

    The verbs and the mark are Transformer Engine's and Megatron's: a foreign provider finds the mark when it wraps, and
    registers a function that runs at the end of each ``backward_dw``.
    """

    wgrad_queue: Any = None
    """This module's own queue of delayed weight gradients; None: they are computed in backward."""

    def delayed_wgrad_weights(self) -> Iterable[str]:
        """Names of the module's own parameters whose gradient comes from ``backward_dw``."""
        raise NotImplementedError(f"{type(self).__name__} must name its delayed weights")

    def mark_delayed_weights(self) -> None:
        """Tell foreign providers; to be called when the parameters are made, and again when they are made anew."""
        for name in self.delayed_wgrad_weights():
            getattr(self, name).skip_backward_post_hook = True

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        module = super()._apply(fn, recurse)  # type: ignore[misc]  # nn.Module's; from meta it makes new parameters
        self.mark_delayed_weights()
        return module

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]  # nn.Module's; copies lose the mark, and are nobody's yet
        self.__dict__.pop("_after_backward_dw", None)
        self.mark_delayed_weights()

    def need_backward_dw(self) -> bool:
        """Whether delayed weight gradients of this module are pending."""
        return self.wgrad_queue is not None and len(self.wgrad_queue) > 0

    def backward_dw(self) -> None:
        """Compute the oldest microbatch's delayed weight gradients of this module; nothing where none is pending."""
        if not self.need_backward_dw():
            return
        self.wgrad_queue.drain_oldest_microbatch()
        for hook in self.__dict__.get("_after_backward_dw", ()):
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, fn: Callable[[], None]) -> None:
        """Have ``fn()`` called at the end of each ``backward_dw``."""
        self.__dict__.setdefault("_after_backward_dw", []).append(fn)


def is_delayed(param: Tensor) -> bool:
    """Whether some module, ours or not, has marked this parameter's gradient as final only after ``backward_dw``."""
    return getattr(param, "skip_backward_post_hook", False)


def check_delayable(weights: Iterable[Tensor], owner: str) -> None:
    """Raise ``RuntimeError`` where a foreign provider would reduce a weight's gradient before it exists."""
    for weight in weights:
        if has_main_grad(weight) and record_of(weight) is None:
            raise RuntimeError(
                f"{owner}: delayed_wgrad(queue) over a weight whose main_grad a foreign provider owns, which asked "
                f"at its wrap what is delayed; build the module with delay_wgrad_compute=True before wrapping, or "
                f"use maingrad.ddp.DistributedDataParallel"
            )


def listen_to_foreign_delays(param: Tensor, record: GradRecord, owners: Iterable[Any]) -> None:
    """Have modules that are not ours, and delay ``param``, report each ``backward_dw`` to its record."""
    if not is_delayed(param):
        return
    # The foreign module keeps the function, and outlives the wrapper: it must not keep the buckets.
    weak_param, weak_record = TensorWeakRef(param), weakref.ref(record)
    for module in owners:
        register = getattr(module, "register_wgrad_accumulation_and_reduce_hooks", None)
        if register is None or isinstance(module, FusedWgradModule):
            continue
        record.foreign_delayer = owner = type(module).__name__

        def computed(owner: str = owner) -> None:
            live, live_record = weak_param(), weak_record()
            if live is None or live_record is None:
                return
            mine = next((pending for pending in live_record.pending if pending.owner == owner), None)
            if mine is not None:
                absorb_grad(live, live_record)
                live_record.delayed_wgrad_done(mine)

        register(computed)


def is_fusable(weight: Tensor) -> bool:
    """Whether a module may write this weight's gradient itself.

    A weight that is computed (``torch.nn.utils.parametrize``) is not a parameter: its gradient flows on to those it is
    computed from, unless somebody gave it an accumulator of its own. Hooks that somebody registered on the weight
    (``weight.register_hook``) want to see the gradient. The GEMM takes no complex conjugate, so that
    complex weights stay with autograd.
    """
    if not (weight.requires_grad and weight.is_floating_point()) or weight._backward_hooks:
        return False
    return weight.is_leaf or has_main_grad(weight)


class WgradQueueLike(Protocol):
    """Where delayed weight gradients wait."""

    def put(self, entry: DelayedWgrad) -> None:
        """Append one."""


class WgradTarget:
    """Where the gradient of one weight goes, for one forward and backward of one module.

    It refers to the weight's Python object weakly, since the object that comes out of ``ctx.saved_tensors`` may be a
    copy without attributes (saved-tensor hooks, recompute, offload), and since an autograd graph must not keep a weight
    alive. In backward ``resolve`` runs before any GEMM, ``deliver`` after the input gradient.

    owner  the module, for errors
    fused  into ``main_grad``; otherwise (delayed weight gradients only) into ``.grad``
    queue  where the weight gradient waits for its turn; None: it is computed in backward
    """

    __slots__ = ("_fused", "_owner", "_queue", "_weight")

    def __init__(self, weight: Tensor, owner: str, *, fused: bool = True, queue: WgradQueueLike | None = None) -> None:
        self._weight = TensorWeakRef(weight)
        self._owner = owner
        self._fused = fused
        self._queue = queue

    def refers_to(self, weight: Tensor) -> bool:
        """Whether this is ``weight``'s target."""
        return self._weight() is weight

    def resolve(self) -> tuple[Tensor, Tensor | None]:
        """The weight's object, and its checked accumulator where this backward writes one.

        An accumulator has the weight's shape, is fp32 or of its dtype, and contiguous. Raises ``RuntimeError`` that
        names the module for a weight that is gone, a missing ``main_grad``, or an unusable one.
        """
        weight = self._alive_weight()
        if not self._fused:
            return weight, None
        if self._queue is None:
            return weight, self._accumulator(weight)
        if not has_main_grad(weight):
            raise self._no_provider()
        return weight, None  # a lazy provider's memory is taken when the delayed gradient is written, not before

    def deliver(self, weight: Tensor, main_grad: Tensor | None, dy: Tensor, x: Tensor, backward: int) -> Tensor | None:
        """In backward: ``main_grad (+)= dy^T x``, now or later, and the flag; returns what autograd must be handed.

        dy [T, N], x [T, K]; ``weight`` [N, K] and ``main_grad`` [N, K] come from ``resolve``. ``backward`` is the graph
        task, in reentrant recompute the one around it.
        """
        record = record_of(weight)
        outcome = wgrad_outcome(
            True, self._queue is not None, self._fused, hasattr(weight, "grad_added_to_main_grad"), record is not None
        )
        if self._queue is not None:
            self._queue.put(DelayedWgrad(self._write, dy, x, record, self._owner, backward, self.refers_to))
        elif main_grad is not None:
            self._write_into(weight, main_grad, dy, x, record, backward)
        if record is not None:
            record.consumer_wrote = True
        if outcome.sets_flag:
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if outcome.returned is Returned.PLACEHOLDER:
            return placeholder(weight)
        return None

    def _write(self, dy: Tensor, x: Tensor, backward: int, last: bool) -> None:
        """A delayed weight gradient's turn has come."""
        weight = self._alive_weight()
        if self._fused:
            self._write_into(weight, self._accumulator(weight), dy, x, record_of(weight), backward)
            return
        # What autograd would have done: add, never assign, and hand the sum of a microbatch to the provider at once.
        product = (dy.t() @ x).to(weight.dtype)
        weight.grad = product if weight.grad is None else weight.grad.add_(product)
        record = record_of(weight)
        if record is not None and last:
            absorb_grad(weight, record)

    def _write_into(
        self, weight: Tensor, main_grad: Tensor, dy: Tensor, x: Tensor, record: GradRecord | None, backward: int
    ) -> None:
        if record is not None:
            overwrite = record.open_for_write()
            record.num_fused_writes += 1
        else:
            overwrite = getattr(weight, "overwrite_main_grad", False) and _first_write_of(backward, weight)
        wgrad_accumulate(dy, x, main_grad, overwrite=overwrite)

    def _alive_weight(self) -> Tensor:
        weight: Tensor | None = self._weight()
        if weight is None:
            raise RuntimeError(f"{self._owner}: the weight was freed between forward and backward")
        return weight

    def _accumulator(self, weight: Tensor) -> Tensor:
        record = record_of(weight)
        main_grad: Tensor | None = getattr(weight, "main_grad", None)
        if record is not None and main_grad is record.view:
            return main_grad  # our own provider's: checked when it was attached
        if hasattr(weight, "__fsdp_param__"):
            main_grad = weight.get_main_grad()  # type: ignore[attr-defined]  # may allocate: only when it is written
            weight.main_grad = main_grad  # type: ignore[attr-defined]
        if main_grad is None:
            raise self._no_provider()
        if record is not None:
            raise RuntimeError(
                f"{self._owner}: weight.main_grad was replaced after wrapping, and what is written there would never "
                f"be reduced; leave the attribute to the wrapper of parameter '{record.name}'"
            )
        _check_accumulator(self._owner, weight, main_grad)
        return main_grad

    def _no_provider(self) -> RuntimeError:
        return RuntimeError(
            f"{self._owner}: fuse_wgrad_accumulation=True needs weight.main_grad, and nobody provided it; wrap the "
            f"model in maingrad.ddp.DistributedDataParallel, or build the module with fuse_wgrad_accumulation=False"
        )


def _first_write_of(backward: int, weight: Tensor) -> bool:
    """A foreign provider's ``overwrite_main_grad`` speaks of the first write only: a tied weight's second use adds."""
    first = getattr(weight, _OVERWRITTEN_IN, None) != backward
    setattr(weight, _OVERWRITTEN_IN, backward)
    return first


def _check_accumulator(owner: str, weight: Tensor, main_grad: Tensor) -> None:
    if (
        main_grad.shape != weight.shape
        or main_grad.device != weight.device
        or main_grad.dtype not in (torch.float32, weight.dtype)
        or not main_grad.is_contiguous()
    ):
        raise RuntimeError(
            f"{owner}: main_grad must be contiguous, of the weight's shape {tuple(weight.shape)} on {weight.device}, "
            f"fp32 or {weight.dtype}; got shape {tuple(main_grad.shape)}, stride {tuple(main_grad.stride())}, "
            f"{main_grad.dtype} on {main_grad.device}"
        )
