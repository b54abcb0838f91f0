"""The end of a save: all ranks write, then the first rank completes the checkpoint.

A save in the foreground does so in the program's own thread: an exception there, such as Ctrl-C, ends the save, and
nothing reads the model afterwards. For ``save_checkpoint(..., background=True)``, the call copies what this rank writes
to host memory, and a thread on each rank does the rest while training goes on.

The thread calls no collective: these would be mixed up with those of training. A data file gets its name when it is
whole, so that the first rank need not be told when the others have written.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress

import torch
from torch import Tensor, nn

from ..collectives.failure_report import CollectiveError
from .files.boxes import Parts
from .files.folder import Staging
from .files.manifest import Manifest, write_manifest
from .files.rank_file import RankFile, check_size, file_name, write_rank_file
from .source import CheckpointRanks

__all__ = ["PendingSave", "finish_pending", "reserve_memory"]

_GRACE = 30.0
"""Seconds for which the first rank waits for the others' files, after its program has ended or given the save up."""

_DELAY = 5.0
"""Seconds that a file system may take to show the first rank a file that another rank has written."""

_PATIENCE = 0.02
"""Seconds between two looks into the folder."""

_under_way: "weakref.WeakKeyDictionary[nn.Module, Callable[[], None]]" = weakref.WeakKeyDictionary()
"""Waits for the last thread of each model: of a save in the background, or of ``reserve_memory``. Alike on all ranks:
saves and waits are collective."""
os.register_at_fork(after_in_child=_under_way.clear)  # the threads are the parent's
# Torch's first look for NumPy holds a lock. If a save's thread took it, a process forked meanwhile would wait for ever.
torch.empty(0, device="cpu").numpy()


