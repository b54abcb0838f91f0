"""Ranks that run other units, of equal size, or take other steps: refused on all ranks. What all do alike is right."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from refusals import refusal
from sharded_twin import options_of, ranks_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.collectives import step_check
from maingrad.ddp.collectives.failure_report import CollectiveError
from maingrad.fsdp import fully_shard
from maingrad.fsdp.module import root_of
from maingrad.launch import simulate

WIDTH = 4
NUM_BLOCKS = 4
Choose = Callable[[int, int], Sequence[int]]
"""The blocks that a rank runs in its nth forward."""


class Net(nn.Module):
    """Blocks of one size. Which of them run is chosen anew in each forward."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)])
        self.choose = choose
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        for index in self.choose(dist.get_rank(), self.num_forwards):
            x = x + torch.tanh(self.blocks[index](x))
        self.num_forwards += 1
        return x


def sharded(choose: Choose, kind: str) -> Any:
    model, options = Net(choose), options_of(kind)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train_unevenly(model: Any, place: int) -> None:
    """Three steps, in which each place has another number of microbatches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with model.no_sync():
            for _ in range((place + step) % 3):
                model(torch.ones(2, WIDTH)).sum().backward()
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def train(model: Any, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def branch_by_rank(rank: int, number: int) -> Sequence[int]:
    return [0, 1 + rank % 2, 3]


def drawn_by_rank(rank: int, number: int) -> Sequence[int]:
    """LayerDrop of one layer."""
    dropped = random.Random(100 * rank + number).randrange(NUM_BLOCKS)
    return [index for index in range(NUM_BLOCKS) if index != dropped]


def another_order(rank: int, number: int) -> Sequence[int]:
    return [0, 1, 2, 3] if rank else [0, 2, 1, 3]


def drawn_alike(rank: int, number: int) -> Sequence[int]:
    """LayerDrop by one seed: numbers of layers differ between iterations, and not between ranks."""
    dice = random.Random(number)
    return [index for index in range(NUM_BLOCKS) if dice.random() < 0.6] or [0]


def trains(choose: Choose, kind: str) -> str:
    return refusal(lambda: train(sharded(choose, kind), 3))


@pytest.mark.parametrize("choose", [branch_by_rank, drawn_by_rank, another_order], ids=lambda each: each.__name__)
@pytest.mark.parametrize("kind", ["zero3", "zero2", "zero1", "hsdp"])
@pytest.mark.sampled(1)
def test_ranks_that_run_other_units(kind: str, choose: Choose) -> None:
    first, *others = simulate(trains, ranks_of(kind), choose, kind)
    assert all(other == first for other in others)
    assert "different units" in first, first
    assert "before the end of iteration 1" in first, first
    if choose is not drawn_by_rank:
        assert "unit 'blocks.1' on rank" in first and "unit 'blocks.2' on rank" in first, first


@pytest.mark.parametrize("inner", [1, 2])
def test_instances_that_run_other_units(inner: int) -> None:
    """Their ranks gather alike, or nothing: reductions across instances alone tell."""

    def on_each_rank() -> str:
        model: Any = Net(lambda rank, number: branch_by_rank(rank // inner, number))
        mesh = init_device_mesh("cpu", (2, inner))
        for module in (*model.blocks, model):
            fully_shard(module, mesh, "hsdp")
        return refusal(lambda: train(model, 3))

    first, *others = simulate(on_each_rank, 2 * inner)
    assert others == [first] * len(others)
    assert f"unit 'blocks.1' on rank 0, unit 'blocks.2' on rank {inner}" in first, first


@pytest.mark.parametrize("kind", ["zero3", "zero2"])
def test_layers_that_all_ranks_drop(kind: str) -> None:
    assert simulate(trains, 2, drawn_alike, kind) == ["nothing was raised"] * 2


def test_over_gloo() -> None:
    first, second = run_ranks(trains, 2, branch_by_rank, "zero3")
    assert first == second
    assert "gathered unit 'blocks.1' on rank 0, unit 'blocks.2' on rank 1" in first, first


@pytest.mark.parametrize("kind", ["zero3", "zero2"])
@pytest.mark.sampled(1)
def test_a_program_that_catches_it_goes_on(kind: str) -> None:
    """Mixed gradients are gone, and so are mixed weights, those of a frozen layer too."""

    def on_each_rank(mixes: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net(lambda rank, number: branch_by_rank(rank if mixes and number == 0 else 0, number))
        model.blocks[1].requires_grad_(False)
        model.blocks[2].requires_grad_(False)
        for block in model.blocks:
            fully_shard(block, placements=kind)
        fully_shard(model, placements=kind)
        if mixes:
            assert "different units" in refusal(lambda: train(model, 1))
            model.finish_grad_sync()  # nothing is left to be sent
            assert all(param.grad is None for param in model.parameters())
        train(model, 2)
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
            with model.record_timeline() as timeline:
                model(torch.ones(2, WIDTH))
        assert not timeline.gathers or kind == "zero3", "what stays whole is gathered anew once"
        return [param.detach().clone() for param in model.parameters()]

    for found, expected in zip(simulate(on_each_rank, 2, True), simulate(on_each_rank, 2, False), strict=True):
        assert all(map(torch.equal, found, expected))


def test_a_collective_that_fails_is_no_difference_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was reduced is kept, and nobody waits for other reductions of ranks that may be gone."""

    def on_each_rank() -> None:
        model = sharded(lambda rank, number: range(NUM_BLOCKS), "zero3")
        train(model, 1)
        grads = root_of(model).grads

        def fail() -> None:
            raise CollectiveError("a peer is gone")

        monkeypatch.setattr(grads.steps, "finish", fail)
        with pytest.raises(CollectiveError, match="a peer is gone"):
            model(torch.ones(2, WIDTH)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())
        assert grads.under_way and not grads.were_mixed

    simulate(on_each_rank, 2)


