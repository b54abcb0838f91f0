"""What this machine's torch and Triton have, and nothing else: torch is 2.11 or newer, Triton may be missing.

torch's private names that features here rest on stand below, each with the public way that is missing.
"""

import functools
import importlib.util
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import checkpoint

if dist.is_available():
    from torch.distributed import distributed_c10d as c10d

__all__ = [
    "HAS_TRITON",
    "PipelineStep",
    "checkpointed_region",
    "device_of",
    "have_inputs_require_grad",
    "premultiplied_sum",
    "running_pipeline_step",
    "runs_on_triton",
    "start_all_gather",
    "start_reduce_scatter",
    "zero_cta_options",
]


# torch.distributed's functions around these two take 90 us of a collective's host time on 2.11, by counters and checks.
# torch 2.13 renamed the methods below them.
if dist.is_available():
    _GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
    _SCATTER = (
        "reduce_scatter_single" if hasattr(dist.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
    )


def start_all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup, *, on_stream: bool = False) -> Any:
    """Fill ``output`` [n] with every rank's ``input`` [n / ranks], asynchronously; returns the ``Work``.

    on_stream  NCCL runs it on the current CUDA stream instead of one of torch's own, which saves the host two events
    """
    options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
    options.asyncOp = not on_stream
    return getattr(group, _GATHER)(_real(output), _real(input), options) or _OnStream()


def start_reduce_scatter(
    output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup, *, on_stream: bool = False
) -> Any:
    """Fill ``output`` [n / ranks] with this rank's part of the reduced ``input`` [n]; returns the ``Work``.

    on_stream  as for ``start_all_gather``
    """
    options = c10d.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = not on_stream
    return getattr(group, _SCATTER)(_real(output), _real(input), options) or _OnStream()


class _OnStream:
    """The ``Work`` of a collective on the current stream, for which torch returns none: the stream is what waits."""

    def wait(self) -> bool:
        """Nothing to do."""
        return True


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def premultiplied_sum(factor: float) -> Any:
    """NCCL's sum of values times ``factor``, scaled on the way. torch has it under a private name, for its own FSDP."""
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


def zero_cta_options() -> Any:
    """Options of an NCCL group whose gathers take no multiprocessor; None where torch does not know them."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    policy = getattr(nccl, "NCCL_CTA_POLICY_ZERO", None)
    if nccl is None or policy is None:
        return None
    options = nccl.Options()
    options.config.cta_policy = policy
    return options


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


def checkpointed_region() -> tuple[Any, bool] | None:
    """The innermost region of ``torch.utils.checkpoint`` without reentrance that a forward runs in, as an object that
    lives as long as the graph of its forward, and whether it is being recomputed; None outside of regions.

    Missing: torch tells nobody which region it is. It shows in the saved-tensor hooks, whose innermost ones are those
    of whoever gets what a module saves. ``LookupError`` where it does not.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return None
    pack: Any = getattr(hooks[0], "_torchdynamo_orig_callable", hooks[0])
    if getattr(pack, "__module__", None) != checkpoint.__name__:
        return None
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    if "frame" in cells:
        return cells["frame"].cell_contents, False
    if "target_frame_ref" in cells:
        return cells["target_frame_ref"].cell_contents(), True
    raise LookupError("which checkpointed region a forward belongs to")


HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Triton publishes wheels for Linux on x86-64 only."""


def runs_on_triton(operation: str, tensor: Tensor) -> bool:
    """Whether a kernel or the oracle serves ``tensor``: CUDA, and not fp64, for which there is no hardware to win.

    Where only Triton is missing, that is said once for each ``operation``: an oracle may wait for the device.
    """
    if not tensor.is_cuda or tensor.dtype is torch.float64:
        return False
    if not HAS_TRITON:
        _warn_without_triton(operation)
    return HAS_TRITON


@functools.cache
def _warn_without_triton(operation: str) -> None:
    warnings.warn(
        f"{operation} runs as plain PyTorch, slowly and with waits for the device, since Triton is not installed: "
        f"pip install triton",
        RuntimeWarning,
        stacklevel=4,
    )


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current CUDA device, which need not be the tensor's."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
