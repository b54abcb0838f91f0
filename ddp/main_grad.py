"""The contract between whoever owns gradient memory and whoever computes weight gradients.

A *provider* (our wrappers, Megatron-core's, Megatron-FSDP's) gives each parameter a buffer, ``main_grad``. A *consumer*
(our modules, Transformer Engine's, any ``nn.Module``) either lets autograd leave a gradient in ``.grad`` for the
provider's hook, or writes ``main_grad`` itself and says so on the parameter. The attribute names are Megatron's and
Transformer Engine's, so either side can be theirs; this file is the only one here that reads or writes them.

    provider                                          consumer
    attach() --- main_grad, grad_added_to_main_grad --> WgradTarget.resolve()      (backward, before any GEMM)
    absorb_grad() <------- flag, .grad --------------- WgradTarget.accumulate()   (GEMM into main_grad, flag, return)

``GradRecord`` is what our own provider knows of a parameter beyond the shared attributes. A foreign provider has none.
"""

import enum
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..kernels import wgrad_accumulate
from .placeholder import placeholder
from .return_table import Returned, wgrad_outcome

__all__ = [
    "Demand",
    "FusedWgradModule",
    "GradRecord",
    "WgradTarget",
    "absorb_grad",
    "attach",
    "check_unattached",
    "clear_exposed_grad",
    "demand",
    "detach",
    "expose_grad",
    "has_main_grad",
    "is_fusable",
    "record_of",
]

_RECORD = "_maingrad_record"
_OVERWRITTEN_IN = "_maingrad_overwritten_in"


# ---- Provider: the record of one parameter, attaching it, and the hook's truth table. ----


class GradRecord:
    """What our provider knows of one parameter in the current iteration.

    It holds no reference to the parameter: the parameter owns it.
    """

    __slots__ = (
        "closed",
        "consumer_wrote",
        "exposed",
        "first_write_overwrites",
        "name",
        "num_fused_writes",
        "num_hook_writes",
        "passed",
        "ready",
        "shared",
        "view",
        "written",
    )

    def __init__(self, name: str, view: Tensor, *, first_write_overwrites: bool, shared: bool) -> None:
        self.name = name
        self.view = view
        """The accumulator: shape of the parameter, a view of its bucket."""
        self.first_write_overwrites = first_write_overwrites
        """Every owner is one of our modules, so that nobody adds behind our back: never zeroed, beta = 0 first."""
        self.shared = shared
        """More than one module owns it."""

        # Per iteration; reset by the bucket.
        self.written = False
        """``view`` holds a contribution of this iteration."""
        self.closed: str | None = None
        """Why nothing may be written any more (its bucket was launched or reduced); None while it may."""
        self.ready = False
        """The last contribution of the final microbatch is in."""

        # Per backward; reset by the hook.
        self.consumer_wrote = False
        """One of our modules wrote ``view`` in this backward, and therefore returned None."""
        self.passed = False
        """The hook ran, but nested in a recompute or for a shared parameter: ready when the outermost backward ends."""

        # Observed over the record's life.
        self.num_fused_writes = 0
        self.num_hook_writes = 0
        self.exposed = False
        """``.grad`` is ``view``, handed out to a stock optimizer."""

    def __reduce__(self) -> Any:
        raise TypeError(
            f"parameter '{self.name}' is wired to gradient buckets and cannot be pickled; "
            f"save state_dict(), or copy.deepcopy(model) first, which gives a plain model"
        )

    def open_for_write(self) -> bool:
        """Check that a contribution may still come in; returns whether it overwrites (beta = 0)."""
        if self.closed is not None:
            raise RuntimeError(f"parameter '{self.name}' received a gradient after {self.closed}")
        overwrite = self.first_write_overwrites and not self.written
        self.written = True
        return overwrite

    def zero_unwritten(self) -> None:
        """Give a parameter that was not used in this iteration the gradient zero."""
        if self.first_write_overwrites and not self.written:
            self.view.zero_()

    def reset(self) -> None:
        """Start a new iteration."""
        self.written = self.ready = self.consumer_wrote = self.passed = False
        self.closed = None


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


def expose_grad(param: Tensor, record: GradRecord, dtype: torch.dtype) -> None:
    """Hand the reduced gradient to a stock optimizer as ``.grad``: the accumulator itself where ``dtype`` is its own.

    A dtype unlike the parameter's goes through ``Tensor.grad_dtype``, which is how autograd is told to allow it.
    """
    param.grad = None
    if dtype is not param.dtype:
        param.grad_dtype = dtype
    param.grad = record.view if record.view.dtype is dtype else record.view.to(dtype)
    record.exposed = True


