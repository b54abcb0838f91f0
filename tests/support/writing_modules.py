"""Modules that write their own parameters in forward, as users have them, and a model of them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ActNorm", "ClampedLinear", "Codebook", "WritingModel"]


def _total(value: Tensor, *, reduces: bool) -> Tensor:
    if reduces:
        dist.all_reduce(value)
    return value


class Codebook(nn.Module):
    """The codebook of a VQ-VAE: a frozen parameter that follows a moving average of its inputs.

    reduces  statistics are summed over ranks, so that ranks write alike
    """

    def __init__(self, width: int, *, reduces: bool) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, width), requires_grad=False)
        self.reduces = reduces

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.cdist(x.detach(), self.codes).argmin(-1)
        quantised = F.embedding(chosen, self.codes)
        if self.training:
            with torch.no_grad():
                one_hot = (chosen[:, None] == torch.arange(len(self.codes))).to(x.dtype)
                sums = _total(one_hot.T @ x.detach(), reduces=self.reduces)
                counts = _total(one_hot.sum(0), reduces=self.reduces)
                mean = sums / counts.clamp(min=1)[:, None]
                self.codes.copy_(torch.where(counts[:, None] > 0, self.codes.lerp(mean, 0.25), self.codes))
        return x + (quantised - x).detach()


class ActNorm(nn.Module):
    """Glow's layer: its first batch decides scale and bias, which are trained from there.

    reduces  that of ``Codebook``
    """

    def __init__(self, width: int, *, reduces: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.initialised = False
        self.reduces = reduces

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialised:
            self.initialised = True
            with torch.no_grad():
                rows = x.reshape(-1, x.shape[-1])
                count = _total(rows.new_tensor(float(len(rows))), reduces=self.reduces)
                mean = _total(rows.sum(0), reduces=self.reduces) / count
                square = _total((rows**2).sum(0), reduces=self.reduces) / count
                self.bias.copy_(-mean)
                self.scale.copy_((square - mean**2 + 1e-3).rsqrt())
        return (x + self.bias) * self.scale


class ClampedLinear(nn.Linear):
    """A layer whose weights are clamped before each use, as those of a critic."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


class WritingModel(nn.Module):
    """An embedding with a largest norm, and the modules above.

    reduces  that of the modules: False is for one rank, and for ranks that all have the same data
    """

    def __init__(self, *, reduces: bool = False, max_norm: float | None = 0.8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, max_norm=max_norm)
        self.norm = ActNorm(6, reduces=reduces)
        self.book = Codebook(6, reduces=reduces)
        self.head = ClampedLinear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.book(self.norm(self.embedding(tokens))))
