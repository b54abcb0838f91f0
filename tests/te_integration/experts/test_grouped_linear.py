"""Numbers of ``GroupedLinear`` against fp64 and against a loop of ``Linear``, in every form and with any splits."""

import copy
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import has_no_own_grad, wrap
from torch import Tensor, nn
from triton_devices import LAUNCHER_DEVICES

from maingrad.te_integration import GroupedLinear, Linear, WgradQueue, delayed_wgrad
from maingrad.te_integration.experts.compiled_grouped_linear import compiled_grouped_linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# One rounding of the result, of operands that are exact, and sums of at most 300 products in fp32.
ROUNDING = {torch.float64: 2.0**-48, torch.float32: 2.0**-18, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

# Rows of each expert, and pad rows behind the last.
SPLITS: dict[str, tuple[list[int], int]] = {
    "uneven": ([5, 0, 3, 9], 0),
    "padded": ([5, 0, 3, 9], 256),
    "much padding": ([1, 2, 0, 0], 2048),
    "one expert": ([7], 0),
    "all to one": ([0, 0, 17, 0], 3),
    "no rows": ([0, 0, 0], 0),
    "padding alone": ([0, 0], 6),
    "tiles": ([130, 1, 64], 2),
}

FORMS: dict[str, dict[str, Any]] = {
    "discrete": {},
    "packed": {"single_grouped_weight": True, "single_grouped_bias": True},
    "packed weight": {"single_grouped_weight": True},
    "packed bias": {"single_grouped_bias": True},
    "no bias": {"bias": False},
    "packed, no bias": {"single_grouped_weight": True, "bias": False},
    "scaled": {"scale_bias": True},
    "packed, scaled": {"single_grouped_weight": True, "single_grouped_bias": True, "scale_bias": True},
}


class Case(NamedTuple):
    """Rows, their splits, the scales of the bias and the gradient of the output; pad rows of all of them are NaN."""

    x: Tensor
    splits: Tensor
    scales: Tensor
    dy: Tensor

    @property
    def filled(self) -> int:
        return int(self.splits.sum())


def case_of(
    splits: list[int],
    padding: int,
    *,
    sizes: tuple[int, int] = (13, 21),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 1,
) -> Case:
    """Operands of few bits, which are the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(splits) + padding

    def some(*shape: int) -> Tensor:
        drawn = (torch.randn(*shape, generator=generator) * 16).round() / 16
        drawn[sum(splits) :] = torch.nan
        return drawn.to(device, dtype)

    scales = some(rows).float().requires_grad_()
    return Case(
        some(rows, sizes[0]).requires_grad_(), torch.tensor(splits, device=device), scales, some(rows, sizes[1])
    )


def make(
    experts: int, *, sizes: tuple[int, int] = (13, 21), dtype: torch.dtype = torch.float32, **options: Any
) -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(experts, *sizes, dtype=dtype, **options)


def expert_of(module: GroupedLinear, name: str, expert: int) -> Tensor | None:
    parameter = getattr(module, name, None)
    return getattr(module, f"{name}{expert}", None) if parameter is None else parameter[expert]


class Expected(NamedTuple):
    """Results for every expert and every row, in fp64."""

    y: Tensor
    dx: Tensor
    ds: Tensor
    dw: list[Tensor]
    db: list[Tensor]


def expected_of(module: GroupedLinear, case: Case) -> Expected:
    """The expected results, by autograd on a loop of plain products."""
    x, scales = (tensor.detach().double().requires_grad_() for tensor in (case.x, case.scales))
    results, dw, db, start = [], [], [], 0
    weights, biases = [], []
    for expert, rows in enumerate(case.splits.tolist()):
        weight = expert_of(module, "weight", expert).detach().double().requires_grad_()
        bias = expert_of(module, "bias", expert)
        bias = torch.zeros_like(weight[:, 0]) if bias is None else bias.detach().double()
        bias = bias.clone().requires_grad_()
        here = slice(start, start + rows)
        y = x[here] @ weight.t() + bias * (scales[here, None] if module.scale_bias else 1)
        y.backward(case.dy[here].double())
        results.append(y.detach())
        weights.append(weight)
        biases.append(bias)
        start += rows
    pad = len(case.x) - start
    dw, db = [weight.grad for weight in weights], [bias.grad for bias in biases]
    dx = torch.cat([x.grad[:start], x.new_zeros(pad, x.shape[1])])
    ds = torch.zeros(len(case.x), device=x.device, dtype=torch.float64)
    if scales.grad is not None:
        ds[:start] = scales.grad[:start]
    return Expected(torch.cat([*results, x.new_zeros(pad, case.dy.shape[1])]).detach(), dx.detach(), ds, dw, db)


def assert_near(actual: Tensor, expected: Tensor, rounding: float, what: str) -> None:
    """Zeros must be exact; everything else must be near in norm."""
    assert actual.shape == expected.shape, what
    difference = (actual.double() - expected).norm()
    assert difference <= rounding * expected.norm(), f"{what}: {difference / expected.norm()}"


def run(module: GroupedLinear, case: Case, **more: Any) -> Tensor:
    scales = (case.scales,) if module.scale_bias else ()
    output = module(case.x, case.splits, *scales, **more)
    output.backward(case.dy)
    module.backward_dw()
    return output.detach()


def assert_right(module: GroupedLinear, case: Case, output: Tensor, *, attribute: str, times: int = 1) -> None:
    expected, dtype = expected_of(module, case), case.x.dtype
    rounding = ROUNDING[dtype]
    assert output.dtype is dtype and case.x.grad.dtype is dtype
    assert_near(output, expected.y, rounding, "y")
    assert_near(case.x.grad, times * expected.dx, rounding, "dx")
    if module.scale_bias:
        assert_near(case.scales.grad, times * expected.ds, ROUNDING[torch.float32], "ds")
    for expert in range(module.num_gemms):
        for name, gradients in (("weight", expected.dw), ("bias", expected.db)):
            whole = getattr(module, name, None)
            parameter = getattr(module, f"{name}{expert}", None) if whole is None else whole
            if parameter is None:
                continue
            gradient = getattr(parameter, attribute)
            gradient = gradient if whole is None else gradient[expert]
            assert_near(gradient, times * gradients[expert], rounding, f"{name} {expert}")


# ---- Numbers. ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("splits", SPLITS)
def test_it_is_fp64s(splits: str, form: str, fuse: bool, delay: bool, device: str) -> None:
    """Memory that is to be overwritten is NaN, and so are all pad rows."""
    rows, padding = SPLITS[splits]
    options = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay, **FORMS[form]}
    module = make(len(rows), device=device, **options)
    case = case_of(rows, padding, device=device)
    if not fuse:
        output = run(module, case)
        assert_right(module, case, output, attribute="grad")
        return
    ddp = wrap(module)
    for name in module.weight_names:
        getattr(module, name).main_grad.data.fill_(torch.nan)
    output = run(module, case)
    ddp.finish_grad_sync()
    assert_right(module, case, output, attribute="main_grad")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("form", ["discrete", "packed, scaled"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("splits", ["uneven", "padded", "tiles"])
def test_it_is_fp64s_in_every_dtype(splits: str, dtype: torch.dtype, form: str, fuse: bool, device: str) -> None:
    rows, padding = SPLITS[splits]
    module = make(len(rows), dtype=dtype, device=device, fuse_wgrad_accumulation=fuse, **FORMS[form])
    case = case_of(rows, padding, dtype=dtype, device=device)
    kept = wrap(module) if fuse else None
    for name in module.weight_names if fuse else ():
        getattr(module, name).main_grad.data.fill_(torch.nan)
    output = run(module, case)
    assert_right(module, case, output, attribute="main_grad" if fuse else "grad")
    if fuse and dtype is not torch.float64:
        assert all(record.view.dtype is torch.float32 for record in kept.records)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_it_is_a_loop_of_linear(packed: bool, fuse: bool, delay: bool) -> None:
    """Over three microbatches that accumulate, with other splits in each; weight gradients bit for bit, on the CPU."""
    options = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay}
    module = make(3, single_grouped_weight=packed, single_grouped_bias=packed, **options)
    loop = nn.ModuleList([Linear(13, 21, **options) for _ in range(3)])
    for expert, linear in enumerate(loop):
        linear.weight.data.copy_(expert_of(module, "weight", expert))
        linear.bias.data.copy_(expert_of(module, "bias", expert))
    kept = [wrap(module), wrap(loop)] if fuse else []
    for seed, splits in enumerate([[4, 0, 6], [1, 5, 4], [0, 0, 10]]):
        case = case_of(splits, 0, seed=seed)
        output = run(module, case)
        x = case.x.detach().clone().requires_grad_()
        expected = torch.cat([linear(part) for linear, part in zip(loop, x.split(splits), strict=True)])
        expected.backward(case.dy)
        for linear in loop:
            linear.backward_dw()
        torch.testing.assert_close(output, expected.detach(), rtol=2.0**-20, atol=2.0**-20)
        torch.testing.assert_close(case.x.grad, x.grad, rtol=2.0**-20, atol=2.0**-20)
    for wrapper in kept:
        wrapper.finish_grad_sync()
    for expert, linear in enumerate(loop):
        for name in ("weight", "bias"):
            whole, other = getattr(module, name, None), getattr(linear, name)
            mine = getattr(module, f"{name}{expert}") if whole is None else whole
            attribute = "main_grad" if fuse else "grad"
            gradient = getattr(mine, attribute) if whole is None else getattr(mine, attribute)[expert]
            theirs = getattr(other, attribute)
            if name == "weight":
                assert torch.equal(gradient, theirs), f"{name} {expert}"
            else:
                torch.testing.assert_close(gradient, theirs, rtol=2.0**-20, atol=2.0**-18)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("which", ["input", "weights", "neither"])
def test_the_input_without_a_gradient_and_the_weights_with_and_the_reverse(form: str, delay: bool, which: str) -> None:
    module = make(4, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay, **FORMS[form])
    for name in module.weight_names:
        getattr(module, name).requires_grad_(which == "weights")
    case = case_of(*SPLITS["padded"])
    case.x.requires_grad_(which == "input")
    kept = wrap(module) if any(parameter.requires_grad for parameter in module.parameters()) else None
    expected = expected_of(module, case)
    output = module(case.x, case.splits, *((case.scales,) if module.scale_bias else ()))
    if output.requires_grad:
        output.backward(case.dy)
        module.backward_dw()
    assert_near(output.detach(), expected.y, ROUNDING[torch.float32], "y")
    assert (case.x.grad is None) is not case.x.requires_grad
    if case.x.requires_grad:
        assert_near(case.x.grad, expected.dx, ROUNDING[torch.float32], "dx")
    for expert in range(4):
        weight = getattr(module, "weight", None)
        weight = getattr(module, f"weight{expert}") if weight is None else weight
        if which == "weights":
            gradient = weight.main_grad if weight.dim() == 2 else weight.main_grad[expert]
            assert_near(gradient, expected.dw[expert], ROUNDING[torch.float32], f"weight {expert}")
        else:
            assert weight.grad is None and not hasattr(weight, "main_grad")
        bias = getattr(module, "bias", None)
        bias = getattr(module, f"bias{expert}", None) if bias is None else bias
        if bias is not None:
            gradient = bias.main_grad if bias.dim() == 1 else bias.main_grad[expert]
            assert_near(gradient, expected.db[expert], ROUNDING[torch.float32], f"bias {expert}")
    if module.scale_bias:
        assert_near(case.scales.grad, expected.ds, ROUNDING[torch.float32], "ds")
    assert kept is not None or "no bias" in form


@pytest.mark.parametrize("shape", [(), (0,), (6,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("listed", [False, True])
def test_any_number_of_leading_dims_and_splits_as_a_list(shape: tuple[int, ...], listed: bool) -> None:
    module = make(2, scale_bias=True)
    rows = torch.Size(shape).numel()
    splits = [rows // 3, rows - rows // 3]
    flat = case_of(splits, 0)
    x = flat.x.detach().view(*shape, 13).requires_grad_()
    given = splits if listed else torch.tensor(splits, dtype=torch.int32)
    output = module(x, given, flat.scales.view(shape))
    expected = module(flat.x, flat.splits, flat.scales)
    assert output.shape == (*shape, 21) and torch.equal(output.view(-1, 21), expected)
    output.sum().backward()
    expected.sum().backward()
    assert torch.equal(x.grad.view(-1, 13), flat.x.grad)


def test_an_output_may_be_changed_in_place() -> None:
    """As with ``nn.Linear``, whose output many models activate in place."""
    module, case = make(4), case_of(*SPLITS["uneven"])
    for x in (case.x, case.x.unflatten(0, (-1, 1))):
        module(x, case.splits).relu_().sum().backward()


# ---- Autocast. ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("save_original_input", [False, True])
def test_fp32_parameters_under_autocast(packed: bool, fuse: bool, save_original_input: bool, device: str) -> None:
    """Products of bf16 operands, fp32 gradients of the parameters; the products are not rounded on their way."""
    options: dict[str, Any] = {"single_grouped_weight": packed, "single_grouped_bias": packed}
    module = make(4, device=device, fuse_wgrad_accumulation=fuse, save_original_input=save_original_input, **options)
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16().float()
    kept = wrap(module) if fuse else None
    case = case_of(*SPLITS["padded"], device=device)
    with torch.autocast(device, torch.bfloat16):
        output = module(case.x, case.splits)
        assert output.dtype is torch.bfloat16
        output.backward(case.dy.bfloat16())  # inside the block, too, nothing is rounded twice
    expected = expected_of(module, case)
    attribute = "main_grad" if fuse else "grad"
    assert_near(output, expected.y, ROUNDING[torch.bfloat16], "y")
    assert case.x.grad.dtype is torch.float32
    assert_near(case.x.grad, expected.dx, ROUNDING[torch.bfloat16], "dx")
    for expert in range(4):
        whole = getattr(module, "weight", None)
        gradient = getattr(getattr(module, f"weight{expert}") if whole is None else whole, attribute)
        gradient = gradient if whole is None else gradient[expert]
        assert gradient.dtype is torch.float32
        assert_near(gradient, expected.dw[expert], ROUNDING[torch.float32], f"weight {expert}")
    assert (kept is not None) is fuse


def test_experts_of_several_dtypes_under_autocast() -> None:
    module, plain = (make(4, bias=False) for _ in range(2))
    for each in (module, plain):
        for param in each.parameters():
            param.data = param.data.bfloat16().float()
    module.weight0.data, module.weight3.data = module.weight0.data.bfloat16(), module.weight3.data.bfloat16()
    found = []
    for each in (module, plain):
        case = case_of(*SPLITS["padded"])
        with torch.autocast("cpu", torch.bfloat16):
            output = each(case.x, case.splits)
        output.backward(case.dy.bfloat16())
        found.append([output.detach(), case.x.grad, *(param.grad.bfloat16() for param in each.parameters())])
    for mine, expected in zip(*found, strict=True):
        assert torch.equal(mine, expected)


# ---- The caller's memory. ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["discrete", "packed, scaled"])
def test_output_and_input_gradient_in_the_callers_memory(form: str, device: str) -> None:
    module, plain = (make(4, device=device, **FORMS[form]) for _ in range(2))
    out = torch.full((273, 21), torch.nan, device=device)
    grad_input = torch.full((273, 13), torch.nan, device=device)
    for seed in range(2):
        case = case_of(*SPLITS["padded"], device=device, seed=seed)
        other = case_of(*SPLITS["padded"], device=device, seed=seed)
        middle = case.x * 1
        arrived: list[int] = []
        middle.register_hook(lambda grad, arrived=arrived: arrived.append(grad.data_ptr()))
        scales = (case.scales,) if module.scale_bias else ()
        output = module(middle, case.splits, *scales, out=out, grad_input=grad_input)
        assert output.data_ptr() == out.data_ptr() and not out.requires_grad and out.grad_fn is None
        assert torch.equal(output, run(plain, other))
        output.backward(case.dy)
        assert arrived == [grad_input.data_ptr()] and torch.equal(case.x.grad, other.x.grad)
        assert not module.scale_bias or torch.equal(case.scales.grad, other.scales.grad)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_the_callers_memory_may_be_of_inference_mode() -> None:
    module, case = make(4), case_of(*SPLITS["uneven"])
    with torch.inference_mode():
        out = torch.full((17, 21), torch.nan)
        assert module(case.x, case.splits, out=out).data_ptr() == out.data_ptr()
        assert torch.equal(out, module(case.x, case.splits))


def test_scales_that_need_no_gradient_still_scale_the_biases() -> None:
    """Probabilities of a frozen router."""
    found = []
    for needs in (True, False):
        module, case = make(4, scale_bias=True), case_of(*SPLITS["uneven"])
        output = module(case.x, case.splits, case.scales.detach().requires_grad_(needs))
        output.backward(case.dy)
        found.append([module.get_parameter(f"bias{expert}").grad for expert in range(4)])
    for mine, expected in zip(*found, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_memory_that_was_filled_again_too_early_is_noticed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a kernel, whose writes torch does not see."""
    if device == "cpu":
        monkeypatch.setattr("maingrad.kernels.grouped.products.runs_on_triton", lambda *_: True)
    module, case = make(4, device=device), case_of(*SPLITS["uneven"], device=device)
    out = torch.empty(17, 21, device=device)
    loss = module(case.x, case.splits, out=out).square().sum()
    module(case.x, case.splits, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    grad_input, factor = torch.empty(17, 13, device=device), torch.ones(13, device=device, requires_grad=True)
    module(case.x, case.splits, grad_input=grad_input).sum().backward()
    loss = (case.x.grad * factor).sum()
    module(case.x.detach().requires_grad_(), case.splits, grad_input=grad_input).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("name", "buffer", "message"),
    [
        ("out", lambda: torch.empty(16, 21), r"out must be \(17, 21\), torch.float32 on cpu; got \(16, 21\)"),
        (
            "out",
            lambda: torch.empty(17, 21, dtype=torch.float64),
            r"out must be .*; got \(17, 21\), torch.float64 on cpu",
        ),
        ("out", lambda: torch.empty(17, 21, device="meta"), r"out must be .* on cpu; got .* on meta"),
        ("out", lambda: torch.empty(17, 21, requires_grad=True), r"out is memory .* must not require a gradient"),
        ("grad_input", lambda: torch.empty(17, 21), r"grad_input must be \(17, 13\)"),
    ],
)
def test_memory_that_does_not_fit_is_refused(name: str, buffer: Any, message: str) -> None:
    module, case = make(4, name="layers.2.fc1"), case_of(*SPLITS["uneven"])
    with pytest.raises(ValueError, match=f"layers.2.fc1: {message}"):
        module(case.x, case.splits, **{name: buffer()})


def test_an_input_that_is_kept_in_another_dtype_has_no_gradient_in_the_callers_memory() -> None:
    """Under autocast the gradient of a kept fp32 input is fp32; the memory is of the products' dtype."""
    module, case = make(4, name="fc1", save_original_input=True), case_of(*SPLITS["uneven"])
    memory = torch.empty(case.x.shape, dtype=torch.bfloat16)
    refusal = pytest.raises(ValueError, match="fc1: grad_input with save_original_input needs an input of")
    with refusal, torch.autocast("cpu", dtype=torch.bfloat16):
        module(case.x.float(), case.splits, grad_input=memory)
    memory = torch.full(case.x.shape, torch.nan)
    module(case.x, case.splits, grad_input=memory).backward(case.dy)
    assert torch.equal(memory, case.x.grad)


def test_second_derivatives_are_refused() -> None:
    module, case = make(4, name="fc1"), case_of(*SPLITS["uneven"])
    y = module(case.x.requires_grad_(), case.splits)
    with pytest.raises(RuntimeError, match="fc1: second derivatives"):
        torch.autograd.grad(y.sum(), case.x, create_graph=True)


def test_transforms_of_functions_are_refused() -> None:
    module, case = make(4, name="fc1"), case_of(*SPLITS["uneven"])
    with pytest.raises(RuntimeError, match=r"fc1.*torch\.func"):
        torch.func.grad(lambda x: module(x, case.splits).sum())(case.x.detach())


# ---- Any splits, any sizes, any experts frozen. ----


@pytest.mark.in_turn
@settings(max_examples=max(50, settings.default.max_examples))  # fewer miss a stale expert
@given(st.data())
def test_any_splits_any_sizes_and_any_frozen_experts(data: st.DataObject) -> None:
    splits = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=6), label="splits")
    padding = data.draw(st.integers(0, 5), label="padding")
    sizes = (data.draw(st.integers(1, 9), label="K"), data.draw(st.integers(1, 9), label="N"))
    packed = data.draw(st.booleans(), label="packed")
    fuse, how = data.draw(st.booleans(), label="fuse"), data.draw(st.sampled_from(["now", "module", "queue"]))
    form = data.draw(st.sampled_from(["bias", "no bias", "scaled"]), label="form")
    module = make(
        len(splits),
        sizes=sizes,
        single_grouped_weight=packed,
        single_grouped_bias=data.draw(st.booleans(), label="packed bias"),
        fuse_wgrad_accumulation=fuse,
        delay_wgrad_compute=how == "module",
        bias=form != "no bias",
        scale_bias=form == "scaled",
    )
    frozen = data.draw(st.sets(st.sampled_from(sorted(module.weight_names))), label="frozen")
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    trainable = any(parameter.requires_grad for parameter in module.parameters())
    ddp = wrap(module) if fuse and trainable else None
    for record in ddp.records if ddp is not None else ():
        if record.first_write_overwrites:
            record.view.data.fill_(torch.nan)
    cases = [case_of(splits, padding, sizes=sizes, seed=seed) for seed in range(data.draw(st.integers(1, 3)))]
    queue = WgradQueue()
    for case in cases:
        scales = (case.scales,) if module.scale_bias else ()
        if how == "queue":
            with delayed_wgrad(queue):
                output = module(case.x, case.splits, *scales)
        else:
            output = module(case.x, case.splits, *scales)
        output.backward(case.dy)
        expected = expected_of(module, case)
        assert_near(output.detach(), expected.y, ROUNDING[torch.float32], "y")
        assert_near(case.x.grad, expected.dx, ROUNDING[torch.float32], "dx")
        if module.scale_bias:
            assert_near(case.scales.grad, expected.ds, ROUNDING[torch.float32], "ds")
    queue.drain()
    while module.need_backward_dw():
        module.backward_dw()
    if ddp is not None:
        ddp.finish_grad_sync()
    sums = [expected_of(module, case) for case in cases]
    for name, parameter in module.named_parameters():
        gradient = getattr(parameter, "main_grad", None) if fuse else parameter.grad
        if name in frozen:
            assert gradient is None and parameter.grad is None
            continue
        of = "dw" if name.startswith("weight") else "db"
        experts = [sum(getattr(each, of)[expert] for each in sums) for expert in range(len(splits))]
        whole = (
            torch.stack(experts)
            if name in ("weight", "bias")
            else experts[int(name.removeprefix("weight").removeprefix("bias"))]
        )
        terms = sum(torch.stack(getattr(each, of)).norm() for each in sums)  # which may cancel in their sum
        assert (gradient.double() - whole).norm() <= ROUNDING[torch.float32] * terms, name