def test_an_evaluation_on_other_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers of evaluations count. They are compared at the end of the next iteration."""

    def on_each_rank(num_batches: int) -> str:
        chosen: list[int] = [0, 1, 2, 3]
        model = sharded(lambda rank, number: chosen, "zero3")
        train(model, 1)
        chosen[:] = branch_by_rank(dist.get_rank(), 0)
        model.eval()
        with torch.no_grad():
            for _ in range(num_batches):
                model(torch.ones(2, WIDTH))
        model.train()
        chosen[:] = [0, 1, 2, 3]
        return refusal(lambda: train(model, 1))

    first, second = simulate(on_each_rank, 2, 2)
    assert first == second
    assert "unit 'blocks.1' on rank 0, unit 'blocks.2' on rank 1, before the end of iteration 2" in first, first

    monkeypatch.setattr(step_check, "_LIMIT", 1)  # the first gather is alike, and later ones have a hash alone
    first, second = simulate(on_each_rank, 2, 4)
    assert first == second and "after 1 units of a long evaluation" in first, first


def test_a_difference_at_the_start_of_a_very_long_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, though many gathers came after it, were alike, and are forgotten."""
    monkeypatch.setattr(step_check, "_LIMIT", 10)

    def on_each_rank() -> str:
        chosen: list[int] = [0, 1, 2, 3]
        model = sharded(lambda rank, number: chosen, "zero3")
        train(model, 1)
        model.eval()
        with torch.no_grad():
            for index in range(8):
                chosen[:] = [0, 1, 2, 3] if index else branch_by_rank(dist.get_rank(), 0)
                model(torch.ones(2, WIDTH))
        model.train()
        return refusal(lambda: train(model, 1))

    first, second = simulate(on_each_rank, 2)
    assert first == second, first
    assert "unit 'blocks.1' on rank 0, unit 'blocks.2' on rank 1, before the end of iteration 2" in first, first


# ---- Steps. ----


