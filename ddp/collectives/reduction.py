"""What is sharded at rest, and how a bucket's gradients are summed over all ranks.

A wrapper's ranks form a grid of two axes. The ranks of an *inner* group are an instance: together they hold one copy of
everything that is sharded. An *outer* group joins the ranks at the same position of all instances. Plain data
parallelism and ZeRO-1 have one instance.

==========  =====================================  =====================================  ============================
row         inner: parameter, gradient, optimizer  outer: parameter, gradient, optimizer  collectives of one step
==========  =====================================  =====================================  ============================
ddp         whole, whole, whole                    whole, whole, whole                    all-reduce
zero1       whole, whole, sharded                  whole, whole, whole (one instance)     reduce-scatter, all-gather
hybrid      whole, whole, sharded                  whole, whole, whole                    the same inside an instance,
                                                                                          all-reduce of shards across
zero2       whole, sharded, sharded                whole, whole, whole                    reduce-scatter of every
                                                                                          microbatch, all-gather
zero3       sharded, sharded, sharded              whole, whole, whole                    and an all-gather before each
                                                                                          unit's forward and backward
hsdp        sharded, sharded, sharded              whole, whole, whole                    the same inside an instance,
                                                                                          all-reduce of shards across
hsdp_zero1  sharded, sharded, sharded              whole, whole, sharded                  inside as zero3, across as
                                                                                          zero1
==========  =====================================  =====================================  ============================

The first three rows are what ``DistributedDataParallel`` offers; ``maingrad.fsdp`` offers all but the first.
ZeRO's stages are Rajbhandari et al. (2020): stage 1 shards the optimizer, 2 the gradients too, 3 the parameters too.

Forms of reduction, and the collectives of each form:

=============================  ==========================================================  ==========================
form                           inside an instance                                          across instances
=============================  ==========================================================  ==========================
all-reduce                     all-reduce of the bucket                                    all-reduce of the bucket
reduce-scatter                 reduce-scatter: each rank gets its shard's sum              all-reduce of the shard
half on the wire               all-to-all of the bucket in bf16; each rank then sums the   all-reduce of the shard
                               received shards in fp32
reduce-scatter on both axes    reduce-scatter: each rank gets its shard's sum              reduce-scatter of the shard
copies                         as above, of the shards of this rank's column alone, over   as above
                               the column
=============================  ==========================================================  ==========================

Copies are parameters of which each tensor-parallel rank has the whole gradient. A column is the ranks of one
tensor-parallel index: their data differ, and gradients of other columns are equal to theirs. With 2 x 2 ranks::

    rank        0 1 2 3          column 0: ranks 0 2 reduce shards 0 2
    its shard   0 1 2 3          column 1: ranks 1 3 reduce shards 1 3

Gradients are multiplied by ``factor`` before they are summed: by NCCL inside the collective, or else by each rank.
"""

import enum
import functools
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import DistributedDataParallelConfig
from ..torch_internals.distributed import premultiplied_sum, start_reduce_scatter
from .in_flight import InFlight, in_stages
from .rank_grid import RankGrid, backends_of

__all__ = [
    "PLACEMENTS",
    "AxisPlacement",
    "CopiesReduction",
    "GradReduction",
    "Placement",
    "Placements",
    "make_reductions",
    "placements_of",
]


class Placement(enum.Enum):
    """How a tensor lies along one axis of ranks."""

    WHOLE = "whole"
    """Every rank holds all of it."""
    SHARDED = "sharded"
    """Every rank holds a shard; all shards have one length."""


class AxisPlacement(NamedTuple):
    """The three kinds of tensors along one axis. A sharded parameter implies a sharded gradient, and that a sharded
    optimizer."""

    parameter: Placement
    gradient: Placement
    """The gradient buffer at rest. ``optimizer`` says which part of the buffer the optimizer reads."""
    optimizer: Placement
    """Master weights and moments."""

    @property
    def scatters(self) -> bool:
        """Whether gradients are reduce-scattered (each rank needs the sum of its shard only), and not all-reduced."""
        return self.optimizer is Placement.SHARDED

    def reduces_once(self, reduce_every_microbatch: bool | None) -> bool:
        """Whether whole gradients stay from one microbatch to the next: where they are at rest, or reductions wait."""
        return reduce_every_microbatch is False or self.gradient is Placement.WHOLE

    @property
    def gathers(self) -> bool:
        """Whether parameters are all-gathered after a step: each rank updates its shard and holds whole parameters."""
        return self.optimizer is Placement.SHARDED and self.parameter is Placement.WHOLE


