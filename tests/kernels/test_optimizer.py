"""AdamW on flat shards: the Triton kernel against the reference, and both against torch's optimizers and fp64."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_devices import LAUNCHER_DEVICES

from maingrad.kernels.optimizer import flat_update
from maingrad.kernels.optimizer.adamw import AdamUpdate
from maingrad.kernels.optimizer.eight_bits import dequantize_moment, quantize_moment
from maingrad.kernels.optimizer.reference import (
    AdamOptions,
    LionOptions,
    Rule,
    SGDOptions,
    UpdateRow,
    fma,
    join_master,
    split_master,
    update_reference,
)
from maingrad.kernels.optimizer.sgd import SGDUpdate

pytest.importorskip("triton", reason="the launches are Triton's")
from maingrad.kernels.optimizer.triton_update import TritonUpdate

OPTIONS = [AdamOptions(1e-3, 0.9, 0.999, 1e-8, 0.1), AdamOptions(3e-2, 0.8, 0.95, 1e-6, 0.0)]
LENGTHS = [700, 0, 2600, 1, 2048]
FORMS = [  # dtypes of gradients and moments, and the form of the parameter
    (torch.float32, torch.float32, "none"),
    (torch.float32, torch.float32, "bf16"),
    (torch.bfloat16, torch.float32, "fp16"),
    (torch.float16, torch.float32, "remainder"),
    (torch.float32, torch.bfloat16, "remainder"),
    (torch.bfloat16, torch.bfloat16, "bf16"),
    (torch.float32, torch.uint8, "remainder"),
    (torch.bfloat16, torch.uint8, "none"),
]


def rows_of(
    grad: torch.dtype, moment: torch.dtype, form: str, device: str = "cpu", lengths: Sequence[int] = LENGTHS
) -> list[UpdateRow]:
    """Rows of two groups and two steps; of every other one no address is a multiple of 16."""
    generator = torch.Generator().manual_seed(0)
    count = sum(lengths)
    drawn = [torch.randn(count, generator=generator) for _ in range(4)]
    master, grads, exp_avg, exp_avg_sq = drawn[0], 0.1 * drawn[1], 0.1 * drawn[2], 0.01 * drawn[3].square()
    for each in (grads, exp_avg, exp_avg_sq):  # an embedding's rows that no token has chosen
        each[::7] = 0.0
    for each in (master, exp_avg):
        each[::14], each[7::14] = -0.0, torch.where(each[7::14] > 0, each[7::14], 0.0)
    steps = [torch.tensor(3.0, device=device), torch.tensor(0.0, device=device)]
    rows = []
    flats = (master, grads, exp_avg, exp_avg_sq)
    for index, parts in enumerate(zip(*(each.split(lengths) for each in flats), strict=True)):
        values = dict(zip(("master", "grad", "exp_avg", "exp_avg_sq"), parts, strict=True))
        values["grad"] = values["grad"].to(grad)
        for name in ("exp_avg", "exp_avg_sq"):
            if moment is torch.uint8:
                quantized = quantize_moment(values[name], signed=name == "exp_avg")
                values[name], values[f"{name}_scale"] = quantized
            else:
                values[name] = values[name].to(moment)
        if form == "remainder":
            values["param"], values["remainder"] = split_master(values.pop("master"))
        elif form != "none":
            values["param"] = torch.zeros_like(parts[0], dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[form])
        moved = {name: value.clone().to(device) for name, value in values.items()}
        if index % 2:
            moved = {name: torch.cat((value[:1], value))[1:] for name, value in moved.items()}
        full = {"master": None, **moved, "first": 512 * index + (index % 2 << 33), "key": 77 + index}
        rows.append(UpdateRow(step=steps[index % 2], group=index // 2 % 2, **full))
    return rows


def copies(rows: Sequence[UpdateRow], device: str | None = None) -> list[UpdateRow]:
    copied: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copied:  # rows share steps
            copied[id(value)] = value.clone().to(device or value.device)
        return copied[id(value)]

    return [UpdateRow(*map(copy, row)) for row in rows]


def launched(rows: Sequence[UpdateRow], rule: Rule = "adamw", maximize: bool = False) -> Callable[..., None]:
    update = TritonUpdate(rows, rule, maximize)
    return lambda options, divisor=None, found_inf=None: update(options, divisor, found_inf)


def assert_same(rows: Sequence[UpdateRow], expected: Sequence[UpdateRow]) -> None:
    for index, (row, other) in enumerate(zip(rows, expected, strict=True)):
        for name, value in row._asdict().items():
            if isinstance(value, Tensor):
                theirs = getattr(other, name)
                mine, wanted = (each.cpu().reshape(-1).view(torch.uint8) for each in (value, theirs))
                assert torch.equal(mine, wanted), f"{name} of row {index}"


def differ(rows: Sequence[UpdateRow], others: Sequence[UpdateRow]) -> bool:
    return any(
        not torch.equal(value, other)
        for row, theirs in zip(rows, others, strict=True)
        for value, other in zip(row, theirs, strict=True)
        if isinstance(value, Tensor)
    )


# ---- The kernel has the reference's bits. ----


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_without_eps_what_has_no_gradient_becomes_nan_as_in_torch(device: str) -> None:
    rows = rows_of(torch.float32, torch.float32, "none", device, lengths=[300])
    expected = copies(rows)
    launched(rows)([AdamOptions(1e-3, 0.9, 0.999, 0.0, 0.1)])
    update_reference(expected, [AdamOptions(1e-3, 0.9, 0.999, 0.0, 0.1)])
    master, theirs = rows[0].master, expected[0].master
    assert master is not None and theirs is not None
    assert master[::7].isnan().all() and master.isnan().sum() == len(master[::7])
    assert torch.equal(master.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.sampled(8)
def test_kernel_is_the_reference_bit_for_bit(device: str, form: tuple[torch.dtype, torch.dtype, str]) -> None:
    index = FORMS.index(form)
    signs: dict[str, Any] = {"rule": "adamw" if index % 3 != 2 else "adam", "maximize": index % 4 == 3}
    rows = rows_of(*form, device)
    expected, before = copies(rows), copies(rows)
    divisor = torch.tensor(3.7, device=device) if index % 2 else None
    update = launched(rows, **signs)
    for _ in range(3):
        update(OPTIONS, divisor)
        update_reference(expected, OPTIONS, divisor=divisor, **signs)
    assert_same(rows, expected)
    assert differ(rows, before) and [row.step.item() for row in rows[:2]] == [6.0, 3.0]


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_a_master_between_two_parameters_is_rounded_to_the_even_one(device: str, form: str) -> None:
    """As torch rounds; masters drawn at random never lie there."""
    (row,) = rows_of(torch.float32, torch.float32, form, device, lengths=[600])
    assert row.master is not None and row.param is not None
    half = 2.0**-8 if form == "bf16" else 2.0**-11  # of the distance between parameters of 1 and more
    row.master.copy_(1.0 + half * torch.arange(600, device=device).remainder(64))
    row.master[::2] *= -1.0
    masters = row.master.clone()
    launched([row])([AdamOptions(0.0, 0.9, 0.999, 1e-8, 0.0)])
    assert torch.equal(row.master, masters)
    assert torch.equal(row.param, masters.to(row.param.dtype))


SGD = [SGDOptions(0.1, 0.9, 0.2, True, 0.1), SGDOptions(0.02, 0.5, 0.0, False, 0.0)]
LION = [LionOptions(1e-3, 0.9, 0.99, 0.1), LionOptions(3e-2, 0.8, 0.95, 0.0)]


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("rule", ["sgd", "lion"])
@pytest.mark.parametrize("form", [FORMS[1], FORMS[3], FORMS[4], FORMS[6]], ids=str)
@pytest.mark.sampled(8)
def test_kernels_of_sgd_and_lion(device: str, rule: Rule, form: tuple[torch.dtype, torch.dtype, str]) -> None:
    """The first group's rows have momentum, from their first step on; of SGD the second's have none."""
    rows = [row._replace(exp_avg_sq=None, exp_avg_sq_scale=None) for row in rows_of(*form, device)]
    rows[0].step.zero_()
    options: Sequence[Any] = SGD if rule == "sgd" else LION
    if rule == "sgd":
        options = [SGD[0], SGD[1]._replace(momentum=0.0, dampening=0.3)]  # of which torch takes no notice
        rows = [row if row.group == 0 else row._replace(exp_avg=None, exp_avg_scale=None) for row in rows]
    expected, before = copies(rows), copies(rows)
    divisor = torch.tensor(3.7, device=device) if form[2] == "remainder" else None
    maximize = form[1] is torch.bfloat16
    update = launched(rows, rule, maximize)
    for skipped in (0.0, 1.0, 0.0, 0.0):
        found_inf = torch.tensor(skipped, device=device)
        update(options, divisor, found_inf)
        update_reference(expected, options, divisor=divisor, found_inf=found_inf, rule=rule, maximize=maximize)
    assert_same(rows, expected)
    assert differ(rows, before) and [row.step.item() for row in rows[:2]] == [3.0, 3.0]


@pytest.mark.gpu
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bits_of_torchs_fused_sgd(momentum: float, nesterov: bool) -> None:
    """Without a divisor. With one torch's compiler contracts the last operation of some elements, and not of others."""
    if nesterov and not momentum:
        pytest.skip("torch refuses Nesterov's without momentum")
    options = SGDOptions(0.1, momentum, 0.0, nesterov, 0.1)
    generator = torch.Generator("cuda").manual_seed(0)
    param = torch.nn.Parameter(torch.randn(100_000, device="cuda", generator=generator))
    theirs = torch.optim.SGD([param], **options._asdict(), fused=True)
    buffer = torch.zeros_like(param.detach()) if momentum else None
    row = UpdateRow(torch.empty(100_000, device="cuda"), buffer, None, torch.zeros((), device="cuda"))
    row = row._replace(master=param.detach().clone())
    ours = SGDUpdate([row])
    for _ in range(20):
        row.grad.normal_(generator=generator)
        param.grad = row.grad.clone()
        theirs.step()
        ours([options])
    assert torch.equal(row.master, param)
    assert buffer is None or torch.equal(buffer, theirs.state[param]["momentum_buffer"])


