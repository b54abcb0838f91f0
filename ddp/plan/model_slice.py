"""Parameters that tensor-parallel ranks hold together: which elements a rank has, and what its gradient is.

Everything in this library works on plain local tensors. A parameter knows by its ``ModelSlice`` what it is of the whole
parameter::

    weight [8, 6] cut by rows over 2 ranks          one box each       rank 1: offsets (4, 0), sizes (4, 6)
    gate and up in one weight [8, 6], each cut      two boxes each     rank 1: (2, 0) and (6, 0), sizes (2, 6)
    norm [6] with sequence parallelism              the whole          each rank has a part of the gradient

A slice comes from a DTensor that became a local parameter (``set_model_slice``), or from Megatron-core's marks on a
parameter (``slice_of_marks``), which tell everything but the ranks.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .cut import Box

__all__ = [
    "GradOfSlice",
    "ModelSlice",
    "model_slice_of",
    "set_model_slice",
    "slice_of_blocks",
    "slice_of_copy",
    "slice_of_marks",
]

GradOfSlice: TypeAlias = Literal["slice", "dense", "mean", "partial", "expert"]
"""What a rank's gradient is before any reduction:

"slice"    complete, of this rank's elements; other tensor-parallel ranks have other elements
"dense"    complete, of the whole parameter, of which each tensor-parallel rank has a copy; the ranks' gradients are
           equal, and any of them counts
"mean"     likewise, but the ranks' gradients differ, and their mean counts
"partial"  a part of a sum over the tensor-parallel ranks, each of which has a copy of the parameter
"expert"   complete, of this rank's experts; the ranks that hold the others have other data, and are none of the
           tensor-parallel ranks
"""

_ATTRIBUTE = "_maingrad_model_slice"


class ModelSlice(NamedTuple):
    """What this rank's parameter is of the parameter that the ranks of ``group`` hold together."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    boxes: tuple[Box, ...]
    """The elements of the whole that this rank has. Concatenated along ``dim`` they are the local parameter. A rank
    without elements has one box of no elements."""
    dim: int | None
    """The dim that is cut; None: every rank has all elements, in one box."""
    group: dist.ProcessGroup | None
    """The tensor-parallel ranks, or those that hold all experts together; None: this rank alone."""
    grad: GradOfSlice
    largest: int | None = None
    """Size along ``dim`` of the rank that has most; None: a whole that is cut in one block, as ``torch.chunk`` cuts."""

    @property
    def largest_shape(self) -> tuple[int, ...]:
        """A local shape that no rank's exceeds: an uneven cut gives ranks other shapes, and all ranks the same here."""
        if self.dim is None or self.group is None:
            return self.local_shape
        sizes = list(self.shape)
        sizes[self.dim] = self.largest or -(-sizes[self.dim] // self.group.size())
        return tuple(sizes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local parameter."""
        if self.dim is None:
            return self.shape
        sizes = list(self.boxes[0].sizes)
        sizes[self.dim] = sum(box.sizes[self.dim] for box in self.boxes)
        return tuple(sizes)

    @property
    def is_uneven(self) -> bool:
        """Whether ranks have slices of different shapes."""
        if self.dim is None or self.group is None:
            return False
        shapes = self.local_shape, self.largest_shape
        return any(each[self.dim] * self.group.size() != self.shape[self.dim] for each in shapes)

    def views_of(self, whole: Tensor) -> list[Tensor]:
        """What this rank has of ``whole``, a tensor of ``shape``, box by box: concatenated, as the local parameter."""
        return [Box((0,) * whole.dim(), self.shape).view_of(box, whole) for box in self.boxes]

    def part_of(self, whole: Tensor) -> Tensor:
        """What the local parameter has of ``whole``, a tensor of ``shape``: a view of it, or joined boxes."""
        views = self.views_of(whole)
        return views[0] if self.dim is None else torch.cat(views, self.dim)


def slice_of_copy(shape: tuple[int, ...], group: dist.ProcessGroup | None, grad: GradOfSlice) -> ModelSlice:
    """The slice of a parameter of which each rank has all elements."""
    return ModelSlice(shape, (Box((0,) * len(shape), shape),), None, group, grad)


def slice_of_blocks(
    shape: tuple[int, ...],
    dim: int,
    blocks: Iterable[int],
    group: dist.ProcessGroup | None,
    rank: int,
    grad: GradOfSlice = "slice",
) -> ModelSlice:
    """The slice of a parameter whose ``blocks`` along ``dim`` are each cut over the ranks of ``group``.

    blocks  their sizes, which make up that of ``dim``: uneven ones are cut as ``torch.chunk`` does
    rank    this rank's place among the ranks
    """
    size, first, largest, boxes = 1 if group is None else group.size(), 0, 0, []
    for block in blocks:
        most = -(-block // size)
        start, end = (min(block, place * most) for place in (rank, rank + 1))
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = first + start, end - start
        boxes.append(Box(tuple(offsets), tuple(sizes)))
        first += block
        largest += most
    return ModelSlice(shape, tuple(boxes), dim, group, grad, largest)


def model_slice_of(param: Tensor) -> ModelSlice | None:
    """What ``set_model_slice`` has said of the parameter; None: nothing, or no Python object of it is left."""
    found: ModelSlice | None = getattr(param, _ATTRIBUTE, None)
    return found


def set_model_slice(param: Tensor, found: ModelSlice) -> None:
    """Make ``found`` known to wrappers, checkpoints and conversion. Raises ``ValueError`` for another local shape."""
    if tuple(param.shape) != found.local_shape:
        raise ValueError(f"a parameter of shape {list(param.shape)} is no slice of shape {list(found.local_shape)}")
    setattr(param, _ATTRIBUTE, found)


def slice_of_marks(param: Tensor, group: dist.ProcessGroup | None) -> ModelSlice:
    """The slice that Megatron-core's marks tell, for the tensor-parallel ranks ``group``.

    tensor_model_parallel = True  the parameter is cut evenly along ``partition_dim``. With ``partition_stride`` = s > 1
                                  the whole is s blocks along this dim, each of which is cut over the ranks
    sequence_parallel = True      copies, of which each rank has a part of the gradient ("partial")
    none of them                  copies, with equal gradients ("dense"). With average_gradients_across_tp_domain = True
                                  the gradients differ, and their mean counts ("mean")

    Raises ``ValueError`` for a local size that the stride does not divide.
    """
    local = tuple(param.shape)
    if not getattr(param, "tensor_model_parallel", False):
        grad: GradOfSlice = "partial" if getattr(param, "sequence_parallel", False) else "dense"
        if getattr(param, "average_gradients_across_tp_domain", False):
            grad = "mean"
        return slice_of_copy(local, group, grad)
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    dim, stride = max(0, getattr(param, "partition_dim", 0)), max(1, getattr(param, "partition_stride", 1))
    if local[dim] % stride:
        raise ValueError(f"partition_stride = {stride} does not divide the {local[dim]} rows of dim {dim}")
    whole = local[dim] * size
    return slice_of_blocks((*local[:dim], whole, *local[dim + 1 :]), dim, [whole // stride] * stride, group, rank)
