"""Measure every configuration of every kernel, and write the table of the fastest."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.grouped.gemm_triton import GEMM_CANDIDATES, GemmConfig, grouped_gemm_triton
from ...kernels.grouped.wgrad_config import WGRAD_CANDIDATES, WgradConfig
from ...kernels.grouped.wgrad_triton import grouped_wgrad_triton
from ...kernels.tuning import COLUMNS, CUBLAS, Problem, gpu_name
from ...kernels.wgrad import cublas_wgrad
from ..config.error import ConfigError
from ..report.table import write_csv
from .problems import DENSE_OPS, GROUPED_OPS, GroupedOperands, Shape, parse_shape, provenance

__all__ = [
    "DENSE_SHAPES",
    "GROUPED_SHAPES",
    "Timing",
    "fastest",
    "plan_work",
    "run_tune",
    "tune",
    "write_tuning",
]

_GROUPED = (
    "8x16384x4096x4096",
    "8x16384x14336x4096",
    "64x32768x2048x2048",
    "128x32768x1536x4096",
    "32x8192x4096x2048",
    "64x32768x2048x1024",
    "128x32768x2048x768",
    "128x32768x1536x2048",
    "32x32768x5760x2880",
    "32x32768x2880x2880",
    "32x16384x4096x7168",
    "32x16384x7168x2048",
    "64x8192x2048x2048",
    "8x4096x4096x4096",
    "8x2048x28672x4096",
    "256x65536x1024x2048",
)
GROUPED_SHAPES = tuple(map(parse_shape, _GROUPED))
DENSE_SHAPES = tuple(
    (1, rows, n, k)
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


def plan_work(ops: Sequence[str], shapes: Sequence[str]) -> list[tuple[Shape, tuple[str, ...]]]:
    """Each shape with its operations. Raises ``ConfigError`` for a text that is no shape, and for no work.

    ops     operations, none: all. Those whose names begin with wgrad_ take shapes of one expert, the others of several
    shapes  as EXPERTSxROWSxNxK; one expert: a dense layer. None: those of the shipped table
    """
    known = (*GROUPED_OPS, *DENSE_OPS)
    for op in ops:
        if op not in known:
            raise ConfigError(f"--ops: '{op}' has no table; choose from {', '.join(known)}")
    chosen = tuple(map(parse_shape, shapes)) or (*GROUPED_SHAPES, *DENSE_SHAPES)
    work = [(each, tuple(op for op in ops or known if (op in DENSE_OPS) == (each[0] == 1))) for each in chosen]
    found = [(shape, ops) for shape, ops in work if ops]
    if not found:
        raise ConfigError("--ops and --shapes leave nothing to tune: dense operations need shapes of one expert")
    return found


def run_tune(ops: Sequence[str], shapes: Sequence[str], folder: Path) -> None:
    """The command ``maingrad tune``: measure what ``plan_work`` says, and write the table."""
    work = plan_work(ops, shapes)
    if not torch.cuda.is_available():
        raise ConfigError("tune measures configurations of kernels on a GPU, and torch sees no CUDA device")
    tune(work, torch.device("cuda", torch.cuda.current_device()), folder, print)
    print(folder / "tuned.csv")


def tune(
    work: Iterable[tuple[Shape, Sequence[str]]],
    device: torch.device,
    folder: Path,
    log: Callable[[str], None] = lambda _: None,
) -> list[Timing]:
    """Time every candidate, then time the three fastest of each problem again in turns. Raises for wrong results.

    Files are written after each shape, so that a stopped run leaves its results.
    """
    timings: list[Timing] = []
    for shape, ops in work:
        timings += _tune_shape(shape, ops, device, log)
        write_tuning(timings, device, folder)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return timings


def _tune_shape(shape: Shape, ops: Sequence[str], device: torch.device, log: Callable[[str], None]) -> Iterator[Timing]:
    operands = GroupedOperands(*shape, torch.bfloat16, device)
    for op in ops:
        dense = op in DENSE_OPS
        runs = dict((_dense_runs if dense else _grouped_runs)(op, operands))
        fitting = _checked(f"grouped_{op}" if dense else op, operands, runs)
        yield from _time_all(operands.problem(op), fitting, log)


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
    if op.startswith("grouped_wgrad"):
        once = op == "grouped_wgrad_overwrite"
        run = partial(grouped_wgrad_triton, operands.dy, operands.x, operands.grads, operands.offsets, once)
        yield from ((describe(config), partial(run, config)) for config in WGRAD_CANDIDATES)
        return
    transposed = op == "grouped_linear"
    source, result = (operands.x, operands.y) if transposed else (operands.dy, operands.dx)
    for config in GEMM_CANDIDATES:
        arguments = source, operands.weights, operands.offsets, result, config
        yield describe(config), partial(grouped_gemm_triton, *arguments, transposed=transposed)


def _dense_runs(op: str, operands: GroupedOperands) -> Iterator[tuple[str, Callable[[], None]]]:
    once = op == "wgrad_overwrite"
    dy, x = operands.dy, operands.x
    yield CUBLAS, partial(cublas_wgrad, dy, x, operands.grads[0], overwrite=once)
    for config in WGRAD_CANDIDATES:
        if config.tma:
            yield describe(config), partial(grouped_wgrad_triton, dy, x, operands.grads, None, once, config)


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
    good: dict[Problem, list[Timing]] = {}
    for problem, by_config in by_problem.items():
        best = min(timing.ms for timing in by_config.values())
        good[problem] = [timing for timing in by_config.values() if timing.ms <= _NOISE * best]
    liked = Counter((problem.op, timing.config) for problem, found in good.items() for timing in found)
    chosen = {}
    for problem, found in good.items():
        kernel = max(found, key=lambda timing: (liked[problem.op, timing.config], -timing.ms))
        library = by_problem[problem].get(CUBLAS)
        chosen[problem] = library if library is not None and kernel.ms > _WORTH * library.ms else kernel
    return chosen


def write_tuning(timings: Sequence[Timing], device: torch.device, folder: Path) -> None:
    """Write ``tuned.csv``, which ``load_tuning_table`` reads, and all timings to ``timings.csv``."""

    def written(found: Iterable[Timing]) -> list[dict[str, Any]]:
        return [{**each.problem._asdict(), "config": each.config, "ms": round(each.ms, 4)} for each in found]

    tuned = [{**row, **provenance(device)} for row in written(fastest(timings).values())]
    write_csv(folder / "tuned.csv", [{column: row[column] for column in COLUMNS} for row in tuned])
    write_csv(folder / "timings.csv", written(timings))
