"""Batches that are cut, copied and widened: nested in any way, with tensors that belong to no row."""

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

from maingrad.launch.verification.batches import count_rows, cut, own_copy, part_of_tokens, to_double
from maingrad.launch.verification.comparison import Allowed, Piece, allowed_between
from maingrad.launch.verification.findings import Cause, Finding, Verification, WayResult
from maingrad.launch.verification.program import Program
from maingrad.te_integration import convert_linears

ROWS = torch.arange(12.0).view(4, 3)


def test_rows_are_those_of_the_first_tensor_with_dims() -> None:
    assert count_rows({"scale": torch.tensor(2.0), "x": [ROWS, torch.zeros(7)]}) == 4
    for nothing in ((), {"scale": torch.tensor(1.0)}, ["a", "b"]):
        with pytest.raises(ValueError, match=f"the batch, a {type(nothing).__name__}, has no tensor with rows"):
            count_rows(nothing)


def test_rows_are_cut_and_the_rest_stays() -> None:
    scale, other, pair = torch.tensor(2.0), torch.zeros(5, 4), (1, 2, 3, 4)
    batch = {"x": ROWS, "y": [ROWS[:, 0], scale], "names": list("abcd"), "few": ["a"], "other": other, "pair": pair}
    found = cut(batch, 4, 1, 3)
    assert torch.equal(found["x"], ROWS[1:3]) and torch.equal(found["y"][0], ROWS[1:3, 0])
    assert found["y"][1] is scale and found["other"] is other
    assert (found["names"], found["few"], found["pair"]) == (["b", "c"], ["a"], pair)
    tensors = [ROWS + number for number in range(4)]
    assert [each.shape for each in cut(tensors, 4, 0, 1)] == [(1, 3)] * 4, "a list of tensors is no list of rows"


def test_tokens_are_cut_where_there_are_as_many() -> None:
    tokens, mask, lengths, other = torch.arange(8).view(2, 4), torch.ones(2, 4, 3), torch.tensor([4, 3]), ROWS
    found = part_of_tokens([lengths, tokens, {"mask": mask, "other": other}, "name"], 1, 2)
    assert torch.equal(found[1], tokens[:, 2:]) and found[2]["mask"].shape == (2, 2, 3)
    assert found[0] is lengths and found[2]["other"] is other and found[3] == "name"
    with pytest.raises(ValueError, match="rows of 4 tokens cannot be divided over 3 context-parallel ranks"):
        part_of_tokens(tokens, 0, 3)
    with pytest.raises(ValueError, match="rows of 0 tokens"):
        part_of_tokens(lengths, 0, 2)


def test_a_copy_has_memory_of_its_own_and_no_graph() -> None:
    leaf = torch.ones(2, requires_grad=True)
    inner = ["a"]
    batch: Any = UserDict({"x": leaf * 2, "leaf": leaf, "ids": torch.tensor([1]), "inner": inner})
    found = own_copy(batch)
    assert type(found) is dict and found["inner"] == inner and found["inner"] is not inner
    assert found["x"].grad_fn is None and found["x"].requires_grad and found["leaf"].requires_grad
    assert not found["ids"].requires_grad
    found["ids"][0] = 5
    assert batch["ids"].item() == 1 and found["leaf"].data_ptr() != leaf.data_ptr()


def test_floating_point_alone_becomes_fp64() -> None:
    found = to_double((torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int32), 3, "a"))
    assert [getattr(each, "dtype", each) for each in found] == [torch.float64, torch.int32, 3, "a"]


# ---- Errors of gradients. ----


