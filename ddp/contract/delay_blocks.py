"""The queue that a forward delays its weight gradients into: modules with ``delay_wgrad_compute`` have their own, and
all others delay in a ``delayed_wgrad`` block, which is kept here.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..torch_internals import checkpointed_region
from .main_grad import is_foreign

__all__ = [
    "check_delayable",
    "check_recompute_delays",
    "current_checkpoint",
    "delay_blocks",
    "delaying_into",
    "queue_of_block",
]


class _DelayBlocks(threading.local):
    """The ``delayed_wgrad`` blocks of one thread."""

    def __init__(self) -> None:
        # Set here and not as class attributes: torch.compile does not guard class attributes.
        self.queue: Any = None
        """The innermost block's queue."""
        self.region: Any = None
        """The checkpointed region in which the innermost block was entered; None outside of regions."""
        self.num_entered = 0
        """Number of blocks entered so far; a caller that reads it twice knows whether a block came in between."""


delay_blocks = _DelayBlocks()
_around: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""The queue of each checkpointed region whose first forward ran in a block."""


def queue_of_block() -> Any:
    """The queue that a forward of this thread delays to now: the innermost block's, or None.

    In a recompute the block around the region's first forward counts, and a block around the backward does not: the
    recompute must save the same tensors as the first forward. A block inside the region is entered again and counts.
    """
    queue = delay_blocks.queue
    if torch.compiler.is_compiling() or (queue is None and not _around):
        return queue
    checkpoint = current_checkpoint()
    if checkpoint is None:
        return queue
    region, is_recompute = checkpoint
    if queue is not None and delay_blocks.region is region:
        return queue
    if is_recompute:
        return _around.get(region)
    if queue is not None:
        _around[region] = queue
    return queue


@contextmanager
def delaying_into(queue: Any) -> Iterator[None]:
    """In this block, forwards of this thread delay all weight gradients of our modules into ``queue``."""
    before = delay_blocks.queue, delay_blocks.region
    checkpoint = None if torch.compiler.is_compiling() else current_checkpoint()
    delay_blocks.queue, delay_blocks.region = queue, None if checkpoint is None else checkpoint[0]
    delay_blocks.num_entered += 1
    try:
        yield
    finally:
        delay_blocks.queue, delay_blocks.region = before


# ---- Which region of torch.utils.checkpoint a forward runs in. Non-reentrant checkpointing uses only the saved tensors
# ---- of a recompute: the backwards of the first forward read them in the order in which the first forward saved its
# ---- own. So a module must save the same tensors in the recompute, whatever has changed in between. torch checks
# ---- shapes and dtypes only.


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


def check_recompute_delays(owner: str) -> None:
    """Raise ``RuntimeError`` in compiled code that a ``delayed_wgrad`` block around a checkpointed region has broken.

    The region's recompute runs outside of the block, and its graph would not be broken: it would save other tensors.
    """
    checkpoint = current_checkpoint()
    if checkpoint is not None and checkpoint[0] is not delay_blocks.region:
        raise RuntimeError(
            f"{owner}: a compiled layer under delayed_wgrad(queue) in a checkpointed region (use_reentrant=False), "
            f"whose recompute would save other tensors: build the layer with delay_wgrad_compute=True, or enter the "
            f"block inside the region, or do not compile the layer"
        )


def check_delayable(weights: Iterable[Tensor], owner: str) -> None:
    """Raise ``RuntimeError`` where a foreign provider would reduce a weight's gradient before it exists."""
    for weight in weights:
        if is_foreign(weight):
            raise RuntimeError(
                f"{owner}: delayed_wgrad(queue) over a weight whose main_grad a foreign provider owns, which asked "
                f"at its wrap what is delayed; build the module with delay_wgrad_compute=True before wrapping, or "
                f"use maingrad.ddp.DistributedDataParallel"
            )
