"""Equal starts: all ranks get the first rank's parameters and buffers; experts among ranks that hold the same."""

from collections.abc import Iterable, Mapping

import torch

from ..collectives.failure_report import FailureReporter
from ..collectives.rank_grid import RankGrid
from ..plan.owned_params import ModelTensor

__all__ = ["broadcast_tensors"]


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[ModelTensor], grids: Mapping[str, RankGrid], failures: FailureReporter) -> None:
    """Copy the first rank's parameters and buffers to all other ranks; experts among ranks that hold the same."""
    with failures.watch("the broadcast of parameters and buffers"):
        for _, tensor, grid_name, _ in tensors:
            grids[grid_name].broadcast(tensor.detach())
            torch.autograd.graph.increment_version(tensor)  # collectives do not raise it, and masters follow it
