"""Every elementwise class of ``torch.optim`` gives the same bits over flat shards; other classes are refused by name.

The reference is the stock class with the same options, one fp32 master for each parameter, on gradients that the test
adds up by hand (``stock_steps``). No tolerance anywhere: each element's arithmetic is the same.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from loops import assert_same, weights, wrap
from stock_steps import WIDTH, backward, batch_of, make_net, stock_run, train
from summed_by_hand import tree_sum
from torch import Tensor, nn

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    Muon,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.ddp.optimizer import steps
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

STEPS = 5
BF16 = torch.bfloat16


class Case(NamedTuple):
    cls: type[torch.optim.Optimizer]
    options: dict[str, Any]

    def __str__(self) -> str:
        return " ".join([self.cls.__name__, *(f"{key}={value}" for key, value in self.options.items() if key != "lr")])


optim = torch.optim
CASES = [
    Case(optim.AdamW, {"lr": 0.02}),
    Case(optim.AdamW, {"lr": 0.02, "amsgrad": True}),
    Case(optim.AdamW, {"lr": 0.02, "maximize": True}),
    Case(optim.AdamW, {"lr": 0.02, "fused": False}),
    Case(optim.AdamW, {"lr": 0.02, "foreach": True}),
    Case(optim.Adam, {"lr": 0.02, "weight_decay": 0.1}),
    Case(optim.Adam, {"lr": 0.02, "amsgrad": True, "maximize": True, "fused": False, "foreach": False}),
    Case(optim.SGD, {"lr": 0.1}),
    Case(optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    Case(optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    Case(optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "fused": False}),
    Case(optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True, "foreach": True}),
    Case(optim.Adadelta, {"lr": 1.0, "weight_decay": 0.01}),
    Case(optim.Adadelta, {"lr": 1.0, "foreach": True}),
    Case(optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.01}),
    Case(optim.Adagrad, {"lr": 0.05, "fused": True}),
    Case(optim.Adamax, {"lr": 0.02, "weight_decay": 0.01}),
    Case(optim.ASGD, {"lr": 0.05, "t0": 2.0}),
    Case(optim.NAdam, {"lr": 0.02, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    Case(optim.RAdam, {"lr": 0.02, "betas": (0.5, 0.8)}),
    Case(optim.RMSprop, {"lr": 0.02, "momentum": 0.9, "centered": True}),
    Case(optim.RMSprop, {"lr": 0.02, "foreach": True}),
    Case(optim.Rprop, {"lr": 0.02}),
]


@pytest.mark.parametrize("cls", sorted({case.cls for case in CASES}, key=lambda cls: cls.__name__))
def test_options_left_out_are_the_classes_own(cls: type[torch.optim.Optimizer]) -> None:
    """The learning rate too: Adadelta's is 1, Rprop's 0.01."""
    (group, *_) = DistributedOptimizer(wrap(make_net()), optimizer_class=cls).param_groups
    own = cls([nn.Parameter(torch.zeros(1))]).defaults
    assert {key: group[key] for key in own if key != "fused"} == {key: own[key] for key in own if key != "fused"}


def stock_options(case: Case) -> dict[str, Any]:
    """Options of the stock class: fused where torch has a fused kernel, as ours defaults to."""
    fused = case.cls in (optim.AdamW, optim.Adam, optim.SGD) and not case.options.get("foreach")
    return {"fused": True, **case.options} if fused else case.options


@functools.lru_cache(maxsize=8)
def expected_of(index: int, dtype: torch.dtype, ranks: int) -> list[dict[str, Tensor]]:
    case = CASES[index]
    return stock_run(dtype, ranks, STEPS, lambda masters: case.cls(masters.values(), **stock_options(case)))


def check(index: int, dtype: torch.dtype, ranks: int, **config: Any) -> None:
    case = CASES[index]
    expected = expected_of(index, dtype, ranks)
    for name, weight in make_net(dtype).named_parameters():
        assert not torch.equal(expected[-1][name], weight), f"{name} does not move"
    options = {**case.options, "optimizer_class": case.cls}
    for history, optimizer in simulate(train, ranks, dtype, range(STEPS), config, options):
        for ours, theirs in zip(history, expected, strict=True):
            assert_same(ours, theirs)
        for key, value in case.options.items():
            assert optimizer.param_groups[0][key] == value


@pytest.mark.in_turn
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: str(CASES[index]))
@pytest.mark.sampled(2)
def test_a_class_over_shards_is_the_class_itself(index: int) -> None:
    """bf16 parameters with fp32 masters on three ranks, in several buckets."""
    check(index, BF16, 3, use_distributed_optimizer=True, bucket_size=300)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: str(CASES[index]))
def test_a_class_is_itself_everywhere(index: int, dtype: torch.dtype, ranks: int, sharded: bool) -> None:
    check(index, dtype, ranks, use_distributed_optimizer=sharded, overlap_param_gather=sharded)


def test_every_elementwise_class_of_torch_is_there() -> None:
    """A class that a new torch adds must be tested here or refused below."""
    classes = {cls for cls in vars(optim).values() if isinstance(cls, type) and issubclass(cls, optim.Optimizer)}
    assert classes - {optim.Optimizer} == {case.cls for case in CASES} | {
        optim.LBFGS,
        optim.SparseAdam,
        optim.Adafactor,
        optim.Muon,
    }


# ---- Whole parameters. ----


def make_matrices(dtype: torch.dtype) -> nn.Sequential:
    """Matrices, as Muon needs; of odd sizes, so that shards are uneven."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, WIDTH, bias=False, dtype=dtype),
        nn.Tanh(),
        nn.Linear(WIDTH, 15, bias=False, dtype=dtype),
        nn.Tanh(),
        nn.Linear(15, 7, bias=False, dtype=dtype),
    )


