"""``ShardedPair``: one parameter in its two forms, this rank's shard and the whole parameter."""

import weakref
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...ddp.collectives.reduction import GradReduction
from ...ddp.plan.cut import Range
from ...ddp.plan.layout import ParamSlot
from ...ddp.plan.owned_params import OwnedParam, is_slice
from ..tensors.parameter import ShardedParameter, ShardInfo, make_sharded

__all__ = ["ShardedPair", "make_pair"]


class ShardedPair(NamedTuple):
    """One parameter in its two forms, sharded and whole."""

    name: str
    """The parameter's name in its unit."""
    before: nn.Parameter
    """The user's parameter before sharding. Its memory is freed."""
    places: tuple[tuple[weakref.ref[nn.Module], str], ...]
    """The modules that register the parameter, and its name in each. The references are weak: modules own the unit."""
    sharded: ShardedParameter
    whole: nn.Parameter


def make_pair(
    entry: OwnedParam,
    slot: ParamSlot,
    shard: Tensor,
    mine: Range,
    whole_params: Tensor,
    reduction: GradReduction,
    unit: str,
) -> ShardedPair:
    """The parameter ``entry``, which lies in ``slot`` of its bucket, as views of the bucket's flat tensors.

    shard         [mine.numel] this rank's elements ``mine`` of the bucket
    whole_params  [n] memory of the whole parameters
    unit          the unit's name, for errors
    """
    part = Range(slot.start, slot.end).intersect(mine)
    offset = part.start - mine.start
    if not part.numel:
        part, offset = Range(slot.start, slot.start), 0
    info = ShardInfo(
        entry.name,
        tuple(entry.param.shape),
        part.start - slot.start,
        part.end - slot.start,
        reduction.grid,
        reduction.num_replicas,
        unit,
        reduction.grid,
        is_slice(entry.param),
        place=slot.start,
        bucket_numel=whole_params.numel(),
    )
    # ``.data``: a version of its own tells which parameter a program has written. Autograd must not see a view.
    sharded = make_sharded(shard[offset : offset + part.numel].data, info, entry.param.requires_grad)
    whole = nn.Parameter(whole_params[slot.start : slot.end].view(slot.spec.shape).data, entry.param.requires_grad)
    # What torch does not set: Megatron's marks, and the user's attributes.
    marks: dict[str, Any] = dict(entry.param.__dict__)
    whole.__dict__.update(marks)
    marks.pop("shard", None)
    sharded.__dict__.update(marks)
    places = tuple((weakref.ref(module), local) for module, local in entry.owners)
    return ShardedPair(entry.name, entry.param, places, sharded, whole)
