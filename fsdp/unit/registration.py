"""``Registration``: modules register a rank's shards, and whole parameters while a forward or a backward runs.

``WholeWrites``: what a forward writes to whole parameters is found at its end, and brought to the shards before the
memory is freed. In plain PyTorch a module may write its parameters in forward (``nn.Embedding(max_norm=...)``, a
codebook, ActNorm's first batch). Here forward sees whole parameters, whose memory is freed afterwards or overwritten by
the next gather. torch counts in-place writes in ``_version``. Gathers do not raise it, because they write to another
tensor of the same memory. A write through ``.data`` does not raise it either: each unit's first forward in training,
and the first one in evaluation, compare values, and such a write raises ``RuntimeError``.
"""

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...ddp.buckets.checks import ModuleTables
from ...ddp.buckets.replicas import bits_of, written_from_local_data
from ...ddp.collectives.streams import is_capturing
from ...ddp.contract.main_grad import record_of
from ...ddp.torch_internals import weak_method
from ..tensors.parameter import ShardedPair, ShardedParameter, flat_of

__all__ = ["Registration", "WholeWrites", "write_back"]

_requires_grad = attrgetter("requires_grad")


class Registration:
    """Registers a unit's parameters in their modules, in one form or the other.

    inside  the unit's module, which owns this object, and the modules in it, without units inside it and their modules
    pairs   the unit's parameters
    """

    def __init__(self, inside: Sequence[nn.Module], pairs: Sequence[ShardedPair]) -> None:
        self._module = weakref.ref(inside[0])
        self._pairs = pairs
        # Where modules register the parameters: the module's ``_parameters``, the name in it, and the module, if its
        # class has a __setattr__ of its own, as recurrent layers have.
        self._places: list[tuple[dict[str, nn.Parameter | None], str, ShardedPair, weakref.ref[nn.Module] | None]] = []
        for pair in pairs:
            for reference, local in pair.places:
                owner = reference()
                assert owner is not None, "the unit is being made of it"
                plain = type(owner).__setattr__ is nn.Module.__setattr__
                self._places.append((owner._parameters, local, pair, None if plain else reference))
        self._tables = ModuleTables(inside)
        self._other_form = {id(pair.sharded): pair.whole for pair in pairs}
        self._forms = [form for pair in pairs for form in (pair.sharded, pair.whole)]
        self._trainable = [*map(_requires_grad, self._forms)]
        self._note_contents()
        self._replaced: str | None = None  # name of a parameter that was replaced while whole ones were registered
        self._plain = {id(param) for param in inside[0].parameters()} - {id(pair.before) for pair in pairs}
        self._trained = [pair for pair in pairs if pair.sharded.requires_grad]
        self._num_shown = 0  # calls of show_whole() without show_shards(): forwards nest, and unshard() counts
        self._shown_frozen = False

    @property
    def is_frozen(self) -> bool:
        """The program has frozen all trained parameters of the unit for now, by ``requires_grad_(False)``."""
        return not any(pair.sharded.requires_grad for pair in self._trained)

    @property
    def shows_whole(self) -> bool:
        """The whole parameters are registered."""
        return self._num_shown > 0

    def check(self, label: str) -> None:
        """Raise ``RuntimeError`` if a parameter was replaced, frozen, unfrozen or added after the unit was made."""
        shown = self.shows_whole
        if (
            self._replaced is None
            and [*map(_requires_grad, self._forms)] == self._trainable
            and self._tables.hold(self._contents[shown])
        ):
            return
        self.check_replaced()
        for (_, _, _, sharded, whole), trainable in zip(self._pairs, self._trainable[::2], strict=True):
            whole_is_trained = trainable and not self._shown_frozen  # by a backward that goes through the unit
            if sharded.requires_grad is not trainable or whole.requires_grad is not whole_is_trained:
                raise RuntimeError(_changed(sharded.shard.name, frozen=trainable))
        self._check_no_stranger(label)
        if not shown:
            self._note_contents()

    def check_replaced(self) -> None:
        """Raise ``RuntimeError`` if a module registers another parameter now than the unit has put there."""
        name = self._replaced or self._find_replaced()
        if name is not None:
            raise RuntimeError(
                f"parameter '{name}' was replaced after fully_shard (a new nn.Parameter, a tie, torch.nn.utils."
                f"parametrize, torch.func), and no unit gathers it or reduces its gradient: change the model before "
                f"fully_shard, and values in place; torch.func takes a plain copy, made within unsharded()"
            )

    def _find_replaced(self) -> str | None:
        """Name of a parameter that was replaced; None if there is none."""
        shown = self.shows_whole
        for parameters, local, pair, _ in self._places:
            if parameters.get(local) is not (pair.whole if shown else pair.sharded):
                return pair.sharded.shard.name
        return None

    def _note_contents(self) -> None:
        """Note what the modules register now, which are shards; and what they register with whole parameters shown."""
        entries = self._tables.entries()
        self._contents = entries, [self._other_form.get(id(entry), entry) for entry in entries]

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
        """Register the whole parameters, with ``requires_grad=False`` if ``frozen``. Calls nest."""
        self._num_shown += 1
        self.freeze_whole(frozen)
        if self._num_shown == 1:
            self.register()

    def show_shards(self) -> None:
        """Undo one ``show_whole()``; the last registers the shards again."""
        if self._num_shown == 1:  # a parameter that has replaced a whole one is lost below: the next check says so
            self._replaced = self._replaced or self._find_replaced()
        self._num_shown -= 1
        if self._num_shown == 0:
            self.freeze_whole(False)
            self.register()

    def freeze_whole(self, frozen: bool) -> None:
        """Say whether whole parameters, of which the shards are trained, require no gradients."""
        if frozen is not self._shown_frozen:
            self._shown_frozen = frozen
            for pair in self._trained:
                pair.whole.requires_grad_(not frozen)

    def show_whole_to_foreign_delays(self) -> None:
        """Have ``backward_dw`` of other libraries' modules run with the whole parameters registered.

        Such a module writes its delayed weight gradient to the parameter that is registered at that time.
        """
        for pair in self._pairs:
            record = record_of(pair.whole)
            for reference, _ in pair.places:
                module = reference()
                if module is not None and record is not None and record.foreign_delayer == type(module).__name__:
                    object.__setattr__(module, "backward_dw", weak_method(self._backward_dw, module))

    def _backward_dw(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.show_whole()
        try:
            return type(module).backward_dw(module, *args, **kwargs)
        finally:
            self.show_shards()

    def register(self) -> None:
        """Register the form that is shown now, whichever is registered."""
        whole = self.shows_whole
        for parameters, local, pair, module in self._places:
            param = pair.whole if whole else pair.sharded
            if module is None:
                parameters[local] = param
            else:
                setattr(module(), local, param)


def _changed(name: str, *, frozen: bool) -> str:
    what, meanwhile = ("frozen", "meanwhile") if frozen else ("unfrozen", "until it is to be trained")
    return (
        f"parameter '{name}' was {what} (requires_grad_) after fully_shard, which plans for gradients or for none: do "
        f"it before, and give it a learning rate of 0 {meanwhile}. To go through the model without training it, freeze "
        f"all of its parameters, on all ranks, or run that backward under no_sync(), then zero_grad()"
    )


# ---- Writes to whole parameters. ----


class WholeWrites:
    """Finds writes to the whole parameters of a unit.

    pairs   the unit's parameters
    served  writes are brought to the shards: all ranks write alike, or there is one rank. False: writes are refused
    """

    def __init__(self, pairs: Sequence[ShardedPair], *, served: bool) -> None:
        self._pairs = pairs
        self._wholes = [pair.whole for pair in pairs]
        self._served = served
        self._compared: set[tuple[bool, bool]] = set()  # kinds of forwards: with gradients, of a module in training
        self._first: list[tuple[int, int]] | None = None  # values before the first forward, while it runs
        self.note()

    def note(self) -> None:
        """Leave out of the shards all that was written so far."""
        self._versions = [whole._version for whole in self._wholes]

    def forward_begins(self, *, training: bool) -> None:
        """The whole parameters are registered, and their gather has arrived; ``training``: the module's mode."""
        kind = torch.is_grad_enabled(), training
        if kind not in self._compared and not is_capturing():
            self._compared.add(kind)
            self._first = self._values()

    def forward_ends(self) -> None:
        """Bring the forward's writes to the shards, while the whole parameters have memory.

        Raises ``RuntimeError`` for the first written parameter if writes are refused, or were not counted.
        """
        first, self._first = self._first, None
        if first is not None:
            self._check_uncounted(first)
        self.take_over()

    def forward_failed(self) -> bool:
        """``forward_ends`` after a forward that has raised, or that a recompute has stopped early. Raises nothing.

        Returns whether whole parameters hold writes that are refused.
        """
        self._first = None
        before = self._versions
        if self._served:
            self.take_over()
            return False
        self.note()
        return self._versions != before

    def take_over(self) -> None:
        """Bring writes to the shards; also after a backward, which may recompute a forward."""
        versions = [whole._version for whole in self._wholes]
        if versions == self._versions:
            return
        before, self._versions = self._versions, versions
        written = [pair for pair, old, new in zip(self._pairs, before, versions, strict=True) if old != new]
        if not self._served:
            shard = written[0].sharded.shard
            unit = f"unit '{shard.unit}'" if shard.unit else "the outermost unit"
            raise written_from_local_data(shard.name, f'fully_shard(..., forward_writes="alike") of {unit}')
        write_back(written)

    def _check_uncounted(self, before: list[tuple[int, int]]) -> None:
        """Raise ``RuntimeError`` for a parameter whose values have changed, and whose version has not."""
        for pair, version, old, new in zip(self._pairs, self._versions, before, self._values(), strict=True):
            if old != new and pair.whole._version == version:
                raise RuntimeError(
                    f"parameter '{pair.sharded.shard.name}' was written in the forward through .data, which is not "
                    f"noticed in later forwards: the write would be lost when the whole parameter is freed. Write to "
                    f"the parameter itself, under torch.no_grad()"
                )

    def _values(self) -> list[tuple[int, int]]:
        """A checksum and the address of each whole parameter."""
        addresses = [whole.data_ptr() for whole in self._wholes]
        return list(zip(bits_of(self._wholes), addresses, strict=True))


@torch.no_grad()
def write_back(pairs: Sequence[ShardedPair]) -> None:
    """Copy this rank's part of whole parameters to the shards.

    An element stays if it is rounded to the whole parameter's element: shards may have a wider dtype.
    """
    for pair in pairs:
        info, sharded = pair.sharded.shard, flat_of(pair.sharded)
        part = flat_of(pair.whole)[info.start : info.end].to(sharded.device)
        if part.dtype is not sharded.dtype:
            part = torch.where(sharded.to(part.dtype) == part, sharded, part.to(sharded.dtype))
        sharded.copy_(part)
