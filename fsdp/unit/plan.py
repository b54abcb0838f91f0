"""The buckets of one unit, from shapes alone: no storage, no process group; parameters may be on the meta device."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from ...ddp.collectives.placements import Placements
from ...ddp.plan.atoms import atom_of
from ...ddp.plan.layout import BucketLayout, ParamSpec, default_bucket_numel, plan_gradients
from ...ddp.plan.model_plan import grad_dtype_of
from ...ddp.plan.owned_params import OwnedParam
from .mixed_precision import MixedPrecisionPolicy

__all__ = ["AtomKind", "ShardAtoms", "plan_unit", "shard_degree"]

AtomKind: TypeAlias = Literal["element", "row", "whole"] | int
"""Between what a shard border may lie: elements, rows, whole parameters, blocks of so many rows."""
ShardAtoms: TypeAlias = AtomKind | Mapping[str, AtomKind]
"""For all parameters of a unit, or by patterns of their names in the unit; the first that matches counts, and what no
pattern matches may be cut between any two elements."""

MAX_ATOM_PADDING = 0.05
"""A bucket that atoms would pad by more is split by atoms: one more collective for less memory."""
SMALL_PART = 64
"""A parameter of less than this part of a bucket opens none."""


def plan_unit(
    owned: Sequence[OwnedParam],
    policy: MixedPrecisionPolicy,
    degree: int,
    atoms: ShardAtoms = "element",
    bucket_size: int | None = None,
) -> Iterator[tuple[BucketLayout, bool]]:
    """The buckets, and whether they have gradients: dtypes, frozen ones and delayed ones apart.

    owned        the unit's parameters, in registration order
    degree       number of equal shards of each bucket
    atoms        what no shard border may cut; with more than elements, a bucket takes all that it can
    bucket_size  elements at which a bucket is closed before the next parameter that is not small, unless less than
                 half as many are left; None: ``default_bucket_numel(degree)``

    Raises ``ValueError`` for a pattern that matches no parameter, and for an atom or a size that is none.
    """
    _check_patterns(owned, atoms)
    if bucket_size is not None and bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1 element, got {bucket_size}")
    size = bucket_size or default_bucket_numel(degree)
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
                atom=atom_of(entry.param.shape, _kind_of(entry.name, atoms)),
            )
            for entry in members
        ]
        for run in _runs(specs, size):
            plan = plan_gradients(
                run,
                shard_degree=degree,
                bucket_numel=1 + sum(spec.numel for spec in run),  # nor does one without elements open a bucket
                max_atom_padding=MAX_ATOM_PADDING,
            )
            for layout in plan.buckets:
                yield _alone(layout), trainable


def _runs(specs: Sequence[ParamSpec], size: int) -> Iterator[Sequence[ParamSpec]]:
    """The parameters of each bucket, before atoms have a say."""
    if any(spec.atom != 1 for spec in specs):
        yield specs
        return
    first = held = 0
    left = sum(spec.numel for spec in specs)
    for place, spec in enumerate(specs):
        # A norm behind a matrix is done with it; in the next matrix's bucket it would take that one's memory as well.
        if held >= size and 2 * left >= size and spec.numel >= size / SMALL_PART:
            yield specs[first:place]
            first, held = place, 0
        held, left = held + spec.numel, left - spec.numel
    yield specs[first:]


def _kind_of(name: str, atoms: ShardAtoms) -> AtomKind:
    if not isinstance(atoms, Mapping):
        return atoms
    return next((kind for pattern, kind in atoms.items() if fnmatchcase(name, pattern)), "element")


def _check_patterns(owned: Sequence[OwnedParam], atoms: ShardAtoms) -> None:
    for pattern in atoms if isinstance(atoms, Mapping) else ():
        if not any(fnmatchcase(entry.name, pattern) for entry in owned):
            raise ValueError(f"shard_atoms: '{pattern}' matches no parameter of this unit")


def _alone(layout: BucketLayout) -> BucketLayout:
    """The same bucket at the start of a buffer of its own."""
    slots = tuple(dataclasses.replace(slot, start=slot.start - layout.start) for slot in layout.slots)
    return dataclasses.replace(layout, start=0, end=layout.numel, slots=slots)


def shard_degree(placements: Placements, inner_size: int, outer_size: int) -> int:
    """Number of shards of a unit's buckets over ``outer_size`` instances of ``inner_size`` ranks."""
    return inner_size * (outer_size if placements.outer.scatters else 1)
