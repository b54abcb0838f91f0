"""Grouped forward, dgrad and wgrad in Triton against fp64: in the interpreter without a GPU, compiled with one."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from expert_operands import DTYPES, NUM_PAD_ROWS, SPLITS, forms, offsets_of
from host_syncs import cuda_waits_are_errors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter
from triton_devices import LAUNCHER_DEVICES

from maingrad.kernels import (
    grouped_bias_grad,
    grouped_dgrad,
    grouped_linear,
    grouped_scale_grad,
    grouped_wgrad_accumulate,
    wgrad_accumulate,
)
from maingrad.kernels.grouped.gemm_triton import (
    GEMM_CANDIDATES,
    GemmConfig,
    default_gemm_config,
    grouped_gemm_triton,
)
from maingrad.kernels.grouped.products import alike, by_layout
from maingrad.kernels.grouped.wgrad_config import WGRAD_CANDIDATES, WgradConfig, default_wgrad_config
from maingrad.kernels.grouped.wgrad_triton import grouped_wgrad_triton

CASES = {
    "cpu": [(torch.float16, 33, 40), (torch.float32, 7, 15)],
    "cuda": [
        (torch.bfloat16, 72, 40),
        (torch.bfloat16, 64, 128),
        (torch.bfloat16, 33, 1),
        (torch.float16, 33, 40),
        (torch.float32, 7, 15),
    ],
}
GEMMS = {
    "tma": GemmConfig(32, 32, 16, 4, 2, tma=True),
    "pointer": GemmConfig(32, 64, 32, 4, 2, group=1),
}
WGRADS = {
    "tma": WgradConfig(32, 32, 16, 4, 2, tma=True),
    "tma, in halves": WgradConfig(32, 32, 32, 4, 2, tma=True, parts=2),
    "pointer": WgradConfig(32, 32, 16, 4, 2, group=1),
    "pointer, in quarters": WgradConfig(32, 64, 16, 4, 2, parts=4),
    "persistent": WgradConfig(32, 32, 16, 4, 2, tma=True, parts=2, persistent=1),
}


def rows_of(splits: Sequence[int]) -> list[slice]:
    ends = [0, *itertools.accumulate(splits)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def draw(*shape: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def padded(splits: Sequence[int], columns: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Rows of all experts, followed by padding rows of NaN that no kernel may use."""
    rows = draw(sum(splits) + NUM_PAD_ROWS, columns, dtype=dtype, device=device, seed=seed)
    rows[sum(splits) :] = torch.nan
    return rows


def tolerance(exact_terms: Tensor, contracted: int) -> Tensor:
    """Error bound of fp32 sums in any order, from ``exact_terms``: the sums of the terms' absolute values."""
    return (contracted + 4) * 2.0**-24 * exact_terms


def assert_rows_close(actual: Tensor, a: Tensor, b: Tensor, splits: Sequence[int], matrices: Tensor) -> None:
    """Compare ``actual`` with the rows of ``a_e b_e`` in fp64, and with zeros after the last expert's rows."""
    for rows, matrix in zip(rows_of(splits), matrices.double(), strict=True):
        exact = a[rows].double() @ matrix
        terms = a[rows].double().abs() @ matrix.abs()
        bound = tolerance(terms, a.shape[1]) + torch.finfo(actual.dtype).eps * exact.abs() + 1e-7
        assert ((actual[rows].double() - exact).abs() <= bound).all()
    assert (actual[sum(splits) :] == 0).all(), "rows behind the last expert"


