"""Experts that are reduced over ranks of their own, under a stock optimizer.

Each rank holds other experts then, so that a norm of one rank's gradients, or the search for Inf in them, differs
between ranks. All must clip by one norm and skip the same steps, or dense parameters, which all hold alike, grow apart.
A scaler's answer is made one for all ranks; ``clip_grad_norm_`` is refused (``stock_clipping.py``), since ours computes
that norm.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..buckets.wiring import WiredParam
from ..collectives.rank_grid import RankGrid
from ..contract.main_grad import record_of

__all__ = ["note_own_ranks"]


def note_own_ranks(wired: Iterable[WiredParam], grids: Mapping[str, RankGrid]) -> None:
    """Tell the records of experts that not all ranks hold them."""
    everyone = grids["dense"]
    for entry in wired:
        if grids[entry.bucket.layout.grid_name].size < everyone.size:
            entry.record.everyone = everyone
            _have_scalers_agree()


@functools.cache
def _have_scalers_agree() -> None:
    """``torch.amp.GradScaler`` asks each rank for itself, through a method that subclasses may have extended: the
    answer of the base class is summed, once for the process."""
    unscale = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscale_and_agree(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        found: dict[torch.device, Tensor] = unscale(self, optimizer, *args, **kwargs)
        everyone = _everyone(param for group in optimizer.param_groups for param in group["params"])
        if everyone is not None:
            for answer in found.values():
                everyone.sum(answer)
                answer.clamp_(max=1.0)  # fused optimizers ask whether it is 1
        return found

    torch.amp.GradScaler._unscale_grads_ = unscale_and_agree  # type: ignore[method-assign]


def _everyone(params: Iterable[Tensor]) -> RankGrid | None:
    for param in params:
        record = record_of(param)
        if record is not None and record.exposed and record.everyone is not None:
            grid: RankGrid = record.everyone
            return grid
    return None
