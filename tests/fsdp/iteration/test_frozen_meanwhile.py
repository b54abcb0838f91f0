"""A backward that goes through a model which is frozen meanwhile, as a generator's through its discriminator: plain
PyTorch's input gradients, and the model's own iteration goes on as if nothing had been."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from sharded_twin import (
    Block,
    Net,
    batches_of,
    mean_loss,
    no_sync,
    options_of,
    rank_and_size,
    ranks_of,
    shard_blocks,
    train_beside,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import convert_linears

Batches = Sequence[Tensor]


def go_through(model: nn.Module, batch: Tensor) -> Tensor:
    x = (batch * 0.5).requires_grad_()
    model.requires_grad_(False)
    mean_loss(model(x)).backward()
    model.requires_grad_(True)
    assert x.grad is not None
    return x.grad


def before(model: nn.Module, batches: Batches) -> None:
    through = go_through(model, batches[0])
    assert all(param.grad is None for param in model.parameters())
    with no_sync(model):
        mean_loss(model(batches[0] + through)).backward()
    mean_loss(model(batches[1])).backward()


def between_microbatches(model: nn.Module, batches: Batches) -> None:
    with no_sync(model):
        mean_loss(model(batches[0])).backward()
    through = go_through(model, batches[0])
    mean_loss(model(batches[1] + through)).backward()


def between_forward_and_backward(model: nn.Module, batches: Batches) -> None:
    loss = mean_loss(model(batches[0]))
    through = go_through(model, batches[0])
    with no_sync(model):
        loss.backward()
    mean_loss(model(batches[1] + through)).backward()


def after(model: nn.Module, batches: Batches) -> None:
    for batch in batches:
        with no_sync(model) if batch is batches[0] else torch.enable_grad():
            mean_loss(model(batch)).backward()
    assert go_through(model, batches[0]).any()


def unfrozen_before_its_backward(model: nn.Module, batches: Batches) -> None:
    x = (batches[0] * 0.5).requires_grad_()
    model.requires_grad_(False)
    loss = mean_loss(model(x))
    model.requires_grad_(True)
    loss.backward()
    mean_loss(model(batches[1] + x.grad)).backward()


def in_one_backward_with_trained_forwards(model: nn.Module, batches: Batches) -> None:
    x = (batches[0] * 0.5).requires_grad_()
    first = mean_loss(model(batches[0]))
    model.requires_grad_(False)
    frozen = mean_loss(model(x))
    model.requires_grad_(True)
    (first + frozen + mean_loss(model(batches[1]))).backward()
    assert x.grad.any()


def evaluated(model: nn.Module, batches: Batches) -> None:
    model.requires_grad_(False)
    with torch.no_grad():
        model(batches[0])
    assert not model(batches[0]).requires_grad
    model.requires_grad_(True)
    mean_loss(model(batches[1])).backward()


class RecomputingBlock(Block):
    """Recomputes the whole block."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class ReentrantBlock(RecomputingBlock):
    reentrant = True