def test_ranks_that_are_wrong_are_named_unless_there_is_one() -> None:
    wanted = {"w": torch.ones(4), "v": torch.full((2,), 100.0)}
    wrong = [Piece("w", 0, torch.ones(4) * 2), Piece("v", 0, torch.full((2,), 100.0))]
    right = [Piece("w", 0, torch.ones(4)), wrong[1]]
    allowed = allowed_between(wanted, None)
    (worst, other) = allowed.differences([right, wrong, right, wrong], wanted)
    assert (worst.name, worst.ranks, worst.is_off, other.ranks, other.is_off) == ("w", (1, 3), True, (), False)
    assert worst.error == pytest.approx(1.0), "relative to what should be"
    (worst, _) = allowed.differences([wrong], wanted)
    assert worst.ranks == () and worst.is_off
    (worst, _) = allowed.differences([wrong, right], wanted)
    assert worst.error == pytest.approx(1.0) and worst.ranks == (0,), "the worst of two ranks, whichever comes last"
    limits = Allowed({"w": 3.0, "v": 3.0}, {"w": 10.0, "v": 0.1})
    half = [Piece("w", 0, torch.full((4,), 3.0)), Piece("v", 0, torch.full((2,), 101.0))]
    (one, other) = limits.differences([half, right], wanted)
    assert [(one.name, one.is_off, one.ranks), (other.name, other.is_off, other.ranks)] == [
        ("v", False, ()),  # off by 1.4, which is 14 times its unit
        ("w", True, (0,)),  # off by 4, which is 0.4 of its unit
    ], "the limit is no multiple of the unit"
    places = Piece("w", 1, torch.tensor([5.0, 7.0]), torch.tensor([1, 3]))
    assert places.of(torch.arange(4.0)).tolist() == [1.0, 3.0]
    assert Piece("w", 1, torch.tensor([5.0, 7.0])).of(torch.arange(4.0).view(2, 2)).tolist() == [1.0, 2.0]


def test_what_is_allowed_grows_with_the_precision() -> None:
    """Four times the rounding of the dtype, 1e-4 at least, of the tensor's norm and a tenth of the mean."""
    grads = {"w": torch.full((4,), 3.0), "v": torch.full((4,), 4.0)}
    for eps, rounding in ((0.0, 1e-4), (2**-10, 2**-8)):
        allowed = allowed_between(grads, None, eps)
        mean = (6**2 + 8**2) ** 0.5 * 0.5**0.5
        assert allowed.by_name == pytest.approx({"w": rounding * (6 + 0.1 * mean), "v": rounding * (8 + 0.1 * mean)})
        assert allowed.unit == {"w": 6.0, "v": 8.0}
    half = {name: grad.bfloat16() for name, grad in grads.items()}
    assert allowed_between(half, None).by_name["w"] == pytest.approx(2**-5 * (6 + 0.1 * mean))
    near = {name: grad.double() * (1 + 1e-5) for name, grad in grads.items()}
    measured = allowed_between(grads, near).by_name["w"] - allowed_between(grads, None).by_name["w"]
    assert measured == pytest.approx(20 * 6e-5, rel=1e-2)
    nothing = allowed_between({"w": torch.zeros(4), "v": grads["v"]}, None)
    assert nothing.unit["w"] == pytest.approx(1e-3 * 8 * 0.5**0.5)


# ---- The program. ----