def clear_exposed_grad(param: Tensor, record: GradRecord) -> None:
    """Take ``.grad`` back before the next backward would accumulate into it."""
    if getattr(param, "grad_added_to_main_grad", False):
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # a backward that failed before the hook
    if record.exposed:
        param.grad = None
        if param.grad_dtype is not param.dtype:
            param.grad_dtype = param.dtype
        record.exposed = False


# ---- Consumer: one use of one weight by one fused module. ----


class FusedWgradModule:
    """Mixin of modules that write weight gradients through a ``WgradTarget``."""

    def fused_wgrad_weights(self) -> Iterable[str]:
        """Names of the module's own parameters whose gradient this module never leaves to autograd."""
        raise NotImplementedError(f"{type(self).__name__} must name its fused weights")


class Demand(enum.Enum):
    """What the running backward wants of a weight's gradient."""

    ACCUMULATE = "backward(): deliver it to the parameter"
    NOTHING = "the gradient is not asked for: autograd.grad(loss, inputs), backward(inputs=...)"
    RETURN = "autograd.grad(loss, weight), or a graph of the gradient: hand it to the caller, side effects forbidden"


def demand(weight_node: Any) -> Demand:
    """Ask the engine what it will do with the weight's gradient; ``weight_node`` is ``ctx.next_functions[i][0]``.

    A fused weight gradient is a side effect, and only ``backward()`` may have it.
    """
    if torch.is_grad_enabled():
        return Demand.RETURN  # create_graph=True: the gradient must be differentiable itself
    try:
        wanted = torch._C._will_engine_execute_node(weight_node)
    except RuntimeError:
        return Demand.RETURN  # the engine refuses the question exactly where autograd.grad captures this leaf
    return Demand.ACCUMULATE if wanted else Demand.NOTHING


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


class WgradTarget:
    """Where the gradient of one weight goes, for one forward and backward of one module.

    It refers to the weight's Python object weakly, since the object that comes out of ``ctx.saved_tensors`` may be a
    copy without attributes (saved-tensor hooks, recompute, offload), and since an autograd graph must not keep a weight
    alive. ``resolve`` runs before any GEMM of the backward, ``accumulate`` after the input gradient.
    """

    __slots__ = ("_owner", "_weight")

    def __init__(self, weight: Tensor, owner: str) -> None:
        self._weight = TensorWeakRef(weight)
        self._owner = owner

    def resolve(self) -> tuple[Tensor, Tensor]:
        """The weight's object and its checked accumulator: the weight's shape, fp32 or its dtype, contiguous.

        Raises ``RuntimeError`` that names the module for a weight that is gone, a missing ``main_grad``, or an
        unusable one.
        """
        weight = self._weight()
        if weight is None:
            raise RuntimeError(f"{self._owner}: the weight was freed between forward and backward")
        if hasattr(weight, "__fsdp_param__"):
            main_grad = weight.get_main_grad()  # may allocate: only now, in backward
            weight.main_grad = main_grad
        else:
            main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            raise RuntimeError(
                f"{self._owner}: fuse_wgrad_accumulation=True needs weight.main_grad, and nobody provided it; wrap the "
                f"model in maingrad.ddp.DistributedDataParallel, or build the module with fuse_wgrad_accumulation=False"
            )
        record = record_of(weight)
        if record is not None and main_grad is not record.view:
            raise RuntimeError(
                f"{self._owner}: weight.main_grad was replaced after wrapping, and what is written there would never "
                f"be reduced; leave the attribute to the wrapper of parameter '{record.name}'"
            )
        if record is None or weight.shape != main_grad.shape:
            _check_accumulator(self._owner, weight, main_grad)
        return weight, main_grad

    def accumulate(self, weight: Tensor, main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
        """``main_grad (+)= dy^T x`` and the flag; returns what backward must hand to autograd.

        dy [T, N], x [T, K]; ``weight`` [N, K] and ``main_grad`` [N, K] come from ``resolve``.
        """
        record = record_of(weight)
        outcome = wgrad_outcome(True, False, True, hasattr(weight, "grad_added_to_main_grad"), record is not None)
        if record is not None:
            overwrite = record.open_for_write()
            record.consumer_wrote = True
            record.num_fused_writes += 1
        else:
            overwrite = getattr(weight, "overwrite_main_grad", False) and _first_write_of_this_backward(weight)
        wgrad_accumulate(dy, x, main_grad, overwrite=overwrite)
        if outcome.sets_flag:
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if outcome.returned is Returned.PLACEHOLDER:
            return placeholder(weight)
        return None


def _first_write_of_this_backward(weight: Tensor) -> bool:
    """A foreign provider's ``overwrite_main_grad`` speaks of the first write only: a tied weight's second use adds."""
    task = torch._C._current_graph_task_id()
    first = getattr(weight, _OVERWRITTEN_IN, None) != task
    setattr(weight, _OVERWRITTEN_IN, task)
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
