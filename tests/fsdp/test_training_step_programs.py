"""``maingrad.fsdp.GraphedTrainingStep``: programs that change what is around the step, or more than their model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphed_training import differences
from torch import Tensor, nn

from maingrad.fsdp import GraphedTrainingStep, fully_shard
from maingrad.launch import simulate

LR = 2**-7  # exact in fp32


def sharded(placements: str = "zero3", norm: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if norm else nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, placements=placements)
    return model


def batches(count: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return [torch.randn(3, 4, generator=draws) for _ in range(count)]


def state(model: Any, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
    return more | {
        "shards": [param.detach().clone() for param in model.parameters()],
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "optimizer": [dict(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]],
        "modes": [module.training for module in model.modules()],
    }


def check(program: Callable[[bool], dict[str, Any]]) -> None:
    """The program gives the same as a graph and eagerly."""
    assert simulate(lambda: differences(program(False), program(True)), 2) == [[]] * 2


class Step:
    """An iteration, eager or graphed. ``extra`` is called after the update."""

    def __init__(self, model: Any, optimizer: Any, graphed: bool, extra: Callable[[], Any] = lambda: None) -> None:
        self.model, self.optimizer, self.extra = model, optimizer, extra
        self.call: Any = GraphedTrainingStep(self.train_step, model, optimizer) if graphed else self.train_step

    def train_step(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.extra()
        self.model.zero_grad()
        return loss.detach()


@pytest.mark.in_turn
@pytest.mark.parametrize("placements", ["zero2", "zero3"])
@pytest.mark.sampled(1)
def test_an_average_in_the_step(placements: str) -> None:
    """A second sharded model that the step writes is evaluated between two calls."""

    def program(graphed: bool) -> dict[str, Any]:
        model, mean = sharded(placements), sharded(placements)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

        @torch.no_grad()
        def average() -> None:
            for average, param in zip(mean.parameters(), model.parameters(), strict=True):
                average.lerp_(param, 0.25)

        step, seen = Step(model, optimizer, graphed, average), []
        for x in batches(6):
            seen.append(step.call(x))
            with torch.no_grad():
                seen.append(mean(x).clone())
        return state(model, optimizer, seen=seen)

    check(program)


def test_a_step_that_switches_to_training() -> None:
    def program(graphed: bool) -> dict[str, Any]:
        model = sharded(norm=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        step, seen = Step(model, optimizer, graphed), []
        first = step.train_step

        def train_step(x: Tensor) -> Tensor:
            model.train()
            return first(x)

        call = GraphedTrainingStep(train_step, model, optimizer) if graphed else train_step
        for x in batches(6):
            seen += [call(x), torch.tensor(model.training)]
            model.eval()
            with torch.no_grad():
                seen.append(model(x).clone())
        call(x)
        return state(model, optimizer, seen=seen)

    check(program)


def add_group(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.add_param_group({"params": params[4:], "lr": LR / 2})


def move_param(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())


def drop_group(optimizer: Any, params: list[Tensor]) -> None:
    optimizer.param_groups[0]["params"] += optimizer.param_groups.pop()["params"]


@pytest.mark.parametrize("change", [add_group, move_param, drop_group])
@pytest.mark.sampled(1)
def test_groups_that_change(change: Callable[[Any, list[Tensor]], None]) -> None:
    def program(graphed: bool) -> dict[str, Any]:
        model = sharded()
        params = list(model.parameters())
        groups = [{"params": params[:2], "names": ["a", "b"]}, {"params": params[2:4], "lr": LR / 4}]
        optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
        step, seen = Step(model, optimizer, graphed), []
        for number, x in enumerate(batches(9)):
            seen.append(step.call(x))
            if number == 4:
                change(optimizer, params)
        return state(model, optimizer, seen=seen)

    check(program)


@pytest.mark.in_turn
def test_parameters_beside_the_model() -> None:
    """They are replicated, in the same optimizer; one is hooked, and frozen later, and one gets other memory."""

    def program(graphed: bool) -> dict[str, Any]:
        model, shift, scale = sharded(), nn.Parameter(torch.zeros(())), nn.Parameter(torch.ones(()))
        groups = [{"params": list(model.parameters())}, {"params": [shift, scale], "lr": LR / 4}]
        optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)

        def train_step(x: Tensor) -> Tensor:
            loss = (model(x) * scale + shift).square().mean()
            loss.backward()
            for param in (shift, scale):
                if param.grad is not None:
                    dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        call = GraphedTrainingStep(train_step, model, optimizer) if graphed else train_step
        seen = []
        for number, x in enumerate(batches(10)):
            seen.append(call(x).detach())
            if number == 3:
                handle = scale.register_hook(lambda grad: grad * 2)
            if number == 5:
                handle.remove()
                scale.requires_grad_(False)
            if number == 8:
                shift.data = shift.data.clone()
        if graphed:
            scale.requires_grad_(True).grad = torch.ones(())
            with pytest.raises(RuntimeError, match="zero_grad"):
                call(x)
        return state(model, optimizer, seen=seen, beside=[shift.detach().clone(), scale.detach().clone()])

    check(program)


@pytest.mark.in_turn
def test_one_tensor_given_twice() -> None:
    def program(graphed: bool) -> dict[str, Any]:
        model = sharded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

        def train_step(x: Tensor, goal: Tensor) -> Tensor:
            loss = (model(x) - (goal * 2 if goal is x else goal)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        call = GraphedTrainingStep(train_step, model, optimizer) if graphed else train_step
        seen = []
        for x in batches(6):
            seen += [call(x, x).detach(), call(x, x.clone()).detach()]
        return state(model, optimizer, seen=seen)

    check(program)


def test_another_optimizer_in_the_step() -> None:
    """Of another model, or of a parameter beside the model."""
    model, other, scale = sharded(), sharded(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    for params in (list(other.parameters()), [scale]):
        second = torch.optim.SGD(params, lr=LR)
        step = Step(model, optimizer, True, second.step)
        with pytest.raises(RuntimeError, match="SGD has stepped beside"):
            step.call(torch.ones(2, 4))
    optimizer.add_param_group({"params": list(other.parameters())})
    with pytest.raises(ValueError, match="of another model"):
        Step(model, optimizer, True)


def test_a_buffer_that_is_replaced_in_the_step() -> None:
    model = sharded()
    model[0].register_buffer("mean", torch.zeros(()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    captures = False

    def replace() -> None:
        if captures:
            model[0].mean = model[0].mean * 0.5

    step = Step(model, optimizer, True, replace)
    for x in batches(2):
        step.call(x)
    captures = True
    with pytest.raises(RuntimeError, match="in place"):
        step.call(x)
