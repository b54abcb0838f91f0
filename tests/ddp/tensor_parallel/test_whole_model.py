"""What covers a whole model covers all ranks that hold it together: clipping, scalers, NaN checks, tokens, replicas."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import WAYS, CutModel, backward, batch, joined, loss_of, plain_grads, ranks_of_mesh, train, wrapped
from torch import Tensor, nn

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GradScaler,
    clip_grad_norm,
)
from maingrad.launch import simulate

EVERY = [(way, sp) for way in ("ddp", "zero1", "hybrid") for sp in (False, True)]


def world_of(way: str) -> int:
    replicas, shards, tp = WAYS[way].mesh
    return replicas * shards * tp


# ---- Clipping. ----


def five_clipped_steps(way: str, sp: bool, microbatches: int) -> tuple[list[int], dict[str, Tensor]]:
    ranks = ranks_of_mesh(WAYS[way].mesh)
    model = wrapped(way, ranks, sp=sp)
    optimizer = DistributedOptimizer(model, lr=0.05, max_grad_norm=0.5)
    for _ in range(5):
        train(model, optimizer, ranks, microbatches)
    optimizer.finish_param_sync()
    params = dict(model.module.named_parameters())
    copies = [params[name] for name, held in model.model_slices.items() if held.grad != "slice"]
    bits = torch.cat([each.detach().view(-1).view(torch.int32) for each in copies])
    return bits.tolist(), joined(model, params)


@pytest.mark.in_turn
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("way", "sp"), EVERY)
@pytest.mark.sampled(6)
def test_replicas_have_the_same_bits_after_five_clipped_steps(way: str, sp: bool, microbatches: int) -> None:
    found = simulate(five_clipped_steps, world_of(way), way, sp, microbatches)
    assert all(bits == found[0][0] for bits, _ in found)
    for _, whole in found[1:]:
        assert all(torch.equal(whole[name], tensor) for name, tensor in found[0][1].items())


def by_hand(way: str, sp: bool) -> list[float]:
    """The norm by our function, by torch's over ``.grad``, and of one slice and one copy, by rank."""
    ranks = ranks_of_mesh(WAYS[way].mesh)
    model = wrapped(way, ranks, sp=sp)
    backward(model, ranks)
    up, bias = model.module.blocks[0].up.weight, model.module.blocks[0].bias
    found = [up.grad.norm().item(), bias.grad.norm().item()]
    found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
    found.append(clip_grad_norm(model, 1e9).item())
    if way == "ddp":
        model.expose_grads()
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
    return found


@pytest.mark.parametrize(("way", "sp"), EVERY)
@pytest.mark.sampled(3)
def test_every_norm_is_of_the_whole_model(way: str, sp: bool) -> None:
    grads = plain_grads(world_of(way) // 2)
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
    expected = [grads["blocks.0.up.weight"].norm().item(), grads["blocks.0.bias"].norm().item(), norm, 0.1, 0.1]
    for found in simulate(by_hand, world_of(way), way, sp):
        assert found == pytest.approx(expected[: len(found)], rel=1e-5)


def whole_grads(way: str) -> dict[str, Tensor]:
    ranks = ranks_of_mesh(WAYS[way].mesh)
    model = wrapped(way, ranks, sp=True)
    backward(model, ranks)
    return {name: param.grad.full_tensor() for name, param in model.module.named_parameters()}


@pytest.mark.in_turn
@pytest.mark.parametrize("way", ["ddp", "zero1", "hybrid"])
def test_the_whole_gradient_is_of_all_slices(way: str) -> None:
    """As under ``fully_shard``."""
    expected = plain_grads(world_of(way) // 2)
    for found in simulate(whole_grads, world_of(way), way):
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=2e-5, atol=2e-6)


# ---- Inf and NaN in one rank's slice. ----


def spoil(model: Any, ranks: Any, value: float) -> None:
    """The gradient of a slice on the first tensor-parallel rank and data 1 alone."""
    if ranks.tp.get_local_rank() == 0 and ranks.data_index == 1:
        model.module.blocks[1].up.weight.register_hook(lambda grad: grad * value)


def scaled(way: str, stock: bool) -> tuple[float, bool]:
    ranks = ranks_of_mesh(WAYS[way].mesh)
    model = wrapped(way, ranks, sp=True)
    spoil(model, ranks, float("inf"))
    before = joined(model, dict(model.module.named_parameters()))
    optimizer: Any = DistributedOptimizer(model, lr=0.1, optimizer_class=torch.optim.SGD)
    scaler: Any = GradScaler("cpu", init_scale=2.0)
    if stock:
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(model, ranks.data_index)).backward()
    scaler.step(optimizer)
    scaler.update()
    after = joined(model, dict(model.module.named_parameters()))
    return scaler.get_scale(), all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("way", "stock"), [("ddp", False), ("ddp", True), ("zero1", False), ("hybrid", False)])
def test_all_ranks_skip_a_step_for_one_slices_inf(way: str, stock: bool) -> None:
    assert simulate(scaled, world_of(way), way, stock) == [(1.0, True)] * world_of(way)


def skipped(way: str) -> tuple[bool, int]:
    ranks = ranks_of_mesh(WAYS[way].mesh)
    model = wrapped(way, ranks)
    spoil(model, ranks, float("nan"))
    optimizer = DistributedOptimizer(model, lr=0.1, skip_nonfinite=True)
    before = [param.detach().clone() for param in model.parameters()]
    backward(model, ranks)
    optimizer.step()
    optimizer.finish_param_sync()
    return all(map(torch.equal, before, model.parameters())), int(optimizer.num_skipped_steps)


