"""A run of ``DistributedOptimizer`` and the same with a stock optimizer: masters of the test's own, gradients added by
hand."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from loops import weights, wrap
from summed_by_hand import tree_sum
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer

__all__ = ["WIDTH", "backward", "batch_of", "loss_of", "make_net", "select", "stock_run", "train"]

WIDTH = 64

MakeStock = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]


def make_net(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Sequential:
    """Every parameter is a multiple of 64 elements: whole vector registers, wherever buckets and shards are cut, so
    that elementwise kernels round alike everywhere."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, WIDTH, dtype=dtype),
        nn.Tanh(),
        nn.LayerNorm(WIDTH, dtype=dtype),
        nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype),
    )


def batch_of(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    """[3, 4] of one rank."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def stock_run(dtype: torch.dtype, ranks: int, steps: int, make_stock: MakeStock) -> list[dict[str, Tensor]]:
    """Weights after every step of a stock optimizer on fp32 masters, fed with the mean over ranks of gradients."""
    model = make_net(dtype)
    masters = {name: nn.Parameter(param.detach().float()) for name, param in model.named_parameters()}
    optimizer = make_stock(masters)
    history = []
    for step in range(steps):
        grads: dict[str, list[Tensor]] = {name: [] for name in masters}
        for rank in range(ranks):
            model.zero_grad()
            loss_of(model, batch_of(step, rank, dtype)).backward()
            for name, param in model.named_parameters():
                assert param.grad is not None
                grads[name].append(param.grad.float() * (1 / ranks) if ranks > 1 else param.grad.float())
        for name, master in masters.items():
            master.grad = tree_sum(grads[name])
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
        history.append(weights(model))
    return history


def backward(ddp: DistributedDataParallel, step: int, dtype: torch.dtype, rank: int | None = None) -> None:
    """One microbatch of this rank, or of another one, and the reduction."""
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    loss_of(ddp, batch_of(step, rank, dtype)).backward()
    ddp.finish_grad_sync()


def train(
    dtype: torch.dtype,
    steps: Iterable[int],
    config: dict[str, Any],
    options: dict[str, Any],
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> tuple[list[dict[str, Tensor]], DistributedOptimizer]:
    """Weights after every step on this rank, and the optimizer."""
    ddp = wrap(make_net(dtype), **config)
    optimizer = DistributedOptimizer(ddp, **options)
    scheduler = None if schedule is None else schedule(optimizer)
    history = []
    for step in steps:
        backward(ddp, step, dtype)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        history.append(weights(ddp))
        ddp.zero_grad_buffer()
    return history, optimizer


def select(masters: dict[str, nn.Parameter], names: Sequence[str]) -> list[nn.Parameter]:
    """In the order of ``names``."""
    return [masters[name] for name in names]
