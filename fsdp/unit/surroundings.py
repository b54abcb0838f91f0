"""What came around a unit after it was made, and would make its work wrong: other ranks, another wrapper."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ...ddp.collectives.rank_grid import RankGrid
from ...ddp.contract.torch_ddp import check_not_collected, check_not_inside, in_torch_ddp
from .bucket import ShardedPair

__all__ = ["check_surroundings", "refuse_torch_ddp"]


def check_surroundings(pairs: Iterable[ShardedPair], grid: RankGrid, label: str) -> None:
    """In forward: raise ``RuntimeError`` for ranks that joined later, and inside torch's ``DistributedDataParallel``.

    pairs  the unit's parameters
    label  the unit in words
    """
    if torch.is_grad_enabled():
        grid.check_still_alone(_described(label), "mesh")
    if in_torch_ddp():
        check_not_inside(_forms(pairs), _described(label))


def refuse_torch_ddp(pairs: Iterable[ShardedPair], label: str) -> None:
    """To be called by ``named_parameters``: raise ``ValueError`` where torch's wrapper asks in its constructor."""
    check_not_collected(_forms(pairs), _described(label), num_callers=2)


def _forms(pairs: Iterable[ShardedPair]) -> Iterator[nn.Parameter]:
    return (form for pair in pairs for form in (pair.sharded, pair.whole))


def _described(label: str) -> str:
    return f"{label} of maingrad.fsdp.fully_shard"
