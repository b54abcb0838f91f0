"""``maingrad.graphed``: captured where a replay does what the function would do; else eager, with a reason.

Each program runs twice, as it is and graphed, and must see the same, bit for bit. On CPUs recorded operations stand in
for CUDA graphs: a replay runs none of the program's Python.
"""

import inspect
import logging
import math
import random
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import maingrad
from maingrad.ddp.collectives.streams import is_capturing
from maingrad.ddp.graphs import auto_step

STEPS, WIDTH, VOCAB = 9, 8, 16
factor = 1.0
"""A global that programs read."""


class Net(nn.Module):
    """(tokens [B, T]) -> logits [B, T, V], with attributes as models have them."""

    num_made = 0

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.dropout = nn.Dropout(0.25)
        self.config = SimpleNamespace(scale=1.0, layers=["up", "down"])
        self.num_calls = 0
        self.inside: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.config.scale
        for name in self.config.layers:
            x = x + torch.tanh(getattr(self, name)(x))
        logits: Tensor = self.head(self.inside(self.dropout(x)))
        return logits


class Job:
    """A model, its optimizer, and what a program has seen of them."""

    def __init__(
        self, *, graphed: bool, form: str = "zero1", dropout: bool = False, mesh: Any = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.net = Net().train(dropout)
        units = {"units": [self.net.up, self.net.down]} if form == "zero3" else {"units": ()}
        self.model = maingrad.parallelize(self.net, form, mesh=mesh, **units)
        self.optimizer: Any = maingrad.make_optimizer(self.model, torch.optim.AdamW, lr=2**-6, **options)
        self.is_graphed = graphed
        self.draws = torch.Generator().manual_seed(1)
        self.seen: list[Any] = []
        self.step: Any = None

    def graphed(self, train_step: Callable[..., Any], **options: Any) -> Any:
        self.step = train_step
        if self.is_graphed:
            self.step = maingrad.graphed(train_step, self.model, self.optimizer, record_on_cpu=True, **options)
        return self.step

    def batch(self, length: int = 4) -> Tensor:
        return torch.randint(VOCAB, (2, length), generator=self.draws)

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def iterate(self, tokens: Tensor, scale: Any = 1.0) -> Tensor:
        loss = self.loss(tokens) * scale
        loss.backward()
        self.finish()
        return loss.detach()

    def run(self, between: Callable[[int], Any] | None = None, length: Callable[[int], int] = lambda number: 4) -> None:
        for number in range(STEPS):
            self.seen.append(self.step(self.batch(length(number))))
            if between is not None:
                self.seen.append(between(number))


def check(program: Callable[[Job], None], **options: Any) -> Any:
    """Run the program both ways; returns the graphed step."""
    global factor
    jobs = []
    for graphed in (False, True):
        factor = 1.0
        job = Job(graphed=graphed, **options)
        program(job)
        job.seen += [dict(job.net.state_dict()), job.net.num_calls, random.getstate(), str(np.random.get_state())]
        jobs.append(job)
    eager, graphed_job = (job.seen for job in jobs)
    assert len(eager) == len(graphed_job)
    for at, (a, b) in enumerate(zip(eager, graphed_job, strict=True)):
        assert same(a, b), f"number {at}: {a} eagerly, {b} graphed"
    return jobs[1].step


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


# ---- Captured. ----


def plain(job: Job) -> None:
    job.graphed(job.iterate)
    job.run()


@pytest.mark.parametrize("form", ["ddp", "zero1", "zero3"])
@pytest.mark.sampled(3)
def test_is_captured_after_two_calls(form: str) -> None:
    step = check(plain, form=form)
    assert step.num_graphs == 1
    assert step.why_eager is None
    job = Job(graphed=True, form=form)
    job.graphed(job.iterate)
    graphs = []
    for _ in range(4):
        job.step(job.batch())
        graphs.append(job.step.num_graphs)
    assert graphs == [0, 0, 1, 1]


def test_on_a_cpu_the_function_itself_runs(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(graphed=False)
    results = []

    def train_step(tokens: Tensor) -> float:
        print(end="")
        return float(job.iterate(tokens))

    step = maingrad.graphed(train_step, job.model, job.optimizer)
    results += [step(job.batch()) for _ in range(4)]
    assert all(type(result) is float for result in results)
    assert (step.num_graphs, step.why_eager, caplog.records) == (0, None, [])
    step.reset()


def dropout(job: Job) -> None:
    job.graphed(job.iterate)
    job.run()
    job.seen.append(torch.get_rng_state())


def accumulation_and_schedule(job: Job) -> None:
    total = torch.zeros(())
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 2, gamma=0.5)

    def train_step(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        losses = []
        for index, tokens in enumerate(batch["tokens"]):
            if index == 0:
                with job.model.no_sync():
                    (job.loss(tokens) / 2).backward()
                continue
            loss = job.loss(tokens) / 2
            loss.backward()
            losses.append(loss)
        norm = nn.utils.clip_grad_norm_(job.model.parameters(), 0.5)
        total.add_(losses[-1].detach())
        job.finish()
        return {"loss": losses[-1], "norm": norm}

    step = job.graphed(train_step)
    for _ in range(STEPS):
        found = step({"tokens": torch.stack([job.batch(), job.batch()])})
        schedule.step()
        job.seen += [found["loss"].detach(), found["norm"], total.clone(), schedule.get_last_lr()]


def in_the_order_of_the_memory(job: Job) -> None:
    """What a step sees of a tensor's strides: images may be channels_last, and views need the order."""

    def train_step(tokens: Tensor) -> Tensor:
        return job.iterate(tokens, scale=torch.tensor(tokens.stride()).sum())

    step = job.graphed(train_step)
    job.seen += [step(torch.randint(VOCAB, (4, 2), generator=job.draws).t()) for _ in range(STEPS)]


def results_in_the_order_of_the_memory(job: Job) -> None:
    job.graphed(lambda tokens: job.iterate(tokens) * torch.ones(3, 2).t())
    job.run()
    job.seen += [result.stride() for result in job.seen]


def lengths(job: Job) -> None:
    job.graphed(job.iterate)
    for _ in range(3):
        job.run(length=lambda number: (4, 6, 3)[number % 3])


def evaluation_and_loads(job: Job) -> None:
    first: dict[str, Any] = {}

    def between(number: int) -> Any:
        if number == 3:
            first.update({name: value.clone() for name, value in job.net.state_dict().items()})
        if number == 6:
            job.net.load_state_dict(first)
        was = job.net.training
        job.net.eval()
        with torch.no_grad():
            logits = job.model(job.batch())
        job.net.train(was)
        return logits

    job.graphed(job.iterate)
    job.run(between)


def made_in_the_first_call(job: Job) -> None:
    """A cache that a model makes when it first runs."""

    def inside(x: Tensor) -> Tensor:
        if not hasattr(job.net, "bias"):
            job.net.bias = torch.ones(WIDTH)
        return x + job.net.bias

    job.net.inside = inside
    job.graphed(job.iterate)
    job.run()


def the_mode_that_it_leaves(job: Job) -> None:
    """Eager calls, the one that captures, and replays leave the model in evaluation."""

    def train_step(tokens: Tensor) -> Tensor:
        loss = job.iterate(tokens)
        job.net.eval()
        return loss

    def between(number: int) -> Any:
        modes = [module.training for module in job.net.modules()]
        job.net.train()
        return modes

    job.net.train()
    job.graphed(train_step)
    job.run(between)


def the_mode_that_it_reads_and_leaves(job: Job) -> None:
    """As before, through the wrapper, which has a mode of its own that code names."""

    def train_step(tokens: Tensor) -> Tensor:
        loss = job.iterate(tokens)
        job.model.eval()
        return loss

    job.net.inside = lambda x: x * 2 if job.net.training else x
    job.model.train()
    job.graphed(train_step)
    job.run(lambda number: job.model.train() is None)


def draws_between_calls(job: Job) -> None:
    """Data loaders draw on the host, and the step does not."""
    job.graphed(job.iterate)
    job.run(lambda number: random.random() + np.random.rand())


def begun_outside(job: Job) -> None:
    """A backward before the fifth call leaves gradients, to which that call's are added: it runs eagerly."""
    job.graphed(job.iterate)
    job.run(lambda number: job.loss(job.batch()).backward() if number == 4 else None)


@pytest.mark.parametrize(
    ("program", "num_graphs"),
    [
        (dropout, 1),
        (draws_between_calls, 1),
        (begun_outside, 1),
        (accumulation_and_schedule, 1),
        (in_the_order_of_the_memory, 1),
        (results_in_the_order_of_the_memory, 1),
        (lengths, 3),
        (evaluation_and_loads, 1),
        (made_in_the_first_call, 1),
        (the_mode_that_it_leaves, 1),
        (the_mode_that_it_reads_and_leaves, 1),
    ],
)
@pytest.mark.sampled(10)
def test_is_captured(program: Callable[[Job], None], num_graphs: int) -> None:
    step = check(program, dropout=program is dropout)
    assert (step.why_eager, step.num_graphs) == (None, num_graphs)


def test_a_step_may_be_any_callable_and_has_its_signature() -> None:
    job = Job(graphed=True)
    step = job.graphed(partial(job.iterate, scale=2.0))
    assert inspect.signature(step) == inspect.signature(partial(job.iterate, scale=2.0))
    for _ in range(4):
        step(job.batch())
    assert (step.why_eager, step.num_graphs) == (None, 1)


def test_more_lengths_than_graphs() -> None:
    def program(job: Job) -> None:
        job.graphed(job.iterate, max_graphs=2)
        for _ in range(3):
            job.run(length=lambda number: (4, 6, 3)[number % 3])

    step = check(program)
    assert (step.why_eager, step.num_graphs) == (None, 2)


def test_reset_lets_all_graphs_go_and_later_calls_are_captured_anew() -> None:
    def program(job: Job) -> None:
        step = job.graphed(job.iterate)
        job.run()
        if job.is_graphed:
            assert step.num_graphs == 1
            step.reset()
            assert step.num_graphs == 0
        job.run()

    assert check(program).num_graphs == 1


def test_a_kept_result_keeps_no_graph() -> None:
    job = Job(graphed=True)
    job.graphed(lambda tokens: [job.loss(tokens), job.iterate(tokens)][0].detach())

    def train_step(tokens: Tensor) -> Tensor:
        loss = job.loss(tokens)
        loss.backward()
        job.finish()
        return loss

    step = job.graphed(train_step)
    kept = [step(job.batch()) for _ in range(5)]
    assert step.num_graphs == 1
    assert not any(loss.requires_grad for loss in kept)


def test_what_a_program_lets_go_is_freed_with_its_activations() -> None:
    job = Job(graphed=True)
    job.net.last = job.loss(job.batch())
    step = job.graphed(job.iterate)
    step(job.batch())
    last = weakref.ref(job.net.last)
    job.net.last = None
    assert last() is None
    step(job.batch())
    assert step.why_eager is None


# ---- Not captured. ----


def counter_in_the_module(job: Job) -> None:
    def inside(x: Tensor) -> Tensor:
        job.net.num_calls += 1
        return x * (1 + job.net.num_calls % 2)

    job.net.inside = inside
    job.graphed(job.iterate)
    job.run()


def counter_of_the_class(job: Job) -> None:
    Net.num_made = 0

    def train_step(tokens: Tensor) -> Tensor:
        Net.num_made += 1
        return job.iterate(tokens, Net.num_made)

    job.graphed(train_step)
    job.run()


def counter_in_the_closure(job: Job) -> None:
    number = 0

    def train_step(tokens: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return job.iterate(tokens, 1.0 / number)

    job.graphed(train_step)
    job.run()


def counter_in_an_object(job: Job) -> None:
    state = SimpleNamespace(inner={"steps": 0})

    def train_step(tokens: Tensor) -> Tensor:
        state.inner["steps"] += 1
        return job.iterate(tokens, 1.0 / state.inner["steps"])

    job.graphed(train_step)
    job.run()


def caches_then_counts(job: Job) -> None:
    """The first calls may fill caches: what stays a reason is the counter."""
    state = SimpleNamespace(cache=0, count=0)

    def train_step(tokens: Tensor) -> Tensor:
        if state.cache < 2:
            state.cache += 1
        else:
            state.count += 1
        return job.iterate(tokens)

    job.graphed(train_step)
    job.run()


def global_number(job: Job) -> None:
    def train_step(tokens: Tensor) -> Tensor:
        global factor
        factor *= 0.5
        return job.iterate(tokens, factor)

    job.graphed(train_step)
    job.run()


def list_that_grows(job: Job) -> None:
    losses: list[Tensor] = []

    def train_step(tokens: Tensor) -> Tensor:
        losses.append(job.iterate(tokens))
        return torch.stack(losses[-3:]).mean()

    job.graphed(train_step)
    job.run()
    job.seen.append(len(losses))


def tensor_that_is_replaced(job: Job) -> None:
    state = SimpleNamespace(mean=torch.zeros(()))

    def train_step(tokens: Tensor) -> Tensor:
        state.mean = 0.5 * state.mean + job.iterate(tokens)
        return state.mean.clone()

    job.graphed(train_step)
    job.run()
    job.seen.append(state.mean)


def python_draws(job: Job) -> None:
    job.graphed(lambda tokens: job.iterate(tokens.roll(random.randrange(4), 1)))
    job.run()


def numpy_draws(job: Job) -> None:
    job.graphed(lambda tokens: job.iterate(tokens, float(np.random.rand())))
    job.run()


def own_generator_draws(job: Job) -> None:
    draws, more = random.Random(3), np.random.default_rng(3)
    job.graphed(lambda tokens: job.iterate(tokens, draws.random() + more.random()))
    job.run()


def reads_an_iterator(job: Job) -> None:
    batches = iter([job.batch() for _ in range(STEPS + 1)])
    job.graphed(lambda tokens: job.iterate(tokens + 0 * next(batches)))
    job.run()


def reads_a_value(job: Job) -> None:
    def train_step(tokens: Tensor) -> Tensor:
        loss = job.loss(tokens)
        loss.backward()
        if loss.item() > 2.7:  # data decides
            nn.utils.clip_grad_norm_(job.model.parameters(), 0.01)
        job.finish()
        return loss.detach()

    job.graphed(train_step)
    job.run()


def reads_a_value_in_a_helper(job: Job) -> None:
    def is_high(loss: Tensor) -> bool:
        return loss.item() > 2.7

    def train_step(tokens: Tensor) -> Tensor:
        loss = job.iterate(tokens)
        return loss if is_high(loss) else -loss

    job.graphed(train_step)
    job.run()


def reads_a_value_after_the_step(job: Job) -> None:
    def train_step(tokens: Tensor) -> Tensor:
        loss = job.iterate(tokens)
        return loss if loss.item() > 2.7 else -loss

    job.graphed(train_step)
    job.run()


def selects_rows(job: Job) -> None:
    job.graphed(lambda tokens: job.iterate(tokens[tokens.sum(1) > 20] if bool((tokens.sum(1) > 20).any()) else tokens))
    job.run()


def returns_a_number(job: Job) -> None:
    job.graphed(lambda tokens: job.iterate(tokens).item())
    job.run()


def prints(job: Job) -> None:
    def train_step(tokens: Tensor) -> Tensor:
        print(end="")
        return job.iterate(tokens)

    job.graphed(train_step)
    job.run()


def logs(job: Job) -> None:
    log = logging.getLogger("program")

    def train_step(tokens: Tensor) -> Tensor:
        log.debug("a step")
        return job.iterate(tokens)

    job.graphed(train_step)
    job.run()


def schedule_inside(job: Job) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 2, gamma=0.5)

    def train_step(tokens: Tensor) -> Tensor:
        loss = job.iterate(tokens)
        schedule.step()
        return loss

    job.graphed(train_step)
    job.run(lambda number: schedule.get_last_lr())


def no_step(job: Job) -> None:
    def train_step(tokens: Tensor) -> Tensor:
        loss = job.loss(tokens)
        loss.backward()
        return loss.detach()

    def between(number: int) -> None:
        job.finish()

    job.graphed(train_step)
    job.run(between)


def takes_its_arguments_apart(job: Job) -> None:
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        return job.iterate(batch.pop("tokens"))

    step = job.graphed(train_step)
    for _ in range(STEPS):
        batch = {"tokens": job.batch()}
        job.seen += [step(batch), len(batch)]


def replaces_its_arguments(job: Job) -> None:
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        batch["tokens"] = batch["tokens"].roll(1, 0)
        return job.iterate(batch["tokens"])

    step = job.graphed(train_step)
    for _ in range(STEPS):
        batch = {"tokens": job.batch()}
        job.seen += [step(batch), batch["tokens"]]


def writes_its_arguments(job: Job) -> None:
    def train_step(tokens: Tensor, total: Tensor) -> Tensor:
        total += job.iterate(tokens)
        return total.clone()

    step, total = job.graphed(train_step), torch.zeros(())
    for _ in range(STEPS):
        job.seen.append(step(job.batch(), total))


def takes_objects(job: Job) -> None:
    step = job.graphed(lambda batch: job.iterate(batch.tokens))
    for _ in range(40):
        job.seen.append(step(SimpleNamespace(tokens=job.batch())))


def number_in_each_call(job: Job) -> None:
    step = job.graphed(lambda tokens, scale: job.iterate(tokens, scale))
    for number in range(40):
        job.seen.append(step(job.batch(), 1.0 / (number + 1)))


def global_that_moves_between(job: Job) -> None:
    global factor
    step = job.graphed(lambda tokens: job.iterate(tokens, factor))
    for _ in range(40):
        factor *= 0.75
        job.seen.append(step(job.batch()))


def global_that_moves_behind_each_capture(job: Job) -> None:
    global factor
    step = job.graphed(lambda tokens: job.iterate(tokens, factor))
    for number in range(30):
        factor *= 0.75 if number % 3 == 0 else 1
        job.seen.append(step(job.batch()))


def counts_its_captures(job: Job) -> None:
    counts = {"captures": 0}

    def train_step(tokens: Tensor) -> Tensor:
        counts["captures"] += is_capturing()
        return job.iterate(tokens)

    job.graphed(train_step)
    for _ in range(2):
        job.run()


STAYS_EAGER = {
    counter_in_the_module: r"changes 'model.*\.num_calls'",
    counter_of_the_class: r"changes 'Net\.num_made'",
    counter_in_the_closure: "changes 'number'",
    counter_in_an_object: r"changes 'state\.inner\['steps'\]'",
    caches_then_counts: r"changes 'state\.count'",
    global_number: "changes 'factor'",
    list_that_grows: "changes 'losses'",
    tensor_that_is_replaced: r"changes 'state\.mean'",
    python_draws: r"random numbers of Python",
    numpy_draws: "random numbers of NumPy",
    own_generator_draws: "draws from (draws|more)",
    reads_an_iterator: "reads 'batches'",
    reads_a_value: r"test_graphed\.py:\d+ \(if loss\.item\(\) > 2\.7",
    reads_a_value_in_a_helper: r"test_graphed\.py:\d+ \(return loss\.item",
    reads_a_value_after_the_step: r"test_graphed\.py:\d+ \(return loss if",
    selects_rows: r"test_graphed\.py:\d+ .*reads a value on the host",
    returns_a_number: "returned a float",
    prints: "it prints",
    logs: "log 'program'",
    schedule_inside: "changes 'schedule",
    no_step: "one whole iteration",
    takes_its_arguments_apart: "changes its arguments",
    replaces_its_arguments: "changes its arguments",
    writes_its_arguments: "among its arguments",
    takes_objects: "not SimpleNamespace",
    number_in_each_call: "no kind of call comes often enough",
    global_that_moves_between: "'factor' has changed",
    global_that_moves_behind_each_capture: r"captured 8 times, for few calls each: 'factor' has changed",
    counts_its_captures: r"changes 'counts\['captures'\]'",
}


@pytest.mark.in_turn
@pytest.mark.parametrize("program", STAYS_EAGER)
@pytest.mark.sampled(len(STAYS_EAGER))
def test_stays_eager_and_says_why_once(program: Callable[[Job], None], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "maingrad"):
        step = check(program)
    assert step.num_graphs == 0
    assert step.why_eager is not None
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert "stays eager" in record.getMessage()
    caplog.clear()
    assert re.search(STAYS_EAGER[program], record.getMessage()), record.getMessage()


def test_dropout_of_a_capture_that_failed_is_drawn_again() -> None:
    assert check(reads_a_value, dropout=True).num_graphs == 0


class Loop:
    """A program's own trainer: its methods name what a step reads, and the loop counts beside."""

    def __init__(self, job: Job) -> None:
        self.job, self.step, self.seen, self.scale = job, 0, job.seen, 1.0

    def train_step(self, tokens: Tensor) -> Tensor:
        self.job.optimizer.zero_grad()
        return self.job.iterate(tokens, self.scaled())

    def scaled(self) -> float:
        return self.scale

    def run(self) -> None:
        step = self.job.graphed(self.train_step)
        for _ in range(2 * STEPS):
            self.seen.append(step(self.job.batch()))
            self.step += 1
            if self.step == STEPS:
                self.scale = 0.5


def test_a_loop_may_count_on_the_object_whose_method_is_graphed() -> None:
    """The step calls ``optimizer.step``, and the loop counts ``self.step``."""
    step = check(lambda job: Loop(job).run())
    assert (step.why_eager, step.num_graphs) == (None, 2)


def test_what_the_wrapper_refuses() -> None:
    step = check(plain, form="ddp", foreach=True, fused=False)
    assert "fused" in step.why_eager
    with pytest.raises(TypeError, match=r"parallelize\(\)"):
        maingrad.graphed(plain, nn.Linear(2, 2), torch.optim.SGD([torch.ones(1)]))


def test_a_gradient_goes_to_what_was_computed_before_the_call() -> None:
    job, weight = Job(graphed=True), torch.ones((), requires_grad=True)
    step = job.graphed(job.iterate)
    for _ in range(4):
        weight.grad = None
        step(job.batch(), weight * 2)
        assert weight.grad is not None
    assert step.num_graphs == 0


def test_an_error_of_the_function_is_its_own() -> None:
    job = Job(graphed=True)

    def train_step(tokens: Tensor) -> Tensor:
        if len(tokens) > 2:
            raise RuntimeError("mine")
        return job.iterate(tokens)

    step = job.graphed(train_step)
    with pytest.raises(RuntimeError, match="mine"):
        step(torch.ones(3, 4, dtype=torch.long))
    for _ in range(4):
        step(job.batch())
    assert step.num_graphs == 1


def test_an_error_of_the_device_is_raised_and_the_call_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture has gone well, and its work has failed: to run the function eagerly would train twice."""
    job = Job(graphed=True)
    step = job.graphed(job.iterate)
    for _ in range(2):
        step(job.batch())

    def finish(variant: Any) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(step._graphs, "_finish", finish)
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        step(job.batch())


@pytest.mark.parametrize(
    ("backend", "made"), [("nccl", True), ("cuda:nccl", True), ("cpu:gloo,cuda:nccl", False), ("gloo", False)]
)
def test_ranks_decide_between_hosts(backend: str, made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device runs the previous replay meanwhile."""
    groups: list[Any] = []
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backend)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [1, 3])
    monkeypatch.setattr(auto_step, "new_group_of_members", lambda ranks, **more: groups.append((ranks, more)))
    group: Any = object()
    found = auto_step._on_host(group, torch.device("cuda", 0))
    assert (groups, found) == (([([1, 3], {"backend": "gloo"})], None) if made else ([], group))


