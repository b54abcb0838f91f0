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
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = ["BucketLayout", "BufferLayout", "GradPlan", "ParamSlot", "ParamSpec", "plan_gradients"]

PARAM_ALIGNMENT = 64  # elements: 128 bytes of bf16, one cache line of parameters
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
    group: str = "dense"
    """Parameters of different groups (dense, expert) reduce over different ranks and never share a buffer."""
    delayed: bool = False
    """Its weight gradient is computed after the main backward: never in a bucket with undelayed parameters."""
    own_bucket: bool = False
    """Gets a bucket of its own (an embedding that is tied across pipeline stages)."""

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"parameter '{self.name}': negative size in shape {self.shape}")

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
    """Parameters, in the order in which backward reaches them."""

    def __post_init__(self) -> None:
        if not self.slots:
            raise ValueError(f"bucket {self.index} holds no parameter")
        if self.numel % self.shard_degree:
            raise ValueError(
                f"bucket {self.index}: {self.numel} elements do not divide into {self.shard_degree} shards"
            )
        if self.slots[0].start != self.start or self.slots[-1].end > self.end:
            raise ValueError(f"bucket {self.index}: parameters reach outside [{self.start}, {self.end})")

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

    def shard(self, rank: int) -> tuple[int, int]:
        """[start, end) of one rank's shard, relative to the bucket's own start."""
        size = self.numel // self.shard_degree
        return rank * size, (rank + 1) * size


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLayout:
    """One allocation: parameters of one dtype with gradients of one dtype, of one group."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    group: str
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
    pad_for_bus_bandwidth: bool = False,
) -> GradPlan:
    """Lay out the gradients of ``specs``, which come **in the order in which backward reaches them**.

    shard_degree           ranks that a bucket is divided between; one number, or one for each group
    bucket_numel           a bucket is closed once it holds this many elements; None: max(40M, 1M x degree)
    pad_for_bus_bandwidth  ends every bucket at a multiple of 2^16 elements as well

    Undelayed buckets launch first, ordered by the parameter that backward reaches last in each; then delayed ones.
    Raises ``ValueError`` for duplicate names, no parameters, and impossible sizes.
    """
    _check_specs(specs, bucket_numel)
    degrees = {s.group: shard_degree if isinstance(shard_degree, int) else shard_degree[s.group] for s in specs}
    for group, degree in degrees.items():
        if degree < 1:
            raise ValueError(f"shard_degree of group '{group}' must be at least 1, got {degree}")

    by_buffer: dict[tuple[torch.dtype, torch.dtype, str], list[ParamSpec]] = {}
    for spec in specs:
        by_buffer.setdefault((spec.param_dtype, spec.grad_dtype, spec.group), []).append(spec)
    runs = {
        key: _cut(members, bucket_numel or default_bucket_numel(degrees[key[2]])) for key, members in by_buffer.items()
    }
    launch_index = _launch_order(specs, (run for buffer_runs in runs.values() for run in buffer_runs))

    buffers = []
    for (param_dtype, grad_dtype, group), buffer_runs in runs.items():
        alignment = math.lcm(degrees[group], BUSBW_ALIGNMENT if pad_for_bus_bandwidth else BUCKET_ALIGNMENT)
        buckets, position = [], 0
        for run in buffer_runs:
            slots, start = [], position
            for spec in run:
                slots.append(ParamSlot(spec=spec, start=_round_up(position, PARAM_ALIGNMENT)))
                position = slots[-1].end
            position = start + max(_round_up(position - start, alignment), alignment)
            index = launch_index[run[0].name]
            buckets.append(
                BucketLayout(index=index, start=start, end=position, shard_degree=degrees[group], slots=tuple(slots))
            )
        buffers.append(
            BufferLayout(param_dtype=param_dtype, grad_dtype=grad_dtype, group=group, buckets=tuple(buckets))
        )
    return GradPlan(buffers=tuple(buffers))


def default_bucket_numel(shard_degree: int) -> int:
    """Elements of a bucket where none are given: large enough that each rank's share keeps a link busy."""
    return max(MIN_DEFAULT_BUCKET_NUMEL, DEFAULT_BUCKET_NUMEL_PER_RANK * shard_degree)


def _check_specs(specs: Sequence[ParamSpec], bucket_numel: int | None) -> None:
    if not specs:
        raise ValueError("there is no parameter that requires a gradient: nothing to lay out")
    if bucket_numel is not None and bucket_numel < 1:
        raise ValueError(f"bucket_size must be at least 1 element, got {bucket_numel}")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"parameter '{spec.name}' appears twice")
        seen.add(spec.name)


def _cut(specs: Sequence[ParamSpec], bucket_numel: int) -> list[list[ParamSpec]]:
    """Cut one buffer's parameters into buckets: undelayed ones first, a bucket closed once it is large enough."""
    runs: list[list[ParamSpec]] = []
    for delayed in (False, True):
        current: list[ParamSpec] = []
        held = 0
        for spec in (spec for spec in specs if spec.delayed is delayed):
            if spec.own_bucket:
                runs.append([spec])
                continue
            current.append(spec)
            held += spec.numel
            if held >= bucket_numel:
                runs.append(current)
                current, held = [], 0
        if current:
            runs.append(current)
    return runs


def _launch_order(specs: Sequence[ParamSpec], runs: Iterable[Sequence[ParamSpec]]) -> dict[str, int]:
    """Name of a bucket's first parameter -> its place in the launch order."""
    reached = {spec.name: position for position, spec in enumerate(specs)}
    ordered = sorted(runs, key=lambda run: (run[0].delayed, max(reached[spec.name] for spec in run)))
    return {run[0].name: index for index, run in enumerate(ordered)}


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
