"""Data parallelism over contiguous gradient buckets, and the main_grad contract that everything here meets at."""

from .backward_order import recorded_backward_order as recorded_backward_order
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .config import DistributedDataParallelConfig as DistributedDataParallelConfig
from .data_parallel import DistributedDataParallel as DistributedDataParallel
from .distributed_optimizer import DistributedOptimizer as DistributedOptimizer
from .failure_report import CollectiveError as CollectiveError
from .grad_norm import clip_grad_norm as clip_grad_norm
from .grad_scaler import GradScaler as GradScaler
from .main_grad import add_grad as add_grad
from .world import WORLD_OF_ONE as WORLD_OF_ONE

__all__ = [
    "WORLD_OF_ONE",
    "CollectiveError",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "GradScaler",
    "add_grad",
    "clip_grad_norm",
    "load_checkpoint",
    "recorded_backward_order",
    "save_checkpoint",
]
