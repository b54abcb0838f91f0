"""Parameters in flat buffers with the gradients' layout, and which of their elements this rank updates.

The range of a bucket that this rank updates is the same for parameters, masters, moments and gradients. So the
all-gather runs in place, and an elementwise optimizer sees few and long tensors::

    bucket of gradients (reduce-scattered)   | rank 0 | rank 1 | rank 2 | rank 3 |
    master and moments on rank 1                      | a  b a |                     segments: groups a, b, a
    bucket of parameters (all-gathered)      | rank 0 | rank 1 | rank 2 | rank 3 |

A *segment* is what the inner optimizer updates as one tensor. A *slice* is what this rank updates of one parameter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buckets.bucket import Bucket, BucketParam
from ..buckets.buffer import FlatBuffer
from ..buckets.checks import check_same
from ..collectives.rank_grid import group_size
from ..plan.cut import Range
from ..plan.layout import ParamSlot
from ..torch_grads.master_param import MasterParameter, make_master
from ..torch_grads.over_ranks import ShardInfo
from ..torch_grads.sharded_grad import make_sharded_grad
from ..torch_internals import weak_method
from ..wrapper.data_parallel import DistributedDataParallel

__all__ = [
    "FlatBucket",
    "ParamSlice",
    "Segment",
    "flatten_params",
    "inner_groups",
    "segments_of",
    "show_grads",
    "slices_of",
]


class FlatBucket(NamedTuple):
    """One bucket's parameters in a flat buffer, and the range of them that this rank updates."""

    bucket: Bucket
    params: Tensor
    """[bucket.numel] all ranks' parameters."""
    owned: Range
    """The elements of the bucket that this rank updates: its shard, or all of them."""
    owned_params: Tensor
    """[owned.numel] view of ``params``."""
    master: Tensor
    """[owned.numel] fp32 copy of ``owned_params``; ``owned_params`` itself where parameters are fp32 or wider, and
    where optimizer state is compact."""
    grads: Tensor
    """[owned.numel] view of the bucket's gradients."""
    bucket_params: tuple[BucketParam, ...]
    """The bucket's parameters, in the order of the layout's slots."""


class Segment(NamedTuple):
    """Consecutive elements of the owned range with one parameter group: one tensor for the inner optimizer."""

    flat: FlatBucket
    start: int
    """First element, counted from the start of the owned range."""
    end: int
    group: int
    """Index of the parameter group."""
    master: MasterParameter
    """[end - start] view of ``flat.master``; in the parameter's shape where the segment is one whole parameter."""

    @property
    def grads(self) -> Tensor:
        """View of the gradients of these elements, in the shape of ``master``."""
        return self.flat.grads[self.start : self.end].view(self.master.shape)


class ParamSlice(NamedTuple):
    """The elements [start, end) of one flattened parameter that this rank updates."""

    bucket_param: BucketParam
    start: int
    end: int
    """Equal to ``start`` where other ranks update all of the parameter."""
    view: Tensor
    """The whole parameter in the flat buffer, in the parameter's shape."""
    param: Tensor
    """[end - start] view of the parameters' flat buffer."""
    master: Tensor
    """[end - start] view of the master."""
    group: int
    """Index of the parameter group."""
    segment: Segment | None
    """The segment that holds these elements; None for an empty slice."""
    offset: int
    """Place of the first element in the segment."""
    state_by_master: Mapping[Any, Any]
    """State of the inner optimizer, by segments' masters."""

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.bucket_param.owned.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return tuple(self.bucket_param.owned.param.shape)

    @property
    def grad(self) -> Tensor:
        """[end - start] view of the gradients, which are reduced when an iteration's last backward is over.

        A read has the reduction finished where nothing else has: all ranks read, or step, in one order.
        """
        parts = self.bucket_param.record.parts()
        if parts is not None:
            parts.begin_read()
        self.bucket_param.bucket.check_readable(f"a read of the gradient of '{self.name}'")
        grads = self.bucket_param.record.view.new_empty(0) if self.segment is None else self.segment.grads.view(-1)
        return grads[self.offset : self.offset + self.end - self.start]

    @property
    def updated(self) -> Tensor | None:
        """The segment's master: the tensor under which the inner optimizer keeps the state of these elements."""
        return None if self.segment is None else self.segment.master

    def state(self) -> dict[str, Tensor]:
        """Elementwise state of the inner optimizer: views, [end - start] each. Empty before the first step."""
        return {
            key: value.view(-1)[self.offset : self.offset + self.end - self.start]
            for key, value in self._segment_state().items()
            if isinstance(value, Tensor) and self.segment is not None and value.shape == self.segment.master.shape
        }

    def scalars(self) -> dict[str, Any]:
        """The rest of the state, such as the number of steps."""
        elementwise = self.state()
        return {key: value for key, value in self._segment_state().items() if key not in elementwise}

    def _segment_state(self) -> Mapping[str, Any]:
        return {} if self.segment is None else self.state_by_master.get(self.segment.master, {})


