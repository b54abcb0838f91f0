"""What passes through torch.distributed.checkpoint (DCP): opening a folder, and moving pieces in and out of it."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .agreement import saying
from .checkpoint_archive import size_and_checksum
from .checkpoint_boxes import Piece
from .checkpoint_folder import describe_missing, find
from .checkpoint_manifest import MANIFEST_FILE, METADATA_FILE, Manifest
from .checkpoint_metadata import check_files, read_metadata
from .checkpoint_planner import PieceReader, PiecesLoadPlanner, PiecesSavePlanner, PieceWriter

__all__ = ["Stored", "check_stored", "check_written", "open_checkpoint", "read_pieces", "write_pieces"]


class Stored(NamedTuple):
    """What a checkpoint holds, without its tensors."""

    folder: Path
    """Where it lies: beside its place where a save died before it was moved."""
    manifest: Manifest
    metadata: Metadata


def open_checkpoint(path: Path, *, check_sizes: bool = True) -> Stored:
    """What the checkpoint at ``path`` holds. No process group is needed.

    check_sizes  look at every data file's size, and which save it is of

    Raises ``FileNotFoundError``, and ``ValueError`` for a folder that is no complete checkpoint.
    """
    folder = find(path)
    if not folder.exists():
        raise FileNotFoundError(describe_missing(folder))
    if not folder.is_dir():
        raise ValueError(f"'{folder}' is a file, and a checkpoint is a folder")
    manifest = Manifest.read(folder)
    metadata = read_metadata(folder, None if manifest.metadata_file is None else manifest.metadata_file[0])
    if Manifest.read(folder).save_id != manifest.save_id:
        raise ValueError(f"'{folder}' was replaced by another save while it was opened: load it again")
    found = None if metadata.storage_meta is None else metadata.storage_meta.save_id
    if found != manifest.save_id:
        raise ValueError(
            f"'{folder / METADATA_FILE}' is of another save than '{folder / MANIFEST_FILE}' ({found or 'no id'}, and "
            f"{manifest.save_id or 'no id'}): files of two checkpoints are mixed in this folder"
        )
    written, present = manifest.metadata_file, size_and_checksum(folder / METADATA_FILE)
    if written not in (None, present):
        raise ValueError(
            f"'{folder / METADATA_FILE}' is truncated or damaged: size and checksum are {present}, and were {written} "
            f"when it was written; where you have changed it yourself, set metadata_file and checksum to null in "
            f"{MANIFEST_FILE}"
        )
    _check_told(manifest, metadata)
    if check_sizes:
        check_files(folder, metadata, manifest.save_id)
    return Stored(folder, manifest, metadata)


def _check_told(manifest: Manifest, metadata: Metadata) -> None:
    """Raise ``ValueError`` unless manifest and metadata tell of the same tensors: nothing has been allocated yet."""
    told = {f"model.{name}": entry.shape for name, entry in {**manifest.parameters, **manifest.buffers}.items()}
    for name, entry in manifest.parameters.items():
        told.update({f"optimizer.state.{name}.{key}": entry.shape for key in entry.state})
        if entry.has_master:
            told[f"master.{name}"] = entry.shape
    stored: Any = metadata.state_dict_metadata
    for key, shape in told.items():
        if key not in stored:
            raise ValueError(f"'{key}' is missing in the checkpoint's metadata, though its manifest names it")
        if tuple(stored[key].size) != shape:
            raise ValueError(
                f"'{key}' is {list(stored[key].size)} in the checkpoint's metadata, though its manifest has "
                f"{list(shape)}"
            )
    if len(stored) > len(told):
        unknown = min(set(stored) - set(told))
        raise ValueError(f"'{unknown}' is in the checkpoint's metadata, though its manifest does not name it")


def write_pieces(
    folder: Path, save_id: str, pieces: Sequence[Piece], notes: Any, group: dist.ProcessGroup | None
) -> list[Any]:
    """Write what the ranks of ``group`` hold between them, once; on the first of them returns everybody's notes.

    Collective over ``group``; None: this rank alone. Raises ``ValueError`` on all for elements that no rank holds.
    """
    planner = PiecesSavePlanner(pieces, notes)
    writer = PieceWriter(folder, save_id)
    _run(lambda **how: save({}, storage_writer=writer, planner=planner, **how), group)
    return planner.all_notes


def check_written(folder: Path, save_id: str) -> tuple[int, int]:
    """Size and checksum of the metadata's file.

    Raises ``ValueError`` where a rank's file is not where the others' are, cannot be read again, or is not this save's:
    another job has written into the folder.
    """
    check_files(folder, read_metadata(folder), save_id)
    return size_and_checksum(folder / METADATA_FILE)


def check_stored(metadata: Metadata, pieces: Sequence[Piece]) -> None:
    """Raise ``ValueError`` where a piece is of a tensor that is not there, or not as the manifest says."""
    for piece in pieces:
        stored: Any = metadata.state_dict_metadata.get(piece.key)
        if stored is None:
            raise ValueError(f"'{piece.key}' is missing in the checkpoint's metadata, though its manifest names it")
        if tuple(stored.size) != piece.shape or stored.properties.dtype != piece.data.dtype:
            raise ValueError(
                f"'{piece.key}' is {stored.properties.dtype} {list(stored.size)} in the checkpoint's metadata, though "
                f"its manifest has {piece.data.dtype} {list(piece.shape)}"
            )


def read_pieces(stored: Stored, pieces: Sequence[Piece], group: dist.ProcessGroup | None) -> None:
    """Fill the pieces' memory. Collective over ``group``, whose ranks have pieces of their own; None: this one alone.

    Raises ``ValueError`` on all for a file that does not hold what the metadata says.
    """
    planner = PiecesLoadPlanner(pieces, stored.metadata)
    reader = PieceReader(stored.folder, stored.metadata, stored.manifest.save_id)
    _run(lambda **how: load({}, storage_reader=reader, planner=planner, **how), group)


def _run(action: Callable[..., Any], group: dist.ProcessGroup | None) -> None:
    """Call DCP over a group. It gathers the ranks' errors into one ``BaseException``: the first rank's is raised."""
    try:
        if group is not None:
            action(process_group=group)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            action(no_dist=True)
    except CheckpointException as failure:
        first = min(failure.failures)
        error, _ = failure.failures[first]
        if group is not None and len(failure.failures) < group.size():
            error = saying(error, f" (on rank {dist.get_global_rank(group, first)})")
        raise error from None
