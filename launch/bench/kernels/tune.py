"""``maingrad bench tune``: measure every configuration of every kernel, and write the table of the fastest.

The benchmark also reports what a cold start costs: a shape without a row of its own gets its configuration from the
other shapes' rows. The cost is this configuration's time divided by the time of the shape's own fastest configuration.
"""

import csv
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....kernels.grouped.gemm_triton import GEMM_CANDIDATES, GemmConfig, default_gemm_config, grouped_gemm_triton
from ....kernels.grouped.wgrad_triton import grouped_wgrad_triton
from ....kernels.tuning import COLUMNS, CUBLAS, Problem, TunedRow, gpu_name, nearest
from ....kernels.wgrad import cublas_wgrad
from ....kernels.wgrad_config import WGRAD_CANDIDATES, WgradConfig, default_wgrad_config
from .problems import GROUPED_OPS, GroupedOperands

__all__ = ["DENSE_SHAPES", "GROUPED_SHAPES", "Timing", "cold_ratios", "fastest", "tune", "write_tuning"]

GROUPED_SHAPES = (
    (8, 16384, 4096, 4096),
    (8, 16384, 14336, 4096),
    (64, 32768, 2048, 2048),
    (128, 32768, 1536, 4096),
    (32, 8192, 4096, 2048),
    (64, 32768, 2048, 1024),
    (128, 32768, 2048, 768),
    (128, 32768, 1536, 2048),
    (32, 32768, 5760, 2880),
    (32, 32768, 2880, 2880),
    (32, 16384, 4096, 7168),
    (32, 16384, 7168, 2048),
    (64, 8192, 2048, 2048),
    (8, 4096, 4096, 4096),
    (8, 2048, 28672, 4096),
    (256, 65536, 1024, 2048),
)
DENSE_SHAPES = tuple(
    (rows, n, k)
    for rows in (512, 1024, 2048, 4096, 8192)
    for n, k in ((4096, 4096), (2048, 2048), (14336, 4096), (4096, 14336), (1024, 4096), (12288, 4096), (6144, 2048))
)
_TOLERANCE = {"grouped_linear": 4e-3, "grouped_dgrad": 4e-3}  # bf16 results; fp32 accumulators are far closer
_WORTH = 0.98
"""A kernel replaces the library for a dense product if its time is at most this part of the library's time."""


_NOISE = 1.01
"""Two measurements of one configuration differ by up to this factor."""


class Timing(NamedTuple):
    """The time of one configuration of one problem."""

    problem: Problem
    config: str
    ms: float


def tune(
    device: torch.device,
    log: Callable[[str], None],
    *,
    grouped: Iterable[tuple[int, int, int, int]] = GROUPED_SHAPES,
    dense: Iterable[tuple[int, int, int]] = DENSE_SHAPES,
    ops: Sequence[str] = (*GROUPED_OPS, "wgrad_accumulate", "wgrad_overwrite"),
) -> list[Timing]:
    """Time every candidate, then time the three fastest of each problem again in turns. Raises for wrong results."""
    timings: list[Timing] = []
    for experts, rows, n, k in grouped:
        operands = GroupedOperands(experts, rows, n, k, torch.bfloat16, device)
        for op in ops:
            if op in GROUPED_OPS:
                runs = _checked(op, operands, dict(_grouped_runs(op, operands)))
                timings += _time_all(operands.problem(op), runs, log)
    for rows, n, k in dense:
        operands = GroupedOperands(1, rows, n, k, torch.bfloat16, device)
        for op in ops:
            if op in ("wgrad_accumulate", "wgrad_overwrite"):
                runs = _checked(f"grouped_{op}", operands, dict(_dense_runs(op, operands)))
                timings += _time_all(operands.problem(op), runs, log)
    return timings


def _checked(op: str, operands: GroupedOperands, runs: dict[str, Callable[[], None]]) -> dict[str, Callable[[], None]]:
    """The runs that fit this GPU's shared memory. Raises for a run with a wrong result."""
    from triton.runtime.errors import OutOfResources

    fitting = {}
    for config, run in runs.items():
        try:
            error = operands.check(op, run)
        except OutOfResources:  # this GPU has less shared memory than an H100
            continue
        if not error < _TOLERANCE.get(op, 1e-4):
            raise RuntimeError(f"{op} {operands.shape} {config}: relative error {error}")
        fitting[config] = run
    if not fitting:
        raise RuntimeError(f"{op}: no configuration fits the shared memory of {gpu_name(operands.x.device)}")
    return fitting


def _grouped_runs(op: str, operands: GroupedOperands) -> Iterator[tuple[str, Callable[[], None]]]:
    def gemm(config: GemmConfig) -> Callable[[], None]:
        source, result = (operands.x, operands.y) if op == "grouped_linear" else (operands.dy, operands.dx)
        transposed = op == "grouped_linear"
        return lambda: grouped_gemm_triton(
            source, operands.weights, operands.offsets, result, config, transposed=transposed
        )

    def wgrad(config: WgradConfig) -> Callable[[], None]:
        once = op == "grouped_wgrad_overwrite"
        return lambda: grouped_wgrad_triton(operands.dy, operands.x, operands.grads, operands.offsets, once, config)

    if op.startswith("grouped_wgrad"):
        yield from ((describe(config), wgrad(config)) for config in WGRAD_CANDIDATES)
    else:
        yield from ((describe(config), gemm(config)) for config in GEMM_CANDIDATES)


