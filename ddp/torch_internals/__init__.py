"""torch's private names that ``ddp`` and ``fsdp`` use. Each has a comment that names the public function torch lacks.

``distributed.py`` holds those of torch.distributed; ``kernels/compat.py`` and
``te_integration/torch_internals.py`` those of their folders. ``weak_method`` makes callbacks that keep nothing
alive. If a torch version renames one, the import warns of what
is lost (``kernels/compat.py``), and the name's test in ``tests/ddp/test_torch_internals.py`` fails.

Some names with an underscore are used in other files all the same:

- ``torch._foreach_*``, of which torch's own optimizers consist, and ``Tensor._version``, which torch documents.
- The tables of ``nn.Module`` and ``Optimizer`` (``_parameters``, ``_buffers``, ``_modules``, ``_forward_pre_hooks``,
  ``_compiled_call_impl`` and the like). Subclasses outside torch read them, and torch has kept them since they exist.
- ``GradScaler._unscale_grads_`` (``ddp/optimizer/grad_scaler.py``): the method that torch's own scaler for FSDP
  overrides.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils.weak import TensorWeakRef

from ...kernels.compat import private_name, raise_where_absent, warn_of_loss

__all__ = [
    "NO_BACKWARD",
    "DisableTorchFunctionSubclass",
    "TorchDispatchMode",
    "allow_storage_reads",
    "are_saves_packed",
    "are_transforms_active",
    "call_when_backward_ends",
    "check_wrappers_can_run",
    "checkpointed_region",
    "checkpointed_regions",
    "current_backward",
    "current_raw_stream",
    "delivers_to_all",
    "disabled_torch_function",
    "end_allocations",
    "grad_of_tensor",
    "has_one_hook",
    "has_tensor_hooks",
    "hook_keys",
    "is_forward_ad_enabled",
    "is_hooked",
    "is_profiling",
    "is_tracing",
    "let_foreach_take",
    "let_optimizers_take",
    "make_subclass",
    "reads_no_values",
    "refuse_storage_reads",
    "refuses_storage_reads",
    "registered_params",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "watch_prehooks",
    "weak_method",
    "will_execute",
]

# ---- Autograd. ----

_NO_WRAPPER = "maingrad's wrappers and layers cannot follow a backward"

current_backward: Callable[[], int] = private_name("torch._C._current_graph_task_id", loss=_NO_WRAPPER)
"""The number of the backward that this thread runs in, or ``NO_BACKWARD``. torch has no public name for a backward."""
NO_BACKWARD = -1


call_when_backward_ends: Callable[[Callable[[], None]], None] = private_name(
    "torch.autograd.Variable._execution_engine.queue_callback", loss=_NO_WRAPPER
)
"""Have the engine call a function once, at the end of the running backward. torch's DDP and FSDP2 use this call.

There is no public function."""


def _executes_all(node: Any) -> bool:
    """``will_execute`` without the name: true in a plain backward, and an error where the answer is not known."""
    if delivers_to_all():
        return True
    raise RuntimeError("the engine does not say which nodes it executes")


are_transforms_active: Callable[[], bool] = private_name(
    "torch._C._are_functorch_transforms_active",
    loss="torch.func's transforms stop at fused layers and sharded models, in errors of torch's",
    fallback=lambda: False,
)
"""Whether a ``torch.func`` transform runs in this thread. torch's public test needs a transformed tensor."""

will_execute: Callable[[Any], bool] = private_name(
    "torch._C._will_engine_execute_node",
    loss="autograd.grad and backward(inputs=...) compute the weight gradients of fused layers too, and are slower",
    fallback=_executes_all,
)
"""Whether the running backward executes a graph node. ``RuntimeError`` where ``autograd.grad`` captures that node.

There is no public function."""

delivers_to_all: Callable[[], bool] = private_name(
    "torch.autograd._is_checkpoint_valid", loss="fully_shard cannot tell backward() from autograd.grad"
)
"""Whether the running backward is a ``backward()`` without ``inputs``, which gives all leaves their gradients.

False in ``autograd.grad``, in ``backward(inputs=...)``, and in backwards nested in them, whatever the graph is.
Exception: True in a hook on a tensor at which ``autograd.grad`` ends because it returns that tensor's gradient.
Reentrant checkpointing asks the same. There is no public function."""

