"""Memory of the sums that ``.grad`` shows: there from an iteration's first round until the next one's forward."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.fsdp import FSDPModule, fully_shard
from maingrad.fsdp.module import root_of
from maingrad.launch import simulate

PLACEMENTS = ("zero1", "zero2", "zero3")


def build(placements: str) -> FSDPModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    fully_shard(model[0], placements=placements)
    return fully_shard(model, placements=placements)  # type: ignore[return-value]


def loss(model: nn.Module, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
    return model(torch.randn(3, 6, generator=generator)).square().mean()


def sums_nbytes(model: FSDPModule) -> int:
    return sum(bucket.reduction.shard.nbytes for bucket in root_of(model).buckets)


@pytest.mark.parametrize("placements", PLACEMENTS)
def test_the_next_forward_has_the_memory(placements: str):
    def run() -> list[bool]:
        model = build(placements)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = [sums_nbytes(model) == 0]
        for index in range(2):
            outputs = loss(model, index)
            found.append(sums_nbytes(model) == 0)
            outputs.backward()
            found.append(sums_nbytes(model) > 0)
            with torch.no_grad():
                loss(model, index)  # gradients are still wanted
            found.append(sums_nbytes(model) > 0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                loss(model, index)
            found.append(sums_nbytes(model) == 0)
        return found

    assert simulate(run, 2) == [[True] * 9] * 2


@pytest.mark.parametrize("placements", PLACEMENTS)
def test_who_keeps_a_gradient_keeps_its_values(placements: str):
    def run() -> bool:
        model = build(placements)
        loss(model, 0).backward()
        kept = [param.grad for param in model.parameters() if param.grad is not None]
        wanted = [grad.detach().clone() for grad in kept]
        model.zero_grad()
        loss(model, 1).backward()
        return all(map(torch.equal, kept, wanted)) and not any(
            param.grad is grad for param, grad in zip(model.parameters(), kept, strict=True)
        )

    assert simulate(run, 2) == [True, True]


@pytest.mark.parametrize("placements", PLACEMENTS)
def test_microbatches_are_summed_over_any_number_of_forwards(placements: str):
    def run() -> tuple[list[Tensor], list[Tensor]]:
        sums = []
        for together in (False, True):
            model = build(placements)
            for index in range(3):
                if together:
                    loss(model, index).backward()  # each ends an iteration, and nobody clears
                elif index < 2:
                    with model.no_sync():
                        loss(model, index).backward()
                else:
                    loss(model, index).backward()
            sums.append([param.grad.detach().clone() for param in model.parameters() if param.grad is not None])
        return sums[0], sums[1]

    for apart, together in simulate(run, 2):
        torch.testing.assert_close(apart, together, rtol=1e-5, atol=1e-7)
