"""A program's own ``Recipe``, however it is written: what was made under one never serves another."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from maingrad import ddp, fsdp
from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.kernels.quantized import Element, QuantSpec, ScaleForm
from maingrad.te_integration import (
    DelayedScaling,
    Float8CurrentScaling,
    Linear,
    Recipe,
    autocast,
    make_graphed_callables,
)

BF16 = torch.bfloat16


def powers_of_two(operand: str, height: int) -> QuantSpec:
    return QuantSpec(Element.E4M3, (height if operand == "weight" else 1, 32), ScaleForm.POWER_OF_TWO)


class Plain(Recipe):
    def __init__(self, height: int) -> None:
        super().__init__()
        self.height = height

    def spec(self, operand: Any, *, columns: bool) -> QuantSpec:
        return powers_of_two(operand, self.height)


@dataclass(frozen=True, kw_only=True)
class Decorated(Recipe):
    height: int = field(default=1, compare=False)

    def spec(self, operand: Any, *, columns: bool) -> QuantSpec:
        return powers_of_two(operand, self.height)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slotted(Recipe):
    height: int

    def spec(self, operand: Any, *, columns: bool) -> QuantSpec:
        return powers_of_two(operand, self.height)


class Inherited(Decorated):
    def __init__(self, height: int) -> None:
        super().__init__()
        self.mine = height

    def spec(self, operand: Any, *, columns: bool) -> QuantSpec:
        return powers_of_two(operand, self.mine)


FORMS: dict[str, Callable[[int], Recipe]] = {
    "plain": Plain,
    "decorated": lambda height: Decorated(height=height),
    "slotted": lambda height: Slotted(height=height),
    "inherited": Inherited,
}


def layer() -> Linear:
    """Rows of very different size, which a common scale would round to 0."""
    torch.manual_seed(0)
    made = Linear(32, 32, bias=False, fuse_wgrad_accumulation=True, dtype=BF16)
    with torch.no_grad():
        made.weight[::2] *= 2.0**-14
    return made


def batch() -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(BF16)


def run(model: Any, recipe: Recipe) -> Tensor:
    with autocast(recipe=recipe):
        y: Tensor = model(batch())
    return y


@pytest.mark.parametrize("form", FORMS)
def test_kept_weights_of_one_do_not_serve_the_other(form: str) -> None:
    make = FORMS[form]
    fine, coarse = (run(layer(), make(height)) for height in (1, 32))
    assert not torch.equal(fine, coarse)
    model = DistributedDataParallel(layer())
    for recipe, expected in ((make(1), fine), (make(32), coarse), (make(1), fine), (make(32), coarse)):
        with model.no_sync():
            y = run(model, recipe)
            assert torch.equal(y, expected)
            y.sum().backward()


@pytest.mark.parametrize("form", FORMS)
def test_equality(form: str) -> None:
    make = FORMS[form]
    one, equal, other = make(1), make(1), make(2)
    assert one == equal != other
    assert len({one, equal, other}) == 2
    assert copy.deepcopy(one) == one
    assert pickle.loads(pickle.dumps(other)) == other
    assert Float8CurrentScaling() == Float8CurrentScaling() != DelayedScaling()


@pytest.mark.in_turn
def test_compiled_code() -> None:
    model = DistributedDataParallel(layer())
    compiled = torch.compile(model.module, backend="aot_eager")
    for height in (1, 32, 1):
        assert torch.equal(run(compiled, Plain(height)), run(layer(), Plain(height)))


def train(kind: str, changes: Callable[[Linear, int], Recipe], captured: bool) -> tuple[list[Tensor], int]:
    """Five iterations; ``changes`` brings the recipe of each, and may change the layer."""
    module = layer()
    model: Any
    optimizer: Any
    if kind == "zero3":
        model = fsdp.fully_shard(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    else:
        model = DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=True))
        optimizer = DistributedOptimizer(model, lr=0.1, optimizer_class=torch.optim.SGD)

    def step(x: Tensor) -> Tensor:
        y: Tensor = model(x)
        y.float().square().sum().backward()
        model.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
        return y.detach()

    graphs: Any = fsdp.GraphedTrainingStep if kind == "zero3" else ddp.GraphedTrainingStep
    graphed = graphs(step, model, optimizer, num_warmup_steps=1) if captured else step
    found = []
    for number in range(8):
        recipe = changes(module, number)
        with autocast(recipe=recipe):
            found.append(graphed(batch()).clone())
    return found, graphed.num_graphs if captured else 0


def two_recipes(module: Linear, number: int) -> Recipe:
    return Plain((1, 1, 1, 32, 32, 32, 1, 32)[number])


def exempt(module: Linear, number: int) -> Recipe:
    if number in (3, 6):
        module.ignores_recipes = not module.ignores_recipes
    return Plain(32)


@pytest.mark.parametrize("kind", ["zero1", "zero3"])
@pytest.mark.parametrize("changes", [two_recipes, exempt])
def test_a_graphed_step(kind: str, changes: Any) -> None:
    expected, _ = train(kind, changes, captured=False)
    found, num_graphs = train(kind, changes, captured=True)
    assert num_graphs == 2
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)


def test_a_graphed_callable() -> None:
    wrapper = DistributedDataParallel(layer())
    module = wrapper.module
    with autocast(recipe=Plain(1)):
        (graphed,) = make_graphed_callables([module], [(batch().requires_grad_(),)])
    x = batch().requires_grad_()
    with autocast(recipe=Plain(32)), pytest.raises(RuntimeError, match="autocast is not as it was captured"):
        graphed(x)
    with autocast(recipe=Plain(1)):
        graphed(x).sum().backward()
        module.ignores_recipes = True
        with pytest.raises(RuntimeError, match=r"it is not as it was captured.*ignores_recipes"):
            graphed(x)


# ---- Refused. ----


def test_what_cannot_be_compared_is_refused() -> None:
    class Listing(Plain):
        def __init__(self, height: int) -> None:
            super().__init__(height)
            self.heights = [height]

    with pytest.raises(TypeError, match=r"Listing\.heights is a list"), autocast(recipe=Listing(1)):
        pass
    with pytest.raises(TypeError, match=r"Sloppy defines __eq__"):
        type("Sloppy", (Plain,), {"__eq__": lambda self, other: True})


def test_a_recipe_that_was_used_stays_as_it_is() -> None:
    recipe = Plain(1)
    recipe.height = 32
    run(layer(), recipe)
    with pytest.raises(FrozenInstanceError, match=r"Plain\.height was changed after the recipe was used"):
        recipe.height = 1
    with pytest.raises(FrozenInstanceError):
        del recipe.height


class Scaled(Recipe):
    """One scale a tensor, which the program sets in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())

    def spec(self, operand: Any, *, columns: bool) -> QuantSpec:
        return QuantSpec(Element.E4M3, None, ScaleForm.FP32)

    def scale_of(self, operand: Any) -> Tensor:
        return self.scale


def test_a_tensor_of_a_recipe_that_changes_in_place() -> None:
    assert Scaled() != Scaled()
    recipe, model = Scaled(), DistributedDataParallel(layer())
    for scale in (1.0, 256.0):
        recipe.scale.fill_(scale)
        with model.no_sync():
            y = run(model, recipe)
            y.sum().backward()
        fresh = Scaled()
        fresh.scale.fill_(scale)
        assert torch.equal(y, run(layer(), fresh))
