"""Our queue under torch's pipeline schedules: each weight gradient once, in its W slot, and the plain run's numbers."""

import re
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from foreign import ForeignProvider
from gloo import run_ranks
from pipelined import (
    FUSED,
    STEPS,
    WIDTH,
    Outcome,
    batch,
    loss_fn,
    make_schedule,
    make_stages,
    pipelined,
    unpipelined,
)
from seeding import seed_as_in_a_new_process
from torch import nn
from torch.distributed import pipelining
from torch.torch_version import TorchVersion

from maingrad.ddp import DistributedDataParallel
from maingrad.launch import simulate
from maingrad.launch.simulation.simulate import SimulatedRankError
from maingrad.te_integration import GroupedLinear, Linear, delayed_wgrad
from maingrad.te_integration.pipeline import PipelineStage

KINDS = ["1F1B", "ZeroBubble", "InterleavedZeroBubble", "ZBV"]
OLD_TORCH = TorchVersion(torch.__version__) < (2, 13)
no_self_send = pytest.mark.skipif(OLD_TORCH, reason="before torch 2.13 gloo cannot send to its own rank, as ZBV does")
ON_GLOO = [*KINDS[:3], pytest.param("ZBV", marks=no_self_send)]
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 200}


def check_slots(outcomes: list[Outcome], microbatches: int, num_replicas: int, splits: bool) -> None:
    """Each fused layer's GEMM ran once per microbatch, in its W slot, and the schedule's slots were kept."""
    for step in range(STEPS):
        ran = [
            (owner, microbatch)
            for outcome in outcomes
            for slots in outcome.slots[step].values()
            for _, microbatch, owners in slots
            for owner in owners
        ]
        expected = [(owner, microbatch) for owner in FUSED for microbatch in range(microbatches)]
        assert sorted(ran) == sorted(num_replicas * expected)
    seen_split = False
    for outcome in outcomes:
        for slots_of_step in outcome.slots:
            for stage, slots in slots_of_step.items():
                layers = {owner for _, _, owners in slots for owner in owners}
                for slot, _, owners in slots:
                    assert set(owners) == (set() if slot == "I" else layers)
                    seen_split |= slot == "I"
                if outcome.planned:
                    assert [(slot, microbatch) for slot, microbatch, _ in slots] == outcome.planned[stage]
    assert seen_split == splits


def check_numbers(
    outcomes: list[Outcome], plain: list[Outcome], tolerance: float = 0.0, overlapped: bool = True
) -> None:
    """Bitwise where microbatches, and replicas, are added in the same order."""
    pipes = len(outcomes) // len(plain)
    for step in range(STEPS):
        for replica, expected in enumerate(plain):
            mine = outcomes[replica * pipes : (replica + 1) * pipes]
            (losses,) = [outcome.losses[step] for outcome in mine if outcome.losses[step]]
            assert losses == expected.losses[step]
            assert all(outcome.launched[step] for outcome in mine) == overlapped
            grads = {name: grad for outcome in mine for name, grad in outcome.grads[step].items()}
            assert grads.keys() == expected.grads[step].keys()
            for name, grad in expected.grads[step].items():
                assert (grads[name] - grad).abs().max() <= tolerance, name


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ON_GLOO)
@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 8)])
@pytest.mark.sampled(1)
def test_a_pipeline_is_the_unpipelined_run(kind: str, ranks: int, microbatches: int, fused: bool) -> None:
    outcomes = run_ranks(pipelined, ranks, kind, 1, microbatches, fused, {})
    check_slots(outcomes, microbatches, 1, splits=kind != "1F1B")
    check_numbers(outcomes, [unpipelined(0, microbatches, fused)], overlapped=False)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "config", [{}, OVERLAP, {**OVERLAP, "bucket_size": 1, "find_unused_parameters": True}], ids=str
)
@pytest.mark.parametrize("kind", ON_GLOO)
@pytest.mark.sampled(1)
def test_two_replicas_of_a_pipeline_are_the_unpipelined_replicas(kind: str, config: dict[str, object]) -> None:
    outcomes = run_ranks(pipelined, 4, kind, 2, 4, True, config)
    check_slots(outcomes, 4, 2, splits=kind != "1F1B")
    check_numbers(outcomes, simulate(unpipelined, 2, None, 4, True, **config), overlapped=bool(config))
    early = "find_unused_parameters" in config and kind in ("1F1B", "ZeroBubble")  # one stage on each rank
    assert all(outcome.early == [early] * STEPS for outcome in outcomes)


