"""docs/by_hand.py trains bit for bit as the library does, and starts its reductions while backward still runs."""

import ast
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo import load_module
from loops import assert_same, wrap
from python_processes import run_python
from torch import Tensor, nn

from maingrad.ddp import DistributedOptimizer
from maingrad.launch import simulate
from maingrad.te_integration import Linear

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs/by_hand.py"
SOURCE = FILE.read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
by_hand = load_module("by_hand", str(FILE))

STEPS = 4
BUCKETS = [{"5.weight", "5.bias", "4.weight", "4.bias"}, {"2.weight", "2.bias", "0.weight"}]
"""Names of the parameters: 5 is the head, 4 the norm, 2 the other linear layer and 0 the embedding."""
REDUCED = "a reduction starts"


class Iteration(NamedTuple):
    """What one iteration used and gave on one rank, gradients averaged over ranks."""

    batch: Tensor
    loss: Tensor
    main_grads: dict[str, Tensor]
    weights: dict[str, Tensor]


class Program:
    """One rank's run of the program ``main``, with what happens in it."""

    def __init__(self) -> None:
        self.names: dict[Tensor, str] = {}
        self.initial: dict[str, Tensor] = {}
        self.options: dict[str, Any] = {}
        self.main_grads: dict[str, Tensor] = {}
        self.iterations: list[Iteration] = []
        self.events: list[str] = []
        """Names of parameters whose hook has run, and ``REDUCED``."""

    def train_step(self, model: nn.Module, buckets: Any, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
        if not self.iterations:
            self.names = {param: name for name, param in model.named_parameters()}
            self.initial = weights_of(model)
            self.options = dict(optimizer.defaults)
            optimizer.register_step_pre_hook(lambda *_: self.gather_main_grads(buckets))
        loss = TRAIN_STEP(model, buckets, optimizer, batch)
        self.iterations.append(Iteration(batch, loss, self.main_grads, weights_of(model)))
        return loss

    def gather_main_grads(self, buckets: Any) -> None:
        """Whole averages: a rank has its shard's, and what else lies in its bucket is undefined."""
        kept = [bucket.grads.clone() for bucket in buckets]
        for bucket in buckets:
            dist.all_gather(list(bucket.grads.chunk(dist.get_world_size())), bucket.grad_shard.clone())
        self.main_grads = {name: param.main_grad.clone() for param, name in self.names.items()}
        for bucket, grads in zip(buckets, kept, strict=True):
            bucket.grads.copy_(grads)


TRAIN_STEP, TAKE_GRAD, REDUCE_SCATTER = by_hand.train_step, by_hand.take_grad, dist.reduce_scatter


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    """The program on two simulated ranks."""
    programs = [Program(), Program()]

    def take_grad(bucket: Any, param: Tensor) -> None:
        events = programs[dist.get_rank()].events
        events.append(programs[dist.get_rank()].names[param])
        TAKE_GRAD(bucket, param)

    def reduce_scatter(*args: Any, async_op: bool) -> Any:
        assert async_op
        assert torch._C._current_graph_task_id() != -1, "a backward is under way"
        programs[dist.get_rank()].events.append(REDUCED)
        return REDUCE_SCATTER(*args, async_op=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_hand, "STEPS", STEPS)
        patch.setattr(by_hand, "train_step", lambda *args: programs[dist.get_rank()].train_step(*args))
        patch.setattr(by_hand, "take_grad", take_grad)
        patch.setattr(dist, "reduce_scatter", reduce_scatter)
        patch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)  # simulated ranks have a group
        patch.setattr(dist, "destroy_process_group", lambda: None)
        simulate(lambda: by_hand.main(dist.get_rank(), ""), 2)
    return programs


def library_twin() -> nn.Sequential:
    layers = [nn.Embedding(256, 16), nn.Flatten(), fused(64, 128), nn.GELU(), nn.LayerNorm(128), fused(128, 256)]
    return nn.Sequential(*layers).to(torch.bfloat16)


def fused(in_features: int, out_features: int) -> Linear:
    return Linear(in_features, out_features, fuse_wgrad_accumulation=True)


def train_with_library(programs: list[Program], num_buckets: int) -> tuple[list[Iteration], list[int]]:
    """A rank's iterations over the program's batches, and the fused writes of its parameters."""
    program = programs[dist.get_rank()]
    model = library_twin()
    model.load_state_dict(program.initial)
    ddp = wrap(model, use_distributed_optimizer=True, overlap_grad_reduce=True, num_buckets=num_buckets)
    assert len(ddp.buckets) == num_buckets
    optimizer = DistributedOptimizer(ddp, lr=program.options["lr"])
    iterations = []
    for batch, *_ in program.iterations:
        with ddp.no_sync():
            for rows in batch[:-1]:
                (loss_of(ddp, rows) / len(batch)).backward()
        loss = loss_of(ddp, batch[-1])
        (loss / len(batch)).backward()
        main_grads = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        iterations.append(Iteration(batch, loss.detach(), main_grads, weights_of(model)))
    return iterations, [record.num_fused_writes for record in ddp.records]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(rows[:, :-1]).float(), rows[:, -1])


