"""A block of experts whose tokens travel, and what each rank sends.

Legend: T tokens of a rank, k experts per token, E experts, ep ranks that hold one of each together.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.te_integration import GroupedMLP, TokenDispatcher

__all__ = ["DIM", "EXPERTS", "FFN", "Tokens", "experts_of", "make_tokens", "number", "rank_groups", "routed"]

DIM = 6
FFN = 10
EXPERTS = 4


class Tokens(NamedTuple):
    """x [T, DIM], ids [T, k], probs [T, k]."""

    x: Tensor
    ids: Tensor
    probs: Tensor


def make_tokens(seed: int, tokens: int, top_k: int = 2, routing: str = "any") -> Tokens:
    """What a rank sends. Values are small integers and quarters, so that sums of products are exact.

    routing  any; one: all to expert 1; low: to the first half of the experts; dropped: an id of E here and there
    """
    random = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, (tokens, DIM), generator=random) / 4
    ids = torch.rand(tokens, EXPERTS, generator=random).argsort(1)[:, :top_k]
    if routing == "one":
        ids = torch.ones_like(ids)
    elif routing == "low":
        ids = ids % (EXPERTS // 2)
    elif routing == "dropped":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=random) < 0.3, EXPERTS)
    return Tokens(x, ids, torch.randint(1, 5, (tokens, top_k), generator=random) / 4)


def experts_of(rank: int, ranks: int, **options: Any) -> GroupedMLP:
    """The experts of one of ``ranks`` ranks, with the mark of experts; expert e has the same values in each layout."""
    local = EXPERTS // ranks
    experts = GroupedMLP(local, DIM, FFN, bias=False, **options)
    for name, param in experts.named_parameters():
        random = torch.Generator().manual_seed(number(name, rank, ranks) + 1000 * name.startswith("fc2"))
        with torch.no_grad():
            param.copy_(torch.randint(-4, 5, param.shape, generator=random) / 8)
        param.allreduce = False
    return experts


def number(name: str, rank: int, ranks: int) -> int:
    """The expert, among all, of the parameter ``name`` of a rank."""
    return int(name.rpartition("weight")[2]) + rank * (EXPERTS // ranks)


def rank_groups(ranks: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's group of ``ranks`` ranks with one of each expert together, and those with the same experts."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("edp", "ep"))
    return mesh.get_group("ep"), mesh.get_group("edp")


def routed(tokens: Tokens, experts: nn.Module, dispatcher: TokenDispatcher, **options: Any) -> Tensor:
    """The block."""
    rows, splits, probs, dispatched = dispatcher.dispatch(*tokens, **options)
    return dispatcher.combine(experts(rows, splits, probs), dispatched)
