"""A model's parameters and buffers, each once, with the ranks that hold the same values; and the plan of gradients."""

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..collectives.rank_grid import RankGrid, Ranks, group_size, make_grid
from ..config import DistributedDataParallelConfig
from ..contract.main_grad import check_unattached, is_delayed
from ..contract.module import DelayedWgradModule, FusedWgradModule
from .layout import GradPlan, ParamSpec, plan_gradients
from .model_slice import ModelSlice, model_slice_of, set_model_slice, slice_of_marks

__all__ = [
    "ModelTensor",
    "OwnedParam",
    "buffers_of_experts",
    "check_marks",
    "check_plain",
    "check_shapes",
    "check_untold_parts",
    "find_owned_params",
    "find_tensor_ranks",
    "find_tensors",
    "grad_dtype_of",
    "grid_name_of",
    "is_marked_expert",
    "is_slice",
    "mark_of_partial_grad",
    "plan_model",
    "refuse_slices",
    "select_names",
    "slice_over",
    "slices_of",
    "take_marks",
]

# ---- Megatron-core's marks of model parallelism on parameters. They are read here. What they say of a slice is read in
# ---- ``slice_of_marks`` (``model_slice.py``), with ``partition_dim`` and ``partition_stride``. Two other files read
# ---- one mark each: ``tensor_parallel/layouts.py`` the first one, of a DTensor, and ``checkpoint/checkpoint.py`` the
# ---- last one.
#
# allreduce = False                   an expert, which only some ranks hold
# tensor_model_parallel = True        a slice: tensor-parallel ranks hold the whole parameter together
# sequence_parallel = True            copies on tensor-parallel ranks, each of which has a part of the gradient
# average_gradients_across_tp_domain  copies likewise; each rank has another gradient, and the mean counts
# shared_embedding = True             copies on two pipeline stages, each of which has a part of the gradient

_OVER_TENSOR_RANKS = ("sequence_parallel", "average_gradients_across_tp_domain")
_PARTIAL = (*_OVER_TENSOR_RANKS, "shared_embedding")


def grid_name_of(param: Tensor, tensor_ranks: RankGrid | None = None) -> str:
    """Which ranks a parameter's gradient is reduced over: "dense" or "expert", "slice", "mean" or "partial" besides
    where there are several ``tensor_ranks``.

    "expert" is what Megatron-core marks ``allreduce = False``: only some ranks hold the same values.
    """
    if not getattr(param, "allreduce", True):
        return "expert"
    if tensor_ranks is None or tensor_ranks.size == 1:
        return "dense"
    return slice_over(param, tensor_ranks).grad


def slice_over(param: Tensor, tensor_ranks: RankGrid) -> ModelSlice:
    """What this rank has of a parameter that is no expert's: as was set, else as the marks tell."""
    return model_slice_of(param) or slice_of_marks(param, tensor_ranks.inner)


def slices_of(module: nn.Module, tensor_ranks: RankGrid | None) -> dict[str, ModelSlice]:
    """What this rank has of each parameter that is no expert's, by name; empty without other tensor-parallel ranks."""
    if tensor_ranks is None or tensor_ranks.size == 1:
        return {}
    params = ((name, param) for name, param in module.named_parameters() if not is_marked_expert(param))
    return {name: slice_over(param, tensor_ranks) for name, param in params}


def take_marks(module: nn.Module, slices: Mapping[str, ModelSlice]) -> None:
    """Set marks to False that a wrapper answers for: Megatron-core's ``finalize_model_grads`` would sum once more.

    The parameter's slice keeps what they said.
    """
    for name, param in module.named_parameters():
        for mark in _OVER_TENSOR_RANKS:
            if name in slices and getattr(param, mark, False):
                set_model_slice(param, slices[name])
                setattr(param, mark, False)


def find_tensor_ranks(module: nn.Module, given: Ranks) -> RankGrid | None:
    """The tensor-parallel ranks: ``given``, else those of the model's slices. None: nobody has said.

    Raises ``ValueError`` for slices over other ranks than ``given``, or over several groups, and for layers that
    communicate over other ranks.
    """
    ranks = None if given is None else make_grid(given, option="tensor_parallel_group")
    if ranks is not None and ranks.outer is not None:
        raise ValueError("tensor_parallel_group: a mesh of tensor-parallel ranks has one dim; flatten it, or slice it")
    for name, param in module.named_parameters():
        found = model_slice_of(param)
        if found is None or group_size(found.group) == 1 or is_marked_expert(param):
            continue
        own = RankGrid(found.group, None, found.group)
        ranks = ranks or own
        if own.ranks != ranks.ranks:
            raise ValueError(
                f"parameter '{name}' is a slice over ranks {own.ranks}, and the tensor-parallel ranks are "
                f"{ranks.ranks}: cut all parameters over one group, and pass it, or nothing, as tensor_parallel_group"
            )
    if ranks is not None:
        _check_layers(module, ranks)
    return ranks


