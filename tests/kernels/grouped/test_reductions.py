"""Offsets, bias gradients and scale gradients by expert: reference implementations and Triton kernels against fp64."""

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from host_syncs import cuda_waits_are_errors
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from triton_devices import LAUNCHER_DEVICES, LAUNCHER_DTYPES, nan_filled_memory, rounding

from maingrad.kernels import group_offsets, grouped_bias_grad, grouped_scale_grad

pytest.importorskip("triton", reason="the launchers are Triton's")
from maingrad.kernels.grouped import reductions_triton
from maingrad.kernels.grouped.reductions_triton import (
    grouped_bias_grad_triton,
    grouped_scale_grad_triton,
)

FP32 = torch.finfo(torch.float32).eps

# Splits, rows of padding, features.
CASES = [
    ([3, 0, 5, 1], 0, 7),
    ([3, 0, 5, 1], 256, 33),
    ([130], 0, 40),
    ([0, 0, 200, 0], 10, 130),
    ([32, 64, 31, 65], 4, 17),  # where chunks of rows end, and next to it
    ([0, 0], 5, 8),
    ([0, 0], 0, 8),
    ([1] * 37, 3, 5),
    ([2, 400, 0, 1], 1, 16),
]


def offsets_of(splits: list[int], device: str, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(splits)], dtype=dtype, device=device)


