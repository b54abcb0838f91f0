"""A small Llama, torch's tensor parallelism of it, and gradients of whole parameters from those of slices."""

import inspect

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from maingrad.ddp.plan.tensor_parallel.localize import layouts_of

VOCABULARY = 64

OLD_DTENSORS = "grad_placements" not in inspect.signature(DTensor.from_local).parameters
"""torch 2.11: it flattens no dim behind one that is cut, puts no packed cut together, and compiles less."""


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, dim, head, bias):
        super().__init__()
        self.head = head
        # A bias of keys has no gradient but for rounding: the softmax takes it out.
        self.wq, self.wv, self.wo = (nn.Linear(dim, dim, bias=bias) for _ in range(3))
        self.wk = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    def __init__(self, dim, hidden, bias):
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=bias), nn.Linear(dim, hidden, bias=bias)
        self.w2 = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim, head, hidden, bias):
        super().__init__()
        self.attention_norm, self.attention = Norm(dim), Attention(dim, head, bias)
        self.mlp_norm, self.mlp = Norm(dim), Mlp(dim, hidden, bias)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, dim=16, head=4, hidden=24, layers=2, bias=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList([Block(dim, head, hidden, bias) for _ in range(layers)])
        self.norm, self.head = Norm(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def llama(seed=0, **options):
    torch.manual_seed(seed)
    return Llama(**options)


def make_mesh(dp=2, tp=2):
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def parallelize(model: Llama, mesh: DeviceMesh, *, sequence: bool) -> Llama:
    """torch's usual plan; ``sequence``: norms and sums between blocks on parts of the sequence."""
    for block in model.blocks:
        plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {"mlp.w1": ColwiseParallel(), "mlp.w3": ColwiseParallel()}
        if sequence:
            whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            out = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
            plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
            plan |= {"attention": whole, "mlp": whole, "attention.wo": out, "mlp.w2": out}
        else:
            plan |= {"attention.wo": RowwiseParallel(), "mlp.w2": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    after = Shard(1) if sequence else Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=after, use_local_output=not sequence),
        "head": ColwiseParallel(input_layouts=after, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan | ({"norm": SequenceParallel()} if sequence else {}))
    return model


def batch(index, rows=2, length=8):
    generator = torch.Generator().manual_seed(1000 + index)
    tokens = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain_grads(model, batches):
    """Gradients of the mean loss over ``batches``."""
    for tokens, labels in batches:
        (model(tokens, labels) / len(batches)).backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def whole_grads(model):
    """``main_grad`` of each parameter, put together from the tensor-parallel ranks' slices."""
    grads = {}
    for prefix, owner in model.named_modules():
        for name, param in owner._parameters.items():
            if param is None:
                continue
            layout, grad = layouts_of(owner).get(name), param.main_grad.clone()
            grads[f"{prefix}.{name}"] = grad if layout is None else layout.dtensor(grad).full_tensor()
    return grads


def assert_grads(found, expected, rtol=1e-6):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        error = (found[name] - grad).norm() / grad.norm()
        assert error < rtol, f"{name}: {error}"


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value
