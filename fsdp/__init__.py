"""Fully sharded data parallelism: ZeRO-1 to ZeRO-3 and hybrids, on the buckets and collectives of ``ddp``.

``fully_shard`` makes a unit of a module. The folders, from the lowest to the highest: ``tensors`` (parameters in
both forms), ``unit`` (one unit), ``iteration`` (all units of a model) and ``state`` (optimizers, state dicts).
"""

from ..ddp.collectives.reduction import PLACEMENTS, AxisPlacement, Placement, Placements
from .fully_shard import fully_shard
from .module import FSDPModule
from .state.optimizer_state import translate_state_dicts
from .state.sharded_adam import ShardedAdam, ShardedAdamW
from .training_step import GraphedTrainingStep
from .unit.plan import MixedPrecisionPolicy

__all__ = [
    "PLACEMENTS",
    "AxisPlacement",
    "FSDPModule",
    "GraphedTrainingStep",
    "MixedPrecisionPolicy",
    "Placement",
    "Placements",
    "ShardedAdam",
    "ShardedAdamW",
    "fully_shard",
    "translate_state_dicts",
]
