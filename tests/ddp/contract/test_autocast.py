"""``torch.autocast`` over fp32 weights: nn.Linear's outputs bit for bit, and its gradients or better ones."""

from collections.abc import Callable

import pytest
import torch
from loops import FEATURES, make_batches, make_model, plain_twin, wrap
from torch import Tensor, nn

from maingrad.te_integration import Linear

OUT = 5
ROUNDING = 2.0**-8  # bf16's unit roundoff


def pair(bias: bool, dtype: torch.dtype = torch.float32) -> tuple[Linear, nn.Linear]:
    torch.manual_seed(0)
    fused = Linear(FEATURES, OUT, bias, dtype=dtype, fuse_wgrad_accumulation=True)
    plain = nn.Linear(FEATURES, OUT, bias, dtype=dtype)
    plain.load_state_dict(fused.state_dict())
    return fused, plain


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward_outside", "backward_inside"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("input_needs_grad", [True, False])
def test_one_layer(input_dtype: torch.dtype, bias: bool, input_needs_grad: bool, backward_inside: bool) -> None:
    fused, plain = pair(bias)
    ddp = wrap(fused)
    torch.manual_seed(1)
    dy = torch.randn(64, OUT).bfloat16()
    batch = torch.randn(64, FEATURES).to(input_dtype)
    inputs = [batch.clone().requires_grad_(input_needs_grad) for _ in range(2)]
    outputs = []
    for model, x in zip((ddp, plain), inputs, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(model(x))
            if backward_inside:
                outputs[-1].backward(dy)
        if not backward_inside:
            outputs[-1].backward(dy)
    ddp.finish_grad_sync()

    assert outputs[0].dtype is torch.bfloat16
    assert torch.equal(outputs[0], outputs[1])
    if input_needs_grad:
        assert inputs[0].grad.dtype is input_dtype
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    # fp64 on the operands as autocast rounds them. nn.Linear rounds the product to bf16, we keep it in fp32.
    exact = dy.double().t() @ batch.bfloat16().double()
    assert fused.weight.main_grad.dtype is torch.float32
    assert error(fused.weight.main_grad, exact) <= 2.0**-20
    assert error(fused.weight.main_grad, exact) < error(plain.weight.grad, exact) <= ROUNDING
    if bias:
        exact = dy.double().sum(0)
        assert fused.bias.main_grad.dtype is torch.float32
        assert error(fused.bias.main_grad, exact) <= 2.0**-20
        assert error(fused.bias.main_grad, exact) <= error(plain.bias.grad, exact) <= 4 * ROUNDING


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype, weight_dtype", [(torch.float64, torch.float64), (torch.float32, torch.bfloat16)])
def test_dtypes_that_autocast_leaves_alone_or_that_agree_with_it(
    dtype: torch.dtype, weight_dtype: torch.dtype, bias: bool
) -> None:
    fused, plain = pair(bias, weight_dtype)
    ddp = wrap(fused)
    batch = torch.randn(7, FEATURES, dtype=dtype)
    for model in (ddp, plain):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch)
        assert output.dtype is (torch.float64 if dtype is torch.float64 else torch.bfloat16)
        output.square().sum().backward()
    ddp.finish_grad_sync()
    rounding = 2.0**-40 if dtype is torch.float64 else 2 * ROUNDING
    for (name, parameter), reference in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert error(parameter.main_grad, reference.grad.double()) <= rounding, name


@pytest.mark.parametrize("freeze", ["weight", "bias"])
def test_one_half_frozen(freeze: str) -> None:
    fused, plain = pair(True)
    for layer in (fused, plain):
        getattr(layer, freeze).requires_grad_(False)
    ddp = wrap(fused)
    batch = make_batches(1)[0]
    for model in (ddp, plain):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch)
        output.backward(torch.ones_like(output))
    ddp.finish_grad_sync()
    trained = "weight" if freeze == "bias" else "bias"
    assert error(getattr(fused, trained).main_grad, getattr(plain, trained).grad.double()) <= ROUNDING
    assert getattr(fused, freeze).grad is None


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("cache", [True, False])
def test_a_model_over_microbatches_is_as_close_to_fp64_as_plain_pytorch(enabled: bool, cache: bool) -> None:
    model = make_model()
    plain = plain_twin(model)
    exact = plain_twin(model).double()
    ddp = wrap(model, overlap_grad_reduce=True)
    batches = make_batches(8)

    def backward(trained: nn.Module, batch: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=cache):
            loss = trained(batch).float().square().mean()
        loss.backward()

    with ddp.no_sync():
        for batch in batches[:-1]:
            backward(ddp, batch)
    backward(ddp, batches[-1])
    ddp.finish_grad_sync()
    for batch in batches:
        backward(plain, batch)
        exact(batch.double()).square().mean().backward()
    for (name, parameter), ours, reference in zip(
        plain.named_parameters(), model.parameters(), exact.parameters(), strict=True
    ):
        if enabled:
            # Both come from bf16 activations and output gradients, several roundings deep.
            assert error(ours.main_grad, reference.grad) <= 1.1 * error(parameter.grad, reference.grad), name
            assert error(parameter.grad, reference.grad) <= 16 * ROUNDING
        else:
            assert torch.equal(ours.main_grad, parameter.grad), name


@pytest.mark.parametrize("nested", [False, True])
def test_a_region_without_autocast_stays_fp32(nested: bool) -> None:
    fused, plain = pair(True)
    ddp = wrap(fused)
    batch = make_batches(1)[0]

    def run(model: Callable[[Tensor], Tensor]) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=nested), torch.autocast("cpu", enabled=False):
            output = model(batch)
        assert output.dtype is torch.float32
        output.square().sum().backward()

    run(ddp)
    run(plain)
    assert torch.equal(fused.weight.main_grad, plain.weight.grad)
    assert torch.equal(fused.bias.main_grad, plain.bias.grad)


@pytest.mark.parametrize("save_original_input", [False, True])
def test_second_derivatives_are_nn_linears(save_original_input: bool) -> None:
    """Also the derivative of the weight's gradient by the input, which autocast has cast."""
    fused, plain = pair(True)
    fused.save_original_input = save_original_input
    ddp = wrap(fused)
    batch = make_batches(1)[0]

    def second_derivatives(model: nn.Module, layer: nn.Linear) -> tuple[Tensor, ...]:
        inputs = batch.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(inputs)
        wanted = (inputs, layer.weight, layer.bias)
        first = torch.autograd.grad(output.float().pow(3).mean(), wanted, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), wanted)

    for ours, theirs in zip(second_derivatives(ddp, fused), second_derivatives(plain, plain), strict=True):
        assert ours.dtype is torch.float32
        assert error(ours, theirs.double()) <= 4 * ROUNDING
    assert not fused.weight.main_grad.any()
