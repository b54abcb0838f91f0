"""Host time of one forward and backward of a layer that is too small to keep the device busy, in microseconds.

Rows: ``nn.Linear`` alone; ``nn.Linear`` whose gradient a hook moves to ``main_grad``; our fused Linear with the
wrapper's hooks; our fused Linear with its weight gradient delayed and computed right after the backward.

Three more tables give the host time of a wrapper's hooks per parameter (``host_hooks.py``), of overlapped parameter
gathers per module (``host_gathers.py``), and of sharded units per unit (``host_units.py``).
"""

import sys
from functools import partial
from typing import Any

import torch
from harness import Options, host_seconds, log, run_script, the_device
from host_clock import medians
from host_gathers import GATHER_COLUMNS, bench_gathers
from host_hooks import HOOK_COLUMNS, bench_hooks
from host_units import UNIT_COLUMNS, bench_units
from tables import Measurement, machine, table, write_csv, write_table
from torch import nn

from maingrad import DistributedDataParallel, DistributedDataParallelConfig, Linear

COLUMNS = [("", "{row.name}"), ("us", "{row.microseconds:.1f}"), ("over nn.Linear", "{row.over_plain:.2f}")]


def bench_host(device, *, features=64, rows=16, calls=500, rounds=7):
    """Time all rows in each of ``rounds`` rounds, so that drift hits them alike.

    microseconds  median over the rounds of a round's mean time for forward and backward
    over_plain    median over the rounds of the time divided by the first row's time in the same round
    """
    x = torch.randn(rows, features, device=device, requires_grad=True)
    dy = torch.randn(rows, features, device=device)
    cases = {name: make(features, device) for name, make in _CASES.items()}

    def one_round():
        times = {name: _time(call, x, dy, calls) / calls * 1e6 for name, call in cases.items()}
        return times | {(name, "over"): us / times["nn.Linear"] for name, us in times.items()}

    found = medians(one_round, rounds)
    return [Measurement(name=name, microseconds=found[name], over_plain=found[name, "over"]) for name in cases]


def _time(call, x, dy, calls):
    def run():
        for _ in range(calls):
            call(x, dy)
            x.grad = None

    seconds, _ = host_seconds(run, x.device)
    return seconds


def _plain(features, device):
    layer = nn.Linear(features, features, bias=False, device=device)

    def call(x, dy):
        layer(x).backward(dy)
        layer.weight.grad = None

    return call


def _wrapped(layer, after=lambda: None):
    ddp = DistributedDataParallel(nn.Sequential(layer), DistributedDataParallelConfig(overlap_grad_reduce=True))

    def call(x, dy):
        with ddp.no_sync():  # the layer alone: a model pays for the wrapper's forward once, not per layer
            layer(x).backward(dy)
            after()

    return call


def _fused(features, device, delayed=False):
    fuse = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": delayed}
    layer = Linear(features, features, bias=False, device=device, **fuse)
    return _wrapped(layer, *([layer.backward_dw] if delayed else []))


_CASES: dict[str, Any] = {
    "nn.Linear": _plain,
    "nn.Linear, hook": lambda features, device: _wrapped(nn.Linear(features, features, bias=False, device=device)),
    "Linear, fused": _fused,
    "Linear, fused and delayed": partial(_fused, delayed=True),
}


def write_report(rows, hooks, gathers, units, folder):
    """Write ``host.csv``, ``host_hooks.csv``, ``host_gathers.csv``, ``host_units.csv`` and ``host.md``.

    Returns the text of ``host.md``, which has all four tables.
    """
    write_csv(folder / "host_hooks.csv", hooks)
    write_csv(folder / "host_gathers.csv", gathers)
    write_csv(folder / "host_units.csv", units)
    return write_table(
        folder,
        "host",
        rows,
        "Host time of one layer",
        f"{machine()}. Host microseconds of one forward and backward of a layer of 64 x 64 on 16 rows, provider "
        f"attached and hooks included; medians over rounds over all rows in turn. Made by `docs/benchmarks/host.py`.",
        table(rows, COLUMNS),
        "## Host time of one parameter in hooks",
        "Backward under a wrapper minus backward without one, over its 400 parameters of one element; overlap on, "
        "gradients sharded, one rank. Plain: the hook adds `.grad` to `main_grad`. Fused: a module wrote `main_grad` "
        "and says so.",
        table(hooks, HOOK_COLUMNS),
        "## Host time of one module whose parameters are gathered under the forward",
        "A chain of 240 modules of 64 x 64 on 16 rows, without gradients; no rank is waited for. The step has "
        "parameters and modules wait, and the first forward after it takes that back, once for each bucket.",
        table(gathers, GATHER_COLUMNS),
        "## Host time of one sharded unit",
        "Forward and backward of a chain of 24 units, each a product with 16 x 16 weights, minus the same without a "
        "wrapper, over their number; fp32 shards that compute in bf16, one rank, so that no collective is launched. An "
        "iteration has an intermediate microbatch, under `no_sync`, and a final one.",
        table(units, UNIT_COLUMNS),
    )


def run(options):
    device = the_device()
    tables = bench_host(device), bench_hooks(device), bench_gathers(device), bench_units(device)
    log(write_report(*tables, options.out_dir))


main = partial(run_script, Options, run)

if __name__ == "__main__":
    sys.exit(main())
