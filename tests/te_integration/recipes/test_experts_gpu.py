"""Experts under recipes on a GPU: emulated, without waiting for the GPU, in graphs whose splits change."""

from typing import Any

import pytest
import torch
from host_syncs import cuda_waits_are_errors
from torch import Tensor

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer, GraphedTrainingStep
from maingrad.te_integration import (
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    GroupedMLP,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
    make_graphed_callables,
)
from maingrad.te_integration.recipes import Recipe

pytestmark = pytest.mark.gpu

RECIPES: dict[str, Recipe] = {
    "current, kernels": Float8CurrentScaling(),
    "block, kernels": Float8BlockScaling(),
    "current": Float8CurrentScaling(emulate=True),
    "block": Float8BlockScaling(emulate=True),
    "MXFP8": MXFP8BlockScaling(emulate=True),
    "NVFP4": NVFP4BlockScaling(emulate=True, disable_stochastic_rounding=True),
}
ROWS, HIDDEN = 300, 128


def experts(device: str, **options: Any) -> GroupedMLP:
    torch.manual_seed(0)
    return GroupedMLP(4, HIDDEN, 64, fuse_wgrad_accumulation=True, dtype=torch.bfloat16, **options).to(device)


def inputs(device: str, number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(number)
    x, probs = torch.randn(ROWS, HIDDEN, generator=draws).bfloat16(), torch.rand(ROWS, generator=draws)
    splits = torch.tensor([137 + number, 0, 160 - 2 * number, 1])  # with pad rows, but for the first
    return x.to(device).requires_grad_(), splits.to(device), probs.to(device)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_computes_what_a_cpu_does_and_nobody_waits(recipe: str, packed: bool) -> None:
    found = []
    for device in ("cpu", "cuda"):
        mlp = experts(device, delay_wgrad_compute=True, single_grouped_weight=packed)
        model = DistributedDataParallel(mlp)
        x, splits, probs = inputs(device)

        def microbatch(mlp: Any = mlp, model: Any = model, given: Any = (x, splits, probs)) -> Tensor:
            with autocast(recipe=RECIPES[recipe]):
                y: Tensor = model(*given)
            with model.no_sync():
                y.backward(torch.ones_like(y))
            mlp.backward_dw()
            return y

        y = microbatch()
        if device == "cuda":  # again, now that kernels are compiled and tables filled
            x.grad = None
            model.zero_grad_buffer()
            with cuda_waits_are_errors():
                y = microbatch()
        model.finish_grad_sync()
        grads = [param.main_grad for param in mlp.parameters()]
        found.append([each.detach().float().cpu() for each in (y, x.grad, *grads) if each is not None])
    for mine, other in zip(*found, strict=True):
        assert (mine - other).norm() <= 0.05 * other.norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graphed_step_takes_the_splits_of_its_call(recipe: str) -> None:
    losses = []
    for graphed in (False, True):
        model = DistributedDataParallel(experts("cuda"))
        optimizer = DistributedOptimizer(model, lr=2**-8)

        def train_step(
            x: Tensor, splits: Tensor, probs: Tensor, model: Any = model, optimizer: Any = optimizer
        ) -> Tensor:
            with autocast(recipe=RECIPES[recipe]):
                y = model(x, splits, probs)
            loss = (y.float() - 1).square().mean()
            loss.backward()
            model.finish_grad_sync()
            optimizer.step()
            model.zero_grad_buffer()
            return loss

        step: Any = GraphedTrainingStep(train_step, model, optimizer) if graphed else train_step
        given = [[each.detach() for each in inputs("cuda", number)] for number in range(8)]
        losses.append(torch.stack([step(*each).detach() for each in given]))
    assert torch.equal(*losses)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("recipe", ["block", "block, kernels", "current, kernels"])
def test_graphed_callables_follow_the_recipe(recipe: str, delay: bool) -> None:
    mlp = experts("cuda", delay_wgrad_compute=delay)
    model = DistributedDataParallel(mlp)
    with autocast(recipe=RECIPES[recipe]):
        (call,) = make_graphed_callables([mlp], [inputs("cuda", 1)])
        found = []
        for run in (call, mlp):
            x, splits, probs = inputs("cuda", 2)
            y = run(x, splits, probs)
            with model.no_sync():
                y.float().square().sum().backward()
            while mlp.need_backward_dw():
                mlp.backward_dw()
            found.append([y.detach().clone(), x.grad.clone(), *(param.main_grad.clone() for param in mlp.parameters())])
            model.zero_grad_buffer()
    assert all(map(torch.equal, *found))
    with pytest.raises(RuntimeError, match="autocast is not as it was captured"):
        call(*inputs("cuda"))


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling, NVFP4BlockScaling])
def test_without_a_kernel(recipe: type[Recipe]) -> None:
    splits = torch.tensor([3, 5], device="cuda")
    x = torch.ones(8, 64, device="cuda", dtype=torch.bfloat16)
    for module in (GroupedLinear(2, 64, 64, dtype=torch.bfloat16), GroupedMLP(2, 64, 64, dtype=torch.bfloat16)):
        with autocast(recipe=recipe()), pytest.raises(RuntimeError, match=r"Grouped.*emulate=True"):
            module.cuda()(x, splits)
