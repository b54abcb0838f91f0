"""The private names of torch that ``te_integration`` uses, each with the public interface that torch lacks.

``torch.distributed.pipelining`` is imported in a function: the import takes half a second, and only pipelines need it.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.compat import TESTED_TORCH, on_first_use, private_name, raise_where_absent, warn_of_loss
from ..kernels.operators import define_operator

__all__ = [
    "Opaque",
    "PipelineStep",
    "collectives",
    "current_autograd_node",
    "have_inputs_require_grad",
    "is_compiled_autograd_on",
    "is_tracing_recomputed",
    "make_effectful_op",
    "running_pipeline_step",
    "symmetric_memory",
]

_GRAPH_BREAKS = "each fused layer under torch.compile is a graph break, which is slower, and fullgraph=True is refused"

current_autograd_node: Callable[[], Any] | None = private_name(
    "torch._C._current_autograd_node", loss=_GRAPH_BREAKS, fallback=None
)
"""The graph node that this thread's backward runs now, or None. Public hooks know their node; an operator does not."""

_dynamo_config = on_first_use("torch._dynamo.config", loss=_GRAPH_BREAKS, fallback=None)
_compiled_autograd = on_first_use("torch._dynamo.compiled_autograd", loss=_GRAPH_BREAKS, fallback=None)


@torch.compiler.assume_constant_result
def is_compiled_autograd_on() -> bool:
    """Return True if compiled autograd will capture backwards, as ``torch._dynamo.config.compiled_autograd`` asks for.

    Compiled autograd drops operators whose results nobody reads, also those with an effect. Traced code asks when it is
    compiled, and guards of compiled code ask at each call: the program may switch it on and off.
    """
    asked_for = getattr(_dynamo_config(), "compiled_autograd", True)
    return bool(asked_for or getattr(_compiled_autograd(), "compiled_autograd_enabled", True))


_translator = on_first_use(
    "torch._dynamo.symbolic_convert.InstructionTranslator",
    loss="compiled graphs break where tokens travel to experts",
    fallback=None,
)


@torch.compiler.assume_constant_result
def is_tracing_recomputed() -> bool:
    """Return True if a compiler traces a ``torch.utils.checkpoint`` region into its graph, or may do so.

    There it cannot hold a forward's operator with an effect: it loses the order's token. Traced code asks.
    """
    try:
        tracer = _translator().current_tx().output.current_tracer
        while tracer is not None:
            if tracer.source_target is torch.ops.higher_order.tag_activation_checkpoint:
                return True
            tracer = tracer.parent
    except AttributeError:  # another version of torch
        return True
    return False


# ---- Operators with effects, and objects that traced code calls. torch 2.14 renamed what an opaque object is. ----

_effect_type: Any = private_name("torch._higher_order_ops.effects._EffectType", loss=_GRAPH_BREAKS, fallback=None)
_give_effect: Any = private_name(
    "torch._higher_order_ops.effects._register_effectful_op", loss=_GRAPH_BREAKS, fallback=None
)
_member_type: Any = private_name("torch._library.opaque_object.MemberType", loss=_GRAPH_BREAKS, fallback=None)
_opaque_class: Any = private_name(
    "torch._custom_class_base.CustomClassBase",
    "torch._library.opaque_object.OpaqueBase",
    loss=_GRAPH_BREAKS,
    fallback=None,
)
_register_opaque: Any = private_name(
    "torch._library.opaque_object.register_custom_class",
    "torch._library.opaque_object.register_opaque_type",
    loss=_GRAPH_BREAKS,
    fallback=None,
)
_HAS_EFFECTS = None not in (
    current_autograd_node, _effect_type, _give_effect, _member_type, _opaque_class, _register_opaque
)  # fmt: skip
Opaque: Any = _opaque_class if _HAS_EFFECTS else object
"""The base of a class whose objects traced code may call."""


