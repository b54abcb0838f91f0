"""torch's private names that ``ddp`` and ``fsdp`` use. Each has a comment that names the public function torch lacks.

``kernels/compat.py`` and ``te_integration/torch_internals.py`` hold the private names of their folders. If a torch
version renames one, its test in ``tests/ddp/test_torch_internals.py`` fails and says which name is gone.

Some names with an underscore are used in other files all the same:

- ``torch._foreach_*`` and ``Tensor._version``, which torch documents.
- The tables of ``nn.Module`` and ``Optimizer`` (``_parameters``, ``_buffers``, ``_modules``, ``_forward_pre_hooks``,
  ``_compiled_call_impl`` and the like). Subclasses outside torch read them, and torch has kept them since they exist.
- ``GradScaler._unscale_grads_`` (``ddp/wrapper/own_ranks.py``, ``ddp/stock/optimizer.py``): the method that torch's own
  scaler for FSDP overrides.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass, _disabled_torch_function_impl
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils, checkpoint
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

if dist.is_available():
    from torch.distributed import distributed_c10d as c10d

__all__ = [
    "NO_BACKWARD",
    "DisableTorchFunctionSubclass",
    "accumulated_by_fsdp2",
    "active_torch_ddp",
    "backend_on",
    "call_when_backward_ends",
    "checkpointed_region",
    "checkpointed_regions",
    "current_backward",
    "current_raw_stream",
    "default_store",
    "delivers_to_all",
    "disabled_torch_function",
    "end_allocations",
    "gathered_by_fsdp2",
    "grad_of_tensor",
    "has_one_hook",
    "has_tensor_hooks",
    "hook_keys",
    "is_hooked",
    "is_profiling",
    "is_tracing",
    "let_foreach_take",
    "let_optimizers_take",
    "make_subclass",
    "params_of_torch_ddp",
    "premultiplied_sum",
    "start_all_gather",
    "start_reduce_scatter",
    "storage_info",
    "timeout_on",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "will_execute",
    "zero_cta_options",
]

# ---- Autograd. ----

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that this thread runs in, or ``NO_BACKWARD``. torch has no public name for a backward."""
NO_BACKWARD = -1


def call_when_backward_ends(callback: Callable[[], None]) -> None:
    """Have the engine call ``callback`` once, at the end of the running backward. torch's DDP and FSDP2 use this call.

    There is no public function.
    """
    Variable._execution_engine.queue_callback(callback)


will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the running backward executes a graph node. ``RuntimeError`` where ``autograd.grad`` captures that node.

There is no public function."""

delivers_to_all: Callable[[], bool] = torch.autograd._is_checkpoint_valid
"""Whether the running backward is a ``backward()`` without ``inputs``, which gives all leaves their gradients.

False in ``autograd.grad``, in ``backward(inputs=...)``, and in backwards nested in them, whatever the graph is.
Exception: True in a hook on a tensor at which ``autograd.grad`` ends because it returns that tensor's gradient.
Reentrant checkpointing asks the same. There is no public function."""

is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler runs. No public function says so, and ``record_function`` takes
20 us in each hook without one, where this takes 0.1 us."""

grad_of_tensor: Any = vars(torch._C.TensorBase)["grad"]
"""The descriptor of ``Tensor.grad``, for subclasses that define a property ``grad`` of their own."""


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether somebody called ``tensor.register_hook``. torch does not list a tensor's hooks."""
    return bool(tensor._backward_hooks)


def hook_keys(params: Iterable[Tensor]) -> list[int]:
    """Numbers of the hooks that somebody has registered on ``params``: another hook has another number."""
    keys: list[int] = []
    for param in params:
        if hooks := param._backward_hooks:
            keys += hooks
        if hooks := param._post_accumulate_grad_hooks:
            keys += hooks
    return keys


def is_hooked(param: Tensor) -> bool:
    """``has_tensor_hooks``, or somebody called ``param.register_post_accumulate_grad_hook``."""
    return has_tensor_hooks(param) or bool(getattr(param, "_post_accumulate_grad_hooks", None))


