"""Recipes on a GPU: emulated, with the bits of the CPU; without ``emulate`` refused by name."""

import pytest
import torch
from quant_oracle import SPECS
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer, GraphedTrainingStep
from maingrad.kernels.quantized import quantize, scaled_product
from maingrad.te_integration import (
    Float8BlockScaling,
    Float8CurrentScaling,
    LayerNormMLP,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
)

pytestmark = pytest.mark.gpu

RECIPES = (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)


@pytest.mark.parametrize("name", SPECS)
def test_bits_are_those_of_the_cpu(name: str) -> None:
    draws = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(300, 515, generator=draws) * torch.exp2(torch.randn(300, 515, generator=draws) * 3)
        x[0], x[1, 3], x[2, 5] = 0.0, float("inf"), float("nan")
        x = x.to(dtype)
        found, expected = quantize(x.cuda(), SPECS[name]), quantize(x, SPECS[name])
        for mine, other in zip(found.tensors, expected.tensors, strict=True):
            # As numbers: NaN has two codes in E4M3.
            torch.testing.assert_close(mine.cpu().float(), other.float(), rtol=0, atol=0, equal_nan=True)
        finite = slice(128, None) if SPECS[name].block else slice(0, 0)  # no block of a row that is not finite
        product = scaled_product(found, found, torch.float32)[finite, finite].cpu()
        same = scaled_product(expected, expected, torch.float32)[finite, finite]
        assert (product - same).norm() <= 1e-5 * same.norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_as_a_graph_is_eager_training(recipe: type) -> None:
    outcomes = []
    for graphed in (False, True):
        torch.manual_seed(0)
        layers = (LayerNormMLP(256, 512, fuse_wgrad_accumulation=True, dtype=torch.bfloat16) for _ in range(2))
        model = DistributedDataParallel(nn.Sequential(*layers).cuda())
        optimizer = DistributedOptimizer(model, lr=2**-8)

        def train_step(x: Tensor, model=model, optimizer=optimizer) -> Tensor:
            with autocast(recipe=recipe(emulate=True)):
                y = model(x)
            loss = (y.float() - 1).square().mean()
            loss.backward()
            model.finish_grad_sync()
            optimizer.step()
            model.zero_grad_buffer()
            return loss

        step = GraphedTrainingStep(train_step, model, optimizer) if graphed else train_step
        torch.manual_seed(1)
        x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
        outcomes.append(torch.stack([step(x).detach() for _ in range(8)]))
    assert outcomes[0][-1] < outcomes[0][0]
    if recipe is NVFP4BlockScaling:  # a graph draws other numbers for the rounding
        torch.testing.assert_close(*outcomes, rtol=0.05, atol=0)
    else:
        assert torch.equal(*outcomes)


def test_without_a_kernel() -> None:
    layer, x = Linear(64, 64, dtype=torch.bfloat16, device="cuda"), torch.ones(16, 64, device="cuda").bfloat16()
    for recipe in RECIPES:
        with autocast(recipe=recipe()), pytest.raises(RuntimeError, match="emulate=True"):
            layer(x)
