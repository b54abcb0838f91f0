"""torch's private names that pipeline stages and compiled layers depend on: the tests say what a torch lacks."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from maingrad.launch import simulate
from maingrad.te_integration import torch_internals as internals
from maingrad.te_integration.dense import compiled_wgrad
from maingrad.te_integration.pipeline import PipelineStage

TORCH = f"torch {torch.__version__} broke maingrad.te_integration.torch_internals"
SCHEDULES = ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"]


def test_operators_have_effects() -> None:
    assert compiled_wgrad.can_compile(), f"{TORCH}: effects of operators on opaque objects; fused layers break graphs"


def seen_by_a_stage(kind: str) -> list[internals.PipelineStep | None]:
    """What a stage's start sees, in a step and in an evaluation of another schedule on the same stage."""
    seen: list[internals.PipelineStep | None] = []

    class Stage(pipelining.PipelineStage):
        def clear_runtime_states(self) -> None:
            seen.append(internals.running_pipeline_step())
            super().clear_runtime_states()

    stage = Stage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    given: Any = [stage] if "Interleaved" in kind else stage
    for verb, microbatches in (("step", 2), ("eval", 3)):
        x = torch.randn(2 * microbatches, 2)  # torch keeps the buffers of the first microbatches' shape
        schedule = getattr(pipelining, kind)(given, microbatches, nn.functional.mse_loss, scale_grads=False)
        getattr(schedule, verb)(x, target=torch.randn_like(x), losses=[])
    seen.append(internals.running_pipeline_step())
    return seen


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_step_of_torchs_schedules_is_seen(kind: str) -> None:
    ((step, evaluation, outside),) = simulate(seen_by_a_stage, 1, kind)
    assert step is not None and evaluation is not None, f"{TORCH}: _PipelineSchedule is not on the stack, or not self"
    assert (step.num_microbatches, evaluation.num_microbatches) == (2, 3), f"{TORCH}: _n_microbatches"
    assert isinstance(step.losses, list), f"{TORCH}: _internal_losses"
    assert outside is None


def test_a_schedule_without_the_known_names_is_refused_by_torchs_version() -> None:
    class Renamed(pipelining.ScheduleGPipe):
        def __init__(self) -> None:  # torch's is not called: it has no _n_microbatches
            pass

        def step(self) -> Any:
            return internals.running_pipeline_step()

    with pytest.raises(RuntimeError, match=re.escape(f"torch {torch.__version__} does not show how many microbatches")):
        Renamed().step()


def after_an_evaluation() -> list[bool]:
    """Whether the second rank's first step after an evaluation sends a gradient back."""
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    rank = dist.get_rank()
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 2, nn.functional.mse_loss, scale_grads=False)
    given = {} if rank == 0 else {"target": torch.randn(4, 2), "losses": []}
    for verb in (schedule.eval, schedule.step):
        verb(*([torch.randn(4, 2)] if rank == 0 else []), **given)
    return [param.grad is not None for param in layers[rank].parameters()]


def test_an_evaluation_may_come_first() -> None:
    assert simulate(after_an_evaluation, 2) == [[True, True]] * 2, f"{TORCH}: buffers of received inputs"


# ---- What torch answers, in words. ----


def nested(*targets: object) -> Any:
    """Tracers, the innermost first, each of an operator's body."""
    tracer = None
    for target in reversed(targets):
        tracer = SimpleNamespace(source_target=target, parent=tracer)
    return SimpleNamespace(current_tx=lambda: SimpleNamespace(output=SimpleNamespace(current_tracer=tracer)))


def test_a_region_that_is_traced_is_seen_from_any_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    region, other = torch.ops.higher_order.tag_activation_checkpoint, torch.ops.higher_order.cond
    for targets, expected in (
        ((), False),
        ((None,), False),
        ((other, None), False),
        ((region, None), True),
        ((other, region, None), True),
        ((other, other), False),
    ):
        monkeypatch.setattr(internals, "_translator", lambda targets=targets: nested(*targets))
        assert internals.is_tracing_recomputed() is expected, targets
    for unknown in (SimpleNamespace(), SimpleNamespace(current_tx=lambda: SimpleNamespace())):
        monkeypatch.setattr(internals, "_translator", lambda unknown=unknown: unknown)
        assert internals.is_tracing_recomputed() is True, "another torch may trace one"


