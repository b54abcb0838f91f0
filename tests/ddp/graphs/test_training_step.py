"""``GraphedTrainingStep``: programs of users give the numbers of eager training, bit for bit. On CPUs: the stand-in."""

import copy
import gc
import itertools
import logging
import random
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphed_training import CONFIGS, EVENTS, FORMS, STATES, Program, differences, train
from loops import loss_of, make_batches, make_model
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh

from maingrad import graphed
from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GraphedTrainingStep,
    Muon,
)
from maingrad.ddp.collectives.streams import is_capturing
from maingrad.ddp.gathers.gathered_models import GatheredModel, record_gathered_model
from maingrad.ddp.graphs import auto_step
from maingrad.ddp.graphs.capture import CapturedGraph, GraphPool
from maingrad.ddp.graphs.inputs import signature
from maingrad.ddp.graphs.recorded import RecordedGraph
from maingrad.ddp.graphs.step_options import StepOptions
from maingrad.kernels.optimizer.adamw import AdamUpdate
from maingrad.launch import simulate


def check(program: Program, ranks: int = 2) -> None:
    def both() -> list[str]:
        return differences(train(program, graphed=False), train(program, graphed=True))

    assert simulate(both, ranks) == [[]] * ranks


@pytest.mark.in_turn
@pytest.mark.parametrize(("config", "form"), list(itertools.product(CONFIGS, FORMS)))
@pytest.mark.sampled(1)
def test_equals_eager(config: str, form: str) -> None:
    check(Program(config=config, form=form, events=("evaluate",)))


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("event", "config"), list(itertools.product(EVENTS, ("all-reduce, overlap", "ZeRO-1, overlap")))
)
@pytest.mark.sampled(2)
def test_what_programs_do_between_steps(event: str, config: str) -> None:
    check(Program(config=config, events=(event,), form="dropout" if event == "mode" else "fused"))


@pytest.mark.in_turn
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(3)
def test_graphed_captures_every_form(form: str) -> None:
    check(Program(form=form, auto=True, events=("evaluate",)))


@pytest.mark.in_turn
def test_graphed_with_a_scaler_and_everything_between_steps() -> None:
    check(Program(auto=True, dtype=torch.float16, scaler=True))
    check(Program(auto=True, state="compact", events=tuple(event for event in EVENTS if event != "mode")))


@pytest.mark.in_turn
def test_a_module_that_is_switched_to_evaluation() -> None:
    check(Program(events=("mode",), form="dropout"))


@pytest.mark.in_turn
def test_weights_that_are_loaded() -> None:
    check(Program(events=("loads weights",)))


@pytest.mark.in_turn
@pytest.mark.parametrize("state", STATES)
def test_everything_between_steps(state: str) -> None:
    check(Program(state=state, events=tuple(event for event in EVENTS if event != "mode")))


