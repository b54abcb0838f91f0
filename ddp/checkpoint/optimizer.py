"""Which optimizer state goes into a checkpoint, and how an optimizer takes over saved state."""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..optimizer.param_groups import names_of_classes
from .files.boxes import Parts, part_of_whole
from .files.manifest import SavedOptimizer, SavedTensor, dtype_name, from_json, to_json
from .source import Holding

__all__ = ["describe_optimizer", "plan_optimizer"]

_HOW_NOT_WHAT = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
"""Keys of a parameter group that say how a step is computed, not what: never taken from a checkpoint."""
_ALONE = "load the weights alone with load_checkpoint(path, model)"


def describe_optimizer(optimizer: Optimizer | None) -> SavedOptimizer | None:
    """The groups' classes and hyperparameters."""
    if optimizer is None:
        return None
    groups = tuple(
        {
            key: to_json(value, f"option '{key}' of parameter group {index}")
            for key, value in group.items()
            if key not in _HOW_NOT_WHAT
        }
        for index, group in enumerate(optimizer.param_groups)
    )
    return SavedOptimizer(names_of_classes(_classes_of(optimizer)), groups)


def _classes_of(optimizer: Optimizer) -> list[type]:
    """The class of each group."""
    kind: type = getattr(optimizer, "optimizer_class", type(optimizer))
    return getattr(optimizer, "classes_of_groups", [kind] * len(optimizer.param_groups))


def plan_optimizer(
    saved: SavedOptimizer | None, entries: Mapping[str, SavedTensor], holding: Holding
) -> tuple[dict[str, dict[str, Tensor]], Parts, Callable[[], None]]:
    """The memory into which this rank's moments are read, by parameter and "state.KEY"; that of its state in other
    shapes; and a function for the end of the load, which installs the state and the hyperparameters.

    Raises ``ValueError`` where the saved state does not fit the optimizer.
    """
    optimizer = holding.optimizer
    if optimizer is None:
        return {}, {}, lambda: None
    if saved is None:
        raise ValueError(
            "the checkpoint was saved without an optimizer: load_checkpoint(path, model) takes its weights, and "
            "the optimizer starts anew from them"
        )
    groups = _match_groups(saved, optimizer, holding, entries)
    for here, there in groups.items():
        cls = _classes_of(optimizer)[here].__name__
        if saved.class_of_group(there) != cls:
            raise ValueError(
                f"the checkpoint has the state of {saved.class_of_group(there)}, and this optimizer is {cls}, which "
                f"keeps other moments: {_ALONE}"
            )
        _check_options(here, saved.groups[there], optimizer.param_groups[here])

    # Of state in other shapes, no shape would fit a tensor without elements: it has no state yet.
    begin_anew = {entry.group for entry in entries.values() if entry.places}
    others: Parts = {}
    state: dict[Tensor, dict[str, Any]] = {}
    first: dict[Tensor, str] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, held in holding.slices.items():
        entry, updated = entries[name], held.updated
        if held.group is None or updated is None or (not updated.numel() and entry.group in begin_anew):
            continue
        width = entry.dtypes.get("master", entry.dtypes["model"])
        if held.master.dtype is not width:
            raise ValueError(
                f"the optimizer updates parameter '{name}' in {dtype_name(held.master.dtype)}, and the saved one "
                f"did in {dtype_name(width)}: {_ALONE}"
            )
        other = entries[first.setdefault(updated, name)]
        if updated not in state:
            group = optimizer.param_groups[held.group]
            memory = partial(_take, holding, entries, others, name, updated.device)
            state[updated] = _make_state(optimizer, updated, group, entry, memory, held.master.device)
        if (entry.state, entry.scalars) != (other.state, other.scalars):
            raise ValueError(
                f"parameters '{first[updated]}' and '{name}' are updated together here, and the checkpoint has "
                f"different states of them: some steps left one of them out. A fully sharded model goes on from it; "
                f"here, {_ALONE}"
            )
        place = slice(held.offset, held.offset + held.master.numel())
        moments[name] = {f"state.{key}": state[updated][key].view(-1)[place] for key in entry.state}
    for group in optimizer.param_groups:  # tensors without elements are not saved, but step with the others
        likes = {
            updated.dtype: entries[first[updated]]
            for updated in group["params"]
            if updated in first and entries[first[updated]].group not in begin_anew
        }
        for updated in group["params"]:
            if updated.numel() == 0 and updated.requires_grad and updated not in state and updated.dtype in likes:
                state[updated] = _make_state(optimizer, updated, group, likes[updated.dtype], None, updated.device)

    def install() -> None:
        optimizer.state.update(state)
        for here, there in groups.items():
            group = optimizer.param_groups[here]
            for key, value in saved.groups[there].items():
                loaded, current = from_json(value), group.get(key)
                if isinstance(current, Tensor):
                    current.fill_(loaded)  # captured graphs and schedulers hold this tensor
                elif isinstance(loaded, Tensor) and key in group:
                    group[key] = loaded.item()  # a number here, though a tensor when saved
                else:
                    group[key] = list(loaded) if isinstance(current, list) else loaded

    return moments, others, install


