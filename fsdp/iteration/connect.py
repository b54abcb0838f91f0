"""The set-up of a model at its first forward: names, ranks of norms, process groups, memory of copy engines."""

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ...ddp.buckets.buffer import MappedPool
from ...ddp.buckets.copy_engines import Gather, choose_copy_engines
from ...ddp.collectives.failure_report import FailureReporter, gather
from ...ddp.collectives.rank_grid import RankGrid, group_size, with_separate_gather
from ...ddp.collectives.streams import OnStream
from ...ddp.plan.model_slice import slice_of_marks
from ...ddp.plan.owned_params import is_marked_expert
from ..unit.bucket import ShardedBucket
from ..unit.unit import Unit

if TYPE_CHECKING:
    from .root import Root

__all__ = ["connect_units", "map_memory", "ranks_of_model", "ranks_of_norms", "use_copy_engines"]


def connect_units(
    module: nn.Module,
    units: Sequence[Unit],
    buckets: Sequence[ShardedBucket],
    root: "weakref.ref[Root]",
    failures: FailureReporter,
    *,
    copy_engines: bool,
) -> None:
    """Make ``units`` one model: names, separate process groups for gathers, the factor of averages. Collective.

    module        the outermost unit's
    units         the outermost first
    buckets       all of the units' buckets, about in backward's order
    root          of the model; it is being made
    failures      names what a rank waits for
    copy_engines  gathers run on copy engines

    Gradients are divided by the number of the outermost unit's ranks, also those of experts: an expert has seen the
    tokens of all ranks.
    """
    model_ranks = ranks_of_model(units)
    everyone = ranks_of_norms(units, model_ranks)
    names = {id(inner): name for name, inner in module.named_modules()}
    for unit in units:
        unit.join(names[id(unit.module())], everyone, root)
    if model_ranks.tensor is not None:
        _join_slices(units, model_ranks.tensor)
    grids = {id(grid.inner): grid for each in buckets if (grid := each.reduction.grid).gather is not grid.inner}
    with failures.watch("the making of process groups"):
        for bucket in buckets:
            grid = bucket.reduction.grid
            if id(grid.inner) not in grids:
                grids[id(grid.inner)] = with_separate_gather(grid, copy_engines=copy_engines)
            bucket.reduction.grid = grid._replace(gather=grids[id(grid.inner)].gather)
            bucket.reduction.factor = 1.0 / units[0].grid.size
    failures.grids = [*(bucket.reduction.grid for bucket in buckets), RankGrid(model_ranks.tensor, None, None)]
    index = 0
    for bucket in buckets:
        bucket.connect(index, failures)
        index += bucket.trainable


def use_copy_engines(units: Sequence[Unit], buckets: Sequence[ShardedBucket], failures: FailureReporter) -> bool:
    """Whether gathers run on copy engines: as any unit asks for, or by "auto" of the outermost. Collective.

    "auto" maps no memory where whole parameters stay at rest: the memory of all units would stay until exit.
    """
    if any(unit.copy_engine_gather is True for unit in units):
        return True
    if units[0].copy_engine_gather is False or any(bucket.whole_params_at_rest for bucket in buckets):
        return False
    gathers = [
        Gather(bucket.whole_params.nbytes, inner)
        for bucket in buckets
        if (inner := bucket.reduction.grid.inner) is not None and inner.size() > 1
    ]
    return choose_copy_engines(gathers, units[0].grid.axes, units[0].device, failures)


def ranks_of_model(units: Sequence[Unit]) -> RankGrid:
    """The ranks of the outermost unit, and the tensor-parallel ranks that slices of any unit tell."""
    found = [pair.sharded.shard.model_slice for unit in units for pair in unit.pairs]
    groups = (each.group for each in found if each is not None and each.grad != "expert")
    return units[0].grid._replace(tensor=next((group for group in groups if group_size(group) > 1), None))


