"""Checks of what surrounds a unit: ranks that joined after sharding, and torch's ``DistributedDataParallel``."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ...ddp.collectives.rank_grid import RankGrid
from ...ddp.contract.torch_ddp import check_not_collected, check_not_inside, in_torch_ddp
from ...ddp.torch_internals import are_transforms_active
from .bucket import ShardedPair

__all__ = ["check_no_transform", "check_surroundings", "refuse_torch_ddp"]


def check_surroundings(pairs: Iterable[ShardedPair], grid: RankGrid, label: str) -> None:
    """Called in forward. Raise ``RuntimeError`` if ranks joined later, or inside torch's wrapper or ``torch.func``.

    pairs  the unit's parameters
    label  name of the unit, for errors
    """
    check_no_transform(label)
    if torch.is_grad_enabled():
        grid.check_still_alone(_described(label), "mesh")
    if in_torch_ddp():
        check_not_inside(_forms(pairs), _described(label))


def refuse_torch_ddp(pairs: Iterable[ShardedPair], label: str) -> None:
    """Called by ``named_parameters``. Raise ``ValueError`` if the constructor of torch's wrapper is the caller."""
    check_not_collected(_forms(pairs), _described(label), num_callers=2)


def check_no_transform(label: str) -> None:
    """Raise ``RuntimeError`` inside ``torch.func.grad``, ``vmap``, ``jvp`` and the like."""
    if are_transforms_active():
        raise RuntimeError(
            f"a transform of torch.func over {_described(label)}: it would take no gradient from gathered parameters; "
            f"give torch.func a plain model, with weights copied within unsharded()"
        )


def _forms(pairs: Iterable[ShardedPair]) -> Iterator[nn.Parameter]:
    return (form for pair in pairs for form in (pair.sharded, pair.whole))


def _described(label: str) -> str:
    return f"{label} of maingrad.fsdp.fully_shard"
