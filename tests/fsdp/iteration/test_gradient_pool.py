"""Memory that comes from the pool holds NaN here: nothing of it may reach a gradient, a parameter or a loss.

Models use their parameters in every way that a write could be missed in: not at all, twice, through a tied module, by
hooks and by fused modules, in recomputed forwards, in some microbatches alone.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import Experts
from sharded_training import mesh_of
from sharded_training import shard as shard_units
from sharded_twin import mean_loss, no_sync, train_beside
from stale_memory import stale_memory
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.fsdp import FSDPModule, fully_shard
from maingrad.fsdp.module import root_of
from maingrad.launch import simulate
from maingrad.te_integration import Linear, WgradQueue, delayed_wgrad

HIDDEN = 8  # what support's experts take
TOKENS = 11


@pytest.fixture(autouse=True)
def memory_is_stale() -> Iterator[None]:
    with stale_memory() as taken:
        yield
    assert taken


class Block(nn.Module):
    """Two layers around a residual, and the extra modules of the given kind."""

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
    """Blocks side by side over one input: the graph gives them no order."""
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


@pytest.mark.parametrize(("placements", "kind", "fused", "order"), MATRIX)
@pytest.mark.sampled(1)
def test_stale_memory_never_leaks(placements: str, kind: str, fused: bool, order: str) -> None:
    train_beside(placements, lambda: Model(kind, ORDERS[order], fused=fused), shard, run, steps=2, microbatches=2)


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize(("placements", "kind", "fused", "order"), MATRIX)
@pytest.mark.sampled(1)
def test_stale_memory_never_leaks_with_several_buckets(
    placements: str, kind: str, fused: bool, order: str, size: int
) -> None:
    cut = functools.partial(shard, bucket_size=size)
    train_beside(placements, lambda: Model(kind, ORDERS[order], fused=fused), cut, run, steps=2, microbatches=2)


# ---- Ranks that use different parameters. ----


class Choosing(nn.Module):
    """Some of several layers around a residual; a layer that is drawn twice runs twice."""

    def __init__(self, widths: Sequence[int], fused: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.ups = nn.ModuleList([Linear(6, width, fuse_wgrad_accumulation=fused) for width in widths])
        self.downs = nn.ModuleList([nn.Linear(width, 6) for width in widths])

    def forward(self, x: Tensor, which: Sequence[int]) -> Tensor:
        normed = self.norm(x)
        for index in which:
            x = x + self.downs[index](self.ups[index](normed).tanh())
        return x


class Drawn(nn.Module):
    """Blocks that run in another order than they are registered in, under a head that may be tied."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(0)
        self.widths = [[rng.randint(1, 9) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(2, 5))]
        fused = rng.random() < 0.6
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([Choosing(widths, fused) for widths in self.widths])
        self.order = rng.sample(range(len(self.blocks)), len(self.blocks))
        self.head = nn.Linear(6, 9, bias=False)
        if rng.random() < 0.5:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, rng: random.Random, recompute: str) -> Tensor:
        x = self.embed(tokens)
        for index in self.order:
            block, count = self.blocks[index], len(self.widths[index])
            which = [rng.randrange(count) for _ in range(rng.randint(1, count))]
            if recompute:
                x = checkpoint(block, x, which, use_reentrant=recompute == "reentrant")
            else:
                x = block(x, which)
        return self.head(x)


