"""``parameters_split``: slices of a weight are parameters of their own, with other dtypes, sizes and lifetimes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.te_integration import Linear, make_graphed_callables

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
