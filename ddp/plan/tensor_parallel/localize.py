"""``localize``: parameters and buffers that are DTensors of tensor parallelism become plain local ones."""

import itertools
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...collectives.rank_grid import RankGrid, Ranks, group_size
from ...contract.module import FusedWgradModule
from ..model_slice import model_slice_of, set_model_slice, slice_of_copy
from ..owned_params import find_tensor_ranks
from .hugging_face import drop_grad_hooks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .layouts import Layout

__all__ = [
    "LAYOUTS",
    "REPLACED",
    "can_localize",
    "is_one_slice",
    "layouts_of",
    "localize",
    "localized_ranks",
    "ranks_told",
    "whole_while",
]

LAYOUTS = "_maingrad_layouts"
"""Attribute of modules: name of a parameter or buffer -> its ``Layout``. Copies of a module have it too."""

REPLACED = "_maingrad_made_local"
"""Attribute of DTensors: the local parameter that has their place."""

_Module = TypeVar("_Module", bound=nn.Module)


def localize(module: _Module, ignored: Collection[int] = ()) -> _Module:
    """Make local parameters of the DTensors that ``parallelize_module``, or transformers' ``tp_plan``, has made.

    Returns the same module. Each DTensor becomes an ``nn.Parameter`` of its local tensor (the memory stays), which
    knows its ``ModelSlice``. Forwards and state dicts have DTensors as before. Wrappers call this first; what is local
    already stays as it is. Tied parameters stay tied if they are one DTensor. ``parallelize_module`` unties what is one
    parameter before: of an embedding and a linear layer with equal values this warns.

    ignored  ``id`` of parameters that stay as they are

    Raises ``ValueError``, with the module unchanged, for DTensors on meshes of several dims, for a ``.grad``, and for
    modules that can run on no slice. DTensors of torch's ``fully_shard`` stay, and the wrappers refuse them.
    """
    if not can_localize(module):
        return module
    from .forwards import show_in_forward
    from .layouts import layout_of
    from .optimizers import set_slice_of
    from .products import share_inputs
    from .state_dict import install_state_dict_hooks

    found = _dtensors(module, ignored)
    _warn_of_ties(found)
    for owner, name, tensor in found:
        table: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
        table[name], owner.__dict__.setdefault(LAYOUTS, {})[name] = _local_of(tensor), layout_of(tensor)
    for owner, _, _ in found:
        show_in_forward(owner)
        install_state_dict_hooks(owner)
    share_inputs(module)
    for owner in module.modules():
        for name, layout in layouts_of(owner).items():
            known = owner._parameters.get(name)
            if known is not None and model_slice_of(known) is None:  # a copied module's, too
                set_slice_of(known, layout)
        _mark_partial(owner)
    return module


def layouts_of(module: nn.Module) -> "Mapping[str, Layout]":
    """The layouts of the module's own local tensors; empty for a module that has none."""
    found: Mapping[str, Layout] = module.__dict__.get(LAYOUTS, {})
    return found


def ranks_told(module: nn.Module, given: Ranks) -> dist.ProcessGroup | None:
    """The tensor-parallel ranks by the first that tells: ``given``, a DTensor or a slice. Nothing is checked.

    Ranks agree over these on what comes of the checks. None: nothing is cut.
    """
    tensors: Iterable[Any] = itertools.chain(module.parameters(), module.buffers())
    for each in (given, *tensors):
        found = model_slice_of(each)
        told = getattr(each, "device_mesh", each) if found is None else found.group
        if isinstance(told, DeviceMesh) and told.ndim == 1 and told.get_coordinate():
            told = told.get_group()
        if isinstance(told, dist.ProcessGroup):
            return told
    return None


def localized_ranks(module: nn.Module, given: Ranks, ignored: Collection[int] = ()) -> RankGrid | None:
    """Make local parameters of DTensors, see ``localize``; then the tensor-parallel ranks. None: nobody has said."""
    localize(module, ignored)
    ranks = find_tensor_ranks(module, given)
    if ranks is None:  # no parameter is cut, and a buffer may be
        layouts = (layout for owner in module.modules() for layout in layouts_of(owner).values())
        cut = next((layout.mesh.get_group() for layout in layouts if layout.is_cut and not layout.of_experts), None)
        ranks = None if group_size(cut) == 1 else RankGrid(cut, None, cut)
    return ranks


def can_localize(module: nn.Module) -> bool:
    """Whether DTensors in ``module`` may be those of tensor parallelism: not torch's ``fully_shard`` has made them."""
    if "torch.distributed.tensor" not in sys.modules:
        return False  # nobody can have made a DTensor
    from torch.distributed.fsdp import FSDPModule

    return not any(isinstance(each, FSDPModule) for each in module.modules())


