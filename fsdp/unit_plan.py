"""The buckets of one unit, from shapes alone: no storage, no process group; parameters may be on the meta device."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..ddp.layout import BucketLayout, ParamSpec, plan_gradients
from ..ddp.placements import Placements
from ..ddp.wiring import OwnedParam, grad_dtype_of
from .mixed_precision import MixedPrecisionPolicy

__all__ = ["plan_unit", "shard_degree"]


def plan_unit(
    owned: Sequence[OwnedParam], policy: MixedPrecisionPolicy, degree: int
) -> Iterator[tuple[BucketLayout, bool]]:
    """The buckets, and whether they have gradients: dtypes, frozen ones and delayed ones apart.

    owned   the unit's parameters, in registration order
    degree  number of equal shards of each bucket
    """
    kinds: dict[tuple[Any, ...], list[OwnedParam]] = {}
    for entry in reversed(owned):  # about the order of backward
        param = entry.param
        kinds.setdefault((param.dtype, param.requires_grad, entry.delayed), []).append(entry)
    for (dtype, trainable, delayed), members in kinds.items():
        computing = policy.param_dtype if policy.param_dtype and dtype.is_floating_point else dtype
        specs = [
            ParamSpec(
                name=entry.name,
                shape=tuple(entry.param.shape),
                param_dtype=computing,
                grad_dtype=grad_dtype_of(computing, policy.grad_dtype),
                delayed=delayed,
            )
            for entry in members
        ]
        plan = plan_gradients(specs, shard_degree=degree, bucket_numel=max(1, sum(spec.numel for spec in specs)))
        for layout in plan.buckets:
            yield layout, trainable


def shard_degree(placements: Placements, inner_size: int, outer_size: int) -> int:
    """Number of shards of a unit's buckets over ``outer_size`` instances of ``inner_size`` ranks."""
    return inner_size * (outer_size if placements.outer.scatters else 1)
