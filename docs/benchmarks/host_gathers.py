"""Host time per module of overlapping parameter all-gathers with the forward, in microseconds.

The benchmark runs a chain of modules on two simulated ranks. Every gather is joined by both ranks before the clock
starts, so no rank waits for the other. The clock measures two things: installing the guards that make reads of
parameters wait, and removing them at the first read of each bucket. The forward runs without gradients and with the
garbage collector off.

nn.Linear          torch's own class: guards on the parameters and on the dict that holds them
a user's module    a subclass: the same guards, and a hook that waits before the forward
"""

import torch
import torch.distributed as dist
from harness import host_seconds
from host_clock import medians
from tables import Measurement
from torch import nn

from maingrad import simulate
from maingrad.ddp.collectives.failure_report import FailureReporter
from maingrad.ddp.collectives.rank_grid import make_grids
from maingrad.ddp.gathers.param_gather import ParamGather, guard_reads

_WIDTH = 64


GATHER_COLUMNS = [
    ("module", "{row.name}"),
    ("modules in a bucket", "{row.modules_per_bucket}"),
    ("forward, never gathered, us", "{row.bare_us:.2f}"),
    ("forward, nothing in flight, us", "{row.idle_us:.2f}"),
    ("step, us", "{row.guard_us:.2f}"),
    ("first forward after it, us", "{row.in_flight_us:.2f}"),
]


def bench_gathers(device, *, num_modules=240, rounds=15):
    """Measure ``nn.Linear`` and a user's subclass, each with few and with many modules in a bucket.

    bare_us       forward of one module that was never guarded
    idle_us       forward of one module while no gather is in flight
    guard_us      the part of ``optimizer.step()`` that installs the guards of one module and its parameters
    in_flight_us  first forward of one module after the step
    """
    return [
        Measurement(
            name=name,
            modules_per_bucket=each,
            **simulate(_measure, 2, kind, device, num_modules, each, rounds)[0],
        )
        for name, kind in _KINDS.items()
        for each in (2, 24)
    ]


class _Users(nn.Linear):
    """A class that is not torch's own; its forward costs the same."""


_KINDS = {"nn.Linear": nn.Linear, "a user's module": _Users}


def _measure(kind, device, num_modules, modules_per_bucket, rounds):
    """Medians over the rounds."""
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

    def guard():
        guard_reads(list(chain.modules()), gathers)

    def one_round():
        for gather in gathers:
            gather.start(stream)
        dist.barrier()  # all ranks have joined the gathers
        return {
            "guard_us": host_seconds(guard, device)[0],
            "in_flight_us": host_seconds(lambda: chain(x), device)[0],
            "idle_us": host_seconds(lambda: chain(x), device)[0],
            "bare_us": host_seconds(lambda: bare(x), device)[0],
        }

    with torch.no_grad():
        return {part: seconds / num_modules * 1e6 for part, seconds in medians(one_round, rounds).items()}
