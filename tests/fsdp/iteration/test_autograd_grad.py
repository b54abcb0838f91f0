"""``torch.autograd.grad`` through a sharded model: it trains nothing, reduces nothing, and ends no iteration."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watching import Watcher

from maingrad.ddp.buckets import iteration_ends
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

RANKS = 2


class Part(nn.Module):
    """Two layers: with ``branches`` each rank uses its own, else all use the first; perhaps under recompute."""

    def __init__(self, *, branches: bool, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.branches, self.recompute = branches, recompute

    def forward(self, x: Tensor, rank: int) -> Tensor:
        layer = self.layers[rank % 2 if self.branches else 0]
        if self.recompute:
            return checkpoint(lambda rows: layer(rows).tanh(), x, use_reentrant=False)
        return layer(x).tanh()


class Net(nn.Module):
    """Three parts, the last of which is the outermost unit's own layer."""

    def __init__(self, **how: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([Part(**{"branches": False, "recompute": False, **how}) for _ in range(2)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for part in self.parts:
            x = part(x, rank)
        return self.head(x)


def shard(net: Net, **options: Any) -> Any:
    for part in net.parts:
        fully_shard(part, **options)
    return fully_shard(net, **options)


def batch(index: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * index + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64).requires_grad_()


def penalised(net: Any, index: int, rank: int) -> Tensor:
    """The gradient penalty of WGAN-GP: the squared norm of the scores' gradient, beside the mean score."""
    x = batch(index, rank)
    scores = net(x, rank)
    (slope,) = torch.autograd.grad(scores.square().sum(), x, create_graph=True)
    return scores.mean() + (slope.norm(dim=1) - 1).square().mean()


def attacked(net: Any, index: int, rank: int) -> Tensor:
    """The loss of an adversarial batch."""
    x = batch(index, rank)
    (slope,) = torch.autograd.grad(net(x, rank).square().mean(), x)
    return net((x + 0.1 * slope.sign()).detach(), rank).square().mean()


def of_the_scores(net: Any, index: int, rank: int) -> Tensor:
    """Gradients of the model's outputs, and of an activation, weigh the loss."""
    scores = net(batch(index, rank), rank)
    loss = scores.square().mean()
    (weight,) = torch.autograd.grad(loss, scores, retain_graph=True)
    return loss + (weight * scores).sum()


def kept_for_the_input(net: Any, index: int, rank: int) -> Tensor:
    """``backward(inputs=...)``, then a backward through the same graph."""
    x = batch(index, rank)
    loss = net(x, rank).square().mean()
    loss.backward(inputs=[x], retain_graph=True)
    return loss + x.grad.square().sum()


PROGRAMS: list[Callable[[Any, int, int], Tensor]] = [penalised, attacked, of_the_scores, kept_for_the_input]
HOW: dict[str, dict[str, bool]] = {"": {}, "branches": {"branches": True}, "recomputed": {"recompute": True}}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("placements", ["zero3", "zero2", "zero1"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.sampled(3)
def test_what_asks_for_gradients_in_an_iteration_is_no_part_of_it(
    microbatches: int, how: str, placements: str, program: Callable[[Any, int, int], Tensor]
) -> None:
    """Gradients are those of plain PyTorch. Hooks of parameters are called once, with complete gradients."""

    def train() -> list[dict[str, Tensor]]:
        net = shard(Net(**HOW[how]).double(), placements=placements)
        called: list[str] = []
        found = []
        for name, param in net.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
        for step in range(2):
            for index in range(microbatches):
                assert called == []
                if index < microbatches - 1:
                    with net.no_sync():
                        program(net, 2 * step + index, dist.get_rank()).backward()
                else:
                    loss = program(net, 2 * step + index, dist.get_rank())
                    assert called == []
                    loss.backward()
            assert sorted(called) == sorted(name for name, _ in net.named_parameters())
            called.clear()
            found.append({name: param.grad.full_tensor() for name, param in net.named_parameters()})
            net.zero_grad()
        return found

    plain = Net(**HOW[how]).double()
    expected = []
    for step in range(2):
        for index in range(microbatches):
            (sum(program(plain, 2 * step + index, rank) for rank in range(RANKS)) / RANKS).backward()
        expected.append({name: param.grad for name, param in plain.named_parameters()})
        plain.zero_grad()
    for rank in simulate(train, RANKS):
        for found, step in zip(rank, expected, strict=True):
            for name, grad in found.items():
                torch.testing.assert_close(grad, torch.zeros_like(grad) if step[name] is None else step[name])


def test_a_program_that_only_asks_reduces_nothing_and_leaves_no_parameter_whole() -> None:
    """Some of its parameters are frozen."""

    def attack() -> list[Tensor]:
        net: Any = Net().double()
        for part in (*net.parts, net.head):
            next(part.parameters()).requires_grad_(False)
        shard(net)
        for param in net.parameters():
            param.register_post_accumulate_grad_hook(lambda _: pytest.fail("nothing is trained"))
        found = []
        with net.record_timeline() as timeline:
            for index in range(2):
                x = batch(index, dist.get_rank())
                found += torch.autograd.grad(net(x, 0).square().sum(), x)
        assert all(param.grad is None for param in net.parameters())
        assert timeline.gathers
        assert not timeline.buckets
        return found

    plain = Net().double()
    for rank, found in enumerate(simulate(attack, RANKS)):
        for index, slope in enumerate(found):
            x = batch(index, rank)
            torch.testing.assert_close(slope, torch.autograd.grad(plain(x, 0).square().sum(), x)[0])


def test_a_backward_for_one_whole_parameter_trains_that_one() -> None:
    def train() -> dict[str, Tensor]:
        net = shard(Net().double())
        wholes: list[Tensor] = []
        net.head.register_forward_pre_hook(lambda module, _: wholes.append(module.weight))
        net(batch(0, dist.get_rank()), 0).square().sum().backward(inputs=wholes)
        return {name: param.grad.full_tensor() for name, param in net.named_parameters()}

    plain = Net().double()
    loss = sum(plain(batch(0, rank), 0).square().sum() for rank in range(RANKS))
    (expected,) = torch.autograd.grad(loss, plain.head.weight)
    for found in simulate(train, RANKS):
        torch.testing.assert_close(found.pop("head.weight"), expected / RANKS)
        assert not any(grad.any() for grad in found.values())


def test_gradients_of_shards_cannot_be_asked_for() -> None:
    def ask() -> None:
        net = shard(Net().double())
        loss = net(batch(0, dist.get_rank()), 0).sum()
        refused = r"(grad|backward)\(\) asks for the gradient of the parameter 'head.weight', .* read .grad"
        with pytest.raises(RuntimeError, match=refused):
            torch.autograd.grad(loss, [net.head.weight])
        with pytest.raises(RuntimeError, match=refused):
            loss.backward(inputs=[net.head.weight])

    simulate(ask, RANKS)


def test_a_gradient_of_inputs_is_no_backward_of_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a timeline takes it for the last one, nor who follows iterations for one that has trained the model."""
    watcher = Watcher()
    monkeypatch.setattr(iteration_ends, "_watchers", [watcher])
    model = shard(Net().double())
    x = batch(0, 0)
    with model.record_timeline() as timeline:
        torch.autograd.grad(model(x, 0).sum(), x)
        with model.no_sync():
            model(x, 0).sum().backward()
        torch.autograd.grad(model(x, 0).sum(), x)
        model(x, 0).sum().backward()
    assert [span.synced for span in timeline.backwards] == [False, False, False, True]
    assert [count for what, _, count in watcher.told if what == "ended"] == [2]


def test_gradients_of_one_unit_that_are_cleared_discard_no_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who follows iterations is told so in the next forward when all were cleared."""
    watcher = Watcher()
    monkeypatch.setattr(iteration_ends, "_watchers", [watcher])
    model = shard(Net().double())
    model(batch(0, 0), 0).sum().backward()
    watcher.told.clear()
    for part in (*model.parts, model):
        assert not watcher.told
        for param in part.parameters():
            param.grad = None
        model(batch(0, 0), 0)
    assert [what for what, *_ in watcher.told] == ["discarded"]


@pytest.mark.parametrize("bias", [False, True])
def test_a_gradient_of_a_units_output_enters_no_unit_before_it(bias: bool) -> None:
    """The first layer's inputs need no gradient: without a bias, its product has none on the left."""

    def gathers() -> list[int]:
        model: Any = nn.Sequential(*[nn.Linear(5, 5, bias=bias) for _ in range(3)])
        outputs: list[Tensor] = []
        for layer in model[:2]:
            fully_shard(layer)
        fully_shard(model)
        model[0].register_forward_hook(lambda _, __, output: outputs.append(output))
        counts = []
        for _ in range(2):  # the first one learns the order
            loss = model(torch.ones(2, 5)).sum()
            with model.record_timeline() as timeline:
                torch.autograd.grad(loss, outputs.pop())
            counts.append(len(timeline.gathers))
            assert all(param.grad is None for param in model.parameters())
        return counts

    assert simulate(gathers, RANKS) == [[2, 1]] * RANKS, "of the second unit, and in the first backward ahead of use"
