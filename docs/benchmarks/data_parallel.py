"""One GPT trained under each kind of data parallelism, with the same work: step time, peak memory, loss.

    torchrun --nproc-per-node 4 docs/benchmarks/data_parallel.py --settings large

Ratios are over a floor: the same model, the same microbatches and a rank's share of the optimizer, without
communication. There are two floors: ours (our modules and buckets) and the peers' (a plain layer, no wrapper). Each
floor is measured at the beginning and at the end, which shows the machine's drift. Ratios are over the mean of its two
times.

A row's time is the median over rounds. A round is timed between two events and ends with a synchronize, so that every
all-gather and reduction is on the clock. Clipping is off. A row that cannot be measured stays in the table with its
reason.
"""

import math
import statistics
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from contenders import Row, ours, refuse_copy_engines, refuse_graphs, refuse_instances, row_of, train
from floors import build_floor, build_peer_floor
from gpt import SETTINGS, Setting, make_model
from harness import (
    ConfigError,
    RowOptions,
    check_names,
    log,
    measure_and_write,
    measure_rows,
    next_token_loss,
    random_tokens,
    run_script,
    versions,
)
from peers import PEERS
from ranks import make_mesh
from tables import grouped, number, odd_losses, read_csv, shown, table, write_sections
from trace_digest import Tracer

import maingrad
from maingrad.fsdp import MixedPrecisionPolicy

FLOOR, PEER_FLOOR = "floor", "peer_floor"


@dataclass(frozen=True)
class Case:
    """The setting, ranks and device that a row is built for; see ``contenders.py``."""

    setting: Setting
    rank: int
    num_ranks: int
    device: torch.device
    ours: dict[str, Any] = field(default_factory=dict)
    """Fields of ``DistributedDataParallelConfig``."""
    compiling: ClassVar = {"fullgraph": False}

    @property
    def name(self):
        return self.setting.name

    def make(self, dtype, *linear):
        return make_model(self.setting, dtype, self.device, *linear)

    def units(self, model, split_ends=False):
        return model.units(split_ends=split_ends)

    def compile_loss(self, model):
        model.compile_loss()

    def loss_of(self, model):
        return next_token_loss(model)

    def tokens(self):
        return random_tokens(self.setting, self.rank, self.device)

    def about(self, name, row):
        options = self.ours if name in OURS and row.trains else {}
        if name.startswith("fsdp_"):
            options = {key: value for key, value in options.items() if key == "bucket_size"}
        label = ", ".join([row.label, *(f"{key}={value}" for key, value in options.items())])
        return {"setting": self.name, "label": label, "trains": row.trains}

    def rates(self, step_ms):
        """``tokens_per_second`` of all ranks; ``slowest_rank_ms``: ``step_ms`` by the slowest rank's clock."""
        num_tokens = self.setting.num_tokens * self.setting.num_microbatches * self.num_ranks
        return {"slowest_rank_ms": max(step_ms), "tokens_per_second": num_tokens / step_ms[0] * 1e3}


def _build_fsdp_zero1(case):
    """``fully_shard`` with parameters and gradients whole: ``parallelize`` has the wrapper for that."""
    model = case.make(torch.float32)
    maingrad.convert_linears(model)
    mesh, policy = make_mesh(case.device, {"inner": case.num_ranks}), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in (*case.units(model), model):
        maingrad.fully_shard(unit, mesh, "zero1", policy, bucket_size=case.ours.get("bucket_size"))
    return train(model, case.loss_of, case.tokens())


# ---- The rows. ----


def _floor(label, build, **how):
    return row_of(label, build, **how)._replace(with_groups=False, trains=False)


_COMPILED = ", blocks under torch.compile"
_GRAPH, _COPIES = "one CUDA graph", "gathers on copy engines"
_SPLIT, _ONCE = "embedding and head units of their own", "gradients reduced once a step"
_ENGINES = {"copy_engine_gather": True, "refuse": refuse_copy_engines}
_REDUCED_ONCE = {"reduce_every_microbatch": False}


