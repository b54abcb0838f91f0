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

    modules: list[tuple[str, Any]]
    """Name with a dot, and module. A module has ``on_demand_buffers``, ``fits_stored`` and ``adopt_stored``."""
    read: dict[str, Tensor]
    """By full name."""

    @classmethod
    def plan(cls, root: nn.Module, stored: Mapping[str, SavedTensor]) -> "OnDemand":
        """Allocate memory for what is stored, if it fits its module. What does not fit is left to ``check_model``."""
        found = [
            (f"{name}." if name else "", module)
            for name, module in root.named_modules()
            if getattr(module, "on_demand_buffers", None)
        ]
        read: dict[str, Tensor] = {}
        for prefix, module in found:
            entries = {name: stored[prefix + name] for name in module.on_demand_buffers() if prefix + name in stored}
            alike = all(entry.dtype is torch.float32 for entry in entries.values())
            if alike and module.fits_stored({name: entry.shape for name, entry in entries.items()}):
                read |= {prefix + name: torch.empty(entry.shape) for name, entry in entries.items()}
        return cls(found, read)

    def shown_in(self, holding: Holding) -> Holding:
        """``holding``, with the memory of this load in place of the modules' buffers."""
        theirs = {prefix + name for prefix, module in self.modules for name in module.on_demand_buffers()}
        kept = {name: buffer for name, buffer in holding.buffers.items() if name not in theirs}
        return holding._replace(buffers=kept | self.read)

    def finish(self) -> None:
        """After reading: give the modules what was read."""
        for prefix, module in self.modules:
            names = (name for name in module.on_demand_buffers() if prefix + name in self.read)
            module.adopt_stored({name: self.read[prefix + name] for name in names})