def make_mixed(dtype: torch.dtype) -> nn.Sequential:
    """Matrices and vectors of odd sizes."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(4, 17, dtype=dtype), nn.Tanh(), nn.LayerNorm(17, dtype=dtype), nn.Linear(17, 7, dtype=dtype)
    )


class Sign(optim.Optimizer):
    """Lion without its second momentum, as a user might write it: elementwise."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    average.lerp_(param.grad, 1 - group["beta"])
                    param.sub_(average.sign(), alpha=group["lr"])


class RowWise(optim.Optimizer):
    """Normalises each row of a matrix: not elementwise, and correct with whole parameters."""

    per_parameter = True

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rows = param.grad.flatten(1) if param.dim() > 1 else param.grad[None]
                    param.sub_((rows / (rows.norm(dim=1, keepdim=True) + 1e-6)).view_as(param), alpha=group["lr"])


def train_whole(
    make: Callable[[torch.dtype], nn.Module], dtype: torch.dtype, config: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, Tensor], list[int]]:
    """Weights at the end, and how many elements this rank updated."""
    ddp = wrap(make(dtype), use_distributed_optimizer=True, keep_params_whole=True, **config)
    optimizer = DistributedOptimizer(ddp, **options)
    for step in range(STEPS):
        backward(ddp, step, dtype)
        optimizer.step()
        ddp.zero_grad_buffer()
    return weights(ddp), [held.end - held.start for held in optimizer.slices]


def test_a_class_may_be_told_later_to_run_without_its_fused_kernel() -> None:
    """What a step has told the kernel is gone then: torch's other steps would refuse it."""
    ddp = wrap(make_mixed(torch.float64))
    optimizer = DistributedOptimizer(ddp, optimizer_class=optim.AdamW, lr=0.1, max_grad_norm=0.01)
    for fused in (True, False, True):
        optimizer.param_groups[0]["fused"] = fused
        before = weights(ddp)
        backward(ddp, 0, torch.float64)
        optimizer.step()
        optimizer.zero_grad()
        assert not any(map(torch.equal, before.values(), weights(ddp).values()))


