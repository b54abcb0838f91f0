"""Buffers that modules make when they need them: a checkpoint may hold them or lack them, and so may the model.

A load makes them where the checkpoint has them. Where it has none, they begin anew.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .files.manifest import SavedTensor
from .source import Holding

__all__ = ["OnDemand"]


class OnDemand(NamedTuple):
    """Such buffers in one load: memory to read into, which the modules take over when all is read."""

    modules: Mapping[Any, Mapping[str, str]]
    """Modules with ``on_demand_buffers``, ``fits_stored`` and ``adopt_stored``, and full names of these buffers by name
    in the module."""
    read: Mapping[str, Tensor]
    """By full name."""

    @classmethod
    def plan(cls, root: nn.Module, stored: Mapping[str, SavedTensor]) -> "OnDemand":
        """Allocate memory for what is stored, if it fits its module. What does not fit is left to ``misfit_of``."""
        modules: dict[Any, dict[str, str]] = {
            module: {name: f"{prefix}.{name}".lstrip(".") for name in module.on_demand_buffers()}
            for prefix, module in root.named_modules()
            if hasattr(module, "on_demand_buffers")
        }
        read: dict[str, Tensor] = {}
        for module, names in modules.items():
            entries = {name: stored[full] for name, full in names.items() if full in stored}
            alike = all(entry.dtype is torch.float32 for entry in entries.values())
            if alike and module.fits_stored({name: entry.shape for name, entry in entries.items()}):
                read |= {names[name]: torch.empty(entry.shape) for name, entry in entries.items()}
        return cls(modules, read)

    def shown_in(self, holding: Holding) -> Holding:
        """``holding``, with the memory of this load in place of the modules' buffers."""
        theirs = {full for names in self.modules.values() for full in names.values()}
        kept = {name: buffer for name, buffer in holding.buffers.items() if name not in theirs}
        return holding._replace(buffers={**kept, **self.read})

    def finish(self) -> None:
        """After reading: give the modules what was read."""
        for module, names in self.modules.items():
            module.adopt_stored({name: self.read[full] for name, full in names.items() if full in self.read})
