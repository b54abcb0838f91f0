"""Memory of a graphed step on a GPU, beside that of the same step run eagerly."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["reserved_before_graphs"]


def reserved_before_graphs(train_step: Callable[[Tensor], Any], step: Callable[[Tensor], Any], x: Tensor) -> int:
    """Capture ``step``, and check that it takes at most a tenth more than ``train_step``, which was warmed up.

    Returns the bytes that were reserved before.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    train_step(x)
    torch.cuda.synchronize()
    eager_peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train_step(x)
    torch.cuda.synchronize()
    eager_reserved = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        step(x)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() <= 1.1 * eager_peak
    torch.cuda.empty_cache()
    # The graph's pool. The stream has workspaces of cuBLAS, and the arguments have static memory.
    print(f"reserved {torch.cuda.memory_reserved()}, eager {eager_reserved}, allocated {eager_peak}")
    assert torch.cuda.memory_reserved() <= 1.1 * eager_reserved + 2**27
    return before