is_profiling: Callable[[], bool] = private_name(
    "torch._C._autograd._profiler_enabled",
    loss="profiles have no labels with the names of buckets and parameters",
    fallback=lambda: False,
)
"""Whether a profiler runs. No public function says so, and ``record_function`` takes
20 us in each hook without one, where this takes 0.1 us."""

is_forward_ad_enabled: Callable[[], bool] = private_name(
    "torch._C._is_fwd_grad_enabled",
    loss="a sharded parameter that is given to a torch.autograd.Function is not refused",
    fallback=lambda: True,
)
"""Whether forward-mode differentiation is allowed. It is not in the forward of a ``torch.autograd.Function``, whose
``apply`` asks its tensors nothing; ``no_grad()`` leaves it alone, and ``inference_mode()`` does not.

There is no public function."""

grad_of_tensor: Any = Tensor.grad
"""The descriptor of ``Tensor.grad``, for subclasses that define a property ``grad`` of their own."""


_HOOKS_UNSEEN = "a weight's hooks cannot be seen, and fused layers would pass them by"


def _has_tensor_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks)


has_tensor_hooks: Callable[[Tensor], bool] = private_name(
    "torch.Tensor._backward_hooks", loss=_HOOKS_UNSEEN, use=_has_tensor_hooks
)
"""Whether somebody called ``tensor.register_hook``. torch does not list a tensor's hooks."""


def _hook_keys(params: Iterable[Tensor]) -> list[int]:
    keys: list[int] = []
    for param in params:
        if hooks := param._backward_hooks:
            keys += hooks
        if hooks := param._post_accumulate_grad_hooks:
            keys += hooks
    return keys


hook_keys: Callable[[Iterable[Tensor]], list[int]] = private_name(
    "torch.Tensor._post_accumulate_grad_hooks", loss=_HOOKS_UNSEEN, use=_hook_keys
)
"""Numbers of the hooks that somebody has registered on parameters: another hook has another number."""


def is_hooked(param: Tensor) -> bool:
    """``has_tensor_hooks``, or somebody called ``param.register_post_accumulate_grad_hook``."""
    return has_tensor_hooks(param) or bool(getattr(param, "_post_accumulate_grad_hooks", None))


def has_one_hook(param: Tensor) -> bool:
    """Whether one function alone sees the gradients of ``param``: a single post-accumulate-grad hook."""
    return not has_tensor_hooks(param) and len(getattr(param, "_post_accumulate_grad_hooks", None) or ()) == 1


_compile_context: Callable[[], Any] = private_name(
    "torch._guards.CompileContext.try_get",
    loss="threads that read parameters while another thread compiles are taken for compilers, and are slower",
    fallback=lambda: torch.compiler.is_compiling() or None,
)


def is_tracing() -> bool:
    """Whether ``torch.compile`` works on a frame in this thread, inside or outside of the traced code.

    ``torch.compiler.is_compiling()`` does not say: torch 2.13 sets its flag for all threads of the process, and threads
    that only read parameters would be taken for compilers.
    """
    return _compile_context() is not None


def _unknown_region(*args: Any) -> Any:
    raise LookupError("which checkpointed region a forward belongs to")


_NO_REGIONS = "delayed_wgrad and autocast cannot tell a recompute of torch.utils.checkpoint from a forward"
_top_hooks: Any = private_name(
    "torch._C._autograd._top_saved_tensors_default_hooks", loss=_NO_REGIONS, fallback=_unknown_region
)
_pop_hooks: Any = private_name(
    "torch._C._autograd._pop_saved_tensors_default_hooks", loss=_NO_REGIONS, fallback=_unknown_region
)
_push_hooks: Any = private_name(
    "torch._C._autograd._push_saved_tensors_default_hooks", loss=_NO_REGIONS, fallback=_unknown_region
)


def are_saves_packed() -> bool:
    """Whether hooks on saved tensors (non-reentrant recompute, ``save_on_cpu``) see what a forward saves now."""
    return _top_hooks(False) is not None


def checkpointed_region() -> tuple[Any, bool] | None:
    """The innermost region of non-reentrant ``torch.utils.checkpoint`` around the running forward, and whether this
    forward is the recompute. None outside of regions.

    A region is an object that lives as long as the graph of its first forward. torch has no public function: the
    object is found in the closure of the innermost saved-tensor hook. ``LookupError`` where that hook has another form.
    """
    hooks: Any = _top_hooks(False)
    return None if hooks is None else _region_of(hooks)