def has_one_hook(param: Tensor) -> bool:
    """Whether one function alone sees the gradients of ``param``: a single post-accumulate-grad hook."""
    return not has_tensor_hooks(param) and len(getattr(param, "_post_accumulate_grad_hooks", None) or ()) == 1


def is_tracing() -> bool:
    """Whether ``torch.compile`` works on a frame in this thread, inside or outside of the traced code.

    ``torch.compiler.is_compiling()`` does not say: torch 2.13 sets its flag for all threads of the process, and threads
    that only read parameters would be taken for compilers.
    """
    return torch._guards.CompileContext.try_get() is not None


def checkpointed_region() -> tuple[Any, bool] | None:
    """The innermost region of non-reentrant ``torch.utils.checkpoint`` around the running forward, and whether this
    forward is the recompute. None outside of regions.

    A region is an object that lives as long as the graph of its first forward. torch has no public function: the
    object is found in the closure of the innermost saved-tensor hook. ``LookupError`` where that hook has another form.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else _region_of(hooks)


def checkpointed_regions() -> list[tuple[Any, bool]]:
    """All regions around the running forward, the innermost first: each as ``checkpointed_region`` returns it.

    Hooks of others may lie between them. torch shows the innermost hooks alone: those are taken off, and put back.
    """
    autograd: Any = torch._C._autograd
    found, taken = [], []
    try:
        while (hooks := autograd._top_saved_tensors_default_hooks(False)) is not None:
            autograd._pop_saved_tensors_default_hooks()
            taken.append(hooks)
            if (region := _region_of(hooks)) is not None:
                found.append(region)
    finally:
        for hooks in reversed(taken):
            autograd._push_saved_tensors_default_hooks(*hooks)
    return found


def _region_of(hooks: Any) -> tuple[Any, bool] | None:
    """The region whose hooks these are."""
    pack: Any = getattr(hooks[0], "_torchdynamo_orig_callable", hooks[0])
    if getattr(pack, "__module__", None) != checkpoint.__name__:
        return None
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    if "frame" in cells:
        return cells["frame"].cell_contents, False
    if "target_frame_ref" in cells:
        return cells["target_frame_ref"].cell_contents(), True
    raise LookupError("which checkpointed region a forward belongs to")


# ---- Subclasses of Tensor. torch documents ``__torch_function__``, and has only private names to switch it off. ----

disabled_torch_function: Any = _disabled_torch_function_impl
"""A class with this ``__torch_function__`` goes through torch's functions as a plain tensor."""

make_subclass: Callable[..., Any] = Tensor._make_subclass
"""``make_subclass(cls, data, requires_grad)``: a leaf of class ``cls`` that shares the memory of ``data``.

``nn.Parameter`` is made by this call. The public ``Tensor.as_subclass`` returns a view with a graph."""


def let_foreach_take(cls: type[Tensor]) -> None:
    """Have ``clip_grad_norm_`` and optimizers use their ``foreach`` forms for gradients of this class."""
    if cls not in _foreach_utils._foreach_supported_types:
        _foreach_utils._foreach_supported_types.append(cls)


def let_optimizers_take(cls: type[Tensor]) -> None:
    """Have optimizers use their ``foreach`` and ``fused`` forms by default for parameters of this class."""
    if cls not in torch_optimizer._foreach_supported_types:
        torch_optimizer._foreach_supported_types.append(cls)


# ---- torch's own DistributedDataParallel. Neither attribute has a public reader. ----


def active_torch_ddp() -> TorchDDP | None:
    """The wrapper whose forward runs now. torch's compiler reads the same attribute."""
    return TorchDDP._active_ddp_module


def params_of_torch_ddp(wrapper: TorchDDP) -> Sequence[Tensor] | None:
    """The parameters whose gradients ``wrapper`` reduces. None while its constructor still collects them."""
    return vars(wrapper).get("_module_parameters")


