"""Steps of a pipeline that differ from their neighbours: other schedules on the same stages, evaluations."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelined import all_launched, reduced_grads
from torch import Tensor, nn
from torch.distributed import pipelining

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.launch import simulate
from maingrad.te_integration import Linear
from maingrad.te_integration.pipeline import PipelineStage

WIDTH = 8
ROWS = 3
STAGES = 2
SCHEDULES = {"1F1B": "Schedule1F1B", "GPipe": "ScheduleGPipe", "ZeroBubble": "ScheduleInterleavedZeroBubble"}
Grads = dict[str, Tensor]


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def batch(microbatches: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(microbatches)
    x = torch.randn(microbatches * rows, WIDTH, generator=generator)
    return x, torch.randn(microbatches * rows, WIDTH, generator=generator)


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True), nn.Tanh()) for _ in range(STAGES)]


class Rank:
    """The stages of this rank, each wrapped: all stages in a world of one, otherwise one stage."""

    def __init__(self, **config: Any) -> None:
        layers = make_layers()
        alone = dist.new_subgroups(1)[0]
        mine = range(STAGES) if dist.get_world_size() == 1 else [dist.get_rank()]
        config = DistributedDataParallelConfig(**config)
        self.models = {index: DistributedDataParallel(layers[index], config, process_group=alone) for index in mine}
        self.stages = self.make_stages()

    def make_stages(self) -> list[PipelineStage]:
        return [PipelineStage(model, index, STAGES, torch.device("cpu")) for index, model in self.models.items()]

    def schedule(self, kind: str, microbatches: int, stages: list[PipelineStage] | None = None) -> Any:
        stages = stages or self.stages
        given = stages if kind == "ZeroBubble" else stages[0]
        return getattr(pipelining, SCHEDULES[kind])(given, microbatches, loss_fn, scale_grads=False)

    def run(self, verb: Any, microbatches: int, rows: int = ROWS) -> list[float]:
        """``schedule.step`` or ``schedule.eval``; returns the losses that this rank sees."""
        x, target = batch(microbatches, rows)
        losses: list[Tensor] = []
        inputs = (x,) if 0 in self.models else ()
        verb(*inputs, **({"target": target, "losses": losses} if STAGES - 1 in self.models else {}))
        return [loss.item() for loss in losses]

    def finish(self) -> Grads:
        """End the iteration; returns its gradients."""
        grads = {}
        for index, model in self.models.items():
            model.finish_grad_sync()
            grads |= {f"{index}.{name}": grad for name, grad in reduced_grads(model).items()}
            model.zero_grad_buffer()
        return grads


def plain_grads(microbatches: int, rows: int = ROWS) -> Grads:
    """Gradients of the same model without pipeline stages."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)))
    model.load_state_dict(nn.Sequential(*make_layers()).state_dict())
    for x, target in zip(*(tensor.chunk(microbatches) for tensor in batch(microbatches, rows)), strict=True):
        (loss_fn(model(x), target) / microbatches).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def check(ranks: Sequence[list[Grads]], expected: Sequence[Grads]) -> None:
    """Of each step, all ranks together."""
    for step, plain in enumerate(expected):
        mine = {name: grad for rank in ranks for name, grad in rank[step].items()}
        assert mine.keys() == plain.keys()
        for name, grad in plain.items():
            assert torch.allclose(mine[name], grad, rtol=1e-5, atol=1e-7), (step, name)


# ---- Several schedules on the same stages. ----


def in_turn(kind: str, counts: list[int]) -> list[Grads]:
    rank = Rank(overlap_grad_reduce=True)
    schedules = {count: rank.schedule(kind, count) for count in counts}
    grads = []
    for count in counts:
        rank.run(schedules[count].step, count)
        grads.append(rank.finish())
    return grads


@pytest.mark.parametrize("counts", [[2, 4, 2, 2], [4, 2, 4, 3]], ids=str)
@pytest.mark.parametrize("kind, ranks", [("ZeroBubble", 1), ("ZeroBubble", 2), ("1F1B", 2), ("GPipe", 2)])
def test_schedules_in_turn_have_each_its_own_mean(kind: str, ranks: int, counts: list[int]) -> None:
    check(simulate(in_turn, ranks, kind, counts), [plain_grads(count) for count in counts])