class Placements(NamedTuple):
    """One row of the table."""

    inner: AxisPlacement
    outer: AxisPlacement

    def check(self) -> None:
        """Raise ``ValueError`` for a combination that cannot work: an optimizer without the gradients that it reads."""
        for name, axis in zip(self._fields, self, strict=True):
            order = [kind is Placement.SHARDED for kind in axis]
            if order != sorted(order):
                raise ValueError(
                    f"{name} axis: parameter {axis.parameter.value}, gradient {axis.gradient.value}, optimizer "
                    f"{axis.optimizer.value}: what shards the parameter must shard the gradient, and what shards the "
                    f"gradient the optimizer"
                )
        for kind, inner, outer in zip(AxisPlacement._fields, self.inner, self.outer, strict=True):
            if (inner, outer) == (Placement.WHOLE, Placement.SHARDED):
                raise ValueError(
                    f"{kind}: whole on the inner axis and sharded on the outer one; swap the axes of the mesh"
                )
        if Placement.SHARDED in (self.outer.parameter, self.outer.gradient):
            raise ValueError(
                "parameters or gradients sharded on both axes are sharded over all ranks: give a mesh of one dim"
            )


_WHOLE = AxisPlacement(Placement.WHOLE, Placement.WHOLE, Placement.WHOLE)
_STAGE_1 = AxisPlacement(Placement.WHOLE, Placement.WHOLE, Placement.SHARDED)
_STAGE_2 = AxisPlacement(Placement.WHOLE, Placement.SHARDED, Placement.SHARDED)
_STAGE_3 = AxisPlacement(Placement.SHARDED, Placement.SHARDED, Placement.SHARDED)

PLACEMENTS = {
    "ddp": Placements(inner=_WHOLE, outer=_WHOLE),
    "zero1": Placements(inner=_STAGE_1, outer=_WHOLE),
    "hybrid": Placements(inner=_STAGE_1, outer=_WHOLE),
    "zero2": Placements(inner=_STAGE_2, outer=_WHOLE),
    "zero3": Placements(inner=_STAGE_3, outer=_WHOLE),
    "hsdp": Placements(inner=_STAGE_3, outer=_WHOLE),
    "hsdp_zero1": Placements(inner=_STAGE_3, outer=_STAGE_1),
}
"""The rows by name. ``zero1`` and ``hybrid``, ``zero3`` and ``hsdp`` differ in the grid alone: one instance, or
several."""


def placements_of(config: DistributedDataParallelConfig) -> Placements:
    """The row that a ``DistributedDataParallel``'s config means."""
    if not config.use_distributed_optimizer:
        return PLACEMENTS["ddp"]
    return PLACEMENTS["zero1" if config.num_distributed_optimizer_instances == 1 else "hybrid"]


# ---- What follows from a row for one bucket.


