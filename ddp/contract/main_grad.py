"""The contract between whoever owns gradient memory and whoever computes weight gradients.

A *provider* (our wrappers, Megatron-core's, Megatron-FSDP's) gives each parameter a buffer, ``main_grad``. A *consumer*
(our modules, Transformer Engine's, any ``nn.Module``) either lets autograd leave a gradient in ``.grad`` for the
provider's hook, or writes ``main_grad`` itself and says so on the parameter. The attribute names are Megatron's and
Transformer Engine's, so either side can be theirs; this file is the only one here that reads or writes them.

    provider                                          consumer
    attach() --- main_grad, grad_added_to_main_grad --> accumulator_of()       (backward, before any GEMM)
                                                        open_for_write()       (does this GEMM overwrite?)
    absorb_grad() <------- flag, .grad ---------------- hand_over()            (after it: the flag, what is returned)
                  <------- .grad ---------------------- backward_dw()          (later, where a foreign module delays)

``GradRecord`` is what our own provider knows of a parameter beyond the shared attributes. A foreign provider has none.
The consumer's side is put together in ``wgrad_target.py``, and for modules in ``wgrad_module.py``.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..torch_internals import has_tensor_hooks
from .placeholder import placeholder
from .record import GradRecord, PendingWgrad
from .return_table import Returned, wgrad_outcome

__all__ = [
    "absorb_grad",
    "accumulator_of",
    "add_grad",
    "add_to_grad",
    "attach",
    "attach_lazily",
    "check_delayable",
    "check_provided",
    "check_unattached",
    "detach",
    "forget_failed_backward",
    "hand_over",
    "hand_over_sum",
    "has_main_grad",
    "is_delayed",
    "is_fusable",
    "mark_delayed",
    "open_for_write",
    "record_of",
    "take_grad_of_backward",
    "take_grad_of_backward_dw",
]

_RECORD = "_maingrad_record"
_OVERWRITTEN_IN = "_maingrad_overwritten_in"
_former: "WeakIdKeyDictionary" = WeakIdKeyDictionary()
"""Names that parameters had in wrappers that are gone, for errors. Parameters are given back plain, without a mark."""


# ---- Provider: the record of one parameter, attaching it, and the hook's truth table. ----


def check_unattached(param: Tensor, name: str) -> None:
    """Raise ``ValueError`` for a parameter that has an accumulator already: it belongs to another provider."""
    if has_main_grad(param):
        raise ValueError(
            f"parameter '{name}' already has a main_grad: it belongs to another DistributedDataParallel or FSDP "
            f"wrapper; wrap a model once, or call the old wrapper's unwrap() first, or let it go"
        )


def attach(param: Tensor, record: GradRecord) -> None:
    """Give ``param`` its accumulator; ``check_unattached`` comes first, for all of a model's parameters."""
    param.main_grad = record.view  # type: ignore[attr-defined]
    param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    setattr(param, _RECORD, record)
    _former.pop(param, None)
    if record.shared:
        # Another owner may return uninitialised placeholders; those must be zeros, since what autograd sums with
        # them is a real gradient that the hook adds.
        param.zero_out_wgrad = True  # type: ignore[attr-defined]


def attach_lazily(param: Tensor, record: GradRecord) -> None:
    """The same for an accumulator that has memory only from its first write to its reduction (``record.make_room``).

    ``get_main_grad`` is for modules that are not ours: what they are handed holds zeros, or what this round has summed
    so far, since they may add to it any number of times.
    """

    def get_main_grad() -> Tensor:
        if record.open_for_write():
            record.view.zero_()
        return record.view

    param.__fsdp_param__ = True  # type: ignore[attr-defined]
    param.get_main_grad = get_main_grad  # type: ignore[attr-defined]
    attach(param, record)
    del param.main_grad  # type: ignore[attr-defined]  # nobody may write there unasked


def detach(param: Tensor, gone: str | None = None) -> None:
    """Take back everything that ``attach`` or ``attach_lazily`` gave.

    gone  the parameter's name in the user's wrapper, which is gone: for the error of a backward that comes too late
    """
    if gone is not None:
        _former[param] = gone
    for name in ("main_grad", "__fsdp_param__", "get_main_grad", "grad_added_to_main_grad", "zero_out_wgrad", _RECORD):
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


