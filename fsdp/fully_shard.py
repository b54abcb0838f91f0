"""``fully_shard``: makes a unit of a module."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..ddp.collectives.agreement import alike
from ..ddp.collectives.failure_report import FailureReporter
from ..ddp.collectives.mapped_memory import check_copy_engines
from ..ddp.collectives.placements import Placements
from ..ddp.collectives.rank_grid import RankGrid, make_grid
from ..ddp.collectives.reduction import GradReduction
from ..ddp.collectives.world import Ranks
from ..ddp.contract.module import note_shard
from ..ddp.plan.layout import BucketLayout
from ..ddp.plan.owned_params import OwnedParam
from ..ddp.stock.clipping import guard_stock_clipping
from ..ddp.wrapper.dropped import forget_dropped
from ..ddp.wrapper.init_sync import check_same_experts
from .module import make_unit
from .state.optimizer_watch import mark_replaced, watch_steps
from .state.state_dict import install_state_dict_hooks
from .unit.bucket import ShardedBucket
from .unit.materialize import materialize, synchronize
from .unit.mixed_precision import MixedPrecisionPolicy
from .unit.plan import ShardAtoms, plan_unit, shard_degree
from .unit.unit import Unit
from .unit_checks import (
    check_module,
    check_offload,
    check_placements,
    compare_units,
    device_of,
    own_modules,
    own_params,
    row_of,
)

__all__ = ["fully_shard"]

_WHOSE_EXPERTS = (
    "call fully_shard on the experts first, with a mesh of the ranks that do, maingrad.ddp.WORLD_OF_ONE where each has "
    "its own; or give this call a mesh too, torch.distributed.group.WORLD, where all are to have the same"
)

_Module = TypeVar("_Module", bound=nn.Module)


def fully_shard(
    module: _Module,
    mesh: Ranks = None,
    placements: str | Placements = "zero3",
    mixed_precision: MixedPrecisionPolicy | None = None,
    *,
    reshard_after_forward: bool | None = None,
    reduce_every_microbatch: bool | None = None,
    bucket_size: int | None = None,
    shard_atoms: ShardAtoms = "element",
    offload_to_cpu: bool = False,
    copy_engine_gather: bool = False,
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

    module                   on any device, or on meta
    mesh                     ranks to shard over: a group, a DeviceMesh of one dim, or of two: (outer, inner);
                             ``maingrad.ddp.WORLD_OF_ONE``: this process alone. None: the default group, or a world of
                             one where no launcher has started several ranks
    placements               a row of ``PLACEMENTS`` by name, or one of your own: what is whole and what is sharded at
                             rest, along both axes
    mixed_precision          dtypes of computation, of gradients and of their reduction
    reshard_after_forward    let whole parameters go between forward and backward; None: unless the unit is the
                             outermost. Needs placements that shard parameters
    reduce_every_microbatch  False: under ``no_sync`` whole gradients stay in memory, and an iteration reduces them
                             once; None: as placements say, which keep them whole ('zero1') or do not
    bucket_size              elements at which the unit's buckets are closed, whose gradients take memory one after the
                             other; None: max(40e6, 1e6 shards), which keeps links busy
    shard_atoms              what no border between ranks' shards may cut: "element", "row" (entries of dim 0), "whole"
                             (parameters; for optimizers of matrices), or a number of rows; for all parameters, or by
                             patterns of their names in ``module``. Coarse atoms take padding, elements next to none
    offload_to_cpu           shards, gradients and with them the optimizer live in pinned host memory; CUDA only
    copy_engine_gather       gathers of the whole model run on the GPU's copy engines and take no multiprocessor from
                             what is computed; say it on the outermost unit. NCCL 2.28 or newer, kernels where ranks
                             cannot map each other's memory (several nodes). The process keeps what is mapped, the
                             outermost unit and three more, until it ends
    init_fn                  initialises one module's own parameters after they came from meta; None: its
                             ``reset_parameters()``. A unit's whole parameters exist while it is being wrapped
    init_sync                copy the first rank's parameters and buffers to all ranks
    device                   where the module computes; None: that of a DeviceMesh, or where the parameters are
    ignored_params           parameters that stay as they are, and are nobody's business here

    Gradients are averaged over all ranks of the outermost unit, those of experts with a mesh of their own too.

    Raises ``ValueError`` for a module or mesh that cannot be sharded so, naming the parameter; the same where the model
    differs between ranks.
    """
    policy, when = mixed_precision or MixedPrecisionPolicy(), (reshard_after_forward, reduce_every_microbatch)
    ignored = {id(param) for param in ignored_params}
    failures = FailureReporter()
    grid = make_grid(mesh, option="mesh")

    def prepare() -> _Prepared:
        wanted = _Wanted(row_of(placements), policy, *when, bucket_size, shard_atoms, offload_to_cpu, init_sync)
        return _prepare(module, wanted, grid, mesh, device, init_fn, ignored, copy_engines=copy_engine_gather)

    name = type(module).__name__
    prepared = alike(prepare, grid.axes, failures, f"the checks of {name} before it is sharded")
    buckets = _make_buckets(name, prepared, grid, ignored, failures, named=mesh is not None)
    unit = Unit(module, name, buckets, policy, grid, prepared.device, prepared.inside, reshard_after_forward)
    unit.copy_engines = copy_engine_gather
    _take_over(module, unit)
    install_state_dict_hooks(module, mesh if isinstance(mesh, DeviceMesh) else None)
    return module


