"""Faults that systems with a main_grad contract have had, by their numbers in docs/main_grad.md, for ``Linear``.

Each test is named by a patch in ``tests/faults``, which brings the fault back and must make it fail.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign import ForeignLinear, ForeignProvider, LazyForeignProvider
from loops import FEATURES, assert_same, ddp_backward, loss_of, main_grads, make_batches, make_model, plain_grads, wrap
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel
from maingrad.ddp.contract.main_grad import placeholder
from maingrad.te_integration import Linear

OUT = 4


def fused_layer() -> Linear:
    torch.manual_seed(0)
    return Linear(FEATURES, OUT, bias=False, fuse_wgrad_accumulation=True)


def product(batch: Tensor) -> Tensor:
    """The weight gradient of ``layer(batch).sum()``."""
    return torch.ones(OUT, len(batch)) @ batch


def finish(ddp: DistributedDataParallel) -> None:
    ddp.finish_grad_sync()
    assert all(torch.equal(each.grad, each.main_grad.to(each.dtype)) for each in ddp.parameters())


class Tied(nn.Module):
    """Two layers over one weight, both used in each forward."""

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        self.first, self.second = first, second
        second.weight = first.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.first(x) + self.second(y)


def tied(first: nn.Linear, second_kind: Callable[..., nn.Linear], **options: Any) -> Tied:
    return Tied(first, second_kind(FEATURES, OUT, bias=False, **options))


# ---- 1 and 2: the flag. ----


def test_01_a_plain_microbatch_after_a_fused_one_counts() -> None:
    first, second, third = make_batches(3)
    layer = fused_layer()
    ddp = wrap(layer)
    ddp(first).sum().backward()
    layer.fuse_wgrad_accumulation = False
    ddp(second).sum().backward()
    layer.fuse_wgrad_accumulation = True
    ddp(third).sum().backward()
    finish(ddp)
    assert torch.equal(layer.weight.main_grad, product(first) + product(second) + product(third))


@pytest.mark.parametrize("provider", ["ours", "foreign", "foreign without a flag"])
def test_02_every_microbatch_accumulates(provider: str) -> None:
    batches = make_batches(4)
    layer = fused_layer()
    ddp = wrap(layer) if provider == "ours" else layer
    kept = None if provider == "ours" else ForeignProvider(layer, flag=provider == "foreign")
    for _ in range(2 if provider == "ours" else 1):  # the second iteration overwrites what the first one left
        for batch in batches:
            ddp(batch).sum().backward()
        expected = product(batches[0])
        for batch in batches[1:]:
            expected = expected + product(batch)
        assert torch.equal(layer.weight.main_grad, expected)
        if kept is None:
            finish(ddp)
            ddp.zero_grad_buffer()


# ---- 3: ties. ----


@pytest.mark.parametrize("fused_first", [True, False])
def test_03_a_plain_use_of_a_tied_weight_counts(fused_first: bool) -> None:
    model = tied(fused_layer(), nn.Linear)
    ddp = wrap(model, overlap_grad_reduce=True)
    x, y, other = make_batches(3)
    with ddp.no_sync():
        ddp(*((x, y) if fused_first else (y, x))).sum().backward()
    model.second(other).sum().backward()
    finish(ddp)
    torch.testing.assert_close(model.first.weight.main_grad, product(x) + product(y) + product(other))


def test_03_both_fused_uses_of_a_tied_weight_count_under_our_overwrite() -> None:
    model = tied(fused_layer(), Linear, fuse_wgrad_accumulation=True)
    ddp = wrap(model, overlap_grad_reduce=True)
    assert ddp.records[0].first_write_overwrites
    batches = make_batches(4)
    for _ in range(2):
        with ddp.no_sync():
            ddp(*batches[:2]).sum().backward()
        ddp(*batches[2:]).sum().backward()
        finish(ddp)
        torch.testing.assert_close(model.first.weight.main_grad, sum(map(product, batches)))
        ddp.zero_grad_buffer()
        model.first.weight.main_grad.data.fill_(torch.nan)  # nothing may read what the last iteration left


def test_03_both_fused_uses_of_a_tied_weight_count_under_a_foreign_overwrite() -> None:
    model = tied(fused_layer(), Linear, fuse_wgrad_accumulation=True)
    provider = LazyForeignProvider(model)
    batches = make_batches(4)
    model(*batches[:2]).sum().backward()
    torch.testing.assert_close(provider.allocated["first.weight"], sum(map(product, batches[:2])))
    provider.start_microbatch(model)
    model(*batches[2:]).sum().backward()
    torch.testing.assert_close(provider.allocated["first.weight"], sum(map(product, batches)))


@pytest.mark.parametrize("others", [ForeignLinear, nn.Linear, Linear])
def test_03_a_foreign_modules_tied_use_adds_no_uninitialised_memory(others: type[nn.Linear]) -> None:
    """The foreign layer's placeholder holds NaN, unless ``zero_out_wgrad`` asks for zeros."""
    options = {"fuse_wgrad_accumulation": True} if others is Linear else {}
    model = tied(ForeignLinear(FEATURES, OUT, bias=False), others, **options)
    ddp = wrap(model)
    batches = make_batches(4)
    with ddp.no_sync():
        ddp(*batches[:2]).sum().backward()
    ddp(*batches[2:]).sum().backward()
    finish(ddp)
    torch.testing.assert_close(model.first.weight.main_grad, sum(map(product, batches)))


