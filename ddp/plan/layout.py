"""The plan of gradient memory: where each parameter's gradient lies, where buckets end, in which order they launch.

The plan holds integers only: no storage, no collectives, nothing that depends on the rank. The same inputs give the
same plan on every rank. ``wrapper/setup_checks.py`` compares plans between ranks.

A buffer holds parameters of one dtype, with gradients of one dtype, either dense or expert. With 2 shards::

    offset 0          64         128                    256          320               512
           |  head.weight  |  norm.weight  |   padding    |  up.weight  |   padding      |
           |------------- bucket 0 --------|--------------|---------- bucket 1 ----------|
           |     rank 0's shard     |    rank 1's shard   |  rank 0's   |   rank 1's     |

Parameters start at multiples of 64 elements. Buckets end at multiples of lcm(degree, 128). A parameter lies in one
bucket. Within a buffer parameters lie in the order in which backward reaches them.

Matrix optimizers (Muon) need whole parameters on one rank. In the buckets of those (``ParamSpec.whole``, or of all
with ``keep_params_whole``) no shard border cuts a parameter: all shards are as long as the fullest shard, and the rest
of each shard is padding. ``dealing.py`` says which parameters share a bucket, and on which rank each is::

    offset 0          64              128           192           256
           |  head.weight  |   padding   |  norm.weight  | up.weight |
           |------ rank 0's shard -------|------ rank 1's shard -----|

A parameter may have an *atom* (``ParamSpec.atom``) of more than one element: then shard borders inside the parameter
lie between atoms. The bucket's parameters then lie in the order that gives the shortest shards, see ``atoms.py``.
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .atoms import arrange, split
from .cut import PARAM_ALIGNMENT, Range, bucket_numel_for, cut
from .dealing import Whole, rows_of, stack_whole, update_cost

__all__ = ["BucketLayout", "BufferLayout", "GradPlan", "ParamSlot", "ParamSpec", "plan_gradients"]

BUCKET_ALIGNMENT = 128  # elements: every bucket starts where vectorised kernels can start
BUSBW_ALIGNMENT = 2**16  # elements: NCCL's ring reaches its bus bandwidth on such multiples only (Megatron-LM)
MIN_DEFAULT_BUCKET_NUMEL = 40_000_000
DEFAULT_BUCKET_NUMEL_PER_RANK = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """One parameter, as the plan knows it."""

    name: str
    """Fully qualified name, unique."""
    shape: tuple[int, ...]
    """Shape of the parameter; () for a scalar."""
    param_dtype: torch.dtype
    """Dtype of the parameter itself."""
    grad_dtype: torch.dtype
    """Dtype of its ``main_grad``."""
    grid_name: str = "dense"
    """Which ranks the gradient is reduced over: a name of ``make_grids``, "dense" or "expert" where nothing is cut by
    tensor parallelism. Parameters of different grids never share a buffer."""
    delayed: bool = False
    """The weight gradient is computed after the main backward. Delayed and undelayed parameters share no bucket."""
    own_bucket: bool = False
    """The parameter gets a bucket of its own (an embedding that is tied across pipeline stages)."""
    atom: int = 1
    """Number of consecutive elements that no shard border cuts, counted from the parameter's start: an element's, a
    row's, those of a block of rows, or all. The last atom may be shorter. ``atoms.atom_of`` computes it."""
    whole: bool = False
    """The parameter lies in one shard. Such parameters and others share no bucket."""
    matrices: bool = False
    """The parameter is a stack [experts, rows, columns], and its atom a matrix. Likewise in buckets of their own."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSlot:
    """The place of one parameter: elements [start, end) of its buffer."""

    spec: ParamSpec
    start: int

    @property
    def end(self) -> int:
        """First element behind the parameter."""
        return self.start + self.spec.numel

    @property
    def range(self) -> Range:
        """The parameter's elements, counted in the buffer."""
        return Range(self.start, self.end)


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketLayout:
    """Consecutive elements of a buffer that are reduced together."""

    index: int
    """Position in the launch order, over all buffers of the plan."""
    start: int
    """First element in its buffer."""
    end: int
    """First element behind the bucket's padding."""
    shard_degree: int
    """Number of equal shards."""
    slots: tuple[ParamSlot, ...]
    """Parameters, in the order in which backward reaches them. In memory they lie in this order too, unless parameters
    or atoms are kept whole."""
    keeps_params_whole: bool = False
    """Whether every parameter lies in one shard."""

    @property
    def keeps_matrices_whole(self) -> bool:
        """Whether every matrix lies in one shard."""
        return self.keeps_params_whole or self.slots[0].spec.matrices

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.end - self.start

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum(slot.spec.numel for slot in self.slots)

    @property
    def delayed(self) -> bool:
        """Whether the weight gradients are computed after the main backward."""
        return self.slots[0].spec.delayed

    @property
    def grid_name(self) -> str:
        """Which ranks the bucket is reduced over: see ``ParamSpec``."""
        return self.slots[0].spec.grid_name

    def shard(self, rank: int) -> Range:
        """One rank's shard, counted from the start of the bucket."""
        size = self.numel // self.shard_degree
        return Range(rank * size, (rank + 1) * size)


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLayout:
    """One allocation: parameters of one dtype with gradients of one dtype, reduced over the same ranks."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    grid_name: str
    buckets: tuple[BucketLayout, ...]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].end


@dataclass(frozen=True)
class GradPlan:
    """All buffers of one model. The buckets' indices are the order in which their collectives launch."""

    buffers: tuple[BufferLayout, ...]

    @cached_property
    def buckets(self) -> tuple[BucketLayout, ...]:
        """Every bucket of every buffer, in launch order."""
        return tuple(sorted((b for buffer in self.buffers for b in buffer.buckets), key=lambda bucket: bucket.index))

    @cached_property
    def grid_names(self) -> tuple[str, ...]:
        """The kinds of parameters there are, see ``ParamSpec``, in the order of buffers."""
        return tuple(dict.fromkeys(buffer.grid_name for buffer in self.buffers))

    @property
    def numel(self) -> int:
        """Elements of all buffers, padding included."""
        return sum(buffer.numel for buffer in self.buffers)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return sum(bucket.padding for bucket in self.buckets)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that is equal on two ranks exactly when their plans are equal."""
        description = "\n".join(repr(dataclasses.astuple(buffer)) for buffer in self.buffers)
        return hashlib.sha256(description.encode()).hexdigest()


def plan_gradients(
    specs: Sequence[ParamSpec],
    *,
    shard_degree: int | Mapping[str, int] = 1,
    bucket_numel: int | None = None,
    num_buckets: int | None = None,
    pad_for_bus_bandwidth: bool = False,
    keep_params_whole: bool = False,
    max_atom_padding: float | None = None,
    held: Mapping[str, tuple[int, ...]] | None = None,
) -> GradPlan:
    """Lay out the gradients of ``specs``, which come **in the order in which backward reaches them**.

    shard_degree           number of shards of a bucket: one number, or one for each grid name
    bucket_numel           a bucket is closed once it holds this many elements; None: max(40M, 1M x degree)
    num_buckets            at most so many buckets in each buffer, those with ``own_bucket`` included, at the smallest
                           bucket size that allows it; excludes ``bucket_numel``. Delayed and undelayed parameters, and
                           whole ones, need a bucket each: where ``num_buckets`` is too few for that, each gets one
    pad_for_bus_bandwidth  every bucket ends at a multiple of 2^16 elements as well
    keep_params_whole      every parameter is whole: it lies in one shard, at a multiple of 64 elements from the shard's
                           start. Equal parameters, as many as shards, are rows without padding; a bucket is one row or
                           several, or has what is left, with little padding. Ranks get about equal costs over all
                           buckets. Where a parameter is larger than its buffer / ``shard_degree``, every shard is as
                           long as this parameter
    max_atom_padding       most padding that atoms may cause in a bucket, as a fraction of its parameters' elements. A
                           bucket above it is split by atoms, into as few buckets as stay below; None: no bucket is
                           split. ``num_buckets`` counts buckets before the split
    held                   shapes of parameters that are laid out in other shapes than ``specs`` have, by which buckets
                           are cut: tensor-parallel ranks with uneven slices close buckets at the same parameters

    Undelayed buckets launch first, in the order in which backward reaches the last parameter of each; then delayed
    buckets. What makes a plan sound, ``tests/ddp/plan`` checks over random models.
    """
    degrees = {
        spec.grid_name: shard_degree if isinstance(shard_degree, int) else shard_degree[spec.grid_name]
        for spec in specs
    }
    whole = frozenset(spec.name for spec in specs if keep_params_whole or spec.whole)
    by_buffer: dict[tuple[torch.dtype, torch.dtype, str], list[ParamSpec]] = {}
    for spec in specs:
        by_buffer.setdefault((spec.param_dtype, spec.grad_dtype, spec.grid_name), []).append(spec)
    buckets_of = {}
    for key, members in by_buffer.items():
        degree = degrees[key[2]]
        numel = bucket_numel or default_bucket_numel(degree)
        if num_buckets is not None:
            numel = _bucket_numel_for(members, num_buckets, degree, whole)
        buckets_of[key] = _cut(members, numel, degree, whole)
        if max_atom_padding is not None:
            multiple = _bucket_alignment(degree, pad_for_bus_bandwidth) // degree
            buckets_of[key] = [
                part for bucket in buckets_of[key] for part in _split(bucket, degree, multiple, max_atom_padding)
            ]
    launch_index = _launch_order(specs, (bucket for buffer_specs in buckets_of.values() for bucket in buffer_specs))

    buffers = []
    loads = {grid_name: [0.0] * degree for grid_name, degree in degrees.items()}
    for (param_dtype, grad_dtype, grid_name), buffer_specs in buckets_of.items():
        alignment = _bucket_alignment(degrees[grid_name], pad_for_bus_bandwidth)
        buckets: list[BucketLayout] = []
        for bucket_specs in buffer_specs:
            start = buckets[-1].end if buckets else 0
            keep_whole = bucket_specs[0].name in whole
            if held:
                bucket_specs = [dataclasses.replace(s, shape=held.get(s.name, s.shape)) for s in bucket_specs]
            slots, numel = _slots_of(bucket_specs, start, alignment, loads[grid_name], keep_whole)
            buckets.append(
                BucketLayout(
                    index=launch_index[bucket_specs[0].name],
                    start=start,
                    end=start + numel,
                    shard_degree=degrees[grid_name],
                    slots=slots,
                    keeps_params_whole=keep_whole,
                )
            )
        buffers.append(
            BufferLayout(param_dtype=param_dtype, grad_dtype=grad_dtype, grid_name=grid_name, buckets=tuple(buckets))
        )
    return GradPlan(buffers=tuple(buffers))


def default_bucket_numel(shard_degree: int) -> int:
    """Elements of a bucket where the caller gives no size: large enough that each rank's shard keeps a link busy."""
    return max(MIN_DEFAULT_BUCKET_NUMEL, DEFAULT_BUCKET_NUMEL_PER_RANK * shard_degree)


