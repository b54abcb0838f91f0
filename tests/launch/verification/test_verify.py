"""``verify`` on programs that are right: what it takes, what it leaves alone, and what it reports."""

import dataclasses
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel
from maingrad.ddp.torch_grads import muon as muon_of_torch
from maingrad.fsdp import fully_shard
from maingrad.fsdp.state import sharded_muon
from maingrad.launch import verify
from maingrad.launch.verification import judge, ways
from maingrad.launch.verification import verify as module_of_verify
from maingrad.launch.verification.findings import Cause, Finding, WayResult
from maingrad.launch.verification.plain import Part, run_whole
from maingrad.launch.verification.program import Program
from maingrad.launch.verification.verify import VerificationError
from maingrad.launch.verification.ways import WAYS
from maingrad.te_integration import WgradQueue, convert_linears

FEW = ("ddp_converted", "zero1", "fsdp_converted")


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2)).to(dtype)


def square(output: Tensor, batch: Any) -> Tensor:
    return (output.float() - 1).square().mean()


def rows(count: int = 12) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.in_turn
def test_every_way_agrees_with_plain_pytorch() -> None:
    found = verify(mlp(), rows(), square)
    assert found.ok and not found.findings, str(found)
    assert [result.way for result in found.results] == [
        name for name, way in WAYS.items() if way.cut is None and way.ep == 1
    ]
    for result in found.results:
        assert result.ok and result.grad_error < 1e-5 and result.norm_error < 1e-5 and result.weight_error < 1e-3
        assert (result.fused_writes > 0) == WAYS[result.way].converted, result.way
    assert (found.num_parameters, found.num_elements) == (6, 6 * 16 + 16 + 32 + 32 + 2)


class Tower(nn.Module):
    """A fused matrix, whose parts are said, and others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(6, 24), nn.Linear(8, 12)
        self.blocks = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 2)])

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.qkv(inputs).split([8, 8, 8], dim=-1)
        hidden = self.out(query.sigmoid() * key + value)
        for block in self.blocks:
            hidden = block(hidden.tanh())
        return hidden


@pytest.mark.in_turn
def test_the_step_of_muon() -> None:
    """In every way."""
    muon = {"split": {"qkv.weight": [8, 8, 8]}, "lr": 0.05}
    found = verify(Tower(), rows(), square, muon=muon)
    assert found.ok and not found.findings, str(found)
    assert len(found.results) == len([way for way in WAYS.values() if way.cut is None and way.ep == 1])
    with pytest.raises(ValueError, match=r"'qkv\.weight' .* the rows of each are not known"):
        verify(Tower(), rows(), square, muon={}, ways=["zero1"])


def test_a_wrong_step_of_muon_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the library, the expected one is changed: its matrices move by a tenth less."""
    ratio = judge.update_ratio
    monkeypatch.setattr(muon_of_torch, "update_ratio", lambda *args: 0.9 * ratio(*args))
    monkeypatch.setattr(sharded_muon, "update_ratio", ratio)
    found = verify(mlp(), rows(), square, muon={"lr": 0.05}, ways=["fsdp"])
    assert not found.ok and "the weights after the step are not those" in str(found)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (3, 1), (4, 3)])
@pytest.mark.sampled(1)
def test_ranks_and_microbatches(ranks: int, microbatches: int) -> None:
    ways = ("zero1", "hybrid_converted", "hsdp_converted")
    found = verify(mlp(), rows(), square, ranks=ranks, num_microbatches=microbatches, ways=ways)
    assert found.ok and not found.findings, str(found)
    assert (found.ranks, found.num_microbatches, found.rows) == (ranks, microbatches, 12)


@pytest.mark.in_turn
@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    found = verify(mlp(dtype), rows().to(dtype), square, ways=FEW)
    assert found.ok and not found.findings, str(found)


@pytest.mark.in_turn
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.sampled(1)
def test_rounding_under_autocast_is_no_mistake(dropout: float) -> None:
    model = nn.Sequential(mlp(), nn.Dropout(dropout))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return square(model(batch), batch)

    found = verify(model, rows(), step=step, ways=FEW)
    assert found.ok, str(found)
    found = verify(model, rows(), step=lambda *given: step(*given) * len(given[1]), ways=FEW)
    assert [str(each.cause) for each in found.findings if not each.is_note] == ["sum"], str(found)


class Pair(NamedTuple):
    x: Tensor
    target: Tensor


