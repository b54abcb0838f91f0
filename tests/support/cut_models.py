"""A model cut by tensor parallelism, with or without sequence parallelism, as Megatron-core cuts and marks it.

Every rank builds the whole model by one seed, so that a plain copy on all the data tells what is right.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.plan.cut import Box
from maingrad.ddp.plan.model_slice import ModelSlice, set_model_slice

__all__ = [
    "LENGTH",
    "WAYS",
    "CutModel",
    "Ranks",
    "Way",
    "backward",
    "batch",
    "copy_in",
    "cut",
    "gather_in",
    "joined",
    "loss_of",
    "plain_grads",
    "ranks_of_mesh",
    "reduce_out",
    "scatter_out",
    "split",
    "train",
    "unsplit",
    "wrapped",
]

DIM, LENGTH, ROWS = 6, 4, 2


class Ranks(NamedTuple):
    """This rank's data-parallel ranks (a mesh of one or two dims), and its tensor-parallel ones."""

    dp: DeviceMesh
    tp: DeviceMesh

    @property
    def data_index(self) -> int:
        """Which data this rank has: tensor-parallel ranks have the same."""
        inner = self.dp.get_local_rank(self.dp.ndim - 1)
        return inner if self.dp.ndim == 1 else self.dp.get_local_rank(0) * self.dp.size(1) + inner


class Way(NamedTuple):
    """A form of the wrapper: shape of the mesh (replicas, shards, tensor-parallel ranks), and options."""

    mesh: tuple[int, int, int]
    config: dict[str, Any]


WAYS = {
    "ddp": Way((1, 2, 2), {}),
    "zero1": Way((1, 2, 2), {"use_distributed_optimizer": True}),
    "zero1 of three": Way((1, 1, 3), {"use_distributed_optimizer": True}),
    "hybrid": Way((2, 2, 2), {"use_distributed_optimizer": True}),
}


def ranks_of_mesh(shape: tuple[int, int, int]) -> Ranks:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
    return Ranks(mesh["replicate", "shard"] if shape[0] > 1 else mesh["shard"], mesh["tp"])


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


def own_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.tensor_split(group.size(), 1)[group.rank()].contiguous()


def _pair(forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
            return backward(dy, ctx.group), None

    return Pair.apply


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return own_part(sum_over(x, group), group)


copy_in, reduce_out = _pair(_same, sum_over), _pair(sum_over, _same)
gather_in, scatter_out = _pair(gathered, _scattered), _pair(_scattered, gathered)
split, unsplit = _pair(own_part, gathered), _pair(gathered, own_part)


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))): ``up`` is cut by rows, ``down`` by columns, and its bias is added after the sum."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, hidden), nn.Linear(hidden, DIM, bias=False)
        self.bias = nn.Parameter(torch.randn(DIM) / 4)
        self.into, self.out = (lambda x: x), (lambda x: x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.down(nn.functional.gelu(self.up(self.into(self.norm(x)))))) + self.bias


class CutModel(nn.Module):
    """Two blocks between an embedding and a head that all ranks hold."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.head = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, 5)
        self.blocks = nn.ModuleList([Block(hidden) for _ in range(2)])
        for param in self.parameters():
            nn.init.normal_(param, std=0.4)
        self.split, self.unsplit = (lambda x: x), (lambda x: x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.split(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.unsplit(x))


def batch(index: int) -> Tensor:
    return torch.randn(ROWS, LENGTH, DIM, generator=torch.Generator().manual_seed(100 + index))


def loss_of(model: nn.Module, index: int) -> Tensor:
    return model(batch(index)).square().mean()


def _cut_param(linear: nn.Linear, name: str, dim: int, group: dist.ProcessGroup, *, marks: bool) -> None:
    whole = getattr(linear, name)
    parts = whole.detach().tensor_split(group.size(), dim)
    param = nn.Parameter(parts[group.rank()].clone())
    setattr(linear, name, param)
    if marks:
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1
        return
    offset = sum(part.shape[dim] for part in parts[: group.rank()])
    box = Box(tuple(offset if each == dim else 0 for each in range(whole.dim())), tuple(param.shape))
    set_model_slice(param, ModelSlice(tuple(whole.shape), (box,), dim, group, "slice"))


def cut(model: CutModel, group: dist.ProcessGroup, *, sp: bool = False, marks: bool = True) -> CutModel:
    """Cut and mark ``model``. Without ``marks`` slices are told as those that were DTensors."""
    into, out = (gather_in, scatter_out) if sp else (copy_in, reduce_out)
    for block in model.blocks:
        _cut_param(block.up, "weight", 0, group, marks=marks)
        _cut_param(block.up, "bias", 0, group, marks=marks)
        _cut_param(block.down, "weight", 1, group, marks=marks)
        block.into, block.out = (lambda x: into(x, group)), (lambda x: out(x, group))
        for param in (*block.norm.parameters(), block.bias) if sp else ():
            if marks:
                param.sequence_parallel = True
            else:
                shape = tuple(param.shape)
                set_model_slice(param, ModelSlice(shape, (Box((0,) * len(shape), shape),), None, group, "partial"))
    if sp:
        model.split, model.unsplit = (lambda x: split(x, group)), (lambda x: unsplit(x, group))
    return model


def wrapped(
    way: str, ranks: Ranks, *, hidden: int = 12, sp: bool = False, marks: bool = True, **options: Any
) -> DistributedDataParallel:
    model = cut(CutModel(hidden), ranks.tp.get_group(), sp=sp, marks=marks)
    config = DistributedDataParallelConfig(**{"bucket_size": 50, **WAYS[way].config, **options})
    return DistributedDataParallel(model, config, process_group=ranks.dp, tensor_parallel_group=ranks.tp)


def plain_grads(num_batches: int, hidden: int = 12) -> dict[str, Tensor]:
    """Gradients of the mean loss over all batches."""
    model = CutModel(hidden)
    for index in range(num_batches):
        (loss_of(model, index) / num_batches).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def joined(model: DistributedDataParallel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of each rank's local ones: slices go into their boxes, and are summed over the ranks of a model."""
    found = {}
    for name, local in tensors.items():
        held = model.model_slices.get(name)
        if held is None or held.grad != "slice":
            found[name] = local.detach().clone()
            continue
        whole = local.new_zeros(held.shape)
        (box,) = held.boxes
        Box((0,) * len(held.shape), held.shape).view_of(box, whole).copy_(local.detach())
        dist.all_reduce(whole, group=held.group)
        found[name] = whole
    return found


def train(model: DistributedDataParallel, optimizer: DistributedOptimizer, ranks: Ranks, microbatches: int) -> None:
    """One step over this rank's microbatches."""
    backward(model, ranks, microbatches)
    optimizer.step()
    optimizer.zero_grad()


def backward(model: DistributedDataParallel, ranks: Ranks, microbatches: int = 1) -> None:
    first = ranks.data_index * microbatches
    with model.no_sync():
        for index in range(first, first + microbatches - 1):
            (loss_of(model, index) / microbatches).backward()
    (loss_of(model, first + microbatches - 1) / microbatches).backward()
