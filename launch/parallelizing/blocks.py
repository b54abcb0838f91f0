"""The repeated blocks of a model: which they are, and how their activations are recomputed."""

import logging
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Units", "add_recompute", "default_units", "find_units", "recompute", "self_contained"]

logger = logging.getLogger(__name__)

Units: TypeAlias = Literal["auto"] | type[nn.Module] | tuple[type[nn.Module], ...] | Iterable[nn.Module]
"""How a user names blocks."""


def find_units(model: nn.Module, units: Units, *, gathers: bool) -> list[nn.Module]:
    """The modules inside ``model`` that ``units`` names, each once.

    gathers  units are what is gathered together, so that a model without any is gathered whole: worth a warning

    Raises ``TypeError`` for what is no module, such as a class beside modules, and ``ValueError`` for modules and
    classes that are not in the model.
    """
    if isinstance(units, str):
        return _found_by_themselves(model, units, gathers=gathers)
    named = units if isinstance(units, tuple) else (units,)
    classes = [each for each in named if isinstance(each, type)]
    if classes and len(classes) == len(named):
        return _of_classes(model, classes)
    if not isinstance(units, Iterable):
        raise TypeError(f"units names no modules: {units!r}; give a class, a tuple of classes, or modules of the model")
    given = dict.fromkeys(units)
    inside = {id(module) for module in model.modules()}
    for module in given:
        if not isinstance(module, nn.Module):
            raise TypeError(f"units: {module!r} is no module; give a class, a tuple of classes, or modules")
        if module is model or id(module) not in inside:
            raise ValueError(
                f"units: {type(module).__name__} is {'the model itself' if module is model else 'not in the model'}; "
                f"name modules inside {type(model).__name__}"
            )
    return [module for module in given if isinstance(module, nn.Module)]


def _found_by_themselves(model: nn.Module, units: str, *, gathers: bool) -> list[nn.Module]:
    if units != "auto":
        raise ValueError(f'units is "auto", a class, a tuple of classes, or modules of the model; got {units!r}')
    found, name = list(default_units(model)), type(model).__name__
    if found:
        logger.info("%s: %d units, %s", name, len(found), _in_words(model, found))
    elif gathers:
        logger.warning(
            "%s: no repeated blocks in an nn.ModuleList or nn.Sequential, so that all its parameters are gathered at "
            "once; name blocks by units=Block, their class",
            name,
        )
    return found


def _of_classes(model: nn.Module, classes: Sequence[type]) -> list[nn.Module]:
    inside = [module for module in model.modules() if module is not model]
    for cls in classes:
        if not any(isinstance(module, cls) for module in inside):
            names = sorted({type(module).__name__ for module in inside})
            raise ValueError(f"units: the model has no {cls.__name__} inside it; its classes are {', '.join(names)}")
    return list(self_contained(model, (module for module in inside if isinstance(module, tuple(classes)))))


def default_units(model: nn.Module) -> Iterator[nn.Module]:
    """A model's layers: the members of its outermost lists of modules; of its ``nn.Sequential``s if it has no list.

    A list is an ``nn.ModuleList``, or an ``nn.ModuleDict`` whose keys are numbers. Members that share a parameter with
    modules outside of them are left out: only the whole model can shard what several have.
    """
    has_lists = any(_is_list(child) for child in model.modules())
    is_kind: Callable[[nn.Module], bool] = _is_list if has_lists else lambda child: isinstance(child, nn.Sequential)
    layers = [
        member
        for outermost in _outermost(model, is_kind)
        for member in outermost.children()
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


def _outermost(module: nn.Module, is_kind: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """The modules of a kind that are in no other one of that kind."""
    if is_kind(module):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, is_kind)


def _in_words(model: nn.Module, units: Iterable[nn.Module]) -> str:
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

    for unit in units:
        recompute(unit)


_FORWARD, _HOW = "_maingrad_forward", "_maingrad_recompute"


def recompute(unit: nn.Module, **how: Any) -> None:
    """Compute the activations of a module's forward again in backward, instead of keeping them.

    how  arguments of ``torch.utils.checkpoint.checkpoint``
    """
    if _FORWARD not in unit.__dict__:
        unit.__dict__.update({_FORWARD: unit.forward, _HOW: how})
        # A bound method: a copy of the model (EMA) gets one that is bound to the copy.
        unit.forward = types.MethodType(_recomputed, unit)


def _recomputed(unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward, whose activations backward computes again."""
    forward = unit.__dict__[_FORWARD]
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **unit.__dict__[_HOW], **kwargs)