def test_03_a_foreign_use_in_the_microbatch_after_ours_adds_no_uninitialised_memory() -> None:
    """A program gives the weight of our layer to a foreign function, whose placeholder holds NaN."""
    layer = fused_layer()
    ddp = wrap(layer)
    x, y = make_batches(2)
    with ddp.no_sync():
        ddp(x).sum().backward()
    ForeignLinear.forward(layer, y).sum().backward()
    finish(ddp)
    torch.testing.assert_close(layer.weight.main_grad, product(x) + product(y))


# ---- 6 and 10: what is returned beside main_grad. ----


def test_06_nothing_returned_is_added_to_what_was_written() -> None:
    """A returned view of main_grad would count twice, for instance for a tied weight under an overwriting provider."""
    model = tied(fused_layer(), nn.Linear)
    provider = LazyForeignProvider(model)
    model.first.weight.zero_out_wgrad = True
    x, y = make_batches(2)
    model(x, y).sum().backward()
    torch.testing.assert_close(provider.allocated["first.weight"], product(x) + product(y))

    alone = fused_layer()
    ddp = wrap(alone)
    ddp(x).sum().backward()
    finish(ddp)
    assert torch.equal(alone.weight.main_grad, product(x))


def test_10_the_hook_clears_a_foreign_placeholder() -> None:
    layer = ForeignLinear(FEATURES, OUT, bias=False)
    ddp = wrap(layer)
    batches = make_batches(3)
    with ddp.no_sync():
        for batch in batches[:2]:
            ddp(batch).sum().backward()
            assert layer.weight.grad is None
    nn.Linear.forward(layer, batches[2]).sum().backward()  # a plain use: a NaN left in .grad would come along
    finish(ddp)
    torch.testing.assert_close(layer.weight.main_grad, sum(map(product, batches)))


def test_10_a_placeholder_somebody_wrote_to_is_zeros_when_it_is_handed_out_again() -> None:
    """Where a provider keeps ``.grad``, autograd adds the next gradient to the memory that placeholders share."""
    layer, other = fused_layer(), fused_layer()
    for each in (layer, other):
        each.weight.main_grad = torch.zeros(OUT, FEATURES)
        each.weight.grad_added_to_main_grad = False
    batch = make_batches(1)[0]
    layer(batch).sum().backward()
    assert layer.weight.grad.untyped_storage().data_ptr() == placeholder(layer.weight).untyped_storage().data_ptr()
    layer.fuse_wgrad_accumulation = False
    layer(batch).sum().backward()  # into the placeholder
    other(batch).sum().backward()
    assert not other.weight.grad.any()
    assert other.weight.grad.shape == other.weight.shape


# ---- 14, 18, 20. ----


