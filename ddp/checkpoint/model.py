"""What of a model goes into a checkpoint, under which names, and whether a checkpoint fits a model.

Everything is by parameter: where a bucket begins and which rank holds which shard shows in the ``TensorSlice``s that a
rank offers and asks for, and nowhere in the file::

    model.NAME                   parameters and buffers, in their own dtypes
    master.NAME                  fp32 masters of parameters in half precision; others are their own masters
    optimizer.state.NAME.KEY     moments
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .files.boxes import TensorSlice
from .files.index import Index
from .files.manifest import Manifest, SavedOptimizer, SavedTensor
from .files.typed_json import dtype_name, dtype_named
from .source import HeldParam, Holding

__all__ = [
    "ModelLoad",
    "ModelTensors",
    "Notes",
    "StoredNames",
    "check_model",
    "make_manifest",
    "model_tensors",
    "slices_of_model",
]


class StoredNames(NamedTuple):
    """Names in the file: the model's own, but for experts that not all ranks have."""

    expert_set: int = 0
    """Which set of experts this rank has; -1: none."""
    num_expert_sets: int = 1

    def of(self, name: str, param: HeldParam) -> str:
        """Under which name ``param``, called ``name`` in the model, is stored."""
        return self._named(name, param.is_expert)

    def of_buffers(self, holding: Holding) -> dict[str, Tensor]:
        """All buffers, by the names under which they are stored."""
        return {self._named(name, name in holding.expert_buffers): value for name, value in holding.buffers.items()}

    def _named(self, name: str, of_expert: bool) -> str:
        return name + self.suffix(self.expert_set) if of_expert and self.num_expert_sets > 1 else name

    def elsewhere(self, stored: str) -> bool:
        """Whether a stored parameter is an expert that other ranks have."""
        others = (self.suffix(index) for index in range(self.num_expert_sets) if index != self.expert_set)
        return self.num_expert_sets > 1 and stored.endswith(tuple(others))

    def suffix(self, expert_set: int) -> str:
        """What the names of one set's experts end with."""
        return f"@expert_set_{expert_set}_of_{self.num_expert_sets}"


class ModelTensors(NamedTuple):
    """What a module consists of, each tensor once, under its first name."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    """The persistent ones: those in ``state_dict``."""
    tied: dict[str, str]
    """Further names of parameters -> their first name."""


def model_tensors(module: nn.Module) -> ModelTensors:
    """Parameters and persistent buffers of a module that is not wrapped."""
    first: dict[nn.Parameter, str] = {}
    tied = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if first.setdefault(param, name) != name:
            tied[name] = first[param]
    buffers: dict[str, Tensor] = {}
    for prefix, owner in module.named_modules():
        for local, buffer in owner._buffers.items():
            if buffer is not None and local not in owner._non_persistent_buffers_set:
                buffers[f"{prefix}.{local}" if prefix else local] = buffer
    # A buffer may have several names, and the first may be one that is not persistent.
    first_of = {id(buffer): name for name, buffer in reversed(buffers.items())}
    buffers = {name: buffer for name, buffer in buffers.items() if first_of[id(buffer)] == name}
    return ModelTensors({name: param for param, name in first.items()}, buffers, tied)


def slices_of_model(holding: Holding, names: StoredNames, *, buffers: bool = True) -> list[TensorSlice]:
    """This rank's parameters, masters and buffers, to be saved: views of its memory, rounded copies where it keeps
    masters alone.

    buffers  those that all ranks have are among them; those of experts that not all ranks have always are
    """
    slices = [_whole(names.of(name, holding.params[name]), tensor.detach()) for name, tensor in holding.whole.items()]
    slices += [
        _whole(stored, buffer.detach())
        for stored, buffer in names.of_buffers(holding).items()
        if buffers or stored not in holding.buffers
    ]
    for part in holding.slices:
        param = holding.params[part.name]
        stored, place = names.of(part.name, param), (param.shape, part.start, part.end)
        slices.append(TensorSlice(("model", stored), *place, part.param))
        if part.master.dtype is not param.dtype:
            slices.append(TensorSlice(("master", stored), *place, part.master))
    return slices


def _whole(stored: str, tensor: Tensor) -> TensorSlice:
    return TensorSlice(("model", stored), tuple(tensor.shape), 0, tensor.numel(), tensor)


class ModelLoad(NamedTuple):
    """Where a model's values are read to."""

    slices: list[TensorSlice]
    converted: list[tuple[Tensor, Tensor]]
    """(as it is read, where it goes): values that the file has in another dtype than this rank keeps."""

    @classmethod
    def plan(cls, manifest: Manifest, holding: Holding, names: StoredNames) -> "ModelLoad":
        """Make room. ``check_model`` comes before."""
        wholes = names.of_buffers(holding)
        wholes |= {names.of(name, holding.params[name]): param for name, param in holding.whole.items()}
        for stored, tensor in wholes.items():
            if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
                raise ValueError(
                    f"'{stored}' is expanded: several of its elements are one place in memory, which cannot take the "
                    f"checkpoint's; make it a tensor of its own with clone()"
                )
        slices = [_whole(stored, tensor.detach()) for stored, tensor in wholes.items()]
        converted = []
        for part in holding.slices:
            if part.name in holding.whole:
                continue  # its master is a part of that
            stored = names.of(part.name, holding.params[part.name])
            entry, target = manifest.parameters[stored], part.master
            kind, dtype = "model", dtype_named(entry.dtype)
            if entry.has_master and target.dtype is torch.float32:
                kind = "master"  # what it rounds to follows from it
            elif dtype is not target.dtype:
                read = torch.empty_like(target, dtype=dtype)
                converted.append((read, target))
                target = read
            slices.append(TensorSlice((kind, stored), entry.shape, part.start, part.end, target))
        return cls(slices, converted)

    @torch.no_grad()
    def finish(self) -> None:
        """All slices are read."""
        for read, target in self.converted:
            target.copy_(read)


