"""Gradients come in another order on every rank, and collectives are slow: the results stay the same."""

import copy
import dataclasses
import functools
import random
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from delayed_group import DELAY, DELAYED, Delays, Watched, delayed_group, new_groups_delayed
from gloo import run_ranks
from parity_models import Trained, assert_bitwise, held_grads
from sleepy import SleepInBackward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from towers import WIDTH as TOWER_WIDTH
from towers import Tower

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.buckets.graph_walk import differentiable_tensors, walk_graph
from maingrad.ddp.collectives.step_check import StepCheck
from maingrad.launch import simulate
from maingrad.te_integration import Linear

BRANCHES = 6
FEATURES = 4
STEPS = 3


class Branches(nn.Module):
    """Branches that run, and get their gradients, in a given order; their sum always has the same order.

    One branch is left out on some ranks: its gradients are zeros there.
    """

    def __init__(self, *, fused: bool, delayed: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        options: dict[str, Any] = {"fuse_wgrad_accumulation": fused, "delay_wgrad_compute": delayed}
        self.branches = nn.ModuleList(
            nn.Sequential(Linear(FEATURES, 3 + i, **options), nn.Tanh(), nn.Linear(3 + i, 2)) for i in range(BRANCHES)
        )
        self.order: Sequence[int] = range(BRANCHES)
        self.skipped: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        outputs = {i: self.branches[i](x) for i in self.order}
        # What skips a branch still runs it, so that the sum is the same.
        return sum((outputs[i].detach() if i == self.skipped else outputs[i] for i in range(BRANCHES)), torch.zeros(()))

    def backward_dw(self, rng: random.Random) -> None:
        """Every delayed weight gradient, in a random order."""
        for branch in rng.sample(list(self.branches), BRANCHES):
            branch[0].backward_dw()


class Loop(NamedTuple):
    """One random way of the same training."""

    ranks: int
    delayed: bool
    config: dict[str, Any]


def batch(step: int, microbatch: int) -> Tensor:
    seed = 1000 * step + 100 * microbatch + dist.get_rank()
    return torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(seed))


def train(loop: Loop, shuffled: int | None) -> tuple[Trained, list[tuple[str, ...]]]:
    """Three steps of two microbatches; ``shuffled``: seed of every rank's random orders, None: the usual order.

    Also returns the orders in which parameters became ready.
    """
    rank = dist.get_rank()
    rng = random.Random(f"{shuffled} {rank}")
    model = Branches(fused=True, delayed=loop.delayed)
    ready: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(bucket_size=20, **loop.config))
    optimizer = DistributedOptimizer(ddp, lr=0.05)
    trained, orders = Trained([], [], []), []
    for step in range(STEPS):
        model.skipped = (step + rank) % (2 * BRANCHES)  # half of the time there is no such branch
        for microbatch in range(2):
            ready.clear()
            if shuffled is not None:
                model.order = rng.sample(range(BRANCHES), BRANCHES)
            loss = ddp(batch(step, microbatch)).square().mean() / 2
            if microbatch == 0:
                with ddp.no_sync():
                    loss.backward()
                    model.backward_dw(rng)
            else:
                loss.backward()
                model.backward_dw(rng)
            trained.losses.append(loss.item())
        orders.append(tuple(ready))
        ddp.finish_grad_sync()
        trained.grads.append(held_grads(ddp))
        optimizer.step()
        trained.weights.append({name: param.detach().clone() for name, param in model.named_parameters()})
        ddp.zero_grad_buffer()
    return trained, orders


@functools.cache
def in_the_plain_order(ranks: int) -> list[Trained]:
    """All-reduce without overlap."""
    return [trained for trained, _ in simulate(train, ranks, Loop(ranks, False, {}), None)]


def draw(seed: int) -> Loop:
    """The loop of one random run."""
    rng = random.Random(seed)
    ranks = rng.choice((2, 3, 4))
    config: dict[str, Any] = {"overlap_grad_reduce": True, "find_unused_parameters": rng.random() < 0.5}
    if rng.random() < 0.8:
        config |= {"use_distributed_optimizer": True, "overlap_param_gather": rng.random() < 0.7}
        if ranks == 4 and rng.random() < 0.5:
            config["num_distributed_optimizer_instances"] = 2  # 2 x 2: the sums of pairs are the same pairs
    return Loop(ranks, rng.random() < 0.4, config)


