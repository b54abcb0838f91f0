"""Equal starts: all ranks get the first rank's parameters and buffers; experts among ranks that hold the same."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..collectives.rank_grid import RankGrid
from ..collectives.world import Ranks
from ..plan.owned_params import OwnedParam, grid_name_of

__all__ = ["broadcast_model", "check_same_experts", "check_whose_experts", "has_experts"]


def has_experts(module: nn.Module) -> bool:
    """Whether a parameter or buffer of ``module`` has Megatron-core's mark of experts, ``allreduce = False``."""
    return any(grid_name_of(tensor) == "expert" for _, tensor in _tensors_of(module))


@torch.no_grad()
def broadcast_model(module: nn.Module, grids: Mapping[str, RankGrid]) -> None:
    """Copy the first rank's parameters and buffers to all other ranks; experts among ranks that hold the same."""
    for _, tensor in _tensors_of(module):
        grids[grid_name_of(tensor)].broadcast(tensor.detach())
        torch.autograd.graph.increment_version(tensor)  # collectives do not raise it, and masters follow it


def check_whose_experts(
    module: nn.Module, trainable: Iterable[OwnedParam], grid: RankGrid, expert_ranks: Ranks, *, init_sync: bool
) -> None:
    """Raise ``ValueError`` where ``expert_ranks`` is None, and experts differ between ranks nevertheless.

    Without the check, trainable experts would get averaged gradients, and with ``init_sync`` all experts the first
    rank's values. With ``expert_ranks`` nothing is compared. Collective over the grid.
    """
    if expert_ranks is None:
        tensors = _tensors_of(module) if init_sync else [(entry.name, entry.param) for entry in trainable]
        check_same_experts(
            tensors,
            grid,
            "say it by expert_process_group, maingrad.ddp.WORLD_OF_ONE where each has its own, or the ranks of "
            "process_group, torch.distributed.group.WORLD as a rule, where all are to have the same",
        )


@torch.no_grad()
def check_same_experts(tensors: Iterable[tuple[str, Tensor | None]], grid: RankGrid, remedy: str) -> None:
    """Raise ``ValueError`` on all ranks unless all hold the same experts, bit for bit.

    tensors  with their names; those of no expert are left out
    remedy   for the error: how the user says which ranks hold the same experts

    Collective over the grid. Copies one tensor at a time.
    """
    experts = [(name, tensor) for name, tensor in tensors if tensor is not None and grid_name_of(tensor) == "expert"]
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


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
