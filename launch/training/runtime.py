"""The process of a run: rank and device from torchrun's environment, and versions of the software."""

import gc
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ... import __version__
from ...ddp.collectives.rank_grid import make_grid
from ..config.error import ConfigError
from ..config.mesh import Stage
from ..config.run import MeshConfig
from ..parallelizing.exchanges import ALONE, ContextRanks
from ..parallelizing.experts import mesh_of

__all__ = [
    "Runtime",
    "current_runtime",
    "let_kernels_start_beside_host_memory",
    "process_group_from_env",
    "versions",
]


class Runtime(NamedTuple):
    """Rank, world size and device of this process. Without ``torch.distributed``: rank 0 of 1."""

    rank: int
    world_size: int
    device: torch.device
    mesh: MeshConfig = MeshConfig()
    context: ContextRanks = ALONE
    """The ranks with other parts of this one's sequences, if there are any."""
    tensor_group: dist.ProcessGroup | None = None
    """The ranks with the same tokens, and other parts of the weights, if there are any."""
    loss_group: dist.ProcessGroup | None = None
    """The ranks whose losses are averaged: those of all samples and parts of sequences. None: all ranks."""
    pipeline_group: dist.ProcessGroup | None = None
    """The ranks with the other stages of the pipeline, if there are any."""
    embedding_group: dist.ProcessGroup | None = None
    """The pipeline's first and last rank, on both."""
    expert_mesh: DeviceMesh | None = None
    """The ranks that hold all experts together, if each has a part."""

    @property
    def loss_rank(self) -> int:
        """The part of the batch that this rank has: equal on tensor-parallel ranks."""
        return self.rank // self.mesh.tp % self.loss_ranks

    @property
    def loss_ranks(self) -> int:
        """Number of parts that the batch has."""
        return self.world_size // self.mesh.tp // self.mesh.pp

    @property
    def data_rank(self) -> int:
        """The sequences that this rank has, or has a part of."""
        return self.loss_rank // self.mesh.cp

    @property
    def data_ranks(self) -> int:
        """Number of ranks with other sequences."""
        return self.loss_ranks // self.mesh.cp

    @property
    def stage(self) -> Stage:
        """What this rank has of the model."""
        return Stage(self.rank * self.mesh.pp // self.world_size, self.mesh.pp)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def backend(self) -> str:
        """Backend of the default group, ``"none"`` without one."""
        return str(dist.get_backend()) if _initialized() else "none"

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over all ranks in fp64, equal on all ranks."""
        if not _initialized():
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]


def let_kernels_start_beside_host_memory() -> None:
    """Before the process's first use of CUDA: take page-locked memory in a way that lets kernels start meanwhile.

    CUDA's own way stops a GPU for 0.6 seconds for each GB; background saves take much. A setting of the user's stays.
    """
    if torch.version.cuda is not None and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "pinned_use_cuda_host_register:True,pinned_num_register_threads:8")


@contextmanager
def process_group_from_env(device: Literal["auto", "cpu", "cuda"]) -> Iterator[None]:
    """Create the default process group for this context, if a launcher set ``RANK`` and ``WORLD_SIZE``.

    NCCL on CUDA, gloo on CPU. Does nothing without these variables, or if a default group exists.
    """
    if _initialized() or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield
        return
    chosen = _choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        dist.init_process_group("nccl", device_id=chosen)
    else:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        # NCCL waits here for ever while a CUDA graph is alive that has captured its collectives.
        gc.collect()
        dist.destroy_process_group()
        # gloo's threads end with the last reference to the group. One that still frees a collective's tensor while
        # Python exits ends the process with SIGABRT (seen in 1 of 25 short runs).
        gc.collect()


def current_runtime(device: Literal["auto", "cpu", "cuda"], mesh: MeshConfig) -> Runtime:
    """Rank, world size, device and mesh of the calling process or simulated rank. Collective with a mesh.

    Raises ``ConfigError`` if the ranks are no such mesh.
    """
    rank, ranks = 0, 1
    if _initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        # gloo ranks, simulated ones among them, train on the CPU.
        device = device if "nccl" in str(dist.get_backend()) else "cpu"
    runtime = Runtime(rank, ranks, _choose_device(device), mesh)
    sizes = mesh.pp, mesh.data_ranks(ranks), mesh.cp, mesh.tp
    if mesh.ep > 1:
        runtime = runtime._replace(expert_mesh=mesh_of(mesh.ep, make_grid(None)))
    if mesh.ranks_of_sample > 1:
        made = init_device_mesh(runtime.device.type, sizes, mesh_dim_names=("pp", "dp", "cp", "tp"))
        if mesh.cp > 1:
            runtime = runtime._replace(context=ContextRanks(made["cp"].get_group(), mesh.cp_attention == "ring"))
        if mesh.tp > 1:
            runtime = runtime._replace(tensor_group=made["tp"].get_group())
        if mesh.tp * mesh.pp > 1:
            runtime = runtime._replace(loss_group=made["dp", "cp"]._flatten().get_group())
        if mesh.pp > 1:
            last = ranks - ranks // mesh.pp
            ends = [[first, first + last] for first in range(ranks - last)]
            both: Any = dist.new_subgroups_by_enumeration(ends)[0]
            runtime = runtime._replace(pipeline_group=made["pp"].get_group(), embedding_group=both)
    return runtime


def versions() -> dict[str, str]:
    """Versions of the software that results depend on, and a description of the machine."""
    found = {"maingrad": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["platform"] = platform.platform()
    found["executable"] = sys.executable
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _choose_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('train.device = "cuda": torch sees no CUDA device here; use "auto" or "cpu"')
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def peak_nbytes(device: torch.device) -> int | None:
    """Peak of allocated device memory in bytes, and all that CUDA graphs keep; None on the CPU.

    Replays allocate nothing: memory that is free in a graph's pool between two captures is the graph's all the same.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    kept: int = sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0) and segment["device"] == index
    )
    allocated: int = torch.cuda.max_memory_allocated(device)
    return allocated + kept
