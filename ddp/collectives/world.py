"""Which ranks there are where the user names none, and how to ask for this one alone."""

import os
from typing import Any, TypeAlias, final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["WORLD_OF_ONE", "Ranks", "WorldOfOne", "check_no_late_group", "check_not_launched", "own_rank"]


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
"""This process alone, whatever ranks there are beside it: goes wherever a process group or a mesh does."""

Ranks: TypeAlias = dist.ProcessGroup | DeviceMesh | WorldOfOne | None
"""Ranks as a user names them. None: the default group, or a world of one where no other process was started."""


def check_not_launched(option: str) -> None:
    """Without a process group: raise ``ValueError`` where a launcher has started several ranks.

    option  what ranks are called where the user may name them
    """
    num_ranks = _launched()
    if num_ranks > 1:
        raise ValueError(
            f"there is no process group, and the environment says WORLD_SIZE={num_ranks}: each of these ranks would "
            f"train by itself; call torch.distributed.init_process_group() before wrapping. Where this process is to "
            f"train alone, say {option}={WORLD_OF_ONE!r}, or unset WORLD_SIZE"
        )


def check_no_late_group(what: str, option: str) -> None:
    """Raise ``RuntimeError`` where there is a process group of several ranks by now.

    what    was made without one, and is a world of one
    option  as above
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"{what} was made before torch.distributed.init_process_group(), as a world of one, and there are "
            f"{dist.get_world_size()} ranks now, over which nothing would be reduced; make it after "
            f"init_process_group(). Where this process is to train alone, say {option}={WORLD_OF_ONE!r}"
        )


def own_rank() -> int:
    """This process among all there are; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _launched() -> int:
    """How many ranks torchrun, or a launcher like it, has started; 1 where it does not say."""
    said: Any = os.environ.get("WORLD_SIZE", "1")
    try:
        return int(said)
    except ValueError:
        return 1
