"""Host time of a wrapper's hooks, in microseconds per parameter and microbatch.

The model has many one-element parameters. The hooks' time is the backward under a wrapper minus the same backward
without a wrapper, divided by the number of parameters. The clock runs during backward alone, not during forward,
zeroing or waiting, and the garbage collector is off. Without a wrapper, ``.grad`` is cleared between backwards, so that
autograd assigns ``.grad`` in both cases instead of adding to it.

plain   the gradient comes in ``.grad``, and the hook adds it to ``main_grad``
fused   a module has written ``main_grad`` and says so; the hook records it. Under a foreign wrapper the module returns
        the placeholder gradient that such wrappers expect. It returns the placeholder without a wrapper as well, so
        that the placeholder's cost does not count as the hook's

The intermediate microbatch is under ``no_sync``. The final microbatch marks buckets ready and launches their
collectives, in a group of one rank. Our wrapper and Megatron-core's both overlap and shard. Each round measures all
contenders.
"""

import gc
import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....ddp import DistributedDataParallel, DistributedDataParallelConfig
from ....ddp.contract.main_grad import hand_over, has_main_grad, record_of
from ....ddp.contract.return_table import placeholder
from ...report.table import Column
from ..data_parallel.peers import megatron_core_problem, wrap_by_megatron
from ..data_parallel.ranks import AnyRankFailed, Ranks
from ..steps import synchronize

__all__ = ["HOOK_COLUMNS", "HookRow", "bench_hooks"]

OURS, MEGATRON = "maingrad", "Megatron-core"


@dataclass(frozen=True, kw_only=True, slots=True)
class HookRow:
    """One line of the table; NaN where ``problem`` says why."""

    name: str
    parameters: str
    """"plain" or "fused"."""
    intermediate_us: float = math.nan
    """Hook time of one parameter in a microbatch under ``no_sync``."""
    final_us: float = math.nan
    """Hook time of one parameter in the last microbatch."""
    backward_us: float = math.nan
    """Backward time of one parameter without a wrapper."""
    problem: str = ""


HOOK_COLUMNS: list[Column] = [
    ("hooks of", "{row.name}"),
    ("parameters", "{row.parameters}"),
    ("intermediate, us", lambda row: row.problem or f"{row.intermediate_us:.2f}"),
    ("final, us", lambda row: "" if row.problem else f"{row.final_us:.2f}"),
    ("backward without them, us", lambda row: "" if row.problem else f"{row.backward_us:.2f}"),
]


def bench_hooks(device: torch.device, *, num_params: int = 400, calls: int = 5, rounds: int = 5) -> list[HookRow]:
    """Measure plain and fused parameters under our wrapper and, where it runs, under Megatron-core's."""
    rows = []
    for parameters in ("plain", "fused"):
        problem = megatron_core_problem(device)
        if problem is None:
            try:
                with Ranks.alone(device).attempt(with_groups=True), _megatron_groups():
                    wrappers = {OURS: _wrap_ours, MEGATRON: _wrap_megatron}
                    rows += _measure(wrappers, parameters, device, num_params, calls, rounds)
                continue
            except AnyRankFailed as failure:
                problem = str(failure)
        rows += _measure({OURS: _wrap_ours}, parameters, device, num_params, calls, rounds)
        rows.append(HookRow(name=MEGATRON, parameters=parameters, problem=f"not measured: {problem}"))
    return rows


class _Plain(nn.Module):
    """Sum over i of x[i] times parameter i; each of the n parameters has one element."""

    def __init__(self, num_params: int, device: torch.device, *, is_foreign: bool) -> None:
        super().__init__()
        self.is_foreign = is_foreign
        ones = torch.ones(num_params, 1, device=device, dtype=torch.bfloat16)
        self.weights = nn.ParameterList(nn.Parameter(one.clone()) for one in ones)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat(list(self.weights)) * x).sum()


class _Fused(_Plain):
    """A chain of layers, one for each parameter; each layer only reports a weight gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for weight in self.weights:
            y = _Report.apply(y, weight, self.is_foreign)
        return y.sum()


class _Report(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, is_foreign: bool) -> Tensor:
        ctx.weight, ctx.is_foreign = weight, is_foreign
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        weight: Tensor = ctx.weight
        if has_main_grad(weight):
            return grads[0], hand_over(weight, record_of(weight), delayed=False, fused=True), None
        return grads[0], placeholder(weight) if ctx.is_foreign else None, None


class _Wrapped(NamedTuple):
    """A model under a wrapper, with the wrapper's functions that a microbatch calls."""

    forward: Callable[[Tensor], Tensor]
    no_sync: Callable[[], AbstractContextManager[Any]]
    start: Callable[[], None]
    finish: Callable[[], None]


def _wrap_ours(model: nn.Module) -> _Wrapped:
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    return _wrapped(DistributedDataParallel(model, config))


def _wrap_megatron(model: nn.Module) -> _Wrapped:
    sizes = {"num_layers": 1, "hidden_size": 128, "num_heads": 1}
    return _wrapped(wrap_by_megatron(model, **sizes, use_distributed_optimizer=True))


def _wrapped(ddp: Any) -> _Wrapped:
    return _Wrapped(ddp, ddp.no_sync, ddp.zero_grad_buffer, ddp.finish_grad_sync)


def _wrap_nothing(model: nn.Module) -> _Wrapped:
    def clear() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    return _Wrapped(model, nullcontext, clear, clear)


@contextmanager
def _megatron_groups() -> Iterator[None]:
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _measure(
    wrappers: Mapping[str, Callable[[nn.Module], _Wrapped]],
    parameters: str,
    device: torch.device,
    num_params: int,
    calls: int,
    rounds: int,
) -> list[HookRow]:
    kind = _Plain if parameters == "plain" else _Fused
    contenders = {}
    for name, wrap in wrappers.items():
        bare, wrapped = (kind(num_params, device, is_foreign=name != OURS) for _ in range(2))
        contenders[name] = (_wrap_nothing(bare), wrap(wrapped))
    x = torch.ones(num_params, device=device, dtype=torch.bfloat16, requires_grad=True)

    def one_round() -> dict[tuple[str, bool], tuple[float, float]]:
        """Microseconds without and with the wrapper, by contender and whether it is the last microbatch."""
        return {
            (name, last): (mean_us(pair[0], last), mean_us(pair[1], last))
            for name, pair in contenders.items()
            for last in (False, True)
        }

    def mean_us(wrapped: _Wrapped, last: bool) -> float:
        return statistics.mean(_time_backward(wrapped, x, last=last) for _ in range(calls)) / num_params * 1e6

    measured = [one_round() for _ in range(rounds + 1)][1:]  # the first round is a warm-up

    def beyond_bare(name: str, last: bool) -> float:
        return statistics.median(
            wrapped_us - bare_us for bare_us, wrapped_us in (each[name, last] for each in measured)
        )

    return [
        HookRow(
            name=name,
            parameters=parameters,
            intermediate_us=beyond_bare(name, False),
            final_us=beyond_bare(name, True),
            backward_us=statistics.median(each[name, last][0] for last in (False, True) for each in measured),
        )
        for name in wrappers
    ]


def _time_backward(wrapped: _Wrapped, x: Tensor, *, last: bool) -> float:
    """Host seconds of one backward: of the final microbatch if ``last``, otherwise of an intermediate one."""
    wrapped.start()
    x.grad = None
    with nullcontext() if last else wrapped.no_sync():
        loss = wrapped.forward(x)
        synchronize(x.device)
        gc.disable()
        began = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        gc.enable()
    synchronize(x.device)
    if last:
        wrapped.finish()
    return ended - began
