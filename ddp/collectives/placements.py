"""Which of parameters, gradients and optimizer state are sharded at rest: one table, from which collectives follow.

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
"""

import enum
from typing import NamedTuple

from ..config import DistributedDataParallelConfig

__all__ = ["PLACEMENTS", "AxisPlacement", "Placement", "Placements", "placements_of"]


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