@pytest.mark.parametrize(
    "main_grad", [torch.zeros(FEATURES, OUT).t(), torch.zeros(2 * OUT, FEATURES)[::2]], ids=["transposed", "strided"]
)
def test_14_a_main_grad_that_is_not_contiguous_is_refused_with_its_stride(main_grad: Tensor) -> None:
    layer = fused_layer()
    assert main_grad.shape == layer.weight.shape
    layer.weight.main_grad = main_grad
    with pytest.raises(RuntimeError, match=r"Linear\(.*main_grad must be contiguous.*stride \(\d+, \d+\)"):
        layer(make_batches(1)[0]).sum().backward()


@pytest.mark.parametrize("fuse", [True, False])
def test_18_small_bf16_gradients_survive_between_large_ones(fuse: bool) -> None:
    layer = Linear(2, 3, bias=False, dtype=torch.bfloat16, fuse_wgrad_accumulation=fuse)
    ddp = wrap(layer)
    for gradient in (256.0, 1.0, -256.0):
        ddp(torch.full((1, 2), gradient, dtype=torch.bfloat16)).sum().backward()
    finish(ddp)
    assert layer.weight.main_grad.dtype is torch.float32
    assert torch.equal(layer.weight.main_grad, torch.ones(3, 2))


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


@pytest.mark.parametrize("provider", ["ours", "foreign", "lazy"])
def test_20_saved_tensor_hooks_that_hand_back_copies_change_nothing(provider: str) -> None:
    model = make_model()
    expected = wrap(make_model())
    batches = make_batches(3)
    ddp_backward(expected, batches)

    trained = wrap(model) if provider == "ours" else model
    kept = None
    if provider != "ours":
        kept = (LazyForeignProvider if provider == "lazy" else ForeignProvider)(model)
    for batch in batches:
        with torch.autograd.graph.saved_tensors_hooks(copied, copied):
            loss = loss_of(trained, batch) / len(batches)
        loss.backward()
        if provider == "lazy":
            kept.start_microbatch(model)
    if provider == "ours":
        finish(trained)
    assert_same(main_grads(model), main_grads(expected))
    if kept is not None:
        fused = {name for name, flag in kept.seen if flag}
        assert fused == {"0.weight", "3.weight"}, "the flag was set on the parameter itself"


def test_20_offload_of_saved_tensors_changes_nothing() -> None:
    offloaded, expected = wrap(make_model()), wrap(make_model())
    batches = make_batches(2)
    ddp_backward(expected, batches)
    with torch.autograd.graph.save_on_cpu():
        ddp_backward(offloaded, batches)
    assert_same(main_grads(offloaded), main_grads(expected))


# ---- 22: side effects. ----


def gradients_of_inputs(model: nn.Module, batch: Tensor) -> None:
    inputs = batch.clone().requires_grad_()
    torch.autograd.grad(model(inputs).sum(), inputs)


def gradients_of_other_parameters(model: nn.Module, batch: Tensor) -> None:
    torch.autograd.grad(model(batch).square().sum(), model[2].bias)


def second_derivative(model: nn.Module, batch: Tensor) -> None:
    inputs = batch.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
    torch.autograd.grad(first.square().sum(), inputs)


@pytest.mark.parametrize("ask", [gradients_of_inputs, gradients_of_other_parameters, second_derivative])
@pytest.mark.parametrize("provider", ["ours", "foreign"])
def test_22_gradients_that_are_handed_to_the_caller_leave_main_grad_alone(
    ask: Callable[[nn.Module, Tensor], None], provider: str
) -> None:
    model = make_model()
    kept = wrap(model) if provider == "ours" else ForeignProvider(model)
    first, second = make_batches(2)
    loss_of(model, first).backward()
    before = main_grads(model)
    ask(model, second)
    assert_same(main_grads(model), before)
    assert not any(parameter.grad_added_to_main_grad for parameter in model.parameters())
    if provider == "ours":
        assert_same(plain_grads(model), before)
    else:
        assert all(parameter.grad is None for parameter in model.parameters())
    assert kept is not None
