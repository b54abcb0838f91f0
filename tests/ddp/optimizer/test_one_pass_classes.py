"""SGD and Lion under ``DistributedOptimizer``, in each form of state; ``maingrad.ddp.Lion`` alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GradScaler,
    Lion,
    add_grad,
)
from maingrad.ddp.optimizer import state_forms
from maingrad.ddp.optimizer.param_groups import IN_ONE_PASS
from maingrad.ddp.optimizer.steps import _RULES, TorchSteps

SGD: dict[str, Any] = {"optimizer_class": torch.optim.SGD, "lr": 0.05, "weight_decay": 0.1}
CLASSES: dict[str, dict[str, Any]] = {
    "sgd": SGD,
    "momentum": {**SGD, "momentum": 0.9},
    "dampened": {**SGD, "momentum": 0.9, "dampening": 0.3, "maximize": False},
    "nesterov": {**SGD, "momentum": 0.9, "nesterov": True},
    "lion": {"optimizer_class": Lion, "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1},
}
COMPACT: dict[str, Any] = {"state": "compact", "moment_dtype": torch.float32}
FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "compact": COMPACT,
    "on the host": {"offload_state": "host"},
    "compact, on the host": {**COMPACT, "offload_state": "host"},
}


def wrapped(dtype: torch.dtype = torch.bfloat16) -> DistributedDataParallel:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 33)).to(dtype)
    return DistributedDataParallel(
        module, DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=1000)
    )


def plain_step(options: dict[str, Any], param: Tensor, buffer: Tensor | None, grad: Tensor) -> Tensor | None:
    """One step in fp64, in place of ``param``. Returns the new moment."""
    lr, decay = options["lr"], options["weight_decay"]
    if options["optimizer_class"] is Lion:
        beta1, beta2 = options["betas"]
        buffer = torch.zeros_like(param) if buffer is None else buffer
        sign = (beta1 * buffer + (1 - beta1) * grad).sign()
        param -= lr * decay * param + lr * sign
        return beta2 * buffer + (1 - beta2) * grad
    grad = grad + decay * param
    momentum = options.get("momentum", 0.0)
    if momentum:
        buffer = grad if buffer is None else momentum * buffer + (1 - options.get("dampening", 0.0)) * grad
        grad = grad + momentum * buffer if options.get("nesterov") else buffer
    param -= lr * grad
    return buffer


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.sampled(20)
def test_steps_are_those_of_the_definition(kind: str, form: str) -> None:
    model = wrapped()
    optimizer = DistributedOptimizer(model, **CLASSES[kind], **FORMS[form])
    masters = {name: p.detach().double() for name, p in model.module.named_parameters()}
    buffers: dict[str, Tensor | None] = dict.fromkeys(masters)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        skipped = step in (0, 3)  # the first one too: momentum then begins in the second
        for name, param in model.module.named_parameters():
            grad = torch.randn(param.shape, generator=generator)
            add_grad(param, grad)
            if not skipped:
                buffers[name] = plain_step(CLASSES[kind], masters[name], buffers[name], grad.double() / 4)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(float(skipped))  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        optimizer.zero_grad()
    for held in optimizer.full_slices():
        name = held.name.removeprefix("module.")
        torch.testing.assert_close(held.master.double(), masters[name].flatten(), rtol=1e-5, atol=1e-6)
        for moment in held.state().values():
            torch.testing.assert_close(moment.double(), buffers[name].flatten(), rtol=1e-5, atol=1e-6)
        assert len(held.state()) == (0 if kind == "sgd" else 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_reads_each_option_of_each_group(cls: type[torch.optim.Optimizer], form: str) -> None:
    first = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.2}
    last: dict[str, Any] = {"lr": 0.03, "betas": (0.7, 0.95), "eps": 0.3, "weight_decay": 0.1}
    groups = [{"params": "2.*", **last}]
    options = {"optimizer_class": cls, "param_groups": groups, **first, **FORMS[form]}
    module, plain = (wrapped(torch.float32).unwrap() for _ in range(2))
    optimizer: Any = DistributedOptimizer(DistributedDataParallel(module), **options)
    stock = cls([{"params": plain[0].parameters()}, {"params": plain[2].parameters(), **last}], **first)  # type: ignore[call-arg, index, operator, union-attr]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for param, other in zip(module.parameters(), plain.parameters(), strict=True):
            other.grad = torch.randn(param.shape, generator=generator)
            add_grad(param, other.grad)
        for stepped in (optimizer, stock):
            stepped.step()
            stepped.zero_grad()
        for param, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.detach(), other.detach(), rtol=1e-5, atol=1e-6)


def test_options_that_a_program_changes_between_steps() -> None:
    """Another direction; and momentum that begins late, whose first step is not dampened."""
    options = {**SGD, "weight_decay": 0.0, "dampening": 0.5}
    optimizer = DistributedOptimizer(wrapped(torch.float32), **options, **COMPACT)
    weight = optimizer.model.module[0].weight
    moves = []
    for changes in ({}, {"maximize": True}, {"maximize": False, "momentum": 0.5}, {}):
        for group in optimizer.param_groups:
            group.update(changes)
        before = weight.detach().clone()
        add_grad(weight, torch.ones_like(weight))
        optimizer.step()
        optimizer.zero_grad()
        moves.append((weight - before).mean().item() / options["lr"])
    assert moves == pytest.approx([-1.0, 1.0, -1.0, -1.0], rel=1e-4)


def test_lion_passes_over_parameters_without_a_gradient() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = Lion(params, lr=0.5)
    params[0].grad = params[2].grad = torch.ones(2)
    optimizer.step()
    assert [param[0].item() for param in params] == [0.5, 1.0, 0.5]


def test_equal_parameters_are_rounded_by_draws_of_their_own() -> None:
    model = DistributedDataParallel(nn.ParameterList([torch.zeros(512, dtype=torch.bfloat16) for _ in range(2)]))
    optimizer = DistributedOptimizer(model, **CLASSES["momentum"], state="compact")
    for _ in range(2):
        for param in model.parameters():
            add_grad(param, torch.linspace(1.0, 1.1, 512))
        optimizer.step()
        optimizer.zero_grad()
    first, second = ({**held.state()} for held in optimizer.slices)
    assert not torch.equal(first["momentum_buffer"], second["momentum_buffer"])


def test_momentum_of_a_checkpoint_without_steps_is_not_the_first() -> None:
    """torch's SGD counts no steps, and dampening spares the first step alone."""
    one = DistributedOptimizer(wrapped(), **CLASSES["dampened"])
    other = DistributedOptimizer(wrapped(), **CLASSES["dampened"], **COMPACT)
    generator = torch.Generator().manual_seed(1)
    grads = [[torch.randn(p.shape, generator=generator) for p in one.model.module.parameters()] for _ in range(4)]

    def step(optimizer: DistributedOptimizer, number: int) -> None:
        for param, grad in zip(optimizer.model.module.parameters(), grads[number], strict=True):
            add_grad(param, grad)
        optimizer.step()
        optimizer.zero_grad()

    step(one, 0)
    step(one, 1)
    other.load_state_dict(one.state_dict())
    for number in (2, 3):
        step(one, number)
        step(other, number)
    for held, theirs in zip(one.full_slices(), other.full_slices(), strict=True):
        torch.testing.assert_close(held.master, theirs.master, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_momentum_that_a_part_has_goes_on_and_that_of_the_others_begins(form: str) -> None:
    """As in a checkpoint of a run in which some parameters had no gradients yet."""
    options: dict[str, Any] = {**SGD, "momentum": 0.9, "dampening": 0.3}
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=1)
    optimizer = DistributedOptimizer(
        DistributedDataParallel(wrapped(torch.float32).unwrap(), config), **options, **FORMS[form]
    )
    plain = wrapped(torch.float32).unwrap()
    stock = torch.optim.SGD(plain.parameters(), **{key: options[key] for key in options if key[0] != "o"})
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        if step == 1:
            stock.state[plain[0].weight].clear()  # type: ignore[index, union-attr]
            (held,) = (each for each in optimizer.slices if each.name.endswith("0.weight"))
            assert held.segment is not None
            optimizer.state[held.segment.master].pop("momentum_buffer")
            optimizer.state[held.segment.master].pop("step", None)
        for param, other in zip(optimizer.model.module.parameters(), plain.parameters(), strict=True):
            other.grad = torch.randn(param.shape, generator=generator)
            add_grad(param, other.grad)
        for stepped in (optimizer, stock):
            stepped.step()
            stepped.zero_grad()
        for param, other in zip(optimizer.model.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.detach(), other.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_momentum_that_begins_later_begins_as_in_a_first_step(form: str) -> None:
    """A program sets momentum in mid-training: dampening spares the first step of the buffer, as torch's."""
    module, plain = (wrapped(torch.float32).unwrap() for _ in range(2))
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(DistributedDataParallel(module, config), **SGD, dampening=0.3, **FORMS[form])
    stock = torch.optim.SGD(plain.parameters(), lr=SGD["lr"], weight_decay=SGD["weight_decay"], dampening=0.3)
    generator = torch.Generator().manual_seed(1)
    momentum = [0.0, 0.0, 0.9, 0.9, 0.0, 0.9]
    for each in momentum:
        stock.param_groups[0]["momentum"] = optimizer.param_groups[0]["momentum"] = each
        for param, other in zip(module.parameters(), plain.parameters(), strict=True):
            grad = torch.randn(param.shape, generator=generator)
            add_grad(param, grad)
            other.grad = grad.clone()
        for stepped in (optimizer, stock):
            stepped.step()
            stepped.zero_grad()
        for param, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.detach(), other.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["nesterov", "lion"])
