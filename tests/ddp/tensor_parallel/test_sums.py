"""Gradients, norms and replicas of models that are cut by tensor parallelism, against a plain model on all the data."""

from typing import Any

import pytest
import torch
from cut_models import LENGTH, WAYS, Ranks, backward, batch, joined, plain_grads, ranks_of_mesh, wrapped
from torch import Tensor

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer, GraphedTrainingStep
from maingrad.launch import simulate

LR = 0.5
EVERY = [*((way, False) for way in WAYS), *((way, True) for way in WAYS if LENGTH % WAYS[way].mesh[2] == 0)]


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
@pytest.mark.parametrize(("way", "sp"), EVERY)
def test_a_cut_model_has_the_gradients_of_a_plain_one(way: str, sp: bool, microbatches: int) -> None:
    check(way, sp, True, microbatches)


@pytest.mark.in_turn
@pytest.mark.parametrize("way", ["ddp", "zero1", "hybrid"])
def test_slices_that_were_dtensors_are_reduced_alike(way: str) -> None:
    check(way, True, False, 1)


@pytest.mark.in_turn
@pytest.mark.parametrize("way", ["ddp", "zero1", "hybrid"])
def test_an_uneven_cut(way: str) -> None:
    """Ranks have 4 and 3 of 7 rows, and close their buckets at the same parameters."""
    check("zero1 of three", False, False, 1, hidden=2)  # the last rank has no row at all
    check(way, False, False, 1, hidden=7, bucket_size=24)
    check(way, False, False, 1, hidden=7, bucket_size=None, num_buckets=3)


@pytest.mark.parametrize("way", ["zero1", "hybrid"])
def test_uneven_slices_that_stay_whole(way: str) -> None:
    check(way, False, False, 1, hidden=7, keep_params_whole=True)


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


def on_half_a_wire() -> Any:
    ranks = ranks_of_mesh(WAYS["zero1"].mesh)
    model = wrapped("zero1", ranks, sp=True, grad_reduce_wire_dtype=torch.bfloat16)
    optimizer = DistributedOptimizer(model, lr=LR, optimizer_class=torch.optim.SGD, max_grad_norm=1e6)
    return grads_of(model, optimizer, ranks, 1)


def test_a_wire_of_half_the_bits_carries_each_kind_by_its_factor() -> None:
    expected = plain_grads(2)
    for found, _ in simulate(on_half_a_wire, 4):
        for name, grad in expected.items():
            assert (found[name] - grad).norm() < 0.01 * grad.norm() + 1e-3, name


def steps_of(graphed: bool) -> list[Tensor]:
    ranks = ranks_of_mesh(WAYS["zero1"].mesh)
    model = wrapped("zero1", ranks, sp=True)
    optimizer = DistributedOptimizer(model, lr=0.05, max_grad_norm=0.5)

    def train_step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = GraphedTrainingStep(train_step, model, optimizer, num_warmup_steps=1) if graphed else train_step
    for index in range(4):
        step(batch(2 * index + ranks.data_index))
    optimizer.finish_param_sync()
    return [param.detach().clone() for param in model.module.parameters()]


@pytest.mark.in_turn
def test_a_graphed_step_is_an_eager_one() -> None:
    for graphed, eager in zip(simulate(steps_of, 4, True), simulate(steps_of, 4, False), strict=True):
        assert all(map(torch.equal, graphed, eager))
