"""Parameters in flat buffers with the gradients' own layout, and what of them this rank updates.

A rank's shard of parameters, masters, moments and gradients is the same range of elements everywhere, so that the
all-gather segments in place and an elementwise optimizer sees a few long tensors::

    bucket of gradients (reduce-scattered)   | rank 0 | rank 1 | rank 2 | rank 3 |
    master, moments on rank 1                         | a  b a |                         segments: groups a, b, a
    bucket of parameters (all-gathered)      | rank 0 | rank 1 | rank 2 | rank 3 |
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buckets.bucket import Bucket
from ..buckets.buffer import FlatBuffer
from ..buckets.wiring import WiredParam
from ..collectives.in_flight import group_size
from ..plan.layout import ParamSlot
from ..stock.master_param import MasterParameter, make_master
from ..wrapper.data_parallel import DistributedDataParallel

__all__ = ["FlatBucket", "ParamSlice", "Segment", "flatten_params", "inner_groups", "segments_of", "slices_of"]


class FlatBucket(NamedTuple):
    """One bucket's parameters, and what this rank updates of them."""

    bucket: Bucket
    params: Tensor
    """[bucket.numel] all ranks' shards."""
    first: int
    """First element of this rank's range of the bucket."""
    mine: Tensor
    """View of ``params``: this rank's range."""
    master: Tensor
    """fp32 copy of ``mine``; ``mine`` itself where parameters are fp32 or wider."""
    grads: Tensor
    """View of the bucket's gradients: the same range."""
    wired: tuple[WiredParam, ...]
    """Its parameters, in the order of the layout's slots."""


class Segment(NamedTuple):
    """Consecutive elements of this rank's range with one parameter group: what the inner optimizer takes for one
    parameter."""

    flat: FlatBucket
    start: int
    """First element, relative to this rank's range."""
    end: int
    group: int
    master: MasterParameter
    """View of ``flat.master``; of the parameter's shape where parameters are kept whole."""

    @property
    def grads(self) -> Tensor:
        """View of the gradients of the same elements."""
        return self.flat.grads[self.start : self.end].view(self.master.shape)


class ParamSlice(NamedTuple):
    """Where one parameter meets this rank's range of its bucket: ``[start, end)`` of the flattened parameter."""

    wired: WiredParam
    start: int
    end: int
    """Equal to ``start`` where the parameter lies in other ranks' ranges."""
    view: Tensor
    """The whole parameter's storage in the flat buffer, in the parameter's shape."""
    param: Tensor
    """[end - start] its elements in the flat buffer of parameters."""
    master: Tensor
    """[end - start] its elements in the master."""
    group: int
    """Its parameter group."""
    segment: Segment | None
    offset: int
    """Place of the first element in its segment."""
    state_by_master: Mapping[Any, Any]
    """State of the inner optimizer by master."""

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.wired.owned.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return tuple(self.wired.owned.param.shape)

    @property
    def grad(self) -> Tensor:
        """[end - start] its elements of the gradients, which are reduced after ``finish_grad_sync``: a view."""
        grads = self.param.new_empty(0) if self.segment is None else self.segment.grads.view(-1)
        return grads[self.offset : self.offset + self.end - self.start]

    @property
    def updated(self) -> Tensor | None:
        """What the inner optimizer takes for one parameter, with these elements in it."""
        return None if self.segment is None else self.segment.master

    def state(self) -> dict[str, Tensor]:
        """Elementwise state of the inner optimizer, [end - start] each: views. Empty before the first step."""
        return {
            key: value.view(-1)[self.offset : self.offset + self.end - self.start]
            for key, value in self._segment_state().items()
            if isinstance(value, Tensor) and self.segment is not None and value.shape == self.segment.master.shape
        }

    def scalars(self) -> dict[str, Any]:
        """The rest of its state, such as the number of steps."""
        elementwise = self.state()
        return {key: value for key, value in self._segment_state().items() if key not in elementwise}

    def _segment_state(self) -> Mapping[str, Any]:
        return {} if self.segment is None else self.state_by_master.get(self.segment.master, {})


def flatten_params(model: DistributedDataParallel) -> list[FlatBucket]:
    """Move the parameters into flat buffers laid out like the gradients; one entry for each bucket."""
    check_flattenable(model)
    by_name = {wired.owned.name: wired for wired in model.wired}
    by_index = {bucket.index: bucket for bucket in model.buckets}
    flats = []
    for layout in model.plan.buffers:
        gather = model.grids[layout.grid_name].gather if model.ddp_config.copy_engine_param_gather else None
        mapped_in = gather if group_size(gather) > 1 else None
        buffer = FlatBuffer(layout, layout.param_dtype, model.device, mapped_in=mapped_in)
        for bucket_layout in layout.buckets:
            wired = tuple(by_name[slot.spec.name] for slot in bucket_layout.slots)
            for slot, entry in zip(bucket_layout.slots, wired, strict=True):
                view = buffer.param_view(slot)
                view.copy_(entry.owned.param.detach())
                entry.owned.param.data = view
            bucket, params = by_index[bucket_layout.index], buffer.bucket_view(bucket_layout)
            first, last = model.owned_range(bucket_layout)
            mine = params[first:last]
            master = mine.float() if mine.dtype in (torch.bfloat16, torch.float16) else mine
            flats.append(FlatBucket(bucket, params, first, mine, master, bucket.grad_data[first:last], wired))
    return flats


