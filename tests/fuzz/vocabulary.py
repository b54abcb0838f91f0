"""The words that programs are written in: modules, data and comparisons, as users have them.

Scripts take the sources of those that they use from this file, so that each stands alone: plain PyTorch, and public
names of the library. The ``Plain`` modules compute what the library's modules of that name promise, and have their
parameters' names.
"""

# ruff: noqa: F401  (the names at the top are there for scripts as well)

import copy
import gc
import math
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class BadBatch(Exception):
    """What users raise, catch and go on from."""


# ---- Models. ----


class Net(nn.Module):
    """A stem, blocks in an order of their own, and a head."""

    def __init__(self, stem, blocks, head, order=None):
        super().__init__()
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.head = head
        self.order = range(len(blocks)) if order is None else order

    def forward(self, x):
        x = self.stem(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


class FullNet(Net):
    """One that does it all: blocks that are recomputed, that raise inside, and that have a part in the loss."""

    def __init__(self, stem, blocks, head, order=None, recompute=None):
        super().__init__(stem, blocks, head, order)
        self.recompute = recompute  # of whole blocks: "reentrant" or "non-reentrant"

    def forward(self, x, fail_in=None, when="forward"):
        x = self.stem(x)
        penalties = []
        for index in self.order:
            fails = when if index == fail_in else None
            if self.recompute is not None and torch.is_grad_enabled():
                x = checkpoint(self.blocks[index], x, fails, use_reentrant=self.recompute == "reentrant")
            else:
                x = self.blocks[index](x, fails)
            if isinstance(x, tuple):
                x, penalty = x
                penalties.append(penalty)
        y = self.head(x)
        return {"y": y, "penalties": penalties} if penalties else y


class Stage(nn.Module):
    """Blocks one after another."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class FullStage(Stage):
    """Likewise of those that do it all."""

    def forward(self, x, fails=None):
        penalties = []
        for block in self.blocks:
            x = block(x, fails)
            if isinstance(x, tuple):
                x, penalty = x
                penalties.append(penalty)
        return (x, sum(penalties)) if penalties else x


class Residual(nn.Module):
    """A layer beside its input."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


class FullResidual(nn.Module):
    """One that does it all."""

    def __init__(self, layer, recompute=None, penalty=False):
        super().__init__()
        self.layer = layer
        self.recompute = recompute  # of the layer
        self.penalty = penalty

    def forward(self, x, fails=None):
        if self.recompute is not None and torch.is_grad_enabled():
            y = checkpoint(self.layer, x, use_reentrant=self.recompute == "reentrant")
        else:
            y = self.layer(x)
        if fails == "forward":
            raise BadBatch("in forward")
        y = x + torch.tanh(y)
        if fails == "backward" and y.requires_grad:
            y.register_hook(fail_in_backward)
        return (y, (y - x).square().mean()) if self.penalty else y


class Cast(nn.Module):
    """A layer that computes in another dtype than the model."""

    def __init__(self, layer, dtype):
        super().__init__()
        self.layer = layer.to(dtype)
        self.dtype = dtype

    def forward(self, x):
        return self.layer(x.to(self.dtype)).to(x.dtype)


class Scale(nn.Module):
    """A parameter of no dims."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return x * self.factor


class Branch(nn.Module):
    """One of two layers, as the batch says: ranks use different parameters."""

    def __init__(self, left, right):
        super().__init__()
        self.left = left
        self.right = right

    def forward(self, x):
        return self.left(x) if x[0, 0] > 0 else self.right(x)


class SharedBranch(Branch):
    """The same weight in both."""

    def __init__(self, left, right):
        super().__init__(left, right)
        self.right.weight = self.left.weight


class Idle(nn.Module):
    """A layer beside a parameter that nobody uses."""

    def __init__(self, layer, features):
        super().__init__()
        self.layer = layer
        self.spare = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return self.layer(x)


class Lookup(nn.Module):
    """A row of a table for each row of x."""

    def __init__(self, rows, features):
        super().__init__()
        self.table = nn.Embedding(rows, features)

    def forward(self, x):
        return self.table(x.argmax(-1))


class Counted(nn.Module):
    """A layer that keeps running statistics of its input."""

    def __init__(self, layer, features):
        super().__init__()
        self.layer = layer
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0).to(self.mean.dtype), 0.1)
            self.count += 1
        return self.layer(x)


class Attention(nn.Module):
    """Rows look at each other."""

    def __init__(self, features):
        super().__init__()
        self.attention = nn.MultiheadAttention(features, 1)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """Rows one after another."""

    def __init__(self, features):
        super().__init__()
        self.cell = nn.GRU(features, features)

    def forward(self, x):
        return self.cell(x)[0]


class Convolution(nn.Module):
    """Neighbouring features."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x):
        return self.kernel(x[:, None]).mean(1)


class Routed(nn.Module):
    """Each row goes to the expert of its largest feature; some experts get none."""

    def __init__(self, experts, num_experts, padded=False):
        super().__init__()
        self.experts = experts
        self.num_experts = num_experts
        self.padded = padded  # with two rows of no expert, whose outputs are zeros

    def forward(self, x):
        chosen = x.argmax(-1) % self.num_experts
        order = chosen.argsort(stable=True)
        rows = torch.cat([x[order], x.new_full((2, x.shape[-1]), 7.0)]) if self.padded else x[order]
        y = self.experts(rows, torch.bincount(chosen, minlength=self.num_experts))
        return y[order.argsort()] + y[len(x) :].sum()


class PlainLayerNormLinear(nn.Module):
    def __init__(self, in_features, out_features, bias=True, normalization="LayerNorm"):
        super().__init__()
        self.normalization = normalization
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
        self.layer_norm_bias = nn.Parameter(torch.zeros(in_features)) if normalization == "LayerNorm" else None
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x):
        return F.linear(normalized(self, x), self.weight, self.bias)