def each_leaves_out_an_update(kind: str, how: str) -> str:
    model = sharded(lambda rank, number: range(NUM_BLOCKS), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for step in range(5):
            bad = step == 1 + dist.get_rank()
            loss = model(torch.ones(2, WIDTH)).square().mean()
            if bad and how == "forward":
                continue
            loss.backward()
            if not bad:
                optimizer.step()
            optimizer.zero_grad()

    return refusal(run)


@pytest.mark.parametrize(("kind", "how"), [("zero3", "update"), ("zero2", "update"), ("zero2", "forward")])
def test_ranks_that_skip_different_steps(kind: str, how: str) -> None:
    first, second = simulate(each_leaves_out_an_update, 2, kind, how)
    assert first == second
    if how == "update":
        assert "different numbers of optimizer steps before iteration 3: 0 on rank 0, 1 on rank 1" in first, first
    else:
        assert "skipped different batches before iteration 2" in first, first


def test_another_number_of_microbatches_under_zero1() -> None:
    """Whole gradients stay, and are reduced once: ranks may have other numbers of microbatches."""

    def on_each_rank() -> str:
        model = sharded(lambda rank, number: range(NUM_BLOCKS), "zero1")
        return refusal(lambda: train_unevenly(model, dist.get_rank()))

    assert simulate(on_each_rank, 2) == ["nothing was raised"] * 2


# ---- Experts: each mesh compares its own order. ----


def experts(alike: bool) -> str:
    """Four ranks. Those that hold the same experts, (0, 2) and (1, 3), run them in an order of their own."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    order = [0, 1, 2] if rank % 2 else [1, 0, 2]
    if not alike and rank == 2:
        order = [0, 1, 2]
    net: Any = Net(lambda rank, number: order)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same", "others"))["same"]
    for block in net.blocks[:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(net.blocks[3])
    fully_shard(net)
    return refusal(lambda: train(net, 2))


def test_experts_have_an_order_of_their_own() -> None:
    assert simulate(experts, 4, True) == ["nothing was raised"] * 4
    found = simulate(experts, 4, False)
    assert len(set(found)) == 1, "ranks that hold other experts raise too"
    assert "gathered unit 'blocks.1' on rank 0, unit 'blocks.0' on rank 2" in found[0], found[0]


def test_ranks_with_other_numbers_of_experts_of_their_own() -> None:
    def on_each_rank() -> str:
        torch.manual_seed(0)
        net: Any = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        own = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(1 + dist.get_rank())])
        for expert in own:
            fully_shard(expert, mesh=WORLD_OF_ONE)
        model: Any = nn.Sequential(own, net)
        fully_shard(net[0])
        fully_shard(net)
        fully_shard(model)
        return refusal(lambda: train(model, 2))

    assert simulate(on_each_rank, 2) == ["nothing was raised"] * 2


class Branches(nn.Module):
    """Each rank trains a branch of its own: under DDP the other branch is unused on it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[dist.get_rank()](x)


def critic() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def rows_of(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def judged_by_a_sharded_critic() -> tuple[list[Tensor], list[Tensor]]:
    """Two wrappers in one backward. DDP launches the unused branch's bucket behind it, on each rank at another time."""
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=WIDTH)
    model, judge = DistributedDataParallel(Branches(), config), fully_shard(critic())
    of_model = torch.optim.SGD(model.parameters(), lr=0.1)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.1)
    for step in range(3):
        judge(model(rows_of(dist.get_rank(), step))).square().mean().backward()
        model.finish_grad_sync()
        model.expose_grads()
        for optimizer in (of_model, of_judge):
            optimizer.step()
        model.zero_grad_buffer()
        of_judge.zero_grad()
    with judge.unsharded():
        return [p.detach().clone() for p in model.parameters()], [p.detach().clone() for p in judge.parameters()]


def test_a_backward_may_belong_to_two_wrappers() -> None:
    branches, judge = Branches().branches, critic()
    params = [*branches.parameters(), *judge.parameters()]
    for step in range(3):
        losses = [judge(branch(rows_of(rank, step))).square().mean() / 2 for rank, branch in enumerate(branches)]
        grads = torch.autograd.grad(sum(losses), params)
        with torch.no_grad():
            torch._foreach_sub_(params, [0.1 * grad for grad in grads])
    for of_model, of_judge in simulate(judged_by_a_sharded_critic, 2):
        torch.testing.assert_close([*of_model, *of_judge], [p.detach() for p in params])


def test_an_evaluation_of_instances_on_other_units() -> None:
    """Gathers across instances would pair shards of one unit with those of another, of the same size."""

    def on_each_rank() -> str:
        chosen: list[int] = [0, 1, 2, 3]
        model = sharded(lambda rank, number: chosen, "hsdp_zero1")
        train(model, 1)
        chosen[:] = [0, 3] if dist.get_rank() // 2 else [3, 0]
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        chosen[:] = [0, 1, 2, 3]
        return refusal(lambda: train(model, 1))

    found = simulate(on_each_rank, 4)
    # The second instance gathers 'blocks.0' in its turn, and then what came next the last time.
    assert all("gathered unit 'blocks.3' on rank 0, unit 'blocks.1' on rank 2" in each for each in found), found


@pytest.mark.parametrize("kind", ["hsdp", "hybrid"])
@pytest.mark.sampled(1)
def test_an_instance_may_evaluate_by_itself(kind: str) -> None:
    """Its gathers ask no other instance."""

    def on_each_rank() -> str:
        model: Any = Net(lambda rank, number: range(NUM_BLOCKS))
        mesh = init_device_mesh("cpu", (2, 2))
        for module in (*model.blocks, model):
            fully_shard(module, mesh, kind)
        train(model, 1)
        if dist.get_rank() < 2:
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
        return refusal(lambda: train(model, 1))

    assert simulate(on_each_rank, 4) == ["nothing was raised"] * 4


def test_instances_may_have_other_numbers_of_microbatches() -> None:
    """Each is reduced inside its instance, and the last one alone over all."""

    def on_each_rank() -> str:
        model: Any = Net(lambda rank, number: range(NUM_BLOCKS))
        mesh = init_device_mesh("cpu", (2, 2))
        for module in (*model.blocks, model):
            fully_shard(module, mesh, "hsdp")
        return refusal(lambda: train_unevenly(model, dist.get_rank() // 2))

    assert simulate(on_each_rank, 4) == ["nothing was raised"] * 4
