"""``DelayedScaling``: what is no part of a completed iteration leaves no amax."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reachable import reachable_tensors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad import ddp, fsdp
from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GradScaler,
)
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import DelayedScaling, LayerNormMLP, Linear, autocast

BF16 = torch.bfloat16
RECIPE = DelayedScaling(amax_history_len=4)
State = dict[str, Tensor]
WRAPPERS = ["ddp", "zero1", "zero2", "zero3", "stock"]


def build(how: str, fused_step: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(0)
    fused = how != "plain"
    module = nn.Sequential(
        LayerNormMLP(16, 24, fuse_wgrad_accumulation=fused, dtype=BF16),
        Linear(16, 16, fuse_wgrad_accumulation=fused, dtype=BF16),
    )
    if how == "plain":
        return module, torch.optim.SGD(module.parameters(), lr=0.01, fused=fused_step)
    if how in ("zero2", "zero3"):
        fully_shard(module[0], placements=how)
        model = fully_shard(module, placements=how)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, fused=fused_step)
    wrapper = DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=how == "zero1"))
    if how == "stock":
        return wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.01, fused=fused_step)
    return wrapper, DistributedOptimizer(wrapper, lr=0.01, optimizer_class=torch.optim.SGD, fused=fused_step)


def loss_of(model: Any, seed: int, size: float = 1.0) -> Tensor:
    own = dist.get_rank() if dist.is_initialized() else 0
    draws = torch.Generator().manual_seed(seed * 2 + own)
    x = torch.randn(4, 16, generator=draws).mul(size * (1 + seed % 3)).to(BF16).requires_grad_()
    with autocast(recipe=RECIPE):
        y: Tensor = model(x)
    loss = y.float().square().mean()
    loss.x = x  # type: ignore[attr-defined]
    return loss


def finish(model: Any) -> None:
    if hasattr(model, "finish_grad_sync"):
        model.finish_grad_sync()
    if hasattr(model, "expose_grads") and not model.ddp_config.use_distributed_optimizer:
        model.expose_grads()


def clear(model: Any, optimizer: Any) -> None:
    if isinstance(model, DistributedDataParallel):
        model.zero_grad_buffer()
    optimizer.zero_grad()


def iterate(model: Any, optimizer: Any, seed: int) -> None:
    loss_of(model, seed).backward()
    finish(model)
    optimizer.step()
    clear(model, optimizer)


def state_of(model: Any) -> State:
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: value.clone() for name, value in module.state_dict().items() if "fp8_" in name}


def look(model: Any, optimizer: Any) -> None:
    """As summaries do."""
    loss_of(model, 9, 100.0)


def look_and_keep(model: Any, optimizer: Any) -> None:
    model.kept = loss_of(model, 9, 100.0)


def gradient_of_the_input(model: Any, optimizer: Any) -> None:
    loss = loss_of(model, 9, 100.0)
    torch.autograd.grad(loss * 100.0, loss.x)  # type: ignore[attr-defined]


def adversarial(model: Any, optimizer: Any) -> None:
    model.requires_grad_(False)
    (loss_of(model, 9, 100.0) * 100.0).backward()
    model.requires_grad_(True)


def microbatch_given_up(model: Any, optimizer: Any) -> None:
    with model.no_sync():
        (loss_of(model, 9, 100.0) * 100.0).backward()
    clear(model, optimizer)


def failed_backward(model: Any, optimizer: Any) -> None:
    loss = loss_of(model, 9, 100.0)

    def fail(grad: Tensor) -> None:
        raise KeyError("a program's own")

    loss.x.register_hook(fail)  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        (loss * 100.0).backward()
    clear(model, optimizer)


def failed_forward(model: Any, optimizer: Any) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("a program's own")

    last = (model.module if isinstance(model, DistributedDataParallel) else model)[1]
    hook = last.register_forward_hook(fail)
    with pytest.raises(KeyError):
        loss_of(model, 9, 100.0)
    hook.remove()


def skipped_by_the_program(model: Any, optimizer: Any) -> None:
    (loss_of(model, 9, 100.0) * 100.0).backward()
    finish(model)
    clear(model, optimizer)


Disturb = Callable[[Any, Any], None]
EVENTS: list[Disturb] = [
    look,
    look_and_keep,
    gradient_of_the_input,
    adversarial,
    microbatch_given_up,
    failed_backward,
    failed_forward,
    skipped_by_the_program,
]


def train(how: str, disturb: Disturb | None) -> State:
    model, optimizer = build(how)
    for seed in range(4):
        iterate(model, optimizer, seed)
        if disturb is not None and seed in (1, 2):
            disturb(model, optimizer)
    return state_of(model)


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys() != set()
    for name, value in expected.items():
        assert torch.equal(found[name], value), (name, found[name], value)


@pytest.mark.in_turn
@pytest.mark.parametrize("how", WRAPPERS)
@pytest.mark.sampled(1)
def test_what_trains_nothing_leaves_no_amax(how: str) -> None:
    expected = simulate(train, 2, how, None)
    for disturb in EVENTS:
        for mine, other in zip(simulate(train, 2, how, disturb), expected, strict=True):
            assert_equal(mine, other)


def skips_its_first_step(how: str, skips: bool) -> State:
    """The norm of the very first gradients is too large: the program clears them before any optimizer has stepped."""
    model, optimizer = build(how)
    if skips:
        (loss_of(model, 9, 100.0) * 100.0).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1.0
        optimizer.zero_grad()
        loss_of(model, 9)  # the state that the next forward finds
    else:
        loss_of(model, 9)
    state = state_of(model)
    return {name: value for name, value in state.items() if name.endswith("scale")}


@pytest.mark.parametrize("how", ["ddp", "zero1", "stock"])
def test_a_program_may_skip_its_first_step(how: str) -> None:
    expected = simulate(skips_its_first_step, 2, how, False)
    for mine, other in zip(simulate(skips_its_first_step, 2, how, True), expected, strict=True):
        assert_equal(mine, other)


def test_gradients_that_are_kept_for_another_iteration_keep_their_amaxes() -> None:
    """Nothing was skipped: the program accumulates over two iterations, and the next forward comes before its step."""

    def on_each_rank() -> None:
        model, optimizer = build("zero3")
        iterate(model, optimizer, 0)
        loss_of(model, 1).backward()
        finish(model)
        before = state_of(model)
        loss_of(model, 2)
        assert_equal(state_of(model), before)

    simulate(on_each_rank, 2)


def goes_on_and_skips(model: Any, optimizer: Any) -> None:
    """A second backward after the first one's gradients were read, as two losses have; and no step."""
    for _ in range(2):
        (loss_of(model, 9, 100.0) * 100.0).backward()
        if isinstance(model, DistributedDataParallel):
            assert next(model.parameters()).grad.norm() > 0  # reduces
    optimizer.zero_grad()


