"""State dicts of the user's optimizer: what is elementwise in DTensors, as PyTorch's FSDP2 has it.

So the functions of ``torch.distributed.checkpoint.state_dict`` work, and what they saved fits any ranks, and FSDP2. The
optimizer is the user's, and is known here from its first step on, or from ``load_checkpoint``. Where it has no state
yet, those functions take a step over gradients of zero first.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .sharded_param import ShardedParameter
from .state_dict import translation_of

__all__ = ["counters_of", "elementwise_of", "translate_state_dicts"]

_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""State of torch's optimizers that is one number for a whole parameter."""


def counters_of(optimizer: Optimizer) -> frozenset[str]:
    """Keys of state that is one number for a parameter. Shapes tell, but not those of scalars."""
    return _COUNTERS | {
        key
        for param, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape != param.shape
    }


def elementwise_of(param: Tensor, state: Mapping[str, Any], counters: Iterable[str]) -> dict[str, Tensor]:
    """What of a parameter's state has a value for each element that this rank holds."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == param.shape and not (value.ndim == 0 and key in counters)
    }


def translate_state_dicts(optimizer: Optimizer) -> None:
    """Have ``optimizer.state_dict()`` and ``load_state_dict()`` speak of whole parameters, from now on.

    Collective where its state was loaded before anybody knew it, in DTensors.
    """
    if _after_saving in optimizer._optimizer_state_dict_post_hooks.values():
        return
    optimizer.register_state_dict_post_hook(_after_saving)
    optimizer.register_load_state_dict_pre_hook(_before_loading)
    with torch.no_grad():
        known = {param: optimizer.state[param] for param in _params_of(optimizer) if param in optimizer.state}
        optimizer.state.update(_to_shards(known))


@torch.no_grad()
def _after_saving(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Shards become DTensors. Collective."""
    counters = counters_of(optimizer)
    state = dict(state_dict["state"])
    for index, param in enumerate(_params_of(optimizer)):
        if isinstance(param, ShardedParameter) and index in state:
            translation = translation_of(param)
            elementwise = elementwise_of(param, state[index], counters)
            state[index] = {
                key: translation.to_dtensor(param.shard, value) if key in elementwise else value
                for key, value in state[index].items()
            }
    return {**state_dict, "state": state}


@torch.no_grad()
def _before_loading(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """DTensors and whole tensors become shards. Collective."""
    state = dict(state_dict["state"])
    # By place, as torch takes them: names of parameters play no part in it.
    saved = dict.fromkeys(index for group in state_dict["param_groups"] for index in group["params"])
    places = {param: index for index, param in zip(saved, _params_of(optimizer), strict=False) if index in state}
    shards = _to_shards({param: state[index] for param, index in places.items()})
    return {**state_dict, "state": {**state, **{places[param]: entry for param, entry in shards.items()}}}


def _to_shards(states: Mapping[Tensor, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """The state of sharded parameters with this rank's elements of each DTensor and whole tensor."""
    from torch.distributed.tensor import DTensor

    counters = _COUNTERS | {
        key
        for param, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ndim == 0 < param.ndim
    }
    found: dict[Tensor, dict[str, Any]] = {}
    for param, state in states.items():
        if not isinstance(param, ShardedParameter):
            continue
        found[param] = entry = dict(state)
        for key, value in state.items():
            whole = isinstance(value, Tensor) and tuple(value.shape) == param.shard.shape != tuple(param.shape)
            if isinstance(value, DTensor) or (whole and not (value.ndim == 0 and key in counters)):
                entry[key] = translation_of(param).to_shard(param.shard, value)
    return found


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    """In the order in which state dicts number them."""
    return list(dict.fromkeys(param for group in optimizer.param_groups for param in group["params"]))
