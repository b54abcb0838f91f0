"""Which tensors of a model go into a checkpoint, under which names, and whether a checkpoint fits a model.

A checkpoint stores whole parameters by name. Buckets and shards show only in the ``Part``s of each rank.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives.failure_report import gather
from ..plan.owned_params import buffers_of_experts
from .files.boxes import Part, Parts, part_of_whole, parts_of_range
from .files.manifest import Manifest, SavedOptimizer, SavedTensor, agreed, new_id, stored_tensors
from .files.typed_json import dtype_name
from .optimizer import scalars_of
from .ranks import CheckpointRanks
from .source import CheckpointSource, Holding

__all__ = [
    "ExpertSets",
    "ModelTensors",
    "Notes",
    "check_same_call",
    "experts_of",
    "make_manifest",
    "make_notes",
    "misfit_of",
    "model_tensors",
    "parts_of_model",
    "parts_to_fill",
]

T = TypeVar("T")


class ExpertSets(NamedTuple):
    """The sets of experts that different ranks hold under the same names: each is stored under names of its own."""

    own: str
    """Suffix of the stored names of this rank's experts; empty where all ranks hold the same."""
    suffixes: Sequence[str]
    """Those of all sets, where there are several."""

    @property
    def number(self) -> int:
        """Number of different sets, 1 for a model without experts."""
        return len(self.suffixes) or 1

    def naming(self, holding: Holding) -> Callable[[str], str]:
        """Names in the files, from names in the model."""
        return lambda name: name + self.own if name in holding.experts else name

    def here_of(self, stored: Mapping[str, T]) -> dict[str, T]:
        """Stored tensors by their names in the model, without the experts that only other ranks hold."""
        others = tuple(suffix for suffix in self.suffixes if suffix != self.own)
        return {name.removesuffix(self.own): each for name, each in stored.items() if not name.endswith(others)}


def check_same_call(
    path: str | os.PathLike[str], optimizer: object, source: CheckpointSource, what: str
) -> tuple[Path, str, ExpertSets]:
    """The absolute path, an id that no other call has, and the sets of experts.

    Raises ``ValueError`` on all ranks unless they were given one path, and all an optimizer or none.

    what  name of the call, for errors

    Collective over the source's ranks.
    """
    ranks = source.ranks
    experts = -1  # else the smallest rank that holds the same
    if ranks.experts is not None:
        what_for = "the comparison of experts between ranks"
        experts = min(gather(dist.get_rank(), ranks.experts.axes, ranks.failures, what_for))

    def call() -> tuple[str, bool, str, int]:
        if not os.fspath(path):
            raise ValueError(f"{what} was given '' as its path: name a folder")
        return os.path.realpath(path), optimizer is not None, new_id(), experts

    _, calls = ranks.run_and_gather(call, lambda said: said, f"the beginning of {what}")
    paths, has_optimizer, ids, all_experts = zip(*calls, strict=True)
    if len(set(paths)) > 1:
        raise ValueError(f"all ranks save to and load from one folder, and were given {sorted(set(paths))[:2]}")
    if len(set(has_optimizer)) > 1:
        raise ValueError("some ranks give an optimizer and some do not: all of them, or none")
    known = sorted({*all_experts} - {-1})
    suffixes = {each: f"@expert_set_{index}_of_{len(known)}" for index, each in enumerate(known) if len(known) > 1}
    return Path(paths[0]), ids[0], ExpertSets(suffixes.get(experts, ""), [*suffixes.values()])


class ModelTensors(NamedTuple):
    """The tensors of a module, each once, under its first name."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    """The persistent buffers: those in ``state_dict``."""
    tied: dict[str, str]
    """Further names of parameters -> their first name."""


def model_tensors(module: nn.Module) -> ModelTensors:
    """Parameters and persistent buffers of a module that is not wrapped."""
    first: dict[nn.Parameter, str] = {}
    tied = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if first.setdefault(param, name) != name:
            tied[name] = first[param]
    buffers: dict[int, tuple[str, Tensor]] = {}
    for prefix, owner in module.named_modules():
        for local, buffer in owner._buffers.items():
            # A buffer may have several names, and its first name may be a non-persistent one.
            if buffer is not None and local not in owner._non_persistent_buffers_set:
                buffers.setdefault(id(buffer), (f"{prefix}.{local}" if prefix else local, buffer))
    return ModelTensors({name: param for param, name in first.items()}, dict(buffers.values()), tied)


def experts_of(module: nn.Module, tensors: ModelTensors, is_expert: Callable[[nn.Parameter], bool]) -> set[str]:
    """All names of the parameters for which ``is_expert`` is true, and of their modules' buffers."""
    buffers = buffers_of_experts(module, is_expert)
    params = {name for name, param in tensors.parameters.items() if is_expert(param)}
    params |= {alias for alias, first in tensors.tied.items() if first in params}
    return params | {name for name, buffer in tensors.buffers.items() if id(buffer) in buffers}


