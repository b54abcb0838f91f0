"""Host time of one forward and backward of a layer that is too small to keep the device busy, in microseconds.

Rows: ``nn.Linear`` alone; ``nn.Linear`` whose gradient a hook moves to ``main_grad``; our fused Linear with the
wrapper's hooks; our fused Linear with its weight gradient delayed and computed right after the backward.

Three more tables give the host time of a wrapper's hooks per parameter (``hooks.py``), of overlapped parameter gathers
per module (``gathers.py``), and of sharded units per unit (``units.py``).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ....ddp import DistributedDataParallel, DistributedDataParallelConfig
from ....te_integration import Linear
from ...report.table import Column, machine, markdown_table, write_csv, write_table
from ..steps import synchronize
from .gathers import GATHER_COLUMNS, GatherRow
from .hooks import HOOK_COLUMNS, HookRow
from .units import UNIT_COLUMNS, UnitRow

__all__ = ["HostRow", "bench_host", "write_host_report"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRow:
    """One line of the table."""

    name: str
    microseconds: float
    """Median over the rounds of a round's mean time for forward and backward."""
    over_plain: float
    """Median over the rounds of the time divided by the first row's time in the same round."""


def bench_host(
    device: torch.device, *, features: int = 64, rows: int = 16, calls: int = 500, rounds: int = 7
) -> list[HostRow]:
    """Time all rows in each of ``rounds`` rounds, so that drift hits them alike."""
    x = torch.randn(rows, features, device=device, requires_grad=True)
    dy = torch.randn(rows, features, device=device)
    cases = {name: make(features, device) for name, make in _CASES.items()}
    measured = [
        {name: _time(call, x, dy, calls) / calls * 1e6 for name, call in cases.items()} for _ in range(rounds + 1)
    ][1:]  # the first round is a warm-up
    return [
        HostRow(
            name=name,
            microseconds=statistics.median(each[name] for each in measured),
            over_plain=statistics.median(each[name] / each["nn.Linear"] for each in measured),
        )
        for name in cases
    ]


Call = Callable[[Tensor, Tensor], None]


def _time(call: Call, x: Tensor, dy: Tensor, calls: int) -> float:
    synchronize(x.device)
    began = time.perf_counter()
    for _ in range(calls):
        call(x, dy)
        x.grad = None
    ended = time.perf_counter()  # host time: the clock does not wait for the device
    synchronize(x.device)
    return ended - began


def _plain(features: int, device: torch.device) -> Call:
    layer = nn.Linear(features, features, bias=False, device=device)

    def call(x: Tensor, dy: Tensor) -> None:
        layer(x).backward(dy)
        layer.weight.grad = None

    return call


def _wrapped(layer: nn.Module, after: Callable[[], None] = lambda: None) -> Call:
    ddp = DistributedDataParallel(nn.Sequential(layer), DistributedDataParallelConfig(overlap_grad_reduce=True))

    def call(x: Tensor, dy: Tensor) -> None:
        with ddp.no_sync():  # the layer alone: a model pays for the wrapper's forward once, not per layer
            layer(x).backward(dy)
            after()

    return call


def _hooked(features: int, device: torch.device) -> Call:
    return _wrapped(nn.Linear(features, features, bias=False, device=device))


def _fused(features: int, device: torch.device) -> Call:
    return _wrapped(Linear(features, features, bias=False, device=device, fuse_wgrad_accumulation=True))


def _delayed(features: int, device: torch.device) -> Call:
    layer = Linear(
        features, features, bias=False, device=device, fuse_wgrad_accumulation=True, delay_wgrad_compute=True
    )
    return _wrapped(layer, layer.backward_dw)


_CASES: dict[str, Callable[[int, torch.device], Call]] = {
    "nn.Linear": _plain,
    "nn.Linear, hook": _hooked,
    "Linear, fused": _fused,
    "Linear, fused and delayed": _delayed,
}


def write_host_report(
    rows: list[HostRow], hooks: list[HookRow], gathers: list[GatherRow], units: list[UnitRow], folder: Path
) -> str:
    """Write ``host.csv``, ``host_hooks.csv``, ``host_gathers.csv``, ``host_units.csv`` and ``host.md`` into ``folder``.

    Returns the text of ``host.md``, which has all four tables.
    """
    setting = (
        f"{machine()}. Host microseconds of one forward and backward of a layer of 64 x 64 on 16 rows, provider "
        f"attached and hooks included; medians over rounds over all rows in turn. Made by `maingrad bench host`."
    )
    columns: list[Column] = [
        ("", "{row.name}"),
        ("us", "{row.microseconds:.1f}"),
        ("over nn.Linear", "{row.over_plain:.2f}"),
    ]
    write_csv(folder, "host_hooks", hooks)
    write_csv(folder, "host_gathers", gathers)
    write_csv(folder, "host_units", units)
    notes = [
        "## Host time of one parameter in hooks",
        "",
        "Backward under a wrapper minus backward without one, over its 400 parameters of one element; overlap on, "
        "gradients sharded, one rank. Plain: the hook adds `.grad` to `main_grad`. Fused: a module wrote `main_grad` "
        "and says so.",
        "",
        *markdown_table(hooks, HOOK_COLUMNS),
        "",
        "## Host time of one module whose parameters are gathered under the forward",
        "",
        "A chain of 240 modules of 64 x 64 on 16 rows, without gradients; no rank is waited for. The step has "
        "parameters and modules wait, and the first forward after it takes that back, once for each bucket.",
        "",
        *markdown_table(gathers, GATHER_COLUMNS),
        "",
        "## Host time of one sharded unit",
        "",
        "Forward and backward of a chain of 24 units, each a product with 16 x 16 weights, minus the same without a "
        "wrapper, over their number; fp32 shards that compute in bf16, one rank, so that no collective is launched. An "
        "iteration has an intermediate microbatch, under `no_sync`, and a final one.",
        "",
        *markdown_table(units, UNIT_COLUMNS),
    ]
    return write_table(
        folder, "host", rows, title="Host time of one layer", setting=setting, columns=columns, notes="\n".join(notes)
    )
