"""Where the user has not said which ranks hold the same experts, or slices: models that differ in them are refused."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from ..buckets.replicas import find_parted
from ..collectives.rank_grid import RankGrid
from ..collectives.world import Ranks
from ..plan.owned_params import ModelTensor
from ..plan.parallel_marks import is_slice

__all__ = ["check_same_experts", "check_same_slices", "check_whose_experts"]


def check_whose_experts(overwritten: Sequence[ModelTensor], grid: RankGrid, ranks: Ranks, expert_ranks: Ranks) -> None:
    """Raise ``ValueError`` where ``expert_ranks`` is None, and experts differ between ranks nevertheless; and where
    ``ranks`` is None, and slices of tensor parallelism differ.

    Without the check, trained experts would get averaged gradients, and with ``init_sync`` all experts the first
    rank's values. What the user has said is not compared. Collective over the grid.

    overwritten  tensors that training or ``init_sync`` will overwrite
    """
    if ranks is None:
        check_same_slices([(each.name, each.tensor) for each in overwritten], grid, "process_group")
    if expert_ranks is None:
        check_same_experts(
            [(each.name, each.tensor) for each in overwritten if each.grid_name == "expert"],
            grid,
            "say it by expert_process_group, maingrad.ddp.WORLD_OF_ONE where each has its own, or the ranks of "
            "process_group, torch.distributed.group.WORLD as a rule, where all are to have the same",
        )


def check_same_experts(experts: Sequence[tuple[str, Tensor]], grid: RankGrid, remedy: str) -> None:
    """Raise ``ValueError`` on all ranks unless all hold the same experts, bit for bit.

    experts  their parameters and buffers, with names
    remedy   for the error: how the user says which ranks hold the same experts

    Collective over the grid.
    """
    if grid.size == 1 or not experts:
        return
    found = find_parted(experts, grid.axes)
    if found:
        raise ValueError(
            f"'{next(iter(found))}' is an expert's (allreduce = False) and differs between ranks, and nobody said "
            f"which ranks hold the same experts: {remedy}"
        )


def check_same_slices(tensors: Iterable[tuple[str, Tensor]], grid: RankGrid, option: str) -> None:
    """Raise ``ValueError`` on all ranks if parameters that are slices differ between them; others are not compared.

    tensors  with their names
    option   by which the user says which ranks hold the same

    Without the check, ``init_sync`` would give all tensor-parallel ranks the first one's slices, and their gradients
    would be averaged. Collective over the grid.
    """
    slices = [(name, tensor) for name, tensor in tensors if is_slice(tensor)]
    found = find_parted(slices, grid.axes) if slices and grid.size > 1 else None
    if found:
        raise ValueError(
            f"parameter '{next(iter(found))}' is a slice of tensor parallelism (tensor_model_parallel = True) and "
            f"differs between ranks, and nobody said which ranks hold the same slices: pass the data-parallel group as "
            f"{option}, or torch.distributed.group.WORLD where all are to have the first rank's"
        )
