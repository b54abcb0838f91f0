"""What ``GraphedTrainingStep`` refuses, by name and before anything is wrong; and that the model goes on after it."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from maingrad import graphed
from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GraphedTrainingStep,
)
from maingrad.ddp.collectives.streams import is_capturing
from maingrad.ddp.graphs import auto_step, capture
from maingrad.ddp.graphs.capture import CapturedGraph, GraphPool
from maingrad.ddp.graphs.step_graphs import check_memory_settings, counted_steps
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate


class Job:
    """A model, its optimizer, and an iteration of them with a body of the test's."""

    def __init__(self, extra: Callable[["Job"], Any] = lambda job: None, **options: Any) -> None:
        torch.manual_seed(0)
        config = DistributedDataParallelConfig(**options.pop("config", {}))
        self.model = DistributedDataParallel(nn.Linear(4, 4), config)
        self.optimizer = DistributedOptimizer(self.model, lr=2**-7, **options)
        self.extra = extra
        self.loss = torch.zeros(())
        self.graphed = GraphedTrainingStep(self.train_step, self.model, self.optimizer, max_graphs=3)

    def train_step(self, x: Tensor, *numbers: Any) -> Tensor:
        self.loss = self.model(x).square().mean()
        self.loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.model.zero_grad_buffer()
        self.extra(self)
        return self.loss


def warm(job: Job, *numbers: Any) -> Tensor:
    x = torch.ones(2, 4)
    for _ in range(2):
        job.graphed(x, *numbers)
    return x


def check_goes_on(job: Job) -> None:
    """The model trains eagerly, and the same function can be captured when its fault is gone."""
    job.extra = lambda job: None
    x = torch.ones(2, 4)
    losses = [float(job.train_step(x)) for _ in range(2)] + [float(job.graphed(x)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert job.graphed.num_graphs == 1


def read_the_loss(job: Job) -> None:
    job.loss.item()


def schedule(job: Job) -> None:
    for group in job.optimizer.param_groups:
        group["lr"] = 0.125


def fill_the_rate(job: Job) -> None:
    for group in job.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(0.125)


def replace_a_buffer(job: Job) -> None:
    job.model.module.register_buffer("mean", torch.zeros(1))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (replace_a_buffer, "write buffers in place"),
        (read_the_loss, "capturing"),
        (schedule, r"scheduler\.step\(\) after"),
        (fill_the_rate, r"scheduler\.step\(\) after"),
        (lambda job: job.optimizer.param_groups[0].update(lr=2**-7) or 1 / 0, "division"),
    ],
    ids=["replaces a buffer", "reads a value", "scheduler", "scheduler of tensors", "an error of its own"],
)
def test_a_capture_that_fails(extra: Callable[[Job], Any], message: str) -> None:
    job = Job(lambda job: extra(job) if torch.utils._python_dispatch._get_current_dispatch_mode() else None)
    x = warm(job)
    before = [param.clone() for param in job.model.parameters()]
    with pytest.raises((RuntimeError, ZeroDivisionError), match=message):
        job.graphed(x)
    assert job.model.is_clear
    assert job.graphed.num_graphs == 0
    assert [group["lr"] for group in job.optimizer.param_groups] == [2**-7] * len(job.optimizer.param_groups)
    assert all(map(torch.equal, before, job.model.parameters())), "nothing of it has run"
    check_goes_on(job)


