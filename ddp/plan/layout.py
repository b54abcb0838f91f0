"""The plan of gradient memory: where each parameter's gradient lies, where buckets are cut, in which order they launch.

Integers only. No storage, no collectives, nothing that depends on the rank: the same inputs give the same plan on every
rank, and ``GradPlan.fingerprint`` is what ranks compare.

One buffer (parameters of one dtype, gradients of one dtype, dense or expert), for a sharding degree of 2::

    offset 0          64         128                    256          320               512
           |  head.weight  |  norm.weight  |   padding    |  up.weight  |   padding      |
           |------------- bucket 0 --------|--------------|---------- bucket 1 ----------|
           |     rank 0's shard     |    rank 1's shard   |  rank 0's   |   rank 1's     |

Parameters start at multiples of 64 elements, buckets end at multiples of lcm(degree, 128), and a parameter is never
split between buckets. Within a buffer parameters lie in the order in which backward reaches them.

Matrix optimizers (Muon) need whole parameters on one rank. With ``keep_params_whole`` no shard border goes through a
parameter: shards are as long as the fullest one, and what the others lack is padding::

    offset 0          64              128           192           256
           |  head.weight  |  up.weight  |  norm.weight  |  padding  |
           |------ rank 0's shard -------|------ rank 1's shard -----|

Where a parameter has an *atom* (``ParamSpec.atom``) of more than one element, borders inside it lie between atoms.
Parameters of a bucket then lie in the order that needs the shortest shards, see ``layout_atoms.py``.
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .atoms import arrange, cuts_an_atom
from .cut import PARAM_ALIGNMENT, bucket_numel_for, cut, stack_whole
from .split import split

__all__ = ["BucketLayout", "BufferLayout", "GradPlan", "ParamSlot", "ParamSpec", "plan_gradients"]

BUCKET_ALIGNMENT = 128  # elements: a bucket's start suits vectorised kernels whatever the bucket before it holds
BUSBW_ALIGNMENT = 2**16  # elements: NCCL's ring reaches its bus bandwidth only on such multiples (Megatron-LM)
MIN_DEFAULT_BUCKET_NUMEL = 40_000_000
DEFAULT_BUCKET_NUMEL_PER_RANK = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """What the plan needs to know of one parameter."""

    name: str
    """Fully qualified name, unique."""
    shape: tuple[int, ...]
    """Shape of the parameter; () for a scalar."""
    param_dtype: torch.dtype
    """Dtype of the parameter itself."""
    grad_dtype: torch.dtype
    """Dtype of its ``main_grad``."""
    grid_name: str = "dense"
    """Which ranks the gradient is reduced over: "dense", all data-parallel ranks, or "expert", those that hold the same
    experts. Parameters of different grids never share a buffer."""
    delayed: bool = False
    """Its weight gradient is computed after the main backward: never in a bucket with undelayed parameters."""
    own_bucket: bool = False
    """Gets a bucket of its own (an embedding that is tied across pipeline stages)."""
    atom: int = 1
    """Consecutive elements that no shard border cuts, counted from the parameter's start: 1, a row's, a block of
    rows', or at least ``numel``. The last atom may be shorter. ``layout_atoms.atom_of`` computes it from the shape."""

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"parameter '{self.name}': negative size in shape {self.shape}")
        if self.atom < 1:
            raise ValueError(f"parameter '{self.name}': an atom is at least 1 element, got {self.atom}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSlot:
    """The place of one parameter: elements [start, start + numel) of its buffer."""

    spec: ParamSpec
    start: int

    @property
    def end(self) -> int:
        """First element behind the parameter."""
        return self.start + self.spec.numel


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketLayout:
    """A contiguous run of a buffer that is reduced by one collective."""

    index: int
    """Position in the launch order, over all buffers of the plan."""
    start: int
    """First element in its buffer."""
    end: int
    """First element behind it, padding included."""
    shard_degree: int
    """Number of equal shards."""
    slots: tuple[ParamSlot, ...]
    """Parameters, in the order in which backward reaches them. They lie in this order unless they are kept whole, or
    atoms are."""
    keeps_params_whole: bool = False
    """Every parameter lies in one shard."""

    def __post_init__(self) -> None:
        if not self.slots:
            raise ValueError(f"bucket {self.index} holds no parameter")
        if self.numel % self.shard_degree:
            raise ValueError(
                f"bucket {self.index}: {self.numel} elements do not divide into {self.shard_degree} shards"
            )
        position = self.start
        for slot in sorted(self.slots, key=lambda slot: (slot.start, slot.end)):
            if slot.start < self.start or slot.end > self.end:
                raise ValueError(
                    f"bucket {self.index}: parameter '{slot.spec.name}' reaches outside [{self.start}, {self.end})"
                )
            if slot.start < position:
                raise ValueError(f"bucket {self.index}: parameter '{slot.spec.name}' overlaps the one before it")
            position = slot.end
        for slot in self.slots:
            self._check_borders(slot)

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
        """Whether its weight gradients come after the main backward."""
        return self.slots[0].spec.delayed

    @property
    def grid_name(self) -> str:
        """Which ranks it is reduced over: "dense" or "expert"."""
        return self.slots[0].spec.grid_name

    def shard(self, rank: int) -> tuple[int, int]:
        """[start, end) of one rank's shard, relative to the bucket's own start."""
        size = self.numel // self.shard_degree
        return rank * size, (rank + 1) * size

    def _check_borders(self, slot: ParamSlot) -> None:
        size, spec = self.numel // self.shard_degree, slot.spec
        if self.keeps_params_whole and cuts_an_atom(slot.start - self.start, spec.numel, max(spec.numel, 1), size):
            raise ValueError(f"bucket {self.index}: parameter '{spec.name}' is split between shards of {size}")
        if spec.atom > 1 and cuts_an_atom(slot.start - self.start, spec.numel, spec.atom, size):
            raise ValueError(
                f"bucket {self.index}: a border between shards of {size} cuts an atom of parameter '{spec.name}', "
                f"{spec.atom} elements"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLayout:
    """One allocation: parameters of one dtype with gradients of one dtype, reduced over the same ranks."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    grid_name: str
    buckets: tuple[BucketLayout, ...]

    def __post_init__(self) -> None:
        position = 0
        for bucket in self.buckets:
            if bucket.start != position:
                raise ValueError(f"bucket {bucket.index} starts at {bucket.start}, not at {position}")
            position = bucket.end

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].end


@dataclass(frozen=True)
class GradPlan:
    """All buffers of one model, and with the buckets' indices the order in which their collectives are launched."""

    buffers: tuple[BufferLayout, ...]

    @cached_property
    def buckets(self) -> tuple[BucketLayout, ...]:
        """Every bucket of every buffer, in launch order."""
        return tuple(sorted((b for buffer in self.buffers for b in buffer.buckets), key=lambda bucket: bucket.index))

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
        """Equal on two ranks exactly when their plans are equal."""
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
) -> GradPlan:
    """Lay out the gradients of ``specs``, which come **in the order in which backward reaches them**.

    shard_degree           ranks that a bucket is divided between; one number, or one for each grid name
    bucket_numel           a bucket is closed once it holds this many elements; None: max(40M, 1M x degree)
    num_buckets            instead: buckets of each buffer. Its bucket size is the smallest at which at most so many
                           come out, counting those with ``own_bucket``. Delayed and undelayed parameters need a bucket
                           each, so that more may be needed: then it is as few as can be
    pad_for_bus_bandwidth  ends every bucket at a multiple of 2^16 elements as well
    keep_params_whole      every parameter lies in one rank's shard, at a multiple of 64 elements from its start.
                           Parameters are dealt so that the shards of a bucket are about equally full, and over all
                           buckets the ranks. A bucket is closed only once it also holds ``shard_degree`` times its
                           largest parameter, and the last one takes in others until it does: padding then is less
                           than what it holds (alignment aside), unless the buffer as a whole holds less than that: a
                           parameter larger than its buffer / ``shard_degree`` makes every shard as long as itself
    max_atom_padding       a bucket that the atoms of its parameters would pad by more than this, as a fraction of their
                           elements, is split by atoms, into as few as keep below it; None: buckets stay as they are.
                           ``num_buckets`` counts them before they are split

    Undelayed buckets launch first, ordered by the parameter that backward reaches last in each; then delayed ones.
    Raises ``ValueError`` for duplicate names, no parameters, and impossible sizes.
    """
    _check_specs(specs, bucket_numel, num_buckets)
    if max_atom_padding is not None and (keep_params_whole or max_atom_padding < 0):
        raise ValueError(
            f"max_atom_padding={max_atom_padding}: it is at least 0, and None where parameters are kept whole"
        )
    names = {spec.grid_name: None for spec in specs}
    degrees = {name: shard_degree if isinstance(shard_degree, int) else shard_degree[name] for name in names}
    for grid_name, degree in degrees.items():
        if degree < 1:
            raise ValueError(f"shard_degree of '{grid_name}' parameters must be at least 1, got {degree}")

    by_buffer: dict[tuple[torch.dtype, torch.dtype, str], list[ParamSpec]] = {}
    for spec in specs:
        by_buffer.setdefault((spec.param_dtype, spec.grad_dtype, spec.grid_name), []).append(spec)
    runs = {}
    for key, members in by_buffer.items():
        degree = degrees[key[2]]
        numel = bucket_numel or default_bucket_numel(degree)
        if num_buckets is not None:
            numel = _bucket_numel_for(members, num_buckets)
        runs[key] = _cut(members, numel, degree if keep_params_whole else 1)
        if max_atom_padding is not None:
            multiple = _bucket_alignment(degree, pad_for_bus_bandwidth) // degree
            runs[key] = [part for run in runs[key] for part in _split(run, degree, multiple, max_atom_padding)]
    launch_index = _launch_order(specs, (run for buffer_runs in runs.values() for run in buffer_runs))

    buffers = []
    loads = {grid_name: [0] * degree for grid_name, degree in degrees.items()}
    for (param_dtype, grad_dtype, grid_name), buffer_runs in runs.items():
        alignment = _bucket_alignment(degrees[grid_name], pad_for_bus_bandwidth)
        buckets: list[BucketLayout] = []
        for run in buffer_runs:
            start = buckets[-1].end if buckets else 0
            slots, numel = _place(run, start, alignment, loads[grid_name], keep_params_whole)
            buckets.append(
                BucketLayout(
                    index=launch_index[run[0].name],
                    start=start,
                    end=start + numel,
                    shard_degree=degrees[grid_name],
                    slots=slots,
                    keeps_params_whole=keep_params_whole,
                )
            )
        buffers.append(
            BufferLayout(param_dtype=param_dtype, grad_dtype=grad_dtype, grid_name=grid_name, buckets=tuple(buckets))
        )
    return GradPlan(buffers=tuple(buffers))


def default_bucket_numel(shard_degree: int) -> int:
    """Elements of a bucket where none are given: large enough that each rank's share keeps a link busy."""
    return max(MIN_DEFAULT_BUCKET_NUMEL, DEFAULT_BUCKET_NUMEL_PER_RANK * shard_degree)


def _bucket_alignment(degree: int, pad_for_bus_bandwidth: bool) -> int:
    """Elements that a bucket is a multiple of."""
    return math.lcm(degree, BUSBW_ALIGNMENT if pad_for_bus_bandwidth else BUCKET_ALIGNMENT)


def _check_specs(specs: Sequence[ParamSpec], bucket_numel: int | None, num_buckets: int | None) -> None:
    if not specs:
        raise ValueError("there is no parameter that requires a gradient: nothing to lay out")
    if bucket_numel is not None and bucket_numel < 1:
        raise ValueError(f"bucket_size must be at least 1 element, got {bucket_numel}")
    if num_buckets is not None and num_buckets < 1:
        raise ValueError(f"num_buckets must be at least 1, got {num_buckets}")
    if num_buckets is not None and bucket_numel is not None:
        raise ValueError(
            f"bucket_size={bucket_numel} and num_buckets={num_buckets} both say where buckets end: give one of them"
        )
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"parameter '{spec.name}' appears twice")
        seen.add(spec.name)


