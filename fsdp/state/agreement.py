"""Ranks tell each other what they are about to exchange, before they do: where one cannot, all raise alike.

An exchange of a parameter's elements is a collective of the ranks that share it. A rank that has no such tensor, or
another rank's, would leave the others waiting, or give them wrong elements.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch.distributed as dist

from ...ddp.collectives.agreement import gather
from ...ddp.collectives.rank_grid import RankGrid
from ..tensors.parameter import ShardedParameter

__all__ = ["disagreement"]


def disagreement(said: Mapping[ShardedParameter, str], complaint: str | None) -> str | None:
    """Why this rank, or another, cannot go on; None where all can. Collective over the parameters' ranks.

    said       what this rank has of each parameter, to be the same on all of its ranks
    complaint  why this rank cannot go on, if so
    """
    by_grid: dict[Any, tuple[RankGrid, list[tuple[str, str]]]] = {}
    for param, text in said.items():
        grid = param.shard.grid
        by_grid.setdefault((grid.inner, grid.outer), (grid, []))[1].append((param.shard.name, text))
    answers = [
        gather(_Answer(_rank(), complaint, lines), grid.axes, None, "the comparison of state dicts")
        for grid, lines in by_grid.values()
    ]
    found = [_first_complaint(each) for each in answers] + [_first_difference(each) for each in answers]
    return next((why for why in found if why is not None), None)


class _Answer(NamedTuple):
    rank: int
    complaint: str | None
    lines: Sequence[tuple[str, str]]
    """What the rank has of each parameter."""


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _first_complaint(answers: Sequence[_Answer]) -> str | None:
    complaining = [each for each in answers if each.complaint is not None]
    if not complaining:
        return None
    rank, text, _ = complaining[0]
    return text if len(complaining) == len(answers) else f"{text} (on rank {rank})"


def _first_difference(answers: Sequence[_Answer]) -> str | None:
    first = answers[0]
    for other in answers[1:]:
        for ours, theirs in zip_longest(first.lines, other.lines, fillvalue=("no parameter", "nothing")):
            if ours != theirs:
                return (
                    f"state dicts differ between ranks: rank {first.rank} has {ours[1]} of '{ours[0]}', where rank "
                    f"{other.rank} has {theirs[1]} of '{theirs[0]}'"
                )
    return None
