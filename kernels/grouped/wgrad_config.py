"""Configurations of the weight-gradient kernel: the candidates for tuning, and the default.

Those of the forward and the dgrad stand beside their kernel, in ``gemm_triton.py``.
"""

from typing import NamedTuple

import torch

__all__ = ["SCALED_WGRAD_CONFIG", "WGRAD_CANDIDATES", "WgradConfig", "default_wgrad_config"]


class WgradConfig(NamedTuple):
    """Tile sizes and compiler options. Each is correct for every shape; ``tma`` falls back to masked loads."""

    block_n: int
    block_k: int
    block_t: int
    num_warps: int
    num_stages: int
    tma: bool = False
    """Load operands by the tensor memory accelerator (sm90 and newer), else by masked loads."""
    reduce: bool = False
    """Accumulate by the accelerator's reduce-add, so that programs do not read G. For evenly spaced G only."""
    parts: int = 1
    """Number of column blocks (1, 2 or 4) in which G is read and written; more blocks need fewer registers."""
    group: int = 8
    """Number of tiles along N that share operands in L2."""
    max_registers: int | None = None
    """Registers per thread; fewer let more programs share a multiprocessor."""
    persistent: int = 0
    """Number of persistent programs per multiprocessor. Each computes tile after tile, and loads operands of the next
    tile while it writes the current one. 0: one program per tile.
    """


WGRAD_CANDIDATES = (
    WgradConfig(128, 256, 64, 8, 4, tma=True, reduce=True, parts=2, group=16),
    WgradConfig(128, 256, 64, 8, 4, tma=True, parts=2, group=16),
    WgradConfig(128, 256, 64, 8, 3, tma=True, reduce=True, parts=4, persistent=1),
    WgradConfig(128, 128, 64, 4, 3, tma=True, parts=2, persistent=2),
    WgradConfig(128, 128, 32, 4, 4, tma=True, max_registers=168),
    WgradConfig(128, 128, 32, 4, 4, tma=True, parts=4, max_registers=168),
    WgradConfig(128, 128, 64, 8, 3, tma=True, parts=2),
    WgradConfig(128, 128, 32, 4, 4, parts=4, max_registers=168),
    WgradConfig(64, 128, 32, 4, 4, parts=2, max_registers=96),
    WgradConfig(64, 128, 32, 4, 4, tma=True, parts=2, group=16, max_registers=96),
)
"""Each is the fastest of 21 for a shape of ``tuned.csv``, or the default of one."""

SCALED_WGRAD_CONFIG = WgradConfig(64, 128, 128, 4, 3, tma=True, parts=2)
"""For quantised operands: the fastest of those measured (H200; 8 experts of 2,048 rows, 64 of 512). Larger tiles need
more registers than a thread has."""


def default_wgrad_config(dtype: torch.dtype, capability: tuple[int, int] | None, rows_per_expert: float) -> WgradConfig:
    """The configuration for unmeasured shapes. ``capability`` None: no NVIDIA GPU."""
    if dtype is torch.float32:
        return WgradConfig(64, 64, 32, 4, 2)
    if capability is not None and capability >= (9, 0):
        # Of 15 candidates at 8 shapes (H200): many products a tile want large tiles, few want many programs at once.
        if rows_per_expert >= 1024:
            return WgradConfig(128, 256, 64, 8, 4, tma=True, parts=2, group=16)
        if rows_per_expert > 256:
            return WgradConfig(128, 128, 32, 4, 4, tma=True, parts=4, max_registers=168)
        return WgradConfig(64, 128, 32, 4, 4, tma=True, parts=2, group=16, max_registers=96)
    if capability is not None:
        return WgradConfig(128, 128, 32, 8, 3, parts=2)
    return WgradConfig(128, 128, 32, 8, 2, parts=2)
