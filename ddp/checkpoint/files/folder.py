"""A save writes into a folder beside the checkpoint's path, and renames this folder when the checkpoint is complete.

    step-100.incomplete/    a save is writing here, or a save that died has left this
    step-100/               complete
    step-100.replaced/      the previous checkpoint, between two renames

A folder is complete when it holds the manifest: a save writes the manifest last, and deletes the manifest first. So
``step-100`` never holds half a checkpoint or a mixture of two. Once one save has completed, ``find`` always finds a
complete checkpoint, the previous or the new one, whenever a later save dies. Only the first rank changes folders.

A save puts a mark, a file, into the two folders beside the path. A folder of such a name without the mark belongs to
the user, and no save changes it. While a save runs, it holds a lock on the mark, and another save to the same path is
refused. The lock ends with the process.

What is deleted are regular files with the names that a save gives. No link is followed.
"""

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ...collectives.failure_report import CollectiveError
from .manifest import MANIFEST_FILE
from .whole_file import TEMPORARY

__all__ = [
    "MARK_FILE",
    "Staging",
    "belongs_to_checkpoint",
    "describe_missing",
    "find",
    "is_being_deleted",
    "is_complete",
    "is_left_to_delete",
    "move_to_place",
    "remove",
]

MARK_FILE = "maingrad.saving"
"""Marks a folder that a save has made beside the checkpoint's path, and one that is being deleted."""
_FILES = rf"{re.escape(MANIFEST_FILE)}|{re.escape(MARK_FILE)}|rank-[0-9]{{5,9}}\.safetensors"
_OURS = re.compile(f"({_FILES})({re.escape(TEMPORARY)})?")
"""Names of files that a save writes; data files have those of ``rank_file.file_name``."""


def _beside(path: Path) -> tuple[Path, Path]:
    """The folder into which a save writes, and that of the previous checkpoint until the new one has its place."""
    return path.with_name(f"{path.name}.incomplete"), path.with_name(f"{path.name}.replaced")


def find(path: Path) -> Path:
    """The folder to read for ``path``.

    This is ``path`` itself, unless nothing is there and a save died between two renames: then it is the newest complete
    folder beside ``path``.
    """
    found = [folder for folder in _beside(path) if is_complete(folder) and (folder / MARK_FILE).is_file()]
    # Looked at last: a save may have taken its second step meanwhile, and that one is newer.
    return found[0] if found and _is_free(path) else path


def move_to_place(path: Path) -> Path:
    """Move what ``find`` finds to ``path``; returns where it was. No save to ``path`` is under way but the caller's."""
    found = find(path)
    if found != path:
        found.rename(path)  # also where an empty folder is
        (path / MARK_FILE).unlink()
    return found


