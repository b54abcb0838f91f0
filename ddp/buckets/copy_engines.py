"""Whether gathers of parameters run on copy engines.

A GPU has engines that copy memory while all multiprocessors compute. NCCL 2.28 gathers by them if the group has the
zero-CTA policy and all ranks map the memory of the gathered parameters (``MappedPool``). Small gathers do not gain.

Memory that is mapped stays with the process until the process ends. So "auto" maps memory for one model of a process.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ..collectives.failure_report import FailureReporter, gather
from ..collectives.rank_grid import RankGrid, backends_of, with_separate_gather
from ..plan.layout import GradPlan
from ..torch_internals.distributed import backend_on, zero_cta_options
from .buffer import MappedPool

__all__ = ["CopyEngines", "Gather", "check_copy_engines", "choose_copy_engines", "with_chosen_gathers"]

CopyEngines: TypeAlias = Literal["auto", True, False]
"""Whether gathers run on copy engines; "auto": the library chooses (``choose_copy_engines``)."""

MIN_SHARD_NBYTES = 16 * 2**20
"""Bytes of one rank's shard of a bucket from which on copy engines gain. Two H200, gather and products of 4,096 tokens,
engines over kernels: buckets of 16 MiB 1.03, 32 MiB 0.89, 64 to 512 MiB 0.79 to 0.81 (docs/benchmarks/copy_engines.md).
"""
MIN_CAPABILITY = (9, 0)
"""Compute capability of the GPUs on which the gain was measured; older ones gather by kernels."""
_MIN_NCCL = (2, 28)


class Gather(NamedTuple):
    """The gathers of one bucket."""

    nbytes: int
    """Bytes of the whole bucket."""
    group: dist.ProcessGroup
    """The ranks that hold a shard each, more than one."""


def check_copy_engines(wanted: CopyEngines, backends: Collection[str], device: torch.device, option: str) -> None:
    """Raise ``ValueError`` where all-gathers cannot run on copy engines, and are asked to; and for another value.

    backends  of the groups on ``device``; none in a world of one
    option    that asks for copy engines, for the error
    """
    if not (isinstance(wanted, bool) or wanted == "auto"):
        raise ValueError(f'{option} is True, False or "auto", got {wanted!r}')
    if wanted is True and not _exist(backends, device):
        raise ValueError(
            f"{option} needs parameters on CUDA, NCCL 2.28 or newer, and a torch that knows its zero-CTA policy; got "
            f'{device} and {", ".join(sorted(backends)) or "no process group"}; leave it False, or set "auto"'
        )


def _exist(backends: Collection[str], device: torch.device) -> bool:
    """Whether this torch and these backends have gathers by copy engines; equal on all ranks."""
    on_nccl = device.type == "cuda" and all("nccl" in backend for backend in backends)
    return on_nccl and zero_cta_options() is not None and backend_on is not None


def choose_copy_engines(
    gathers: Sequence[Gather], axes: Iterable[dist.ProcessGroup], device: torch.device, failures: FailureReporter
) -> bool:
    """The choice of "auto", the same on all ranks. Collective over ``axes``, unless copy engines cannot be.

    gathers  of the model
    axes     groups that join all ranks of the model

    Copy engines are chosen if all of this holds on every rank: at least half of the bytes are in buckets whose shards
    have ``MIN_SHARD_NBYTES``; all ranks that gather together reach each other's memory, which means one host; the GPU
    has ``MIN_CAPABILITY``; NCCL is 2.28 or newer; torch does not grow segments of memory (``expandable_segments``), and
    this process has mapped no memory before.
    """
    axes = list(axes)
    if not (gathers and _exist(backends_of((each.group for each in gathers), device), device)):
        return False
    told = gather(_peers(device), axes, failures, "the peers of each GPU")
    reached = all(
        told[other].device in told[rank].reached
        for group in {id(each.group): each.group for each in gathers}.values()
        for rank in dist.get_process_group_ranks(group)
        for other in dist.get_process_group_ranks(group)
        if rank != other
    )
    chosen = reached and large_enough(gathers) and _fits_process(device)
    return all(gather(chosen, axes, failures, "the choice of copy engines").values())


def with_chosen_gathers(
    plan: GradPlan, grids: Mapping[str, RankGrid], device: torch.device, failures: FailureReporter
) -> tuple[dict[str, RankGrid], bool]:
    """The grids, with separate groups for gathers, and the choice of "auto" for the plan's parameters. Collective."""
    gathers = [
        Gather(bucket.numel * buffer.param_dtype.itemsize, inner)
        for buffer in plan.buffers
        for bucket in buffer.buckets
        if (inner := grids[buffer.grid_name].inner) is not None and inner.size() > 1
    ]
    chosen = choose_copy_engines(gathers, grids["dense"].axes, device, failures)
    with failures.watch("the making of process groups"):
        made = {id(grid): grid for grid in grids.values()}
        made = {key: with_separate_gather(grid, copy_engines=chosen) for key, grid in made.items()}
    return {name: made[id(grid)] for name, grid in grids.items()}, chosen


def large_enough(gathers: Sequence[Gather]) -> bool:
    """Whether at least half of the bytes are in buckets that copy engines gather no slower than kernels."""
    large = sum(each.nbytes for each in gathers if each.nbytes >= MIN_SHARD_NBYTES * each.group.size())
    return 0 < sum(each.nbytes for each in gathers) <= 2 * large


def _fits_process(device: torch.device) -> bool:
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return (
        MappedPool.num_made == 0
        and "expandable_segments:True" not in settings
        and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
        and torch.cuda.nccl.version() >= _MIN_NCCL
    )


class _Peers(NamedTuple):
    """A rank's GPU, and the GPUs whose memory it reaches, among those that the process sees."""

    device: str
    reached: frozenset[str]


def _peers(device: torch.device) -> _Peers:
    own = torch.cuda.current_device() if device.index is None else device.index
    names = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    others = (index for index in range(len(names)) if index != own)
    return _Peers(names[own], frozenset(names[each] for each in others if torch.cuda.can_device_access_peer(own, each)))
