"""Data parallelism over contiguous gradient buckets, and the main_grad contract that everything here meets at."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint.background import PendingSave as PendingSave
    from .checkpoint.checkpoint import load_checkpoint as load_checkpoint
    from .checkpoint.checkpoint import prepare_background_saves as prepare_background_saves
    from .checkpoint.checkpoint import save_checkpoint as save_checkpoint
    from .collectives.failure_report import CollectiveError as CollectiveError
    from .collectives.rank_grid import WORLD_OF_ONE as WORLD_OF_ONE
    from .collectives.rank_grid import init_process_group as init_process_group
    from .config import DistributedDataParallelConfig as DistributedDataParallelConfig
    from .contract.main_grad import add_grad as add_grad
    from .graphs.training_step import GraphedTrainingStep as GraphedTrainingStep
    from .optimizer.distributed_optimizer import DistributedOptimizer as DistributedOptimizer
    from .optimizer.grad_norm import clip_grad_norm as clip_grad_norm
    from .optimizer.grad_scaler import GradScaler as GradScaler
    from .torch_grads.lion import Lion as Lion
    from .torch_grads.muon import Muon as Muon
    from .torch_grads.muon_groups import MuonGroups as MuonGroups
    from .torch_grads.muon_groups import muon_groups as muon_groups
    from .wrapper.backward_order import recorded_backward_order as recorded_backward_order
    from .wrapper.data_parallel import DistributedDataParallel as DistributedDataParallel

__all__ = [
    "WORLD_OF_ONE",
    "CollectiveError",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "GradScaler",
    "GraphedTrainingStep",
    "Lion",
    "Muon",
    "MuonGroups",
    "PendingSave",
    "add_grad",
    "clip_grad_norm",
    "init_process_group",
    "load_checkpoint",
    "muon_groups",
    "prepare_background_saves",
    "recorded_backward_order",
    "save_checkpoint",
]

_HOMES = {
    "WORLD_OF_ONE": "collectives.rank_grid",
    "CollectiveError": "collectives.failure_report",
    "DistributedDataParallel": "wrapper.data_parallel",
    "DistributedDataParallelConfig": "config",
    "DistributedOptimizer": "optimizer.distributed_optimizer",
    "GradScaler": "optimizer.grad_scaler",
    "GraphedTrainingStep": "graphs.training_step",
    "Lion": "torch_grads.lion",
    "Muon": "torch_grads.muon",
    "MuonGroups": "torch_grads.muon_groups",
    "PendingSave": "checkpoint.background",
    "add_grad": "contract.main_grad",
    "clip_grad_norm": "optimizer.grad_norm",
    "init_process_group": "collectives.rank_grid",
    "load_checkpoint": "checkpoint.checkpoint",
    "muon_groups": "torch_grads.muon_groups",
    "prepare_background_saves": "checkpoint.checkpoint",
    "recorded_backward_order": "wrapper.backward_order",
    "save_checkpoint": "checkpoint.checkpoint",
}


def __getattr__(name: str) -> object:
    """Load the file of a name when a program asks for it: wrappers import torch's compiler, and configurations not."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
