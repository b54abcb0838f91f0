"""A model that a program changes at any moment under ``DistributedDataParallel``: plain PyTorch's weights, or a refusal
that names the parameter before a wrong step."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from changing import CHANGES, MOMENTS, Changing, ddp_run, outcome, unfreeze
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer, GraphedTrainingStep
from maingrad.ddp.contract.main_grad import record_of
from maingrad.launch import simulate
from maingrad.te_integration import WgradQueue, delayed_wgrad

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "overlap": {"overlap_grad_reduce": True},
    "find unused": {"overlap_grad_reduce": True, "find_unused_parameters": True},
    "zero1": {"use_distributed_optimizer": True},
    "zero1 overlap": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "by a method": {"by_method": True, "overlap_grad_reduce": True},
}
UNFROZEN = r"parameter 'frozen.weight' requires a gradient, and was frozen"


@pytest.mark.sampled(14)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_served_as_plain_pytorch_serves_it_or_refused_by_name(
    change: Callable[[nn.Module], None], moment: str, way: str
) -> None:
    found = outcome(ddp_run(**WAYS[way]), change, moment)
    if not CHANGES[change]:
        assert found == "served"


def test_unfreezing_behind_a_look_at_shapes_is_refused_before_the_ranks_part() -> None:
    """The forward has no backward, and the next one is the iteration's second."""

    def on_rank() -> str:
        model = Changing(fused=True)
        ddp = DistributedDataParallel(model)
        ddp(torch.ones(2, 6))
        unfreeze(model)
        with pytest.raises(RuntimeError, match=UNFROZEN) as info:
            ddp(torch.ones(2, 6))
        return str(info.value)

    assert len(set(simulate(on_rank, 2))) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_change_behind_a_methods_forward_is_refused_before_gradients_leave(overlap: bool) -> None:
    """No forward of the wrapper runs, and no backward hook of its outputs. An iteration may have passed."""

    def on_rank() -> None:
        run = ddp_run(by_method=True, overlap_grad_reduce=overlap)()
        run.loss_of(torch.ones(2, 6)).backward()
        run.step()
        run.loss_of(torch.ones(2, 6))
        unfreeze(run.module)
        loss = run.loss_of(torch.ones(2, 6))
        with pytest.raises(RuntimeError, match=UNFROZEN):
            loss.backward() if overlap else [loss.backward(), run.step()]
        records = [record_of(param) for param in run.module.parameters()]
        assert all(record is None or record.closed is None for record in records), "nothing was launched"

    simulate(on_rank, 2)


@pytest.mark.parametrize("delayed", [False, True])
def test_a_fused_layer_that_is_frozen_before_its_backward_gets_no_gradient(delayed: bool) -> None:
    ddp = DistributedDataParallel(Changing(fused=True))
    queue = WgradQueue()
    with delayed_wgrad(queue) if delayed else nullcontext():
        loss = ddp(torch.ones(2, 6)).sum()
    ddp.module.first.requires_grad_(False)
    loss.backward()
    queue.drain()
    assert ddp.module.first.weight.grad is None and ddp.module.head.weight.grad is not None
    ddp.module.first.requires_grad_(True)
    ddp.finish_grad_sync()
    assert not ddp.module.first.weight.main_grad.any()
    assert ddp.module.head.weight.main_grad.any()


def test_a_layer_that_is_frozen_for_one_microbatch_keeps_the_gradient_of_the_others() -> None:
    """A critic that is frozen while the actor's loss goes through it, in one iteration with its own loss."""

    def freeze_for_one_microbatch(model: Changing) -> None:
        model.middle.requires_grad_(False)

    def unfreeze_after(run: Any, loss: torch.Tensor) -> None:
        loss.backward()
        run.module.middle.requires_grad_(True)

    for way in ("overlap", "zero1"):
        assert (
            outcome(ddp_run(**WAYS[way]), freeze_for_one_microbatch, "between microbatches", last=unfreeze_after)
            == "served"
        )


@pytest.mark.parametrize("moment", ["bare", "between microbatches", "after backward"])
def test_a_change_while_weight_gradients_are_delayed(moment: str) -> None:
    def iteration() -> None:
        run, queue = ddp_run(**WAYS["overlap"])(), WgradQueue()
        one, two = torch.ones(2, 6), torch.full((2, 6), 0.5)
        with delayed_wgrad(queue):
            if moment == "bare":
                run.loss_of(one)
                unfreeze(run.module)
            with run.no_sync():
                run.loss_of(one).backward()
            if moment == "between microbatches":
                unfreeze(run.module)
            run.loss_of(two).backward()
        if moment == "after backward":
            unfreeze(run.module)
        queue.drain()
        run.step()

    def on_rank() -> None:
        with pytest.raises(RuntimeError, match=UNFROZEN):
            iteration()

    simulate(on_rank, 2)


def test_a_change_between_replays_of_a_graphed_step_is_refused() -> None:
    ddp = DistributedDataParallel(Changing(fused=True))
    optimizer = DistributedOptimizer(ddp)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = ddp(x).square().mean()
        loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()
        return loss

    step = GraphedTrainingStep(train_step, ddp, optimizer)
    for _ in range(4):
        step(torch.ones(2, 6))
    ddp(torch.ones(2, 6))
    unfreeze(ddp.module)
    with pytest.raises(RuntimeError, match=UNFROZEN):
        step(torch.ones(2, 6))
    ddp.module.frozen.requires_grad_(False)
    step(torch.ones(2, 6))