def _bucket_alignment(degree: int, pad_for_bus_bandwidth: bool) -> int:
    """A bucket's number of elements is a multiple of this."""
    return math.lcm(degree, BUSBW_ALIGNMENT if pad_for_bus_bandwidth else BUCKET_ALIGNMENT)


def _bucket_numel_for(specs: Sequence[ParamSpec], num_buckets: int, degree: int, whole: Collection[str]) -> int:
    """The bucket size with which one buffer has at most ``num_buckets`` buckets, those with ``own_bucket`` included."""
    shared = _alike([spec for spec in specs if not spec.own_bucket], whole)
    num_own = sum(spec.own_bucket for spec in specs)
    everything = 1 + sum(spec.numel for spec in specs)  # at this size the rest of whole parameters is one bucket
    rows = [[sum(spec.numel for spec in row) for row in _rows(alike, everything, degree, whole)] for alike in shared]
    numel = bucket_numel_for(rows, num_buckets - num_own)
    # At this size the rest may be several buckets. Where that makes too many, the size grows.
    while whole and len(_cut(specs, numel, degree, whole)) > max(num_buckets, num_own + len(shared)):
        numel *= 2
    return numel


def _cut(specs: Sequence[ParamSpec], bucket_numel: int, degree: int, whole: Collection[str]) -> list[list[ParamSpec]]:
    """Cut one buffer's parameters into buckets, undelayed ones first, in the order in which backward completes them."""
    reached = {spec.name: position for position, spec in enumerate(specs)}
    buckets: list[list[ParamSpec]] = []
    for delayed in (False, True):
        mine = [spec for spec in specs if spec.delayed is delayed]
        parts = [[spec] for spec in mine if spec.own_bucket]
        for alike in _alike([spec for spec in mine if not spec.own_bucket], whole):
            rows = _rows(alike, bucket_numel, degree, whole)
            least = None
            if alike[0].matrices and alike[0].name not in whole:
                least = [_least_of_stacks(spec, degree) for spec in alike]
            remaining = iter(rows)
            for count in cut([sum(spec.numel for spec in row) for row in rows], bucket_numel, least):
                bucket = [spec for row in itertools.islice(remaining, count) for spec in row]
                parts.append(sorted(bucket, key=lambda spec: reached[spec.name]))
        buckets += sorted(parts, key=lambda bucket: reached[bucket[-1].name])
    return buckets