@pytest.mark.parametrize("how", ["zero1", "zero2", "zero3", "stock"])
@pytest.mark.sampled(1)
def test_an_iteration_of_two_ends_that_is_skipped(how: str) -> None:
    expected = simulate(train, 2, how, None)
    for mine, other in zip(simulate(train, 2, how, goes_on_and_skips), expected, strict=True):
        assert_equal(mine, other)


@pytest.mark.parametrize("how", WRAPPERS)
@pytest.mark.sampled(1)
def test_a_state_that_is_loaded_before_a_skipped_step_stays(how: str) -> None:
    """A program goes back to what it has kept, after gradients that it does not want."""

    def load() -> None:
        model, optimizer = build(how)
        for seed in range(2):
            iterate(model, optimizer, seed)
        kept = copy.deepcopy(model.state_dict())
        expected = state_of(model)
        for seed in (2, 3):
            iterate(model, optimizer, seed)
        (loss_of(model, 9, 100.0) * 100.0).backward()
        finish(model)
        model.load_state_dict(kept)
        clear(model, optimizer)
        loss_of(model, 0)
        assert_equal(state_of(model), expected)

    simulate(load, 2)


@pytest.mark.parametrize("how", ["zero1", "zero3"])
def test_a_state_that_is_loaded_between_two_skipped_steps_stays(how: str) -> None:
    """The second one goes back to it, not to what was there before the first."""

    def load() -> None:
        model, optimizer = build(how)
        iterate(model, optimizer, 0)
        kept, expected = copy.deepcopy(model.state_dict()), state_of(model)
        iterate(model, optimizer, 1)
        for loads in (False, True):
            if loads:
                model.load_state_dict(kept)
            (loss_of(model, 9, 100.0) * 100.0).backward()
            finish(model)
            clear(model, optimizer)
            loss_of(model, 0)
        assert_equal(state_of(model), expected)

    simulate(load, 1)


def scaled(how: str, overflows: bool, fused: bool = True) -> State:
    model, optimizer = build(how, fused)
    scaler: Any = (torch.amp.GradScaler if how in ("zero3", "stock") else GradScaler)("cpu", init_scale=8.0)
    for seed in range(4):
        for factor in (torch.inf, 1.0) if overflows and seed in (0, 2) else (1.0,):
            scaler.scale(loss_of(model, seed) * factor).backward()
            finish(model)
            scaler.step(optimizer)
            scaler.update(8.0)
            clear(model, optimizer)
    return state_of(model)