@pytest.mark.in_turn
def test_forms_of_a_batch() -> None:
    """Rows are divided; a tensor without rows is given whole; ``step`` takes what the model does not."""
    x, target = rows(8), rows(8)[:, :2]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, target: Tensor, scale: Tensor, names: list[str]) -> dict[str, Tensor]:
            assert len(names) == len(x) and scale.shape == (3,)
            return {"loss": ((self.net(x) - target) * scale[1]).square().mean()}

    scale, names = torch.tensor([0.0, 2.0, 0.0]), [str(row) for row in range(8)]
    for batch in ((x, target, scale, names), {"x": x, "target": target, "scale": scale, "names": names}):
        assert verify(Model(), batch, ways=("ddp",)).ok
    step = lambda model, batch: F.mse_loss(model(batch.x), batch.target)  # noqa: E731
    assert verify(mlp(), Pair(x, target), step=step, ways=FEW).ok


class Watched(nn.Module):
    """Follows the mean of its rows in a buffer that computes nothing, and counts its calls in another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        self.calls += 1
        output: Tensor = self.net(x)
        return output


def test_buffers_that_each_rank_fills_with_its_own_rows_are_named() -> None:
    found = verify(Watched(), rows(), square, ways=FEW)
    (note,) = found.findings
    assert found.ok and (str(note.cause), note.module) == ("buffers", "mean"), str(found)


def test_the_program_is_left_alone() -> None:
    model, batch = mlp(), rows()
    model[0].weight.grad = torch.ones(16, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    wanted = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    with torch.no_grad():
        assert verify(model, batch, square, ways=FEW).ok
        assert not torch.is_grad_enabled()
    assert (torch.rand(1), random.random(), np.random.rand()) == wanted
    assert torch.equal(batch, rows()) and not dist.is_initialized()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(16, 6)) and model[3].weight.grad is None
    assert type(model[0]) is nn.Linear and not hasattr(model[0].weight, "main_grad")


def test_a_function_may_make_the_model() -> None:
    """It may make other weights each time; and what cannot be copied is made so."""

    class NoCopy(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("tied to a device")

    made = []

    def make() -> nn.Module:
        model = nn.Sequential(NoCopy(6, 4), nn.Linear(4, 2))
        nn.init.constant_(model[1].weight, 0.1 + len(made))
        made.append(model)
        return model

    assert verify(make, rows(), square, ways=FEW).ok
    assert len(made) > 4
    with pytest.raises(TypeError, match="pass a function that makes the model"):
        verify(make(), rows(), square)
    model = mlp()
    model.kept = model[0].weight * 2  # torch copies no tensor with a graph
    with pytest.raises(TypeError, match="pass a function that makes the model"):
        verify(model, rows(), square)


class Warming(nn.Module):
    """Counts its training forwards in a buffer that its output reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return (self.linear(x) * self.forwards).square().mean()


def test_each_model_of_a_function_begins_with_the_first_ones_state() -> None:
    """And not with what that one's forwards have made of it."""
    program = Program(Warming, None, None, 0)
    first = program.make()
    first(torch.ones(2, 12))
    with torch.no_grad():
        first.linear.weight.zero_()
    second = program.make()
    assert second.forwards == 0 and second.linear.weight.any()


@pytest.mark.in_turn
def test_models_that_are_converted_or_wrapped() -> None:
    converted = mlp()
    convert_linears(converted)
    assert verify(converted, rows(), square, ways=FEW).ok
    assert verify(DistributedDataParallel(mlp()), rows(), square, ways=FEW).ok
    for sharded in (fully_shard(mlp()), nn.Sequential(fully_shard(mlp()))):
        with pytest.raises(TypeError, match="before fully_shard"):
            verify(sharded, rows(), square)


def test_marks_and_hooks_go_along() -> None:
    """deepcopy leaves them behind."""
    model, calls = mlp(), []
    model[0].weight.register_hook(lambda grad: calls.append("hook"))
    model[3].weight.register_post_accumulate_grad_hook(lambda param: calls.append("after"))
    assert verify(model, rows(), square, ways=("ddp",)).ok
    assert {"hook", "after"} <= set(calls)
    weight: Any = model[0].weight
    weight.allreduce, weight.sequence_parallel, weight.group = False, True, object()
    weight.register_hook(lambda grad: calls.append("another hook"))
    for kind in ("one after", "another after"):
        weight.register_post_accumulate_grad_hook(lambda param, kind=kind: calls.append(kind))
    copied: Any = Program(model, square, None, 0).make()[0].weight
    assert (copied.allreduce, copied.sequence_parallel) == (False, True)
    calls.clear()
    copied.sum().backward()
    assert calls == ["hook", "another hook", "one after", "another after"]


