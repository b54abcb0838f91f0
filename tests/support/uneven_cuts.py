"""A model that tensor-parallel ranks hold together: rows, columns and packed blocks, cut unevenly."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cut_models import copy_in, reduce_out
from torch import Tensor, nn

from maingrad.ddp.plan.cut import Box
from maingrad.ddp.plan.model_slice import ModelSlice, set_model_slice

VOCABULARY, WIDTH, HIDDEN = 11, 6, 7
NUM_SCALES = 12  # evenly cut: fully_shard wants buffers of one shape


def pieces(length: int, count: int) -> list[tuple[int, int]]:
    """[start, end) of each rank; the last ones may have fewer, or nothing."""
    step = -(-length // count)
    return [(min(index * step, length), min((index + 1) * step, length)) for index in range(count)]


def cut(whole: Tensor, dim: int, blocks: int, group: dist.ProcessGroup | None) -> tuple[Tensor, ModelSlice]:
    """This rank's part of a tensor that is ``blocks`` equal blocks along ``dim``, each cut over the ranks."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    local, found = part_of(whole, dim, blocks, rank, size)
    return local, found._replace(group=group)


def part_of(whole: Tensor, dim: int, blocks: int, rank: int, size: int) -> tuple[Tensor, ModelSlice]:
    """The part of one of ``size`` ranks."""
    length = whole.shape[dim] // blocks
    start, end = pieces(length, size)[rank]
    boxes = []
    for block in range(blocks):
        offsets, sizes = [0] * whole.ndim, list(whole.shape)
        offsets[dim], sizes[dim] = block * length + start, end - start
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    local = torch.cat([each.narrow(dim, start, end - start) for each in whole.split(length, dim)], dim)
    return local.contiguous(), ModelSlice(tuple(whole.shape), tuple(boxes), dim, None, "slice")


class Cut(nn.Module):
    """Gate and up packed in one weight, a row-parallel layer, an embedding tied to the head by vocabulary, a frozen
    slice, a slice that a rank of four has nothing of, a buffer of a slice, and copies.

    group  the tensor-parallel ranks; None: this rank has everything, and no slice is known
    """

    def __init__(self, group: dist.ProcessGroup | None, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.group = group
        self.embed = self._slice(torch.randn(VOCABULARY, WIDTH), 0, dtype)
        self.gate_up = self._slice(torch.randn(2 * HIDDEN, WIDTH), 0, dtype, blocks=2)
        self.gate_up_bias = self._slice(torch.randn(2 * HIDDEN), 0, dtype, blocks=2)
        self.down = self._slice(torch.randn(WIDTH, HIDDEN), 1, dtype)
        self.down_bias = nn.Parameter(torch.randn(WIDTH).to(dtype))
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float32)
        self.mix = self._slice(torch.randn(3, WIDTH), 0, dtype)
        self.fixed = self._slice(torch.rand(HIDDEN), 0, dtype)
        self.fixed.requires_grad_(False)
        self.register_buffer("scales", self._slice(torch.rand(NUM_SCALES), 0, torch.float32).detach())
        if group is not None:
            set_model_slice(self.scales, cut(torch.zeros(NUM_SCALES), 0, 1, group)[1])
            for copies in (self.down_bias, *self.norm.parameters()):
                shape = tuple(copies.shape)
                set_model_slice(copies, ModelSlice(shape, (Box((0,), shape),), None, group, "dense"))
        self.head = nn.Linear(1, 1, bias=False)
        self.head.weight = self.embed

    def _slice(self, whole: Tensor, dim: int, dtype: torch.dtype, blocks: int = 1) -> nn.Parameter:
        local, found = cut(whole.to(dtype), dim, blocks, self.group)
        param = nn.Parameter(local)
        if self.group is not None:
            set_model_slice(param, found)
        return param

    def _sum(self, x: Tensor) -> Tensor:
        return x if self.group is None else reduce_out(x, self.group)

    def _copied(self, x: Tensor) -> Tensor:
        return x if self.group is None else copy_in(x, self.group)

    def forward(self, tokens: Tensor) -> Tensor:
        rank, size = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        start, end = pieces(VOCABULARY, size)[rank]
        mine = ((tokens >= start) & (tokens < end))[..., None]
        x = self._sum(self.embed[(tokens - start).clamp(0, max(0, end - start - 1))] * mine)
        x = x + self._sum(self.mix.sum(0))
        x = self.norm(x.float()).to(x.dtype)
        gate, up = F.linear(self._copied(x), self.gate_up, self.gate_up_bias).chunk(2, -1)
        hidden = F.silu(gate) * up * self.fixed * (self._sum(self.scales.sum()) / NUM_SCALES).to(x.dtype)
        x = self._copied(self._sum(F.linear(hidden, self.down)) + self.down_bias)
        return self._sum(F.pad(F.linear(x, self.head.weight), (start, VOCABULARY - end)))


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: nn.Module, step: int, ranks: Sequence[int]) -> Tensor:
    """The mean over these ranks' batches."""
    tokens = torch.cat([batch(step, rank) for rank in ranks])
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten())