def _wrapped(label, **how):
    return row_of(f"maingrad {label}", ours, form="zero1", **how)


def _sharded(label, form="zero3", **how):
    return row_of(f"maingrad FSDP, {label}", ours, form=form, **how)


OURS: dict[str, Row] = {
    FLOOR: _floor("our floor: no collectives", build_floor),
    PEER_FLOOR: _floor("peers' floor: no collectives", build_peer_floor),
    "zero1": _wrapped("ZeRO-1"),
    **{
        f"floor{name}_graphed": _floor(
            f"our floor{label}, {_GRAPH}", build_floor, compiled=bool(name), graphed=True, refuse=refuse_graphs
        )
        for name, label in (("", ""), ("_compiled", " under torch.compile"))
    },
    "zero1_copy_engines": _wrapped(f"ZeRO-1, {_COPIES}", copy_engine_param_gather=True, refuse=refuse_copy_engines),
    "zero1_bf16_wire": _wrapped("ZeRO-1, bf16 wire", grad_reduce_wire_dtype=torch.bfloat16),
    "zero1_no_overlap": _wrapped("ZeRO-1, no overlap", overlap_grad_reduce=False, overlap_param_gather=False),
    "zero1_unfused": _wrapped("ZeRO-1, nn.Linear", fused=False),
    "zero1_compiled": _wrapped(f"ZeRO-1{_COMPILED}", compiled=True),
    **{
        f"zero1{name}_graphed{suffix}": _wrapped(
            f"ZeRO-1{label}, {_GRAPH}{way}",
            compiled=bool(name),
            graphed=True,
            copy_engine_param_gather=bool(suffix),
            refuse=refuse_copy_engines if suffix else refuse_graphs,
        )
        for suffix, way in (("", ""), ("_copy_engines", f", {_COPIES}"))
        for name, label in (("", ""), ("_compiled", _COMPILED))
    },
    "hybrid": _wrapped("hybrid, two instances", num_distributed_optimizer_instances=2, refuse=refuse_instances),
    "ddp": row_of("maingrad DDP", ours, form="ddp"),
    # Units as the peers': each block, then the model, whose own unit holds the embedding, the last norm and the head.
    "fsdp_zero3": _sharded("ZeRO-3"),
    "fsdp_zero3_split": _sharded(f"ZeRO-3, {_SPLIT}", split_ends=True),
    "fsdp_zero3_copy_engines": _sharded(f"ZeRO-3, {_COPIES}", **_ENGINES),
    "fsdp_zero3_split_copy_engines": _sharded(f"ZeRO-3, {_SPLIT}, {_COPIES}", split_ends=True, **_ENGINES),
    "fsdp_zero3_reduced_once": _sharded(f"ZeRO-3, {_ONCE}", **_REDUCED_ONCE),
    "fsdp_zero3_reduced_once_copy_engines": _sharded(f"ZeRO-3, {_ONCE}, {_COPIES}", **_REDUCED_ONCE, **_ENGINES),
    "fsdp_zero3_split_reduced_once_copy_engines": _sharded(
        f"ZeRO-3, {_SPLIT}, {_ONCE}, {_COPIES}", split_ends=True, **_REDUCED_ONCE, **_ENGINES
    ),
    "fsdp_zero3_kept": _sharded("ZeRO-3, parameters kept until backward", reshard_after_forward=False),
    "fsdp_zero3_unfused": _sharded("ZeRO-3, nn.Linear", fused=False),
    "fsdp_zero3_compiled": _sharded(f"ZeRO-3{_COMPILED}", compiled=True),
    **{
        f"fsdp_zero3{name}_graphed": _sharded(
            f"ZeRO-3{label}, {_GRAPH}", compiled=bool(name), graphed=True, refuse=refuse_graphs
        )
        for name, label in (("", ""), ("_compiled", _COMPILED))
    },
    "fsdp_zero2": _sharded("ZeRO-2", "zero2"),
    "fsdp_zero2_copy_engines": _sharded(f"ZeRO-2, {_COPIES}", "zero2", **_ENGINES),
    "fsdp_zero1": row_of("maingrad FSDP, ZeRO-1", _build_fsdp_zero1),
    "fsdp_hsdp": _sharded("two instances (HSDP)", "hsdp", num_instances=2, refuse=refuse_instances),
}
ROWS: dict[str, Row] = OURS | PEERS
"""Rows by name, in measuring order. Ratios are over the first row."""