def train_drawn(
    seed: int, size: int, placements: str, instances: int, microbatches: int, how: str, at_once: bool
) -> tuple[list[float], list[Tensor]]:
    """Three steps in which each rank uses the layers that it draws. Returns losses and whole weights."""
    rank = dist.get_rank()
    model = Drawn(seed)
    options: dict[str, Any] = {"placements": placements, "bucket_size": size}
    options["mesh"] = mesh_of(instances, dist.get_world_size() // instances)
    if how == "reduced once":
        options["reduce_every_microbatch"] = False
    shard_units(model, [f"blocks.{index}" for index in range(len(model.blocks))], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    rng, queue, losses = random.Random(1000 * seed + rank), WgradQueue(), []

    def forward(step: int, index: int) -> Tensor:
        tokens = torch.randint(9, (4,), generator=torch.Generator().manual_seed(100 * step + 10 * index + rank))
        with delayed_wgrad(queue) if how == "queue" else nullcontext():
            out = model(tokens, rng, how if "re" in how and how != "reduced once" else "")
        return (out - 1).square().mean() / microbatches

    for step in range(3):
        ahead = [forward(step, index) for index in range(microbatches)] if at_once else []
        for index in range(microbatches):
            with nullcontext() if index == microbatches - 1 else model.no_sync():
                loss = ahead[index] if at_once else forward(step, index)
                loss.backward()
                losses.append(loss.item())
                queue.drain()
        assert placements in ("zero1", "hybrid") or root_of(model).grads.meter.held_nbytes == 0
        optimizer.step()
        optimizer.zero_grad()
    with model.unsharded():
        return losses, [param.detach().clone() for param in model.parameters()]


def draws(seeds: range) -> Iterator[tuple[Any, ...]]:
    for seed in seeds:
        rng = random.Random(seed)
        placements = rng.choice(("zero1", "zero2", "zero3", "zero3", "hybrid", "hsdp", "hsdp_zero1"))
        instances = 2 if placements.startswith("h") else 1
        ways = ["", "queue", "recomputed", "reentrant"] + ["reduced once"] * (placements not in ("zero1", "hybrid"))
        how = rng.choice(ways)
        at_once = how in ("", "reduced once") and rng.random() < 0.5
        inner = rng.choice([1, 2]) if instances == 2 else rng.choice([2, 3])
        yield seed, rng.choice([1, 10, 30, 60]), placements, instances, inner, rng.choice([1, 2, 3]), how, at_once


# In that of seed 128 the pool has waited for more on one rank than on another when backward ends.
@pytest.mark.in_turn
@pytest.mark.parametrize("draw", list(draws(range(5, 200))), ids=str)
@pytest.mark.sampled(1)
def test_ranks_may_use_different_parameters_of_a_unit(draw: tuple[Any, ...]) -> None:
    """All ranks launch in one order (simulated ranks check it), no stale value is summed, and buckets change no bit."""
    seed, size, placements, instances, inner, *rest = draw
    several, one = (
        simulate(train_drawn, instances * inner, seed, numel, placements, instances, *rest, seed=seed)
        for numel in (size, 10**9)
    )
    for (losses, weights), (expected_losses, expected) in zip(several, one, strict=True):
        assert losses == expected_losses
        assert all(weight.isfinite().all() for weight in weights)
        assert all(map(torch.equal, weights, expected))


class Either(nn.Module):
    """Two layers that delay; a rank may use one of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": how == "modules"}
        self.first, self.second = Linear(8, 8, **options), Linear(8, 8, **options)

    def forward(self, x: Tensor, which: str) -> Tensor:
        y = self.first(x).tanh() if "first" in which else x.tanh()
        return self.second(y) if "second" in which else y * 2


@pytest.mark.parametrize("how", ["modules", "queue"])
@pytest.mark.parametrize("used", [("first second", "second"), ("first", "second"), ("second", "first second")])
@pytest.mark.sampled(2)
def test_ranks_may_delay_gradients_of_different_buckets(how: str, used: tuple[str, str]) -> None:
    """A unit's buckets wait for each other: what is complete in backward on one rank is not on another."""

    def train(size: int) -> list[Tensor]:
        torch.manual_seed(0)
        which, queue = used[dist.get_rank()], WgradQueue()
        model = Towers([Either(how) for _ in range(3)])
        shard_units(model, [f"blocks.{index}" for index in range(3)], bucket_size=size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            with delayed_wgrad(queue) if how == "queue" else nullcontext():
                loss = model(x, which).square().mean()
            loss.backward()
            queue.drain()
            for block in reversed(model.blocks) if how == "modules" else ():
                for name in ("second", "first"):
                    if name in which:
                        block.get_submodule(name).backward_dw()
            optimizer.step()
            optimizer.zero_grad()
        with model.unsharded():
            return [param.detach().clone() for param in model.parameters()]

    for several, one in zip(simulate(train, 2, 1), simulate(train, 2, 10**6), strict=True):
        assert all(map(torch.equal, several, one))


class Towers(nn.Module):
    """Blocks one after the other, below a layer of the outermost unit."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, which: str) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, which)
        return x
