"""What of a ``DistributedOptimizer`` goes into a checkpoint, and how one takes over what a checkpoint holds."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checkpoint_boxes import Piece
from .checkpoint_contents import StoredNames
from .checkpoint_manifest import Manifest, SavedOptimizer, SavedTensor, dtype_named, from_json, to_json
from .distributed_optimizer import DistributedOptimizer
from .flat_params import ParamSlice

__all__ = ["OptimizerLoad", "describe_optimizer", "describe_slices", "pieces_of_optimizer"]

_HOW_NOT_WHAT = ("params", "fused", "foreach", "capturable", "differentiable")
"""Keys of a parameter group that say how a step is computed here: never taken from a checkpoint."""


def describe_optimizer(optimizer: DistributedOptimizer) -> SavedOptimizer:
    """Its class and its groups' hyperparameters."""
    groups = tuple(
        {
            key: to_json(value, f"option '{key}' of parameter group {index}")
            for key, value in group.items()
            if key not in _HOW_NOT_WHAT
        }
        for index, group in enumerate(optimizer.param_groups)
    )
    return SavedOptimizer(optimizer.optimizer_class.__name__, groups)


def describe_slices(optimizer: DistributedOptimizer) -> dict[str, dict[str, Any]]:
    """Fields of ``SavedTensor`` for each trainable parameter, as far as this rank knows them."""
    return {
        part.name: {
            "group": part.group,
            "has_master": _has_master(part),
            "state": {key: str(value.dtype).removeprefix("torch.") for key, value in part.state().items()},
            "scalars": {
                key: to_json(value, f"state '{key}' of parameter '{part.name}'")
                for key, value in part.scalars().items()
                if value is not None
            },
        }
        for part in optimizer.slices
    }


def pieces_of_optimizer(optimizer: DistributedOptimizer, names: StoredNames) -> list[Piece]:
    """This rank's slices of trainable parameters, masters and moments, to be saved."""
    pieces = []
    for part in optimizer.slices:
        stored, place = names.of(part.name, part.wired.owned.param), (part.shape, part.start, part.end)
        pieces.append(Piece(("model", stored), *place, part.param))
        if _has_master(part):
            pieces.append(Piece(("master", stored), *place, part.master))
        pieces += [Piece(("optimizer", "state", stored, key), *place, value) for key, value in part.state().items()]
    return pieces


