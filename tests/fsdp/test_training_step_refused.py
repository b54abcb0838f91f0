"""``maingrad.fsdp.GraphedTrainingStep``: what it refuses, and what is right after an error."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer
from maingrad.ddp import GraphedTrainingStep as StepOfWrapper
from maingrad.ddp.torch_grads.sharded_grad import ShardedGrad
from maingrad.fsdp import GraphedTrainingStep, ShardedAdam, ShardedAdamW, fully_shard
from maingrad.launch import simulate


class Job:
    """Two units and an iteration. ``extra`` is called at the end of the iteration, before gradients are cleared."""

    def __init__(self, extra: Callable[["Job"], Any] = lambda job: None, **options: Any) -> None:
        torch.manual_seed(0)
        self.extra = extra
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (*self.model, self.model):
            fully_shard(module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), **{"lr": 2**-4, "fused": True, **options})
        self.graphed = GraphedTrainingStep(self.train_step, self.model, self.optimizer)

    def train_step(self, x: Tensor) -> Tensor:
        self.loss = self.model(x).square().mean()
        self.loss.backward()
        self.optimizer.step()
        self.extra(self)
        self.optimizer.zero_grad()
        return self.loss

    def warm(self) -> Tensor:
        x = torch.ones(2, 4)
        for _ in range(2):
            self.graphed(x)
        return x


def capturing() -> bool:
    return torch.utils._python_dispatch._get_current_dispatch_mode() is not None


def fail_in_backward(job: Job) -> None:
    hidden = job.model[0](torch.ones(2, 4))
    hidden.register_hook(lambda grad: grad / (1 // 0))
    job.model[1](hidden).sum().backward()


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        (lambda job: job.loss.item(), RuntimeError, "capturing"),
        (lambda job: job.optimizer.param_groups[0].update(lr=0.5), RuntimeError, r"scheduler\.step\(\) after"),
        (lambda job: 1 / 0, ZeroDivisionError, "division"),
        (fail_in_backward, ZeroDivisionError, "division"),
    ],
    ids=["reads a value", "scheduler", "an error of its own", "an error in a backward"],
)
@pytest.mark.sampled(1)
def test_a_capture_that_fails(extra: Callable[[Job], Any], error: type[Exception], message: str) -> None:
    def program() -> None:
        job = Job(lambda job: extra(job) if capturing() else None)
        x = job.warm()
        with pytest.raises(error, match=message):
            job.graphed(x)
        assert job.graphed.num_graphs == 0
        assert all(param.grad is None for param in job.model.parameters())
        assert job.optimizer.param_groups[0]["lr"] == 2**-4
        job.extra = lambda job: None
        losses = [float(job.train_step(x).detach()) for _ in range(2)] + [float(job.graphed(x)) for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0]
        assert job.graphed.num_graphs == 1

    simulate(program, 2)


def test_a_capture_that_fails_leaves_nothing_beside_the_model_either() -> None:
    """Neither gradients of other parameters of the optimizer, nor what a loss scaler has told it for its step."""
    scale = nn.Parameter(torch.ones(()))

    class Scaled(Job):
        def train_step(self, x: Tensor) -> Tensor:
            scale.square().backward()
            return super().train_step(x)

    def fail(job: Job) -> None:
        if capturing():
            job.optimizer.grad_scale, job.optimizer.found_inf = torch.ones(()), torch.ones(())  # type: ignore[attr-defined]
            raise KeyError

    job = Scaled(fail)
    job.optimizer.add_param_group({"params": [scale]})
    x = job.warm()
    with pytest.raises(KeyError):
        job.graphed(x)
    assert scale.grad is None
    assert not {"grad_scale", "found_inf"} & vars(job.optimizer).keys()
    job.extra, before = lambda job: None, scale.detach().clone()
    job.graphed(x)
    assert job.graphed.num_graphs == 1 and scale.detach() < before


def test_gradients_are_whole_again_after_a_capture_that_fails_within_the_optimizers_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within a step they are plain tensors of this rank."""

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError

    job, other = Job(), Job()
    x = job.warm()
    other.model(x).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "_init_group", fail)
        with pytest.raises(KeyError):
            job.graphed(x)
    assert isinstance(other.model[0].weight.grad * 2, ShardedGrad)


def test_kinds_of_calls_beyond_the_number_of_graphs_are_refused() -> None:
    job = Job()
    for rows in range(1, 9):
        job.graphed(torch.ones(rows, 4))
    with pytest.raises(RuntimeError, match="8 kinds of calls have a graph each"):
        job.graphed(torch.ones(9, 4))
    graphed = GraphedTrainingStep(job.train_step, job.model, job.optimizer, num_warmup_steps=1, max_graphs=1)
    for number in range(2):
        assert graphed.num_graphs == 0, number
        graphed(torch.ones(2, 4))
    assert graphed.num_graphs == 1
    with pytest.raises(RuntimeError, match="raise max_graphs"):
        graphed(torch.ones(3, 4))


@pytest.mark.in_turn
@pytest.mark.parametrize("placements", ["zero1", "zero2", "zero3"])
def test_after_a_capture_that_fails_a_forward_has_the_weights_of_the_last_step(placements: str) -> None:
    """The gathers of the capture were recorded and never ran, also where whole parameters stay in memory."""

    def program() -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        plain = copy.deepcopy(model)
        for module in (*model, model):
            fully_shard(module, placements=placements)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-4, fused=True)

        def train_step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            if capturing():
                raise ArithmeticError("before the step")
            optimizer.step()
            optimizer.zero_grad()
            return loss

        graphed = GraphedTrainingStep(train_step, model, optimizer)
        x = torch.ones(2, 4)
        for _ in range(2):
            graphed(x)
        with pytest.raises(ArithmeticError, match="before the step"):
            graphed(x)
        with torch.no_grad():
            found = model(x)
        plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
        assert torch.equal(found, plain(x))

    simulate(program, 2)