def run(seed: int) -> bool:
    """One random run; returns whether two ranks saw gradients in different orders."""
    loop = draw(seed)
    shuffled = simulate(train, loop.ranks, loop, seed, seed=seed)  # a deadlock raises
    for (trained, _), reference in zip(shuffled, in_the_plain_order(loop.ranks), strict=True):
        assert_bitwise(trained, reference)
    return len({tuple(orders) for _, orders in shuffled}) > 1


@pytest.mark.in_turn
def test_readiness_in_random_order() -> None:
    assert sum(run(seed) for seed in range(4)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_readiness_in_random_order_a_thousand_times(first: int) -> None:
    assert sum(run(seed) for seed in range(1_000_000 + first, 1_000_000 + first + 100)) >= 85


# ---- Delays, on real processes. ----


def train_delayed(by_rank: list[Delays]) -> Watched:
    """Three steps of ZeRO-1 with everything overlapped; the module's layers sleep in backward."""
    delays = by_rank[dist.get_rank()]
    sleep = SleepInBackward(0.0)
    torch.manual_seed(0)
    model = Tower(sleep, fused=True, registered=range(3))
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, num_buckets=2
    )
    losses = []
    with delayed_group(0.0) as reduce, new_groups_delayed(0.0) as made:
        ddp = DistributedDataParallel(model, config, process_group=reduce)
        (gather,) = made
        optimizer = DistributedOptimizer(ddp, lr=0.05)
        reduce.delay, gather.delay, sleep.seconds = delays
        reduce.intervals.clear()
        gather.intervals.clear()
        start = time.perf_counter()
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            loss = ddp(torch.randn(4, TOWER_WIDTH, generator=generator)).square().mean()
            loss.backward()
            ddp.finish_grad_sync()
            optimizer.step()
            ddp.zero_grad_buffer()
            losses.append(loss.item())
        weights = [param.detach().clone() for param in model.parameters()]
        seconds = time.perf_counter() - start
        reductions = sum(interval.op.startswith(("reduce_scatter", "_reduce_scatter")) for interval in reduce.intervals)
        return Watched(losses, weights, reductions, len(gather.intervals), len(sleep.intervals), seconds)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "what",
    [
        pytest.param("gather", marks=pytest.mark.slow),
        pytest.param("reduce", marks=pytest.mark.slow),
        pytest.param("compute", marks=pytest.mark.slow),
        "each rank something else",
    ],
)
def test_delays_of_100_ms_change_nothing(what: str) -> None:
    prompt = run_ranks(train_delayed, 2, [Delays(0, 0, 0)] * 2)
    delayed = run_ranks(train_delayed, 2, DELAYED[what])
    for ours, theirs in zip(delayed, prompt, strict=True):
        assert ours.losses == theirs.losses
        assert len(set(ours.losses)) == 3
        for one, other in zip(ours.weights, theirs.weights, strict=True):
            assert torch.equal(one, other)
        # Two buckets; three steps of three layers.
        assert (ours.reductions, ours.gathers, ours.computes) == (6, 6, 9)
        assert ours.seconds > 3 * DELAY


# ---- What a forward returns. ----


@dataclasses.dataclass
class Output:
    """As a model of Hugging Face's returns."""

    loss: Tensor
    caches: list[dict[str, Any]]


def test_tensors_that_a_backward_may_come_through_are_found_in_any_structure() -> None:
    leaf, plain = torch.ones(1, requires_grad=True), torch.ones(1)
    made = [leaf * number for number in range(4)]
    inner = Output(made[2], [{"k": (made[3], plain), "n": 3}])
    outer = Output(made[0], [{"k": made[1]}, {"inner": inner}])
    found = differentiable_tensors({"out": outer, "class": Output, "leaf": leaf})
    assert {id(each) for each in found} == {id(each) for each in (*made, leaf)}
    other = torch.ones(1, requires_grad=True)
    walk = walk_graph([*made[:1], other * 2, leaf])
    assert (walk.leaves, walk.recomputes) == ({id(leaf), id(other)}, False)


def test_a_graph_is_walked_in_as_many_steps_as_it_has_nodes() -> None:
    """Not in as many as there are ways through it: a sum of a tensor with itself doubles these."""
    visited: list[object] = []

    class Node:
        def __init__(self, behind: object) -> None:
            self.behind = behind

        @property
        def next_functions(self) -> list[tuple[object, int]]:
            visited.append(self)
            return [(self.behind, 0), (self.behind, 0)]

    node = None
    for _ in range(8):
        node = Node(node)
    output: Any = SimpleNamespace(grad_fn=node)
    walk_graph([output])
    assert len(visited) == len(set(visited)) == 8


