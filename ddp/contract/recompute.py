"""Which region of ``torch.utils.checkpoint`` a forward runs in, and whether it is the recompute.

Without reentrance a recompute serves nothing but its saved tensors: the first forward's backwards read them, one by one
in the order in which that forward saved its own. torch compares shapes and dtypes. A module must therefore save what it
saved the first time, whatever has changed around it since.
"""

from typing import Any

import torch

from ..torch_internals import checkpointed_region

__all__ = ["current_checkpoint"]


def current_checkpoint() -> tuple[Any, bool] | None:
    """The innermost region of this thread's forward, and whether it is being recomputed; None outside of regions.

    A region is an object that lives as long as the graph of its forward. ``RuntimeError`` where torch does not show it.
    """
    try:
        return checkpointed_region()
    except LookupError:
        raise RuntimeError(
            f"torch {torch.__version__} does not show which checkpointed region a forward belongs to, and its "
            f"recompute could not be told to delay weight gradients alike: use delay_wgrad_compute=True or "
            f"fuse_wgrad_accumulation=True of each module inside, or use_reentrant=True, with delayed_wgrad"
        ) from None