@pytest.mark.in_turn
@pytest.mark.parametrize("state", [state for state in STATES if state != "full"])
@pytest.mark.parametrize("event", ["loads optimizer", "eager step", "other decay"])
def test_no_capture_makes_tables_of_an_update(state: str, event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are copied from the host at once, which a capture refuses."""
    made: list[bool] = []

    make = AdamUpdate.__init__

    def watched(update: AdamUpdate, *args: Any, **kwargs: Any) -> None:
        made.append(is_capturing())
        make(update, *args, **kwargs)

    monkeypatch.setattr(AdamUpdate, "__init__", watched)
    check(Program(state=state, events=(event,)))
    assert made and not any(made)


@pytest.mark.parametrize("order", range(2))
@pytest.mark.sampled(1)
def test_a_rank_trains_eagerly_while_another_one_captures(order: int) -> None:
    """Ranks are threads of one process here: what is refused in captures is refused of those who capture."""

    def on_each_rank() -> None:
        config = DistributedDataParallelConfig(calculate_per_token_loss=True)
        model = DistributedDataParallel(nn.Linear(4, 1), config)
        optimizer = DistributedOptimizer(model, lr=2**-7)

        def train_step(x: Tensor, tokens: Tensor | int) -> Tensor:
            loss = model(x).square().sum()
            loss.backward()
            model.finish_grad_sync(tokens)
            optimizer.step()
            model.zero_grad_buffer()
            return loss

        step = GraphedTrainingStep(train_step, model, optimizer)
        for _ in range(3):
            step(torch.ones(2, 4), torch.tensor(2))
            train_step(torch.ones(2, 4), 2)

    simulate(on_each_rank, 3, seed=order)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer_class": torch.optim.SGD, "momentum": 0.5},
    ],
    ids=["AdamW", "SGD"],
)
@pytest.mark.sampled(1)
def test_an_optimizer_that_goes_back_to_before_its_first_step(options: dict[str, Any]) -> None:
    """A state of before the first step is loaded before eager, captured and replayed steps. A rank has no shard."""

    def on_each_rank() -> None:
        torch.manual_seed(0)
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(nn.Linear(1, 1), config)
        optimizer = DistributedOptimizer(model, lr=2**-7, **options)

        def train_step(x: Tensor) -> Tensor:
            loss = model(x).square().sum()
            loss.backward()
            model.finish_grad_sync()
            optimizer.step()
            model.zero_grad_buffer()
            return loss

        step = GraphedTrainingStep(train_step, model, optimizer)
        start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        losses = []
        for calls in (1, 5, 4):  # eager, captured and replayed
            model.load_state_dict(start[0])
            optimizer.load_state_dict(copy.deepcopy(start[1]))
            losses.append([float(step(torch.ones(2, 1))) for _ in range(calls)])
        assert losses[0] == losses[1][:1]
        assert losses[2] == losses[1][:4]
        assert len(set(losses[1])) == 5

    simulate(on_each_rank, 3)


@pytest.mark.parametrize(("ranks", "config"), [(1, "ZeRO-1, overlap"), (3, "ZeRO-1, overlap"), (4, "hybrid")])
@pytest.mark.sampled(1)
def test_ranks(ranks: int, config: str) -> None:
    check(Program(config=config, events=("evaluate", "rank 0 reads")), ranks)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "program",
    [
        Program(microbatches=1),
        Program(microbatches=4, clip=None),
        Program(dtype=torch.float32),
        Program(optimizer="SGD", events=("loads optimizer",)),
        Program(optimizer="Adam"),
        Program(per_token=True),
        Program(dtype=torch.float16, scaler=True),
        Program(dtype=torch.float16, scaler=True, optimizer="SGD"),
    ],
    ids=["one microbatch", "no clipping", "fp32", "SGD", "Adam", "per token", "loss scale", "loss scale, SGD"],
)
@pytest.mark.sampled(2)
def test_forms_of_a_step(program: Program) -> None:
    check(replace(program, events=(*program.events, "evaluate")))


@pytest.mark.parametrize("config", [{}, {"use_distributed_optimizer": True, "keep_params_whole": True}], ids=str)
def test_muon_beside_adamw(config: dict[str, Any]) -> None:
    """Learning rates are powers of two, and decays too: products with the rate in fp32 have the bits of the host's."""
    groups = [
        {"params": ["0.weight", "2.weight"], "optimizer": Muon, "lr": 2**-5, "weight_decay": 2**-3, "split": 2},
    ]

    def trained(graphed: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
        model = DistributedDataParallel(net, DistributedDataParallelConfig(**config))
        optimizer = DistributedOptimizer(model, lr=2**-7, max_grad_norm=1.0, param_groups=groups)

        def train_step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = GraphedTrainingStep(train_step, model, optimizer) if graphed else train_step
        for number in range(6):
            rank = dist.get_rank() if dist.is_initialized() else 0
            step(torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * number + rank)))
            if number == 3:
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] / 2 if not isinstance(group["lr"], Tensor) else group["lr"].div_(2)
        return {name: param.detach().clone() for name, param in net.named_parameters()}

    def both() -> None:
        eager, graphed = trained(False), trained(True)
        for name, weight in eager.items():
            assert torch.equal(weight, graphed[name]), name

    simulate(both, 2)


