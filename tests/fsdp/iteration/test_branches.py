"""Data that leads ranks to different layers of a unit: backward comes to the same units, in the same order, on all.

A unit may call itself, too."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_twin import assert_same_grads, batches_of, mean_loss, no_sync, options_of, plain_grads, ranks_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.fsdp import fully_shard
from maingrad.fsdp.module import root_of
from maingrad.launch import simulate

WIDTH = 5


class Branch(nn.Module):
    """The frozen layer or the trained one: the data decides."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return (self.frozen if x[0, 0] > 0 else self.trained)(x)


class Net(nn.Module):
    """A frozen stem: the first block's inputs require no gradient. Blocks run in an order of their own."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
        self.blocks = nn.ModuleList([Branch(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64), Branch()])
        self.head = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index in self.order:
            x = torch.tanh(self.blocks[index](x))
        return self.head(x)


def one_backward(model: nn.Module, batches: Any) -> None:
    mean_loss(model(batches[0])).backward()


@pytest.mark.parametrize("order", [(0, 1, 0, 0), (0, 2, 1), (0, 2, 0), (2, 0)], ids=str)
@pytest.mark.parametrize("kind", ["zero3", "zero2", "zero1", "hsdp", "zero3, once"])
@pytest.mark.sampled(2)
def test_a_branch_to_what_is_frozen_on_some_ranks(kind: str, order: tuple[int, ...]) -> None:
    check_branches(kind, order)


def test_ranks_that_write_nothing_of_a_unit_begin_its_collectives_in_the_order_of_the_others() -> None:
    """Where a rank waits for a reduction depends on what it has written, and which collective begins does not."""
    check_branches("hsdp", (2, 0))


def check_branches(kind: str, order: tuple[int, ...]) -> None:
    def on_each_rank() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        model, twin = Net(order), Net(order)
        for block in model.blocks:
            fully_shard(block, **options_of(kind))
        fully_shard(model, **options_of(kind))
        for step in range(4):
            everyones = [[10 * batch - 5 for batch in batches_of(other, 1, step=step)] for other in range(size)]
            one_backward(model, everyones[rank])
            trained = {name for name, param in model.named_parameters() if param.requires_grad}
            expected = plain_grads(twin, one_backward, everyones)
            assert_same_grads(model, {name: grad if name in trained else None for name, grad in expected.items()})
            assert all(param.grad is not None for param in model.parameters() if param.requires_grad)
            model.zero_grad()

    simulate(on_each_rank, ranks_of(kind))


def reached_by_the_first_alone(model: Any, batches: Any) -> None:
    """Two microbatches, the first through all blocks, and the last through one."""
    with no_sync(model):
        mean_loss(model(batches[0])).backward()
    model.order, before = (1,), model.order
    mean_loss(model(batches[1])).backward()
    model.order = before


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ["zero3", "zero1", "hsdp", "zero3, once"])
def test_units_that_the_first_microbatch_alone_reaches_are_reduced_over_all_ranks(kind: str) -> None:
    def on_each_rank() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        model, twin = Net((0, 1, 2)), Net((0, 1, 2))
        for block in model.blocks:
            fully_shard(block, **options_of(kind))
        fully_shard(model, **options_of(kind))
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        for step in range(2):
            everyones = [batches_of(other, 2, step=step) for other in range(size)]
            reached_by_the_first_alone(model, everyones[rank])
            expected = plain_grads(twin, reached_by_the_first_alone, everyones)
            assert_same_grads(model, {name: grad if name in trained else None for name, grad in expected.items()})
            model.zero_grad()

    simulate(on_each_rank, ranks_of(kind))


def test_what_a_unit_returns_keeps_its_values_and_integers() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"detached": self.layer(x).detach(), "index": x.argmax(-1), "name": "counts"}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = fully_shard(Counts())
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
            found = self.inside(x)
            return self.head(found["detached"]), found

    def on_each_rank() -> None:
        model: Any = fully_shard(Outer())
        x = torch.randn(3, WIDTH)
        y, found = model(x)
        assert found["name"] == "counts" and torch.equal(found["index"], x.argmax(-1))
        with torch.no_grad():
            assert torch.equal(found["detached"], model(x)[1]["detached"])
        y.sum().backward()
        assert not any(param.grad.to_local().any() for param in model.inside.parameters())
        with pytest.raises(RuntimeError, match="does not require grad"):
            model(x)[1]["index"].float().sum().backward()

    simulate(on_each_rank, 2)


def test_outputs_that_lead_to_no_trained_parameter_have_no_graph() -> None:
    """Of a unit that is frozen as a whole, and of the model, around which no other unit waits for a backward."""

    def on_each_rank() -> None:
        stem, model = nn.Linear(WIDTH, WIDTH).requires_grad_(False), Branch().float()
        inside: list[Tensor] = []
        fully_shard(stem)
        model.frozen = nn.Sequential(stem, nn.Identity())
        model.frozen[1].register_forward_pre_hook(lambda _, args: inside.append(args[0]))
        fully_shard(model)
        y = model(torch.ones(2, WIDTH))
        assert not y.requires_grad and not inside[0].requires_grad
        assert model(-torch.ones(2, WIDTH)).requires_grad

    simulate(on_each_rank, 2)


def test_complex_outputs_of_what_is_frozen_on_some_ranks() -> None:
    class Spectrum(Branch):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(super().forward(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inside = Spectrum()

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x).abs()

    def on_each_rank() -> None:
        model, twin = Outer(), Outer()
        fully_shard(model.inside)
        fully_shard(model)
        everyones = [torch.full((2, WIDTH), sign, dtype=torch.float64) for sign in (1.0, -1.0)]
        entered: list[str] = []
        model.inside.trained.register_full_backward_pre_hook(lambda *_: entered.append("trained"))
        model(everyones[dist.get_rank()]).square().mean().backward()
        assert bool(entered) is (dist.get_rank() == 1)
        expected = torch.autograd.grad(twin(everyones[1]).square().mean() / 2, [*twin.inside.trained.parameters()])
        for param, grad in zip(model.inside.trained.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), grad)

    simulate(on_each_rank, 2)


class Recursive(nn.Linear):
    """Calls itself between two products, perhaps in a checkpoint: then a recompute inside the unit runs it again."""

    reentrant: bool | None = None

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = super().forward(x).tanh()
        if depth and self.reentrant is None:
            x = self(x, depth - 1)
        elif depth:
            x = checkpoint(lambda y: self(y.tanh(), depth - 1), x, use_reentrant=self.reentrant)
        return super().forward(x).tanh()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_unit_that_calls_itself_is_sent_once(reentrant: bool | None) -> None:
    """It is whole until its outermost forward has ended, and until backward has passed that."""
    schedule: list[tuple[int, str]] = []

    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Recursive(16, 16))
        model[1].reentrant = reentrant
        return model

    def on_each_rank() -> list[Tensor]:
        model = make()
        for module in (model[1], model):
            fully_shard(module)
        loss = model(torch.ones(2, 16)).square().mean()
        schedule.append((dist.get_rank(), "backward"))
        loss.backward()
        return [param.grad.full_tensor() for param in model.parameters()]

    twin = make()
    twin(torch.ones(2, 16)).square().mean().backward()
    for grads in simulate(on_each_rank, 2, schedule=schedule):
        torch.testing.assert_close(grads, [param.grad for param in twin.parameters()])
    words = [word for rank, word in schedule if rank == 0]
    words = words[words.index("backward") :]
    assert sum(word.startswith("launch reduce_scatter") for word in words) == 2, words


class InTurns(nn.Linear):
    """Calls another one between two products, which calls it again."""

    other: list[nn.Module]

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = super().forward(x).tanh()
        if depth:
            x = self.other[0](x, depth - 1)
        return super().forward(x).tanh()


@pytest.mark.parametrize("trains", [True, False])
def test_units_that_call_each_other_in_turns_are_whole_until_the_outer_call_has_ended(trains: bool) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = nn.ModuleDict({"first": InTurns(16, 16), "second": InTurns(16, 16)})
        model["first"].other, model["second"].other = [model["second"]], [model["first"]]
        return model

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers["first"](x)

    twin = Outer()
    expected = twin(torch.ones(2, 16)).square().mean()
    expected.backward()

    def on_each_rank() -> list[Tensor]:
        model: Any = Outer()
        for module in (*model.layers.values(), model):
            fully_shard(module)
        for _ in range(2):  # the first one learns the order
            model.zero_grad()
            with torch.set_grad_enabled(trains):
                loss = model(torch.ones(2, 16)).square().mean()
            torch.testing.assert_close(loss, expected)
            if trains:
                loss.backward()
        assert not any(unit.gathered for unit in model.units[1:])
        return [param.grad.full_tensor() for param in model.parameters()] if trains else []

    for grads in simulate(on_each_rank, 2):
        torch.testing.assert_close(grads, [param.grad for param in twin.parameters()][: len(grads)])


def test_outputs_beside_an_input_that_is_handed_on_stay_as_they_are() -> None:
    """The input becomes a view. What has no graph gets none: another output leads backward into the unit."""

    class Gate(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = super().forward(x)
            return y, (y > 0).float(), x

    def on_each_rank() -> None:
        model: Any = nn.Sequential(Gate(WIDTH, WIDTH))
        for module in (model[0], model):
            fully_shard(module)
        kept: list[Tensor] = []
        model[0].register_forward_hook(lambda module, args, outputs: kept.extend(outputs))
        x = torch.ones(2, WIDTH, requires_grad=True)
        y, gate, same = model(x)
        assert y.requires_grad and not gate.requires_grad
        assert y is kept[0] and gate is kept[1] and same is not x
        (y.sum() + same.sum()).backward()
        with model.unsharded():
            torch.testing.assert_close(x.grad, 1.0 + model[0].weight.sum(0).expand(2, WIDTH))

    simulate(on_each_rank, 2)


def over_its_own_outputs(model: nn.Module, batches: Any) -> None:
    """Two outermost forwards, of which the second follows the first: backward is in both at once."""
    mean_loss(model(model(batches[0]))).backward()


@pytest.mark.parametrize("kind", ["zero3", "zero2", "hsdp"])
def test_a_model_may_run_over_its_own_outputs(kind: str) -> None:
    """Its unit is passed when backward has passed both forwards, and is reduced once."""

    def make() -> Any:
        torch.manual_seed(0)
        return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def on_each_rank() -> list[int]:
        model, twin = make(), make()
        fully_shard(model, **options_of(kind))
        launcher, launched = root_of(model).grads.launcher, []
        launch = launcher.launch
        launcher.launch = lambda bucket, *args: (launched.append(bucket.index), launch(bucket, *args))[1]
        for _ in range(2):
            over_its_own_outputs(model, batches_of(dist.get_rank(), 1))
            everyones = [batches_of(rank, 1) for rank in range(ranks_of(kind))]
            assert_same_grads(model, plain_grads(twin, over_its_own_outputs, everyones))
            model.zero_grad()
        return launched

    assert simulate(on_each_rank, ranks_of(kind)) == [[0, 0]] * ranks_of(kind)


@pytest.mark.parametrize("kind", ["zero3", "zero1", "hsdp", "hsdp_zero1", "zero3, once"])
@pytest.mark.sampled(2)
def test_a_model_of_units_may_run_over_its_own_outputs(kind: str) -> None:
    """Units inside are reduced for each of the two forwards, and sums have both."""

    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)])

    def run(model: Any, batches: Any) -> None:
        with no_sync(model):
            over_its_own_outputs(model, batches[:1])
        over_its_own_outputs(model, batches[1:])

    def on_each_rank() -> None:
        model, twin = make(), make()
        for module in (*model[:2], model):
            fully_shard(module, **options_of(kind))
        for step in range(2):
            run(model, batches_of(dist.get_rank(), 2, step=step))
            everyones = [batches_of(rank, 2, step=step) for rank in range(ranks_of(kind))]
            assert_same_grads(model, plain_grads(twin, run, everyones))
            assert not any(unit.gathered for unit in model.units) or kind == "zero1"
            model.zero_grad()

    simulate(on_each_rank, ranks_of(kind))
