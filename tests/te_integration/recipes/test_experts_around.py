"""``GroupedMLP`` and ``Sequential`` under a recipe, and what is around experts: recompute, graphs, compilers, ranks."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
)
from maingrad.launch import simulate
from maingrad.te_integration import (
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    GroupedMLP,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScaledSwiGLU,
    Sequential,
    autocast,
    convert_linears,
    unconvert,
)
from maingrad.te_integration.recipes import Recipe

RECIPES: dict[str, Recipe] = {
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "MXFP8": MXFP8BlockScaling(),
    "NVFP4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
HIDDEN, FFN = 48, 32
SPLITS = torch.tensor([17, 0, 40, 3])


def experts(**options: Any) -> GroupedMLP:
    torch.manual_seed(0)
    return GroupedMLP(4, HIDDEN, FFN, **{"fuse_wgrad_accumulation": True, "dtype": torch.bfloat16, **options})


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    rows = int(SPLITS.sum())
    x, probs = torch.randn(rows, HIDDEN, generator=draws), torch.rand(rows, generator=draws)
    return x.bfloat16().requires_grad_(), SPLITS, probs.requires_grad_()


def grads_of(model: DistributedDataParallel, x: Tensor, probs: Tensor, y: Tensor) -> list[Tensor]:
    """After a backward: copies of all gradients, and of the output."""
    model.finish_grad_sync()
    found = [param.main_grad.clone() for param in model.module.parameters()]
    model.zero_grad_buffer()
    return [y.detach().clone(), x.grad.clone(), probs.grad.clone(), *found]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


# ---- Numbers. ----


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_three_modules_give_the_bits_of_one(recipe: str, packed: bool) -> None:
    mlp = experts(single_grouped_weight=packed)
    options: dict[str, Any] = {
        "fuse_wgrad_accumulation": True,
        "dtype": torch.bfloat16,
        "single_grouped_weight": packed,
    }
    one, two = GroupedLinear(4, HIDDEN, 2 * FFN, **options), GroupedLinear(4, FFN, HIDDEN, **options)
    for prefix, layer in (("fc1_", one), ("fc2_", two)):
        state = {name.removeprefix(prefix): value for name, value in mlp.state_dict().items() if prefix in name}
        layer.load_state_dict(state)
    ops = Sequential(one, ScaledSwiGLU(), two)
    found = []
    for module, give in ((mlp, lambda x, m, p: (x, m, p)), (ops, lambda x, m, p: (x, m, p, m))):
        model = DistributedDataParallel(module)
        x, splits, probs = inputs()
        with autocast(recipe=RECIPES[recipe]):
            y = model(*give(x, splits, probs))
        y.float().square().mean().backward()
        found.append(grads_of(model, x, probs, y))
    assert same(found[0][:3], found[1][:3])
    shapes = {tuple(grad.shape): grad.float().norm() for grad in found[0]}
    assert {tuple(grad.shape): grad.float().norm() for grad in found[1]} == shapes


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES, "NVFP4, random"])
def test_gradients_are_near_those_of_bf16(recipe: str, delay: bool) -> None:
    found = []
    for low in (RECIPES.get(recipe, NVFP4BlockScaling()), None):
        mlp = experts(delay_wgrad_compute=delay)
        model = DistributedDataParallel(mlp)
        x, splits, probs = inputs()
        with autocast(low is not None, recipe=low):
            y = model(x, splits, probs)
        y.float().square().mean().backward()
        mlp.backward_dw()
        found.append(grads_of(model, x, probs, y))
    for low, plain in zip(*found, strict=True):
        if plain.norm():
            error = (low.double() - plain.double()).norm() / plain.double().norm()
            assert 0.005 < error < (1.0 if "NVFP4" in recipe else 0.3)
        else:
            assert low.norm() == 0  # of the expert without rows


# ---- Recompute. ----


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_computed_again_has_the_recipe(recipe: str, outside: bool) -> None:
    found = []
    for recomputed in (False, True):
        model = DistributedDataParallel(experts())
        x, splits, probs = inputs()

        def forward(x: Tensor, probs: Tensor, model: Any = model, splits: Tensor = splits) -> Tensor:
            with autocast(recipe=RECIPES[recipe]):
                return model(x, splits, probs).tanh()

        def plain(x: Tensor, probs: Tensor, model: Any = model, splits: Tensor = splits) -> Tensor:
            return model(x, splits, probs).tanh()

        run = plain if outside else forward
        with autocast(outside, recipe=RECIPES[recipe]):
            y = checkpoint(run, x, probs, use_reentrant=False) if recomputed else run(x, probs)
        y.float().square().sum().backward()
        found.append(grads_of(model, x, probs, y))
    assert same(*found)


def test_reentrant_recompute_outside_is_refused() -> None:
    mlp = experts()
    x, splits, probs = inputs()
    with autocast(recipe=MXFP8BlockScaling()):
        y = checkpoint(mlp, x, splits, probs, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"GroupedMLP\(.*use_reentrant=False"):
        y.float().sum().backward()


# ---- Blocks, dtypes, compilers. ----


def test_blocks_and_backward() -> None:
    """Backward has the recipe of its forward."""
    found = []
    for around in (None, NVFP4BlockScaling()):
        model = DistributedDataParallel(experts())
        x, splits, probs = inputs()
        with autocast(recipe=Float8BlockScaling()):
            with autocast(enabled=False):
                plain = model(x, splits, probs)
            y = model(x, splits, probs)
        with autocast(around is not None, recipe=around):
            y.float().square().sum().backward()
        assert not torch.equal(plain, y)
        assert torch.equal(plain, model(x, splits, probs))
        found.append(grads_of(model, x, probs, y))
    assert same(*found)


def test_fp32_is_not_quantised_and_says_so_once() -> None:
    mlp = experts(dtype=torch.float32)
    x, splits, probs = inputs()
    with warnings.catch_warnings(record=True) as caught, autocast(recipe=MXFP8BlockScaling()):
        warnings.simplefilter("default")
        for _ in range(3):
            found = mlp(x.float(), splits, probs)
    assert ["as without a recipe" in str(each.message) for each in caught] == [True]
    assert torch.equal(found, mlp(x.float(), splits, probs))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.sampled(1)
def test_compiled_code_leaves_quantised_experts_outside(fullgraph: bool) -> None:
    mlp = experts()
    model = DistributedDataParallel(mlp)
    x, splits, probs = inputs()
    recipe = MXFP8BlockScaling()
    torch.compiler.reset()
    compiled = torch.compile(lambda *given: mlp(*given) + 1, backend="eager", fullgraph=fullgraph)
    if fullgraph:
        with autocast(enabled=False):
            assert compiled(x, splits, probs).shape == x.shape
        with pytest.raises(Exception, match="compile"), autocast(recipe=recipe):
            compiled(x, splits, probs)
        return
    plain = compiled(x, splits, probs)
    found = []
    for run in (compiled, lambda *given: mlp(*given) + 1):
        x.grad = probs.grad = None
        with autocast(recipe=recipe):
            y = run(x, splits, probs)
        y.float().square().sum().backward()
        found.append(grads_of(model, x, probs, y))
    assert same(*found)
    assert torch.equal(compiled(x, splits, probs), plain)


def test_converted_models_have_experts_of_their_own() -> None:
    """``convert_linears`` changes the linear layers beside experts, and leaves experts, under one recipe."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"gate": nn.Linear(HIDDEN, HIDDEN).bfloat16(), "experts": experts()})
    twin = copy.deepcopy(net)
    convert_linears(net)
    found = []
    for module in (net, twin):
        x, splits, probs = inputs()
        with autocast(recipe=Float8CurrentScaling()):
            found.append(module["experts"](module["gate"](x), splits, probs))
    assert isinstance(net["gate"], Linear)
    assert not torch.equal(*found)  # one gate is quantised
    unconvert(net)
    with autocast(recipe=Float8CurrentScaling()):
        assert torch.equal(net["experts"](net["gate"](x), splits, probs), found[1])