class OptimizerLoad(NamedTuple):
    """A load that was checked and waits for the tensors."""

    optimizer: DistributedOptimizer
    pieces: list[Piece]
    """Where this rank's slices of masters and moments are read to."""
    state: Mapping[Tensor, dict[str, Any]]
    """What the inner optimizer will know of each of its tensors."""
    groups: tuple[Mapping[str, Any], ...]
    """Hyperparameters of each group."""

    @classmethod
    def plan(cls, manifest: Manifest, optimizer: DistributedOptimizer, names: StoredNames) -> "OptimizerLoad":
        """Check that the checkpoint is of such an optimizer, and make room. Raises ``ValueError`` where it is not."""
        saved = manifest.optimizer
        if saved is None:
            raise ValueError(
                "the checkpoint was saved without an optimizer: load_checkpoint(path, model) takes its weights, and "
                "the optimizer starts anew from them"
            )
        _check_optimizer(saved, optimizer)
        state: dict[Tensor, dict[str, Any]] = {}
        first: dict[Tensor, ParamSlice] = {}
        pieces = []
        for part in optimizer.slices:
            stored = names.of(part.name, part.wired.owned.param)
            entry = manifest.parameters[stored]
            if entry.group != part.group:
                where = "was frozen, or had no optimizer," if entry.group is None else f"was in group {entry.group}"
                raise ValueError(
                    f"parameter '{stored}' is in parameter group {part.group} and {where} when the checkpoint was saved"
                )
            place = (part.shape, part.start, part.end)
            # A master of its own is rounded into the parameter when all is read.
            pieces.append(Piece(("master" if entry.has_master else "model", stored), *place, part.master))
            if part.run is None:
                continue
            master = part.run.master
            if master not in state:
                group = optimizer.param_groups[part.group]
                state[master] = _make_state(optimizer.state.get(master, {}), master, group, entry.state, entry.scalars)
                first[master] = part
            other = manifest.parameters[names.of(first[master].name, first[master].wired.owned.param)]
            if (entry.state, entry.scalars) != (other.state, other.scalars):
                raise ValueError(
                    f"parameters '{first[master].name}' and '{part.name}' are updated together here, and the "
                    f"checkpoint has different states of them: {_in_words(other)}, and {_in_words(entry)}"
                )
            offset, numel = part.offset, part.end - part.start
            for key in entry.state:
                flat = state[master][key].view(-1)[offset : offset + numel]
                pieces.append(Piece(("optimizer", "state", stored, key), *place, flat))
        frozen = {
            name for name, entry in manifest.parameters.items() if entry.group is not None and not names.elsewhere(name)
        } - {names.of(part.name, part.wired.owned.param) for part in optimizer.slices}
        if frozen:
            raise ValueError(
                f"parameter '{min(frozen)}' is frozen, and the checkpoint has optimizer state of it: load the weights "
                f"alone with load_checkpoint(path, model)"
            )
        return cls(optimizer, pieces, state, saved.groups)

    @torch.no_grad()
    def finish(self) -> None:
        """All pieces are read: install the state and have the parameters follow the masters. Collective."""
        for master, state in self.state.items():
            self.optimizer.state[master] = state
        for group, saved in zip(self.optimizer.param_groups, self.groups, strict=True):
            for key, value in saved.items():
                loaded, current = from_json(value), group.get(key)
                if isinstance(current, Tensor):
                    current.fill_(loaded)  # captured graphs and schedulers hold this tensor
                elif isinstance(loaded, Tensor) and key in group:
                    group[key] = loaded.item()  # a number here, whatever it was there
                else:
                    group[key] = list(loaded) if isinstance(current, list) else loaded
        self.optimizer.mark_loaded()


def _has_master(part: ParamSlice) -> bool:
    return part.master.dtype is not part.param.dtype


def _in_words(entry: SavedTensor) -> str:
    return f"{sorted(entry.state)} {dict(entry.scalars)}"


def _check_optimizer(saved: SavedOptimizer, optimizer: DistributedOptimizer) -> None:
    here = optimizer.optimizer_class.__name__
    if saved.optimizer_class != here:
        raise ValueError(
            f"the checkpoint has the state of {saved.optimizer_class}, and this optimizer is {here}, which keeps other "
            f"moments: load the weights alone with load_checkpoint(path, model)"
        )
    if len(saved.groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the checkpoint has {len(saved.groups)} parameter group(s), and this optimizer "
            f"{len(optimizer.param_groups)}"
        )


def _make_state(
    present: Mapping[str, Any],
    master: Tensor,
    group: Mapping[str, Any],
    elementwise: Mapping[str, str],
    scalars: Mapping[str, Any],
) -> dict[str, Any]:
    """State of one of the inner optimizer's tensors: what is there already is reused, and its values overwritten."""
    made: dict[str, Any] = {}
    for key, name in elementwise.items():
        old, dtype = present.get(key), dtype_named(name)
        fits = isinstance(old, Tensor) and old.shape == master.shape and old.dtype is dtype
        made[key] = old if fits else torch.zeros_like(master, dtype=dtype, requires_grad=False)
    for key, value in scalars.items():
        made[key] = from_json(value)
        # As torch.optim.Optimizer.load_state_dict does: steps are counted on the CPU, unless a kernel reads them.
        on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
        if isinstance(made[key], Tensor) and not on_host:
            made[key] = made[key].to(master.device)
    return made
