"""The Triton quantiser against the reference: scales bit for bit, elements too where the device has the cast.

Triton's interpreter casts to 8 bits by rules of its own: it loses a carry into the exponent, subnormal elements and
NaN. There an element must be near; ``tests/te_integration/recipes/test_recipes_gpu.py`` has all bits on a GPU.
"""

import dataclasses

import pytest
import torch
from quant_oracle import SPECS, check_copy
from torch import Tensor
from triton_devices import LAUNCHER_DEVICES, nan_filled_memory

from maingrad.kernels.quantized import Element, Quantized, quantize

pytest.importorskip("triton", reason="the launchers are Triton's")
from maingrad.kernels.quantized import quantize_triton as quantize_triton_module
from maingrad.kernels.quantized.quantize import record_amax
from maingrad.kernels.quantized.quantize_triton import quantize_triton

NAMES = ["current", "current, gradients", "block", "block, weights"]
SMALLEST = {Element.E4M3: 2**-6, Element.E5M2: 2**-14}
"""Normal elements."""


def check(found: Quantized | None, x: Tensor, name: str, scale: Tensor | None = None) -> None:
    expected = quantize(x, SPECS[name], scale=scale)
    mine, other = check_copy(found, expected)
    if x.is_cuda:
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    else:
        normal = other.abs() >= SMALLEST[expected.spec.element]
        assert ((mine - other).abs() <= 0.5 * other.abs())[normal].all()
        assert (mine.abs() <= 2 * SMALLEST[expected.spec.element])[~normal & ~other.isnan()].all()


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_both_copies(device: str, name: str) -> None:
    """Partial tiles at both borders, zeros, Inf, numbers that are subnormal, and blocks near the smallest normal."""
    draws = torch.Generator().manual_seed(0)
    for dtype, shape in ((torch.bfloat16, (150, 170)), (torch.float16, (3, 520))):
        x = torch.randn(shape, generator=draws) * torch.exp2(torch.randn(shape, generator=draws) * 2)
        x[0], x[1, 3], x[2, 5:9] = 0.0, float("inf"), 1e-40
        x[128:, 128:] = 2e-38
        x = x.to(dtype).to(device)
        for matrix in (x, x.t(), x[:, : shape[1] // 2]):
            with nan_filled_memory():
                rows, columns = quantize_triton(matrix, SPECS[name], SPECS[name])
                only_rows, _ = quantize_triton(matrix, SPECS[name], None)
                _, only_columns = quantize_triton(matrix, None, SPECS[name])
            for copy in (rows, only_rows):
                check(copy, matrix, name)
            for copy in (columns, only_columns):
                check(copy, matrix.t(), name)


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(100)
def test_scales_lie_as_cublas_reads_them(device: str, name: str) -> None:
    x = torch.randn(300, 700).bfloat16().to(device)
    rows, columns = quantize_triton(x, SPECS[name], SPECS[name])
    assert rows is not None and columns is not None
    widths = {"block": (1024, 384), "block, weights": (1024, 512)}.get(name, (704, 304))
    assert (rows.data.shape, columns.data.shape) == ((300, widths[0]), (700, widths[1]))
    strides = {"block": ((1, 300), (1, 700)), "block, weights": ((8, 1), (4, 1))}.get(name, ((), ()))
    assert (rows.scale.stride(), columns.scale.stride()) == strides


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(1)
def test_launches_that_differ_in_one_thing(device: str, name: str) -> None:
    """A compiled form that is found again fits: sizes, dtype, and whether the memory begins at whole 16 bytes."""
    x = torch.randn(96, 264).bfloat16().to(device)
    for matrix in (x[:, :256], x[:, 1:257], x[:, :255], x[:95, :256], x[:, :256].half(), x[:, 8:], x[:, :256]):
        rows, columns = quantize_triton(matrix, SPECS[name], SPECS[name])
        check(rows, matrix, name)
        check(columns, matrix.t(), name)


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_scales_of_whole_blocks_are_as_many_as_there_are_blocks(device: str) -> None:
    """Programs behind the matrix write zeros to the copies' padding, and no scale."""
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    with nan_filled_memory():
        rows, columns = quantize_triton(x, SPECS["block, weights"], SPECS["block, weights"])
    check(rows, x, "block, weights")
    check(columns, x.t(), "block, weights")


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_the_largest_magnitude_is_that_of_the_matrix_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program looks through several tiles; what lies beside and behind the matrix is larger."""
    spec = SPECS["current"]
    monkeypatch.setattr(quantize_triton_module, "_PARTIALS", 1)
    for rows, columns in ((65, 3), (2, 258)):
        memory = torch.full((rows + 1, columns + 2), 1e4, device=device).bfloat16()
        x = memory[:rows, :columns].fill_(0.5)
        x[-1, -1] = -3.0  # in the last tile
        found, _ = quantize_triton(x, spec, None)
        check(found, x, "current")
        x.fill_(1e-37)[:, 0] = 0.0  # no finite scale lifts these to the largest element
        check(quantize_triton(x, spec, None)[0], x, "current")


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_a_recorded_amax_only_grows_and_knows_no_nan(device: str) -> None:
    spec, scale = SPECS["current"], torch.tensor(2.0, device=device)
    found, expected = torch.zeros(4, device=device)[1], torch.zeros((), device=device)
    for value in (-2.0, 1.0, torch.nan, 3.0):
        x = torch.full((2, 3), 0.5, device=device).bfloat16()
        x[1, 2] = value
        quantize_triton(x, spec, None, scale, found)
        record_amax(x, expected)
        assert found.item() == expected.item()
    assert expected == 3.0


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_blocks_of_gradients_may_have_the_wider_range(device: str) -> None:
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    for name in ("block", "block, weights"):
        spec = dataclasses.replace(SPECS[name], element=Element.E5M2)
        found, expected = check_copy(quantize_triton(x, spec, None)[0], quantize(x, spec))
        torch.testing.assert_close(found, expected, rtol=0.5 if device == "cpu" else 0, atol=0)


SCALES = (1.0, 2.7, 3.1e-6, torch.finfo(torch.float32).max)


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_scale_that_is_given(device: str, name: str) -> None:
    """Scale and amax are entries of vectors, at every place of 16 bytes."""
    draws = torch.Generator().manual_seed(0)
    spec, tiny = SPECS[name], 1e-30 if device == "cpu" else 1e-40  # the interpreter widens subnormals in bf16 wrongly
    for dtype, shape in ((torch.bfloat16, (150, 170)), (torch.float16, (3, 520))):
        x = torch.randn(shape, generator=draws) * torch.exp2(torch.randn(shape, generator=draws) * 2)
        x[0], x[1, 3], x[2, 5:9] = 0.0, float("inf"), tiny
        x = x.to(dtype).to(device)
        for place, scale in enumerate(torch.tensor(SCALES, device=device)):
            amaxes = torch.full((4,), -1.0, device=device)
            matrices = (x, x.t(), x[:, : shape[1] // 2])
            for matrix in matrices if place == 0 or device == "cuda" else matrices[place - 1 : place]:
                with nan_filled_memory():
                    rows, columns = quantize_triton(matrix, spec, spec, scale, amaxes[place])
                    only_rows, _ = quantize_triton(matrix, spec, None, scale, amaxes[place])
                    _, only_columns = quantize_triton(matrix, None, spec, scale)
                for copy in (rows, only_rows):
                    check(copy, matrix, name, scale)
                for copy in (columns, only_columns):
                    check(copy, matrix.t(), name, scale)
            assert amaxes.tolist() == [float("inf") if each == place else -1.0 for each in range(4)]


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.slow
def test_amaxes_are_those_of_the_reference(device: str) -> None:
    """The largest of many programs and of what is there already. NaN, whose sign may be set, counts as 0."""
    nan = torch.tensor([-float("nan")]).item()
    spec, scale = SPECS["current"], torch.tensor(2.0, device=device)
    shape = (300, 401) if device == "cuda" else (130, 131)  # six programs: the interpreter takes 20 ms for each
    last = shape[0] - 1, shape[1] - 1
    for dtype in (torch.bfloat16, torch.float16):
        for special in (
            {},
            {last: -7.0},
            {(3, 5): -float("inf")},
            {(0, 0): nan},
            {(0, 0): nan, (9, 9): torch.inf},
        ):
            for first in (-1.0, 0.0, 3.0, torch.inf, torch.nan):
                x = torch.zeros(shape, dtype=dtype)
                for place, value in special.items():
                    x[place] = value
                found, expected = torch.full((2,), first, device=device), torch.full((), first)
                quantize_triton(x.to(device), spec, spec, scale, found[1])
                record_amax(x, expected)
                assert first != first or not expected.isnan()
                torch.testing.assert_close(found[1].cpu(), expected, rtol=0, atol=0, equal_nan=True)
