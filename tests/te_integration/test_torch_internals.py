"""torch's private names that pipeline stages and compiled layers depend on: the tests say what a torch lacks."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
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
