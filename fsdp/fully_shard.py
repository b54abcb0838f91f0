"""``fully_shard``: makes a unit of a module, and refuses what cannot work."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..ddp.failure_report import FailureReporter
from ..ddp.layout import BucketLayout
from ..ddp.main_grad import check_unattached
from ..ddp.placements import PLACEMENTS, Placement, Placements
from ..ddp.rank_grid import RankGrid, make_grid
from ..ddp.wiring import OwnedParam, compare_between_ranks, find_owned_params
from .grad_shard import ShardReduction
from .materialize import materialize, synchronize
from .mixed_precision import MixedPrecisionPolicy
from .module import FSDPModule, make_unit, unit_of
from .optimizer_watch import mark_replaced, replaced_in, watch_steps
from .sharded_bucket import ShardedBucket
from .sharded_param import ShardedParameter
from .state_dict import install_state_dict_hooks
from .unit import Unit
from .unit_plan import plan_unit, shard_degree

__all__ = ["fully_shard"]

_Module = TypeVar("_Module", bound=nn.Module)


def fully_shard(
    module: _Module,
    mesh: dist.ProcessGroup | DeviceMesh | None = None,
    placements: str | Placements = "zero3",
    mixed_precision: MixedPrecisionPolicy | None = None,
    *,
    reshard_after_forward: bool | None = None,
    offload_to_cpu: bool = False,
    init_fn: Callable[[nn.Module], None] | None = None,
    init_sync: bool = True,
    device: torch.device | str | None = None,
    ignored_params: Collection[nn.Parameter] = (),
) -> _Module:
    """Shard the parameters of ``module`` that no unit inside it has, as one unit; returns the same module.

    Call it from the inside out: on each transformer block, then on the whole model. The module becomes an instance of
    ``FSDPModule`` as well; its parameters become this rank's shards, over which any elementwise optimizer of torch can
    be built; ``model(...)`` and ``backward()`` are used as ever. One iteration is::

        for microbatch in microbatches[:-1]:
            with model.no_sync(): (loss(model, microbatch) / n).backward()
        (loss(model, microbatches[-1]) / n).backward()    # .grad of the shards is complete when it returns
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(); optimizer.zero_grad()

    module                 on any device, or on meta
    mesh                   ranks to shard over: a group, a DeviceMesh of one dim, or of two: (outer, inner). None: the
                           default group, or a world of one without ``torch.distributed``
    placements             a row of ``PLACEMENTS`` by name, or one of your own: what is whole and what is sharded at
                           rest, along both axes
    mixed_precision        dtypes of computation, of gradients and of their reduction
    reshard_after_forward  let whole parameters go between forward and backward; None: unless the unit is the outermost.
                           Needs placements that shard parameters
    offload_to_cpu         shards, gradients and with them the optimizer live in pinned host memory; CUDA only
    init_fn                initialises one module's own parameters after they came from meta; None: its
                           ``reset_parameters()``. A unit's whole parameters exist while it is being wrapped
    init_sync              copy the first rank's parameters and buffers to all ranks
    device                 where the module computes; None: that of a DeviceMesh, or where the parameters are
    ignored_params         parameters that stay as they are, and are nobody's business here

    Gradients are averaged over all ranks of the outermost unit, those of experts with a mesh of their own too.

    Raises ``ValueError`` for a module or mesh that cannot be sharded so, naming the parameter; the same where the model
    differs between ranks.
    """
    placements = _row(placements)
    policy = mixed_precision or MixedPrecisionPolicy()
    _check_module(module)
    grid = make_grid(mesh, option="mesh")
    _check_placements(placements, grid, reshard_after_forward)
    inside = list(_own_modules(module))
    ignored = {id(param) for param in ignored_params}
    device = _device(device, mesh, inside, ignored)
    if offload_to_cpu and device.type != "cuda":
        raise ValueError(f"offload_to_cpu has no effect on {device}: shards are in host memory anyway; leave it False")
    _owned(module, ignored)  # refuses what it must before anything is moved
    materialize(inside, device, init_fn)
    owned = _owned(module, ignored)
    failures = FailureReporter()
    plans = list(plan_unit(owned, policy, shard_degree(placements, grid.inner_size, grid.outer_size)))
    with failures.watch("the comparison of models between ranks"):
        _compare(plans, grid, type(module).__name__)
    if init_sync:
        with failures.watch("the broadcast of parameters and buffers"):
            synchronize(inside, grid)

    by_name = {entry.name: entry for entry in owned}
    buckets = []
    for layout, trainable in plans:
        reduction = _reduction(grid, placements, policy, device)
        entries = [by_name[slot.spec.name] for slot in layout.slots]
        buckets.append(
            ShardedBucket(
                layout,
                entries,
                reduction,
                placements,
                device,
                unit=type(module).__name__,
                trainable=trainable,
                offload=offload_to_cpu,
            )
        )
    unit = Unit(module, type(module).__name__, buckets, policy, grid, reshard_after_forward=reshard_after_forward)
    for bucket in buckets:
        watch_steps(bucket)
        for pair in bucket.pairs:
            mark_replaced(pair.owned.param, unit.label)
    unit.register_shards()
    make_unit(module, unit)
    install_state_dict_hooks(module, mesh if isinstance(mesh, DeviceMesh) else None)
    return module


def _reduction(
    grid: RankGrid, placements: Placements, policy: MixedPrecisionPolicy, device: torch.device
) -> ShardReduction:
    return ShardReduction(grid, placements, factor=1.0 / grid.size, wire_dtype=policy.wire_dtype, device=device)


def _row(placements: str | Placements) -> Placements:
    if isinstance(placements, str):
        if placements not in PLACEMENTS:
            raise ValueError(f"placements '{placements}' is none of {', '.join(PLACEMENTS)}")
        placements = PLACEMENTS[placements]
    placements.check()
    if placements.inner.optimizer is Placement.WHOLE:
        raise ValueError(
            "placements that shard nothing are plain data parallelism: use maingrad.ddp.DistributedDataParallel"
        )
    return placements


def _check_placements(placements: Placements, grid: RankGrid, reshard_after_forward: bool | None) -> None:
    if reshard_after_forward and placements.inner.parameter is Placement.WHOLE:
        raise ValueError(
            "reshard_after_forward=True has no effect where placements keep parameters whole; leave it None, or shard "
            "them ('zero3')"
        )
    if placements.outer.scatters and grid.outer is None:
        raise ValueError(
            "placements that shard across instances need a DeviceMesh of two dims, (outer, inner), and this mesh has "
            "one instance; use 'zero3'"
        )


def _check_module(module: nn.Module) -> None:
    if isinstance(module, FSDPModule):
        raise ValueError(f"{unit_of(module).label} ({type(module).__name__}) is fully sharded already")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"{type(module).__name__} has no forward, and a unit is gathered for its forward: shard its members"
        )


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those inside it, without units and what is inside them."""
    seen: set[int] = set()
    stack = [module]
    while stack:
        found = stack.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        stack += [child for child in reversed(list(found.children())) if not isinstance(child, FSDPModule)]