@pytest.mark.in_turn
@pytest.mark.parametrize("way", ["ddp", "zero1", "hybrid"])
def test_no_rank_steps_on_one_slices_nan(way: str) -> None:
    assert simulate(skipped, world_of(way), way) == [(True, 1)] * world_of(way)


def with_nan(way: str) -> str:
    ranks = ranks_of_mesh(WAYS[way].mesh)
    model = wrapped(way, ranks, check_for_nan_in_grad=True)
    spoil(model, ranks, float("nan"))
    backward(model, ranks)
    with pytest.raises(FloatingPointError) as raised:
        model.finish_grad_sync()
    return str(raised.value)


@pytest.mark.in_turn
@pytest.mark.parametrize("way", ["ddp", "zero1", "hybrid"])
def test_nan_in_one_slice_is_raised_on_all_ranks(way: str) -> None:
    for text in simulate(with_nan, world_of(way), way):
        assert "parameter 'blocks.1.up.weight' holds NaN or Inf on rank 2" in text


# ---- Tokens. ----


def per_token(way: str, sp: bool) -> dict[str, Tensor]:
    """Ranks of other data have 1, 2, ... rows."""
    ranks = ranks_of_mesh(WAYS[way].mesh)
    model = wrapped(way, ranks, sp=sp, calculate_per_token_loss=True)
    optimizer = DistributedOptimizer(model, lr=1.0, optimizer_class=torch.optim.SGD)
    before = joined(model, dict(model.module.named_parameters()))
    rows = ranks.data_index % 2 + 1
    output = model(batch(ranks.data_index)[:rows])
    output.square().sum().backward()
    model.set_num_tokens(output.shape[0] * output.shape[1])
    optimizer.step()
    optimizer.finish_param_sync()
    return {name: before[name] - each for name, each in joined(model, dict(model.module.named_parameters())).items()}


@pytest.mark.parametrize(("way", "sp"), EVERY)
@pytest.mark.sampled(3)
def test_tokens_are_counted_once(way: str, sp: bool) -> None:
    plain, tokens = CutModel(), 0
    for index in range(world_of(way) // 2):
        output = plain(batch(index)[: index % 2 + 1])
        output.square().sum().backward()
        tokens += output.shape[0] * output.shape[1]
    for found in simulate(per_token, world_of(way), way, sp):
        for name, param in plain.named_parameters():
            assert param.grad is not None
            torch.testing.assert_close(found[name], param.grad / tokens, rtol=2e-5, atol=2e-6)


# ---- Other ways to step. ----


def stock_steps() -> dict[str, Tensor]:
    ranks = ranks_of_mesh(WAYS["ddp"].mesh)
    model = wrapped("ddp", ranks, sp=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = joined(model, dict(model.module.named_parameters()))
    backward(model, ranks)
    optimizer.step()
    return {name: before[name] - each for name, each in joined(model, dict(model.module.named_parameters())).items()}


def test_a_stock_optimizer_takes_slices() -> None:
    expected = plain_grads(2)
    for found in simulate(stock_steps, 4):
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=2e-5, atol=2e-6)


def state_of_another_slice(way: str) -> str:
    ranks = ranks_of_mesh(WAYS[way].mesh)
    model = wrapped(way, ranks)
    optimizer = DistributedOptimizer(model, lr=0.1)
    train(model, optimizer, ranks, 1)
    states: list[Any] = [None] * 2
    dist.all_gather_object(states, optimizer.state_dict(), group=ranks.tp.get_group())
    optimizer.load_state_dict(states[ranks.tp.get_local_rank()])
    with pytest.raises(ValueError, match="each rank loads what it") as raised:
        optimizer.load_state_dict(states[1 - ranks.tp.get_local_rank()])
    return str(raised.value)


@pytest.mark.parametrize("way", ["ddp", "zero1"])
def test_an_optimizers_state_is_of_its_slices(way: str) -> None:
    for text in simulate(state_of_another_slice, world_of(way), way):
        assert "on tensor-parallel rank 2 of 2" in text


def test_one_tensor_parallel_rank_has_the_state_of_all() -> None:
    """A program that cuts its model only where there are several GPUs."""

    def trained(**groups: Any) -> DistributedOptimizer:
        model = DistributedDataParallel(nn.Linear(2, 2), DistributedDataParallelConfig(), **groups)
        optimizer = DistributedOptimizer(model, lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return optimizer

    state = trained().state_dict()
    trained(tensor_parallel_group=WORLD_OF_ONE).load_state_dict(state)


def parted() -> str:
    ranks = ranks_of_mesh(WAYS["zero1"].mesh)
    model = wrapped("zero1", ranks, check_replicas_every=1)
    optimizer = DistributedOptimizer(model, lr=0.1)
    if dist.get_rank() == 3:
        with torch.no_grad():
            model.module.head.bias.data[0] += 1
    with pytest.raises(RuntimeError, match="replicas have parted") as raised:
        train(model, optimizer, ranks, 1)
    return str(raised.value)


def test_replicas_over_tensor_parallel_ranks_are_compared() -> None:
    for text in simulate(parted, 4):
        assert "'head.bias' has other values on rank 3" in text
