"""Faults of the library itself, brought in by hand: ``verify`` notices each, and does not blame the user's program."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp.collectives.in_flight import in_stages
from maingrad.ddp.collectives.reduction import GradReduction
from maingrad.ddp.contract.record import GradRecord
from maingrad.ddp.optimizer import distributed_optimizer
from maingrad.launch import verify

WAYS = ("ddp", "zero1_converted", "fsdp", "fsdp_converted")


class Net(nn.Module):
    """Rows that do not look alike, so that each part's gradient is told from the others'."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return (x - 1).square().mean()


def first_call_of_each(start: Callable[..., Any], changed: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ``GradReduction`` that takes gradients, changed for the first bucket of each reduction."""
    seen: set[int] = set()

    def start_or_changed(self: GradReduction, grads: Tensor, into: Tensor | None = None) -> Any:
        if id(self) in seen:
            return start(self, grads, into)
        seen.add(id(self))
        kept.append(self)
        return changed(self, grads, into)

    kept: list[GradReduction] = []  # ids of those that are gone would come again
    return start_or_changed


def leave_out_a_bucket(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        GradReduction,
        "start",
        first_call_of_each(GradReduction.start, lambda self, grads, into: in_stages(iter(()), (grads,))),
    )


def keep_a_shard_to_itself(patch: pytest.MonkeyPatch) -> None:
    """A rank's shard of the first bucket is made of its own gradients: under ``fully_shard`` too."""

    def of_this_rank(self: GradReduction, grads: Tensor, into: Tensor | None = None) -> Iterator[Any]:
        yield from ()
        return grads[slice(*self.range_inside(grads.numel()))]

    patch.setattr(GradReduction, "inside", first_call_of_each(GradReduction.inside, of_this_rank))


def sum_a_bucket(patch: pytest.MonkeyPatch) -> None:
    start = GradReduction.start

    def summed(self: GradReduction, grads: Tensor, into: Tensor | None = None) -> Any:
        return start(self, grads.mul_(self.grid.size), into)

    patch.setattr(GradReduction, "start", first_call_of_each(start, summed))


def forget_the_first_microbatch(patch: pytest.MonkeyPatch) -> None:
    """Each fused product overwrites the accumulator."""
    open_for_write = GradRecord.open_for_write
    patch.setattr(
        GradRecord, "open_for_write", lambda self, **how: open_for_write(self, **how) or self.first_write_overwrites
    )


def double_the_norm(patch: pytest.MonkeyPatch) -> None:
    norm = distributed_optimizer.global_grad_norm
    patch.setattr(distributed_optimizer, "global_grad_norm", lambda model: 2 * norm(model))


def double_the_step(patch: pytest.MonkeyPatch) -> None:
    init = distributed_optimizer.DistributedOptimizer.__init__
    patch.setattr(
        distributed_optimizer.DistributedOptimizer,
        "__init__",
        lambda self, model, lr, **options: init(self, model, 2 * lr, **options),
    )


def write_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    """After a step the second rank's weights are others than the first one's."""
    step = distributed_optimizer.DistributedOptimizer.step

    def step_and_write(self: Any, *arguments: Any) -> Any:
        result = step(self, *arguments)
        self.finish_param_sync()
        if dist.get_rank() == 1:
            for param in self.model.parameters():
                param.data.mul_(1.5)
        return result

    patch.setattr(distributed_optimizer.DistributedOptimizer, "step", step_and_write)


def break_a_method(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(GradReduction, "range_inside")


class Fault(NamedTuple):
    bring_in: Callable[[pytest.MonkeyPatch], None]
    ways: set[str]
    """Those that show it."""
    parameters: set[str]
    evidence: str
    """Part of the finding's evidence."""


LAST = {"blocks.2.weight", "blocks.2.bias"}
ALL = {f"blocks.{index}.{kind}" for index in range(3) for kind in ("weight", "bias")}
FAULTS = {
    "a bucket is not reduced": Fault(
        leave_out_a_bucket,
        {"ddp", "zero1_converted"},
        LAST,
        "2.00 of rank 0's microbatch 0, 2.00 of rank 0's microbatch 1, 0.00 of rank 1's",
    ),
    "a shard is not reduced": Fault(keep_a_shard_to_itself, set(WAYS), LAST, "2.00 of rank 0's microbatch 0"),
    "a bucket is summed": Fault(sum_a_bucket, {"ddp", "zero1_converted"}, LAST, "2.00 of rank 1's microbatch 1"),
    "a microbatch is lost": Fault(
        forget_the_first_microbatch,
        {"zero1_converted"},
        {n for n in ALL if "weight" in n},
        "0.00 of rank 0's microbatch 0",
    ),
    "the norm": Fault(double_the_norm, {"zero1_converted"}, set(), "the global norm is"),
    "the step": Fault(double_the_step, {"zero1_converted"}, ALL, "the weights after the step are not"),
    "one rank has other weights": Fault(write_on_one_rank, {"zero1_converted"}, ALL, "the weights after the step are"),
    "an error": Fault(break_a_method, set(WAYS), set(), "AttributeError: 'GradReduction' object"),
}


@pytest.mark.in_turn
@pytest.mark.sampled(len(FAULTS))
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_library_is_called_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.bring_in(monkeypatch)
    found = verify(Net(), torch.randn(8, 12), ways=WAYS)
    assert not found.ok
    assert {str(finding.cause) for finding in found.findings} == {"library"}, str(found)
    assert {way for finding in found.findings for way in finding.ways} == fault.ways, str(found)
    assert {result.way for result in found.results if not result.ok} == fault.ways, str(found)
    assert {each for finding in found.findings for each in finding.parameters} >= fault.parameters, str(found)
    assert all(fault.evidence in finding.evidence for finding in found.findings), str(found)


def test_tied_weights_are_not_taken_for_weights_that_are_read_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    net.blocks[2].weight = net.blocks[0].weight
    keep_a_shard_to_itself(monkeypatch)
    found = verify(net, torch.randn(8, 12), ways=("fsdp",))
    assert {str(finding.cause) for finding in found.findings} == {"library"}, str(found)


def test_the_error_of_a_way_is_that_of_its_worst_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have all gradients, and one rank alone has wrong ones: not the last rank."""
    start = GradReduction.start

    def wrong_on_the_first_rank(self: GradReduction, grads: Tensor, into: Tensor | None = None) -> Any:
        in_flight = start(self, grads)
        in_flight.wait()
        if dist.get_rank() == 0:
            grads.mul_(3.0)
        return in_flight

    monkeypatch.setattr(GradReduction, "start", wrong_on_the_first_rank)
    found = verify(Net(), torch.randn(8, 12), ways=("ddp",))
    assert not found.ok
    assert found.results[0].grad_error == pytest.approx(2.0, rel=1e-3), str(found)


def test_without_a_fault_the_same_program_is_verified() -> None:
    found = verify(Net(), torch.randn(8, 12), ways=WAYS)
    assert found.ok and not found.findings, str(found)
