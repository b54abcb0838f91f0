"""A program changes what a ``DistributedOptimizer`` does between its steps: options of it, and of its groups."""

import copy
from typing import Any

import pytest
import torch
from loops import assert_same, loss_of, make_batches, make_model, plain_twin, weights, wrap
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer
from maingrad.ddp.gathers.gathered_models import gathered_models
from maingrad.launch import simulate

FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "compact": {"state": "compact", "moment_dtype": torch.float32},
    "on the host": {"offload_state": "host"},
}


def step(optimizer: DistributedOptimizer, seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """How far the step has moved each parameter."""
    before = weights(optimizer.model)
    (loss_of(optimizer.model, make_batches(1, seed=seed)[0]) * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name: weight - before[name] for name, weight in weights(optimizer.model).items()}


def length(moved: dict[str, torch.Tensor]) -> float:
    return torch.stack([each.norm() for each in moved.values()]).norm().item()


@pytest.mark.parametrize("sharded", [False, True])
def test_clipping_begins_and_ends_between_steps(sharded: bool) -> None:
    def made() -> DistributedOptimizer:
        ddp = wrap(make_model(), use_distributed_optimizer=sharded, bucket_size=64)
        return DistributedOptimizer(ddp, lr=1.0, optimizer_class=torch.optim.SGD)

    optimizer = made()
    free = step(optimizer, 0, 100.0)
    assert optimizer.grad_norm is None
    assert length(free) > 1
    optimizer = made()
    optimizer.max_grad_norm = 1e-2
    assert length(step(optimizer, 0, 100.0)) == pytest.approx(1e-2, rel=1e-2)
    assert optimizer.grad_norm == pytest.approx(length(free), rel=1e-4)
    optimizer.max_grad_norm = None
    assert length(step(optimizer, 1, 100.0)) > 1


@pytest.mark.parametrize("form", FORMS)
def test_skipping_begins_and_ends_between_steps(form: str) -> None:
    """Steps are counted from then on. The count stays where skipping ends."""
    optimizer = DistributedOptimizer(wrap(make_model(), use_distributed_optimizer=True), lr=0.1, **FORMS[form])
    assert length(step(optimizer, 0)) > 0
    assert optimizer.num_skipped_steps is None
    optimizer.skip_nonfinite = True
    for count, scale in ((0, 1.0), (1, float("inf")), (2, float("nan")), (2, 1.0)):
        assert (length(step(optimizer, count, scale)) > 0) is (scale == 1.0)
        assert optimizer.num_skipped_steps == count
    optimizer.skip_nonfinite = False
    assert step(optimizer, 0, float("inf"))["0.weight"].isnan().any()
    assert optimizer.num_skipped_steps == 2


@pytest.mark.parametrize("clip", [None, 1e-2])
def test_the_fused_kernel_is_given_up_and_taken_again_behind_clipped_and_skipped_steps(clip: float | None) -> None:
    """What the kernel was told of the steps before concerns no other one."""
    fused, switched = (
        DistributedOptimizer(
            wrap(make_model(), use_distributed_optimizer=True), lr=0.1, max_grad_norm=clip, skip_nonfinite=True
        )
        for _ in range(2)
    )
    for number, scale in enumerate((1.0, float("inf"), 1.0, 1.0, float("inf"), 1.0)):
        switched.param_groups[0]["fused"] = number % 3 == 0
        step(fused, number, scale)
        step(switched, number, scale)
        for one, other in zip(fused.model.parameters(), switched.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert fused.num_skipped_steps == switched.num_skipped_steps == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize(
    ("option", "value"), [("lr", 0.03), ("betas", (0.5, 0.6)), ("eps", 0.5), ("weight_decay", 0.4)], ids=str
)
@pytest.mark.sampled(12)
def test_an_option_of_one_group_changes_between_steps(option: str, value: Any, group: int, form: str) -> None:
    ddp = wrap(make_model(), use_distributed_optimizer=True)
    plain = plain_twin(ddp.module)
    optimizer = DistributedOptimizer(ddp, lr=0.1, param_groups=[{"params": ["0.*"]}], **FORMS[form])
    stock = torch.optim.AdamW([{"params": plain[0].parameters()}, {"params": plain[2:].parameters()}], lr=0.1)
    for number in range(3):
        (batch,) = make_batches(1, seed=number)
        loss_of(ddp, batch).backward()
        loss_of(plain, batch).backward()
        for each in (optimizer, stock):
            each.param_groups[group][option] = value if number == 1 else each.param_groups[1 - group][option]
            each.step()
            each.zero_grad()
        for one, other in zip(ddp.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_step_and_a_load_tell_this_thread_that_the_model_is_gathered() -> None:
    """A capture then waits for its gathers. To make an optimizer gathers nothing."""

    def on_each_rank() -> None:
        def made() -> DistributedOptimizer:
            return DistributedOptimizer(wrap(make_model(), use_distributed_optimizer=True, overlap_param_gather=True))

        stepped, loaded, written, idle = (made() for _ in range(4))
        step(stepped, 0)
        loaded.load_state_dict(idle.state_dict())
        written.mark_loaded()
        known = gathered_models()
        assert [each.param_sync in known for each in (stepped, loaded, written, idle)] == [True, True, True, False]

    simulate(on_each_rank, 2)


def test_groups_of_two_classes_change_and_load_apart() -> None:
    """Each load begins where the state was saved, the second one too, whatever was trained and changed between."""

    def made() -> DistributedOptimizer:
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 4))
        groups = [
            {"params": ["2.*"], "optimizer": torch.optim.SGD, "lr": 0.2, "momentum": 0.5},
            {"params": ["4.*"], "lr": 0.3},
        ]
        torch.manual_seed(0)
        for param in net.parameters():
            nn.init.normal_(param, std=0.3)
        ddp = DistributedDataParallel(net)
        return DistributedOptimizer(ddp, lr=0.1, param_groups=groups)

    optimizer = made()
    for number in range(2):
        step(optimizer, number)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = [(step(optimizer, 2), weights(optimizer.model))[1], (step(optimizer, 3), weights(optimizer.model))[1]]
    other = made()
    for each in (other, optimizer, other):
        for group in each.param_groups:
            group["lr"] = 7.0
        each.load_state_dict(copy.deepcopy(saved))
        assert [group["lr"] for group in each.param_groups] == [0.2, 0.3, 0.1]
        assert [type(inner) for inner in each._inners] == [torch.optim.AdamW, torch.optim.SGD]
        for number, found in enumerate(expected, start=2):
            step(each, number)
            assert_same(weights(each.model), found)