class _Wanted(NamedTuple):
    """What the user wants of a unit, and all ranks must want alike."""

    placements: Placements
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool | None
    reduce_every_microbatch: bool | None
    bucket_size: int | None
    shard_atoms: ShardAtoms
    offload_to_cpu: bool
    init_sync: bool

    def check(self, grid: RankGrid, device: torch.device) -> None:
        """Raise ``ValueError`` for what cannot be, or has no effect."""
        check_placements(self.placements, grid, self.reshard_after_forward, self.reduce_every_microbatch)
        if self.offload_to_cpu:
            check_offload(device)


class _Prepared(NamedTuple):
    """A module that was checked and waits to be compared between ranks and sharded."""

    wanted: _Wanted
    device: torch.device
    inside: Sequence[nn.Module]
    """Its modules but for units inside it."""
    owned: Sequence[OwnedParam]
    plans: Sequence[tuple[BucketLayout, bool]]
    """Each bucket's layout, and whether its parameters are trained."""


def _prepare(
    module: nn.Module,
    wanted: _Wanted,
    grid: RankGrid,
    mesh: Ranks,
    device: torch.device | str | None,
    init_fn: Callable[[nn.Module], None] | None,
    ignored: Collection[int],
    *,
    copy_engines: bool,
) -> _Prepared:
    """Check the module, materialise it and plan its buckets: all that may fail on one rank alone."""
    check_module(module)
    inside = list(own_modules(module))
    on = device_of(device, mesh, grid, inside, ignored)
    wanted.check(grid, on)
    if copy_engines:
        check_copy_engines([grid], on, "copy_engine_gather")
    own_params(module, ignored)  # refuses what it must before anything is moved
    materialize(inside, on, init_fn, ignored)
    owned = own_params(module, ignored)
    for entry in owned:
        forget_dropped(entry.param, [owner for owner, _ in entry.owners])
    degree = shard_degree(wanted.placements, grid.inner_size, grid.outer_size)
    plans = list(plan_unit(owned, wanted.policy, degree, wanted.shard_atoms, wanted.bucket_size))
    return _Prepared(wanted, on, inside, owned, plans)


def _make_buckets(
    name: str,
    prepared: _Prepared,
    grid: RankGrid,
    ignored: Collection[int],
    failures: FailureReporter,
    *,
    named: bool,
) -> list[ShardedBucket]:
    """Compare the plan and then the values between ranks, and shard the parameters.

    named  somebody said which ranks there are
    """
    wanted, device, inside, owned, plans = prepared
    with failures.watch("the comparison of models between ranks"):
        dtypes = {entry.name: entry.param.dtype for entry in owned}
        said = [f"{option}={value}" for option, value in wanted._asdict().items()]
        compare_units(plans, dtypes, inside, said, grid, name)
        if not named:
            buffers = [entry for found in inside if wanted.init_sync for entry in found._buffers.items()]
            check_same_experts([*((entry.name, entry.param) for entry in owned), *buffers], grid, _WHOSE_EXPERTS)
    if wanted.init_sync:
        with failures.watch("the broadcast of parameters and buffers"):
            synchronize(inside, grid, ignored)
    by_name = {entry.name: entry for entry in owned}
    return [
        ShardedBucket(
            layout,
            [by_name[slot.spec.name] for slot in layout.slots],
            _reduction(grid, wanted, device),
            wanted.placements,
            device,
            unit=name,
            trainable=trainable,
            offload=wanted.offload_to_cpu,
            reduces_once=wanted.placements.inner.reduces_once(wanted.reduce_every_microbatch),
        )
        for layout, trainable in plans
    ]


def _reduction(grid: RankGrid, wanted: _Wanted, device: torch.device) -> GradReduction:
    factor = 1.0 / grid.size  # until the outermost unit is known
    return GradReduction(grid, wanted.placements, factor=factor, wire_dtype=wanted.policy.wire_dtype, device=device)


def _take_over(module: nn.Module, unit: Unit) -> None:
    """The module shows shards from here on, and optimizers are watched."""
    guard_stock_clipping(unit)
    for bucket in unit.buckets:
        watch_steps(bucket)
        for pair in bucket.pairs:
            mark_replaced(pair.before, unit.label)
            note_shard(pair.whole, pair.sharded)
    unit.registered.show_whole_to_foreign_delays()
    unit.registered.register_shards()
    make_unit(module, unit)