def take_grad_of_backward(param: Tensor, record: GradRecord) -> None:
    """The post-accumulate-grad hook: ``absorb_grad``, or, where a module of others delays, what can be done already.

    What such a module's backward has left in ``.grad`` may be the gradient (biases under fp8, and of activations), or
    memory that its ``backward_dw`` has yet to fill and will assign (Transformer Engine's ``GroupedLinear``). Only
    ``backward_dw`` tells them apart, by looking at ``.grad``: so ``.grad`` stays until then. What another owner of a
    tied weight has added is taken at once, since ``backward_dw`` would assign over it; so is a placeholder.
    """
    if record.foreign_delayer is None:
        absorb_grad(param, record)
        return
    at_once = record.shared or getattr(param, "grad_added_to_main_grad", False)
    if at_once:
        absorb_grad(param, record)
    record.pending.append(PendingWgrad(record.foreign_delayer, part_in_grad=not at_once and param.grad is not None))


def take_grad_of_backward_dw(param: Tensor, record: GradRecord, owner: str) -> None:
    """A module of others, ``owner``, has run its ``backward_dw`` for its oldest microbatch.

    Raises ``RuntimeError`` where backward has announced no such gradient: the bucket may have been reduced without it.
    """
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
        # Theirs have been added with this one's. Their backward_dw must not find None, or it assigns what it lacks.
        param.grad = torch.zeros_like(param)
    record.delayed_wgrad_done(mine)


def add_grad(param: Tensor, grad: Tensor) -> None:
    """Add ``grad`` [shape of ``param``] to what this iteration has brought a wrapped parameter, as a backward would.

    For gradients that autograd did not bring: projected ones (PCGrad), those of ``torch.autograd.grad``, noise. It is
    this rank's, and is reduced with the rest. Call it before the iteration's last backward; where all gradients come
    so, before ``finish_grad_sync()``.

    Raises ``ValueError`` for a parameter that no ``DistributedDataParallel`` has wrapped, or another shape;
    ``RuntimeError`` once the parameter's bucket was launched.
    """
    record = record_of(param)
    if record is None or record.make_room is not None:
        raise ValueError("add_grad: this parameter is not wrapped in maingrad.ddp.DistributedDataParallel")
    if grad.shape != param.shape:
        raise ValueError(f"add_grad: parameter '{record.name}' is {tuple(param.shape)}, and grad {tuple(grad.shape)}")
    with torch.no_grad():
        if record.open_for_write():
            record.view.copy_(grad)
        else:
            record.view.add_(grad)


def _check_foreign_write(record: GradRecord) -> None:
    if record.open_for_write():
        raise RuntimeError(
            f"parameter '{record.name}' was accumulated into by a module that is not ours, into memory that was not "
            f"zeroed because only our modules own it; register the parameter in that module as well, then wrap"
        )


def forget_failed_backward(param: Tensor) -> None:
    """Reset what a backward left set because it failed before the hook, or its delayed part was given up."""
    if getattr(param, "grad_added_to_main_grad", False):
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    record = record_of(param)
    if record is not None:
        record.consumer_wrote = record.sum_in_grad = False


# ---- Consumer: what a module asks of a weight and tells about it. ----


def mark_delayed(param: Tensor) -> None:
    """Say that this parameter's gradient is final only after ``backward_dw``: foreign providers ask when they wrap."""
    param.skip_backward_post_hook = True  # type: ignore[attr-defined]


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


def is_fusable(weight: Tensor) -> bool:
    """Whether a module may write this weight's gradient itself.

    A weight that is computed (``torch.nn.utils.parametrize``) is not a parameter: its gradient flows on to those it is
    computed from, unless somebody gave it an accumulator of its own. Hooks that somebody registered on the weight
    (``weight.register_hook``) want to see the gradient. The GEMM takes no complex conjugate, so that
    complex weights stay with autograd.
    """
    if not (weight.requires_grad and weight.is_floating_point()) or has_tensor_hooks(weight):
        return False
    return weight.is_leaf or has_main_grad(weight)


def check_provided(weight: Tensor, owner: str) -> None:
    """Raise ``RuntimeError`` that names the module for a weight without ``main_grad``, or the promise of one."""
    if not has_main_grad(weight):
        raise _no_provider(weight, owner)


