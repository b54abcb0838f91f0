"""What programs do with the gradient of a matrix of 60 rows and 5 columns, in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

WEIGHTS = torch.linspace(-1, 1, 5, dtype=torch.float64)
COLUMN = torch.linspace(1, 2, 60, dtype=torch.float64).view(60, 1)

OF_A_MATRIX: dict[str, Callable[[Any], Any]] = {
    "rows": lambda g: g.sum(0),
    "rows, kept": lambda g: g.sum(1, keepdim=True),
    "norms of rows": lambda g: g.data.norm(dim=1),
    "norms of rows, kept": lambda g: torch.linalg.vector_norm(g, 2, 1, keepdim=True),
    "a norm that writes": lambda g: torch.linalg.vector_norm(g, out=torch.zeros((), dtype=torch.float64)),
    "a sum that writes": lambda g: torch.sum(g, 0, out=torch.zeros(5, dtype=torch.float64)),
    "means of rows": lambda g: g.detach().mean(dim=-1),
    "largest of rows": lambda g: g.max(dim=1).values,
    "the largest's place": lambda g: g.argmax().item(),
    "an index": lambda g: g[3],
    "an element": lambda g: g[59, 4].item(),
    "a mask's elements": lambda g: g[g > 0],
    "a plain tensor's elements": lambda g: torch.arange(300.0).view(60, 5)[g > 0],
    "a loop": lambda g: [row.sum() for row in g][7],
    "halves": lambda g: g.chunk(2)[1],
    "a transpose": lambda g: g.T,
    "a transpose of a product": lambda g: (g * 2).mT.sum(1),
    "a product": lambda g: g @ WEIGHTS,
    "a product on the right": lambda g: COLUMN.T @ g,
    "a product with itself": lambda g: g.T @ g,
    "a Gram matrix's number": lambda g: torch.trace(g @ g.T),
    "a sort": lambda g: g.flatten().sort().values,
    "top k": lambda g: g.view(-1).topk(3).indices,
    "an element of a flat view": lambda g: g.reshape(-1)[150],
    "a median": lambda g: g.median(),
    "a quantile": lambda g: torch.quantile(g.abs(), 0.9),
    "a histogram": lambda g: torch.histc(g, bins=8),
    "a product of all": lambda g: (1 + g).prod(),
    "matrix norm": lambda g: torch.linalg.matrix_norm(g),
    "largest singular value": lambda g: torch.linalg.norm(g, 2),
    "nuclear norm": lambda g: torch.norm(g, "nuc"),
    "a vector of all": lambda g: parameters_to_vector([g, g]),
    "stacked": lambda g: torch.stack([g.flatten(), g.flatten()]),
    "concatenated": lambda g: torch.cat([g, torch.ones(1, 5, dtype=torch.float64)]),
    "numpy": lambda g: torch.from_numpy(g.data.numpy().copy()),
    "a list": lambda g: g.detach().tolist()[3],
    "broadcast": lambda g: g.unsqueeze(0) * torch.ones(2, 1, 1),
    "broadcast without a dim": lambda g: g * torch.ones(2, 1, 1),
    "with a row": lambda g: (g * WEIGHTS).norm(),
    "with a row, whole": lambda g: (g * WEIGHTS).sum(0),
    "with a column": lambda g: (g - COLUMN).sum(1),
    "with a whole one": lambda g: torch.where(torch.arange(300.0).view(60, 5) > 100, g, 0.0).sum(1),
    "added to a row": lambda g: (WEIGHTS + g)[1],
    "centred": lambda g: (g - g.mean(dim=0)).norm(),
    "complex": lambda g: torch.complex(g, g).abs().sum(0),
    "complex, whole": lambda g: (g * (1 + 2j)).sum(0).imag,
    "places of what is not 0": lambda g: torch.where(g > 0)[0],
    "softmax": lambda g: g.softmax(-1)[0],
    "cosine": lambda g: torch.cosine_similarity(g, g.roll(1, 0), dim=0),
    "einsum": lambda g: torch.einsum("ij,j->i", g, WEIGHTS),
    "a row's largest element": lambda g: g[2].abs().max(),
    "a batch of one": lambda g: g.unsqueeze(0).squeeze(0).sum(1),
}


def answer(read: Callable[[Any], Any], grad: Any, *, on_shards: bool) -> Any:
    """The result of ``read``, which the shards of a gradient give; or else an error with the remedy, and its result."""
    if on_shards:
        return read(grad)
    with pytest.raises(RuntimeError, match=r"is not defined over the shards .*full_tensor\(\)"):
        read(grad)
    return read(grad.full_tensor())


WRITES: dict[str, Callable[[Any], Any]] = {
    "a row": lambda g: g.__setitem__(0, 1.0),
    "a slice": lambda g: g.__setitem__((slice(None), 2), 1.0),
    "sums": lambda g: g.cumsum_(0),
    "of some rows": lambda g: g.index_fill_(0, torch.tensor([0]), 0.0),
    "a swap of dims": lambda g: g.t_(),
    "another function's result": lambda g: torch.cumsum(g, 0, out=g),
}

WRITES_TO_VIEWS: dict[str, Callable[[Any], Any]] = {
    "a row": lambda g: g[0].zero_(),
    "an element of a row": lambda g: g[0][1].fill_(1.0),
    "a part of a row": lambda g: g[0].__setitem__(slice(2), 1.0),
    "a transpose": lambda g: g.T.mul_(2),
    "a factor": lambda g: g.mT.__imul__(2),
    "rows in a loop": lambda g: [row.div_(row.norm()) for row in g],
    "several": lambda g: torch._foreach_mul_(g.unbind(), 2.0),
    "another function's result": lambda g: torch.add(g[0], 1, out=g[1]),
}


class Net(nn.Module):
    """A matrix with elements on several ranks, and a scalar and small parameters that lie on one rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(5, 60)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(60, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wide(x).tanh() * self.scale)


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
