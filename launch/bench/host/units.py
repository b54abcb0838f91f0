"""Host time of a sharded unit, in microseconds per unit and microbatch: ours and FSDP2's.

The model is a chain of tiny units. A unit's time is the forward and backward under a wrapper minus the same without a
wrapper, divided by the number of units. The clock does not run during the optimizer's step, zeroing or waiting, and the
garbage collector is off. Units have fp32 weights and compute in bf16; without a wrapper the weights are bf16. The group
has one rank, so neither wrapper launches a collective: the measured time is the wrappers' own work, and the copies into
the buffers that collectives would read.

The intermediate microbatch does not reduce whole gradients (``no_sync``); the final microbatch reduces all of them.
Each round measures all contenders.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ....fsdp import MixedPrecisionPolicy, fully_shard
from ...report.table import Column
from ..data_parallel.peers import shard_by_fsdp2
from ..data_parallel.ranks import AnyRankFailed, Ranks
from ..steps import synchronize

__all__ = ["UNIT_COLUMNS", "UnitRow", "bench_units"]

_SHAPE = (16, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRow:
    """One line of the table; NaN where ``problem`` says why."""

    name: str
    intermediate_forward_us: float = math.nan
    """Forward of one unit in a microbatch that is not the last."""
    intermediate_backward_us: float = math.nan
    final_forward_us: float = math.nan
    """Forward of one unit in the last microbatch."""
    final_backward_us: float = math.nan
    bare_forward_us: float = math.nan
    """Forward of one module without a wrapper."""
    bare_backward_us: float = math.nan
    problem: str = ""


def _cell(name: str) -> Callable[[UnitRow], str]:
    return lambda row: "" if row.problem else f"{getattr(row, name):.1f}"


UNIT_COLUMNS: list[Column] = [
    ("units of", "{row.name}"),
    ("intermediate forward, us", lambda row: row.problem or f"{row.intermediate_forward_us:.1f}"),
    ("and backward", _cell("intermediate_backward_us")),
    ("final forward, us", _cell("final_forward_us")),
    ("and backward", _cell("final_backward_us")),
    ("module without, forward, us", _cell("bare_forward_us")),
    ("and backward", _cell("bare_backward_us")),
]


class _Sharded(NamedTuple):
    """A chain of units, with the functions that an iteration calls."""

    model: nn.Module
    begin: Callable[[bool], None]
    """Called before each microbatch; the argument says whether this microbatch is the last."""
    step: Callable[[], None]


def bench_units(device: torch.device, *, num_units: int = 24, calls: int = 3, rounds: int = 5) -> list[UnitRow]:
    """Measure our units and FSDP2's, with parameters resharded after forward and with parameters kept whole."""
    try:
        with Ranks.alone(device).attempt(with_groups=True):
            return _measure(_CONTENDERS, device, num_units, calls, rounds)
    except AnyRankFailed as failure:
        return [UnitRow(name=name, problem=f"not measured: {failure}") for name in _CONTENDERS]


class _Scale(nn.Module):
    """x times the weights, both [16, 16]: as little work as a unit can have."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_SHAPE, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _chain(num_units: int, device: torch.device, dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(*[_Scale(device, dtype) for _ in range(num_units)])


def _wrap_ours(model: nn.Sequential, device: torch.device, placements: str) -> _Sharded:
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in (*model, model):
        fully_shard(unit, mesh, placements, policy)
    sharded: Any = model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    quiet: list[Any] = []

    def begin(is_last: bool) -> None:
        while quiet:
            quiet.pop().__exit__(None, None, None)
        if not is_last:
            quiet.append(sharded.no_sync())
            quiet[-1].__enter__()

    def step() -> None:
        sharded.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()

    return _Sharded(model, begin, step)


def _wrap_fsdp2(model: nn.Sequential, device: torch.device, reshard: bool) -> _Sharded:
    mesh = init_device_mesh(device.type, (1,))
    _, begin = shard_by_fsdp2(model, model, mesh, reshard=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return _Sharded(model, begin, step)


def _wrap_nothing(model: nn.Sequential) -> _Sharded:
    return _Sharded(model, lambda is_last: None, lambda: model.zero_grad())


_CONTENDERS: Mapping[str, Callable[[nn.Sequential, torch.device], _Sharded]] = {
    "maingrad ZeRO-3": partial(_wrap_ours, placements="zero3"),
    "FSDP2, resharded (ZeRO-3)": partial(_wrap_fsdp2, reshard=True),
    "maingrad ZeRO-2": partial(_wrap_ours, placements="zero2"),
    "FSDP2, parameters kept (ZeRO-2)": partial(_wrap_fsdp2, reshard=False),
}

_PARTS = ("intermediate_forward", "intermediate_backward", "final_forward", "final_backward")


def _measure(
    contenders: Mapping[str, Callable[[nn.Sequential, torch.device], _Sharded]],
    device: torch.device,
    num_units: int,
    calls: int,
    rounds: int,
) -> list[UnitRow]:
    chains = {name: wrap(_chain(num_units, device, torch.float32), device) for name, wrap in contenders.items()}
    chains = {"": _wrap_nothing(_chain(num_units, device, torch.bfloat16)), **chains}
    x = torch.ones(_SHAPE, device=device, dtype=torch.bfloat16, requires_grad=True)
    measured = [{name: _time(chain, x, num_units, calls) for name, chain in chains.items()} for _ in range(rounds + 1)][
        1:
    ]  # the first round is a warm-up

    def beyond_bare(name: str, part: int) -> float:
        return statistics.median(each[name][part] - each[""][part] for each in measured)

    def numbers(name: str) -> dict[str, Any]:
        return {f"{part}_us": beyond_bare(name, index) for index, part in enumerate(_PARTS)}

    return [
        UnitRow(
            name=name,
            **numbers(name),
            bare_forward_us=statistics.median(each[""][2] for each in measured),
            bare_backward_us=statistics.median(each[""][3] for each in measured),
        )
        for name in contenders
    ]


def _time(sharded: _Sharded, x: Tensor, num_units: int, calls: int) -> list[float]:
    """Host microseconds of one unit in each of ``_PARTS``: means over iterations of two microbatches."""
    totals = [0.0] * len(_PARTS)
    for _ in range(calls):
        x.grad = None
        for is_last in (False, True):
            sharded.begin(is_last)
            synchronize(x.device)
            gc.disable()
            began = time.perf_counter()
            loss = sharded.model(x).sum()
            between = time.perf_counter()
            loss.backward()
            ended = time.perf_counter()
            gc.enable()
            totals[2 * is_last] += between - began
            totals[2 * is_last + 1] += ended - between
        synchronize(x.device)
        sharded.step()
    return [total / calls / num_units * 1e6 for total in totals]
