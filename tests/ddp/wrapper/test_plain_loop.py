"""A plain PyTorch loop, textually the same under each form of ``DistributedDataParallel``, is right.

Weights and norms are those of plain PyTorch on the whole batch, in fp64.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.launch import simulate
from maingrad.te_integration import Linear

STEPS, SAMPLES = 4, 5
RANKS = (1, 2, 3)


class Net(nn.Module):
    """Plain layers around two of ``linear``, which share one weight."""

    def __init__(self, linear: Callable[..., nn.Linear]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.middle = linear(8, 8)
        self.again = linear(8, 8, bias=False)
        self.again.weight = self.middle.weight
        self.last = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = self.middle(x).tanh()
        return self.last(self.again(x).tanh())  # type: ignore[no-any-return]


def plain_net() -> Net:
    return Net(nn.Linear)


def fused_net() -> Net:
    net = Net(partial(Linear, fuse_wgrad_accumulation=True))
    net.load_state_dict(plain_net().state_dict())
    return net


# ---- Forms, optimizers. ----


class Form(NamedTuple):
    """A way to wrap the model."""

    config: dict[str, Any]
    stock: bool
    """Optimizers are those of ``torch.optim``, or a user's own, over ``model.parameters()``."""


OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 40}
SHARDED = {"use_distributed_optimizer": True}
FORMS = {
    "ddp": Form({}, True),
    "ddp_overlap": Form(OVERLAP, True),
    "ddp_own": Form({}, False),
    "ddp_own_overlap": Form(OVERLAP, False),
    "zero1": Form(SHARDED, False),
    "zero1_overlap": Form(SHARDED | OVERLAP, False),
    "zero1_gathers": Form(SHARDED | OVERLAP | {"overlap_param_gather": True}, False),
}
STOCK = [name for name, form in FORMS.items() if form.stock]
OWN = [name for name, form in FORMS.items() if not form.stock]


class Lion(torch.optim.Optimizer):
    """A user's own optimizer."""

    elementwise = True

    def __init__(self, params: Any, lr: float, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["decay"])
                param.sub_(torch.lerp(moment, param.grad, 0.1).tanh(), alpha=group["lr"])
                moment.lerp_(param.grad, 0.01)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "own": (Lion, {"lr": 0.02}),
}


# ---- The loop, and what programs do in it. ----


