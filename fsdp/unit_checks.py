"""All checks before a module becomes a unit, in the order in which they run. Errors name what cannot be sharded.

1. ``record_ignored``        warns of ignored DTensors
2. ``row_of``, ``policy_of``  the types of options
3. ``check_unit``            this rank's module, device, options and parameters: a new refusal goes there
4. ``compare_units``         ranks have one unit and one plan
5. ``check_whose_experts``   ranks hold the same experts and slices, where nobody said who does

Those of 2 and 3 run on each rank, and ``fully_shard`` raises an error of one rank on all.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..ddp.buckets.copy_engines import check_copy_engines
from ..ddp.collectives.failure_report import FailureReporter
from ..ddp.collectives.rank_grid import RankGrid, Ranks, backends_of, device_types_of
from ..ddp.collectives.reduction import PLACEMENTS, Placement, Placements
from ..ddp.plan.layout import BucketLayout
from ..ddp.plan.model_slice import model_slice_of, set_model_slice, slice_of_marks
from ..ddp.plan.owned_params import (
    OwnedParam,
    buffers_of_experts,
    check_marks,
    check_plain,
    check_shapes,
    find_owned_params,
    is_marked_expert,
)
from ..ddp.plan.tensor_parallel.localize import localized_ranks
from ..ddp.torch_internals import check_wrappers_can_run, delivers_to_all, is_hooked
from ..ddp.wrapper.setup_checks import check_copies, check_same_slices, check_undeclared_parts, compare_between_ranks
from .module import FSDPModule, unit_of
from .state.optimizer_watch import replaced_in
from .tensors.parameter import ShardedParameter
from .unit.plan import MixedPrecisionPolicy, UnitOptions
from .unit.weight_unit import find_groups

__all__ = [
    "UnitParts",
    "check_copies_of",
    "check_unit",
    "check_whose_experts",
    "compare_units",
    "policy_of",
    "record_ignored",
    "row_of",
]

_WHOSE_EXPERTS = (
    "call fully_shard on the experts first, with a mesh of the ranks that do, maingrad.ddp.WORLD_OF_ONE where each has "
    "its own; or give this call a mesh too, torch.distributed.group.WORLD, where all are to have the same"
)


class UnitParts(NamedTuple):
    """What becomes a unit, and how."""

    options: UnitOptions
    grid: RankGrid
    """The ranks that share the parameters."""
    ignored: Collection[int]
    """``id`` of parameters that are not sharded."""

    modules: Sequence[nn.Module]
    """The module and the modules in it, without units inside it and their modules."""
    owned: Sequence[OwnedParam]
    """The parameters."""
    device: torch.device
    """The device that the unit computes on."""
    tensor_ranks: RankGrid | None
    """The tensor-parallel ranks; None: nobody has said."""
    groups: Mapping[str, str]
    """Parameters that modules ask for: see ``find_groups``."""
    plans: Sequence[tuple[BucketLayout, bool]] = ()
    """Each bucket's layout, and whether its parameters are trained."""

    @property
    def module(self) -> nn.Module:
        """The module that ``fully_shard`` was called with."""
        return self.modules[0]

    @property
    def name(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__


def check_unit(
    module: nn.Module,
    options: UnitOptions,
    grid: RankGrid,
    mesh: Ranks,
    device: torch.device | str | None,
    ignored: Collection[int],
    tensor_parallel_group: Ranks,
) -> UnitParts:
    """Raise for what cannot be sharded on this rank. ``ignored``: ``id`` of parameters that are not sharded."""
    check_wrappers_can_run(delivers_to_all)
    _check_module(module)
    tensor_ranks = localized_ranks(module, tensor_parallel_group, ignored)
    modules = list(_own_modules(module))
    on = _device_of(device, mesh, grid, modules, ignored)
    _check_options(options, grid, on)
    owned = _own_params(module, modules, ignored)
    _check_params(owned)
    if tensor_ranks is not None:
        _set_slices(owned, grid, tensor_ranks)
    trainable = [(each.name, each.param) for each in owned if each.param.requires_grad]
    check_marks(trainable, grid, tensor_ranks=tensor_ranks)
    groups = find_groups(modules, owned) if options.distributed_weights else {}
    return UnitParts(options, grid, ignored, modules, owned, on, tensor_ranks, groups)


def _set_slices(owned: Iterable[OwnedParam], grid: RankGrid, tensor_ranks: RankGrid) -> None:
    """Have each parameter know what it is of the whole that tensor-parallel ranks hold.

    Raises ``ValueError`` for experts that nobody says it of, and where ``grid``, over which gradients are averaged, has
    ranks with other slices.
    """
    members = tensor_ranks.ranks
    here = {rank for group in grid.axes for rank in dist.get_process_group_ranks(group)}
    both = here.intersection(members) - {dist.get_rank()}
    if both:
        raise ValueError(
            f"ranks {sorted(both)} are in mesh and among the tensor-parallel ranks {members}: mesh is of the ranks "
            f"that hold the same slices and have other data, as mesh['dp'] of a mesh (dp, tp)"
        )
    for entry in owned:
        found = model_slice_of(entry.param)
        if found is None and entry.grid_name == "expert" and tensor_ranks.size > 1:
            raise ValueError(
                f"parameter '{entry.name}' is an expert's (allreduce = False), and nobody says what ranks {members} "
                f"hold of it: say it by maingrad.ddp.plan.model_slice.set_model_slice, slices or copies"
            )
        if found is None:
            set_model_slice(entry.param, slice_of_marks(entry.param, tensor_ranks.inner))


def policy_of(mixed_precision: object) -> MixedPrecisionPolicy:
    """The policy, or the default one. Raises ``TypeError`` for any other object, such as FSDP2's policy."""
    if not isinstance(mixed_precision, MixedPrecisionPolicy | None):
        raise TypeError(f"mixed_precision is a maingrad.fsdp.MixedPrecisionPolicy, got {mixed_precision!r}")
    return mixed_precision or MixedPrecisionPolicy()


def row_of(placements: str | Placements) -> Placements:
    """The ``Placements`` of that name in ``PLACEMENTS``, or ``placements`` itself. Raises for a row that cannot be."""
    if isinstance(placements, str):
        if placements not in PLACEMENTS:
            raise ValueError(f"placements '{placements}' is none of {', '.join(PLACEMENTS)}")
        placements = PLACEMENTS[placements]
    if not isinstance(placements, Placements):
        raise TypeError(f"placements is a name or a Placements(inner, outer), got {type(placements).__name__}")
    placements.check()
    if placements.inner.optimizer is Placement.WHOLE:
        raise ValueError(
            "placements that shard nothing are plain data parallelism: use maingrad.ddp.DistributedDataParallel"
        )
    return placements


def _check_options(options: UnitOptions, grid: RankGrid, device: torch.device) -> None:
    """Raise ``ValueError`` for options that cannot be, on these ranks or on this device."""
    if options.forward_writes not in ("refused", "alike"):
        raise ValueError(f"forward_writes is 'refused' or 'alike', got {options.forward_writes!r}")
    if options.placements.outer.scatters and grid.outer is None:
        raise ValueError(
            "placements that shard across instances need a DeviceMesh of two dims, (outer, inner), and this mesh has "
            "one instance; use 'zero3'"
        )
    if options.offload_to_cpu and device.type != "cuda":
        raise ValueError(f"offload_to_cpu has no effect on {device}: shards are in host memory anyway; leave it False")
    check_copy_engines(options.copy_engine_gather, backends_of(grid.axes, device), device, "copy_engine_gather")


def _check_module(module: nn.Module) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a module that cannot be a unit, whatever its parameters are."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fully_shard takes one nn.Module, got {type(module).__name__}: call it on each module, or make one module "
            f"that contains them where they are to be gathered together"
        )
    check_shapes(module, "fully_shard")
    if isinstance(module, FSDPModule):
        raise ValueError(f"{unit_of(module).label} ({type(module).__name__}) is fully sharded already")
    for name, inside in module.named_modules():
        place = f"module '{name}'" if name else "the module"
        if isinstance(inside, nn.parallel.DistributedDataParallel):
            raise ValueError(f"{place} is wrapped in torch's DistributedDataParallel already: shard what it wraps")
        if isinstance(inside, torch.jit.ScriptModule):
            raise ValueError(f"{place} is a ScriptModule, whose parameters stay where they are: shard it unscripted")
        if type(inside).__name__ == "OptimizedModule":
            raise ValueError(
                f"{place} is torch.compile(...) of another module: call that one's .compile(), which keeps the module, "
                f"and shard it"
            )
    if type(module).forward is nn.Module.forward:
        raise ValueError(
            f"{type(module).__name__} has no forward, and a unit is gathered for its forward: shard its members"
        )


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module and the modules inside it, without units inside it and their modules."""
    seen: set[int] = set()
    stack = [module]
    while stack:
        found = stack.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        stack += [child for child in reversed(list(found.children())) if not isinstance(child, FSDPModule)]


def _own_params(module: nn.Module, modules: Sequence[nn.Module], ignored: Collection[int]) -> list[OwnedParam]:
    """The parameters that this unit is to shard, each with all modules that register it.

    ignored  ``id`` of parameters that are not sharded. Parameters that units inside have ignored are not sharded either
    """
    inside = set(map(id, modules))
    return [
        entry
        for entry in find_owned_params(module)
        if id(entry.param) not in ignored and any(id(owner) in inside for owner, _ in entry.owners)
    ]


def record_ignored(ignored: Iterable[nn.Parameter], grid: RankGrid) -> set[int]:
    """``id`` of each ignored parameter. Warns of DTensors that are trained, and that ranks of the unit hold copies of.

    A plain ignored parameter is the program's own. A DTensor's mesh looks as if somebody reduced its gradients.
    """
    ignored = list(ignored)  # ``module.parameters()`` can be read once
    here = {rank for group in grid.axes for rank in dist.get_process_group_ranks(group)}
    for param in ignored:
        mesh: Any = getattr(param, "device_mesh", None)
        outside = sorted(here - set(mesh.mesh.flatten().tolist())) if mesh is not None and param.requires_grad else []
        if outside:
            warnings.warn(
                f"an ignored parameter of shape {list(param.shape)} is a DTensor over ranks "
                f"{sorted(mesh.mesh.flatten().tolist())}, and nobody averages its gradient over ranks {outside}, which "
                f"have other batches: all-reduce param.grad.to_local() over them after backward, or freeze it",
                stacklevel=3,
            )
    return set(map(id, ignored))


def _check_params(owned: Iterable[OwnedParam]) -> None:
    """Raise ``ValueError`` for a parameter that cannot be sharded, or that another unit has sharded."""
    for name, param, _, _ in owned:
        if isinstance(param, ShardedParameter):
            raise ValueError(
                f"parameter '{name}' is sharded by unit '{param.shard.unit}' and registered outside it as well: "
                f"wrap from the inside out, and leave tied parameters to one unit that contains all their modules"
            )
        other = replaced_in(param)
        if other is not None:
            raise ValueError(
                f"parameter '{name}' was sharded by {other} and is registered here as well: make one unit of all "
                f"modules that share it, before any of them is sharded"
            )
        _check_param(name, param)


def _check_param(name: str, param: nn.Parameter) -> None:
    if not param.is_leaf:  # a shard would be cut off from them
        raise ValueError(f"parameter '{name}' is computed from others: shard those")
    check_plain(name, param, "fully_shard")
    if is_hooked(param):
        raise ValueError(
            f"parameter '{name}' has hooks, which no backward would call: whole gradients never lie in .grad; remove "
            f"them, or list it in ignored_params"
        )
    if param.is_complex():
        raise ValueError(
            f"parameter '{name}' is {param.dtype}: shards are of real parameters; list it in ignored_params"
        )
    if param.layout is not torch.strided:
        raise ValueError(f"parameter '{name}' is {param.layout}: shards are of dense ones; list it in ignored_params")


def _device_of(
    device: torch.device | str | None,
    mesh: Ranks,
    grid: RankGrid,
    inside: Sequence[nn.Module],
    ignored: Collection[int],
) -> torch.device:
    """The device that the unit computes on.

    Raises ``ValueError`` if that is not one device, or the ranks' groups cannot use it.
    """
    if device is None and isinstance(mesh, DeviceMesh):
        device = mesh.device_type
    if device is None:
        device = _device_inside(inside, ignored)
    if device is None:
        served = [device_type for group in grid.axes for device_type in device_types_of(group)]
        device = "cpu" if not served or "cpu" in served else served[0]
    found = torch.device(device)
    if found.type == "meta":
        raise ValueError("device is where the unit computes, and nothing does on meta")
    for group in grid.axes:
        if (served := device_types_of(group)) and found.type not in served:
            raise ValueError(
                f"the mesh's group talks over {', '.join(served)}, and the unit is on {found}: give a group of that "
                f"device"
            )
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found


def _device_inside(inside: Sequence[nn.Module], ignored: Collection[int]) -> torch.device | None:
    """The one device of the unit's parameters; of a unit without parameters, that of a unit inside it, if any."""
    params = [p for module in inside for p in module._parameters.values() if p is not None and id(p) not in ignored]
    found = {param.device for param in params if not param.is_meta}
    if len(found) > 1:
        raise ValueError(f"parameters are on {', '.join(sorted(map(str, found)))}: say which by device")
    if not found and params:
        raise ValueError("parameters on the meta device: say by device, or a DeviceMesh, where they are to be")
    if not found:
        children = [child for module in inside for child in module.children()]
        found = {unit_of(child).device for child in children if isinstance(child, FSDPModule)}
    return next(iter(found), None)


