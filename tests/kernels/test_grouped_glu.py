"""Grouped products with the gated activation in their epilogues: against fp64, and against the separate operations.

Without a GPU the launchers run in Triton's interpreter, whose tl.dot multiplies the bit patterns of bf16: fp16, fp32.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from expert_operands import DTYPES, NUM_PAD_ROWS, SPLITS, forms, offsets_of
from host_syncs import cuda_waits_are_errors
from torch import Tensor
from triton_devices import LAUNCHER_DEVICES, nan_filled_memory

from maingrad.kernels import (
    grouped_dgrad,
    grouped_dgrad_scaled_glu_backward,
    grouped_linear,
    grouped_linear_scaled_glu,
    scaled_glu,
    scaled_glu_backward,
)
from maingrad.kernels.scaled_glu import resolve_glu
from maingrad.kernels.scaled_glu_reference import (
    GLU_ACTIVATIONS,
    Glu,
    scaled_glu_backward_reference,
    scaled_glu_reference,
)

pytest.importorskip("triton", reason="the launchers are Triton's")
from maingrad.kernels.grouped_gemm_triton import GemmConfig, grouped_gemm_triton
from maingrad.kernels.grouped_glu_triton import (
    GLU_BACKWARD_CANDIDATES,
    GLU_CANDIDATES,
    grouped_dgrad_glu_triton,
    grouped_linear_glu_triton,
)
from maingrad.kernels.scaled_glu_triton import scaled_glu_backward_triton, scaled_glu_triton

pytestmark = pytest.mark.slow  # in the interpreter; a benchmark alone uses these kernels

# Columns of the first cut an odd number of features, its second half and all; the second computes gradients in parts.
CONFIGS = {
    "tma": GemmConfig(32, 32, 16, 4, 2, tma=True),
    "pointer, in parts": GemmConfig(32, 64, 32, 4, 2, group=1),
}
SHAPES = {torch.float32: [(15, 7)], torch.float16: [(33, 40), (40, 24)], torch.bfloat16: [(72, 40), (33, 24)]}
"""Features of the activation, and of what is summed."""
FORMS = ["packed", "discrete", "backwards"]


class Operands(NamedTuple):
    """Of both directions; rows behind the last expert are NaN everywhere."""

    x: Tensor
    weights: Tensor
    bias: Tensor
    dy: Tensor
    weights2: Tensor
    h: Tensor
    probs: Tensor
    offsets: Tensor


def draw(splits: Sequence[int], features: int, contracted: int, dtype: torch.dtype, device: str) -> Operands:
    generator = torch.Generator().manual_seed(0)
    experts, used = len(splits), sum(splits)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def rows(columns: int) -> Tensor:
        made = random(used + NUM_PAD_ROWS, columns)
        made[used:] = torch.nan
        return made

    probs = torch.rand(used + NUM_PAD_ROWS, generator=generator)
    probs[used:] = torch.nan
    size = contracted**-0.5  # so that products are of size 1
    return Operands(
        rows(contracted),
        random(experts, 2 * features, contracted) * size,
        random(experts, 2 * features),
        rows(contracted),
        random(experts, contracted, features) * size,
        2 * rows(2 * features),
        probs.to(device),
        offsets_of(splits, device),
    )


def forward(
    o: Operands, config: GemmConfig, glu: Glu, *, form: str = "packed", biased: bool = False, scaled: bool = True
) -> tuple[Tensor, Tensor]:
    h, a = torch.full_like(o.h, torch.nan), torch.full_like(o.h[:, ::2], torch.nan).contiguous()
    grouped_linear_glu_triton(
        o.x, forms(o.weights, form), o.offsets, o.probs if scaled else None, h, a, glu, config,
        bias=forms(o.bias, form) if biased else None,
    )  # fmt: skip
    return h, a


def backward(
    o: Operands, config: GemmConfig, glu: Glu, *, form: str = "packed", scaled: bool = True
) -> tuple[Tensor, Tensor | None]:
    dh = torch.full_like(o.h, torch.nan)
    with nan_filled_memory():
        dprobs = grouped_dgrad_glu_triton(
            o.dy, forms(o.weights2, form), o.offsets, o.h, o.probs if scaled else None, dh, glu, config
        )
    return dh, dprobs


def exact_product(rows: Tensor, matrices: Tensor, splits: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """In fp64, of the rows that experts have."""
    parts = rows[: sum(splits)].double().split(list(splits))
    made = [part @ matrix for part, matrix in zip(parts, matrices.double(), strict=True)]
    return torch.cat(made if bias is None else [y + b for y, b in zip(made, bias.double(), strict=True)])


def assert_near(actual: Tensor, exact: Tensor, error: Tensor | float) -> None:
    """All rows that experts have: within one rounding and ``error``; zeros behind them."""
    used = exact.shape[0]
    tiny = torch.finfo(actual.dtype).smallest_normal
    bound = torch.finfo(actual.dtype).eps * exact.abs() + error + tiny
    assert ((actual[:used].double() - exact).abs() <= bound).all()
    assert (actual[used:] == 0).all(), "rows behind the last expert"


def check_forward(o: Operands, splits: Sequence[int], h: Tensor, a: Tensor, glu: Glu, biased: bool, p: bool) -> None:
    used, k = sum(splits), o.x.shape[1]
    exact = exact_product(o.x, o.weights.transpose(1, 2), splits, o.bias if biased else None)
    terms = exact_product(o.x.abs(), o.weights.transpose(1, 2).abs(), splits, o.bias.abs() if biased else None)
    assert_near(h, exact, (k + 4) * 2.0**-24 * terms)
    # The activation is of the h that was stored; a dozen roundings in fp32 of factors as large as h.
    value = scaled_glu_reference(h[:used].double(), o.probs[:used].double() if p else None, glu)
    size = h[:used].double().abs().amax().clamp_min(1) ** 3 if used else 1.0
    assert_near(a, value, 2.0**-19 * size)


def check_backward(o: Operands, splits: Sequence[int], dh: Tensor, dprobs: Tensor | None, glu: Glu) -> None:
    used, n = sum(splits), o.dy.shape[1]
    da = exact_product(o.dy, o.weights2, splits)
    terms = exact_product(o.dy.abs(), o.weights2.abs(), splits)
    probs = None if dprobs is None else o.probs[:used].double()
    exact_dh, exact_dprobs = scaled_glu_backward_reference(da, o.h[:used].double(), probs, glu)
    # Of da's error, its rounding to half precision among it, remains what the gradient by da makes of it.
    lost = (n + 4) * 2.0**-24 * terms + torch.finfo(o.dy.dtype).eps * da.abs()
    slopes, _ = scaled_glu_backward_reference(torch.ones_like(da), o.h[:used].double(), probs, glu)
    size = (o.h[:used].double().abs().amax().clamp_min(1) ** 2 * da.abs().amax().clamp_min(1)) if used else 1.0
    assert_near(dh, exact_dh, lost.repeat(1, 2) * slopes.abs() + 2.0**-19 * size)
    if dprobs is not None:
        assert exact_dprobs is not None and dprobs.dtype is torch.float32
        values = scaled_glu_reference(o.h[:used].double(), None, glu).abs()
        error = (lost * values).sum(1) + da.shape[1] * 2.0**-23 * (da.abs() * values).sum(1)
        assert_near(dprobs, exact_dprobs, error + 2.0**-19 * size * da.shape[1] ** 0.5)


def glu_of(activation: str) -> Glu:
    """A limit that both halves often exceed."""
    return resolve_glu("test", activation, 0.9, 1.1, 1.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_against_fp64(device: str, config: GemmConfig, splits: list[int], form: str) -> None:
    glu = glu_of("swiglu")
    for dtype in DTYPES[device]:
        for features, contracted in SHAPES[dtype]:
            o = draw(splits, features, contracted, dtype, device)
            check_forward(o, splits, *forward(o, config, glu, form=form), glu, False, True)
            check_backward(o, splits, *backward(o, config, glu, form=form), glu)


# Each activation with half of the combinations, in turns: the interpreter takes its time.
@pytest.mark.parametrize(
    ("activation", "biased", "scaled"),
    [
        pytest.param(activation, biased, biased == bool(index % 2), id=f"{activation}-{'bias' * biased or 'no bias'}")
        for index, activation in enumerate(GLU_ACTIVATIONS)
        for biased in (False, True)
    ],
)
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_every_activation(device: str, activation: str, biased: bool, scaled: bool) -> None:
    splits, glu = SPLITS["uneven"], glu_of(activation)
    for dtype in DTYPES[device]:
        o = draw(splits, 33, 24, dtype, device)
        for config, form in zip(CONFIGS.values(), ("discrete", "backwards"), strict=True):
            h, a = forward(o, config, glu, form=form, biased=biased, scaled=scaled)
            check_forward(o, splits, h, a, glu, biased, scaled)
            dh, dprobs = backward(o, config, glu, form=form, scaled=scaled)
            assert (dprobs is not None) is scaled
            check_backward(o, splits, dh, dprobs, glu)


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_what_the_separate_kernels_give(device: str, config: GemmConfig, activation: str) -> None:
    """h and the activation bit for bit; gradients too, but for the order of the sums of dprobs."""
    splits, glu = SPLITS["uneven"], glu_of(activation)
    used = sum(splits)
    for dtype in DTYPES[device]:
        for features, contracted in SHAPES[dtype]:
            o = draw(splits, features, contracted, dtype, device)
            h, a = forward(o, config, glu, biased=True)
            separate_h, da = torch.full_like(h, torch.nan), torch.full_like(a, torch.nan)
            grouped_gemm_triton(o.x, o.weights, o.offsets, separate_h, config, transposed=True, bias=o.bias)
            assert_one_rounding(h, separate_h)
            assert_one_rounding(a[:used], scaled_glu_triton(h, o.probs, glu)[:used])
            dh, dprobs = backward(o, config, glu)
            grouped_gemm_triton(o.dy, o.weights2, o.offsets, da, config, transposed=False)
            separate_dh, separate_dprobs = scaled_glu_backward_triton(da, o.h, o.probs, glu)
            assert_one_rounding(dh[:used], separate_dh[:used])
            assert dprobs is not None and separate_dprobs is not None
            torch.testing.assert_close(dprobs[:used], separate_dprobs[:used], rtol=1e-5, atol=1e-4)


def assert_one_rounding(actual: Tensor, expected: Tensor) -> None:
    """Equal in the interpreter. A compiler may contract what it finds in two kernels otherwise: one unit, in few."""
    if not actual.is_cuda:
        # numpy sums a product of one row length otherwise than one of another.
        torch.testing.assert_close(actual, expected, rtol=torch.finfo(actual.dtype).eps, atol=1e-6)
        return
    torch.testing.assert_close(actual, expected, rtol=torch.finfo(actual.dtype).eps, atol=1e-6)
    if actual.dtype is not torch.float32:
        assert (actual != expected).float().mean() < 0.01


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_public_functions_are_the_separate_ones_composed(device: str) -> None:
    splits = SPLITS["uneven"]
    used = sum(splits)
    for dtype, scaled in itertools.product((torch.float64, torch.float32, torch.bfloat16), (False, True)):
        o = draw(splits, 40, 24, dtype, device)
        probs = o.probs if scaled else None
        options: dict[str, Any] = {"activation": "clamped_swiglu", "limit": 0.9, "alpha": 1.1, "linear_offset": 0.5}
        close: dict[str, Any] = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5 if dtype is not torch.float64 else 0}
        h, a = grouped_linear_scaled_glu(o.x, o.weights, o.offsets, probs, bias=o.bias, **options)
        torch.testing.assert_close(h, grouped_linear(o.x, o.weights, o.offsets, bias=o.bias), **close)
        torch.testing.assert_close(a[:used], scaled_glu(h, probs, **options)[:used], **close)
        dh, dprobs = grouped_dgrad_scaled_glu_backward(o.dy, o.weights2, o.offsets, o.h, probs, **options)
        da = grouped_dgrad(o.dy, o.weights2, o.offsets)
        expected, expected_dprobs = scaled_glu_backward(da, o.h, probs, **options)
        torch.testing.assert_close(dh[:used], expected[:used], **close)
        pads = [h[used:], a[used:], dh[used:]]
        if dprobs is not None:
            assert expected_dprobs is not None and dprobs.dtype is expected_dprobs.dtype
            torch.testing.assert_close(dprobs[:used], expected_dprobs[:used], rtol=1e-5, atol=1e-4)
            pads.append(dprobs[used:])
        assert (dprobs is not None) is scaled
        assert all((pad == 0).all() for pad in pads), "rows behind the last expert"


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize(("rows", "features", "contracted"), [(0, 8, 8), (5, 0, 8), (5, 8, 0)])
def test_nothing_to_do(device: str, rows: int, features: int, contracted: int) -> None:
    o = draw([rows, 0], features, contracted or 1, torch.float32, device)
    o = o._replace(
        x=o.x[:rows, :contracted].contiguous(),
        dy=o.dy[:rows, :contracted].contiguous(),
        weights=o.weights[:, :, :contracted].contiguous(),
        weights2=o.weights2[:, :contracted].contiguous(),
        h=o.h[:rows],
        probs=o.probs[:rows],
    )
    config, glu = CONFIGS["pointer, in parts"], glu_of("swiglu")
    for made in (*forward(o, config, glu), *backward(o, config, glu)):
        assert made is not None and not made.any(), "a product of nothing is zero, and so are its activation's parts"


def test_what_does_not_fit_together_is_refused() -> None:
    o = draw([3, 4], 8, 6, torch.float32, "cpu")
    with pytest.raises(ValueError, match="two halves"):
        grouped_linear_scaled_glu(o.x, o.weights[:, :15], o.offsets)
    with pytest.raises(ValueError, match="no activation 'relu'"):
        grouped_linear_scaled_glu(o.x, o.weights, o.offsets, activation="relu")
    with pytest.raises(ValueError, match="needs bias"):
        grouped_linear_scaled_glu(o.x, o.weights, o.offsets, bias=o.bias[:, :3])
    with pytest.raises(ValueError, match="needs probs"):
        grouped_linear_scaled_glu(o.x, o.weights, o.offsets, o.probs[:3])
    with pytest.raises(TypeError, match="floating dtype"):
        grouped_linear_scaled_glu(o.x, o.weights, o.offsets, o.probs.nan_to_num().int())
    with pytest.raises(TypeError, match="one dtype"):
        grouped_linear_scaled_glu(o.x.half(), o.weights, o.offsets)
    with pytest.raises(ValueError, match="needs h"):
        grouped_dgrad_scaled_glu_backward(o.dy, o.weights2, o.offsets, o.h[:, :8])
    with pytest.raises(ValueError, match="needs h"):
        grouped_dgrad_scaled_glu_backward(o.dy, o.weights2, o.offsets, o.h.half())
    with pytest.raises(ValueError, match="needs probs"):
        grouped_dgrad_scaled_glu_backward(o.dy, o.weights2, o.offsets, o.h, o.probs[:3])
    with pytest.raises(ValueError, match="features in the last dim"):
        grouped_dgrad_scaled_glu_backward(o.dy[:, :3], o.weights2, o.offsets, o.h)


# ---- What only a GPU can show. ----


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "clamped_swiglu"])
@pytest.mark.parametrize("config", dict.fromkeys((*GLU_CANDIDATES, *GLU_BACKWARD_CANDIDATES)), ids=str)
def test_every_candidate(config: GemmConfig, activation: str) -> None:
    splits, glu = [0, 100, 333, 1, 500], glu_of(activation)
    o = draw(splits, 264, 384, torch.bfloat16, "cuda")
    if config in GLU_CANDIDATES:
        check_forward(o, splits, *forward(o, config, glu, biased=True), glu, True, True)
    if config in GLU_BACKWARD_CANDIDATES:
        dh, dprobs = backward(o, config, glu)
        check_backward(o, splits, dh, dprobs, glu)
        again = backward(o, config, glu)
        assert dprobs is not None and again[1] is not None
        assert torch.equal(dh, again[0]) and torch.equal(dprobs, again[1]), "the same bits again"


@pytest.mark.gpu
@pytest.mark.parametrize("broken", ["column stride", "unaligned", "odd columns"])
def test_operands_that_the_accelerator_cannot_address(broken: str) -> None:
    splits, glu = [100, 0, 60], glu_of("swiglu")
    o = draw(splits, 40, 63 if broken == "odd columns" else 64, torch.bfloat16, "cuda")

    def worse(rows: Tensor) -> Tensor:
        if broken == "column stride":
            return rows.t().contiguous().t()
        if broken == "unaligned":
            return torch.cat((rows.new_zeros(1), rows.flatten()))[1:].view(rows.shape)
        return rows

    x, dy, h = worse(o.x), worse(o.dy), worse(o.h)
    made = grouped_linear_scaled_glu(x, o.weights, o.offsets, o.probs, bias=o.bias)
    check_forward(o, splits, *made, glu, True, True)
    dh, dprobs = grouped_dgrad_scaled_glu_backward(dy, o.weights2, o.offsets, h, o.probs)
    check_backward(o, splits, dh, dprobs, glu)


@pytest.mark.gpu
def test_no_wait_for_the_device_and_replay_with_other_splits() -> None:
    o = draw([100, 0, 200, 40, 280, 0], 256, 192, torch.bfloat16, "cuda")
    o.h.nan_to_num_(), o.x.nan_to_num_(), o.dy.nan_to_num_(), o.probs.nan_to_num_()
    discrete = [each.clone() for each in o.weights]

    def step() -> list[Tensor]:
        h, a = grouped_linear_scaled_glu(o.x, discrete, o.offsets, o.probs, bias=o.bias)
        dh, dprobs = grouped_dgrad_scaled_glu_backward(o.dy, o.weights2, o.offsets, o.h, o.probs)
        assert dprobs is not None
        return [h, a, dh, dprobs]

    with cuda_waits_are_errors():
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for splits in ([0, 0, 640, 0, 0, 0], [1, 2, 3, 4, 5, 6], [100, 100, 100, 100, 100, 100]):
        o.offsets.copy_(torch.tensor([0, *itertools.accumulate(splits)]))
        for made in captured:
            made.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, captured, step()))