def flatten_params(
    model: DistributedDataParallel,
    compact: Callable[[BucketParam], bool],
    place: Callable[[FlatBucket], FlatBucket],
) -> list[FlatBucket]:
    """Move the parameters into flat buffers laid out like the gradients; returns one entry for each bucket.

    compact  whether parameters of half precision have no masters beside them, alike for all of a bucket
    place    moves a bucket's masters to where they stay

    Raises ``ValueError`` for complex parameters and for parameters that share memory.
    """
    check_flattenable(model)
    by_name = {entry.owned.name: entry for entry in model.bucket_params}
    by_index = {bucket.index: bucket for bucket in model.buckets}
    flats = []
    for layout in model.plan.buffers:
        gather = model.grids[layout.grid_name].gather if model.copy_engines else None
        mapped_in = gather if group_size(gather) > 1 else None
        buffer = FlatBuffer(layout, layout.param_dtype, model.device, mapped_in=mapped_in)
        for bucket_layout in layout.buckets:
            bucket_params = tuple(by_name[slot.spec.name] for slot in bucket_layout.slots)
            for slot, entry in zip(bucket_layout.slots, bucket_params, strict=True):
                view = buffer.param_view(slot)
                view.copy_(entry.owned.param.detach())
                entry.owned.param.data = view
            bucket, params = by_index[bucket_layout.index], buffer.bucket_view(bucket_layout)
            owned = Range(*model.owned_range(bucket_layout))
            owned_params, grads = params[slice(*owned)], bucket.reduced
            in_half = owned_params.dtype in (torch.bfloat16, torch.float16)
            master = owned_params.float() if in_half and not compact(bucket_params[0]) else owned_params
            flats.append(place(FlatBucket(bucket, params, owned, owned_params, master, grads, bucket_params)))
    return flats


def check_flattenable(model: DistributedDataParallel) -> None:
    """Raise ``ValueError`` for parameters that flat buffers cannot hold as they are.

    Raises ``RuntimeError`` for a parameter that was replaced, moved or cast after wrapping.
    """
    names: dict[int, str] = {}
    for entry in model.bucket_params:
        check_same(entry)
        name, param = entry.owned.name, entry.owned.param
        if param.is_complex():
            raise ValueError(
                f"parameter '{name}' is {entry.dtype}: DistributedOptimizer updates real parameters; use a stock "
                f"optimizer, with use_distributed_optimizer=False"
            )
        first = names.setdefault(param.data_ptr(), name)
        if first != name and param.numel():
            raise ValueError(
                f"parameters '{first}' and '{name}' share memory, which flat buffers would undo: tie them as one "
                f"nn.Parameter object"
            )


