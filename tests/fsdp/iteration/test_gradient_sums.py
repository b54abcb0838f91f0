"""Memory of the sums that ``.grad`` shows: there from an iteration's first round until the next one's forward."""

import gc
import re
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_training import nbytes_of_sums
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from maingrad.fsdp.module import root_of
from maingrad.launch import simulate

PLACEMENTS = ("zero1", "zero2", "zero3")


def build(placements: str, **options: Any) -> FSDPModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    fully_shard(model[0], placements=placements, **options)
    return fully_shard(model, placements=placements, **options)  # type: ignore[return-value]


def loss(model: nn.Module, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
    return model(torch.randn(3, 6, generator=generator)).square().mean()


def sums_nbytes(model: FSDPModule) -> int:
    return sum(nbytes_of_sums(bucket.grad_shard) for bucket in root_of(model).buckets)


@pytest.mark.parametrize("placements", [*PLACEMENTS, "hsdp"])
def test_the_next_forward_has_the_memory(placements: str):
    """That of sums inside instances too."""

    def run() -> list[bool]:
        mesh = init_device_mesh("cpu", (2, 1)) if placements == "hsdp" else None
        model = build(placements, mesh=mesh)
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


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("at_once", [False, True], ids=["", "both forwards first"])
@pytest.mark.parametrize("placements", PLACEMENTS)
def test_who_keeps_a_gradient_keeps_its_values(placements: str, at_once: bool, size: int | None):
    """The next reduction goes into new memory, and ``.grad`` shows the new memory."""

    def run() -> None:
        fresh = build(placements)
        loss(fresh, 1).backward()
        model = build(placements, bucket_size=size)
        first, second = (loss(model, index) for index in range(2)) if at_once else (loss(model, 0), None)
        first.backward()
        kept = [param.grad for param in model.parameters()]
        wanted = [grad.to_local().clone() for grad in kept]
        model.zero_grad()
        (loss(model, 1) if second is None else second).backward()
        assert all(torch.equal(grad.to_local(), value) for grad, value in zip(kept, wanted, strict=True))
        assert not any(param.grad is grad for param, grad in zip(model.parameters(), kept, strict=True))
        for expected, grads in zip(everyones(fresh), everyones(model), strict=True):
            assert torch.equal(expected, grads)

    simulate(run, 2)


def everyones(model: FSDPModule) -> list[Tensor]:
    """Whole gradients, assembled from the shards of all ranks."""
    found = []
    for param in model.parameters():
        whole = torch.zeros(torch.Size(param.shard.shape).numel())
        whole[param.shard.start : param.shard.end] = param.grad.to_local().reshape(-1)
        dist.all_reduce(whole)
        found.append(whole)
    return found


@pytest.mark.parametrize("kept_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16 shards"])
def test_the_first_round_is_summed_in_place(kept_dtype: torch.dtype):
    """The collective writes into ``.grad``. Later reductions are added, also without ``zero_grad`` in between."""

    def run() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(kept_dtype)
        fully_shard(model, bucket_size=1)
        written: list[tuple[int, int]] = []
        for bucket in root_of(model).buckets:
            reduction = bucket.reduction
            inside = reduction.inside

            def noted(grads: Tensor, into: Tensor | None = None, inside: Any = inside) -> Any:
                mine = yield from inside(grads, into)
                assert into is None or mine is into
                written.append((mine.data_ptr(), grads.data_ptr()))
                return mine

            reduction.inside = noted  # type: ignore[method-assign]
        sums = [bucket.grad_shard for bucket in root_of(model).buckets]
        for index in range(3):
            if index == 2:
                model.zero_grad()
            written.clear()
            model(torch.full((2, 6), float(index), dtype=kept_dtype)).square().mean().backward()
            in_place = [at == total._total.data_ptr() for (at, _), total in zip(written, sums, strict=True)]
            assert in_place == [index != 1] * len(sums)
            if kept_dtype is torch.float32:
                shown = {param.grad.untyped_storage().data_ptr() for param in model.parameters()}
                assert shown == {total._total.untyped_storage().data_ptr() for total in sums}

    simulate(run, 2)


