"""A unit's parameters before sharding: from the meta device to memory, and equal on all ranks."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import nn

from ...ddp.collectives.rank_grid import RankGrid
from ...ddp.plan.owned_params import buffers_of_experts
from ..tensors.parameter import ShardedParameter
from .unwritten import Unwritten, fill_unwritten

__all__ = ["materialize", "synchronize"]


def materialize(
    modules: Sequence[nn.Module],
    device: torch.device,
    init_fn: Callable[[nn.Module], None] | None,
    ignored: Collection[int] = (),
    *,
    overwritten: bool = False,
) -> None:
    """Move the own parameters and buffers of ``modules`` (not those of their children) to ``device``.

    modules      the first has all others inside
    init_fn      called with each module that has tensors on the meta device, to initialise its own parameters and
                 buffers; None: the module's ``reset_parameters()``
    ignored      ``id`` of parameters that are not moved
    overwritten  another rank's values will replace this rank's: tensors need none

    A parameter that several modules share stays one parameter, and keeps its attributes. Raises ``ValueError`` for a
    module on the meta device without ``init_fn`` and ``reset_parameters()``, for a tensor that these do not write, and
    for a module with an ignored parameter on the meta device beside others.
    """
    fresh_tensors: list[Unwritten] = []
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id of the meta parameter, which the tuple keeps alive
    for module in modules:
        own = {name: param for name, param in module._parameters.items() if param is not None}
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        on_meta = [name for name, tensor in {**own, **buffers}.items() if tensor.is_meta and id(tensor) not in ignored]
        if not on_meta:
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
        fresh_tensors += [Unwritten.of(module, name, is_buffer=name in buffers) for name in on_meta]
        if init_fn is not None:
            init_fn(module)
        else:
            module.reset_parameters()  # type: ignore[operator]
    if not overwritten:
        _check_written(modules[0], fresh_tensors, "init_fn" if init_fn is not None else "reset_parameters()")


@torch.no_grad()
def synchronize(modules: Sequence[nn.Module], grid: RankGrid, ignored: Collection[int] = ()) -> None:
    """Copy the first rank's own parameters and buffers of ``modules`` to all other ranks. Collective over ``grid``.

    modules  the first has all others inside

    Buffers of experts (``buffers_of_experts``) are copied between the ranks that hold the same experts: a module around
    units of experts, which have a smaller mesh, may have some.
    """
    grids = [param.shard.grid for param in modules[0].parameters() if _is_of_fewer(param, grid)]
    of_experts = buffers_of_experts(modules[0], partial(_is_of_fewer, grid=grid)) if grids else set()
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in ignored:
                (grids[0] if id(tensor) in of_experts else grid).broadcast(tensor.detach())


def _is_of_fewer(param: nn.Parameter, grid: RankGrid) -> TypeGuard[ShardedParameter]:
    """Whether ``param`` is sharded already, over fewer ranks than ``grid`` has."""
    return isinstance(param, ShardedParameter) and param.shard.grid.size < grid.size


def _empty_on(tensor: torch.Tensor, device: torch.device, ignored: Collection[int]) -> torch.Tensor:
    if id(tensor) in ignored:
        return tensor
    return fill_unwritten(torch.empty_like(tensor, device=device)) if tensor.is_meta else tensor.to(device)


def _check_written(root: nn.Module, tensors: Sequence[Unwritten], writer: str) -> None:
    """Raise ``ValueError`` for the first of ``tensors`` that is not written; ``writer``: who was to write it."""
    for each in tensors:
        missing = each.missing
        if missing is None:
            continue
        prefix = next((f"{name}." for name, module in root.named_modules() if module is each.module and name), "")
        raise ValueError(
            f"{'buffer' if each.is_buffer else 'parameter'} '{prefix}{each.name}' of {type(root).__name__} was on the "
            f"meta device, and {missing} after {writer} of {type(each.module).__name__}: give fully_shard an init_fn "
            f"that writes it, as module.{each.name}.copy_(...) does, or make this module on a device that keeps values"
        )
