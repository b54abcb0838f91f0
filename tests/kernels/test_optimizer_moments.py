"""Moments of the optimizer in bf16 and in 8 bits: rounding, random bits, codes and scales."""

import pytest
import torch
from torch import Tensor
from triton_devices import LAUNCHER_DEVICES

from maingrad.kernels.optimizer.adamw import AdamUpdate
from maingrad.kernels.optimizer.eight_bits import (
    BORDERS,
    LEAST,
    LEAST_ONE,
    code_table,
    dequantize_moment,
    quantize_moment,
)
from maingrad.kernels.optimizer.reference import (
    AdamOptions,
    LionOptions,
    UpdateRow,
    random_bits,
    round_stochastically,
    update_reference,
)

CPU = torch.device("cpu")


# ---- bf16. ----


def test_rounding_is_right_on_average_and_leaves_bf16_as_it_is() -> None:
    values = torch.tensor([1.0, 1.001, -1.001, 3e-39, -7.7e20, 0.3])
    every = torch.arange(65536)
    for value in values:
        rounded = round_stochastically(value.expand(65536), every).double()
        assert rounded.unique().numel() <= 2
        assert rounded.mean() == value.double()  # each of 65,536 bits once: exact
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(round_stochastically(exact.float(), torch.full((1000,), 65535)), exact)


def test_rounding_makes_no_infinity_of_a_number_and_no_number_of_infinity_or_nan() -> None:
    largest = torch.tensor([3.4028235e38, -3.4028235e38, float("inf"), float("-inf")])
    bits = torch.full((4,), 65535)
    rounded = round_stochastically(largest, bits)
    assert rounded[:2].isfinite().all() and torch.equal(rounded[2:].float(), largest[2:])
    nan = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert round_stochastically(nan, bits[:2]).isnan().all()


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_a_step_rounds_no_finite_moment_to_infinity(device: str) -> None:
    """Between the largest number of bf16 and that of fp32, which about each second of 512 elements would leave."""
    pytest.importorskip("triton", reason="the launch is Triton's")
    from maingrad.kernels.optimizer.triton_update import TritonUpdate

    largest = torch.finfo(torch.bfloat16).max
    rows = []
    for _ in range(2):
        grad = torch.full((512,), torch.finfo(torch.float32).max, device=device)
        moment = torch.full((512,), largest, dtype=torch.bfloat16, device=device)
        step, master = torch.zeros((), device=device), torch.ones(512, device=device)
        rows.append(UpdateRow(grad, moment, None, step, master, key=5))
    TritonUpdate(rows[:1], "lion", False)([LionOptions(0.1, 0.5, 0.5, 0.0)], None, None)
    update_reference(rows[1:], [LionOptions(0.1, 0.5, 0.5, 0.0)], rule="lion")
    for row in rows:
        assert row.exp_avg is not None and (row.exp_avg == largest).all()


def test_random_bits_are_even_and_tell_elements_steps_and_keys_apart() -> None:
    count = 1 << 16
    base = random_bits(count, 0, 5, 9, CPU)
    others = {
        "key": random_bits(count, 0, 6, 9, CPU),
        "key above 16 bits": random_bits(count, 0, 5 + (1 << 31), 9, CPU),
        "step": random_bits(count, 0, 5, 10, CPU),
        "element": random_bits(count, 1, 5, 9, CPU),
        "element above 32 bits": random_bits(count, 1 << 32, 5, 9, CPU),
    }
    assert torch.equal(others["element"][:-1], base[1:])
    for bits in (base, *others.values()):
        assert bits.min() >= 0 and bits.max() < 1 << 32
        for half in (bits & 0xFFFF, bits >> 16):
            # 256 cells of 256 expected: chi square of 255 degrees has a deviation of 22.6.
            cells = torch.bincount(half >> 8, minlength=256).double()
            assert ((cells - 256).square() / 256).sum() < 255 + 6 * 22.6
    pairs = [(base & 0xFFFF, base >> 16), *((base & 0xFFFF, other & 0xFFFF) for other in others.values())]
    for one, other in pairs:
        if one is not other:
            correlation = torch.corrcoef(torch.stack((one.double(), other.double())))[0, 1]
            assert correlation.abs() < 6 / count**0.5


