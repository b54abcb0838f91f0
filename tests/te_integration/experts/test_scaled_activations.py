"""``ScaledSwiGLU`` and ``ScaledClampedQGeGLU``: numbers against fp64, saved tensors, refusals."""

import copy
from typing import Any

import pytest
import torch
from host_syncs import cuda_waits_are_errors
from modules import PLAIN_ACTIVATIONS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.te_integration import ScaledClampedQGeGLU, ScaledSwiGLU, Sequential
from maingrad.te_integration.experts.scaled_activations import glu_options, scaled_activation

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUMBERS = {"limit": 1.53, "alpha": 1.1}
MODULES = [(ScaledSwiGLU, "swiglu", {}), (ScaledClampedQGeGLU, "clamped_swiglu", NUMBERS)]
FEATURES = 12


def operands(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    h = 2 * torch.randn(*shape, 2 * FEATURES, generator=generator)
    scales = torch.rand(*shape, generator=generator)
    return h.to(device, dtype).requires_grad_(), scales.to(device).requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("module", "activation", "numbers"), MODULES)
@pytest.mark.parametrize("shape", [(9,), (2, 0), (3, 5)])
def test_against_fp64(
    device: str, dtype: torch.dtype, module: Any, activation: str, numbers: dict[str, float], shape: tuple[int, ...]
) -> None:
    h, scales = operands(*shape, dtype=dtype, device=device)
    y = module(**numbers)(h, scales)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    y.backward(upstream)
    exact_h, exact_scales = (t.detach().double().requires_grad_() for t in (h, scales))
    exact = PLAIN_ACTIVATIONS[activation](exact_h, **numbers) * exact_scales[..., None]
    exact.backward(upstream.double())
    assert y.dtype is h.grad.dtype is dtype and scales.grad.dtype is torch.float32
    for actual, expected in ((y, exact), (h.grad, exact_h.grad), (scales.grad, exact_scales.grad)):
        assert actual.shape == expected.shape
        # One rounding of the stored value, and the absolute error of fp32 steps with factors of at most 8.
        bound = torch.finfo(actual.dtype).eps / 2 * expected.abs() + 1e-4
        assert ((actual.double() - expected).abs() <= bound).all()


def test_the_offset_of_the_linear_half() -> None:
    h, scales = operands(7, dtype=torch.float64)
    shifted = ScaledClampedQGeGLU(**NUMBERS, glu_linear_offset=0.25)(h, scales)
    gate, linear = h.chunk(2, -1)
    gate, linear = gate.clamp(max=1.53), linear.clamp(-1.53, 1.53)
    torch.testing.assert_close(shifted, gate * torch.sigmoid(1.1 * gate) * (linear + 0.25) * scales[:, None].double())


def test_only_the_input_and_the_scales_are_kept() -> None:
    h, scales = operands(9)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ScaledSwiGLU()(h, scales)
    assert {t.data_ptr() for t in kept} == {h.data_ptr(), scales.data_ptr()} and len(kept) == 2


@pytest.mark.parametrize("frozen", ["h", "scales"])
def test_either_may_need_no_gradient(frozen: str) -> None:
    h, scales = operands(5)
    (h if frozen == "h" else scales).requires_grad_(False)
    ScaledSwiGLU()(h, scales).sum().backward()
    assert (h.grad is None) == (frozen == "h") and (scales.grad is None) == (frozen == "scales")


def test_scales_of_another_dtype_get_a_gradient_of_theirs() -> None:
    h, scales = operands(5)
    coarse = scales.detach().bfloat16().requires_grad_()
    ScaledSwiGLU()(h, coarse).sum().backward()
    exact = scales.detach().requires_grad_()
    ScaledSwiGLU()(h, exact).sum().backward()
    assert coarse.grad.dtype is torch.bfloat16
    assert torch.equal(coarse.grad, exact.grad.bfloat16())


def test_autocast_decides_the_output() -> None:
    h, scales = operands(5)
    with torch.autocast("cpu", torch.bfloat16):
        y = ScaledSwiGLU()(h, scales)
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and h.grad.dtype is torch.float32
    assert torch.equal(y, ScaledSwiGLU()(h.bfloat16(), scales))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("module", "activation", "numbers"), MODULES)
