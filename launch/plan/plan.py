"""Computes what a run allocates and sends from shapes alone, without process group and storage."""

import dataclasses
from typing import NamedTuple

import torch

from ...ddp import DistributedDataParallelConfig
from ...ddp.collectives.placements import Placements, placements_of
from ...ddp.plan.layout import BucketLayout, GradPlan
from ...ddp.plan.model_plan import plan_model
from ...ddp.plan.owned_params import find_owned_params
from ..config.run import Config, ModelConfig, Parallel
from ..model.hugging_face import LanguageModel, build_language_model
from .grad_peak import peak_of_grads
from .parameter_count import ParameterCount, count_of
from .rank_bytes import BucketTraffic, RankBytes, bucket_traffic, rank_bytes
from .units import UnitsPlan, fsdp_alternatives, place_units

__all__ = ["RunPlan", "UnitsPlan", "plan_run", "plan_units"]


class RunPlan(NamedTuple):
    """The plan of a configuration with ``DistributedDataParallel``."""

    gradients: GradPlan
    ranks: int
    parameters: ParameterCount
    parallel: Parallel
    wrapper: DistributedDataParallelConfig
    model: ModelConfig
    alternatives: dict[Parallel, RankBytes]
    """Bytes at rest under each kind of parallelism that so many ranks allow, this run's among them."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, without padding."""
        return self.parameters.total

    @property
    def placements(self) -> Placements:
        """Whether parameters, gradients and optimizer state are whole or sharded."""
        return placements_of(self.wrapper)

    @property
    def inner_size(self) -> int:
        """Number of ranks per instance."""
        return self.ranks // self.outer_size

    @property
    def outer_size(self) -> int:
        """Number of instances."""
        return self.wrapper.num_distributed_optimizer_instances

    @property
    def rank_bytes(self) -> RankBytes:
        """Bytes that each rank holds. They are equal on all ranks, since shards have equal sizes."""
        return self.alternatives[self.parallel]

    @property
    def gather_order(self) -> list[BucketLayout]:
        """Buckets in the order of gathers, which is that of the forward. Empty without gathers."""
        return list(reversed(self.gradients.buckets)) if self.placements.inner.gathers else []

    def traffic(self, bucket: BucketLayout) -> BucketTraffic:
        """Bytes that a rank sends for one bucket in one step."""
        spec = bucket.slots[0].spec
        return bucket_traffic(
            bucket,
            inner_size=self.inner_size,
            outer_size=self.outer_size,
            scatters=self.placements.inner.scatters,
            param_dtype=spec.param_dtype,
            grad_dtype=spec.grad_dtype,
            wire_dtype=self.wrapper.grad_reduce_wire_dtype,
        )


def plan_run(config: Config, ranks: int) -> RunPlan:
    """Build the model on the meta device and lay out its gradients for ``ranks`` data-parallel ranks.

    Raises ``ConfigError`` if the global batch or the ranks do not divide evenly.
    """
    config.check_ranks(ranks)
    model = build_language_model(config.model, seed=0, device=torch.device("meta"))
    wrapper = config.wrapper_config
    return RunPlan(
        _lay_out(model, wrapper, ranks),
        ranks,
        count_of(model),
        config.parallel,
        wrapper,
        config.model,
        _alternatives(config, model, ranks),
    )


def plan_units(config: Config, ranks: int) -> UnitsPlan:
    """The plan for ``parallel = "fsdp"`` and ``"hsdp"``: lays out the units."""
    config.check_ranks(ranks)
    model = build_language_model(config.model, seed=0, device=torch.device("meta"))
    units = place_units(config, ranks, config.parallel, config.fsdp)
    num_microbatches = config.train.num_microbatches
    return UnitsPlan(
        units,
        ranks,
        config.num_instances,
        count_of(model),
        config.parallel,
        config.fsdp,
        config.model,
        num_microbatches,
        peak_of_grads(
            model,
            {unit.name: unit.buckets for unit in units},
            num_microbatches=num_microbatches,
            reduces_once=config.fsdp.reduces_once,
        ),
        _alternatives(config, model, ranks),
    )


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