@pytest.mark.in_turn
@pytest.mark.parametrize("form", ["packed", "discrete", "backwards"])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("config", GEMMS.values(), ids=GEMMS)
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.sampled(1)
def test_forward_and_dgrad(device: str, config: GemmConfig, splits: list[int], form: str) -> None:
    offsets = offsets_of(splits, device)
    for dtype, n, k in CASES[device]:
        weights = draw(len(splits), n, k, dtype=dtype, device=device, seed=0)
        x, dy = padded(splits, k, dtype, device, 1), padded(splits, n, dtype, device, 2)
        y, dx = (torch.full_like(like, torch.nan) for like in (dy, x))
        grouped_gemm_triton(x, forms(weights, form), offsets, y, config, transposed=True)
        grouped_gemm_triton(dy, forms(weights, form), offsets, dx, config, transposed=False)
        assert_rows_close(y, x, y, splits, weights.transpose(1, 2))
        assert_rows_close(dx, dy, dx, splits, weights)


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_each_expert_and_the_padding_may_have_a_tile_that_is_not_full(device: str) -> None:
    """A row for each expert, and fewer rows of padding than a tile has: no launch needs more tiles for its rows."""
    splits = [1, 1, 1]
    weights = draw(3, 8, 16, dtype=torch.float32, device=device, seed=0)
    x = padded(splits, 16, torch.float32, device, 1)
    y = x.new_full((len(x), 8), torch.nan)
    grouped_gemm_triton(x, weights, offsets_of(splits, device), y, GEMMS["pointer"], transposed=True)
    assert_rows_close(y, x, y, splits, weights.transpose(1, 2))


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_what_lies_around_operands_takes_no_part(device: str) -> None:
    """Views of larger tensors, with NaN in other columns and rows."""
    offsets = offsets_of([3, 2], device)
    wide = torch.full((2, 11, 21), torch.nan, device=device)
    weights = wide[:, :9, :10].copy_(draw(2, 9, 10, dtype=torch.float32, device=device, seed=0))
    for transposed, columns, features in ((True, 10, 9), (False, 9, 10)):
        x = draw(5, columns, dtype=torch.float32, device=device, seed=1)
        apart = torch.full((6, 32), torch.nan, device=device)[:5, :columns].copy_(x)
        out, expected = (torch.full((5, features), torch.nan, device=device) for _ in range(2))
        grouped_gemm_triton(apart, weights, offsets, out, GEMMS["pointer"], transposed=transposed)
        grouped_gemm_triton(x, weights.contiguous(), offsets, expected, GEMMS["pointer"], transposed=transposed)
        assert torch.equal(out, expected) and not out.isnan().any()


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("form", ["packed", "discrete"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.sampled(4)
def test_weights_that_are_stored_transposed(device: str, form: str, with_bias: bool) -> None:
    """``y = x W + s b`` with W [K, N] is the product with W^T, which is stored [N, K]."""
    splits, n, k = SPLITS["uneven"], 40, 24
    x = padded(splits, k, torch.float32, device, 0)
    packed = draw(len(splits), k, n, dtype=torch.float32, device=device, seed=1)
    bias = draw(len(splits), n, dtype=torch.float32, device=device, seed=2) if with_bias else None
    scale = draw(len(x), dtype=torch.float32, device=device, seed=3) if with_bias else None
    offsets = offsets_of(splits, device)
    weights = packed if form == "packed" else list(packed.clone().unbind())
    options = {"bias": bias, "bias_scale": scale}
    y = grouped_linear(x, weights, offsets, transposed=True, **options)
    turned = grouped_linear(x, packed.transpose(1, 2).contiguous(), offsets, **options)
    assert torch.allclose(y, turned, rtol=1e-5, atol=1e-5)
    assert not y[sum(splits) :].count_nonzero()
    with pytest.raises(ValueError, match="features in the last dim"):
        grouped_linear(x, packed.transpose(1, 2), offsets, transposed=True)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("form", ["packed", "discrete"])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.sampled(1)
def test_the_bias_is_scaled_and_added_before_the_one_rounding(device: str, form: str, scaled: bool) -> None:
    splits, n, k = SPLITS["uneven"], 33, 16
    for dtype in DTYPES[device]:
        weights = draw(len(splits), n, k, dtype=dtype, device=device, seed=0)
        bias = draw(len(splits), n, dtype=dtype, device=device, seed=3)
        x = padded(splits, k, dtype, device, 1)
        scale = torch.rand(x.shape[0]).to(device) if scaled else None
        y = x.new_full((x.shape[0], n), torch.nan)
        offsets = offsets_of(splits, device)
        grouped_gemm_triton(
            x, weights, offsets, y, GEMMS["tma"], transposed=True, bias=forms(bias, form), bias_scale=scale
        )
        # A bias is one more feature, whose input is the scale.
        ones = torch.ones(x.shape[0], 1, device=device, dtype=torch.double)
        wide = torch.cat((x.double(), ones if scale is None else scale.double()[:, None]), 1)
        assert_rows_close(y, wide, y, splits, torch.cat((weights, bias[:, :, None]), 2).transpose(1, 2))


@pytest.mark.parametrize("overwrite", [False, True, [True, False, True, False, False]], ids=["add", "write", "each"])
@pytest.mark.parametrize("form", ["packed", "discrete", "backwards", "wide rows"])
@pytest.mark.parametrize("config", WGRADS.values(), ids=WGRADS)
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.sampled(1)
def test_wgrad(device: str, config: WgradConfig, form: str, overwrite: Any) -> None:
    for name, (dtype, n, k) in itertools.product(SPLITS, CASES[device]):
        if name == "uneven" or device == "cuda" or dtype is torch.float32:
            check_wgrad(SPLITS[name], n, k, dtype, device, config, form, overwrite)


def check_wgrad(
    splits: Sequence[int],
    n: int,
    k: int,
    dtype: torch.dtype,
    device: str,
    config: WgradConfig,
    form: str = "packed",
    overwrite: Any = False,
    frozen: Sequence[int] = (),
    grad_dtype: torch.dtype = torch.float32,
) -> None:
    bits = [overwrite] * len(splits) if isinstance(overwrite, bool) else overwrite
    dy, x = padded(splits, n, dtype, device, 1), padded(splits, k, dtype, device, 2)
    before = draw(len(splits), n, k, dtype=grad_dtype, device=device, seed=3)
    before[torch.tensor(bits, device=device)] = torch.nan
    if form == "wide rows":
        wide = torch.full((len(splits), n, k + 8), -7.0, device=device, dtype=grad_dtype)
        grads: Any = wide[:, :, :k].copy_(before)
    else:
        grads = forms(before.clone(), form)
    given_grads = [None if e in frozen else grad for e, grad in enumerate(grads)] if frozen else grads
    grouped_wgrad_triton(dy, x, given_grads, offsets_of(splits, device), overwrite, config)
    for e, rows in enumerate(rows_of(splits)):
        if e in frozen or (not bits[e] and not splits[e]):
            assert torch.equal(grads[e].nan_to_num(), before[e].nan_to_num()), "nothing to write"
            continue
        start = torch.zeros(n, k, dtype=torch.double, device=device) if bits[e] else before[e].double()
        exact = start + dy[rows].double().t() @ x[rows].double()
        terms = start.abs() + dy[rows].double().abs().t() @ x[rows].double().abs()
        bound = tolerance(terms, splits[e] + 1) + torch.finfo(grad_dtype).eps * exact.abs()
        assert ((grads[e].double() - exact).abs() <= bound).all()
    if form == "wide rows":
        assert (wide[:, :, k:] == -7).all(), "written outside"


@pytest.mark.parametrize("form", ["packed", "discrete", "backwards"])
@pytest.mark.parametrize("config", [WGRADS["tma, in halves"], WGRADS["pointer"]], ids=["tma", "pointer"])
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.sampled(1)
def test_a_frozen_expert_is_left_alone(device: str, config: WgradConfig, form: str) -> None:
    for overwrite in (False, True, [True, False, True, False, False]):
        check_wgrad(SPLITS["uneven"], 24, 40, torch.float16, device, config, form, overwrite, frozen=[0, 2])


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("config", WGRADS.values(), ids=WGRADS)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.sampled(2)
def test_an_accumulator_of_the_operands_dtype(device: str, config: WgradConfig, overwrite: bool) -> None:
    options = {"overwrite": overwrite, "grad_dtype": torch.float16}
    check_wgrad(SPLITS["uneven"], 24, 40, torch.float16, device, config, **options)


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("config", WGRADS.values(), ids=WGRADS)
@pytest.mark.sampled(2)
def test_one_matrix_has_all_rows_where_no_offsets_are_given(device: str, config: WgradConfig) -> None:
    dtype = torch.float16
    dy, x = (draw(37, size, dtype=dtype, device=device, seed=size) for size in (24, 40))
    for overwrite in (False, True):
        grad = torch.full((1, 24, 40), torch.nan if overwrite else 2.0, device=device)
        grouped_wgrad_triton(dy, x, grad, None, overwrite, config)
        exact = dy.double().t() @ x.double() + (0.0 if overwrite else 2.0)
        torch.testing.assert_close(grad[0].double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
@pytest.mark.parametrize("form", ["packed", "backwards"])
def test_gradients_that_the_memory_accelerator_adds(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter lacks the addition: here it is a load and a store."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    added = []

    def add(self: Any, kind: Any, desc: Any, value: Any, indices: Any) -> None:
        before = self.create_descriptor_load(desc, indices, None, None)
        self.create_descriptor_store(desc, handle(before.data + value.data, value.dtype), indices)
        added.append(kind)

    monkeypatch.setattr(builder, "create_descriptor_reduce", add, raising=False)
    config = WGRADS["tma, in halves"]._replace(reduce=True)
    check_wgrad([0, 37, 5], 24, 40, torch.float16, "cpu", config, form)
    assert added, "an expert without rows is left alone"


@pytest.mark.in_turn
@settings(max_examples=max(3, settings.default.max_examples // 4))  # half a second each in the interpreter
@given(
    splits=st.lists(st.integers(0, 50), min_size=1, max_size=5),
    n=st.integers(1, 50),
    k=st.integers(1, 50),
    data=st.data(),
)
def test_any_split_and_shape(splits: list[int], n: int, k: int, data: st.DataObject) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = data.draw(st.sampled_from(DTYPES[device]))
    config = data.draw(st.sampled_from(list(WGRADS.values())))
    bits = data.draw(st.lists(st.booleans(), min_size=len(splits), max_size=len(splits)))
    frozen = data.draw(st.sets(st.integers(0, len(splits) - 1), max_size=len(splits) - 1))
    form = data.draw(st.sampled_from(["packed", "discrete", "backwards"]))
    check_wgrad(splits, n, k, dtype, device, config, form, bits, sorted(frozen))
    gemm = data.draw(st.sampled_from(list(GEMMS.values())))
    weights = draw(len(splits), n, k, dtype=dtype, device=device, seed=0)
    x, dy = padded(splits, k, dtype, device, 1), padded(splits, n, dtype, device, 2)
    y, dx = (torch.full_like(like, torch.nan) for like in (dy, x))
    grouped_gemm_triton(x, forms(weights, form), offsets_of(splits, device), y, gemm, transposed=True)
    grouped_gemm_triton(dy, forms(weights, form), offsets_of(splits, device), dx, gemm, transposed=False)
    assert_rows_close(y, x, y, splits, weights.transpose(1, 2))
    assert_rows_close(dx, dy, dx, splits, weights)


# ---- What only a GPU can show. ----


@pytest.mark.gpu
@pytest.mark.parametrize("config", WGRAD_CANDIDATES, ids=str)
def test_every_tuned_wgrad_kernel(config: WgradConfig) -> None:
    for form, overwrite in itertools.product(("packed", "discrete"), (False, True)):
        check_wgrad([0, 100, 333, 1, 500], 384, 264, torch.bfloat16, "cuda", config, form, overwrite)


@pytest.mark.gpu
@pytest.mark.parametrize("config", GEMM_CANDIDATES, ids=str)
def test_every_tuned_gemm_kernel(config: GemmConfig) -> None:
    splits, n, k = [0, 100, 333, 1, 500], 384, 264
    offsets = offsets_of(splits, "cuda")
    weights = draw(len(splits), n, k, dtype=torch.bfloat16, device="cuda", seed=0)
    x, dy = padded(splits, k, torch.bfloat16, "cuda", 1), padded(splits, n, torch.bfloat16, "cuda", 2)
    y, dx = (torch.full_like(like, torch.nan) for like in (dy, x))
    grouped_gemm_triton(x, weights, offsets, y, config, transposed=True)
    grouped_gemm_triton(dy, weights, offsets, dx, config, transposed=False)
    assert_rows_close(y, x, y, splits, weights.transpose(1, 2))
    assert_rows_close(dx, dy, dx, splits, weights)


def test_outputs_and_gradients_of_inputs_are_written_into_memory_that_is_given() -> None:
    weights, offsets = draw(2, 6, 3, dtype=torch.float32, device="cpu", seed=0), torch.tensor([0, 2, 5])
    for product, columns, features in ((grouped_linear, 3, 6), (grouped_dgrad, 6, 3)):
        rows = draw(5, columns, dtype=torch.float32, device="cpu", seed=1)
        out = torch.full((5, 8), torch.nan)[:, :features]
        assert product(rows, weights, offsets, out=out) is out
        assert torch.equal(out, product(rows, weights, offsets))


@pytest.mark.parametrize("out", [torch.empty(5, 6, dtype=torch.float64), torch.empty(4, 6), torch.empty(6, 5).t()])
def test_memory_for_the_output_that_does_not_fit_is_refused(out: Tensor) -> None:
    x, weights, offsets = torch.ones(5, 3), torch.ones(2, 6, 3), torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match=r"out must be \(5, 6\) with adjacent columns, torch.float32"):
        grouped_linear(x, weights, offsets, out=out)


@pytest.mark.gpu
def test_wgrad_gives_the_same_bits_again() -> None:
    splits = [100, 0, 333, 1, 500]
    dy, x = padded(splits, 512, torch.bfloat16, "cuda", 1), padded(splits, 384, torch.bfloat16, "cuda", 2)
    for config in WGRAD_CANDIDATES:
        runs = [torch.ones(5, 512, 384, device="cuda") for _ in range(3)]
        for grad in runs:
            grouped_wgrad_triton(dy, x, grad, offsets_of(splits, "cuda"), False, config)
        assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2]), config


@pytest.mark.gpu
def test_addresses_beyond_32_bits() -> None:
    """One G of 2.3 G elements, and rows whose last element is beyond 2**31."""
    splits, n, k = [3, 0, 5], 24_576, 32_768
    grads = torch.zeros(3, n, k, device="cuda")
    dy, x = (
        draw(8, n, dtype=torch.bfloat16, device="cuda", seed=0),
        draw(8, k, dtype=torch.bfloat16, device="cuda", seed=1),
    )
    for tma in (False, True):
        config = default_wgrad_config(torch.bfloat16, (9, 0), 3)._replace(tma=tma)
        grouped_wgrad_triton(dy, x, grads, offsets_of(splits, "cuda"), True, config)
        exact = dy[3:, -64:].double().t() @ x[3:, -64:].double()
        torch.testing.assert_close(grads[2, -64:, -64:].double(), exact, rtol=1e-5, atol=1e-4)
        assert not grads[1].any()
    del grads
    rows = 70_000
    wide = torch.zeros(rows, 32_768, device="cuda", dtype=torch.bfloat16)
    wide[-5:] = draw(5, 32_768, dtype=torch.bfloat16, device="cuda", seed=2)
    weight = draw(1, 16, 32_768, dtype=torch.bfloat16, device="cuda", seed=3)
    out = torch.full((rows, 16), torch.nan, device="cuda", dtype=torch.bfloat16)
    for config in (
        default_gemm_config(torch.bfloat16, (9, 0), rows),
        default_gemm_config(torch.bfloat16, (8, 0), rows),
    ):
        grouped_gemm_triton(wide, weight, offsets_of([rows], "cuda"), out, config, transposed=True)
        torch.testing.assert_close(out[-5:].double(), wide[-5:].double() @ weight[0].double().t(), rtol=1e-2, atol=1.0)


@pytest.mark.gpu
def test_no_wait_for_the_device_and_replay_with_other_splits() -> None:
    e, t, n, k = 6, 640, 256, 192
    dy, x = (
        draw(t, n, dtype=torch.bfloat16, device="cuda", seed=0),
        draw(t, k, dtype=torch.bfloat16, device="cuda", seed=1),
    )
    weights = draw(e, n, k, dtype=torch.bfloat16, device="cuda", seed=2)
    discrete = [torch.zeros(n, k, device="cuda") for _ in range(e)]
    packed = torch.zeros(e, n, k, device="cuda")
    offsets = offsets_of([100, 0, 200, 40, 300, 0], "cuda")

    def step() -> tuple[Tensor, Tensor]:
        grouped_wgrad_accumulate(dy, x, packed, offsets)
        grouped_wgrad_accumulate(dy, x, discrete, offsets, overwrite=True)
        return grouped_linear(x, weights, offsets), grouped_dgrad(dy, list(weights), offsets)

    with cuda_waits_are_errors():
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for splits in ([0, 0, 640, 0, 0, 0], [1, 2, 3, 4, 5, 6], [100, 100, 100, 100, 100, 100]):
        offsets.copy_(offsets_of(splits, "cuda"))
        packed.normal_()
        before = packed.clone()
        graph.replay()
        results = [captured[0].clone(), captured[1].clone(), packed.clone(), [each.clone() for each in discrete]]
        packed.copy_(before)
        eager = step()
        assert torch.equal(results[0], eager[0]) and torch.equal(results[1], eager[1])
        assert torch.equal(results[2], packed)
        assert all(map(torch.equal, results[3], discrete))


@pytest.mark.gpu
def test_new_addresses_in_a_capture_are_refused_by_name() -> None:
    dy, x = (draw(64, 64, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in (0, 1))
    grads = [torch.zeros(64, 64, device="cuda") for _ in range(4)]
    lonely = [grads[0], grads[3], grads[1]]  # not evenly spaced
    offsets = offsets_of([10, 20, 34], "cuda")
    grouped_wgrad_accumulate(dy, x, grads[:1], offsets_of([64], "cuda"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run one eager iteration"), torch.cuda.graph(graph):
        grouped_wgrad_accumulate(dy, x, lonely, offsets)


def test_each_expert_has_a_weight_and_a_bias() -> None:
    x, weights, bias, offsets = torch.ones(5, 3), torch.ones(2, 6, 3), torch.ones(2, 6), torch.tensor([0, 2, 5])
    for one in (weights[:1], [weights[0]]):
        with pytest.raises(ValueError, match=r"grouped_linear needs weights \(6, 3\) for each of 2 experts; got 1"):
            grouped_linear(x, one, offsets)
    for one in (bias[:1], [bias[0]]):
        with pytest.raises(ValueError, match=r"grouped_linear needs bias \(6,\) for each of 2 experts; got 1"):
            grouped_linear(x, weights, offsets, bias=one)
        with pytest.raises(ValueError, match="grouped_scale_grad needs bias"):
            grouped_scale_grad(torch.ones(5, 6), one, offsets)


def test_operands_that_do_not_match_are_named() -> None:
    x, dy, weights, offsets = torch.ones(5, 3), torch.ones(5, 6), torch.ones(2, 6, 3), torch.tensor([0, 2, 5])
    grads = torch.zeros(2, 6, 3)
    for wrong in (x[:, :2], torch.ones(5, 3, 3), x[0]):
        with pytest.raises(ValueError, match="grouped_linear needs 3 features in the last dim"):
            grouped_linear(wrong, weights, offsets)
    with pytest.raises(ValueError, match="grouped_dgrad needs 6 features in the last dim"):
        grouped_dgrad(x, weights, offsets)
    for no_weights in (torch.ones(2, 6), []):
        with pytest.raises(ValueError, match=r"needs weights \[experts, N, K\]"):
            grouped_linear(x, no_weights, offsets)
    with pytest.raises(TypeError, match="needs weights and rows of one dtype"):
        grouped_linear(x, weights.double(), offsets)
    with pytest.raises(TypeError, match="needs weights and rows of one dtype"):
        grouped_linear(x, [weights[0], weights[1].double()], offsets)
    for bias in (torch.ones(2, 6).double(), [torch.ones(6), torch.ones(6).double()]):
        with pytest.raises(TypeError, match="needs bias and rows of one dtype"):
            grouped_linear(x, weights, offsets, bias=bias)
    with pytest.raises(ValueError, match=r"needs bias_scale \(5,\); got \(4,\)"):
        grouped_linear(x, weights, offsets, bias=torch.ones(2, 6), bias_scale=torch.ones(4))
    for scale in (torch.ones(4), torch.ones(5, 1)):
        with pytest.raises(ValueError, match=r"grouped_bias_grad needs scale \(5,\)"):
            grouped_bias_grad(dy, offsets, scale=scale)
    with pytest.raises(ValueError, match="got a bias_scale and no bias"):
        grouped_linear(x, weights, offsets, bias_scale=torch.ones(5))
    for wrong_dy, wrong_x in (
        (dy[:4], x),
        (dy, x[:4]),
        (dy[None], x),
        (dy, x[None]),
        (dy[:, None], x),
        (dy, x[:, :, None]),
    ):
        with pytest.raises(ValueError, match=r"needs dy \[T, N\] and x \[T, K\]"):
            grouped_wgrad_accumulate(wrong_dy, wrong_x, grads, offsets)
    with pytest.raises(TypeError, match="needs dy and x of one dtype"):
        grouped_wgrad_accumulate(dy.half(), x, grads, offsets)
    wide = torch.zeros(2, 6, 6)
    for unfit in (grads[:, :, :2], wide[:, :, ::2], grads.half(), grads.to("meta"), [grads[0], grads[1].t()]):
        with pytest.raises(ValueError, match=r"main_grad of expert [01] must be \(6, 3\) with adjacent columns"):
            grouped_wgrad_accumulate(dy, x, unfit, offsets)
    assert not grads.any() and not wide.any()
    single = torch.zeros(1, 3)[:, ::3]  # of one column any stride is as good
    grouped_wgrad_accumulate(dy[:, :1], x[:, :1], [single, None], offsets)
    assert single.item() == 2


def test_autocast_rounds_no_operand_of_the_reference() -> None:
    x, weights, bias = (
        draw(*shape, dtype=torch.float32, device="cpu", seed=0) for shape in ((5, 3), (2, 6, 3), (2, 6))
    )
    offsets, dy = torch.tensor([0, 2, 5]), draw(5, 6, dtype=torch.float32, device="cpu", seed=1)

    def run() -> tuple[Tensor, ...]:
        grads = torch.zeros(2, 6, 3)
        grouped_wgrad_accumulate(dy, x, grads, offsets)
        y, dx = grouped_linear(x, weights, offsets, bias=bias), grouped_dgrad(dy, weights, offsets)
        return y, dx, grads, grouped_bias_grad(dy, offsets), grouped_scale_grad(dy, bias, offsets)

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, run(), expected))


def test_each_expert_has_an_accumulator_and_a_bit() -> None:
    dy, x, offsets = torch.ones(3, 2), torch.ones(3, 4), torch.tensor([0, 1, 3])
    grads = [torch.zeros(2, 4) for _ in range(3)]
    with pytest.raises(ValueError, match="got 3 main_grads for 2 experts"):
        grouped_wgrad_accumulate(dy, x, grads, offsets)
    for bits in ([True], [True, False, True]):
        with pytest.raises(ValueError, match=f"got {len(bits)} overwrite bits for 2 experts"):
            grouped_wgrad_accumulate(dy, x, grads[:2], offsets, overwrite=bits)
    assert not any(grad.any() for grad in grads)


def test_experts_weights_are_copied_where_a_kernel_could_not_address_them_alike() -> None:
    """A kernel takes one row stride for all experts, and columns that lie side by side."""
    rows = [torch.randn(4, 6), torch.randn(4, 6)]
    assert all(mine is theirs for mine, theirs in zip(alike(rows), rows, strict=True))
    parts = list(torch.randn(2, 4, 9)[:, :, :6].unbind())  # rows that lie apart
    assert all(mine is theirs for mine, theirs in zip(alike(parts), parts, strict=True))
    for unlike in ([rows[0], parts[1]], [each.t() for each in rows]):
        found = alike(unlike)
        assert {each.stride() for each in found} == {(unlike[0].shape[1], 1)}
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, unlike, strict=True))
    packed = torch.randn(2, 4, 6)
    assert alike(packed) is packed
    assert alike(packed.transpose(1, 2)).stride(-1) == 1


def test_under_autocast_sums_stay_in_fp32() -> None:
    """It would round operands and results to its dtype."""
    x, dy, weights = (draw(*shape, dtype=torch.float32, device="cpu", seed=1) for shape in ((6, 5), (6, 4), (2, 4, 5)))
    offsets, scale, bias = torch.tensor([0, 2, 6]), torch.rand(6), torch.randn(2, 4)

    def products() -> list[Tensor]:
        grads, dense = torch.zeros(2, 4, 5), torch.zeros(4, 5)
        grouped_wgrad_accumulate(dy, x, grads, offsets)
        wgrad_accumulate(dy, x, dense)
        return [
            grads,
            dense,
            grouped_linear(x, weights, offsets, bias=bias, bias_scale=scale),
            grouped_dgrad(dy, weights, offsets),
            grouped_bias_grad(dy, offsets, scale=scale),
            grouped_scale_grad(dy, bias, offsets),
        ]

    expected = products()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, products(), expected))


