"""A model's parameters, each once: with the modules that register it, and the ranks that reduce its gradient."""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import nn

from ..contract.main_grad import is_delayed
from ..contract.module import DelayedWgradModule, FusedWgradModule

__all__ = ["OwnedParam", "find_owned_params", "grid_name_of"]


class OwnedParam(NamedTuple):
    """A parameter and its owners: the modules that register it. The first owner gives the name."""

    name: str
    param: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]

    @property
    def ours_alone(self) -> bool:
        """Whether every owner writes the weight gradient through a ``WgradTarget``."""
        return all(isinstance(m, FusedWgradModule) and local in m.fused_wgrad_weights() for m, local in self.owners)

    @property
    def delayed(self) -> bool:
        """Whether an owner computes the weight gradient after the main backward."""
        return is_delayed(self.param) or any(
            isinstance(m, DelayedWgradModule) and local in m.delayed_wgrad_weights() for m, local in self.owners
        )


def grid_name_of(tensor: torch.Tensor) -> str:
    """Which ranks a parameter's gradient is reduced over, or a buffer is copied to: "dense" or "expert".

    "expert" is what Megatron-core marks ``allreduce = False``: only some ranks hold the same values.
    """
    return "dense" if getattr(tensor, "allreduce", True) else "expert"


def find_owned_params(module: nn.Module) -> list[OwnedParam]:
    """Every parameter of the model once, in registration order."""
    owners: defaultdict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    names: dict[nn.Parameter, str] = {}
    for prefix, owner in module.named_modules():
        for local, param in owner._parameters.items():
            if param is not None:
                owners[param].append((owner, local))
                names.setdefault(param, f"{prefix}.{local}" if prefix else local)
    return [OwnedParam(name, param, tuple(owners[param])) for param, name in names.items()]
