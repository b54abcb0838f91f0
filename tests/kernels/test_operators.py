"""Operators of ``torch.ops.maingrad``: compilers are told the shapes of eager code's results, and get its numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_devices import nan_filled_memory

from maingrad import kernels
from maingrad.kernels.grouped import operators
from maingrad.kernels.permutation.operators import permute_rows_op, unpermute_rows_op

GENERATOR = torch.Generator().manual_seed(0)
E, T, N, K = 3, 7, 6, 4
X, DY, SCALE = (torch.randn(*shape, generator=GENERATOR) for shape in ((T, K), (T, N), (T,)))
WEIGHTS, BIASES = torch.randn(E, N, K, generator=GENERATOR), torch.randn(E, N, generator=GENERATOR)
OFFSETS = torch.tensor([0, 2, 2, 6])
IDS = torch.tensor([[3, 0], [1, 2]])
TOKENS, ROWS = torch.randn(2, 5, generator=GENERATOR), torch.randn(4, 5, generator=GENERATOR)
PACKED, APART = [WEIGHTS], list(WEIGHTS)


def wgrad(dtype: torch.dtype, of_result: torch.dtype | None = None) -> Tensor:
    found = torch.full((E, N, K), torch.nan, dtype=of_result or dtype)
    kernels.grouped_wgrad_accumulate(DY.to(dtype), X.to(dtype), found, OFFSETS, overwrite=True)
    return found


CASES: list[tuple[Any, tuple[Any, ...], Callable[[], Tensor]]] = [
    (operators.group_offsets_op, (OFFSETS.diff().int(),), lambda: OFFSETS),
    (
        operators.grouped_linear_op,
        (X, PACKED, OFFSETS, [], None, False),
        lambda: kernels.grouped_linear(X, WEIGHTS, OFFSETS),
    ),
    (
        operators.grouped_linear_op,
        (X, APART, OFFSETS, [BIASES], SCALE, False),
        lambda: kernels.grouped_linear(X, WEIGHTS, OFFSETS, bias=BIASES, bias_scale=SCALE),
    ),
    (
        operators.grouped_linear_op,
        (X, APART, OFFSETS, list(BIASES), None, False),
        lambda: kernels.grouped_linear(X, WEIGHTS, OFFSETS, bias=BIASES),
    ),
    (
        operators.grouped_linear_op,
        (DY, PACKED, OFFSETS, [], None, True),
        lambda: kernels.grouped_dgrad(DY, WEIGHTS, OFFSETS),
    ),
    (operators.grouped_wgrad_op, (DY, X, OFFSETS, torch.float32), lambda: wgrad(torch.float32)),
    (operators.grouped_wgrad_op, (DY.bfloat16(), X.bfloat16(), OFFSETS, torch.bfloat16), lambda: wgrad(torch.bfloat16)),
    (
        operators.grouped_wgrad_op,
        (DY.bfloat16(), X.bfloat16(), OFFSETS, torch.float32),
        lambda: wgrad(torch.bfloat16, torch.float32),
    ),
    (
        operators.grouped_bias_grad_op,
        (DY, OFFSETS, SCALE, torch.float64),
        lambda: kernels.grouped_bias_grad(DY, OFFSETS, scale=SCALE, dtype=torch.float64),
    ),
    (operators.grouped_scale_grad_op, (DY, [BIASES], OFFSETS), lambda: kernels.grouped_scale_grad(DY, BIASES, OFFSETS)),
    (
        operators.grouped_scale_grad_op,
        (DY.bfloat16(), list(BIASES), OFFSETS),
        lambda: kernels.grouped_scale_grad(DY.bfloat16(), BIASES, OFFSETS),
    ),
    (
        operators.grouped_scale_grad_op,
        (DY.double(), [BIASES.double()], OFFSETS),
        lambda: kernels.grouped_scale_grad(DY.double(), BIASES.double(), OFFSETS),
    ),
    (permute_rows_op, (TOKENS, IDS), lambda: kernels.permute_rows(TOKENS, IDS)),
    (unpermute_rows_op, (ROWS, IDS), lambda: kernels.unpermute_rows(ROWS, IDS)),
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.sampled(100)
def test_an_operator_is_its_function_and_its_fake_has_its_shape(case: int) -> None:
    operator, arguments, function = CASES[case]
    with nan_filled_memory():
        found = operator(*arguments)
    assert torch.equal(found, function()) and found.dtype is function().dtype
    mode = FakeTensorMode()
    to_fake = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, arguments)
    with mode:
        fake = operator(*to_fake)
    assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride())


def test_gradients_of_permutations_are_each_other() -> None:
    for operator, source, other in (
        (permute_rows_op, TOKENS, kernels.unpermute_rows),
        (unpermute_rows_op, ROWS, kernels.permute_rows),
    ):
        leaf = source.clone().requires_grad_()
        out = operator(leaf, IDS)
        grad = torch.randn(out.shape, generator=GENERATOR)
        out.backward(grad)
        assert leaf.grad is not None and torch.equal(leaf.grad, other(grad, IDS))