class GradReduction:
    """The reduction of every bucket of one kind of parameters.

    grid           the ranks
    placements     the row of ``PLACEMENTS``
    factor         each rank's gradients are multiplied by it; 1 / ranks for an average, 1 for a sum
    wire_dtype     dtype in which gradients are sent; None: the accumulators' dtype
    in_collective  True: NCCL multiplies by ``factor``; False: each rank does; None: NCCL where all groups are NCCL's
    device         of the gradients
    """

    def __init__(
        self,
        grid: RankGrid,
        placements: Placements,
        *,
        factor: float,
        wire_dtype: torch.dtype | None = None,
        in_collective: bool | None = None,
        device: torch.device,
    ) -> None:
        self.grid = grid
        self.scatters = placements.inner.scatters
        self.scatters_across = placements.outer.scatters
        self.factor = factor
        self.wire_dtype = wire_dtype
        if in_collective is None:
            backends = backends_of(grid.axes, device)
            on_nccl = bool(backends) and all("nccl" in each for each in backends)
            in_collective = wire_dtype is None and on_nccl and premultiplied_sum is not None
        self.in_collective = in_collective

    @property
    def name(self) -> str:
        """Name of the collective inside an instance, for labels and records."""
        if not self.scatters:
            return "all_reduce"
        return "reduce_scatter" if self.wire_dtype is None else "all_to_all"

    @property
    def num_replicas(self) -> int:
        """Number of ranks, this one included, that hold the same reduced gradients as this rank."""
        across = 1 if self.scatters_across else self.grid.outer_size
        return across if self.scatters else across * self.grid.inner_size

    @property
    def num_collectives(self) -> int:
        """Number of collectives for one bucket, in ``inside`` and ``across`` together.

        The launcher makes as many streams. On CPUs it has to know whether there is a second one, which begins in a
        wait: all ranks must then wait in one order. A form with two collectives inside an instance counts both.
        """
        return len(list(self.grid.axes))

    def owned_range(self, numel: int) -> tuple[int, int]:
        """[start, end) of the bucket's elements whose sum over all ranks this rank gets: its shard, or all elements.

        numel  of the bucket
        """
        start, end = self.range_inside(numel)
        if not self.scatters_across:
            return start, end
        size = (end - start) // self.grid.outer_size
        return start + self.grid.outer_rank * size, start + (self.grid.outer_rank + 1) * size

    def range_inside(self, numel: int) -> tuple[int, int]:
        """[start, end) of the elements whose sum over its instance this rank gets from ``inside``."""
        if not self.scatters:
            return 0, numel
        size = numel // self.grid.inner_size
        return self.grid.inner_rank * size, (self.grid.inner_rank + 1) * size

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of a bucket of ``numel`` accumulators of ``dtype`` in the dtype in which it is sent."""
        if self.wire_dtype is None:
            return numel * dtype.itemsize
        return numel * self.wire_dtype.itemsize * (2 if dtype.is_complex else 1)

    def start(self, grads: Tensor, into: Tensor | None = None) -> InFlight:
        """Reduce ``grads`` [n] in place, asynchronously. Outside ``owned_range`` the result is undefined.

        into  [range_inside] gets the result of a reduce-scatter in place of ``grads``
        """
        # Step 6.3 of docs/by_hand.py, where the table above says which collectives.
        return in_stages(self._stages(grads, into), (grads,))

    def inside(self, grads: Tensor, into: Tensor | None = None) -> Generator[Any, None, Tensor]:
        """The stages inside an instance. Returns a tensor that holds the sum of ``grads[range_inside]`` after them.

        into  memory that a reduce-scatter may write the result to; None: a view of ``grads``
        """
        inner = self.grid.inner
        on_the_wire = self.wire_dtype is not None and self.grid.inner_size > 1
        if self.factor != 1.0 and not self.in_collective and not on_the_wire:
            grads.mul_(self.factor)
        mine = grads[slice(*self.range_inside(grads.numel()))]
        if self.grid.inner_size > 1:
            if into is not None and self.scatters and into.dtype is grads.dtype:
                mine = into
            if on_the_wire:
                yield from self._sum_shards(grads, mine)
            elif self.scatters:
                assert inner is not None, "a group of more than one rank"
                # With one collective for each bucket the launcher has one stream. NCCL runs on it, and not on torch's
                # stream for NCCL, which costs the host two events.
                on_stream = grads.is_cuda and self.grid.outer_size == 1
                yield start_reduce_scatter(mine, grads, self._op(inner), inner, on_stream=on_stream)
            else:
                yield dist.all_reduce(grads, op=self._op(inner), group=inner, async_op=True)
        return mine

    def across(self, mine: Tensor) -> Generator[Any, None, Tensor]:
        """The stages across instances, in place. Returns the part of ``mine`` that this rank owns after them.

        mine  what ``inside`` returned, or the sum of several such results
        """
        outer = self.grid.outer
        if self.grid.outer_size == 1:
            return mine
        # ``inside`` has scaled already, unless the inner axis has one rank.
        op = self._op(outer) if self.grid.inner_size == 1 else dist.ReduceOp.SUM
        if not self.scatters_across:
            yield dist.all_reduce(mine, op=op, group=outer, async_op=True)
            return mine
        part = mine.view(self.grid.outer_size, -1)[self.grid.outer_rank]
        assert outer is not None, "a group of more than one rank"
        yield start_reduce_scatter(part, mine, op, outer)
        return part

    def _stages(self, grads: Tensor, into: Tensor | None) -> Iterator[Any]:
        mine = yield from self.inside(grads, into)
        yield from self.across(mine)

    def _sum_shards(self, grads: Tensor, mine: Tensor) -> Iterator[Any]:
        """Send every rank its shard, scaled and rounded once to ``wire_dtype``; sum the received shards in fp32.

        Scratch memory: twice the bucket in ``wire_dtype``, until the bucket is reduced.
        """
        if grads.is_complex():
            grads, mine = torch.view_as_real(grads).view(-1), torch.view_as_real(mine).view(-1)
        sent = torch.empty_like(grads, dtype=self.wire_dtype)
        torch.mul(grads, self.factor, out=sent)
        received = torch.empty_like(sent)
        yield dist.all_to_all_single(received, sent, group=self.grid.inner, async_op=True)
        torch.sum(received.view(self.grid.inner_size, -1), dim=0, dtype=mine.dtype, out=mine)

    def _op(self, group: dist.ProcessGroup | None) -> Any:
        """The sum, with the multiplication by ``factor`` where NCCL does it."""
        if not self.in_collective or self.factor == 1.0:
            return dist.ReduceOp.SUM
        assert group is not None, "a group of more than one rank"
        return _scaled_sum(self.factor, group.size())


class CopiesReduction(GradReduction):
    """The reduction of buckets of which each tensor-parallel rank has the whole gradient, equal to the other ranks'.

    Nothing is sent between columns. The gather of what ranks have made of their shards makes the copies equal.

    grid        the ranks that the bucket is sharded over: of all columns
    placements  see ``GradReduction``; gradients are reduce-scattered
    column      the reduction over this rank's column, by the same placements
    """

    def __init__(self, grid: RankGrid, placements: Placements, column: GradReduction, device: torch.device) -> None:
        super().__init__(
            grid,
            placements,
            factor=column.factor,
            wire_dtype=column.wire_dtype,
            in_collective=column.in_collective,
            device=device,
        )
        self._column = column
        ranks = grid.ranks
        self._shards = [ranks.index(rank) for rank in column.grid.ranks]

    @property
    def num_collectives(self) -> int:
        """See ``GradReduction``."""
        return self._column.num_collectives

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """See ``GradReduction``: bytes of the column's shards."""
        return self._column.wire_nbytes(numel // self.grid.inner_size * len(self._shards), dtype)

    def inside(self, grads: Tensor, into: Tensor | None = None) -> Generator[Any, None, Tensor]:
        """See ``GradReduction``. Scratch memory: the column's shards, where they are not adjacent."""
        shards, (first, last) = grads.view(self.grid.inner_size, -1), (self._shards[0], self._shards[-1])
        if self._shards == [*range(first, last + 1)]:
            own = shards[first : last + 1].view(-1)
        else:
            own = torch.cat([shards[index] for index in self._shards])
        target = shards[self.grid.inner_rank] if into is None else into
        mine = yield from self._column.inside(own, target)
        if into is None or mine is into:
            return mine
        return into.copy_(mine)

    def across(self, mine: Tensor) -> Generator[Any, None, Tensor]:
        """See ``GradReduction``."""
        return (yield from self._column.across(mine))


@functools.cache
def _scaled_sum(factor: float, num_ranks: int) -> Any:
    if factor == 1.0 / num_ranks:
        return dist.ReduceOp.AVG
    if premultiplied_sum is None:
        raise RuntimeError(
            f"average_in_collective: torch {torch.__version__} does not show NCCL's scaled sum: leave it None"
        )
    return premultiplied_sum(factor)


def make_reductions(
    config: DistributedDataParallelConfig, grids: Mapping[str, RankGrid], device: torch.device
) -> dict[str, GradReduction]:
    """The reduction of each kind of parameters.

    Gradients are divided by the number of ranks that average losses, or only summed with ``calculate_per_token_loss``.
    Where each tensor-parallel rank has the whole gradient, these count once: a rank takes its own, or their mean, which
    keeps replicas equal bit for bit where nothing is gathered after a step.
    """
    row, averaging = placements_of(config), grids["slice"]
    data_ranks = averaging.size if config.calculate_per_token_loss else 1

    def reduction(kind: str, grid: RankGrid) -> GradReduction:
        counts = grid if kind in ("dense", "mean") else averaging
        return GradReduction(
            grid,
            row,
            factor=data_ranks / counts.size,
            wire_dtype=config.grad_reduce_wire_dtype,
            in_collective=config.average_in_collective,
            device=device,
        )

    reductions = {kind: reduction(kind, grid) for kind, grid in grids.items()}
    if row.inner.gathers and grids["dense"].size > averaging.size:
        reductions["dense"] = CopiesReduction(grids["dense"], row, reductions["slice"], device)
    return reductions
