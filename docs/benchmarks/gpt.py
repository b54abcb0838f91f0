"""The GPT that every row of ``data_parallel.py`` trains, and its choice of linear layers.

Legend: B sequences, T tokens, H width of the model, F width of the feed-forward, V vocabulary, M microbatches.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from maingrad.ddp.contract.main_grad import accumulator_of, hand_over, open_for_write, record_of
from maingrad.ddp.torch_internals import current_backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Sizes of one table."""

    name: str
    hidden: int
    num_layers: int
    num_microbatches: int
    num_tokens: int
    """Tokens of one microbatch on one rank: one sequence."""
    vocab_size: int = 32000

    @property
    def num_heads(self):
        """Number of heads; a head is 128 wide where the width of the model allows."""
        return max(1, self.hidden // 128)

    @property
    def ffn_dim(self):
        """2.6875 times the model's width, rounded down to a multiple of 128."""
        return int(self.hidden * 2.6875) // 128 * 128

    @property
    def num_params(self):
        """Elements of all parameters."""
        block = self.hidden * (4 * self.hidden + 3 * self.ffn_dim + 2)
        return self.num_layers * block + self.hidden * (2 * self.vocab_size + 1)

    def describe(self):
        """A line for the head of the table."""
        microbatches = "1 microbatch" if self.num_microbatches == 1 else f"{self.num_microbatches} microbatches"
        return (
            f"hidden {self.hidden}, {self.num_layers} layers, {self.num_params / 1e9:.2f} B parameters, "
            f"{microbatches} of {self.num_tokens:,} tokens on each GPU"
        )


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(name="large", hidden=4096, num_layers=8, num_microbatches=4, num_tokens=4096),
        Setting(name="one_microbatch", hidden=4096, num_layers=8, num_microbatches=1, num_tokens=4096),
        Setting(name="small", hidden=2048, num_layers=16, num_microbatches=2, num_tokens=2048),
        # Not for measurements: small enough to run everything on a CPU.
        Setting(name="tiny", hidden=64, num_layers=2, num_microbatches=2, num_tokens=16, vocab_size=128),
    )
}


# ---- Linear layers. ----


def plain_linear(in_features, out_features):
    """torch's layer: ``parallelize`` fuses its weight gradient; otherwise a wrapper's hook moves it."""
    return nn.Linear(in_features, out_features, bias=False)


class AddmmLinear(nn.Linear):
    """The simplest layer that adds its weight gradient to ``main_grad``: an autograd function around one ``addmm``.

    The peers' floor uses this layer, and so do peers that accept a fused weight gradient: the benchmark compares data
    parallelism, not layers. The layer follows the same ``main_grad`` contract as ours, with any provider.
    """

    def forward(self, x):
        """x [..., in] -> [..., out]."""
        y = _AddmmWgrad.apply(x, self.weight)
        return y

    @classmethod
    def make(cls, in_features, out_features):
        """The layer without bias, as ``plain_linear`` makes torch's."""
        return cls(in_features, out_features, bias=False)


class _AddmmWgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # the object with main_grad; a provider's saved-tensor hook may unpack another object
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, *grads):
        (dy,) = grads
        x, data = ctx.saved_tensors
        weight = ctx.weight
        dx = dy @ data
        record = record_of(weight)
        total = accumulator_of(weight, "AddmmLinear")
        rows, columns = dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1])
        overwrite = open_for_write(weight, record, current_backward())
        _write_product(total, rows, columns, overwrite)
        return dx, hand_over(weight, record, fused=True)


def _write_product(total, a, b, overwrite):
    """``total += a b``, or ``total = a b``, summed in ``total``'s dtype."""
    if not total.is_cuda:  # only CUDA has products with an output of another dtype
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=0 if overwrite else 1)
    elif overwrite:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


# ---- The model. ----


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``."""

    def __init__(self, setting, linear):
        super().__init__()
        width, ffn = setting.hidden, setting.ffn_dim
        self.num_heads = setting.num_heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)
        self.ffn_norm = nn.RMSNorm(width)
        self.up = linear(width, 2 * ffn)
        self.down = linear(ffn, width)

    def forward(self, x):
        """[B, T, H] -> [B, T, H]."""
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # [B, heads, T, H / heads] each
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, value = self.up(self.ffn_norm(x)).chunk(2, dim=-1)
        y = x + self.down(F.silu(gate) * value)
        return y


def cross_entropy(logits, targets):
    """[B, T, V], [B, T] -> mean cross-entropy, fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """(tokens [B, T], targets [B, T]) -> loss. Without rotary positions and dropout, which no row's work depends on."""

    def __init__(self, setting, linear):
        super().__init__()
        self.embedding = nn.Embedding(setting.vocab_size, setting.hidden)
        self.blocks = nn.ModuleList(Block(setting, linear) for _ in range(setting.num_layers))
        self.norm = nn.RMSNorm(setting.hidden)
        self.head = linear(setting.hidden, setting.vocab_size)
        self.loss = cross_entropy

    def forward(self, tokens, targets):
        """See the class."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.norm(x)), targets)

    def units(self, *, split_ends=False):
        """The modules that sharded wrappers make units of before the model itself.

        split_ends  the blocks, the embedding and the head; otherwise the blocks alone
        """
        return [*self.blocks, *((self.embedding, self.head) if split_ends else ())]

    def compile_loss(self):
        """Compile the loss; ``units`` are compiled one by one, and sharded wrappers hook them whole."""
        self.loss = torch.compile(cross_entropy)


def make_model(setting, dtype, device, linear=plain_linear):
    """A model with the same weights for every row and rank, drawn in fp32 and rounded to ``dtype``."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        model = GPT(setting, linear)
        torch.manual_seed(0)  # after the constructors, whose draws differ between layers
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
    return model.to(dtype)