def checkpointed_regions() -> list[tuple[Any, bool]]:
    """All regions around the running forward, the innermost first: each as ``checkpointed_region`` returns it.

    Hooks of others may lie between them. torch shows the innermost hooks alone: those are taken off, and put back.
    """
    found, taken = [], []
    try:
        while (hooks := _top_hooks(False)) is not None:
            _pop_hooks()
            taken.append(hooks)
            if (region := _region_of(hooks)) is not None:
                found.append(region)
    finally:
        for hooks in reversed(taken):
            _push_hooks(*hooks)
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
    return _unknown_region()  # type: ignore[no-any-return]


# ---- Subclasses of Tensor. torch documents ``__torch_function__``, and has only private names to switch it off. ----

DisableTorchFunctionSubclass: Any = private_name(
    "torch._C.DisableTorchFunctionSubclass", loss="maingrad's parameters cannot be taken for plain tensors"
)
"""A ``with`` block in which subclasses go through torch's functions as plain tensors."""

disabled_torch_function: Any = nn.Parameter.__torch_function__
"""A class with this ``__torch_function__`` goes through torch's functions as a plain tensor."""

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = private_name(
        "torch.utils._python_dispatch.TorchDispatchMode", loss="operations cannot be recorded, nor their random draws"
    )
"""A ``with`` block that sees every operation."""

make_subclass: Callable[..., Any] = private_name(
    "torch.Tensor._make_subclass", loss="parameters of a class of maingrad's cannot be made"
)
"""``make_subclass(cls, data, requires_grad)``: a leaf of class ``cls`` that shares the memory of ``data``.

``nn.Parameter`` is made by this call. The public ``Tensor.as_subclass`` returns a view with a graph."""


_foreach_types: list[type] = private_name(
    "torch.utils._foreach_utils._foreach_supported_types",
    loss="clip_grad_norm_ takes gradients of sharded parameters one by one, slowly",
    fallback=[],
)
_optimized_types: list[type] = private_name(
    "torch.optim.optimizer._foreach_supported_types",
    loss="optimizers take masters and sharded parameters one by one unless foreach=True or fused=True, slowly",
    fallback=[],
)


def let_foreach_take(cls: type[Tensor]) -> None:
    """Have ``clip_grad_norm_`` and optimizers use their ``foreach`` forms for gradients of this class."""
    if cls not in _foreach_types:
        _foreach_types.append(cls)


def let_optimizers_take(cls: type[Tensor]) -> None:
    """Have optimizers use their ``foreach`` and ``fused`` forms by default for parameters of this class."""
    if cls not in _optimized_types:
        _optimized_types.append(cls)


# ---- Containers: what a module takes and returns. ``torch.utils.pytree`` is not public in every version. ----

_NO_TREES = "tensors in a module's inputs and outputs cannot be found"
tree_flatten: Any = private_name("torch.utils._pytree.tree_flatten", loss=_NO_TREES)
tree_leaves: Any = private_name("torch.utils._pytree.tree_leaves", loss=_NO_TREES)
tree_map: Any = private_name("torch.utils._pytree.tree_map", loss=_NO_TREES)
tree_map_only: Any = private_name("torch.utils._pytree.tree_map_only", loss=_NO_TREES)
tree_unflatten: Any = private_name("torch.utils._pytree.tree_unflatten", loss=_NO_TREES)


def check_wrappers_can_run(*more: Any) -> None:
    """Raise ``RuntimeError`` where this torch lacks a name without which a wrapper would train wrongly.

    more  names of this file that one wrapper alone needs
    """
    raise_where_absent(
        *more,
        current_backward, call_when_backward_ends, has_tensor_hooks, hook_keys,
        DisableTorchFunctionSubclass, make_subclass, tree_flatten, tree_leaves, tree_map, tree_unflatten,
    )  # fmt: skip


# ---- Streams. ----


def _address_of_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# Builds without CUDA lack both names, and nothing is lost.
current_raw_stream: Callable[[int], int] = (
    private_name(
        "torch._C._cuda_getCurrentRawStream",
        loss="reading the current stream takes the host more time",
        fallback=_address_of_stream,
    )
    if torch.backends.cuda.is_built()
    else lambda index: 0
)
"""The address of a CUDA device's current stream. ``torch.cuda.current_stream()`` makes an object."""

_end_allocations: Any = (
    private_name(
        "torch._C._cuda_endAllocateToPool",
        loss="after a capture that failed, other allocations may come from its pool",
        fallback=None,
    )
    if torch.backends.cuda.is_built()
    else None
)


