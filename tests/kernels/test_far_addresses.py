"""Rows that lie 2^31 elements apart, in memory that is mapped and hardly touched: kernels compute addresses in 64 bits.

A product in 32 bits wraps, and lands as far in front of the first row, where memory is mapped too.
"""

import mmap
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the launchers are Triton's")
from maingrad.kernels import glu_named
from maingrad.kernels.cross_entropy.reference import LossTerms
from maingrad.kernels.cross_entropy.triton_kernels import cross_entropy_triton
from maingrad.kernels.glu.triton_kernels import scaled_glu_backward_triton, scaled_glu_triton
from maingrad.kernels.grouped.gemm_triton import GemmConfig, grouped_gemm_triton
from maingrad.kernels.grouped.reductions_triton import grouped_bias_grad_triton, grouped_scale_grad_triton
from maingrad.kernels.grouped.wgrad_config import WgradConfig
from maingrad.kernels.grouped.wgrad_triton import grouped_wgrad_triton
from maingrad.kernels.optimizer import triton_update
from maingrad.kernels.optimizer.orthogonal.elements_triton import apply_on_triton, momentum_on_triton
from maingrad.kernels.optimizer.orthogonal.product_triton import symmetric_product
from maingrad.kernels.optimizer.reference import SGDOptions, UpdateRow
from maingrad.kernels.permutation.embedding_triton import embedding_wgrad_triton
from maingrad.kernels.permutation.triton_kernels import permute_triton
from maingrad.kernels.quantized import Element, QuantSpec, ScaleForm
from maingrad.kernels.quantized.quantize_triton import (
    quantize_experts_triton,
    quantize_grouped_triton,
    quantize_triton,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
STRIDE, ROWS, WIDTH = 2**30, 4, 20
BLOCKS = [None, (1, 128), (128, 128)]
OFFSETS = torch.tensor([0, 1, ROWS])


class Far:
    """Views of tensors [ROWS, ...] whose rows, or matrices, are STRIDE apart."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._begin = memory, 2**31

    def like(self, matrix: Tensor) -> Tensor:
        """``matrix`` there: its third row begins 2^31 elements behind the first."""
        return self.flat(matrix.dtype).as_strided(matrix.shape, (STRIDE, *matrix[0].stride())).copy_(matrix)

    def flat(self, dtype: torch.dtype) -> Tensor:
        """All memory from there on; each call begins a little behind the last one."""
        self._begin += 2**14
        return torch.frombuffer(self._memory, dtype=dtype)[self._begin :]


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
    weights, offsets = draw(ROWS, ROWS, ROWS), torch.arange(ROWS + 1)
    for each, into in ((weights, out), (far.like(weights), apart)):
        grouped_gemm_triton(x, each, offsets, into, config, transposed=transposed)
    assert torch.equal(apart, out)


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


def test_gradients_of_biases(far: Far) -> None:
    dy, out, apart = draw(ROWS, WIDTH), torch.zeros(2, WIDTH), torch.zeros(2, WIDTH)
    grouped_bias_grad_triton(dy, OFFSETS.int(), out)
    grouped_bias_grad_triton(far.like(dy), OFFSETS.int(), apart)
    assert torch.equal(apart, out) and out.all()


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


@pytest.mark.parametrize("block", BLOCKS[:2])
def test_quantised_rows_of_experts(far: Far, block: tuple[int, int] | None) -> None:
    spec = QuantSpec(Element.E4M3, block, ScaleForm.FP32 if block is None else ScaleForm.POWER_OF_TWO)
    x = draw(ROWS, WIDTH, dtype=torch.float16)
    (expected, _), (found, _) = (quantize_grouped_triton(each, spec, None, OFFSETS) for each in (x, far.like(x)))
    assert expected is not None and found is not None
    assert torch.equal(found.matrix.data.float(), expected.matrix.data.float()) and found.matrix.data.float().any()
    assert torch.equal(found.matrix.scale, expected.matrix.scale)


@pytest.mark.parametrize("block", BLOCKS[::2])
def test_quantised_matrices_of_experts(far: Far, block: tuple[int, int] | None) -> None:
    spec = QuantSpec(Element.E4M3, block, ScaleForm.FP32 if block is None else ScaleForm.POWER_OF_TWO)
    x = draw(ROWS, 2, WIDTH, dtype=torch.float16)
    (expected, _), (found, _) = (quantize_experts_triton(each, spec, None) for each in (x, far.like(x)))
    assert expected is not None and found is not None
    assert torch.equal(found.data.float(), expected.data.float()) and expected.data.float().any()
    assert torch.equal(found.scale, expected.scale)


def test_cross_entropy(far: Far) -> None:
    logits, targets, grads = draw(ROWS, WIDTH), torch.arange(ROWS), draw(ROWS, 1)
    apart = far.like(logits)
    found = cross_entropy_triton(apart, targets, LossTerms(), grads=far.like(grads)[:, 0])
    expected = cross_entropy_triton(logits, targets, LossTerms(), grads=grads[:, 0])
    assert torch.equal(apart, logits)
    assert found[0] is not None and expected[0] is not None and torch.equal(found[0], expected[0])


def test_what_lies_outside_of_all_tensors_is_not_read() -> None:
    """The check itself, which every test of kernels has."""
    x, out = draw(ROWS, WIDTH), torch.zeros(1, WIDTH)
    for row, fits in ((ROWS - 1, True), (ROWS, False), (-1, False), (2**40, False)):
        with nullcontext() if fits else pytest.raises(Exception, match="lie outside of all tensors"):
            permute_triton(x, torch.tensor([[row]]), out, inverse=True)
    assert torch.equal(out[0], x[-1])


def test_permutations(far: Far) -> None:
    x, ids = draw(ROWS, WIDTH), torch.arange(ROWS).flip(0)[:, None]
    for inverse in (False, True):
        out = far.like(torch.zeros_like(x))
        permute_triton(far.like(x), ids, out, inverse=inverse)
        assert torch.equal(out, x.flip(0))


def test_weight_gradients_of_embeddings(far: Far) -> None:
    """Of a token in one chunk, and of one in two."""
    dy, first = draw(ROWS, WIDTH), 2**31 // WIDTH
    tokens = torch.tensor([first + 1, first + 9], dtype=torch.int32).repeat_interleave(2)
    main_grad = far.flat(torch.float32)[: (first + 10) * WIDTH].view(-1, WIDTH)
    main_grad[tokens] = 0.0
    embedding_wgrad_triton(far.like(dy), tokens, main_grad, overwrite=False)
    torch.testing.assert_close(main_grad[tokens[::2]], dy.view(2, 2, WIDTH).sum(1))
    embedding_wgrad_triton(torch.ones(17, WIDTH), tokens[3:].expand(17), main_grad, overwrite=False)
    torch.testing.assert_close(main_grad[tokens[3]], dy[2] + dy[3] + 17)


def test_passes_of_muon(far: Far) -> None:
    buffer, grad, param, orthogonal = (draw(ROWS, 3, size) for size in (5, 5, 4, 4))
    apart, update, found = far.like(buffer), torch.zeros_like(buffer), far.like(torch.zeros_like(buffer))
    momentum_on_triton(buffer, grad, update, 0.9, nesterov=True)
    momentum_on_triton(apart, far.like(grad), found, 0.9, nesterov=True)
    assert torch.equal(apart, buffer) and torch.equal(found, update)
    apart = far.like(param)
    apply_on_triton(param, orthogonal, 0.5, -0.25)
    apply_on_triton(apart, far.like(orthogonal), 0.5, -0.25)
    assert torch.equal(apart, param)


@pytest.mark.parametrize("count", [1, ROWS])
def test_symmetric_products(far: Far, count: int) -> None:
    """Far rows of one matrix, or far matrices of one row."""
    rows = ROWS // count
    a, out = draw(count, rows, 8, dtype=torch.float16), torch.zeros(count, rows, rows, dtype=torch.float16)
    apart = far.flat(torch.float16).as_strided(out.shape, (rows * STRIDE, STRIDE, 1))
    symmetric_product(a, a, out)
    assert torch.equal(symmetric_product(a, a, apart), out) and out.any()


def test_rows_of_optimizers(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two chunks of a row, of which one is not whole."""
    chunk = triton_update.CHUNK_BLOCKS * 256
    length = 2**31 + chunk + 300
    grad, master = (far.flat(torch.float32)[:length] for _ in range(2))
    master[-chunk - 300 :], grad[-chunk - 300 :] = 1.0, draw(chunk + 300)
    form = triton_update._chunks_by_form([UpdateRow(grad[:1], None, None, torch.zeros(()), master[:1])])
    last = [(0, length // chunk - 1), (0, length // chunk)]
    monkeypatch.setattr(triton_update, "_chunks_by_form", lambda _: dict.fromkeys(form, last))
    update = triton_update.TritonUpdate([UpdateRow(grad, None, None, torch.zeros(()), master)], "sgd", False)
    update([SGDOptions(0.5, 0.0, 0.0, False, 0.0)], None, None)
    assert torch.equal(master[-chunk - 300 :], 1.0 - 0.5 * grad[-chunk - 300 :])