@pytest.mark.parametrize(
    ("overlap", "error"), [(False, ArithmeticError), (True, ArithmeticError), (False, KeyboardInterrupt)]
)
def test_a_capture_that_fails_between_backward_and_step(overlap: bool, error: type[BaseException]) -> None:
    """Reductions that the capture has launched are over, and the next iteration is as any other."""

    def program(fails: bool) -> list[Tensor]:
        torch.manual_seed(0)
        config = DistributedDataParallelConfig(overlap_grad_reduce=overlap)
        model = DistributedDataParallel(nn.Linear(4, 4), config)
        optimizer = DistributedOptimizer(model, lr=2**-7)
        failures = [error("of the program")] if fails else []

        def train_step(x: Tensor) -> None:
            model(x).square().mean().backward()
            if failures and torch.utils._python_dispatch._get_current_dispatch_mode():
                raise failures.pop()
            optimizer.step()
            model.zero_grad()

        graphed = GraphedTrainingStep(train_step, model, optimizer)
        x = torch.full((2, 4), 1.0 + dist.get_rank())
        for _ in range(2):
            graphed(x)
        if fails:
            with pytest.raises(error):
                graphed(x)
            assert model.is_clear
        for _ in range(3):
            graphed(x)
        return [param.detach().clone() for param in model.parameters()]

    for mine, other in zip(simulate(program, 2, True), simulate(program, 2, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda job: job.optimizer.register_step_post_hook(lambda *_: None), "hooks"),
        (lambda job: job.optimizer.register_step_pre_hook(lambda *_: None), "hooks"),
        (lambda job: job.model(torch.ones(2, 4)).sum().backward(), "an iteration has begun"),
        (lambda job: job.optimizer.param_groups[0].update(fused=False), "fused"),
        (lambda job: job.model.module.register_parameter("late", nn.Parameter(torch.ones(1))), "late"),
        (lambda job: setattr(job.model.module.weight, "data", torch.ones(4, 4)), "other storage"),
        (lambda job: DistributedOptimizer(job.model), "replaced"),
        (lambda job: job.model.unwrap(), r"after unwrap\(\): this wrapper reduces nothing"),
        (lambda job: job.optimizer.param_groups[0]["params"][0].mul_(2), "written"),
    ],
    ids=[
        "hook",
        "hook before",
        "begun",
        "unfused",
        "new parameter",
        "storage",
        "other optimizer",
        "unwrapped",
        "master written",
    ],
)
@torch.no_grad()
def test_what_an_eager_step_or_a_replay_cannot_take(change: Callable[[Job], Any], message: str) -> None:
    def program() -> None:
        job = Job(config={"use_distributed_optimizer": True})
        with torch.enable_grad():
            x = warm(job)
            job.graphed(x)
            job.graphed(x)
        with torch.set_grad_enabled("begun" in message):
            change(job)
        with torch.enable_grad(), pytest.raises((RuntimeError, ValueError), match=message):
            job.graphed(x)

    simulate(program, 2)


def test_arguments_and_results() -> None:
    job = Job()
    x = warm(job)
    with pytest.raises(TypeError, match="takes tensors, numbers and strings"):
        job.graphed(x, object.__new__(type("Unhashable", (), {"__hash__": None})))
    assert job.graphed(x, 1.0).shape == ()
    job.graphed(x, 2.0)
    with pytest.raises(RuntimeError, match="give numbers that change as tensors"):
        job.graphed(x, 3.0)
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are disabled"):
        job.graphed(x)
    twice = Job()
    for other in [x] * 3 + [x.clone()] * 3:
        twice.graphed(x, other)
    assert twice.graphed.num_graphs == 2, "a tensor that is given twice is one in the graph"
    returns = Job()
    returns.graphed = GraphedTrainingStep(
        lambda x: float(returns.train_step(x).detach()), returns.model, returns.optimizer
    )
    with pytest.raises(TypeError, match="returned a float"):
        returns.graphed(x)


READS: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda x: x[0, 0].item(),
    "a truth": lambda x: bool(x[0, 0]),
    "places": lambda x: x.nonzero(),
    "equality": lambda x: torch.equal(x, x),
    "kinds": lambda x: torch.unique(x),
    "kinds of rows": lambda x: torch.unique(x, dim=0),
    "runs": lambda x: torch.unique_consecutive(x),
}


@pytest.mark.parametrize("name", READS)
def test_what_needs_a_value_on_the_host_is_refused_in_a_capture(name: str) -> None:
    """Also by the stand-in on CPUs, so that tests without a GPU see it."""
    job = Job()
    job.extra = lambda job: READS[name](job.loss.detach().view(1, 1))
    x = warm(job)
    with pytest.raises(RuntimeError, match="captur"):
        job.graphed(x)
    check_goes_on(job)


