"""The contract between the provider, who owns gradient memory, and the consumer, who computes weight gradients.

A *provider* (our wrappers, Megatron-core's, Megatron-FSDP's) gives each parameter an accumulator, ``main_grad``. A
*consumer* (our modules, Transformer Engine's, any ``nn.Module``) does one of two things: autograd leaves the gradient
in ``.grad`` and the provider's hook moves it, or the consumer adds to ``main_grad`` itself and sets a flag on the
parameter. The attribute names are Megatron's and Transformer Engine's, so either side can be theirs. No other file of
this library reads or writes these attributes.

    provider                                          consumer, in backward
    attach() --- main_grad, grad_added_to_main_grad --> demand()               step 3.1: who asks for the gradient?
                                                        WgradTarget.resolve    step 3.2: where does it go?
                                                        WgradTarget.deliver    step 3.4: main_grad (+)= dW
    take_grad_of_backward() <--- flag, .grad ---------- hand_over()            step 3.5: the flag, the return value
        absorb_grad()       <--- .grad ---------------- backward_dw()          (later, where a foreign module delays)

The steps are those of ``docs/by_hand.py``; ``te_integration/dense/linear.py`` has 2.1 to 3.3, which come before. Below,
the provider comes first, then the consumer, then the provider's hook, which is step 4.

A ``GradRecord`` holds what our provider knows of a parameter beyond the attributes. A foreign provider has no records.
Other kinds of ``WgradTarget`` are in ``delayed.py``, ``capturing.py`` and ``torch_wrappers.py``.
"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from ..torch_internals import has_tensor_hooks, will_execute
from .record import GradRecord, PendingWgrad, check_accumulator

__all__ = [
    "Demand",
    "Place",
    "WgradProduct",
    "WgradTarget",
    "absorb_grad",
    "accumulator_of",
    "add_grad",
    "add_to_main_grad",
    "attach",
    "attach_lazily",
    "check_provided",
    "check_unattached",
    "demand",
    "detach",
    "forget_failed_backward",
    "former_name",
    "hand_over",
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
]

_RECORD = "_maingrad_record"
_OVERWRITTEN_IN = "_maingrad_overwritten_in"
_former: "WeakIdKeyDictionary" = WeakIdKeyDictionary()  # names in wrappers that are gone, for errors


# ---- The provider attaches records to parameters. ----


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


def attach_lazily(param: Tensor, record: GradRecord) -> None:
    """``attach`` for an accumulator that has memory only from its first write to its reduction (``record.make_room``).

    Foreign modules add to ``param.get_main_grad()``: it holds zeros, or the sum of this iteration so far. There is no
    attribute ``main_grad``: a view whose memory comes and goes.
    """

    def get_main_grad() -> Tensor:
        if record.open_for_write():
            record.view.zero_()
        return record.view

    attach(param, record)
    del param.main_grad  # type: ignore[attr-defined]  # every write goes through get_main_grad or the record
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


# ---- The consumer: what a module's backward asks, in order, and what it leaves behind. ----


class Demand(enum.Enum):
    """The running backward's use of a weight's gradient."""

    ACCUMULATE = "backward(): deliver it to the parameter"
    NOTHING = "the gradient is not asked for: autograd.grad(loss, inputs), backward(inputs=...)"
    RETURN = "autograd.grad(loss, weight), or create_graph=True: return it to the caller, without a side effect"


def demand(weight_node: Any) -> Demand:
    """Ask the engine what it will do with a weight's gradient; ``weight_node`` is ``ctx.next_functions[i][0]``.

    Only ``ACCUMULATE`` allows a write to ``main_grad``.
    """
    # Step 3.1: who asks for the gradient?
    if torch.is_grad_enabled():
        return Demand.RETURN  # create_graph=True: the gradient itself must be differentiable
    try:
        wanted = will_execute(weight_node)
    except RuntimeError:
        return Demand.RETURN  # the engine raises exactly where autograd.grad captures this leaf
    return Demand.ACCUMULATE if wanted else Demand.NOTHING


class WgradProduct(Protocol):
    """How the weight gradients of one product are computed: ``DenseWgrad``, or ``GroupedWgrad`` for experts."""

    def __init__(self, weights: Sequence[Tensor]) -> None: ...

    rows_apart: bool
    """``main_grad`` need not be contiguous: see ``accumulator_of``."""

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """Whether the weights have the shapes that this object was made for."""

    def accumulate(self, main_grads: Sequence[Tensor | None], overwrite: Sequence[bool], *operands: Any) -> None:
        """``main_grad (+)= dW`` for each weight; weights with None are left out."""

    def gradients(self, wanted: Sequence[bool], dtype: torch.dtype, *operands: Any) -> list[Tensor | None]:
        """``dW`` of each wanted weight as a new tensor of ``dtype``; None for the rest."""


class Place(NamedTuple):
    """Where a weight's gradient goes. A backward looks it up before it computes any product."""

    weight: Tensor
    """The weight's Python object, which carries the contract's attributes."""
    accumulator: Tensor | None
    """The checked ``main_grad``; None where this backward does not write it."""