@pytest.mark.gpu
def test_where_torchs_fused_adam_rounds_its_decay_twice() -> None:
    """Without ``grad_scale`` only the first of the four elements of a thread may differ: its product is not contracted.

    ``DistributedOptimizer`` gives such steps to torch's kernel.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    param = torch.nn.Parameter(torch.randn(1 << 20, device="cuda", generator=generator))
    theirs = torch.optim.Adam([param], lr=1e-3, weight_decay=0.1, fused=True)
    moments = torch.zeros(2, 1 << 20, device="cuda")
    row = UpdateRow(torch.empty(1 << 20, device="cuda"), *moments, torch.zeros((), device="cuda"))
    row = row._replace(master=param.detach().clone())
    row.grad.normal_(generator=generator)
    param.grad = row.grad.clone()
    theirs.step()
    AdamUpdate([row], decoupled=False)([AdamOptions(1e-3, 0.9, 0.999, 1e-8, 0.1)])
    differing = (moments[0] != theirs.state[param]["exp_avg"]).nonzero().flatten()
    assert (differing % 4 == 0).all()
    torch.testing.assert_close(moments[0], theirs.state[param]["exp_avg"], rtol=1e-6, atol=1e-8)


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("form", ["launches", "called on a GPU", "reference"])
def test_gradients_may_move_and_are_not_kept(device: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = form == "launches"
    monkeypatch.setattr(flat_update, "runs_on_triton", lambda *_: form != "reference")
    rows = rows_of(torch.float32, torch.bfloat16, "remainder", device)
    expected = copies(rows)
    update: Any = TritonUpdate(rows, "adamw", False, True) if launches else AdamUpdate(rows, grads_move=True)
    seen = [weakref.ref(row.grad) for row in rows]
    values = [row.grad.tolist() for row in rows]
    rows = [row._replace(grad=torch.empty(0)) for row in rows]
    flat = torch.empty(2 * sum(LENGTHS) + 512, device=device)
    for step in range(4):
        # Together, each by itself, together elsewhere; every other one is no multiple of 16, as before.
        starts = [(length + 63) // 64 * 64 for length in LENGTHS]
        places = [sum(starts[:index]) + 128 * (step // 2) + index % 2 for index in range(len(LENGTHS))]
        grads = []
        for place, value in zip(places, values, strict=True):
            memory = flat if step != 1 else torch.empty_like(flat)
            grads.append(memory[place : place + len(value)])
            grads[-1].copy_(torch.tensor(value) * 0.5**step)
        if not launches:
            assert update.takes(grads) and not update.takes([grad.half() for grad in grads])
            update(OPTIONS, grads=grads)
        else:
            update.move_grads(grads)
            update(OPTIONS, None, None)
        theirs = [row._replace(grad=grad) for row, grad in zip(expected, grads, strict=True)]
        update_reference(theirs, OPTIONS)
        seen += [weakref.ref(grad) for grad in grads]
        del grads, theirs
    assert_same(rows, [row._replace(grad=torch.empty(0)) for row in expected])
    assert not [each for each in seen if each() is not None]


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_options_that_change_and_a_learning_rate_in_a_tensor(device: str) -> None:
    rows = rows_of(*FORMS[1], device, [300, 0, 900])  # of two groups
    expected = copies(rows)
    update = launched(rows)
    rate = torch.tensor(1e-2, device=device)
    for beta1, lr in ((0.9, rate), (0.9, rate), (0.5, 1e-3), (0.5, rate), (0.5, rate), (0.5, 0.0)):
        options = [AdamOptions(1e-4, beta1, 0.99, 1e-8, 0.1), AdamOptions(lr, 0.8, 0.99, 1e-8, 0.1)]
        update([*options, AdamOptions(7.0, 0.5, 0.5, 1.0, 1.0)])  # the last group has no rows
        update_reference(expected, options)
        rate *= 0.7  # the next call reads it
    assert_same(rows, expected)


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("form", FORMS[3:7], ids=str)
@pytest.mark.sampled(2)
def test_found_inf_leaves_everything_as_it_is(device: str, form: tuple[torch.dtype, torch.dtype, str]) -> None:
    rows = rows_of(*form, device)
    rows[0].grad.fill_(float("inf"))
    before, launches, called = copies(rows), launched(rows), AdamUpdate(rows)
    found_inf = torch.tensor(1.0, device=device)
    for update in (launches, called):
        update(OPTIONS, divisor=torch.tensor(2.0, device=device), found_inf=found_inf)
        assert_same(rows, before)
    found_inf.zero_()
    launches(OPTIONS, found_inf=found_inf)
    assert differ(rows, before) and rows[0].step == before[0].step + 1


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[4], FORMS[6]], ids=str)
@pytest.mark.sampled(3)
def test_cuts_of_a_parameter_change_nothing(device: str, form: tuple[torch.dtype, torch.dtype, str]) -> None:
    """Rows of one parameter, cut elsewhere and begun at other programs' borders, as on other numbers of ranks."""
    (whole,) = rows_of(*form, device, [2600])
    cuts = [0, 256, 1024, 2304, 2600]
    parts = copies([whole])[0]
    pieces = []
    for start, end in itertools.pairwise(cuts):
        blocks = slice(start // 256, -(-end // 256))
        cut = {
            name: value if name == "step" else value[blocks if name.endswith("_scale") else slice(start, end)]
            for name, value in parts._asdict().items()
            if isinstance(value, Tensor)
        }
        pieces.append(parts._replace(**cut, first=whole.first + start))
    one, many = launched([whole]), launched(pieces)
    for _ in range(3):
        one(OPTIONS)
        many(OPTIONS)
    assert_same([whole], [parts])
    assert whole.step == 6


# ---- torch's optimizers, and fp64. ----


@pytest.mark.gpu
@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], (torch.float32, torch.float32, "remainder")], ids=str)
@pytest.mark.parametrize("decoupled", [True, False])
def test_bits_of_torchs_fused_kernel(form: tuple[torch.dtype, torch.dtype, str], decoupled: bool) -> None:
    rows = [row for row in rows_of(*form, "cuda") if row.grad.numel()]
    for row in rows:
        row.step.zero_()
    masters = [join_master(row.param, row.remainder) if row.master is None else row.master.clone() for row in rows]
    params = [torch.nn.Parameter(master) for master in masters]
    groups = []
    for param, row in zip(params, rows, strict=True):
        lr, beta1, beta2, eps, weight_decay = OPTIONS[row.group]
        groups.append({"params": [param], "lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay})
    theirs = (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups, fused=True)
    for param, row in zip(params, rows, strict=True):
        state = {"step": torch.zeros((), device="cuda"), "exp_avg": row.exp_avg, "exp_avg_sq": row.exp_avg_sq}
        theirs.state[param] = {name: value.clone() for name, value in state.items()}
    theirs.grad_scale, theirs.found_inf = torch.tensor(1.7, device="cuda"), torch.zeros((), device="cuda")
    ours = AdamUpdate(rows, decoupled=decoupled)
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(30):
        for param, row in zip(params, rows, strict=True):
            row.grad.normal_(generator=generator).mul_(10.0 ** torch.randint(-9, 3, row.grad.shape, device="cuda"))
            param.grad = row.grad.clone()
        theirs.step()
        ours(OPTIONS, divisor=theirs.grad_scale, found_inf=theirs.found_inf)
    for param, row in zip(params, rows, strict=True):
        master = join_master(row.param, row.remainder) if row.master is None else row.master
        assert torch.equal(master, param)
        assert torch.equal(row.exp_avg, theirs.state[param]["exp_avg"])
        assert torch.equal(row.exp_avg_sq, theirs.state[param]["exp_avg_sq"])
        if form[2] == "bf16":
            assert torch.equal(row.param, param.bfloat16())


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.sampled(8)
def test_steps_of_torchs_optimizer_on_a_cpu(dtype: torch.dtype, fused: bool, decoupled: bool) -> None:
    """PyTorch rounds elsewhere on CPUs; what a step adds differs by the error of fp32's ``1 - beta2^t`` too."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3000, generator=generator, dtype=dtype)
    param = torch.nn.Parameter(start.clone())
    options = AdamOptions(1e-2, 0.9, 0.999, 1e-8, 0.1)
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = make([param], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, fused=fused)
    exp_avg, exp_avg_sq = torch.zeros(2, 3000, dtype=dtype)
    row = UpdateRow(torch.zeros_like(start), exp_avg, exp_avg_sq, torch.tensor(0.0), start)
    ours = AdamUpdate([row], decoupled=decoupled)
    for _ in range(20):
        row.grad.normal_(generator=generator)
        param.grad = row.grad.clone()
        theirs.step()
        ours([options])
    eps = torch.finfo(dtype).eps
    # 20 steps of at most lr each, whose size has the relative error of 1 - 0.999^t: half a unit of 1 over 0.001, and
    # half of that under the root; and a rounding or two of a parameter of 5 in each step.
    bound = 20 * 1e-2 * 1000 * eps + 40 * eps * 5
    assert (start - param).abs().max() <= bound
    state = theirs.state[param]
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=0, atol=20 * eps * 4)
    # 1 - beta2 is 0.001, and has the error of beta2, which is half a unit of 1.
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=1000 * eps, atol=0)


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_one_step_against_fp64(device: str) -> None:
    """Moments within an ulp of the larger addend, masters within two ulps besides the bias corrections' error."""
    rows = rows_of(torch.float32, torch.float32, "none", device, [4000])
    (exact,) = copies(rows)
    launched(rows)(OPTIONS, torch.tensor(3.7, device=device))
    lr, beta1, beta2, eps, decay = (torch.tensor(float(x)).double().to(device) for x in OPTIONS[0])  # as fp32
    grad = exact.grad.double() / torch.tensor(3.7).double().to(device)
    exp_avg = beta1 * exact.exp_avg.double() + (1 - beta1) * grad
    exp_avg_sq = beta2 * exact.exp_avg_sq.double() + (1 - beta2) * grad.square()
    denom = exp_avg_sq.sqrt() / (1 - beta2**4).sqrt() + eps
    change = lr / (1 - beta1**4) * exp_avg / denom
    master = exact.master.double() * (1 - lr * decay) - change
    ulp = torch.finfo(torch.float32).eps
    moments = beta1 * exact.exp_avg.double().abs() + grad.abs()
    assert ((rows[0].exp_avg - exp_avg).abs() <= ulp * moments).all()
    assert ((rows[0].exp_avg_sq - exp_avg_sq).abs() <= 4 * ulp * exp_avg_sq).all()
    # 1 - beta2^4 is 0.004: the power's half unit is 250 times as much there, and half of that under the root.
    room = 2 * ulp * exact.master.abs() + change.abs() * 160 * ulp + lr / (1 - beta1**4) * ulp * moments / denom
    assert ((rows[0].master - master).abs() <= room).all()


def test_fma_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3000, generator=generator)
    # Sums near the middle of two fp32 numbers, where a second rounding shows, and sums that cancel.
    c = torch.cat((torch.randn(1000, generator=generator) * 2.0**-30, -(a * b)[1000:2000], a[2000:] * 2.0**26))
    a[:500], b[:500], c[:500] = 1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60 * torch.randn(500, generator=generator)
    for x, y, z, result in zip(*(each.tolist() for each in (a, b, c, fma(a, b, c))), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = torch.tensor(result)
        neighbours = [near.nextafter(torch.tensor(end)).item() for end in (-float("inf"), float("inf"))]
        assert all(abs(exact - Fraction(result)) <= abs(exact - Fraction(other)) for other in neighbours)
    assert fma(*torch.tensor([float("inf"), 1.0, 1.0])) == float("inf")
    assert fma(*torch.tensor([float("inf"), 0.0, 1.0])).isnan()
    assert fma(*torch.tensor([2.0**-149, 0.5, 2.0**-149])) == 2.0**-148  # half of the smallest number: to even


# ---- Masters of a parameter and a remainder. ----


def test_every_finite_master_is_split_and_joined_exactly() -> None:
    """All 65,536 remainders of parameters of every exponent, signs, the smallest, the largest, and zeros."""
    low = torch.arange(65536, dtype=torch.int32)
    edges = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x3F82, 0x7F7E, 0x7F7F]
    for high in [*range(0x0000, 0x7F80, 0x155), *edges]:
        for sign in (0, -0x8000):
            master = ((sign + high << 16) + low).view(torch.float32)
            param, remainder = split_master(master)
            assert torch.equal(join_master(param, remainder).view(torch.int32), master.view(torch.int32))
            # The parameter is the nearest bf16, and of two the one that is farther from zero.
            away = (master.view(torch.int32) + 0x8000 >> 16).to(torch.int16)
            assert torch.equal(param.view(torch.int16), away)
    halves = torch.tensor([0x3F818000, 0x3F828000, 0x7F7F8000, 0x7F7FFFFF], dtype=torch.int32).view(torch.float32)
    assert split_master(halves)[0].tolist() == [1.015625, 1.0234375, float("inf"), float("inf")]
    assert join_master(*split_master(halves)).tolist() == halves.tolist()


def test_infinities_and_nan_stay() -> None:
    bits = torch.tensor([0x7F800000, 0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF], dtype=torch.int32)
    for sign in (0, -0x80000000):
        param, remainder = split_master((bits + sign).view(torch.float32))
        assert param[0] == torch.tensor(float("-inf" if sign else "inf")) and param[1:].isnan().all()
        assert remainder.tolist() == [0] * 6
        joined = join_master(param, remainder)
        assert joined[0] == param[0] and joined[1:].isnan().all()


@pytest.mark.in_turn
@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_remainders_are_fp32_masters_bit_for_bit(device: str) -> None:
    plain, split = rows_of(*FORMS[0], device), rows_of(torch.float32, torch.float32, "remainder", device)
    updates = launched(plain), launched(split)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for row, other in zip(plain, split, strict=True):
            row.grad.copy_(torch.randn(row.grad.shape, generator=generator))
            other.grad.copy_(row.grad)
        for update in updates:
            update(OPTIONS)
    for row, other in zip(plain, split, strict=True):
        assert torch.equal(join_master(other.param, other.remainder), row.master)
        assert torch.equal(other.param, split_master(row.master)[0])
        assert torch.equal(other.exp_avg, row.exp_avg)


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("form", [(torch.float32, torch.float32, "remainder"), FORMS[1], FORMS[4], FORMS[6]], ids=str)
@pytest.mark.sampled(4)
def test_nan_and_infinity_of_gradients_show(device: str, form: tuple[torch.dtype, torch.dtype, str]) -> None:
    rows = rows_of(*form, device, [2000])
    rows[0].grad[5], rows[0].grad[900] = float("nan"), float("inf")
    rows[0].grad[5:6].view(torch.int32).fill_(0x7FFFFFFF)  # CUDA's: to round it up would make -0 of it
    expected = copies(rows)
    launched(rows)(OPTIONS)
    update_reference(expected, OPTIONS)
    for row in (*rows, *expected):
        assert row.param[5].isnan() and row.param[900].isnan()
        assert not row.param[1000:].isnan().any()
        exp_avg = row.exp_avg
        if form[1] is torch.uint8:  # the whole block
            exp_avg = dequantize_moment(exp_avg, row.exp_avg_scale, signed=True)
        assert exp_avg[5].isnan() and not exp_avg[900].isfinite() and exp_avg[1100:].isfinite().all()


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("form", [FORMS[1], FORMS[4]], ids=str)
def test_a_gradient_of_nan_shows_under_lion(device: str, form: tuple[torch.dtype, torch.dtype, str]) -> None:
    """A step has the sign of the blend, and torch's sign of NaN is 0."""
    rows = [row._replace(exp_avg_sq=None, exp_avg_sq_scale=None) for row in rows_of(*form, device, [2000])]
    rows[0].grad[5] = float("nan")
    expected = copies(rows)
    launched(rows, "lion")(LION)
    update_reference(expected, LION, rule="lion")
    for row in (*rows, *expected):
        assert row.param[5].isnan() and row.param.isnan().sum() == 1
        assert row.exp_avg[5].isnan() and row.exp_avg.isnan().sum() == 1


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
@pytest.mark.parametrize("rule", ["adamw", "adam", "lion", "sgd"])
def test_without_a_gradient_and_a_decay_masters_stay_as_they_are(device: str, rule: Rule) -> None:
    """Infinite ones too, as of a mask that is a parameter, and the sign of zero."""
    (row,) = rows_of(torch.float32, torch.float32, "none", device, [600])
    assert row.master is not None and row.exp_avg is not None and row.exp_avg_sq is not None
    row.master[:3] = torch.tensor([float("-inf"), float("inf"), -0.0])
    for each in (row.grad, row.exp_avg, row.exp_avg_sq):
        each.zero_()
    row = row._replace(exp_avg_sq=row.exp_avg_sq if rule in ("adamw", "adam") else None)
    options: Any = {"lion": LION[1], "sgd": SGD[1]}.get(rule, OPTIONS[1])
    mine, theirs = copies([row]), copies([row])
    launched(mine, rule)([options])
    update_reference(theirs, [options], rule=rule)
    for each in (mine[0].master, theirs[0].master):
        assert each is not None and torch.equal(each.view(torch.int32), row.master.view(torch.int32))


@pytest.mark.parametrize("device", LAUNCHER_DEVICES)
def test_a_small_second_moment_in_8_bits_stays_above_0(device: str) -> None:
    """Beside a gradient that is a million times as large: a step would divide by eps alone."""
    rows = rows_of(torch.float32, torch.uint8, "remainder", device, [600])
    rows[0].exp_avg_sq.zero_(), rows[0].exp_avg_sq_scale.zero_()
    rows[0].grad.fill_(1e-6)
    rows[0].grad[::256] = 1.0
    expected = copies(rows)
    launched(rows)(OPTIONS)
    update_reference(expected, OPTIONS)
    assert_same(rows, expected)
    assert (dequantize_moment(rows[0].exp_avg_sq, rows[0].exp_avg_sq_scale, signed=False) > 0).all()


# ---- CUDA, and mistakes. ----


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS[:1] + FORMS[4:7], ids=str)
def test_captured_steps_and_no_wait(form: tuple[torch.dtype, torch.dtype, str]) -> None:
    rows = rows_of(*form, "cuda")
    expected = copies(rows)
    rate = torch.tensor(1e-2, device="cuda")
    options = [OPTIONS[0]._replace(lr=rate), OPTIONS[1]]
    eager = AdamUpdate(expected)
    update = AdamUpdate(rows)
    found_inf = torch.zeros((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for both in (update, eager):
            both(options, found_inf=found_inf)
            both([options[0], OPTIONS[1]._replace(lr=1e-4)], found_inf=found_inf)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(options, found_inf=found_inf)
    update([options[0], OPTIONS[1]._replace(lr=1e-4)], found_inf=found_inf)
    eager([options[0], OPTIONS[1]._replace(lr=1e-4)], found_inf=found_inf)
    for skipped in (0.0, 1.0, 0.0):
        found_inf.fill_(skipped)
        graph.replay()
        eager(options, found_inf=found_inf)
        rate.mul_(0.5)
    assert_same(rows, expected)
    assert rows[0].step == 8


def test_masters_that_are_parameters() -> None:
    """Autograd records nothing, and leaves that require gradients are written."""
    (row,) = rows_of(*FORMS[0], lengths=[300])
    param = torch.nn.Parameter(row.master)
    AdamUpdate([row._replace(master=param)])(OPTIONS)
    assert param.is_leaf and torch.equal(param, row.master) and row.step == 4
