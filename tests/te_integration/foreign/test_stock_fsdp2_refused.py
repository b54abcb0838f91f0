"""Our modules under PyTorch's own ``fully_shard``: uses that cannot work raise an error with a remedy."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from modules import ALL_FACTORIES, FEATURES, make
from stock_fsdp2 import Twin, Unit, batch, shard, worst_difference
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.te_integration import WgradQueue, convert_linears, delayed_wgrad
from maingrad.te_integration.pipeline import PipelineStage

RANKS = 2


def raised_by(attempt: Callable[[], Any]) -> str:
    """The error's type and text, and its cause's: torch's pipelines wrap what a stage raises."""
    try:
        attempt()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error} {error.__cause__ or ''}"
    return "no error"


def delay(kind: str, fuse: bool, own_queue: bool) -> tuple[str, float]:
    """The error of a forward that delays; the difference of gradients after one that does not."""
    module = make(kind, fuse=fuse, delay=own_queue, name="the layer")
    model, twin = (shard(nn.Sequential(Unit(each))) for each in (module, Twin(module)))
    queue = WgradQueue()
    with delayed_wgrad(queue):
        error = raised_by(lambda: model(batch(0)))
    assert len(queue) == 0
    assert not module.need_backward_dw()
    if own_queue:
        return error, 0.0
    for each in (model, twin):
        each(batch(0)).square().mean().backward()
    return error, worst_difference(model, twin)


@pytest.mark.in_turn
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("own_queue", [True, False])
@pytest.mark.parametrize("kind", ALL_FACTORIES)
def test_delayed_weight_gradients_are_refused_in_forward(kind: str, own_queue: bool, fuse: bool):
    for error, difference in run_ranks(delay, RANKS, kind, fuse, own_queue):
        assert error.startswith("RuntimeError: the layer")
        assert "torch.distributed.fsdp.fully_shard" in error
        assert "without delay_wgrad_compute=True" in error
        assert difference < 1e-6


def delay_tied_to_plain() -> str:
    """FSDP2 knows the weight by the module that comes first; ours is the second."""
    plain, ours = nn.Linear(FEATURES, FEATURES), make("Linear", fuse=False, delay=True)
    ours.weight = plain.weight
    model = shard(nn.Sequential(plain, ours))
    return raised_by(lambda: model(batch(0)))


def delay_into_slots() -> str:
    """A pipeline of one stage on each rank, sharded over the ranks."""
    mesh = dist.init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("shard", "pipeline"))
    module = shard(nn.Sequential(make("Linear")), mesh=mesh["shard"])
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=mesh["pipeline"].get_group())
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss, scale_grads=False)
    return raised_by(lambda: schedule.step(batch(0), target=batch(1)))


def wrap_sharded() -> str:
    model = shard(nn.Sequential(make("Linear")))
    return raised_by(lambda: DistributedDataParallel(model, DistributedDataParallelConfig()))


def shard_wrapped() -> str:
    model = nn.Sequential(make("Linear"))
    wrapped = DistributedDataParallel(model, DistributedDataParallelConfig())
    shard(model)
    return raised_by(lambda: wrapped(batch(0)))


def use_outside_its_unit() -> str:
    """Outside its unit the weight is this rank's shard."""
    model = shard(nn.Sequential(make("Linear")))
    return raised_by(lambda: model[0](batch(0)))


@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        (delay_tied_to_plain, "RuntimeError: Linear.*delayed weight gradient under torch.distributed.fsdp.fully_shard"),
        (delay_into_slots, "RuntimeError: .*delayed weight gradient under torch.distributed.fsdp.fully_shard"),
        (wrap_sharded, "ValueError: parameter '0.weight' is a DTensor"),
        (shard_wrapped, "RuntimeError: parameter '0.*was made a DTensor after wrapping"),
        (use_outside_its_unit, "RuntimeError: .* mixed torch.Tensor and DTensor"),
    ],
)
def test_what_cannot_be_is_an_error(attempt: Callable[[], str], text: str):
    for error in run_ranks(attempt, RANKS):
        assert re.match(text, error, re.DOTALL), error


def convert_late() -> tuple[tuple[str, ...], dict[str, str], float]:
    """The model is converted after it was sharded."""
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, FEATURES))
    model, twin = (shard(each) for each in (copy.deepcopy(plain), plain))
    outcome = convert_linears(model)
    for each in (model, twin):
        each(batch(0)).square().mean().backward()
    return outcome.converted, outcome.skipped, worst_difference(model, twin)


def test_converting_comes_before_sharding():
    for done, skipped, difference in run_ranks(convert_late, RANKS):
        assert done == ()
        assert list(skipped) == ["0", "2"]
        assert all("DTensor" in reason for reason in skipped.values())
        assert difference == 0