@dataclass(frozen=True, kw_only=True)
class DataParallelBench(RowOptions):
    """Ours and others on the same work."""

    settings: tuple[str, ...] = ("large", "one_microbatch", "small")
    """Tables: large, one_microbatch, small, tiny."""
    rows: tuple[str, ...] = ()
    """Rows by name; none: all. The floors are always measured, for the ratios."""
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
    stem: str = "data_parallel"
    """Files are STEM.csv, STEM.md and STEM.png; sections of other settings and numbers of ranks in STEM.csv stay."""
    redraw: bool = False
    """Measure nothing: write table and picture again from STEM.csv in the output folder."""


def choose_rows(bench, rows=ROWS):
    """Row names in measuring order: floors first and again last. Raises ``ConfigError`` for an unknown name."""
    check_names("setting", bench.settings, SETTINGS)
    check_names("row", bench.trace, rows)
    floors = [name for name in (FLOOR, PEER_FLOOR) if name in rows and name not in bench.without]
    between = [name for name in bench.chosen(rows) if name not in floors]
    return [*floors, *between, *floors] if between else floors


def bench_data_parallel(bench, ranks, rows=ROWS, **how):
    """Measure every chosen row of every chosen setting; ``how``: see ``measure_rows``."""
    names = choose_rows(bench, rows)
    given = {
        "bucket_size": bench.bucket_size,
        "num_buckets": bench.num_buckets,
        "pad_buckets_for_high_nccl_busbw": bench.pad_buckets,
    }
    options = {name: value for name, value in given.items() if value}
    cases = [Case(SETTINGS[name], ranks.rank, ranks.size, ranks.device, options) for name in bench.settings]
    trace = Tracer(bench.trace, bench.out_dir, keep=bench.keep_traces)
    return measure_rows(bench, ranks, cases, rows, names, after=trace, **how)


# ---- The table: a section for each setting and number of ranks. ----


def sections_of(rows):
    """The rows by setting and number of ranks, in the order of the settings, fewer ranks first."""
    groups = grouped(rows, _section)
    order = list(SETTINGS)
    return [groups[key] for key in sorted(groups, key=lambda key: (order.index(key[0]), key[1]))]


def _section(row):
    return row.setting, row.num_ranks


def _times(section, name, column="step_ms"):
    return [row[column] for row in section if row.row == name and not row.problem]


def floor_ms(section, name, column="step_ms"):
    """Mean step time of the floor's measurements; NaN if the floor was not measured."""
    return statistics.mean(_times(section, name, column) or [math.nan])


def write_report(rows, folder, stem="data_parallel"):
    """Write ``stem.csv`` and ``stem.md``, with the sections that the CSV already has; returns the Markdown."""
    return write_sections(
        rows,
        folder,
        stem,
        title="Data parallelism: ours and others on the same work",
        script="data_parallel",
        anchor="data-parallelism",
        key=_section,
        sections_of=sections_of,
        parts_of=_parts,
    )