def _bucket_numel_for(specs: Sequence[ParamSpec], num_buckets: int) -> int:
    """The bucket size of one buffer for ``num_buckets`` of them; those of their own are there already."""
    shared = [[s.numel for s in specs if s.delayed is delayed and not s.own_bucket] for delayed in (False, True)]
    return bucket_numel_for(shared, num_buckets - sum(spec.own_bucket for spec in specs))


def _cut(specs: Sequence[ParamSpec], bucket_numel: int, degree: int) -> list[list[ParamSpec]]:
    """Cut one buffer's parameters into buckets, undelayed ones first; they lie in memory as they are completed."""
    reached = {spec.name: position for position, spec in enumerate(specs)}
    runs: list[list[ParamSpec]] = []
    for delayed in (False, True):
        alone = [[spec] for spec in specs if spec.delayed is delayed and spec.own_bucket]
        shared = [spec for spec in specs if spec.delayed is delayed and not spec.own_bucket]
        counts = cut([spec.numel for spec in shared], bucket_numel, degree)
        remaining = iter(shared)
        together = [list(itertools.islice(remaining, count)) for count in counts]
        runs += sorted(alone + together, key=lambda run: reached[run[-1].name])
    return runs


def _split(run: list[ParamSpec], degree: int, multiple: int, max_padding: float) -> list[list[ParamSpec]]:
    """The buckets that one bucket becomes because of its parameters' atoms."""
    if degree == 1 or all(spec.atom == 1 for spec in run):
        return [run]
    groups = split([spec.numel for spec in run], [spec.atom for spec in run], degree, multiple, max_padding)
    return [[run[index] for index in group] for group in groups]