def _owned(module: nn.Module, ignored: Collection[int]) -> list[OwnedParam]:
    """The parameters that this unit shards, with all modules that register them."""
    inside = {id(found) for found in _own_modules(module)}
    owned = []
    for entry in find_owned_params(module):
        name, param, owners = entry
        if id(param) in ignored:
            continue
        strangers = [owner for owner, _ in owners if id(owner) not in inside]
        if isinstance(param, ShardedParameter):
            if len(strangers) < len(owners):
                raise ValueError(
                    f"parameter '{name}' is sharded by unit '{param.shard.unit}' and registered outside it as well: "
                    f"wrap from the inside out, and leave tied parameters to one unit that holds all their modules"
                )
            continue
        other = replaced_in(param)
        if other is not None:
            raise ValueError(
                f"parameter '{name}' was sharded by {other} and is registered here as well: make one unit of all "
                f"modules that share it, before any of them is sharded"
            )
        check_unattached(param, name)
        if param.grad is not None:
            raise ValueError(f"parameter '{name}' already has a .grad: call module.zero_grad() before fully_shard")
        if param.is_complex():
            raise ValueError(f"parameter '{name}' is {param.dtype}: shards are of real parameters; list it as ignored")
        if not param.is_leaf:
            raise ValueError(f"parameter '{name}' is computed from others: shard those")
        owned.append(entry)
    return owned


def _device(
    device: torch.device | str | None,
    mesh: dist.ProcessGroup | DeviceMesh | None,
    inside: Sequence[nn.Module],
    ignored: Collection[int],
) -> torch.device:
    if device is None and isinstance(mesh, DeviceMesh):
        device = mesh.device_type
    if device is not None:
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return device
    found = {param.device for module in inside for param in module._parameters.values() if param is not None}
    found = {place for place in found if place.type != "meta"}
    if len(found) > 1:
        raise ValueError(f"parameters are on {', '.join(sorted(map(str, found)))}: say which by device")
    if not found and any(param is not None for module in inside for param in module._parameters.values()):
        raise ValueError("parameters on the meta device: say by device, or a DeviceMesh, where they are to be")
    return found.pop() if found else torch.device("cpu")


def _compare(plans: Sequence[tuple[BucketLayout, bool]], grid: RankGrid, unit: str) -> None:
    lines = [
        f"{unit}'s '{slot.spec.name}' {slot.spec.param_dtype} {list(slot.spec.shape)}"
        f"{'' if trainable else ' frozen'}{' delayed' if slot.spec.delayed else ''}"
        for layout, trainable in plans
        for slot in layout.slots
    ]
    for group in grid.axes:
        compare_between_ranks(group, {"model": lines})