def accumulator_of(weight: Tensor, owner: str, *, rows_apart: bool = False) -> Tensor:
    """The checked ``main_grad`` of ``weight``; a lazy provider allocates it now.

    It has the weight's shape, is fp32 or of its dtype, and contiguous; with ``rows_apart`` its columns are adjacent and
    the other strides leave no two elements in one place. Raises ``RuntimeError`` that names the module, the shape and
    the stride.
    """
    record = record_of(weight)
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if record is not None and (main_grad is record.view or record.make_room is not None):
        return record.view  # our own: checked when it was attached; a lazy one has memory when it is written
    if hasattr(weight, "__fsdp_param__"):
        main_grad = weight.get_main_grad()  # type: ignore[attr-defined]  # may allocate: only when it is written
        weight.main_grad = main_grad  # type: ignore[attr-defined]
    if main_grad is None:
        raise _no_provider(weight, owner)
    if record is not None:
        raise RuntimeError(
            f"{owner}: weight.main_grad was replaced after wrapping, and what is written there would never be reduced; "
            f"leave the attribute to the wrapper of parameter '{record.name}'"
        )
    _check_accumulator(owner, weight, main_grad, rows_apart)
    return main_grad


def open_for_write(weight: Tensor, record: GradRecord | None, backward: int) -> bool:
    """To be called once before each write: whether it overwrites (beta = 0).

    Our own record knows; a foreign provider's ``overwrite_main_grad`` speaks of the first write of a backward only.
    """
    if record is not None:
        overwrite = record.open_for_write()
        record.num_fused_writes += 1
        return overwrite
    return getattr(weight, "overwrite_main_grad", False) and _first_write_of(backward, weight)


def hand_over(weight: Tensor, record: GradRecord | None, *, delayed: bool, fused: bool) -> Tensor | None:
    """In backward, when the gradient is written or queued: set the flag; returns what autograd must be handed."""
    has_flag = hasattr(weight, "grad_added_to_main_grad")
    outcome = wgrad_outcome(True, delayed, fused, has_flag, record is not None)
    if record is not None:
        record.consumer_wrote = True
    if outcome.sets_flag:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if outcome.returned is Returned.PLACEHOLDER:
        return placeholder(weight)
    return None


def add_to_grad(weight: Tensor, gradient: Tensor, record: GradRecord | None) -> None:
    """What autograd would have done with a delayed gradient that is not fused: add, never assign."""
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
    if record is not None:
        record.sum_in_grad = True


def hand_over_sum(weight: Tensor, record: GradRecord) -> None:
    """The last delayed gradient of a microbatch is in, fused or not: what others have left in ``.grad`` goes on."""
    record.sum_in_grad = False
    absorb_grad(weight, record)


def _no_provider(weight: Tensor, owner: str) -> RuntimeError:
    former: str | None = _former.get(weight)
    missing = f"{owner}: fuse_wgrad_accumulation=True needs weight.main_grad"
    if former is not None:
        return RuntimeError(
            f"{missing}, and the wrapper that provided it for parameter '{former}' is gone (let go, or unwrap()); "
            f"keep the wrapper until the last backward of its forwards is over, wrap the model again, or have autograd "
            f"deliver its gradients: maingrad.te_integration.unconvert(model) before the forward"
        )
    return RuntimeError(
        f"{missing}, and nobody provided it; wrap the model in maingrad.ddp.DistributedDataParallel, or have autograd "
        f"deliver the gradient: build the module with fuse_wgrad_accumulation=False, or, as after convert_linears, "
        f"call maingrad.te_integration.unconvert(model)"
    )


def _first_write_of(backward: int, weight: Tensor) -> bool:
    """A foreign provider's ``overwrite_main_grad`` speaks of the first write only: a tied weight's second use adds."""
    first = getattr(weight, _OVERWRITTEN_IN, None) != backward
    setattr(weight, _OVERWRITTEN_IN, backward)
    return first


def _check_accumulator(owner: str, weight: Tensor, main_grad: Tensor, rows_apart: bool) -> None:
    if (
        main_grad.shape != weight.shape
        or main_grad.device != weight.device
        or main_grad.dtype not in (torch.float32, weight.dtype)
        or not (_rows_fit(main_grad) if rows_apart else main_grad.is_contiguous())
    ):
        raise RuntimeError(
            f"{owner}: main_grad must {'have adjacent columns and be' if rows_apart else 'be contiguous,'} of the "
            f"weight's shape {tuple(weight.shape)} on {weight.device}, fp32 or {weight.dtype}; got shape "
            f"{tuple(main_grad.shape)}, stride {tuple(main_grad.stride())}, {main_grad.dtype} on {main_grad.device}"
        )


def _rows_fit(main_grad: Tensor) -> bool:
    """Whether columns are adjacent and no two rows overlap."""
    if main_grad.is_contiguous():
        return True
    end = 1
    for stride, size in sorted(zip(main_grad.stride(), main_grad.shape, strict=True)):
        if size > 1 and stride < end:
            return False
        end = max(end, stride * size)
    return main_grad.stride(-1) == 1