class WgradTarget:
    """Where the gradients of one product's weights go: into ``main_grad``, in backward.

    A target refers to the weights' Python objects weakly. An autograd graph must not keep a weight alive, and the
    object that ``ctx.saved_tensors`` returns may be a copy without attributes (saved-tensor hooks, recompute, offload).
    Each weight has its own flag and record, may be frozen alone, and its own first write overwrites.

    weights  of the product
    names    of the weights, for errors
    wgrad    computes the gradients
    owner    the module, for errors

    ``target.choose_target`` lists the other kinds.
    """

    __slots__ = ("_names", "_references", "owner", "wgrad")
    fused = True
    """The gradients go into ``main_grad``; False (delayed ones only): into ``.grad``."""
    demand = staticmethod(demand)

    def __init__(self, weights: Sequence[Tensor], names: Sequence[str], wgrad: WgradProduct, owner: str) -> None:
        self.owner = owner
        self.wgrad = wgrad
        self._references = tuple(map(TensorWeakRef, weights))
        self._names = tuple(f"{owner}, {name}" for _, name in zip(weights, names, strict=True))

    def serves(self, weights: Sequence[Tensor], queue: object | None) -> bool:
        """Whether a forward of these weights, delayed into ``queue`` or not, may use this target."""
        return queue is None and self.refers_to(weights)

    def refers_to(self, weights: Sequence[Tensor]) -> bool:
        """Whether this is the target of ``weights``, in this order."""
        return len(weights) == len(self._references) and all(map(_refers_to, self._references, weights))

    def resolve(self, wanted: Sequence[bool]) -> list[Place | None]:
        """Where this backward's gradients go. None for weights that are not wanted, and where autograd delivers.

        Raises ``RuntimeError`` that names the module: for a weight that was freed, and for a missing or unfit
        ``main_grad`` (see ``accumulator_of``).
        """
        # Step 3.2: where does the gradient go?
        return [self.place(number) if want else None for number, want in enumerate(wanted)]

    def place(self, number: int) -> Place | None:
        """Where the gradient of one weight goes; None where autograd delivers it."""
        weight = self.alive(number)
        if has_tensor_hooks(weight):  # registered after the forward: the hook must get the gradient
            return None
        if not weight.requires_grad:  # frozen after the forward: autograd drops the gradient
            return None
        return self.place_for_write(number, weight)

    def place_for_write(self, number: int, weight: Tensor) -> Place:
        """``place`` of a gradient that is written right after."""
        return Place(weight, accumulator_of(weight, self._names[number], rows_apart=self.wgrad.rows_apart))

    def alive(self, number: int) -> Tensor:
        """One weight. Raises ``RuntimeError`` where it was freed."""
        weight: Tensor | None = self._references[number]()
        if weight is None:
            raise RuntimeError(f"{self._names[number]}: the weight was freed between forward and backward")
        return weight

    def deliver(self, places: Sequence[Place | None], operands: Sequence[Any], backward: int) -> list[Tensor | None]:
        """In backward: ``main_grad (+)= dW``, and the flags. Returns what autograd gets.

        places    from ``resolve``; weights with None are left out
        operands  what ``wgrad.accumulate`` takes
        backward  number of the running backward; in reentrant recompute of the backward around it
        """
        self.accumulate(places, operands, backward)
        return [place and hand_over(place.weight, record_of(place.weight), fused=True) for place in places]

    def accumulate(self, places: Sequence[Place | None], operands: Sequence[Any], backward: int) -> None:
        """``main_grad (+)= dW`` for each weight with a place."""
        # Step 3.4: the product into main_grad. The first write of an iteration overwrites where the record allows it.
        main_grads, overwrite = [], []
        for place in places:
            main_grads.append(place and place.accumulator)
            overwrite.append(place is not None and open_for_write(place.weight, record_of(place.weight), backward))
        self.wgrad.accumulate(main_grads, overwrite, *operands)