def operands(
    splits: list[int], padding: int, features: int, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """dy and scales, both with NaN in padding rows, and biases."""
    generator = torch.Generator().manual_seed(seed)
    filled = sum(splits)
    dy = torch.randn(filled + padding, features, generator=generator)
    scale = torch.rand(filled + padding, generator=generator)
    dy[filled:], scale[filled:] = float("nan"), float("nan")
    bias = torch.randn(len(splits), features, generator=generator)
    return dy.to(device, dtype), scale.to(device), bias.to(device, dtype)


def bias_grad_launched(dy: Tensor, offsets: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    with nan_filled_memory():
        out = dy.new_empty(offsets.shape[0] - 1, dy.shape[1], dtype=dtype)
        grouped_bias_grad_triton(dy, offsets, out, scale=scale)
    return out


def bias_grad_called(dy: Tensor, offsets: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return grouped_bias_grad(dy, offsets, scale=scale, dtype=dtype)


def scale_grad_launched(dy: Tensor, bias: Any, offsets: Tensor) -> Tensor:
    with nan_filled_memory():
        out = dy.new_empty(dy.shape[0], dtype=torch.float32)
        grouped_scale_grad_triton(dy, bias, offsets, out)
    return out


def exact_bias_grad(dy: Tensor, splits: list[int], scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sums in fp64, and the sums of absolute values, which bound the rounding error."""
    parts = dy[: sum(splits)].double() * (1 if scale is None else scale[: sum(splits), None].double())
    groups = parts.split(splits)
    return torch.stack([group.sum(0) for group in groups]), torch.stack([group.abs().sum(0) for group in groups])


@pytest.mark.parametrize("run", [bias_grad_called, bias_grad_launched])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("device", "dtype"), LAUNCHER_DTYPES)
@pytest.mark.sampled(1)
def test_bias_grad_against_fp64(run: Callable[..., Tensor], device: str, dtype: torch.dtype, scaled: bool) -> None:
    for (splits, padding, features), (index_dtype, out_dtype) in itertools.product(
        CASES, ((torch.int32, dtype), (torch.int64, torch.float32))
    ):
        dy, scale, _ = operands(splits, padding, features, dtype, device)
        db = run(dy, offsets_of(splits, device, index_dtype), scale if scaled else None, out_dtype)
        expected, sizes = exact_bias_grad(dy, splits, scale if scaled else None)
        assert db.dtype is out_dtype and db.shape == expected.shape
        stored = rounding(device if run is bias_grad_launched else "cuda", out_dtype)
        # One rounding for each addition in a row of at most 400, for the scale's product, and for the store.
        bound = sizes * FP32 * (2 + max(splits) ** 0.5) + expected.abs() * stored
        assert ((db.double() - expected).abs() <= bound).all(), (splits, padding, features)


@pytest.mark.parametrize("run", [grouped_scale_grad, scale_grad_launched])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("device", "dtype"), LAUNCHER_DTYPES)
@pytest.mark.sampled(1)
def test_scale_grad_against_fp64(run: Callable[..., Tensor], device: str, dtype: torch.dtype, packed: bool) -> None:
    for (splits, padding, features), index_dtype in itertools.product(CASES, (torch.int32, torch.int64)):
        dy, _, bias = operands(splits, padding, features, dtype, device)
        ds = run(dy, bias if packed else [*bias], offsets_of(splits, device, index_dtype))
        assert ds.dtype is torch.float32
        filled = sum(splits)
        of_row = bias.double().repeat_interleave(torch.tensor(splits, device=device), 0)
        products = dy[:filled].double() * of_row
        bound = products.abs().sum(-1) * FP32 * (2 + features**0.5)
        assert ((ds[:filled].double() - products.sum(-1)).abs() <= bound).all()
        assert not ds[filled:].any()


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("experts", [0, 1, 2, 5, 64, 3000])
def test_offsets(device: str, dtype: torch.dtype, experts: int) -> None:
    splits = torch.randint(0, 2**21, (experts,), generator=torch.Generator().manual_seed(experts)).to(device, dtype)
    with nan_filled_memory():
        offsets = group_offsets(splits)
    assert offsets.dtype is torch.int64
    assert offsets.tolist() == [0, *itertools.accumulate(splits.tolist())]


@pytest.mark.parametrize(
    "splits", [torch.ones(2, 2, dtype=torch.int64), torch.ones(3), torch.ones(3, dtype=torch.int16)]
)
def test_splits_are_counts_of_each_expert(splits: Tensor) -> None:
    with pytest.raises(ValueError, match=r"splits must be \[experts\], int32 or int64"):
        group_offsets(splits)


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_offsets_above_32_bits_and_of_strided_splits(device: str) -> None:
    splits = torch.tensor([2**31 - 1, 7, 2**31 - 1, 7, 1, 7], dtype=torch.int32, device=device)
    assert group_offsets(splits[::2]).tolist() == [0, 2**31 - 1, 2**32 - 2, 2**32 - 1]


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_operands_with_rows_apart_or_columns_apart(device: str) -> None:
    """Where loads of 16 bytes are impossible, threads take other features and sums have another order."""
    splits = [5, 0, 40]
    dy, scale, bias = operands(splits, 3, 140, torch.float32, device)  # of two programs, or two steps of one
    offsets = offsets_of(splits, device)
    db, ds = bias_grad_launched(dy, offsets, scale, torch.float32), scale_grad_launched(dy, bias, offsets)
    torch.testing.assert_close(db.double(), exact_bias_grad(dy, splits, scale)[0], rtol=1e-5, atol=1e-5)
    of_row = bias.repeat_interleave(torch.tensor(splits, device=device), 0)
    torch.testing.assert_close(ds[:45], (dy[:45] * of_row).sum(-1), rtol=1e-5, atol=1e-5)
    wide = torch.full((48, 160), float("nan"), device=device)
    wide[:, 7:147] = dy
    for other in (wide[:, 7:147], dy.t().contiguous().t()):
        torch.testing.assert_close(bias_grad_launched(other, offsets, scale, torch.float32), db)
        torch.testing.assert_close(scale_grad_launched(other, bias.t().contiguous().t(), offsets), ds)
    wide_bias = torch.full((3, 160), float("nan"), device=device)
    wide_bias[:, 7:147] = bias
    torch.testing.assert_close(scale_grad_launched(dy, wide_bias[:, 7:147], offsets), ds)
    apart = torch.full((96,), float("nan"), device=device)
    apart[::2] = scale
    torch.testing.assert_close(bias_grad_launched(dy, offsets, apart[::2], torch.float32), db)


def test_chunks_have_the_rows_of_an_expert() -> None:
    """Few where experts are small; more, with fewer sums in memory, where programs are many."""
    rows_of = {(4096, 64): 64, (4096, 3): 128, (100, 64): 32, (0, 5): 32, (32767, 1): 128, (32768, 8): 256}
    assert {sizes: reductions_triton._chunk(*sizes) for sizes in rows_of} == rows_of


def test_no_programs_are_launched_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU refuses such a launch."""
    launched: list[str] = []
    for name in ("_bias_grad_chunks_kernel", "_bias_grad_kernel", "_scale_grad_kernel"):

        def note(grid: tuple[int, ...], name: str = name) -> Callable[..., None]:
            assert all(grid)
            return lambda *_, **__: launched.append(name)

        kernel = mock.MagicMock()
        kernel.__getitem__.side_effect = note
        monkeypatch.setattr(reductions_triton, name, kernel)
    offsets = torch.zeros(3, dtype=torch.int64)
    for rows, features, expected in ((0, 4, ["_bias_grad_kernel"]), (5, 0, ["_scale_grad_kernel"]), (0, 0, [])):
        dy, bias = torch.ones(rows, features), torch.ones(2, features)
        grouped_bias_grad_triton(dy, offsets, torch.zeros(2, features))
        grouped_scale_grad_triton(dy, bias, offsets, torch.zeros(rows))
        assert launched == expected
        launched.clear()
    grouped_bias_grad_triton(torch.ones(5, 4), offsets[:1], torch.zeros(0, 4))
    assert not launched


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_what_others_rows_hold_changes_no_bit(device: str) -> None:
    splits = [70, 0, 33]
    dy, scale, _ = operands(splits, 300, 20, torch.float16, device)
    offsets = offsets_of(splits, device)
    first = bias_grad_launched(dy, offsets, scale, torch.float32)
    assert torch.equal(bias_grad_launched(dy, offsets, scale, torch.float32), first)
    dy[103:], scale[103:], dy[:70] = 1, float("inf"), float("nan")
    again = bias_grad_launched(dy, offsets, scale, torch.float32)
    assert torch.equal(again[1:], first[1:])
    assert again[0].isnan().all()


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_many_experts_are_found(device: str) -> None:
    """Fewer in the interpreter, which takes seconds."""
    splits = [index % 3 for index in range(40 if device == "cpu" else 300)]
    dy, _, bias = operands(splits, 9, 3, torch.float32, device)
    offsets = offsets_of(splits, device)
    expected, _ = exact_bias_grad(dy, splits, None)
    actual = bias_grad_launched(dy, offsets, None, torch.float32)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)
    of_row = bias.repeat_interleave(torch.tensor(splits, device=device), 0)
    ds = scale_grad_launched(dy, bias, offsets)
    torch.testing.assert_close(ds[: sum(splits)], (dy[: sum(splits)] * of_row).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.in_turn
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
@given(
    st.lists(st.one_of(st.just(0), st.integers(0, 5), st.integers(30, 70)), min_size=1, max_size=5),
    st.integers(0, 40),
    st.integers(1, 20),
    st.integers(0, 99),
)
def test_the_kernels_are_the_reference(splits: list[int], padding: int, features: int, seed: int) -> None:
    dy, scale, bias = operands(splits, padding, features, torch.float32, "cpu", seed)
    offsets = offsets_of(splits, "cpu")
    torch.testing.assert_close(
        bias_grad_launched(dy, offsets, scale, torch.float32),
        bias_grad_called(dy, offsets, scale, torch.float32),
        rtol=1e-5,
        atol=1e-4,
    )
    torch.testing.assert_close(
        scale_grad_launched(dy, bias, offsets), grouped_scale_grad(dy, bias, offsets), rtol=1e-5, atol=1e-5
    )


@pytest.mark.gpu
def test_rows_beyond_32_bits_of_address() -> None:
    """2^31 elements lie before the last expert's rows."""
    features, rows = 8192, 2**18 + 40
    dy = torch.zeros(rows, features, dtype=torch.float16, device="cuda")
    dy[-40:] = torch.randn(40, features, device="cuda").half()
    offsets = offsets_of([2**18, 40], "cuda")
    bias = torch.randn(2, features, device="cuda").half()
    expected = grouped_bias_grad(dy[-40:].clone(), offsets_of([40], "cuda"), dtype=torch.float32)
    torch.testing.assert_close(grouped_bias_grad(dy, offsets, dtype=torch.float32)[1:], expected, rtol=1e-5, atol=1e-4)
    exact = dy[-40:].double() @ bias[1].double()
    torch.testing.assert_close(grouped_scale_grad(dy, bias, offsets)[-40:].double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_nothing_waits_for_the_device_and_a_graph_takes_other_splits() -> None:
    dy = torch.randn(300, 64, device="cuda").bfloat16()
    scale, bias = torch.rand(300, device="cuda"), torch.randn(3, 64, device="cuda").bfloat16()
    splits = torch.tensor([100, 0, 150], device="cuda")

    def run() -> tuple[Tensor, Tensor]:
        offsets = group_offsets(splits)
        return grouped_bias_grad(dy, offsets, scale=scale, dtype=torch.float32), grouped_scale_grad(dy, bias, offsets)

    run()
    torch.cuda.synchronize()
    with cuda_waits_are_errors():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    splits.copy_(torch.tensor([0, 290, 7], device="cuda"))
    graph.replay()
    for replayed, eager in zip(captured, run(), strict=True):
        assert torch.equal(replayed, eager)


@pytest.mark.gpu
def test_fp64_on_a_gpu_is_the_reference() -> None:
    splits = [3, 0, 4]
    dy, scale, bias = operands(splits, 2, 6, torch.float64, "cuda")
    offsets = offsets_of(splits, "cuda")
    expected, _ = exact_bias_grad(dy, splits, scale)
    torch.testing.assert_close(grouped_bias_grad(dy, offsets, scale=scale), expected)
    assert grouped_scale_grad(dy, bias, offsets).dtype is torch.float64


@pytest.mark.parametrize("scaled", [True, False])
def test_bias_sums_of_half_precision_are_fp32(scaled: bool) -> None:
    dy = torch.full((300, 4), 1.0, dtype=torch.bfloat16)
    scale = torch.full((300,), 1.0 + 2**-12) if scaled else None
    found = grouped_bias_grad(dy, torch.tensor([0, 257, 300]), scale=scale, dtype=torch.float32)
    expected = torch.tensor([257.0, 43.0])[:, None] * (1.0 + 2**-12 if scaled else 1.0)
    torch.testing.assert_close(found, expected.expand(2, 4), rtol=1e-6, atol=0)
