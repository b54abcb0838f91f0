"""``parallel`` and ``[ddp]``: what a run says of its ranks, and the wrapper's own configuration that follows from it.

==========  ==================================================================================================
parallel    what ranks hold, and what they send
==========  ==================================================================================================
``ddp``     every rank holds everything; gradients are all-reduced
``zero1``   masters and moments are sharded over all ranks; gradients are reduce-scattered, parameters gathered
``hybrid``  the same inside each of several instances; shards are all-reduced across instances
``fsdp``    parameters and gradients are sharded as well: ``[fsdp]`` counts instead, see ``fsdp_config.py``
``hsdp``    the same inside each of several instances
==========  ==================================================================================================

``[ddp]`` has the fields of ``DistributedDataParallelConfig`` but those that ``parallel`` decides.
Dtypes are words here.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from ...ddp import DistributedDataParallelConfig
from .error import ConfigError, require

__all__ = ["DdpConfig", "Parallel"]

Parallel = Literal["ddp", "zero1", "hybrid", "fsdp", "hsdp"]

_OF_THE_WRAPPER_ALONE = frozenset(
    {"overlap_grad_reduce", "overlap_param_gather", "bucket_size", "num_buckets", "pad_buckets_for_high_nccl_busbw"}
)
"""How the wrapper cuts buckets and when it sends them. Units are buckets, and are always sent under computation: these
may stay in a file under ``fsdp`` and ``hsdp``, so that one word chooses between all of them."""

_INSTEAD = {
    "grad_reduce_in_fp32": 'set fsdp.grad_dtype = "bfloat16" instead',
    "grad_reduce_wire_dtype": "set fsdp.reduce_dtype instead",
    "num_distributed_optimizer_instances": "set fsdp.num_instances instead",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpConfig:
    """Gradient buckets, their reduction and the gathers of parameters."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce in fp32 under bf16 parameters; otherwise in the parameter's dtype."""
    overlap_grad_reduce: bool = False
    """Launch a bucket's collective from backward as soon as it is ready, instead of after it."""
    overlap_param_gather: bool | None = None
    """Gather updated parameters under the next forward, instead of in the optimizer's step. None: as
    ``overlap_grad_reduce``, where ``parallel`` gathers at all."""
    copy_engine_param_gather: bool = False
    """Gathers that overlap run on the GPU's copy engines and take no multiprocessor from the forward (NCCL 2.28 or
    newer)."""
    num_distributed_optimizer_instances: int | None = None
    """Instances of ``parallel = "hybrid"``, runs of consecutive ranks: as a rule one for each node. None: 2."""
    bucket_size: int | None = None
    """Elements at which a bucket is closed; None: max(40,000,000, 1,000,000 x ranks of an instance)."""
    num_buckets: int | None = None
    """About so many buckets for each buffer, instead of ``bucket_size``."""
    keep_params_whole: bool = False
    """No parameter is split between shards, as optimizers of whole matrices need it. Shards are less even."""
    average_in_collective: bool | None = None
    """Let the collective divide by the number of ranks (NCCL only); false: each rank divides before it; None: where it
    can."""
    grad_reduce_wire_dtype: Literal["bfloat16", "float16"] | None = None
    """Gradients travel in this dtype and are summed in fp32; None: they travel as they are accumulated."""
    check_for_nan_in_grad: bool = False
    """End the run at a gradient that is NaN or infinite, naming rank, bucket and parameter."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """End every bucket at a multiple of 2^16 elements, on which NCCL's rings are fastest."""
    find_unused_parameters: bool = False
    """Walk the final microbatch's graph, so that unused parameters hold no bucket back. Needs overlap."""

    def check_unused(self, parallel: Parallel) -> None:
        """Raise ``ConfigError`` for a value that means something under ``DistributedDataParallel`` alone."""
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            require(
                value == entry.default or entry.name in _OF_THE_WRAPPER_ALONE,
                f"ddp.{entry.name}",
                value,
                f'has no effect under parallel = "{parallel}"; {_INSTEAD.get(entry.name, "leave it out")}',
            )

    def wrapper_config(self, parallel: Parallel) -> DistributedDataParallelConfig:
        """The configuration of ``DistributedDataParallel``. Raises ``ConfigError`` where the two contradict."""
        gathers = parallel != "ddp"
        for name, neutral in (
            ("overlap_param_gather", False),
            ("copy_engine_param_gather", False),
            ("keep_params_whole", False),
            ("grad_reduce_wire_dtype", None),
        ):
            value = getattr(self, name)
            require(
                gathers or value is None or value == neutral,
                f"ddp.{name}",
                value,
                'contradicts parallel = "ddp", under which nothing is sharded; set parallel = "zero1", or leave it out',
            )
        instances = self.num_distributed_optimizer_instances
        if parallel == "hybrid":
            instances = 2 if instances is None else instances
            require(
                instances >= 2,
                "ddp.num_distributed_optimizer_instances",
                instances,
                'contradicts parallel = "hybrid", which has at least 2; one instance is parallel = "zero1"',
            )
        else:
            require(
                instances in (None, 1),
                "ddp.num_distributed_optimizer_instances",
                instances,
                f'contradicts parallel = "{parallel}"; set parallel = "hybrid", or leave it out',
            )
        decided = {
            "use_distributed_optimizer": gathers,
            "overlap_param_gather": gathers and self._gathers_overlap,
            "num_distributed_optimizer_instances": instances or 1,
            "grad_reduce_wire_dtype": self.grad_reduce_wire_dtype and getattr(torch, self.grad_reduce_wire_dtype),
        }
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        try:
            return DistributedDataParallelConfig(**(fields | decided))
        except ValueError as error:
            raise ConfigError(f"ddp: {error}") from None

    @property
    def _gathers_overlap(self) -> bool:
        return self.overlap_grad_reduce if self.overlap_param_gather is None else self.overlap_param_gather