def test_eager_calls_before_a_capture_are_as_many_as_are_asked_for() -> None:
    job, graphs = Job(), []
    step = GraphedTrainingStep(partial(job.train_step), job.model, job.optimizer, num_warmup_steps=3, max_graphs=1)
    hooks = len(_global_optimizer_post_hooks)
    for _ in range(5):
        step(torch.ones(2, 4))
        graphs.append(step.num_graphs)
    assert graphs == [0, 0, 0, 1, 1]
    assert len(_global_optimizer_post_hooks) == hooks, "none stays"


def test_part_of_an_iteration() -> None:
    job = Job()

    def give_up(x: Tensor) -> None:
        job.model(x).sum().backward()
        job.model.finish_grad_sync()
        job.model.zero_grad()

    for part, message in (
        (lambda x: job.model(x).sum(), r"step\(\) 0 times"),
        (lambda x: [job.train_step(x), job.train_step(x)][0], "2 times"),
        (lambda x: [job.train_step(x), give_up(x)][0], "1 times, and .* 2 times"),
        (lambda x: [give_up(x)][0], "0 times, and .* 1 times"),
    ):
        with pytest.raises(RuntimeError, match=message):
            GraphedTrainingStep(part, job.model, job.optimizer)(torch.ones(2, 4))

    def forgets(x: Tensor) -> Tensor:
        job.model.zero_grad_buffer()
        loss = job.model(x).square().mean()
        loss.backward()
        job.model.finish_grad_sync()
        job.optimizer.step()
        return loss

    with pytest.raises(RuntimeError, match=r"let zero_grad\(\) be its last call"):
        GraphedTrainingStep(forgets, job.model, job.optimizer)(torch.ones(2, 4))

    def begins_another(x: Tensor) -> Tensor:
        loss = job.train_step(x)
        with job.model.no_sync():
            job.model(x).sum().backward()
        return loss

    job.model.zero_grad()
    with pytest.raises(RuntimeError, match=r"step\(\) 1 times, and zero_grad\(\) 1 times .*, and has left gradients"):
        GraphedTrainingStep(begins_another, job.model, job.optimizer)(torch.ones(2, 4))


def test_numbers_of_tokens_are_tensors() -> None:
    job = Job(config={"calculate_per_token_loss": True})

    def train_step(x: Tensor) -> Tensor:
        loss = job.model(x).square().sum()
        loss.backward()
        job.model.finish_grad_sync(2)
        job.optimizer.step()
        job.model.zero_grad_buffer()
        return loss

    step = GraphedTrainingStep(train_step, job.model, job.optimizer)
    x = torch.ones(2, 4)
    step(x)
    step(x)
    with pytest.raises(RuntimeError, match="give it a tensor on the device"):
        step(x)


