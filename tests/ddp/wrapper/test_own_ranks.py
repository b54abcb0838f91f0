"""Experts that differ between ranks, under a stock optimizer: all ranks clip by one norm and skip the same steps."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, GradScaler, clip_grad_norm
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


def test_our_norm_covers_plain_tensors_in_the_place_of_all_gradients() -> None:
    """Torch's clipping of them asks nothing of ours: docs/main_grad.md sends a program to ``clip_grad_norm``."""

    def train() -> tuple[float, float, list[Tensor]]:
        model, optimizer = reduced()
        model(batch()).square().sum().backward()
        for param in model.parameters():
            param.grad = torch.ones_like(param.detach())
        before = [param.detach().clone() for param in model.parameters()]
        norm = clip_grad_norm(model, 0.5)
        optimizer.step()
        moves = [old - param.detach() for old, param in zip(before, model.parameters(), strict=True)]
        return float(norm), sum(param.numel() for param in model.parameters()), moves

    for norm, numel, moves in simulate(train, RANKS):
        whole = (numel + numel / 2) ** 0.5  # the dense layer once, and the other rank's expert
        assert norm == pytest.approx(whole)
        for move in moves:
            torch.testing.assert_close(move, torch.full_like(move, 0.1 * 0.5 / whole), rtol=1e-4, atol=1e-7)