def of_other_rows() -> list[Grads]:
    rank = Rank()
    schedules = [rank.schedule("1F1B", 2), rank.schedule("1F1B", 4, rank.make_stages())]
    grads = []
    for schedule, count, rows in [(schedules[0], 2, ROWS), (schedules[1], 4, 1), (schedules[0], 2, ROWS)]:
        rank.run(schedule.step, count, rows)
        grads.append(rank.finish())
    return grads


def test_a_schedule_of_other_shapes_has_a_stage_of_its_own_around_the_same_module() -> None:
    check(simulate(of_other_rows, 2), [plain_grads(2), plain_grads(4, 1), plain_grads(2)])


def by_hand() -> None:
    """A step of two microbatches by a runner that is none of torch's, on a stage that was told of four."""
    rank = Rank()
    rank.run(rank.schedule("ZeroBubble", 4).step, 4)
    rank.finish()
    stage = rank.stages[0]
    stage.clear_runtime_states()
    for microbatch, x in enumerate(batch(2)[0].chunk(2)):
        y = stage.forward_one_chunk(microbatch, (x,), {})
        stage.set_local_bwd_input((torch.ones_like(y),), microbatch)
        stage.backward_one_chunk(microbatch)
    stage.perform_reduce_grad(1)


def test_a_runner_that_stops_before_the_last_microbatch_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"stage 0: 2 backwards in a step of 4 microbatches, .* 1 / 4; .* schedules"):
        simulate(by_hand, 1)


def without_weight_gradients() -> None:
    """A runner that runs every B of the first stage, and no W."""
    layers = [Linear(WIDTH, WIDTH) for _ in range(STAGES)]
    stages = [PipelineStage(layer, index, STAGES, torch.device("cpu")) for index, layer in enumerate(layers)]
    schedule = pipelining.ScheduleInterleavedZeroBubble(stages, 2, loss_fn, scale_grads=False)
    x, target = batch(2)
    schedule.step(x, target=target, losses=[])
    stage = stages[0]
    stage.clear_runtime_states()
    for microbatch, part in enumerate(x.chunk(2)):
        y = stage.forward_one_chunk(microbatch, (part,), {})
        stage.set_local_bwd_input((torch.ones_like(y),), microbatch)
        stage.backward_one_chunk(microbatch, full_backward=False)
    stage.perform_reduce_grad(1)


def test_a_runner_that_leaves_out_weight_gradients_is_refused() -> None:
    """Also where no wrapper waits for them."""
    with pytest.raises(RuntimeError, match="2 delayed weight gradients were never computed, of Linear"):
        simulate(without_weight_gradients, 1)


# ---- Wrappers of a stage. ----


def launched_in_order(wraps: str) -> tuple[list[list[bool]], bool]:
    """Before the end of each stage, last stage first: which wrappers have launched all buckets; and after the step."""
    layers = [nn.Sequential(Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)) for _ in range(STAGES)]
    config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    alone = dist.new_subgroups(1)[0]
    if wraps == "two in a stage":
        layers = [nn.Sequential(*(DistributedDataParallel(each, config) for each in layer)) for layer in layers[:1]]
        wrappers = list(layers[0])
    elif wraps == "later":
        layers = layers[:1]
    else:
        layers = wrappers = [DistributedDataParallel(layer, config) for layer in layers]
    stages = [
        PipelineStage(layer, index, len(layers), torch.device("cpu"), group=alone) for index, layer in enumerate(layers)
    ]
    if wraps == "later":
        wrappers = [DistributedDataParallel(layers[0], config)]
    before: list[list[bool]] = []
    for stage in stages:

        def ends(factor: int, end: Any = stage.perform_reduce_grad) -> None:
            before.append([all_launched(model) for model in wrappers])
            end(factor)

        stage.perform_reduce_grad = ends
    x, target = batch(2)
    pipelining.ScheduleInterleaved1F1B(stages, 2, loss_fn, scale_grads=False).step(x, target=target, losses=[])
    return before, all(all_launched(model) for model in wrappers)


@pytest.mark.parametrize(
    ("wraps", "before"),
    [
        ("two in a stage", [[False, False]]),  # in the order of the schedule, which is that of all replicas
        ("one in each of two stages", [[False, False], [False, True]]),
        ("later", [[True]]),  # the last backward launches
    ],
)
def test_several_wrappers_launch_where_the_schedule_ends_their_stages(wraps: str, before: list[list[bool]]) -> None:
    assert simulate(launched_in_order, 2, wraps) == [(before, True)] * 2


# ---- Evaluations between steps. ----


