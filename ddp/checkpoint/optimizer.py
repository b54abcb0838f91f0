"""Which optimizer state goes into a checkpoint, and how an optimizer takes over saved state."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .files.boxes import Parts, parts_of_range
from .files.manifest import Manifest, SavedOptimizer, SavedTensor
from .files.typed_json import dtype_name, from_json, to_json
from .model import ExpertSets
from .source import HeldOptimizer, HeldSlice, Holding

__all__ = ["OptimizerLoad", "describe_optimizer", "describe_updates"]

_HOW_NOT_WHAT = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
"""Keys of a parameter group that say how a step is computed, not what: never taken from a checkpoint."""


def describe_optimizer(optimizer: HeldOptimizer) -> SavedOptimizer:
    """The optimizer's class and its groups' hyperparameters."""
    groups = tuple(
        {
            key: to_json(value, f"option '{key}' of parameter group {index}")
            for key, value in group.items()
            if key not in _HOW_NOT_WHAT
        }
        for index, group in enumerate(optimizer.groups)
    )
    return SavedOptimizer(optimizer.class_name, groups)


def describe_updates(holding: Holding, names: Mapping[str, str]) -> dict[str, tuple[int | None, dict[str, Any]]]:
    """Group, and state that is not elementwise, of each parameter with a slice here; by stored names."""
    return {
        names[held.name]: (
            held.group,
            {
                key: to_json(value, f"state '{key}' of parameter '{held.name}'")
                for key, value in held.scalars().items()
                if value is not None
            },
        )
        for held in holding.slices
    }


class OptimizerLoad(NamedTuple):
    """A checked load of optimizer state, before the tensors are read."""

    optimizer: HeldOptimizer
    parts: Parts
    """The memory into which this rank's moments are read."""
    state: Mapping[Tensor, dict[str, Any]]
    """The optimizer's state after the load."""
    groups: Mapping[int, Mapping[str, Any]]
    """Saved hyperparameters by the index of a group here."""

    @classmethod
    def plan(cls, manifest: Manifest, holding: Holding, optimizer: HeldOptimizer, sets: ExpertSets) -> "OptimizerLoad":
        """Check that the saved state fits the optimizer, else raise ``ValueError``; allocate memory."""
        saved = manifest.optimizer
        if saved is None:
            raise ValueError(
                "the checkpoint was saved without an optimizer: load_checkpoint(path, model) takes its weights, and "
                "the optimizer starts anew from them"
            )
        if saved.optimizer_class != optimizer.class_name:
            raise ValueError(
                f"the checkpoint has the state of {saved.optimizer_class}, and this optimizer is "
                f"{optimizer.class_name}, which keeps other moments: load the weights alone with "
                f"load_checkpoint(path, model)"
            )
        names = sets.names(holding)
        entries = {held.name: manifest.tensors[names[held.name]] for held in holding.slices}
        groups = _match_groups(saved, optimizer, [(held, entries[held.name]) for held in holding.slices])
        state: dict[Tensor, dict[str, Any]] = {}
        first: dict[Tensor, str] = {}
        parts: Parts = {}
        for held in holding.slices:
            entry = entries[held.name]
            if held.group is None or held.updated is None:
                continue
            _check_width(held, entry)
            updated = held.updated
            if updated not in state:
                group = optimizer.groups[held.group]
                state[updated] = _make_state(optimizer.state.get(updated, {}), updated, group, entry)
                first[updated] = held.name
            other = entries[first[updated]]
            if (entry.state, entry.scalars) != (other.state, other.scalars):
                raise ValueError(
                    f"parameters '{first[updated]}' and '{held.name}' are updated together here, and the "
                    f"checkpoint has different states of them: {_in_words(other)}, and {_in_words(entry)}; some steps "
                    f"left one of them out. A fully sharded model goes on from it; here, load the weights alone with "
                    f"load_checkpoint(path, model)"
                )
            if entry.state:
                place = slice(held.offset, held.offset + held.end - held.start)
                flat = {f"state.{key}": state[updated][key].view(-1)[place] for key in entry.state}
                parts |= parts_of_range(names[held.name], entry.shape, held.start, flat)
        for group in optimizer.groups:  # tensors without elements are not saved, but step with the others
            likes = {updated.dtype: updated for updated in group["params"] if updated in first}
            for updated in group["params"]:
                if updated.numel() == 0 and updated.requires_grad and updated not in state:
                    like = likes.get(updated.dtype)
                    state[updated] = {} if like is None else _make_state({}, updated, group, entries[first[like]])
        trained = {
            name for name, entry in manifest.tensors.items() if entry.group is not None and not sets.elsewhere(name)
        }
        frozen = trained.difference(names[held.name] for held in holding.slices)
        if frozen:
            raise ValueError(
                f"parameter '{min(frozen)}' is frozen, and the checkpoint has optimizer state of it: load the weights "
                f"alone with load_checkpoint(path, model)"
            )
        found = {here: saved.groups[there] for here, there in groups.items()}
        for here, options in found.items():
            _check_options(here, options, optimizer.groups[here])
        return cls(optimizer, parts, state, found)

    @torch.no_grad()
    def finish(self) -> None:
        """After reading: install the state and the hyperparameters."""
        for updated, state in self.state.items():
            self.optimizer.state[updated] = state
        for index, saved in self.groups.items():
            group = self.optimizer.groups[index]
            for key, value in saved.items():
                loaded, current = from_json(value), group.get(key)
                if isinstance(current, Tensor):
                    current.fill_(loaded)  # captured graphs and schedulers hold this tensor
                elif isinstance(loaded, Tensor) and key in group:
                    group[key] = loaded.item()  # a number here, though a tensor when saved
                else:
                    group[key] = list(loaded) if isinstance(current, list) else loaded