def test_a_copy_computes_the_same() -> None:
    module, case = make(4, fuse_wgrad_accumulation=True), case_of(*SPLITS["padded"])
    kept = wrap(module)
    twin = copy.deepcopy(module)
    twin.fuse_wgrad_accumulation = False
    other = case_of(*SPLITS["padded"])
    assert torch.equal(run(module, case), run(twin, other))
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.main_grad, theirs.grad) and has_no_own_grad(mine) and not hasattr(theirs, "main_grad")
    assert kept is not None


@pytest.mark.parametrize("form", ["scaled", "packed, scaled"])
def test_scales_of_the_bias_have_gradients_where_the_input_has_none(form: str) -> None:
    """The first layer of a model: backward saves no weights, and still reads the biases."""
    splits, padding = SPLITS["uneven"]
    grads = []
    for needs_dx in (True, False):
        case = case_of(splits, padding)
        module = make(len(splits), **FORMS[form])
        module(case.x.detach().requires_grad_(needs_dx), case.splits, case.scales).backward(case.dy)
        grads.append([case.scales.grad, *(param.grad for param in module.parameters())])
    for with_dx, without in zip(*grads, strict=True):
        assert with_dx is not None and torch.equal(with_dx, without)
    assert grads[0][0].abs().min() > 0, "of the scales"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("experts, packed", [(1, False), (3, False), (3, True)])
