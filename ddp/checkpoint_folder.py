"""A checkpoint is written into a folder beside its place and moved there when it is complete.

    step-100.incomplete/    being written, or left by a save that died
    step-100/               complete
    step-100.replaced/      what was there before, for the moment between two renames

So ``step-100`` is at no time a mixture or half a checkpoint. Only the first rank does what is here.
"""

import os
import shutil
from pathlib import Path

from .checkpoint_manifest import MANIFEST_FILE, METADATA_FILE

__all__ = ["begin", "complete", "describe_missing", "incomplete"]


def incomplete(path: Path) -> Path:
    """Where the checkpoint is written."""
    return path.with_name(f"{path.name}.incomplete")


def replaced(path: Path) -> Path:
    """Where the one before it stays until the new one is in its place."""
    return path.with_name(f"{path.name}.replaced")


def begin(path: Path) -> None:
    """Make the empty folder to write into. What a save that died has left there is removed.

    Raises ``FileExistsError`` where ``path``, or a folder beside it, holds something else than a checkpoint.
    """
    if path.exists() and not _is_checkpoint(path):
        raise FileExistsError(
            f"'{path}' is there and is not just a checkpoint: saving would delete all of it; save elsewhere"
        )
    for folder in (incomplete(path), replaced(path)):
        if folder.exists() and not _is_leftover(folder):
            raise FileExistsError(f"'{folder}' is in the way and is no part of a checkpoint: move it")
    if incomplete(path).exists():
        shutil.rmtree(incomplete(path))
    incomplete(path).mkdir(parents=True)


def complete(path: Path) -> None:
    """Move the finished folder into its place; the checkpoint that was there goes when the new one stands."""
    _sync_folder(incomplete(path))
    if path.exists():
        if replaced(path).exists():
            shutil.rmtree(replaced(path))
        path.rename(replaced(path))
    incomplete(path).rename(path)
    _sync_folder(path.parent)
    if replaced(path).exists():
        shutil.rmtree(replaced(path))


def describe_missing(path: Path) -> str:
    """Why there may be nothing at ``path``, and what to do."""
    for folder in (incomplete(path), replaced(path)):
        if (folder / MANIFEST_FILE).is_file():
            return (
                f"there is no checkpoint at '{path}', but a complete one at '{folder}': a save was interrupted between "
                f"two renames; rename it"
            )
    if incomplete(path).exists():
        return f"there is no checkpoint at '{path}': a save was interrupted, and '{incomplete(path)}' is not complete"
    return f"there is no checkpoint at '{path}'"


def _is_checkpoint(path: Path) -> bool:
    """Ours with nothing else in it, or an empty folder: nobody misses it when it is replaced."""
    return _is_leftover(path) and ((path / MANIFEST_FILE).is_file() or not any(path.iterdir()))


def _is_leftover(folder: Path) -> bool:
    """A folder with nothing in it but files that a save writes."""
    ours = (MANIFEST_FILE, METADATA_FILE, f"{METADATA_FILE}.tmp")
    return folder.is_dir() and all(
        entry.is_file() and (entry.name in ours or entry.suffix == ".distcp") for entry in folder.iterdir()
    )


def _sync_folder(folder: Path) -> None:
    """Have the folder's own entries on the disk, where the system can do that."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
