"""``save_checkpoint`` and ``load_checkpoint``: a model and its optimizer, by parameter, whatever the ranks and buckets.

    save_checkpoint("runs/step-100", model, optimizer, extra={"step": 100, "scheduler": scheduler.state_dict()})
    extra = load_checkpoint("runs/step-100", model, optimizer)

Each rank writes and reads its own slices through torch.distributed.checkpoint (DCP), whose other tools read the folder
too. Follow a save: every rank offers `Piece`s of full-shape tensors (``checkpoint_contents.py``,
``checkpoint_optimizer.py``); the first rank deals out what several hold (``checkpoint_planner.py``); when all is
written it adds the manifest (``checkpoint_manifest.py``) and moves the folder into its place
(``checkpoint_folder.py``). A load goes backwards, and checks all it can before it touches the model.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import checkpoint_folder as folders
from .checkpoint_boxes import Piece
from .checkpoint_contents import Notes, StoredNames, check_model, make_manifest, model_tensors, pieces_of_model
from .checkpoint_manifest import Manifest, SavedOptimizer
from .checkpoint_optimizer import OptimizerLoad, describe_optimizer, describe_slices, pieces_of_optimizer
from .checkpoint_ranks import check_same_call, place_of_experts, ranks_of, saying
from .data_parallel import DistributedDataParallel
from .distributed_optimizer import DistributedOptimizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

# checkpoint_storage is imported where it is used: it needs a torch with torch.distributed, and importing this does not.

__all__ = ["load_checkpoint", "save_checkpoint"]


@torch.no_grad()
def save_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: DistributedOptimizer | None = None, *, extra: Any = None
) -> None:
    """Write the model and its optimizer into the folder ``path``, on a file system that all ranks share.

    model      a ``DistributedDataParallel`` model: collective over all its ranks; any other module is written by this
               process alone
    optimizer  the model's ``DistributedOptimizer``; None: the weights alone
    extra      what else there is to keep (steps, schedulers, random states): anything that JSON holds. The first rank's
               is written

    Call it between steps: gradients are not saved. The folder appears when it is complete. A checkpoint that is there
    already is replaced then; anything else at ``path`` is refused with ``FileExistsError``. All ranks raise alike.
    """
    from .checkpoint_storage import check_written, write_pieces

    target = Path(os.path.realpath(path))
    ranks = ranks_of(model)
    check_same_call(str(target), optimizer, ranks)
    names = StoredNames(*place_of_experts(model, ranks))

    def prepare() -> tuple[list[Piece], Notes, SavedOptimizer | None]:
        _check_optimizer_belongs(model, optimizer)
        tensors = model_tensors(_unwrapped(model))
        parts: list[Piece] = []
        described: dict[str, dict[str, Any]] = {}
        saved = None
        if optimizer is not None:
            optimizer.finish_param_sync()
            optimizer.refresh_masters()
            saved = describe_optimizer(optimizer)
            parts, described = pieces_of_optimizer(optimizer, names), describe_slices(optimizer)
        # Running statistics may differ between ranks: the first one's count, as they do in broadcast_params.
        parts += pieces_of_model(tensors, names, without=described, buffers=ranks.leads)
        if ranks.leads:
            _check_json(extra)
            folders.begin(target)
        return parts, Notes.of(tensors, names, described), saved

    pieces, notes, saved = ranks.alike(prepare)
    staging = folders.incomplete(target)
    all_notes = ranks.alike(lambda: write_pieces(staging, pieces, notes, ranks.group) if ranks.writes else [])

    def finish() -> None:
        if ranks.leads:
            check_written(staging)
            tensors = model_tensors(_unwrapped(model))
            make_manifest(all_notes, tensors, names, saved, extra).write(staging)
            folders.complete(target)

    ranks.alike(finish)


@torch.no_grad()
def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: DistributedOptimizer | None = None
) -> Any:
    """Read what ``save_checkpoint`` wrote, into a model of the same parameters; returns its ``extra``.

    model      a ``DistributedDataParallel`` model of any number of ranks, buckets and placement: collective over all
               its ranks; any other module is filled by this process alone
    optimizer  the model's ``DistributedOptimizer``: of the class and with the groups that were saved; hyperparameters,
               masters and moments become the saved ones. None: the weights alone

    Raises, alike on all ranks and before the model has changed: ``FileNotFoundError``; ``ValueError`` for a folder that
    is no complete checkpoint, files that are truncated or would run code, parameters that are missing, unknown or of
    another shape or dtype, and another optimizer or none. Bytes that are damaged inside a file are found while reading:
    then the error says that the model is partly overwritten.
    """
    from .checkpoint_storage import check_stored, open_checkpoint, read_pieces

    source = Path(os.path.realpath(path))
    ranks = ranks_of(model)
    check_same_call(str(source), optimizer, ranks)
    names = StoredNames(*place_of_experts(model, ranks))

    def prepare() -> "tuple[Manifest, Metadata, list[Piece], OptimizerLoad | None]":
        _check_optimizer_belongs(model, optimizer)
        manifest, metadata = open_checkpoint(source, check_sizes=ranks.leads)
        tensors = model_tensors(_unwrapped(model))
        check_model(manifest, tensors, names)
        if optimizer is None:
            load, pieces = None, pieces_of_model(tensors, names)
        else:
            optimizer.finish_param_sync()
            load = OptimizerLoad.plan(manifest, optimizer, names)
            pieces = load.pieces + pieces_of_model(tensors, names, without=[part.name for part in optimizer.slices])
        check_stored(metadata, pieces)
        return manifest, metadata, pieces, load

    manifest, metadata, pieces, load = ranks.alike(prepare)
    try:
        ranks.alike(lambda: read_pieces(source, metadata, pieces, ranks.group))
    except Exception as error:
        raise saying(error, "; the model is partly overwritten, do not go on with it") from error
    if load is not None:
        load.finish()
    return manifest.extra


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _check_optimizer_belongs(model: nn.Module, optimizer: object) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, DistributedOptimizer):
        raise TypeError(
            f"a checkpoint holds the state of a DistributedOptimizer, got {type(optimizer).__name__}: save the model "
            f"without it, and its state_dict() beside the checkpoint"
        )
    if optimizer.model is not model:
        raise ValueError("this optimizer belongs to another model")


def _check_json(extra: Any) -> None:
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise TypeError(f"extra must be something that JSON holds ({error})") from None
