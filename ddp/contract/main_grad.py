"""The contract between the provider, who owns gradient memory, and the consumer, who computes weight gradients.

A *provider* (our wrappers, Megatron-core's, Megatron-FSDP's) gives each parameter an accumulator, ``main_grad``. A
*consumer* (our modules, Transformer Engine's, any ``nn.Module``) does one of two things: autograd leaves the gradient
in ``.grad`` and the provider's hook moves it, or the consumer adds to ``main_grad`` itself and sets a flag on the
parameter. The attribute names are Megatron's and Transformer Engine's, so either side can be theirs. No other file of
this library reads or writes these attributes.

    provider                                          consumer
    attach() --- main_grad, grad_added_to_main_grad --> accumulator_of()       (backward, before any GEMM)
                                                        open_for_write()       (does this GEMM overwrite?)
    absorb_grad() <------- flag, .grad ---------------- hand_over()            (after the GEMM: flag, return value)
                  <------- .grad ---------------------- backward_dw()          (later, where a foreign module delays)

A ``GradRecord`` holds what our provider knows of a parameter beyond these. A foreign provider has no records.
``target.py`` calls the consumer's functions in the right order; ``module.py`` is for modules.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..torch_internals import has_tensor_hooks
from .record import GradRecord, PendingWgrad, check_accumulator

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
    "former_name",
    "hand_over",
    "hand_over_sum",
    "has_main_grad",
    "is_delayed",
    "is_foreign",
    "is_fusable",
    "is_lazy",
    "mark_delayed",
    "open_for_write",
    "placeholder",
    "record_of",
    "take_grad_of_backward",
    "take_grad_of_backward_dw",
]

_RECORD = "_maingrad_record"
_OVERWRITTEN_IN = "_maingrad_overwritten_in"
_former: "WeakIdKeyDictionary" = WeakIdKeyDictionary()  # names in wrappers that are gone, for errors


# ---- Provider: attaching records to parameters, and the hook's truth table. ----


def check_unattached(param: Tensor, name: str) -> None:
    """Raise ``ValueError`` for a parameter that has an accumulator already, from another provider."""
    if has_main_grad(param):
        raise ValueError(
            f"parameter '{name}' already has a main_grad: it belongs to another DistributedDataParallel or FSDP "
            f"wrapper; wrap a model once, or call the old wrapper's unwrap() first, or let it go"
        )


def attach(param: Tensor, record: GradRecord) -> None:
    """Give ``param`` its accumulator. Raises ``ValueError`` where it has one, of this or another provider.

    Call ``check_unattached`` for all of a model's parameters before the first is attached.
    """
    check_unattached(param, record.name)
    # Step 1 of docs/by_hand.py: what consumers of the contract find on the parameter.
    param.main_grad = record.view  # type: ignore[attr-defined]
    param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    setattr(param, _RECORD, record)
    _former.pop(param, None)
    if record.shared:
        # Autograd sums the placeholder of one owning module with the real gradient of the other, and the hook adds
        # the sum: placeholders must be zeros.
        param.zero_out_wgrad = True  # type: ignore[attr-defined]


def attach_lazily(param: Tensor, record: GradRecord, main_grad: Tensor | None = None) -> None:
    """``attach`` for an accumulator that has memory only from its first write to its reduction (``record.make_room``).

    Foreign modules add to ``param.get_main_grad()``: it holds zeros, or the sum of this iteration so far.

    main_grad  what programs find in ``param.main_grad``, where no write looks; None: no such attribute
    """

    def get_main_grad() -> Tensor:
        if record.open_for_write():
            record.view.zero_()
        return record.view

    attach(param, record)
    del param.main_grad  # type: ignore[attr-defined]  # every write goes through get_main_grad or the record
    if main_grad is not None:
        param.main_grad = main_grad  # type: ignore[attr-defined]
    param.__fsdp_param__ = True  # type: ignore[attr-defined]
    param.get_main_grad = get_main_grad  # type: ignore[attr-defined]


def detach(param: Tensor, gone: str | None = None) -> None:
    """Remove every attribute that ``attach`` or ``attach_lazily`` set.

    gone  the parameter's name in the wrapper, if the wrapper is gone: for the error of a backward that comes too late
    """
    if gone is not None:
        _former[param] = gone
    for name in ("main_grad", "__fsdp_param__", "get_main_grad", "grad_added_to_main_grad", "zero_out_wgrad", _RECORD):
        param.__dict__.pop(name, None)


def former_name(param: Tensor) -> str | None:
    """The parameter's name in a wrapper of ours that is gone; None where there was none, or is another one now."""
    name: str | None = _former.get(param)
    return name