def _check_options(index: int, saved: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a saved option that the optimizer could not step with, or that no save writes."""
    for key, value in saved.items():
        if key in _HOW_NOT_WHAT:
            raise ValueError(
                f"option '{key}' of parameter group {index} is in the checkpoint's manifest, and no save writes it"
            )
        if key in group and _kind_of(from_json(value)) != _kind_of(group[key]) and group[key] is not None:
            raise ValueError(
                f"option '{key}' of parameter group {index} is {reprlib.repr(value)} in the checkpoint's manifest, "
                f"and {reprlib.repr(group[key])} here: another kind of value, or no finite number"
            )


def _kind_of(value: Any) -> Any:
    """Equal for two values of which an optimizer takes the one where it takes the other."""
    if isinstance(value, list | tuple):
        return [_kind_of(each) for each in value]
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return type(value)
    return "a number" if math.isfinite(value) else "no finite number"


def _match_groups(
    saved: SavedOptimizer, optimizer: HeldOptimizer, sliced: list[tuple[HeldSlice, SavedTensor]]
) -> dict[int, int]:
    """Index of each group here -> index of the saved group with the same parameters. Empty groups match by index.

    Raises ``ValueError`` where the saved groups hold other parameters.
    """
    pairs = {(held.group, entry.group) for held, entry in sliced}
    here, there = {one for one, _ in pairs}, {other for _, other in pairs}
    if not len(here) == len(pairs) == len(there) or any((one is None) != (other is None) for one, other in pairs):
        if len(saved.groups) != len(optimizer.groups):
            raise ValueError(
                f"the checkpoint has {len(saved.groups)} parameter group(s), and this optimizer {len(optimizer.groups)}"
            )
        held, entry = next((held, entry) for held, entry in sliced if held.group != entry.group)
        raise ValueError(
            f"parameter '{held.name}' {_place(held.group, 'is')} and {_place(entry.group, 'was')} when the checkpoint "
            f"was saved"
        )
    matched = {one: other for one, other in pairs if one is not None and other is not None}
    for index in range(min(len(saved.groups), len(optimizer.groups))):
        if index not in matched and index not in matched.values():
            matched[index] = index
    return matched


def _place(group: int | None, verb: str) -> str:
    if group is None:
        return f"{verb} frozen, or {'has' if verb == 'is' else 'had'} no optimizer,"
    return f"{verb} in {'parameter group' if verb == 'is' else 'group'} {group}"


def _check_width(held: HeldSlice, entry: SavedTensor) -> None:
    """Raise ``ValueError`` unless both optimizers update elements of one dtype."""
    there = torch.float32 if entry.has_master else entry.dtype
    if held.master.dtype is not there:
        raise ValueError(
            f"the optimizer updates parameter '{held.name}' in {dtype_name(held.master.dtype)}, and the saved one did "
            f"in {dtype_name(there)}: load the weights alone with load_checkpoint(path, model)"
        )


def _in_words(entry: SavedTensor) -> str:
    return f"{sorted(entry.state)} {dict(entry.scalars)}"


def _make_state(
    present: Mapping[str, Any], updated: Tensor, group: Mapping[str, Any], entry: SavedTensor
) -> dict[str, Any]:
    """Memory for the state of one of the optimizer's tensors; fitting tensors in ``present`` are reused."""
    made: dict[str, Any] = {}
    for key, dtype in entry.state.items():
        old = present.get(key)
        fits = isinstance(old, Tensor) and old.shape == updated.shape and old.dtype is dtype
        made[key] = old if fits else torch.zeros_like(updated, dtype=dtype, requires_grad=False)
    for key, value in entry.scalars.items():
        made[key] = from_json(value)
        # As torch.optim.Optimizer.load_state_dict does: steps are counted on the CPU, unless a kernel reads them.
        on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
        if isinstance(made[key], Tensor) and not on_host:
            made[key] = made[key].to(updated.device)
    return made
