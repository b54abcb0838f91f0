"""``GraphedTrainingStep`` on GPUs: CUDA graphs and NCCL give the numbers of eager training, bit for bit."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from graph_memory import reserved_before_graphs
from graphed_training import CONFIGS, EVENTS, FORMS, STATES, Program, differences, train
from python_processes import run_python
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer, GraphedTrainingStep
from maingrad.ddp.gathers import param_gather as gathering

pytestmark = pytest.mark.gpu

EVENTS_BUT_MODE = tuple(event for event in EVENTS if event != "mode")
PROGRAMS = {
    **{f"{config}, {form}": Program(config=config, form=form) for config, form in itertools.product(CONFIGS, FORMS)},
    **{event: Program(events=(event,)) for event in EVENTS},
    "copy engines": Program(config="ZeRO-1, copy engines", events=("evaluate",)),
    **{f"graphed, {form}": Program(form=form, auto=True, events=("evaluate", "EMA")) for form in FORMS},
    "graphed, everything": Program(auto=True, steps=9, events=EVENTS_BUT_MODE),
    "per token": Program(per_token=True),
    "loss scale": Program(dtype=torch.float16, scaler=True),
    "SGD": Program(optimizer="SGD"),
    **{state: Program(state=state, events=EVENTS_BUT_MODE) for state in STATES},
    "fp32, Adam": Program(dtype=torch.float32, optimizer="Adam"),
    "four microbatches, no clipping": Program(microbatches=4, clip=None),
}


def compare(names: list[str], size: int) -> dict[str, Any]:
    """On each of a job's gloo processes, with an NCCL group beside it."""
    torch.cuda.set_device(dist.get_rank())
    group = dist.new_group(backend="nccl") if size > 1 else None
    found = {}
    for name in names:
        program = Program(**{**vars(PROGRAMS[name]), "device": f"cuda:{dist.get_rank()}"})
        try:
            found[name] = differences(
                train(program, graphed=False, group=group), train(program, graphed=True, group=group)
            )
        except Exception as error:
            found[name] = [f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"]
    return found


@pytest.mark.timeout(330)  # the ranks give up first, and show where they are
@pytest.mark.parametrize("size", [1, 2])
def test_equals_eager(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    for found in run_ranks(compare, size, list(PROGRAMS), size, timeout=300.0):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def compare_delayed() -> dict[str, list[str]]:
    """Gathers that sleep on one rank, while the host is far ahead."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    program = Program(device=f"cuda:{rank}", steps=12)
    eager = train(program, graphed=False, group=group)
    gather, count = gathering.all_gather_shards, 0

    def slow(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count % 5 == rank:
            torch.cuda._sleep(50_000_000)
        return gather(*args, **kwargs)

    gathering.all_gather_shards = slow
    try:
        return {"differences": differences(eager, train(program, graphed=True, group=group))}
    finally:
        gathering.all_gather_shards = gather


def test_replays_wait_for_gathers() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    assert run_ranks(compare_delayed, 2, timeout=120.0) == [{"differences": []}] * 2


def job_of(
    module: nn.Module, look_at: Callable[[torch.Tensor], Any] = lambda loss: None
) -> tuple[DistributedDataParallel, Any, Any]:
    """The wrapped module, an iteration of it that ends with a look at the loss, and the same iteration as a graph."""
    model = DistributedDataParallel(module)
    optimizer = DistributedOptimizer(model)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        model.zero_grad_buffer()
        look_at(loss)
        return loss

    return model, train_step, GraphedTrainingStep(train_step, model, optimizer)


def test_a_failed_capture_leaves_the_model_usable() -> None:
    torch.manual_seed(0)
    losses: list[float] = []
    model, train_step, step = job_of(nn.Linear(8, 8).cuda(), lambda loss: losses.append(loss.item()))
    x = torch.randn(4, 8, device="cuda")
    step(x)
    step(x)
    with pytest.raises(RuntimeError) as caught:
        step(x)
    assert any(".item()" in note for note in caught.value.__notes__)
    assert model.is_clear
    for _ in range(3):
        train_step(x)
    assert losses == sorted(losses, reverse=True)


def test_a_loss_that_was_kept_with_its_graph() -> None:
    """Nodes of parameters that belong to the default stream are refused by name, where they are alive in a capture."""
    torch.manual_seed(0)
    model, train_step, step = job_of(nn.Linear(8, 8).cuda())
    x = torch.randn(4, 8, device="cuda")
    kept = [train_step(x), model(x).sum()]
    losses = [step(x) for _ in range(2)]
    with pytest.raises(RuntimeError) as caught:
        step(x)
    assert any("detach()" in note for note in caught.value.__notes__)
    del caught
    kept.clear()
    losses += [step(x) for _ in range(3)]
    kept.append(model(x).sum())
    losses += [step(x) for _ in range(3)]
    assert torch.stack(losses).tolist() == sorted(torch.stack(losses).tolist(), reverse=True)
    assert step.num_graphs == 1


def test_memory_is_given_back_and_the_host_is_free() -> None:
    _, train_step, step = job_of(nn.Sequential(*(nn.Linear(512, 512) for _ in range(24))).cuda().bfloat16())
    x = torch.randn(65536, 512, device="cuda", dtype=torch.bfloat16)  # activations: 1.6 GiB
    train_step(x)
    before = reserved_before_graphs(train_step, step, x)
    ahead = 0
    for _ in range(20):
        torch.cuda.synchronize()
        step(x)
        ahead += not torch.cuda.current_stream().query()  # the host has returned before the GPU has finished
    assert ahead > 10
    assert torch.cuda.memory_reserved() > before
    for _ in range(2):
        step.reset()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # cuBLAS keeps a workspace of 32 MiB for the stream, on the main thread and on autograd's.
        assert torch.cuda.memory_reserved() <= before + 2**27
        for _ in range(4):
            step(x)


PROGRAM = """
import os, torch, torch.distributed as dist
from maingrad.ddp import DistributedDataParallel, DistributedOptimizer, GraphedTrainingStep

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
model = DistributedDataParallel(torch.nn.Linear(16, 16).to(device))
optimizer = DistributedOptimizer(model, lr=1e-3)


def train_step(x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


step = GraphedTrainingStep(train_step, model, optimizer)
for _ in range(5):
    step(torch.randn(4, 16, device=device))
step.reset()
dist.destroy_process_group()
"""


@pytest.mark.gpu(count=2)
def test_a_program_that_frees_its_graphs_ends(tmp_path: Path) -> None:
    """As docs/cuda_graphs.md says: NCCL waits for ever for a communicator that a living graph has captured."""
    (tmp_path / "program.py").write_text(PROGRAM)
    launched = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / "program.py")
    done = run_python(*launched, timeout=60.0)
    assert done.returncode == 0, done.stdout + done.stderr
