"""``save_checkpoint`` and ``load_checkpoint``: a model and its optimizer by parameter, for any ranks and buckets.

    save_checkpoint("runs/step-100", model, optimizer, extra={"step": 100, "scheduler": scheduler.state_dict()})
    extra = load_checkpoint("runs/step-100", model, optimizer)

Each rank writes a safetensors file of its own slices. Follow a save: the wrapper says what this rank holds
(``source.py``, ``wrapper_source.py``); every rank makes ``Part``s of it (``model.py``, ``optimizer.py``); where several
ranks hold the same elements, the first rank says which rank writes them (``files/manifest.py``); the ranks write
(``files/rank_file.py``), perhaps in a thread (``background.py``); the first rank adds the manifest
(``files/manifest.py``) and renames the folder (``files/folder.py``). A load goes the other way: it opens the files and
checks all it can before it changes the model, and then each rank reads its parts (``files/opened.py``).
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..collectives.failure_report import CollectiveError, with_more_text
from ..plan.owned_params import refuse_slices
from .background import PendingSave, finish_pending, reserve_memory
from .files.boxes import Part, Parts
from .files.folder import Staging
from .files.manifest import Manifest, SavedOptimizer, assign
from .files.opened import open_checkpoint
from .model import (
    ExpertSets,
    Notes,
    check_same_call,
    make_manifest,
    make_notes,
    misfit_of,
    parts_of_model,
    parts_to_fill,
)
from .on_demand import with_on_demand
from .optimizer import describe_optimizer, plan_optimizer
from .source import CheckpointSource
from .wrapper_source import source_of

__all__ = ["load_checkpoint", "prepare_background_saves", "save_checkpoint"]


@torch.no_grad()
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    background: bool = False,
) -> PendingSave:
    """Write the model and its optimizer into the folder ``path``, on a file system that all ranks share.

    model      a ``DistributedDataParallel`` or ``fully_shard`` model: collective over all its ranks. Any other module:
               this process writes it alone
    optimizer  the model's ``DistributedOptimizer``; for a fully sharded model, the torch optimizer over its parameters.
               None: only the weights are saved
    extra      other values to save (steps, schedulers, random states): anything that JSON holds. The first rank's
               ``extra`` is written
    background  True: copy to host memory what this rank writes, return a ``PendingSave``, and write in a thread while
               training goes on. The model's next save or load waits for the thread first

    Call it between steps: gradients are not saved. The folder appears at ``path`` when it is complete, and replaces a
    checkpoint there. Raises ``FileExistsError`` where something else is at ``path``, and where another save to ``path``
    is running. All ranks raise the same error.
    """
    finish_pending(model)
    source = source_of(model)
    ranks = source.ranks
    if ranks.grid.leaves_ranks_out:
        refuse_slices(
            source.module.named_parameters(),
            "save_checkpoint",
            "would write this rank's slices under the names of whole parameters, where other ranks write theirs",
            "save state_dict() of each tensor-parallel rank to a file of its own",
        )
    target, save_id, sets = check_same_call(path, optimizer, source, "save_checkpoint")

    with Staging(target) as staging:
        mine, writers, notes, saved = _list_saved(source, optimizer, sets, f"the preparation of checkpoint '{target}'")

        def plan() -> PendingSave:
            manifest = None
            if ranks.leads:
                staging.begin()
                manifest = make_manifest(writers, notes, sets, saved, extra, save_id)
            pending = PendingSave(staging, ranks, save_id, mine, manifest)
            if background:
                pending.copy_to_host()
            return pending

        pending = ranks.run_on_all_ranks(plan, f"the plan of checkpoint '{target}'")
        if background:
            pending.start(model)
        else:
            pending.write_now()
    return pending


@torch.no_grad()
def load_checkpoint(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> Any:
    """Read a checkpoint of ``save_checkpoint`` into a model with the same parameters; returns ``extra``.

    model      a ``DistributedDataParallel`` or ``fully_shard`` model of any number of ranks, buckets and placement:
               collective over all its ranks. Any other module: this process fills it alone
    optimizer  the model's optimizer, of the saved class and with the saved groups of parameters. Hyperparameters,
               masters and moments become the saved ones. None: only the weights are read

    Raises the same error on all ranks, before the model has changed: ``FileNotFoundError``; ``ValueError`` for a folder
    that is no complete checkpoint, truncated files, parameters that are missing, unknown or of another shape or dtype,
    and another optimizer or none. Damaged bytes are found while reading: then the error says that the model is partly
    overwritten.
    """
    finish_pending(model)
    source = source_of(model)
    ranks = source.ranks
    target, _, sets = check_same_call(path, optimizer, source, "load_checkpoint")

    at_the_end: list[Callable[[], None]] = []

    def prepare() -> Callable[[Manifest], Parts]:
        held = source.hold(optimizer, saving=False)

        def choose(manifest: Manifest) -> Parts:
            entries = sets.here_of(manifest.tensors)
            holding, adopt = with_on_demand(held, source.module, entries)
            misfit = misfit_of(manifest.num_expert_sets, entries, holding, sets)
            if misfit is not None:
                raise ValueError(
                    f"checkpoint '{target}' does not fit this model: {misfit}; load it into a model that is built as "
                    f"the saved one was, or begin a new run in another folder"
                )
            parts = parts_to_fill(entries, holding)
            at_the_end[:] = [adopt]
            if holding.optimizer is not None:
                moments, install = plan_optimizer(manifest.optimizer, entries, holding, holding.optimizer)
                parts |= moments
                at_the_end.append(install)
            stored = sets.here_of({name: name for name in manifest.tensors})
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
def prepare_background_saves(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Take the host memory of background saves now, so that the first one is as short as those after it.

    model, optimizer  as of ``save_checkpoint``. Collective over the model's ranks

    Call it after the first step: before, most optimizers have no state. Copies from a GPU go to page-locked memory,
    which takes 0.6 seconds for each GB to get, and which torch keeps. A thread gets it while training goes on, and the
    first save waits for the thread. On a CPU there is nothing to do.

    By default CUDA starts no kernel meanwhile. ``PYTORCH_ALLOC_CONF=pinned_use_cuda_host_register:True`` in the
    environment of the process lets kernels start, and ``pinned_num_register_threads:8`` behind it, after a comma, is
    three times as fast. No CUDA graph can be captured before the memory is there.
    """
    finish_pending(model)
    source = source_of(model)
    anywhere = os.sep  # a path that is one on all ranks
    *_, sets = check_same_call(anywhere, optimizer, source, "prepare_background_saves")
    mine, *_ = _list_saved(source, optimizer, sets, "the listing of what is saved")
    reserve_memory(model, mine)


def _list_saved(
    source: CheckpointSource, optimizer: object, sets: ExpertSets, what: str
) -> tuple[Parts, dict[Part, int], list[Notes], SavedOptimizer | None]:
    """What this rank writes; and for the manifest the writer of each part, all ranks' notes, and the optimizer.

    what  name of the step, for errors

    Collective over the source's ranks.
    """
    ranks = source.ranks

    def look() -> tuple[Parts, SavedOptimizer | None, Notes]:
        holding = source.hold(optimizer, saving=True)
        stored = sets.naming(holding)
        parts = parts_of_model(holding, ranks, stored)
        return parts, describe_optimizer(holding.optimizer), make_notes(parts, holding, stored)

    (parts, saved, _), notes = ranks.run_and_gather(look, lambda seen: seen[-1], what)
    writers = assign([each.parts for each in notes])
    mine = {part: data for part, data in parts.items() if writers[part] == ranks.place}
    return mine, writers, notes, saved
