"""Ranks on CPUs that choose copy engines as GPUs of one host do, which reach each other's memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from maingrad.ddp.buckets import copy_engines

__all__ = ["everywhere"]


def everywhere(monkeypatch: pytest.MonkeyPatch, **replaced: Callable[..., Any]) -> None:
    """Ranks on CPUs stand for GPUs of one host that reach each other; ``replaced`` functions say otherwise."""
    names = [f"gpu {rank}" for rank in range(8)]
    told = {
        "_exist": lambda *_: True,
        "_fits_process": lambda *_: True,
        "_peers": lambda _: copy_engines._Peers(names[dist.get_rank()], frozenset(names)),
        **replaced,
    }
    for name, function in told.items():
        monkeypatch.setattr(copy_engines, name, function)