@pytest.mark.parametrize("groups", [[], [{"params": "weight", "optimizer": Muon}]], ids=["all", "a group"])
def test_muon_that_skips_is_refused(groups: list[Any]) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4, bias=bool(groups)), DistributedDataParallelConfig())
    cls = torch.optim.AdamW if groups else Muon
    optimizer = DistributedOptimizer(model, optimizer_class=cls, skip_nonfinite=True, param_groups=groups)
    with pytest.raises(ValueError, match="skip_nonfinite skips Muon on the host"):
        GraphedTrainingStep(lambda x: model(x).sum(), model, optimizer)


def test_a_subclass_of_muon_is_refused() -> None:
    class Counting(Muon):
        """Its step may read what changes on the host."""

    model = DistributedDataParallel(nn.Linear(4, 4, bias=False), DistributedDataParallelConfig())
    optimizer = DistributedOptimizer(model, optimizer_class=Counting)
    with pytest.raises(ValueError, match="Counting reads learning rates and counters on the host"):
        GraphedTrainingStep(lambda x: model(x).sum(), model, optimizer)


def test_a_capture_that_has_failed_leaves_a_program_to_train_without_graphs() -> None:
    def trained(graphed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 4), DistributedDataParallelConfig(use_distributed_optimizer=True))
        optimizer = DistributedOptimizer(model, lr=0.1)

        def train_step(x: Tensor) -> None:
            model(x).square().sum().backward()
            optimizer.step()
            if is_capturing():
                optimizer.grad_scale = torch.full((), 2.0)  # as a scaler whose step has raised leaves it
                raise KeyError
            optimizer.zero_grad()

        step = GraphedTrainingStep(train_step, model, optimizer) if graphed else train_step
        for number in range(6):
            x = torch.full((1, 4), 1.0 + number + dist.get_rank())
            try:
                step(x)
            except KeyError:
                assert not hasattr(optimizer, "grad_scale")
                model.zero_grad()
                step = train_step
                step(x)
        assert step is train_step
        return [param.detach().clone() for param in model.parameters()]

    def both() -> None:
        assert all(map(torch.equal, trained(False), trained(True)))

    simulate(both, 2)


@pytest.mark.parametrize("groups", [(), ({"params": "bias", "fused": False},)], ids=["all", "a group"])
def test_loops_over_tensors_are_refused(groups: Any) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4), DistributedDataParallelConfig())
    optimizer = DistributedOptimizer(model, param_groups=groups, fused=bool(groups))
    with pytest.raises(ValueError, match="AdamW reads learning rates and counters on the host"):
        GraphedTrainingStep(lambda x: model(x).sum(), model, optimizer)


class Told(GatheredModel):
    """Another model of the thread, whose parameters are gathered: what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        record_gathered_model(self)

    def finish(self) -> None:
        self.said.append("finish")

    def begin_capture(self) -> None:
        self.said.append("begin")

    def end_capture(self) -> None:
        self.said.append("end")

    def record_replay(self) -> None:
        self.said.append("replay")


def test_all_other_models_of_a_thread_are_told_of_each_call() -> None:
    """A replay may read them, and may write to them: no Python waits for them, and no version tells."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = DistributedOptimizer(model, lr=2**-7)

    def train_step(x: Tensor) -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_capturing() and len(x) == 3:
            raise KeyError

    step = GraphedTrainingStep(train_step, model, optimizer, num_warmup_steps=1)
    others = [Told() for _ in range(3)]
    for expected in (["finish"], ["finish", "begin", "end", "replay"], ["finish", "replay"]):
        step(torch.ones(2, 4))
        for other in others:
            assert other.said == expected
            other.said.clear()
    step(torch.ones(3, 4))
    with pytest.raises(KeyError):
        step(torch.ones(3, 4))
    assert [other.said for other in others] == [["finish", "finish", "begin", "end"]] * 3


