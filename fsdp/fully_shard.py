"""``fully_shard``: checks a module, plans its buckets, shards its parameters and makes it a unit."""

from collections.abc import Callable, Collection
from typing import Literal, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..ddp.collectives.failure_report import FailureReporter, run_on_all_ranks
from ..ddp.collectives.rank_grid import Ranks, in_two_dims, make_grid
from ..ddp.collectives.reduction import Placements
from ..ddp.config import with_names_meant
from ..ddp.contract.module import record_shard
from ..ddp.plan.model_slice import model_slice_of
from ..ddp.plan.owned_params import take_marks
from ..ddp.plan.tensor_parallel.localize import ranks_told
from .module import make_unit
from .state.optimizer_watch import mark_replaced, watch_steps
from .state.state_dict import install_state_dict_hooks
from .unit.bucket import ShardedBucket
from .unit.materialize import materialize, synchronize
from .unit.plan import MixedPrecisionPolicy, ShardAtoms, UnitOptions, plan_unit, shard_degree
from .unit.unit import Unit
from .unit.weight_unit import WeightBucket, make_weight_units
from .unit_checks import (
    UnitParts,
    check_copies_of,
    check_unit,
    check_whose_experts,
    compare_units,
    policy_of,
    record_ignored,
    row_of,
)

__all__ = ["fully_shard"]

_Module = TypeVar("_Module", bound=nn.Module)


@with_names_meant(
    mp_policy="write mixed_precision=maingrad.fsdp.MixedPrecisionPolicy(...)",
    offload_policy="write offload_to_cpu=True",
    shard_placement_fn="write shard_atoms='row'; each rank holds a range of elements",
    process_group="write mesh=...",
    device_mesh="write mesh=...",
    device_id="write device=...",
    auto_wrap_policy="call fully_shard on each block, then on the model, or maingrad.parallelize(model, 'zero3')",
    sharding_strategy="write placements='zero3', or another of PLACEMENTS",
    zero_dp_strategy="write placements='zero1', 'zero2' or 'zero3'",
    fsdp_unit_modules="call fully_shard on each block, then on the model, or maingrad.parallelize(model, 'zero3')",
)
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
    copy_engine_gather: Literal["auto", True, False] = "auto",
    init_fn: Callable[[nn.Module], None] | None = None,
    init_sync: bool = True,
    forward_writes: Literal["refused", "alike"] = "refused",
    device: torch.device | str | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    tensor_parallel_group: Ranks = None,
    distributed_weights: bool = False,
) -> _Module:
    """Make one unit of ``module``: shard its parameters, without those of units inside it. Returns the same module.

    Call ``fully_shard`` from the inside out: on each transformer block, then on the whole model. The module becomes an
    instance of ``FSDPModule`` as well. Its parameters become this rank's shards, and any elementwise optimizer of torch
    can be built over them. Collective over ``mesh``. One iteration is::

        for microbatch in microbatches[:-1]:
            with model.no_sync(): (loss(model, microbatch) / n).backward()
        (loss(model, microbatches[-1]) / n).backward()    # .grad of the shards is complete when it returns
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step(); optimizer.zero_grad()

    module                   on any device, or on the meta device
    mesh                     ranks to shard over: a process group, or a DeviceMesh of one dim, of two dims (outer,
                             inner), or of three (outer, inner, "cp"), whose last two are one. ``WORLD_OF_ONE``: this
                             process alone. None: the default group, or this process alone without a launcher
    placements               name of a row of ``PLACEMENTS``, or a ``Placements``: whether parameters, gradients and
                             optimizer state are whole or sharded at rest, along both axes
    mixed_precision          dtypes of computation, gradients and reduction; None: ``MixedPrecisionPolicy()``
    reshard_after_forward    True: free the whole parameters between forward and backward, unless placements keep them
                             whole. None: True for every unit but the outermost
    reduce_every_microbatch  False: under ``no_sync`` whole gradients stay in memory, and one reduction an iteration
                             sums them, as with placements that keep gradients whole ('zero1'). None: True
    bucket_size              number of elements at which a bucket of the unit is closed; gradients of different buckets
                             take memory one after the other. None: max(40e6, 1e6 * number of shards)
    shard_atoms              what no border between shards may cut: "element" (no restriction), "block" (256 elements
                             from the parameter's start; for moments in 8 bits), "row" (an entry of dim 0), "whole" (a
                             parameter; for optimizers of matrices), or a number of rows. One value for all parameters,
                             or a dict from patterns of names. Larger atoms need more padding
    offload_to_cpu           shards, their gradients and the optimizer state are in pinned host memory; CUDA only
    copy_engine_gather       True on the outermost unit: gathers run on copy engines (NCCL 2.28), by kernels where ranks
                             cannot map each other's memory. "auto": where they gain, for a process's first model
    init_fn                  gives one module from the meta device all its values; None: its ``reset_parameters()``
    init_sync                copy the first rank's parameters and buffers to all ranks
    forward_writes           of parameters, in place (``nn.Embedding(max_norm=...)``, a codebook). "alike": all ranks
                             write equal values, which the shards get. "refused": such a forward of several ranks raises
    device                   where the module computes; None: the DeviceMesh's device, or that of the parameters
    ignored_params           parameters that are neither sharded nor reduced
    tensor_parallel_group    ranks with the other slices of parameters that Megatron-core marks, where ``mesh`` has the
                             ranks with the same. None: the ranks over which ``parallelize_module`` has cut
    distributed_weights      True: modules of Transformer Engine, from 2.19 on, ask for their weights one by one

    Gradients are averages over all ranks of the outermost unit. That includes experts, which have a smaller mesh.
    Raises ``ValueError`` if the module or mesh cannot be sharded, or if the module differs between ranks.
    """
    as_given = (reshard_after_forward, reduce_every_microbatch, bucket_size, shard_atoms, offload_to_cpu)
    rest = (copy_engine_gather, init_sync, forward_writes, distributed_weights)
    grid, failures = make_grid(mesh, option="mesh"), FailureReporter()
    ignored = record_ignored(ignored_params, grid)

    def prepare() -> UnitParts:
        row, policy = row_of(placements), policy_of(mixed_precision)
        options = UnitOptions(row, policy, *as_given, *rest)
        return _plan(check_unit(module, options, grid, mesh, device, ignored, tensor_parallel_group), init_fn)

    what = f"the checks of {type(module).__name__} before it is sharded"
    tensor_ranks = ranks_told(module, tensor_parallel_group) if isinstance(module, nn.Module) else None
    parts = run_on_all_ranks(prepare, grid._replace(tensor=tensor_ranks).axes, failures, what)
    _make_alike(parts, failures, named=mesh is not None)
    _take_over(parts, in_two_dims(mesh) if isinstance(mesh, DeviceMesh) else None)
    return module


