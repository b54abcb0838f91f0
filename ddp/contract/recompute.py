"""Which region of ``torch.utils.checkpoint`` a forward runs in, and whether that forward is the recompute.

Non-reentrant checkpointing uses only the saved tensors of a recompute: the backwards of the first forward read them in
the order in which the first forward saved its own. So a module must save the same tensors in the recompute as in the
first forward, whatever has changed in between. torch checks shapes and dtypes only.
"""

from typing import Any

import torch

from ..torch_internals import checkpointed_region

__all__ = ["current_checkpoint"]


def current_checkpoint() -> tuple[Any, bool] | None:
    """The innermost region around this thread's forward, and whether the forward is its recompute. None outside.

    A region is an object that lives as long as the graph of its first forward. Raises ``RuntimeError`` where this torch
    version does not show the region.
    """
    try:
        return checkpointed_region()
    except LookupError:
        raise RuntimeError(
            f"torch {torch.__version__} does not show which checkpointed region a forward belongs to, and its "
            f"recompute could not be told to delay weight gradients alike: use delay_wgrad_compute=True or "
            f"fuse_wgrad_accumulation=True of each module inside, or use_reentrant=True, with delayed_wgrad"
        ) from None