@pytest.mark.in_turn
@pytest.mark.parametrize("how", WRAPPERS)
@pytest.mark.sampled(1)
def test_a_scaler_that_skips_a_step_skips_its_amaxes(how: str) -> None:
    for fused in (True, False):
        expected = simulate(scaled, 2, how, False, fused)
        for mine, other in zip(simulate(scaled, 2, how, True, fused), expected, strict=True):
            assert_equal(mine, other)


@pytest.mark.parametrize("how", ["zero1", "zero3"])
def test_a_scaler_that_takes_its_steps_keeps_their_amaxes(how: str) -> None:
    """Whether the device decides on the step, or the host: the same but for roundings of the weights."""
    on_device, on_host = (simulate(scaled, 2, how, False, fused)[0] for fused in (True, False))
    for name, value in on_host.items():
        torch.testing.assert_close(on_device[name], value, rtol=0.05, atol=0.0, msg=name)
    assert all(value[-1].gt(0).all() for name, value in on_device.items() if name.endswith("history"))


def test_without_a_wrapper() -> None:
    expected = train("plain", None)
    for disturb in (
        look,
        gradient_of_the_input,
        adversarial,
        failed_backward,
        failed_forward,
    ):
        assert_equal(train("plain", disturb), expected)


def assert_scaled(found: State, scaled: bool) -> None:
    assert all(torch.any(value != 1.0) == scaled for name, value in found.items() if name.endswith("scale"))


def test_without_a_wrapper_each_backward_counts() -> None:
    """What steps, or whether anything does, tells nobody: optimizers over copies, foreign wrappers, updates by hand."""
    for clears in (False, True):
        model, _ = build("plain")
        loss = loss_of(model, 0)  # a program that keeps it keeps its graph
        loss.backward()
        if clears:
            model.zero_grad()
        loss_of(model, 1)
        assert_scaled(state_of(model), True)


# ---- What counts, though it looks alike. ----


class Adapted(nn.Module):
    """Frozen layers around trained ones: the first has no graph, the second a graph and no gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (Linear(16, 16, dtype=BF16).requires_grad_(False) for _ in range(2))
        self.adapter = nn.Linear(16, 16, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.detach())
        y: Tensor = self.second(x + self.adapter(x))
        return y


def train_adapted(how: str, looks: bool) -> State:
    module = Adapted()
    model: Any = fully_shard(module) if how == "zero3" else DistributedDataParallel(module)
    for seed in range(3):
        if looks and seed:
            loss_of(model, 9, 100.0)
        loss_of(model, seed).backward()
        model.finish_grad_sync()
        model.zero_grad()
    return state_of(model)


@pytest.mark.parametrize("how", ["ddp", "zero3"])
@pytest.mark.sampled(1)
def test_frozen_layers_of_a_model_that_trains(how: str) -> None:
    expected = simulate(train_adapted, 2, how, False)[0]
    assert not torch.any(expected["first.fp8_scale"][:2] == 1.0), "no backward reaches it"
    assert not torch.any(expected["second.fp8_scale"] == 1.0)
    assert expected["first.fp8_amax_history"][-1, 2] == 0.0
    assert_equal(simulate(train_adapted, 2, how, True)[0], expected)


@pytest.mark.parametrize("how", ["ddp", "zero3"])
def test_each_backward_of_a_forward_has_its_gradient(how: str) -> None:
    """One that only asks for the input's gradient leaves nothing of its own."""

    def run(model: Any, penalty: bool) -> State:
        for seed in range(2):
            loss = loss_of(model, seed)
            if penalty:
                torch.autograd.grad(loss * 1000.0, loss.x, retain_graph=True)  # type: ignore[attr-defined]
            loss.backward()
            model.finish_grad_sync()
            model.zero_grad()
        return state_of(model)

    assert_equal(run(build(how)[0], True), run(build(how)[0], False))


@pytest.mark.parametrize("how", ["ddp", "zero3"])
def test_a_reentrant_checkpoint_counts(how: str) -> None:
    def run(reentrant: bool) -> State:
        model, _ = build(how)

        def block(x: Tensor) -> Tensor:
            with autocast(recipe=RECIPE):
                y: Tensor = model(x)
            return y

        for seed in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(BF16).requires_grad_()
            y = checkpoint(block, x, use_reentrant=True) if reentrant else block(x)
            y.float().square().mean().backward()
            model.finish_grad_sync()
            model.zero_grad()
        return state_of(model)

    assert_equal(run(True), run(False))


