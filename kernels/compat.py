"""Differences between the supported versions of torch (2.11 and newer), and nothing else."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]


def _either(new: str, old: str) -> Callable[..., Any]:
    """The function under its new name, or under the old one where torch does not have the new name yet."""
    return getattr(dist, new, None) or getattr(dist, old)  # type: ignore[no-any-return]


# torch 2.13 renamed these collectives and warns at each call of the old names, which 2.11 and 2.12 still need.
if dist.is_available():
    reduce_scatter_single = _either("reduce_scatter_single", "reduce_scatter_tensor")
    all_gather_single = _either("all_gather_single", "all_gather_into_tensor")
