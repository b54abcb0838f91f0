"""Products of quantised matrices, against fp64 on the same operands."""

import itertools

import pytest
import torch
from quant_oracle import SPECS

from maingrad.kernels.quantized import dequantize, quantize, scaled_product, scaled_wgrad_accumulate


@pytest.mark.parametrize(("left", "right"), list(itertools.combinations_with_replacement(SPECS, 2)))
def test_products(left: str, right: str) -> None:
    draws = torch.Generator().manual_seed(0)
    a = quantize(torch.randn(33, 170, generator=draws), SPECS[left])
    b = quantize(torch.randn(18, 170, generator=draws), SPECS[right])
    bias = torch.randn(18, generator=draws)
    exact = dequantize(a, torch.float64) @ dequantize(b, torch.float64).t()
    error = (scaled_product(a, b, torch.float32).double() - exact).norm() / exact.norm()
    assert error < 1e-5
    summed = scaled_product(a, b, torch.bfloat16, bias)
    assert summed.dtype is torch.bfloat16
    torch.testing.assert_close(summed.double(), exact + bias.double(), rtol=2**-8, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scaled_product(a, b, torch.bfloat16, bias), summed), "autocast rounds no operand"
    once = (scaled_product(a, b, torch.float32) + bias).bfloat16()
    assert torch.equal(summed, once), "rounded once, with the bias"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients(dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(0)
    dy, x = torch.randn(40, 12, generator=draws), torch.randn(40, 9, generator=draws)
    operands = quantize(dy.t(), SPECS["current, gradients"]), quantize(x.t(), SPECS["current"])
    exact = dequantize(operands[0], torch.float64) @ dequantize(operands[1], torch.float64).t()
    main_grad = torch.full((12, 9), float("nan"), dtype=dtype)
    scaled_wgrad_accumulate(*operands, main_grad, overwrite=True)
    scaled_wgrad_accumulate(*operands, main_grad)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-6
    torch.testing.assert_close(main_grad.double(), 2 * exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(scaled_product(*operands, torch.float32).double(), exact, rtol=1e-5, atol=1e-5)
    assert [tensor.dtype for tensor in operands[0].tensors] == [torch.float8_e5m2, torch.float32]


def test_what_does_not_match() -> None:
    a, b = torch.randn(4, 8), torch.randn(4, 16)
    with pytest.raises(ValueError, match="contracts the last dims"):
        scaled_product(quantize(a, SPECS["current"]), quantize(b, SPECS["current"]), torch.float32)
