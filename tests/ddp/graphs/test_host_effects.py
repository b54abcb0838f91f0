"""Effects on the host that a replay would lose: a graphed step does them again, takes another graph, or refuses."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad import graphed
from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GraphedTrainingStep,
)
from maingrad.ddp.collectives.streams import is_capturing
from maingrad.ddp.graphs import step_graphs
from maingrad.ddp.graphs.capture import CapturedGraph
from maingrad.ddp.graphs.inputs import StaticInputs, check_outputs, detached_copies, signature
from maingrad.ddp.graphs.step_options import StepOptions
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


class Model:
    """A bf16 model, its optimizer, and an iteration of them."""

    def __init__(self, config: dict[str, Any]) -> None:
        module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).bfloat16()
        self.ddp = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=70, **config))
        self.optimizer = DistributedOptimizer(self.ddp, lr=2**-5, max_grad_norm=1.0)

    def iterate(self, loss: Tensor) -> Tensor:
        loss.backward()
        self.ddp.finish_grad_sync()
        self.optimizer.step()
        self.ddp.zero_grad_buffer()
        return loss

    def train(self, x: Tensor, *rest: Any) -> Any:
        return self.iterate(self.ddp(x).float().square().mean())

    def graphed(self, train_step: Callable[..., Any], on: bool) -> Callable[..., Any]:
        return GraphedTrainingStep(train_step, self.ddp, self.optimizer) if on else train_step

    def params(self) -> list[Tensor]:
        self.optimizer.finish_param_sync()
        return [param.detach().clone() for param in self.ddp.module.parameters()]


Program = Callable[[bool], list[Any]]
"""Whether to graph -> all that a program can see."""


def check_equal(program: Program, ranks: int = 2) -> None:
    def both() -> list[int]:
        torch.manual_seed(0)
        eager = program(False)
        torch.manual_seed(0)
        graphed = program(True)
        assert len(eager) == len(graphed)
        return [place for place, (a, b) in enumerate(zip(eager, graphed, strict=True)) if not torch.equal(a, b)]

    assert simulate(both, ranks) == [[]] * ranks


def test_parameters_that_the_step_writes_after_the_update() -> None:
    def program(graphed: bool) -> list[Any]:
        model = Model({})

        def train_step(x: Tensor) -> Any:
            model.train(x)
            with torch.no_grad():
                for param in model.ddp.module.parameters():
                    param.clamp_(-0.125, 0.125)

        step = model.graphed(train_step, graphed)
        for _ in range(6):
            step(torch.randn(3, 8).bfloat16())
        return model.params()

    check_equal(program)


@pytest.mark.parametrize("config", [OVERLAP, {"use_distributed_optimizer": True}], ids=["overlap", "ZeRO-1"])
def test_parameters_that_the_step_reads_after_the_update(config: dict[str, Any]) -> None:
    def program() -> list[Tensor]:
        torch.manual_seed(0)
        model = Model(config)
        reads = True

        def train_step(x: Tensor) -> Any:
            loss = model.train(x)
            return loss, model.ddp.module[2].weight.norm() if reads else None

        step = GraphedTrainingStep(train_step, model.ddp, model.optimizer)
        x = torch.ones(3, 8).bfloat16()
        for _ in range(2):
            step(x)
        with pytest.raises(RuntimeError, match=r"after optimizer\.step\(\).*between two calls"):
            step(x)
        reads = False
        norms = []
        for _ in range(3):
            step(x)
            norms.append(model.ddp.module[2].weight.detach().norm())
        assert step.num_graphs == 1
        assert len(set(map(float, norms))) == 3, "it trains"
        return [*norms, *model.params()]

    one, other = simulate(program, 2)
    assert all(map(torch.equal, one, other))


def test_a_model_that_another_step_trains() -> None:
    def program(graphed: bool) -> list[Any]:
        student, teacher = Model(OVERLAP), Model(OVERLAP)

        def distil(x: Tensor) -> Tensor:
            with torch.no_grad():
                goal = teacher.ddp(x)
            return student.iterate((student.ddp(x) - goal).float().square().mean())

        teach, learn = teacher.graphed(teacher.train, graphed), student.graphed(distil, graphed)
        seen = []
        for _ in range(6):
            x = torch.randn(3, 8).bfloat16()
            seen += [teach(x), learn(x)]
        return [*seen, *student.params(), *teacher.params()]

    check_equal(program)


def test_the_mode_that_the_step_leaves() -> None:
    def program(graphed: bool) -> list[Any]:
        model = Model({})

        def train_step(x: Tensor) -> Any:
            model.ddp.train()
            return model.train(x)

        step, seen = model.graphed(train_step, graphed), []
        for _ in range(5):
            model.ddp.eval()
            step(torch.randn(3, 8).bfloat16())
            seen.append(torch.tensor([module.training for module in model.ddp.modules()]))
        return seen

    check_equal(program, ranks=1)


def test_a_sharded_average_of_the_weights() -> None:
    def program(graphed: bool) -> list[Any]:
        model = Model({})
        layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).bfloat16()
        mean = fully_shard(layers, placements="zero2")  # whole parameters stay, until they are known to have changed

        def train_step(x: Tensor) -> Any:
            loss = model.train(x)
            with torch.no_grad():
                for average, param in zip(mean.parameters(), model.ddp.module.parameters(), strict=True):
                    own = param.flatten()[average.shard.start : average.shard.end]
                    average.lerp_(own.view_as(average), 0.25)
            return loss

        step, seen = model.graphed(train_step, graphed), []
        for _ in range(6):
            x = torch.randn(3, 8).bfloat16()
            step(x)
            with torch.no_grad():
                seen.append(mean(x).clone())
        return seen

    check_equal(program)


def test_a_failed_capture_leaves_a_sharded_model_as_it_was() -> None:
    """What the capture wrote to shards is taken back, and so are the whole parameters that it has gathered of that."""

    def program() -> None:
        torch.manual_seed(0)
        model = Model({})
        other = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).bfloat16())

        def train_step(x: Tensor) -> Tensor:
            with torch.no_grad():
                for shard in other.parameters():
                    shard.mul_(0.5)
            penalty = other(x).sum()
            if is_capturing():
                raise KeyError("a mistake in front of the backward")
            penalty.backward()
            other.zero_grad()
            return model.train(x)

        @torch.no_grad()
        def evaluate(x: Tensor) -> Tensor:
            return other(x).clone()

        step, x = model.graphed(train_step, on=True), torch.ones(3, 8).bfloat16()
        step(x)
        step(x)
        before = evaluate(x)
        with pytest.raises(KeyError, match="a mistake"):
            step(x)
        assert torch.equal(evaluate(x), before)
        train_step(x)
        assert not torch.equal(evaluate(x), before)

    simulate(program, 2)


def test_two_optimizers_in_one_step() -> None:
    one, other = Model({}), Model({})
    step = GraphedTrainingStep(lambda x: one.train(x) + other.train(x), one.ddp, one.optimizer)
    with pytest.raises(RuntimeError, match="make a GraphedTrainingStep for each model"):
        step(torch.ones(3, 8).bfloat16())


@pytest.mark.parametrize("writes", [True, False], ids=["written", "gradient"])
@pytest.mark.sampled(2)
def test_what_the_step_leaves_in_its_arguments(writes: bool) -> None:
    model = Model({})

    def train_step(x: Tensor, total: Tensor) -> Any:
        loss = model.train(x).detach()
        if writes:
            total += loss

    step = model.graphed(train_step, True)
    x = torch.randn(3, 8).bfloat16().requires_grad_(not writes)
    with pytest.raises(RuntimeError, match="among its arguments"):
        step(x, torch.zeros(()))


HOOKS: dict[str, Callable[[nn.Linear], Any]] = {
    "forward": lambda layer: layer.register_forward_hook(lambda _, args, output: output * 2),
    "forward pre": lambda layer: layer.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "backward": lambda layer: layer.register_full_backward_hook(lambda _, grads, __: (grads[0] * 2,)),
    "backward pre": lambda layer: layer.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,)),
    "parameter": lambda layer: layer.weight.register_hook(lambda grad: grad * 2),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.sampled(1)
def test_hooks_of_another_time_than_the_capture(kind: str) -> None:
    def program(graphed: bool) -> list[Any]:
        model = Model(OVERLAP)
        step = model.graphed(model.train, graphed)
        seen = []
        for number in range(10):
            if number == 4:
                handle = HOOKS[kind](model.ddp.module[2])
            if number == 8:
                handle.remove()
            seen.append(step(torch.randn(3, 8).bfloat16()))
        if isinstance(step, GraphedTrainingStep):
            assert step.num_graphs == 2
        return [*seen, *model.params()]

    check_equal(program)


def test_the_norm_of_steps_that_clip_now_and_then() -> None:
    def program(graphed: bool) -> list[Any]:
        model = Model({})
        step = model.graphed(model.train, graphed)
        seen = []
        for number in range(10):
            model.optimizer.max_grad_norm = 1.0 if number % 2 else None
            step(torch.randn(3, 8).bfloat16())
            seen.append(torch.zeros(()) if model.optimizer.grad_norm is None else model.optimizer.grad_norm)
        return seen

    check_equal(program, ranks=1)


class Batch:
    """Data that Python may change."""

    def __init__(self) -> None:
        self.x = torch.ones(3, 8).bfloat16()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (lambda: Batch(), "not Batch"),
        (lambda: iter([torch.ones(3, 8)]), "not list_iterator"),
        (lambda: torch.ones(3, 8, requires_grad=True) * 2, "operations with gradients"),
        (lambda: nn.Parameter(torch.ones(3, 8)), "is a parameter"),
    ],
    ids=["object", "iterator", "graph", "parameter"],
)
def test_arguments_that_a_replay_could_not_follow(argument: Callable[[], Any], message: str) -> None:
    model = Model({})
    step = GraphedTrainingStep(model.train, model.ddp, model.optimizer)
    with pytest.raises((TypeError, ValueError), match=message):
        step(torch.ones(3, 8).bfloat16(), argument())
    x = torch.ones(3, 8).bfloat16()
    for value in (None, torch.bfloat16, torch.relu, lambda: 1, nn.ReLU(), {"a": (1, "b", None)}):
        step(x, value)


def test_too_many_graphs_say_what_may_differ() -> None:
    model = Model({})
    step = GraphedTrainingStep(model.train, model.ddp, model.optimizer, max_graphs=2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(model.optimizer, 2**-4, total_steps=20)
    x = torch.ones(3, 8).bfloat16()
    for _ in range(2):
        step(x)
        scheduler.step()
    with pytest.raises(RuntimeError, match=r"options of the optimizer.*cycle_momentum"):
        step(x)


def test_iterations_are_counted_as_by_eager_steps() -> None:
    def program(graphed: bool) -> list[Any]:
        model = Model({})
        train = model.graphed(model.train, graphed)
        counts = []
        for seed in range(5):
            train(torch.full((2, 8), float(seed), dtype=torch.bfloat16))
            counts.append(torch.tensor(model.ddp.iteration))
        return counts

    check_equal(program)


@pytest.mark.parametrize("config", [{}, OVERLAP])
@pytest.mark.sampled(1)
def test_two_backwards_outside_no_sync(config: dict[str, Any]) -> None:
    """The second one finds what the first has left in .grad."""

    def program(graphed: bool) -> list[Any]:
        model = Model(config)

        def train_step(x: Tensor) -> Any:
            model.ddp(x).float().square().mean().backward()
            model.ddp(x + 1).float().abs().mean().backward()
            model.optimizer.step()
            model.optimizer.zero_grad()

        step = model.graphed(train_step, graphed)
        for number in range(4):
            step(torch.full((2, 8), 0.25 * number, dtype=torch.bfloat16))
        return model.params()

    check_equal(program)


def test_loaded_state_is_brought_to_where_kernels_read_it() -> None:
    """Also that of before the first step, which has none; of another shape it is refused, and not stretched."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    optimizer.step()
    options = StepOptions(optimizer, torch.device("cpu"))
    options.record_state()
    kept, state = optimizer.state[weight]["momentum_buffer"], optimizer.state[weight]
    state["momentum_buffer"] = torch.full((3,), 2.0)
    options.load()
    assert state["momentum_buffer"] is kept
    assert kept.tolist() == [2, 2, 2]
    del state["momentum_buffer"]
    options.load()
    assert state["momentum_buffer"] is kept
    assert kept.tolist() == [0, 0, 0]
    for other in (torch.ones(1), 1.0):
        state["momentum_buffer"] = other
        with pytest.raises(RuntimeError, match="'momentum_buffer' has another shape than in the capture"):
            options.load()
    options.forget_state()
    options.load()


