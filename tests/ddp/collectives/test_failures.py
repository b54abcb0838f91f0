"""Ranks that die, hang, differ or take other numbers of steps: the others end with a report, within the timeout.

Every test here runs real processes, and asserts what the survivors say and the exit codes of all.
"""

import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ending_ranks import Store, assert_silent, run_to_the_end, the_report
from loops import FEATURES, ddp_backward, loss_of, make_batches, make_model, wrap
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer, save_checkpoint
from maingrad.te_integration import Linear

ALL_REDUCE: dict[str, Any] = {"overlap_grad_reduce": True}
ZERO1: dict[str, Any] = {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "overlap_param_gather": True}
PLAIN_ZERO1: dict[str, Any] = {"use_distributed_optimizer": True}
HYBRID: dict[str, Any] = {**ZERO1, "num_distributed_optimizer_instances": 2}
CONFIGS = {"all-reduce": ALL_REDUCE, "ZeRO-1": ZERO1, "ZeRO-1 without overlap": PLAIN_ZERO1, "hybrid": HYBRID}

BUCKET_SIZE = 64  # two buckets


# ---- What the ranks run. ----


class Trap(nn.Module):
    """The identity; its backward calls ``spring`` if that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.spring: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return _Trap.apply(x, self)


class _Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.trap.spring is not None:
            ctx.trap.spring()
        return grad, None


def make_trapped() -> nn.Sequential:
    model = make_model()
    model.insert(2, Trap())  # the last layers' gradients are there by then
    return model


def end_by(how: str) -> None:
    """End this process, or make it hang."""
    if how == "os._exit":
        os._exit(7)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exception":
        raise KeyError("a mistake in somebody's model")
    if how == "return":
        sys.exit(0)
    time.sleep(float(how))
    os._exit(0)


EXIT_CODES = {"os._exit": 7, "SIGKILL": -9, "exception": 1, "return": 0}


def one_ends(config: dict[str, Any], victim: int, when: str, how: str) -> None:
    """Train; one rank ends, or stops for a while, in its second step."""
    doomed = dist.get_rank() == victim
    if doomed and when == "before wrapping":
        end_by(how)
    module = make_trapped()
    model = wrap(module, bucket_size=BUCKET_SIZE, **config)
    optimizer = DistributedOptimizer(model, max_grad_norm=1.0)
    for step in range(4):
        if doomed and step == 1:
            if when == "between steps":
                end_by(how)
            elif when == "in backward":
                module[2].spring = lambda: end_by(how)
        ddp_backward(model, make_batches(2))
        if doomed and step == 1 and when == "before the optimizer's step":
            end_by(how)
        optimizer.step()
        model.zero_grad_buffer()


# ---- What the survivors say. ----


@cache
def known_buckets() -> set[str]:
    """The names of all buckets, which have the names of their first and last parameters."""
    return {bucket.name for bucket in wrap(make_trapped(), bucket_size=BUCKET_SIZE).buckets}


def assert_names_a_bucket(what: str) -> None:
    found = re.fullmatch(r"(\w+) of (bucket \d+ \(.*\))", what)
    assert found, what
    assert found[1] in ("all_reduce", "reduce_scatter", "all_gather")
    assert found[2] in known_buckets()


# ---- A rank that dies. ----

DEATHS = [
    (2, "all-reduce", 1, "in backward", "SIGKILL", "launcher"),
    (3, "ZeRO-1", 2, "in backward", "os._exit", "launcher"),
    (4, "hybrid", 1, "in backward", "SIGKILL", "launcher"),
    (4, "hybrid", 3, "between steps", "exception", "file"),
    (3, "ZeRO-1", 0, "between steps", "SIGKILL", "rank 0"),
    (3, "ZeRO-1 without overlap", 1, "before the optimizer's step", "SIGKILL", "rank 0"),
    (3, "all-reduce", 1, "before the optimizer's step", "exception", "launcher"),
]
ALL_DEATHS = [
    (4, config, victim, when, how, store)
    for config in CONFIGS
    for victim in (0, 2)
    for when in ("in backward", "between steps", "before the optimizer's step")
    for how in ("os._exit", "SIGKILL", "exception")
    for store in ("launcher", "rank 0")
]


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "world_size, config, victim, when, how, store",
    [*DEATHS, *(pytest.param(*death, marks=pytest.mark.slow) for death in ALL_DEATHS)],
)
@pytest.mark.sampled(1)
def test_a_rank_that_dies_is_named_by_all_others(
    world_size: int, config: str, victim: int, when: str, how: str, store: Store
) -> None:
    start = time.monotonic()
    # All get to know within moments, not after the timeout.
    all_ended = run_to_the_end(
        one_ends, world_size, CONFIGS[config], victim, when, how, store=store, collective_timeout=60.0
    )
    assert time.monotonic() - start < 50
    for rank, ended in enumerate(all_ended):
        if rank == victim:
            assert ended.exit_code == EXIT_CODES[how], ended.output
            continue
        report = the_report(rank, ended)
        if report["what"] != "the sum of the gradients' squares":
            assert_names_a_bucket(report["what"])
        others = set(range(world_size)) - {rank, victim}
        if victim == 0 and store == "rank 0":
            assert "the store, through which ranks tell each other, is out of reach" in report["fates"]
            assert "look whether the process that serves it has ended (rank 0, " in report["fates"]
        else:
            assert_silent(report, victim)
            told = re.findall(r"rank (\d+)(?: in|,|$)", report["fates"].partition("\n")[2], re.MULTILINE)
            assert {int(other) for other in told} == others


def one_ends_beside_experts(victim: int) -> None:
    """Ranks 0 and 2 share experts, ranks 1 and 3 too; only some of the groups have lost a rank."""
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Linear(16, 4))
    for parameter in model[1].parameters():
        parameter.allreduce = False
    mine = dist.get_rank() % 2
    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    wrapped = DistributedDataParallel(model, expert_process_group=groups[mine])
    for step in range(3):
        loss_of(wrapped, make_batches(1)[0]).backward()
        if step == 1 and dist.get_rank() == victim:
            end_by("SIGKILL")
        wrapped.finish_grad_sync()
        wrapped.zero_grad_buffer()


@pytest.mark.in_turn
def test_a_rank_that_dies_is_named_by_ranks_that_share_no_experts_with_it() -> None:
    all_ended = run_to_the_end(one_ends_beside_experts, 4, 3, collective_timeout=60.0)
    assert all_ended[3].exit_code == EXIT_CODES["SIGKILL"]
    for rank in (0, 1, 2):
        report = the_report(rank, all_ended[rank])
        assert_silent(report, 3)


@pytest.mark.in_turn
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch chooses NCCL too, which wants a GPU for each rank")
def test_a_rank_that_dies_is_named_where_torch_chose_the_backend() -> None:
    all_ended = run_to_the_end(one_ends, 3, ZERO1, 2, "in backward", "SIGKILL", collective_timeout=60.0, backend=None)
    for rank in (0, 1):
        report = the_report(rank, all_ended[rank])
        assert_silent(report, 2)
        assert report["fates"].endswith(f"  failed too: rank {1 - rank}\n")


@pytest.mark.in_turn
def test_a_rank_that_dies_before_it_wraps_its_model_is_named() -> None:
    all_ended = run_to_the_end(one_ends, 3, ALL_REDUCE, 2, "before wrapping", "os._exit", collective_timeout=60.0)
    assert all_ended[2].exit_code == 7
    for rank in (0, 1):
        report = the_report(rank, all_ended[rank])
        assert report["what"] == "the comparison of configs between ranks"
        silent, same = report["fates"].splitlines()
        assert silent.startswith("  silent for 3 s: rank 2: look whether it has ended, ")
        assert same == f"  failed too: rank {1 - rank}"


@pytest.mark.in_turn
@pytest.mark.parametrize("config", ["hybrid", pytest.param("all-reduce", marks=pytest.mark.slow)])
def test_a_rank_that_hangs_is_named_within_the_timeout(config: str) -> None:
    """The timeout also holds in groups that the wrapper makes."""
    all_ended = run_to_the_end(one_ends, 4, CONFIGS[config], 1, "in backward", "5.0", collective_timeout=1.0)
    assert all_ended[1].exit_code == 0
    for rank in (0, 2, 3):
        report = the_report(rank, all_ended[rank])
        assert_names_a_bucket(report["what"])
        assert re.search("Timed out waiting 1000ms|onnection|timeout caused pair closure", report["why"]), report["why"]
        assert 0.7 < float(report["seconds"]) < 3.0
        assert_silent(report, 1)
        _, *told = report["fates"].splitlines()
        assert {int(other) for line in told for other in re.findall(r"rank (\d+)", line)} == {0, 2, 3} - {rank}


def reads_on(victim: int) -> list[str]:
    """Read parameters again and again after their gather has failed."""
    model = wrap(make_model(), bucket_size=BUCKET_SIZE, **ZERO1)
    optimizer = DistributedOptimizer(model)
    layer = model.module[3]
    last: Tensor = layer.weight  # in another bucket
    ddp_backward(model, make_batches(2))
    if dist.get_rank() == victim:
        end_by("os._exit")
    optimizer.step()
    errors = []
    for read in (
        model.state_dict, model.state_dict, last.sum, last.clone, lambda: layer.weight.sum(),
        lambda: layer(torch.ones(1)), lambda: loss_of(model, make_batches(1)[0]),
    ):  # fmt: skip
        with pytest.raises(RuntimeError) as raised:
            read()
        errors.append(f"{type(raised.value).__name__} {raised.value}")
    return errors


@pytest.mark.in_turn
def test_parameters_whose_gather_failed_never_show_old_values() -> None:
    all_ended = run_to_the_end(reads_on, 2, 1)
    assert [ended.exit_code for ended in all_ended] == [0, 7], all_ended[0].output
    errors = all_ended[0].returned
    assert len(errors) == 7
    for error in errors:
        assert re.match(
            r"CollectiveError rank 0 waited \d.\d\d s for all_gather of bucket \d .*\n  silent for 3 s: rank 1:", error
        )


# ---- Different numbers of steps. ----


def other_number_of_steps(config: dict[str, Any], then: str, folder: str) -> None:
    """Rank 1 takes two steps, the others three."""
    model = wrap(make_trapped(), bucket_size=BUCKET_SIZE, **config)
    optimizer = DistributedOptimizer(model, max_grad_norm=1.0)
    for _ in range(2 if dist.get_rank() == 1 else 3):
        ddp_backward(model, make_batches(2))
        optimizer.step()
        model.zero_grad_buffer()
    if then == "returns":
        return
    if then == "lingers":
        dist.destroy_process_group()
        time.sleep(7.0)
    elif then == "barrier":
        dist.barrier()
    elif then == "metric":
        dist.all_reduce(torch.ones(1))
    elif then == "checkpoint":
        save_checkpoint(folder, model, optimizer)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "config, then",
    [
        ("all-reduce", "returns"),
        ("ZeRO-1", "barrier"),
        ("all-reduce", "metric"),
        *(
            pytest.param(config, then, marks=pytest.mark.slow)
            for config in CONFIGS
            for then in ("returns", "lingers", "barrier", "metric", "checkpoint")
        ),
    ],
)
@pytest.mark.sampled(1)
def test_ranks_that_take_other_numbers_of_steps_end(config: str, then: str, tmp_path: Path) -> None:
    all_ended = run_to_the_end(
        other_number_of_steps, 4, CONFIGS[config], then, str(tmp_path), collective_timeout=3.0, limit=20.0
    )
    early = all_ended[1]
    if then in ("returns", "lingers"):
        assert early.exit_code == 0, early.output
    else:  # its own collective fails, or gloo finds that sizes differ
        assert early.exit_code in (1, -signal.SIGABRT), early.output
        assert "Timed out" in early.output or "onnection" in early.output or "mismatch" in early.output
    for rank in (0, 2, 3):
        report = the_report(rank, all_ended[rank])
        assert_names_a_bucket(report["what"])
        assert float(report["seconds"]) < 5.0
        if then == "checkpoint":
            assert "rank 1 in word from all ranks after the beginning of save_checkpoint" in report["fates"]
        else:
            assert_silent(report, 1)


# ---- Different numbers of microbatches. ----


def uneven_batches(rank: int, count: int) -> list[Tensor]:
    """Small integers, for which fp32 sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(-3, 4, (2 + index, FEATURES), generator=generator).float() for index in range(count)]


