"""Experts that are reduced over ranks of their own, under a stock optimizer.

Ranks hold different experts, so a norm over one rank's gradients differs between ranks, and so does the search for Inf.
But all ranks must clip by one norm and skip the same steps, or their dense parameters drift apart. Here the answer of
``torch.amp.GradScaler`` is summed over all ranks. ``clip_grad_norm_`` is refused (``stock/clipping.py``):
``maingrad.ddp.clip_grad_norm`` computes the norm over all ranks.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..buckets.wiring import WiredParam
from ..collectives.rank_grid import RankGrid
from ..contract.main_grad import record_of
from ..plan.parallel_marks import is_slice

__all__ = ["note_own_ranks"]


def note_own_ranks(wired: Iterable[WiredParam], grids: Mapping[str, RankGrid]) -> None:
    """Set ``all_ranks`` in the records of experts that not all ranks hold, and ``sliced`` in those of slices."""
    all_ranks = grids["dense"]
    for entry in wired:
        if all_ranks.leaves_ranks_out and is_slice(entry.owned.param):
            entry.record.sliced = True
            _have_scalers_agree()
        if grids[entry.bucket.layout.grid_name].size < all_ranks.size:
            entry.record.all_ranks = all_ranks
            _have_scalers_agree()


@functools.cache
def _have_scalers_agree() -> None:
    """Have ``torch.amp.GradScaler`` sum its answer over ranks. Done once for the process, in the base class's method,
    since subclasses may extend it."""
    unscale = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscale_and_agree(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        _refuse_slices(param for group in optimizer.param_groups for param in group["params"])
        found: dict[torch.device, Tensor] = unscale(self, optimizer, *args, **kwargs)
        all_ranks = _all_ranks_of(param for group in optimizer.param_groups for param in group["params"])
        if all_ranks is not None:
            for answer in found.values():
                all_ranks.sum(answer)
                answer.clamp_(max=1.0)  # fused optimizers compare it with 1
        return found

    torch.amp.GradScaler._unscale_grads_ = unscale_and_agree  # type: ignore[method-assign]


def _refuse_slices(params: Iterable[Tensor]) -> None:
    for param in params:
        record = record_of(param)
        if record is not None and record.sliced:
            raise RuntimeError(
                f"GradScaler would look for Inf in this rank's slices alone, and skip other steps than the ranks with "
                f"the rest of the model: parameter '{record.name}' is a slice of tensor parallelism "
                f"(tensor_model_parallel = True); train in bf16, or sum the answer over those ranks in a scaler of "
                f"your own. If every rank holds the whole parameter, set the mark to False before wrapping"
            )


def _all_ranks_of(params: Iterable[Tensor]) -> RankGrid | None:
    for param in params:
        record = record_of(param)
        if record is not None and record.exposed and record.all_ranks is not None:
            grid: RankGrid = record.all_ranks
            return grid
    return None
