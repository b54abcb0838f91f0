"""``save_checkpoint`` and ``load_checkpoint``: a model and its optimizer by parameter, for any ranks and buckets.

    save_checkpoint("runs/step-100", model, optimizer, extra={"step": 100, "scheduler": scheduler.state_dict()})
    extra = load_checkpoint("runs/step-100", model, optimizer)

Each rank writes a safetensors file of its own slices. Follow a save: the wrapper says what this rank holds
(``source.py``, ``wrapper_source.py``); every rank makes ``Part``s of it (``_look_at``, below); where several
ranks hold the same elements, the first rank says which rank writes them (``files/manifest.py``); the ranks write
(``files/rank_file.py``), perhaps in a thread (``background.py``); the first rank adds the manifest
(``files/manifest.py``) and renames the folder (``files/folder.py``). A load goes the other way: it opens the files and
checks all it can before it changes the model, and then each rank reads its parts (``files/opened.py``).
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives.failure_report import CollectiveError, gather, with_more_text
from ..plan.model_slice import ModelSlice
from ..plan.owned_params import is_slice, refuse_slices
from ..torch_internals.distributed import default_store
from .background import PendingSave, finish_pending, reserve_memory
from .files.boxes import Part, Parts, part_of_whole, parts_of_range
from .files.folder import Staging
from .files.manifest import Manifest, SavedOptimizer, SavedTensor, assign, dtype_name, new_id, saved_tensors, to_json
from .files.opened import open_checkpoint
from .optimizer import describe_optimizer, plan_optimizer
from .source import CheckpointRanks, CheckpointSource, Holding
from .wrapper_source import source_of

__all__ = ["Notes", "load_checkpoint", "prepare_background_saves", "save_checkpoint"]


@torch.no_grad()
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    background: bool = False,
    pipeline_group: dist.ProcessGroup | None = None,
) -> PendingSave:
    """Write the model and its optimizer into the folder ``path``, on a file system that all ranks share.

    model      a ``DistributedDataParallel`` or ``fully_shard`` model: collective over all its ranks, tensor-parallel
               ones too. Any other module: this process writes it alone, or with the ranks that hold its other slices
    optimizer  the model's ``DistributedOptimizer``; for a fully sharded model, the torch optimizer over its parameters.
               None: only the weights are saved
    extra      other values to save (steps, schedulers, random states): anything that JSON holds. The first rank's
               ``extra`` is written
    background  True: copy to host memory what this rank writes, return a ``PendingSave``, and write in a thread while
               training goes on. The model's next save or load waits for the thread first
    pipeline_group  the ranks with the pipeline's other stages. ``model`` is this rank's stage, whose parameters have
               other names than other stages'; but a shared embedding has one name on all. A module without it takes all

    Call it between steps: gradients are not saved. The folder appears at ``path`` when it is complete, and replaces a
    checkpoint there. Raises ``FileExistsError`` where something else is at ``path``, where other ranks of this program
    have saved to ``path``, and where another save to it is running. All ranks raise the same error.
    """
    finish_pending(model)
    source = _source_of(model, pipeline_group)
    ranks = source.ranks
    if ranks.grid.leaves_ranks_out and getattr(model, "tensor_ranks", None) is None:
        refuse_slices(
            ((name, param) for name, param in source.module.named_parameters() if name not in source.slices),
            "save_checkpoint",
            "would write this rank's slices under the names of whole parameters, where other ranks write theirs",
            "give the wrapper those ranks as tensor_parallel_group",
        )
    target, save_id, sets = _check_same_call(path, optimizer, source, "save_checkpoint")
    _names_elsewhere(source)  # raises where two stages have a parameter of one name

    with Staging(target) as staging:
        mine, writers, notes = _list_saved(source, optimizer, sets, f"the preparation of checkpoint '{target}'")

        def plan() -> PendingSave:
            manifest = None
            if ranks.is_first:
                if ranks.failures is not None:  # a model in no wrapper may be one that all ranks have
                    _check_sole_saver(target)
                staging.begin()
                tensors = saved_tensors(writers, (item for each in notes for item in each.tensors.items()))
                manifest = Manifest(
                    save_id,
                    tensors,
                    dict(pair for each in notes for pair in each.tied.items()),
                    sets.number_in(tensors),
                    notes[0].optimizer,
                    extra,
                )
            pending = PendingSave(staging, ranks, save_id, mine, manifest)
            if background:
                pending.copy_to_host()
            return pending

        pending = ranks.run_on_all_ranks(plan, f"the plan of checkpoint '{target}'")
        if background:
            pending.start(model)
        else:
            pending.finish()
    return pending


@torch.no_grad()
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    pipeline_group: dist.ProcessGroup | None = None,
) -> Any:
    """Read a checkpoint of ``save_checkpoint`` into a model with the same parameters; returns ``extra``.

    model      a ``DistributedDataParallel`` or ``fully_shard`` model of any number of ranks, buckets and placement:
               collective over all its ranks, tensor-parallel ones too. Any other module: this process fills it
               alone, or with the ranks that hold its other slices
    optimizer  the model's optimizer, of the saved class and with the saved groups of parameters. Hyperparameters,
               masters and moments become the saved ones. None: only the weights are read
    pipeline_group  as of ``save_checkpoint``. Other stages of any number may have saved, or a whole model

    Raises the same error on all ranks, before the model has changed: ``FileNotFoundError``; ``ValueError`` for a folder
    that is no complete checkpoint, truncated files, parameters that are missing, unknown or of another shape or dtype,
    and another optimizer or none. Damaged bytes are found while reading: then the error says that the model is partly
    overwritten.
    """
    finish_pending(model)
    source = _source_of(model, pipeline_group)
    ranks = source.ranks
    target, _, sets = _check_same_call(path, optimizer, source, "load_checkpoint")

    at_the_end: list[Callable[[], None]] = []
    elsewhere = _names_elsewhere(source)

    def prepare() -> Callable[[Manifest], Parts]:
        held = source.hold(optimizer, saving=False)

        def choose(manifest: Manifest) -> Parts:
            stored = {
                name: there
                for name, there in sets.here_of(manifest.tensors).items()
                if elsewhere.isdisjoint((model_name := name.rpartition("@")[2], model_name.rpartition(".")[0]))
            }
            # A shared embedding may have another first name on each stage. Then it is there under both.
            for alias, first in held.tensors.tied.items():
                if first in stored and not {(alias, first), (first, alias)}.isdisjoint(manifest.tied.items()):
                    stored.pop(alias, None)
            entries = {name: manifest.tensors[there] for name, there in stored.items()}
            holding, adopts = _with_on_demand(_with_sets(held, stored), source.module, entries)
            _check_fits(target, manifest, entries, holding, sets)
            moments, others, install = plan_optimizer(manifest.optimizer, entries, holding)
            at_the_end[:] = [*adopts, install]
            parts = _parts_to_fill(entries, holding, moments) | others
            return {part._replace(name=stored[part.name]): data for part, data in parts.items()}

        return choose

    opened = open_checkpoint(target, prepare, ranks)
    try:
        ranks.run_on_all_ranks(opened.read, f"the reading of checkpoint '{target}'")
    except Exception as error:
        cause = error.__cause__ if isinstance(error, CollectiveError) else error
        raise with_more_text(error, "; the model is partly overwritten, do not go on with it") from cause
    for finish in at_the_end:
        finish()
    source.loaded(optimizer)
    return opened.manifest.extra


@torch.no_grad()
def prepare_background_saves(
    model: nn.Module, optimizer: Optimizer | None = None, *, pipeline_group: dist.ProcessGroup | None = None
) -> None:
    """Take the host memory of background saves now, so that the first one is as short as those after it.

    model, optimizer, pipeline_group  as of ``save_checkpoint``. Collective over the model's ranks

    Call it after the first step: before, most optimizers have no state. Copies from a GPU go to page-locked memory,
    which takes 0.6 seconds for each GB to get, and which torch keeps. A thread gets it while training goes on, and the
    first save waits for the thread. On a CPU there is nothing to do.

    By default CUDA starts no kernel meanwhile. ``PYTORCH_ALLOC_CONF=pinned_use_cuda_host_register:True`` in the
    environment of the process lets kernels start, and ``pinned_num_register_threads:8`` behind it, after a comma, is
    three times as fast. No CUDA graph can be captured before the memory is there.
    """
    finish_pending(model)
    source = _source_of(model, pipeline_group)
    *_, sets = _check_same_call(os.sep, optimizer, source, "prepare_background_saves")  # a path that all ranks have
    mine, *_ = _list_saved(source, optimizer, sets, "the listing of what is saved")
    reserve_memory(model, mine)


# ---- The call, alike on all ranks. ----


def _source_of(model: nn.Module, pipeline_group: dist.ProcessGroup | None) -> CheckpointSource:
    source = source_of(model)
    source.ranks = source.ranks.with_pipeline(pipeline_group)
    return source


def _names_elsewhere(source: CheckpointSource) -> set[str]:
    """The modules, parameters and buffers that only a pipeline's other stages have. Collective over the stages.

    Raises ``ValueError`` for a trained parameter of several stages that is no shared embedding: one would be taken for
    another.
    """
    module, ranks = source.module, source.ranks
    if ranks.pipeline is None:
        return set()
    own = {name: False for name, _ in [*module.named_modules(), *module.named_buffers(remove_duplicate=False)]}
    for name, param in module.named_parameters(remove_duplicate=False):
        own[name] = param.requires_grad and not getattr(param, "shared_embedding", False)
    stages = gather(own, [ranks.pipeline], ranks.failures, "the names of all stages").values()
    counts = Counter(name for names in stages for name, is_single in names.items() if is_single)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"several stages have a parameter '{min(twice)}', and a checkpoint would have one of them: give parameters "
            f"the names that the whole model has, or save each stage to a folder of its own, without pipeline_group"
        )
    return set().union(*stages) - own.keys()


def _check_sole_saver(path: Path) -> None:
    """Raise ``FileExistsError`` where other ranks of this program have saved to ``path``: theirs would be gone."""
    if default_store is not None and dist.is_initialized():
        rank = str(dist.get_rank())
        first = bytes(default_store().compare_set(f"maingrad/saved/{path}", "", rank)).decode()
        if first != rank:
            raise FileExistsError(
                f"rank {first} saves to '{path}' too, and one would replace the other: a pipeline's stages give "
                f"pipeline_group, and other models are saved elsewhere"
            )


class ExpertSets(NamedTuple):
    """The sets of experts that different ranks hold under the same names. Each is stored under names of its own, unless
    experts are known as slices of a parameter of all experts."""

    own: str
    """Suffix of the stored names of this rank's experts; empty where all ranks hold the same."""
    suffixes: Sequence[str]
    """Those of all sets, where there are several."""

    @property
    def number(self) -> int:
        """Number of different sets, 1 for a model without experts."""
        return len(self.suffixes) or 1

    def number_in(self, names: Iterable[str]) -> int:
        """Number of sets that are stored apart under such names."""
        return self.number if any(name.endswith(tuple(self.suffixes)) for name in names) else 1

    def here_of(self, stored: Iterable[str]) -> dict[str, str]:
        """Names in the model -> stored names, without the experts that only other ranks hold."""
        others = tuple(suffix for suffix in self.suffixes if suffix != self.own)
        return {name.removesuffix(self.own): name for name in stored if not name.endswith(others)}


