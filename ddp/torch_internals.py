"""torch's private names that ``ddp`` and ``fsdp`` rest on, each with the public way that is missing.

``kernels/compat.py`` and ``te_integration/torch_internals.py`` hold those of their folders. A torch that renames one of
them breaks its test in ``tests/ddp/test_torch_internals.py``, which says which.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass, _disabled_torch_function_impl
from torch.autograd import Variable
from torch.utils import _foreach_utils, checkpoint
from torch.utils._pytree import tree_leaves, tree_map

if dist.is_available():
    from torch.distributed import distributed_c10d as c10d

__all__ = [
    "NO_BACKWARD",
    "DisableTorchFunctionSubclass",
    "call_when_backward_ends",
    "checkpointed_region",
    "current_backward",
    "current_raw_stream",
    "default_store",
    "delivers_to_all",
    "disabled_torch_function",
    "grad_of_tensor",
    "is_profiling",
    "is_tracing",
    "let_foreach_take",
    "premultiplied_sum",
    "start_all_gather",
    "start_reduce_scatter",
    "tree_leaves",
    "tree_map",
    "will_execute",
    "zero_cta_options",
]

# ---- Autograd. ----

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that this thread runs in, or ``NO_BACKWARD``. Missing: torch names no backward."""
NO_BACKWARD = -1


def call_when_backward_ends(callback: Callable[[], None]) -> None:
    """Have the engine call it once, when the running backward has ended. torch's DDP and FSDP2 do so; no public way."""
    Variable._execution_engine.queue_callback(callback)


will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the running backward comes to a node; ``RuntimeError`` where ``autograd.grad`` captures it. No public way."""

delivers_to_all: Callable[[], bool] = torch.autograd._is_checkpoint_valid
"""Whether the running backward is a ``backward()`` without ``inputs``. Reentrant recompute asks it; no public way."""

is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler runs. Missing: ``record_function`` costs 5 us of each hook where none does."""

grad_of_tensor: Any = vars(torch._C.TensorBase)["grad"]
"""The descriptor of ``Tensor.grad``, for classes that have a property of that name before it."""


def is_tracing() -> bool:
    """Whether this thread's ``torch.compile`` is at work on a frame, inside or outside of what it has traced.

    ``torch.compiler.is_compiling()`` is False in code that the compiler runs while it guards.
    """
    return torch._guards.CompileContext.try_get() is not None


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


# ---- Subclasses of tensors. torch documents ``__torch_function__``, and how to leave it only under private names. ----

disabled_torch_function: Any = _disabled_torch_function_impl
"""Called as ``__torch_function__``: what a function does to plain tensors."""


def let_foreach_take(cls: type[Tensor]) -> None:
    """Have ``clip_grad_norm_`` and optimizers take tensors of this class to their ``foreach`` form, as plain ones."""
    if cls not in _foreach_utils._foreach_supported_types:
        _foreach_utils._foreach_supported_types.append(cls)


# ---- Streams. ----

current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""The number of a CUDA device's current stream. ``torch.cuda.current_stream()`` makes an object: 2 us of each hook."""

# ---- Process groups. ----

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


def default_store() -> Any:
    """The store that the ranks met at. ``torch.distributed`` hands it to nobody after ``init_process_group``."""
    return dist.distributed_c10d._get_default_store()