def test_calls_of_one_kind_differ_in_values_of_tensors_alone() -> None:
    one, other = torch.ones(2), torch.zeros(2)
    assert signature((one, [other])) == signature((other, [one]))
    calls: list[Any] = [1, True, 1.0, "1", None, one, [one], (one,), {"x": one}, {"y": one}, (one, one), (one, other)]
    calls += [torch.ones(2, requires_grad=True), one.double(), torch.ones(2, 3), torch.ones(3, 2).t()]
    assert len({signature(each) for each in calls}) == len(calls)


def test_equal_options_make_one_kind_and_others_another() -> None:
    """Numbers, containers of them in any nesting, and tensors, which are where they are."""
    tensor = torch.ones(1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    options, (group,) = StepOptions(optimizer, torch.device("cpu")), optimizer.param_groups
    group["own"] = {"scales": [0.5, (1, 2)], "tensors": [tensor]}
    key = options.key()
    group["own"] = copy.copy({"scales": [0.5, (1, 2)], "tensors": [tensor]})
    assert options.key() == key
    group["lr"] = group["initial_lr"] = 0.2
    assert options.key() == key, "rates are read anew"
    for value in (
        {"scales": [0.5, (1, 3)], "tensors": [tensor]},
        {"scales": [0.5, (1, 2)], "tensors": [torch.ones(1)]},
        {"scale": [0.5, (1, 2)], "tensors": [tensor]},
        [0.5],
        None,
    ):
        group["own"] = value
        assert options.key() != key
    group["own"] = {"scales": [0.5, (1, 2)], "tensors": [tensor]}
    reversed_group = dict(reversed(group.items()))
    group.clear()
    group.update(reversed_group)
    assert options.key() == key
    for name in ("max_grad_norm", "skip_nonfinite"):
        setattr(optimizer, name, 1.0)
        assert options.key() != key
        delattr(optimizer, name)


def test_fused_layers_train_eagerly_behind_replays() -> None:
    """What replays have written is none of the program's own writes into ``main_grad``."""

    def losses(graphed: bool) -> list[float]:
        model = DistributedDataParallel(make_model())
        optimizer = DistributedOptimizer(model, optimizer_class=torch.optim.SGD, lr=2**-5)

        def train_step(x: Tensor) -> Tensor:
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = GraphedTrainingStep(train_step, model, optimizer, num_warmup_steps=1)
        steps = [step] * 4 + [train_step] * 2 if graphed else [train_step] * 6
        return [float(each(batch).detach()) for each, batch in zip(steps, make_batches(6), strict=True)]

    assert simulate(losses, 2, True) == simulate(losses, 2, False)


def test_modes_and_rates_that_change_between_and_in_calls() -> None:
    """All modules are left as the function leaves them; and a rate may be a number, a tensor, and the same number."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4)))
    optimizer = DistributedOptimizer(model, optimizer_class=torch.optim.SGD, lr=0.5)

    def train_step(x: Tensor) -> None:
        model.train()
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()

    step = GraphedTrainingStep(train_step, model, optimizer, num_warmup_steps=1)
    decays: list[float] = []
    for lr in (0.5, 0.5, 0.5, torch.tensor(0.0), 0.5, torch.tensor(0.0)):
        model.train()
        before = [param.detach().clone() for param in model.parameters()]
        decays.append(float("0.5"))  # an equal number, made anew
        optimizer.param_groups[0].update(lr=lr, weight_decay=decays[-1])
        step(torch.full((1, 4), 2.0**-4))
        assert not any(module.training for module in model.modules())
        assert all(map(torch.equal, before, model.parameters())) == (lr == 0)
    assert step.num_graphs == 1
    assert model.iteration == 6


def test_a_capture_begins_with_gathers_under_way() -> None:
    """Where the step before has begun none: each captured read waits for its own gather, as in replays."""

    def on_each_rank() -> None:
        config = {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 1}
        model = DistributedDataParallel(nn.Linear(4, 4), DistributedDataParallelConfig(**config))
        optimizer = DistributedOptimizer(model)
        under_way: list[bool] = []

        def train_step(x: Tensor) -> None:
            under_way.extend(gather.under_way for gather in optimizer.param_sync.gathers)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = GraphedTrainingStep(train_step, model, optimizer, num_warmup_steps=1)
        for _ in range(2):
            optimizer.finish_param_sync()
            step(torch.ones(1, 4))
        assert under_way == [False] * 2 + [True] * 2

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_reads_behind_a_replay_wait_for_its_gathers(overlap: bool) -> None:
    """Where gathers do not overlap, the call has waited for them."""

    def on_each_rank() -> None:
        config = {"use_distributed_optimizer": True, "overlap_param_gather": overlap, "bucket_size": 1}
        model = DistributedDataParallel(nn.Linear(4, 4), DistributedDataParallelConfig(**config))
        optimizer = DistributedOptimizer(model)

        def train_step(x: Tensor) -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = GraphedTrainingStep(train_step, model, optimizer, num_warmup_steps=1)
        gathers = optimizer.param_sync.gathers
        for _ in range(4):
            step(torch.ones(1, 4))
            assert [gather.under_way for gather in gathers] == [overlap] * 2
            for param in model.parameters():
                param.sum()
            assert not any(gather.under_way for gather in gathers)

    simulate(on_each_rank, 2)


# ---- ``graphed`` decides. ----


def decided(extra: Callable[[Tensor, list[int]], Any], **options: Any) -> Any:
    """``maingrad.graphed`` of an iteration in which ``extra`` runs too."""
    model = DistributedDataParallel(nn.Linear(4, 4), **options)
    optimizer = DistributedOptimizer(model, lr=2**-7)

    def train_step(x: Tensor, numbers: list[int]) -> Tensor:
        extra(x, numbers)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return graphed(train_step, model, optimizer, record_on_cpu=True)


def test_one_change_among_odd_batches_is_one_change() -> None:
    step = decided(lambda x, numbers: numbers.append(1) if len(x) == 6 else None)
    for rows in (3, 4, 5, 6, 2, 2, 2):
        step(torch.ones(rows, 4), [])
    assert (step.why_eager, step.num_graphs) == (None, 1)


def test_a_step_is_given_up_after_a_few_changes_and_after_more_odd_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, given_up = {"calls": 0}, []
    step = decided(lambda x, numbers: counts.update(calls=counts["calls"] + 1))
    for _ in range(6):
        step(torch.ones(2, 4), [])
        given_up.append(step.why_eager is not None)
    assert given_up == [False] * 4 + [True] * 2
    monkeypatch.setattr(auto_step, "_MOST_EAGER", 5)
    step, given_up = decided(lambda x, numbers: None), []
    for rows in range(1, 8):
        step(torch.ones(rows, 4), [])
        given_up.append(step.why_eager is not None)
    assert given_up == [False] * 5 + [True] * 2


def test_what_changes_before_each_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_step, "_MOST_EAGER", 3)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = DistributedOptimizer(model, lr=2**-7)

    def train_step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = graphed(train_step, model, optimizer, record_on_cpu=True)
    for number in range(4):
        model.module.register_forward_hook(lambda *_: None)
        with torch.autocast("cpu", torch.bfloat16, enabled=number == 0):
            step(torch.ones(2, 4))
    assert step.why_eager == "'a hook of the model' has changed since the call before"


def test_one_rank_warns_and_all_tell_who_asks(caplog: pytest.LogCaptureFixture) -> None:
    """Of a step that is captured, and of one that stays eager."""

    def on_each_rank() -> None:
        step = decided(lambda x, numbers: numbers.append(1) if len(x) == 3 else None)
        for rows in (2, 2, 2, 3, 3, 3, 3, 3):
            step(torch.ones(rows, 4), [])
        assert step.why_eager is not None

    with caplog.at_level(logging.INFO, auto_step.__name__):
        simulate(on_each_rank, 2)
    told = [(record.levelname, record.getMessage().split(".train_step ")[1]) for record in caplog.records]
    assert [level for level, text in told if text == "is a CUDA graph from here on"] == ["INFO"] * 2
    stays = [level for level, text in told if text.startswith("stays eager, and is no CUDA graph: it changes its ")]
    assert sorted(stays) == ["INFO", "WARNING"]


def test_what_a_program_draws_between_calls_is_its_own() -> None:
    step = decided(lambda x, numbers: None)
    for _ in range(8):
        random.random()
        step(torch.ones(2, 4), [])
    assert (step.why_eager, step.num_graphs) == (None, 1)


def test_a_graph_whose_capture_has_changed_the_host_serves_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[bool] = []
    step = decided(lambda x, numbers: captures.append(True) if is_capturing() else None)
    for _ in range(3):
        step(torch.ones(2, 4), [])
    assert (len(captures), step.num_graphs) == (1, 0)
    monkeypatch.setattr(auto_step, "_MOST_CHANGES", 1)
    step(torch.ones(2, 4), [])
    assert re.match("it changes '.*captures.*', which no replay would", step.why_eager)


def test_only_the_ranks_of_the_model_decide() -> None:
    """In instances and across them. Another rank of the program does something else."""

    def on_each_rank() -> list[int]:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("outer", "inner"))
        if dist.get_rank() == 4:
            return []
        config, graphs = DistributedDataParallelConfig(use_distributed_optimizer=True), []
        step = decided(lambda x, numbers: None, config=config, process_group=mesh)
        for number in range(5):
            step(torch.ones(3 if number == 3 and dist.get_rank() == 1 else 2, 4), [])
            graphs.append(step.num_graphs)
        return graphs

    assert simulate(on_each_rank, 5) == [[0, 0, 1, 1, 1]] * 4 + [[]]


# ---- The stand-in, by itself. ----


def test_a_recorded_block_that_fails_has_not_run() -> None:
    """What it wrote several times, by the name of an argument, in a list, and what it has drawn."""
    before = torch.arange(3.0)
    twice, named, first, second = (before.clone() for _ in range(4))
    generator = torch.get_rng_state()

    def fails() -> None:
        twice.add_(1.0)
        twice.mul_(2.0)
        torch.add(before, 1.0, out=named)
        torch._foreach_add_([first, second], 1.0)
        torch._foreach_add_([second, first], 1.0)
        torch.rand(2)
        raise KeyError

    with pytest.raises(KeyError), RecordedGraph().recording():
        fails()
    assert all(torch.equal(each, before) for each in (twice, named, first, second))
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch._dynamo.eval_frame._stance.stance == "default", "compiled code is compiled again"


def test_a_block_is_recorded_on_behind_a_collective_that_returns_a_tensor() -> None:
    """As layers over tensor-parallel ranks have them."""

    def on_each_rank() -> None:
        given, reduced = torch.ones(2), torch.ones(2)
        graph = CapturedGraph(GraphPool(torch.device("cpu")))
        with graph.capture():
            total = all_reduce(given, "sum", dist.group.WORLD) * 1.0
            assert is_capturing()
            dist.all_reduce(reduced)
        assert (total.tolist(), reduced.tolist()) == ([2.0] * 2, [2.0] * 2)
        given.fill_(3.0)
        graph.replay()
        assert (total.tolist(), reduced.tolist()) == ([6.0] * 2, [4.0] * 2)

    simulate(on_each_rank, 2)


def test_memory_that_a_failed_block_has_freed_stays_free() -> None:
    """Of whole parameters, which are gathered for some time."""
    whole, beside = torch.ones(2), torch.ones(2)

    def fails() -> None:
        whole.add_(1.0)
        beside.add_(1.0)
        whole.untyped_storage().resize_(0)
        raise KeyError

    with pytest.raises(KeyError), RecordedGraph().recording():
        fails()
    assert whole.untyped_storage().nbytes() == 0
    assert beside.tolist() == [1.0] * 2


def test_what_was_replayed_is_not_taken_back() -> None:
    """A capture that is given up before its first replay is."""
    for replays in (0, 1):
        total, graph = torch.zeros(2), CapturedGraph(GraphPool(torch.device("cpu")))
        with graph.capture():
            total.add_(1.0)
        for _ in range(replays):
            graph.replay()
        graph.undo()
        assert total.tolist() == [2.0 * replays] * 2
        assert not graph.is_captured


def test_a_recording_that_was_let_go_does_nothing_and_is_undone_no_more() -> None:
    total, graph = torch.zeros(2), RecordedGraph()
    with graph.recording():
        total.add_(1.0)
    graph.reset()
    graph.undo()
    graph.replay()
    assert total.tolist() == [1.0] * 2


class _Held:
    """What a node of autograd keeps."""


class _Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, held: _Held) -> Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def test_what_a_captured_step_returns_keeps_no_graph_of_autograd() -> None:
    """Else its memory would be held as long as the captured graph."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = DistributedOptimizer(model, lr=2**-7)
    held: list[weakref.ref[_Held]] = []

    def train_step(x: Tensor) -> dict[str, Tensor]:
        own = _Held()
        held.append(weakref.ref(own))
        loss = _Holds.apply(model(x), own).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss}

    step = GraphedTrainingStep(train_step, model, optimizer, num_warmup_steps=1)
    for calls in (1, 2, 2):
        assert not step(torch.ones(2, 4))["loss"].requires_grad
        gc.collect()
        assert [each() for each in held] == [None] * calls
    assert step.num_graphs == 1


