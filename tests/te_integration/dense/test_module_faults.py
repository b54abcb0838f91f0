"""Faults that systems with a main_grad contract have had, by their numbers in docs/main_grad.md, for every weight.

What each needs of ``Linear`` alone is in ``tests/ddp/contract/test_contract_faults.py``; 4, 5 and 13 are in
``test_return_table_modules.py`` with the rows they break, 15 with the modules that have several weights, 17 in
``test_delayed_streams.py``, and 20 and 21 in ``test_saved_tensor_hooks.py``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from foreign import ForeignLinear, ForeignProvider, LazyForeignProvider
from loops import wrap
from modules import FACTORIES, FEATURES, WEIGHTS, error, make, plain_forward
from torch import Tensor, nn

from maingrad.launch import simulate
from maingrad.te_integration import GroupedLinear, Linear, LinearCrossEntropy, autocast
from maingrad.te_integration.dense.tensor_parallel import multiply_over_ranks, ranks_of

ROUNDING = 2.0**-19
EVERY_WEIGHT = pytest.mark.parametrize(("kind", "name"), WEIGHTS)
DELAYED_OR_NOT = pytest.mark.parametrize("delay", [False, True])


def batch(seed: int = 1) -> Tensor:
    return torch.randn(2, 3, FEATURES, generator=torch.Generator().manual_seed(seed))


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().sum()


def fp64_params(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


def step(module: Any, loss: Tensor) -> None:
    loss.backward()
    module.backward_dw()


def expected_of(module: nn.Module, name: str, batches: list[Tensor]) -> Tensor:
    params = fp64_params(module)
    for x in batches:
        loss_of(plain_forward(module, params, x.double())).backward()
    return params[name].grad


@EVERY_WEIGHT
@DELAYED_OR_NOT
def test_01_a_plain_microbatch_between_fused_ones_counts(kind: str, name: str, delay: bool) -> None:
    module = make(kind, delay=delay)
    ddp = wrap(module)
    batches = [batch(seed) for seed in range(3)]
    for x, fuse in zip(batches, (True, False, True), strict=True):
        module.fuse_wgrad_accumulation = fuse
        with ddp.no_sync():
            step(module, loss_of(ddp(x)))
    ddp.finish_grad_sync()
    assert error(getattr(module, name).main_grad, expected_of(module, name, batches)) <= ROUNDING


@EVERY_WEIGHT
@DELAYED_OR_NOT
@pytest.mark.sampled(4)
def test_02_every_microbatch_of_every_iteration_counts(kind: str, name: str, delay: bool) -> None:
    module = make(kind, delay=delay)
    ddp = wrap(module)
    for iteration in range(2):
        batches = [batch(3 * iteration + index) for index in range(3)]
        for x in batches:
            with ddp.no_sync():
                step(module, loss_of(ddp(x)))
        ddp.finish_grad_sync()
        assert error(getattr(module, name).main_grad, expected_of(module, name, batches)) <= ROUNDING
        ddp.zero_grad_buffer()


class Tied(nn.Module):
    """A module, and another layer over one of its weights, before or after it."""

    def __init__(self, kind: str, name: str, other: Callable[..., nn.Linear], before: bool, delay: bool) -> None:
        super().__init__()
        self.module = make(kind, delay=delay)
        rows, columns = getattr(self.module, name).shape
        self.other = other(columns, rows, bias=False)
        self.other.weight = getattr(self.module, name)
        self.before = before

    def losses(self, x: Tensor, run: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]) -> Tensor:
        columns = self.other.in_features
        if self.before:
            x = x + other(torch.cat([x] * 4, dim=-1)[..., :columns]).tanh().mean(-1, keepdim=True)
            return loss_of(run(x))
        y = run(x)
        return loss_of(y) + loss_of(other(torch.cat([y] * 4, dim=-1)[..., :columns]))

    def forward(self, x: Tensor) -> Tensor:
        return self.losses(x, self.module, self.other)


def fused_linear(*sizes: int, bias: bool) -> Linear:
    return Linear(*sizes, bias=bias, fuse_wgrad_accumulation=True)


@EVERY_WEIGHT
@DELAYED_OR_NOT
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("other", [nn.Linear, ForeignLinear, fused_linear], ids=["plain", "foreign", "fused"])
def test_03_every_use_of_a_tied_weight_counts(kind: str, name: str, other: Any, before: bool, delay: bool) -> None:
    """The foreign layer returns NaN as its gradient unless it is told that a real gradient is added to it."""
    model = Tied(kind, name, other, before, delay)
    ddp = wrap(model, overlap_grad_reduce=True, bucket_size=64)
    for iteration in range(2):
        batches = [batch(2 * iteration + index)[0] for index in range(2)]
        with ddp.no_sync():
            step(model.module, ddp(batches[0]))
        step(model.module, ddp(batches[1]))
        ddp.finish_grad_sync()
        params = fp64_params(model.module)
        for x in batches:
            model.losses(
                x.double(),
                lambda y, params=params: plain_forward(model.module, params, y),
                lambda y, params=params: y @ params[name].t(),
            ).backward()
        assert error(getattr(model.module, name).main_grad, params[name].grad) <= ROUNDING
        ddp.zero_grad_buffer()


@EVERY_WEIGHT
@DELAYED_OR_NOT
@pytest.mark.parametrize("provider", [ForeignProvider, LazyForeignProvider])
def test_06_what_is_returned_is_no_view_of_main_grad(
    kind: str, name: str, provider: type[ForeignProvider], delay: bool
) -> None:
    """A program that sums the returned gradients as if they were real adds zeros."""
    module = make(kind, delay=delay)
    kept = provider(module)
    getattr(module, name).zero_out_wgrad = True
    loss_of(module(batch())).backward()
    module.backward_dw()
    assert error(getattr(module, name).main_grad, expected_of(module, name, [batch()])) <= ROUNDING
    assert kept.placeholders and all(not grad.any() for _, grad in kept.placeholders)


@EVERY_WEIGHT
@DELAYED_OR_NOT
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda weight: torch.zeros(weight.shape[::-1]).t(), r"stride \(1, \d+\)"),
        (lambda weight: torch.zeros(2 * weight.shape[0], weight.shape[1])[::2], r"stride \(\d+, 1\)"),
        (lambda weight: torch.zeros(weight.numel()), r"got shape \(\d+,\)"),
        (lambda weight: torch.zeros_like(weight, dtype=torch.float16), r"torch\.float16"),
    ],
    ids=["transposed", "strided", "flat", "half"],
)
def test_14_a_main_grad_that_does_not_fit_is_refused(
    kind: str, name: str, bad: Callable[[Tensor], Tensor], message: str, delay: bool
) -> None:
    module = make(kind, delay=delay)
    kept = ForeignProvider(module)
    getattr(module, name).main_grad = bad(getattr(module, name).detach())
    loss = loss_of(module(batch()))
    with pytest.raises(RuntimeError, match=rf"(?s){kind}\(.*main_grad must be contiguous.*{message}"):
        step(module, loss)
    assert kept is not None


@pytest.mark.parametrize("kind", FACTORIES)
@DELAYED_OR_NOT
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.sampled(4)
def test_18_small_bf16_gradients_survive_between_large_ones(kind: str, fuse: bool, delay: bool) -> None:
    """Gradients of one microbatch, 256, 1 and -256 times: exactly one of them is left in fp32, none in bf16."""
    module = make(kind, fuse=fuse, delay=delay, params_dtype=torch.bfloat16)
    ddp = wrap(module)

    def run(*factors: float) -> dict[str, Tensor]:
        with ddp.no_sync():
            for factor in factors:
                output = ddp(batch().bfloat16())
                output.backward(torch.full_like(output, factor))
                module.backward_dw()
        ddp.finish_grad_sync()
        result = {name: getattr(module, name).main_grad.clone() for name in module.weight_names}
        ddp.zero_grad_buffer()
        return result

    once, sandwiched = run(1.0), run(256.0, 1.0, -256.0)
    for name, gradient in once.items():
        assert gradient.dtype is torch.float32
        assert error(sandwiched[name], gradient.double()) <= 2.0**-13, name  # fp32 rounds at 256 times its size
        assert gradient.any()


@EVERY_WEIGHT
@DELAYED_OR_NOT
@pytest.mark.parametrize("provider", ["ours", "foreign"])
def test_22_gradients_that_are_handed_to_the_caller_leave_main_grad_alone(
    kind: str, name: str, delay: bool, provider: str
) -> None:
    module = make(kind, delay=delay)
    kept = wrap(module) if provider == "ours" else ForeignProvider(module)
    weight = getattr(module, name)
    step(module, loss_of(module(batch())))
    before = {each: p.main_grad.clone() for each, p in module.named_parameters()}

    x, params = batch(2).requires_grad_(), fp64_params(module)
    exact_x = batch(2).double().requires_grad_()
    ours = torch.autograd.grad(loss_of(module(x)), (x, weight))
    theirs = torch.autograd.grad(loss_of(plain_forward(module, params, exact_x)), (exact_x, params[name]))
    assert all(error(one, other) <= ROUNDING for one, other in zip(ours, theirs, strict=True))
    (ours,) = torch.autograd.grad(loss_of(module(x)), x, create_graph=True)
    (theirs,) = torch.autograd.grad(loss_of(plain_forward(module, params, exact_x)), exact_x, create_graph=True)
    second = torch.autograd.grad(ours.square().sum(), (x, weight))
    exact_second = torch.autograd.grad(theirs.square().sum(), (exact_x, params[name]))
    assert all(error(one, other) <= 2.0**-17 for one, other in zip(second, exact_second, strict=True))

    assert kept is not None and not module.need_backward_dw()
    for each, parameter in module.named_parameters():
        assert torch.equal(parameter.main_grad, before[each]), each
        assert parameter.grad_added_to_main_grad is False
        if provider == "foreign":
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, before[each]), each


@pytest.mark.parametrize("kind", FACTORIES)
@DELAYED_OR_NOT
def test_inputs_that_do_not_fit_are_refused_by_name(kind: str, delay: bool) -> None:
    module = make(kind, delay=delay, name="layers.3")
    ddp = wrap(module)
    for bad in (torch.randn(3, FEATURES - 1), torch.randn(FEATURES, 3), torch.randn(())):
        with pytest.raises((ValueError, RuntimeError), match=r"layers.3 takes 8 features|normalized_shape=\[8\]"):
            ddp(bad)
    if kind == "Linear":
        with pytest.raises(ValueError, match=r"layers.3: the input is torch.bfloat16 and the weight torch.float32"):
            ddp(batch().bfloat16())


def of_ranks(layer: Linear, x: Tensor) -> Tensor:
    """A column-parallel product."""
    ranks = ranks_of(dist.group.WORLD)  # type: ignore[arg-type]
    y: Tensor = multiply_over_ranks(layer, "column", ranks, x, (layer.weight,), None, None)
    return y


def quantised(layer: Any, x: Tensor, *splits: Any) -> Tensor:
    with autocast():
        y: Tensor = layer(x, *splits)
    return y


SPLIT_BACKWARDS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor], str]] = {
    "linear": (lambda: Linear(8, 8), lambda layer, x: layer(x), "_FusedLinear"),
    "quantised": (lambda: Linear(8, 8), quantised, "_QuantizedLinear"),
    "over ranks": (lambda: Linear(8, 8), of_ranks, "_Columns"),
    "head": (lambda: LinearCrossEntropy(8, 8), lambda head, x: head(x, torch.arange(4)), "_Recomputed"),
    "quantised experts": (
        lambda: GroupedLinear(2, 8, 8, single_grouped_weight=True),
        lambda experts, x: quantised(experts, x, [1, 3]),
        "_FusedGroupedLinear",
    ),
}


@pytest.mark.parametrize("kind", SPLIT_BACKWARDS)
def test_19_a_backward_that_is_split_for_inputs_and_weights_is_refused(kind: str) -> None:
    """As torch.distributed.pipelining's own stage does: a prehook, the inputs alone, then the weights alone."""
    make, run, name = SPLIT_BACKWARDS[kind]

    def on_a_rank() -> None:
        module = make().bfloat16()
        module.fuse_wgrad_accumulation = True
        kept = wrap(module)
        x = torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True)
        output = run(module, x).sum()
        node: Any = output.grad_fn
        while node.name() != f"{name}Backward":
            node = node.next_functions[0][0]
        node.register_prehook(lambda grads: None)
        torch.autograd.grad(output, x, retain_graph=True)
        with pytest.raises(RuntimeError, match="this backward was split into one for inputs and one for weights"):
            torch.autograd.grad(output, module.weight)
        assert not any(record.num_fused_writes for record in kept.records)

    simulate(on_a_rank, 1)