class RecomputedNet(Net):
    """Recomputes its blocks from outside their units; blocks that recompute themselves do so inside their units."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            inside = isinstance(block, RecomputingBlock)
            x = block(x) if inside else checkpoint(block, x, use_reentrant=False)
        return self.head(x * self.scale)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "kept": Net,
    "around units": RecomputedNet,
    "inside units": lambda: RecomputedNet(RecomputingBlock),
    "inside units, reentrant": lambda: RecomputedNet(ReentrantBlock),
}
ORDERS = (before, between_microbatches, between_forward_and_backward, after, in_one_backward_with_trained_forwards)


@pytest.mark.parametrize("kind", ["zero1", "zero3", "zero3, once"])
@pytest.mark.parametrize("run", [*ORDERS, unfrozen_before_its_backward, evaluated])
@pytest.mark.sampled(2)
def test_the_models_own_iteration_goes_on(run: Callable[..., None], kind: str) -> None:
    train_beside(kind, run=run, ranks=2)


@pytest.mark.in_turn
@pytest.mark.parametrize("run", [between_microbatches, between_forward_and_backward])
@pytest.mark.sampled(1)
def test_over_instances(run: Callable[..., None]) -> None:
    train_beside("hsdp_zero1", run=run)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "kept"])
@pytest.mark.parametrize("run", [between_microbatches, between_forward_and_backward])
@pytest.mark.sampled(2)
def test_recompute_is_frozen_as_its_forward_was(run: Callable[..., None], model: str) -> None:
    train_beside("zero3", MODELS[model], run=run, ranks=2)


def fused(model: nn.Module, **options: Any) -> None:
    convert_linears(model)
    shard_blocks(model, **options)


@pytest.mark.parametrize("run", [between_forward_and_backward, in_one_backward_with_trained_forwards])
@pytest.mark.sampled(1)
def test_fused_weight_gradients(run: Callable[..., None]) -> None:
    train_beside("zero3", shard=fused, run=run, ranks=2)


@pytest.mark.parametrize("kind", ["zero1", "zero3", "hsdp"])
@pytest.mark.sampled(1)
def test_nothing_is_reduced(kind: str) -> None:
    def on_each_rank() -> tuple[int, int, list[bool]]:
        model = Net().double()
        shard_blocks(model, **options_of(kind))
        x = batches_of(rank_and_size()[0], 1)[0]
        mean_loss(model(x)).backward()
        model.zero_grad()
        with model.record_timeline() as timeline:
            assert go_through(model, x).any()
            reduced = len(timeline.buckets)
            with model.no_sync():
                mean_loss(model(x)).backward()
            mean_loss(model(x)).backward()
        return reduced, len(timeline.forwards), [span.synced for span in timeline.backwards]

    ranks = ranks_of(kind)
    assert simulate(on_each_rank, ranks) == [(0, 3, [False, False, True])] * ranks


def test_a_part_that_is_frozen_is_refused_with_what_helps() -> None:
    model = Net()
    shard_blocks(model)
    model.blocks[1].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'blocks.1.\w+.\w+' was frozen .* freeze all of its .* under no_sync"):
        model(torch.ones(2, 5))
    model.blocks[1].requires_grad_(True)
    mean_loss(model(torch.ones(2, 5))).backward()


def test_what_was_never_trained_stays_so() -> None:
    model = nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 3))
    fully_shard(model[0])
    fully_shard(model)
    model.requires_grad_(False)
    model(torch.ones(2, 5))
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter '0.\w+' was unfrozen"):
        model(torch.ones(2, 5))


def test_a_model_that_was_never_trained_is_not_frozen_meanwhile() -> None:
    """What has changed since it was sharded is refused."""
    model: Any = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)).requires_grad_(False)
    for module in (*model, model):
        fully_shard(module)
    model(torch.ones(2, 5))
    model[1].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter '1.weight' was unfrozen"):
        model(torch.ones(2, 5))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_one_parameter_that_is_frozen_freezes_no_model(name: str) -> None:
    model = fully_shard(nn.Linear(5, 3))
    getattr(model, name).requires_grad_(False)
    with pytest.raises(RuntimeError, match=rf"parameter '{name}' was frozen"):
        model(torch.ones(2, 5))


def test_a_parameter_of_a_trained_unit_that_was_never_trained_stays_so() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    trained = [param for param in fully_shard(model).parameters() if param.requires_grad]
    model.requires_grad_(False)
    x = torch.ones(2, 5, requires_grad=True)
    mean_loss(model(x)).backward()
    assert x.grad is not None and x.grad.any()
    for param in trained:
        param.requires_grad_(True)
    mean_loss(model(torch.ones(2, 5))).backward()
    assert model[0].weight.grad is None and all(param.grad is not None for param in trained)


class Sometimes(nn.Module):
    """Recomputes only what is trained, as a discriminator does to save memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        trains = self.up.weight.requires_grad
        return checkpoint(self.layers, x, use_reentrant=False) if trains else self.layers(x)  # type: ignore[no-any-return]

    def layers(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())  # type: ignore[no-any-return]


def test_one_backward_enters_a_unit_frozen_and_trained_at_once() -> None:
    """Inputs of the program end no unit. What the trained forward computes again needs gradients all the same."""

    def grads(*, sharded: bool) -> list[Tensor]:
        model = Sometimes().double()
        if sharded:
            fully_shard(model)
        batch = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
        x = (batch * 0.5).requires_grad_()
        trained = model(batch).square().sum()
        model.requires_grad_(False)
        frozen = model(x).square().sum()
        model.requires_grad_(True)
        (trained + frozen).backward()
        assert x.grad is not None
        own = [param.grad.full_tensor() if sharded else param.grad for param in model.parameters()]  # type: ignore[union-attr]
        return [x.grad, *own]

    expected = grads(sharded=False)
    for found in simulate(lambda: grads(sharded=True), 2):
        torch.testing.assert_close(found, expected)


def test_a_frozen_model_is_frozen_within_unsharded_too() -> None:
    model: Any = fully_shard(nn.Sequential(Block()))
    model.requires_grad_(False)
    with model.unsharded():
        assert not model(torch.ones(2, 7)).requires_grad
        x = torch.ones(2, 7, requires_grad=True)
        model(x).sum().backward()
    assert x.grad is not None and x.grad.any()
    model.requires_grad_(True)
    assert all(param.grad is None for param in model.parameters())


class Penalised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.weight.square().sum()
        return super().forward(x)


def test_a_loss_beside_the_outputs_is_trained_after_a_frozen_forward() -> None:
    """Backward comes to the whole parameters and to no output of the unit."""

    def on_each_rank() -> None:
        torch.manual_seed(0)
        model: Any = Penalised(4, 4)
        expected = 2 * model.weight.detach().clone()
        fully_shard(model, placements="zero2")
        model(torch.ones(2, 4))
        penalty = model.penalty
        model.requires_grad_(False)
        model(torch.ones(2, 4))
        model.requires_grad_(True)
        penalty.backward()
        assert torch.equal(model.weight.grad.full_tensor(), expected)

    simulate(on_each_rank, 2)