@pytest.mark.parametrize(
    ("placements", "sent"),
    [("zero1", torch.bfloat16), ("zero3", torch.bfloat16), ("hsdp", torch.bfloat16), ("zero3", None)],
)
@pytest.mark.sampled(4)
def test_reductions_send_the_reduce_dtype_and_sum_in_that_of_gradients(placements: str, sent: torch.dtype | None):
    """Each rank's part of the mean is rounded before it is sent, and no sum is. Instances all-reduce the sums."""
    schedule: list[tuple[int, str]] = []
    ranks = 4 if placements == "hsdp" else 2

    def part(rank: int) -> Tensor:
        return torch.full((2, 8), 1.0 + rank / 7)

    def run() -> Tensor:
        mesh = init_device_mesh("cpu", (2, 2)) if placements == "hsdp" else None
        policy = MixedPrecisionPolicy(reduce_dtype=sent)
        model: Any = fully_shard(nn.Linear(8, 8, bias=False), mesh, placements, policy)
        loss = model(part(dist.get_rank())).sum()
        schedule.append((dist.get_rank(), "backward"))
        loss.backward()
        return model.weight.grad.to_local()

    found = simulate(run, ranks, schedule=schedule)
    launched = [event for rank, event in schedule if rank == 0]
    launched = launched[launched.index("backward") :]
    inside = [event for event in launched if re.match("launch (all_to_all|reduce_scatter)", event)]
    assert len(inside) == 1 and f" {str(sent or torch.float32).removeprefix('torch.')}" in inside[0]
    parts = [part(rank).sum(0)[0] / ranks for rank in range(ranks)]
    expected = sum(each if sent is None else each.to(sent).float() for each in parts)
    for grad in found:
        torch.testing.assert_close(grad, expected.expand_as(grad), rtol=1e-6, atol=0)


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
            sums.append([param.grad.to_local().clone() for param in model.parameters() if param.grad is not None])
        return sums[0], sums[1]

    for apart, together in simulate(run, 2):
        torch.testing.assert_close(apart, together, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("placements", ["zero3", "zero1"])
def test_a_gradient_that_was_replaced_is_what_the_next_backward_adds_to(placements: str):
    """bf16 shows sums that are kept in fp32."""

    def on_each_rank() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16, bias=False, dtype=torch.bfloat16))
        fully_shard(model, placements=placements)
        weight = model[0].weight
        x = torch.ones(2, 16, dtype=torch.bfloat16)
        model(x).sum().backward()
        once = weight.grad.to_local().clone()
        weight.grad = weight.grad * 0.5
        model(x).sum().backward()
        return once, weight.grad.to_local()

    for once, found in simulate(on_each_rank, 2):
        assert once.any()
        assert torch.equal(found, once * 1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_keeps_gradients_that_were_cleared(dtype: torch.dtype) -> None:
    model: Any = fully_shard(nn.Linear(4, 4, dtype=dtype))
    x = torch.ones(2, 4, dtype=dtype)
    model(x).sum().backward()
    refs = [weakref.ref(param.grad) for param in model.parameters()]
    assert all(ref() is not None for ref in refs)
    model.zero_grad()
    model(x)
    gc.collect()
    assert all(ref() is None for ref in refs)


def test_one_gradient_that_was_cleared_is_zeros_where_no_backward_comes() -> None:
    """The others of its bucket keep their sums."""

    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            return self.second(self.first(x) if both else x)

    def run() -> None:
        model: Any = Picks()
        for module in (model.first, model.second, model):
            fully_shard(module)
        x = torch.ones(3, 6)
        model(x, True).sum().backward()
        kept = model.first.bias.grad.to_local().clone()
        model.first.weight.grad = None
        model(x, False).sum().backward()
        assert not model.first.weight.grad.to_local().any()
        assert torch.equal(model.first.bias.grad.to_local(), kept)

    simulate(run, 2)


@pytest.mark.parametrize("placements", ["hsdp", "hsdp_zero1"])
@pytest.mark.sampled(1)
def test_gradients_are_zeros_until_they_are_reduced_across_instances(placements: str) -> None:
    """Whatever the memory of the sums has contained."""

    def run() -> None:
        model = build(placements, mesh=init_device_mesh("cpu", (2, 2)))
        for _ in range(2):
            with model.no_sync():
                for index in range(2):
                    loss(model, index).backward()
                    assert not any(param.grad.to_local().any() for param in model.parameters())
            loss(model, 2).backward()
            assert all(param.grad.norm() > 0 for param in model.parameters())
            model.zero_grad()

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        simulate(run, 4)
    finally:
        torch.use_deterministic_algorithms(before)
