"""Which parameters of a bucket get buckets of their own because their atoms do not go together.

A parameter longer than two shards makes the shard a multiple of its atom, so that rows of 2,880 and of 4,096 elements
in one bucket make it a multiple of 184,320. Apart, each bucket's shard is a multiple of its own rows only. The price is
one more collective for each bucket, so that atoms are joined again where that costs little padding.

Decided on lower bounds (``atoms.least_shard_numel``), which ``atoms.arrange`` nearly always reaches.
"""

import itertools
from collections.abc import Sequence

from .atoms import least_shard_numel

__all__ = ["split"]

MAX_GROUPS = 12  # atoms considered apart; with more, the finest stay together


def split(
    numels: Sequence[int], atoms: Sequence[int], degree: int, multiple: int, max_padding: float
) -> list[list[int]]:
    """Indices of the parameters of each bucket, few buckets that together are padded by at most ``max_padding``.

    numels, atoms  of each parameter, in elements
    degree         number of shards
    multiple       elements that a shard's length must be a multiple of
    max_padding    elements of padding for each element of a parameter

    One bucket if that is enough, or if nothing is gained by more. Where even one bucket for each atom is padded by
    more than ``max_padding``, atoms are joined only where that pads no more.
    """

    def padding(group: Sequence[int]) -> int:
        group_numels = [numels[index] for index in group]
        shard_numel = least_shard_numel(group_numels, [atoms[index] for index in group], degree, multiple)
        return shard_numel * degree - sum(group_numels)

    together = list(range(len(numels)))
    allowed = int(max_padding * sum(numels))
    if padding(together) <= allowed:
        return [together]
    by_atom: dict[int, list[int]] = {}
    coarsest = sorted(set(atoms), reverse=True)[: MAX_GROUPS - 1]
    for index in together:
        by_atom.setdefault(atoms[index] if atoms[index] in coarsest else 1, []).append(index)
    groups = list(by_atom.values())
    paddings = [padding(group) for group in groups]
    while len(groups) > 1:
        joined = []
        for one, other in itertools.combinations(range(len(groups)), 2):
            more = padding(groups[one] + groups[other]) - paddings[one] - paddings[other]
            joined.append((more, one, other))
        more, one, other = min(joined)
        if more > max(allowed - sum(paddings), 0):
            break
        groups[one] = sorted(groups[one] + groups.pop(other))
        paddings[one] += paddings.pop(other) + more
    return sorted(groups, key=lambda group: group[-1]) if sum(paddings) < padding(together) else [together]
