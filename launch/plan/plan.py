"""Computes what a run allocates and sends from shapes alone, without process group and storage."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from ...ddp import DistributedDataParallelConfig
from ...ddp.collectives.placements import placements_of
from ...ddp.plan.layout import BucketLayout, GradPlan
from ...ddp.plan.model_plan import plan_model
from ...ddp.plan.owned_params import find_owned_params
from ..config.run import Config, Parallel
from ..model.hugging_face import LanguageModel, build_language_model
from .grad_peak import peak_of_grads
from .parameter_count import count_of
from .rank_bytes import RankBytes, rank_bytes
from .units import Plan, UnitsPlan, fsdp_alternatives, place_units

__all__ = ["RunPlan", "UnitsPlan", "plan_run", "plan_units"]


@dataclass(frozen=True, kw_only=True)
class RunPlan(Plan):
    """The plan of a configuration with ``DistributedDataParallel``."""

    gradients: GradPlan
    wrapper: DistributedDataParallelConfig

    @property
    def gather_order(self) -> list[BucketLayout]:
        """Buckets in the order of gathers, which is that of the forward. Empty without gathers."""
        return list(reversed(self.gradients.buckets)) if self.placements.inner.gathers else []


def plan_run(config: Config, ranks: int) -> RunPlan:
    """Build the model on the meta device and lay out its gradients for ``ranks`` data-parallel ranks.

    Raises ``ConfigError`` if the global batch or the ranks do not divide evenly.
    """
    model, common = _begin(config, ranks)
    wrapper = config.wrapper_config
    return RunPlan(
        **common,
        placements=placements_of(wrapper),
        wire_dtype=wrapper.grad_reduce_wire_dtype,
        gradients=_lay_out(model, wrapper, ranks),
        wrapper=wrapper,
    )


def plan_units(config: Config, ranks: int) -> UnitsPlan:
    """The plan for ``parallel = "fsdp"`` and ``"hsdp"``: lays out the units."""
    model, common = _begin(config, ranks)
    units = place_units(config, ranks, config.parallel, config.fsdp)
    num_microbatches = config.train.num_microbatches
    peak_grads = peak_of_grads(
        model,
        {unit.name: unit.buckets for unit in units},
        num_microbatches=num_microbatches,
        reduces_once=config.fsdp.reduces_once,
    )
    return UnitsPlan(
        **common,
        placements=config.fsdp.row,
        wire_dtype=config.fsdp.torch_reduce_dtype,
        units=units,
        fsdp=config.fsdp,
        num_microbatches=num_microbatches,
        peak_grads=peak_grads,
    )


def _begin(config: Config, ranks: int) -> tuple[LanguageModel, dict[str, Any]]:
    """The model on the meta device, and what all plans have."""
    config.check_ranks(ranks)
    model = build_language_model(config.model, seed=0, device=torch.device("meta"))
    return model, {
        "ranks": ranks,
        "outer_size": config.num_instances,
        "parameters": count_of(model),
        "parallel": config.parallel,
        "model": config.model,
        "alternatives": _alternatives(config, model, ranks),
    }


def _lay_out(model: LanguageModel, wrapper: DistributedDataParallelConfig, ranks: int) -> GradPlan:
    degree = ranks // wrapper.num_distributed_optimizer_instances if wrapper.use_distributed_optimizer else 1
    return plan_model(find_owned_params(model), wrapper, shard_degree=degree)


def _alternatives(config: Config, model: LanguageModel, ranks: int) -> dict[Parallel, RankBytes]:
    """Bytes at rest under each kind of parallelism that so many ranks allow."""
    states = config.optimizer.state_per_element()
    found = {
        parallel: rank_bytes(
            _lay_out(model, wrapper, ranks), keep_params_whole=wrapper.keep_params_whole, states=states
        )
        for parallel, wrapper in _wrappers(config, ranks).items()
    }
    return found | fsdp_alternatives(config, ranks)


def _wrappers(config: Config, ranks: int) -> dict[Parallel, DistributedDataParallelConfig]:
    """The run's configuration under each kind that has a wrapper, with what has no meaning there left out."""
    own = config.wrapper_config
    sharded = dataclasses.replace(own, use_distributed_optimizer=True, num_distributed_optimizer_instances=1)
    whole = dataclasses.replace(
        sharded,
        use_distributed_optimizer=False,
        overlap_param_gather=False,
        copy_engine_param_gather=False,
        grad_reduce_wire_dtype=None,
        keep_params_whole=False,
    )
    found: dict[Parallel, DistributedDataParallelConfig] = {"ddp": whole, "zero1": sharded}
    instances = own.num_distributed_optimizer_instances if config.parallel == "hybrid" else 2
    if ranks % instances == 0:
        found["hybrid"] = dataclasses.replace(sharded, num_distributed_optimizer_instances=instances)
    return found
