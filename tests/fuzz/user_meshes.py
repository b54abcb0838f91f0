"""Models over tensor-parallel ranks as users cut them, and their training. Scripts take sources from here."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from maingrad.launch import make_optimizer, parallelize
from maingrad.te_integration import convert_linears


class Summed(torch.autograd.Function):
    """Of all ranks: forward sums, or backward does."""

    @staticmethod
    def forward(ctx, x, group, sums):
        ctx.group, ctx.sums = group, sums
        x = x.clone()
        if sums:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, dy):
        return Summed.apply(dy, ctx.group, not ctx.sums), None, None


class Gathered(torch.autograd.Function):
    """The whole sequence of parts. Backward gives each rank its part: of the ranks' sum, or of what all have."""

    @staticmethod
    def forward(ctx, x, group, sums):
        ctx.group, ctx.sums = group, sums
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, dy):
        return Scattered.apply(dy, ctx.group, ctx.sums), None, None


class Scattered(torch.autograd.Function):
    """A part of the sequence: of the ranks' sum, or of what all of them have."""

    @staticmethod
    def forward(ctx, x, group, sums):
        ctx.group, ctx.sums = group, sums
        x = x.clone()
        if sums:
            dist.all_reduce(x, group=group)
        return x.chunk(group.size(), 1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, dy):
        return Gathered.apply(dy, ctx.group, ctx.sums), None, None


class MeshBlock(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, hidden), nn.Linear(hidden, 6, bias=False)
        self.group, self.sequence = None, False

    def forward(self, x):
        y = self.norm(x)
        if self.group is not None:
            y = Gathered.apply(y, self.group, True) if self.sequence else Summed.apply(y, self.group, False)
        y = self.down(nn.functional.gelu(self.up(y)))
        if self.group is not None:
            y = Scattered.apply(y, self.group, True) if self.sequence else Summed.apply(y, self.group, True)
        return x + y


class MeshModel(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.first = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList([MeshBlock(hidden) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 10, bias=False)
        self.group = None
        draws = torch.Generator().manual_seed(hidden)
        for param in self.parameters():
            param.data.copy_(torch.randn(param.shape, generator=draws) * 0.4)

    def forward(self, tokens):
        x = self.first(tokens)
        if self.group is not None:
            x = Scattered.apply(x, self.group, False)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.group is not None:
            x = Gathered.apply(x, self.group, False)
        return self.head(x)


def cut_by_marks(model, group, sequence):
    def cut(module, name, dim):
        part = getattr(module, name).detach().chunk(group.size(), dim)[group.rank()]
        param = nn.Parameter(part.clone())
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1
        setattr(module, name, param)

    for block in model.blocks:
        cut(block.up, "weight", 0)
        cut(block.up, "bias", 0)
        cut(block.down, "weight", 1)
        block.group, block.sequence = group, sequence
    if sequence:
        model.group = group
        for norm in (model.norm, *(block.norm for block in model.blocks)):
            for param in norm.parameters():
                param.sequence_parallel = True


def cut_by_plan(model, mesh, sequence):
    between = Shard(1) if sequence else Replicate()
    even = model.blocks[0].up.out_features % mesh.size() == 0  # torch takes local tensors for even parts
    up = ColwiseParallel(input_layouts=between, use_local_output=even)
    plan = {"up": up, "down": RowwiseParallel(output_layouts=between)}
    norm = {"norm": SequenceParallel()} if sequence else {}
    for block in model.blocks:
        parallelize_module(block, mesh, plan | norm)
    first = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    head = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    parallelize_module(model, mesh, {"first": first, "head": head} | norm)


def mesh_loss(model, number, index, data_rank):
    draws = torch.Generator().manual_seed(100 * number + 10 * index + data_rank)
    tokens = torch.randint(10, (3, 5), generator=draws)
    return nn.functional.cross_entropy(model(tokens[:, :4]).flatten(0, 1), tokens[:, 1:].flatten())


def mesh_optimizer(adam):
    return (torch.optim.AdamW, {"lr": 0.05, "eps": 1e-2}) if adam else (torch.optim.SGD, {"lr": 0.5})


def mesh_run(shape, hidden, clip, adam, iterations, wrapper, cut, sequence, converted):
    """What a rank sees: losses of its microbatches, norms, and whole weights in the end."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    module = MeshModel(hidden)
    shapes = {name: param.shape for name, param in module.named_parameters()}
    if converted == "before":
        convert_linears(module)
    if cut == "marks":
        cut_by_marks(module, mesh["tp"].get_group(), sequence)
    else:
        cut_by_plan(module, mesh["tp"], sequence)
    options = {"tensor_parallel_group": mesh["tp"].get_group()} if cut == "marks" else {}
    options |= {} if wrapper == "zero3" else {"bucket_size": 60}
    model = parallelize(module, wrapper, mesh=mesh["dp"], fuse=converted == "after", **options)
    kind, settings = mesh_optimizer(adam)
    optimizer = make_optimizer(model, kind, max_grad_norm=clip, **settings)
    seen = {}
    for number, count in enumerate(iterations):
        for index in range(count):
            loss = mesh_loss(model, number, index, mesh.get_local_rank("dp"))
            seen[f"loss {number}.{index}"] = loss.detach()
            if index == count - 1:
                (loss / count).backward()
            else:
                with model.no_sync():
                    (loss / count).backward()
        optimizer.step()
        if clip is not None:
            seen[f"norm {number}"] = torch.as_tensor(optimizer.grad_norm)
        optimizer.zero_grad()
    state = (model if wrapper == "zero3" else module).state_dict()
    return seen | {name: whole_in_mesh(state[name], shape, mesh["tp"]) for name, shape in shapes.items()}


def whole_in_mesh(value, shape, mesh):
    """A parameter of this shape, of which a state dict has all, or this rank's slice."""
    value = value.full_tensor() if isinstance(value, DTensor) else value.detach()
    for dim in range(len(shape)):
        if value.shape[dim] != shape[dim]:
            parts = [torch.empty_like(value) for _ in range(mesh.size())]
            dist.all_gather(parts, value.contiguous(), group=mesh.get_group())
            value = torch.cat(parts, dim)
    return value.clone()


def mesh_plain(shape, hidden, clip, adam, iterations):
    """The same of each rank, by one process with the whole model and all data."""
    model = MeshModel(hidden)
    kind, settings = mesh_optimizer(adam)
    optimizer = kind(model.parameters(), **settings)
    seen = [{} for _ in range(shape[0])]
    norms = {}
    for number, count in enumerate(iterations):
        for index in range(count):
            for data_rank in range(shape[0]):
                loss = mesh_loss(model, number, index, data_rank)
                seen[data_rank][f"loss {number}.{index}"] = loss.detach()
                (loss / count / shape[0]).backward()
        if clip is not None:
            norms[f"norm {number}"] = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: param.detach() for name, param in model.named_parameters()}
    return [seen[data_rank] | norms | weights for data_rank in range(shape[0]) for _ in range(shape[1])]