def _check_layers(module: nn.Module, tensor_ranks: RankGrid) -> None:
    """Raise ``ValueError`` for a layer with slices that communicates over other ranks: groups were mistaken.

    Layers of Megatron-core and Transformer Engine have ``tp_group``, ours ``tensor_parallel_members``, which copies
    have too.
    """
    for name, layer in module.named_modules():
        group = getattr(layer, "tp_group", None)
        known = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
        members = [*getattr(layer, "tensor_parallel_members", known)]
        if len(members) > 1 and members != tensor_ranks.ranks and any(map(is_slice, layer.parameters(recurse=False))):
            raise ValueError(
                f"layer '{name}' is cut over ranks {members}, and tensor_parallel_group has ranks "
                f"{tensor_ranks.ranks}: pass the layers' group as tensor_parallel_group, and the ranks with the same "
                f"slices and other data as the data-parallel ones"
            )


def is_marked_expert(param: Tensor) -> bool:
    """Whether ``grid_name_of`` says "expert"."""
    return grid_name_of(param) == "expert"


def is_slice(param: Tensor) -> bool:
    """Whether tensor-parallel ranks hold the whole parameter together. Megatron-core marks experts alike, whole or cut:
    those have ranks of their own, and are none here."""
    return bool(getattr(param, "tensor_model_parallel", False)) and not is_marked_expert(param)


def mark_of_partial_grad(param: Tensor, completed: Collection[str] = ()) -> str | None:
    """The mark of a parameter of which other ranks hold copies, with parts of its gradient; None: no such mark.

    completed  marks whose gradients the wrapper completes
    """
    return next((name for name in _PARTIAL if name not in completed and getattr(param, name, False)), None)


# ---- Where nobody has said which ranks are tensor-parallel, a wrapper knows the data-parallel ones alone. What covers
# ---- all elements of a model, or needs a whole matrix, would be computed from one rank's slices, and differ between
# ---- the ranks that hold one model together.

_REMEDY_FOR_SUMS = {
    "sequence_parallel": "all-reduce its reduced gradient over the tensor-parallel ranks",
    "average_gradients_across_tp_domain": "average its reduced gradient over the tensor-parallel ranks",
    "shared_embedding": "all-reduce its gradient over the stages that hold the copies",
}
_GROUP_FOR_SUMS = dict.fromkeys(_PARTIAL, "tensor_parallel_group") | {"shared_embedding": "embedding_group"}


def check_marks(
    trainable: Iterable[tuple[str, nn.Parameter]],
    grid: RankGrid,
    config: DistributedDataParallelConfig | None = None,
    tensor_ranks: RankGrid | None = None,
    *,
    sums_embeddings: bool = False,
) -> None:
    """Raise ``ValueError`` for marked parameters whose gradients nobody would complete, and for options that would
    look at this rank's slices alone.

    grid             all data-parallel ranks
    config           of the wrapper; None: a wrapper without such options
    tensor_ranks     over which the wrapper completes gradients; None: nobody has said
    sums_embeddings  it sums gradients of shared embeddings over stages
    """
    trainable = list(trainable)
    completed = [*(() if tensor_ranks is None else _OVER_TENSOR_RANKS), *(["shared_embedding"] * sums_embeddings)]
    for name, param in trainable:
        mark = mark_of_partial_grad(param, completed)
        # Megatron-core sets the first mark only where there are other tensor-parallel ranks.
        if mark is not None and (grid.leaves_ranks_out or (mark == "sequence_parallel" and grid.in_larger_world)):
            raise ValueError(
                f"parameter '{name}' has {mark} = True: other ranks hold copies of it, and parts of its gradient, "
                f"which this wrapper does not sum; pass DistributedDataParallel those ranks as "
                f"{_GROUP_FOR_SUMS[mark]}, or {_REMEDY_FOR_SUMS[mark]} yourself, and set the mark to False before "
                f"wrapping"
            )
    unknown = tensor_ranks is None and grid.leaves_ranks_out
    if config is not None and config.check_for_nan_in_grad and unknown:
        refuse_slices(
            trainable,
            "check_for_nan_in_grad",
            "would raise on some of the ranks that hold one model together, while the others wait for them",
            "give the wrapper those ranks as tensor_parallel_group",
        )