def test_what_compilers_take_has_the_gradients_of_one_product_for_each_expert(
    experts: int, packed: bool, transposed: bool
) -> None:
    """Of separate and packed parameters, also where each expert's matrix is stored [in, out]."""
    generator = torch.Generator().manual_seed(0)
    rows, counts = torch.randn(6, 4, generator=generator), [6] if experts == 1 else [1, 3, 2]
    weights = torch.randn(experts, *((4, 5) if transposed else (5, 4)), generator=generator)
    tensors = rows, weights, torch.randn(experts, 5, generator=generator), torch.rand(6, generator=generator)
    x, w, b, scales = (each.requires_grad_() for each in tensors)
    expected = []
    for expert, (part, scale) in enumerate(zip(x.split(counts), scales.split(counts), strict=True)):
        matrix = w[expert] if transposed else w[expert].t()
        expected.append(part @ matrix + scale[:, None] * b[expert])
    forms = [[each] if packed else [part.detach().requires_grad_() for part in each] for each in (w, b)]
    offsets = torch.tensor([0, *itertools.accumulate(counts)])
    found = compiled_grouped_linear(x, *forms, offsets, None, 0, bias_scale=scales, transposed=transposed)
    torch.testing.assert_close(found, torch.cat(expected))
    want = torch.autograd.grad(torch.cat(expected).square().sum(), (x, scales, w, b))
    dx, dscales, *others = torch.autograd.grad(found.square().sum(), (x, scales, *forms[0], *forms[1]))
    grads = others if packed else [torch.stack(others[:experts]), torch.stack(others[experts:])]
    torch.testing.assert_close([dx, dscales, *grads], list(want))