@pytest.mark.sampled(1)
def test_second_derivatives(device: str, module: Any, activation: str, numbers: dict[str, float]) -> None:
    h, scales = (t.detach().double().requires_grad_() for t in operands(4, device=device))
    op = module(**numbers)
    assert torch.autograd.gradgradcheck(op, (h, scales))
    single_h, single_scales = operands(4, device=device)  # fp32 runs the kernels where there are any
    grads = torch.autograd.grad(
        op(single_h, single_scales).square().sum(), (single_h, single_scales), create_graph=True
    )
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), (single_h, single_scales))
    exact = torch.autograd.grad(op(h, scales).square().sum(), (h, scales), create_graph=True)
    expected = torch.autograd.grad(sum(g.square().sum() for g in exact), (h, scales))
    for actual, wanted in zip(second, expected, strict=True):
        assert ((actual.double() - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.in_turn
def test_recompute_and_torch_func_and_compile_agree() -> None:
    op = ScaledSwiGLU()
    h, scales = operands(6)
    expected = torch.autograd.grad(op(h, scales).square().sum(), (h, scales))
    for reentrant in (False, True):
        y = checkpoint(op, h, scales, use_reentrant=reentrant)
        h.grad = scales.grad = None
        y.square().sum().backward()
        assert torch.equal(h.grad, expected[0]) and torch.equal(scales.grad, expected[1])
    with_func = torch.func.grad(lambda h, s: op(h, s).square().sum(), argnums=(0, 1))(h.detach(), scales.detach())
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)(h, scales)
    with_compiler = torch.autograd.grad(compiled.square().sum(), (h, scales))
    for other in (with_func, with_compiler):
        for actual, wanted in zip(other, expected, strict=True):
            torch.testing.assert_close(actual, wanted)


def test_in_a_sequential_it_takes_the_scales() -> None:
    h, scales = operands(5)
    model = Sequential(nn.Tanh(), copy.deepcopy(ScaledSwiGLU()))
    assert model.num_extra_inputs == 1
    assert torch.equal(model(h, scales), ScaledSwiGLU()(h.tanh(), scales))


@pytest.mark.parametrize("activation", ["geglu", "reglu", "qgeglu", "sreglu", "glu", "swiglu"])
def test_the_other_gated_activations(activation: str) -> None:
    h, scales = operands(5, dtype=torch.float64)
    y = scaled_activation(h, scales, glu_options("test", activation))
    torch.testing.assert_close(y, PLAIN_ACTIVATIONS[activation](h) * scales[:, None].double())
    torch.testing.assert_close(
        scaled_activation(h, None, glu_options("test", activation)), PLAIN_ACTIVATIONS[activation](h)
    )


def test_what_does_not_fit_is_named() -> None:
    h, scales = operands(5)
    with pytest.raises(ValueError, match=r"a scale for each of its rows; got \(5, 24\) and \(4,\)"):
        ScaledSwiGLU()(h, scales[:4])
    for given, of_rows in ((h[:, 1:], scales), (h[0, 0], scales), (h, scales[:, None])):
        with pytest.raises(ValueError, match=r"an input \[..., 2 features\]"):
            ScaledSwiGLU()(given, of_rows)
    with pytest.raises(ValueError, match="ScaledSwiGLU does not support glu_interleave_size=32"):
        ScaledSwiGLU(32)
    with pytest.raises(ValueError, match="ScaledClampedQGeGLU does not support glu_interleave_size=32"):
        ScaledClampedQGeGLU(32)
    with pytest.raises(ValueError, match="test needs a gated activation"):
        glu_options("test", "gelu")
    with pytest.raises(ValueError, match="unknown activation 'swigl'"):
        glu_options("test", "swigl")
    with pytest.raises(ValueError, match="glu_linear_offset is of clamped_swiglu alone"):
        glu_options("test", "swiglu", {"glu_linear_offset": 0.0})
    with pytest.raises(ValueError, match="only clamped_swiglu takes any"):
        glu_options("test", "swiglu", {"limit": 1.0})


def test_what_it_is_is_said() -> None:
    assert repr(ScaledSwiGLU()) == "ScaledSwiGLU()"
    clamped = ScaledClampedQGeGLU(limit=3.0, alpha=1.5, glu_linear_offset=0.0)
    assert repr(clamped) == "ScaledClampedQGeGLU(limit=3.0, alpha=1.5, glu_linear_offset=0.0)"


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    h, scales = operands(50, dtype=torch.bfloat16, device="cuda")
    op = ScaledSwiGLU()
    op(h, scales).sum().backward()
    torch.cuda.synchronize()
    with cuda_waits_are_errors():
        op(h, scales).sum().backward()
