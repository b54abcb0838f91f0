"""Models as users write them. Scripts take the sources of what they use from here."""

import math
import zlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from user_training import loss_of

from maingrad.te_integration import convert_linears


class BadBatch(Exception):
    """What users raise, catch and go on from."""


class Loss:
    """A mean of squares, which raises once when it is told to."""

    def __init__(self):
        self.fails_in = None  # how many calls

    def __call__(self, y, target):
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in <= 0:
                raise BadBatch("in the loss")
        return (y - target).square().mean()


# ---- Models. ----


class Net(nn.Module):
    """A stem, blocks in an order of their own, and a head."""

    def __init__(self, stem, blocks, head, order=None):
        super().__init__()
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.head = head
        self.order = range(len(blocks)) if order is None else order
        self.temperature = 1.0
        self.headless = False  # the program calls the head by itself
        self.config = {"blocks": len(self.blocks)}

    def forward(self, x):
        x = self.stem(x)
        for index in self.order:
            x = self.blocks[index](x)
        return x if self.headless else self.with_head(x)

    def with_head(self, x):
        return self.head(x) * self.temperature

    @property
    def sharpness(self):
        return 1 / self.temperature

    def set_temperature(self, temperature):
        self.temperature = temperature
        return self

    @torch.no_grad()
    def generate(self, x, count=1):
        """Outputs for inputs that go further and further."""
        outputs = [self(x + index) for index in range(count)]
        return torch.cat([each["y"] if isinstance(each, dict) else each for each in outputs])

    def compute_loss(self, x):
        return loss_of(self(x))


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
        y = x if self.headless else self.with_head(x)
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


class Clamped(nn.Module):
    """A shift that each forward in training clamps, on all ranks alike. Outputs are the same before and after it."""

    def __init__(self, width):
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, width))

    def forward(self, x):
        clamped = self.shift.detach().clamp(-0.05, 0.05)
        y = x + self.shift + (clamped - self.shift.detach())
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.shift.copy_(clamped)
        return y


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
    """A row of a table for each row of x: that of its largest feature."""

    def __init__(self, rows, features):
        super().__init__()
        self.table = nn.Embedding(rows, features)

    def forward(self, x):
        return self.table(choices(x) % self.table.num_embeddings)


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


def choices(x):
    """A number for each row: of its largest feature; of its place, where rounding might make that another one."""
    rounded = x.dtype is torch.bfloat16 or torch.is_autocast_enabled("cpu")
    return torch.arange(len(x)) if rounded else x.argmax(-1)


class Routed(nn.Module):
    """Each row goes to the expert of its largest feature; some experts get none."""

    def __init__(self, experts, num_experts, padded=False):
        super().__init__()
        self.experts = experts
        self.num_experts = num_experts
        self.padded = padded  # with two rows of no expert, whose outputs are zeros

    def forward(self, x):
        chosen = choices(x) % self.num_experts
        order = chosen.argsort(stable=True)
        rows = torch.cat([x[order], x.new_full((2, x.shape[-1]), 7.0)]) if self.padded else x[order]
        y = self.experts(rows, torch.bincount(chosen, minlength=self.num_experts))
        return y[order.argsort()] + y[len(x) :].sum()


class TopExperts(nn.Module):
    """Each row goes to two of the experts of a model of transformers, by probabilities that are learnt."""

    def __init__(self, name, num_experts, features, hidden, drops=False):
        super().__init__()
        self.gate = nn.Linear(features, num_experts, bias=False)
        self.experts = experts_of(name, num_experts, features, hidden)
        self.drops = drops  # the second choice of every third row

    def forward(self, x):
        first, count = choices(x) % self.gate.out_features, self.gate.out_features
        index = torch.stack([first, (first + 1) % count], dim=-1)
        probs = torch.sigmoid(self.gate(x)).gather(-1, index).to(x.dtype)
        if self.drops:
            index = index.clone()
            index[::3, 1] = count
        return self.experts(x, index, probs)


def experts_of(name, num_experts, features, hidden):
    """As the package has them: weights of all experts in one parameter."""
    options = {"hidden_size": features, "intermediate_size": hidden, "num_local_experts": num_experts}
    if name == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

        return MixtralExperts(MixtralConfig(**options, experts_implementation="eager"))
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    return GptOssExperts(GptOssConfig(**options, experts_implementation="eager"))


def converted(module):
    convert_linears(module)
    return module


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


def attributes_of(model):
    """What training has set on a model, for another one."""
    return {name: vars(model)[name] for name in ("order", "temperature")}


def doubled(gradient):
    return gradient * 2


def fail_in_backward(gradient):
    raise BadBatch("in backward")


def interrupt(outputs):
    """What the exception's traceback keeps alive."""
    raise BadBatch("after forward")
