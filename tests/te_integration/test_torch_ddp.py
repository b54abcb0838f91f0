"""Our modules under ``torch.nn.parallel.DistributedDataParallel``, which reduces ``.grad`` within backward."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.launch import simulate
from maingrad.te_integration import LayerNormLinear, Linear, WgradQueue, delayed_wgrad

MODULES = {
    "Linear": lambda **options: Linear(6, 4, **options),
    "LayerNormLinear": lambda **options: LayerNormLinear(6, 4, **options),
}


def wrapped(name: str, **options: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.parallel.DistributedDataParallel(MODULES[name](fuse_wgrad_accumulation=False, **options))


def loss(model: nn.Module) -> Tensor:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    return model(x).square().mean()


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_reduced(name: str) -> None:
    def run() -> list[Tensor]:
        model = wrapped(name)
        loss(model).backward()
        return [param.grad for param in model.parameters() if param.grad is not None]

    first, second = simulate(run, 2)
    assert len(first) > 1
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("how", ["module", "queue"])
def test_a_delayed_gradient_is_refused(name: str, how: str) -> None:
    """It would be added to ``.grad`` after the reduction, and differ between ranks."""

    def run() -> None:
        model = wrapped(name, delay_wgrad_compute=how == "module")
        with delayed_wgrad(WgradQueue()) if how == "queue" else nullcontext():
            with pytest.raises(RuntimeError, match=r"delayed weight gradient under torch\.nn\.parallel"):
                loss(model)

    simulate(run, 2)
