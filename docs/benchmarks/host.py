"""Host time of one piece of a training step, in microseconds: four tables, each over a model too small for the device.

1. forward and backward of one linear layer, with and without hooks and fused weight gradients
2. the hooks of a wrapper, of one parameter in one microbatch
3. overlapped gathers, of one module in a step and in the forward after it
4. a sharded unit, in one microbatch

``host_wrappers.py`` measures the second and the fourth. Each round measures all
contenders, so that drift hits them alike; medians over rounds count. The garbage collector is off while the clock runs.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import Options, host_seconds, log, run_script, the_device
from host_wrappers import bench_hooks, bench_units, medians
from tables import Column, Measurement, machine, table, write_csv, write_table
from torch import nn

from maingrad import DistributedDataParallel, DistributedDataParallelConfig, Linear, simulate
from maingrad.ddp.collectives.failure_report import FailureReporter
from maingrad.ddp.collectives.rank_grid import make_grids
from maingrad.ddp.gathers.param_gather import ParamGather, guard_reads

# ---- One linear layer. ----


def bench_layers(device, *, features=64, rows=16, calls=500, rounds=7):
    """``nn.Linear``; the same whose gradient a hook moves to ``main_grad``; ours, fused; ours, fused and delayed.

    microseconds  median over the rounds of a round's mean time for forward and backward
    over_plain    median over the rounds of the time divided by the first row's time in the same round
    """
    x = torch.randn(rows, features, device=device, requires_grad=True)
    dy = torch.randn(rows, features, device=device)
    cases = {name: make(features, device) for name, make in _LAYERS.items()}

    def run(call):
        for _ in range(calls):
            call(x, dy)
            x.grad = None

    def one_round():
        times = {name: host_seconds(partial(run, call), device)[0] / calls * 1e6 for name, call in cases.items()}
        return times | {(name, "over"): us / times["nn.Linear"] for name, us in times.items()}

    found = medians(one_round, rounds)
    return [Measurement(name=name, microseconds=found[name], over_plain=found[name, "over"]) for name in cases]


def _plain_layer(features, device):
    layer = nn.Linear(features, features, bias=False, device=device)

    def call(x, dy):
        layer(x).backward(dy)
        layer.weight.grad = None

    return call


def _wrapped_layer(layer, after=lambda: None):
    ddp = DistributedDataParallel(nn.Sequential(layer), DistributedDataParallelConfig(overlap_grad_reduce=True))

    def call(x, dy):
        with ddp.no_sync():  # the layer alone: a model pays for the wrapper's forward once, not per layer
            layer(x).backward(dy)
            after()

    return call


def _fused_layer(features, device, delayed=False):
    fuse = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": delayed}
    layer = Linear(features, features, bias=False, device=device, **fuse)
    return _wrapped_layer(layer, *([layer.backward_dw] if delayed else []))


_LAYERS: dict[str, Any] = {
    "nn.Linear": _plain_layer,
    "nn.Linear, hook": lambda size, device: _wrapped_layer(nn.Linear(size, size, bias=False, device=device)),
    "Linear, fused": _fused_layer,
    "Linear, fused and delayed": partial(_fused_layer, delayed=True),
}


# ---- Gathers. ----


class _Users(nn.Linear):
    """A class that is not torch's own; its forward costs the same. It has one guard more: a hook that waits."""


def bench_gathers(device, *, num_modules=240, rounds=15):
    """Chains of ``nn.Linear`` and of a user's subclass on two simulated ranks, with few and many modules in a bucket.

    Both ranks have joined every gather before the clock starts, so no rank waits for the other.

    bare_us       forward of one module that was never guarded
    idle_us       forward of one module while no gather is in flight
    guard_us      the part of ``optimizer.step()`` that installs the guards of one module and its parameters
    in_flight_us  first forward of one module after the step
    """
    return [
        Measurement(
            name=name, modules_per_bucket=each, **simulate(_gathers, 2, kind, device, num_modules, each, rounds)[0]
        )
        for name, kind in (("nn.Linear", nn.Linear), ("a user's module", _Users))
        for each in (2, 24)
    ]


