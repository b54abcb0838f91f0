"""Buffers that modules make when they need them: a checkpoint may hold them or lack them, and so may the model.

A load makes them where the checkpoint has them. Where it has none, they begin anew.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .files.manifest import SavedTensor
from .source import Holding

__all__ = ["with_on_demand"]


def with_on_demand(
    holding: Holding, root: nn.Module, stored: Mapping[str, SavedTensor]
) -> tuple[Holding, Callable[[], None]]:
    """``holding``, with memory to read into in place of such buffers; and a function for the end of the load, which
    gives this memory to the modules.

    The modules have ``on_demand_buffers``, ``fits_stored`` and ``adopt_stored``. What does not fit its module is left
    to ``misfit_of``.
    """
    buffers = dict(holding.buffers)
    read: dict[Any, dict[str, Tensor]] = {}
    for prefix, module in root.named_modules():
        if hasattr(module, "on_demand_buffers"):
            theirs: Any = module
            names = {name: f"{prefix}.{name}".lstrip(".") for name in theirs.on_demand_buffers()}
            shapes = {name: stored[full].shape for name, full in names.items() if full in stored}
            fits = theirs.fits_stored(shapes)
            read[theirs] = {name: torch.empty(shape) for name, shape in shapes.items() if fits}
            for full in names.values():
                buffers.pop(full, None)
            buffers |= {names[name]: memory for name, memory in read[theirs].items()}

    def adopt() -> None:
        for module, memory in read.items():
            module.adopt_stored(memory)

    return holding._replace(buffers=buffers), adopt
