"""An optimizer around another one: what it passes on, and what it refuses."""

from typing import Any

import torch

__all__ = ["AroundOptimizer"]


class AroundOptimizer(torch.optim.Optimizer):
    """The base of ``DistributedOptimizer``; the other optimizer is ``self._inner``."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: only the constructor makes groups."""
        if vars(self).get("_sealed"):
            raise RuntimeError(
                "DistributedOptimizer updates every parameter of its model and takes no further group: give the "
                "constructor param_groups"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "DistributedOptimizer is tied to its model's buckets and is not copied or pickled; use state_dict()"
        )

    _step_supports_amp_scaling = True
    """A scaler leaves unscaling and skipping to ``step``: it sets ``grad_scale`` and ``found_inf``."""

    def __getattr__(self, name: str) -> Any:
        """Methods of the class that this one lacks: ``train()`` and ``eval()`` of a schedule-free optimizer."""
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("__") or not callable(getattr(type(inner), name, None)):
            raise AttributeError(f"'DistributedOptimizer' object has no attribute '{name}'")
        return getattr(inner, name)