@pytest.mark.in_turn
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [*KINDS, "GPipe", "LoopedBFS", "Interleaved1F1B", "DualPipeV"])
@pytest.mark.sampled(1)
def test_ranks_that_go_on_in_any_order_get_the_same(kind: str, seed: int) -> None:
    config = {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "find_unused_parameters": True}
    outcomes = simulate(pipelined, 4, kind, 2, 4, True, config, seed=seed)
    check_slots(outcomes, 4, 2, splits=kind in (*KINDS[1:], "DualPipeV"))
    tolerance = 1e-6 if kind == "LoopedBFS" else 0.0  # runs the last microbatch's backward first
    check_numbers(outcomes, simulate(unpipelined, 2, None, 4, True, **config), tolerance)


def two_steps(kind: str, accumulate: bool) -> dict[str, torch.Tensor]:
    """Gradients of two steps: of one iteration that accumulates both, or of two iterations, added."""
    stages = make_stages(kind, dist.group.WORLD, dist.new_subgroups(1)[0], PipelineStage, True, **OVERLAP)
    schedule = make_schedule(kind, stages, 4, scale_grads=False)
    total: dict[str, torch.Tensor] = {}
    for step in range(2):
        x, target = batch(step, 0, 4)
        with ExitStack() as stack:
            for stage in stages if accumulate and step == 0 else ():
                stack.enter_context(stage.submod.no_sync())
            inputs = (x,) if any(s.is_first for s in stages) else ()
            targets = {"target": target, "losses": []} if any(s.is_last for s in stages) else {}
            schedule.step(*inputs, **targets)
        if accumulate and step == 0:
            assert {b.phase.value for s in stages for b in s.submod.buckets} <= {"idle", "accumulating"}
            continue
        for stage in stages:
            stage.submod.finish_grad_sync()
            for record in stage.submod.records:
                total[record.name] = total.get(record.name, 0) + record.view
            stage.submod.zero_grad_buffer()
    return total


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(1)
def test_steps_under_no_sync_accumulate(kind: str) -> None:
    together, apart = simulate(two_steps, 2, kind, True), simulate(two_steps, 2, kind, False)
    for mine, expected in zip(together, apart, strict=True):
        assert mine.keys() == expected.keys()
        assert all((mine[name] - grad).abs().max() <= 1e-6 for name, grad in expected.items())


@pytest.mark.in_turn
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.sampled(1)
def test_recomputed_blocks_keep_their_slots(fused: bool) -> None:
    outcomes = simulate(pipelined, 4, "ZBV", 2, 4, fused, OVERLAP, recompute=True)
    check_slots(outcomes, 4, 2, splits=True)
    check_numbers(outcomes, simulate(unpipelined, 2, None, 4, fused, **OVERLAP))


