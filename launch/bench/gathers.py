"""What a module costs the host where parameters are gathered under the forward: microseconds of one module.

A chain of modules under two simulated ranks, whose gathers have all been joined before the clock starts, so that nobody
waits for another rank: what is timed is having parameters and modules wait, and taking that back at the first read of
each bucket. The forward runs without gradients and with the collector off.

nn.Linear          torch's own: its parameters wait, and the dict that it registers them in
a user's module    of a class of its own: a hook waits before its forward as well
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...ddp.collectives.failure_report import FailureReporter
from ...ddp.collectives.rank_grid import make_grids
from ...ddp.gathers.guard import guard_reads
from ...ddp.gathers.param_gather import ParamGather
from ...ddp.gathers.reader_threads import ReaderThreads
from ..report.table import Column
from ..simulation.simulate import simulate

__all__ = ["GATHER_COLUMNS", "GatherRow", "bench_gathers"]

_WIDTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherRow:
    """One line of the table."""

    name: str
    modules_per_bucket: int
    bare_us: float
    """Forward of one module that no gather ever guarded."""
    idle_us: float
    """Forward of one module between steps: nothing is in flight."""
    guard_us: float
    """Of ``optimizer.step()``: having one module and its parameters wait."""
    in_flight_us: float
    """The first forward after the step."""


GATHER_COLUMNS: list[Column] = [
    ("module", lambda row: row.name),
    ("modules in a bucket", lambda row: str(row.modules_per_bucket)),
    ("forward, never gathered, us", lambda row: f"{row.bare_us:.2f}"),
    ("forward, nothing in flight, us", lambda row: f"{row.idle_us:.2f}"),
    ("step, us", lambda row: f"{row.guard_us:.2f}"),
    ("first forward after it, us", lambda row: f"{row.in_flight_us:.2f}"),
]


def bench_gathers(device: torch.device, *, num_modules: int = 240, rounds: int = 15) -> list[GatherRow]:
    """Measure torch's own and a user's modules, few and many in a bucket."""
    rows = []
    for name, kind in _KINDS.items():
        for modules_per_bucket in (2, 24):
            times = simulate(_measure, 2, kind, device, num_modules, modules_per_bucket, rounds)[0]
            rows.append(GatherRow(name=name, modules_per_bucket=modules_per_bucket, **times))
    return rows


class _Users(nn.Linear):
    """Of the same cost, and not torch's own."""


_KINDS: Mapping[str, type[nn.Linear]] = {"nn.Linear": nn.Linear, "a user's module": _Users}


def _measure(
    kind: type[nn.Linear], device: torch.device, num_modules: int, modules_per_bucket: int, rounds: int
) -> dict[str, float]:
    """Medians over rounds, by the field of the row."""
    bare, chain = (nn.Sequential(*[kind(_WIDTH, _WIDTH, device=device) for _ in range(num_modules)]) for _ in range(2))
    grids = make_grids(None, None, has_experts=False, num_instances=1, separate_gather=False, copy_engines=False)
    threads, failures = ReaderThreads(), FailureReporter()
    gathers = [
        ParamGather(
            f"bucket {start}",
            torch.zeros(2, device=device),
            list(chain[start : start + modules_per_bucket].parameters()),
            grids["dense"],
            failures,
            threads,
        )
        for start in range(0, num_modules, modules_per_bucket)
    ]
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    x = torch.ones(16, _WIDTH, device=device)

    def guard() -> None:
        guard_reads(list(chain.modules()), gathers, (), threads)

    times: dict[str, list[float]] = {"bare_us": [], "idle_us": [], "guard_us": [], "in_flight_us": []}
    with torch.no_grad():
        for round_index in range(rounds + 1):
            for gather in gathers:
                gather.start(stream)
            dist.barrier()  # all of them are there
            measured = {
                "guard_us": _time(guard, x),
                "in_flight_us": _time(lambda: chain(x), x),
                "idle_us": _time(lambda: chain(x), x),
                "bare_us": _time(lambda: bare(x), x),
            }
            if round_index:  # the first one warms up
                for field, seconds in measured.items():
                    times[field].append(seconds / num_modules * 1e6)
    return {field: statistics.median(values) for field, values in times.items()}


def _time(call: Callable[[], object], x: Tensor) -> float:
    """Seconds of the host."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    gc.disable()
    began = time.perf_counter()
    call()
    ended = time.perf_counter()
    gc.enable()
    return ended - began
