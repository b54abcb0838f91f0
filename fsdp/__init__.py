"""Parameters that are sharded at rest: ZeRO-1 to 3 and hybrids, on the buckets and collectives of ``ddp``."""

from ..ddp.collectives.placements import PLACEMENTS, AxisPlacement, Placement, Placements
from .fully_shard import fully_shard
from .module import FSDPModule
from .unit.mixed_precision import MixedPrecisionPolicy

__all__ = [
    "PLACEMENTS",
    "AxisPlacement",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "Placement",
    "Placements",
    "fully_shard",
]
