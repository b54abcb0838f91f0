"""Models under PyTorch's ``fully_shard``, trained beside a twin in plain PyTorch."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from modules import FEATURES, plain_forward
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from maingrad.ddp.contract import grouped_wgrad as grouped_products
from maingrad.te_integration.dense import products as dense_products

__all__ = ["PLAIN", "Setting", "Twin", "Unit", "accumulate", "batch", "counted_writes", "shard", "worst_difference"]


class Setting(NamedTuple):
    """How a model is sharded and trained."""

    fuse: bool = True
    keep: bool = False
    """Parameters stay gathered from forward to backward, and between the backwards of one step."""
    bf16: bool = False
    """Computed in bf16, gradients summed and reduced in fp32."""
    recompute: str = "none"
    microbatches: int = 3
    reduce_each: bool = False
    """Every microbatch is reduced; otherwise the last, which also has what the others accumulated."""


PLAIN = Setting()


class Twin(nn.Module):
    """What ``module`` should compute, written out in plain PyTorch, over a copy of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)

    def forward(self, x: Tensor) -> Tensor:
        return plain_forward(self.module, dict(self.module.named_parameters()), x)


class Unit(nn.Module):
    """What is sharded together; its module recomputed as the setting says."""

    def __init__(self, module: nn.Module, recompute: str = "none") -> None:
        super().__init__()
        self.module, self.recompute = module, recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute == "none":
            return self.module(x).clone()  # FSDP2 warns of views
        return checkpoint(self.module, x, use_reentrant=self.recompute == "reentrant").clone()


def shard(model: nn.Module, setting: Setting = PLAIN, mesh: Any = None) -> nn.Module:
    """Each ``Unit`` in it, then the model."""
    mesh = mesh or dist.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if setting.bf16 else MixedPrecisionPolicy()
    options = {"mesh": mesh, "reshard_after_forward": not setting.keep, "mp_policy": policy}
    for module in list(model.modules()):
        if isinstance(module, Unit):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def batch(index: int) -> Tensor:
    """[2, 6, FEATURES], of this rank."""
    seed = 100 * index + dist.get_rank()
    return torch.randn(2, 6, FEATURES, generator=torch.Generator().manual_seed(seed))


def accumulate(model: Any, setting: Setting, step: int) -> None:
    """The backwards of one step."""
    for index in range(setting.microbatches):
        last = index == setting.microbatches - 1
        model.set_requires_gradient_sync(last or setting.reduce_each)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or not setting.keep)
        (model(batch(10 * step + index)).float().square().mean() / setting.microbatches).backward()


def worst_difference(model: nn.Module, twin: nn.Module) -> float:
    """Largest norm of the difference of two gradients over the norm, over all parameters."""
    worst = 0.0
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.shape == theirs.shape, name
        assert (ours.grad is None) is (theirs.grad is None) is (not ours.requires_grad), name
        if ours.grad is not None:
            expected = theirs.grad.full_tensor()
            difference = (ours.grad.full_tensor() - expected).norm() / expected.norm().clamp(min=1e-6)
            worst = max(worst, difference.item())
    return worst


@contextmanager
def counted_writes() -> Iterator[list[bool]]:
    """One entry for each product that adds to an accumulator: of one weight, or of all experts."""
    dense, grouped, writes = dense_products.wgrad_accumulate, grouped_products.grouped_wgrad, []

    def count_dense(*args: Any, overwrite: bool = False) -> None:
        writes.append(overwrite)
        dense(*args, overwrite=overwrite)

    def count_grouped(*args: Any, overwrite: Any = False) -> None:
        if overwrite is not True:  # which is how gradients of their own are made for autograd
            writes.append(False if overwrite is False else any(overwrite))
        grouped(*args, overwrite=overwrite)

    dense_products.wgrad_accumulate, grouped_products.grouped_wgrad = count_dense, count_grouped
    try:
        yield writes
    finally:
        dense_products.wgrad_accumulate, grouped_products.grouped_wgrad = dense, grouped
