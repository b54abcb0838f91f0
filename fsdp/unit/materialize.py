"""A unit's parameters before sharding: from the meta device to memory, and equal on all ranks."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from ...ddp.collectives.rank_grid import RankGrid

__all__ = ["materialize", "synchronize"]


def materialize(
    modules: Sequence[nn.Module],
    device: torch.device,
    init_fn: Callable[[nn.Module], None] | None,
    ignored: Collection[int] = (),
) -> None:
    """Move the own parameters and buffers of ``modules`` (not those of their children) to ``device``.

    init_fn  called with each module that has tensors on the meta device, to initialise its own parameters; None: the
             module's ``reset_parameters()``
    ignored  ``id`` of parameters that are not moved

    A parameter that several modules share stays one parameter, and keeps its attributes. Raises ``ValueError`` for a
    module on the meta device without ``init_fn`` and ``reset_parameters()``, and for a module with an ignored parameter
    on the meta device beside others.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id of the meta parameter, which the tuple keeps alive
    for module in modules:
        own = {name: param for name, param in module._parameters.items() if param is not None}
        tensors = [*own.values(), *[buffer for buffer in module._buffers.values() if buffer is not None]]
        if not any(tensor.is_meta and id(tensor) not in ignored for tensor in tensors):
            module._apply(lambda tensor: tensor if id(tensor) in ignored else tensor.to(device), recurse=False)
            continue
        initialise = init_fn or getattr(module, "reset_parameters", None)
        if not callable(initialise):
            raise ValueError(
                f"{type(module).__name__} has parameters or buffers on the meta device and no reset_parameters(): give "
                f"fully_shard init_fn, a function that initialises the parameters of the module that it is called with"
            )
        kept = [name for name, param in own.items() if id(param) in ignored]
        if any(own[name].is_meta for name in kept):
            raise ValueError(
                f"{type(module).__name__}.{kept[0]} is ignored and on the meta device: materialise it first"
            )
        module._apply(lambda tensor: _empty_on(tensor, device, ignored), recurse=False)
        for name, param in own.items():
            if param.is_meta:
                fresh = module._parameters[name]
                assert fresh is not None, "_apply keeps the names"
                fresh.__dict__.update({**param.__dict__, **fresh.__dict__})
                _, module._parameters[name] = made.setdefault(id(param), (param, fresh))
        if init_fn is not None:
            init_fn(module)
        else:
            module.reset_parameters()  # type: ignore[operator]


@torch.no_grad()
def synchronize(modules: Sequence[nn.Module], grid: RankGrid, ignored: Collection[int] = ()) -> None:
    """Copy the first rank's own parameters and buffers of ``modules`` to all other ranks. Collective over ``grid``."""
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in ignored:
                grid.broadcast(tensor.detach())


def _empty_on(tensor: torch.Tensor, device: torch.device, ignored: Collection[int]) -> torch.Tensor:
    if id(tensor) in ignored:
        return tensor
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
