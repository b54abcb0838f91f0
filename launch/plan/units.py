"""The units of a run under ``parallel = "fsdp"`` or ``"hsdp"``, from shapes alone: no process group, no storage."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...ddp.collectives.placements import PLACEMENTS, Placement, Placements
from ...ddp.plan.layout import BucketLayout
from ...ddp.plan.owned_params import find_owned_params
from ...fsdp.unit.plan import plan_unit, shard_degree
from ..config.run import Config, FsdpConfig, ModelConfig, Parallel
from ..model.hugging_face import build_language_model
from ..training.units import units_of
from .parameter_count import ParameterCount
from .rank_bytes import RankBytes, Traffic, bucket_traffic
from .unit_bytes import PlacedBucket, sharded_rank_bytes

__all__ = ["PlacedUnit", "Plan", "UnitsPlan", "fsdp_alternatives", "place_units"]


class PlacedUnit(NamedTuple):
    """One unit, in the order in which a forward enters them."""

    name: str
    """Name of the module in the model; empty for the model itself."""
    buckets: tuple[PlacedBucket, ...]
    gathers_in_forward: int
    gathers_in_backward: int
    """All-gathers of each bucket in one step, from the second step on: the first step does not know the order yet."""
    reductions: tuple[int, ...]
    """Reductions of each bucket in one step, over the ranks of an instance; 1 for a bucket of delayed gradients."""

    @property
    def title(self) -> str:
        """The name, for a table."""
        return self.name or "(the model)"

    @property
    def param_nbytes(self) -> int:
        """Bytes of the unit's whole parameters."""
        return sum(bucket.param_nbytes for bucket in self.buckets)

    @property
    def grad_nbytes(self) -> int:
        """Bytes of the unit's whole gradients."""
        return sum(bucket.grad_nbytes for bucket in self.buckets)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the plans of all kinds of parallelism have."""

    ranks: int
    outer_size: int
    """Number of instances."""
    parameters: ParameterCount
    parallel: Parallel
    model: ModelConfig
    placements: Placements
    """Which of parameters, gradients and optimizer state are whole, and which are sharded."""
    wire_dtype: torch.dtype | None
    """Dtype in which the ranks of an instance reduce gradients; None: that of the gradients."""
    alternatives: dict[Parallel, RankBytes]
    """Bytes at rest under each kind of parallelism that this number of ranks allows, this run's included."""

    @property
    def inner_size(self) -> int:
        """Number of ranks in an instance."""
        return self.ranks // self.outer_size

    @property
    def rank_bytes(self) -> RankBytes:
        """What the fullest rank holds between steps."""
        return self.alternatives[self.parallel]

    def traffic(self, bucket: BucketLayout, *, trainable: bool = True) -> Traffic:
        """Bytes that a rank sends in each collective of ``bucket``."""
        sizes = {"inner_size": self.inner_size, "outer_size": self.outer_size}
        return bucket_traffic(bucket, self.placements, **sizes, wire_dtype=self.wire_dtype, trainable=trainable)


@dataclass(frozen=True, kw_only=True)
class UnitsPlan(Plan):
    """The plan of a fully sharded configuration on a given number of ranks."""

    units: tuple[PlacedUnit, ...]
    fsdp: FsdpConfig
    num_microbatches: int
    peak_grads: int
    """Largest number of bytes that whole gradients take at one time."""

    @property
    def buckets(self) -> list[PlacedBucket]:
        """The buckets of all units."""
        return [bucket for unit in self.units for bucket in unit.buckets]

    @property
    def peak_params(self) -> int:
        """Largest number of bytes that whole parameters take at one time.

        The outermost unit stays whole, and while one unit computes, the all-gather of the next unit runs: so the
        maximum is the outermost unit's bytes plus those of two consecutive units.
        """
        blocks: dict[str, int] = {}  # bytes of each block, nested units included
        for unit in self.units[1:]:
            outside = (each.name for each in self.units[1:] if unit.name.startswith(f"{each.name}."))
            block = next(outside, unit.name)
            blocks[block] = blocks.get(block, 0) + unit.param_nbytes
        keeps = self.placements.inner.parameter is Placement.WHOLE or self.fsdp.reshard_after_forward is False
        inside = list(blocks.values())
        count = len(inside) if keeps else min(2, len(inside))
        rows = [sum(inside[first : first + count]) for first in range(len(inside) - count + 1)]
        return self.units[0].param_nbytes + max(rows)