def make_whole(fuse: bool) -> nn.Sequential:
    model = nn.Sequential(
        Linear(FEATURES, 16, fuse_wgrad_accumulation=fuse), nn.ReLU(), Linear(16, 4, fuse_wgrad_accumulation=fuse)
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    return model


def uneven(counts: list[int], config: dict[str, Any], steps: int) -> list[dict[str, Tensor]]:
    """The weights after each step; ranks have different numbers of microbatches."""
    rank = dist.get_rank()
    model = wrap(make_whole(True), bucket_size=BUCKET_SIZE, calculate_per_token_loss=True, **config)
    optimizer = DistributedOptimizer(model, lr=0.5, optimizer_class=torch.optim.SGD)
    weights = []
    for step in range(steps):
        batches = uneven_batches(10 * step + rank, counts[rank])
        tokens = torch.tensor([sum(len(batch) for batch in batches)])
        with model.no_sync():
            for batch in batches[:-1]:
                model(batch).sum().backward()
        for batch in batches[-1:]:
            model(batch).sum().backward()
        with NothingIsRead():
            model.finish_grad_sync(tokens)
        optimizer.step()
        model.zero_grad_buffer()
        weights.append({name: param.detach().clone() for name, param in model.module.named_parameters()})
    return weights


class NothingIsRead(TorchDispatchMode):
    """No operation hands a tensor's value to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READERS, f"{func} reads a value"
        return func(*args, **(kwargs or {}))


READERS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
}


@pytest.mark.in_turn
@pytest.mark.parametrize("counts", [[3, 1], [2, 0, 1], [0, 0, 4]])
@pytest.mark.parametrize("config", ["all-reduce", "ZeRO-1"])
@pytest.mark.sampled(2)
def test_ranks_may_have_different_numbers_of_microbatches(counts: list[int], config: str) -> None:
    steps = 2
    plain = make_whole(False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    all_ended = run_to_the_end(uneven, len(counts), counts, CONFIGS[config], steps)
    assert all(ended.exit_code == 0 for ended in all_ended), "\n".join(ended.output for ended in all_ended)
    for step in range(steps):
        batches = torch.cat([b for rank, count in enumerate(counts) for b in uneven_batches(10 * step + rank, count)])
        optimizer.zero_grad()
        plain(batches).sum().backward()
        for param in plain.parameters():
            assert param.grad is not None
            param.grad /= len(batches)
        optimizer.step()
        for ended in all_ended:
            for name, param in plain.named_parameters():
                # Sums of whole numbers, divided once by the tokens; the second step's are rounded.
                bound = 0.0 if step == 0 else 1e-5
                assert torch.allclose(ended.returned[step][name], param, rtol=bound, atol=bound), (step, name)


# ---- Models that differ between ranks. ----


def wrap_what_differs(difference: str) -> None:
    rank = dist.get_rank()
    odd = rank == 2
    names = {"name": "ac" if odd else "ab", "order": "ba" if odd else "ab"}.get(difference, "ab")
    model = nn.ModuleDict({name: nn.Linear(3, 4 if difference == "shape" and odd else 3) for name in names})
    if difference == "dtype" and odd:
        model["b"].double()
    if difference == "frozen" and odd:
        model["b"].weight.requires_grad_(False)
    if difference == "number" and odd:
        model["extra"] = nn.Linear(1, 1)
    config = {
        "config": {"bucket_size": 100 + rank},
        "gathers": {"use_distributed_optimizer": True, "overlap_param_gather": odd},
        "instances": {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 3 if odd else 1},
    }
    wrap(model, **config.get(difference, {}))


@pytest.mark.parametrize(
    "difference, named",
    [
        ("name", r"the model .*: rank 0 has 'b.bias' .* where rank 2 has 'c.bias' .*"),
        ("shape", r"the model .*: rank 0 has 'b.bias' torch.float32 \[3\] .* where rank 2 has 'b.bias' .* \[4\] .*"),
        ("dtype", r"the model .*: rank 0 has 'b.bias' torch.float32 .* where rank 2 has 'b.bias' torch.float64 .*"),
        ("order", r"the model .*: rank 0 has 'b.bias' .* where rank 2 has 'a.bias' .*"),
        ("frozen", r"the model .*: rank 0 has 'b.weight' .* where rank 2 has 'a.bias' .*"),
        ("number", r"the model .*: rank 0 has 'b.bias' .* where rank 2 has 'extra.bias' .*"),
        ("config", r"the config .*: rank 0 has bucket_size = 100 where rank 1 has bucket_size = 101"),
        ("gathers", r"the config .*: rank 0 has overlap_param_gather = False where rank 2 has .* = True"),
        ("instances", r"the config .*: rank 0 has num_d.* = 1 where rank 2 has num_d.* = 3"),
    ],
)
@pytest.mark.sampled(2)
def test_models_that_differ_end_every_rank(difference: str, named: str) -> None:
    for rank, ended in enumerate(run_to_the_end(wrap_what_differs, 3, difference)):
        assert ended.exit_code == 1
        last = ended.output.strip().rpartition("\n")[2]
        named_here = named.replace(" .*:", rf" differs between ranks \(this is rank {rank}\):", 1)
        assert re.fullmatch("ValueError: " + named_here, last), ended.output


# ---- Under torchrun. ----

SCRIPT = """
import os, signal, sys
import torch.distributed as dist
sys.path += [{support!r}]
from loops import ddp_backward, make_batches, make_model, wrap
from maingrad.ddp import DistributedOptimizer

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when the first rank is gone
dist.init_process_group("gloo")
model = wrap(make_model(), bucket_size=64, overlap_grad_reduce=True, use_distributed_optimizer=True)
optimizer = DistributedOptimizer(model)
for step in range(3):
    if step == 1 and dist.get_rank() == 1:
        os._exit(7)
    ddp_backward(model, make_batches(2))
    optimizer.step()
    model.zero_grad_buffer()
"""


@pytest.mark.slow
def test_torchrun_ends_with_the_survivors_reports(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(support=str(Path(__file__).parents[2] / "support")))
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    for rank in (0, 2):
        found = re.findall(rf"CollectiveError: rank {rank} waited .* for (.*), which failed: .*", ran.stderr)
        assert len(found) == 1, ran.stderr
        assert re.fullmatch(r"(all_gather|reduce_scatter) of bucket \d \(.*\)", found[0])
    assert len(re.findall("silent for 3 s: rank 1: look", ran.stderr)) == 2
    assert re.search(r"exitcode +: 7 ", ran.stderr), "torchrun's summary names the first to fail"
