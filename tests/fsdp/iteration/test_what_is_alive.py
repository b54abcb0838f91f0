"""What a rank keeps of its forwards and backwards is its own affair: losses, outputs, graphs, exceptions.

Programs are written against the public interface alone, and compared with a plain model over all ranks' batches.
"""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

KINDS = {"zero1": 2, "zero2": 2, "zero3": 3, "zero3 once": 2, "zero3 kept": 2, "hsdp": 4, "hsdp_zero1": 4}
"""Ways to shard, and on how many ranks."""
LEARNING_RATE = 0.05


class Failed(Exception):
    """The exception of a forward that is told to raise."""


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """Blocks of different sizes between layers of the outermost unit; the second block runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 3, bias=False)
        self.blocks = nn.ModuleList([Block(hidden) for hidden in (3, 8, 13)])
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.fails and index == 1:
                raise Failed("in the middle of a forward")
        return self.head(self.blocks[1](x))


def make(kind: str | None) -> Any:
    """The model of seed 0, sharded or, without a kind, plain."""
    torch.manual_seed(0)
    model = Net().double()
    if kind is None:
        return model
    options: dict[str, Any] = {"placements": kind.split()[0]}
    if kind == "zero3 once":
        options["reduce_every_microbatch"] = False
    elif kind == "zero3 kept":
        options["reshard_after_forward"] = False
    elif kind.startswith("hsdp"):
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(rank: int, index: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * index + rank), dtype=torch.float64)


Loss = Callable[[nn.Module, Tensor], Tensor]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


# ---- Two programs that everybody writes. ----


@pytest.mark.in_turn
@pytest.mark.parametrize("who", ["nobody", "rank 0", "everybody"])
@pytest.mark.parametrize("what", ["loss", "output", "output of an extra forward", "loss that is never used"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(2)
def test_kept_on_some_ranks(kind: str, what: str, who: str) -> None:
    """``losses.append(loss)`` under ``if rank == 0``; a metric's forward, in grad mode, whose result is kept."""

    def train(kind: str | None, ranks: Sequence[int]) -> list[Tensor]:
        model = make(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        kept: list[Tensor] = []
        keeps = who == "everybody" or (who == "rank 0" and ranks[0] == 0)
        for step in range(4):
            for rank in ranks:
                x = batch(rank, step)
                if what == "output of an extra forward":
                    extra = model(x)
                    if keeps:
                        kept.append(extra)
                    del extra
                elif what == "loss that is never used":
                    unused = loss_of(model, x)
                    if keeps:
                        kept.append(unused)
                    del unused
                output = model(x)
                loss = (output - 1).square().mean()
                if keeps:
                    kept.append(loss if what == "loss" else output)
                (loss / len(ranks)).backward()
                del loss, output
            optimizer.step()
            optimizer.zero_grad()
        return whole_parameters(model)

    compare(kind, train)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(2)
def test_an_exception_is_stored_on_rank_0(kind: str) -> None:
    """The exception keeps its traceback, and so the frames, their tensors and their graphs."""

    def train(kind: str | None, ranks: Sequence[int]) -> list[Tensor]:
        model = make(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        stored: list[Exception] = []
        for step in range(3):
            model.fails = True
            try:
                loss_of(model, batch(ranks[0], 50 + step))
            except Failed as error:
                if ranks[0] == 0:
                    stored.append(error)
            model.fails = False
            for rank in ranks:
                (loss_of(model, batch(rank, step)) / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole_parameters(model)

    compare(kind, train)


@pytest.mark.parametrize("kind", ["zero1", "zero3 once"])
def test_gradients_are_cleared_on_rank_0(kind: str) -> None:
    """In the middle of an iteration: rank 0 discards its gradients so far, the other ranks do not."""

    def train(kind: str | None, ranks: Sequence[int]) -> list[Tensor]:
        model = make(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for step in range(2):
            for rank in ranks:
                if kind is not None:
                    with model.no_sync():
                        loss_of(model, batch(rank, 2 * step)).backward()
                    if rank == 0:
                        model.zero_grad()
                elif rank != 0:
                    (loss_of(model, batch(rank, 2 * step)) / len(ranks)).backward()
                if step == 0:
                    (loss_of(model, batch(rank, 2 * step + 1)) / len(ranks)).backward()
            if kind is not None:
                model.finish_grad_sync()
            optimizer.step()
            optimizer.zero_grad()
        return whole_parameters(model)

    compare(kind, train)


# ---- Programs that are drawn. ----


def drawn_program(seed: int, kind: str | None, ranks: Sequence[int]) -> list[Tensor]:
    """``shared`` draws what all ranks do, ``own`` what only this rank does."""
    shared, own = random.Random(seed), random.Random(1000 * seed + ranks[0])
    model = make(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    kept: list[Any] = []

    def keep(*found: Any) -> None:
        if own.random() < 0.5:
            kept.append(found)
        if own.random() < 0.2:
            kept.clear()
        if own.random() < 0.2:
            gc.collect()

    for step in range(shared.randint(2, 4)):
        num_microbatches = shared.randint(1, 3)
        for index in range(num_microbatches):
            what = shared.choice(["plain", "plain", "extra", "no grad", "raises", "two", "retain", "twice", "input"])
            for rank in ranks:
                x = batch(rank, 10 * step + index)
                last = index == num_microbatches - 1
                with nullcontext() if last or kind is None else model.no_sync():
                    one_microbatch(model, x, what, len(ranks), keep)
        if shared.random() < 0.3:
            with torch.no_grad():
                keep(model(batch(ranks[0], 7)))
        optimizer.step()
        optimizer.zero_grad()
    return whole_parameters(model)


def one_microbatch(model: Any, x: Tensor, what: str, size: int, keep: Callable[..., None]) -> None:
    if what == "extra":
        keep(model(x))
    elif what == "no grad":
        with torch.no_grad():
            keep(model(x))
    elif what == "raises":
        model.fails = True
        try:
            model(x)
        except Failed as error:
            keep(error)
        model.fails = False
    x = x.clone().requires_grad_(what == "input")
    loss = loss_of(model, x)
    if what == "two":
        loss = loss + loss_of(model, x * 0.5)
    (loss / size).backward(retain_graph=what in ("retain", "twice"))
    if what == "twice":
        (loss / size).backward()
    keep(loss, x.grad)


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 75))])
@pytest.mark.sampled(1)
def test_any_program(seed: int, kind: str) -> None:
    with the_collector(enabled=seed % 3 > 0):
        compare(kind, lambda *where: drawn_program(seed, *where))


@contextmanager
def the_collector(*, enabled: bool) -> Iterator[None]:
    if not enabled:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---- Comparison. ----


def whole_parameters(model: Any) -> list[Tensor]:
    with model.unsharded() if hasattr(model, "unsharded") else nullcontext():
        return [param.detach().clone() for param in model.parameters()]


def compare(kind: str, train: Callable[[str | None, Sequence[int]], list[Tensor]]) -> None:
    """Compare all ranks' parameters with those of a plain model that has seen all ranks' batches.

    Within the rounding of sums in another order: a few dozen operations in fp64 on values near 1.
    """
    size = KINDS[kind]
    expected = train(None, range(size))
    for found in simulate(lambda: train(kind, [dist.get_rank()]), size):
        # One rank's loss is divided by its own number of batches, which is one; gradients are averaged over ranks.
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