def _check_same_call(
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
        experts = min(gather(None, ranks.experts.axes, ranks.failures, "the comparison of experts between ranks"))

    _, calls = ranks.run_and_gather(
        lambda: (os.path.realpath(path), optimizer is not None, new_id(), experts),
        lambda said: said,
        f"the beginning of {what}",
    )
    paths, has_optimizer, ids, all_experts = zip(*calls, strict=True)
    if len(set(paths)) > 1:
        raise ValueError(f"all ranks save to and load from one folder, and were given {sorted(set(paths))[:2]}")
    if len(set(has_optimizer)) > 1:
        raise ValueError("some ranks give an optimizer and some do not: all of them, or none")
    known = sorted({*all_experts} - {-1})
    suffixes = {each: f"@expert_set_{index}_of_{len(known)}" for index, each in enumerate(known) if len(known) > 1}
    return Path(paths[0]), ids[0], ExpertSets(suffixes.get(experts, ""), [*suffixes.values()])


# ---- What is saved. Buckets and shards show only in the ``Part``s of each rank. ----


class Notes(NamedTuple):
    """What a rank tells the first rank, which writes the manifest; by names in the files."""

    parts: Sequence[Part]
    """What this rank could write."""
    optimizer: SavedOptimizer | None
    tensors: Mapping[str, Mapping[str, Any]]
    """By name, fields of its ``SavedTensor``. A rank that holds no element of a parameter has no scalars of it."""
    tied: Mapping[str, str]


def _list_saved(
    source: CheckpointSource, optimizer: object, sets: ExpertSets, what: str
) -> tuple[Parts, dict[Part, int], list[Notes]]:
    """What this rank writes; and for the manifest the writer of each part, and all ranks' notes.

    what  name of the step, for errors

    Collective over the source's ranks. Raises ``ValueError`` on all of them for a set of experts that no rank writes.
    """
    ranks = source.ranks
    (parts, _), notes = ranks.run_and_gather(
        lambda: _look_at(source.hold(optimizer, saving=True), ranks, sets), lambda seen: seen[1], what
    )
    writers = assign([each.parts for each in notes])
    are_apart = sets.number_in(part.name for part in writers) > 1
    for expert_set, suffix in enumerate(sets.suffixes if are_apart else ()):
        if not any(part.name.endswith(suffix) for part in writers):
            raise ValueError(
                f"experts of set {expert_set} are on no rank of the first instance, which writes: instances must hold "
                f"all"
            )
    return {part: data for part, data in parts.items() if writers[part] == ranks.place}, writers, notes


def _look_at(holding: Holding, ranks: CheckpointRanks, sets: ExpertSets) -> tuple[Parts, Notes]:
    """This rank's parameters, masters, moments and buffers to save, by their names in the files: views of memory. And
    what the rank tells of them.

    Whole parameters, which all ranks hold, are dealt to the writers in turn. Slices, and the parameters of a pipeline's
    stage, are told by every rank that holds them. Running statistics may differ between ranks: the first one's are
    saved, as ``broadcast_params`` copies them.
    """
    tensors, slices = holding.tensors, holding.tensors.slices
    of_sets = tensors.unplaced_experts

    def stored(name: str) -> str:
        return name + sets.own if name in of_sets else name

    parts: Parts = {}
    told: dict[str, dict[str, Any]] = {stored(name): {"is_buffer": True} for name in tensors.buffers}
    for turn, (name, tensor) in [*enumerate(holding.whole.items()), *((0, each) for each in tensors.buffers.items())]:
        told_by_all = name in tensors.experts or name in slices or ranks.pipeline is not None
        if told_by_all or turn % ranks.num_writers == ranks.place:
            parts |= _dense(stored(name), tensor, slices.get(name))
        if name not in tensors.buffers:
            told[stored(name)] = {"shape": tensors.shape_of(name, tensor.shape)}  # refused where nobody writes it
    for name, held in holding.slices.items():
        there = stored(name)
        sections = {"model": held.param, **{f"state.{key}": value for key, value in held.state.items()}}
        if held.master.dtype is not held.dtype:
            sections["master"] = held.master
        parts |= parts_of_range(there, held.shape, held.start, sections, slices.get(name), model=held.dtype)
        told[there] = {"shape": tensors.shape_of(name, held.shape), "group": held.group}
        if held.scalars and held.param.numel():
            others = dict[str, Tensor]() if holding.has_whole(name) else None
            told[there]["scalars"] = {
                key: to_json(value, f"state '{key}' of parameter '{name}'", key, others)
                for key, value in held.scalars.items()
                if value is not None
            }
            for place, tensor in (others or {}).items():
                parts |= part_of_whole(f"{place}@{there}", "state", tensor)
    if ranks.place >= ranks.num_writers:
        parts = {}
    tied = {stored(alias): stored(first) for alias, first in tensors.tied.items()}
    return parts, Notes([*parts], describe_optimizer(holding.optimizer), told, tied)


def _dense(stored: str, tensor: Tensor, cut: ModelSlice | None) -> Parts:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(
            f"'{stored}' is quantized or not strided, and a checkpoint has dense tensors only: register its parts "
            f"(indices and values, integers and scales) as buffers, or register it with persistent=False"
        )
    return part_of_whole(stored, "model", tensor.detach(), cut)


# ---- What is loaded. ----


def _with_sets(holding: Holding, stored: Mapping[str, str]) -> Holding:
    """``holding``, without the slices of experts that the checkpoint has as sets, as those before it knew slices.

    stored  names in the model -> stored names
    """
    slices = {name: each for name, each in holding.tensors.slices.items() if stored.get(name, name) == name}
    return holding._replace(tensors=holding.tensors._replace(slices=slices))


def _with_on_demand(
    holding: Holding, root: nn.Module, stored: Mapping[str, SavedTensor]
) -> tuple[Holding, list[Callable[[], None]]]:
    """``holding``, with memory to read into in place of buffers that modules make when they need them; and functions
    for the end of the load, which give this memory to the modules.

    A checkpoint may hold such buffers or lack them, and so may the model. A load makes them where the checkpoint has
    them. Where it has none, they begin anew. The modules have ``on_demand_buffers``, ``fits_stored`` and
    ``adopt_stored``. What does not fit its module is left to ``_check_fits``.
    """
    buffers, adopts = dict(holding.tensors.buffers), list[Callable[[], None]]()
    for prefix, module in root.named_modules():
        if hasattr(module, "on_demand_buffers"):
            theirs: Any = module
            names = {name: f"{prefix}.{name}".lstrip(".") for name in theirs.on_demand_buffers()}
            fits = theirs.fits_stored({name: stored[full].shape for name, full in names.items() if full in stored})
            memory: dict[str, Tensor] = {}
            for name, full in names.items():
                buffers.pop(full, None)
                if fits:
                    buffers[full] = memory[name] = torch.empty(stored[full].shape)
            adopts.append(partial(theirs.adopt_stored, memory))
    return holding._replace(tensors=holding.tensors._replace(buffers=buffers)), adopts


def _parts_to_fill(
    entries: Mapping[str, SavedTensor], holding: Holding, moments: Mapping[str, Mapping[str, Tensor]]
) -> Parts:
    """The memory into which a model's values, and ``moments`` of ``plan_optimizer``, are read. Call ``_check_fits``
    before."""
    parts, slices = Parts(), holding.tensors.slices
    for name, tensor in {**holding.tensors.buffers, **holding.whole}.items():
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(
                f"'{name}' is expanded: several of its elements are one place in memory, which cannot take the "
                f"checkpoint's; make it a tensor of its own with clone()"
            )
        parts |= _dense(name, tensor, slices.get(name))
    for name, held in holding.slices.items():
        # The parameter follows from its master.
        section = "master" if "master" in entries[name].dtypes and held.master.dtype is torch.float32 else "model"
        master = {} if holding.reads_whole else {section: held.master}
        wanted = {**master, **moments.get(name, {})}
        parts |= parts_of_range(name, held.shape, held.start, wanted, slices.get(name))
    return parts


def _check_fits(
    path: Path, manifest: Manifest, entries: Mapping[str, SavedTensor], holding: Holding, sets: ExpertSets
) -> None:
    """Raise ``ValueError`` where model and checkpoint differ. The error names the first parameters or buffers."""
    tensors = holding.tensors
    # By name, what the saved tensor may be.
    present = {
        name: [_described(name in tensors.buffers, tensors.shape_of(name, tensor.shape), tensor.dtype)]
        for name, tensor in {**holding.whole, **tensors.buffers}.items()
    }
    for name, held in holding.slices.items():
        shape = tensors.shape_of(name, held.shape)
        either = (_described(False, shape, dtype) for dtype in (held.dtype, held.param.dtype))
        present[name] = [*dict.fromkeys(either)]
    saved = {
        name: _described(entry.is_buffer, entry.shape, entry.dtypes["model"])
        for name, entry in entries.items()
        if "model" in entry.dtypes
    }
    wrong = [name for name in {**present, **saved} if saved.get(name) not in present.get(name, [])]
    misfits = [
        f"'{name}' is {' or '.join(present.get(name, ['missing']))} in the model and {saved.get(name, 'missing')} in "
        f"the checkpoint"
        for name in wrong
    ]
    remedy = "load it into a model that is built as the saved one was, or begin a new run in another folder"
    marked = [name for name, param in tensors.parameters.items() if is_slice(param) and name not in tensors.slices]
    if untold := next((name for name in wrong if name in marked), None):
        remedy = (
            f"'{untold}' is a slice (tensor_model_parallel = True), and nobody says which ranks hold the others: give "
            f"the wrapper those ranks as tensor_parallel_group"
        )
    if manifest.num_expert_sets not in (sets.number, sets.number if tensors.unplaced_experts else 1):
        misfits = [
            f"the checkpoint was saved by ranks with {manifest.num_expert_sets} different set(s) of experts, and these "
            f"ranks have {sets.number}: experts do not move between ranks, unless a ModelSlice says which they are"
        ]
    if misfits:
        raise ValueError(f"checkpoint '{path}' does not fit this model: {'; '.join(misfits[:3])}; {remedy}")


def _described(is_buffer: bool, shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"a {'buffer' if is_buffer else 'parameter'} of {dtype_name(dtype)} {list(shape)}"
