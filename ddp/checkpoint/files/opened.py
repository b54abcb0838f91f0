"""Opens a checkpoint for a load: all data files that the load needs, before anything changes; then reads them.

Each rank reads by itself. Files stay open until they are read, so that a save that replaces the checkpoint meanwhile
changes nothing for this load.
"""

import os
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..source import CheckpointRanks
from .boxes import Box, Parts
from .folder import describe_missing, find
from .manifest import MANIFEST_FILE, Manifest
from .rank_file import Entry, RankFile, check_size, file_name

__all__ = ["open_checkpoint"]

_MOST_TRIES = 20
"""How often a checkpoint is opened that saves replace meanwhile."""


class OpenedCheckpoint(NamedTuple):
    """A checkpoint whose files are as the manifest says, as far as they are wanted."""

    manifest: Manifest
    entries: Sequence[Entry]

    def read(self) -> None:
        """Fill the memory of the parts, on any device.

        Raises ``ValueError``, naming the tensor, for a file whose bytes are not those that were written.
        """
        for entry in self.entries:
            entry.read()


def open_checkpoint(
    path: Path, prepare: Callable[[], Callable[[Manifest], Parts]], ranks: CheckpointRanks | None = None
) -> OpenedCheckpoint:
    """Open the checkpoint at ``path`` to read what ``prepare()`` makes of its manifest.

    prepare  may be collective: all ranks call it before they look at files
    ranks    all of them open the same checkpoint, or raise alike: collective. None: this process alone

    Raises ``FileNotFoundError``, and ``ValueError`` for a folder that is no complete checkpoint. Where a save replaces
    the checkpoint meanwhile, the new one is opened.
    """

    def attempt() -> OpenedCheckpoint | None:
        choose, seen = prepare(), _look(path)
        try:
            opened = _open(seen[0], choose)
        except (ValueError, OSError):
            if _look(path) == seen:
                raise
            return None
        # Where saves have replaced the checkpoint twice, the folder beside ``path`` is ahead of what is there.
        return opened if find(path) == seen[0] else None

    for _ in range(_MOST_TRIES):
        opened, ids = (ranks or CheckpointRanks()).run_and_gather(
            attempt, lambda opened: opened and opened.manifest.save_id, f"the opening of checkpoint '{path}'"
        )
        if opened and len(set(ids)) == 1:
            return opened
    raise ValueError(f"'{path}' was replaced {_MOST_TRIES} times while it was opened: load it when nothing saves there")


def _look(path: Path) -> tuple[Path, object]:
    """The folder to read for ``path``, and what differs between the manifests of two saves; None: no manifest."""
    folder = find(path)
    with suppress(OSError):
        found = os.stat(folder / MANIFEST_FILE)
        return folder, (found.st_ino, found.st_mtime_ns)
    return folder, None


def _open(folder: Path, choose: Callable[[Manifest], Parts]) -> OpenedCheckpoint:
    if not folder.exists():
        raise FileNotFoundError(describe_missing(folder))
    if not folder.is_dir():
        raise ValueError(f"'{folder}' is a file, and a checkpoint is a folder")
    manifest = Manifest.read(folder)
    # No memory is allocated for tensors that cannot be there.
    sizes = manifest.nbytes
    for rank, nbytes in sizes.items():
        check_size(folder / file_name(rank), nbytes)
    wanted_files = 2 * len(sizes)  # 1024 are usual, and each rank has written a file
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted_files:
        with suppress(ValueError, OSError):  # the process may have no more
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted_files, hard))
    file_of = cache(lambda rank: RankFile(folder / file_name(rank), manifest.save_id))
    entries: dict[tuple[str, str, Box], Entry] = {}
    for part, wanted in choose(manifest).items():
        saved = manifest.tensors[part.name]
        for rank, box in saved.boxes:
            both = box.intersect(part.box)
            if both is None:
                continue
            for section, data in wanted.items():
                found = file_of(rank).find(part, section, box, saved.dtypes[section])
                entry = entries.setdefault((part.name, section, box), found)
                entry.wanted.append((both, part.box.view_of(both, data)))
    return OpenedCheckpoint(manifest, sorted(entries.values(), key=lambda entry: (entry.file.path, entry.position)))
