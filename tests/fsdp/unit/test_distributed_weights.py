"""``fully_shard(..., distributed_weights=True)``: modules that ask for their weights, as Transformer Engine's do.

The modules are the stand-ins of ``tests/support/distributed_weights.py``. Training is equal to the bit to that of whole
units of the same modules.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_weights import AskingGrouped, AskingLinear, AskingMLP, DistributedWeight, Operations
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.fsdp import MixedPrecisionPolicy, fully_shard
from maingrad.fsdp.module import root_of
from maingrad.fsdp.unit.unit import Unit
from maingrad.fsdp.unit.weight_unit import WeightUnit
from maingrad.launch import simulate

WIDTH = 8
STEPS = 3


class Block(nn.Module):
    """Every kind of asking module, around a residual."""

    def __init__(self, *, fuse: bool = True, recompute: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = AskingLinear(WIDTH, WIDTH, fuse=fuse)
        self.experts = AskingGrouped(3, WIDTH, fuse=fuse)
        self.operation = AskingGrouped(2, WIDTH, fuse=fuse, operation=True)
        self.mlp = AskingMLP(WIDTH, fuse=fuse)
        self.recompute = recompute
        """Reentrant or not; None: no recompute."""

    def inside(self, x: Tensor) -> Tensor:
        return self.mlp(self.operation(self.experts(self.linear(self.norm(x)).tanh()).tanh()))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return x + self.inside(x)
        return x + checkpoint(self.inside, x, use_reentrant=self.recompute)


class Twice(nn.Module):
    """One asking layer, used twice in a forward."""

    def __init__(self, *, fuse: bool = True) -> None:
        super().__init__()
        self.linear = AskingLinear(WIDTH, WIDTH, bias=False, fuse=fuse)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.linear(x).tanh())


class OfTheProgram(AskingLinear):
    """Its base class asks, in another file."""


class Half(nn.Module):
    """Asking layers of which the middle one is frozen, and the last one is computed in vain."""

    def __init__(self, *, fuse: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OfTheProgram(WIDTH, WIDTH, fuse=fuse) for _ in range(4)])
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[2](self.layers[1](self.layers[0](x).tanh()).tanh())
        self.layers[3](x)
        return x


class Contained(Operations):
    """Operations that run without a call of their own."""

    def __init__(self, *, fuse: bool = True) -> None:
        super().__init__(*(AskingGrouped(2, WIDTH, fuse=fuse, operation=True) for _ in range(2)))


class FrozenAndRecomputed(Block):
    """A recomputed block of which three weights are frozen."""

    def __init__(self, *, fuse: bool = True) -> None:
        super().__init__(fuse=fuse, recompute=True)
        for weight in (self.linear.weight, self.mlp.fc1_weight, self.mlp.fc2_weight):
            weight.requires_grad_(False)


KINDS: dict[str, Callable[..., nn.Module]] = {
    "blocks": Block,
    "recomputed": functools.partial(Block, recompute=True),
    "used twice": Twice,
    "operations": Contained,
    "half frozen": Half,
    "frozen and recomputed": FrozenAndRecomputed,
}


def make(kind: str, *, asked: bool, fuse: bool = True, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(KINDS[kind](fuse=fuse), KINDS[kind](fuse=fuse), nn.Linear(WIDTH, 4)).to(dtype)
    if options.get("placements") == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    for module in model[:2]:
        fully_shard(module, distributed_weights=asked, **options)
    return fully_shard(model, distributed_weights=asked, **options)


def batch(step: int, microbatch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    seed = 1000 * step + 10 * microbatch + dist.get_rank()
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one_iteration(model: Any, step: int, microbatches: int, dtype: torch.dtype = torch.float32) -> None:
    for index in range(microbatches):
        with model.no_sync() if index < microbatches - 1 else nullcontext():
            (model(batch(step, index, dtype).requires_grad_()).float().square().mean() / microbatches).backward()


def grads_of(model: Any) -> dict[str, Tensor]:
    return {
        name: param.grad.full_tensor().clone() for name, param in model.named_parameters() if param.grad is not None
    }


def weights_of(model: Any) -> dict[str, Tensor]:
    with model.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def train_both(kind: str, dtype: torch.dtype, microbatches: int, fuse: bool, options: dict[str, Any]) -> None:
    """Runs on each rank. Whole units are of modules that fuse, so that both sum in fp32."""
    options = {"mixed_precision": MixedPrecisionPolicy(grad_dtype=torch.float32), **options}
    models = [make(kind, asked=asked, fuse=fuse or not asked, dtype=dtype, **options) for asked in (False, True)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    before = weights_of(models[1])
    for step in range(STEPS):
        norms = []
        for model in models:
            one_iteration(model, step, microbatches, dtype)
        assert_alike(grads_of(models[1]), grads_of(models[0]))
        for model, optimizer in zip(models, optimizers, strict=True):
            # The largest element has one value, however shards are cut; the sum of squares has not.
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=torch.inf))
            optimizer.step()
            optimizer.zero_grad()
        assert norms[0] == norms[1] > 0.01
    after = weights_of(models[1])
    assert_alike(after, weights_of(models[0]))
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert any(isinstance(unit, WeightUnit) for unit in models[1].units)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_clipped_steps_are_those_of_whole_units(
    kind: str, fuse: bool, dtype: torch.dtype, microbatches: int, ranks: int
) -> None:
    simulate(train_both, ranks, kind, dtype, microbatches, fuse, {})


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"placements": "zero1"},
        {"placements": "zero2"},
        {"placements": "hsdp"},
        {"reduce_every_microbatch": False},
        {"reshard_after_forward": False},
        {"bucket_size": 100},
        {"shard_atoms": {"*weight*": "row"}},
    ],
    ids=str,
)
@pytest.mark.in_turn
def test_under_each_option(options: dict[str, Any], microbatches: int) -> None:
    simulate(train_both, 4, "blocks", torch.float32, microbatches, True, options)


# ---- When weights are in memory, and when they are reduced. ----


def gathered(model: Any) -> set[str]:
    return {unit.label for unit in root_of(model).units if unit.gathered and isinstance(unit, WeightUnit)}


def look_at_memory(kind: str, groups: int) -> None:
    """Runs on each rank: at most the weight that is used and one ahead of use are whole, once an order is known."""
    model = make(kind, asked=True)
    seen: list[set[str]] = []
    behind: list[set[str]] = []  # when backward has passed a module
    for module in model.modules():
        if isinstance(module, AskingLinear | AskingGrouped | AskingMLP):
            module.register_forward_hook(lambda *_: seen.append(gathered(model)), prepend=True)
            module.register_full_backward_hook(lambda *_: behind.append(gathered(model)))
    for step in range(2):
        seen.clear()
        behind.clear()
        one_iteration(model, step, 1)
        model.zero_grad()
        assert not any(root_of(model).weights._asked.values())  # recomputes of frozen weights too
    labels = set().union(*seen, *behind)
    assert len(labels) == 2 * groups
    assert max(map(len, seen + behind)) <= 3  # the two of one module, and the next
    assert max(map(len, seen[8:]), default=0) <= 2  # in a recompute too: what backward has used is freed
    if kind == "blocks":
        assert all(behind[:-1])  # what comes next is under way
    assert not gathered(model)
    with torch.no_grad(), model.record_timeline() as timeline:
        model(batch(0, 0))
    assert not gathered(model)
    num_buckets = sum(len(unit.buckets) for unit in root_of(model).units)
    assert len(timeline.gathers) == num_buckets, "none comes twice: what is ahead of use stays until then"


@pytest.mark.parametrize(
    ("kind", "groups"),
    [("blocks", 5), ("recomputed", 5), ("frozen and recomputed", 5)],  # of 8 weights of a block
)
def test_a_weight_is_whole_for_its_module_alone(kind: str, groups: int) -> None:
    simulate(look_at_memory, 2, kind, groups)


def test_a_frozen_weight_is_gathered_once_for_uses_that_follow_each_other() -> None:
    def gathers() -> int:
        model: Any = nn.Sequential(Twice(), nn.Linear(WIDTH, 4))
        model[0].linear.requires_grad_(False)
        fully_shard(model, distributed_weights=True)
        one_iteration(model, 0, 1)  # it learns which unit comes last
        with model.record_timeline() as timeline:
            one_iteration(model, 1, 1)
        return len(timeline.gathers)

    assert simulate(gathers, 2) == [3, 3], "the outermost unit's, and the weight's in forward and in backward"


def look_behind_operations() -> None:
    """Runs on each rank: what the second container finds whole. The first one has run its operations by itself."""
    model = make("operations", asked=True)
    found: list[set[str]] = []
    model[1].register_forward_pre_hook(lambda *_: found.append(gathered(model)))
    for step in range(2):
        one_iteration(model, step, 1)
        model.zero_grad()
    assert not any(label.startswith("weight '0.") for labels in found for label in labels), found


def test_weights_of_operations_in_a_container_are_freed_when_it_has_run() -> None:
    simulate(look_behind_operations, 2)


def look_between(reshard: bool | None) -> int:
    """Runs on each rank: how many groups are whole between forward and backward of an outermost unit."""
    torch.manual_seed(0)
    model: Any = fully_shard(Block(), distributed_weights=True, reshard_after_forward=reshard)
    for step in range(2):
        model.zero_grad()
        loss = model(batch(step, 0)).square().mean()
        found = len(gathered(model))
        loss.backward()
    return found


@pytest.mark.parametrize(("reshard", "count"), [(None, 1), (True, 1), (False, 5)])
def test_weights_of_the_outermost_unit_are_freed_too_unless_it_says_otherwise(reshard: bool | None, count: int) -> None:
    """Backward begins with the last one."""
    assert simulate(look_between, 2, reshard) == [count] * 2


def look_at_reductions() -> None:
    """Runs on each rank: when backward has passed a module, the reduction of its weights is launched."""
    model = make("blocks", asked=True)
    one_iteration(model, 0, 1)
    model.zero_grad()
    launched: list[bool] = []
    linear = model[1].linear
    (unit,) = [each for each in model[1]._maingrad_unit.weights if each.pairs[0].name == "linear.weight"]
    model[1].norm.register_forward_hook(
        lambda _, __, out: out.register_hook(lambda __: launched.append(unit.buckets[0].is_launched)) and None
    )
    assert linear.weight is unit.pairs[0].sharded
    one_iteration(model, 1, 1)
    assert launched == [True]


def test_reduction_starts_when_the_gradient_is_handed_over() -> None:
    simulate(look_at_reductions, 2)


# ---- The protocol. ----


def look_at_weights() -> None:
    model = make(
        "blocks", asked=True, dtype=torch.bfloat16, mixed_precision=MixedPrecisionPolicy(grad_dtype=torch.float32)
    )
    seen: list[nn.Parameter] = []
    model[0].linear.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    model[0].experts.register_forward_pre_hook(lambda module, _: seen.append(module.weight1))
    one_iteration(model, 0, 1, torch.bfloat16)
    assert not isinstance(model[0].linear.weight, DistributedWeight)  # the optimizer's: a shard
    assert not hasattr(model[0].linear.bias, "is_distributed_weight")
    for weight in seen:
        assert isinstance(weight, DistributedWeight)
        assert weight.main_grad.dtype is torch.float32
        assert not hasattr(weight, "__fsdp_param__")


def test_weights_speak_the_protocol() -> None:
    simulate(look_at_weights, 2)


def go_through() -> None:
    """``autograd.grad`` of an input, through modules that hand over gradients all the same."""
    model = make("blocks", asked=True)
    one_iteration(model, 0, 1)
    wanted = grads_of(model)
    model.zero_grad()
    x = batch(5, 0).requires_grad_()
    (found,) = torch.autograd.grad(model(x).sum(), x)
    assert found.abs().sum() > 0
    assert all(param.grad is None for param in model.parameters())
    one_iteration(model, 0, 1)
    assert_alike(grads_of(model), wanted)


def test_going_through_the_model_writes_nothing() -> None:
    simulate(go_through, 2)


def ask_for_one_expert(fuse: bool) -> None:
    """``backward(inputs=...)`` of one whole weight of a group: the others of the group get nothing."""
    found = []
    for asked in (False, True):
        model = make("blocks", asked=asked, fuse=fuse and asked)
        wholes: list[Tensor] = []
        model[1].experts.register_forward_pre_hook(lambda module, _, wholes=wholes: wholes.append(module.weight1))
        model(batch(0, 0).requires_grad_()).square().mean().backward(inputs=wholes)
        found.append(grads_of(model))
    assert [name for name, grad in found[0].items() if grad.any()] == ["1.experts.weight1"]
    assert_alike(found[1], found[0])


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.sampled(1)
def test_a_backward_for_one_weight_of_a_group_trains_that_one(fuse: bool) -> None:
    simulate(ask_for_one_expert, 2, fuse)


def several_forwards() -> None:
    """Two forwards before their backwards, in both orders, and an evaluation between them."""
    found = []
    for asked in (False, True):
        for order in (0, 1), (1, 0):
            model = make("blocks", asked=asked)
            losses = []
            with model.no_sync():
                losses.append(model(batch(0, 0)).square().mean())
                with torch.no_grad():
                    model(batch(0, 7))
                losses.append(model(batch(0, 1)).square().mean())
                losses[order[0]].backward()
            losses[order[1]].backward()
            found.append(grads_of(model))
    for mine, whole in zip(found[2:], found[:2], strict=True):
        assert_alike(mine, whole)


def test_forwards_may_wait_for_their_backwards() -> None:
    simulate(several_forwards, 2)


def one_backward(kind: str) -> None:
    """A backward through two outermost forwards, under ``no_sync`` and outside."""
    found = []
    for asked in (False, True):
        model = make(kind, asked=asked)
        for final in (False, True):
            with nullcontext() if final else model.no_sync():
                sum(model(batch(int(final), index)).square().mean() for index in range(2)).backward()
        found.append(grads_of(model))
        assert not gathered(model)
    torch.testing.assert_close(found[1], found[0])  # a weight's sum over ranks comes after each forward, not once


@pytest.mark.parametrize("kind", ["blocks", "used twice"])
def test_one_backward_may_go_through_several_forwards(kind: str) -> None:
    simulate(one_backward, 2, kind)


def freeze_all(kind: str) -> None:
    """A backward through the frozen model, between iterations, as a discriminator's."""
    found = []
    for asked in (False, True):
        model = make(kind, asked=asked)
        one_iteration(model, 0, 1)
        model.zero_grad()
        model.requires_grad_(False)
        x = batch(0, 0).requires_grad_()
        model(x).square().mean().backward()
        assert all(param.grad is None for param in model.parameters())
        model.requires_grad_(True)
        one_iteration(model, 1, 2)
        assert x.grad is not None
        found.append({**grads_of(model), "x": x.grad})
    assert_alike(found[1], found[0])


