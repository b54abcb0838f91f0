"""Losses that are sums over tokens: gradients are divided by the tokens of all ranks, which the host does not read."""

import torch
from torch import Tensor

from ..collectives.rank_grid import RankGrid

__all__ = ["check_num_tokens", "divide_by_tokens"]


def check_num_tokens(num_tokens: Tensor | int | None, *, wanted: bool) -> None:
    """Raise for a number where none is wanted, for none where one is, and for a tensor of several."""
    if (num_tokens is not None) != wanted:
        raise TypeError(
            "finish_grad_sync(num_tokens) goes with DistributedDataParallelConfig(calculate_per_token_loss=True), "
            "and only with it"
        )
    if isinstance(num_tokens, Tensor) and num_tokens.numel() != 1:
        raise ValueError(
            f"finish_grad_sync(num_tokens) takes one number for this rank, not a tensor of {list(num_tokens.shape)}"
        )


def divide_by_tokens(grads: list[Tensor], num_tokens: Tensor | int, grid: RankGrid, device: torch.device) -> None:
    """Divide by the sum of all ranks' numbers. Collective."""
    total = torch.as_tensor(num_tokens, dtype=torch.float32, device=device).reshape(()).clone()
    grid.sum(total)
    total.masked_fill_(total == 0, 1.0)  # no tokens: gradients are zeros
    torch._foreach_div_(grads, total)