@pytest.mark.in_turn
def test_a_second_moment_in_bf16_decays() -> None:
    """0.999 of a bf16 number rounds to itself: only random roundings follow the average."""
    count, steps = 20_000, 200
    exp_avg, exp_avg_sq = torch.zeros(count).bfloat16(), torch.ones(count).bfloat16()
    row = UpdateRow(torch.zeros(count), exp_avg, exp_avg_sq, torch.tensor(0.0), torch.zeros(count), key=3)
    update = AdamUpdate([row])
    for _ in range(steps):
        update([AdamOptions(0.0, 0.9, 0.999, 1e-8, 0.0)])
    # One step's error is below half an ulp of 2^-8 on average: 200 of them, averaged over all elements.
    bound = 6 * (steps**0.5) * 2.0**-9 / count**0.5
    assert abs(exp_avg_sq.double().mean() - 0.999**steps) < bound


# ---- 8 bits. ----


def values_of(signed: bool) -> Tensor:
    return code_table(CPU)[int(not signed), :256]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.sampled(2)
def test_codes_are_the_dynamic_codes_and_their_own_roundings(signed: bool) -> None:
    """bitsandbytes' ``create_dynamic_map``: midpoints of ``linspace(0.1, 1)`` in each of seven decades, 0 and 1."""
    expected = [0.0, 1.0]
    for decade in range(7):
        borders = torch.linspace(0.1, 1, (2**decade if signed else 2 ** (decade + 1)) + 1, dtype=torch.float64)
        means = 10.0 ** (decade - 6) * (borders[:-1] + borders[1:]) / 2
        expected += [*means.tolist(), *((-means).tolist() if signed else [])]
    values = values_of(signed)
    torch.testing.assert_close(values.double().sort()[0], torch.tensor(expected, dtype=torch.float64).sort()[0])
    for scale in (1.0, 3e-12, 2.5e30):
        for codes in (torch.arange(128, dtype=torch.uint8), torch.arange(129, 256).to(torch.uint8)):
            block = torch.cat((values[codes.int()], torch.ones(1))) * scale  # 1 sets the scale
            again, scales = quantize_moment(block, signed=signed)
            assert torch.equal(again[:-1], codes) and scales == torch.tensor([scale])


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.sampled(2)
def test_the_nearest_value_is_taken(signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = 10 ** (-8 * torch.rand(20_000, generator=generator)) * 7.0
    if signed:
        x *= torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    codes, scales = quantize_moment(x, signed=signed)
    largest = torch.stack([each[each.abs().argmax()] for each in x.split(256)])
    assert scales.shape == (79,) and torch.equal(scales, largest)
    result = dequantize_moment(codes, scales, signed=signed).double()
    wide = scales.repeat_interleave(256)[: x.numel()].double()
    allowed = values_of(signed).double()
    best = ((x.double() / wide)[:, None] - allowed).abs().min(1)[0] * wide.abs()
    wide = wide.abs()
    if not signed:  # a second moment above 0 stays above 0
        assert (result > 0).all()
        smallest = allowed[allowed > 0].min()
        best = torch.where(x / wide < smallest, (x - smallest * wide).abs(), best)
    # Borders are those of fp32: a value that lies on one goes to either side.
    assert ((result - x).abs() <= best + 1e-6 * wide).all()
    assert ((result - x).abs() <= best * (1 + 1e-3) + 1e-12 * wide).double().mean() > 0.999


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.sampled(2)
def test_every_border_between_codes(signed: bool) -> None:
    """All 255 or 128 values of one sign, and the 100 fp32 numbers on either side of each border between two of them."""
    values = (values_of(signed)[:129] if signed else values_of(signed)).double()
    assert (values.diff() > 0).all() and values[-1] == 1
    ones = torch.ones(1)
    for sign in (1, -1) if signed else (1,):
        allowed = values if sign == 1 else values[:-1]
        borders = ((allowed[1:] + allowed[:-1]) / 2).float()
        for index, border in enumerate(borders):
            near = (border.view(torch.int32) + torch.arange(-100, 101, dtype=torch.int32)).view(torch.float32)
            codes, scales = quantize_moment(torch.cat((sign * near, ones)), signed=signed)
            lower, upper = (code + 128 if sign == -1 and code else code for code in (index, index + 1))
            if not signed and index == 0:  # a second moment above 0 stays above 0
                lower = 1
            assert scales == 1 and {lower, upper} == {*codes[:-1].tolist(), lower, upper}
            # Two roundings of y, which is 1 or more: at most 20 numbers near the border go to the wrong side.
            assert (codes[:80] == lower).all() and (codes[121:201] == upper).all(), (sign, index)
            assert (codes[:-1].int().diff() >= 0).all()  # no number is below a smaller one
    midpoints = torch.cat((values[:-1], ones.double())).float()
    codes, scales = quantize_moment(midpoints, signed=signed)
    assert torch.equal(codes.int(), torch.arange(midpoints.numel()).int()) and scales.eq(1).all()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.sampled(2)
def test_what_was_read_has_the_same_codes_again(signed: bool) -> None:
    """A checkpoint has fp32 moments: training that goes on from it begins with the same codes and scales."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60_000, generator=generator) ** 3 * 10 ** (-40 * torch.rand(60_000, generator=generator))
    x[::512] = -x[::512].abs() - 1  # blocks whose largest magnitude is negative
    x = x if signed else x.square()
    codes, scales = quantize_moment(x, signed=signed)
    again = quantize_moment(dequantize_moment(codes, scales, signed=signed), signed=signed)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


def test_blocks_of_zeros_short_blocks_and_blocks_with_nan() -> None:
    x = torch.zeros(256 * 3 + 7)
    x[256:512], x[520], x[768:] = 1e-40, float("nan"), -2.0
    for signed in (True, False):
        codes, scales = quantize_moment(x if signed else x.abs(), signed=signed)
        assert codes.shape == x.shape and scales.shape == (4,)
        result = dequantize_moment(codes, scales, signed=signed)
        assert (result[:256] == 0).all() and (result[256:512] > 0).all() and result[512:768].isnan().all()
        assert torch.equal(result[768:], (x if signed else x.abs())[768:])  # the largest of a block is exact
    empty, none = quantize_moment(torch.zeros(0), signed=True)
    assert empty.shape == none.shape == dequantize_moment(empty, none, signed=True).shape == (0,)


def test_a_scale_has_the_sign_of_its_largest_element() -> None:
    """Of two as large the positive one's, in either order; that of zeros is zero, and positive."""
    blocks = torch.zeros(5, 256)
    blocks[0, 3], blocks[0, 9] = 2.0, -2.0
    blocks[1, 3], blocks[1, 9] = -2.0, 2.0
    blocks[2, 5], blocks[2, 6] = -3.0, 2.0
    blocks[3] = torch.linspace(-1, 0.5, 256)
    codes, scales = quantize_moment(blocks.view(-1), signed=True)
    assert scales.tolist() == [2.0, 2.0, -3.0, -1.0, 0.0] and not scales[4].signbit()
    largest = [codes[256 * block + place].item() for block, place in ((0, 3), (1, 9), (2, 5), (3, 0))]
    assert largest == [128] * 4, "the code of 1"


def coded_row(grad: Tensor) -> UpdateRow:
    """A row before its first step: moments in 8 bits, a master of ones."""
    moments = [torch.zeros_like(grad, dtype=torch.uint8) for _ in range(2)]
    scales = [grad.new_zeros(-(-len(grad) // 256)) for _ in range(2)]
    return UpdateRow(grad, *moments, grad.new_zeros(()), torch.ones_like(grad), None, None, *scales)


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("size", [1.0, 3e-20])
def test_kernels_have_the_references_codes_of_small_moments_of_equal_ones_and_of_none(device: str, size: float) -> None:
    """Squares of 1e-39 and less, whose scales have no finite reciprocal; and largest elements of either sign."""
    pytest.importorskip("triton", reason="the launch is Triton's")
    from maingrad.kernels.optimizer.triton_update import TritonUpdate

    grad = size * torch.tensor([-1.0, 1.0, 0.5, -0.25]).repeat(150)
    grad[256:512] *= -1.0
    grad[512:] = 0.0
    rows = [coded_row(grad.to(device)) for _ in range(2)]
    options = [AdamOptions(1e-3, 0.9, 0.999, 1e-30, 0.0)]
    for _ in range(2):
        TritonUpdate(rows[:1], "adamw", False)(options, None, None)
        update_reference(rows[1:], options)
    for mine, wanted in zip(rows[0], rows[1], strict=True):
        assert not isinstance(mine, Tensor) or torch.equal(mine, wanted)
    assert rows[0].exp_avg_scale.isfinite().all() and (rows[0].exp_avg_scale > 0).tolist() == [True, True, False]
    assert (rows[0].exp_avg_sq[:512] > 0).all() and not rows[0].exp_avg_sq[512:].any()


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_kernels_have_the_references_codes_at_the_borders_of_decades(device: str) -> None:
    """Of either moment, whose betas are 0: the first is the gradient, and the second its square."""
    pytest.importorskip("triton", reason="the launch is Triton's")
    from maingrad.kernels.optimizer.triton_update import TritonUpdate

    signed, unsigned = (torch.tensor([*BORDERS[kind], LEAST[kind], LEAST_ONE[kind]]) for kind in (True, False))
    around = torch.arange(-5, 6, dtype=torch.int32)
    near, roots = ((each.view(torch.int32)[:, None] + around).flatten().view(torch.float32) for each in (
        signed, unsigned.double().sqrt().float()
    ))  # fmt: skip
    # Blocks whose largest element is 1 have the scale 1.
    grad = torch.cat([torch.nn.functional.pad(each, (0, 256 - len(each)), value=1.0) for each in (near, -near, roots)])
    rows = [coded_row(grad.to(device)) for _ in range(2)]
    options = [AdamOptions(1e-3, 0.0, 0.0, 1e-8, 0.0)]
    TritonUpdate(rows[:1], "adamw", False)(options, None, None)
    update_reference(rows[1:], options)
    for mine, wanted in zip(rows[0], rows[1], strict=True):
        assert not isinstance(mine, Tensor) or torch.equal(mine, wanted)
    assert rows[0].exp_avg_scale.tolist() == rows[0].exp_avg_sq_scale.tolist() == [1.0] * 3


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_kernels_have_the_references_bits_where_the_two_moments_have_other_dtypes(device: str) -> None:
    pytest.importorskip("triton", reason="the launch is Triton's")
    from maingrad.kernels.optimizer.triton_update import TritonUpdate

    generator = torch.Generator().manual_seed(0)
    rows = []
    for index, (first, second) in enumerate(((torch.bfloat16, torch.uint8), (torch.uint8, torch.bfloat16))):
        moments, scales = list[Tensor](), list[Tensor | None]()
        for dtype, signed in ((first, True), (second, False)):
            value = torch.randn(300, generator=generator)
            value = value if signed else value.square()
            codes, scale = quantize_moment(value, signed=signed)
            moments.append(codes.to(device) if dtype is torch.uint8 else value.to(device, dtype))
            scales.append(scale.to(device) if dtype is torch.uint8 else None)
        grad, master = (torch.randn(300, generator=generator).to(device) for _ in range(2))
        step = torch.zeros((), device=device)
        rows.append(UpdateRow(grad, *moments, step, master, None, None, *scales, first=256 * index, key=7 + index))
    expected = [UpdateRow(*(each.clone() if isinstance(each, Tensor) else each for each in row)) for row in rows]
    options = [AdamOptions(1e-3, 0.9, 0.999, 1e-8, 0.1)]
    TritonUpdate(rows, "adamw", False)(options, None, None)
    update_reference(expected, options)
    for row, wanted in zip(rows, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(row, wanted, strict=True) if isinstance(pair[0], Tensor))


@pytest.mark.in_turn
def test_training_with_8_bit_moments_goes_the_way_of_fp32() -> None:
    """A least-squares problem: both reach the same loss, though no step is the same."""
    generator = torch.Generator().manual_seed(0)
    inputs, target = torch.randn(512, 600, generator=generator), torch.randn(512, generator=generator)

    def train(moment: torch.dtype) -> float:
        weight, grad = torch.zeros(600), torch.zeros(600)
        moments, scales = [torch.zeros(600, dtype=moment) for _ in range(2)], [None, None]
        if moment is torch.uint8:
            scales = [torch.zeros(3), torch.zeros(3)]
        update = AdamUpdate([UpdateRow(grad, *moments, torch.tensor(0.0), weight, None, None, *scales)])
        for _ in range(150):
            torch.mv(inputs.T, inputs @ weight - target, out=grad)
            update([AdamOptions(3e-3, 0.9, 0.95, 1e-8, 0.0)], divisor=torch.tensor(512.0))
        return (inputs @ weight - target).square().mean().item()

    exact, first = train(torch.float32), target.square().mean().item()
    assert exact < 0.2 * first
    for moment in (torch.bfloat16, torch.uint8):
        assert abs(train(moment) - exact) < 0.02 * first
