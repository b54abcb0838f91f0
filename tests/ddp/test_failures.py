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
from ending_ranks import Ended, Store, run_to_the_end
from loops import FEATURES, ddp_backward, loss_of, make_batches, make_model, wrap
from torch import Tensor, nn

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
    """Hands its input on; its backward runs ``spring`` once it is set."""

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
    """End this process, or hold it up."""
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
def known_buckets() -> dict[str, int]:
    """Bucket names and their numbers of parameters."""
    return {bucket.name: len(bucket.records) for bucket in wrap(make_trapped(), bucket_size=BUCKET_SIZE).buckets}


REPORT = re.compile(
    r"^maingrad\.ddp\.failure_report\.CollectiveError: rank (?P<rank>\d+) waited (?P<seconds>\d+\.\d\d) s for "
    r"(?P<what>.*), which failed: (?P<why>.*)\n(?P<fates>(?:  .*\n)*)",
    re.MULTILINE,
)


def the_report(rank: int, ended: Ended) -> re.Match[str]:
    """The one report of a survivor, by which its process ended."""
    assert ended.exit_code == 1, f"rank {rank}: {ended.output}"
    reports = list(REPORT.finditer(ended.output))
    assert len(reports) == 1, ended.output
    assert ended.output.endswith(reports[0].group()), "it is the last word"
    assert int(reports[0]["rank"]) == rank
    return reports[0]


def assert_names_a_bucket(what: str) -> None:
    found = re.fullmatch(r"(\w+) of (bucket \d+ \(.*\)), (\d+) parameters?", what)
    assert found, what
    assert found[1] in ("all_reduce", "reduce_scatter", "all_gather")
    assert known_buckets()[found[2]] == int(found[3])


def assert_gone(report: re.Match[str], victim: int, all_ended: list[Ended]) -> None:
    pid = all_ended[victim].pid
    assert re.match(rf"  gone: rank {victim} \(process {pid} on \S+ has ended\)\n", report["fates"]), report.group()


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


@pytest.mark.parametrize(
    "world_size, config, victim, when, how, store",
    [*DEATHS, *(pytest.param(*death, marks=pytest.mark.slow) for death in ALL_DEATHS)],
)
def test_a_rank_that_dies_is_named_by_all_others(
    world_size: int, config: str, victim: int, when: str, how: str, store: Store
) -> None:
    start = time.monotonic()
    # All get to know within moments, not after the timeout.
    all_ended = run_to_the_end(
        one_ends, world_size, CONFIGS[config], victim, when, how, store=store, collective_timeout=60.0
    )
    assert time.monotonic() - start < 20
    for rank, ended in enumerate(all_ended):
        if rank == victim:
            assert ended.exit_code == EXIT_CODES[how], ended.output
            continue
        report = the_report(rank, ended)
        if report["what"] != "the sum of the gradients' squares":
            assert_names_a_bucket(report["what"])
        assert_gone(report, victim, all_ended)
        others = set(range(world_size)) - {rank, victim}
        if victim == 0 and store == "rank 0":
            assert "the store, through which ranks tell each other, is out of reach" in report["fates"]
        else:
            told = re.findall(r"rank (\d+)(?: in|,|$)", report["fates"].partition("\n")[2], re.MULTILINE)
            assert {int(other) for other in told} == others
            assert "silent" not in report["fates"]
