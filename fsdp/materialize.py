"""A unit's parameters before they are sharded: made on a device where they have no memory yet, equal on all ranks."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..ddp.rank_grid import RankGrid

__all__ = ["materialize", "synchronize"]


def materialize(
    modules: Sequence[nn.Module], device: torch.device, init_fn: Callable[[nn.Module], None] | None
) -> None:
    """Give parameters and buffers of ``modules`` (their own, not their children's) memory on ``device``.

    init_fn  called with each module that had some on the meta device; None: its ``reset_parameters()``

    Raises ``ValueError`` for a module that has neither.
    """
    for module in modules:
        own = [*module._parameters.values(), *module._buffers.values()]
        if not any(tensor is not None and tensor.is_meta for tensor in own):
            module._apply(lambda tensor: tensor.to(device), recurse=False)
            continue
        module.to_empty(device=device, recurse=False)
        reset = getattr(module, "reset_parameters", None)
        if init_fn is not None:
            init_fn(module)
        elif callable(reset):
            reset()
        else:
            raise ValueError(
                f"{type(module).__name__} has parameters on the meta device and no reset_parameters(): give "
                f"fully_shard init_fn, a function that initialises the parameters of the module that it is called with"
            )


@torch.no_grad()
def synchronize(modules: Sequence[nn.Module], grid: RankGrid) -> None:
    """Copy the first rank's parameters and buffers of ``modules`` (their own) to all other ranks of the grid."""
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                grid.broadcast(tensor.detach())