def is_one_slice(param: Tensor) -> bool:
    """Whether ``param`` is a DTensor on a mesh of one dim."""
    mesh: Any = getattr(param, "device_mesh", None)
    return mesh is not None and mesh.ndim == 1


@contextmanager
def whole_while(
    module: nn.Module, names: Collection[str], make: Callable[[Tensor, torch.Size], Tensor]
) -> Iterator[None]:
    """While a module gets its initial values, its own local tensors are whole; then they get their parts of these.

    So ranks with one random state have slices of one whole, as wide as a model that is not cut draws it.

    names  of tensors without values; others, and tensors that are not local ones, stay as they are
    make   of a local tensor and a shape: the whole one
    """
    local = []
    for name, layout in layouts_of(module).items():
        if name in names:
            part, whole = getattr(module, name), make(getattr(module, name), layout.shape)
            table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            table[name] = nn.Parameter(whole, part.requires_grad) if isinstance(part, nn.Parameter) else whole
            local.append((table, name, part, layout.model_slice()))
    yield
    with torch.no_grad():
        for table, name, part, held in local:
            part.copy_(held.part_of(table[name]))
            table[name] = part


def _dtensors(module: nn.Module, ignored: Collection[int]) -> list[tuple[nn.Module, str, "DTensor"]]:
    """Modules with the names of their DTensors. Raises ``ValueError`` for those that cannot become local."""
    from torch.distributed.tensor import DTensor

    found: list[tuple[nn.Module, str, DTensor]] = []
    for prefix, owner in module.named_modules():
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if isinstance(tensor, DTensor) and id(tensor) not in ignored:
                _check(f"{prefix}.{name}" if prefix else name, owner, tensor)
                found.append((owner, name, tensor))
    return found


def _warn_of_ties(found: list[tuple[nn.Module, str, "DTensor"]]) -> None:
    """Warn of an embedding and a linear layer that look as if they had been tied."""
    from torch.distributed.tensor import DTensor

    tables, heads = (
        [each for owner, _, each in found if isinstance(owner, kind) and _has_elements(each)]
        for kind in (nn.Embedding, nn.Linear)
    )
    for table, head in itertools.product(tables, heads):
        if table is head or table.shape != head.shape:
            continue
        if torch.equal(DTensor.to_local(table), DTensor.to_local(head)):
            warnings.warn(
                f"an embedding and a linear layer have equal weights of shape {list(table.shape)} that are two "
                f"parameters: parallelize_module unties what was one before. To train one, tie them again after it "
                f"(head.weight = embedding.weight)",
                stacklevel=4,
            )
            return


def _has_elements(tensor: "DTensor") -> bool:
    return not tensor.is_meta and tensor.to_local().numel() > 0


def _check(name: str, owner: nn.Module, tensor: "DTensor") -> None:
    if tensor.device_mesh.ndim != 1:
        raise ValueError(
            f"'{name}' is a DTensor on a mesh of {tensor.device_mesh.ndim} dims (torch.distributed.fsdp.fully_shard, "
            f"or tensor parallelism over a part of it): give parallelize_module the one dim mesh['tp'], and the "
            f"wrapper the other"
        )
    (placement,) = tensor.placements
    if placement.is_partial():
        raise ValueError(f"'{name}' is a DTensor of partial sums, which no parameter is: redistribute it")
    if tensor.grad is not None:
        raise ValueError(
            f"parameter '{name}' already has a .grad, which would count in the first iteration: call "
            f"module.zero_grad() before wrapping"
        )
    if isinstance(owner, FusedWgradModule) and owner.slices == "refused":
        raise ValueError(
            f"'{name}' is a slice of tensor parallelism, and {type(owner).__name__} computes from whole weights: use "
            f"maingrad.te_integration.Linear or torch's own layers there. For a loss over a cut vocabulary, convert "
            f"without fused_loss, and take torch's loss_parallel"
        )


def _local_of(tensor: "DTensor") -> Tensor:
    """The local tensor in the place of ``tensor``: one of all modules that share it, units of ``fully_shard`` too."""
    known: Tensor | None = getattr(tensor, REPLACED, None)
    if known is not None:
        return known
    with torch.no_grad():
        local: Tensor = tensor.to_local().contiguous()
    if isinstance(tensor, nn.Parameter):
        local = nn.Parameter(local, requires_grad=tensor.requires_grad)
        for name, value in vars(tensor).items():
            if not name.startswith("_"):  # marks, such as Megatron-core's; the others are DTensor's own
                setattr(local, name, value)
    setattr(tensor, REPLACED, local)
    return local


def _mark_partial(owner: nn.Module) -> None:
    """Parameters of which transformers says that each rank has a part of the gradient."""
    group = drop_grad_hooks(owner)
    for param in () if group is None else owner._parameters.values():
        if param is not None and model_slice_of(param) is None:
            set_model_slice(param, slice_of_copy(tuple(param.shape), group, "partial"))
