"""torch's own wrappers: ``DistributedDataParallel`` is refused where it would do harm, FSDP2's weights are recognised.

Around parameters that this library reduces: torch's constructor copies the first rank's parameters, shards too, to all
ranks, and its backward reduces ``.grad``, where our gradients are not. The owner of the parameters refuses in
``named_parameters``, which torch's constructor calls; a wrapper that got past it is refused in the first forward.

Around modules that delay weight gradients: torch reduces ``.grad`` in backward, before the delayed gradient is there.

``TorchShardedTarget`` adds gradients of weights that ``torch.distributed.fsdp.fully_shard`` has gathered.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..torch_internals import NO_BACKWARD, current_backward
from ..torch_internals.distributed import accumulated_by_fsdp2, active_torch_ddp, gathered_by_fsdp2, params_of_torch_ddp
from .main_grad import Place, WgradProduct, WgradTarget

__all__ = [
    "TorchShardedTarget",
    "TorchShards",
    "check_none_inside",
    "check_not_collected",
    "check_not_inside",
    "in_torch_ddp",
    "is_sharded_by_torch",
    "record_without_grad",
    "refuse_delay",
    "refuse_delay_in_recompute",
]

_MODULE = TorchDDP.__module__
_NUM_FRAMES = 3
"""Frames of torch's constructor between a call and ``self``: a method, and before Python 3.12 a comprehension."""


def in_torch_ddp() -> bool:
    """Whether a forward of a torch wrapper runs now."""
    return active_torch_ddp() is not None


def check_not_collected(params: Iterable[Tensor], what: str, num_callers: int = 1) -> None:
    """Called by ``named_parameters``: raise ``ValueError`` where torch's constructor is the caller.

    params       the parameters that are reduced already; parameters that torch's wrapper ignores do no harm
    what         their owner, for the error
    num_callers  number of calls between ``named_parameters`` and this function
    """
    if torch.compiler.is_compiling():
        return
    caller = sys._getframe(1 + num_callers)
    if caller.f_globals.get("__name__") == _MODULE:
        wrapper = _wrapper_of(caller)
        if wrapper is not None and _takes_one_of(wrapper, params):
            raise ValueError(_why(what))


def check_not_inside(params: Iterable[Tensor], what: str) -> None:
    """Called in forward: raise ``RuntimeError`` inside a torch wrapper that reduces one of ``params``."""
    wrapper = active_torch_ddp()
    if wrapper is not None and _takes_one_of(wrapper, params):
        raise RuntimeError(_why(what))


def check_none_inside(module: nn.Module) -> None:
    """Raise ``ValueError`` for a model that is, or contains, a torch wrapper."""
    for name, inside in module.named_modules():
        if isinstance(inside, TorchDDP):
            place = f"module '{name}'" if name else "the module"
            raise ValueError(
                f"{place} is wrapped in torch.nn.parallel.DistributedDataParallel already, and gradients would be "
                f"reduced twice: wrap what it wraps, its .module"
            )


def refuse_delay(owner: str, weight: Tensor) -> None:
    """Raise ``RuntimeError`` inside a torch wrapper that reduces ``weight``, whose gradient is delayed."""
    wrapper = active_torch_ddp()
    if wrapper is not None and _takes_one_of(wrapper, [weight]):
        raise _late(owner)


_without_grad: "weakref.WeakKeyDictionary[object, weakref.ref[TorchDDP]]" = weakref.WeakKeyDictionary()
"""Modules that delay, and whose last forward inside a torch wrapper ran without grad mode. Reentrant checkpointing runs
its first forward so; the recompute runs in backward, where no wrapper's forward is active."""


def record_without_grad(module: object, weights: Iterable[Tensor]) -> None:
    """Called by a module that delays the gradients of ``weights``, in a forward without grad mode."""
    wrapper = active_torch_ddp()
    if wrapper is not None and not torch.compiler.is_compiling() and _takes_one_of(wrapper, weights):
        _without_grad[module] = weakref.ref(wrapper)


def refuse_delay_in_recompute(module: object, owner: Callable[[], str]) -> None:
    """Called by a module that delays, in a forward with grad mode: ``refuse_delay`` for a reentrant recompute."""
    if _without_grad and current_backward() != NO_BACKWARD:
        wrapper = _without_grad.get(module)
        if wrapper is not None and wrapper() is not None:
            raise _late(owner())


def _late(owner: str) -> RuntimeError:
    return RuntimeError(
        f"{owner}: a delayed weight gradient under torch.nn.parallel.DistributedDataParallel would come after it has "
        f"reduced .grad, and stay local; use maingrad.ddp.DistributedDataParallel, or do not delay"
    )


