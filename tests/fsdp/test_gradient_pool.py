"""Memory that comes from the pool holds NaN here: nothing of it may reach a gradient, a parameter or a loss.

Models use their parameters in every way that a write could be missed in: not at all, twice, through a tied module, by
hooks and by fused modules, in recomputed forwards, in some microbatches alone.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from modules import Experts
from sharded_twin import mean_loss, no_sync, train_beside
from stale_memory import stale_memory
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.fsdp import FSDPModule, fully_shard
from maingrad.te_integration import Linear

HIDDEN = 8  # what support's experts take
TOKENS = 11


@pytest.fixture(autouse=True)
def memory_is_stale() -> Iterator[None]:
    with stale_memory() as taken:
        yield
    assert taken


class Block(nn.Module):
    """Two layers around a residual, and what a kind of block has beside them."""

    def __init__(self, kind: str, *, fused: bool) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = Linear(HIDDEN, 15, fuse_wgrad_accumulation=fused)
        self.down = nn.Linear(15, HIDDEN)
        if kind == "unused parameters":
            self.first_unused = nn.Parameter(torch.ones(3, 5))
            self.unused = Linear(5, 3, fuse_wgrad_accumulation=fused)
        elif kind == "tied to a fused module":
            self.again = Linear(HIDDEN, 15, fuse_wgrad_accumulation=fused)
        elif kind == "tied to a plain module":
            self.again = nn.Linear(HIDDEN, 15)
        elif kind == "an expert without tokens":
            self.experts = Experts(3, HIDDEN, HIDDEN, fuse_wgrad_accumulation=fused)
        if hasattr(self, "again"):
            self.again.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        if hasattr(self, "again"):
            hidden = hidden + self.again(x.sin())
        y = x + self.down(hidden.tanh())
        return y + self.experts(y) if hasattr(self, "experts") else y


KINDS = (
    "plain",
    "unused parameters",
    "tied to a fused module",
    "tied to a plain module",
    "an expert without tokens",
)


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(function, x, use_reentrant=reentrant)


Order = Callable[["Model", Tensor], Tensor]


def each_once(model: "Model", x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def one_left_out(model: "Model", x: Tensor) -> Tensor:
    return model.blocks[2](model.blocks[0](x))


def one_in_the_first_microbatch_alone(model: "Model", x: Tensor) -> Tensor:
    return each_once(model, x) if model.microbatch == 0 else one_left_out(model, x)


def one_in_the_last_microbatch_alone(model: "Model", x: Tensor) -> Tensor:
    return each_once(model, x) if model.microbatch == 1 else one_left_out(model, x)


def one_three_times(model: "Model", x: Tensor) -> Tensor:
    first, second, third = model.blocks
    return second(third(second(second(first(x)))))


def side_by_side(model: "Model", x: Tensor) -> Tensor:
    """No order between them but that of the forward."""
    return sum((block(x) for block in model.blocks), x)


def each_recomputed(reentrant: bool) -> Order:
    def order(model: "Model", x: Tensor) -> Tensor:
        for block in model.blocks:
            x = recomputed(block, x, reentrant)
        return x

    return order


def two_recomputed_as_one(reentrant: bool) -> Order:
    def order(model: "Model", x: Tensor) -> Tensor:
        first, second, third = model.blocks
        return third(recomputed(lambda y: second(first(y)), x, reentrant))

    return order


def one_recomputed_and_used_again(reentrant: bool) -> Order:
    def order(model: "Model", x: Tensor) -> Tensor:
        first, second, third = model.blocks
        return second(third(recomputed(lambda y: second(second(first(y))), x, reentrant)))

    return order


ORDERS: dict[str, Order] = {
    "each once": each_once,
    "one left out": one_left_out,
    "one in the first microbatch alone": one_in_the_first_microbatch_alone,
    "one in the last microbatch alone": one_in_the_last_microbatch_alone,
    "one three times": one_three_times,
    "side by side": side_by_side,
    "each recomputed": each_recomputed(False),
    "each recomputed, reentrant": each_recomputed(True),
    "two recomputed as one": two_recomputed_as_one(False),
    "two recomputed as one, reentrant": two_recomputed_as_one(True),
    "one recomputed and used again": one_recomputed_and_used_again(False),
    "one recomputed and used again, reentrant": one_recomputed_and_used_again(True),
}


class Model(nn.Module):
    """An embedding, three blocks, and a head of the embedding's weight. Batches [rows, WIDTH] are read as tokens."""

    def __init__(self, kind: str, order: Order, *, fused: bool) -> None:
        super().__init__()
        self.order = order
        self.microbatch = 0
        self.embed = nn.Embedding(TOKENS, HIDDEN)
        self.blocks = nn.ModuleList([Block(kind, fused=fused) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(0.75))
        self.head = Linear(HIDDEN, TOKENS, fuse_wgrad_accumulation=fused)
        self.head.weight = self.embed.weight

    def forward(self, batch: Tensor) -> Tensor:
        tokens = (batch.abs() * 10).long() % TOKENS
        return self.head(self.order(self, self.embed(tokens)) * self.scale)


def shard(model: Model, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def plain(model: nn.Module) -> nn.Module:
    """Gradients of the twin go through autograd."""
    for module in model.modules():
        if not isinstance(model, FSDPModule) and hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = False
    return model


def run(model: Any, batches: Sequence[Tensor]) -> None:
    plain(model)
    for model.microbatch, batch in enumerate(batches):
        loss = None
        if model.microbatch < len(batches) - 1:
            with no_sync(model):
                loss = mean_loss(model(batch)) / len(batches)
                loss.backward()
        else:
            loss = mean_loss(model(batch)) / len(batches)
            loss.backward()
        assert loss.isfinite()


PLACEMENTS = ("zero1", "zero2", "zero3", "hsdp", "hsdp_zero1", "zero3, once", "hsdp, once")
MATRIX = list(itertools.product(PLACEMENTS, KINDS, (True, False), ORDERS))


@pytest.mark.sampled(43)
@pytest.mark.parametrize(("placements", "kind", "fused", "order"), MATRIX)
def test_stale_memory_never_leaks(placements: str, kind: str, fused: bool, order: str) -> None:
    train_beside(placements, lambda: Model(kind, ORDERS[order], fused=fused), shard, run, steps=2, microbatches=2)
