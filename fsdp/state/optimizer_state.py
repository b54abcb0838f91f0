"""State dicts of the user's optimizer: elementwise state in DTensors, as with PyTorch's FSDP2.

So the functions of ``torch.distributed.checkpoint.state_dict`` work, and any number of ranks, or FSDP2, can load what
these functions save. torch has hooks of one optimizer, and does not tell when an optimizer is built: these
hooks are registered at its first step, or by ``make_optimizer``, ``save_checkpoint`` and ``load_checkpoint``. An
optimizer that was given a state dict before keeps the DTensors until then, and so they are what it would save.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..tensors.parameter import ShardedParameter
from .exchange import disagreement
from .state_dict import translation_of

__all__ = ["counters_of", "elementwise_of", "translate_state_dicts"]

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


def elementwise_of(param: Tensor, state: Mapping[str, Any], counters: Iterable[str]) -> dict[str, Tensor]:
    """The part of ``state`` that has one value for each element of ``param``."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == param.shape and not (value.ndim == 0 and key in counters)
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
    optimizer.register_state_dict_post_hook(_after_saving)
    optimizer.register_load_state_dict_pre_hook(_before_loading)
    with torch.no_grad():
        known = {param: optimizer.state[param] for param in _params_of(optimizer) if param in optimizer.state}
        if known:
            _check_fits(optimizer, known, [])
            optimizer.state.update(_to_shards(known))


@torch.no_grad()
def _after_saving(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Post-hook of ``state_dict``: shards become DTensors. Collective."""
    counters = counters_of(optimizer)
    state = dict(state_dict["state"])
    elementwise = {
        param: (index, elementwise_of(param, state.get(index, {}), counters))
        for index, param in enumerate(_params_of(optimizer))
        if isinstance(param, ShardedParameter)
    }
    _agree({param: _keys(known) for param, (_, known) in elementwise.items()}, None)
    for param, (index, known) in elementwise.items():
        if known:
            translation = translation_of(param)
            state[index] = {
                **state[index],
                **{key: translation.to_dtensor(param.shard, value) for key, value in known.items()},
            }
    return {**state_dict, "state": state}


@torch.no_grad()
def _before_loading(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Pre-hook of ``load_state_dict``: DTensors and whole tensors become shards. Collective."""
    state = dict(state_dict["state"])
    # torch matches saved parameters by their position in the groups, and ignores names.
    saved = dict.fromkeys(index for group in state_dict["param_groups"] for index in group["params"])
    places = {param: index for index, param in zip(saved, _params_of(optimizer), strict=False) if index in state}
    states = {param: state[index] for param, index in places.items()}
    _check_loadable(optimizer, state_dict, states)
    return {**state_dict, "state": {**state, **{places[param]: entry for param, entry in _to_shards(states).items()}}}


def _check_loadable(
    optimizer: Optimizer, state_dict: Mapping[str, Any], states: Mapping[Tensor, Mapping[str, Any]]
) -> None:
    """Raise ``ValueError`` on all ranks if one rank cannot load its state dict, or state dicts differ. Collective."""
    here, there = ([len(group["params"]) for group in side["param_groups"]] for side in (vars(optimizer), state_dict))
    complaints = []
    if here != there:
        complaints.append(f"the state dict has groups of {there} parameters, and this optimizer has groups of {here}")
    _check_fits(optimizer, states, complaints)


def _check_fits(optimizer: Optimizer, states: Mapping[Tensor, Mapping[str, Any]], complaints: list[str]) -> None:
    """The same for ``states`` alone, where this rank has ``complaints`` already. Collective."""
    translated = _to_translate(states)
    said: dict[ShardedParameter, str] = {}
    for param in _params_of(optimizer):
        if isinstance(param, ShardedParameter):
            values, translation = translated.get(param, {}), translation_of(param)
            said[param] = _keys({f"{key} ({translation.describe(param.shard, values[key])})": 0 for key in values})
            objections = ((key, translation.objection(param.shard, value)) for key, value in values.items())
            complaints += [f"'{key}' of '{param.shard.name}': {why}" for key, why in objections if why is not None]
    _agree(said, complaints[0] if complaints else None)


def _agree(said: Mapping[ShardedParameter, str], complaint: str | None) -> None:
    trouble = disagreement(said, complaint)
    if trouble is not None:
        raise ValueError(trouble)


def _keys(state: Iterable[str]) -> str:
    return f"state {', '.join(sorted(state))}" if state else "no state"


def _to_shards(states: Mapping[Tensor, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """The state of sharded parameters, with DTensors and whole tensors replaced by shards. Collective."""
    shards: dict[Tensor, dict[str, Any]] = {
        param: dict(state) for param, state in states.items() if isinstance(param, ShardedParameter)
    }
    for param, values in _to_translate(states).items():
        for key, value in values.items():
            shards[param][key] = translation_of(param).to_shard(param.shard, value)
    return shards


def _to_translate(states: Mapping[Tensor, Mapping[str, Any]]) -> dict[ShardedParameter, dict[str, Tensor]]:
    """The state that ``_to_shards`` replaces: DTensors, and tensors of the whole parameter's shape."""
    from torch.distributed.tensor import DTensor

    counters = _COUNTERS | {
        key
        for param, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ndim == 0 < param.ndim
    }

    def of_whole(param: ShardedParameter, key: str, value: Any) -> bool:
        if isinstance(value, DTensor):
            return True
        whole = isinstance(value, Tensor) and tuple(value.shape) == param.shard.shape != tuple(param.shape)
        return whole and not (value.ndim == 0 and key in counters)

    return {
        param: {key: value for key, value in state.items() if of_whole(param, key, value)}
        for param, state in states.items()
        if isinstance(param, ShardedParameter)
    }


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters, in the order in which state dicts number them."""
    return list(dict.fromkeys(param for group in optimizer.param_groups for param in group["params"]))