def record_of(param: Tensor) -> GradRecord | None:
    """Our provider's record of ``param``. None under a foreign provider, and without one."""
    return getattr(param, _RECORD, None)


def has_main_grad(param: Tensor) -> bool:
    """Whether any provider gave ``param`` an accumulator, or will allocate one in ``get_main_grad``."""
    return getattr(param, "main_grad", None) is not None or hasattr(param, "__fsdp_param__")


def is_foreign(param: Tensor) -> bool:
    """Whether a provider that is not ours gave ``param`` an accumulator."""
    return record_of(param) is None and has_main_grad(param)


def is_lazy(param: Tensor) -> bool:
    """Whether a provider, ours or not, gives ``param`` an accumulator for some time only, so that its place changes."""
    return hasattr(param, "__fsdp_param__")


def absorb_grad(param: Tensor, record: GradRecord) -> None:
    """The truth table of the post-accumulate-grad hook: add ``.grad`` to ``main_grad``, clear ``.grad`` and the flag.

    ====================  =====  =================================================================================
    ``.grad``             flag   action
    ====================  =====  =================================================================================
    a gradient            False  added; copied where it is the first write and ``first_write_overwrites``
    None                  any    nothing to add
    a gradient            True   our module wrote and returned None: the gradient is of another use of a tied weight,
                                 and is added
    a placeholder         True   a foreign module wrote: dropped; under ``zero_out_wgrad`` (it holds zeros, and perhaps
                                 a gradient of another use) added
    ====================  =====  =================================================================================
    """
    grad = param.grad
    # Step 4 of docs/by_hand.py: with the flag, the gradient is in main_grad already.
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
    try:
        _check_without_graph(record, grad)
        _add(record, grad)
    finally:
        param.grad = None  # after the write: where every ``.grad`` is None, a write begins a new iteration


def _check_without_graph(record: GradRecord, grad: Tensor) -> None:
    if grad.requires_grad:
        raise RuntimeError(
            f"parameter '{record.name}': backward(create_graph=True) asks for a gradient with a graph of its own, "
            f"which main_grad cannot hold; use torch.autograd.grad(..., create_graph=True) instead"
        )