def test_a_scaler_skips_on_the_device(kind: str) -> None:
    model = wrapped()
    optimizer = DistributedOptimizer(model, **CLASSES[kind], **COMPACT)
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        before = [held.master.clone() for held in optimizer.full_slices()]
        x = torch.full((2, 24), float("nan") if step == 0 else 0.5).bfloat16()
        scaler.scale(model(x).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [held.master for held in optimizer.full_slices()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == (step == 0)


# ---- On GPUs full state has one pass too. Here its reference runs on CPUs. ----

ADAM: dict[str, Any] = {"optimizer_class": torch.optim.Adam, "lr": 0.05}
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
CLIP = {"max_grad_norm": 0.5}
CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "learning rate": (ADAMW, {"lr": 0.5}),
    "learning rate, clipped": ({**ADAMW, **CLIP}, {"lr": 0.5}),
    "decay that torch rounds otherwise": (ADAM, {"weight_decay": 0.1}),
    "decay that torch rounds alike, clipped": ({**ADAM, **CLIP}, {"weight_decay": 0.1}),
    "decay of AdamW": ({**ADAM, **CLIP}, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "decay of Adam": (ADAMW, {"decoupled_weight_decay": False}),
    "loops": (ADAMW, {"fused": False}),
    "direction": (ADAMW, {"maximize": True}),
    "direction of momentum": (CLASSES["momentum"], {"maximize": True}),
}


def two_groups(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], **of_last_layer: Any) -> DistributedOptimizer:
    """On one pass, where a GPU would have one."""
    monkeypatch.setattr(state_forms, "_has_kernel", lambda master: True)
    return DistributedOptimizer(wrapped(), param_groups=[{"params": "2.*", **of_last_layer}], **options)


def stepped(optimizer: DistributedOptimizer) -> DistributedOptimizer:
    for number, param in enumerate(optimizer.model.module.parameters()):
        add_grad(param, torch.randn(param.shape, generator=torch.Generator().manual_seed(number)))
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def took_one_pass(optimizer: Any) -> bool:
    """Its table is made for a pass, and is freed where torch steps."""
    return bool(optimizer._steps._updates)


@pytest.mark.parametrize("case", CHANGED)
def test_a_group_that_one_pass_does_not_know_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A program changes one of two groups after a step, and changes it back."""
    options, changes = CHANGED[case]
    stock = DistributedOptimizer(wrapped(), param_groups=[{"params": "2.*"}], **options)
    tried = two_groups(monkeypatch, options)
    before = {key: tried.param_groups[0][key] for key in changes}
    for group, values, one_pass in (
        (0, {}, True),
        (0, changes, "rate" in case or "alike" in case),
        (0, before, True),
        (1, changes, "rate" in case or "alike" in case),
        (1, before, True),
    ):
        for optimizer in (stock, tried):
            optimizer.param_groups[group].update(values)
            stepped(optimizer)
        assert took_one_pass(tried) is one_pass
        for param, other in zip(tried.model.parameters(), stock.model.parameters(), strict=True):
            torch.testing.assert_close(param.detach(), other.detach())


def test_amsgrad_and_betas_on_the_device_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not took_one_pass(stepped(two_groups(monkeypatch, ADAMW, amsgrad=True)))
    optimizer = two_groups(monkeypatch, ADAMW)
    optimizer.param_groups[1]["betas"] = (torch.tensor(0.9), torch.tensor(0.95))
    left: list[object] = []
    monkeypatch.setattr(TorchSteps, "update", lambda steps, *args: left.append(args))  # no CPU kernel reads tensors
    assert not took_one_pass(stepped(optimizer)) and left


# ---- Lion alone. ----


def test_each_class_of_one_pass_has_a_rule() -> None:
    assert list(_RULES) == list(IN_ONE_PASS)


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_is_its_definition(maximize: bool) -> None:
    param = nn.Parameter(torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    expected, buffer = param.detach().clone(), None
    optimizer = Lion([param], maximize=maximize, **{k: v for k, v in CLASSES["lion"].items() if k[0] != "o"})
    for step in range(5):
        param.grad = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        buffer = plain_step(CLASSES["lion"], expected, buffer, -param.grad if maximize else param.grad)
    torch.testing.assert_close(param.detach(), expected)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], buffer)
    assert optimizer.step(lambda: 3.0) == 3.0


def test_lion_takes_a_closure_that_computes_the_gradients() -> None:
    param = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Lion([param], lr=0.5)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    assert [optimizer.step(closure) for _ in range(2)] == [5.0, 2.5]
    assert param.tolist() == [0.0, -1.0]


@pytest.mark.parametrize("form", [{}, COMPACT], ids=["full", "compact"])
def test_a_gradient_of_nan_shows_in_the_parameter(form: dict[str, Any]) -> None:
    model = wrapped()
    optimizer = DistributedOptimizer(model, **CLASSES["lion"], **form)
    weight = next(model.module.parameters())
    grad = torch.zeros(weight.shape)
    grad[0, 0] = float("nan")
    add_grad(weight, grad)
    optimizer.step()
    assert weight[0, 0].isnan() and weight.isnan().sum() == 1


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"betas": (0.9,)}],
)
def test_lion_refuses_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Lion needs"):
        Lion([nn.Parameter(torch.zeros(1))], **options)


def test_lion_may_begin_with_a_learning_rate_of_0() -> None:
    """As at the start of a warmup, or in a group that is kept as it is; momentum follows the gradients."""
    param = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Lion([param], lr=0.0, betas=(0.9, 0.5), weight_decay=0.1)
    param.grad = torch.tensor([4.0, -4.0])
    optimizer.step()
    assert param.tolist() == [1.0, -2.0] and optimizer.state[param]["exp_avg"].tolist() == [2.0, -2.0]
    DistributedOptimizer(wrapped(), **CLASSES["lion"], param_groups=[{"params": "*.bias", "lr": 0.0}])
