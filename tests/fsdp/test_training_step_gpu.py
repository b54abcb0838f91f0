"""``maingrad.fsdp.GraphedTrainingStep`` on GPUs: the numbers of eager training, bit for bit, with NCCL."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from graph_memory import reserved_before_graphs
from graphed_sharded import EVENTS, PLACEMENTS, ShardedProgram, train_sharded_program, train_with_teacher
from graphed_training import FORMS, differences
from torch import Tensor, nn

from maingrad.ddp import WORLD_OF_ONE
from maingrad.fsdp import GraphedTrainingStep, fully_shard

pytestmark = pytest.mark.gpu

PROGRAMS = {
    **{
        f"{placements}, {form}": ShardedProgram(placements=placements, form=form)
        for placements, form in itertools.product(PLACEMENTS, FORMS)
    },
    **{event: ShardedProgram(events=(event,)) for event in EVENTS},
    **{
        f"{placements}, all events": ShardedProgram(
            placements=placements, events=tuple(event for event in EVENTS if event not in ("mode", "other shape"))
        )
        for placements in PLACEMENTS
    },
    "loss scale": ShardedProgram(scaler=True),
    "SGD, no clipping": ShardedProgram(optimizer="SGD", clip=None),
    "bf16 shards, Adam": ShardedProgram(dtype=torch.bfloat16, optimizer="Adam"),
    "stays whole, four microbatches": ShardedProgram(microbatches=4, reshards=False),
    "reduced once": ShardedProgram(microbatches=3, every_microbatch=False),
}


def compare(names: list[str], size: int) -> dict[str, Any]:
    """On each of a job's gloo processes, with an NCCL group beside it."""
    torch.cuda.set_device(dist.get_rank())
    mesh = dist.new_group(backend="nccl") if size > 1 else WORLD_OF_ONE
    found = {}
    for name in names:
        program = ShardedProgram(**{**vars(PROGRAMS[name]), "device": f"cuda:{dist.get_rank()}", "mesh": mesh})
        try:
            eager = train_sharded_program(program, graphed=False)
            found[name] = differences(eager, train_sharded_program(program, graphed=True))
        except Exception as error:
            found[name] = [f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"]
    for student, teacher in itertools.product(("ddp", "zero1", "zero3"), repeat=2):
        options: dict[str, Any] = {"device": f"cuda:{dist.get_rank()}", "group": mesh}
        try:
            eager = train_with_teacher(student, teacher, graphed=False, **options)
            found[f"{student} reads {teacher}"] = differences(
                eager, train_with_teacher(student, teacher, graphed=True, **options)
            )
        except Exception as error:
            found[f"{student} reads {teacher}"] = [f"{type(error).__name__}: {error}"]
    return found


@pytest.mark.timeout(330)  # the ranks give up first, and show where they are
@pytest.mark.parametrize("size", [1, 2])
def test_equals_eager(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    for found in run_ranks(compare, size, list(PROGRAMS), size, timeout=300.0):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def job_of(model: nn.Module, **options: Any) -> tuple[Any, Any, Any]:
    """The sharded model, an iteration of it, and the same iteration as a graph."""
    for layer in model:
        fully_shard(layer, WORLD_OF_ONE)
    fully_shard(model, WORLD_OF_ONE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train_step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if options.get("reads"):
            loss.item()
        return loss

    return model, train_step, GraphedTrainingStep(train_step, model, optimizer)


def test_a_failed_capture_leaves_the_model_usable() -> None:
    torch.manual_seed(0)
    options = {"reads": True}
    _, train_step, step = job_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda(), **options)
    x = torch.randn(4, 8, device="cuda")
    losses = [step(x), step(x)]
    with pytest.raises(RuntimeError) as caught:
        step(x)
    assert any(".item()" in note for note in caught.value.__notes__)
    losses += [train_step(x).detach() for _ in range(3)]
    assert torch.stack(losses).tolist() == sorted(torch.stack(losses).tolist(), reverse=True)


def test_memory_is_that_of_eager_steps_and_is_given_back() -> None:
    layers = (nn.Linear(2048, 2048, bias=False) for _ in range(16))
    _, train_step, step = job_of(nn.Sequential(*layers).cuda())
    x = torch.randn(16384, 2048, device="cuda")  # activations: 2 GiB
    for _ in range(2):
        train_step(x)
    before = reserved_before_graphs(train_step, step, x)
    assert torch.cuda.memory_reserved() > before
    step.reset()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # cuBLAS keeps a workspace of 32 MiB for the stream, on the main thread and on autograd's.
    assert torch.cuda.memory_reserved() <= before + 2**27
