"""Experts that differ between ranks, under a stock optimizer: all ranks clip by one norm and skip the same steps."""

import pytest
import torch
import torch.distributed as dist
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

RANKS = 2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    dense = nn.Linear(4, 4)
    torch.manual_seed(1 + dist.get_rank())
    expert = nn.Linear(4, 4)
    for param in expert.parameters():
        param.allreduce = False  # type: ignore[attr-defined]
    return nn.Sequential(dense, expert)


def batch() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))


def reduced() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = DistributedDataParallel(make_model(), expert_process_group=WORLD_OF_ONE, init_sync=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def sharded_model() -> tuple[DistributedDataParallel, DistributedOptimizer]:
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(make_model(), config, expert_process_group=WORLD_OF_ONE, init_sync=False)
    return model, DistributedOptimizer(model, lr=0.1, optimizer_class=torch.optim.SGD)


@pytest.mark.parametrize("exposed", [False, True])
def test_torchs_norm_and_ours_are_one_for_all_ranks(exposed: bool) -> None:
    def train() -> tuple[list[float], float]:
        model, optimizer = reduced()
        model(batch()).square().sum().backward()
        if exposed:
            model.expose_grads()
        params = list(model.parameters())
        ours = clip_grad_norm(model, 1e9)
        torchs = torch.nn.utils.clip_grad_norm_(params, 1e9)
        by_hand = torch.stack([param.grad.norm() for param in params]).norm()
        squares = sum(param.main_grad.double().square().sum() for param in model.module[0].parameters())
        own = sum(param.main_grad.double().square().sum() for param in model.module[1].parameters())
        dist.all_reduce(own)
        expected = (squares + own).sqrt().item()
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        before = [param.detach().clone() for param in params]
        grads = [param.main_grad.clone() for param in params]
        optimizer.step()
        for param, then, grad in zip(params, before, grads, strict=True):
            torch.testing.assert_close(param.detach(), then - 0.1 * grad)
        return [ours.item(), torchs.item(), by_hand.item(), 0.5 * expected / clipped_to(grads)], expected

    norms = simulate(train, RANKS)
    assert norms[0][1] == norms[1][1]
    for found, expected in norms:
        assert found == pytest.approx([expected] * 4, rel=1e-5)


def clipped_to(grads: list[Tensor]) -> float:
    """The norm over all ranks of one dense layer's gradients and one rank's own expert's."""
    dense, own = (sum(grad.double().square().sum() for grad in part) for part in (grads[:2], grads[2:]))
    assert isinstance(own, Tensor)
    dist.all_reduce(own)
    return (dense + own).sqrt().item()


def test_norms_of_the_optimizers_own_tensors_cover_each_ranks_experts() -> None:
    def train() -> tuple[float, float, float]:
        model, optimizer = sharded_model()
        model(batch()).square().sum().backward()
        expert = {held.updated for held in optimizer.slices if held.name.startswith("1.")}
        masters = optimizer.param_groups[0]["params"]
        total = nn.utils.get_total_norm([master.grad for master in masters])
        of_experts = nn.utils.get_total_norm([master.grad for master in masters if master in expert])
        own = sum(grad.double().square().sum() for grad in model.reduced_grads("expert"))
        assert isinstance(own, Tensor)
        dist.all_reduce(own)
        torch.testing.assert_close(of_experts, own.sqrt().float())
        return total.item(), clip_grad_norm(model, 1e9).item(), of_experts.item()

    (total, ours, of_experts), other = simulate(train, RANKS)
    assert (total, of_experts) == pytest.approx((ours, other[2])) and of_experts < total


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("exposed", [False, True])
@pytest.mark.sampled(8)
def test_all_ranks_skip_where_one_ranks_expert_overflows(exposed: bool, scaler_class: type, unscales: bool) -> None:
    def train() -> tuple[list[bool], float]:
        model, optimizer = reduced()
        scaler, moved = scaler_class("cpu", init_scale=1024.0), []
        for overflows in (True, False):
            before = model.module[0].weight.detach().clone()
            y = model.module[1](model.module[0](batch()).detach()) if overflows else model(batch())
            loss = y.square().sum() * (float("inf") if overflows and dist.get_rank() == 0 else 1.0)
            scaler.scale(loss).backward()
            if exposed:
                model.expose_grads()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved.append(not torch.equal(before, model.module[0].weight))
        return moved, scaler.get_scale()

    assert simulate(train, RANKS) == [([False, True], 512.0)] * RANKS


WAYS = {
    "clip_grad_norm": clip_grad_norm,
    "torch": lambda model, limit: nn.utils.clip_grad_norm_(model.parameters(), limit),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("clip", WAYS)
@pytest.mark.sampled(4)
def test_norms_cover_what_a_program_puts_into_all_gradients(clip: str, sharded: bool) -> None:
    """Our norm sees tensors in the place of gradients too. torch's sees what is written into them."""

    def train() -> tuple[float, float, list[Tensor]]:
        model, optimizer = sharded_model() if sharded else reduced()
        model(batch()).square().sum().backward()
        for param in model.parameters():
            if clip == "torch":
                param.grad.copy_(torch.ones_like(param.detach()))
            else:
                param.grad = torch.ones_like(param.detach())
        before = [param.detach().clone() for param in model.parameters()]
        norm = WAYS[clip](model, 0.5)
        optimizer.step()
        moves = [old - param.detach() for old, param in zip(before, model.parameters(), strict=True)]
        return float(norm), sum(param.numel() for param in model.parameters()), moves

    for norm, numel, moves in simulate(train, RANKS):
        whole = (numel + numel / 2) ** 0.5  # the dense layer once, and the other rank's expert
        assert norm == pytest.approx(whole)
        for move in moves:
            torch.testing.assert_close(move, torch.full_like(move, 0.1 * 0.5 / whole), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("replaced", ["all", "the expert's"])
@pytest.mark.sampled(4)
def test_steps_refuse_an_experts_gradient_of_which_torch_saw_one_ranks(replaced: str, sharded: bool) -> None:
    def train() -> bool:
        model, optimizer = sharded_model() if sharded else reduced()
        for refused in (True, False):
            model(batch()).square().sum().backward()
            for param in (model if replaced == "all" else model.module[1]).parameters():
                param.grad = torch.ones_like(param.detach()) if refused else None
            before = [param.detach().clone() for param in model.module[1].parameters()]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if refused:
                with pytest.raises(RuntimeError, match=r"'1\.\w+' was replaced.*param\.grad\.copy_"):
                    optimizer.step()
            elif replaced == "the expert's":  # None is no gradient, as in plain PyTorch
                optimizer.step()
            for param, then in zip(model.module[1].parameters(), before, strict=True):
                torch.testing.assert_close(param.detach(), then, rtol=0, atol=0)
            optimizer.zero_grad()
        return True

    assert all(simulate(train, RANKS))
