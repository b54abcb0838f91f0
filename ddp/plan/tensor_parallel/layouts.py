"""A local tensor as a part of the whole, and as a DTensor; and the gradient of a DTensor as a local one."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from ..model_slice import GradOfSlice, ModelSlice, slice_of_blocks, slice_of_copy

__all__ = ["Layout", "from_local", "layout_of", "to_local", "waited"]

_PLACES_GRADS = "grad_placements" in inspect.signature(DTensor.from_local).parameters


class Layout(NamedTuple):
    """How the ranks of a mesh of one dim hold a tensor together."""

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size
    """Shape of the whole tensor, which its stride belongs to as well."""
    stride: tuple[int, ...]
    of_experts: bool = False
    """Whether the ranks of the mesh hold experts together, and have other data. Copies of a module know it from here:
    their parameters have lost the mark."""

    @property
    def is_cut(self) -> bool:
        """Whether each rank has elements of its own."""
        return hasattr(self.placement, "dim")

    def model_slice(self) -> ModelSlice:
        """What this rank has of the whole. Copies have partial gradients: see ``_FromLocal``."""
        shape, group = tuple(self.shape), self.mesh.get_group()
        if not self.is_cut:
            return slice_of_copy(shape, group, "partial")
        dim = self.placement.dim % len(shape)  # type: ignore[attr-defined]  # of Shard and _StridedShard
        # _StridedShard: the whole is blocks (gate and up), each of which is cut over the ranks.
        blocks = torch.empty(shape[dim], device="meta").chunk(getattr(self.placement, "split_factor", 1))
        grad: GradOfSlice = "expert" if self.of_experts else "slice"
        return slice_of_blocks(shape, dim, map(len, blocks), group, self.mesh.get_local_rank(), grad)

    def dtensor(self, local: Tensor, **options: Any) -> DTensor:
        """``local`` as a DTensor that shares its memory. ``options``: of ``DTensor.from_local``."""
        # Without shape and stride torch takes the whole to be equally long on each rank.
        whole: dict[str, Any] = {"shape": self.shape, "stride": self.stride}
        return DTensor.from_local(local, self.mesh, [self.placement], run_check=False, **whole, **options)

    def shown(self, local: Tensor) -> DTensor:
        """``dtensor`` for autograd: the gradient reaches ``local`` as ``model_slice`` says."""
        if not local.requires_grad:
            return self.dtensor(local)
        if not torch.compiler.is_compiling():
            shown: DTensor = _FromLocal.apply(local, self, not self.is_cut)
            return shown
        # No function of ours that makes a DTensor is traced. Torch's own divides equal gradients of copies by the
        # number of ranks.
        if not _PLACES_GRADS and not self.is_cut:
            raise NotImplementedError(
                f"torch {torch.__version__} compiles no module with a replicated DTensor and its gradient's parts: "
                f"compile with torch 2.14, or leave this module out (torch.compiler.disable)"
            )
        return self.dtensor(local, **({} if self.is_cut else {"grad_placements": [Partial()]}))

    def __deepcopy__(self, memo: Any) -> "Layout":
        return self  # process groups are not copied


def layout_of(tensor: DTensor) -> Layout:
    """The layout of a DTensor on a mesh of one dim."""
    of_experts = not getattr(tensor, "allreduce", True)
    return Layout(tensor.device_mesh, tensor.placements[0], tensor.shape, tensor.stride(), of_experts)


def waited(local: Tensor) -> Tensor:
    """A plain tensor: a local tensor whose collective still runs is a subclass, whose memory kernels cannot see."""
    wait = getattr(local, "wait", None)
    return local if wait is None else wait()


class _FromLocal(torch.autograd.Function):
    """A DTensor of a local tensor. Its gradient is the local one: of a partial sum the whole one on each rank.

    Of a parameter's copy the gradient is the rank's part of a sum over the ranks, "partial", whatever backward brings:
    a module that runs on parts of the sequence brings partial sums. One that runs on the whole sequence brings equal
    gradients on all ranks, and the first rank's counts alone. So no backward communicates, and no placement has to be
    foreseen.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, is_copy: bool) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.is_copy = layout, is_copy
        return layout.dtensor(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None]:
        (grad,), at = grads, ctx.layout.placement
        if grad is None:
            return None, None, None
        if ctx.is_copy and grad.placements == (Partial(),):
            return waited(grad.to_local()), None, None
        placement = Replicate() if at.is_partial() else at
        if grad.placements != (placement,):
            grad = grad.redistribute(placements=[placement])
        local = waited(grad.to_local())
        counts = not ctx.is_copy or ctx.layout.mesh.get_local_rank() == 0
        return local if counts else torch.zeros_like(local), None, None


class _ToLocal(torch.autograd.Function):
    """See ``to_local``."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad: Placement) -> Tensor:
        ctx.layout = layout_of(tensor)._replace(placement=grad)
        local = waited(tensor.to_local())
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[DTensor, None]:
        return ctx.layout.dtensor(grads[0]), None


def to_local(tensor: DTensor, grad: Placement) -> Tensor:
    """The local tensor, whose gradient is ``grad``: torch takes the placement of ``tensor`` where nobody says."""
    if torch.compiler.is_compiling():
        return tensor.to_local(grad_placements=[grad])
    return _ToLocal.apply(tensor, grad)  # type: ignore[no-any-return]


def from_local(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: tuple[int, ...]) -> DTensor:
    """The DTensor of ``local``, of this shape in all. The gradient of a partial sum is the whole one on each rank."""
    stride = torch.empty(shape, device="meta").stride()
    layout = Layout(mesh, placement, torch.Size(shape), stride)
    if torch.compiler.is_compiling():
        return layout.dtensor(local)
    return _FromLocal.apply(local, layout, False)  # type: ignore[no-any-return]