@pytest.mark.parametrize(("cls", "refused"), [(optim.NAdam, True), (optim.AdamW, False)])
def test_a_scaler_that_skips_on_the_host_is_refused_in_a_capture(
    cls: type, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No graph replays what the host decides. A fused class skips on the device."""
    ddp = wrap(make_mixed(torch.float64))
    optimizer: Any = DistributedOptimizer(ddp, optimizer_class=cls, lr=0.1)
    backward(ddp, 0, torch.float64)
    ddp.finish_grad_sync()
    before = weights(ddp)
    monkeypatch.setattr(steps, "is_capturing", lambda: True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    with pytest.raises(RuntimeError, match="skips NAdam on the host, which no graph") if refused else nullcontext():
        optimizer.step()
    assert_same(weights(ddp), before)


@pytest.mark.parametrize("cls", [RowWise, optim.SGD])
def test_where_parameters_stay_whole_each_has_a_tensor_of_its_own(cls: type) -> None:
    """In the parameter's shape, under elementwise classes too."""
    net = make_mixed(torch.float32)
    ddp = wrap(net, use_distributed_optimizer=True, keep_params_whole=True)
    (group,) = DistributedOptimizer(ddp, lr=0.1, optimizer_class=cls).param_groups
    assert sorted(master.shape for master in group["params"]) == sorted(param.shape for param in net.parameters())


def test_whole_parameters_step_by_the_options_of_their_group() -> None:
    """The first group stands still."""

    def on_each_rank() -> None:
        ddp = wrap(make_mixed(torch.float32), use_distributed_optimizer=True, keep_params_whole=True)
        groups: Any = [{"params": ["*.bias", "2.weight"], "lr": 0.0}]
        optimizer = DistributedOptimizer(ddp, optimizer_class=RowWise, lr=0.1, param_groups=groups)
        before = {name: value.clone() for name, value in weights(ddp).items()}
        backward(ddp, 0, torch.float32)
        optimizer.step()
        moved = {name for name, value in weights(ddp).items() if not torch.equal(value, before[name])}
        assert moved == {"0.weight", "3.weight"}

    simulate(on_each_rank, 2)


def stock_whole(
    make: Callable[[torch.dtype], nn.Module], dtype: torch.dtype, ranks: int, cls: Any, options: dict[str, Any]
) -> dict[str, Tensor]:
    model = make(dtype)
    masters = {name: nn.Parameter(param.detach().float()) for name, param in model.named_parameters()}
    optimizer = cls(masters.values(), **options)
    for step in range(STEPS):
        grads: list[dict[str, Tensor]] = []
        for rank in range(ranks):
            model.zero_grad()
            (model(batch_of(step, rank, dtype)) - 1).square().mean().backward()
            grads.append({name: param.grad.float() * (1 / ranks) for name, param in model.named_parameters()})
        for name, master in masters.items():
            master.grad = tree_sum([grad[name] for grad in grads])
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
    return weights(model)


WHOLE: dict[str, tuple[Callable[[torch.dtype], nn.Module], Case]] = {
    "Muon": (make_matrices, Case(optim.Muon, {"lr": 0.05})),
    "Muon, as RMS of AdamW": (make_matrices, Case(optim.Muon, {"lr": 0.05, "adjust_lr_fn": "match_rms_adamw"})),
    "Muon, ours": (make_matrices, Case(Muon, {"lr": 0.05})),
    "Adafactor": (make_mixed, Case(optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1})),
    "Adafactor, foreach": (make_mixed, Case(optim.Adafactor, {"lr": 0.05, "foreach": True})),
    "of the user's own": (make_mixed, Case(RowWise, {"lr": 0.05})),
    "RMSprop": (make_mixed, Case(optim.RMSprop, {"lr": 0.05})),
}


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_parameters_take_classes_of_matrices(name: str, dtype: torch.dtype, ranks: int) -> None:
    make, (cls, options) = WHOLE[name]
    expected = stock_whole(make, dtype, ranks, cls, options)
    results = simulate(train_whole, ranks, make, dtype, {}, {**options, "optimizer_class": cls})
    sizes = [param.numel() for param in make(dtype).parameters()]
    for ours, numels in results:
        assert_same(ours, expected)
        assert ranks == 1 or sum(numels) < sum(sizes), "every rank updates a part"
    for by_rank in zip(*(numels for _, numels in results), strict=True):
        assert sorted(by_rank)[:-1] == [0] * (ranks - 1), "one rank updates all of a parameter"


def test_a_class_that_says_it_is_elementwise_is_taken_at_its_word() -> None:
    expected = stock_run(BF16, 3, STEPS, lambda masters: Sign(masters.values(), lr=0.02, beta=0.8))
    options = {"optimizer_class": Sign, "lr": 0.02, "beta": 0.8}
    config = {"use_distributed_optimizer": True, "bucket_size": 300}
    for history, optimizer in simulate(train, 3, BF16, range(STEPS), config, options):
        for ours, theirs in zip(history, expected, strict=True):
            assert_same(ours, theirs)
        for held in optimizer.slices:
            assert set(held.state()) == ({"average"} if held.end > held.start else set())