@pytest.mark.parametrize("kind", ["blocks", "recomputed"])
def test_a_frozen_model_lets_gradients_through(kind: str) -> None:
    simulate(freeze_all, 2, kind)


def freeze_an_expert() -> None:
    """The module hands over a gradient of each expert, of the frozen one too."""
    found = []
    for asked in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(AskingGrouped(3, WIDTH, fuse=False), nn.Linear(WIDTH, 4))
        model[0].weight1.requires_grad_(False)
        fully_shard(model, distributed_weights=asked)
        one_iteration(model, 0, 2)
        found.append(grads_of(model))
    assert found[0].keys() == {"0.weight0", "0.weight2", "1.weight", "1.bias"}
    assert_alike(found[1], found[0])


def test_one_weight_of_a_group_may_be_frozen() -> None:
    simulate(freeze_an_expert, 2)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("stop here")


def fail_once() -> None:
    model, reference = (make("blocks", asked=True) for _ in range(2))
    one_iteration(reference, 0, 1)
    handle = model[1].linear.register_forward_pre_hook(lambda _, args: Failing.apply(args[0]))
    with pytest.raises(ValueError, match="stop here"):
        one_iteration(model, 0, 1)
    handle.remove()
    model.zero_grad()
    one_iteration(model, 0, 1)
    assert_alike(grads_of(model), grads_of(reference))