def test_what_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="check_for_nan_in_grad"):
        Job(config={"check_for_nan_in_grad": True})
    with pytest.raises(ValueError, match="check_replicas_every"):
        Job(config={"check_replicas_every": 2})
    with pytest.raises(ValueError, match="RMSprop reads learning rates"):
        Job(optimizer_class=torch.optim.RMSprop)
    with pytest.raises(ValueError, match="RMSprop reads learning rates"):
        Job(param_groups=[{"params": "weight"}, {"params": "bias", "optimizer": torch.optim.RMSprop}])
    sgd = {"optimizer_class": torch.optim.SGD, "momentum": 0.5}
    with pytest.raises(ValueError, match="SGD with dampening"):
        Job(**sgd, param_groups=[{"params": "weight"}, {"params": "bias", "dampening": 0.25}])
    one, other = Job(), Job()
    with pytest.raises(ValueError, match="another model"):
        GraphedTrainingStep(one.train_step, one.model, other.optimizer)
    with pytest.raises(TypeError, match="not Linear and DistributedOptimizer"):
        GraphedTrainingStep(one.train_step, one.model.module, one.optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not DistributedDataParallel and AdamW"):
        GraphedTrainingStep(one.train_step, one.model, torch.optim.AdamW(one.model.parameters()))  # type: ignore[arg-type]
    sharded = fully_shard(nn.Linear(4, 4), mesh=WORLD_OF_ONE)
    with pytest.raises(TypeError, match="not FSDPLinear and AdamW"):
        GraphedTrainingStep(one.train_step, sharded, torch.optim.AdamW(sharded.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_warmup_steps"):
        GraphedTrainingStep(one.train_step, one.model, one.optimizer, num_warmup_steps=0)


def test_a_timeline_around_it() -> None:
    job = Job()
    x = warm(job)
    with job.model.record_timeline(), pytest.raises(RuntimeError, match="record eager steps"):
        job.graphed(x)


def test_reset_captures_anew() -> None:
    job = Job()
    x = warm(job)
    options = [dict(group) for group in job.optimizer.param_groups]
    job.graphed(x)
    assert job.graphed.num_graphs == 1
    for before, now in zip(options, job.optimizer.param_groups, strict=True):
        assert all(now[name] is value or now[name] == value for name, value in before.items())
    job.graphed.reset()
    assert job.graphed.num_graphs == 0
    for _ in range(3):  # max_graphs counts what is there
        job.graphed(x)
        assert job.graphed.num_graphs == 0, "it warms up anew"
        job.graphed.reset()
    check_goes_on(job)


def test_a_state_of_another_shape_is_taken_after_reset() -> None:
    """An entry of the program's own in the optimizer's state, which captured kernels might read."""
    job = Job()
    x = warm(job)
    note = partial(next(iter(job.optimizer.state.values())).__setitem__, "note")
    note(torch.zeros(2))
    job.graphed(torch.ones(3, 4))
    job.graphed(x)
    note(torch.zeros(3))
    with pytest.raises(RuntimeError, match="'note' has another shape"):
        job.graphed(x)
    job.graphed.reset()
    check_goes_on(job)


def counted(job: Job, **options: Any) -> tuple[Any, Any]:
    """``maingrad.graphed`` of the job's iteration, and what has ``number``, that of calls of its Python."""
    calls = threading.local()  # which is not compared
    calls.number = 0

    def train_step(x: Tensor) -> Tensor:
        calls.number += 1
        loss = job.model(x).square().mean()
        loss.backward()
        job.optimizer.step()
        job.model.zero_grad()
        return loss

    return graphed(train_step, job.model, job.optimizer, record_on_cpu=True, **options), calls


def test_where_one_ranks_capture_fails_a_rank_that_captures_anew_goes_on_eagerly() -> None:
    def program() -> str | None:
        job = Job()

        def train_step(x: Tensor) -> Tensor:
            loss = job.model(x).square().mean()
            loss.backward()
            job.optimizer.step()
            job.model.zero_grad()
            if len(x) == 3:
                loss.item()
            return loss

        step = graphed(train_step, job.model, job.optimizer, record_on_cpu=True)
        for number in range(8):
            if number == 4:
                assert step.num_graphs == 1
            step(torch.ones(3 if dist.get_rank() == 1 and number >= 4 else 2, 4))
        return step.why_eager

    first, second = simulate(program, 2)
    assert "another rank's capture has failed" in first
    assert "reads a value on the host" in second


def test_graphed_lets_graphs_go_whose_state_has_another_shape() -> None:
    job = Job()
    step, _ = counted(job)
    step(torch.ones(2, 4))
    note = partial(next(iter(job.optimizer.state.values())).__setitem__, "note")
    note(torch.zeros(2))
    for _ in range(3):
        step(torch.ones(2, 4))
    assert step.num_graphs == 1
    note(torch.zeros(3))
    step(torch.ones(3, 4))
    assert (step.why_eager, step.num_graphs) == (None, 0)


def test_graphed_lets_graphs_go_whose_surroundings_are_long_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_step, "_MOST_CAPTURES", 2)
    monkeypatch.setattr(auto_step, "_REPLAYS_OF_A_CAPTURE", 1)
    job = Job()
    step, calls = counted(job, max_graphs=2)
    for phase in range(3):
        job.model.module.register_forward_hook(lambda *_: None)
        for _ in range(5):
            step(torch.ones(2, 4))
        assert step.why_eager is None
        assert calls.number == 3 * (phase + 1), "two eager ones and the capture in each phase"


def test_graphed_keeps_the_graphs_of_surroundings_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And lets go of those that were there longest ago."""
    monkeypatch.setattr(auto_step, "_MOST_CAPTURES", 2)
    job = Job()
    step, calls = counted(job)
    for _ in range(3):
        step(torch.ones(2, 4))
    assert (step.num_graphs, calls.number) == (1, 3)
    for phase in range(1, 4):
        handle = job.model.module.register_forward_hook(lambda *_: None)
        step(torch.ones(2, 4))
        handle.remove()
        step(torch.ones(2, 4))
        assert (step.why_eager, step.num_graphs, calls.number) == (None, 1, 3 + phase)


def test_graphed_stops_after_so_many_captures_that_served_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_step, "_MOST_CAPTURES", 1)
    monkeypatch.setattr(auto_step, "_REPLAYS_OF_A_CAPTURE", 3)
    for num_replays, goes_on in ((2, False), (3, True)):
        step, _ = counted(Job())
        for _ in range(3 + num_replays):
            step(torch.ones(2, 4))
        for _ in range(3):
            step(torch.ones(3, 4))
        assert step.num_graphs == 2 * goes_on
        if not goes_on:
            assert step.why_eager.startswith("it was captured 1 times, for few calls each")


def test_graphed_takes_any_number_of_odd_batches_between_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_step, "_MOST_EAGER", 4)
    step, calls = counted(Job())
    for _ in range(3):
        step(torch.ones(2, 4))
    for number in range(6):
        step(torch.ones(3 + number, 4))
        step(torch.ones(2, 4))
    assert step.why_eager is None
    assert calls.number == 3 + 6


def test_graphed_runs_eagerly_what_finds_no_graph_free_and_stops_where_nothing_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls before a capture count no more behind it."""
    monkeypatch.setattr(auto_step, "_MOST_EAGER", 4)
    step, calls = counted(Job(), max_graphs=1)
    for _ in range(4):
        step(torch.ones(2, 4))
    assert (step.num_graphs, calls.number) == (1, 3)
    stopped = []
    for _ in range(6):
        step(torch.ones(3, 4))
        stopped.append(step.why_eager is not None)
    assert stopped == [False] * 4 + [True] * 2
    assert "more shapes and options than there may be graphs (max_graphs)" in step.why_eager
    assert calls.number == 3 + 6


def test_graphed_counts_the_eager_calls_behind_a_capture_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_step, "_MOST_EAGER", 4)
    step, _ = counted(Job())
    stopped = []
    for rows in (2, 2, 2, 3, 4, 5, 6, 7):
        step(torch.ones(rows, 4))
        stopped.append(step.why_eager is not None)
    assert stopped == [False] * 7 + [True]
    assert step.why_eager == "no kind of call comes often enough"


class _Counter:
    """What no graph can be for: it is equal to itself alone."""


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (_Counter, "takes tensors, numbers and strings"),
        (lambda: {1: _Counter()}, "takes tensors, numbers and strings"),
        (lambda: nn.Parameter(torch.ones(1)), "a parameter, which would get none from a copy"),
        (lambda: torch.ones(1, requires_grad=True) * 2.0, "the result of operations with gradients"),
    ],
    ids=["object", "inside", "parameter", "result"],
)
def test_graphed_runs_eagerly_with_arguments_that_no_graph_can_have(
    extra: Callable[[], Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turn with others, of which the graphs go on."""
    monkeypatch.setattr(auto_step, "_MOST_EAGER", 4)
    job, seen = Job(), threading.local()

    def train_step(x: Tensor, beside: Any = None) -> Tensor:
        seen.beside = beside
        loss = job.model(x).square().mean()
        loss.backward()
        job.optimizer.step()
        job.model.zero_grad()
        return loss

    step = graphed(train_step, job.model, job.optimizer, record_on_cpu=True)
    for _ in range(3):
        step(torch.ones(2, 4))
    assert step.num_graphs == 1
    for _ in range(4):
        given = extra()
        step(torch.ones(2, 4), given)
        assert seen.beside is given
    assert (step.why_eager, step.num_graphs) == (None, 1)
    step(torch.ones(2, 4), extra())
    assert why in step.why_eager


def test_kinds_of_calls_in_surroundings_that_are_long_past_leave_room_for_others() -> None:
    """At most three surroundings are remembered for two graphs."""
    job = Job()
    step = GraphedTrainingStep(job.train_step, job.model, job.optimizer, max_graphs=2)
    for refused in (False, False, True, False):
        job.model.module.register_forward_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match="2 kinds of calls have a graph each") if refused else nullcontext():
            step(torch.ones(2, 4))


def test_other_values_of_an_option_beside_the_groups_are_another_graph() -> None:
    job = Job(skip_nonfinite=False)
    x = warm(job)
    job.graphed(x)
    job.optimizer.skip_nonfinite = True
    job.graphed(x)
    job.graphed(torch.full((2, 4), torch.inf))
    job.graphed(x)
    assert job.graphed.num_graphs == 2
    assert all(param.isfinite().all() for param in job.model.parameters())


def test_a_step_in_a_capture_that_is_not_its_own() -> None:
    """Of a program's own graph, or of another optimizer's step. The host's part would not be replayed."""
    job = Job()
    job.model(torch.ones(2, 4)).sum().backward()
    before = [param.clone() for param in job.model.parameters()]
    with (
        pytest.raises(RuntimeError, match="in the captured step of another optimizer"),
        CapturedGraph(GraphPool(torch.device("cpu"))).capture(),
    ):
        job.optimizer.step()
    assert all(map(torch.equal, before, job.model.parameters()))
    job.optimizer.step()
    assert not any(map(torch.equal, before, job.model.parameters()))


def test_another_optimizer_in_the_step() -> None:
    """Of a parameter beside the model: replays would go on with the learning rate of the capture."""
    scale = nn.Parameter(torch.ones(()))
    beside = torch.optim.SGD([scale], lr=0.1)

    def step_beside(job: Job) -> None:
        scale.grad = torch.ones(())
        beside.step()

    with pytest.raises(RuntimeError, match="as a group of param_groups"):
        Job(step_beside).graphed(torch.ones(2, 4))


def test_optimizers_of_other_threads() -> None:
    """Simulated ranks are threads: their optimizers step at the same time, each over its own parameters."""
    mine, trained, strange = (torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=0.1) for _ in range(3))
    trained_ids = {id(param) for param in trained.param_groups[0]["params"]}

    def step_in_a_thread(optimizer: torch.optim.Optimizer) -> None:
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()

    with counted_steps("train_step", mine, trained_ids) as steps:
        step_in_a_thread(strange)
        mine.step()
    assert steps == [mine]
    with pytest.raises(RuntimeError, match="SGD has stepped beside"), counted_steps("train_step", mine, trained_ids):
        step_in_a_thread(trained)
    with pytest.raises(RuntimeError, match="SGD has stepped beside"), counted_steps("train_step", mine, trained_ids):
        strange.step()


@pytest.mark.parametrize(
    ("setting", "kind", "num_ranks", "refused"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "cuda", 2, True),
        ("PYTORCH_ALLOC_CONF", "cuda", 2, True),
        ("PYTORCH_CUDA_ALLOC_CONF", "cuda", 1, False),
        ("PYTORCH_CUDA_ALLOC_CONF", "cpu", 2, False),
    ],
)
def test_memory_that_the_allocator_maps_anew(
    setting: str, kind: str, num_ranks: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    check_memory_settings(torch.device(kind), num_ranks)
    monkeypatch.setenv(setting, "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(RuntimeError, match="expandable_segments:True") if refused else nullcontext():
        check_memory_settings(torch.device(kind), num_ranks)


def test_a_capture_within_a_capture() -> None:
    outer, inner = (CapturedGraph(GraphPool(torch.device("cpu"))) for _ in range(2))
    with outer.capture():
        total = torch.ones(2) + 1
        with pytest.raises(RuntimeError, match="a capture within a capture"), inner.capture():
            pass
        total.mul_(3)
    assert not inner.is_captured
    total.zero_()
    outer.replay()
    assert total.tolist() == [6, 6]


def test_casts_of_a_capture_are_read_in_it_alone() -> None:
    weight, x = nn.Parameter(torch.ones(1, 2)), torch.ones(1, 2)
    graph = CapturedGraph(GraphPool(torch.device("cpu")))
    with torch.autocast("cpu", torch.bfloat16):
        nn.functional.linear(x, weight)
        weight.data.mul_(2)
        with graph.capture():
            inside = nn.functional.linear(x, weight)
        weight.data.mul_(2)
        after = nn.functional.linear(x, weight)
    assert (inside.item(), after.item()) == (4, 8)


# ---- A capture on a GPU, by a graph of ``torch.cuda`` that only notes what it is asked. ----


class CudaGraph:
    """Notes its calls in ``log``."""

    log: list[str]
    cannot_end = False
    """The first one's ``capture_end`` raises, as after an operation that cannot be captured."""

    def __init__(self) -> None:
        self.is_first = not self.log

    def capture_begin(self, pool: str = "its own", capture_error_mode: str = "global") -> None:
        self.log.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self.log.append("end")
        if self.cannot_end and self.is_first:
            raise RuntimeError("capture_end() found the capture broken")

    def replay(self) -> None:
        self.log.append("replay")

    def reset(self) -> None:
        self.log.append("reset")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> GraphPool:
    log: list[str] = []
    handles = iter(["pool 0", "pool 1"])
    monkeypatch.setattr(CudaGraph, "log", log, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CudaGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: log.append(f"work on {device}"))
    monkeypatch.setattr(capture, "end_allocations", lambda device, handle: log.append(f"nothing more from {handle}"))
    return GraphPool(torch.device("cuda", 0), object())  # type: ignore[arg-type]


def test_on_a_gpu_a_capture_runs_nothing_and_a_replay_runs_it(pool: GraphPool) -> None:
    graph = CapturedGraph(pool)
    with graph.capture():
        assert not graph.is_captured
        assert is_capturing()
    assert not graph.ran
    assert graph.is_captured
    graph.replay()
    graph.undo()
    assert not graph.is_captured
    assert CudaGraph.log == ["begin in pool 0, thread_local", "end", "replay", "reset"]


NOTES = {
    "operation failed due to a previous error during capture": "neither read a value of the device",
    "capturing depends on work in the legacy stream": "let go of losses and outputs that were kept without",
    "sizes do not fit": None,
}


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("text", NOTES)
def test_on_a_gpu_the_first_error_of_a_capture_is_told(
    text: str, broken: bool, pool: GraphPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the capture cannot be ended, later ones have memory of their own, and the generator draws again."""
    monkeypatch.setattr(CudaGraph, "cannot_end", broken)
    graph, error = CapturedGraph(pool), RuntimeError(text)
    with pytest.raises(RuntimeError) as raised, graph.capture():
        raise error
    assert raised.value is error
    note = NOTES[text]
    assert [note in each for each in getattr(error, "__notes__", [])] == [True] * (note is not None)
    assert not graph.is_captured
    assert not is_capturing()
    recovery = ["nothing more from pool 0", "begin in its own, thread_local", "work on cuda", "end"] if broken else []
    assert CudaGraph.log == ["begin in pool 0, thread_local", "end", *recovery]
    assert pool.handle == ("pool 1" if broken else "pool 0")