def compare_units(parts: UnitParts, failures: FailureReporter) -> None:
    """Compare the unit between ranks, before a collective depends on it.

    Raises ``ValueError`` on all ranks, with the first difference.
    """
    unit, dtypes = parts.name, {entry.name: entry.param.dtype for entry in parts.owned}
    slices = {entry.name: model_slice_of(entry.param) for entry in parts.owned}
    shapes = {slot.spec.name: str(list(slot.spec.shape)) for layout, _ in parts.plans for slot in layout.slots}
    for name, found in slices.items():
        if found is not None:  # tensor-parallel ranks may have other shapes
            shapes[name] = f"slices {list(found.largest_shape)} of {list(found.shape)}, {found.grad}"
    model = [
        f"{unit}'s '{slot.spec.name}' {dtypes[slot.spec.name]} {shapes[slot.spec.name]}"
        f"{'' if trainable else ' frozen'}{' delayed' if slot.spec.delayed else ''}"
        for layout, trainable in parts.plans
        for slot in layout.slots
    ]
    model += [
        f"{unit}'s buffer '{name}' {buffer.dtype} {list(buffer.shape)}"
        for module in parts.modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    said = [f"{option}={value}" for option, value in parts.options._asdict().items()]
    tensor = None if parts.tensor_ranks is None else parts.tensor_ranks.inner
    everyone = parts.grid._replace(tensor=tensor)
    compare_between_ranks({"model": model, "call of fully_shard": said}, everyone.axes, failures)
    told = {name: found for name, found in slices.items() if found is not None}
    check_same_slices(told, parts.grid, everyone, failures)


def check_copies_of(parts: UnitParts, failures: FailureReporter) -> None:
    """Raise ``ValueError`` on all ranks for parameters without the mark of a slice that tensor-parallel ranks have
    different values of, once data-parallel ranks have the same."""
    if parts.tensor_ranks is not None:
        slices = ((entry, model_slice_of(entry.param)) for entry in parts.owned)
        copies = [(entry.name, entry.param) for entry, found in slices if found is not None and found.dim is None]
        check_copies(copies, parts.tensor_ranks, failures)


def check_whose_experts(parts: UnitParts, failures: FailureReporter) -> None:
    """Raise ``ValueError`` on all ranks for experts and slices that differ between ranks, where no mesh was given."""
    slices = [(each.name, each.param) for each in parts.owned]
    experts: list[tuple[str, Tensor]] = [(each.name, each.param) for each in parts.owned if each.grid_name == "expert"]
    if parts.options.init_sync:
        own = buffers_of_experts(parts.module, is_marked_expert)
        buffers = [entry for found in parts.modules for entry in found.named_buffers(recurse=False)]
        experts += [(name, buffer) for name, buffer in buffers if id(buffer) in own]
    check_undeclared_parts(slices, experts, parts.grid, failures, option="mesh", remedy=_WHOSE_EXPERTS)