def place_units(config: Config, ranks: int, parallel: Parallel, fsdp: FsdpConfig) -> tuple[PlacedUnit, ...]:
    """The units of the configured model over ``ranks`` ranks: the outermost first, the others in forward order."""
    model = build_language_model(
        config.model, seed=0, device=torch.device("meta")
    ).float()  # parameters are fp32 at rest
    names = {id(module): name for name, module in model.named_modules()}
    outer_size, row = fsdp.instances(parallel), fsdp.row
    inner_size = ranks // outer_size
    degree = shard_degree(row, inner_size, outer_size)
    taken: set[int] = set()
    placed: dict[str, tuple[PlacedBucket, ...]] = {}
    for module, policy in units_of(model, config.model, fsdp):
        owned = [entry for entry in find_owned_params(module) if id(entry.param) not in taken]
        taken.update(id(entry.param) for entry in owned)
        placed[names[id(module)]] = tuple(
            PlacedBucket(layout, trainable, torch.float32, row, inner_size, outer_size)
            for layout, trainable in plan_unit(owned, policy, degree, fsdp.shard_atoms, fsdp.bucket_size)
        )
    entered = [name for name in names.values() if name in placed]  # this model registers modules in forward order
    return tuple(_unit(index, entered, placed, config.train.num_microbatches, fsdp) for index in range(len(entered)))


def _unit(
    index: int,
    entered: list[str],
    placed: dict[str, tuple[PlacedBucket, ...]],
    num_microbatches: int,
    fsdp: FsdpConfig,
) -> PlacedUnit:
    """Unit ``index`` of ``entered`` with its number of all-gathers and reductions.

    The outermost unit and the unit that a forward enters first stay whole from one microbatch to the next. The
    outermost unit and the unit that a forward enters last stay whole from the forward to the backward.
    """
    inner = fsdp.row.inner
    in_forward, in_backward = 1, 0
    if inner.parameter is Placement.SHARDED:
        in_forward = 1 if index < 2 else num_microbatches
        stays = index in (0, len(entered) - 1) or fsdp.reshard_after_forward is False
        in_backward = 0 if stays else num_microbatches
    buckets = placed[entered[index]]
    reductions = [1 if fsdp.reduces_once or bucket.layout.delayed else num_microbatches for bucket in buckets]
    return PlacedUnit(entered[index], buckets, in_forward, in_backward, tuple(reductions))


def fsdp_alternatives(config: Config, ranks: int) -> dict[Parallel, RankBytes]:
    """Bytes at rest under ``fsdp`` and, where ``ranks`` ranks make several instances, under ``hsdp``."""
    found: dict[Parallel, RankBytes] = {}
    states = config.optimizer.state_per_element()
    for parallel in ("fsdp", "hsdp"):
        settings = config.fsdp if config.parallel == parallel else _other_fsdp_config(config)
        if ranks % settings.instances(parallel) == 0:
            units = place_units(config, ranks, parallel, settings)
            found[parallel] = sharded_rank_bytes((bucket for unit in units for bucket in unit.buckets), states=states)
    return found


def _other_fsdp_config(config: Config) -> FsdpConfig:
    """The FSDP settings for the kinds of parallelism that ``config`` does not use."""
    own = config.fsdp if config.fully_sharded else FsdpConfig()
    row = Placements(own.row.inner, PLACEMENTS["zero3"].outer)
    return FsdpConfig(
        inner=tuple(kind.value for kind in row.inner),
        grad_dtype=own.grad_dtype if config.fully_sharded or config.ddp.grad_reduce_in_fp32 else "bfloat16",
        reshard_after_forward=own.reshard_after_forward,
        bucket_size=own.bucket_size,
        shard_atoms=own.shard_atoms,
    )