def _alike(specs: Iterable[ParamSpec], whole: Collection[str]) -> list[list[ParamSpec]]:
    """Parameters that may share buckets."""
    found: dict[tuple[bool, bool, bool], list[ParamSpec]] = {}
    for spec in specs:
        found.setdefault((spec.delayed, spec.name in whole, spec.matrices), []).append(spec)
    return list(found.values())


def _rows(specs: Sequence[ParamSpec], bucket_numel: int, degree: int, whole: Collection[str]) -> list[list[ParamSpec]]:
    """Return the groups that no bucket border cuts: single parameters, or of whole ones ``rows_of``."""
    if specs[0].name not in whole:
        return [[spec] for spec in specs]
    return [[specs[index] for index in row] for row in rows_of([_whole(spec) for spec in specs], bucket_numel, degree)]


def _least_of_stacks(spec: ParamSpec, degree: int) -> int:
    """Elements of a bucket with this stack. A last shard that is shorter by a matrix is then a sixteenth shorter."""
    return degree * spec.atom * (16 if spec.numel % (degree * spec.atom) else 1)


def _whole(spec: ParamSpec) -> Whole:
    return Whole(spec.numel, update_cost(spec.shape))


def _split(specs: list[ParamSpec], degree: int, multiple: int, max_padding: float) -> list[list[ParamSpec]]:
    """Split one bucket's parameters where their atoms would cost too much padding."""
    if degree == 1:
        return [specs]
    parts = split([spec.numel for spec in specs], [spec.atom for spec in specs], degree, multiple, max_padding)
    return [[specs[index] for index in part] for part in parts]


