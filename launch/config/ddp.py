"""``parallel`` and ``[ddp]`` of a configuration file.

==========  ==================================================================================================
parallel    what ranks hold, and what they send
==========  ==================================================================================================
``ddp``     nothing is sharded; gradients are all-reduced
``zero1``   masters and moments are sharded over all ranks; gradients are reduce-scattered, parameters gathered
``hybrid``  the same inside each of several instances; shards are all-reduced across instances
``fsdp``    parameters and gradients are sharded too; ``[fsdp]`` replaces ``[ddp]``, see ``fsdp.py``
``hsdp``    the same inside each of several instances
==========  ==================================================================================================

``[ddp]`` is ``DistributedDataParallelConfig``. Dtypes are strings.
"""

from collections.abc import Mapping
from typing import Any, Literal

from ...ddp import DistributedDataParallelConfig
from ...kernels.optimizer.eight_bits import BLOCK
from .error import require
from .table import require_defaults

__all__ = ["FULLY_SHARDED", "Parallel", "check_ddp", "what_parallel_decides"]

Parallel = Literal["ddp", "zero1", "hybrid", "fsdp", "hsdp"]
FULLY_SHARDED = ("fsdp", "hsdp")
"""Values of ``parallel`` under which ``[fsdp]`` applies instead of ``[ddp]``."""

_UNUSED_BY_UNITS = (
    "grad_reduce_in_fp32",
    "copy_engine_param_gather",
    "keep_params_whole",
    "keep_matrices_whole",
    "release_grads",
    "shard_atom",
    "average_in_collective",
    "grad_reduce_wire_dtype",
    "check_for_nan_in_grad",
    "find_unused_parameters",
    "forward_writes",
    "check_replicas_every",
)
"""Keys without effect under ``fsdp`` and ``hsdp``. Overlap and buckets may stay in the file: ``parallel`` is then the
only value to change."""


def what_parallel_decides(parallel: object, table: Mapping[str, Any], moment_dtype: object) -> dict[str, Any]:
    """The keys of ``[ddp]`` that follow from ``parallel`` and the others where the file does not have them."""
    sharded = parallel != "ddp"
    in_blocks = moment_dtype == "uint8" and parallel in ("zero1", "hybrid") and not table.get("keep_params_whole")
    return {
        "shard_atom": BLOCK if in_blocks else 1,
        "use_distributed_optimizer": sharded,
        "overlap_param_gather": sharded and table.get("overlap_grad_reduce") is True,
        "num_distributed_optimizer_instances": 2 if parallel == "hybrid" else 1,
    }


def check_ddp(table: DistributedDataParallelConfig, parallel: Parallel) -> None:
    """Raise ``ConfigError`` for a key that contradicts ``parallel``, or has no effect."""
    remedy = f'contradicts parallel = "{parallel}": leave it out'
    agrees = table.use_distributed_optimizer is (parallel != "ddp")
    require(agrees, "ddp.use_distributed_optimizer", table.use_distributed_optimizer, remedy)
    instances = table.num_distributed_optimizer_instances
    remedy = f'contradicts parallel = "{parallel}"; several instances are parallel = "hybrid", one is "zero1"'
    require((instances > 1) is (parallel == "hybrid"), "ddp.num_distributed_optimizer_instances", instances, remedy)
    remedy = "maingrad train averages over sequences of one length; set it in your own loop"
    require(not table.calculate_per_token_loss, "ddp.calculate_per_token_loss", True, remedy)
    if parallel in FULLY_SHARDED:
        remedy = f'has no effect under parallel = "{parallel}"; [fsdp] has grad_dtype and reduce_dtype; leave it out'
        require_defaults(table, "ddp", _UNUSED_BY_UNITS, remedy)