def check_untold_parts(module: nn.Module, slices: Mapping[str, ModelSlice]) -> None:
    """Raise ``ValueError`` for norms of queries and keys without a mark: each tensor-parallel rank norms its own heads.

    Megatron-core knows them by their names, and by its config.
    """
    if not getattr(getattr(module, "config", None), "qk_layernorm", False):
        return
    for name, param in module.named_parameters():
        named = "q_layernorm" in name or "k_layernorm" in name
        if named and name in slices and slices[name].grad == "dense" and model_slice_of(param) is None:
            raise ValueError(
                f"'{name}' norms the heads of this tensor-parallel rank (config.qk_layernorm), so that each rank has a "
                f"part of its gradient, and it has no mark that says so: set sequence_parallel = True on it before "
                f"wrapping, and config.finalize_model_grads_func = "
                f"maingrad.te_integration.pipeline.finalize_model_grads, in place of Megatron-core's, which would sum "
                f"it once more"
            )


def refuse_slices(params: Iterable[tuple[str, Tensor]], what: str, consequence: str, remedy: str) -> None:
    """Raise ``ValueError`` if a parameter is a slice. The caller knows that other ranks may hold the rest.

    what         the option or function, for the error
    consequence  what it would do, after ``what``
    remedy       what the user can do instead
    """
    name = next((name for name, param in params if is_slice(param)), None)
    if name is not None:
        raise ValueError(
            f"{what} {consequence}: parameter '{name}' is a slice of tensor parallelism (tensor_model_parallel = "
            f"True), whose other slices are on ranks outside the data-parallel group; {remedy}. If every rank holds "
            f"the whole parameter, set the mark to False"
        )


# ---- Parameters and buffers, each once.


class OwnedParam(NamedTuple):
    """A parameter and its owners: the modules that register it. The first owner gives the name."""

    name: str
    param: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    grid_name: str
    """Which ranks the gradient is reduced over: see ``grid_name_of``."""

    def read_again(self) -> "OwnedParam":
        """With the parameter that the first owner registers now."""
        owner, local = self.owners[0]
        param = owner._parameters[local]
        assert param is not None, "modules keep the names of their parameters"
        return self._replace(param=param)

    @property
    def ours_alone(self) -> bool:
        """Whether every owner writes the weight gradient through a ``WgradTarget``."""
        return all(isinstance(m, FusedWgradModule) and local in m.fused_wgrad_weights() for m, local in self.owners)

    @property
    def delayed(self) -> bool:
        """Whether an owner computes the weight gradient after the main backward."""
        return is_delayed(self.param) or any(
            isinstance(m, DelayedWgradModule) and local in m.delayed_wgrad_weights() for m, local in self.owners
        )


class ModelTensor(NamedTuple):
    """A parameter or a buffer."""

    name: str
    tensor: Tensor
    grid_name: str
    """Which ranks hold the same values: see ``grid_name_of`` and ``buffers_of_experts``."""
    is_buffer: bool

    @property
    def trained(self) -> bool:
        """Whether it is a parameter that requires a gradient."""
        return self.tensor.requires_grad and not self.is_buffer


def buffers_of_experts(module: nn.Module, is_experts: Callable[[nn.Parameter], bool]) -> set[int]:
    """``id`` of the buffers that only some ranks hold the same values of, because their module is an expert's.

    A module is an expert's if its own parameters all are. If it has none, those of the modules in it decide; if these
    have none either, the module around it. Nobody marks buffers (Megatron-core marks parameters alone); where a buffer
    has the attribute ``allreduce``, that decides.
    """
    found: set[int] = set()

    def visit(owner: nn.Module, around: bool) -> None:
        params = [param for param in owner._parameters.values() if param is not None] or list(owner.parameters())
        of_experts = all(map(is_experts, params)) if params else around
        for buffer in owner._buffers.values():
            if buffer is not None and not getattr(buffer, "allreduce", not of_experts):
                found.add(id(buffer))
        for child in owner.children():
            visit(child, of_experts)

    visit(module, False)
    return found


def check_shapes(module: nn.Module, before: str) -> None:
    """Raise ``ValueError`` for a parameter or buffer of a lazy module (``nn.LazyLinear``) that has no shape yet.

    before  what the module is given to
    """
    tensors: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise ValueError(f"'{name}' has no shape yet: run a forward of the lazy module before {before}")


def check_plain(name: str, param: nn.Parameter, before: str) -> None:
    """Raise ``ValueError`` for a DTensor, for a parameter that has a gradient, and for one that has a ``main_grad``.

    before  what the model is given to
    """
    if hasattr(param, "to_local"):
        raise ValueError(
            f"parameter '{name}' is a DTensor (torch.distributed.fsdp.fully_shard, or tensor parallelism), and its "
            f"gradient is one too, or never reaches it in backward: give {before} a model of plain parameters"
        )
    if param.grad is not None:
        raise ValueError(
            f"parameter '{name}' already has a .grad, which would count in the first iteration: call "
            f"module.zero_grad() before {before}"
        )
    check_unattached(param, name)


