"""A step of a pipeline that fails in the middle, and the steps after it."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelined import reduced_grads
from torch import Tensor, nn
from torch.distributed import pipelining

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.launch import simulate
from maingrad.te_integration import Linear
from maingrad.te_integration.pipeline import PipelineStage

WIDTH = 8
ROWS = 3
STAGES = 2
MICROBATCHES = 4
SCHEDULES = {"Interleaved1F1B": "ScheduleInterleaved1F1B", "ZeroBubble": "ScheduleInterleavedZeroBubble"}


class Failing(nn.Module):
    """Raises in one pass of the microbatch with the given number, counted from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.at: tuple[str, int] | None = None
        self.seen = {"forward": 0, "backward": 0}

    def fail_at(self, at: tuple[str, int] | None) -> None:
        self.at, self.seen = at, {"forward": 0, "backward": 0}

    def forward(self, x: Tensor) -> Tensor:
        self._pass("forward")
        y = x.clone()
        if y.requires_grad:
            y.register_hook(lambda grad: self._pass("backward"))
        return y

    def _pass(self, which: str) -> None:
        at, self.seen[which] = (which, self.seen[which]), self.seen[which] + 1
        if at == self.at:
            raise ArithmeticError(f"{which} of microbatch {at[1]}")


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(
            Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True, name=f"first of {index}"),
            Failing(),
            Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True, name=f"second of {index}"),
        )
        for index in range(STAGES)
    ]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator)
    return x, torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator)


class Pipeline:
    """All stages on this rank; other ranks hold replicas."""

    def __init__(self, kind: str, *, wrap: bool = True, stages: int = STAGES, **config: Any) -> None:
        self.layers = make_layers()[:stages]
        if not wrap:
            for layer in self.layers:
                for module in layer:
                    module.fuse_wgrad_accumulation = False
        config = DistributedDataParallelConfig(**config)
        self.models = [DistributedDataParallel(layer, config) if wrap else layer for layer in self.layers]
        alone = dist.new_subgroups(1)[0]
        self.stages = [
            PipelineStage(model, index, stages, torch.device("cpu"), group=alone)
            for index, model in enumerate(self.models)
        ]
        schedule = getattr(pipelining, SCHEDULES[kind])
        self.schedule = schedule(self.stages, MICROBATCHES, loss_fn, scale_grads=False)

    def step(self, step: int, stage: int = 0, fails: tuple[str, int] | None = None) -> None:
        self.layers[stage][1].fail_at(fails)
        x, target = batch(step)
        self.schedule.step(x, target=target, losses=[])

    def fail(self, step: int, stage: int, at: tuple[str, int]) -> None:
        with pytest.raises((ArithmeticError, RuntimeError)) as caught:
            self.step(step, stage, at)
        assert "of microbatch" in f"{caught.value}{caught.value.__cause__}"

    def grads(self) -> dict[str, Tensor]:
        grads = {}
        for index, model in enumerate(self.models):
            if isinstance(model, DistributedDataParallel):
                model.finish_grad_sync()
                found = reduced_grads(model)
                model.zero_grad_buffer()
            else:
                found = {name: param.grad.clone() for name, param in model.named_parameters()}
                model.zero_grad()
            grads |= {f"{index}.{name}": grad for name, grad in found.items()}
        return grads