def make_effectful_op(
    name: str,
    arguments: str,
    run: Callable[..., Any],
    *,
    returns: str = "Tensor",
    fake: Callable[..., Any] | None = None,
) -> Callable[..., Any] | None:
    """Define the operator ``maingrad::name``, which a compiler must run once for each call, in the order of the calls.

    arguments  of the schema; the first is a list of tensors
    run        called with the operator's arguments
    returns    of the schema: what ``run`` returns, if there is a ``fake``
    fake       makes results with the shapes of those of ``run``; None: the operator returns an empty tensor, because
               one with an effect must return something

    Returns the operator; None where this torch lacks the names.
    """
    if not _HAS_EFFECTS:
        return None

    def nothing(operands: list[Tensor], *rest: Any) -> Tensor:
        return operands[0].new_empty(0)

    def call(operands: list[Tensor], *rest: Any) -> Any:
        found = run(operands, *rest)
        return nothing(operands) if fake is None else found

    op = define_operator(f"{name}({arguments}) -> {returns}", call, fake or nothing)
    try:
        _give_effect(op, _effect_type.ORDERED)
    except Exception as error:  # whatever another version raises for arguments that it takes no more
        warn_of_loss(f"has another torch._higher_order_ops.effects ({error})", _GRAPH_BREAKS)
        return None
    return op  # type: ignore[no-any-return]


def let_traces_call(cls: type, names: tuple[str, ...], *, guarded: Callable[[Any], list[Any]]) -> bool:
    """Let traced code call methods of objects of ``cls``, a subclass of ``Opaque``. A compiler does not trace them.

    Returns False where this torch lacks the names: a compiler traces the methods then.

    names    the methods. Arguments are constants, and results become constants of the traced code
    guarded  called with an object before compiled code runs; another result compiles the code again

    torch's public guards cover attributes, and no function of an object.
    """
    if not _HAS_EFFECTS:
        return False
    kind = "symbolic" if _register_opaque.__name__ == "register_custom_class" else "reference"  # before torch 2.14
    try:
        _register_opaque(cls, typ=kind, members=dict.fromkeys(names, _member_type.USE_REAL), guard_fn=guarded)
    except Exception as error:  # as in make_effectful_op
        warn_of_loss(f"has another torch._library.opaque_object ({error})", _GRAPH_BREAKS)
        return False
    return True


collectives: Any = private_name(
    "torch.ops._c10d_functional", loss="linear layers cannot be cut over tensor-parallel ranks"
)
"""Collectives as operators, which a compiler takes into its graph. Each runs from its call to ``wait_tensor`` of its
result. torch's public ones raise in code that a compiler traces below Python, as it does a ``compiled_linear``."""

symmetric_memory = on_first_use(
    "torch.distributed._symmetric_memory", loss="experts' rows cannot travel through symmetric memory"
)
"""Memory of a GPU that other processes' GPUs map: ``empty`` and ``rendezvous``."""

_schedule_class = on_first_use(
    "torch.distributed.pipelining.schedules._PipelineSchedule",
    loss="a PipelineStage cannot tell how many microbatches a step has, and gradients would be scaled wrongly",
)


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
    names the class or its two attributes differently.
    """
    schedule_class = _schedule_class()
    raise_where_absent(schedule_class)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found: Any = frame.f_locals.get("self")
        if isinstance(found, schedule_class):
            try:
                return PipelineStep(found._n_microbatches, found._internal_losses)
            except AttributeError as error:
                raise RuntimeError(
                    f"torch {torch.__version__} does not show how many microbatches a step of "
                    f"{type(found).__name__} has ({error}), and gradients would be scaled wrongly: use torch "
                    f"{TESTED_TORCH}, or torch's PipelineStage under no_sync(), which needs no number"
                ) from error
        frame = frame.f_back
    return None


def have_inputs_require_grad(stage: Any) -> None:
    """Let the receive buffers of a pipeline stage require gradients, in a step after an evaluation.

    Before torch 2.13, a stage whose first run is ``schedule.eval()`` creates buffers that require no gradient. The
    first step of the stage then raises, since there is no gradient to send back. Newer versions decide at each forward.
    """
    for received in getattr(stage, "args_recv_info", {}).values():
        for info in received:
            buffer = getattr(info, "buffer", None)
            decided_later = hasattr(info, "tensor_meta")  # torch 2.13
            if isinstance(buffer, Tensor) and not decided_later and buffer.is_floating_point():
                buffer.requires_grad_()