# ---- torch.distributed.fsdp.fully_shard (FSDP2) tells nobody which weight belongs to which sharded parameter. The
# ---- names are those of torch 2.11 and 2.13. Nothing of FSDP2 is imported here: torch loads its registry before FSDP2.


def gathered_by_fsdp2() -> Iterator[tuple[Any, Tensor]]:
    """Every weight that FSDP2 holds gathered in this process, each after FSDP2's record of the parameter."""
    registry = sys.modules.get("torch.distributed._composable_state")
    for reference in list(getattr(registry, "_module_state_mapping", {}).values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11 has one group for each module
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for param in getattr(group, "fsdp_params", ()):
                gathered = getattr(param, "_unsharded_param", None)
                if gathered is not None:
                    yield param, gathered


def accumulated_by_fsdp2(param: Any) -> Tensor | None:
    """The gradient that FSDP2 sums outside of ``.grad``, in its ``reduce_dtype``; ``param`` is FSDP2's record."""
    found: Tensor | None = getattr(param, "unsharded_accumulated_grad", None)
    return found


# ---- Streams. ----

current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""The address of a CUDA device's current stream. ``torch.cuda.current_stream()`` makes an object."""

_end_allocations: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)


def end_allocations(device: torch.device, pool: Any) -> None:
    """After a failed capture: allocations of other captures on this device no longer look for this pool.

    ``CUDAGraph.capture_end`` does so where the capture succeeds, and raises before it where not.
    """
    if _end_allocations is not None:
        _end_allocations(device.index, pool)


# ---- Process groups. ----

# torch.distributed's public functions around these two methods cost 90 us of host time on torch 2.11, for counters and
# checks. torch 2.13 renamed the methods.
if dist.is_available():
    _GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
    _SCATTER = (
        "reduce_scatter_single" if hasattr(dist.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
    )


def start_all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup, *, on_stream: bool = False) -> Any:
    """Start to fill ``output`` [n] with every rank's ``input`` [n / ranks]; returns the ``Work``.

    on_stream  NCCL runs on the current CUDA stream instead of torch's own stream, which saves the host two events
    """
    options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
    options.asyncOp = not on_stream
    return getattr(group, _GATHER)(_real(output), _real(input), options) or _OnStream()


def start_reduce_scatter(
    output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup, *, on_stream: bool = False
) -> Any:
    """Start to fill ``output`` [n / ranks] with this rank's shard of the reduced ``input`` [n]; returns the ``Work``.

    on_stream  as for ``start_all_gather``
    """
    options = c10d.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = not on_stream
    return getattr(group, _SCATTER)(_real(output), _real(input), options) or _OnStream()


class _OnStream:
    """The ``Work`` of a collective on the current stream, for which torch returns None: the stream itself waits."""

    def wait(self) -> bool:
        """Return at once."""
        return True


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def premultiplied_sum(factor: float) -> Any:
    """NCCL's operation that multiplies each rank's values by ``factor`` and sums them. torch's FSDP uses this name."""
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


def zero_cta_options() -> Any:
    """Options of an NCCL group whose all-gathers occupy no multiprocessor. None where this torch has no such option."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    policy = getattr(nccl, "NCCL_CTA_POLICY_ZERO", None)
    if nccl is None or policy is None:
        return None
    options = nccl.Options()
    options.config.cta_policy = policy
    return options


def default_store() -> Any:
    """The key-value store of the default process group. ``torch.distributed`` has no public reader for it."""
    return dist.distributed_c10d._get_default_store()


def backend_on(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend (``ProcessGroupNCCL``, ``ProcessGroupGloo``) that runs a group's collectives on one kind of device.

    ``dist.get_backend`` returns a name only.
    """
    return group._get_backend(device)


def timeout_on(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long a collective of the group may take on this kind of device; None where the backend does not say."""
    options = getattr(backend_on(group, device), "options", None)
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


def storage_info(file: str, position: int, length: int) -> Any:
    """What torch.distributed.checkpoint's ``FileSystemWriter`` notes of a chunk. Its class has no public name."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # here: a torch without torch.distributed

    return _StorageInfo(file, position, length)
