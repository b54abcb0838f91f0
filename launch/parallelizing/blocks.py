"""The repeated blocks of a model: which they are, and how their activations are recomputed."""

import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["add_recompute", "default_units", "in_words", "recompute_each", "self_contained"]


def default_units(model: nn.Module) -> Iterator[nn.Module]:
    """A model's layers: the members of its outermost lists of modules; of its ``nn.Sequential``s if it has no list.

    A list is an ``nn.ModuleList``, or an ``nn.ModuleDict`` whose keys are numbers. Members that share a parameter with
    modules outside of them are left out: only the whole model can shard what several have.
    """
    has_lists = any(_is_list(child) for child in model.modules())
    is_kind: Callable[[nn.Module], bool] = _is_list if has_lists else lambda child: isinstance(child, nn.Sequential)
    layers = [
        member
        for name, child in model.named_modules()
        if is_kind(child) and not _is_inside(model, name, is_kind)
        for member in child.children()
        if type(member).forward is not nn.Module.forward and any(True for _ in member.parameters())
    ]
    yield from self_contained(model, layers)


def self_contained(model: nn.Module, modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Each of ``modules`` once, without those that share a parameter with modules of ``model`` outside of them."""
    everywhere = _count_places(model)
    for module in dict.fromkeys(modules):
        if all(everywhere[key] == count for key, count in _count_places(module).items()):
            yield module


def _count_places(module: nn.Module) -> Mapping[int, int]:
    """In how many modules each parameter is registered, by the parameter's ``id``."""
    return Counter(id(param) for inner in module.modules() for param in inner.parameters(recurse=False))


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.ModuleDict) and len(module) > 0 and all(key.isdecimal() for key in module)
    )


def _is_inside(model: nn.Module, name: str, is_kind: Callable[[nn.Module], bool]) -> bool:
    parents = name.split(".")[:-1] if name else []
    ends = range(len(parents) + 1) if name else ()
    return any(is_kind(model.get_submodule(".".join(parents[:end]))) for end in ends)


def in_words(model: nn.Module, units: Iterable[nn.Module]) -> str:
    """``units`` by class and name, one after the other: "LlamaDecoderLayer: model.layers.0, model.layers.1"."""
    names = {id(module): name for name, module in model.named_modules()}
    by_class: dict[str, list[str]] = {}
    for unit in units:
        by_class.setdefault(type(unit).__name__, []).append(names[id(unit)])
    return "; ".join(f"{cls}: {', '.join(found)}" for cls, found in by_class.items())


def add_recompute(model: Any, units: Iterable[nn.Module]) -> None:
    """Recompute each unit in backward: as a Hugging Face model does it itself, or around each unit's forward."""
    if getattr(model, "supports_gradient_checkpointing", False):
        # Later versions of transformers have the first name, and warn by the second.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        return
    recompute_each(units)


def recompute_each(units: Iterable[nn.Module]) -> None:
    """Put a checkpointed region around each unit's forward."""
    for unit in units:
        if _FORWARD in unit.__dict__:
            continue
        unit.__dict__[_FORWARD] = unit.forward
        # A bound method: a copy of the model (EMA) gets one that is bound to the copy.
        unit.forward = types.MethodType(_recomputed, unit)


_FORWARD = "_maingrad_forward"


def _recomputed(unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward, whose activations backward computes again."""
    forward = unit.__dict__[_FORWARD]
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