def test_accumulators_are_written_together_where_they_lie_alike() -> None:
    first, second, apart = torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(4, 9)[:, :6]
    half, nothing = torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(0, 6)
    groups = list(by_layout([first, None, apart, second, half]))
    kept = [[index for index, grad in enumerate(group) if grad is not None] for group in groups]
    assert sorted(kept) == [[0, 3], [2], [4]]
    assert all(len(group) == 5 for group in groups), "the index of an expert stays"
    packed = torch.zeros(2, 4, 6)
    assert [group is packed for group in by_layout(packed)] == [True]
    assert not list(by_layout(torch.zeros(2, 0, 6))) and not list(by_layout([None, nothing]))


@pytest.mark.gpu
@pytest.mark.parametrize("broken", ["column stride", "unaligned", "odd columns"])
def test_operands_that_the_accelerator_cannot_address(broken: str) -> None:
    splits = [100, 0, 60]
    offsets = offsets_of(splits, "cuda")
    if broken == "column stride":
        dy, x = (draw(64, 160, dtype=torch.bfloat16, device="cuda", seed=seed).t() for seed in (0, 1))
    elif broken == "unaligned":
        dy, x = (draw(160 * 64 + 1, dtype=torch.bfloat16, device="cuda", seed=s)[1:].view(160, 64) for s in (0, 1))
    else:
        dy, x = (draw(160, 63, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in (0, 1))
    grads = torch.full((3, dy.shape[1], x.shape[1]), torch.nan, device="cuda")
    grouped_wgrad_accumulate(dy, x, grads, offsets, overwrite=True)
    weights = draw(3, dy.shape[1], x.shape[1], dtype=torch.bfloat16, device="cuda", seed=4)
    y = grouped_linear(x, weights.transpose(1, 2).contiguous().transpose(1, 2), offsets)
    assert_rows_close(y, x, y, splits, weights.transpose(1, 2))
    for e, rows in enumerate(rows_of(splits)):
        exact = dy[rows].double().t() @ x[rows].double()
        torch.testing.assert_close(grads[e].double(), exact, rtol=1e-4, atol=1e-3)
