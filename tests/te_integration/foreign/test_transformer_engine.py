"""Transformer Engine's own modules under our DDP; runs wherever ``transformer_engine`` imports and a GPU is there."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig

WIDTH = 64
MODULES = ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"]


def make(name: str, te: Any, fused: bool, delayed: bool, bias: bool) -> nn.Module:
    torch.manual_seed(0)
    options = {
        "params_dtype": torch.bfloat16,
        "fuse_wgrad_accumulation": fused,
        "delay_wgrad_compute": delayed,
        "bias": bias,
    }
    if name == "GroupedLinear":
        return te.GroupedLinear(4, WIDTH, WIDTH, **options)
    return getattr(te, name)(WIDTH, WIDTH, **options)


def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if type(module).__name__ == "GroupedLinear":
        return module(x, [8, 0, 16, 8])
    return module(x)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["hook", "fused"])
@pytest.mark.parametrize("delayed", [False, True], ids=["now", "delayed"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", MODULES)
def test_their_gradients_reach_main_grad(name: str, bias: bool, delayed: bool, fused: bool) -> None:
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    batches = [torch.randn(32, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    plain = make(name, te, fused=False, delayed=False, bias=bias)
    total: dict[str, torch.Tensor] = {}
    for x in batches:
        plain.zero_grad()
        run(plain, x).float().square().mean().backward()
        for parameter_name, parameter in plain.named_parameters():
            total[parameter_name] = total.get(parameter_name, 0.0) + parameter.grad.double()

    module = make(name, te, fused, delayed, bias)
    module.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(nn.Sequential(module), DistributedDataParallelConfig(overlap_grad_reduce=True))
    for index, x in enumerate(batches):
        with nullcontext() if index == len(batches) - 1 else ddp.no_sync():
            run(module, x).float().square().mean().backward()
        if delayed:
            module.backward_dw()
    ddp.finish_grad_sync()
    for parameter_name, parameter in module.named_parameters():
        exact = total[parameter_name]
        error = (parameter.main_grad.double() - exact).norm()
        # The reference rounds each of its gradients to bf16 once; of an expert without tokens both are zero.
        assert error <= torch.finfo(torch.bfloat16).eps * exact.norm(), parameter_name