def _plan(parts: UnitParts, init_fn: Callable[[nn.Module], None] | None) -> UnitParts:
    """Materialise the parts, and plan them."""
    options, grid = parts.options, parts.grid
    overwritten = options.init_sync and not grid.is_first
    materialize(parts.modules, parts.device, init_fn, parts.ignored, overwritten=overwritten)
    owned = [entry.read_again() for entry in parts.owned]  # a parameter on the meta device is another one now
    degree = shard_degree(options.placements, grid.inner_size, grid.outer_size)
    plans = list(plan_unit(owned, options.policy, degree, options.shard_atoms, options.bucket_size, parts.groups))
    return parts._replace(owned=owned, plans=plans)


def _make_alike(parts: UnitParts, failures: FailureReporter, *, named: bool) -> None:
    """Compare the unit between ranks; then copy the first rank's values to all. ``named``: the user gave a mesh."""
    compare_units(parts, failures)
    if not named:
        check_whose_experts(parts, failures)
    if parts.options.init_sync:
        with failures.watch("the broadcast of parameters and buffers"):
            synchronize(parts.modules, parts.grid, parts.ignored)
        check_copies_of(parts, failures)


def _take_over(parts: UnitParts, mesh: DeviceMesh | None) -> None:
    """Shard the parameters, make the unit, register the shards, and have steps of optimizers watched. ``mesh``: the
    user's, for state dicts."""
    device, options, grid = parts.device, parts.options, parts.grid
    by_name = {entry.name: entry for entry in parts.owned}
    slices = {name: found for name, entry in by_name.items() if (found := model_slice_of(entry.param)) is not None}
    take_marks(parts.module, slices)
    buckets = []
    for layout, trainable in parts.plans:
        params = [by_name[slot.spec.name] for slot in layout.slots]
        kind = WeightBucket if params[0].name in parts.groups else ShardedBucket
        buckets.append(kind(layout, params, grid, options, device, unit=parts.name, trainable=trainable))
    weights = make_weight_units(parts.groups, buckets, options, grid, device, parts.modules)
    mine = [bucket for bucket in buckets if not isinstance(bucket, WeightBucket)]
    unit = Unit(mine, options, grid, device, parts.modules, weights)
    for bucket in buckets:
        watch_steps(bucket)
    for pair in unit.pairs:
        mark_replaced(pair.before, unit.label)
        record_shard(pair.whole, pair.sharded)
    unit.registered.show_whole_to_foreign_delays()
    unit.registered.register()
    make_unit(parts.module, unit)
    install_state_dict_hooks(parts.module, mesh)
