"""Which of its two forms each module shows of its parameters: the rank's shard, or the whole while a forward runs."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ...ddp.contract.main_grad import record_of
from ..tensors.parameter import ShardedParameter
from .bucket import ShardedPair

__all__ = ["Registration"]


class _Place(NamedTuple):
    """One module's registration of one parameter."""

    parameters: dict[str, nn.Parameter | None]
    """Of the module."""
    module: "weakref.ref[nn.Module]"
    local: str
    """Its name there."""
    plain: bool
    """The module's class does nothing else about parameters that are set, as recurrent layers do."""
    sharded: ShardedParameter
    whole: nn.Parameter
    trainable: bool

    @classmethod
    def of(cls, pair: ShardedPair, module: nn.Module, local: str) -> "_Place":
        """As it stands when the unit is made."""
        plain = type(module).__setattr__ is nn.Module.__setattr__
        trainable = pair.sharded.requires_grad
        return cls(module._parameters, weakref.ref(module), local, plain, pair.sharded, pair.whole, trainable)

    def register(self, param: nn.Parameter) -> None:
        """Have the module show this form."""
        if self.plain:
            self.parameters[self.local] = param
        else:
            setattr(self.module(), self.local, param)


class Registration:
    """The modules that register a unit's parameters.

    module  of the unit; held weakly, as it owns this
    inside  the module and those in it that are not in units of their own
    pairs   the unit's parameters
    """

    def __init__(self, module: nn.Module, inside: Sequence[nn.Module], pairs: Sequence[ShardedPair]) -> None:
        self._module = weakref.ref(module)
        self._places = [_Place.of(pair, owner, local) for pair in pairs for owner, local in pair.owned.owners]
        self._contents = [
            (found._parameters, len(found._parameters), found._modules, tuple(found._modules.values()))
            for found in inside
        ]
        self._plain = {id(param) for param in module.parameters()} - {id(pair.before) for pair in pairs}
        self._trained = [place for place in self._places if place.trainable]
        self._num_shown = 0
        self._shown_in_backward = False
        self._shown_frozen = False

    @property
    def is_frozen(self) -> bool:
        """Somebody has frozen the shards of all that is trained, for now."""
        return not any(place.sharded.requires_grad for place in self._trained)

    @property
    def shows_whole(self) -> bool:
        """Its modules have the whole parameters registered."""
        return self._num_shown > 0

    def check(self, label: str) -> None:
        """Raise ``RuntimeError`` where a parameter was replaced, frozen, unfrozen or added since the unit was made."""
        shown = self.shows_whole
        for parameters, _, local, _, sharded, whole, trainable in self._places:
            if parameters.get(local) is not (whole if shown else sharded):
                raise RuntimeError(
                    f"parameter '{sharded.shard.name}' was replaced after fully_shard (a new nn.Parameter, a tie, "
                    f"torch.nn.utils.parametrize): no unit gathers it or reduces its gradient; change the model "
                    f"before fully_shard, and values in place, under torch.no_grad()"
                )
            if sharded.requires_grad is not trainable or whole.requires_grad is not trainable:
                raise RuntimeError(_changed(sharded.shard.name, frozen=trainable))
        for index, (parameters, size, children, found) in enumerate(self._contents):
            if len(parameters) != size or tuple(children.values()) != found:
                self._check_no_stranger(label)
                self._contents[index] = parameters, len(parameters), children, tuple(children.values())

    def _check_no_stranger(self, label: str) -> None:
        module = self._module()
        assert module is not None, "its forward runs"
        for name, param in module.named_parameters():
            known = isinstance(param, ShardedParameter) or record_of(param) is not None or id(param) in self._plain
            if param.requires_grad and not known:
                raise RuntimeError(
                    f"parameter '{name}' of {label} was not there at fully_shard: no unit gathers it or reduces "
                    f"its gradient; add it before, or freeze it"
                )

    def show_whole(self, *, frozen: bool = False) -> None:
        """Register the whole parameters in the modules that had them before sharding; ``frozen``: as frozen ones."""
        self._num_shown += 1
        if frozen is not self._shown_frozen:
            self._freeze_whole(frozen)
        if self._num_shown == 1:
            for place in self._places:
                place.register(place.whole)

    def show_shards(self) -> None:
        """Register the shards again."""
        self._num_shown -= 1
        if self._num_shown == 0:
            if self._shown_frozen:
                self._freeze_whole(False)
            self.register_shards()

    def _freeze_whole(self, frozen: bool) -> None:
        self._shown_frozen = frozen
        for place in self._trained:
            place.whole.requires_grad_(not frozen)

    def show_in_backward(self, *, frozen: bool) -> None:
        """Register the whole parameters for what forward runs again in backward (recompute inside the unit)."""
        if not self._shown_in_backward:
            self._shown_in_backward = True
            self.show_whole(frozen=frozen)
        elif frozen is not self._shown_frozen:
            self._freeze_whole(frozen)

    def hide_after_backward(self) -> None:
        """Undo it."""
        if self._shown_in_backward:
            self._shown_in_backward = False
            self.show_shards()

    def show_whole_to_foreign_delays(self) -> None:
        """Modules that are not ours, and delay weight gradients, write to what they have registered by then."""
        modules = [(place.whole, module) for place in self._places if (module := place.module()) is not None]
        delaying = {
            id(module): module
            for whole, module in modules
            if (record := record_of(whole)) is not None and record.foreign_delayer == type(module).__name__
        }
        for module in delaying.values():
            backward_dw = type(module).backward_dw  # type: ignore[attr-defined]
            shown = partial(_among_whole, weakref.ref(self), backward_dw, weakref.ref(module))
            object.__setattr__(module, "backward_dw", shown)

    def register_shards(self) -> None:
        """Register the shards, whatever is registered now."""
        for place in self._places:
            place.register(place.sharded)


def _changed(name: str, *, frozen: bool) -> str:
    if frozen:
        return (
            f"parameter '{name}' was frozen (requires_grad_) after fully_shard, which plans for gradients or for none; "
            f"do it before, or give it a learning rate of 0 meanwhile. Where a backward is to go through the model "
            f"without training it (a generator's, through its discriminator), freeze all of its parameters, on all "
            f"ranks; or run that backward under no_sync() of this model, then its zero_grad()"
        )
    return (
        f"parameter '{name}' was unfrozen (requires_grad_) after fully_shard, which plans for gradients or for none; "
        f"do it before, and give it a learning rate of 0 until it is to be trained"
    )


def _among_whole(
    registration: "weakref.ref[Registration]",
    backward_dw: Any,
    module: "weakref.ref[nn.Module]",
    *args: Any,
    **kwargs: Any,
) -> Any:
    live = registration()
    if live is None:
        return backward_dw(module(), *args, **kwargs)
    live.show_whole()
    try:
        return backward_dw(module(), *args, **kwargs)
    finally:
        live.show_shards()
