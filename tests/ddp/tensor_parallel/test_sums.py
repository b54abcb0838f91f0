"""Gradients, norms and replicas of models that are cut by tensor parallelism, against a plain model on all the data."""

from typing import Any

import pytest
import torch
from cut_models import WAYS, Ranks, backward, joined, plain_grads, ranks_of_mesh, wrapped

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer
from maingrad.launch import simulate

LR = 0.5


def grads_of(model: DistributedDataParallel, optimizer: DistributedOptimizer, ranks: Ranks, microbatches: int) -> Any:
    """Whole gradients, as an SGD step shows them, and the norm."""
    before = joined(model, dict(model.module.named_parameters()))
    backward(model, ranks, microbatches)
    optimizer.step()
    optimizer.finish_param_sync()
    after = joined(model, dict(model.module.named_parameters()))
    assert optimizer.grad_norm is not None
    return {name: (before[name] - after[name]) / LR for name in before}, optimizer.grad_norm.item()


def one_step(way: str, sp: bool, marks: bool, microbatches: int, hidden: int, options: dict[str, Any]) -> Any:
    ranks = ranks_of_mesh(WAYS[way].mesh)
    model = wrapped(way, ranks, sp=sp, marks=marks, hidden=hidden, **options)
    optimizer = DistributedOptimizer(model, lr=LR, optimizer_class=torch.optim.SGD, max_grad_norm=1e6)
    return grads_of(model, optimizer, ranks, microbatches)


def check(way: str, sp: bool, marks: bool, microbatches: int, hidden: int = 12, **options: Any) -> None:
    replicas, shards, tp = WAYS[way].mesh
    expected = plain_grads(replicas * shards * microbatches, hidden)
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm().item()
    for found, found_norm in simulate(one_step, replicas * shards * tp, way, sp, marks, microbatches, hidden, options):
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=2e-5, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")
        assert found_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_cut_model_has_the_gradients_of_a_plain_one(way: str, sp: bool, microbatches: int) -> None:
    if way == "zero1 of three" and sp:
        pytest.skip("three ranks do not divide the sequence evenly")
    check(way, sp, True, microbatches)


@pytest.mark.parametrize("way", ["ddp", "zero1", "hybrid"])
def test_slices_that_were_dtensors_are_reduced_alike(way: str) -> None:
    check(way, True, False, 1)


@pytest.mark.parametrize("way", ["ddp", "zero1", "hybrid"])
def test_an_uneven_cut(way: str) -> None:
    """Ranks have 4 and 3 of 7 rows, and close their buckets at the same parameters."""
    check(way, False, False, 1, hidden=7, bucket_size=24)
    check(way, False, False, 1, hidden=7, bucket_size=None, num_buckets=3)


OPTIONS = {
    "overlapped gathers": ("zero1", {"overlap_param_gather": True}),
    "released": ("zero1", {"release_grads": True}),
    "everything at the end": ("hybrid", {"overlap_grad_reduce": False}),
    "checked for NaN": ("ddp", {"check_for_nan_in_grad": True}),
    "watched replicas": ("zero1", {"check_replicas_every": 1}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_go_with_slices(name: str) -> None:
    way, options = OPTIONS[name]
    check(way, True, True, 1, **options)