def test_hooks_of_a_wrapper_stay_with_its_own_parameters() -> None:
    """A copy of what is wrapped has gradients of its own, and the wrapper sees none."""
    wrapped = DistributedDataParallel(mlp())
    copied = Program(wrapped, square, None, 0).make()
    square(copied(rows()), rows()).backward()
    assert all(param.grad is not None and param.grad.any() for param in copied.parameters())
    assert not any(param.main_grad.any() for param in wrapped.module.parameters())
    assert not any(hasattr(param, "main_grad") for param in copied.parameters())


def test_units_are_the_users() -> None:
    given = []

    def units(model: nn.Module) -> list[nn.Module]:
        given.append(model)
        return [model[0]]

    assert verify(mlp(), rows(), square, units=units, ways=("fsdp_recompute",)).ok
    assert given


class GatheredRows(nn.Module):
    """A contrastive loss over the rows of all ranks: that of the whole batch, if there is one microbatch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        everyone = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, y.detach())
        everyone[dist.get_rank()] = y
        targets = torch.arange(len(x)) + len(x) * dist.get_rank()
        return F.cross_entropy(y @ torch.cat(everyone).detach().T, targets)


def test_a_loss_may_gather_rows() -> None:
    assert verify(GatheredRows(), rows(), num_microbatches=1, ways=FEW).ok
    found = verify(GatheredRows(), rows(), ways=("ddp",))
    assert [str(finding.cause) for finding in found.findings] == ["rank"]


class Summed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum()


def test_the_report() -> None:
    found = verify(Summed(6, 2), rows(), ways=("ddp", "fsdp"))
    text = str(found)
    assert "2 trainable parameters, 14 elements; 12 rows on 2 ranks, 2 microbatches each" in text
    for part in ("ddp ", "fsdp ", "DIFFERS", "error: sum", "parameter  ", "shown by   plain PyTorch", "1 error"):
        assert part in text, text
    assert "4.00 of rank 1's microbatch 1" in " ".join(text.split())
    assert "calculate_per_token_loss" in found.findings[0].remedy
    with pytest.raises(VerificationError, match="error: sum"):
        found.raise_if_failed()
    for result in found.results:  # four parts are averaged, and the whole is their sum
        assert (result.norm_error, result.grad_error) == pytest.approx((0.75, 0.75))


class Neighbours(nn.Module):
    """Two parameters that lie side by side in one storage, and share none of it."""

    def __init__(self, apart: int) -> None:
        super().__init__()
        flat = torch.arange(12.0)
        self.one, self.two = nn.Parameter(flat[:6]), nn.Parameter(flat[apart : apart + 6])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one + self.two


@pytest.mark.parametrize(("apart", "causes"), [(6, []), (5, ["shared_memory"])])
def test_parameters_share_memory_from_one_element_on(apart: int, causes: list[str]) -> None:
    made = Program(Neighbours(apart), None, lambda model, batch: square(model(batch), batch), 0)
    found = module_of_verify._about_parameters(made, run_whole(made, rows()))
    assert [str(each.cause) for each in found] == causes


class Following(nn.Module):
    """Follows the mean of its rows, and passes them on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        return x


def test_the_report_is_short_where_many_modules_are_at_fault() -> None:
    """The finding itself names all of them."""
    names = [f"{index}.mean" for index in range(40)]
    found = verify(nn.Sequential(*(Following() for _ in names), mlp()), rows(), square, ways=("ddp",))
    (finding,) = found.findings
    assert finding.cause == "buffers" and finding.module == ", ".join(names)
    assert "note: buffers in 0.mean, 1.mean, 2.mean, " in str(found)
    assert max(map(len, str(found).splitlines())) < 130


def test_gradients_that_are_all_zero_are_compared() -> None:
    found = verify(mlp(), rows(), lambda output, batch: (output * 0).sum(), ways=FEW)
    assert found.ok and len(found.results) == len(FEW), str(found)


def test_a_cause_may_be_accepted() -> None:
    found = verify(Summed(6, 2), rows(), ways=("ddp",), accept=("sum",))
    assert found.ok and found.raise_if_failed() is found
    assert [str(finding.cause) for finding in found.findings] == ["sum"]
    assert "accepted: sum" in str(found)


