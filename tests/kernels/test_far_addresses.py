"""Rows that lie 2^31 elements apart, in memory that is mapped and hardly touched: kernels compute addresses in 64 bits.

A product in 32 bits wraps, and lands as far in front of the first row, where memory is mapped too.
"""

import mmap

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the launchers are Triton's")
from maingrad.kernels import glu_named
from maingrad.kernels.glu.triton_kernels import scaled_glu_backward_triton, scaled_glu_triton
from maingrad.kernels.grouped.gemm_triton import GemmConfig, grouped_gemm_triton
from maingrad.kernels.grouped.reductions_triton import grouped_scale_grad_triton
from maingrad.kernels.grouped.wgrad_config import WgradConfig
from maingrad.kernels.grouped.wgrad_triton import grouped_wgrad_triton
from maingrad.kernels.quantized import Element, QuantSpec, ScaleForm
from maingrad.kernels.quantized.quantize_triton import quantize_triton

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
STRIDE, ROWS, WIDTH = 2**30, 4, 20
BLOCKS = [None, (1, 128), (128, 128)]
OFFSETS = torch.tensor([0, 1, ROWS])


class Far:
    """Views of matrices [ROWS, ...] whose rows are STRIDE apart."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._begin = memory, 2**31

    def like(self, matrix: Tensor) -> Tensor:
        """``matrix`` there: its third row begins 2^31 elements behind the first."""
        flat = torch.frombuffer(self._memory, dtype=matrix.dtype)
        self._begin += 64
        return flat.as_strided(matrix.shape, (STRIDE, 1), self._begin).copy_(matrix)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Far:
    # The interpreter brings whole storages to the host and back, which they have not left.
    monkeypatch.setattr(torch.UntypedStorage, "cpu", lambda self: self)
    monkeypatch.setattr(torch.UntypedStorage, "copy_", lambda self, source, *_: self)
    size = 4 * (2**32 + STRIDE + 2**20)
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # without a reserve
    except (OSError, ValueError, OverflowError):
        pytest.skip("this machine maps no 20 GiB")
    return Far(memory)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_experts(far: Far, transposed: bool) -> None:
    config = GemmConfig(16, 16, 16, 4, 2)
    x, weights, out = draw(ROWS, ROWS), draw(2, ROWS, ROWS), torch.zeros(ROWS, ROWS)
    grouped_gemm_triton(x, weights, OFFSETS, out, config, transposed=transposed)
    apart = far.like(torch.zeros_like(out))
    grouped_gemm_triton(far.like(x), [far.like(w) for w in weights], OFFSETS, apart, config, transposed=transposed)
    assert torch.equal(apart, out) and out.any()


def test_weight_gradients_of_experts(far: Far) -> None:
    config = WgradConfig(16, 16, 16, 4, 2)
    dy, x, grads = draw(ROWS, ROWS), draw(ROWS, WIDTH), draw(2, ROWS, WIDTH)
    apart = [far.like(grad) for grad in grads]
    grouped_wgrad_triton(dy, x, grads, OFFSETS, False, config)
    grouped_wgrad_triton(far.like(dy), far.like(x), apart, OFFSETS, False, config)
    assert torch.equal(torch.stack(apart), grads)


def test_gradients_of_bias_scales(far: Far) -> None:
    dy, bias, offsets = draw(ROWS, WIDTH), draw(ROWS, WIDTH), torch.arange(ROWS + 1)
    out, apart = torch.zeros(ROWS), torch.zeros(ROWS)
    grouped_scale_grad_triton(dy, bias, offsets, out)
    grouped_scale_grad_triton(far.like(dy), far.like(bias), offsets, apart)
    assert torch.equal(apart, out) and out.any()


def test_gated_activations(far: Far) -> None:
    h, da, glu = draw(ROWS, 2 * WIDTH), draw(ROWS, WIDTH), glu_named("swiglu")
    assert torch.equal(scaled_glu_triton(far.like(h), None, glu), scaled_glu_triton(h, None, glu))
    found = scaled_glu_backward_triton(far.like(da), far.like(h), None, glu)[0]
    assert torch.equal(found, scaled_glu_backward_triton(da, h, None, glu)[0])


@pytest.mark.parametrize("block", BLOCKS)
def test_quantised_copies(far: Far, block: tuple[int, int] | None) -> None:
    spec = QuantSpec(Element.E4M3, block, ScaleForm.FP32 if block is None else ScaleForm.POWER_OF_TWO)
    x = draw(ROWS, WIDTH, dtype=torch.float16)
    (expected, _), (found, _) = (quantize_triton(each, spec, None) for each in (x, far.like(x)))
    assert expected is not None and found is not None
    assert torch.equal(found.data.float(), expected.data.float()) and expected.data.float().any()
    assert torch.equal(found.scale, expected.scale)