def _join_slices(units: Sequence[Unit], tensor: dist.ProcessGroup) -> None:
    """Have all parameters know what they are of the whole: units without slices may have been sharded before.

    Raises ``ValueError`` for slices that nobody says it of. ``fully_shard`` of the outermost module has refused slices
    of several groups.
    """
    for pair in (pair for unit in units for pair in unit.pairs):
        info = pair.sharded.shard
        found = info.model_slice
        if found is None and (is_marked_expert(pair.whole) or info.is_slice):
            raise ValueError(
                f"the model is cut over tensor-parallel ranks, and unit {info.unit!r} with parameter {info.name!r} was "
                f"sharded without them: give all calls of fully_shard tensor_parallel_group"
            )
        found = slice_of_marks(pair.whole, tensor) if found is None else found
        if found.grad == "expert":
            continue
        copies = tensor.size() if found.dim is None else 1
        pair.sharded.shard = info._replace(model_slice=found, copies=copies)


def ranks_of_norms(units: Sequence[Unit], everyone: RankGrid) -> RankGrid | None:
    """The ranks that a norm of gradients, and the check for Inf, cover: all of the model. Collective.

    units     all units of the model, the outermost first
    everyone  the outermost unit's ranks, and the tensor-parallel ranks

    Units of experts have smaller meshes: the ranks that hold the same experts. A norm over such a mesh alone would
    differ between ranks, and ranks would clip by different coefficients. So a norm of an expert's gradient sums over
    all ranks: it includes the experts that other ranks hold at the same place of the model. Returns None if ranks hold
    different numbers of expert parameters.

    Raises ``ValueError`` on all ranks if a unit's mesh contains a rank that is not in the outermost unit's mesh.
    """
    apart = [unit for unit in units if unit.grid[:2] != everyone[:2]]
    here = {rank for unit in apart for group in unit.grid.axes for rank in dist.get_process_group_ranks(group)}
    count = sum(len(bucket.pairs) for unit in apart for bucket in unit.buckets if bucket.trainable)
    found = gather((here, count), everyone.axes, None, "the ranks of units")
    outside = set().union(*[ranks for ranks, _ in found.values()]) - found.keys()
    if outside:
        raise ValueError(
            f"a unit's mesh has ranks {sorted(outside)}, which are not among the outermost unit's: gradients are "
            f"averaged over the outermost unit's ranks, which must be all that have seen tokens"
        )
    return everyone if len({count for _, count in found.values()}) == 1 else None


def map_memory(units: Sequence[Unit], stream: torch.cuda.Stream | None, num_units: int) -> None:
    """Reserve memory that copy engines can reach, for the units that are gathered at the same time.

    units      the outermost first
    stream     of gathers; None on CPU
    num_units  number of units beside the outermost that are gathered at the same time

    Units take turns in this memory. All ranks take and free memory in one order, and so at the same places.
    """
    by_group: dict[int, list[ShardedBucket]] = {}
    for bucket in (bucket for unit in units for bucket in unit.buckets):
        if bucket.reduction.grid.inner_size > 1:
            by_group.setdefault(id(bucket.reduction.grid.gather), []).append(bucket)
    for buckets in by_group.values():
        gather, device = buckets[0].reduction.grid.gather, buckets[0].device
        assert gather is not None, "a group of more than one rank"
        pool = MappedPool(gather, device)
        # In each unit, the bytes of its buckets, rounded up to 2 MiB as the caching allocator does for large blocks.
        sizes = [
            sum(-(-bucket.whole_params.nbytes // 2**21) * 2**21 for bucket in unit.buckets if bucket in buckets)
            for unit in units
        ]
        if not buckets[0].whole_params_at_rest:
            sizes = [sizes[0], *sorted(sizes[1:], reverse=True)[:num_units]]
        with nullcontext() if stream is None else OnStream(stream):
            with pool.allocating():
                reserved = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            pool.share()
            del reserved
        for bucket in buckets:
            bucket.whole_params.pool = pool
