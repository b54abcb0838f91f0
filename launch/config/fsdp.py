"""``[fsdp]`` of a configuration file: what ``parallel = "fsdp"`` and ``"hsdp"`` shard, in which dtypes, and when.

==========  ==========================================================================================================
parallel    what ranks hold, and what they send
==========  ==========================================================================================================
``fsdp``    parameters, gradients, masters and moments are sharded over all ranks; a block's parameters are gathered for
            its forward and backward; its gradients are reduce-scattered during the backward of the block before it
``hsdp``    the same inside each of several instances; gradient shards are all-reduced across instances
==========  ==========================================================================================================
"""

from dataclasses import dataclass, fields
from typing import Literal

from ...ddp.collectives.reduction import PLACEMENTS, Placement, Placements
from .ddp import FULLY_SHARDED, Parallel
from .table import Count, Table, require_defaults

__all__ = ["FsdpConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpConfig(Table):
    """Placements, dtypes and schedule of the units: one per block, and one for all other parameters."""

    placements: Literal["zero1", "zero2", "zero3", "hsdp_zero1"] = "zero3"
    """What is sharded over the ranks of an instance. ``zero1``: optimizer state. ``zero2``: gradients too. ``zero3``:
    parameters too. ``hsdp_zero1``: like ``zero3``, and the optimizer state also across instances."""
    num_instances: Count | None = None
    """Number of instances of ``parallel = "hsdp"``: groups of consecutive ranks, usually one per node. None: 2."""
    reshard_after_forward: bool | None = None
    """Free the whole parameters of a block between its forward and backward. None: if placements shard parameters."""
    reduce_every_microbatch: bool | None = None
    """False: keep whole gradients in memory between microbatches, and reduce them once per iteration. None: as
    ``placements`` says."""
    bucket_size: Count | None = None
    """Elements at which a bucket of a unit is closed. Memory for gradients is allocated and freed by buckets. None:
    max(40e6, 1e6 x number of shards), which uses the full bandwidth."""
    shard_atoms: Literal["element", "block", "row", "whole"] = "element"
    """What the border between two shards must not cut. ``block``: 256 elements, counted from the parameter's start; the
    default where ``optimizer.moment_dtype = "uint8"``. ``row`` and ``whole`` need padding."""
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients of bf16 parameters are accumulated and summed."""
    reduce_dtype: Literal["bfloat16", "float16"] | None = None
    """Send gradients in this dtype. None: in the dtype of accumulation."""
    offload_to_cpu: bool = False
    """Keep shards, gradient shards and optimizer state in host memory (CUDA only)."""
    copy_engine_gather: Literal["auto", True, False] = "auto"
    """Run gathers on the copy engines of the GPU; computation keeps all multiprocessors (NCCL 2.28 or newer). ``auto``:
    where they gain by the buckets' sizes, on one host; otherwise by kernels."""

    def check(self) -> None:
        inner = self.row.inner
        remedy = "has no effect where placements keep parameters whole; leave it out"
        whole = inner.parameter is Placement.WHOLE
        self.require(not (self.reshard_after_forward and whole), "reshard_after_forward", remedy)
        remedy = "has no effect where placements keep gradients whole; leave it out"
        whole = inner.gradient is Placement.WHOLE
        self.require(not (self.reduce_every_microbatch and whole), "reduce_every_microbatch", remedy)

    @property
    def row(self) -> Placements:
        """Placements on both axes."""
        return PLACEMENTS[self.placements]

    @property
    def reduces_once(self) -> bool:
        """Whether whole gradients stay from one microbatch to the next, and an iteration reduces them once."""
        return self.row.inner.reduces_once(self.reduce_every_microbatch)

    def check_parallel(self, parallel: Parallel) -> None:
        """Raise ``ConfigError`` if a value contradicts ``parallel``."""
        if parallel not in FULLY_SHARDED:
            remedy = f'contradicts parallel = "{parallel}"; set parallel = "fsdp" or "hsdp", or leave it out'
            require_defaults(self, "fsdp", [entry.name for entry in fields(self)], remedy)
        elif parallel == "hsdp":
            remedy = 'contradicts parallel = "hsdp", which has at least 2; one instance is parallel = "fsdp"'
            self.require(self.num_instances != 1, "num_instances", remedy)
        else:
            remedy = 'contradicts parallel = "fsdp"; set parallel = "hsdp", or leave it out'
            self.require(self.num_instances in (None, 1), "num_instances", remedy)
            remedy = 'shards across instances, and parallel = "fsdp" has one; set parallel = "hsdp"'
            self.require(not self.row.outer.scatters, "placements", remedy)
