"""Opens a checkpoint for a load: all data files that the load needs, before anything changes; then reads them.

Each rank reads by itself. Opened files are mapped into memory, so that a save that replaces the checkpoint meanwhile
changes nothing for this load.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from .boxes import Box, Part
from .folder import describe_missing, find
from .manifest import MANIFEST_FILE, Manifest
from .rank_file import RankFile, file_name, size_of

__all__ = ["MOST_TRIES", "OpenedCheckpoint", "open_checkpoint"]

MOST_TRIES = 20
"""How often a checkpoint is opened that saves replace meanwhile."""


class _Copy(NamedTuple):
    """A stored box, and where its elements go."""

    file: RankFile
    box: Box
    elements: Tensor
    """The elements of ``box``."""
    parts: list[Part]
    """Those that want some of them."""


class OpenedCheckpoint(NamedTuple):
    """A checkpoint whose files are as the manifest says, as far as they are wanted."""

    manifest: Manifest
    copies: Sequence[_Copy]

    def read(self) -> None:
        """Fill the memory of the parts, on any device.

        Raises ``ValueError``, naming the tensor, for a file whose bytes are not those that were written.
        """
        for copy in self.copies:
            copy.file.read(copy.box, copy.elements, copy.parts)


def open_checkpoint(path: Path, choose: Callable[[Manifest], Sequence[Part]]) -> OpenedCheckpoint:
    """Open the checkpoint at ``path`` to read what ``choose`` makes of its manifest. Needs no process group.

    Raises ``FileNotFoundError``, and ``ValueError`` for a folder that is no complete checkpoint. Where a save replaces
    the checkpoint meanwhile, the new one is opened.
    """
    found = None
    caught: Exception = ValueError(f"'{path}' was replaced {MOST_TRIES} times while it was opened")
    for _ in range(MOST_TRIES):
        try:
            folder = find(path)
            found = _identity(folder)
            opened = _open(folder, choose)
            if find(path) == folder:
                return opened
            # Saves have replaced the checkpoint twice, and the folder beside ``path`` is ahead of what is there.
        except (ValueError, OSError) as error:
            caught = error
            if found is not None and _identity(folder) == found:
                break
    raise caught


def _identity(folder: Path) -> tuple[int, ...] | None:
    """Differs between the manifests of two saves."""
    try:
        found = os.stat(folder / MANIFEST_FILE)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _open(folder: Path, choose: Callable[[Manifest], Sequence[Part]]) -> OpenedCheckpoint:
    if not folder.exists():
        raise FileNotFoundError(describe_missing(folder))
    if not folder.is_dir():
        raise ValueError(f"'{folder}' is a file, and a checkpoint is a folder")
    manifest = Manifest.read(folder)
    # No memory is allocated for tensors that cannot be there.
    for rank, nbytes in manifest.nbytes.items():
        path = folder / file_name(rank)
        size = size_of(path)
        if size < nbytes:
            raise ValueError(f"the data file '{path}' is truncated: {size} bytes, for tensors of {nbytes}")
    files: dict[int, RankFile] = {}
    copies: dict[tuple[str, str, Box], _Copy] = {}
    for part in choose(manifest):
        entry = manifest.tensors[part.name]
        for each in entry.boxes(part.section):
            if each.box.intersect(part.box) is None:
                continue
            key = part.name, part.section, each.box
            if key not in copies:
                if each.rank not in files:
                    files[each.rank] = RankFile(folder / file_name(each.rank), manifest.save_id)
                file = files[each.rank]
                copies[key] = _Copy(file, each.box, file.elements(part, each.box, entry.stored[part.section].dtype), [])
            copies[key].parts.append(part)
    return OpenedCheckpoint(manifest, list(copies.values()))
