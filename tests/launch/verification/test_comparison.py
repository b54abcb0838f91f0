"""How large errors may be, and of which parts a gradient is a sum."""

from typing import Any

import pytest
import torch
from torch import nn

from maingrad.launch.verification import experiments
from maingrad.launch.verification.comparison import Difference, Piece, allowed_between, norm_of, parts_in
from maingrad.launch.verification.experiments import about, unequal
from maingrad.launch.verification.findings import Cause
from maingrad.launch.verification.plain import Plain, mean_of


def test_a_sum_of_parts_is_decomposed() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(4, 5) for _ in range(3)]
    found = 0.5 * parts[0] - 2 * parts[2]
    factors, rest = parts_in(found, parts)
    assert factors == pytest.approx([0.5, 0, -2], abs=1e-6)
    assert rest < 1e-6
    _, rest = parts_in(found + torch.randn_like(found), parts)
    assert rest > 0.1


def test_equal_parts_share() -> None:
    part = torch.ones(3)
    factors, rest = parts_in(torch.full((3,), 4.0), [part, part])
    assert factors == pytest.approx([2, 2], rel=1e-3) and rest < 1e-6


def test_rounding_is_allowed_and_no_more() -> None:
    wanted = {"large": torch.full((10,), 1.0), "cancelled": torch.full((10,), 1e-9)}
    exact = {"large": wanted["large"].double() * (1 + 1e-7), "cancelled": torch.full((10,), -2e-9).double()}
    allowed = allowed_between(wanted, exact)
    assert not allowed.between({"large": wanted["large"] * (1 + 1e-5), "cancelled": torch.full((10,), 5e-9)}, wanted)
    (off,) = allowed.between({"large": wanted["large"] * 1.01, "cancelled": wanted["cancelled"]}, wanted)
    assert off.name == "large" and off.error == pytest.approx(0.01, rel=1e-3)


def test_a_run_in_fp64_that_computes_something_else_allows_nothing() -> None:
    wanted = {"weight": torch.ones(10)}
    other = allowed_between(wanted, {"weight": torch.full((10,), 3.0).double()})
    assert other == allowed_between(wanted, None)
    assert other.between({"weight": torch.full((10,), 1.01)}, wanted)


@pytest.mark.parametrize("values", [torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("inf")])])
def test_what_is_not_finite_is_off(values: torch.Tensor) -> None:
    wanted = {"weight": torch.ones(2)}
    (off,) = allowed_between(wanted, None).between({"weight": values}, wanted)
    assert off.error == float("inf")
    assert allowed_between(wanted, None).between({}, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_and_means_in_half_precision_are_not_rounded(dtype: torch.dtype) -> None:
    large = torch.full((4,), 60_000.0 if dtype is torch.float16 else 2.0**120, dtype=dtype)
    assert norm_of(large) == 2 * float(large[0])  # above the largest number of fp16
    small = torch.tensor([1.0, 1.0 + torch.finfo(dtype).eps], dtype=dtype)
    plains = [Plain(0.0, {"w": value.clone()}) for value in small.view(2, 1)]
    assert mean_of(plains)["w"].item() == 1.0 + torch.finfo(dtype).eps / 2
    overflows = [Plain(0.0, {"w": large})] * 2
    assert mean_of(overflows)["w"].tolist() == large.tolist()


def test_imaginary_parts_are_compared_too() -> None:
    wanted = {"weight": torch.tensor([3 + 0j, 4j])}
    assert norm_of(wanted["weight"]) == 5.0
    (off,) = allowed_between(wanted, None).between({"weight": torch.tensor([3 + 0j, 0j])}, wanted)
    assert off.error == pytest.approx(0.8)
    factors, rest = parts_in(wanted["weight"], [torch.tensor([1 + 0j, 0j]), torch.tensor([0j, 1j])])
    assert factors == pytest.approx([3, 4]) and rest < 1e-6


def test_a_finding_has_the_ranks_of_all_that_is_off() -> None:
    off = [Difference("w", 0.2, True, (2, 0)), Difference("v", 0.5, True, (1,))]
    finding = about(off, Cause.HOOK, "Why.")
    assert (finding.parameters, finding.ranks, finding.error) == (("w", "v"), (0, 1, 2), 0.5)
    one, other = {"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.zeros(2), "c": torch.ones(1)}
    assert unequal(one, other) == ["a", "b"] and not unequal(one, {**other, **one})


def test_hooks_that_see_gradients_are_found_and_taken_off() -> None:
    """Of parameters and of modules, before and after."""
    makers: dict[str, Any] = {
        "0.weight": lambda model: model[0].weight.register_hook(print),
        "1.bias": lambda model: model[1].bias.register_post_accumulate_grad_hook(print),
        "0": lambda model: model[0].register_full_backward_hook(print),
        "": lambda model: model.register_full_backward_pre_hook(print),
    }
    for name, make in makers.items():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        make(model)
        assert [found for found, hooks in experiments._grad_hooks(model) if hooks] == [name]
        experiments._remove_grad_hooks(model)
        assert not any(hooks for _, hooks in experiments._grad_hooks(model))


def test_copies_of_parameters_are_tied_and_frozen_as_the_parameters_are() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    before = dict(model.named_parameters())
    experiments._register_copies(model)
    after = dict(model.named_parameters())
    assert model[1].weight is model[0].weight and after.keys() == before.keys()
    for name, param in after.items():
        assert param is not before[name] and torch.equal(param, before[name])
        assert param.data_ptr() != before[name].data_ptr()
        assert param.requires_grad is before[name].requires_grad is (name != "0.bias")


def test_a_part_that_no_rank_holds_is_missing() -> None:
    wanted = {"weight": torch.arange(6.0)}
    allowed = allowed_between(wanted, None)
    halves = [Piece("weight", 0, torch.arange(3.0)), Piece("weight", 3, torch.arange(3.0, 6.0))]
    (whole,) = allowed.differences([halves[:1], halves[1:]], wanted)
    assert whole.error == 0 and not whole.is_off
    (lacking,) = allowed.differences([halves[:1], halves[:1]], wanted)
    assert lacking.error == float("inf") and lacking.is_off