def test_rates_are_brought_to_where_kernels_read_them_after_tensors_and_failed_captures() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.125)
    group, options = optimizer.param_groups[0], StepOptions(optimizer, torch.device("cpu"))

    def read() -> float:
        options.load()
        with options.in_device_memory():
            return float(group["lr"])

    for rate in (0.125, torch.tensor(0.5), 0.125):
        group["lr"] = rate
        options.load()
    assert read() == 0.125
    with pytest.raises(RuntimeError, match="has changed a learning rate"), options.in_device_memory():
        group["lr"].fill_(2.0)
    assert (group["lr"], read()) == (0.125, 0.125)


def test_options_that_are_equal_are_one_kind_of_call() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.125)
    group, options = optimizer.param_groups[0], StepOptions(optimizer, torch.device("cpu"))

    def key(value: Any) -> Any:
        group["own"] = value
        return options.key()

    for make in (lambda last: {"a": [1, last]}, lambda last: [1, {"b": last}], lambda last: (last, "c")):
        assert key(make(2)) == key(make(2))
        assert key(make(2)) != key(make(3))
    for each, another in ((torch.ones(2), torch.ones(2)), ({1}, {1})):
        assert key(each) == key(each)
        assert key(each) != key(another), "which may change in place"


# ---- Arguments, results and options by themselves. ----

