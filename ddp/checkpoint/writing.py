"""What one rank does of a save once it knows what it writes, perhaps in a thread: it calls no collective.

The first rank completes the checkpoint when the data files of all ranks are in the folder. A data file gets its name
when it is whole, so that the first rank need not be told: collectives of a thread would be mixed up with those of
training.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .files.boxes import Parts
from .files.folder import Staging
from .files.manifest import Manifest, write_manifest
from .files.rank_file import RankFile, file_name, write_rank_file

__all__ = ["Writing", "page_locked"]

_PATIENCE = 0.02
"""Seconds between two looks into the folder."""


class Writing:
    """The rest of a save on one rank.

    rank      of the group that writes
    parts     what this rank writes
    manifest  on the first rank
    """

    def __init__(self, staging: Staging, save_id: str, rank: int, parts: Parts, manifest: Manifest | None) -> None:
        self.staging = staging
        self.rank = rank
        self._id, self._parts, self._manifest = save_id, parts, manifest
        self._encoded = "" if manifest is None else manifest.encoded()

    def copy_to_host(self) -> None:
        """Copy what this rank writes to host memory: afterwards the model may change. The host waits for the device
        once, after all copies have been queued."""
        devices = {data.device for each in self._parts.values() for data in each.values() if not data.is_cpu}
        self._parts = {
            part: {section: _host_copy(each[section].detach(), dtype) for section, dtype in part.dtypes}
            for part, each in self._parts.items()
        }
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()

    def write(self) -> None:
        """Write this rank's data file, if it has one."""
        parts, self._parts = self._parts, {}  # also after an error no memory is held
        if parts:
            write_rank_file(self.staging.folder / file_name(self.rank), self._id, parts)

    def complete(self, waits: Callable[[], bool]) -> None:
        """On the first rank: write the manifest, and give the checkpoint its place.

        waits  asked while a rank has not written: whether to go on waiting

        Raises ``ValueError`` for a data file that is missing, or of another job that writes here.
        """
        if self._manifest is None:
            return
        folder = self.staging.folder
        for rank, nbytes in self._manifest.nbytes.items():
            path = folder / file_name(rank)
            while not path.exists() and waits():
                time.sleep(_PATIENCE)
            RankFile(path, self._id, nbytes)
        write_manifest(folder, self._encoded)
        self.staging.complete()


def page_locked(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Host memory that a device copies to by itself. Torch keeps it for the next tensor of its size."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _host_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_cpu:
        plain = tensor.resolve_conj().resolve_neg()
        return plain.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return page_locked(tensor.shape, dtype).copy_(tensor.to(dtype), non_blocking=True)
