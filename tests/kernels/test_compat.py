"""Which tensors the kernels serve, what is said where Triton is missing, and which private names of torch are used."""

import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from maingrad.ddp.recompute import current_checkpoint
from maingrad.kernels import compat
from maingrad.launch import simulate
from maingrad.te_integration.pipeline import PipelineStage


def like(device: str, dtype: torch.dtype) -> Any:
    """What the rule looks at, without a GPU."""
    return SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "HAS_TRITON", False)
    compat._warn_without_triton.cache_clear()


def test_kernels_serve_cuda_and_no_fp64() -> None:
    assert compat.runs_on_triton("op", like("cuda", torch.bfloat16)) == compat.HAS_TRITON
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compat.runs_on_triton("op", like("cpu", torch.bfloat16))
        assert not compat.runs_on_triton("op", like("cuda", torch.float64))


@pytest.mark.usefixtures("without_triton")
def test_a_missing_triton_is_said_once_for_each_operation() -> None:
    with pytest.warns(RuntimeWarning, match="grouped_dgrad runs as plain PyTorch.*pip install triton"):
        assert not compat.runs_on_triton("grouped_dgrad", like("cuda", torch.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compat.runs_on_triton("grouped_dgrad", like("cuda", torch.float16))
        # On a CPU, and in fp64, nothing is lost.
        assert not compat.runs_on_triton("grouped_linear", like("cpu", torch.float32))
        assert not compat.runs_on_triton("grouped_linear", like("cuda", torch.float64))
    with pytest.warns(RuntimeWarning, match="grouped_linear runs"):
        compat.runs_on_triton("grouped_linear", like("cuda", torch.bfloat16))


@pytest.mark.gpu(count=2)
def test_a_launch_goes_to_the_tensors_own_device() -> None:
    tensor = torch.ones(4, device="cuda:1")
    with compat.device_of(tensor):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0


def test_a_cpu_tensor_needs_no_device() -> None:
    with compat.device_of(torch.ones(1)):
        pass


class WorklessGroup:
    """Does what NCCL's group does with a collective on the current stream: it is launched, and there is no work."""

    def gather(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> None:
        assert not options.asyncOp
        output.copy_(torch.cat([input, input]))

    def scatter(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> None:
        assert not options.asyncOp
        output.copy_(2 * input[: output.numel()])

    all_gather_single = _allgather_base = gather
    reduce_scatter_single = _reduce_scatter_base = scatter


def test_a_collective_on_the_current_stream_has_something_to_wait_for() -> None:
    """Who waits for it goes on to what comes after: None would have been taken for "nothing was launched"."""
    group: Any = WorklessGroup()
    flat, shard = torch.zeros(4), torch.ones(2)
    assert compat.start_all_gather(flat, shard, group, on_stream=True).wait()
    assert flat.tolist() == [1, 1, 1, 1]
    work = compat.start_reduce_scatter(shard, flat, torch.distributed.ReduceOp.SUM, group, on_stream=True)
    assert work.wait()
    assert shard.tolist() == [2, 2]


# ---- torch's private names: where a torch does not have them, the test says which one broke. ----

TORCH = f"torch {torch.__version__} broke maingrad.kernels.compat"
SCHEDULES = ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"]


def seen_by_a_stage(kind: str) -> list[compat.PipelineStep | None]:
    """What a stage's start sees, in a step and in an evaluation of another schedule on the same stage."""
    seen: list[compat.PipelineStep | None] = []

    class Stage(pipelining.PipelineStage):
        def clear_runtime_states(self) -> None:
            seen.append(compat.running_pipeline_step())
            super().clear_runtime_states()

    stage = Stage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    given: Any = [stage] if "Interleaved" in kind else stage
    for verb, microbatches in (("step", 2), ("eval", 3)):
        x = torch.randn(2 * microbatches, 2)  # torch keeps the buffers of the first microbatches' shape
        schedule = getattr(pipelining, kind)(given, microbatches, nn.functional.mse_loss, scale_grads=False)
        getattr(schedule, verb)(x, target=torch.randn_like(x), losses=[])
    seen.append(compat.running_pipeline_step())
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
            return compat.running_pipeline_step()

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


def regions(reentrant: bool) -> list[tuple[Any, bool] | None]:
    seen = []

    def run(x: Tensor) -> Tensor:
        seen.append(compat.checkpointed_region())
        return x.sin().sin()

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=reentrant).sum().backward()
    seen.append(compat.checkpointed_region())
    return seen


def test_a_checkpointed_region_and_its_recompute_are_seen() -> None:
    first, again, outside = regions(reentrant=False)
    assert first is not None and again is not None, f"{TORCH}: saved-tensor hooks of torch.utils.checkpoint"
    assert not first[1] and again[1] and first[0] is again[0], f"{TORCH}: frame, target_frame_ref"
    assert outside is None
    assert regions(reentrant=True) == [None, None, None]


def test_hooks_of_others_are_no_region() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert compat.checkpointed_region() is None


def test_hooks_of_a_checkpoint_with_other_names_are_said() -> None:
    def pack(x: Tensor) -> Tensor:
        return x

    pack.__module__ = "torch.utils.checkpoint"
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, pack),
        pytest.raises(RuntimeError, match=re.escape(f"torch {torch.__version__} does not show which checkpointed")),
    ):
        current_checkpoint()
