"""A small model, its plain PyTorch twin, and the two loops over microbatches that tests compare."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.torch_grads.shown_grad import ShownGrad
from maingrad.te_integration import Linear

FEATURES = 8


def make_model(dtype: torch.dtype = torch.float32, *, fuse: bool = True, seed: int = 0) -> nn.Sequential:
    """Two of our layers around modules that know nothing of main_grad.

    Every parameter fills whole vector registers, so that fused optimizers treat it alike in a flat buffer and alone.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        Linear(FEATURES, 16, dtype=dtype, fuse_wgrad_accumulation=fuse),
        nn.Tanh(),
        nn.LayerNorm(16, dtype=dtype),
        Linear(16, 4, bias=False, dtype=dtype, fuse_wgrad_accumulation=fuse),
    )


def plain_twin(model: nn.Module) -> nn.Module:
    """A copy with the same weights in which every gradient goes through autograd."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, Linear):
            module.fuse_wgrad_accumulation = False
    return twin


def wrap(model: nn.Module, **config: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, DistributedDataParallelConfig(**config))


def make_batches(count: int, dtype: torch.dtype = torch.float32, *, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, FEATURES, generator=generator).to(dtype) for _ in range(count)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Not quadratic at the optimum, so that every parameter has a gradient in every iteration."""
    return (model(batch) - 1).square().mean()


def plain_backward(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """The gradients of one iteration, in ``.grad``."""
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()


def ddp_backward(ddp: DistributedDataParallel, batches: Sequence[Tensor]) -> None:
    """The same in ``main_grad``, reduced."""
    with ddp.no_sync():
        for batch in batches[:-1]:
            (loss_of(ddp, batch) / len(batches)).backward()
    (loss_of(ddp, batches[-1]) / len(batches)).backward()
    ddp.finish_grad_sync()


def main_grads(model: nn.Module) -> dict[str, Tensor]:
    """Names as in the unwrapped model, so that they compare with ``plain_grads`` of a twin."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}


def plain_grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bitwise, and of the same names and dtypes."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), f"{name}: {(actual[name] - value).abs().max()}"


def has_no_own_grad(param: Tensor) -> bool:
    """Whether autograd has left nothing in ``.grad``: it is None, or shows the wrapper's gradient and has no memory."""
    return param.grad is None or isinstance(param.grad, ShownGrad)
