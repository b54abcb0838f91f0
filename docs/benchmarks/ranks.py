"""Ranks that measure one row after another, agree on each row's outcome, and go on after a failure.

Each measurement gets process groups of its own. A rank that fails reports the failure in a store that belongs to no
group. The other ranks, which may wait for the failed rank inside a collective, see the report, abort their groups and
fail as well.
"""

import gc
import os
import pickle
import threading
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

_POLL_SECONDS = 0.25
_GRACE_SECONDS = 1.0
"""Time before a rank is aborted: mostly all ranks fail for one reason, and each should report its own error."""


class AnyRankFailed(RuntimeError):
    """A rank failed; the message names the first rank that failed and its error.

    details  the end of the failed rank's traceback
    """

    def __init__(self, message, details):
        super().__init__(message)
        self.details = details


class Ranks:
    """This process and the other ranks that torchrun started; one rank alone without torchrun.

    timeout  seconds after which a wait for a collective or for another rank's answer fails
    """

    def __init__(self, store, rank, size, device, timeout=120.0):
        self.rank, self.size, self.device = rank, size, device
        self.timeout = timedelta(seconds=timeout)
        self._store = store
        self._num_exchanges = 0
        self._num_groups = 0

    @classmethod
    def from_env(cls, timeout=120.0):
        """Ranks from torchrun's variables: NCCL and ``LOCAL_RANK``'s GPU if torch sees GPUs, else gloo and the CPU."""
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if "RANK" not in os.environ:
            return cls.alone(device)
        store, rank, size = next(iter(rendezvous("env://")))
        return cls(store, rank, size, device, timeout)

    @classmethod
    def alone(cls, device):
        """A world of one rank, which is this process."""
        return cls(dist.HashStore(), 0, 1, device)  # type: ignore[attr-defined]

    def exchange(self, value):
        """Every rank's ``value``, by rank. All ranks must call this in the same order; a call waits for all ranks."""
        number, self._num_exchanges = self._num_exchanges, self._num_exchanges + 1
        keys = [f"exchange {number} of rank {rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps(value).hex())
        # Polled: a blocking wait would hold the store's lock until it ends.
        deadline = time.monotonic() + 2 * self.timeout.total_seconds()
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank}: another rank gave no answer within {2 * self.timeout}")
            time.sleep(0.005)
        return [pickle.loads(bytes.fromhex(self._store.get(key).decode())) for key in keys]

    @contextmanager
    def attempt(self, *, with_groups):
        """Run the block on all ranks together, in a default process group of its own if ``with_groups``.

        Raises ``AnyRankFailed`` on every rank, with the first failure's text, if the block raised on any rank. The
        block's process groups are destroyed in either case. ``KeyboardInterrupt`` and the like pass at once.
        """
        number, self._num_groups = self._num_groups, self._num_groups + 1
        failure = None
        details, failed_at = "", 0.0
        try:
            with _Watch(self._store, f"failure {number}") as watch:
                try:
                    if with_groups:
                        self._join(number)
                    yield
                    if self.device.type == "cuda":
                        torch.cuda.synchronize(self.device)
                except Exception as error:
                    failure = f"{type(error).__name__}: {error}"
                    failed_at = time.time()
                    details = traceback.format_exc(limit=-4)
                    watch.report()
        finally:
            _destroy()
        # Ranks that were aborted sort last: their failures are consequences, whenever they happened.
        told = self.exchange((watch.has_aborted, failed_at, self.rank, failure, details))
        failures = sorted(each for each in told if each[3] is not None)
        if failures:
            _, _, rank, text, details = failures[0]
            raise AnyRankFailed(text if self.size == 1 else f"rank {rank}: {text}", details)

    def _join(self, number):
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=c10d.PrefixStore(f"group {number}", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
            device_id=self.device if self.device.type == "cuda" else None,
        )


def make_mesh(device, dims):
    """A mesh over all ranks of the default group. Collective.

    dims  sizes by name, the outermost dim first

    Each dim gets groups of its own. ``init_device_mesh`` would split the default group's communicator, and torch 2.11
    then kills the process unless the default group is the process's first NCCL group (pytorch/pytorch#192109).
    """
    ranks = torch.arange(dist.get_world_size()).view(*dims.values())
    groups = []
    for index in range(ranks.ndim):
        for members in ranks.movedim(index, -1).reshape(-1, ranks.shape[index]).tolist():
            group = dist.group.WORLD if len(members) == ranks.numel() else dist.new_group(members)
            if dist.get_rank() in members:
                assert isinstance(group, dist.ProcessGroup), "this rank is a member"
                groups.append(group)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=tuple(dims))


class _Watch:
    """Aborts this process's groups once, after a rank has failed.

    If another rank has failed, a thread of the watch aborts, because the main thread may be stuck in a collective.
    """

    def __init__(self, store, key):
        self.has_aborted = False
        self._store = store
        # A connection of its own: the main thread's connection may be blocked.
        self._eyes = store.clone()
        self._key = key
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="failure watch", daemon=True)

    def report(self):
        """Report to the other ranks that this rank failed, and abort its groups unless the watch has done so."""
        self._store.set(self._key, "failed")
        self._stop()
        if not self.has_aborted:
            _abort()

    def _look(self):
        while not self._over.wait(_POLL_SECONDS):
            if self._eyes.check([self._key]):
                if not self._over.wait(_GRACE_SECONDS):
                    self.has_aborted = True
                    _abort()
                return

    def _stop(self):
        self._over.set()
        self._thread.join()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop()


def _abort():
    if dist.is_initialized():
        c10d._abort_process_group()


def _destroy():
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # gloo's threads end with the last reference to the group