def _dense_runs(op: str, operands: GroupedOperands) -> Iterator[tuple[str, Callable[[], None]]]:
    once = op == "wgrad_overwrite"
    dy, x, grad = operands.dy, operands.x, operands.grads[0]
    yield CUBLAS, lambda: cublas_wgrad(dy, x, grad, overwrite=once)

    def wgrad(config: WgradConfig) -> Callable[[], None]:
        return lambda: grouped_wgrad_triton(dy, x, operands.grads, None, once, config)

    yield from ((describe(config), wgrad(config)) for config in WGRAD_CANDIDATES if config.tma)


def describe(config: GemmConfig | WgradConfig) -> str:
    """The text of ``TunedRow.config``: fields without a default, and fields that differ from their default."""
    defaults = config._field_defaults
    fields: dict[str, Any] = config._asdict()
    return " ".join(
        f"{name}={int(value)}" for name, value in fields.items() if name not in defaults or value != defaults[name]
    )


def _time_all(problem: Problem, runs: dict[str, Callable[[], None]], log: Callable[[str], None]) -> list[Timing]:
    from triton.testing import do_bench

    def milliseconds(run: Callable[[], None], rep: int) -> float:
        return float(do_bench(run, warmup=5, rep=rep, return_mode="median"))

    times = {config: milliseconds(run, 15) for config, run in runs.items()}
    finalists = sorted(times, key=times.__getitem__)[:3]
    if CUBLAS in times and CUBLAS not in finalists:
        finalists.append(CUBLAS)
    rounds: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(3):
        for config in finalists:
            rounds[config].append(milliseconds(runs[config], 30))
    times |= {config: sorted(values)[1] for config, values in rounds.items()}
    best = min(finalists, key=times.__getitem__)
    log(f"{problem}: {times[best]:.4f} ms, {best}")
    return [Timing(problem, config, ms) for config, ms in times.items()]


def fastest(timings: Sequence[Timing]) -> dict[Problem, Timing]:
    """The configuration to use for each problem. A dense problem keeps the library unless a kernel is clearly faster.

    Several configurations may be as fast as the best one within ``_NOISE``. The chosen one is that which is also within
    ``_NOISE`` of the best at the largest number of the op's problems, because a shape that was not measured gets the
    configuration of a near shape.
    """
    by_problem: defaultdict[Problem, dict[str, Timing]] = defaultdict(dict)
    for timing in timings:
        by_problem[timing.problem][timing.config] = timing
    good = {problem: _as_fast_as_the_best(found) for problem, found in by_problem.items()}
    liked = Counter((problem.op, timing.config) for problem, found in good.items() for timing in found)
    chosen = {}
    for problem, found in good.items():
        best = max(found, key=lambda timing: (liked[problem.op, timing.config], -timing.ms))
        library = by_problem[problem].get(CUBLAS)
        chosen[problem] = library if library is not None and best.ms > _WORTH * library.ms else best
    return chosen


def _as_fast_as_the_best(found: dict[str, Timing]) -> list[Timing]:
    best = min(timing.ms for timing in found.values())
    return [timing for timing in found.values() if timing.ms <= _NOISE * best]


def cold_ratios(timings: Sequence[Timing], device: torch.device) -> dict[Problem, float]:
    """For each problem, the time of the configuration that the other rows would give it over its own row's time."""
    gpu = gpu_name(device)
    rows = tuple(_row(timing, gpu) for timing in fastest(timings).values())
    measured = {(timing.problem, timing.config): timing.ms for timing in timings}
    ratios = {}
    for row in rows:
        others = tuple(other for other in rows if other.problem != row.problem)
        found = nearest(gpu, row.problem, others)
        config = _default(row.problem) if found is None else found.config
        if (row.problem, config) in measured:
            ratios[row.problem] = measured[row.problem, config] / row.ms
    return ratios


def _default(problem: Problem) -> str:
    if problem.experts == 1:
        return CUBLAS
    make: Callable[..., GemmConfig | WgradConfig] = (
        default_wgrad_config if "wgrad" in problem.op else default_gemm_config
    )
    return describe(make(getattr(torch, problem.dtype), (9, 0), problem.rows / problem.experts))


def _row(timing: Timing, gpu: str) -> TunedRow:
    import triton

    return TunedRow(
        gpu,
        timing.problem,
        timing.config,
        round(timing.ms, 4),
        time.strftime("%Y-%m-%d"),
        torch.__version__,
        triton.__version__,
    )


def write_tuning(timings: Sequence[Timing], device: torch.device, folder: Path) -> str:
    """Write ``tuned.csv``, and all timings to ``timings.csv``. Returns cold-start costs, one line per problem."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tuned.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for timing in fastest(timings).values():
            row = _row(timing, gpu_name(device))
            writer.writerow([row.gpu, *row.problem, row.config, row.ms, row.date, row.torch, row.triton])
    with (folder / "timings.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Problem._fields, "config", "ms"])
        writer.writerows([*timing.problem, timing.config, f"{timing.ms:.4f}"] for timing in timings)
    ratios = cold_ratios(timings, device)
    worst_first = sorted(ratios.items(), key=lambda item: -item[1])
    return "\n".join(f"{ratio:.3f}  {' '.join(map(str, problem))}" for problem, ratio in worst_first)
