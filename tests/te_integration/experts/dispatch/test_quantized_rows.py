"""Rows that travel in 8 bits under a recipe."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo import run_ranks
from sharded_on_gpus import nccl
from torch import Tensor

from maingrad.kernels.quantized import Element, Quantized, QuantSpec, ScaleForm, quantize_both
from maingrad.launch import simulate
from maingrad.te_integration import (
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedMLP,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    TokenDispatcher,
    autocast,
)
from maingrad.te_integration.experts.dispatch import quantized_rows
from maingrad.te_integration.experts.dispatch.quantized_rows import row_spec
from maingrad.te_integration.recipes import Operand

DIM, EXPERTS = 160, 4
TOKENS = [9, 0]
"""Of each rank."""


def run(recipe: Any, options: dict[str, Any], routing: str = "any", device: str = "cpu") -> list[Tensor]:
    """The output, gradients of tokens and probabilities, and those of the experts' weights."""
    rank = dist.get_rank()
    group = nccl() if device == "cuda" else None
    torch.manual_seed(rank)
    experts = GroupedMLP(EXPERTS // 2, DIM, 32, bias=False, dtype=torch.bfloat16)
    x = (torch.randn(TOKENS[rank], DIM) * torch.logspace(-3, 3, DIM)).bfloat16().requires_grad_()
    ids = torch.rand(TOKENS[rank], EXPERTS).argsort(1)[:, :2]
    if routing == "low":
        ids = ids % 2
    probs = torch.rand(TOKENS[rank], 2, requires_grad=True)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(rank))
    if device != "cpu":
        experts, ids, weights = experts.to(device), ids.to(device), weights.to(device)
        x, probs = (each.detach().to(device).requires_grad_() for each in (x, probs))
    dispatcher = TokenDispatcher(EXPERTS, group, **options)
    with autocast(recipe=recipe):
        rows, splits, row_probs, dispatched = dispatcher.dispatch(x, ids, probs)
        y = dispatcher.combine(experts(rows, splits, row_probs), dispatched)
    (y * weights).sum().backward()
    return [each.detach().cpu() for each in (y, x.grad, probs.grad, *(param.grad for param in experts.parameters()))]


class WiderGradients(Float8BlockScaling):
    """A program's own: gradients have a format of more range than what the forward multiplies."""

    def spec(self, operand: Operand, *, columns: bool) -> QuantSpec:
        found = super().spec(operand, columns=columns)
        return replace(found, element=Element.E5M2) if operand == "grad" else found


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), MXFP8BlockScaling(), WiderGradients()])
@pytest.mark.parametrize("routing", ["any", "low"])
@pytest.mark.parametrize("options", [{}, {"transport": "capacity", "capacity": 9}])
def test_products_of_rows_have_the_same_bits(options: dict[str, Any], routing: str, recipe: Any) -> None:
    events: list[tuple[int, str]] = []
    wide = simulate(run, 2, recipe, options, routing)
    narrow = simulate(run, 2, recipe, {**options, "quantize_rows": True}, routing, schedule=events)
    sent = [event for rank, event in events if rank == 0 and event.startswith("launch all_to_all_single")]
    # Counts, elements, scales and probabilities; outputs; their gradients; and those of rows and probabilities.
    assert sum("bfloat16" in event for event in sent) == 2
    for expected, found in zip(wide, narrow, strict=True):
        assert all(map(torch.equal, found[:3], expected[:3]))
        for weight_grad, of_wide in zip(found[3:], expected[3:], strict=True):
            error = (weight_grad - of_wide).norm() / of_wide.norm().clamp(min=1e-9)
            assert error < 0.05


def test_ranks_whose_kernels_pad_and_ranks_whose_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs kernels pad copies of several rows; of one row, or none, the reference makes a copy without padding."""

    def padded(rows: Tensor, *arguments: Any) -> tuple[Quantized, None]:
        q, _ = quantize_both(rows, *arguments)
        assert q is not None
        if len(rows) > 1:
            data = F.pad(q.data.view(torch.uint8), (0, 516 - DIM)).view(q.data.dtype)
            q = q._replace(data=data, scale=F.pad(q.scale, (0, 4 - q.scale.shape[1]), value=float("nan")))
        return q, None

    expected = simulate(run, 2, Float8BlockScaling(), {"quantize_rows": True})
    monkeypatch.setattr(quantized_rows, "quantize_both", padded)
    found = simulate(run, 2, Float8BlockScaling(), {"quantize_rows": True})
    for each, same in zip(found, expected, strict=True):
        assert all(map(torch.equal, each, same))


def test_what_would_not_survive_the_way_is_not_quantised_for_it() -> None:
    """Scales of several rows or of any value, and elements that are drawn: the experts would find others."""

    def changed(**changes: Any) -> Any:
        class Changed(Float8BlockScaling):
            def spec(self, operand: Operand, *, columns: bool) -> QuantSpec:
                return replace(super().spec(operand, columns=columns), **changes)

        return Changed()

    assert row_spec(changed(), "input") is not None
    for changes in ({"block": (128, 128)}, {"block": None}, {"scale": ScaleForm.FP32}, {"stochastic": True}):
        assert row_spec(changed(**changes), "input") is None, changes


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), NVFP4BlockScaling()])
def test_under_other_recipes_rows_travel_as_they_are(recipe: Any) -> None:
    torch.manual_seed(0)
    wide, asked = (simulate(run, 2, recipe, options) for options in ({}, {"quantize_rows": True}))
    for expected, found in zip(wide, asked, strict=True):
        assert torch.equal(found[0], expected[0])


@pytest.mark.gpu(2)
@pytest.mark.parametrize("options", [{}, {"transport": "capacity", "capacity": 9}, {"transport": "symmetric"}], ids=str)
def test_products_over_nccl_have_the_same_bits(options: dict[str, Any]) -> None:
    wide, narrow = (
        run_ranks(run, 2, Float8BlockScaling(), {**options, **more}, "any", "cuda")
        for more in ({}, {"quantize_rows": True})
    )
    for expected, found in zip(wide, narrow, strict=True):
        for each, same in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(each, same, rtol=0.0, atol=0.0)
