"""``maingrad bench tune``: times every configuration of every shape, and reports what a cold start costs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ....kernels.tuning import Problem
from ...config.run import ConfigError
from ...report.table import Column, machine, write_table
from .problems import GROUPED_OPS, Shape, parse_shape
from .rivals import DENSE_OPS
from .tune import DENSE_SHAPES, GROUPED_SHAPES, Timing, cold_ratios, fastest, tune, write_tuning

__all__ = ["ColdRow", "TuneBench", "bench_tune", "cold_rows", "write_cold_report"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneBench:
    """What is tuned; the defaults are the shipped table's."""

    ops: tuple[str, ...] = (*GROUPED_OPS, *DENSE_OPS)
    """Operations. Those whose names begin with wgrad_ take shapes of one expert, the others shapes of several."""
    shapes: tuple[str, ...] = ()
    """Shapes as EXPERTSxROWSxNxK; one expert: a dense layer. None: the shipped table's shapes."""

    def __post_init__(self) -> None:
        known = (*GROUPED_OPS, *DENSE_OPS)
        for op in self.ops:
            if op not in known:
                raise ConfigError(f"--ops: '{op}' has no table; choose from {', '.join(known)}")
        if not list(self.work()):
            raise ConfigError("--ops and --shapes leave nothing to tune: dense operations need shapes of one expert")

    def work(self) -> Iterator[tuple[Shape, tuple[str, ...]]]:
        """Each shape with its operations. Raises ``ConfigError`` for a text that is no shape."""
        shapes = [parse_shape(text) for text in self.shapes]
        for shape in shapes or [*GROUPED_SHAPES, *((1, *dense) for dense in DENSE_SHAPES)]:
            ops = tuple(op for op in self.ops if (op in DENSE_OPS) == (shape[0] == 1))
            if ops:
                yield shape, ops


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdRow:
    """One problem of the tuning table, as if the table lacked the problem's own row."""

    op: str
    experts: int
    rows: int
    n: int
    k: int
    config: str
    """Configuration of the problem's own row."""
    ms: float
    cold_over_tuned: float
    """Time of the configuration that the other rows give to the problem, divided by ``ms``."""


def bench_tune(
    bench: TuneBench, device: torch.device, folder: Path, log: Callable[[str], None] = lambda _: None
) -> list[Timing]:
    """Time every configuration. Files are written after each shape, so that a stopped run leaves its results."""
    timings: list[Timing] = []
    for shape, ops in bench.work():
        dense = shape[0] == 1
        timings += tune(device, log, grouped=() if dense else (shape,), dense=(shape[1:],) if dense else (), ops=ops)
        write_tuning(timings, device, folder)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return timings


def cold_rows(timings: Sequence[Timing], device: torch.device) -> list[ColdRow]:
    """A row for each problem whose cold configuration was measured, the largest ``cold_over_tuned`` first."""
    tuned, ratios = fastest(timings), cold_ratios(timings, device)
    worst_first: list[Problem] = sorted(ratios, key=lambda problem: -ratios[problem])
    return [
        ColdRow(
            **{name: value for name, value in problem._asdict().items() if name != "dtype"},
            config=tuned[problem].config,
            ms=tuned[problem].ms,
            cold_over_tuned=ratios[problem],
        )
        for problem in worst_first
    ]


def write_cold_report(rows: Sequence[ColdRow], folder: Path) -> str:
    """Write ``cold_starts.csv`` and ``cold_starts.md`` into ``folder``; returns the table."""
    worst = max(rows, key=lambda row: row.cold_over_tuned)
    setting = (
        f"{machine()}. Each shape of the tuning table with its own configuration, and with the one that it would get "
        f"from the nearest other row: at worst {worst.cold_over_tuned:.2f} times its own time. bf16 operands, medians "
        f"of single runs from a cold L2; the fastest of each shape measured in three rounds. Made by "
        f"`maingrad bench tune`, which also writes the table itself, `tuned.csv`, and every timing, `timings.csv`."
    )
    columns: list[Column] = [
        ("operation", "{row.op}"),
        ("E, T, N, K", "{row.experts}, {row.rows}, {row.n}, {row.k}"),
        ("ms", "{row.ms:.4f}"),
        ("cold over tuned", "{row.cold_over_tuned:.3f}"),
        ("configuration", "`{row.config}`"),
    ]
    return write_table(folder, "cold_starts", rows, title="Cold starts", setting=setting, columns=columns)
