"""What ``torch.utils.checkpoint`` computes again has the recipe of its first forward, whatever is around."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    LayerNormMLP,
    Linear,
    NVFP4BlockScaling,
    autocast,
    recipes,
)
from maingrad.te_integration.recipes import Recipe

CURRENT, BLOCK = Float8CurrentScaling(), Float8BlockScaling()
ROTATED, PLAIN = (NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=each) for each in (False, True))
"""What both save for backward has one shape, so that torch does not notice an exchange."""

Region = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def gradients(run: Callable[[list[Linear], Tensor, Region], Any], region: Region) -> list[Tensor]:
    """Of the input and of three layers."""
    torch.manual_seed(0)
    layers = [Linear(64, 64, dtype=torch.bfloat16) for _ in range(3)]
    x = torch.randn(16, 64).bfloat16().requires_grad_()
    run(layers, x, region)
    return [x.grad, *(layer.weight.grad for layer in layers if layer.weight.grad is not None)]  # type: ignore[list-item]


def check(run: Callable[[list[Linear], Tensor, Region], Any]) -> None:
    again = gradients(run, lambda forward, x: checkpoint(forward, x, use_reentrant=False))
    once = gradients(run, lambda forward, x: forward(x))
    for found, expected in zip(again, once, strict=True):
        assert torch.equal(found, expected)


def backward(y: Tensor) -> None:
    y.float().square().sum().backward()


@pytest.mark.parametrize("where", ["outside", "around the inner alone", "between", "inside"])
def test_nested_regions(where: str) -> None:
    def run(layers: list[Linear], x: Tensor, region: Region) -> None:
        def inner(x: Tensor) -> Tensor:
            if where != "inside":
                return layers[1](layers[0](x).tanh()).tanh()
            with autocast(recipe=BLOCK):
                x = layers[0](x).tanh()
            return layers[1](x).tanh()

        def outer(x: Tensor) -> Tensor:
            if where == "around the inner alone":
                return region(inner, x).sin()
            if where != "between":
                return layers[2](region(inner, x)).tanh()
            with autocast(recipe=ROTATED):
                x = region(inner, x)
            return layers[2](x).tanh()

        if where in ("outside", "around the inner alone"):
            with autocast(recipe=CURRENT):
                y = region(outer, x)
        else:
            y = region(outer, x)
        backward(y)

    check(run)


@pytest.mark.parametrize(("forward", "around"), [(None, CURRENT), (CURRENT, BLOCK), (ROTATED, PLAIN), (CURRENT, None)])
def test_a_block_around_backward_does_not_count(forward: Recipe | None, around: Recipe | None) -> None:
    def run(layers: list[Linear], x: Tensor, region: Region) -> None:
        with autocast(forward is not None, recipe=forward):
            y = region(lambda x: layers[1](layers[0](x).tanh()).tanh(), x)
        with autocast(around is not None, recipe=around):
            backward(y)

    check(run)


def test_a_layer_before_a_block_inside_has_no_recipe() -> None:
    def run(layers: list[Linear], x: Tensor, region: Region) -> None:
        def inside(x: Tensor) -> Tensor:
            x = layers[0](x)
            with autocast(recipe=CURRENT):
                return layers[1](x).tanh()

        backward(region(inside, x))

    check(run)


def test_a_layer_that_had_a_recipe_before() -> None:
    """It may be computed again without one in a region."""

    def run(layers: list[Linear], x: Tensor, region: Region) -> None:
        with autocast(recipe=CURRENT):
            layers[0](x)
        backward(region(lambda x: layers[1](layers[0](x)).tanh(), x))

    check(run)


def test_hooks_of_others_inside() -> None:
    def run(layers: list[Linear], x: Tensor, region: Region) -> None:
        def inside(x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                x = layers[0](x).tanh()
            return layers[1](x).tanh()

        with autocast(recipe=CURRENT):
            y = region(inside, x)
        backward(y)

    check(run)


@pytest.mark.parametrize("recipe", [CURRENT, DelayedScaling(amax_history_len=3)], ids=["current", "delayed"])
@pytest.mark.parametrize("shape", [(8, 32), (2, 4, 32), (2, 0, 32), (0, 32)])
def test_an_mlp_that_recomputes_itself(shape: tuple[int, ...], recipe: Recipe) -> None:
    """It skips its second product in the recompute, whatever the shape of its input, and has the same bits.

    Without torch's early stop the recompute runs to its end.
    """
    found = []
    for recomputes, stops in ((False, True), (True, True), (True, False)):
        torch.manual_seed(0)
        mlp = LayerNormMLP(32, 48, checkpoint=recomputes, fuse_wgrad_accumulation=True, dtype=torch.bfloat16)
        model, x = DistributedDataParallel(mlp), torch.randn(shape).bfloat16().requires_grad_()
        outputs = []
        for _ in range(2):
            with autocast(recipe=recipe), set_checkpoint_early_stop(stops):
                outputs.append(model(x))
            backward(outputs[-1])
            model.finish_grad_sync()
            model.zero_grad_buffer()
            outputs += [param.main_grad.clone() for param in mlp.parameters()]
        assert outputs[0].shape == shape
        found.append([*outputs, x.grad, *mlp.buffers()])
    for once, again, whole in zip(*found, strict=True):
        assert torch.equal(once, again)
        assert torch.equal(once, whole)


def test_an_mlp_that_recomputes_itself_multiplies_once_more() -> None:
    """The second product of the recompute, whose output nobody reads, is not computed."""
    counts = []
    for recomputes in (False, True):
        mlp = LayerNormMLP(32, 48, checkpoint=recomputes, fuse_wgrad_accumulation=True, dtype=torch.bfloat16)
        model, x = DistributedDataParallel(mlp), torch.randn(8, 32).bfloat16().requires_grad_()
        with autocast(recipe=CURRENT):
            y = model(x)
        with torch.profiler.profile() as profile:
            backward(y)
        counts.append(sum(each.count for each in profile.key_averages() if each.key in ("aten::mm", "aten::addmm")))
    assert counts[1] - counts[0] == 1


@pytest.mark.in_turn
def test_compiled_layers_in_a_region() -> None:
    """The recompute runs with no block open: compiled code of a forward without recipe would run."""

    def run(layers: list[Linear], x: Tensor, region: Region) -> None:
        torch.compiler.reset()
        forward = torch.compile(lambda x: layers[0](x).tanh(), backend="eager")
        forward(x)
        with autocast(recipe=CURRENT):
            y = region(forward, x)
        backward(y)

    check(run)
    assert not recipes.may_be_any  # the region is gone
