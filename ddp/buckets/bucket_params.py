"""Allocates the buckets of a plan, and ties the model's parameters to them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..collectives.reduction import GradReduction
from ..contract.record import GradRecord
from ..plan.layout import BucketLayout, GradPlan
from ..plan.owned_params import OwnedParam
from .bucket import Bucket, BucketParam
from .buffer import FlatBuffer, ReleasableBuffer
from .released import GradPool, ReleasedBucket

__all__ = ["allocate_buckets"]


def allocate_buckets(
    plan: GradPlan,
    trainable: Sequence[OwnedParam],
    device: torch.device,
    reductions: Mapping[str, GradReduction],
    pool: GradPool | None,
) -> tuple[tuple[Bucket, ...], list[BucketParam]]:
    """Allocate the plan's buffers; returns the buckets, in launch order, and the parameters, in the buffers' order.

    pool  gives memory to the buckets of which this rank keeps a shard; None: all buckets keep theirs
    """
    by_name = {owned.name: owned for owned in trainable}
    buckets: list[Bucket] = []
    # Step 1 of docs/by_hand.py: one flat tensor for each buffer of the plan. A parameter's main_grad is a view of it.
    for layout in plan.buffers:
        reduction = reductions[layout.grid_name]
        flat = None
        if pool is None or reduction.grid.inner_size == 1:
            flat = FlatBuffer(layout, layout.grad_dtype, device)
        for each in layout.buckets:
            owned_range = reduction.owned_range(each.numel)
            if flat is not None:
                data = flat.bucket_view(each)
                buckets.append(Bucket(each, data, _records_of(each, data, by_name), owned_range))
            else:
                assert pool is not None, "else the buffer is flat"
                memory = ReleasableBuffer(each.numel, layout.grad_dtype, device)
                records = _records_of(each, memory.data, by_name)
                buckets.append(ReleasedBucket(each, memory, records, owned_range, pool))
    bucket_params = []
    for bucket in buckets:
        for slot, record in zip(bucket.layout.slots, bucket.records, strict=True):
            owned = by_name[record.name]
            bucket_params.append(BucketParam(owned, record, bucket, slot, owned.param.dtype, device))
    return tuple(sorted(buckets, key=lambda bucket: bucket.index)), bucket_params


def _records_of(layout: BucketLayout, data: Tensor, by_name: Mapping[str, OwnedParam]) -> list[GradRecord]:
    """The records of a bucket's parameters, whose accumulators are views of ``data`` [layout.numel]."""
    records = []
    for slot in layout.slots:
        owned = by_name[slot.spec.name]
        view = data[slice(*slot.range.counted_from(layout.start))].view(slot.spec.shape)
        records.append(
            GradRecord(
                owned.name,
                view.data,  # with a version of its own, which tells of writes by hand
                first_write_overwrites=owned.ours_alone,
                shared=len(owned.owners) > 1,
                bucket_index=layout.index,
            )
        )
    return records