class PendingSave:
    """A checkpoint that is written, or is being written by a thread.

    parts     what this rank writes
    manifest  on the first rank

    The checkpoint is at its path when all ranks have written; whenever a process dies before, the previous one is. The
    copies in host memory are freed when this rank has written.
    """

    def __init__(
        self, staging: Staging, ranks: CheckpointRanks, save_id: str, parts: Parts, manifest: Manifest | None
    ) -> None:
        self.path = staging.path
        self._staging, self._ranks, self._id, self._parts = staging, ranks, save_id, parts
        self._manifest = manifest
        self._encoded = "" if manifest is None else manifest.encoded()
        self._ends: list[Future[None]] = []
        """In the background, the ends of the thread's two steps: the writing of this rank's file, and the completion.
        """
        self._error: Exception | None = None
        """What ``wait`` raises."""
        self.is_over = True
        """Whether this rank knows the end of the save."""
        self._until = self._appears_by = float("inf")
        self._program = threading.current_thread()

    def copy_to_host(self) -> None:
        """Copy what this rank writes to host memory: afterwards the model may change. The host waits for the device
        once, after all copies have been queued."""
        devices = set()
        for each, section, memory in _host_memory(self._parts):
            devices.add(each[section].device)
            each[section] = memory.copy_(each[section].to(memory.dtype), non_blocking=True)
        for device in devices - {torch.device("cpu")}:
            torch.accelerator.current_stream(device).synchronize()

    def start(self, model: nn.Module) -> None:
        """Write and complete in a thread, which then leaves the folder. Other saves of the model wait for it."""
        self.is_over, self._ends = False, [Future(), Future()]
        _under_way[model] = lambda: None if self.is_over else self.wait()  # else the program knows the error
        # No daemon: a program that ends without waiting still completes its checkpoint.
        threading.Thread(target=self._run, name=f"save of {self.path.name}", daemon=False).start()

    def done(self) -> bool:
        """Whether this rank has nothing left to do. On the first rank: whether the checkpoint is complete, or has
        failed. Waits for nobody."""
        return all(end.done() for end in self._ends)

    def failed(self) -> bool:
        """Whether this rank could not write; ``wait`` raises the error. Waits for nobody."""
        return any(end.done() and end.exception() for end in self._ends)

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Collective over the model's ranks.

        Raises, on all ranks, the error of the rank that could not write: then the previous checkpoint stays. A second
        call returns or raises the same at once.
        """
        if not self.is_over:
            try:
                self.finish()
            except Exception as error:
                self._error = error
                self.give_up(after=0.0)
            for end in self._ends:
                end.exception()  # waits for the step
            self.is_over = True
        if self._error:
            raise self._error

    def give_up(self, *, after: float = _GRACE) -> None:
        """Complete the checkpoint only if all ranks have written within ``after`` seconds. Waits for nobody.

        For programs that end by an error and cannot call ``wait`` together with the other ranks.
        """
        self._until = min(self._until, time.monotonic() + after)

    def finish(self) -> None:
        """Write and complete: in this thread, or in the background by waiting for the thread's steps.

        Collective; raises on all ranks alike.
        """
        write, complete = [end.result for end in self._ends] or (self._write, self._complete)
        self._ranks.run_on_all_ranks(write, f"the writing of checkpoint '{self.path}'")
        self._appears_by = time.monotonic() + _DELAY
        self._ranks.run_on_all_ranks(complete, f"the completion of checkpoint '{self.path}'")

    def _write(self) -> None:
        parts, self._parts = self._parts, {}  # also after an error no memory is held
        if parts:
            write_rank_file(self._staging.folder / file_name(self._ranks.place), self._id, parts)

    def _complete(self) -> None:
        """On the first rank: write the manifest, and give the checkpoint its place.

        Raises ``ValueError`` for a data file that is missing, or of another job that writes here.
        """
        if self._manifest is None:
            return
        with self._staging:
            folder = self._staging.folder
            for rank, nbytes in self._manifest.nbytes.items():
                path = folder / file_name(rank)
                while not path.exists() and self._waits():
                    time.sleep(_PATIENCE)
                check_size(path, nbytes)
                RankFile(path, self._id)
            write_manifest(folder, self._encoded)
            self._staging.complete()

    @torch.no_grad()
    def _run(self) -> None:
        for end, step in zip(self._ends, (self._write, self._complete), strict=True):
            try:
                end.set_result(step())
            except BaseException as error:
                end.set_exception(error)

    def _waits(self) -> bool:
        """Whether the first rank goes on waiting for files. Raises where the save is given up."""
        if not self._program.is_alive():
            self.give_up()
        if time.monotonic() > self._until:
            # After another error than this no rank is writing any more, and ``Staging`` can delete the files.
            kind = CollectiveError if isinstance(self._error, CollectiveError | None) else RuntimeError
            raise kind(f"the save to '{self.path}' was given up: not all ranks have written")
        return time.monotonic() < self._appears_by


def finish_pending(model: nn.Module) -> None:
    """Wait for the model's thread: of ``reserve_memory``, or of a save that the program has not waited for. Raises the
    save's error."""
    wait = _under_way.get(model)  # not removed before its end: Ctrl-C may end the waiting, but not the save
    if wait:
        wait()


def reserve_memory(model: nn.Module, parts: Parts) -> None:
    """Start a thread that takes the host memory for copies of ``parts``, and leaves it to torch's cache."""

    def take_and_free() -> None:
        with suppress(RuntimeError):  # no memory: the save itself says so
            list(_host_memory(parts))

    thread = threading.Thread(target=take_and_free, name="memory of saves")
    _under_way[model] = thread.join
    thread.start()


def _host_memory(parts: Parts) -> Iterator[tuple[dict[str, Tensor], str, Tensor]]:
    """Memory for copies: for each tensor of ``parts`` the part's tensors, its section there, and the memory.

    A device copies to page-locked memory by itself. Torch keeps the memory for the next save.
    """
    for part, each in parts.items():
        for section, dtype in part.dtypes:
            memory = torch.empty(part.box.sizes, dtype=dtype, device="cpu", pin_memory=not each[section].is_cpu)
            yield each, section, memory