# ---- Ranks. ----


@pytest.mark.in_turn
def test_training_is_alike_on_any_number_of_ranks() -> None:
    """ZeRO-1 with overlap, delayed weight gradients and recompute: losses fall, and every rank has one model."""

    def program() -> tuple[list[float], list[Tensor]]:
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        )
        mlp = experts(delay_wgrad_compute=True)
        model = DistributedDataParallel(mlp, config)
        optimizer = DistributedOptimizer(model, lr=1e-2)
        losses = []
        for _ in range(6):
            for last in (False, True):
                x, splits, probs = inputs(int(last))
                with autocast(recipe=Float8BlockScaling()):
                    y = checkpoint(model, x, splits, probs, use_reentrant=False)
                loss = (y.float() - 1).square().mean()
                if last:
                    loss.backward()
                else:
                    with model.no_sync():
                        loss.backward()
            while mlp.need_backward_dw():
                mlp.backward_dw()
            model.finish_grad_sync()
            optimizer.step()
            model.zero_grad_buffer()
            losses.append(loss.item())
        return losses, [param.detach().float().clone() for param in mlp.parameters()]

    ranks = simulate(program, 2)
    alone = simulate(program, 1)[0]
    for losses, weights in ranks:
        assert losses[-1] < 0.8 * losses[0]
        assert losses == pytest.approx(alone[0], rel=2e-2)
        assert all(map(torch.equal, weights, ranks[0][1]))