class PlainLayerNormMLP(nn.Module):
    def __init__(self, features, hidden, bias=True, normalization="LayerNorm", activation="gelu"):
        super().__init__()
        self.normalization, self.activation = normalization, activation
        self.layer_norm_weight = nn.Parameter(torch.ones(features))
        self.layer_norm_bias = nn.Parameter(torch.zeros(features)) if normalization == "LayerNorm" else None
        self.fc1_weight = nn.Parameter(torch.zeros(hidden * (2 if activation == "swiglu" else 1), features))
        self.fc1_bias = nn.Parameter(torch.zeros(len(self.fc1_weight))) if bias else None
        self.fc2_weight = nn.Parameter(torch.zeros(features, hidden))
        self.fc2_bias = nn.Parameter(torch.zeros(features)) if bias else None

    def forward(self, x):
        y = F.linear(normalized(self, x), self.fc1_weight, self.fc1_bias)
        if self.activation == "swiglu":
            gate, y = y.chunk(2, dim=-1)
            y = F.silu(gate) * y
        else:
            y = F.gelu(y, approximate="tanh")
        return F.linear(y, self.fc2_weight, self.fc2_bias)


def normalized(module, x):
    shape = (x.shape[-1],)
    if module.normalization == "RMSNorm":
        return F.rms_norm(x, shape, module.layer_norm_weight, 1e-5)
    return F.layer_norm(x, shape, module.layer_norm_weight, module.layer_norm_bias, 1e-5)


class PlainGroupedLinear(nn.Module):
    def __init__(self, num_experts, in_features, out_features, bias=True, single_grouped_weight=False):
        super().__init__()
        self.num_experts, self.has_bias, self.packed = num_experts, bias, single_grouped_weight
        add_experts(self, "", num_experts, out_features, in_features, bias, single_grouped_weight)

    def forward(self, x, m_splits):
        return product_of_experts(self, "", x, m_splits)