def _check_options(index: int, saved: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a saved option that the optimizer could not step with, or that no save writes."""
    for key, value in saved.items():
        differs = group.get(key) is not None and _kind_of(from_json(value)) != _kind_of(group[key])
        if key in _HOW_NOT_WHAT or differs:
            raise ValueError(
                f"option '{key}' of parameter group {index} is {reprlib.repr(value)} in the checkpoint's manifest, "
                f"and {reprlib.repr(group.get(key))} here: another kind of value, or no finite number, or none to load"
            )


def _kind_of(value: Any) -> Any:
    """Equal for two values of which an optimizer takes the one where it takes the other."""
    if isinstance(value, list | tuple):
        return [_kind_of(each) for each in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    # A number of NumPy's is a float too: a learning rate that was computed with it.
    if isinstance(value, int | float) and not isinstance(value, bool):
        return math.isfinite(value)
    return type(value)


def _match_groups(
    saved: SavedOptimizer, optimizer: Optimizer, holding: Holding, entries: Mapping[str, SavedTensor]
) -> dict[int, int]:
    """Index of each group here -> index of the saved group with the same parameters. Empty groups match by index, if
    their class is the same.

    Raises ``ValueError`` where the saved groups hold other parameters.
    """
    there_of: dict[Any, Any] = {None: None}
    here_of: dict[Any, Any] = {None: None}
    for name, entry in entries.items():
        held, there = holding.slices.get(name), entry.group
        here = held.group if held else None
        if there_of.setdefault(here, there) != there or here_of.setdefault(there, here) != here:
            raise ValueError(
                f"parameter '{name}' is {_place(here, optimizer.param_groups)} and was {_place(there, saved.groups)} "
                f"when the checkpoint was saved: {_ALONE}"
            )
    for index, cls in enumerate(_classes_of(optimizer)[: len(saved.groups)]):
        if index not in there_of and index not in here_of and saved.class_of_group(index) == cls.__name__:
            there_of[index] = index
    del there_of[None]
    return there_of


def _place(group: int | None, groups: Sequence[object]) -> str:
    return "frozen, or without an optimizer," if group is None else f"in parameter group {group} of {len(groups)}"


def _take(
    holding: Holding,
    entries: Mapping[str, SavedTensor],
    taken: Parts,
    name: str,
    device: torch.device,
    place: str,
    order: list[int],
) -> Tensor:
    """Memory for a tensor in the state of the parameter ``name``, which has another shape; it is added to ``taken``.

    Raises ``ValueError`` where this rank does not update the whole parameter, and nothing with it.
    """
    if not holding.has_whole(name):
        raise ValueError(
            f"the checkpoint has state '{place}' of the whole parameter '{name}', which is cut between ranks here, or "
            f"updated together with others: keep it whole (keep_params_whole=True; shard_atoms='whole'), or {_ALONE}"
        )
    entry = entries[f"{place}@{name}"]
    tensor = torch.empty_permuted(entry.shape, order, dtype=entry.dtypes["state"], device=device)
    taken.update(part_of_whole(f"{place}@{name}", "state", tensor))
    return tensor


def _make_state(
    optimizer: Optimizer,
    updated: Tensor,
    group: Mapping[str, Any],
    entry: SavedTensor,
    take: Callable[[str, list[int]], Tensor] | None,
    device: torch.device,
) -> dict[str, Any]:
    """Memory for the state of one of the optimizer's tensors; fitting tensors that are there are reused.

    take    see ``from_json``
    device  of new elementwise state: the master's, which lies on the host where the device keeps fewer bytes
    """
    made: dict[str, Any] = {}
    for key, dtype in entry.state.items():
        old = optimizer.state.get(updated, {}).get(key)
        fits = isinstance(old, Tensor) and old.shape == updated.shape and old.dtype is dtype
        made[key] = old if fits else torch.zeros(updated.shape, dtype=dtype, device=device)
    for key, value in entry.scalars.items():
        made[key] = from_json(value, take)
        # As torch.optim.Optimizer.load_state_dict does: steps are counted on the CPU, unless a kernel reads them.
        on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
        if isinstance(made[key], Tensor) and not on_host:
            made[key] = made[key].to(updated.device)
    return made