class TwoOutputs(nn.Module):
    """Two layers' outputs, and a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 2), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.first(x), self.last(x), self.first.weight


def test_a_backward_through_several_outputs_is_one_backward_of_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the timeline, and where ranks compare how many of their forwards were used."""
    happened: list[str] = []
    for name in ("record_forward", "record_use"):
        monkeypatch.setattr(StepCheck, name, lambda _, name=name: happened.append(name.removeprefix("record_")))
    model = DistributedDataParallel(TwoOutputs(), DistributedDataParallelConfig(overlap_grad_reduce=True))
    x = torch.ones(1, 3)
    with model.record_timeline() as timeline:
        with model.no_sync():
            first, last, _ = model(x)
            first.sum().backward()
            last.sum().backward()  # a second one of the same forward
        first, last, weight = model(x)
        (first.sum() + last.sum() + weight.sum()).backward()
        model.finish_grad_sync()
    assert happened == ["forward", "use"] * 2
    assert [span.synced for span in timeline.backwards] == [False, False, True]
    assert len(timeline.buckets) == len(model.buckets)
    assert torch.equal(model.module.first.weight.main_grad, torch.full((2, 3), 3.0))
    happened.clear()
    model.eval()
    model(x)
    model.train()
    with torch.no_grad():
        model(x)
    for outputs in (model.module.first.weight, x.argmax(), None):
        model.module.forward = lambda _, outputs=outputs: outputs
        model(x)
    assert happened == [], "which train nothing"


def test_a_tied_weight_is_ready_when_its_backward_ends() -> None:
    """Its bucket is not launched as one of a weight that is not used."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    model = DistributedDataParallel(net, DistributedDataParallelConfig(overlap_grad_reduce=True))
    with model.record_timeline() as timeline:
        model(torch.ones(1, 3)).sum().backward()
        model.finish_grad_sync()
    (bucket,) = timeline.buckets
    assert bucket.ready < bucket.launched


# ---- Layers that run inside a recompute. ----


class Tied(nn.Module):
    """Runs two layers of one weight, the first of them recomputed or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.other, self.first, self.last = (nn.Linear(7, 7, bias=False, dtype=torch.float64) for _ in range(3))

    def tie(self) -> "Tied":
        self.last.weight = self.first.weight
        return self

    def use_again(self) -> "Tied":
        self.last = self.first
        return self

    def forward(self, x: Tensor, recomputes: bool) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.other(self.first(x).tanh())  # type: ignore[no-any-return]

        for _ in range(2):
            x = checkpoint(inner, x, use_reentrant=True) if recomputes else inner(x)
        out: Tensor = self.last(x)
        return out


@pytest.mark.parametrize(
    ("last", "forwards"),
    [("of its own", (False, True)), ("tied", (False, True)), ("used in both", (True, True))],
)
def test_a_model_may_begin_to_recompute_after_its_first_forward(last: str, forwards: tuple[bool, bool]) -> None:
    """Its graph was walked once, and had no recompute. Or it had: then a layer may run inside and outside as well."""
    net = {"of its own": Tied(), "tied": Tied().tie(), "used in both": Tied().use_again()}[last]
    twin = copy.deepcopy(net)
    model = DistributedDataParallel(net, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1))
    x = torch.ones(2, 7, dtype=torch.float64, requires_grad=True)
    for recomputes in forwards:
        for each in (model, twin):
            each.zero_grad()
            each(x, recomputes).square().sum().backward()
        model.finish_grad_sync()
        for mine, plain in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.main_grad, plain.grad)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_wrapper_may_be_recomputed_in_a_backward_that_has_brought_gradients(overlap: bool) -> None:
    """Its forward in the backward begins nothing, and gives nothing up."""
    net = nn.Linear(3, 2)
    twin = copy.deepcopy(net)
    model = DistributedDataParallel(net, DistributedDataParallelConfig(overlap_grad_reduce=overlap))
    x = torch.ones(1, 3, requires_grad=True)
    with model.no_sync():
        model(x).square().sum().backward()
    twin(x).square().sum().backward()
    calls: list[int] = []
    net.register_forward_pre_hook(lambda *_: calls.append(len(calls)))
    for each in (model, twin):
        hidden = checkpoint(each, x, use_reentrant=False).square()
        (hidden.sum() + checkpoint(each, 2 * x, use_reentrant=False).square().sum()).backward()
    assert len(calls) == 4
    model.finish_grad_sync()
    for mine, plain in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.main_grad, plain.grad)