def test_errors_come_before_what_is_accepted() -> None:
    found = verify(Summed(6, 2), rows(), ways=("ddp",))
    other = dataclasses.replace(found.findings[0], cause=Cause.HOOK)
    found = dataclasses.replace(found, findings=[found.findings[0], other]).accepting(["sum"])
    assert [(str(each.cause), each.is_note) for each in found.findings] == [("hook", False), ("sum", True)]


class Forgetful(nn.Module):
    """A block whose recompute takes another path: it has seen the input."""

    def __init__(self, longer: bool = False) -> None:
        super().__init__()
        self.net = nn.Linear(6, 6)
        self._last: list[Tensor] = []
        self._longer = longer

    def forward(self, x: Tensor) -> Tensor:
        known = any(x is seen for seen in self._last)
        self._last[:] = [x]
        if known and self._longer:
            x = x.sin().cos()
        return (self.net(x) * (3 if known else 1)).tanh()


class Blocks(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), block, nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.real if x.is_complex() else x).abs()
        return x.square().mean()


def test_a_forward_that_cannot_be_recomputed() -> None:
    found = verify(Blocks(Forgetful()), rows(), ways=("ddp", "ddp_recompute"))
    (finding,) = found.findings
    assert (str(finding.cause), finding.ways) == ("not_recomputable", ("ddp_recompute",)), found
    assert finding.ranks == (0, 1) and finding.error > 1e-2, "those of the difference that it explains"
    found = verify(Blocks(Forgetful(longer=True)), rows(), ways=("ddp_recompute",))
    assert [str(each.cause) for each in found.findings] == ["not_recomputable"], "torch raises"


class ComplexWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_what_a_way_refuses_is_said_in_its_words() -> None:
    found = verify(Blocks(ComplexWeight()), rows(), ways=("ddp", "zero1"))
    assert [(str(each.cause), each.ways) for each in found.findings] == [("refused", ("zero1",))], str(found)
    assert found.findings[0].parameter == "blocks.1.weight"
    assert "DistributedOptimizer updates real parameters" in found.findings[0].evidence
    assert [result.ok for result in found.results] == [True, False]


def backward_inside(model: nn.Module, batch: Tensor) -> Tensor:
    loss = square(model(batch), batch)
    loss.backward()
    return loss.detach()