def check_equal(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(mine[name], grad), name


def undisturbed(kind: str, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    pipeline = Pipeline(kind, **options)
    grads = []
    for step in range(3):
        pipeline.step(step)
        grads.append(pipeline.grads())
    return grads


def disturbed(kind: str, options: dict[str, Any], stage: int, at: tuple[str, int]) -> list[dict[str, Tensor]]:
    """Steps that succeed; after each of them another step fails and is abandoned."""
    pipeline = Pipeline(kind, **options)
    grads = []
    for step in range(3):
        pipeline.step(step)
        grads.append(pipeline.grads())
        pipeline.fail(step + 1, stage, at)
        for each in pipeline.stages:
            each.abandon_step()
    return grads


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap_grad_reduce": True, "bucket_size": 1},
    "sharded": {"overlap_grad_reduce": True, "use_distributed_optimizer": True},
    "unwrapped": {"wrap": False},
}
FAILURES = [("forward", 0), ("forward", 3), ("backward", 0), ("backward", 2), ("backward", 3)]


@pytest.mark.parametrize("at", FAILURES, ids=str)
@pytest.mark.parametrize("stage", range(STAGES))
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.sampled(1)
def test_an_abandoned_step_leaves_nothing(kind: str, options: str, stage: int, at: tuple[str, int]) -> None:
    ranks = 1 if options == "unwrapped" else 2
    expected = simulate(undisturbed, ranks, kind, OPTIONS[options])
    for mine, plain in zip(simulate(disturbed, ranks, kind, OPTIONS[options], stage, at), expected, strict=True):
        for got, wanted in zip(mine, plain, strict=True):
            check_equal(got, wanted)


def on_one_rank_only(kind: str, at: tuple[str, int]) -> list[dict[str, Tensor]]:
    """One stage on each rank, whose buckets launch in the last backward; only the first rank fails."""
    pipeline = Pipeline(kind, **OPTIONS["overlap"], stages=1)
    grads = []
    for step in range(3):
        pipeline.step(step)
        grads.append(pipeline.grads())
        if dist.get_rank() == 0:
            pipeline.fail(step + 1, 0, at)
        else:
            pipeline.step(step + 1)
        for each in pipeline.stages:
            each.abandon_step()
    return grads


@pytest.mark.parametrize("at", FAILURES, ids=str)
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.sampled(2)
def test_replicas_abandon_a_step_that_failed_on_one_of_them(kind: str, at: tuple[str, int]) -> None:
    expected = simulate(undisturbed, 2, kind, {**OPTIONS["overlap"], "stages": 1})
    for mine, plain in zip(simulate(on_one_rank_only, 2, kind, at), expected, strict=True):
        for got, wanted in zip(mine, plain, strict=True):
            check_equal(got, wanted)


def not_abandoned(kind: str, options: dict[str, Any], at: tuple[str, int]) -> tuple[str, list[Any]]:
    """Two more steps after a failed one: the next step's error, and the gradients once the user has cleared them."""
    pipeline = Pipeline(kind, **options)
    pipeline.step(0)
    pipeline.grads()
    pipeline.fail(1, 0, at)
    with pytest.raises(RuntimeError) as caught:
        pipeline.step(1)
    x, target = batch(1)
    pipeline.schedule.eval(x, target=target, losses=[])  # adds no gradients
    with pytest.raises(RuntimeError, match="an earlier step failed"):
        pipeline.step(1)
    for stage, model in zip(pipeline.stages, pipeline.models, strict=True):
        stage.queue.clear()
        model.zero_grad()
    pipeline.step(1)
    return str(caught.value), [pipeline.grads()]


@pytest.mark.parametrize("at", [("backward", 2), ("forward", 3)], ids=str)
@pytest.mark.parametrize("options", ["plain", "unwrapped"])
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.sampled(3)
def test_the_step_after_one_that_failed_is_refused_until_gradients_are_cleared(
    kind: str, options: str, at: tuple[str, int]
) -> None:
    ((message, grads),) = simulate(not_abandoned, 1, kind, OPTIONS[options], at)
    assert "an earlier step failed after " in message and "call stage.abandon_step() of every stage" in message
    check_equal(grads[0], simulate(undisturbed, 1, kind, OPTIONS[options])[0][1])


def failed_forward() -> list[dict[str, Tensor]]:
    """torch keeps the losses of a step that failed, and would run the next one's backwards from them."""
    pipeline = Pipeline("Interleaved1F1B")
    pipeline.step(0)
    pipeline.grads()
    pipeline.fail(1, 1, ("forward", 1))
    for stage in pipeline.stages:
        stage.abandon_step()
    pipeline.step(2)
    return [pipeline.grads()]


def test_losses_of_a_step_that_failed_are_forgotten() -> None:
    check_equal(simulate(failed_forward, 1)[0][0], simulate(undisturbed, 1, "Interleaved1F1B", {})[0][2])


def abandoned_by_another_schedule(kind: str) -> list[dict[str, Tensor]]:
    """Stages of a second schedule are around the same wrappers; those of the first have done their steps."""
    pipeline = Pipeline(kind, stages=1)
    pipeline.step(0)
    grads = [pipeline.grads()]
    first = pipeline.stages, pipeline.schedule
    group = dist.new_subgroups(1)[0]
    pipeline.stages = [PipelineStage(pipeline.models[0], 0, 1, torch.device("cpu"), group=group)]
    schedule = getattr(pipelining, SCHEDULES[kind])
    pipeline.schedule = schedule(pipeline.stages, MICROBATCHES, loss_fn, scale_grads=False)
    pipeline.fail(1, 0, ("backward", 2))
    pipeline.stages[0].abandon_step()
    pipeline.step(1)
    grads.append(pipeline.grads())
    pipeline.stages, pipeline.schedule = first
    pipeline.step(2)
    return [*grads, pipeline.grads()]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_step_of_a_second_schedule_is_abandoned(kind: str) -> None:
    expected = simulate(undisturbed, 1, kind, {"stages": 1})[0]
    (found,) = simulate(abandoned_by_another_schedule, 1, kind)
    for got, wanted in zip(found, expected, strict=True):
        check_equal(got, wanted)


def accumulated_since(options: dict[str, Any], abandon: bool) -> list[dict[str, Tensor]]:
    """Gradients of a failed step are thrown away. Those that the program then accumulates are its own."""
    pipeline = Pipeline("ZeroBubble", **options)
    pipeline.step(0)
    pipeline.grads()
    pipeline.fail(1, 0, ("backward", 2))
    for stage, model in zip(pipeline.stages, pipeline.models, strict=True):
        if abandon:
            stage.abandon_step()
        else:
            stage.queue.clear()
            model.zero_grad()
        with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
            model(torch.ones(1, WIDTH)).sum().backward()
    before = [
        {
            name: (param.grad if param.grad is not None else param.main_grad).clone()
            for name, param in model.named_parameters()
        }
        for model in pipeline.models
    ]
    pipeline.step(1)
    return [{f"{i}.{name}": grad for i, grads in enumerate(before) for name, grad in grads.items()}, pipeline.grads()]


@pytest.mark.parametrize(("options", "abandon"), [("plain", False), ("unwrapped", True)])
def test_what_a_program_accumulates_after_a_failed_step_counts(options: str, abandon: bool) -> None:
    expected = simulate(undisturbed, 1, "ZeroBubble", OPTIONS[options])[0][1]
    ((before, found),) = simulate(accumulated_since, 1, OPTIONS[options], abandon)
    for name, grad in expected.items():
        key = name.replace(".module.", ".")
        own = before.get(name, before.get(key))
        own = before[f"{name[0]}.module.{name[2:]}"] if own is None else own
        assert own.any()
        torch.testing.assert_close(found[name], own + grad)


def of_two_wrappers(fails: bool) -> dict[str, Tensor]:
    """A stage with two wrappers and a layer outside of them: gradients of a step, behind another that was abandoned."""
    layers, outside = make_layers()[0], nn.Linear(WIDTH, WIDTH)
    models = [DistributedDataParallel(layer) for layer in (layers[0], layers[2])]
    stage = PipelineStage(nn.Sequential(models[0], layers[1], models[1], outside), 0, 1, torch.device("cpu"))
    schedule = pipelining.ScheduleInterleavedZeroBubble([stage], MICROBATCHES, loss_fn, scale_grads=False)
    for step, at in ((0, ("backward", 2)), (1, None)) if fails else ((1, None),):
        layers[1].fail_at(at)
        x, target = batch(step)
        with nullcontext() if at is None else pytest.raises((ArithmeticError, RuntimeError)):
            schedule.step(x, target=target, losses=[])
        if at is not None:
            stage.abandon_step()
            assert all(model.is_clear for model in models)
    found = {name: param.grad for name, param in outside.named_parameters() if param.grad is not None}
    for index, model in enumerate(models):
        model.finish_grad_sync()
        found |= {f"{index}.{name}": grad for name, grad in reduced_grads(model).items()}
    return found


def test_all_wrappers_of_a_stage_abandon_its_step() -> None:
    (found,), (expected,) = (simulate(of_two_wrappers, 1, fails) for fails in (True, False))
    check_equal(found, expected)


# ---- Losses that torch refuses. ----


def of_each_row() -> None:
    """Scalar in torch's trial of the first step, which refuses others by itself; of one row each later on."""
    pipeline = Pipeline("Interleaved1F1B")
    rows_apart = False

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean(1) if rows_apart else loss_fn(y, target)

    pipeline.schedule = pipelining.ScheduleInterleaved1F1B(pipeline.stages, MICROBATCHES, loss, scale_grads=False)
    pipeline.step(0)
    pipeline.grads()
    rows_apart = True
    pipeline.step(1)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"stage 1: loss_fn must return a scalar, got shape \(3,\); return its mean"):
        simulate(of_each_row, 1)
