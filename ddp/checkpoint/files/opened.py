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
from .rank_file import RankFile, size_of

__all__ = ["OpenedCheckpoint", "open_checkpoint"]


class _Copy(NamedTuple):
    """A stored box, and where its elements go."""

    file: RankFile
    key: str
    shape: tuple[int, ...]
    box: Box
    stored: Tensor
    """The elements of ``box``."""
    targets: list[tuple[Tensor, Tensor]]
    """(memory to fill, view of ``stored``)."""


class OpenedCheckpoint(NamedTuple):
    """A checkpoint whose files are as the manifest says, as far as they are wanted."""

    manifest: Manifest
    copies: Sequence[_Copy]

    def read(self) -> None:
        """Fill the memory of the parts, on any device; values are rounded to its dtype.

        Raises ``ValueError``, naming the tensor, for a file whose bytes are not those that were written.
        """
        for copy in self.copies:
            copy.file.check(copy.key, copy.shape, copy.box, copy.stored)
            for target, source in copy.targets:
                target.copy_(source)


def open_checkpoint(path: Path, choose: Callable[[Manifest], Sequence[Part]]) -> OpenedCheckpoint:
    """Open the checkpoint at ``path`` to read what ``choose`` makes of its manifest. Needs no process group.

    Raises ``FileNotFoundError``, and ``ValueError`` for a folder that is no complete checkpoint. Where a save replaces
    the checkpoint meanwhile, the new one is opened.
    """
    for last in (False, True):
        folder = find(path)
        found = _identity(folder)
        try:
            return _open(folder, choose)
        except (ValueError, OSError) as error:
            if _identity(find(path)) == found:
                raise
            if last:
                raise ValueError(
                    f"'{path}' was replaced by another save while it was opened, and once more when it was opened "
                    f"again: load it when nothing saves there ({error})"
                ) from error
    raise AssertionError("the last time returns or raises")


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
    kinds, files = manifest.kinds, dict[str, RankFile]()
    _check_sizes(folder, manifest)
    copies: dict[tuple[str, Box], _Copy] = {}
    for part in choose(manifest):
        wanted, (shape, dtype) = part.box, kinds[part.key]
        for name, box in manifest.tensors[part.key]:
            both = box.intersect(wanted)
            if both is None:
                continue
            if (part.key, box) not in copies:
                file = files[name] = files.get(name) or RankFile(folder / name, manifest.save_id)
                stored = file.elements(part.key, shape, box, dtype)
                copies[part.key, box] = _Copy(file, part.key, shape, box, stored, [])
            copy = copies[part.key, box]
            copy.targets.append((wanted.view_of(both, part.data), box.view_of(both, copy.stored)))
    return OpenedCheckpoint(manifest, list(copies.values()))


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise ``ValueError`` for a file that is missing, or has fewer bytes than its tensors: no memory is allocated for
    tensors that cannot be there."""
    kinds, claimed = manifest.kinds, dict.fromkeys(manifest.files, 0)
    for key, boxes in manifest.tensors.items():
        for name, box in boxes:
            claimed[name] += box.numel * kinds[key][1].itemsize
    for name, nbytes in claimed.items():
        size = size_of(folder / name)
        if size < nbytes:
            raise ValueError(f"the data file '{folder / name}' is truncated: {size} bytes, for tensors of {nbytes}")