class Staging:
    """The folder that one save to ``path`` writes into, locked against other saves; a context manager.

    A save that fails deletes its files. Where a rank is gone the files stay, because other ranks may still be writing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder, self._replaced = _beside(path)
        """The folder to write into; and that of the previous checkpoint, between two renames."""
        self._mark: TextIO | None = None

    def begin(self) -> None:
        """Make the empty folder. A complete checkpoint of a save that died is moved to ``path`` first; its other files
        are deleted.

        Raises ``FileExistsError`` where ``path``, or a folder beside it, holds something else than a checkpoint, and
        where another save is writing.
        """
        path = self.path
        if path == Path.cwd():
            raise FileExistsError(
                f"'{path}' is the working directory, and a save replaces its folder: save to a folder in it"
            )
        if not _is_only(path, MARK_FILE, MANIFEST_FILE):
            raise FileExistsError(
                f"'{path}' is there and is not just a checkpoint: saving would delete all of it; save elsewhere"
            )
        for folder in _beside(path):
            if not _is_only(folder, MARK_FILE):
                raise FileExistsError(
                    f"'{folder}' is in the way and is not what a save has left there: move it, or save elsewhere"
                )
        self._hold()
        if move_to_place(path) == self.folder:  # the only complete checkpoint until this save completes
            self._release()
            self._hold()
        _empty(self.folder)

    def complete(self) -> None:
        """Rename the finished folder to ``path``; then delete the previous checkpoint."""
        path = self.path
        _sync_folder(self.folder)
        if not _is_free(path):
            _remove(self._replaced)
            (path / MARK_FILE).touch()
            _sync_folder(path)
            path.rename(self._replaced)
        self.folder.rename(path)
        (path / MARK_FILE).unlink()
        _sync_folder(path.parent)
        self._release()
        _remove(self._replaced)

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        if self._mark is None or error is None:
            return  # this is not the rank that writes here, or a thread goes on writing
        try:
            # A complete folder stays even if the save fails later: it is the newest checkpoint.
            failed = isinstance(error, Exception) and not isinstance(error, CollectiveError)
            if failed and not is_complete(self.folder):
                _remove(self.folder)
        finally:
            self._release()

    def _hold(self) -> None:
        """Make the folder with its mark, or take over the existing one, and lock the mark."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / MARK_FILE
        try:
            self._mark = path.open("a")
            try:
                fcntl.flock(self._mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:
                pass  # the file system has no locks; ids must do there
            # The save that held the lock before may have renamed the folder since the mark was opened.
            if not os.path.samestat(os.fstat(self._mark.fileno()), path.stat()):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            self._release()
            raise FileExistsError(
                f"another save is writing into '{self.folder}': two jobs do not save to one path; wait for it to end, "
                f"or save elsewhere; a model that is in no wrapper of maingrad's, each rank saves by itself: save it "
                f"on one (if torch.distributed.get_rank() == 0)"
            ) from None

    def _release(self) -> None:
        if self._mark is not None:
            with suppress(OSError):  # unlock explicitly: a forked process may still have the file open
                fcntl.flock(self._mark, fcntl.LOCK_UN)
            self._mark.close()
            self._mark = None


def describe_missing(path: Path) -> str:
    """Why there is no checkpoint at ``path``, for an error."""
    missing = f"there is no checkpoint at '{path}'"
    for folder in _beside(path):
        if is_complete(folder):
            return f"{missing}; '{folder}' is a checkpoint of its own, and no save to '{path}' has left it: name it"
    incomplete, _ = _beside(path)
    if incomplete.exists():
        return f"{missing}: a save was interrupted, and '{incomplete}' is not complete"
    return missing


def is_complete(folder: Path) -> bool:
    """Whether this is a complete checkpoint, or a link to one."""
    return (folder / MANIFEST_FILE).is_file()


def _is_free(path: Path) -> bool:
    """Whether there is nothing, or an empty folder, which a save may replace. A link is something."""
    try:
        return not path.is_symlink() and not any(path.iterdir())
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False


def _is_only(folder: Path, *names: str) -> bool:
    """Whether there is nothing, or a folder, and no link to one, with a file of these names, and with nothing but files
    of a save.

    The mark shows that a save has made the folder, or that ``remove`` has begun to delete it; the manifest shows a
    checkpoint.
    """
    if _is_free(folder):
        return True
    ours = folder.is_dir() and not folder.is_symlink() and all(map(_is_written_by_a_save, folder.iterdir()))
    return ours and any((folder / name).is_file() for name in names)


def _is_written_by_a_save(entry: Path) -> bool:
    """Whether this is a regular file with a name of ours."""
    return entry.is_file() and not entry.is_symlink() and belongs_to_checkpoint(entry.name)


def belongs_to_checkpoint(name: str) -> bool:
    """Whether a save writes files of this name."""
    return _OURS.fullmatch(name) is not None


def remove(path: Path) -> None:
    """Delete a complete checkpoint, or what an earlier call has left. Whenever the process dies, ``path`` is a complete
    checkpoint, or marked and without a manifest, or empty.

    Raises ``FileExistsError`` where ``path`` is a link or holds anything else than a checkpoint.
    """
    if not os.path.lexists(path):
        return
    if not _is_only(path, MARK_FILE, MANIFEST_FILE):
        raise FileExistsError(f"'{path}' is not just a checkpoint: delete it by hand")
    (path / MARK_FILE).touch()
    _sync_folder(path)
    _remove(path)


def is_left_to_delete(path: Path) -> bool:
    """Whether a ``remove`` that did not end has left this folder. An empty one may be somebody's own."""
    return not path.is_symlink() and (path / MARK_FILE).is_file() and not is_complete(path)


def is_being_deleted(path: Path) -> bool:
    """Whether this is no checkpoint any more: what a ``remove`` that did not end has left, or an empty folder."""
    return is_left_to_delete(path) or _is_free(path)


def _empty(folder: Path) -> None:
    """Delete the files of a save but the mark. The manifest goes first: from then on the folder is not complete."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name != MANIFEST_FILE):
        if entry.name != MARK_FILE and _is_written_by_a_save(entry):
            entry.unlink()


def _remove(folder: Path) -> None:
    """Delete the folder; the mark goes last. A folder stays that holds something else by now, and so does a link."""
    if folder.exists() and not folder.is_symlink():
        _empty(folder)
        (folder / MARK_FILE).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _sync_folder(folder: Path) -> None:
    """Write the folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