def end_allocations(device: torch.device, pool: Any) -> None:
    """After a failed capture: allocations of other captures on this device no longer look for this pool.

    ``CUDAGraph.capture_end`` does so where the capture succeeds, and raises before it where not.
    """
    if _end_allocations is not None:
        _end_allocations(device.index, pool)


# ---- Memory. ----

_refuse_storage: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_allow_storage: Any = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)
refuses_storage_reads: bool = _refuse_storage is not None and _allow_storage is not None
"""Whether ``refuse_storage_reads`` has an effect: torch 2.14 and newer, in builds with CUDA."""


def refuse_storage_reads(address: int, text: str) -> None:
    """Have every access to a storage's memory raise ``RuntimeError`` with ``text``; ``address``: its ``_cdata``.

    There is no public function: a storage that was resized to 0 bytes has a null pointer, which most functions of torch
    read. torch's CUDA graph trees use this one. Without effect where ``refuses_storage_reads`` is False.
    """
    if refuses_storage_reads:
        _refuse_storage(address, text)


def allow_storage_reads(address: int) -> None:
    """Undo ``refuse_storage_reads``."""
    if refuses_storage_reads:
        _allow_storage(address)


# ---- Reads that need no values: nothing waits for a gather, or for a reduction.


@functools.cache
def reads_no_values() -> frozenset[Any]:
    """torch's functions over a parameter or a gradient that read no values, so that nothing waits: methods of tensors,
    and functions of torch of the same names."""
    properties = """
        shape dtype device layout ndim requires_grad grad grad_fn grad_dtype is_leaf retains_grad output_nr names
        itemsize nbytes name _base _version _backward_hooks _post_accumulate_grad_hooks _cdata
        is_cpu is_cuda is_xpu is_mps is_mtia is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_vulkan
    """
    methods = """
        size stride numel nelement dim ndimension element_size storage_offset is_contiguous is_floating_point is_complex
        is_signed is_inference is_conj is_neg is_same_size get_device dim_order has_names storage_type __len__ __dir__
        requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook _is_view
        new new_empty new_empty_strided new_zeros new_ones new_full
    """
    verbs = ("__get__", "__set__", "__delete__")
    # Names that this torch does not have stand for None.
    found = [getattr(place, name, None) for place in (torch.Tensor, torch) for name in methods.split()]
    found += [getattr(getattr(torch.Tensor, name, None), verb, None) for name in properties.split() for verb in verbs]
    return frozenset(found) - {None}


def registered_params(module: nn.Module) -> dict[str, Tensor | None]:
    """The parameters that ``module`` itself registers, by name. This read waits for no gather."""
    params: Any = module._parameters
    return params if isinstance(params, dict) else dict(params.items())  # TorchScript's is a dict by name only


# ---- A callback that keeps no object alive.


def weak_method(method: Callable[..., Any], *objects: object) -> Callable[..., Any]:
    """A function that calls ``method(*objects, ...)`` and refers weakly to the method's object and to ``objects``.

    The function does nothing, and returns None, once one of them is gone. Hooks, records and buckets keep such
    functions: a strong reference would keep the wrapper alive.

    method   a bound method, or a function of ``objects``
    objects  its first arguments
    """
    if isinstance(method, MethodType):
        objects = (method.__self__, *objects)
        method = method.__func__
    references = tuple(TensorWeakRef(each) if isinstance(each, Tensor) else weakref.ref(each) for each in objects)

    def call(*args: object, **kwargs: object) -> Any:
        alive = []
        for reference in references:
            each = reference()
            if each is None:
                return None
            alive.append(each)
        return method(*alive, *args, **kwargs)

    return call


def _register_prehook(node: Any, fn: Any) -> Any:
    node.has_prehook = True
    return super(type(node), node).register_prehook(fn)


def watch_prehooks(function: Any) -> None:
    """Let nodes of an autograd function remember that they got a prehook. torch cannot list the hooks of a node."""
    node_class = getattr(function, "_backward_cls", None)
    if node_class is not None and hasattr(node_class, "register_prehook"):
        node_class.register_prehook = _register_prehook
    else:
        _warn_of_prehooks()


@functools.cache
def _warn_of_prehooks() -> None:
    warn_of_loss(
        "has no _backward_cls.register_prehook of autograd functions",
        "zero-bubble schedules over torch's own PipelineStage are not refused: use maingrad's PipelineStage",
    )
