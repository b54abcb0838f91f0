"""Where the user has not said which ranks hold the same experts: a model of different experts is refused."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..collectives.rank_grid import RankGrid
from ..collectives.world import Ranks
from ..plan.owned_params import ModelTensor

__all__ = ["check_same_experts", "check_whose_experts"]


def check_whose_experts(overwritten: Iterable[ModelTensor], grid: RankGrid, expert_ranks: Ranks) -> None:
    """Raise ``ValueError`` where ``expert_ranks`` is None, and experts differ between ranks nevertheless.

    Without the check, trained experts would get averaged gradients, and with ``init_sync`` all experts the first
    rank's values. With ``expert_ranks`` nothing is compared. Collective over the grid.

    overwritten  tensors that training or ``init_sync`` will overwrite
    """
    if expert_ranks is None:
        check_same_experts(
            [(each.name, each.tensor) for each in overwritten if each.grid_name == "expert"],
            grid,
            "say it by expert_process_group, maingrad.ddp.WORLD_OF_ONE where each has its own, or the ranks of "
            "process_group, torch.distributed.group.WORLD as a rule, where all are to have the same",
        )


@torch.no_grad()
def check_same_experts(experts: Sequence[tuple[str, Tensor]], grid: RankGrid, remedy: str) -> None:
    """Raise ``ValueError`` on all ranks unless all hold the same experts, bit for bit.

    experts  their parameters and buffers, with names
    remedy   for the error: how the user says which ranks hold the same experts

    Collective over the grid. Copies one tensor at a time.
    """
    if grid.size == 1 or not experts:
        return
    differs = torch.zeros(len(experts), device=experts[0][1].device)
    for index, (_, tensor) in enumerate(experts):
        first = tensor.detach().clone()
        grid.broadcast(first)
        differs[index] = not torch.equal(_bits(first), _bits(tensor))
    found = grid.sum(differs).nonzero().flatten().tolist()
    if found:
        raise ValueError(
            f"'{experts[found[0]][0]}' is an expert's (allreduce = False) and differs between ranks, and nobody said "
            f"which ranks hold the same experts: {remedy}"
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