def test_forms_of_a_loss() -> None:
    class Output:
        loss = torch.tensor([[3.0]])

    def program(**given: Any) -> Program:
        return Program(lambda: nn.Linear(1, 1), **{"loss": None, "step": None, "seed": 0, **given})

    two = torch.tensor(2.0)
    assert program().loss_of(lambda x, y: x + y, (two, two)) == 4
    assert program().loss_of(lambda x, y: x - y, [two, two]) == 0
    assert program().loss_of(lambda a: {"loss": a}, {"a": two}) == 2
    assert program().loss_of(lambda x: Output(), two).shape == ()
    assert program(loss=lambda output, batch: output * batch).loss_of(lambda x: x + 1, two) == 6
    assert program(step=lambda model, batch: model(batch) + 5).loss_of(lambda x: x, two) == 7
    with pytest.raises(TypeError, match="the model returned a dict and no loss"):
        program().loss_of(lambda x: {"logits": x}, two)
    with pytest.raises(TypeError, match="step returned a float and no loss"):
        program(step=lambda model, batch: 1.0).loss_of(None, two)
    with pytest.raises(ValueError, match=r"loss returned a tensor of shape \(2,\)"):
        program(loss=lambda output, batch: torch.ones(2)).loss_of(lambda x: x, two)
    with pytest.raises(ValueError, match="pass one of them"):
        program(loss=print, step=print)
    with pytest.raises(TypeError, match="got int"):
        Program(3, None, None, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the function that makes the model returned a int"):
        Program(lambda: 3, None, None, 0).make()  # type: ignore[arg-type, return-value]


def test_copies_have_equal_weights_marks_and_hooks_and_no_gradient() -> None:
    model, seen = nn.Linear(2, 1), list[str]()
    model.weight.allreduce, model.weight.other = False, object()  # type: ignore[attr-defined]
    model.weight.register_hook(lambda grad: seen.append("hook"))
    model.weight.register_post_accumulate_grad_hook(lambda param: seen.append("post"))
    model.weight.grad = torch.ones(1, 2)
    copied = Program(model, None, None, 0).make()
    assert torch.equal(copied.weight, model.weight) and copied.weight is not model.weight
    assert copied.weight.allreduce is False and not hasattr(copied.weight, "other") and copied.weight.grad is None
    copied(torch.ones(1, 2)).sum().backward()
    assert seen == ["hook", "post"] and model.weight.grad is not None
    made = Program(lambda: nn.Linear(2, 1), None, None, seed=3)
    first = made.make()
    torch.manual_seed(9)
    with torch.no_grad():
        first.weight.zero_()
    second, third = made.make(), made.make()
    assert torch.equal(second.weight, third.weight) and second.weight.any(), "all copies get the first one's weights"
    assert Program(lambda: model, None, None, 0).make().weight.grad is None, "of a function's model too"


def test_copies_are_plain_and_draw_alike_what_no_state_dict_has() -> None:
    class Noisy(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.noise = torch.rand(3)

    made = Program(Noisy, None, None, seed=3)
    assert torch.equal(made.make().noise, made.make().noise)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    convert_linears(model)
    assert [type(each) for each in Program(model, None, None, 0).make()] == [nn.Linear, nn.Linear]
    assert type(model[0]) is not nn.Linear


# ---- The report. ----


def test_a_report_in_words() -> None:
    finding = Finding(
        cause=Cause.SUM,
        evidence="So.",
        parameters=("w", "v"),
        ways=("ddp", "fsdp"),
        ranks=(0, 2),
        error=0.5,
        module="m",
    )
    note = Finding(cause=Cause.UNUSED, evidence="Why.")
    good = WayResult(way="ddp", ok=True, grad_error=1e-6, norm_error=2e-6, weight_error=3e-6, fused_writes=4)
    fields: dict[str, Any] = {"num_parameters": 2, "num_elements": 1234, "ranks": 2, "num_microbatches": 3, "rows": 12}
    found = Verification(findings=[note, finding], results=[good, WayResult(way="fsdp")], **fields)
    assert not found.ok
    lines = str(found).splitlines()
    assert lines[0].startswith("2 trainable parameters, 1,234 elements; 12 rows on 2 ranks, 3 microbatches each")
    assert [" ".join(line.split()) for line in lines[2:5]] == [
        "way gradients norm weights fused",
        "ddp 1.0e-06 2.0e-06 3.0e-06 4 ok",
        "fsdp inf inf inf 0 DIFFERS",
    ]
    assert "note: unused" in lines and "error: sum in m" in lines and lines[-1] == "1 error"
    assert "  parameter  w and 1 more, off by 5.0e-01 of its norm" in lines
    assert "  shown by   ddp, fsdp" in lines and "  shown by   plain PyTorch" in lines and "  ranks      0, 2" in lines
    accepted = found.accepting(["sum"])
    assert accepted.ok and accepted.raise_if_failed() is accepted and "accepted: sum in m" in str(accepted).splitlines()
    assert str(accepted).endswith("\nverified")
    both = Verification(findings=[note, finding, finding], results=[good], **fields).accepting([])
    assert [each.is_note for each in both.findings] == [False, False, True] and str(both).endswith("\n2 errors")
    nothing = Verification(findings=[], results=[], **fields)
    assert not nothing.ok and str(nothing).endswith("\nnothing could be compared") and "way  " not in str(nothing)
    one = Finding(cause=Cause.SUM, evidence="", parameters=("w",))
    assert one.parameter == "w" and "  parameter  w" in str(one).splitlines() and note.parameter == ""
