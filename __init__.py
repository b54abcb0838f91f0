"""Megatron's gradient machinery for any PyTorch model.

Gradient buckets own ``main_grad``, weight-gradient GEMMs accumulate straight into them, and reduce-scatters run under
the rest of the backward.

The names below, and the folders ``ddp``, ``fsdp``, ``te_integration``, ``kernels`` and ``launch``, are loaded when a
program asks for them: ``import maingrad`` alone loads no torch. ``maingrad.hugging_face`` has Hugging Face's
``Trainer``.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maingrad.ddp import (
        WORLD_OF_ONE,
        DistributedDataParallel,
        DistributedDataParallelConfig,
        DistributedOptimizer,
        GradScaler,
        GraphedTrainingStep,
        clip_grad_norm,
        init_process_group,
        load_checkpoint,
        save_checkpoint,
    )
    from maingrad.fsdp import FSDPModule, MixedPrecisionPolicy, Placements, fully_shard
    from maingrad.launch import graphed, make_optimizer, parallelize, simulate, verify
    from maingrad.te_integration import (
        GroupedLinear,
        GroupedMLP,
        LayerNormLinear,
        LayerNormMLP,
        Linear,
        Sequential,
        WgradQueue,
        convert_linears,
        delayed_wgrad,
        make_graphed_callables,
    )

__version__ = "0.1.0"

__all__ = [
    "WORLD_OF_ONE",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "FSDPModule",
    "GradScaler",
    "GraphedTrainingStep",
    "GroupedLinear",
    "GroupedMLP",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MixedPrecisionPolicy",
    "Placements",
    "Sequential",
    "WgradQueue",
    "clip_grad_norm",
    "convert_linears",
    "delayed_wgrad",
    "fully_shard",
    "graphed",
    "init_process_group",
    "load_checkpoint",
    "make_graphed_callables",
    "make_optimizer",
    "parallelize",
    "save_checkpoint",
    "simulate",
    "verify",
]

_FOLDERS = ("ddp", "fsdp", "te_integration", "launch", "kernels")


def __getattr__(name: str) -> object:
    """A public name or a folder, by its absolute name: pytest loads this file under other names as well."""
    if name in _FOLDERS:
        return importlib.import_module(f"maingrad.{name}")
    if name in __all__:
        for folder in map(importlib.import_module, ("maingrad.ddp", "maingrad.fsdp", "maingrad.te_integration")):
            if name in folder.__all__:
                return getattr(folder, name)
        return getattr(importlib.import_module("maingrad.launch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_FOLDERS, "__version__", "hugging_face"])


def _of_hugging_face(name: str) -> object:
    if name == "Trainer":
        return importlib.import_module("maingrad.launch.training.hugging_face").Trainer
    raise AttributeError(f"module 'maingrad.hugging_face' has no attribute {name!r}")


if __name__ == "maingrad":
    # The top level has no file of this name. A module that its package registers while it is imported is found by
    # ``import maingrad.hugging_face``; transformers is loaded when ``Trainer`` is asked for.
    hugging_face = ModuleType("maingrad.hugging_face", "Hugging Face's ``Trainer`` over maingrad.")
    hugging_face.__spec__ = ModuleSpec(hugging_face.__name__, None)
    hugging_face.__dict__.update(__all__=["Trainer"], __getattr__=_of_hugging_face)
    sys.modules[hugging_face.__name__] = hugging_face
