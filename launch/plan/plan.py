"""Computes what a run allocates and sends from shapes alone, without process group and storage."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...ddp.collectives.reduction import Placement, Placements
from ...fsdp.unit.plan import pool_limit
from ..config.mesh import Stage
from ..config.run import Config
from ..model.cut_gpt import cut_gpt
from ..model.gpt import GPT
from ..model.hugging_face import build_language_model
from .exchanged import Exchange, exchanges_of
from .muon_shares import MuonShares, muon_shares
from .parameter_count import ParameterCount, count_of
from .rank_bytes import PlacedBucket, RankBytes, rank_bytes
from .units import PlacedUnit, lay_out

__all__ = ["RunPlan", "plan_run"]


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a configuration on a given number of ranks."""

    config: Config
    ranks: int
    parameters: ParameterCount
    units: tuple[PlacedUnit, ...]
    """What is gathered and reduced together: units of a fully sharded model, else single buckets."""
    rank_bytes: RankBytes
    """What the fullest rank holds between steps."""
    stage: Stage
    """The pipeline's stage whose ranks hold most: units and bytes are theirs."""
    muon: MuonShares | None
    """Muon's work by ranks; None: another optimizer, or sharded parameters, whose owners are found once they are."""
    exchanges: tuple[Exchange, ...]
    """What ranks that compute one sample together send each other in a step."""

    @property
    def inner_size(self) -> int:
        """Number of ranks in an instance, of those whose losses are averaged."""
        return self.ranks // self.config.mesh.tp // self.config.mesh.pp // self.config.num_instances

    @property
    def buckets(self) -> list[PlacedBucket]:
        """The buckets of all units."""
        return [bucket for unit in self.units for bucket in unit.buckets]

    @property
    def placements(self) -> Placements:
        """Which of parameters, gradients and optimizer state are whole, and which are sharded."""
        return self.buckets[0].placements

    @property
    def peak_params(self) -> int:
        """Largest number of bytes that whole parameters of a fully sharded model take at one time.

        The outermost unit stays whole, and while one unit computes, the all-gather of the next unit runs: so the
        maximum is the outermost unit's bytes plus those of two consecutive units.
        """
        keeps = self.placements.inner.parameter is Placement.WHOLE or self.config.fsdp.reshard_after_forward is False
        inside = [sum(unit.param_nbytes for unit in block) for block in self._blocks]
        count = len(inside) if keeps else min(2, len(inside))
        rows = [sum(inside[first : first + count]) for first in range(len(inside) - count + 1)]
        return self.units[0].param_nbytes + max(rows)

    @property
    def peak_grads(self) -> int:
        """Bytes that whole gradients of a fully sharded model take at one time, at most.

        The pool of freed memory bounds them. It counts neither the outermost unit's, nor delayed ones, which stay until
        the last microbatch, nor those of units inside the one that is written.
        """
        outermost, *inside = self.units
        whole = sum(unit.grad_nbytes for unit in self.units)
        if self.buckets[0].keeps_grads or (self.config.fsdp.reduces_once and self.config.train.num_microbatches > 1):
            return whole
        delayed = sum(bucket.grad_nbytes for unit in inside for bucket in unit.buckets if bucket.layout.delayed)
        nested = [sum(unit.grad_nbytes for unit in block[1:]) for block in self._blocks]
        limits = [pool_limit([bucket.grad_nbytes for bucket in unit.buckets]) for unit in inside]
        return min(whole, outermost.grad_nbytes + delayed + max(nested) + max(limits))

    @property
    def _blocks(self) -> list[list[PlacedUnit]]:
        """The units inside the outermost one, each with those inside it."""
        blocks: dict[str, list[PlacedUnit]] = {}
        for unit in self.units[1:]:
            outside = (each.name for each in self.units[1:] if unit.name.startswith(f"{each.name}."))
            blocks.setdefault(next(outside, unit.name), []).append(unit)
        return list(blocks.values())


def plan_run(config: Config, ranks: int) -> RunPlan:
    """Build the model on the meta device and lay it out over ``ranks`` ranks.

    Raises ``ConfigError`` if the global batch or the ranks do not divide evenly.
    """
    config.check_ranks(ranks)
    pp, make = config.mesh.pp, partial(build_language_model, config.model, seed=0, device=torch.device("meta"))
    # The last stage has a norm more than the first one, which has another block where these do not divide.
    stage = Stage(0 if config.model.num_layers % pp else pp - 1, pp)
    model = make(stage=stage)
    muon, parameters = config.optimizer.muon_of(model), count_of(model if pp == 1 else make())
    if config.mesh.tp > 1 and isinstance(model, GPT):
        group: Any = dist.ProcessGroup(0, config.mesh.tp)  # type: ignore[call-arg]  # a rank and a size alone
        cut_gpt(model, group, sequence_parallel=config.mesh.sequence_parallel, runs=False)
    if config.mesh.ep > 1 and isinstance(model, GPT):
        model.share_experts(config.mesh.ep)
    units = lay_out(config, model, muon, ranks // config.mesh.tp // config.mesh.pp)
    buckets = [bucket for unit in units for bucket in unit.buckets]
    return RunPlan(
        config=config,
        ranks=ranks,
        parameters=parameters,
        stage=stage,
        units=units,
        rank_bytes=rank_bytes(buckets),
        muon=muon_shares(muon, buckets) if muon.groups and not config.fully_sharded else None,
        exchanges=exchanges_of(config, ranks),
    )