def evaluated(kind: str, config: dict[str, Any], inside: bool) -> tuple[list[Grads], list[list[float]]]:
    """Steps with an evaluation before, between and, where ``inside``, before the iteration's gradients are read."""
    rank = Rank(**config)
    schedule = rank.schedule(kind, 4)
    grads, losses = [], []
    for _ in range(2):
        losses.append(rank.run(schedule.eval, 4))
        assert not any(all_launched(model) for model in rank.models.values())
        losses.append(rank.run(schedule.step, 4))
        if inside:
            losses.append(rank.run(schedule.eval, 4))
        grads.append(rank.finish())
    return grads, losses


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind, ranks", [("ZeroBubble", 1), ("ZeroBubble", 2), ("1F1B", 2)])
@pytest.mark.parametrize("sharded", [False, True])
def test_an_evaluation_leaves_gradients_and_reductions_alone(
    kind: str, ranks: int, sharded: bool, inside: bool
) -> None:
    config = {"overlap_grad_reduce": True, "use_distributed_optimizer": sharded}
    outcomes = simulate(evaluated, ranks, kind, config, inside)
    check([grads for grads, _ in outcomes], [plain_grads(4)] * 2)
    losses = outcomes[-1][1]
    assert len(losses) == 2 * (2 + inside) and all(len(seen) == 4 and seen == losses[0] for seen in losses)


# ---- torch's trial of a stage's module, before its first step. ----


class Gated(nn.Module):
    """Uses its gate only if the first row asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * self.gate if x[0, 0] > 0 else y


def first_step(around: bool) -> tuple[list[bool], list[bool], Grads]:
    """Whether forwards in torch's trial would reduce, and whether the first microbatch found all buckets clear."""
    torch.manual_seed(0)
    module = Gated()
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1, find_unused_parameters=True)
    model = DistributedDataParallel(nn.ModuleList([module]) if around else module, config)
    alone = dist.new_subgroups(1)[0]
    stage = PipelineStage(module if around else model, 0, 1, torch.device("cpu"), group=alone)
    tried: list[bool] = []
    clear: list[bool] = []
    forward_one_chunk = stage.forward_one_chunk
    module.register_forward_hook(lambda *_: tried.append(model.require_backward_grad_sync))

    def watched(*args: Any, **kwargs: Any) -> Any:
        clear.append(model.is_clear)
        return forward_one_chunk(*args, **kwargs)

    stage.forward_one_chunk = watched
    x, target = batch(2)
    x[0, 0], x[ROWS, 0] = -1.0, 1.0  # the trial, of the first microbatch, does not use the gate
    pipelining.Schedule1F1B(stage, 2, loss_fn, scale_grads=False).step(x, target=target, losses=[])
    model.finish_grad_sync()
    return tried[:-2], clear[:1], reduced_grads(model)


def tried_under_two_wrappers() -> list[bool]:
    """Whether forwards of a stage's first step, of one microbatch, would reduce: of each wrapper inside the stage."""
    models = [DistributedDataParallel(Linear(WIDTH, WIDTH)) for _ in range(2)]
    tried: list[bool] = []
    for model in models:
        model.module.register_forward_hook(lambda *_, model=model: tried.append(model.require_backward_grad_sync))
    stage = PipelineStage(nn.Sequential(*models), 0, 1, torch.device("cpu"), group=dist.new_subgroups(1)[0])
    x, target = batch(1)
    pipelining.Schedule1F1B(stage, 1, loss_fn, scale_grads=False).step(x, target=target, losses=[])
    return tried


def test_no_wrapper_of_a_stage_reduces_in_torchs_trial() -> None:
    (tried,) = simulate(tried_under_two_wrappers, 1)
    assert len(tried) >= 4 and not any(tried[:-2])


@pytest.mark.parametrize("around", [False, True])
def test_torchs_trial_of_a_module_reduces_nothing(around: bool) -> None:
    x, target = batch(2)
    x[0, 0], x[ROWS, 0] = -1.0, 1.0
    torch.manual_seed(0)
    plain = Gated()
    plain.layer.fuse_wgrad_accumulation = False
    for part, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
        (loss_fn(plain(part), wanted) / 2).backward()
    for tried, clear, grads in simulate(first_step, 2, around):
        assert tried and not any(tried)
        assert clear == [True]
        for name, param in plain.named_parameters():
            assert torch.allclose(grads[f"0.{name}" if around else name], param.grad, rtol=1e-5, atol=1e-7), name