CPU = torch.device("cpu")


def test_arguments_that_differ_in_anything_are_another_kind_of_call() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(2, 3)
    cases: list[Any] = [
        (x, y),
        (x, x),
        (x,),
        (x, y, 1),
        (x, y, 2),
        (1, x, y),
        (x, y, 1.0),
        (x, y, True),
        (x, y, None),
        (x, y, "1"),
        (x, [y]),
        (x, {"a": y}),
        (x, {"b": y}),
        (x, y.double()),
        (x.double(), y),
        (x, torch.zeros(2, 4)),
        (x, torch.zeros(3, 2).t()),
        (x, torch.zeros(2, 3, requires_grad=True)),
        (x, torch.relu),
        (x, torch.tanh),
        (x, torch.float64),
        (x, torch.device("meta")),
    ]
    found = [signature(case) for case in cases]
    for at, one in enumerate(found):
        assert [other for other, two in enumerate(found) if one == two] == [at]
    assert signature((torch.ones(2, 3), torch.ones(2, 3), 1)) == found[3]
    assert signature((x, nn.Parameter(y, requires_grad=False))) == found[0], "a frozen one gets no gradient"


def test_a_call_is_copied_to_where_the_capture_has_read_it() -> None:
    row = torch.arange(3.0).expand(2, 3)
    x, leaf = torch.zeros(2), torch.zeros(2, requires_grad=True)
    inputs = StaticInputs(([x, 5], {"row": row, "again": x}, leaf), CPU)
    held, named, of_leaf = inputs.args
    assert held[1] == 5
    assert named["again"] is held[0] and held[0] is not x
    assert of_leaf.requires_grad and not held[0].requires_grad
    for value in (1.0, 2.0):
        x = torch.full((2,), value)
        inputs.load(([x, 5], {"row": row + value, "again": x}, torch.full((2,), 3 * value)))
        assert held[0].tolist() == [value] * 2
        assert of_leaf.tolist() == [3 * value] * 2
        assert torch.equal(named["row"], row + value)
    named["row"].clone().add_(1)
    inputs.check_unchanged("step")
    for written in (held[0], named["row"]):
        written.add_(1)
        with pytest.raises(RuntimeError, match="step has written a tensor of shape"):
            inputs.check_unchanged("step")
        inputs.load(([x, 5], {"row": row, "again": x}, x))
        inputs.check_unchanged("step")
    assert named["row"][0, 0] != named["row"][0, 1], "no two elements share memory"
    for each in (
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3, 4, 4, dtype=torch.half).to(memory_format=torch.channels_last),
    ):
        copy = StaticInputs(each, CPU).args
        assert (copy.dtype, copy.shape, copy.stride()) == (each.dtype, each.shape, each.stride())
    of_leaf.sum().backward()
    with pytest.raises(RuntimeError, match=r"or its \.grad"):
        inputs.check_unchanged("step")


