"""``parameters_split``: slices of a weight are parameters of their own, with other dtypes, sizes and lifetimes."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.te_integration import Float8CurrentScaling, Linear, autocast, make_graphed_callables

ROWS, FEATURES = 16, 32


def attention(**options: Any) -> Linear:
    torch.manual_seed(0)
    return Linear(FEATURES, 48, bias=False, parameters_split=["query", "key", "value"], name="qkv", **options)


def by_hand(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of ``module(x).square().sum()``, a slice at a time."""
    return [2 * (x @ weight.detach().t()).t() @ x for weight in module.parameters()]


@pytest.mark.parametrize("graphed", [False, True])
def test_delayed_gradients_of_slices_have_the_dtypes_of_the_slices(graphed: bool) -> None:
    module = attention(delay_wgrad_compute=True)
    module.key_weight = nn.Parameter(module.key_weight.detach().bfloat16())
    x = torch.randn(ROWS, FEATURES, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run: Any = make_graphed_callables([module], [(x.detach().requires_grad_(),)])[0] if graphed else module
        y = run(x)
    y.square().sum().backward()
    run.backward_dw()
    for weight, expected in zip(module.parameters(), by_hand(module.float(), x.detach()), strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad.float(), expected, rtol=0.05, atol=1.0)


def test_heads_that_are_pruned_under_a_recipe() -> None:
    module = attention()
    x = torch.randn(ROWS, FEATURES)
    for rows in (16, 8):
        module.query_weight = nn.Parameter(module.query_weight.detach()[:rows])
        module.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16), autocast(recipe=Float8CurrentScaling()):
            y = module(x)
        y.float().square().sum().backward()
        for weight, expected in zip(module.parameters(), by_hand(module, x), strict=True):
            assert weight.grad is not None and (weight.grad - expected).norm() < 0.1 * expected.norm()


def test_a_slice_that_is_gone_is_named_once() -> None:
    """The layer's entry goes as a whole: the next backward is not held up by what the freed weight has left."""
    module = attention(delay_wgrad_compute=True)
    x = torch.randn(ROWS, FEATURES)
    module(x).square().sum().backward()
    module.query_weight = nn.Parameter(torch.zeros(16, FEATURES))
    gc.collect()
    with pytest.raises(RuntimeError, match="qkv, query_weight: the weight was freed"):
        module.backward_dw()
    assert not module.need_backward_dw()
    _, *expected = by_hand(module, x)
    module(x).square().sum().backward()
    module.backward_dw()
    for weight, gradient in zip((module.key_weight, module.value_weight), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient)
