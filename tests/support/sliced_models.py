"""A small transformer cut over tensor-parallel ranks by hand, of plain local parameters, as Megatron-core cuts it.

``Plain`` is the whole model. ``cut`` makes a rank's part of it: columns and rows of linear layers, with sequence
parallelism too, told by Megatron-core's marks or by ``set_model_slice``. The forward of both is the same mathematics.
"""

from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cut_models import copy_in, gather_in, reduce_out, scatter_out, split, unsplit
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from maingrad.ddp.plan.model_slice import ModelSlice, model_slice_of, set_model_slice, slice_of_marks
from maingrad.fsdp import fully_shard

VOCAB, WIDTH, LENGTH = 12, 8, 8

Told = Literal["marks", "slices"]


class Norm(nn.Module):
    """A norm without a mean, whose gradients are partial under sequence parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """Gate and up in one weight, and a way down with a bias that is added once."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = Norm()
        self.gate_up = nn.Linear(WIDTH, 2 * hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.group: dist.ProcessGroup | None = None
        self.sequence_parallel = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.group is not None:
            y = (gather_in if self.sequence_parallel else copy_in)(y, self.group)
        gate, up = self.gate_up(y).chunk(2, -1)
        y = self.down(F.silu(gate) * up)
        if self.group is not None:
            y = (scatter_out if self.sequence_parallel else reduce_out)(y, self.group)
        return x + y + self.bias


class Plain(nn.Module):
    """Embedding, blocks, norm and head; ``loss(model, batch)`` is ``model(*batch)``."""

    def __init__(self, *, hidden: int = 12, blocks: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(hidden) for _ in range(blocks)])
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCAB, bias=False)
        self.group: dist.ProcessGroup | None = None
        for param in self.parameters():
            nn.init.uniform_(param, -0.7, 0.9)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.group is not None:
            x = split(x, self.group)
        for block in self.blocks:
            x = block(x)
        if self.group is not None:
            x = unsplit(x, self.group)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch_of(index: int) -> tuple[Tensor, Tensor]:
    """The batch of this number: tokens and targets."""
    drawn = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1000 + index))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def mesh_of(*sizes: int, names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    """A mesh on CPUs; the last dim is of tensor-parallel ranks."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def cut(model: Plain, group: dist.ProcessGroup, *, sequence_parallel: bool = False, told: Told = "marks") -> Plain:
    """This rank's part of the model."""
    for block in model.blocks:
        block.group, block.sequence_parallel = group, sequence_parallel  # type: ignore[assignment]
        for owner, name, dim, stride in (
            (block.gate_up, "weight", 0, 2),
            (block.gate_up, "bias", 0, 2),
            (block.down, "weight", 1, 1),
        ):
            _cut(owner, name, dim, stride, group)
        if sequence_parallel:
            for param in (block.norm.weight, block.bias):
                param.sequence_parallel = True  # type: ignore[union-attr]
    if sequence_parallel:
        model.group = group
    if told == "slices":
        for param in model.parameters():
            set_model_slice(param, slice_of_marks(param, group))
            for mark in ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel"):
                param.__dict__.pop(mark, None)
    return model


def _cut(owner: Any, name: str, dim: int, stride: int, group: dist.ProcessGroup) -> None:
    whole, rank, size = getattr(owner, name).detach(), group.rank(), group.size()
    pieces = [block.tensor_split(size, dim)[rank] for block in whole.chunk(stride, dim)]
    param: Any = nn.Parameter(torch.cat(pieces, dim).contiguous())
    if whole.shape[dim] % (size * stride) == 0:
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, stride
    else:
        raise ValueError(f"{whole.shape[dim]} rows over {size} ranks")
    setattr(owner, name, param)


def part_of(whole: Tensor, param: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What this rank holds of ``whole``, a tensor in the shape of the whole parameter."""
    found: ModelSlice = model_slice_of(param) or slice_of_marks(param, group)
    return whole if found.dim is None else torch.cat(found.views_of(whole), found.dim)


# ---- Training on 2 tensor-parallel ranks, and the same by one process. ----


def ranks_of(row: str) -> tuple[Any, dist.ProcessGroup, int]:
    """The data-parallel mesh, the tensor-parallel group, and the number of ranks that average losses."""
    if row.startswith("hsdp"):
        mesh = mesh_of(2, 2, 2, names=("outer", "inner", "tp"))
        return mesh["outer", "inner"], mesh["tp"].get_group(), 4
    mesh = mesh_of(2, 2)
    return mesh["dp"], mesh["tp"].get_group(), 2


def world_of(row: str) -> int:
    """Number of ranks that ``ranks_of`` needs."""
    return 8 if row.startswith("hsdp") else 4


def shard(model: Plain, row: str, mesh: Any, group: Any, **options: Any) -> Any:
    """Make a unit of each block, and of the model."""
    for block in model.blocks:
        fully_shard(block, mesh, row, tensor_parallel_group=group, **options)
    return fully_shard(model, mesh, row, tensor_parallel_group=group, **options)


def train(model: Any, first: int, microbatches: int) -> None:
    """One iteration over the batches from ``first`` on."""
    for index in range(microbatches):
        within = model.no_sync() if index < microbatches - 1 and hasattr(model, "no_sync") else nullcontext()
        with within:
            (model(*batch_of(first + index)) / microbatches).backward()


def data_rank(mesh: Any) -> int:
    """This rank's index among those that average losses."""
    outer, inner = ([0, *mesh.get_coordinate()])[-2:]
    return int(outer * mesh.size(mesh.ndim - 1) + inner)


def plain_iteration(model: Plain, step: int, data_ranks: int, microbatches: int) -> None:
    """The same iteration of the whole model: the batches of all ranks."""
    for rank in range(data_ranks):
        for index in range(microbatches):
            number = (step * data_ranks + rank) * microbatches + index
            (model(*batch_of(number)) / (microbatches * data_ranks)).backward()