def test_results_are_copies_of_tensors_and_nothing_else_is_returned() -> None:
    x = torch.ones(2, requires_grad=True)
    found = detached_copies({"loss": x * 2, "nothing": None, "all": (x, [x])})
    assert found["nothing"] is None
    assert found["loss"].tolist() == [2, 2] and not found["loss"].requires_grad
    for each in (found["all"][0], found["all"][1][0]):
        assert torch.equal(each, x) and each.data_ptr() != x.data_ptr() and not each.requires_grad
    check_outputs({"loss": x, "nothing": None}, "step")
    for wrong in ((x, 1.0), ("text", x), {"loss": [x, x, 3]}):
        with pytest.raises(TypeError, match=r"step returned a (float|str|int)"):
            check_outputs(wrong, "step")


def adam(**options: Any) -> tuple[torch.optim.Optimizer, StepOptions]:
    """Two groups, of two parameters each, after a step."""
    groups = [{"params": [nn.Parameter(torch.ones(2)) for _ in range(2)], "lr": lr} for lr in (0.5, 0.25)]
    optimizer = torch.optim.AdamW(groups, **options)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones(2)
    optimizer.step()
    return optimizer, StepOptions(optimizer, CPU)


def test_a_capture_finds_each_groups_rate_on_the_device_and_leaves_options_as_they_were() -> None:
    optimizer, options = adam()
    options.load()
    before = [dict(group) for group in optimizer.param_groups]
    with options.in_device_memory():
        rates = [group["lr"] for group in optimizer.param_groups]
        assert [float(rate) for rate in rates] == [0.5, 0.25]
        assert all(group["capturable"] is True for group in optimizer.param_groups)
    assert [dict(group) for group in optimizer.param_groups] == before
    for place, value in ((0, 2.0), (1, torch.tensor(4.0)), (1, 8.0)):
        optimizer.param_groups[place]["lr"] = value
        options.load()
        assert float(rates[place]) == float(value)
    for group in optimizer.param_groups:
        with pytest.raises(RuntimeError, match="has changed a learning rate"), options.in_device_memory():
            group["lr"] = 1.0
        assert group["lr"] != 1.0
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 16.0})
    options.load()
    with options.in_device_memory():
        assert [float(group["lr"]) for group in optimizer.param_groups] == [2.0, 8.0, 16.0]