def test_a_backward_that_fails_leaves_nothing() -> None:
    simulate(fail_once, 2)


# ---- Checkpoints. ----


def save(path: Path) -> list[float]:
    model = make("blocks", asked=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    one_iteration(model, 0, 3)
    optimizer.step()
    optimizer.zero_grad()
    save_checkpoint(path, model, optimizer)
    return go_on(model, optimizer)


def load(path: Path, asked: bool) -> list[float]:
    model = make("blocks", asked=asked)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    load_checkpoint(path, model, optimizer)
    return go_on(model, optimizer)


def go_on(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """The weights after another step, as a list that leaves the rank."""
    torch.manual_seed(0)
    for param in model.parameters():
        param.grad = torch.ones_like(param.detach()) * 0.1
    optimizer.step()
    return [value for weight in weights_of(model).values() for value in weight.flatten().tolist()]


@pytest.mark.in_turn
def test_checkpoints_move_between_weights_and_whole_units(tmp_path: Path) -> None:
    wanted = simulate(save, 2, tmp_path / "step")[0]
    for asked, ranks in ((True, 4), (False, 2), (False, 4)):
        assert simulate(load, ranks, tmp_path / "step", asked)[0] == wanted


def write_back() -> None:
    model = make("blocks", asked=True)
    with model.unsharded(writeback=True), torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
    assert all(torch.equal(value, torch.full_like(value, 0.25)) for value in weights_of(model).values())
    whole = make("blocks", asked=False)
    whole.load_state_dict(model.state_dict())
    assert_alike(weights_of(whole), weights_of(model))


def test_unsharded_reads_and_writes_them() -> None:
    simulate(write_back, 2)


# ---- Refused by name. ----


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = AskingLinear(WIDTH, WIDTH), AskingLinear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def refused() -> Iterator[None]:
    with pytest.raises(ValueError, match=r"'first\.weight' is registered by several modules"):
        fully_shard(Tied(), distributed_weights=True)
    with pytest.raises(ValueError, match=r"'0\.weight' is of a module that delays"):
        fully_shard(nn.Sequential(AskingLinear(WIDTH, WIDTH, delay=True)), distributed_weights=True)


def test_ties_and_delays_are_refused_by_name() -> None:
    simulate(refused, 2)


def pack() -> None:
    model = fully_shard(Block(recompute=False), distributed_weights=True)
    with pytest.raises(RuntimeError, match=r"weight 'linear\.weight' is asked for under hooks on saved tensors"):
        model(batch(0, 0).requires_grad_())
    with pytest.raises(RuntimeError, match="use_reentrant=True"), torch.autograd.graph.save_on_cpu():
        model(batch(0, 0))
    with torch.no_grad():
        model(batch(0, 0))
    frozen = fully_shard(AskingLinear(WIDTH, WIDTH, bias=False).requires_grad_(False), distributed_weights=True)
    x = batch(0, 0).requires_grad_()
    with torch.autograd.graph.save_on_cpu():  # what comes back has the values
        frozen(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0], weights_of(frozen)["weight"].sum(0))


def test_saved_tensors_that_come_back_as_others_are_refused() -> None:
    """Autograd detaches a saved leaf before it packs it: what comes back has none of the protocol's attributes."""
    simulate(pack, 2)


class Plain(nn.Module):
    """Uses the weight of an asking module beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = AskingLinear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + nn.functional.linear(x, self.linear.weight)


class Alone(nn.Module):
    """Uses the weight of an operation in one forward, and runs the operation in others."""

    def __init__(self) -> None:
        super().__init__()
        self.operation = AskingGrouped(1, WIDTH, operation=True)
        self.plainly = False

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.operation.weight0) if self.plainly else self.operation(x)


def use_plainly(make_model: Callable[[], Any], kept: bool) -> None:
    model = fully_shard(make_model(), distributed_weights=True, reshard_after_forward=False if kept else None)

    def train() -> None:
        for model.plainly in (False, True):
            model(batch(0, 0).requires_grad_()).sum().backward()

    with pytest.raises(RuntimeError, match=r"storage of size 0|received a gradient from autograd"):
        train()


@pytest.mark.parametrize("make_model", [Plain, Alone])
@pytest.mark.parametrize("kept", [True, False])
def test_another_use_of_the_weight_is_refused(make_model: Callable[[], Any], kept: bool) -> None:
    simulate(use_plainly, 2, make_model, kept)


def ask_for_many() -> None:
    model = fully_shard(AskingGrouped(11, WIDTH), distributed_weights=True)
    x = torch.cat([batch(0, 0), batch(0, 1)]).requires_grad_()
    (model(x) ** 2).mean().backward()
    assert [len(unit.pairs) for unit in model.units if isinstance(unit, WeightUnit)] == [11]


def test_more_than_ten_weights_are_one_group() -> None:
    simulate(ask_for_many, 2)


def step_too_early() -> None:
    model = make("used twice", asked=True)
    weight = model[0].linear.weight
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with model.no_sync():
        model(batch(0, 0)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"SGD.step\(\): gradients of '0.linear.weight' are not reduced yet"):
        optimizer.step()


def test_a_step_before_the_last_microbatch_is_refused() -> None:
    simulate(step_too_early, 2)


def ignore() -> None:
    """Modules that do not ask are gathered with their unit."""
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)), distributed_weights=True)
    model(batch(0, 0)).sum().backward()
    assert [type(unit) for unit in model.units] == [Unit]


def test_modules_that_do_not_ask_are_gathered_with_their_unit() -> None:
    simulate(ignore, 2)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_module_whose_input_needs_no_gradient_asks_for_no_weight_in_backward(fuse: bool, microbatches: int) -> None:
    """Its gradient is handed over all the same, and reduced."""

    def on_each_rank() -> None:
        models = []
        for asked in (False, True):
            torch.manual_seed(0)
            layers = [AskingLinear(WIDTH, WIDTH, bias=False, fuse=fuse or not asked) for _ in range(2)]
            models.append(fully_shard(nn.Sequential(*layers, nn.Linear(WIDTH, 4)), distributed_weights=asked))
        for step in range(2):
            for model in models:
                model.zero_grad()
                for index in range(microbatches):
                    with model.no_sync() if index < microbatches - 1 else nullcontext():
                        model(batch(step, index)).square().mean().backward()
            assert_alike(grads_of(models[1]), grads_of(models[0]))

    simulate(on_each_rank, 2)


def test_weights_that_stay_until_backward_are_gathered_once_an_iteration() -> None:
    """Frozen ones are freed when backward asks for others, and not in the forward that follows."""

    def gathers() -> list[int]:
        model = make("half frozen", asked=True, reshard_after_forward=False)
        counts = []
        for step in range(3):
            with model.record_timeline() as timeline:
                one_iteration(model, step, 1)
            counts.append(len(timeline.gathers))
            model.zero_grad()
        num_buckets = sum(len(unit.buckets) for unit in root_of(model).units)
        return [count - num_buckets for count in counts]

    assert simulate(gathers, 2) == [[0, 0, 0]] * 2
