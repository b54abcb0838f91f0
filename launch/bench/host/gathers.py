"""Host time per module of overlapping parameter all-gathers with the forward, in microseconds.

The benchmark runs a chain of modules on two simulated ranks. Every gather is joined by both ranks before the clock
starts, so no rank waits for the other. The clock measures two things: installing the guards that make reads of
parameters wait, and removing them at the first read of each bucket. The forward runs without gradients and with the
garbage collector off.

nn.Linear          torch's own class: guards on the parameters and on the dict that holds them
a user's module    a subclass: the same guards, and a hook that waits before the forward
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....ddp.collectives.failure_report import FailureReporter
from ....ddp.collectives.rank_grid import make_grids
from ....ddp.gathers.param_gather import ParamGather, guard_reads
from ...report.table import Column
from ...simulation.simulate import simulate
from ..steps import synchronize

__all__ = ["GATHER_COLUMNS", "GatherRow", "bench_gathers"]

_WIDTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherRow:
    """One line of the table."""

    name: str
    modules_per_bucket: int
    bare_us: float
    """Forward of one module that was never guarded."""
    idle_us: float
    """Forward of one module while no gather is in flight."""
    guard_us: float
    """The part of ``optimizer.step()`` that installs the guards of one module and its parameters."""
    in_flight_us: float
    """First forward of one module after the step."""


GATHER_COLUMNS: list[Column] = [
    ("module", "{row.name}"),
    ("modules in a bucket", "{row.modules_per_bucket}"),
    ("forward, never gathered, us", "{row.bare_us:.2f}"),
    ("forward, nothing in flight, us", "{row.idle_us:.2f}"),
    ("step, us", "{row.guard_us:.2f}"),
    ("first forward after it, us", "{row.in_flight_us:.2f}"),
]


def bench_gathers(device: torch.device, *, num_modules: int = 240, rounds: int = 15) -> list[GatherRow]:
    """Measure ``nn.Linear`` and a user's subclass, each with few and with many modules in a bucket."""
    rows = []
    for name, kind in _KINDS.items():
        for modules_per_bucket in (2, 24):
            times = simulate(_measure, 2, kind, device, num_modules, modules_per_bucket, rounds)[0]
            rows.append(GatherRow(name=name, modules_per_bucket=modules_per_bucket, **times))
    return rows


class _Users(nn.Linear):
    """A class that is not torch's own; its forward costs the same."""


_KINDS: Mapping[str, type[nn.Linear]] = {"nn.Linear": nn.Linear, "a user's module": _Users}


def _measure(
    kind: type[nn.Linear], device: torch.device, num_modules: int, modules_per_bucket: int, rounds: int
) -> dict[str, float]:
    """Medians over the rounds, by field of `GatherRow`."""
    bare, chain = (nn.Sequential(*[kind(_WIDTH, _WIDTH, device=device) for _ in range(num_modules)]) for _ in range(2))
    grids = make_grids(None, None, has_experts=False, num_instances=1, separate_gather=False, copy_engines=False)
    failures = FailureReporter()
    gathers = [
        ParamGather(
            f"bucket {start}",
            torch.zeros(2, device=device),
            list(chain[start : start + modules_per_bucket].parameters()),
            grids["dense"],
            failures,
        )
        for start in range(0, num_modules, modules_per_bucket)
    ]
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    x = torch.ones(16, _WIDTH, device=device)

    def guard() -> None:
        guard_reads(list(chain.modules()), gathers)

    def one_round() -> dict[str, float]:
        for gather in gathers:
            gather.start(stream)
        dist.barrier()  # all ranks have joined the gathers
        return {
            "guard_us": _time(guard, x),
            "in_flight_us": _time(lambda: chain(x), x),
            "idle_us": _time(lambda: chain(x), x),
            "bare_us": _time(lambda: bare(x), x),
        }

    with torch.no_grad():
        measured = [one_round() for _ in range(rounds + 1)][1:]  # the first round is a warm-up
    return {field: statistics.median(each[field] for each in measured) / num_modules * 1e6 for field in measured[0]}


def _time(call: Callable[[], object], x: Tensor) -> float:
    """Host seconds of one call."""
    synchronize(x.device)
    gc.disable()
    began = time.perf_counter()
    call()
    ended = time.perf_counter()
    gc.enable()
    return ended - began