def test_every_parameters_state_is_brought_to_where_kernels_read_it() -> None:
    optimizer, options = adam()
    optimizer.state[optimizer.param_groups[0]["params"][0]]["note"] = "no tensor"
    options.record_state()
    kept = {param: dict(state) for param, state in optimizer.state.items()}
    optimizer.load_state_dict(optimizer.state_dict())  # copies
    for state in optimizer.state.values():
        state["exp_avg"] = torch.full((2,), 7.0)
    options.load()
    for param, state in optimizer.state.items():
        assert all(state[name] is value for name, value in kept[param].items() if name != "note")
        assert state["exp_avg"].tolist() == [7, 7]
    optimizer.state[param]["step"] = 1.0
    with pytest.raises(RuntimeError, match="the optimizer's state 'step' has another shape than in the capture"):
        options.load()


def test_options_of_any_group_and_of_the_optimizer_are_another_kind_of_call() -> None:
    optimizer, options = adam()
    key = options.key()
    optimizer.param_groups[1]["lr"] = 3.0
    optimizer.param_groups[0]["initial_lr"] = 3.0
    assert options.key() == key, "schedules change these"
    for place in (0, 1):
        optimizer.param_groups[place]["weight_decay"] += 1.0
        assert options.key() != key
        key = options.key()
    for name in ("max_grad_norm", "skip_nonfinite"):
        setattr(optimizer, name, True)
        assert options.key() != key
        key = options.key()


