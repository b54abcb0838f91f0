"""Ties a model's parameters to the buckets of a plan, and checks that the parameters are still the same."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..contract.record import GradRecord
from ..contract.torch_wrappers import is_sharded_by_torch
from ..gathers.waiting_params import registered_params
from ..plan.layout import GradPlan
from ..plan.owned_params import OwnedParam
from .bucket import Bucket
from .buffer import FlatBuffer

__all__ = ["BucketParam", "allocate_buckets"]


class BucketParam(NamedTuple):
    """A parameter with its record and its bucket, as the parameter was when the model was wrapped."""

    owned: OwnedParam
    record: GradRecord
    bucket: Bucket
    dtype: torch.dtype
    device: torch.device

    def check(self) -> None:
        """Raise ``RuntimeError`` if the module has another parameter now, or this one was moved or cast."""
        name, param = self.owned.name, self.owned.param
        module, local = self.owned.owners[0]
        found = registered_params(module).get(local)
        if found is not param and found is not None and is_sharded_by_torch(found):
            raise RuntimeError(
                f"parameter '{name}' was made a DTensor after wrapping (torch.distributed.fsdp.fully_shard, or tensor "
                f"parallelism), and its gradient would never be reduced here: use torch's fully_shard alone, "
                f"maingrad.fsdp.fully_shard in its place, or this wrapper over a model of plain parameters"
            )
        if found is not param:
            raise RuntimeError(
                f"parameter '{name}' was replaced after wrapping (load_state_dict(assign=True), a new nn.Parameter): "
                f"its gradient would never be reduced; load with assign=False, or wrap again. For "
                f"torch.func.functional_call, call it on wrapper.module"
            )
        if param.dtype is not self.dtype or param.device != self.device:
            raise RuntimeError(
                f"parameter '{name}' is {param.dtype} on {param.device}, and was {self.dtype} on {self.device} when it "
                f"was wrapped: its main_grad did not move along; call .to() before wrapping"
            )

    def refuse_frozen(self) -> None:
        """Raise ``RuntimeError`` for a parameter that was frozen after wrapping, and has no gradient."""
        raise RuntimeError(
            f"parameter '{self.owned.name}' was frozen (requires_grad_(False)) after wrapping: its gradient would be "
            f"reduced as zero, and momentum or decay move it on; freeze before wrapping, or unwrap() and wrap again. "
            f"Where a backward is to go through the model without training it (a generator's, through its "
            f"discriminator), freeze all of its parameters and unfreeze them before the step; or run "
            f"that backward under no_sync() of this model, then its zero_grad()"
        )


def allocate_buckets(
    plan: GradPlan, trainable: Sequence[OwnedParam], device: torch.device
) -> tuple[tuple[Bucket, ...], list[BucketParam]]:
    """Allocate the plan's buffers; returns the buckets, in launch order, and the parameters, in the buffers' order."""
    by_name = {owned.name: owned for owned in trainable}
    buckets, bucket_params = [], []
    # Step 1 of docs/by_hand.py: one flat tensor for each buffer of the plan. A parameter's main_grad is a view of it.
    for buffer_layout in plan.buffers:
        buffer = FlatBuffer(buffer_layout, buffer_layout.grad_dtype, device)
        for layout in buffer_layout.buckets:
            owned_here = [by_name[slot.spec.name] for slot in layout.slots]
            records = [
                GradRecord(
                    owned.name,
                    buffer.param_view(slot).data,  # with a version of its own, which tells of writes by hand
                    first_write_overwrites=owned.ours_alone,
                    shared=len(owned.owners) > 1,
                    bucket_index=layout.index,
                )
                for owned, slot in zip(owned_here, layout.slots, strict=True)
            ]
            bucket = Bucket(layout, buffer.bucket_view(layout), records)
            buckets.append(bucket)
            bucket_params += [
                BucketParam(owned, record, bucket, owned.param.dtype, device)
                for owned, record in zip(owned_here, records, strict=True)
            ]
    return tuple(sorted(buckets, key=lambda bucket: bucket.index)), bucket_params