def sync_context(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Plain modules have no ``no_sync``."""
    return nullcontext() if is_last or isinstance(model, Net) else model.no_sync()  # type: ignore[operator]


class Program(NamedTuple):
    """What differs between the loops of this file."""

    losses: Callable[[nn.Module, Tensor], Iterable[Tensor]]
    before_clip: Callable[[nn.Module, int], None] = lambda model, step: None
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None
    max_norm: float | None = 0.3


class Result(NamedTuple):
    weights: list[Tensor]
    norms: list[Tensor]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterable[list[Tensor]],
    program: Program,
    scaler: torch.amp.GradScaler | None = None,
) -> list[Tensor]:
    """The loop. Returns the norms."""
    norms = []
    for step, batch in enumerate(data):
        for number, microbatch in enumerate(batch):
            with sync_context(model, number == len(batch) - 1):
                for loss in program.losses(model, microbatch):
                    loss = loss / len(batch)
                    (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        program.before_clip(model, step)
        if program.max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), program.max_norm))
        program.before_step(model, step)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return norms


def make_data(ranks: Iterable[int], num_microbatches: int) -> Iterator[list[Tensor]]:
    """Batches of these ranks together."""
    for step in range(STEPS):
        yield [
            torch.cat([
                torch.randn(
                    SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + 10 * i + rank)
                )
                for rank in ranks
            ])
            for i in range(num_microbatches)
        ]  # fmt: skip


def one_loss(model: nn.Module, x: Tensor) -> Iterator[Tensor]:
    yield (model(x) - 1).square().mean()


def two_losses(model: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """The second forward comes after the first backward."""
    yield from one_loss(model, x)
    yield model(x + 1).abs().mean()


def two_losses_of_two_forwards(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(two_losses(model, x))


def penalty(model: nn.Module, x: Tensor) -> Iterator[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    yield (y - 1).square().mean() + grad.square().mean()


def penalty_of_its_own(model: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """A loss's backward, and the penalty's."""
    yield from one_loss(model, x)
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    yield (grad.norm(dim=1) - 1).square().mean()


LOSSES = {
    each.__name__: each for each in (one_loss, two_losses, two_losses_of_two_forwards, penalty, penalty_of_its_own)
}


def plainly(
    program: Program,
    name: str = "adamw",
    size: int = 1,
    num_microbatches: int = 1,
    scaler: torch.amp.GradScaler | None = None,
) -> Result:
    """Plain PyTorch on the batches of all ranks."""
    model = plain_net()
    optimizer_class, options = OPTIMIZERS[name]
    optimizer = optimizer_class(model.parameters(), **options)
    norms = train(model, optimizer, make_data(range(size), num_microbatches), program, scaler)
    return Result([param.detach() for param in model.parameters()], norms)


def wrapped(
    form: Form, program: Program, name: str, num_microbatches: int, scaler: torch.amp.GradScaler | None = None
) -> Result:
    """One rank of a wrapper."""
    model = DistributedDataParallel(fused_net(), DistributedDataParallelConfig(**form.config))
    optimizer_class, options = OPTIMIZERS[name]
    optimizer: Any
    if form.stock:
        optimizer = optimizer_class(model.parameters(), **options)
    else:
        optimizer = DistributedOptimizer(model, optimizer_class=optimizer_class, **options)
    norms = train(model, optimizer, make_data([dist.get_rank()], num_microbatches), program, scaler)
    if not form.stock:
        optimizer.finish_param_sync()
    return Result([param.detach().clone() for param in model.parameters()], norms)


def assert_close(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    torch.testing.assert_close(list(found), list(expected), rtol=1e-10, atol=1e-10)


def check(
    form: str, program: Program, *, name: str = "adamw", size: int = 2, num_microbatches: int = 1, rule: Any = None
) -> None:
    """``rule``: what plain PyTorch runs in place of ``program``."""
    expected = plainly(rule or program, name, size, num_microbatches)
    for found in simulate(wrapped, size, FORMS[form], program, name, num_microbatches):
        assert_close(found.weights, expected.weights)
        assert_close(found.norms, expected.norms)


# ---- Each optimizer, and each way to compute gradients. ----


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(14)
def test_each_optimizer_trains_as_in_plain_pytorch(form: str, size: int, name: str, num_microbatches: int) -> None:
    check(form, Program(one_loss), name=name, size=size, num_microbatches=num_microbatches)


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(16)
def test_losses_with_backwards_of_their_own_and_penalties(
    form: str, size: int, losses: str, num_microbatches: int
) -> None:
    check(form, Program(LOSSES[losses]), name="sgd", size=size, num_microbatches=num_microbatches)


@pytest.mark.parametrize("losses", ["one_loss", "two_losses"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(1)
def test_without_clipping_the_step_alone_finishes_the_iteration(form: str, losses: str) -> None:
    check(form, Program(LOSSES[losses], max_norm=None))


# ---- What programs do with .grad between backward and step. ----


def halved_in_place(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        param.grad.mul_(0.5)


def decayed_by_hand(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        param.grad.add_(param.detach(), alpha=0.1)


def replaced(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        param.grad = param.grad * 0.5


def with_other_memory(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        param.grad.data = param.grad.data * 0.5


def whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def replaced_by_whole(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        param.grad = whole(param.grad) * 0.5


def cancelled(model: nn.Module, step: int) -> None:
    """As DINO's last layer is, in its first epoch."""
    if step < 2:
        model.get_submodule("last" if isinstance(model, Net) else "module.last").weight.grad = None


def zeroed(model: nn.Module, step: int) -> None:
    """What ``cancelled`` is under ``DistributedOptimizer``: parameters without gradient have the gradient zero."""
    if step < 2:
        grad = model.get_submodule("last").weight.grad
        assert isinstance(grad, Tensor)
        grad.zero_()


@pytest.mark.parametrize("moment", ["before_clip", "before_step"])
@pytest.mark.parametrize(
    ("form", "change"),
    [
        (form, change)
        for form in FORMS
        for change in (halved_in_place, decayed_by_hand, replaced, with_other_memory, replaced_by_whole, cancelled)
    ],
)
@pytest.mark.sampled(12)
def test_what_is_done_to_grad_is_what_steps(form: str, change: Callable[[nn.Module, int], None], moment: str) -> None:
    rule = zeroed if change is cancelled and not FORMS[form].stock else change
    for max_norm in (0.3, None):
        program, plain = (Program(one_loss, max_norm=max_norm, **{moment: each}) for each in (change, rule))  # type: ignore[arg-type]
        check(form, program, rule=plain)


def in_bf16(form: Form) -> list[Tensor]:
    """``.grad`` of the parameter's dtype in place of what was reduced in fp32 and read."""
    model = DistributedDataParallel(nn.Linear(3, 2).bfloat16(), DistributedDataParallelConfig(**form.config))
    before = [param.detach().float() for param in model.parameters()]
    optimizer: Any = (
        torch.optim.SGD(model.parameters(), lr=0.5)
        if form.stock
        else DistributedOptimizer(model, optimizer_class=torch.optim.SGD, lr=0.5)
    )
    for _ in range(2):
        model(torch.ones(4, 3, dtype=torch.bfloat16)).sum().backward()
        for param in model.parameters():
            assert param.grad is not None and param.grad.norm() > 0
            param.grad = torch.ones_like(param.detach())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish_param_sync() if not form.stock else None
    return [old - param.detach().float() for old, param in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_of_the_parameters_dtype_takes_the_place_of_one_in_fp32(form: str) -> None:
    torch.manual_seed(0)
    for steps in simulate(in_bf16, 2, FORMS[form]):
        for step in steps:
            torch.testing.assert_close(step, torch.ones_like(step), rtol=0, atol=0.02)


@pytest.mark.parametrize("moment", ["before_clip", "before_step"])
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(8)
def test_gradients_that_the_program_keeps_hold_their_values_in_later_iterations(
    form: str, size: int, moment: str
) -> None:
    def kept_by(run: Callable[[Program], Result]) -> list[Tensor]:
        kept: list[Any] = []
        keep = {moment: lambda model, step: kept.extend(p.grad for p in model.parameters())}
        run(Program(two_losses, **keep))  # type: ignore[arg-type]
        return [whole(grad) for grad in kept]

    expected = kept_by(partial(plainly, size=size))
    assert len(expected) == STEPS * 6
    for found in simulate(lambda: kept_by(lambda program: wrapped(FORMS[form], program, "adamw", 1)), size):
        assert_close(found, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(1)
def test_logged_norms_are_those_of_the_whole_batch(form: str) -> None:
    def logged_by(run: Callable[[Program], Result]) -> list[Tensor]:
        logged: list[Any] = []
        run(Program(one_loss, lambda model, step: logged.extend(p.grad.norm() for p in model.parameters())))  # type: ignore[union-attr]
        return logged

    expected = logged_by(partial(plainly, size=2))
    for found in simulate(lambda: logged_by(lambda program: wrapped(FORMS[form], program, "adamw", 1)), 2):
        assert_close(found, expected)


# ---- torch's GradScaler. ----


def in_half(model: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """A scale of 2**16 is Inf in this loss's dtype, and 2**15 is not."""
    for loss in one_loss(model, x):
        yield loss.half()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("form", STOCK)
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.sampled(6)
def test_torchs_scaler_skips_the_step_that_overflows_and_takes_all_others(size: int, form: str, name: str) -> None:
    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**16)

    expected = plainly(Program(in_half), name, size, 2, scaler())
    assert [norm.isfinite().item() for norm in expected.norms] == [False, True, True, True]

    def run() -> Result:
        return wrapped(FORMS[form], Program(in_half), name, 2, scaler())

    for found in simulate(run, size):
        assert_close(found.weights, expected.weights)
        assert_close(found.norms[1:], expected.norms[1:])
        assert not found.norms[0].isfinite()
