"""Slices of tensor parallelism under ``fully_shard``, against a plain model on all data."""

import pytest
import torch
from sliced_models import Plain, Told, cut, data_rank, part_of, plain_iteration, ranks_of, shard, train, world_of
from torch import Tensor

from maingrad.ddp.plan.model_slice import model_slice_of
from maingrad.launch import simulate

ROWS = ("zero3", "zero2", "zero1", "hsdp", "hsdp_zero1")


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    error = float((found - expected).norm() / (expected.norm() + 1e-12))
    assert error < 1e-9, f"{name}: {error}"


@pytest.mark.in_turn
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("told", ["marks", "slices"])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.sampled(6)
def test_gradients_norms_and_steps_are_a_plain_models(
    row: str, told: Told, sequence_parallel: bool, microbatches: int
) -> None:
    """Five clipped steps, after which copies on tensor-parallel ranks are equal bit for bit."""

    def on_each_rank() -> dict[str, Tensor]:
        mesh, group, data_ranks = ranks_of(row)
        plain = Plain().double()
        local = cut(Plain().double(), group, sequence_parallel=sequence_parallel, told=told)
        model = shard(local, row, mesh, group if told == "marks" else None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        expected = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for step in range(5):
            train(model, (step * data_ranks + data_rank(mesh)) * microbatches, microbatches)
            plain_iteration(plain, step, data_ranks, microbatches)
            wholes = dict(plain.named_parameters())
            for name, param in model.named_parameters():
                assert_close(param.grad.full_tensor(), wholes[name].grad, name)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
            for each in (optimizer, expected):
                each.step()
                each.zero_grad()
        found = {}
        with model.unsharded():
            for name, param in model.named_parameters():
                torch.testing.assert_close(param, part_of(wholes[name], param, group))
                if model_slice_of(param).dim is None:
                    found[name] = param.detach().clone()
        return found

    first, *others = simulate(on_each_rank, world_of(row))
    assert len(first) == 7
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), name
