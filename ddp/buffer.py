"""Storage: one flat tensor for each buffer of a plan, and the views that parameters and buckets have of it."""

import torch
from torch import Tensor

from .layout import BucketLayout, BufferLayout, ParamSlot

__all__ = ["FlatBuffer"]


class FlatBuffer:
    """A flat tensor laid out by a ``BufferLayout``: gradients, or the parameters themselves.

    It starts as zeros and nothing writes its padding, so that norms and collectives may read all of it.
    """

    def __init__(self, layout: BufferLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.data = torch.zeros(layout.numel, dtype=dtype, device=device)

    def param_view(self, slot: ParamSlot) -> Tensor:
        """The parameter's elements in the parameter's shape, contiguous, no copy."""
        return self.data[slot.start : slot.end].view(slot.spec.shape)

    def bucket_view(self, bucket: BucketLayout) -> Tensor:
        """The bucket's elements, padding included: [bucket.numel], no copy."""
        return self.data[bucket.start : bucket.end]