def _refers_to(reference: TensorWeakRef, weight: Tensor) -> bool:
    return reference() is weight


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


def open_for_write(weight: Tensor, record: GradRecord | None, backward: int) -> bool:
    """Call once before each write. Returns whether that write overwrites (beta = 0) or adds (beta = 1).

    Our own record decides. A foreign provider's ``overwrite_main_grad`` holds for the first write of a backward only.
    """
    if record is not None:
        overwrite = record.open_for_write()
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
    # Step 3.5: the flag, and what autograd gets.
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


# ---- The provider's hook: what a backward has left in .grad and in the flag. ----


def take_grad_of_backward(param: Tensor, record: GradRecord) -> None:
    """Step 4, in the post-accumulate-grad hook: ``absorb_grad``, or part of it where a foreign module delays.

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


def absorb_grad(param: Tensor, record: GradRecord) -> None:
    """Add ``.grad`` to ``main_grad``, and clear ``.grad`` and the flag.

    ====================  =====  =================================================================================
    ``.grad``             flag   action
    ====================  =====  =================================================================================
    a gradient            False  added; copied where it is the first write and ``first_write_overwrites``
    None                  any    nothing to add
    a gradient            True   our module wrote and returned None: the gradient is of another use of a tied weight,
                                 and is added
    a placeholder         True   a foreign module wrote: dropped. Under ``zero_out_wgrad`` the placeholder is zeros plus
                                 the gradient of another use, if there is one: added
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
        if grad.requires_grad:
            raise RuntimeError(
                f"parameter '{record.name}': backward(create_graph=True) asks for a gradient with a graph of its own, "
                f"which main_grad cannot hold; use torch.autograd.grad(..., create_graph=True) instead"
            )
        add_to_main_grad(record, grad)
    finally:
        param.grad = None  # after the write: where every ``.grad`` is None, a write begins a new iteration


def add_to_main_grad(record: GradRecord, grad: Tensor) -> None:
    """Add a gradient that autograd or a program brings; it is copied where it is the first write and may overwrite."""
    if grad.layout is not torch.strided:
        grad = grad.to_dense()  # nn.Embedding(sparse=True)
    if record.open_for_write():
        record.view.copy_(grad)
    else:
        record.view.add_(grad)
    record.num_hook_writes += 1


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
        add_to_main_grad(record, grad)


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


# ---- What modules ask of a weight in forward. ----


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


def mark_delayed(param: Tensor) -> None:
    """Mark a parameter whose gradient is final only after ``backward_dw``. Foreign providers read the mark at wrap."""
    param.skip_backward_post_hook = True  # type: ignore[attr-defined]


def is_delayed(param: Tensor) -> bool:
    """Whether a module, ours or foreign, has marked this parameter by ``mark_delayed``."""
    return getattr(param, "skip_backward_post_hook", False)
