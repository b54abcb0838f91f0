"""Training of a few steps of each of our modules, delayed or not, with recompute and saved-tensor hooks around them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from modules import FEATURES, make
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.te_integration import WgradQueue, delayed_wgrad

__all__ = ["AROUND", "Stack", "Trained", "assert_bitwise", "train"]

STEPS = 3


def fresh_tensors() -> AbstractContextManager[None]:
    """What is saved comes back as other objects in other memory, without any attribute."""
    return saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda packed: packed.clone())


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "recompute": nullcontext,
    "reentrant recompute": nullcontext,
    "save_on_cpu": save_on_cpu,
    "fresh tensors": fresh_tensors,
    "recompute, fresh tensors": fresh_tensors,
}


class Stack(nn.Module):
    """Two modules of a kind and a plain norm between them. Options are the modules'.

    twice   the second one runs twice, once of them not recomputed
    tied    their weights are the same parameters
    frozen  the last weight of the first module (which is the second's too, where they are tied)
    """

    def __init__(
        self,
        kind: str,
        around: str = "nothing",
        *,
        twice: bool = True,
        tied: bool = False,
        frozen: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.first = make(kind, seed=1, **options)
        self.norm = nn.LayerNorm(FEATURES)
        self.second = make(kind, seed=2, **options)
        if tied:
            for name in self.first.weight_names:
                setattr(self.second, name, getattr(self.first, name))
            self.second.mark_delayed_weights()
        if frozen:
            getattr(self.first, self.first.weight_names[-1]).requires_grad_(False)
        self.around = around
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        with AROUND[self.around]():
            x = self._run(self.first, x)
            x = x + self.norm(x).tanh()
            y = x + self._run(self.second, x)
            return y + self.second(x * 0.5) if self.twice else y

    def _run(self, module: nn.Module, x: Tensor) -> Tensor:
        if "recompute" not in self.around:
            return module(x)
        return checkpoint(module, x, use_reentrant="reentrant" in self.around)


class Trained(NamedTuple):
    losses: list[float]
    grads: list[dict[str, Tensor]]
    """Of every step, what this rank holds of each bucket."""
    weights: dict[str, Tensor]


def train(model: nn.Module, microbatches: int, how: str) -> Trained:
    """A few steps under overlap, sharded.

    how  "now"; "module": each module's own ``backward_dw``; "queue": all forwards in a ``delayed_wgrad`` block
    """
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=100)
    ddp = DistributedDataParallel(model, config)
    optimizer = DistributedOptimizer(ddp, lr=1e-2)
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(17 + rank)
    trained, queue = Trained([], [], {}), WgradQueue()
    for _ in range(STEPS):
        for index in range(microbatches):
            x = torch.randn(2, 3, FEATURES, generator=generator).requires_grad_()
            with nullcontext() if index == microbatches - 1 else ddp.no_sync():
                with delayed_wgrad(queue) if how == "queue" else nullcontext():
                    loss = (ddp(x) - 1).square().mean() / microbatches
                loss.backward()
                assert how != "queue" or len(queue), "nothing was delayed"
                queue.drain()
                for module in reversed(list(model.children())):
                    getattr(module, "backward_dw", bool)()
            trained.losses.append(loss.item())
        ddp.finish_grad_sync()
        trained.grads.append({b.name: b.grad_data[slice(*ddp.owned_range(b.layout))].clone() for b in ddp.buckets})
        optimizer.step()
        ddp.zero_grad_buffer()
    trained.weights.update({name: p.detach().clone() for name, p in model.named_parameters()})
    return trained


def assert_bitwise(one: Trained, other: Trained, *, same_buckets: bool = True) -> None:
    """Losses and weights, and gradients where both put them into the same buckets."""
    assert one.losses == other.losses
    assert len(set(one.losses)) > 1
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name
    if same_buckets:
        for ours, theirs in zip(one.grads, other.grads, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[bucket], theirs[bucket]) for bucket in ours)