@pytest.mark.parametrize("num_buckets", [1, 2])
def test_the_library_gives_the_same_bits(programs: list[Program], num_buckets: int) -> None:
    for program, (iterations, fused_writes) in zip(
        programs, simulate(train_with_library, 2, programs, num_buckets), strict=True
    ):
        assert sorted(fused_writes) == [0] * 5 + [STEPS * by_hand.MICROBATCHES] * 2
        assert len(program.iterations) == STEPS
        before = program.initial
        for mine, theirs in zip(program.iterations, iterations, strict=True):
            assert len(mine.batch) == 2
            assert torch.equal(mine.loss, theirs.loss)
            assert all(grad.dtype is torch.float32 and grad.any() for grad in mine.main_grads.values())
            assert_same(mine.main_grads, theirs.main_grads)
            assert_same(mine.weights, theirs.weights)
            assert all(not torch.equal(before[name], weight) for name, weight in mine.weights.items())
            before = mine.weights


def test_ranks_agree_on_weights_and_train_on_other_data(programs: list[Program]) -> None:
    for first, second in zip(*(program.iterations for program in programs), strict=True):
        assert_same(first.weights, second.weights)
        assert_same(first.main_grads, second.main_grads)
        assert not torch.equal(first.batch, second.batch)
        assert not torch.equal(first.loss, second.loss)


def test_a_reduction_starts_before_backward_has_ended(programs: list[Program]) -> None:
    """The head's bucket is under way when the layers below get their gradients; the first microbatch starts nothing."""
    everything = BUCKETS[0] | BUCKETS[1]
    for program in programs:
        events = iter(program.events)
        for _ in range(STEPS):
            assert {next(events) for _ in everything} == everything, "first microbatch"
            for bucket in BUCKETS:
                assert {next(events) for _ in bucket} == bucket
                assert next(events) == REDUCED
        assert next(events, None) is None


def test_the_file_is_short_and_needs_torch_alone() -> None:
    assert len(SOURCE.splitlines()) <= 120
    imported = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert imported - sys.stdlib_module_names == {"torch"}


def test_the_page_tells_of_every_step() -> None:
    """Steps are numbered in the order of the file, and in this order the page says which file does them."""
    numbers = re.findall(r"# (\d+)\. ", SOURCE)
    assert numbers == [str(number) for number in range(1, 11)]
    walk = ARCHITECTURE.partition("\n## ")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|.*$", walk, re.MULTILINE)
    assert rows == numbers
    assert len(re.findall(r"^\| \d+ \|.*`\w+/[\w/]+\.py`.*$", walk, re.MULTILINE)) == len(rows), "each names a file"


@pytest.mark.in_turn
def test_the_program_runs_as_the_page_prints_it(programs: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    command = "python docs/by_hand.py"
    assert f"\n    {command}  #" in SOURCE
    assert f"```bash\n{command}\n```" in ARCHITECTURE
    monkeypatch.chdir(ROOT)
    ended = run_python(*command.split()[1:], timeout=100.0)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    printed = re.findall(r"^step (\d+) loss (\d\.\d{3})$", ended.stdout, re.MULTILINE)
    assert len(printed) == len(ended.stdout.splitlines())
    assert [int(step) for step, _ in printed] == list(range(1, by_hand.STEPS + 1))
    losses = [float(loss) for _, loss in printed]
    assert losses[0] > 5.0, "nothing is known of 256 bytes"
    assert sum(losses[-5:]) / 5 < 3.0
    assert losses[:STEPS] == [round(iteration.loss.item(), 3) for iteration in programs[0].iterations], "as simulated"


ROWS = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \|", ARCHITECTURE, re.M)


def test_the_library_names_each_step_where_it_happens() -> None:
    """In the first file of the step's row in docs/architecture.md, a comment has the step's number."""
    for step, files in ROWS:
        file = re.search(r"`([\w/]+\.py)`", files)
        assert file is not None
        assert re.search(rf"# [Ss]tep {step} of docs/by_hand\.py", (ROOT / file[1]).read_text()), file[1]


def test_every_step_has_a_row() -> None:
    assert [step for step, _ in ROWS] == re.findall(r"# (\d+)\. ", SOURCE)