def test_a_split_backward_of_a_layer_that_is_not_fused_returns_its_gradients() -> None:
    """It has no main_grad that would be bypassed, whether or not it delays."""
    layer = Linear(8, 8, bias=False, delay_wgrad_compute=True)
    x = torch.ones(4, 8, requires_grad=True)
    output = layer(x).sum()
    node: Any = output.grad_fn
    while node.name() != "_FusedLinearBackward":
        node = node.next_functions[0][0]
    node.register_prehook(lambda grads: None)
    (dx,) = torch.autograd.grad(output, x, retain_graph=True)
    (dw,) = torch.autograd.grad(output, layer.weight)
    torch.testing.assert_close(dx, layer.weight.detach().sum(0).expand(4, 8))
    assert torch.equal(dw, torch.full((8, 8), 4.0))
    assert not layer.need_backward_dw() and layer.weight.grad is None


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_that_a_program_asks_for_one_after_the_other_are_no_split_backward(hooked: bool) -> None:
    """A prehook alone makes none of it: under ``create_graph`` the program means to go on from the gradients."""
    layer = Linear(8, 8, bias=False, fuse_wgrad_accumulation=True)
    kept, x = wrap(layer), torch.ones(4, 8, requires_grad=True)
    output = layer(x).sum()
    node: Any = output.grad_fn.next_functions[0][0]
    if hooked:
        node.register_prehook(lambda grads: None)
    (dx,) = torch.autograd.grad(output, x, retain_graph=True)
    (dw,) = torch.autograd.grad(output, layer.weight, create_graph=hooked)
    torch.testing.assert_close(dx, layer.weight.detach().sum(0).expand(4, 8))
    assert dw.eq(4.0).all() and not any(record.num_fused_writes for record in kept.records)
