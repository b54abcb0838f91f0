"""State dicts of the user's optimizer: elementwise state in DTensors, as with PyTorch's FSDP2.

So the functions of ``torch.distributed.checkpoint.state_dict`` work, and any number of ranks, or FSDP2, can load what
these functions save. torch has hooks of one optimizer, and does not tell when an optimizer is built: these
hooks are registered at its first step, or by ``make_optimizer``, ``save_checkpoint`` and ``load_checkpoint``. An
optimizer that was given a state dict before keeps the DTensors until then, and so they are what it would save.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...ddp.optimizer.steps import MASTER
from ...kernels.optimizer.reference import split_master
from ..tensors.parameter import ShardedParameter
from .state_dict import disagreement, misfit, to_dtensor, to_shard

__all__ = ["counters_of", "elementwise_of", "params_of", "places_of", "translate_state_dicts"]

_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of state that is one number for a whole parameter, in optimizers of torch."""


def counters_of(optimizer: Optimizer) -> frozenset[str]:
    """Keys of state that is one number for a whole parameter.

    Shapes tell which, except for the state of a scalar parameter: so keys count, for all parameters.
    """
    return _COUNTERS | {
        key
        for param, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape != param.shape
    }


def elementwise_of(shape: tuple[int, ...], state: Mapping[str, Any], counters: Collection[str]) -> dict[str, Tensor]:
    """The part of ``state`` that has one value for each element of a parameter, or shard, of this shape."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == shape and not (value.ndim == 0 and key in counters)
    }


def translate_state_dicts(optimizer: Optimizer) -> None:
    """Have ``optimizer.state_dict()`` and ``load_state_dict()`` translate to DTensors and back, from now on.

    The first step of an optimizer over sharded parameters does so by itself. Before it, only optimizers that make state
    when they are built (``Adagrad``) have anything to translate.

    optimizer  of ``torch.optim``. State that was loaded before becomes shards: DTensors of any ranks, and tensors of
               the whole parameter's shape

    Collective if there is state. Raises ``ValueError`` on all ranks if one rank's state fits no shard, or ranks differ.
    """
    if _after_saving in optimizer._optimizer_state_dict_post_hooks.values():
        return
    from torch.distributed.tensor import DTensor

    optimizer.register_state_dict_post_hook(_after_saving)
    optimizer.register_load_state_dict_pre_hook(_before_loading)
    with torch.no_grad():
        known = {param: optimizer.state[param] for param in params_of(optimizer) if param in optimizer.state}
        if known:
            # A shard that is all of its parameter does not tell what a plain tensor is, and needs no translation.
            optimizer.state.update(_to_shards(optimizer, known, compared=DTensor))


@torch.no_grad()
def _after_saving(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Post-hook of ``state_dict``: shards become DTensors. Collective."""
    counters = counters_of(optimizer)
    state = dict(state_dict["state"])
    elementwise = {
        param: (index, elementwise_of(param.shape, state.get(index, {}), counters))
        for param, index in _numbers_of(optimizer, state_dict).items()
        if isinstance(param, ShardedParameter)
    }
    trouble = disagreement({param: list(_named(param, known)) for param, (_, known) in elementwise.items()}, [])
    if trouble is not None:
        raise ValueError(trouble)
    for param, (index, known) in elementwise.items():
        if known:
            state[index] = {**state[index], **{key: to_dtensor(param, value) for key, value in known.items()}}
    return {**state_dict, "state": state}


@torch.no_grad()
def _before_loading(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Pre-hook of ``load_state_dict``: DTensors and whole tensors become shards. Collective."""
    state, places = dict(state_dict["state"]), places_of(optimizer, state_dict)
    states = {param: state[index] for param, index in places.items()}
    here, there = ([len(group["params"]) for group in side["param_groups"]] for side in (vars(optimizer), state_dict))
    complaints = []
    if here != there:
        complaints.append(f"the state dict has groups of {there} parameters, and this optimizer has groups of {here}")
    shards = _to_shards(optimizer, states, complaints)
    return {**state_dict, "state": {**state, **{places[param]: entry for param, entry in shards.items()}}}


def _named(param: ShardedParameter, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values by their names for errors."""
    return {f"'{key}' of '{param.shard.name}'": values[key] for key in sorted(values)}


def _to_shards(
    optimizer: Optimizer,
    states: Mapping[Tensor, Mapping[str, Any]],
    complaints: Sequence[str] = (),
    *,
    compared: type[Tensor] = Tensor,
) -> dict[Tensor, dict[str, Any]]:
    """The state of sharded parameters, with DTensors and whole tensors replaced by shards. Collective.

    compared  ranks compare which state of this type they have

    Raises ``ValueError`` on all ranks if one rank has ``complaints`` or cannot take its state, or states differ.
    """
    translated = _to_translate(states)
    params = [param for param in params_of(optimizer) if isinstance(param, ShardedParameter)]
    given = {
        param: {key: value for key, value in translated.get(param, {}).items() if isinstance(value, compared)}
        for param in params
    }
    trouble = misfit({param: _named(param, values) for param, values in given.items()}, complaints)
    if trouble is not None:
        raise ValueError(trouble)
    shards: dict[Tensor, dict[str, Any]] = {
        param: {**states[param], **{key: to_shard(param, value) for key, value in values.items()}}
        for param, values in translated.items()
    }
    if not getattr(optimizer, "keeps_masters", False):
        for param, known in states.items():
            if MASTER in known:  # of a plain parameter too, whose state needs no translation
                entry = shards.setdefault(param, dict(known))
                _take_master(param, entry.pop(MASTER))
    return shards


def _take_master(param: Tensor, master: Tensor) -> None:
    """Write the masters of compact state (``ShardedAdamW``) into parameters that are masters themselves.

    Elements stay that are not the master's rounding: the program has given the parameter other values since.
    """
    master = master.to(param.device, torch.float32)
    param.copy_(torch.where(split_master(master)[0].to(param.dtype) == param, master, param))


def _to_translate(states: Mapping[Tensor, Mapping[str, Any]]) -> dict[ShardedParameter, dict[str, Tensor]]:
    """The state that ``_to_shards`` replaces: DTensors, and tensors of the whole parameter's shape."""
    from torch.distributed.tensor import DTensor

    counters = _COUNTERS | {
        key
        for param, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ndim == 0 < _ndim_of_whole(param)
    }
    return {
        param: {
            **elementwise_of(param.shard.shape, state, counters),
            **{key: value for key, value in state.items() if isinstance(value, DTensor)},
        }
        for param, state in states.items()
        if isinstance(param, ShardedParameter)
    }


def _ndim_of_whole(param: Tensor) -> int:
    """Without elements here, the shard of a scalar has a dim."""
    return len(param.shard.shape) if isinstance(param, ShardedParameter) else param.ndim


def places_of(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[Tensor, int]:
    """The number under which a state dict has the state of a parameter, for all that have state."""
    numbers = _numbers_of(optimizer, state_dict)
    return {param: index for param, index in numbers.items() if index in state_dict["state"]}


def _numbers_of(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[Tensor, int]:
    """The number of each parameter in a state dict: not its place, where a group names a parameter twice.

    torch matches saved parameters by their position in the groups, and ignores names.
    """
    saved = dict.fromkeys(index for group in state_dict["param_groups"] for index in group["params"])
    return dict(zip(params_of(optimizer), saved, strict=False))


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters, each once, in the order of its groups."""
    return list(dict.fromkeys(param for group in optimizer.param_groups for param in group["params"]))
