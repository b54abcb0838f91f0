"""The private names of torch that ``te_integration`` uses, each with the public interface that torch lacks.

``torch.distributed.pipelining`` is imported in a function: the import takes half a second, and only pipelines need it.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    from torch._library import opaque_object

    if hasattr(opaque_object, "register_custom_class"):  # torch 2.14
        from torch._custom_class_base import CustomClassBase as _OpaqueBase

        _register_opaque, _OPAQUE_KIND = opaque_object.register_custom_class, "symbolic"
    else:
        _OpaqueBase = opaque_object.OpaqueBase
        _register_opaque, _OPAQUE_KIND = opaque_object.register_opaque_type, "reference"
    Opaque: Any = _OpaqueBase
    _HAS_EFFECTS = True
except (ImportError, AttributeError):  # a later torch may move them: its canary is tests/te_integration/test_torch_internals.py
    Opaque = object
    _HAS_EFFECTS = False

__all__ = [
    "Opaque",
    "PipelineStep",
    "are_transforms_active",
    "current_autograd_node",
    "have_inputs_require_grad",
    "is_compiled_autograd_on",
    "make_effectful_op",
    "running_pipeline_step",
    "watch_prehooks",
]

are_transforms_active = torch._C._are_functorch_transforms_active
"""Whether a ``torch.func`` transform runs in this thread. torch's public test needs a transformed tensor."""


current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""The graph node that this thread's backward runs now, or None. Public hooks know their node; an operator does not."""


@torch.compiler.assume_constant_result
def is_compiled_autograd_on() -> bool:
    """Whether backwards will be captured by compiled autograd, as ``torch._dynamo.config.compiled_autograd`` asks for.

    Compiled autograd drops operators whose results nobody reads, also those with an effect. Call this in traced code.
    """
    import torch._dynamo.compiled_autograd as captured

    return bool(torch._dynamo.config.compiled_autograd or captured.compiled_autograd_enabled)


_library: Any = None


def make_effectful_op(name: str, arguments: str, run: Callable[..., None]) -> Callable[..., Any] | None:
    """Define the operator ``maingrad::name``, which a compiler must run once for each call, in the order of the calls.

    arguments  of the schema; the first is a list of tensors
    run        called with the operator's arguments

    Returns the operator, which returns an empty tensor: an operator with an effect must return something. None where
    this torch lacks the names. ``torch.library.custom_op`` takes twice the host time of a call (36 us for 16 us on the
    CPU of an H200's host).
    """
    global _library
    if not _HAS_EFFECTS:
        return None
    if _library is None:
        _library = torch.library.Library("maingrad", "FRAGMENT")
    _library.define(f"{name}({arguments}) -> Tensor")

    def call(operands: list[Tensor], *rest: Any) -> Tensor:
        run(operands, *rest)
        return operands[0].new_empty(0)

    def fake(operands: list[Tensor], *rest: Any) -> Tensor:
        return operands[0].new_empty(0)

    _library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"maingrad::{name}", fake, lib=_library)
    op = getattr(torch.ops.maingrad, name).default
    _register_effectful_op(op, _EffectType.ORDERED)
    return op  # type: ignore[no-any-return]


def let_traces_call(cls: type, names: tuple[str, ...], *, guarded: Callable[[Any], list[Any]]) -> None:
    """Let traced code call methods of objects of ``cls``, a subclass of ``Opaque``. A compiler does not trace them.

    names    the methods. Arguments are constants, and results become constants of the traced code
    guarded  called with an object before compiled code runs; another result compiles the code again

    torch's public guards cover attributes, and no function of an object.
    """
    if _HAS_EFFECTS:
        members = dict.fromkeys(names, opaque_object.MemberType.USE_REAL)
        _register_opaque(cls, typ=_OPAQUE_KIND, members=members, guard_fn=guarded)


def _register_prehook(node: Any, fn: Any) -> Any:
    node.has_prehook = True
    return super(type(node), node).register_prehook(fn)


def watch_prehooks(function: Any) -> None:
    """Let nodes of an autograd function remember that they got a prehook. torch cannot list the hooks of a node."""
    function._backward_cls.register_prehook = _register_prehook


class PipelineStep(NamedTuple):
    """A running ``step()`` or ``eval()`` of a pipeline schedule of torch."""

    num_microbatches: int
    losses: list[Any]
    """Losses of the last stage, from forward to backward. Losses of a failed step are still here in the next step."""


def running_pipeline_step() -> PipelineStep | None:
    """The step of the torch schedule that calls this function, directly or not; None if no schedule does.

    torch tells a stage its number of microbatches only when a schedule first runs the stage. If two schedules take
    turns on one stage, that number may belong to the other schedule. No argument that a schedule passes to its stages
    names the schedule, so the schedule is found on the call stack. Raises ``RuntimeError`` if this version of torch
    names the two attributes differently.
    """
    from torch.distributed.pipelining import schedules

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found: Any = frame.f_locals.get("self")
        if isinstance(found, schedules._PipelineSchedule):
            try:
                return PipelineStep(found._n_microbatches, found._internal_losses)
            except AttributeError as error:
                raise RuntimeError(
                    f"torch {torch.__version__} does not show how many microbatches a step of "
                    f"{type(found).__name__} has ({error}), and gradients would be scaled wrongly: use torch 2.11 to "
                    f"2.13, or torch's PipelineStage under no_sync(), which needs no number"
                ) from error
        frame = frame.f_back
    return None


def have_inputs_require_grad(stage: Any) -> None:
    """Let the receive buffers of a pipeline stage require gradients, in a step after an evaluation.

    Before torch 2.13, a stage whose first run is ``schedule.eval()`` creates buffers that require no gradient. The
    first step of the stage then raises, since there is no gradient to send back. Newer versions decide at each forward.
    """
    for received in stage.args_recv_info.values():
        for info in received:
            buffer = getattr(info, "buffer", None)
            decided_later = hasattr(info, "tensor_meta")  # torch 2.13
            if isinstance(buffer, Tensor) and not decided_later and buffer.is_floating_point():
                buffer.requires_grad_()