def hook_optimizer(job: Job) -> None:
    job.optimizer.register_step_pre_hook(lambda *_: None)


def leave_gradients(job: Job) -> None:
    job.model(torch.ones(2, 4)).sum().backward()


def unfuse(job: Job) -> None:
    job.optimizer.param_groups[0]["fused"] = False


def unshard(job: Job) -> None:
    job.model[0].unshard()


@pytest.mark.parametrize(
    ("change", "message"),
    [(hook_optimizer, "hooks"), (leave_gradients, "zero_grad"), (unfuse, "fused=True"), (unshard, r"reshard\(\)")],
)
def test_what_a_replay_cannot_take(change: Callable[[Job], Any], message: str) -> None:
    def program() -> None:
        job = Job()
        x = job.warm()
        job.graphed(x)
        job.graphed(x)
        change(job)
        with pytest.raises((RuntimeError, ValueError), match=message):
            job.graphed(x)

    simulate(program, 2)


def test_around_a_call() -> None:
    job = Job()
    x = job.warm()
    with job.model.no_sync(), pytest.raises(RuntimeError, match="open it in the function"):
        job.graphed(x)
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are disabled"):
        job.graphed(x)
    with job.model.record_timeline(), pytest.raises(RuntimeError, match="record eager steps"):
        job.graphed(x)
    assert job.graphed(x).shape == ()
    assert job.graphed(x).shape == ()
    with job.model.record_timeline(), pytest.raises(RuntimeError, match="record eager steps"):
        job.graphed(x)  # a replay


def test_a_step_is_one_iteration() -> None:
    twice = Job(lambda job: job.optimizer.step())
    with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) 2 times"):
        twice.graphed(torch.ones(2, 4))
    forwards = Job(lambda job: None)
    step = GraphedTrainingStep(lambda x: forwards.model(x).sum().detach(), forwards.model, forwards.optimizer)
    with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) 0 times"):
        step(torch.ones(2, 4))
    left = Job(lambda job: setattr(job.optimizer, "zero_grad", lambda: None))
    with pytest.raises(RuntimeError, match=r"has left \.grad"):
        left.graphed(torch.ones(2, 4))
    other = Job()
    second = torch.optim.SGD(other.model.parameters(), lr=0.1, fused=True)
    other.extra = lambda job: second.step()
    with pytest.raises(RuntimeError, match="SGD has stepped beside"):
        other.graphed(torch.ones(2, 4))


def test_what_is_built() -> None:
    job = Job()
    with pytest.raises(ValueError, match="outermost"):
        GraphedTrainingStep(job.train_step, job.model[0], job.optimizer)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], fused=True)
    with pytest.raises(ValueError, match="no parameter of the model"):
        GraphedTrainingStep(job.train_step, job.model, stranger)
    with pytest.raises(ValueError, match="fused=True"):
        GraphedTrainingStep(job.train_step, job.model, torch.optim.Adagrad(job.model.parameters()))
    groups = [{"params": [job.model[0].weight]}, {"params": [job.model[1].weight], "fused": False}]
    with pytest.raises(ValueError, match="fused=True"):
        GraphedTrainingStep(job.train_step, job.model, torch.optim.SGD(groups, lr=0.1, fused=True))
    dampened = torch.optim.SGD(job.model.parameters(), momentum=0.9, dampening=0.5, fused=True)
    with pytest.raises(ValueError, match="use dampening=0"):
        GraphedTrainingStep(job.train_step, job.model, dampened)
    for cls in (ShardedAdam, ShardedAdamW):
        GraphedTrainingStep(job.train_step, job.model, cls(job.model.parameters()))
    with pytest.raises(TypeError, match="torch optimizer"):
        GraphedTrainingStep(job.train_step, job.model, job.model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"maingrad\.ddp\.GraphedTrainingStep"):
        GraphedTrainingStep(job.train_step, nn.Linear(2, 2), job.optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"maingrad\.fsdp\.GraphedTrainingStep"):
        StepOfWrapper(job.train_step, job.model, job.optimizer)
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="module of fully_shard"):
        GraphedTrainingStep(job.train_step, wrapped, DistributedOptimizer(wrapped))  # type: ignore[arg-type]


def test_hooks_that_are_registered_later() -> None:
    """A hook of a shard is called by later calls, and a hook that was removed is not."""
    job = Job()
    x = job.warm()
    job.graphed(x)
    handle = job.model[0].weight.register_post_accumulate_grad_hook(lambda param: param.grad.zero_())
    before = job.model[0].weight.detach().clone()
    for _ in range(4):
        job.graphed(x)
    assert torch.equal(job.model[0].weight.detach(), before)
    handle.remove()
    job.graphed(x)
    assert not torch.equal(job.model[0].weight.detach(), before)
    assert job.graphed.num_graphs == 2


def test_reset() -> None:
    job = Job()
    x = job.warm()
    losses = [float(job.graphed(x)) for _ in range(2)]
    job.graphed.reset()
    assert job.graphed.num_graphs == 0
    losses += [float(job.graphed(x)) for _ in range(4)]
    assert job.graphed.num_graphs == 1
    assert losses == sorted(losses, reverse=True)