def test_a_frozen_block_in_a_reentrant_checkpoint_counts() -> None:
    """Its own backward, inside the model's, brings no gradient of a parameter."""

    def run(reentrant: bool) -> State:
        torch.manual_seed(0)
        first, frozen = nn.Linear(16, 16, dtype=BF16), Linear(16, 16, dtype=BF16).requires_grad_(False)
        model = DistributedDataParallel(nn.Sequential(first, Checkpointed(frozen, reentrant)))
        for seed in range(3):
            loss_of(model, seed).backward()
            model.finish_grad_sync()
            model.zero_grad()
        return state_of(model)

    found = run(True)
    assert_equal(found, run(False))
    assert all(value.ne(1.0).all() for name, value in found.items() if name.endswith("scale"))


class Checkpointed(nn.Module):
    """Backward runs ``inner`` again."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self._run, x, use_reentrant=self.reentrant)
        return y

    def _run(self, x: Tensor) -> Tensor:
        with autocast(recipe=RECIPE):
            y: Tensor = self.inner(x)
        return y


def test_frozen_layers_alone_count_where_the_rest_of_the_model_is_trained() -> None:
    """No product under the recipe has a graph. A forward without a backward is no iteration's."""
    torch.manual_seed(0)
    frozen, head = Linear(16, 16, dtype=BF16).requires_grad_(False), nn.Linear(16, 4, dtype=BF16)
    model = DistributedDataParallel(nn.Sequential(frozen, head))

    def look(seed: int) -> Tensor:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(BF16)
        with autocast(recipe=RECIPE):
            y: Tensor = model(x)
        return y.float().square().mean()

    for trains in (False, True):
        before = state_of(model)
        loss = look(0)
        if trains:
            loss.backward()
        model.finish_grad_sync()
        model.zero_grad()
        look(1)
        scales = [value[:2] for name, value in state_of(model).items() if name.endswith("scale")]
        assert all(value.ne(1.0).all() if trains else value.eq(1.0).all() for value in scales), (trains, before)


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def test_a_forward_of_a_frozen_layer_goes_with_its_iteration() -> None:
    """The iteration ends without a backward: the next one has other forwards."""

    def run(looks: bool) -> State:
        torch.manual_seed(0)
        frozen, head = Linear(16, 16, dtype=BF16).requires_grad_(False), nn.Linear(16, 4, dtype=BF16)
        model = DistributedDataParallel(nn.Sequential(Detached(), frozen, head))
        if looks:
            loss_of(model, 9, 100.0)
            model.finish_grad_sync()
            model.zero_grad()
        loss_of(model, 1).backward()
        model.finish_grad_sync()
        model.zero_grad()
        return state_of(model)

    assert_equal(run(True), run(False))


def graphed(how: str, overflows: bool, captured: bool) -> State:
    model, optimizer = build(how, True)
    scaler: Any = (torch.amp.GradScaler if how == "zero3" else GradScaler)("cpu", init_scale=8.0, growth_interval=1000)

    def step(x: Tensor, factor: Tensor) -> None:
        with autocast(recipe=RECIPE):
            y = model(x)
        scaler.scale(y.float().square().mean() * factor).backward()
        finish(model)
        scaler.step(optimizer)
        scaler.update(8.0)
        clear(model, optimizer)

    graphs: Any = {"zero3": fsdp.GraphedTrainingStep}.get(how, ddp.GraphedTrainingStep)
    run = graphs(step, model, optimizer, num_warmup_steps=1) if captured else step
    for seed in range(5):
        for factor in (torch.inf, 1.0) if overflows and seed in (0, 3) else (1.0,):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(BF16)
            run(x, torch.tensor(factor))
    assert not captured or run.num_graphs == 1
    return state_of(model)


@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["zero1", "zero3"])
@pytest.mark.sampled(1)
def test_a_graphed_step_that_is_skipped(how: str) -> None:
    expected = graphed(how, overflows=False, captured=False)
    for captured in (True, False):
        assert_equal(graphed(how, overflows=True, captured=captured), expected)


def test_forwards_whose_graphs_are_dropped_leave_nothing_behind() -> None:
    """A program that scores with gradients enabled, before the iteration's backward, or without one for long."""
    model = DistributedDataParallel(Linear(16, 16, dtype=BF16, fuse_wgrad_accumulation=True))

    def score(times: int) -> int:
        with autocast(recipe=RECIPE):
            for _ in range(times):
                model(torch.ones(2, 16, dtype=BF16))
        return len(reachable_tensors(model))

    after_few = score(1)
    assert score(300) - after_few <= 64, "amaxes of forwards that no backward can follow"
