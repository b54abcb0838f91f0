"""Rows of optimizers: which are refused, how steps and options are theirs, and what the launches are told of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton_devices import LAUNCHER_DEVICES

from maingrad.kernels.optimizer.adamw import AdamUpdate
from maingrad.kernels.optimizer.flat_update import FlatUpdate
from maingrad.kernels.optimizer.lion import LionUpdate
from maingrad.kernels.optimizer.reference import (
    AdamOptions,
    LionOptions,
    SGDOptions,
    UpdateRow,
    power,
    update_reference,
)
from maingrad.kernels.optimizer.sgd import SGDUpdate

OPTIONS = AdamOptions(1e-3, 0.9, 0.999, 1e-8, 0.1)


def row_of(**changed: Any) -> UpdateRow:
    given = {name: torch.zeros(600) for name in ("grad", "exp_avg", "exp_avg_sq", "master")}
    return UpdateRow(**{**given, "step": torch.zeros(()), **changed})


def test_rows_that_do_not_fit_are_refused() -> None:
    row = row_of(param=torch.zeros(600).bfloat16())
    codes = {name: torch.zeros(600, dtype=torch.uint8) for name in ("exp_avg", "exp_avg_sq")}
    scales = {f"{name}_scale": torch.zeros(3) for name in codes}
    halves = {"master": None, "param": torch.zeros(600).bfloat16(), "remainder": torch.zeros(600, dtype=torch.int16)}
    bits = row_of(**codes, **scales, **halves, first=512)
    wrong: list[tuple[UpdateRow, type[Exception], str]] = [
        (row._replace(exp_avg=row.exp_avg[1:]), ValueError, "exp_avg of row 0"),
        (row._replace(grad=torch.randn(1200)[::2]), ValueError, "grad of row 0"),
        (row._replace(grad=row.grad.double()), TypeError, "grad of row 0"),
        (row._replace(exp_avg_sq=row.exp_avg_sq.half()), TypeError, "exp_avg_sq of row 0"),
        (row._replace(param=row.param.float()), TypeError, "param of row 0"),
        (row._replace(step=torch.zeros(1)), ValueError, "step of row 0"),
        (row._replace(step=torch.zeros((), device="meta")), ValueError, "step of row 0"),
        (bits._replace(exp_avg_sq_scale=bits.exp_avg_sq_scale[:2]), ValueError, "exp_avg_sq_scale of row 0"),
        (row._replace(master=None), ValueError, "a master, or with a param and its remainder"),
        (row._replace(remainder=bits.remainder), ValueError, "a master and a remainder"),
        (bits._replace(param=bits.param.half()), TypeError, "param of row 0"),
        (bits._replace(exp_avg_scale=None), ValueError, "exp_avg_scale of row 0"),
        (bits._replace(exp_avg_scale=bits.exp_avg_scale[:2]), ValueError, "exp_avg_scale of row 0"),
        (bits._replace(first=300), ValueError, "a multiple of 256"),
        (bits._replace(first=384), ValueError, "a multiple of 256"),
        (row._replace(exp_avg_sq=None), ValueError, "needs exp_avg_sq of row 0"),
        (row._replace(exp_avg_scale=bits.exp_avg_scale), ValueError, "for 8-bit moments, and only for those"),
        (bits._replace(exp_avg_sq_scale=bits.exp_avg_sq_scale.double()), TypeError, "exp_avg_sq_scale of row 0"),
        (row._replace(master=row.master.double()), TypeError, "grad of row 0 in float64"),
        (row._replace(master=row.master.double(), grad=row.grad.double()), TypeError, "exp_avg of row 0 in float64"),
        (row._replace(master=row.master.half()), TypeError, "master of row 0"),
        (bits._replace(param=None), ValueError, "a master, or with a param and its remainder"),
        (row._replace(step=torch.zeros((), dtype=torch.float64)), ValueError, "step of row 0"),
        (bits._replace(remainder=bits.remainder.int()), TypeError, "remainder of row 0"),
        (row._replace(param=row.param.to("meta")), ValueError, "param of row 0"),
    ]
    for each, error, text in wrong:
        with pytest.raises(error, match=text):
            AdamUpdate([each])
    with pytest.raises(ValueError, match="SGDUpdate has no exp_avg_sq, and row 0 has one"):
        SGDUpdate([row])
    with pytest.raises(ValueError, match="LionUpdate has no exp_avg_sq, and row 0 has one"):
        LionUpdate([row])
    with pytest.raises(ValueError, match="LionUpdate needs exp_avg of row 0"):
        LionUpdate([row._replace(exp_avg=None, exp_avg_sq=None)])
    with pytest.raises(ValueError, match="options for 2 groups, got 1"):
        AdamUpdate([row._replace(group=1)])([OPTIONS])
    with pytest.raises(ValueError, match="options for 3 groups, got 2"):
        AdamUpdate([row, row._replace(group=2), row._replace(group=1)])([OPTIONS, OPTIONS])
    for number in (torch.ones(1), torch.ones((), dtype=torch.float64), torch.ones((), device="meta")):
        with pytest.raises(ValueError, match="needs divisor as a 0-dim fp32 tensor"):
            AdamUpdate([row])([OPTIONS], divisor=number)
        with pytest.raises(ValueError, match="needs found_inf as a 0-dim fp32 tensor"):
            AdamUpdate([row])([OPTIONS], found_inf=number)
    with pytest.raises(ValueError, match="exp_avg of row 1"):
        AdamUpdate([row, row._replace(exp_avg=None)])
    AdamUpdate([])([])
    update = AdamUpdate([row, bits])
    memory = torch.zeros(1204)
    assert update.takes([memory[4:604], memory[604:]]) and not update.takes([memory[1:601], memory[604:]])
    assert not update.takes([memory[:600]]) and not update.takes([memory[:600], memory[:596]])


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (AdamUpdate, OPTIONS),
        (LionUpdate, LionOptions(0.1, 0.9, 0.99, 0.1)),
        (SGDUpdate, SGDOptions(0.1, 0.9, 0.0, False, 0.1)),
        (SGDUpdate, SGDOptions(0.1, 0.0, 0.0, False, 0.1)),
    ],
)
def test_to_maximize_is_to_minimize_the_opposite(make: type[Any], options: Any) -> None:
    """Of each optimizer; SGD without momentum has rows without a moment."""
    generator = torch.Generator().manual_seed(0)
    start, moment = torch.randn(2, 600, generator=generator)
    stepped = []
    for maximize in (False, True):
        own = None if getattr(options, "momentum", 1.0) == 0.0 else moment.clone()
        second = moment.square() if make is AdamUpdate else None
        row = row_of(exp_avg=own, exp_avg_sq=second, master=start.clone())
        update: FlatUpdate = make([row], maximize=maximize)
        for number in range(2):
            drawn = torch.randn(600, generator=torch.Generator().manual_seed(number))
            row.grad.copy_(-drawn if maximize else drawn)
            update([options])
        stepped.append(row.master)
    assert torch.equal(*stepped) and not torch.equal(stepped[0], start)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dampening", [0.0, 0.25])
def test_steps_of_torchs_sgd_on_a_cpu(dampening: float, nesterov: bool) -> None:
    """The first step of a momentum buffer is not dampened."""
    if nesterov and dampening:
        pytest.skip("torch refuses Nesterov's with dampening")
    options = SGDOptions(0.1, 0.9, dampening, nesterov, 0.1)
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(100, generator=generator))
    theirs = torch.optim.SGD([param], **options._asdict())
    row = UpdateRow(torch.empty(100), torch.zeros(100), None, torch.zeros(()), master=param.detach().clone())
    ours = SGDUpdate([row])
    for _ in range(3):
        row.grad.normal_(generator=generator)
        param.grad = row.grad.clone()
        theirs.step()
        ours([options])
        torch.testing.assert_close(row.master, param.detach())
    torch.testing.assert_close(row.exp_avg, theirs.state[param]["momentum_buffer"])


def test_powers_on_a_cpu_are_rounded_once() -> None:
    """fp32's own powers are an ulp off here and there, which bias corrections of early steps magnify."""
    steps = torch.arange(1.0, 2001.0)
    for base in torch.tensor([0.9, 0.95, 0.999]):
        bases, out = base.expand(2000), torch.zeros(2000)
        expected = torch.tensor([base.item() ** int(step) for step in steps], dtype=torch.float64).float()
        assert torch.equal(power(bases, steps), expected) and power(bases, steps, out) is out
        assert torch.equal(out, expected) and power(base.double(), steps[:1]).dtype is torch.float64