def check_flattenable(model: DistributedDataParallel) -> None:
    """Raise ``ValueError`` for parameters that flat buffers cannot hold as they are."""
    names: dict[int, str] = {}
    for wired in model.wired:
        name, param, _ = wired.owned
        if param.is_complex():
            raise ValueError(
                f"parameter '{name}' is {wired.dtype}: DistributedOptimizer updates real parameters; use a stock "
                f"optimizer with model.expose_grads()"
            )
        first = names.setdefault(param.data_ptr(), name)
        if first != name and param.numel():
            raise ValueError(
                f"parameters '{first}' and '{name}' share memory, which flat buffers would undo: tie them as one "
                f"nn.Parameter object"
            )


def segments_of(flats: Sequence[FlatBucket], group_of: Callable[[WiredParam], int], *, whole: bool) -> list[Segment]:
    """Cut this rank's range of every bucket into segments; together they are all of it, padding included.

    A range of padding alone has no segment: no checkpoint has state of it, which it would lack after a load.

    group_of  index of a parameter's group
    whole     one segment for each parameter, in its shape; padding belongs to none
    """
    segments = []
    for flat in flats:
        pieces = list(_pieces(flat))
        if whole:
            for piece in pieces:
                shape = piece.slot.spec.shape or (1,)  # so that a scalar's moments differ from its counter of steps
                master = make_master(flat.master[piece.start : piece.end].view(shape))
                segments.append(Segment(flat, piece.start, piece.end, group_of(piece.wired), master))
            continue
        cuts: list[tuple[int, int]] = []  # (first element, group)
        for piece in pieces:
            group = group_of(piece.wired)
            if not cuts or cuts[-1][1] != group:
                cuts.append((piece.start if cuts else 0, group))
        if not cuts:
            continue
        for (start, group), (end, _) in zip(cuts, [*cuts[1:], (flat.master.numel(), 0)], strict=True):
            segments.append(Segment(flat, start, end, group, make_master(flat.master[start:end])))
    return segments


class _Piece(NamedTuple):
    """The part of one parameter in this rank's range, relative to the range's start."""

    slot: ParamSlot
    wired: WiredParam
    start: int
    end: int


def _pieces(flat: FlatBucket) -> Iterator[_Piece]:
    """The parameters that this rank's range meets, in the order of memory."""
    base = flat.bucket.layout.start + flat.first
    found = []
    for slot, wired in zip(flat.bucket.layout.slots, flat.wired, strict=True):
        start, end = max(slot.start - base, 0), min(slot.end - base, flat.mine.numel())
        if start < end:
            found.append(_Piece(slot, wired, start, end))
    return iter(sorted(found, key=lambda piece: piece.start))


def slices_of(
    flats: Sequence[FlatBucket],
    segments: Sequence[Segment],
    group_of: Callable[[WiredParam], int],
    state_by_master: Mapping[Any, Any],
) -> list[ParamSlice]:
    """Every parameter's part in this rank's range, in the order of buckets; empty for those in other ranks' ranges."""
    by_flat: dict[int, list[Segment]] = {}
    for segment in segments:
        by_flat.setdefault(id(segment.flat.params), []).append(segment)
    slices = []
    for flat in flats:
        pieces = {piece.slot.spec.name: piece for piece in _pieces(flat)}
        base = flat.bucket.layout.start + flat.first
        for slot, wired in zip(flat.bucket.layout.slots, flat.wired, strict=True):
            piece = pieces.get(slot.spec.name)
            first, last = (0, 0) if piece is None else (piece.start, piece.end)
            start = 0 if piece is None else base + first - slot.start
            own = next((r for r in by_flat.get(id(flat.params), ()) if r.start <= first and last <= r.end), None)
            slices.append(
                ParamSlice(
                    wired=wired,
                    start=start,
                    end=start + last - first,
                    view=wired.owned.param.detach(),
                    param=flat.mine[first:last],
                    master=flat.master[first:last],
                    group=group_of(wired),
                    segment=own if piece is not None else None,
                    offset=0 if own is None else first - own.start,
                    state_by_master=state_by_master,
                )
            )
    return slices


def inner_groups(segments: Sequence[Segment], param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of masters, the default one last; one that lies in other ranks' shards is empty here."""
    members: list[list[Tensor]] = [[] for _ in range(len(param_groups) + 1)]
    for segment in segments:
        members[segment.group].append(segment.master)
    options = [{key: value for key, value in group.items() if key != "params"} for group in param_groups]
    return [{**own, "params": masters} for own, masters in zip([*options, {}], members, strict=True)]
