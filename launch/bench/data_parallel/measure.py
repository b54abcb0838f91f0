"""One GPT trained under each kind of data parallelism, with the same work: step time, peak memory, loss.

Ratios are over a floor: the same model, the same microbatches and a rank's share of the optimizer, without
communication. There are two floors: ours (our modules and buckets) and the peers' (a plain layer, no wrapper). Each
floor is measured at the beginning and at the end, which shows the machine's drift. Ratios are over the mean of its two
times.

A row's time is the median over rounds. A round is timed between two events and ends with a synchronize, so that every
all-gather and reduction is on the clock. Clipping is off. A row that cannot be measured stays in the table with its
reason.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...report.trace_digest import digest_trace, record_trace
from .fsdp_rows import FSDP
from .model import SETTINGS, Setting
from .peers import PEERS
from .ranks import Ranks
from .rounds import RowMeasurement, check_names, line_of, measure_row, time_row, worst_of
from .rows import FLOOR, OURS, PEER_FLOOR, Case, Row, Step

__all__ = ["DataParallelBench", "Measurement", "bench_data_parallel", "choose_rows", "choose_settings"]

ROWS: Mapping[str, Row] = {**OURS, **FSDP, **PEERS}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallelBench:
    """Size of the measurement; the defaults are the published tables'."""

    settings: tuple[str, ...] = ("large", "one_microbatch", "small")
    """Tables: large, one_microbatch, small, tiny."""
    rows: tuple[str, ...] = ()
    """Rows by name; none: all. The floors are always measured, for the ratios."""
    without: tuple[str, ...] = ()
    """Rows to leave out."""
    num_steps: int = 10
    """Consecutive steps of one round."""
    num_rounds: int = 3
    """Rounds; the median counts."""
    num_warmup_steps: int = 3
    """Steps before the first round."""
    trace: tuple[str, ...] = ()
    """Rows that run two further steps under the profiler; a digest of rank 0's trace is written beside the table."""
    keep_traces: bool = False
    """Keep the traces themselves too, as .json.gz."""
    bucket_size: int | None = None
    """Elements at which our rows, sharded units included, close a bucket; None: the library's own rule."""
    num_buckets: int | None = None
    """Number of buckets of our rows, in place of ``bucket_size``."""
    pad_buckets: bool = False
    """Pad the buckets of our rows to multiples of 2^16 elements."""
    timeout: float = 120.0
    """Seconds after which a rank gives up on a collective or on another rank."""
    stem: str = "data_parallel"
    """Files are STEM.csv, STEM.md and STEM.png; sections of other settings and numbers of ranks in STEM.csv stay."""
    redraw: bool = False
    """Measure nothing: write table and picture again from STEM.csv in the output folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement(RowMeasurement):
    """``row``: each floor has two measurements. ``tokens_per_second``: over all ranks."""

    setting: str
    slowest_rank_ms: float = math.nan
    """``step_ms`` of the slowest rank, by the slowest rank's clock."""
    trains: bool = True


def choose_settings(names: Sequence[str]) -> list[Setting]:
    """The settings called ``names``, in that order. Raises ``ConfigError`` for an unknown name."""
    check_names("setting", names, SETTINGS)
    return [SETTINGS[name] for name in names]


def choose_rows(bench: DataParallelBench, rows: Mapping[str, Row] = ROWS) -> list[str]:
    """Row names in measuring order: floors first and again last. Raises ``ConfigError`` for an unknown name."""
    for kind in (bench.rows, bench.without, bench.trace):
        check_names("row", kind, rows)
    wanted = set(bench.rows or rows) - set(bench.without)
    floors = [name for name in (FLOOR, PEER_FLOOR) if name in rows and name not in bench.without]
    between = [name for name in rows if name in wanted and name not in floors]
    return [*floors, *between, *floors] if between else floors


def bench_data_parallel(
    bench: DataParallelBench,
    ranks: Ranks,
    out_dir: Path,
    *,
    machine: str = "",
    rows: Mapping[str, Row] = ROWS,
    log: Callable[[str], None] = lambda _: None,
    save: Callable[[list[Measurement]], None] = lambda _: None,
) -> list[Measurement]:
    """Measure every chosen row of every chosen setting, one after the other, each with process groups of its own.

    out_dir  folder for the digests of traces
    machine  text that is written into every measurement
    save     called after each row with all measurements so far, so that a stopped run leaves its results

    All ranks call this function with the same arguments and get the same list.
    """
    done: list[Measurement] = []
    for setting in choose_settings(bench.settings):
        case = Case(setting, ranks.rank, ranks.size, ranks.device, _options_of_ours(bench))
        traced = set(bench.trace)
        for name in choose_rows(bench, rows):
            trace = out_dir / f"trace_{setting.name}_{name}.json.gz" if name in traced else None
            traced.discard(name)  # a floor is measured twice, but traced once
            done.append(_measure(bench, case, name, rows[name], ranks, machine, trace, log))
            log(_line(done[-1]))
            save(done)
    return done


def _options_of_ours(bench: DataParallelBench) -> dict[str, Any]:
    """Fields of ``DistributedDataParallelConfig`` that the command line sets."""
    options = {
        "bucket_size": bench.bucket_size,
        "num_buckets": bench.num_buckets,
        "pad_buckets_for_high_nccl_busbw": bench.pad_buckets,
    }
    return {name: value for name, value in options.items() if value}


def _measure(
    bench: DataParallelBench,
    case: Case,
    name: str,
    row: Row,
    ranks: Ranks,
    machine: str,
    trace: Path | None,
    log: Callable[[str], None],
) -> Measurement:
    options = case.ours if name in OURS and row.trains else {}
    if name in FSDP:
        options = {key: value for key, value in case.ours.items() if key == "bucket_size"}
    about: dict[str, Any] = {
        "setting": case.setting.name,
        "num_ranks": case.num_ranks,
        "row": name,
        "label": ", ".join([row.label, *(f"{key}={value}" for key, value in options.items())]),
        "trains": row.trains,
        "machine": machine,
    }
    problem, told = measure_row(
        ranks, partial(_time_row, bench, case, row, trace), log, refusal=row.refuse(case), with_groups=row.with_groups
    )
    if problem:
        return Measurement(**about, problem=problem)
    numbers, setting = told[0], case.setting
    num_tokens = setting.num_tokens * setting.num_microbatches * case.num_ranks
    return Measurement(
        **about,
        **(numbers | worst_of(told, "peak_gib", "held_gib")),
        slowest_rank_ms=max(each["step_ms"] for each in told),
        tokens_per_second=num_tokens / numbers["step_ms"] * 1e3,
    )


def _time_row(bench: DataParallelBench, case: Case, row: Row, trace: Path | None) -> dict[str, Any]:
    def write_digest(step: Step) -> None:
        """Run traced steps on all ranks; rank 0 writes the digest of its trace."""
        if trace is None:
            return
        num_steps = 2
        trace.parent.mkdir(parents=True, exist_ok=True)
        record_trace(step, num_steps, trace if case.rank == 0 else None)
        if case.rank == 0:
            trace.with_suffix("").with_suffix(".txt").write_text(digest_trace(trace, num_steps))
            if not bench.keep_traces:
                trace.unlink()

    numbers = time_row(bench, case.device, partial(row.build, case), after=write_digest, close=row.close)
    del numbers["first_step_s"]
    return numbers


def _line(measured: Measurement) -> str:
    head = f"{measured.setting:15s} {measured.row:26s}"
    return line_of(head, measured, f"{measured.tokens_per_second / 1e3:8.1f} ktok/s")