def find_owned_params(module: nn.Module, tensor_ranks: RankGrid | None = None) -> list[OwnedParam]:
    """Every parameter of the model once, in registration order."""
    owners: defaultdict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    names: dict[nn.Parameter, str] = {}
    for prefix, owner in module.named_modules():
        for local, param in owner._parameters.items():
            if param is not None:
                owners[param].append((owner, local))
                names.setdefault(param, f"{prefix}.{local}" if prefix else local)
    return [
        OwnedParam(name, param, tuple(owners[param]), grid_name_of(param, tensor_ranks))
        for param, name in names.items()
    ]


def find_tensors(module: nn.Module, tensor_ranks: RankGrid | None = None) -> list[ModelTensor]:
    """Every parameter of the model once, frozen ones too, then every buffer, each in registration order.

    Nobody marks buffers: tensor-parallel ranks may have others each, as the first row of a slice of a vocabulary.
    """
    params = [
        ModelTensor(name, each, grid_name_of(each, tensor_ranks), is_buffer=False)
        for name, each in module.named_parameters()
    ]
    of_experts = buffers_of_experts(module, is_marked_expert)
    others = "dense" if tensor_ranks is None or tensor_ranks.size == 1 else "slice"
    buffers = [
        ModelTensor(name, each, "expert" if id(each) in of_experts else others, is_buffer=True)
        for name, each in module.named_buffers()
    ]
    return params + buffers


# ---- The plan of their gradients.


def plan_model(
    trainable: Sequence[OwnedParam],
    config: DistributedDataParallelConfig,
    *,
    shard_degree: int | Mapping[str, int],
    backward_order: Sequence[str] | None = None,
    slices: Mapping[str, ModelSlice] | None = None,
) -> GradPlan:
    """The plan for these parameters. A pure function: works on the meta device too, and for any number of ranks.

    slices          what this rank has of parameters, by name: buckets are cut alike on all tensor-parallel ranks
    backward_order  parameters' names in the order in which backward reaches them; None: reverse registration order
    """
    by_name = {owned.name: owned for owned in trainable}
    if backward_order is None:
        names = list(reversed(by_name))
    else:
        names = list(backward_order)
        if set(names) != set(by_name) or len(names) != len(by_name):
            missing, unknown = sorted(set(by_name) - set(names)), sorted(set(names) - set(by_name))
            raise ValueError(
                f"backward_order must name each trainable parameter once; missing {missing}, unknown {unknown}, "
                f"{len(names)} names for {len(by_name)} parameters"
            )
    matrices = select_names(config.keep_matrices_whole, by_name, "keep_matrices_whole")
    stacks = {name for name in matrices if by_name[name].param.dim() == 3}
    held = {name: tuple(by_name[name].param.shape) for name in names}
    largest = {name: each.largest_shape for name, each in (slices or {}).items()}
    specs = [
        ParamSpec(
            name=name,
            shape=largest.get(name, held[name]),
            param_dtype=by_name[name].param.dtype,
            grad_dtype=grad_dtype_of(
                by_name[name].param.dtype, torch.float32 if config.grad_reduce_in_fp32 else by_name[name].param.dtype
            ),
            grid_name=by_name[name].grid_name,
            delayed=by_name[name].delayed,
            own_bucket=getattr(by_name[name].param, "shared_embedding", False),
            atom=max(1, by_name[name].param[0].numel()) if name in stacks else config.shard_atom,
            whole=name in matrices - stacks,
            matrices=name in stacks,
        )
        for name in names
    ]
    return plan_gradients(
        specs,
        shard_degree=shard_degree,
        bucket_numel=config.bucket_size,
        num_buckets=config.num_buckets,
        pad_for_bus_bandwidth=config.pad_buckets_for_high_nccl_busbw,
        keep_params_whole=config.keep_params_whole,
        held=held if slices else None,
    )


def select_names(patterns: Iterable[str], names: Collection[str], what: str) -> set[str]:
    """The names that are among ``patterns``, or match one. Raises ``ValueError`` for a pattern that selects nothing.

    what  the option with the patterns
    """
    found: set[str] = set()
    for pattern in patterns:
        matching = set(fnmatch.filter(names, pattern))
        if not matching:
            raise ValueError(f"{what}: no trainable parameter is called '{pattern}'")
        found |= matching
    return found


def grad_dtype_of(param_dtype: torch.dtype, of_half: torch.dtype) -> torch.dtype:
    """Dtype of ``main_grad``: ``of_half`` for parameters in half precision, the parameter's own dtype for others."""
    return of_half if param_dtype in (torch.bfloat16, torch.float16) else param_dtype