def _wrapper_of(frame: FrameType | None) -> TorchDDP | None:
    for _ in range(_NUM_FRAMES):
        if frame is None:
            break
        found: Any = frame.f_locals.get("self")
        if isinstance(found, TorchDDP):
            return found
        frame = frame.f_back
    return None


def _takes_one_of(wrapper: TorchDDP, params: Iterable[Tensor]) -> bool:
    taken = params_of_torch_ddp(wrapper)
    # None: the constructor still collects them, from the outermost module.
    return taken is None or not set(map(id, taken)).isdisjoint(map(id, params))


def _why(what: str) -> str:
    return (
        f"torch.nn.parallel.DistributedDataParallel around {what}, which has its ranks already: torch's would copy the "
        f"first rank's parameters over all others', and find no gradient in .grad; leave it away. Where accelerate or "
        f"a trainer adds it under torchrun, do not hand this model over to be prepared"
    )


# ---- FSDP2. It gives a module plain parameters for its forward and backward. When backward has passed the module's
# ---- inputs, FSDP2 takes the parameters' ``.grad`` and frees the parameters. Under
# ---- ``set_requires_gradient_sync(False)`` FSDP2 keeps the gradient until the next microbatch, in ``.grad`` or in a
# ---- tensor of ``reduce_dtype``. That tensor is an accumulator, and a fused weight gradient is added to it. A gradient
# ---- that is added after FSDP2 took ``.grad`` would wait for the next iteration; so weight gradients cannot be
# ---- delayed.

_MARK = "_maingrad_torch_shards"


class TorchShards:
    """FSDP2's record of one gathered weight, held weakly: FSDP2 owns record and weight."""

    def __init__(self, param: Any) -> None:
        self._param = weakref.ref(param)

    @classmethod
    def of(cls, weight: Tensor) -> "TorchShards | None":
        """The record of ``weight``; None where FSDP2 did not make that weight.

        The search goes over all sharded models and marks every weight that is gathered now. So one search serves a
        whole unit.
        """
        if not hasattr(weight, _MARK):
            for param, gathered in gathered_by_fsdp2():
                if not hasattr(gathered, _MARK):
                    setattr(gathered, _MARK, cls(param))
        found: TorchShards | None = getattr(weight, _MARK, None)
        return found

    def accumulator(self, weight: Tensor) -> Tensor | None:
        """The tensor that this backward's gradient is added to: contiguous, ``weight``'s shape, fp32 or its dtype.

        None, and then autograd delivers the gradient: in the first microbatch, where each microbatch is reduced on its
        own, and where FSDP2 sums in another dtype.
        """
        found = accumulated_by_fsdp2(self._param())
        if found is None:
            found = weight.grad
        # Under tensor parallelism the weight and its gradient are DTensors, which no GEMM here writes.
        fits = type(found) is Tensor and found.dtype in (torch.float32, weight.dtype) and found.is_contiguous()
        return found if fits else None

    @staticmethod
    def refuse_delay(owner: str) -> RuntimeError:
        """The error for a weight gradient that is delayed under FSDP2."""
        return RuntimeError(
            f"{owner}: a delayed weight gradient under torch.distributed.fsdp.fully_shard, which reduces gradients in "
            f"backward: what backward_dw() or drain() adds later would be reduced in the next iteration, or never; "
            f"build the module without delay_wgrad_compute=True and run its forward outside delayed_wgrad(queue), or "
            f"use maingrad.fsdp.fully_shard"
        )


class TorchShardedTarget(WgradTarget):
    """The accumulators are FSDP2's.

    shards  of each weight; None for weights that FSDP2 did not make
    """

    __slots__ = ("_shards",)

    def __init__(
        self,
        weights: Sequence[Tensor],
        names: Sequence[str],
        wgrad: WgradProduct,
        owner: str,
        shards: Sequence[TorchShards | None],
    ) -> None:
        super().__init__(weights, names, wgrad, owner)
        self._shards = shards

    def place(self, number: int) -> Place | None:
        """As ``WgradTarget``'s, in FSDP2's accumulator."""
        shards = self._shards[number]
        if shards is None:
            return super().place(number)
        weight = self.alive(number)
        accumulator = shards.accumulator(weight)
        return None if accumulator is None else Place(weight, accumulator)


def is_sharded_by_torch(param: Tensor) -> bool:
    """Whether ``param`` is a DTensor, or a weight that FSDP2 has gathered from one. For error messages."""
    return hasattr(param, "to_local") or TorchShards.of(param) is not None
