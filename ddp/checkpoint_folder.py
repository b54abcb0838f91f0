"""A checkpoint is written into a folder beside its place and moved there when it is complete.

    step-100.incomplete/    being written, or left by a save that died
    step-100/               complete
    step-100.replaced/      what was there before, for the moment between two renames

A folder is complete when it has the manifest, which comes last and goes first. At no time is ``step-100`` a mixture or
half a checkpoint, and at every time ``find`` has a complete one for it, once there was one: whatever moment a save dies
at, the one before it can be loaded, or the new one. Only the first rank changes anything here.
"""

import os
import shutil
from pathlib import Path

from .checkpoint_manifest import MANIFEST_FILE, MANIFEST_STAGING, METADATA_FILE

__all__ = ["begin", "complete", "describe_missing", "find", "incomplete"]


def incomplete(path: Path) -> Path:
    """Where the checkpoint is written."""
    return path.with_name(f"{path.name}.incomplete")


def replaced(path: Path) -> Path:
    """Where the one before it stays until the new one is in its place."""
    return path.with_name(f"{path.name}.replaced")


def find(path: Path) -> Path:
    """The folder to read for ``path``: itself, but for a save that died between writing and moving.

    Then it is the newest complete one beside it. ``path``, too, where there is none.
    """
    if not _is_free(path):
        return path
    return next((folder for folder in (incomplete(path), replaced(path)) if _is_complete(folder)), path)


def begin(path: Path) -> None:
    """Make the empty folder to write into. What a save that died has left there is put into its place, or removed.

    Raises ``FileExistsError`` where ``path``, or a folder beside it, holds something else than a checkpoint.
    """
    if not (_is_free(path) or (_is_complete(path) and _is_leftover(path))):
        raise FileExistsError(
            f"'{path}' is there and is not just a checkpoint: saving would delete all of it; save elsewhere"
        )
    for folder in (incomplete(path), replaced(path)):
        if folder.exists() and not _is_leftover(folder):
            raise FileExistsError(f"'{folder}' is in the way and is no part of a checkpoint: move it")
    found = find(path)
    if found != path:  # it is all there is until this save is complete
        if path.exists():
            path.rmdir()
        found.rename(path)
    _remove(incomplete(path))
    incomplete(path).mkdir(parents=True)


def complete(path: Path) -> None:
    """Move the finished folder into its place; the checkpoint that was there goes when the new one stands."""
    _sync_folder(incomplete(path))
    if path.exists():
        _remove(replaced(path))
        path.rename(replaced(path))
    incomplete(path).rename(path)
    _sync_folder(path.parent)
    _remove(replaced(path))


def describe_missing(path: Path) -> str:
    """Why there is nothing at ``path``."""
    if incomplete(path).exists():
        return f"there is no checkpoint at '{path}': a save was interrupted, and '{incomplete(path)}' is not complete"
    return f"there is no checkpoint at '{path}'"


def _is_complete(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file()


def _is_free(path: Path) -> bool:
    """Nothing, or an empty folder, which nobody misses when it is replaced."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _is_leftover(folder: Path) -> bool:
    """A folder with nothing in it but files that a save writes."""
    ours = (MANIFEST_FILE, MANIFEST_STAGING, METADATA_FILE, f"{METADATA_FILE}.tmp")
    return folder.is_dir() and all(
        entry.is_file() and (entry.name in ours or entry.suffix == ".distcp") for entry in folder.iterdir()
    )


def _remove(folder: Path) -> None:
    """Delete it; from the first moment on it is not complete."""
    if folder.exists():
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _sync_folder(folder: Path) -> None:
    """Have the folder's own entries on the disk, where the system can do that."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
