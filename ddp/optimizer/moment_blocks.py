"""8-bit moments of flat shards: which blocks of 256 elements have a scale, and where the scales lie.

Blocks are counted from a parameter's start (``kernels/optimizer/eight_bits.py``), so that shards and ranks change no
bit of training. A border between shards must then cut no block: ``DistributedDataParallelConfig(shard_atom=256)``, and
``fully_shard(shard_atoms="block")``.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...kernels.optimizer.eight_bits import BLOCK, blocks_of, dequantize_moment, quantize_moment
from ..plan.atoms import cuts_an_atom
from ..plan.cut import Range
from ..plan.layout import BucketLayout
from .flat_params import ParamSlice, Segment

__all__ = ["MomentBlocks", "check_blocks", "scale_key"]


def scale_key(key: str) -> str:
    """The key of the scales of a moment of 8 bits."""
    return f"{key}_scale"


def check_blocks(buckets: Iterable[BucketLayout], remedy: str) -> None:
    """Raise ``ValueError`` where a border between shards cuts a block, on all ranks, whose layouts are equal."""
    for bucket in buckets:
        shard_numel = bucket.numel // bucket.shard_degree
        for slot in bucket.slots:
            if cuts_an_atom(slot.start - bucket.start, slot.spec.numel, BLOCK, shard_numel):
                raise ValueError(
                    f"moment_dtype=torch.uint8 has a scale for each {BLOCK} elements of a parameter, and a border "
                    f"between shards cuts such a block of '{slot.spec.name}': {remedy}"
                )


class MomentBlocks:
    """The places of scales: those of a bucket lie behind each other, by parameters as they lie in memory."""

    def __init__(self, slices: Iterable[ParamSlice]) -> None:
        self._slices: dict[Tensor, list[ParamSlice]] = {}
        self._scales: dict[str, Range] = {}
        self._segments: dict[Tensor, Range] = {}
        ends: dict[int, int] = {}
        for held, segment in sorted(
            ((held, held.segment) for held in slices if held.segment is not None),
            key=lambda pair: (pair[1].flat.bucket.index, pair[1].start, pair[0].offset),
        ):
            start = ends.get(segment.flat.bucket.index, 0)
            end = ends[segment.flat.bucket.index] = start + blocks_of(held.end - held.start)
            self._slices.setdefault(segment.master, []).append(held)
            self._scales[held.name] = Range(start, end)
            first = self._segments.get(segment.master, Range(start, end)).start
            self._segments[segment.master] = Range(first, end)

    def scales_of(self, segment: Segment) -> Range:
        """The segment's scales, counted in the bucket."""
        return self._segments[segment.master]

    def scales_in_segment(self, held: ParamSlice) -> slice:
        """The scales of a slice, counted in its segment."""
        assert held.segment is not None, "a slice without elements has no scales"
        return slice(*self._scales[held.name].counted_from(self.scales_of(held.segment).start))

    def encode(self, segment: Segment, values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
        """Write codes [segment] and scales for values [segment]."""
        for part, place in self._parts(segment):
            own_codes, own_scales = quantize_moment(values.view(-1)[part].float(), signed=signed)
            codes.view(-1)[part] = own_codes
            scales[place] = own_scales

    def decode(self, segment: Segment, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        """fp32 [segment] on the host. Padding is 0."""
        values = torch.zeros(codes.shape, dtype=torch.float32)
        for part, place in self._parts(segment):
            values.view(-1)[part] = dequantize_moment(codes.view(-1)[part], scales[place], signed=signed).cpu()
        return values

    def _parts(self, segment: Segment) -> Sequence[tuple[slice, slice]]:
        """Each parameter's elements in the segment, and its scales."""
        return [
            (slice(held.offset, held.offset + held.end - held.start), self.scales_in_segment(held))
            for held in self._slices[segment.master]
        ]
