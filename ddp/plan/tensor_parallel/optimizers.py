"""Optimizers of torch over local parameters: state dicts have DTensors, and none steps over the DTensors of before.

Without it a state dict would have plain tensors, one rank's slices: torch.distributed.checkpoint saves these once, and
gives them to all tensor-parallel ranks. torch does not tell when an optimizer is built. So its hooks are registered at
its first step.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..model_slice import set_model_slice
from .layouts import Layout
from .localize import REPLACED
from .state_dict import local_of

__all__ = ["set_slice_of"]

_LAYOUT = "_maingrad_layout"


def set_slice_of(param: Tensor, layout: Layout) -> None:
    """Have wrappers, and state dicts of optimizers, know the layout of a local parameter."""
    _watch_steps()
    set_model_slice(param, layout.model_slice())
    if layout.of_experts:
        param.allreduce = False  # type: ignore[attr-defined]  # Megatron-core's mark, which a copy has lost
    setattr(param, _LAYOUT, layout)


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


@torch.no_grad()
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if any(hasattr(param, REPLACED) for group in optimizer.param_groups for param in group["params"]):
        raise RuntimeError(  # it would step, and change nothing: no gradient reaches these DTensors
            f"{type(optimizer).__name__} was built before the model was wrapped: its parameters are the DTensors of "
            f"before, which no forward uses any more; build the optimizer from model.parameters() after wrapping"
        )
    if _after_saving not in optimizer._optimizer_state_dict_post_hooks.values() and any(_local_params(optimizer)):
        optimizer.register_state_dict_post_hook(_after_saving)
        optimizer.register_load_state_dict_pre_hook(_before_loading)
        for _, param, layout in _local_params(optimizer):  # what was loaded before the first step
            if param in optimizer.state:
                optimizer.state[param] = _localized(optimizer.state[param], layout)


def _local_params(optimizer: Optimizer) -> Iterator[tuple[int, Tensor, Layout]]:
    """Local parameters with their numbers in state dicts. Shards of ``fully_shard`` have hooks of their own."""
    params = dict.fromkeys(param for group in optimizer.param_groups for param in group["params"])
    for index, param in enumerate(params):
        layout = getattr(param, _LAYOUT, None)
        if layout is not None and not hasattr(param, "shard"):
            yield index, param, layout


@torch.no_grad()
def _after_saving(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Post-hook of ``state_dict``: DTensors of the state that has one value for each element."""
    state = dict(state_dict["state"])
    for index, param, layout in _local_params(optimizer):
        state[index] = {
            key: layout.dtensor(value.detach()) if _is_elementwise(value, param) else value
            for key, value in state.get(index, {}).items()
        }
    return {**state_dict, "state": {index: each for index, each in state.items() if each}}


@torch.no_grad()
def _before_loading(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Pre-hook of ``load_state_dict``. Collective where a DTensor is cut in another way."""
    saved = list(dict.fromkeys(index for group in state_dict["param_groups"] for index in group["params"]))
    state = dict(state_dict["state"])
    for index, _, layout in _local_params(optimizer):
        if index < len(saved) and saved[index] in state:
            state[saved[index]] = _localized(state[saved[index]], layout)
    return {**state_dict, "state": state}


def _localized(state: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """State with this rank's elements of DTensors and whole tensors. Local tensors stay."""
    return {
        key: local_of(value, layout) if isinstance(value, Tensor) and value.shape == layout.shape else value
        for key, value in state.items()
    }


def _is_elementwise(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == param.shape