# ---- What changes between two calls. ----


def at_step(change: Callable[[Job], Any], *numbers: int) -> Callable[[Job], None]:
    def program(job: Job) -> None:
        job.graphed(lambda tokens: job.iterate(tokens, factor))
        job.run(lambda number: change(job) if number in numbers else None)
        job.run()

    return program


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def half(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output / 2


def change_global(job: Job) -> None:
    global factor
    factor = 1.5 - factor


CHANGES: dict[str, Callable[[Job], Any]] = {
    "attribute": lambda job: setattr(job.net.config, "scale", 0.5),
    "list": lambda job: job.net.config.layers.append("up"),
    "dropout": lambda job: setattr(job.net.dropout, "p", 0.5),
    "train": lambda job: job.net.train(not job.net.training) is None,
    "hook": lambda job: job.net.up.register_forward_hook(double).id > 0,
    "new attribute": lambda job: setattr(job.net.up, "extra", 1),
    "other attribute": lambda job: (
        [setattr(job.net.up, "extra", job.net.up.in_features), delattr(job.net.up, "in_features")] == [None, None]
    ),
    "another function": lambda job: setattr(job.net, "inside", torch.tanh),
    "global": change_global,
    "decay": lambda job: job.optimizer.param_groups[0].update(weight_decay=0.5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.sampled(len(CHANGES))
def test_a_change_between_two_calls_is_seen(change: str) -> None:
    step = check(at_step(CHANGES[change], 4), dropout=change in ("dropout", "train"))
    assert (step.why_eager, step.num_graphs) == (None, 2)


def removed(job: Job, handle: Any) -> None:
    handle.remove()


def emptied(job: Job, handle: Any) -> None:
    job.net.up._forward_hooks = OrderedDict()


def exchanged(job: Job, handle: Any) -> None:
    handle.remove()
    job.net.up.register_forward_hook(half)


@pytest.mark.parametrize("change", [removed, emptied, exchanged])
@pytest.mark.sampled(3)
def test_a_hook_that_leaves_is_seen(change: Callable[[Job, Any], None]) -> None:
    def program(job: Job) -> None:
        handle = job.net.up.register_forward_hook(double)
        job.graphed(job.iterate)
        job.run(lambda number: change(job, handle) if number == 4 else None)
        job.run()

    assert check(program).num_graphs == 2


def scale_linears(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    return output * (factor / 2) if isinstance(module, nn.Linear) else None


def test_hooks_of_all_modules_are_seen_and_so_is_what_they_read() -> None:
    def program(job: Job) -> None:
        job.graphed(job.iterate)
        job.run()
        handle = nn.modules.module.register_module_forward_hook(scale_linears)
        try:
            job.run()
            change_global(job)
            job.run()
        finally:
            handle.remove()
        job.run()

    step = check(program)
    assert (step.why_eager, step.num_graphs) == (None, 3)


def scaled_by_factor(grad: Tensor) -> Tensor:
    return grad * factor


def test_what_a_hook_of_an_ignored_parameter_reads_is_seen() -> None:
    """No unit holds the parameter."""

    def program(graphed: bool) -> tuple[list[Any], int]:
        global factor
        factor = 1.0
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        net[1].weight.register_hook(scaled_by_factor)
        model = maingrad.parallelize(net, "zero3", mesh=maingrad.WORLD_OF_ONE, ignored_params=[net[1].weight])
        optimizer = maingrad.make_optimizer(model, torch.optim.SGD, lr=2**-6)

        def train_step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = maingrad.graphed(train_step, model, optimizer, record_on_cpu=True) if graphed else train_step
        seen = []
        for number in range(2 * STEPS):
            if number == STEPS:
                factor = 3.0
            seen.append(step(torch.full((2, WIDTH), 1.0 / (1 + number))).detach())
        return seen, step.num_graphs if graphed else 0

    (eager, _), (graphed, num_graphs) = program(False), program(True)
    assert all(map(same, eager, graphed)) and num_graphs == 2


def test_what_comes_back_has_its_graph_still() -> None:
    """Two phases of training by turns are two graphs."""
    step = check(at_step(change_global, 3, 7))
    assert (step.why_eager, step.num_graphs) == (None, 2)


def graphs_of_ranks(form: str, length: Callable[[int, int], int], shape: tuple[int, ...] = (2,)) -> list[int]:
    """Number of graphs on each rank of a mesh whose results are an eager job's; ``length`` is of a call and a rank."""

    def program(graphed: bool) -> tuple[list[Any], int]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
        job = Job(graphed=graphed, form=form, mesh=mesh)
        rank = torch.distributed.get_rank()
        job.graphed(job.iterate)
        job.run(length=lambda number: length(number, rank))
        return job.seen, job.step.num_graphs if graphed else 0

    def both() -> int:
        eager, _ = program(False)
        graphed, num_graphs = program(True)
        assert all(map(same, eager, graphed))
        return num_graphs

    return maingrad.simulate(both, math.prod(shape))


@pytest.mark.parametrize("form", ["zero1", "zero3"])
@pytest.mark.sampled(2)
def test_ranks_decide_together(form: str) -> None:
    """One rank has another length: all run eagerly then. An eager iteration has collectives that a replay lacks."""
    assert graphs_of_ranks(form, lambda number, rank: 6 if number == 5 and rank == 0 else 4) == [1, 1]


@pytest.mark.in_turn
@pytest.mark.parametrize("form", ["zero1", "zero3"])
def test_ranks_of_all_instances_decide_together(form: str) -> None:
    """What one rank cannot do is heard by those that share neither its shards nor its replicas."""
    assert graphs_of_ranks(form, lambda number, rank: 6 if number == 5 and rank == 0 else 4, (2, 2)) == [1] * 4


@pytest.mark.in_turn
@pytest.mark.parametrize("form", ["zero1", "zero3"])
def test_a_rank_captures_while_another_has_its_graph(form: str) -> None:
    """The second rank meets another length in every second call, and captures it when the first one could replay."""
    assert graphs_of_ranks(form, lambda number, rank: 6 if number % 2 and rank == 1 else 4) == [1, 2]


def test_one_rank_that_must_stay_eager_stops_all(caplog: pytest.LogCaptureFixture) -> None:
    def program() -> str:
        job = Job(graphed=True)
        rank, counts = torch.distributed.get_rank(), [0]

        def train_step(tokens: Tensor) -> Tensor:
            if rank == 1:
                counts[0] += 1
            return job.iterate(tokens)

        job.graphed(train_step)
        job.run()
        assert job.step.num_graphs == 0
        return job.step.why_eager

    with caplog.at_level(logging.INFO, "maingrad"):
        first, second = maingrad.simulate(program, 2)
    assert first == "another rank does"
    assert "counts" in second
    said = {each.getMessage().partition("no CUDA graph: ")[2]: each.levelname for each in caplog.records}
    assert said == {first: "WARNING", second: "INFO"}, "the first rank alone speaks up"


def test_where_one_ranks_capture_fails_no_rank_has_a_graph() -> None:
    def program(graphed: bool) -> tuple[list[Any], str | None]:
        job = Job(graphed=graphed)
        rank = torch.distributed.get_rank()

        def train_step(tokens: Tensor) -> Tensor:
            loss = job.iterate(tokens)
            if rank == 1:
                loss.item()
            return loss

        job.graphed(train_step)
        job.run()
        return job.seen, job.step.why_eager if graphed else None

    def both() -> str | None:
        (eager, _), (graphed, why) = program(False), program(True)
        assert all(map(same, eager, graphed))
        return why

    first, second = maingrad.simulate(both, 2)
    assert "another rank's capture has failed" in first
    assert "reads a value on the host" in second