def _add(record: GradRecord, grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        grad = grad.to_dense()  # nn.Embedding(sparse=True)
    if record.open_for_write():
        record.view.copy_(grad)
    else:
        record.view.add_(grad)
    record.num_hook_writes += 1


def take_grad_of_backward(param: Tensor, record: GradRecord) -> None:
    """The post-accumulate-grad hook: ``absorb_grad``, or part of it where a foreign module delays the gradient.

    After a foreign module's backward, ``.grad`` holds the gradient (biases under fp8, and biases of activations), or
    memory that ``backward_dw`` will fill and assign (Transformer Engine's ``GroupedLinear``). Only ``backward_dw`` can
    tell, by looking at ``.grad``; so ``.grad`` stays until then. Two things are absorbed at once: ``.grad`` of a tied
    weight, because ``backward_dw`` would assign over the other owner's part, and a placeholder.
    """
    delayer = record.foreign_delayer
    if delayer is None or record.shared or getattr(param, "grad_added_to_main_grad", False):
        absorb_grad(param, record)
        part_in_grad = False
    else:
        part_in_grad = param.grad is not None
    if delayer is not None:
        record.pending.append(PendingWgrad(delayer, part_in_grad=part_in_grad))


def take_grad_of_backward_dw(param: Tensor, record: GradRecord, owner: str) -> None:
    """The foreign module ``owner`` has run its ``backward_dw`` for its oldest microbatch.

    Raises ``RuntimeError`` where no backward has announced this gradient: its bucket may be reduced already.
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
        # ``absorb_grad`` took the parts of later microbatches too. Their backward_dw must find a tensor to add to: for
        # None it would assign its memory without these parts.
        param.grad = torch.zeros_like(param)
    record.delayed_wgrad_done(mine)


def add_grad(param: Tensor, grad: Tensor) -> None:
    """Add ``grad`` [shape of ``param``] to this iteration's gradient of a wrapped parameter, as a backward would.

    For gradients that no ``backward()`` delivers: projected gradients (PCGrad), results of ``torch.autograd.grad``,
    noise. ``grad`` is this rank's contribution, and is reduced with the others. Call it before the iteration's last
    backward, or, in an iteration without a backward, before the step.

    Raises ``ValueError`` for a parameter that no ``DistributedDataParallel`` has wrapped, or another shape;
    ``RuntimeError`` once the parameter's bucket was launched.
    """
    record = record_of(param)
    if record is None or record.is_of_unit:
        raise ValueError("add_grad: this parameter is not wrapped in maingrad.ddp.DistributedDataParallel")
    if grad.shape != param.shape:
        raise ValueError(f"add_grad: parameter '{record.name}' is {tuple(param.shape)}, and grad {tuple(grad.shape)}")
    with torch.no_grad():
        _add(record, grad)


def _check_foreign_write(record: GradRecord) -> None:
    if record.open_for_write(written_already=True):
        raise RuntimeError(
            f"parameter '{record.name}' was accumulated into by a module that is not ours, into memory that was not "
            f"zeroed because only our modules own it; register the parameter in that module as well, then wrap"
        )


def forget_failed_backward(param: Tensor) -> bool:
    """Clear the flags of a backward that failed before the hook, or whose delayed gradients were given up.

    Returns whether the flag was set: a module had written ``main_grad``.
    """
    flag: bool = getattr(param, "grad_added_to_main_grad", False)
    if flag:
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    record = record_of(param)
    if record is not None:
        record.consumer_wrote, record.late_sum = False, None
    return flag


# ---- Consumer: what a module reads from a weight, and what it sets there. ----


def mark_delayed(param: Tensor) -> None:
    """Mark a parameter whose gradient is final only after ``backward_dw``. Foreign providers read the mark at wrap."""
    param.skip_backward_post_hook = True  # type: ignore[attr-defined]


def is_delayed(param: Tensor) -> bool:
    """Whether a module, ours or foreign, has marked this parameter by ``mark_delayed``."""
    return getattr(param, "skip_backward_post_hook", False)


def check_delayable(weights: Iterable[Tensor], owner: str) -> None:
    """Raise ``RuntimeError`` where a foreign provider would reduce a weight's gradient before it exists."""
    for weight in weights:
        if is_foreign(weight):
            raise RuntimeError(
                f"{owner}: delayed_wgrad(queue) over a weight whose main_grad a foreign provider owns, which asked "
                f"at its wrap what is delayed; build the module with delay_wgrad_compute=True before wrapping, or "
                f"use maingrad.ddp.DistributedDataParallel"
            )


def is_fusable(weight: Tensor) -> bool:
    """Whether a module may write this weight's gradient itself.

    False for a computed weight (``torch.nn.utils.parametrize``) without an accumulator: its gradient flows on to the
    parameters it is computed from. False for a weight with hooks (``weight.register_hook``), which must get the
    gradient. False for complex weights: the GEMM takes no conjugate.
    """
    if not (weight.requires_grad and weight.is_floating_point()) or has_tensor_hooks(weight):
        return False
    return weight.is_leaf or has_main_grad(weight)


def check_provided(weight: Tensor, owner: str) -> None:
    """Raise ``RuntimeError`` that names the module, for a weight without a provider."""
    if not has_main_grad(weight):
        raise _no_provider(weight, owner)


def accumulator_of(weight: Tensor, owner: str, *, rows_apart: bool = False) -> Tensor:
    """The checked ``main_grad`` of ``weight``; a lazy provider allocates it now.

    ``main_grad`` has the weight's shape, is fp32 or of the weight's dtype, and contiguous. With ``rows_apart`` adjacent
    columns are enough, if no two elements share memory. Raises ``RuntimeError`` that names module, shape and stride.
    """
    record = record_of(weight)
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if record is not None and (main_grad is record.view or record.make_room is not None):
        return record.view  # our own views always fit; a lazy one gets its memory in ``open_for_write``
    if hasattr(weight, "__fsdp_param__"):
        main_grad = weight.get_main_grad()  # type: ignore[attr-defined]  # allocates, so not before the write
        weight.main_grad = main_grad  # type: ignore[attr-defined]
    if main_grad is None:
        raise _no_provider(weight, owner)
    if record is not None:
        raise RuntimeError(
            f"{owner}: weight.main_grad was replaced after wrapping, and what is written there would never be reduced; "
            f"leave the attribute to the wrapper of parameter '{record.name}'"
        )
    check_accumulator(owner, weight, main_grad, rows_apart)
    return main_grad


def open_for_write(weight: Tensor, record: GradRecord | None, backward: int, *, ahead: Tensor | None = None) -> bool:
    """Call once before each write. Returns whether that write overwrites (beta = 0) or adds (beta = 1).

    Our own record decides. A foreign provider's ``overwrite_main_grad`` holds for the first write of a backward only.

    ahead  the token of a write in forward, under our own provider: see ``GradRecord.open_for_write``
    """
    if record is not None:
        overwrite = record.open_for_write(ahead=ahead)
        record.num_fused_writes += 1
        return overwrite
    return getattr(weight, "overwrite_main_grad", False) and _first_write_of(backward, weight)


def hand_over(weight: Tensor, record: GradRecord | None, *, fused: bool) -> Tensor | None:
    """Call in backward after the gradient was written or queued: set the flag, and return what autograd gets.

    ================  ==================  =======  =====  ==================================================
    the gradient      the weight's flag   returns  flag   because
    ================  ==================  =======  =====  ==================================================
    goes into .grad   any                 None     stays  ``backward_dw`` delivers it
    is fused          absent              None     --     the provider has no hook that would run
    is fused          of our provider     None     True   our hook runs for None too
    is fused          of a foreign one    zeros    True   a foreign hook runs only if autograd delivers a tensor
    ================  ==================  =======  =====  ==================================================

    The flag means "``.grad`` is a placeholder". A delayed weight's flag is set before its gradient is written.
    """
    if record is not None:
        record.consumer_wrote = True
    if fused and hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
        if record is None:
            return placeholder(weight)
    return None


_scratch: dict[tuple[torch.device, torch.dtype], tuple[Tensor, int]] = {}
"""One scratch tensor for each (device, dtype), with its version when it was last known to hold zeros. All placeholders
share it, as nobody reads them."""


def placeholder(weight: Tensor) -> Tensor:
    """Zeros of ``weight``'s shape, dtype and device: a view of one shared scratch tensor, without new memory.

    Autograd uses a detached view as ``.grad`` without a copy; it would clone a stride-0 expand. Zeros make mixed use
    safe: placeholder + gradient = gradient. A write into an earlier placeholder changes the scratch's version, and the
    scratch is zeroed again.
    """
    key = (weight.device, weight.dtype)
    scratch, version = _scratch.get(key, (None, 0))
    if scratch is None or scratch.numel() < weight.numel():
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a placeholder gradient cannot be allocated during a CUDA graph capture: run one eager iteration first"
            )
        scratch = torch.zeros(weight.numel(), dtype=weight.dtype, device=weight.device)
        _scratch[key] = (scratch, scratch._version)
    elif scratch._version != version:
        scratch.zero_()
        _scratch[key] = (scratch, scratch._version)
    return scratch[: weight.numel()].view(weight.shape).detach()


def add_to_grad(weight: Tensor, gradient: Tensor, record: GradRecord | None) -> None:
    """Sum a delayed gradient that is not fused, as autograd sums it in ``.grad``. Never assign over one.

    Our provider keeps the sum beside ``.grad``, which may show this iteration's gradient already.
    """
    gradient = gradient.to(weight.dtype)  # a product computes all its slices in one dtype
    if record is None:
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
    else:
        record.late_sum = gradient if record.late_sum is None else record.late_sum.add_(gradient)


def hand_over_sum(record: GradRecord) -> None:
    """Absorb the sum: the last delayed gradient of the microbatch, fused or not, was computed."""
    grad, record.late_sum = record.late_sum, None
    assert grad is not None, "the caller has looked"
    _add(record, grad)


def _no_provider(weight: Tensor, owner: str) -> RuntimeError:
    former = former_name(weight)
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
    """Whether ``weight`` was not written yet in this backward: the second use of a tied weight adds."""
    first = getattr(weight, _OVERWRITTEN_IN, None) != backward
    setattr(weight, _OVERWRITTEN_IN, backward)
    return first
