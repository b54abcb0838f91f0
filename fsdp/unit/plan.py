"""The buckets of one unit, from shapes alone: without storage or process groups, also on the meta device."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias

from ...ddp.collectives.reduction import Placements
from ...ddp.plan.atoms import atom_of
from ...ddp.plan.layout import BucketLayout, ParamSpec, default_bucket_numel, plan_gradients
from ...ddp.plan.owned_params import OwnedParam, grad_dtype_of
from .mixed_precision import MixedPrecisionPolicy

__all__ = ["Atom", "ShardAtoms", "UnitOptions", "plan_unit", "shard_degree"]

Atom: TypeAlias = Literal["element", "block", "row", "whole"] | int
"""The elements between which no border of shards lies: one, 256, a row (entry of dim 0), a parameter, a number of
rows."""
ShardAtoms: TypeAlias = Atom | Mapping[str, Atom]
"""One atom for all parameters of a unit, or a dict from patterns of their names in the unit. The first pattern that
matches a name counts; without a match the atom is "element"."""


class UnitOptions(NamedTuple):
    """The options of one ``fully_shard`` call, which says what they mean. They must be equal on all ranks."""

    placements: Placements
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool | None
    reduce_every_microbatch: bool | None
    bucket_size: int | None
    shard_atoms: ShardAtoms
    offload_to_cpu: bool
    copy_engine_gather: Literal["auto", True, False]
    init_sync: bool
    forward_writes: Literal["refused", "alike"]


MAX_ATOM_PADDING = 0.05
"""If atoms would pad a bucket by a larger part than this, the bucket is split by atoms."""
SMALL_PART = 64
"""A parameter of less than 1 / SMALL_PART of ``bucket_size`` opens no new bucket."""


def plan_unit(
    owned: Sequence[OwnedParam],
    policy: MixedPrecisionPolicy,
    degree: int,
    atoms: ShardAtoms = "element",
    bucket_size: int | None = None,
) -> Iterator[tuple[BucketLayout, bool]]:
    """The layout of each bucket, and whether its parameters are trained.

    Parameters in one bucket have one dtype, are all trained or all frozen, and all delayed or none.

    owned        the unit's parameters, in registration order
    degree       number of equal shards of each bucket
    atoms        what no border between shards may cut. Parameters are not cut into several buckets by size if one of
                 them has an atom larger than a block of 256 elements
    bucket_size  number of elements at which a bucket is closed. A small parameter still joins, and so does the rest if
                 it has less than half of ``bucket_size``. None: ``default_bucket_numel(degree)``

    Raises ``ValueError`` for a pattern that matches no parameter, and for an invalid atom or size.
    """
    _check_patterns(owned, atoms)
    if bucket_size is not None and bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1 element, got {bucket_size}")
    size = bucket_size or default_bucket_numel(degree)
    alike: dict[tuple[Any, ...], list[OwnedParam]] = {}
    for entry in reversed(owned):  # about backward's order
        param = entry.param
        alike.setdefault((param.dtype, param.requires_grad, entry.delayed), []).append(entry)
    for (dtype, trainable, delayed), members in alike.items():
        computing = policy.param_dtype if policy.param_dtype and dtype.is_floating_point else dtype
        with_atoms = [(entry, _atom_of_name(entry.name, atoms)) for entry in members]
        specs = [
            ParamSpec(
                name=entry.name,
                shape=tuple(entry.param.shape),
                param_dtype=computing,
                grad_dtype=grad_dtype_of(computing, policy.grad_dtype),
                delayed=delayed,
                atom=atom_of(entry.param.shape, atom),
            )
            for entry, atom in with_atoms
        ]
        small = all(spec.atom == 1 or atom == "block" for spec, (_, atom) in zip(specs, with_atoms, strict=True))
        for run in _runs(specs, size) if small else [specs]:
            plan = plan_gradients(
                run,
                shard_degree=degree,
                bucket_numel=1 + sum(spec.numel for spec in run),  # + 1: a parameter without elements opens no bucket
                max_atom_padding=MAX_ATOM_PADDING,
            )
            for layout in plan.buckets:
                yield _alone(layout), trainable


def _runs(specs: Sequence[ParamSpec], size: int) -> Iterator[Sequence[ParamSpec]]:
    """Cut the parameters into runs, one for each bucket, by size."""
    first = size_of_run = 0
    left = sum(spec.numel for spec in specs)
    for place, spec in enumerate(specs):
        # A small norm behind a matrix joins the matrix's bucket: their gradients come at the same time in backward.
        if size_of_run >= size and 2 * left >= size and spec.numel >= size / SMALL_PART:
            yield specs[first:place]
            first, size_of_run = place, 0
        size_of_run, left = size_of_run + spec.numel, left - spec.numel
    yield specs[first:]


def _atom_of_name(name: str, atoms: ShardAtoms) -> Atom:
    if not isinstance(atoms, Mapping):
        return atoms
    return next((atom for pattern, atom in atoms.items() if fnmatchcase(name, pattern)), "element")


def _check_patterns(owned: Sequence[OwnedParam], atoms: ShardAtoms) -> None:
    for pattern in atoms if isinstance(atoms, Mapping) else ():
        if not any(fnmatchcase(entry.name, pattern) for entry in owned):
            raise ValueError(f"shard_atoms: '{pattern}' matches no parameter of this unit")


def _alone(layout: BucketLayout) -> BucketLayout:
    """The layout moved to the start of a buffer of its own."""
    slots = tuple(dataclasses.replace(slot, start=slot.start - layout.start) for slot in layout.slots)
    return dataclasses.replace(layout, start=0, end=layout.numel, slots=slots)


def shard_degree(placements: Placements, inner_size: int, outer_size: int) -> int:
    """Number of shards of a unit's buckets over ``outer_size`` instances of ``inner_size`` ranks."""
    return inner_size * (outer_size if placements.outer.scatters else 1)