def backward_before_returning(model: nn.Module, batch: Tensor) -> Tensor:
    loss = square(model(batch), batch)
    loss.backward()
    return loss


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"ways": ("ddp", "zero")}, ValueError, "'zero' is no way: choose of ddp"),
        ({"accept": ("sum", "dropout")}, ValueError, "'dropout' is no cause"),
        ({"ranks": 0}, ValueError, "at least 1"),
        ({"num_microbatches": 0}, ValueError, "at least 1, got 2 and 0"),
        ({"loss": None}, ValueError, "where a loss, one number, is needed"),
        ({"step": square}, ValueError, "pass one of them"),
        ({"loss": lambda output, batch: 1.0}, TypeError, "returned a float"),
        ({"batch": rows(0)}, ValueError, "a batch of 0 rows cannot be divided"),
        ({"batch": rows(1)}, ValueError, "1 rows cannot be divided over 2 ranks"),
        ({"batch": rows(10)}, ValueError, "10 rows cannot be divided over 2 ranks of 2 microbatches"),
        ({"batch": {"n": 3}}, ValueError, "no tensor with rows"),
        ({"model": 3}, TypeError, "an nn.Module or a function"),
        ({"model": mlp().requires_grad_(False)}, ValueError, "no parameter that requires a gradient"),
        ({"ways": ()}, ValueError, "ways names none"),
        ({"loss": None, "step": backward_inside}, ValueError, "has called backward itself"),
        ({"loss": None, "step": backward_before_returning}, ValueError, "has called backward itself"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        verify(**{"model": mlp(), "batch": rows(), "loss": square, **arguments})


def test_nothing_compared_is_not_verified() -> None:
    class Constant(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().mean()

    found = verify(Constant(6, 2), rows(), ways=FEW)
    assert not found.ok and not found.results
    assert [str(finding.cause) for finding in found.findings] == ["unused"]
    assert str(found).endswith("nothing could be compared")


@pytest.mark.parametrize("calls_another", [True, False])
def test_a_loss_without_the_model_is_not_verified(calls_another: bool) -> None:
    """``step`` calls another model than its argument; or nothing has a graph."""
    outside = mlp()

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.set_grad_enabled(calls_another):
            return square(outside(batch) if calls_another else model(batch), batch)

    found = verify(mlp(), rows(), step=step, ways=FEW)
    assert not found.ok and not found.results
    assert [str(finding.cause) for finding in found.findings] == ["unused"]
    assert len(found.findings[0].parameters) == 6


def test_the_programs_own_error_is_raised_with_its_cause() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        verify(mlp(), torch.randn(8, 7), square)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        try:
            raise KeyError("inside")
        except KeyError as error:
            raise ValueError("outside") from (error if says_so else None)

    def other(model: nn.Module, batch: Tensor) -> Tensor:
        try:
            raise KeyError("inside")
        finally:
            raise ValueError("outside")

    for says_so in (True, False):
        with pytest.raises(ValueError, match="outside") as raised:
            verify(mlp(), rows(), step=step)
        assert isinstance(raised.value.__cause__, KeyError) is says_so
    with pytest.raises(ValueError, match="outside") as raised:
        verify(mlp(), rows(), step=other)
    assert isinstance(raised.value.__context__, KeyError) and not raised.value.__suppress_context__


def test_the_seed_is_the_users() -> None:
    """It may be larger than numpy's."""
    seen = set()

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.add(torch.initial_seed())
        return square(model(batch), batch)

    assert verify(mlp(), rows(), step=step, ways=("ddp",), seed=2**40).ok
    draws = {Part(rank, microbatch, None).draw for rank in (0, 1) for microbatch in (0, 1)}
    assert seen == {2**40 + draw for draw in {0, *draws}}


def test_a_program_may_change_its_batch() -> None:
    """Each run and each way gets rows of its own."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return square(model(batch.mul_(2)), batch)

    found = verify(mlp(), rows(), step=step, ways=("ddp", "zero1"))
    assert found.ok and not found.findings, str(found)


def test_frozen_parameters_and_models_without_blocks_are_compared() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    assert verify(model, rows(), square, ways=FEW).ok
    assert verify(nn.Linear(6, 2), rows(), square, ways=("ddp_recompute", "fsdp_recompute")).ok


def test_only_delayed_ways_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[list[Any]] = []

    class Logging(WgradQueue):
        def __init__(self) -> None:
            super().__init__()
            self.log = []
            logs.append(self.log)

    monkeypatch.setattr(ways, "WgradQueue", Logging)
    for name in ("zero1_converted", "zero1_delayed", "fsdp_delayed"):
        logs.clear()
        assert verify(mlp(), rows(), square, ways=(name,)).ok
        assert [len(log) for log in logs] == [4 if "delayed" in name else 0] * 2, "two layers, two microbatches"


def test_ranks_that_share_rows_are_left_out_where_forwards_draw() -> None:
    found = verify(nn.Sequential(mlp(), nn.Dropout(0.5)), rows(), square, ways=("ddp", "ddp_tp"), tensor_parallel=print)
    assert [result.way for result in found.results] == ["ddp"] and found.ok


def test_muons_options_are_those_of_the_step() -> None:
    muon = {"lr": 0.05, "weight_decay": 0.3, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    found = verify(mlp(), rows(), square, muon=muon, ways=("zero1",))
    assert found.ok and not found.findings, str(found)


def test_one_cause_is_one_finding_with_all_its_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the way with the largest error; other parameters are another finding, and what plain PyTorch shows is none."""
    given = {
        "ddp": (Cause.LIBRARY, ("x", "y"), 0.1),
        "zero1": (Cause.LIBRARY, ("y", "x"), 0.3),
        "fsdp": (Cause.LIBRARY, ("z",), 0.2),
        "zero1_converted": (Cause.SUM, ("x",), 0.9),
    }

    def judged(name: str, way: Any, comparison: Any) -> tuple[WayResult, Finding]:
        cause, parameters, error = given[name]
        return WayResult(way=name), Finding(cause=cause, evidence=name, parameters=parameters, error=error)

    monkeypatch.setattr(module_of_verify, "judge", judged)
    found = verify(Summed(6, 2), rows(), ways=tuple(given))
    assert [(each.cause, each.ways, each.error) for each in found.findings[1:]] == [
        (Cause.LIBRARY, ("ddp", "zero1"), 0.3),
        (Cause.LIBRARY, ("fsdp",), 0.2),
    ]
    assert (found.findings[0].cause, found.findings[0].ways) == (Cause.SUM, ())


def test_a_loss_that_is_not_finite_is_found_beside_gradients_that_are() -> None:
    found = verify(mlp(), rows(), lambda output, batch: square(output, batch) + torch.inf, ways=("ddp",))
    assert [(str(each.cause), each.parameters) for each in found.findings] == [("not_finite", ())]
