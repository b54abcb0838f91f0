"""How ``bench data-parallel`` and ``bench models`` measure a row: its rounds on one rank, and what all ranks say."""

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...config.error import ConfigError
from ..steps import free_memory, peak_gib, reset_peak, synchronize, time_steps
from .ranks import AnyRankFailed, Ranks

__all__ = ["RowMeasurement", "check_names", "line_of", "measure_row", "time_row", "worst_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMeasurement:
    """The measurement of one row. Its numbers are NaN if it could not be measured; ``problem`` says why."""

    num_ranks: int
    row: str
    """Name of the row."""
    label: str
    step_ms: float = math.nan
    """Mean step of the median round, by rank 0's clock."""
    spread_ms: float = math.nan
    """Largest minus smallest round."""
    tokens_per_second: float = math.nan
    peak_gib: float = math.nan
    """Peak of allocated memory during the measured steps less ``held_gib``, largest of all ranks; 0 on the CPU."""
    held_gib: float = math.nan
    """Memory that was allocated before the row was built, because an earlier row did not free it."""
    first_loss: float = math.nan
    """Loss of rank 0 in the first step."""
    last_loss: float = math.nan
    """Loss of rank 0 in the last step; a floor does not train."""
    problem: str = ""
    machine: str = ""
    """Device, versions and date."""


class _Sizes(Protocol):
    @property
    def num_warmup_steps(self) -> int: ...

    @property
    def num_rounds(self) -> int: ...

    @property
    def num_steps(self) -> int: ...


def check_names(kind: str, names: Sequence[str], known: Collection[str]) -> None:
    """Raises ``ConfigError`` for a name that is not known."""
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {kind} '{name}': it is one of {', '.join(known)}")


def time_row(
    sizes: _Sizes,
    device: torch.device,
    build: Callable[[], Callable[[], Tensor]],
    *,
    after: Callable[[Callable[[], Tensor]], None] = lambda _: None,
    close: Callable[[], None],
) -> dict[str, Any]:
    """Build, warm up, time and close one row on this rank. Returns fields of the benchmark's ``Measurement``.

    build  makes the training step
    after  called with the step after the last round
    close  frees what the row leaves in the process, also if the row fails
    """
    held = torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    try:
        step = build()
        synchronize(device)
        began = time.perf_counter()
        first_loss = step().item()
        synchronize(device)
        first_step_s = time.perf_counter() - began
        for _ in range(sizes.num_warmup_steps - 1):
            step()
        synchronize(device)
        reset_peak(device)
        times, last_loss = [], first_loss
        for _ in range(sizes.num_rounds):
            _barrier()
            milliseconds, last_loss = time_steps(step, sizes.num_steps, device)
            times.append(milliseconds)
        peak = peak_gib(device)
        _barrier()
        after(step)
        del step
    finally:
        close()
    return {
        "step_ms": statistics.median(times),
        "spread_ms": max(times) - min(times),
        "peak_gib": peak - held,
        "held_gib": held,
        "first_step_s": first_step_s,
        "first_loss": first_loss,
        "last_loss": last_loss,
    }


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def measure_row(
    ranks: Ranks,
    measure: Callable[[], dict[str, Any]],
    log: Callable[[str], None],
    *,
    refusal: str | None,
    with_groups: bool = True,
) -> tuple[str, list[dict[str, Any]]]:
    """Call ``measure`` on all ranks unless ``refusal`` says why not. Collective.

    Returns why there are no numbers ("" if there are), and every rank's numbers. One rank's refusal or failure counts
    for all ranks.
    """
    problem, mine = refusal, {}
    if problem is None:
        try:
            with ranks.attempt(with_groups=with_groups):
                mine = measure()
                free_memory(ranks.device)  # memory that a process group has mapped is freed before the group ends
        except AnyRankFailed as failure:
            problem = str(failure)
            log(failure.details)
    free_memory(ranks.device)  # a failure's traceback holds frames, and the frames hold a model
    told: list[tuple[str | None, dict[str, Any]]] = ranks.exchange((problem, mine))
    problem = next((each for each, _ in told if each), "")
    return " ".join(problem.split())[:400], [numbers for _, numbers in told]


def worst_of(told: Sequence[Mapping[str, Any]], *names: str) -> dict[str, Any]:
    """The largest of all ranks' numbers."""
    return {name: max(each[name] for each in told) for name in names}


def line_of(head: str, measured: Any, speed: str, more: str = "") -> str:
    """A line of the log for a ``Measurement`` of either benchmark."""
    if measured.problem:
        return f"{head} not measured: {measured.problem}"
    held = f"  ({measured.held_gib:.1f} GiB held by earlier rows)" if measured.held_gib > 0.1 else ""
    return (
        f"{head} {measured.step_ms:8.1f} ms  spread {measured.spread_ms:5.1f}  {speed}  "
        f"peak {measured.peak_gib:5.1f} GiB  {more}loss {measured.first_loss:.4f} -> {measured.last_loss:.4f}{held}"
    )