def unwrapped(stage_class: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [Linear(WIDTH, WIDTH) for _ in range(2)]
    x, target = batch(0, 0, 2)
    if stage_class is None:
        for chunk in range(2):
            (loss_fn(layers[1](layers[0](x.chunk(2)[chunk])), target.chunk(2)[chunk]) / 2).backward()
    else:
        stages = [stage_class(layer, i, 2, torch.device("cpu")) for i, layer in enumerate(layers)]
        schedule = pipelining.ScheduleInterleavedZeroBubble(stages, 2, loss_fn, scale_grads=False)
        schedule.step(x, target=target, losses=[])
    return [param.grad for layer in layers for param in layer.parameters()]


def test_without_a_provider_gradients_are_in_grad() -> None:
    (ours,), (plain,) = simulate(unwrapped, 1, PipelineStage), simulate(unwrapped, 1, None)
    assert all(map(torch.equal, ours, plain))


def in_slots(delay_wgrad: bool) -> tuple[list[list[int]], list[torch.Tensor]]:
    """By stage, the microbatches whose weight gradients waited for their W slot; and all gradients."""
    torch.manual_seed(0)
    layers = [Linear(WIDTH, WIDTH) for _ in range(2)]
    stages = [
        PipelineStage(layer, i, 2, torch.device("cpu"), delay_wgrad=delay_wgrad) for i, layer in enumerate(layers)
    ]
    for stage in stages:
        stage.queue.log = []
    x, target = batch(0, 0, 2)
    schedule = pipelining.ScheduleInterleavedZeroBubble(stages, 2, loss_fn, scale_grads=False)
    schedule.step(x, target=target, losses=[])
    waited = [[record.microbatch for record in stage.queue.log or ()] for stage in stages]
    return waited, [param.grad for layer in layers for param in layer.parameters()]


def test_a_stage_that_does_not_delay_computes_weight_gradients_in_its_backwards() -> None:
    ((waited, grads),), ((delayed, expected),) = (simulate(in_slots, 1, delay_wgrad) for delay_wgrad in (False, True))
    assert (waited, delayed) == ([[], []], [[0, 1], [0, 1]])
    assert all(map(torch.equal, grads, expected))


def sums_under_1f1b(stage_class: Any, **options: Any) -> dict[str, torch.Tensor]:
    pipes, alone = dist.group.WORLD, dist.new_subgroups(1)[0]
    (stage,) = make_stages("1F1B", pipes, alone, partial(stage_class, **options), True, overlap_grad_reduce=True)
    schedule = make_schedule("1F1B", [stage], 4, scale_grads=False)
    x, target = batch(0, 0, 4)
    with stage.submod.no_sync() if stage_class is pipelining.PipelineStage else nullcontext():
        schedule.step(target=target, losses=[]) if stage.is_last else schedule.step(x)
    stage.submod.finish_grad_sync()
    return {record.name: record.view.clone() for record in stage.submod.records}


def test_the_sum_over_microbatches_is_what_torchs_stage_gives_under_no_sync() -> None:
    ours = simulate(sums_under_1f1b, 2, PipelineStage, average_microbatches=False)
    theirs = simulate(sums_under_1f1b, 2, pipelining.PipelineStage)
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.keys() == expected.keys()
        assert all(torch.equal(mine[name], grad) for name, grad in expected.items())


def run_documentation(code: str) -> tuple[int, bool]:
    names: dict[str, Any] = {}
    seed_as_in_a_new_process()
    exec(code, names)
    grads = [record.view for stage in names["stages"] for record in stage.submod.records]
    return len(names["losses"]), all(grad.isfinite().all() and grad.any() for grad in grads)


@no_self_send
def test_the_documentations_code_runs() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/schedules.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[-1]
    assert run_ranks(run_documentation, 4, code) == [(4, True), (0, True), (4, True), (0, True)]


# ---- Fault 19: torch's own split. ----


def split_by_torch(kind: str) -> str:
    """Two stages on one rank under a zero-bubble schedule and torch's own stage; returns the refusal."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(WIDTH, WIDTH) if kind == "plain" else Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True, name=name)
        for name in ("first layer", "second layer")
    ]
    providers = [ForeignProvider(layer) if kind == "foreign" else DistributedDataParallel(layer) for layer in layers]
    modules = layers if kind == "foreign" else providers
    stages = [pipelining.PipelineStage(module, i, 2, torch.device("cpu")) for i, module in enumerate(modules)]
    schedule = pipelining.ScheduleInterleavedZeroBubble(stages, 2, loss_fn, scale_grads=False)
    x, target = batch(0, 0, 2)
    try:
        schedule.step(x, target=target, losses=[])
        for provider in () if kind == "foreign" else providers:
            provider.finish_grad_sync()
    except RuntimeError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    "kind, named",
    [
        ("ours", "second layer: this backward was split"),
        ("foreign", "second layer: this backward was split"),
        ("plain", "a gradient of parameter 'bias' was put into .grad by hand"),
    ],
    ids=["ours", "foreign", "plain"],
)
def test_19_a_backward_split_by_torch_is_refused(kind: str, named: str) -> None:
    (message,) = simulate(split_by_torch, 1, kind)
    if OLD_TORCH and kind != "plain":
        assert "_input_metadata" in message, "torch's split cannot run any autograd function in Python before 2.13"
        return
    assert message.startswith(named) or f": {named}" in message
    assert "use maingrad.te_integration.pipeline.PipelineStage" in message


def test_19_gradients_that_are_asked_for_one_after_the_other_are_not_a_split() -> None:
    layer = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True)
    ddp = DistributedDataParallel(layer)
    x, _ = batch(0, 0, 1)
    x.requires_grad_()
    y = ddp(x)
    (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (dw,) = torch.autograd.grad(y.sum(), layer.weight, retain_graph=True)
    assert torch.equal(dx, torch.ones_like(y) @ layer.weight)
    assert torch.equal(dw, torch.ones_like(y).t() @ x)
    seen = []
    y.grad_fn.register_prehook(seen.append)
    assert torch.equal(torch.autograd.grad(y.sum(), layer.weight, retain_graph=True)[0], dw)
    y.sum().backward()
    ddp.finish_grad_sync()
    assert torch.equal(layer.weight.main_grad, dw)
    assert len(seen) == 2


def test_19_what_is_not_fused_may_be_split() -> None:
    """torch registers a prehook, asks for the inputs' gradients, and then for the weights'."""
    experts = GroupedLinear(2, WIDTH, WIDTH, bias=False)
    x, _ = batch(0, 0, 2)
    x.requires_grad_()
    rows = x.detach().split([3, len(x) - 3])
    y = experts(x, [3, len(x) - 3])
    y.grad_fn.register_prehook(lambda grads: None)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    found = torch.autograd.grad(y.sum(), [experts.weight0, experts.weight1])
    torch.testing.assert_close(found, tuple(part.sum(0).expand(WIDTH, WIDTH) for part in rows))


def test_19_a_gradient_that_bypassed_the_hooks_is_cleared_with_the_iteration() -> None:
    ddp = DistributedDataParallel(Linear(WIDTH, WIDTH, bias=False, fuse_wgrad_accumulation=True, name="layer"))
    weight = ddp.module.weight
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match=r"finish_grad_sync\(\)|parameter 'weight' was put into .grad by hand"):
        ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    assert weight.grad is None
    x, _ = batch(0, 0, 1)
    ddp(x).sum().backward()
    ddp.finish_grad_sync()
    assert torch.equal(weight.main_grad, torch.ones(WIDTH, len(x)) @ x)


# ---- What is refused. ----


def two_stages_on_one_rank(**options: object) -> None:
    layers = [Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True, name=f"layer {i}") for i in range(2)]
    wrappers = [DistributedDataParallel(layer) for layer in layers]
    stages = [PipelineStage(ddp, i, 2, torch.device("cpu")) for i, ddp in enumerate(wrappers)]
    schedule = pipelining.ScheduleInterleavedZeroBubble(stages, 2, loss_fn, **options)
    x, target = batch(0, 0, 2)
    schedule.step(x, target=target, losses=[])


def test_scaling_by_the_schedule_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"stage \d: the schedule would divide .grad by 2.* scale_grads=False"):
        simulate(two_stages_on_one_rank, 1)


def leave_a_weight_gradient() -> None:
    layer = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True, name="layer")
    stage = PipelineStage(DistributedDataParallel(layer), 0, 1, torch.device("cpu"))
    with delayed_wgrad(stage.queue):
        y = layer(batch(0, 0, 1)[0])
    y.sum().backward()
    stage.has_backward = True
    stage.clear_runtime_states()


def test_what_an_abandoned_step_left_is_refused_by_the_next() -> None:
    with pytest.raises(
        RuntimeError,
        match=r"stage 0: an earlier step failed .* left gradients \(pending: \['layer'\]\), .* stage.abandon_step\(\)",
    ):
        simulate(leave_a_weight_gradient, 1)


def stage_of(module: nn.Module, **options: object) -> None:
    PipelineStage(module, 0, 1, torch.device("cpu"), **options)


def test_queues_and_runners_of_others_are_refused() -> None:
    module = nn.Sequential(nn.Identity(), Linear(WIDTH, WIDTH, delay_wgrad_compute=True), nn.Identity())
    for delay in (True, False):  # nobody empties the module's queue where the stage has no W slots either
        with pytest.raises(
            SimulatedRankError, match=r"ValueError: stage 0: '1' \(Linear\) delays .* without delay_wgrad_compute=True"
        ):
            simulate(stage_of, 1, module, delay_wgrad=delay)
    with pytest.raises(SimulatedRankError, match=r"ValueError: stage 0: '' \(Linear\) delays its weight gradients"):
        simulate(stage_of, 1, module[1])
    with pytest.raises(SimulatedRankError, match="ValueError: dw_builder is what this stage brings"):
        simulate(stage_of, 1, nn.Identity(), dw_builder=lambda: None)
