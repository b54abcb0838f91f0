"""``parallel`` and ``[ddp]`` of a configuration file, and the wrapper's configuration that follows from them.

==========  ==================================================================================================
parallel    what ranks hold, and what they send
==========  ==================================================================================================
``ddp``     nothing is sharded; gradients are all-reduced
``zero1``   masters and moments are sharded over all ranks; gradients are reduce-scattered, parameters gathered
``hybrid``  the same inside each of several instances; shards are all-reduced across instances
``fsdp``    parameters and gradients are sharded too; ``[fsdp]`` replaces ``[ddp]``, see ``fsdp.py``
``hsdp``    the same inside each of several instances
==========  ==================================================================================================

``[ddp]`` has the fields of ``DistributedDataParallelConfig``, except those that ``parallel`` decides. Dtypes are
strings.
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
"""Fields without effect under ``fsdp`` and ``hsdp`` that may stay in the file: ``parallel`` is then the only value to
change."""

_INSTEAD = {
    "grad_reduce_in_fp32": 'set fsdp.grad_dtype = "bfloat16" instead',
    "grad_reduce_wire_dtype": "set fsdp.reduce_dtype instead",
    "num_distributed_optimizer_instances": "set fsdp.num_instances instead",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpConfig:
    """Gradient buckets, their reduction and the gathers of parameters."""

    grad_reduce_in_fp32: bool = True
    """True: accumulate and reduce gradients of bf16 parameters in fp32; false: in the parameter's dtype."""
    overlap_grad_reduce: bool = False
    """Launch a bucket's collective from backward as soon as it is ready, instead of after it."""
    overlap_param_gather: bool | None = None
    """Gather updated parameters during the next forward instead of in the optimizer's step. None: as
    ``overlap_grad_reduce``, if ``parallel`` gathers parameters."""
    copy_engine_param_gather: bool = False
    """Run overlapped gathers on the copy engines of the GPU, so that the forward keeps all multiprocessors (NCCL 2.28
    or newer)."""
    num_distributed_optimizer_instances: int | None = None
    """Number of instances of ``parallel = "hybrid"``: groups of consecutive ranks, usually one per node. None: 2."""
    bucket_size: int | None = None
    """Elements at which a bucket is closed. None: max(40,000,000, 1,000,000 x ranks of an instance)."""
    num_buckets: int | None = None
    """Approximate number of buckets per buffer, instead of ``bucket_size``."""
    keep_params_whole: bool = False
    """Split no parameter between shards, for optimizers that need whole matrices. Shards are less even."""
    average_in_collective: bool | None = None
    """True: the collective divides by the number of ranks (NCCL only). False: each rank divides before the collective.
    None: true under NCCL."""
    grad_reduce_wire_dtype: Literal["bfloat16", "float16"] | None = None
    """Send gradients in this dtype and sum them in fp32. None: send them in the dtype of accumulation."""
    check_for_nan_in_grad: bool = False
    """End the run at a NaN or infinite gradient, with an error that names rank, bucket and parameter."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """Pad every bucket to a multiple of 2^16 elements, for which NCCL's rings are fastest."""
    find_unused_parameters: bool = False
    """Walk the graph of the last microbatch, so that unused parameters delay no bucket. Needs overlap_grad_reduce."""
    forward_writes: Literal["refused", "alike"] = "refused"
    """Parameters that a model of Hugging Face writes in its forward. "refused": the run ends with the parameter's name.
    "alike": all ranks write the same values."""
    check_replicas_every: int | None = None
    """Compare all parameters between ranks every so many steps, and end the run where they differ. None: never."""

    def check_unused(self, parallel: Parallel) -> None:
        """Raise ``ConfigError`` for a value that has an effect only under ``DistributedDataParallel``."""
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            require(
                value == entry.default or entry.name in _OF_THE_WRAPPER_ALONE,
                f"ddp.{entry.name}",
                value,
                f'has no effect under parallel = "{parallel}"; {_INSTEAD.get(entry.name, "leave it out")}',
            )

    def wrapper_config(self, parallel: Parallel) -> DistributedDataParallelConfig:
        """The configuration of ``DistributedDataParallel``. Raises ``ConfigError`` for contradictory values."""
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