def test_compiled_autograd_is_on_where_it_is_asked_for_or_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for config, running, expected in (
        ({"compiled_autograd": False}, {"compiled_autograd_enabled": False}, False),
        ({"compiled_autograd": True}, {"compiled_autograd_enabled": False}, True),
        ({"compiled_autograd": False}, {"compiled_autograd_enabled": True}, True),
        ({}, {"compiled_autograd_enabled": False}, True),
        ({"compiled_autograd": False}, {}, True),
    ):
        monkeypatch.setattr(internals, "_dynamo_config", lambda config=config: SimpleNamespace(**config))
        monkeypatch.setattr(internals, "_compiled_autograd", lambda running=running: SimpleNamespace(**running))
        assert internals.is_compiled_autograd_on() is expected, (config, running)


def test_buffers_of_received_inputs_are_those_that_can_have_gradients() -> None:
    """Integers cannot, newer versions decide later, and one of several chunks may come without a buffer."""
    kinds = {"floats": torch.zeros(2), "integers": torch.zeros(2, dtype=torch.int64), "later": torch.zeros(2)}
    more = torch.zeros(2)
    received = [SimpleNamespace(buffer=buffer) for buffer in kinds.values()]
    received[2].tensor_meta = None
    stage = SimpleNamespace(args_recv_info={0: (SimpleNamespace(), *received), 1: (SimpleNamespace(buffer=more),)})
    internals.have_inputs_require_grad(stage)
    found = {name for name, buffer in kinds.items() if buffer.requires_grad}
    assert found == {"floats"} and more.requires_grad
    internals.have_inputs_require_grad(SimpleNamespace())


def added(operands: list[Tensor], factor: int) -> Tensor:
    return factor * (operands[0] + operands[1])


def test_an_operator_returns_what_it_computes_where_a_compiler_knows_its_shape() -> None:
    arguments, calls = "Tensor[] operands, int factor", []
    known = internals.make_effectful_op(
        "of_known_shape", arguments, added, fake=lambda operands, _: operands[0].clone()
    )
    silent = internals.make_effectful_op(
        "of_no_shape", arguments, lambda *given: calls.append(given[1]) or added(*given)
    )
    assert known is not None and silent is not None
    operands = [torch.ones(3), torch.ones(3)]
    assert torch.equal(known(operands, 2), torch.full((3,), 4.0))
    assert silent(operands, 5).shape == (0,) and calls == [5]


def test_a_torch_that_takes_other_arguments_is_named_once_and_graphs_break(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(internals.Opaque):  # type: ignore[misc]  # torch's class
        def ask(self) -> int:
            return 1

    def refuse(*_: Any, **__: Any) -> None:
        raise TypeError("unexpected")

    refuse.__name__ = internals._register_opaque.__name__
    monkeypatch.setattr(internals, "_give_effect", refuse)
    monkeypatch.setattr(internals, "_register_opaque", refuse)
    with pytest.warns(
        RuntimeWarning, match=r"another torch._higher_order_ops.effects \(unexpected\): each fused layer"
    ):
        assert internals.make_effectful_op("of_another_torch", "Tensor[] operands", lambda operands: None) is None
    with pytest.warns(RuntimeWarning, match=r"another torch._library.opaque_object \(unexpected\): each fused layer"):
        assert internals.let_traces_call(Named, ("ask",), guarded=lambda _: []) is False
    monkeypatch.setattr(internals, "_HAS_EFFECTS", False)
    assert internals.make_effectful_op("of_an_old_torch", "Tensor[] operands", lambda operands: None) is None
    assert internals.let_traces_call(Named, ("ask",), guarded=lambda _: []) is False
