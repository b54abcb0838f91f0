"""How the weight-gradient kernel is cut and compiled: what there is to choose from, and what is chosen unmeasured."""

from typing import NamedTuple

import torch

__all__ = ["WGRAD_CANDIDATES", "WgradConfig", "default_wgrad_config"]


class WgradConfig(NamedTuple):
    """How the kernel is cut and compiled; any is right for any shape, but for ``tma`` (falls back to pointers)."""

    block_n: int
    block_k: int
    block_t: int
    num_warps: int
    num_stages: int
    tma: bool = False
    """Operands by the tensor memory accelerator (sm90 and newer), otherwise by masked loads."""
    reduce: bool = False
    """Accumulate by the accelerator's reduce-add: the tile of G is never read by a program. Evenly spaced G only."""
    parts: int = 1
    """G is read and written in so many column blocks (1, 2 or 4), which takes fewer registers."""
    group: int = 8
    """Tiles in a row of tiles over N that share operands in L2."""
    max_registers: int | None = None
    """Per thread: fewer let more programs share a multiprocessor."""
    persistent: int = 0
    """So many programs a multiprocessor take tile after tile, and load the next one's operands while they write this
    one's result; 0: a program for each tile.
    """


WGRAD_CANDIDATES = (
    WgradConfig(128, 256, 64, 8, 4, tma=True, reduce=True, parts=2, group=8),
    WgradConfig(128, 256, 64, 8, 4, tma=True, reduce=True, parts=2, group=16),
    WgradConfig(128, 256, 64, 8, 4, tma=True, parts=2, group=16),
    WgradConfig(128, 256, 64, 8, 3, tma=True, reduce=True, parts=4, persistent=1),
    WgradConfig(128, 256, 64, 8, 3, tma=True, parts=4, persistent=1),
    WgradConfig(256, 128, 64, 8, 3, tma=True, reduce=True, parts=4, persistent=1),
    WgradConfig(128, 128, 64, 4, 3, tma=True, parts=2, persistent=2),
    WgradConfig(128, 128, 64, 8, 4, tma=True, reduce=True, parts=2, persistent=1),
    WgradConfig(128, 128, 32, 4, 4, tma=True, parts=1, group=8, max_registers=168),
    WgradConfig(128, 128, 32, 4, 4, tma=True, parts=2, group=8, max_registers=168),
    WgradConfig(128, 128, 32, 4, 4, tma=True, parts=4, group=8, max_registers=168),
    WgradConfig(128, 128, 32, 4, 4, tma=True, parts=4, group=16, max_registers=168),
    WgradConfig(128, 128, 64, 4, 3, tma=True, parts=2, group=8),
    WgradConfig(128, 128, 64, 8, 3, tma=True, parts=2, group=8),
    WgradConfig(128, 128, 32, 4, 4, parts=4, group=8, max_registers=168),
    WgradConfig(128, 128, 64, 8, 3, parts=2, group=8, max_registers=128),
    WgradConfig(128, 128, 64, 4, 3, parts=2, group=8),
    WgradConfig(128, 256, 64, 8, 4, parts=2, group=8),
    WgradConfig(64, 128, 32, 4, 4, parts=2, group=8, max_registers=96),
    WgradConfig(64, 128, 32, 4, 4, tma=True, parts=2, group=16, max_registers=96),
    WgradConfig(64, 128, 64, 4, 3, parts=2, group=16, max_registers=128),
)


def default_wgrad_config(dtype: torch.dtype, capability: tuple[int, int] | None, rows_per_expert: float) -> WgradConfig:
    """What is used where no measurement says better. ``capability`` None: no NVIDIA GPU."""
    if dtype is torch.float32:
        return WgradConfig(64, 64, 32, 4, 2)
    if capability is not None and capability >= (9, 0):
        if rows_per_expert >= 1024:
            return WgradConfig(128, 256, 64, 8, 4, tma=True, parts=2, group=16)
        return WgradConfig(128, 128, 32, 4, 4, tma=True, parts=2, max_registers=168)
    if capability is not None:
        return WgradConfig(128, 128, 32, 8, 3, parts=2)
    return WgradConfig(128, 128, 32, 8, 2, parts=2)