class Notes(NamedTuple):
    """What a rank tells the one that writes the manifest, by stored names."""

    parameters: dict[str, SavedTensor]
    buffers: dict[str, SavedTensor]
    tied: dict[str, str]

    @classmethod
    def of(cls, holding: Holding, names: StoredNames, described: Mapping[str, Mapping[str, Any]]) -> "Notes":
        """described: fields of ``SavedTensor`` by parameter"""
        entries = {
            names.of(name, param): _entry(param.shape, param.dtype, **described.get(name, {}))
            for name, param in holding.params.items()
        }
        params = holding.params
        tied = {names.of(alias, params[first]): names.of(first, params[first]) for alias, first in holding.tied.items()}
        buffers = {stored: SavedTensor.of(buffer) for stored, buffer in names.of_buffers(holding).items()}
        return cls(entries, buffers, tied)


def make_manifest(
    all_notes: Iterable[Notes],
    names: StoredNames,
    optimizer: SavedOptimizer | None,
    extra: Any,
    save_id: str,
    index: Index,
) -> Manifest:
    """The manifest of what all ranks have, in their order. Raises ``ValueError`` where they contradict each other."""
    parameters: dict[str, SavedTensor] = {}
    buffers: dict[str, SavedTensor] = {}
    tied: dict[str, str] = {}
    for notes in all_notes:
        tied |= notes.tied
        buffers = {**notes.buffers, **buffers}
        for name, entry in notes.parameters.items():
            known = parameters.get(name, entry)
            # A rank without an element of a parameter knows nothing of its state.
            both = known if known.state or known.scalars else entry
            knows = bool(entry.state or entry.scalars)
            if (knows and entry != both) or (entry.description, entry.group) != (both.description, both.group):
                raise ValueError(f"ranks disagree on parameter '{name}': one has {both}, another {entry}")
            parameters[name] = both
    for expert_set in range(names.num_expert_sets):
        stored = (name.endswith(names.suffix(expert_set)) for name in (*parameters, *buffers))
        if names.num_expert_sets > 1 and not any(stored):
            raise ValueError(
                f"experts of set {expert_set} are on no rank of the first instance, which writes: instances must hold "
                f"all"
            )
    return Manifest(save_id, parameters, buffers, tied, names.num_expert_sets, optimizer, extra, index)


def check_model(manifest: Manifest, holding: Holding, names: StoredNames) -> None:
    """Raise ``ValueError`` with the first parameter or buffer in which the model differs from the checkpoint."""
    if manifest.num_expert_sets != names.num_expert_sets:
        raise ValueError(
            f"the checkpoint was saved by ranks with {manifest.num_expert_sets} different set(s) of experts, and these "
            f"ranks have {names.num_expert_sets}: experts do not move between ranks"
        )
    present = {
        names.of(name, param): [_entry(param.shape, dtype).description for dtype in (param.dtype, param.kept)]
        for name, param in holding.params.items()
    }
    saved = {name: entry for name, entry in manifest.parameters.items() if not names.elsewhere(name)}
    _check_same("parameter", saved, present)
    buffers = {name: [SavedTensor.of(buffer).description] for name, buffer in names.of_buffers(holding).items()}
    _check_same("buffer", {n: entry for n, entry in manifest.buffers.items() if not names.elsewhere(n)}, buffers)


def _check_same(what: str, saved: Mapping[str, SavedTensor], present: Mapping[str, list[str]]) -> None:
    """present: by name, what the saved tensor may be"""
    missing = [name for name in present if name not in saved]
    unknown = [name for name in saved if name not in present]
    if missing or unknown:
        sides = [f"the model's {what} {_in_words(missing)} is not in the checkpoint"] if missing else []
        sides += [f"the checkpoint's {what} {_in_words(unknown)} is not in the model"] if unknown else []
        raise ValueError("; ".join(sides))
    for name, kinds in present.items():
        if saved[name].description not in kinds:
            raise ValueError(
                f"{what} '{name}' is {' or '.join(dict.fromkeys(kinds))} in the model and {saved[name].description} in "
                f"the checkpoint"
            )


def _entry(shape: tuple[int, ...], dtype: torch.dtype, **fields: Any) -> SavedTensor:
    return SavedTensor(shape, dtype_name(dtype), **fields)


def _in_words(names: list[str]) -> str:
    few = ", ".join(f"'{name}'" for name in names[:3])
    return few if len(names) <= 3 else f"{few} (and {len(names) - 3} more)"