def segments_of(
    flats: Sequence[FlatBucket], group_of: Callable[[BucketParam], int], is_whole: Callable[[BucketParam], bool]
) -> list[Segment]:
    """Cut the owned range of every bucket into segments.

    A segment is a whole parameter, in its shape, or this rank's matrices of a stack; or all elements of one group up to
    the next segment, padding included.
    An owned range of padding alone has no segment: a checkpoint has no state of padding, so that the optimizer would
    lack this state after a load.

    group_of  index of a parameter's group
    is_whole  whether what this rank has of a parameter, all of it or whole matrices, is a segment
    """
    segments = []
    for flat in flats:
        origin = flat.bucket.layout.start + flat.owned.start
        held = [(entry, part.counted_from(origin)) for entry, _, part in _owned_parts(flat) if part.numel]
        held.sort(key=lambda entry: entry[1].start)
        cuts: list[tuple[int, int, Range | None, tuple[int, ...]]] = []  # first element, group, whole parameter, shape
        for entry, part in held:
            group = group_of(entry)
            if is_whole(entry):
                shape = (-1, *entry.owned.param.shape[1:])  # of a stack, this rank's matrices; of a scalar, one element
                cuts.append((part.start, group, part, shape))
            elif not cuts or cuts[-1][1] != group:
                cuts.append((part.start if cuts else 0, group, None, (-1,)))
        if not cuts:
            continue
        ends = [*(start for start, *_ in cuts[1:]), flat.master.numel()]
        for (first, group, alone, shape), behind in zip(cuts, ends, strict=True):
            start, end = alone or (first, behind)
            segments.append(Segment(flat, start, end, group, make_master(flat.master[start:end].view(shape))))
    return segments


def _owned_parts(flat: FlatBucket) -> list[tuple[BucketParam, ParamSlot, Range]]:
    """Each parameter, its slot, and the elements of the slot that this rank updates, counted in the buffer."""
    layout = flat.bucket.layout
    owned = flat.owned.counted_from(-layout.start)
    return [
        (entry, slot, slot.range.intersect(owned)) for slot, entry in zip(layout.slots, flat.bucket_params, strict=True)
    ]


def slices_of(
    flats: Sequence[FlatBucket],
    segments: Sequence[Segment],
    group_of: Callable[[BucketParam], int],
    state_by_master: Mapping[Any, Any],
) -> list[ParamSlice]:
    """This rank's slice of every parameter, in the order of buckets."""
    by_bucket: dict[int, list[Segment]] = {}
    for segment in segments:
        by_bucket.setdefault(segment.flat.bucket.index, []).append(segment)
    slices = []
    for flat in flats:
        origin = flat.bucket.layout.start + flat.owned.start
        for entry, slot, part in _owned_parts(flat):
            held = in_param = Range(0, 0)
            own = None
            if part.numel:
                held, in_param = part.counted_from(origin), part.counted_from(slot.start)
                own = next(s for s in by_bucket[flat.bucket.index] if s.start <= held.start and held.end <= s.end)
            slices.append(
                ParamSlice(
                    bucket_param=entry,
                    start=in_param.start,
                    end=in_param.end,
                    view=entry.owned.param.detach(),
                    param=flat.owned_params[slice(*held)],
                    master=flat.master[slice(*held)],
                    group=group_of(entry),
                    segment=own,
                    offset=0 if own is None else held.start - own.start,
                    state_by_master=state_by_master,
                )
            )
    return slices


def inner_groups(segments: Sequence[Segment], groups: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An inner optimizer's groups of masters, from the options of each by index. A group may be empty on this rank."""
    return [
        {**own, "params": [segment.master for segment in segments if segment.group == index]}
        for index, own in groups.items()
    ]


def show_grads(segments: Iterable[Segment], optimizer: Any) -> None:
    """Have ``.grad`` of masters show this rank's elements, whose norms and checks for Inf are those of all ranks."""
    shown = weak_method(_shown_grad, optimizer)
    for index, segment in enumerate(segments):  # by number: a master that refers to its segment would never be freed
        segment.master.shown = partial(shown, index)


def _shown_grad(optimizer: Any, index: int) -> Tensor | None:
    if optimizer.is_stepping or not optimizer.model.shown.active:
        return None
    model, segment = optimizer.model, optimizer.segments[index]
    model.finish_for_optimizer("a read of gradients")
    grads, layout = segment.grads, segment.flat.bucket.layout
    info = ShardInfo(
        segment.flat.bucket.name, tuple(grads.shape), 0, grads.numel(), model.grids[layout.grid_name],
        model.reductions[layout.grid_name].num_replicas, "", model.grids["dense"],
        bool(model.slices), has_whole=False,  # ranks have masters of their own
    )  # fmt: skip
    return make_sharded_grad(grads.view(-1), info)
