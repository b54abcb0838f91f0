"""The dtypes and the buckets of one unit, from shapes alone: without storage or process groups, also on meta."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...ddp.collectives.reduction import Placements
from ...ddp.plan.atoms import atom_of
from ...ddp.plan.layout import BucketLayout, ParamSpec, default_bucket_numel, plan_gradients
from ...ddp.plan.model_slice import model_slice_of
from ...ddp.plan.owned_params import OwnedParam, grad_dtype_of
from ...ddp.torch_internals import tree_map

__all__ = [
    "Atom",
    "MixedPrecisionPolicy",
    "ShardAtoms",
    "UnitOptions",
    "cast_floating",
    "cast_inputs",
    "num_to_end",
    "plan_unit",
    "pool_limit",
    "shard_degree",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of one unit. Field names are those of PyTorch's FSDP2 if it has the field.

    Sharded parameters and the optimizer's state keep the module's dtype: with ``param_dtype=torch.bfloat16``, fp32
    parameters are fp32 masters, which are gathered and used in bf16.

    Raises ``ValueError`` for a dtype that is not floating-point, and for a ``reduce_dtype`` wider than ``grad_dtype``.
    """

    param_dtype: torch.dtype | None = None
    """The dtype of whole parameters and of their gather; None: the module's dtype."""
    grad_dtype: torch.dtype = torch.float32
    """The dtype of ``main_grad``, and of sums over microbatches and ranks, for parameters computed in half precision.
    Gradients of wider parameters have the parameter's dtype."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which the reduction sends; sums are in ``grad_dtype`` all the same. None: ``grad_dtype``."""
    output_dtype: torch.dtype | None = None
    """Forward's floating-point outputs are cast to it; None: no cast."""
    cast_forward_inputs: bool = True
    """Forward's floating-point inputs are cast to ``param_dtype``."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "grad_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"MixedPrecisionPolicy.{name} must be a floating-point dtype, got {dtype}")
        if self.reduce_dtype is not None and self.reduce_dtype.itemsize > self.grad_dtype.itemsize:
            raise ValueError(
                f"MixedPrecisionPolicy.reduce_dtype {self.reduce_dtype} is wider than grad_dtype {self.grad_dtype}: "
                f"gradients have no more bits than grad_dtype; widen that"
            )

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """``reduce_dtype``; None if it is ``grad_dtype``."""
        return None if self.reduce_dtype is self.grad_dtype else self.reduce_dtype


def cast_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """``cast_floating`` of a forward's arguments. Tensors and numbers skip the walk over a tree, for speed."""
    cast = tuple(arg if isinstance(arg, _PLAIN) else cast_floating(arg, dtype) for arg in args)
    return cast, cast_floating(kwargs, dtype) if kwargs else kwargs


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """``tree`` (nested tuples, lists and dicts) with every floating-point tensor cast to ``dtype``."""
    if isinstance(tree, Tensor):
        return _cast(tree, dtype)
    return tree_map(lambda leaf: _cast(leaf, dtype), tree)


_PLAIN = (int, float, str, type(None))


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype is not dtype else leaf


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
    distributed_weights: bool


_NO_GROUPS: Mapping[str, str] = {}
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
    groups: Mapping[str, str] = _NO_GROUPS,
) -> Iterator[tuple[BucketLayout, bool]]:
    """The layout of each bucket, and whether its parameters are trained.

    Parameters in one bucket have one dtype, are all trained or all frozen, and all delayed or none. Slices of which
    tensor-parallel ranks have different shapes are apart, so that copies lie alike on these ranks: each rank's shard of
    a copy has the same elements.

    owned        the unit's parameters, in registration order
    degree       number of equal shards of each bucket
    atoms        what no border between shards may cut. Parameters are not cut into several buckets by size if one of
                 them has an atom larger than a block of 256 elements
    bucket_size  number of elements at which a bucket is closed. A small parameter still joins, and so does the rest if
                 it has less than half of ``bucket_size``. None: ``default_bucket_numel(degree)``
    groups       by name, the parameters that modules ask for, with the name of the group that is gathered together

    Raises ``ValueError`` for a pattern that matches no parameter, and for an invalid atom or size.
    """
    _check_patterns(owned, atoms)
    if bucket_size is not None and bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1 element, got {bucket_size}")
    size = bucket_size or default_bucket_numel(degree)
    alike: dict[tuple[Any, ...], list[OwnedParam]] = {}
    for entry in reversed(owned):  # about backward's order
        param, found = entry.param, model_slice_of(entry.param)
        uneven = found is not None and found.is_uneven
        kind = (param.dtype, param.requires_grad, entry.delayed, uneven, groups.get(entry.name))
        alike.setdefault(kind, []).append(entry)
    for (dtype, trainable, delayed, *_), members in alike.items():
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


# ---- The bound on the bytes of whole gradients that are written or reduced. ----


def pool_limit(sizes: Sequence[int]) -> int:
    """Bytes that are enough to write a unit's gradients while an equal unit's gradients are being reduced.

    sizes  bytes of the unit's buckets

    That is sum + max(largest bucket, sum / 2): twice the unit for one bucket, one and a half times the unit for several
    buckets of at most half the unit. The first of several buckets are reduced before the last are written.
    """
    return sum(sizes) + max(max(sizes, default=0), sum(sizes) // 2)


def num_to_end(written: int, launched: Sequence[int], limit: int) -> int:
    """Number of launched reductions, the oldest first, that must end before a bucket takes memory.

    written   bytes of the bucket, and of the buckets of its unit that have memory and are not launched. Other units
              that are still being written do not count: a wait for them might never end
    launched  bytes of each bucket whose memory a reduction uses, the oldest first
    limit     bytes that ``written`` and ``launched`` may have together
    """
    taken = written + sum(launched)
    for count, nbytes in enumerate(launched):
        if taken <= limit:
            return count
        taken -= nbytes
    return len(launched)