def test_a_group_that_an_optimizer_has_lost_takes_its_rate_along() -> None:
    optimizer, options = adam()
    options.load()
    lost = optimizer.param_groups.pop()
    options.load()
    with options.in_device_memory():
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5]
    assert (optimizer.param_groups[0]["lr"], lost["lr"]) == (0.5, 0.25)


# ---- What is let go. ----


def parts_of_a_job() -> tuple[Callable[[Tensor], None], DistributedDataParallel, DistributedOptimizer]:
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = DistributedOptimizer(model, lr=2**-7)

    def train_step(x: Tensor) -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train_step, model, optimizer


def job_of(max_graphs: int = 8) -> tuple[nn.Module, GraphedTrainingStep[..., Any]]:
    train_step, model, optimizer = parts_of_a_job()
    return model, GraphedTrainingStep(train_step, model, optimizer, num_warmup_steps=1, max_graphs=max_graphs)


def test_a_graph_is_freed_as_soon_as_it_serves_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a reset, by a capture of the same call, and when what was around its calls is long past."""
    freed: list[CapturedGraph] = []
    reset = CapturedGraph.reset

    def noted(graph: CapturedGraph) -> None:
        freed.extend([graph] * graph.is_captured)
        reset(graph)

    monkeypatch.setattr(CapturedGraph, "reset", noted)
    model, step = job_of(max_graphs=1)
    x = torch.ones(2, 4)
    step(x)
    step(x)
    step(x)
    assert freed == []
    call = ((x,), {})
    step.capture(step.kind_of(call, step.state()[0]), call)
    assert (len(freed), step.num_graphs) == (1, 1)
    for expected in (1, 2):
        model.module.register_forward_hook(lambda *_: None)
        step.state()
        assert len(freed) == expected
    step.reset()
    assert len(freed) == 2
    step(x)
    step(x)
    step.reset()
    assert len(freed) == 3


def test_what_is_beside_a_graphed_step_is_let_go_by_a_reset() -> None:
    """Calls were compared with it: here a module that was replaced since."""
    model, step = job_of()
    model.module.beside = nn.Identity()
    step(torch.ones(2, 4))
    before = weakref.ref(model.module.beside)
    model.module.beside = nn.Identity()
    model(torch.ones(2, 4))  # the wrapper looks at its modules anew
    step.reset()
    assert before() is None


def test_eager_calls_of_very_many_kinds_are_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their kinds, each of which keeps what was around it, would fill the memory of the host."""
    monkeypatch.setattr(step_graphs, "_MOST_KINDS", 3)
    step, graphs = graphed(*parts_of_a_job(), record_on_cpu=True), []
    for rows in (2, 3, 4, 5, 2, 2, 2):
        step(torch.ones(rows, 4))
        graphs.append(step.num_graphs)
    assert graphs == [0] * 6 + [1]