class PlainGroupedMLP(nn.Module):
    def __init__(self, num_experts, features, hidden, bias=True, single_grouped_weight=False):
        super().__init__()
        self.num_experts, self.has_bias, self.packed = num_experts, bias, single_grouped_weight
        add_experts(self, "fc1_", num_experts, 2 * hidden, features, bias, single_grouped_weight)
        add_experts(self, "fc2_", num_experts, features, hidden, bias, single_grouped_weight)

    def forward(self, x, m_splits):
        gate, y = product_of_experts(self, "fc1_", x, m_splits).chunk(2, dim=-1)
        return product_of_experts(self, "fc2_", F.silu(gate) * y, m_splits)


def add_experts(module, prefix, num_experts, out_features, in_features, bias, packed):
    for expert in range(1 if packed else num_experts):
        shape = (num_experts, out_features, in_features) if packed else (out_features, in_features)
        module.register_parameter(f"{prefix}weight{'' if packed else expert}", nn.Parameter(torch.zeros(shape)))
    for expert in range(num_experts if bias else 0):
        module.register_parameter(f"{prefix}bias{expert}", nn.Parameter(torch.zeros(out_features)))


def product_of_experts(module, prefix, x, m_splits):
    rows = x.split([*m_splits.tolist(), len(x) - int(m_splits.sum())])
    products = []
    for expert in range(module.num_experts):
        packed = getattr(module, f"{prefix}weight", None)
        weight = getattr(module, f"{prefix}weight{expert}") if packed is None else packed[expert]
        bias = getattr(module, f"{prefix}bias{expert}") if module.has_bias else None
        products.append(F.linear(rows[expert], weight, bias))
    products.append(products[0].new_zeros(len(rows[-1]), products[0].shape[-1]))  # of no expert
    return torch.cat(products)


def initialise(model, seed=0, variant=0, experts=()):
    """Values by name, so that it does not matter in which order a class makes its parameters. They fit into bf16.

    variant  of the parameters whose names begin with ``experts``
    """
    with torch.no_grad():
        for name, param in model.named_parameters():
            own = variant if name.startswith(tuple(experts)) else 0
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed} {own}".encode()))
            values = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_((values / math.sqrt(param.shape[-1]) if param.ndim > 1 else 0.5 + 0.2 * values).bfloat16())
    return model


def doubled(gradient):
    return gradient * 2


def fail_in_backward(gradient):
    raise BadBatch("in backward")


def interrupt(outputs):
    """What the exception's traceback keeps alive."""
    raise BadBatch("after forward")


# ---- Training. ----


def batch(rank, step, index, rows=3, features=5):
    """The rows that one rank sees in one microbatch."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * index + rank)
    return torch.randn(rows, features, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())


def loss_of(outputs):
    """A mean over everything in the outputs."""
    if isinstance(outputs, dict):
        return loss_of(outputs["y"]) + sum(penalty.mean() for penalty in outputs["penalties"])
    return (outputs.float() if outputs.dtype is torch.bfloat16 else outputs).sub(1.0).square().mean()


def groups_of(model, **options):
    """Parameter groups as everybody has them: norms and biases do not decay."""
    small = [param for param in model.parameters() if param.ndim < 2]
    large = [param for param in model.parameters() if param.ndim >= 2]
    return [{"params": small, **options}, {"params": large}]


def autocast(model, *arguments):
    """A forward in bf16, as far as autocast goes."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(*arguments)


def scale_grads(model, factor):
    """In place."""
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(factor)


def drain(model):
    """Compute the weight gradients that modules have delayed, last module first."""
    for module in reversed(list(model.modules())):
        while isinstance(module, nn.Module) and getattr(module, "wgrad_queue", None) and module.need_backward_dw():
            module.backward_dw()


def values_of(model):
    """What this rank has of each parameter: name -> (its first element, values)."""
    module = getattr(model, "module", model)
    with torch.no_grad():
        return {name: (first_of(param), copied(param)) for name, param in module.named_parameters()}


def grads_of(model):
    """The same of gradients, where they are whole or this rank's shard of them; None for a parameter without."""
    module = getattr(model, "module", model)
    found = {}
    for name, param in module.named_parameters():
        if param.requires_grad:
            grad = param.grad if param.grad is not None else getattr(param, "main_grad", None)
            found[name] = None if grad is None else (first_of(param), copied(grad))
    return found