def _gathers(kind, device, num_modules, modules_per_bucket, rounds):
    width = 64
    bare, chain = (nn.Sequential(*[kind(width, width, device=device) for _ in range(num_modules)]) for _ in range(2))
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
    x = torch.ones(16, width, device=device)
    timed = {  # in this order
        "guard_us": lambda: guard_reads(list(chain.modules()), gathers),
        "in_flight_us": lambda: chain(x),
        "idle_us": lambda: chain(x),
        "bare_us": lambda: bare(x),
    }

    def one_round():
        for gather in gathers:
            gather.start(stream)
        dist.barrier()  # all ranks have joined the gathers
        return {part: host_seconds(call, device)[0] for part, call in timed.items()}

    with torch.no_grad():
        return {part: seconds / num_modules * 1e6 for part, seconds in medians(one_round, rounds).items()}


# ---- The tables. ----


def _us(name, form=".1f"):
    return lambda row: "" if row.problem else format(row[name], form)


class Table(NamedTuple):
    """One table: what is measured, and how it is shown."""

    bench: Callable[..., list[Measurement]]
    title: str
    about: str
    columns: list[Column]


TABLES = {
    "host": Table(
        bench_layers,
        "Host time of one layer",
        "Host microseconds of one forward and backward of a layer of 64 x 64 on 16 rows, provider attached and hooks "
        "included; medians over rounds over all rows in turn. Made by `docs/benchmarks/host.py`.",
        [("", "{row.name}"), ("us", "{row.microseconds:.1f}"), ("over nn.Linear", "{row.over_plain:.2f}")],
    ),
    "host_hooks": Table(
        bench_hooks,
        "Host time of one parameter in hooks",
        "Backward under a wrapper minus backward without one, over its 400 parameters of one element; overlap on, "
        "gradients sharded, one rank. Plain: the hook adds `.grad` to `main_grad`. Fused: a module wrote `main_grad` "
        "and says so.",
        [
            ("hooks of", "{row.name}"),
            ("parameters", "{row.parameters}"),
            ("intermediate, us", lambda row: row.problem or f"{row.intermediate_us:.2f}"),
            ("final, us", _us("final_us", ".2f")),
            ("backward without them, us", _us("backward_us", ".2f")),
        ],
    ),
    "host_gathers": Table(
        bench_gathers,
        "Host time of one module whose parameters are gathered under the forward",
        "A chain of 240 modules of 64 x 64 on 16 rows, without gradients; no rank is waited for. The step has "
        "parameters and modules wait, and the first forward after it takes that back, once for each bucket.",
        [
            ("module", "{row.name}"),
            ("modules in a bucket", "{row.modules_per_bucket}"),
            ("forward, never gathered, us", "{row.bare_us:.2f}"),
            ("forward, nothing in flight, us", "{row.idle_us:.2f}"),
            ("step, us", "{row.guard_us:.2f}"),
            ("first forward after it, us", "{row.in_flight_us:.2f}"),
        ],
    ),
    "host_units": Table(
        bench_units,
        "Host time of one sharded unit",
        "Forward and backward of a chain of 24 units, each a product with 16 x 16 weights, minus the same without a "
        "wrapper, over their number; fp32 shards that compute in bf16, one rank, so that no collective is launched. An "
        "iteration has an intermediate microbatch, under `no_sync`, and a final one.",
        [
            ("units of", "{row.name}"),
            ("intermediate forward, us", lambda row: row.problem or f"{row.intermediate_forward_us:.1f}"),
            ("and backward", _us("intermediate_backward_us")),
            ("final forward, us", _us("final_forward_us")),
            ("and backward", _us("final_backward_us")),
            ("module without, forward, us", _us("bare_forward_us")),
            ("and backward", _us("bare_backward_us")),
        ],
    ),
}
"""By the stem of its CSV."""


def write_report(measured, folder):
    """Write a CSV of each table and ``host.md``, which has all of them; returns the Markdown.

    measured  rows by the stem of their table
    """
    for stem, rows in measured.items():
        write_csv(folder / f"{stem}.csv", rows)
    parts = [
        part
        for stem, each in TABLES.items()
        for part in (f"## {each.title}", each.about, table(measured[stem], each.columns))
    ]
    return write_table(folder, "host", measured["host"], "Host time", f"{machine()}.", *parts)


def run(options):
    log(write_report({stem: each.bench(the_device()) for stem, each in TABLES.items()}, options.out_dir))


main = partial(run_script, Options, run)

if __name__ == "__main__":
    sys.exit(main())
