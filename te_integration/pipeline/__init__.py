"""Pipeline parallelism: an executor of order lists, and stages for torch's schedules with delayed weight gradients.

Imports ``te_integration/wgrad_queue.py`` and ``ddp``. The names below are public.
"""

from .executor import ChunkLink, ScheduleExecutor
from .megatron import finalize_model_grads
from .order import Kind, Schedule, ScheduleError, parse_order
from .stage import PipelineStage

__all__ = [
    "ChunkLink",
    "Kind",
    "PipelineStage",
    "Schedule",
    "ScheduleError",
    "ScheduleExecutor",
    "finalize_model_grads",
    "parse_order",
]
