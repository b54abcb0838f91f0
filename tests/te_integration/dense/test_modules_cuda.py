"""The modules on a GPU: norms in half precision, recompute, weight gradients drained on another stream, host waits."""

from typing import Any

import pytest
import torch
from host_syncs import cuda_waits_are_errors
from loops import wrap
from torch import Tensor, nn

from maingrad.te_integration import LayerNormLinear, LayerNormMLP

pytestmark = pytest.mark.gpu

K, FFN, ROWS = 256, 512, 128


def make(kind: type[Any], **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = (K, FFN) if kind is LayerNormMLP else (K, K)
    module = kind(*sizes, device="cuda", fuse_wgrad_accumulation=True, **options)
    with torch.no_grad():
        module.layer_norm_weight.add_(torch.randn_like(module.layer_norm_weight) * 0.1)
    return module


def batch(dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(2, ROWS, K, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def fp64_norm(module: Any, x: Tensor) -> Tensor:
    x, gamma = x.double(), module.layer_norm_weight.double() + (1 if module.zero_centered_gamma else 0)
    if module.normalization == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * gamma
    x = x - x.mean(-1, keepdim=True)
    beta = 0 if module.layer_norm_bias is None else module.layer_norm_bias.double()
    return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * gamma + beta


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_norms_in_every_dtype(
    normalization: str, zero_centered_gamma: bool, dtype: torch.dtype, autocast: bool
) -> None:
    """Under autocast parameters are fp32 and the input is what an earlier layer made of it."""
    options = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
    layer = make(LayerNormLinear, params_dtype=torch.float32 if autocast else dtype, **options)
    ddp = wrap(layer)
    x = batch(dtype).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        output = ddp(x)
        normalized = layer.normalize(x)
    assert output.dtype is (torch.bfloat16 if autocast else dtype)
    rounding = 2.0**-8 if torch.bfloat16 in (dtype, output.dtype) else 2.0**-10 if dtype is torch.float16 else 2.0**-20
    assert error(normalized, fp64_norm(layer, x)) <= rounding
    expected = fp64_norm(layer, x) @ layer.weight.double().t() + layer.bias.double()
    assert error(output, expected) <= 4 * max(rounding, 2.0**-11)  # TF32 may multiply fp32
    output.float().square().sum().backward()
    dy = 2 * expected.reshape(-1, K)
    assert error(layer.weight.main_grad, dy.t() @ fp64_norm(layer, x).reshape(-1, K)) <= 8 * max(rounding, 2.0**-11)
    assert all(record.view.isfinite().all() for record in ddp.records)


@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_17_weight_gradients_drained_on_another_stream_are_the_same_bits(kind: type[Any], checkpoint: bool) -> None:
    """While the compute stream goes on and frees what it can: nothing may be read before it is there, or after."""
    if kind is LayerNormLinear and checkpoint:
        options: dict[str, Any] = {"normalization": "RMSNorm"}
    else:
        options = {"checkpoint": checkpoint} if kind is LayerNormMLP else {}

    def run(delay: bool) -> dict[str, Tensor]:
        module = make(kind, params_dtype=torch.bfloat16, delay_wgrad_compute=delay, **options)
        ddp, side = wrap(module), torch.cuda.Stream()
        for seed in range(4):
            with ddp.no_sync():
                torch.cuda._sleep(2_000_000)
                ddp(batch(torch.bfloat16, seed)).float().square().mean().backward()
            with torch.cuda.stream(side):
                module.backward_dw()
            torch.randn(4, 2 * ROWS, 2 * FFN, device="cuda", dtype=torch.bfloat16)  # takes freed memory at once
        torch.cuda.current_stream().wait_stream(side)
        ddp.finish_grad_sync()
        return {record.name: record.view.clone() for record in ddp.records}

    now, delayed = run(False), run(True)
    for name, gradient in now.items():
        assert torch.equal(gradient, delayed[name]), name
        assert gradient.isfinite().all()


def test_recompute_keeps_the_input_alone() -> None:
    def peak(checkpoint: bool) -> tuple[int, Tensor]:
        mlp = make(LayerNormMLP, params_dtype=torch.bfloat16, activation="swiglu", checkpoint=checkpoint)
        ddp = wrap(mlp)
        x = batch(torch.bfloat16).requires_grad_()
        before = torch.cuda.memory_allocated()
        output = ddp(x)
        kept = torch.cuda.memory_allocated() - before - output.nbytes
        output.float().square().sum().backward()
        return kept, mlp.fc1_weight.main_grad.clone()

    (plain, gradient), (recomputed, same) = peak(False), peak(True)
    assert recomputed <= batch(torch.bfloat16).nbytes // 4 < plain
    assert torch.equal(gradient, same)


@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
def test_the_host_never_waits_for_the_gpu(kind: type[Any]) -> None:
    module = make(kind, params_dtype=torch.bfloat16, delay_wgrad_compute=True)
    ddp = wrap(nn.Sequential(module))
    x = batch(torch.bfloat16)
    ddp(x).float().mean().backward()
    module.backward_dw()
    with cuda_waits_are_errors():
        ddp(x).float().mean().backward()
        module.backward_dw()
    ddp.finish_grad_sync()