@pytest.mark.parametrize("config", [{}, {"use_distributed_optimizer": True}], ids=["whole", "sharded"])
def test_masters_follow_what_a_replay_writes_to_parameters_behind_the_update(config: dict[str, Any]) -> None:
    """Of the second layer alone: the other's masters keep bits that its parameters lack."""

    def trained(graphed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
        model = DistributedDataParallel(net, DistributedDataParallelConfig(**config))
        optimizer = DistributedOptimizer(model, lr=2**-7)

        def train_step(x: Tensor) -> None:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                net[1].weight.mul_(0.5)

        step = GraphedTrainingStep(train_step, model, optimizer, num_warmup_steps=1) if graphed else train_step
        for number in range(5):
            step(torch.full((1, 4), 1.0 + number).bfloat16())
        return [each.master.clone() for each in optimizer.slices]

    assert all(map(torch.equal, trained(False), trained(True)))


def test_a_leaf_among_the_arguments_gets_the_values_of_each_call() -> None:
    """It is given twice, and its gradient is that of both."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = DistributedOptimizer(model, lr=0.0)

    def train_step(x: Tensor, again: Tensor) -> tuple[Tensor, ...]:
        loss = model(x).square().sum() + again.sum()
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward(inputs=list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        return loss, grad

    step = GraphedTrainingStep(train_step, model, optimizer, num_warmup_steps=1)
    for number in (1.0, 2.0, 3.0):
        x = torch.full((2, 4), number, requires_grad=True)
        expected = model.module(x).square().sum() + x.sum()
        torch.testing.assert_close(step(x, x), (expected.detach(), *torch.autograd.grad(expected, x)))
    assert step.num_graphs == 1


def test_a_replay_writes_the_memory_of_the_recording_and_no_version_rises() -> None:
    weight, seen = torch.zeros(2, requires_grad=True), torch.zeros(2)
    graph = RecordedGraph()
    with graph.recording(), torch.no_grad():
        weight.add_(1.0)
        made = weight * 2.0
        seen.copy_(made.view(2, 1).squeeze())
    versions = [tensor._version for tensor in (weight, made, seen)]
    for number in (2.0, 3.0):
        graph.replay()
        assert (weight.tolist(), made.tolist(), seen.tolist()) == ([number] * 2, [2 * number] * 2, [2 * number] * 2)
    assert [tensor._version for tensor in (weight, made, seen)] == versions
    assert not (made.requires_grad or seen.requires_grad)
    assert torch._dynamo.eval_frame._stance.stance == "default"