def _parts(section):
    setting, num_ranks = _section(section[0])

    def over(name, column="step_ms"):
        return lambda row: number(row[column] / floor_ms(section, name, column), ".3f", "-") if not row.problem else "-"

    columns = [
        ("", "{row.label}"),
        ("ms", shown("step_ms", ".1f", "-")),
        ("over our floor", over(FLOOR)),
        # Ranks that communicate all take as long as the slowest rank: the ratio of both slowest ranks' times.
        ("over the slowest GPU's", over(FLOOR, "slowest_rank_ms")),
        ("over the peers' floor", over(PEER_FLOOR)),
        ("peak GiB", shown("peak_gib", ".1f", "-")),
        ("thousand tokens/s", shown("tokens_per_second", ".1f", "-", 1e-3)),
        ("loss", lambda row: row.problem or f"{row.first_loss:.3f} to {row.last_loss:.3f}"),
    ]
    drifts = [
        f"{whose} floor {times[-1] / times[0] - 1:+.1%}"
        for whose, times in (("our", _times(section, FLOOR)), ("the peers'", _times(section, PEER_FLOOR)))
        if len(times) > 1
    ]
    odd = ", ".join(row.label for row in odd_losses(section))
    return [
        f"## {setting}, {num_ranks} ranks",
        f"{num_ranks} x {section[0].machine}. {SETTINGS[setting].describe()}. Drift of the machine from the first rows "
        f"to the last: {', '.join(drifts) or 'not measured'}.",
        table(section, columns),
        *([f"**Losses differ from the others'**: {odd}."] if odd else []),
    ]


# ---- The picture: bars of step time over the floor, fastest first. ----


def draw(rows, path):
    """Draw ``rows`` into ``path``: a panel for each section, a bar for each row, each floor once."""
    from maingrad.launch.report.drawing import save, styled

    return save(styled(_figure)(rows), path)


def _figure(rows):
    from matplotlib.figure import Figure

    panels = [(section, bars) for section in sections_of(rows) if (bars := _bars(section))]
    heights = [0.6 + 0.28 * len(bars) for _, bars in panels] or [1.0]
    figure = Figure(figsize=(9.5, sum(heights) + 0.6))
    panels_of = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    for axes, (section, bars) in zip(panels_of.flat, panels, strict=False):
        floor = floor_ms(section, FLOOR)
        axes.set_title(f"{section[0].setting}, {section[0].num_ranks} ranks: ms a step, over our floor, peak memory")
        drawn = axes.barh(
            range(len(bars)), [length for length, _ in bars], 0.78, color=[_colour(row) for _, row in bars]
        )
        texts = [
            f"{length:.1f} ms  {number(length / floor, '.2f')}  {f'{row.peak_gib:.1f} GiB' if row.peak_gib else ''}"
            for length, row in bars
        ]
        axes.bar_label(drawn, texts, padding=4, fontsize=7)
        if not math.isnan(floor):
            axes.axvline(floor, color="black", linewidth=1.0, linestyle=(0, (5, 4)))
        axes.set_yticks(range(len(bars)), [row.label for _, row in bars], fontsize=7.5)
        axes.margins(x=0.28)
    if panels:
        figure.supxlabel(panels[-1][0][0].machine, fontsize=8)
    return figure


def _colour(row):
    """Floors are pale, ours dark, peers between."""
    return "#dfe6ec" if row.row in (FLOOR, PEER_FLOOR) else "#1f77a4" if row.row in OURS else "#9bb8cc"


def _bars(section):
    """Length and row, slowest first because bars are drawn upwards."""
    measured = {row.row: row for row in section if not row.problem}
    floors = {name: floor_ms(section, name) for name in (FLOOR, PEER_FLOOR)}
    bars = [(floors.get(name, row.step_ms), row) for name, row in measured.items()]
    return sorted(bars, key=lambda bar: -bar[0])


def run(bench):
    """Returns status 1 if the loss of a row of ours differs from the other rows'; the table names the row."""
    choose_rows(bench)
    csv = bench.out_dir / f"{bench.stem}.csv"
    if bench.redraw:
        rows = read_csv(csv)
        if not rows:
            raise ConfigError(f"'{csv}' holds no measurements that could be drawn again")
    else:
        rows, text = measure_and_write(bench, bench_data_parallel, write_report, versions())
        if not text:  # another rank writes
            return 0
    log(write_report(rows, bench.out_dir, bench.stem))
    try:
        log(draw(read_csv(csv), csv.with_suffix(".png")))
    except ImportError as error:
        log(f"no picture: {error}; --redraw makes it from the CSV elsewhere")
    return any(row.row not in PEERS for section in sections_of(rows) for row in odd_losses(section))


main = partial(run_script, DataParallelBench, run)

if __name__ == "__main__":
    sys.exit(main())
