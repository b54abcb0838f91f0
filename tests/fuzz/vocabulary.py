"""The words that programs are written in: those of plain PyTorch, and the public names of the library.

A word is a function or class of the modules below, which programs are executed with and scripts take the source of; or
something that is imported.
"""

import importlib
import inspect
import re
from typing import Any

import comparison
import plain_modules
import plain_training
import user_beside
import user_checkpoints
import user_meshes
import user_models
import user_recipes
import user_runs
import user_training
from pipeline_programs import SCHEDULES

OURS = (
    user_models,
    plain_modules,
    user_training,
    user_checkpoints,
    user_beside,
    plain_training,
    comparison,
    user_runs,
    user_recipes,
    user_meshes,
)

LIBRARY = {
    "maingrad.ddp": (
        "DistributedDataParallel",
        "DistributedDataParallelConfig",
        "DistributedOptimizer",
        "GradScaler",
        "GraphedTrainingStep",
        "add_grad",
        "clip_grad_norm",
        "load_checkpoint",
        "recorded_backward_order",
        "prepare_background_saves",
        "save_checkpoint",
    ),
    "maingrad.fsdp": ("MixedPrecisionPolicy", "fully_shard", "translate_state_dicts"),
    "maingrad.kernels.quantized": ("Element", "QuantSpec", "ScaleForm"),
    "maingrad.launch": ("make_optimizer", "parallelize", "simulate"),
    "maingrad.launch.config.file": ("structure",),
    "maingrad.launch.data.indexed": ("write_indexed",),
    "maingrad.launch.training.signals": ("StopRequest",),
    "maingrad.launch.training.train": ("train",),
    "maingrad.te_integration": (
        "DelayedScaling",
        "GroupedLinear",
        "GroupedMLP",
        "LayerNormLinear",
        "LayerNormMLP",
        "Linear",
        "Recipe",
        "WgradQueue",
        "convert_linears",
        "delayed_wgrad",
        "unconvert",
    ),
    "maingrad.te_integration.pipeline": ("PipelineStage",),
}
"""All that programs use of the library, by room."""

TORCH = {
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "F": "import torch.nn.functional as F",
    "nn": "from torch import nn",
    "DTensor": "from torch.distributed.tensor import DTensor",
    "Replicate": "from torch.distributed.tensor import Replicate",
    "Shard": "from torch.distributed.tensor import Shard",
    "ColwiseParallel": "from torch.distributed.tensor.parallel import ColwiseParallel",
    "RowwiseParallel": "from torch.distributed.tensor.parallel import RowwiseParallel",
    "SequenceParallel": "from torch.distributed.tensor.parallel import SequenceParallel",
    "parallelize_module": "from torch.distributed.tensor.parallel import parallelize_module",
    "init_device_mesh": "from torch.distributed.device_mesh import init_device_mesh",
    "contextmanager": "from contextlib import contextmanager",
    "nullcontext": "from contextlib import nullcontext",
    "pipelining": "from torch.distributed import pipelining",
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
    "StateDictOptions": "from torch.distributed.checkpoint.state_dict import StateDictOptions",
    "get_model_state_dict": "from torch.distributed.checkpoint.state_dict import get_model_state_dict",
    "fsdp": "from maingrad import fsdp",
    "te_integration": "from maingrad import te_integration",
}
TORCH |= {name: f"from torch.distributed.pipelining import {name}" for names in SCHEDULES.values() for name in names}
STANDARD = {
    name: f"import {name}"
    for name in ("copy", "dataclasses", "gc", "io", "math", "os", "random", "shutil", "tempfile", "threading", "zlib")
}


def namespace() -> dict[str, Any]:
    """What programs are executed in."""
    found: dict[str, Any] = {}
    for line in (STANDARD | TORCH).values():
        exec(line, found)
    for room, names in LIBRARY.items():
        found |= {name: getattr(importlib.import_module(room), name) for name in names}
    for module in OURS:
        found |= {name: value for name, value in vars(module).items() if _is_own(module, value)}
    return found


def imports(text: str) -> list[str]:
    """The import lines of what a text uses."""
    standard = [line for name, line in STANDARD.items() if uses(text, name)]
    torchs = [line for name, line in TORCH.items() if uses(text, name)]
    library = []
    for room, names in LIBRARY.items():
        used = [name for name in names if uses(text, name)]
        library += [f"from {room} import {', '.join(used)}"] if used else []
    return [*standard, "", *torchs, "", *library]


def definitions(text: str) -> str:
    """The sources of our words that a text uses, and of what these use."""
    sources = {
        name: inspect.getsource(value)
        for module in OURS
        for name, value in vars(module).items()
        if _is_own(module, value)
    }
    used: set[str] = set()
    waiting = [text]
    while waiting:
        reading = waiting.pop()
        for name in [name for name in sources if name not in used and uses(reading, name)]:
            used.add(name)
            waiting.append(sources[name])
    return "".join(f"{source}\n\n" for name, source in sources.items() if name in used)


def uses(text: str, name: str) -> bool:
    """Whether the text has the word, and not as somebody's attribute."""
    return re.search(rf"(?<![\w.]){name}\b", text) is not None


def _is_own(module: Any, value: Any) -> bool:
    return getattr(value, "__module__", "") == module.__name__ and callable(value)
