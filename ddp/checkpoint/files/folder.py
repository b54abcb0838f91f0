"""A checkpoint is written into a folder beside its place and moved there when it is complete.

    step-100.incomplete/    being written, or left by a save that died
    step-100/               complete
    step-100.replaced/      what was there before, for the moment between two renames

A folder is complete when it has the manifest, which comes last and goes first. At no time is ``step-100`` a mixture or
half a checkpoint, and at every time ``find`` has a complete one for it, once there was one: whatever moment a save dies
at, the one before it can be loaded, or the new one. Only the first rank changes anything here.

The two folders beside it have a mark in them, a file that only a save puts there: a folder without it that is named
like them is somebody's own, and stays as it is. The save that writes holds a lock on its mark until it ends, however it
ends: another one to the same path is refused meanwhile.
"""

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from ...collectives.failure_report import CollectiveError
from .manifest import MANIFEST_FILE, MANIFEST_STAGING, METADATA_FILE

if sys.platform != "win32":
    import fcntl

__all__ = ["MARK_FILE", "Staging", "belongs_to_checkpoint", "describe_missing", "find", "incomplete", "replaced"]

MARK_FILE = "maingrad.saving"
"""In a folder that a save has put beside the checkpoint's place."""


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
    beside = (incomplete(path), replaced(path))
    return next((folder for folder in beside if _is_complete(folder) and _is_marked(folder)), path)


class Staging:
    """The folder that one save to ``path`` writes into, held against other saves; a context manager.

    A save that fails leaves nothing behind. One in which a rank is gone leaves its files: other ranks may be writing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark: TextIO | None = None

    @property
    def folder(self) -> Path:
        """Where to write."""
        return incomplete(self._path)

    def begin(self) -> None:
        """Make the empty folder. What a save that died has left there is put into its place, or removed.

        Raises ``FileExistsError`` where ``path``, or a folder beside it, holds something else than a checkpoint, and
        where another save is writing.
        """
        path = self._path
        if path == Path.cwd():
            raise FileExistsError(
                f"'{path}' is the working directory, and a save replaces its folder: save to a folder in it"
            )
        if not (_is_free(path) or (_is_complete(path) and _is_ours(path))):
            raise FileExistsError(
                f"'{path}' is there and is not just a checkpoint: saving would delete all of it; save elsewhere"
            )
        for folder in (incomplete(path), replaced(path)):
            if not _is_leftover(folder):
                raise FileExistsError(
                    f"'{folder}' is in the way and is not what a save has left there: move it, or save elsewhere"
                )
        self._hold()
        found = find(path)
        if found != path:  # it is all there is until this save is complete
            if path.exists():
                path.rmdir()
            found.rename(path)
            (path / MARK_FILE).unlink()
            if found == self.folder:
                self._release()
                self._hold()
        _empty(self.folder)

    def complete(self) -> None:
        """Move the finished folder into its place; the checkpoint that was there goes when the new one stands."""
        path = self._path
        _sync_folder(self.folder)
        if _is_free(path):
            if path.exists():
                path.rmdir()
        else:
            _remove(replaced(path))
            (path / MARK_FILE).touch()
            _sync_folder(path)
            path.rename(replaced(path))
        self.folder.rename(path)
        (path / MARK_FILE).unlink()
        _sync_folder(path.parent)
        self._release()
        _remove(replaced(path))

    def __enter__(self) -> "Staging":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mark is None:
            return
        try:
            # A complete one stays, wherever the failure was: it is the newest there is.
            failed = isinstance(error, Exception) and not isinstance(error, CollectiveError)
            if failed and not _is_complete(self.folder):
                _remove(self.folder)
        finally:
            self._release()

    def _hold(self) -> None:
        """Make the folder with its mark, or take over the one that is there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        where = self.folder / MARK_FILE
        try:
            mark = where.open("a+", encoding="utf-8")
        except FileNotFoundError:  # moved this very moment
            raise _in_use(self.folder, "") from None
        # Whoever held it until now may have moved it into its place.
        if not (_lock(mark) and where.exists() and os.path.samestat(os.fstat(mark.fileno()), where.stat())):
            mark.seek(0)
            writer = mark.read(200)
            mark.close()
            raise _in_use(self.folder, writer)
        self._mark = mark
        mark.truncate(0)
        try:  # at once: a full disk is not found when the file is closed
            os.write(mark.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(where)) from error

    def _release(self) -> None:
        if self._mark is not None:
            if sys.platform != "win32":
                with suppress(OSError):  # explicitly: a forked process may have the file open still
                    fcntl.flock(self._mark, fcntl.LOCK_UN)
            self._mark.close()
            self._mark = None


def _in_use(folder: Path, writer: str) -> FileExistsError:
    return FileExistsError(
        f"another save is writing into '{folder}'{f' ({writer})' if writer else ''}: two jobs do not save to one path; "
        f"wait for it to end, or save elsewhere"
    )


def _lock(mark: TextIO) -> bool:
    """Whether nobody else has it. True, too, on a system without locks: there the saves' ids have to do."""
    if sys.platform != "win32":
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
    return True


def describe_missing(path: Path) -> str:
    """Why there is nothing at ``path``."""
    missing = f"there is no checkpoint at '{path}'"
    for folder in (incomplete(path), replaced(path)):
        if _is_complete(folder):
            return f"{missing}; '{folder}' is a checkpoint of its own, and no save to '{path}' has left it: name it"
    if incomplete(path).exists():
        return f"{missing}: a save was interrupted, and '{incomplete(path)}' is not complete"
    return missing


def _is_complete(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file()


def _is_marked(folder: Path) -> bool:
    return (folder / MARK_FILE).is_file()


def _is_free(path: Path) -> bool:
    """Nothing, or an empty folder, which nobody misses when it is replaced."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _is_ours(folder: Path) -> bool:
    """A folder with nothing in it but files that a save writes."""
    return folder.is_dir() and all(entry.is_file() and belongs_to_checkpoint(entry.name) for entry in folder.iterdir())


def belongs_to_checkpoint(name: str) -> bool:
    """Whether a file of this name is one that a save writes."""
    ours = (MANIFEST_FILE, MANIFEST_STAGING, METADATA_FILE, f"{METADATA_FILE}.tmp", MARK_FILE)
    return name in ours or name.endswith(".distcp")


def _is_leftover(folder: Path) -> bool:
    """Nothing, or what a save has put beside a checkpoint's place."""
    return _is_free(folder) or (_is_marked(folder) and _is_ours(folder))


def _empty(folder: Path) -> None:
    """Delete all but the mark; from the first moment on the folder is not complete."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name != MANIFEST_FILE):
        if entry.name != MARK_FILE:
            entry.unlink()


def _remove(folder: Path) -> None:
    """Delete it; the mark goes last."""
    if folder.exists():
        _empty(folder)
        (folder / MARK_FILE).unlink(missing_ok=True)
        folder.rmdir()


def _sync_folder(folder: Path) -> None:
    """Have the folder's own entries on the disk, where the system can do that."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
