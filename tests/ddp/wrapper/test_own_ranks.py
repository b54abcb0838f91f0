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


def test_torchs_norm_of_one_ranks_experts_is_refused_and_ours_is_one_for_all() -> None:
    def train() -> tuple[float, float]:
        model, _ = reduced()
        model(batch()).square().sum().backward()
        model.finish_grad_sync()
        model.expose_grads()
        with pytest.raises(RuntimeError, match=r"'1\.\w+' is an expert .*maingrad\.ddp\.clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        squares = sum(param.grad.double().square().sum() for param in model.module[0].parameters())
        own = sum(param.grad.double().square().sum() for param in model.module[1].parameters())
        dist.all_reduce(own)
        expected = (squares + own).sqrt().item()
        torch.nn.utils.clip_grad_norm_(model.module[0].parameters(), 1e9)  # what all ranks hold alike
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e9)
        return clip_grad_norm(model, 1.0).item(), expected

    norms = simulate(train, RANKS)
    assert norms[0][0] == norms[1][0]
    for norm, expected in norms:
        assert norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("unscales", [True, False])
def test_all_ranks_skip_where_one_ranks_expert_overflows(scaler_class: type, unscales: bool) -> None:
    def train() -> tuple[list[bool], float]:
        model, optimizer = reduced()
        scaler, moved = scaler_class("cpu", init_scale=1024.0), []
        for overflows in (True, False):
            before = model.module[0].weight.detach().clone()
            y = model.module[1](model.module[0](batch()).detach()) if overflows else model(batch())
            loss = y.square().sum() * (float("inf") if overflows and dist.get_rank() == 0 else 1.0)
            scaler.scale(loss).backward()
            model.finish_grad_sync()
            model.expose_grads()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad_buffer()
            moved.append(not torch.equal(before, model.module[0].weight))
        return moved, scaler.get_scale()

    assert simulate(train, RANKS) == [([False, True], 512.0)] * RANKS
