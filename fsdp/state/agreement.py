"""A comparison between ranks before they exchange tensors: if one rank cannot exchange, all ranks raise.

An exchange of a parameter's elements is a collective over the ranks that share the parameter. If one rank has no such
tensor, the others would wait for ever; if one rank has another rank's tensor, the others would get wrong elements.
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
    """Why this rank or another cannot exchange; None if all can. Collective over the parameters' ranks.

    said       for each parameter, words for what this rank has of it; to be equal on all ranks that share the parameter
    complaint  why this rank cannot exchange; None if it can
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
    """For each parameter, its name and what the rank has of it."""


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
