"""Sharded parameters over NCCL, against all-reduce DDP over NCCL: every placement, with delays on every stream."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from sharded_on_gpus import (
    COPYING,
    FORMS,
    HYBRIDS,
    MAX_NORM,
    OFFLOADED,
    Form,
    Model,
    Pause,
    batch,
    here,
    loss_of,
    nccl,
    relative_error,
    shard,
    slowed,
    two_instances,
    whole,
)
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer

pytestmark = pytest.mark.timeout(460)  # whichever test comes first waits for all trainings

STEPS = 20
# A large eps keeps AdamW from turning rounding noise in tiny gradients into steps of full length.
ADAMW = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.01}
SLOWED = {
    "zero2": ("gather", "reduce", "compute"),
    "zero3": ("gather", "reduce", "compute"),
    "zero2, once": ("reduce",),
    "zero3, once": ("gather", "reduce", "compute"),
    "hsdp": ("reduce",),
    "hsdp, once": ("reduce",),
}


class Run(NamedTuple):
    """The results of a training, on the CPU."""

    losses: Tensor
    grads: dict[tuple[int, str], Tensor]
    """Whole gradients of the first and of the last step, by step and parameter, before clipping."""
    weights: dict[str, Tensor]
    """Whole weights at the end."""


def reference(group: Any, *, bf16: bool = False) -> Run:
    """``STEPS`` steps of two microbatches under all-reduce DDP; in bf16 with the optimizer's fp32 masters."""
    rank, device = dist.get_rank(), here()
    model = Model().to(device, torch.bfloat16 if bf16 else torch.float32)
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = DistributedOptimizer(ddp, max_grad_norm=MAX_NORM, **ADAMW)
    losses: list[Tensor] = []
    grads: dict[tuple[int, str], Tensor] = {}
    for step in range(STEPS):
        for index in range(2):
            tokens = batch(step, index, rank).to(device)
            with nullcontext() if index else ddp.no_sync():
                loss = loss_of(ddp, tokens) / 2
                loss.backward()
            losses.append(loss.detach())
        ddp.finish_grad_sync()
        if step in (0, STEPS - 1):
            grads |= {
                (step, name): p.main_grad.cpu().clone() for name, p in model.named_parameters() if p.requires_grad
            }
        optimizer.step()
        ddp.zero_grad_buffer()
    return Run(torch.stack(losses).cpu(), grads, {name: p.detach().cpu() for name, p in model.named_parameters()})


def train(form: Form, mesh: Any, pause: Pause = lambda where: None) -> Run:
    """The same steps over sharded parameters, with torch's own optimizer and clipping."""
    rank, device = dist.get_rank(), here()
    model = shard(Model(pause, delayed=form.delayed).to(device), form, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=not form.offload, **ADAMW)
    losses: list[Tensor] = []
    grads: dict[tuple[int, str], Tensor] = {}
    for step in range(STEPS):
        for index in range(2):
            tokens = batch(step, index, rank).to(device)
            with nullcontext() if index else model.no_sync():
                loss = loss_of(model, tokens) / 2
                loss.backward()
                if form.delayed:
                    model.drain()
            losses.append(loss.detach())
        model.finish_grad_sync()
        if step in (0, STEPS - 1):
            grads |= {(step, name): whole(p, p.grad) for name, p in model.named_parameters() if p.requires_grad}
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return Run(torch.stack(losses).cpu(), grads, {name: whole(p, p) for name, p in model.named_parameters()})


def on_nccl() -> dict[str, Run]:
    """Run on each gloo process of a job, with NCCL groups beside the gloo group."""
    group = nccl()
    rank, meshes = dist.get_rank(), {"": group}
    forms = FORMS | OFFLOADED | COPYING
    if dist.get_world_size() == 4:
        meshes["hsdp"] = meshes["hsdp_zero1"] = two_instances()
        forms |= HYBRIDS
    results = {"reference": reference(group), "reference, bf16": reference(group, bf16=True)}
    for name, form in forms.items():
        results[name] = train(form, meshes.get(form.placements, group))
    for name, places in SLOWED.items():
        for where in places if name in forms else ():
            with slowed(where, rank) as pause:
                mesh = meshes.get(forms[name].placements, group)
                results[f"{name}, slow {where}"] = train(forms[name], mesh, pause)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), slowed("gather", rank):
        results["zero3, on a side stream"] = train(FORMS["zero3"], group)
    return results


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.gpu(2)), pytest.param(4, marks=pytest.mark.gpu(4))]
)
def runs(request: pytest.FixtureRequest) -> list[dict[str, Run]]:
    return run_ranks(on_nccl, request.param, timeout=400.0)


def test_every_form_trains_like_all_reduce(runs: list[dict[str, Run]]) -> None:
    """Twenty steps: losses, gradients of the first and the last step, and weights, to 1e-5 of their norm."""
    for results in runs:
        expected = results["reference"]
        for name, run in results.items():
            if "bf16" in name:
                continue
            assert relative_error(run.losses, expected.losses) <= 1e-5, name
            for param, value in (expected.weights | expected.grads).items():
                assert relative_error((run.weights | run.grads)[param], value) <= 1e-5, (name, param)


def test_in_bf16_it_starts_alike_and_stays_as_near_as_bf16_allows(runs: list[dict[str, Run]]) -> None:
    """Rounding makes nearly equal weights differ more and more. So only first gradients are compared closely."""
    bound = torch.finfo(torch.bfloat16).eps
    for results in runs:
        expected, run = results["reference, bf16"], results["zero3, bf16"]
        for (step, param), value in expected.grads.items():
            if step == 0:
                assert relative_error(run.grads[step, param], value) <= 1e-5, param
        assert relative_error(run.losses, expected.losses) <= bound
        all_of, all_expected = (torch.cat([v.double().flatten() for v in r.weights.values()]) for r in (run, expected))
        assert relative_error(all_of, all_expected) <= bound


def test_what_only_the_schedule_changes_changes_no_bit(runs: list[dict[str, Run]]) -> None:
    """Delays of 100 ms on every stream, gathers that come late or by copies, parameters that stay, a user's stream."""
    schedules = (", slow", ", no prefetch", ", kept", ", copy engines", ", on a side stream")
    compared = 0
    for results in runs:
        for name, run in results.items():
            for schedule in filter(name.__contains__, schedules):
                plain = results[name.partition(schedule)[0]]
                compared += 1
                assert torch.equal(run.losses, plain.losses), name
                for param, value in plain.weights.items():
                    assert torch.equal(run.weights[param], value), (name, param)
    assert compared >= 14 * len(runs)


def test_ranks_hold_one_model(runs: list[dict[str, Run]]) -> None:
    for results in runs[1:]:
        for name, run in results.items():
            for param, value in runs[0][name].weights.items():
                assert torch.equal(run.weights[param], value), (name, param)
