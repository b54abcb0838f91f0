"""Splits a bucket whose atoms together would need much padding.

A parameter longer than two shards makes the shard a multiple of its atom. So rows of 2,880 and of 4,096 elements in one
bucket make the shard a multiple of 184,320. In two buckets, each shard is a multiple of one row only. But each bucket
costs a collective, so that atoms stay in one bucket where this costs little padding.

Padding is estimated by the lower bound ``atoms.least_shard_numel``, which ``atoms.arrange`` nearly always reaches.
"""

import itertools
from collections.abc import Sequence

from .atoms import least_shard_numel

__all__ = ["split"]

MAX_PARTS = 12  # with more different atoms, the finest stay together


def split(
    numels: Sequence[int], atoms: Sequence[int], degree: int, multiple: int, max_padding: float
) -> list[list[int]]:
    """Split one bucket into few buckets with little padding; returns the indices of the parameters of each.

    numels, atoms  of each parameter, in elements
    degree         number of shards
    multiple       a shard's length must be a multiple of this, in elements
    max_padding    most padding of all buckets together, as a fraction of the parameters' elements

    One bucket stays one where its padding is small enough, or where a split saves none. Where one bucket for each atom
    still has more padding than ``max_padding``, atoms share a bucket only where this adds no padding.
    """

    def padding(part: Sequence[int]) -> int:
        part_numels = [numels[index] for index in part]
        shard_numel = least_shard_numel(part_numels, [atoms[index] for index in part], degree, multiple)
        return shard_numel * degree - sum(part_numels)

    together = list(range(len(numels)))
    allowed = int(max_padding * sum(numels))
    if padding(together) <= allowed:
        return [together]
    by_atom: dict[int, list[int]] = {}
    coarsest = sorted(set(atoms), reverse=True)[: MAX_PARTS - 1]
    for index in together:
        by_atom.setdefault(atoms[index] if atoms[index] in coarsest else 1, []).append(index)
    parts = list(by_atom.values())
    paddings = [padding(part) for part in parts]
    while len(parts) > 1:
        joined = []
        for one, other in itertools.combinations(range(len(parts)), 2):
            more = padding(parts[one] + parts[other]) - paddings[one] - paddings[other]
            joined.append((more, one, other))
        more, one, other = min(joined)
        if more > max(allowed - sum(paddings), 0):
            break
        parts[one] = sorted(parts[one] + parts.pop(other))
        paddings[one] += paddings.pop(other) + more
    return sorted(parts, key=lambda part: part[-1]) if sum(paddings) < padding(together) else [together]