class Counting(optim.Optimizer):
    """Counts its steps in the parameter group, as some fused and schedule-free optimizers do."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["k"])


def test_a_class_with_a_count_of_its_own_steps_once_a_step() -> None:
    """It steps once also where several buckets are updated and gathered one after the other."""
    expected = stock_run(BF16, 3, STEPS, lambda masters: Counting(masters.values(), lr=0.5))
    options = {"optimizer_class": Counting, "lr": 0.5}
    config = {"use_distributed_optimizer": True, "bucket_size": 100, "overlap_param_gather": True}
    for history, optimizer in simulate(train, 3, BF16, range(STEPS), config, options):
        assert optimizer.param_groups[0]["k"] == STEPS
        for ours, theirs in zip(history, expected, strict=True):
            assert_same(ours, theirs)


def test_the_fused_kernel_may_be_given_up_between_steps() -> None:
    ddp = wrap(make_net())
    optimizer = DistributedOptimizer(ddp, lr=0.02, max_grad_norm=0.05)
    for step in range(2):
        backward(ddp, step, torch.float32)
        optimizer.step()
        ddp.zero_grad_buffer()
        optimizer.param_groups[0]["fused"] = False
    expected, _ = train(torch.float32, range(2), {}, {"lr": 0.02, "max_grad_norm": 0.05})
    for name, weight in weights(ddp).items():
        torch.testing.assert_close(weight, expected[-1][name], rtol=1e-5, atol=1e-6)


def test_a_subclass_of_a_stock_class_says_it_too() -> None:
    class Logged(optim.AdamW):
        pass

    with pytest.raises(ValueError, match=r"Logged is not known to be elementwise.*Logged\.elementwise = True"):
        DistributedOptimizer(wrap(make_net()), optimizer_class=Logged)
    Logged.elementwise = True
    stock = stock_run(torch.float32, 1, STEPS, lambda masters: optim.AdamW(masters.values(), lr=0.02, fused=False))
    ours, _ = train(torch.float32, range(STEPS), {}, {"optimizer_class": Logged, "lr": 0.02})
    for mine, theirs in zip(ours, stock, strict=True):
        assert_same(mine, theirs)


# ---- Refused. ----


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("cls", [optim.LBFGS, optim.SparseAdam])
@pytest.mark.sampled(4)
def test_classes_that_need_all_parameters_at_once_are_refused(cls: type[optim.Optimizer], whole: bool) -> None:
    ddp = wrap(make_net(), use_distributed_optimizer=True, keep_params_whole=whole)
    with pytest.raises(ValueError, match=rf"{cls.__name__} cannot update flat shards.*use_distributed_optimizer=False"):
        DistributedOptimizer(ddp, optimizer_class=cls)


@pytest.mark.parametrize("cls", [optim.Adafactor, optim.Muon, Muon, RowWise])
def test_classes_of_matrices_are_refused_without_whole_parameters(cls: type[optim.Optimizer]) -> None:
    ddp = wrap(make_net(), use_distributed_optimizer=True)
    option = r"keep_matrices_whole=\[their names\]" if "Muon" in cls.__name__ else "keep_params_whole=True"
    with pytest.raises(ValueError, match=rf"{cls.__name__} updates whole parameters, .*{option}"):
        DistributedOptimizer(ddp, optimizer_class=cls)


@pytest.mark.parametrize("whole", [False, True])
def test_a_class_that_says_nothing_is_refused(whole: bool) -> None:
    """The class may sum over all parameters, as Prodigy does: whole parameters would not help."""

    class Silent(optim.SGD):
        pass

    ddp = wrap(make_net(), use_distributed_optimizer=True, keep_params_whole=whole)
    with pytest.raises(ValueError, match=r"Silent\.elementwise = True if .*Silent\.per_parameter = True if .*Prodigy"):
        DistributedOptimizer(ddp, optimizer_class=Silent)


def muon_on_vectors(cls: type) -> str:
    ddp = wrap(make_net(), use_distributed_optimizer=True, keep_params_whole=True)
    with pytest.raises(ValueError, match="Muon updates matrices") as raised:
        DistributedOptimizer(ddp, optimizer_class=cls)
    return str(raised.value)


@pytest.mark.parametrize("cls", [optim.Muon, Muon])
def test_muon_refuses_vectors_on_every_rank_alike(cls: type) -> None:
    """Also on ranks whose shards hold only matrices: these would wait for the other ranks for ever."""
    for message in simulate(muon_on_vectors, 3, cls):
        assert "parameter '3.bias' has shape [128]" in message


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bettas": (0.9, 0.99)}, TypeError, "unexpected keyword argument 'bettas'"),
        ({"lr": -0.1}, ValueError, "^Invalid learning rate"),
        ({"betas": (0.9, 1.0)}, ValueError, "Invalid beta parameter at index 1"),
        ({"fused": True, "foreach": True}, RuntimeError, "cannot be `True` together"),
        ({"differentiable": True}, ValueError, "differentiable=True: the step works on masters"),
        ({"optimizer_class": optim.RMSprop, "differentiable": True}, ValueError, "differentiable=True"),
        ({"optimizer_class": optim.RMSprop, "fused": True}, TypeError, "unexpected keyword argument 'fused'"),
        ({"optimizer_class": optim.SGD, "nesterov": True}, ValueError, "Nesterov momentum requires a momentum"),
        ({"optimizer_class": optim.SGD, "betas": (0.9, 0.99)}, TypeError, "unexpected keyword argument 'betas'"),
        ({"optimizer_class": nn.Linear}, TypeError, "subclass of torch.optim.Optimizer, got <class .*Linear"),
        ({"optimizer_class": optim.AdamW([nn.Parameter(torch.zeros(1))])}, TypeError, "subclass of torch.optim"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm must be positive"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm must be positive"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DistributedOptimizer(wrap(make_net()), **options)


def test_a_complex_parameter_is_refused_by_name() -> None:
    dtypes = (torch.float32, torch.complex64, torch.float32)
    model = nn.ParameterList(torch.ones(3, dtype=dtype) for dtype in dtypes)
    with pytest.raises(ValueError, match=r"parameter '1' is torch\.complex64: DistributedOptimizer updates real param"):
        DistributedOptimizer(wrap(model))


def test_parameters_without_elements_share_no_memory() -> None:
    model = nn.ParameterList(torch.ones(numel) for numel in (0, 3, 0))
    ddp = wrap(model)
    optimizer = DistributedOptimizer(ddp, lr=0.5, optimizer_class=optim.SGD)
    sum(param.sum() for param in ddp.module).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert [param.tolist() for param in model] == [[], [0.5] * 3, []]


class WithMethods(optim.SGD):
    """As schedule-free optimizers: methods of its own change the weights that the model shows."""

    elementwise = True

    def shift(self, by: float) -> int:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(by)
        return len(self.param_groups)


def test_methods_of_the_class_are_methods_of_the_wrapper() -> None:
    ddp = wrap(nn.Linear(2, 2), use_distributed_optimizer=True)
    before = [param.detach().clone() for param in ddp.parameters()]
    optimizer: Any = DistributedOptimizer(ddp, lr=0.1, optimizer_class=WithMethods)
    assert optimizer.shift(1.0) == 1
    optimizer.mark_loaded()
    for param, old in zip(ddp.parameters(), before, strict=True):
        torch.testing.assert_close(param.detach(), old + 1)
    with pytest.raises(AttributeError, match="'DistributedOptimizer' object has no attribute 'shifts'"):
        optimizer.shifts(1.0)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, *, both: bool) -> Tensor:
        return self.second(self.first(x) if both else x)


def momentum_of_some(folder: str, dtype: torch.dtype) -> list[list[Tensor]]:
    """Weights of a plain loop, and of one that begins fully sharded and goes on under DDP.

    The first step leaves a layer without momentum.
    """
    found = []
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}
    for resumed in (False, True):
        model: Any = Two().to(dtype)
        if resumed:
            model = fully_shard(model)
        biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
        others = [param for name, param in model.named_parameters() if name.endswith("weight")]
        optimizer: Any = optim.SGD([{"params": biases}, {"params": others}], **options)
        for step in range(3):
            if resumed and step == 1:
                save_checkpoint(folder, model, optimizer)
                model = DistributedDataParallel(Two().to(dtype), DistributedDataParallelConfig(bucket_size=25))
                groups = [{"params": "*.bias"}]
                optimizer = DistributedOptimizer(model, optimizer_class=optim.SGD, param_groups=groups, **options)
                load_checkpoint(folder, model, optimizer)
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(x, both=step > 0).square().mean().backward()
            if step == 0:
                for param in model.first.parameters():
                    param.grad = None
            optimizer.step()
            optimizer.zero_grad()
        found.append([param.detach().clone() for param in model.parameters()])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_checkpoint_has_momentum_of_some_parameters(tmp_path: Path, dtype: torch.dtype) -> None:
    plain, ours = simulate(momentum_of_some, 1, str(tmp_path / "checkpoint"), dtype)[0]
    for expected, weight in zip(plain, ours, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)