def _slots_of(
    specs: Sequence[ParamSpec], start: int, alignment: int, loads: list[float], keep_whole: bool
) -> tuple[tuple[ParamSlot, ...], int]:
    """The slots of one bucket's parameters, and the number of the bucket's elements.

    loads  costs of whole parameters on each rank so far; those of this bucket are added
    """
    degree = len(loads)
    starts: Sequence[int]
    if keep_whole:  # a shard starts where a parameter may start, and the last shard ends where a bucket may end
        multiple = math.lcm(PARAM_ALIGNMENT, alignment // degree)
        starts, shard_numel = stack_whole([_whole(spec) for spec in specs], loads, multiple)
    else:
        numels, atoms = [spec.numel for spec in specs], [spec.atom for spec in specs]
        starts, shard_numel = arrange(numels, atoms, degree, alignment // degree)
    slots = (ParamSlot(spec=spec, start=start + offset) for spec, offset in zip(specs, starts, strict=True))
    return tuple(slots), shard_numel * degree


def _launch_order(specs: Sequence[ParamSpec], buckets: Iterable[Sequence[ParamSpec]]) -> dict[str, int]:
    """Name of a bucket's first parameter -> the bucket's place in the launch order."""
    reached = {spec.name: position for position, spec in enumerate(specs)}
    ordered = sorted(buckets, key=lambda bucket: (bucket[0].delayed, max(reached[spec.name] for spec in bucket)))
    return {bucket[0].name: index for index, bucket in enumerate(ordered)}
