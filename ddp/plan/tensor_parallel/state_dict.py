"""State dicts of modules with local tensors have DTensors, as before, and take DTensors or whole tensors."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from .layouts import Layout, waited
from .localize import layouts_of

__all__ = ["install_state_dict_hooks", "local_of"]


def install_state_dict_hooks(module: nn.Module) -> None:
    """Have ``state_dict`` and ``load_state_dict`` translate the module's own local tensors."""
    if _after_saving not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_after_saving)
        module.register_load_state_dict_pre_hook(_before_loading)


@torch.no_grad()
def _after_saving(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Post-hook of ``state_dict``: DTensors that share the memory of the local tensors."""
    for name, layout in layouts_of(module).items():
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and not _is_shard(module, name):
            state_dict[prefix + name] = layout.dtensor(value.detach())


@torch.no_grad()
def _before_loading(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Pre-hook of ``load_state_dict``: local tensors. Collective where a DTensor is cut in another way."""
    for name, layout in layouts_of(module).items():
        value = state_dict.get(prefix + name)
        if not isinstance(value, Tensor) or _is_shard(module, name):
            continue
        if value.shape == layout.shape:
            state_dict[prefix + name] = local_of(value, layout)
        else:
            error_msgs.append(
                f"size mismatch for {prefix}{name}: {list(value.shape)} in the state dict, and the whole tensor, of "
                f"which this rank holds a slice, is {list(layout.shape)}"
            )
            del state_dict[prefix + name]


def _is_shard(module: nn.Module, name: str) -> bool:
    """Whether the parameter is one of ``fully_shard``, whose hooks translate between shards and DTensors."""
    return hasattr(module._parameters.get(name), "shard")


def local_of(value: Tensor, layout: Layout) -> Tensor:
    """This rank's elements of a DTensor or a whole tensor. Collective where a DTensor is cut in another way."""
    if isinstance(value, DTensor):
        if value.device_mesh == layout.mesh and value.placements == (layout.placement,):
            return waited(value.to_local())
        value = waited(value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local())
    return layout.model_slice().part_of(value)
