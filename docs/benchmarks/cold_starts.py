"""What a cold start of a kernel costs, from the files that ``maingrad tune`` has written.

A shape without a row of its own in the tuning table gets its configuration from the nearest other row, or the default.
The cost is this configuration's time divided by the time of the shape's own configuration. Needs no GPU:

    maingrad tune --out-dir runs/tune
    python docs/benchmarks/cold_starts.py --folder runs/tune
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from harness import ConfigError, Options, log, run_script
from tables import Measurement, read_csv, table, write_table

from maingrad.kernels.grouped.gemm_triton import default_gemm_config
from maingrad.kernels.grouped.wgrad_config import default_wgrad_config
from maingrad.kernels.tuning import CUBLAS, Problem, nearest, parse_table
from maingrad.launch.tuning.tune import describe


@dataclass(frozen=True, kw_only=True)
class ColdStarts(Options):
    """Where the measurements are."""

    folder: Path = Path("runs/tune")
    """The folder of ``maingrad tune``, with ``tuned.csv`` and ``timings.csv``."""


COLUMNS = [
    ("operation", "{row.op}"),
    ("E, T, N, K", "{row.experts}, {row.rows}, {row.n}, {row.k}"),
    ("ms", "{row.ms:.4f}"),
    ("cold over tuned", "{row.cold_over_tuned:.3f}"),
    ("configuration", "`{row.config}`"),
]


def cold_rows(folder):
    """A row for each problem whose cold configuration was measured, the largest ``cold_over_tuned`` first."""
    tuned = parse_table((folder / "tuned.csv").read_text(encoding="utf-8"), str(folder / "tuned.csv"))
    measured = {
        (Problem(*(row[name] for name in Problem._fields)), row.config): row.ms
        for row in read_csv(folder / "timings.csv")
    }
    cold = []
    for row in tuned:
        found = nearest(row.gpu, row.problem, tuple(other for other in tuned if other.problem != row.problem))
        ms = measured.get((row.problem, _default(row.problem) if found is None else found.config))
        if ms is not None:
            own = measured[row.problem, row.config]
            cold.append(Measurement(**row.problem._asdict(), config=row.config, ms=own, cold_over_tuned=ms / own))
    return sorted(cold, key=lambda row: -row.cold_over_tuned)


def _default(problem):
    """The configuration of a shape with nothing near."""
    if problem.experts == 1:
        return CUBLAS
    make = default_wgrad_config if "wgrad" in problem.op else default_gemm_config
    return describe(make(getattr(torch, problem.dtype), (9, 0), problem.rows / problem.experts))


def run(options):
    """Write ``cold_starts.csv`` and ``cold_starts.md``, and print the table."""
    for name in ("tuned.csv", "timings.csv"):
        if not (options.folder / name).is_file():
            raise ConfigError(f"'{options.folder}' has no {name}: maingrad tune writes it")
    rows = cold_rows(options.folder)
    if not rows:
        raise ConfigError(f"'{options.folder}': no shape's cold configuration was timed; tune several shapes")
    first = parse_table((options.folder / "tuned.csv").read_text(encoding="utf-8"), "tuned.csv")[0]
    about = (
        f"{first.gpu}, torch {first.torch}, Triton {first.triton}, {first.date}. Each shape of the tuning table with "
        f"its own configuration, and with the one that it would get from the nearest other row: at worst "
        f"{rows[0].cold_over_tuned:.2f} times its own time. bf16 operands, medians of single runs from a cold L2; the "
        f"fastest of each shape measured in three rounds. Made by `docs/benchmarks/cold_starts.py` from the files of "
        f"`maingrad tune`."
    )
    log(write_table(options.out_dir, "cold_starts", rows, "Cold starts", about, table(rows, COLUMNS)))


main = partial(run_script, ColdStarts, run)

if __name__ == "__main__":
    sys.exit(main())