def test_rows_of_one_step_may_have_views_of_it() -> None:
    """As of one tensor of all steps."""
    steps = torch.tensor([3.0, 8.0])
    rows = [row_of(step=steps[index]) for index in (0, 1, 0)]
    AdamUpdate(rows)([OPTIONS])
    assert steps.tolist() == [4.0, 9.0]


@pytest.mark.parametrize("name", ["grad", "exp_avg", "exp_avg_sq", "master", "param", "remainder"])
def test_kernels_are_told_of_one_tensor_that_begins_between_16_bytes(name: str) -> None:
    """Whatever it is: loads of 16 bytes would fail there."""
    triton_update = pytest.importorskip("maingrad.kernels.optimizer.triton_update", reason="the launches are Triton's")
    halves: dict[str, Any] = {"param": torch.zeros(600).bfloat16()}
    if name == "remainder":
        halves.update(master=None, remainder=torch.zeros(600, dtype=torch.int16))
    row = row_of(**halves)
    memory = torch.zeros(616, dtype=getattr(row, name).dtype)
    for off in (0, 1):
        begun = memory[off : off + 600]
        [(*_, aligned)] = triton_update._chunks_by_form([row._replace(**{name: begun})])
        assert aligned is (off == 0)


def test_captured_calls_keep_their_options_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay writes a captured call's numbers again: neither later calls nor other captured ones may share them."""
    triton_update = pytest.importorskip("maingrad.kernels.optimizer.triton_update", reason="the launches are Triton's")
    update, capturing = triton_update.TritonUpdate([row_of()], "adamw", False), [False]
    update._device = SimpleNamespace(type="cuda")  # a GPU in words: numbers stay where they are
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    found = []
    for capturing[0], lr in ((False, 0.5), (True, 0.25), (True, 0.125), (False, 0.5), (False, 2.0), (True, 2.0)):
        found.append(update._upload([OPTIONS._replace(lr=lr)]))
        assert found[-1].tolist() == torch.tensor([[lr, *OPTIONS[1:]]]).tolist()
    assert found[0] is found[3] is found[4]
    assert [each[0, 0].item() for each in found] == [2.0, 0.25, 0.125, 2.0, 2.0, 2.0]
    assert len({each.data_ptr() for each in found}) == 4


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_a_group_without_rows_between_others_keeps_its_place(device: str) -> None:
    triton_update = pytest.importorskip("maingrad.kernels.optimizer.triton_update", reason="the launches are Triton's")
    options = [OPTIONS, OPTIONS._replace(lr=7.0), OPTIONS._replace(lr=0.5)]
    masters = []
    for launches in (True, False):
        given: Any = {name: torch.zeros(300, device=device) for name in ("exp_avg", "exp_avg_sq", "master")}
        step = torch.zeros((), device=device)
        row = row_of(grad=torch.ones(300, device=device), step=step, group=2, **given)
        other = row._replace(step=step.clone(), group=0, **{name: each.clone() for name, each in given.items()})
        if launches:
            triton_update.TritonUpdate([row, other], "adamw", False)(options, None, None)
        else:
            update_reference([row, other], options)
        masters.append(torch.cat([row.master, other.master]))
    assert torch.equal(*masters) and masters[0][0] < -0.4 and masters[0][-1] > -0.01
