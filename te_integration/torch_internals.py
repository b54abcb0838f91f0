"""torch's private names that ``te_integration`` rests on, each with the public way that is missing.

``torch.distributed.pipelining`` is imported when somebody has a pipeline, and not before: it takes half a second.
"""

import sys
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "PipelineStep",
    "are_transforms_active",
    "have_inputs_require_grad",
    "running_pipeline_step",
    "watch_prehooks",
]

are_transforms_active = torch._C._are_functorch_transforms_active
"""Whether one of ``torch.func``'s transforms runs in this thread. Missing: torch asks tensors, which may be plain."""


def _register_prehook(node: Any, fn: Any) -> Any:
    node.has_prehook = True
    return super(type(node), node).register_prehook(fn)


def watch_prehooks(function: Any) -> None:
    """Have nodes of an autograd function remember that they got a prehook. Missing: a node names no hook it has."""
    function._backward_cls.register_prehook = _register_prehook


class PipelineStep(NamedTuple):
    """A step, or an evaluation, of one of torch's pipeline schedules."""

    num_microbatches: int
    losses: list[Any]
    """Of its last stage, kept from forward to backward; those of a step that failed are still there in the next."""


def running_pipeline_step() -> PipelineStep | None:
    """That of the schedule which calls, through any number of functions; None where nobody of torch's does.

    Missing: torch tells a stage the number of microbatches when a schedule first runs on it, and never again, so that
    of two schedules that take turns the other's would count. Nothing that a schedule hands to its stages in each step
    names the schedule. ``RuntimeError`` where this torch's schedules do not have these two under the names known here.
    """
    from torch.distributed.pipelining import schedules  # not before somebody has a pipeline: it takes half a second

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
    """Have what a pipeline stage receives require gradients, in a step after an evaluation.

    Missing: before torch 2.13 a stage whose first run was ``schedule.eval()`` made its buffers without, and raised in
    its first step, when there was no gradient to send back. Later ones decide at each forward.
    """
    for received in stage.args_recv_info.values():
        for info in received:
            buffer = getattr(info, "buffer", None)
            decided_later = hasattr(info, "tensor_meta")
            if isinstance(buffer, Tensor) and not decided_later and buffer.is_floating_point():
                buffer.requires_grad_()