def pieces_like(model, tensors):
    """Tensors that follow ``model.parameters()``, as ``values_of`` has them."""
    module = getattr(model, "module", model)
    named = module.named_parameters()
    return {name: (first_of(param), copied(each)) for (name, param), each in zip(named, tensors, strict=True)}


def first_of(param):
    return param.shard.start if hasattr(param, "shard") else 0


def copied(tensor):
    return tensor.detach().reshape(-1).clone().double()


# ---- In plain PyTorch, where one process sees the batches of all ranks. ----


def share(models, experts):
    """Models that differ in their experts alone."""
    first = models[0]
    for other in models[1:]:
        for (name, module), twin in zip(other.named_modules(), first.modules(), strict=True):
            for local in list(module._parameters):
                if not f"{name}.{local}".startswith(tuple(experts)):
                    module._parameters[local] = twin._parameters[local]


class AllOf(nn.Module):
    """Models as one, for its parameters."""

    def __init__(self, *models):
        super().__init__()
        self.models = nn.ModuleList(models)


class Masters(nn.Module):
    """fp32 copies of a bf16 model's parameters: gradients are summed in them, and optimizers step over them."""

    def __init__(self, model):
        super().__init__()
        self.model = [model]  # whose parameters are not ours
        for name, param in model.named_parameters():
            self.register_parameter(
                name.replace(".", "/"), nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
            )

    def named_parameters(self, *args, **kwargs):
        return [(name.replace("/", "."), param) for name, param in super().named_parameters(*args, **kwargs)]

    def pairs(self):
        return zip(self.model[0].parameters(), self.parameters(), strict=True)

    def take(self):
        """Add the model's gradients, and clear them."""
        for param, master in self.pairs():
            if param.grad is not None:
                master.grad = param.grad.float() if master.grad is None else master.grad + param.grad.float()
                param.grad = None

    def give(self):
        """Round to the model's parameters."""
        with torch.no_grad():
            for param, master in self.pairs():
                param.copy_(master)


def zeros_where_none(model):
    """A parameter that nobody has used has the gradient zero."""
    for param in model.parameters():
        if param.requires_grad and param.grad is None:
            param.grad = torch.zeros_like(param)


# ---- Comparison. ----


class Differs(AssertionError):
    """A rank has seen something else than plain PyTorch."""


def compare(found, expected, tolerance):
    """What each rank has noted, by name, with what it should have. What is "first" has no steps' roundings in it."""
    for rank, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
        for what, value in mine.items():
            allowed = min(tolerance, 1e-4) if what.startswith("first ") else tolerance
            if isinstance(value, dict):
                for name, piece in value.items():
                    compare_piece(f"rank {rank}: {what}: {name}", piece, wanted[what][name], allowed)
            else:
                compare_piece(f"rank {rank}: {what}", (0, value), (0, wanted[what]), allowed)
        missing = [what for what in wanted if what not in mine]
        if missing:
            raise Differs(f"rank {rank}: {missing[0]}: missing")


def compare_piece(what, piece, whole, tolerance):
    """``tolerance`` is relative to the norm of the whole, or to a thousandth where that is smaller."""
    if piece is None or whole is None:
        if piece is not whole:
            raise Differs(f"{what}: {piece} where {whole} was expected")
        return
    start, values = piece
    values, all_of_it = (torch.as_tensor(each, dtype=torch.float64).reshape(-1) for each in (values, whole[1]))
    wanted = all_of_it[start : start + len(values)]
    if len(values) != len(wanted):
        raise Differs(f"{what}: {len(values)} elements where {len(wanted)} were expected")
    if not torch.isfinite(wanted).all():
        if torch.isfinite(values).all():
            raise Differs(f"{what}: {values.tolist()} where {wanted.tolist()} was expected")
        return
    error, norm = float((values - wanted).norm()), max(float(all_of_it.norm()), 1e-3)
    if not error <= tolerance * norm:
        raise Differs(f"{what}: off by {error / norm:.1e}: {values.tolist()} where {wanted.tolist()} was expected")