def parts_of_model(holding: Holding, ranks: CheckpointRanks, stored: Callable[[str], str]) -> Parts:
    """This rank's parameters, masters, moments and buffers to save, by their names in the files: views of memory.

    Whole parameters, which all ranks hold, are dealt to the writers in turn. Running statistics may differ between
    ranks: the first one's are saved, as ``broadcast_params`` copies them.
    """
    parts: Parts = {}
    if ranks.place >= ranks.num_writers:
        return parts
    for turn, (name, tensor) in [*enumerate(holding.whole.items()), *((0, each) for each in holding.buffers.items())]:
        if name in holding.experts or turn % ranks.num_writers == ranks.place:
            parts |= _dense(stored(name), tensor)
    for name, held in holding.slices.items():
        param = holding.params[name]
        sections = {"model": held.param, **{f"state.{key}": value for key, value in held.state().items()}}
        if held.master.dtype is not param.dtype:
            sections["master"] = held.master
        parts |= parts_of_range(stored(name), param.shape, held.start, sections, model=param.dtype)
    return parts


def _dense(stored: str, tensor: Tensor) -> Parts:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        what = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ValueError(
            f"'{stored}' is {what}, and a checkpoint has dense tensors only: register its parts (indices and values, "
            f"integers and scales) as buffers, or register it with persistent=False"
        )
    return part_of_whole(stored, "model", tensor.detach())


def parts_to_fill(entries: Mapping[str, SavedTensor], holding: Holding) -> Parts:
    """The memory into which a model's values are read. Call ``misfit_of`` before."""
    parts: Parts = {}
    for name, tensor in {**holding.buffers, **holding.whole}.items():
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(
                f"'{name}' is expanded: several of its elements are one place in memory, which cannot take the "
                f"checkpoint's; make it a tensor of its own with clone()"
            )
        parts |= _dense(name, tensor)
    for name, held in holding.slices.items():
        if name in holding.whole:
            continue  # the master is a view of the whole parameter
        entry = entries[name]
        # The parameter follows from its master.
        section = "master" if entry.has_master and held.master.dtype is torch.float32 else "model"
        parts |= parts_of_range(name, entry.shape, held.start, {section: held.master})
    return parts


class Notes(NamedTuple):
    """What a rank tells the first rank, which writes the manifest; by names in the files."""

    parts: Sequence[Part]
    """What this rank could write."""
    groups: Mapping[str, int | None]
    """Parameter group of each parameter with a slice here."""
    scalars: Mapping[str, dict[str, Any]]
    """State that is not elementwise. A rank that holds no element of a parameter has none."""
    is_buffer: Mapping[str, bool]
    tied: Mapping[str, str]


def make_notes(parts: Parts, holding: Holding, stored: Callable[[str], str]) -> Notes:
    """The notes of this rank."""
    slices = holding.slices.items()
    return Notes(
        [*parts],
        {stored(name): held.group for name, held in slices},
        {stored(name): scalars for name, held in slices if (scalars := scalars_of(name, held))},
        {stored(name): True for name in holding.buffers},
        {stored(alias): stored(first) for alias, first in holding.tied.items()},
    )


def make_manifest(
    writers: Mapping[Part, int],
    all_notes: Sequence[Notes],
    sets: ExpertSets,
    optimizer: SavedOptimizer | None,
    extra: Any,
    save_id: str,
) -> Manifest:
    """The manifest, from the rank that writes each part and all ranks' notes, in the order of ranks.

    Raises ``ValueError`` where notes contradict, and for elements that no rank holds.
    """
    groups, scalars, is_buffer, tied = (
        agreed(field, [getattr(notes, field) for notes in all_notes]) for field in Notes._fields[1:]
    )
    tensors: dict[str, SavedTensor] = {}
    for name, stored in stored_tensors(writers).items():
        try:
            tensors[name] = SavedTensor(*stored, name in is_buffer, groups.get(name), scalars.get(name, {}))
        except ValueError as error:
            raise ValueError(
                f"'{name}' of shape {list(stored[0])} is not held by all ranks together: {error}"
            ) from None
    for expert_set, suffix in enumerate(sets.suffixes):
        if not any(name.endswith(suffix) for name in tensors):
            raise ValueError(
                f"experts of set {expert_set} are on no rank of the first instance, which writes: instances must hold "
                f"all"
            )
    return Manifest(save_id, tensors, tied, sets.number, optimizer, extra)


def misfit_of(
    num_expert_sets: int, entries: Mapping[str, SavedTensor], holding: Holding, sets: ExpertSets
) -> str | None:
    """The first parameters or buffers in which model and checkpoint differ, for an error."""
    if num_expert_sets != sets.number:
        return (
            f"the checkpoint was saved by ranks with {num_expert_sets} different set(s) of experts, and these "
            f"ranks have {sets.number}: experts do not move between ranks"
        )
    # By name, what the saved tensor may be.
    present = {
        name: [_described(False, param.shape, dtype) for dtype in dict.fromkeys((param.dtype, param.kept))]
        for name, param in holding.params.items()
    } | {name: [_described(True, buffer.shape, buffer.dtype)] for name, buffer in holding.buffers.items()}
    saved = {name: _described(entry.is_buffer, entry.shape, entry.dtype) for name, entry in entries.items()}
    misfits = [
        f"'{name}' is {' or '.join(present.get(name, ['missing']))} in the model and {saved.get(name, 'missing')} in "
        f"the checkpoint"
        for name in {**present, **saved}
        if saved.get(name) not in present.get(name, [])
    ]
    more = f" (and {len(misfits) - 3} more)" if len(misfits) > 3 else ""
    return "; ".join(misfits[:3]) + more or None


def _described(is_buffer: bool, shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"a {'buffer' if is_buffer else 'parameter'} of {dtype_name(dtype)} {list(shape)}"
