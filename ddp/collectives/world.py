"""``WORLD_OF_ONE``, the ranks that are meant where the user names none, and this process as a launcher started it."""

import os
from typing import Any, NamedTuple, TypeAlias, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "WORLD_OF_ONE",
    "Process",
    "Ranks",
    "WorldOfOne",
    "check_not_launched",
    "init_process_group",
    "own_rank",
    "world_size",
]


@final
class WorldOfOne:
    """The class of ``WORLD_OF_ONE``."""

    def __new__(cls) -> "WorldOfOne":
        return WORLD_OF_ONE

    def __reduce__(self) -> str:
        return "WORLD_OF_ONE"

    def __repr__(self) -> str:
        return "maingrad.ddp.WORLD_OF_ONE"


WORLD_OF_ONE: WorldOfOne = object.__new__(WorldOfOne)
"""This process alone, whatever other ranks there are. Accepted wherever a process group or a mesh is."""

Ranks: TypeAlias = dist.ProcessGroup | DeviceMesh | WorldOfOne | None
"""Ranks as a user names them. None: the default group; without one, and without a launcher, a world of one."""


class Process(NamedTuple):
    """This process among those of a job: its device, its rank and the number of ranks in the default group."""

    device: torch.device
    rank: int
    world_size: int


def init_process_group() -> Process:
    """Make the default process group of a program that torchrun started, and choose this process's device.

    With CUDA: NCCL, and the GPU with the number ``LOCAL_RANK``, which becomes the current device. Else gloo, and the
    CPU. A default group that exists already stays, and its backend decides on the device. Without a launcher (neither
    ``RANK`` nor ``WORLD_SIZE`` in the environment) the group has this process alone.
    ``torch.distributed.destroy_process_group`` ends the group.

    Raises ``RuntimeError`` where this machine has fewer GPUs than ``LOCAL_RANK`` asks for.
    """
    made = dist.is_initialized()
    if "nccl" in str(dist.get_backend()) if made else torch.cuda.is_available():
        index, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if index >= found:
            raise RuntimeError(f"LOCAL_RANK={index}, and this process sees {found} GPU(s): start one process for each")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if not made:
        alone: dict[str, Any] = {}
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device, **alone)
        else:
            dist.init_process_group("gloo", **alone)
    return Process(device, dist.get_rank(), dist.get_world_size())


def check_not_launched(option: str) -> None:
    """Without a process group: raise ``ValueError`` where a launcher has started several ranks.

    option  name of the argument that names ranks
    """
    num_ranks = _launched()
    if num_ranks > 1:
        raise ValueError(
            f"there is no process group, and the environment says WORLD_SIZE={num_ranks}: each of these ranks would "
            f"train by itself; call torch.distributed.init_process_group() before wrapping. Where this process is to "
            f"train alone, say {option}={WORLD_OF_ONE!r}, or unset WORLD_SIZE"
        )


def own_rank() -> int:
    """This process's rank in the default group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks in the default group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _launched() -> int:
    """Number of ranks that torchrun or another launcher has started, by ``WORLD_SIZE``; 1 where it is not set."""
    said: Any = os.environ.get("WORLD_SIZE", "1")
    try:
        return int(said)
    except ValueError:
        return 1