def _place(
    run: Sequence[ParamSpec], start: int, alignment: int, loads: list[int], keep_whole: bool
) -> tuple[tuple[ParamSlot, ...], int]:
    """The places of one bucket's parameters and its elements. Adds to the ranks' ``loads`` where they are kept whole.

    One parameter lies behind the other, unless that would cut what is to stay together.
    """
    degree, numels = len(loads), [spec.numel for spec in run]
    starts: Sequence[int]
    if keep_whole:  # shards start where parameters may start, and together they end where a bucket may end
        starts, shard_numel = stack_whole(numels, loads, math.lcm(PARAM_ALIGNMENT, alignment // degree))
    else:
        starts, shard_numel = arrange(numels, [spec.atom for spec in run], degree, alignment // degree)
    slots = (ParamSlot(spec=spec, start=start + offset) for spec, offset in zip(run, starts, strict=True))
    return tuple(slots), shard_numel * degree


def _launch_order(specs: Sequence[ParamSpec], runs: Iterable[Sequence[ParamSpec]]) -> dict[str, int]:
    """Name of a bucket's first parameter -> its place in the launch order."""
    reached = {spec.name: position for position, spec in enumerate(specs)}
    ordered = sorted(runs, key=lambda run: (run[0].delayed, max(reached[spec.name] for spec in run)))
    return {run[0].name: index for index, run in enumerate(ordered)}
