"""Pipelines: order lists and their eager execution, and stages of torch's schedules with delayed weight gradients.

Imports ``te_integration/wgrad_queue.py`` and ``ddp``. The names below are public.
"""

from .executor import ChunkLink, ConnectedChunks, ScheduleExecutor, SlotRecord
from .order import Entry, Kind, Schedule, ScheduleError, parse_order, render_entries
from .stage import PipelineStage

__all__ = [
    "ChunkLink",
    "ConnectedChunks",
    "Entry",
    "Kind",
    "PipelineStage",
    "Schedule",
    "ScheduleError",
    "ScheduleExecutor",
    "SlotRecord",
    "parse_order",
    "render_entries",
]
