"""Per-token loss: gradients of a mean over all ranks' tokens, whatever each rank has of them. Bitwise.

Ranks sum the losses of their tokens; ``finish_grad_sync(num_tokens)`` divides the sum over ranks by all ranks' tokens.
The reference adds every rank's gradients by hand (``summed_by_hand``) and divides once.
"""

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_syncs import NoHostSync
from loops import assert_same, weights, wrap
from parity_models import Everything, expert_group, held_grads
from stock_steps import make_net
from summed_by_hand import alone, everyones_grads, tree_sum
from torch import Tensor

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
from maingrad.ddp.optimizer.grad_norm import global_grad_norm
from maingrad.ddp.wrapper import iteration
from maingrad.launch import simulate

PER_TOKEN: dict[str, Any] = {"calculate_per_token_loss": True}
PLACED: dict[str, dict[str, Any]] = {
    "whole": {},
    "sharded": {"use_distributed_optimizer": True},
    "sharded, overlapped": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "hybrid": {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
}


def microbatch(rank: int, index: int) -> Tensor:
    """[tokens, 7]; 2 to 5 tokens."""
    tokens = 2 + (3 * rank + 2 * index) % 4
    return torch.randn(tokens, 7, generator=torch.Generator().manual_seed(10 * rank + index))


def accumulate(ddp: DistributedDataParallel, count: int) -> int:
    """Run ``count`` microbatches of this rank; returns the number of their tokens."""
    rank, tokens = dist.get_rank(), 0
    for index in range(count):
        with nullcontext() if index == count - 1 else ddp.no_sync():
            x = microbatch(rank, index)
            (ddp(x) - 1).square().mean(dim=1).sum().backward()
            ddp.module.backward_dw()
            tokens += len(x)
    return tokens


def count_of(rank: int) -> int:
    """Microbatches; rank 2 has none at all."""
    return (2, 1, 0, 3)[rank % 4]


def grads_and_reference(variants: int, delayed: bool, config: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """This rank's part of every reduced gradient, ours and by hand."""
    rank = dist.get_rank()
    apart = alone(Everything(fused=True, delayed=delayed, variant=rank % variants), **PER_TOKEN)
    tokens = torch.tensor(float(accumulate(apart, count_of(rank))))
    dist.all_reduce(tokens)
    instances = config.get("num_distributed_optimizer_instances", 1)
    expected = {}
    for name, by_rank in everyones_grads(apart).items():
        terms = by_rank[rank % variants :: variants] if name.startswith("experts") else by_rank
        inner = len(terms) // instances
        total = tree_sum([tree_sum(terms[i : i + inner]) for i in range(0, len(terms), inner)])
        expected[name] = (total / tokens).flatten()

    ddp = DistributedDataParallel(
        Everything(fused=True, delayed=delayed, variant=rank % variants),
        DistributedDataParallelConfig(**PER_TOKEN, bucket_size=300, **config),
        expert_process_group=expert_group(variants),
    )
    own = torch.tensor(float(accumulate(ddp, count_of(rank))))  # the dtype that is summed in
    with NoHostSync():
        ddp.finish_grad_sync(own)
    assert own == sum(len(microbatch(rank, i)) for i in range(count_of(rank))), "the caller's tensor is left alone"
    found = {}
    for name, piece in held_grads(ddp).items():
        found[name] = (piece.values, expected[name][piece.start : piece.start + len(piece.values)])
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("ranks", "variants", "placed", "delayed"),
    [
        (1, 1, "sharded", False),
        (3, 1, "whole", False),
        (3, 1, "sharded, overlapped", True),
        (4, 2, "whole", True),
        (4, 2, "sharded", False),
        (4, 4, "sharded", False),
        (4, 2, "hybrid", False),
        (4, 1, "hybrid", True),
    ],
)
def test_gradients_are_those_of_a_mean_over_all_ranks_tokens(
    ranks: int, variants: int, placed: str, delayed: bool
) -> None:
    """Also for experts that other ranks do not hold: those ranks' tokens count too."""
    held: dict[str, int] = {}
    for found in simulate(grads_and_reference, ranks, variants, delayed, PLACED[placed]):
        for name, (ours, expected) in found.items():
            assert torch.equal(ours, expected), name
            held[name] = held.get(name, 0) + len(ours)
    sizes = {name: param.numel() for name, param in Everything(fused=True, delayed=False).named_parameters()}
    assert held["odd.weight"] == sizes["odd.weight"] * {"whole": ranks, "hybrid": 2}.get(placed, 1)
    copies = {"whole": ranks, "hybrid": 2 * variants}.get(placed, variants)
    assert held["experts.0.weight"] == sizes["experts.0.weight"] * copies


# ---- Numbers of tokens. ----


def reduced(num_tokens: Any, config: dict[str, Any], scale: float = 1.0) -> Tensor:
    """The sum over ranks of a gradient (rank + 1) * ``scale``, divided."""
    model = torch.nn.Linear(1, 1, bias=False)
    ddp = wrap(model, **PER_TOKEN, **config)
    ddp(torch.tensor([[(dist.get_rank() + 1) * scale]])).sum().backward()
    ddp.finish_grad_sync(num_tokens(dist.get_rank()) if callable(num_tokens) else num_tokens)
    first = [grad[:1] for grad, bucket in zip(ddp.reduced_grads(), ddp.buckets, strict=True)]
    start = ddp.owned_range(ddp.buckets[0].layout)[0]
    return first[0].clone() if start == 0 else torch.empty(0)


NUMBERS: dict[str, tuple[Any, float]] = {
    "an int": (8, 6 / 24),
    "a tensor": (torch.tensor(8), 6 / 24),
    "int32 in one dim": (torch.tensor([8], dtype=torch.int32), 6 / 24),
    "bf16": (torch.tensor(8.0, dtype=torch.bfloat16), 6 / 24),
    "fp64 in two dims": (torch.tensor([[8.0]], dtype=torch.float64), 6 / 24),
    "on one rank alone": (lambda rank: 0 if rank else 3, 6 / 3),
    "another on every rank": (lambda rank: torch.tensor(rank * 2), 6 / 6),
    "less than one in all": (0.125, 6 / 0.375),
    "a small integer": (torch.tensor(128, dtype=torch.uint8), 6 / 384),
    "many": (2**20, 6 / (3 * 2**20)),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("config", [{}, PLACED["sharded"]], ids=["whole", "sharded"])
def test_tokens_come_as_any_kind_of_number(name: str, config: dict[str, Any]) -> None:
    """Three ranks with the gradients 1, 2 and 3."""
    num_tokens, expected = NUMBERS[name]
    values = torch.cat(simulate(reduced, 3, num_tokens, config))
    assert values.tolist() == [expected] * (1 if config else 3)


@pytest.mark.parametrize("config", PLACED.values(), ids=PLACED)
def test_an_iteration_without_a_token_has_zeros(config: dict[str, Any]) -> None:
    values = torch.cat(simulate(reduced, 2, 0, config, scale=0.0))
    assert not values.any()
    assert values.numel()


def step_without_tokens() -> None:
    ddp = wrap(make_net(), **PER_TOKEN, use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(ddp, weight_decay=0.0, max_grad_norm=1.0)
    before = weights(ddp)
    ddp.finish_grad_sync(torch.tensor(0))
    optimizer.step()
    assert optimizer.grad_norm == 0
    assert_same(weights(ddp), before)


def test_a_step_without_a_token_moves_nothing() -> None:
    simulate(step_without_tokens, 2)


# ---- With what comes after. ----


def clipped(config: dict[str, Any], scale: float | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The norm as reported and of the divided gradients, and the weights after."""
    ddp = wrap(make_net(torch.bfloat16), **PER_TOKEN, **config)
    optimizer = DistributedOptimizer(ddp, lr=0.02, max_grad_norm=0.05)
    scaler = None if scale is None else GradScaler("cpu", init_scale=scale)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    loss = (ddp(x) - 1).square().sum()
    (loss if scaler is None else scaler.scale(loss)).backward()
    ddp.finish_grad_sync(torch.tensor(4 * 128))
    norm = global_grad_norm(ddp)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.grad_norm is not None
    return optimizer.grad_norm, norm if scale is None else norm / scale, weights(ddp)


@pytest.mark.parametrize("reduce_in_fp32", [True, False])
@pytest.mark.sampled(1)
def test_clipping_and_loss_scaling_see_divided_gradients(reduce_in_fp32: bool) -> None:
    config = {"grad_reduce_in_fp32": reduce_in_fp32}
    expected = simulate(clipped, 3, config, None)[0]
    for placed in ("whole", "sharded"):
        for scale in (None, 2.0**10):
            for reported, norm, after in simulate(clipped, 3, {**config, **PLACED[placed]}, scale):
                assert torch.equal(reported, norm)
                assert torch.equal(norm, expected[1])
                assert norm > 0.05, "clipping has nothing to do"
                assert_same(after, expected[2])


def averaged(per_token: bool) -> dict[str, Tensor]:
    """All ranks have the same number of tokens: the mean of means."""
    ddp = wrap(make_net(), use_distributed_optimizer=True, calculate_per_token_loss=per_token)
    optimizer = DistributedOptimizer(ddp, lr=0.125, optimizer_class=torch.optim.SGD)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = (ddp(x) - 1).square().mean(dim=1)
    (losses.sum() if per_token else losses.mean()).backward()
    ddp.finish_grad_sync(*((4,) if per_token else ()))
    optimizer.step()
    return weights(ddp)


def test_even_ranks_train_as_by_averages() -> None:
    """Powers of two: not even the roundings differ."""
    assert_same(simulate(averaged, 2, True)[0], simulate(averaged, 2, False)[0])


# ---- Refused. ----


def test_tokens_go_with_the_option_and_only_with_it() -> None:
    with pytest.raises(TypeError, match=r"goes with DistributedDataParallelConfig\(calculate_per_token_loss=True\)"):
        wrap(make_net()).set_num_tokens(3)
    with pytest.raises(TypeError, match=r"goes with DistributedDataParallelConfig\(calculate_per_token_loss=True\)"):
        wrap(make_net()).finish_grad_sync(3)
    ddp = wrap(make_net(), **PER_TOKEN)
    with pytest.raises(TypeError, match=r"goes with DistributedDataParallelConfig\(calculate_per_token_loss=True\)"):
        ddp.finish_grad_sync()
    ddp.finish_grad_sync(3)


@pytest.mark.parametrize("shape", [(2,), (0,), (1, 2)])
def test_one_number_for_each_rank(shape: tuple[int, ...]) -> None:
    ddp = wrap(make_net(), **PER_TOKEN)
    with pytest.raises(ValueError, match=rf"takes one number for this rank, not a tensor of \[{shape[0]}"):
        ddp.finish_grad_sync(torch.ones(shape))
    ddp.finish_grad_sync(torch.ones(1))


def test_tokens_of_a_captured_step_are_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay would divide by one number."""
    ddp = wrap(make_net(), **PER_TOKEN)
    monkeypatch.setattr(iteration, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="every replay would divide by this number: give it a tensor"):
        ddp.set_num_tokens(3)
    ddp.set_num_tokens(torch.tensor(3))


def test_a_second_finish_divides_no_more() -> None:
    ddp = wrap(make_net(), **PER_TOKEN)
    (ddp(torch.ones(2, 4)) - 1).square().sum().backward()
    ddp.finish_grad_sync(3)
    before = [grad.clone() for grad in ddp.reduced_grads()]
    ddp.finish_grad_sync(3)
    ddp.finish_grad_sync()
    assert all(map(torch.equal, ddp.reduced_grads(), before))


def test_inf_tokens_reach_the_gradients_visibly() -> None:
    """The host does not read the number; the norm shows it."""
    ddp = wrap(make_net(), **PER_TOKEN)
    (ddp(torch.ones(2, 4)) - 1).square().sum().backward()
    ddp.finish_grad_sync(torch.tensor(math.nan))
    assert global_grad_norm(ddp).isnan()


@pytest.mark.parametrize("when", ["before the forward", "after the backward"])
@pytest.mark.parametrize("form", ["stock", "whole", "sharded"])
@pytest.mark.sampled(6)
def test_a_plain_loop_sets_its_tokens(form: str, when: str) -> None:
    """Equal to plain PyTorch's mean over all ranks' tokens; the counts of the iteration before are forgotten."""

    def tokens_of(step: int, rank: int) -> Tensor:
        return microbatch(rank, step).double()

    def loss_of(model: torch.nn.Module, x: Tensor) -> Tensor:
        return (model(x) - 1).square().mean(dim=1).sum()

    def train() -> dict[str, Tensor]:
        config = {**PER_TOKEN, "use_distributed_optimizer": form == "sharded"}
        ddp = wrap(copy.deepcopy(begun), **config)
        make = torch.optim.SGD if form == "stock" else DistributedOptimizer
        options = {} if form == "stock" else {"optimizer_class": torch.optim.SGD}
        optimizer = make(ddp.parameters() if form == "stock" else ddp, lr=0.1, **options)
        for step in range(3):
            x = tokens_of(step, dist.get_rank())
            if when == "before the forward":
                ddp.set_num_tokens(len(x))
            loss_of(ddp, x).backward()
            if when == "after the backward":
                ddp.set_num_tokens(len(x))
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        loss_of(ddp, x).backward()
        with pytest.raises(TypeError, match=r"model\.set_num_tokens\(num_tokens\), before .grad is read or"):
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        return weights(ddp)

    begun = torch.nn.Linear(7, 5).double()
    plain = copy.deepcopy(begun)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        batches = [tokens_of(step, rank) for rank in range(2)]
        (sum(loss_of(plain, x) for x in batches) / sum(map(len, batches))).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    for found in simulate(train, 2):
        for name, weight in weights(plain).items():
            torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-12)
