"""``calculate_per_token_loss``: gradients are divided by the number of tokens of all ranks, on the device."""

import torch
from torch import Tensor

from ..collectives.rank_grid import RankGrid
from ..collectives.streams import is_capturing

__all__ = ["check_num_tokens", "divide_by_tokens"]


def check_num_tokens(num_tokens: Tensor | int | None, *, wanted: bool) -> None:
    """Raise ``TypeError`` where ``num_tokens`` is missing or not ``wanted``, ``ValueError`` for several elements, and
    ``RuntimeError`` for a number in a capture."""
    if (num_tokens is not None) != wanted:
        raise TypeError(
            "model.set_num_tokens(num_tokens), before .grad is read or stepped on, goes with "
            "DistributedDataParallelConfig(calculate_per_token_loss=True), and only with it"
        )
    if isinstance(num_tokens, int) and is_capturing():
        raise RuntimeError(
            "set_num_tokens(num_tokens) got a number in a function that is captured, and every replay would divide "
            "by this number: give it a tensor on the device, computed from the microbatches"
        )
    if isinstance(num_tokens, Tensor) and num_tokens.numel() != 1:
        raise ValueError(
            f"set_num_tokens(num_tokens) takes one number for this rank, not a tensor of {list(num_tokens.shape)}"
        )


def divide_by_tokens(grads: list[Tensor], num_tokens: Tensor | int, grid: RankGrid, device: torch.device) -> None:
    """Divide ``grads`` in place by the sum of ``num_tokens`` over all ranks. Collective over the grid."""
    total = torch.as_tensor(num_tokens, dtype=torch.float32, device=device).reshape(()).clone()
    grid.sum(total)
    total.masked_fill_(total == 0, 1.0)  # without tokens all gradients are zeros
    torch._foreach_div_(grads, total)
