"""One Hugging Face model trained by maingrad and by FSDP2, eager and compiled, with the same work.

A row's time is the median over rounds of a round's mean step. A round ends with a synchronize, so that every all-gather
and reduction is on the clock. Clipping is off. A row that cannot be measured stays in the table with its reason.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ....kernels.compat import private_name
from ..data_parallel.ranks import Ranks
from ..data_parallel.rounds import RowMeasurement, check_names, line_of, measure_row, time_row, worst_of
from ..data_parallel.rows import reset_compiler
from .architectures import ARCHITECTURES, Architecture, Shape
from .rows import ROWS, Case, Row

__all__ = ["Measurement", "ModelsBench", "bench_models", "choose_architecture", "choose_rows", "peak_tflops"]

_counters: dict[str, Any] = private_name(
    "torch._dynamo.utils.counters", loss="measurements of compiled models count no graphs", fallback={}
)

_PEAKS = {"H200": 989.5, "H100": 989.5, "A100": 312.0}
"""Dense bf16 TFLOP/s of the SXM modules, by NVIDIA's data sheets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelsBench:
    """Size of the measurement; the defaults are the published tables'."""

    model: str = "llama-1b"
    """llama-1b, llama-8b, qwen3-1.7b, qwen3-30b-a3b, gpt2-large, tiny."""
    shapes: tuple[str, ...] = ()
    """Microbatches of one rank like 4x4096, sequences x tokens; none: the model's own."""
    num_layers: int | None = None
    """Decoder layers; None: the model's own number."""
    num_microbatches: int = 1
    """Microbatches of one step."""
    rows: tuple[str, ...] = ()
    """Rows by name; none: all."""
    without: tuple[str, ...] = ()
    """Rows to leave out."""
    backend: str = "inductor"
    """Backend of torch.compile: inductor, aot_eager, eager."""
    compile_loss: bool = False
    """Compile the loss function of compiled rows too."""
    num_steps: int = 10
    """Consecutive steps of one round."""
    num_rounds: int = 3
    """Rounds; the median counts."""
    num_warmup_steps: int = 3
    """Steps before the first round, the first step of all among them."""
    peak_tflops: float | None = None
    """Dense bf16 TFLOP/s of one GPU, which MFU is a share of; None: by the GPU's name."""
    timeout: float = 300.0
    """Seconds after which a rank gives up on a collective or on another rank."""
    stem: str = "models"
    """Files are STEM.csv and STEM.md; sections of other models, shapes and numbers of ranks in STEM.csv stay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement(RowMeasurement):
    """``tokens_per_second``: of one GPU."""

    model: str
    shape: str
    num_microbatches: int
    mfu: float = math.nan
    """FLOPs of the model in a second of one GPU, over ``peak_tflops``; NaN if the peak is not known."""
    peak_tflops: float = math.nan
    first_step_s: float = math.nan
    """Seconds of the first step, compilation included; the slowest rank's."""
    num_graphs: int = 0
    """Graphs that were compiled for the row on rank 0."""
    options: str = ""
    """How the contender is set up."""
    backend: str = ""
    """Backend of torch.compile; empty for an eager row."""


def choose_architecture(bench: ModelsBench) -> tuple[Architecture, list[Shape]]:
    """The model and the shapes. Raises ``ConfigError`` for an unknown name or shape."""
    check_names("model", [bench.model], ARCHITECTURES)
    architecture = ARCHITECTURES[bench.model]
    if bench.num_layers is not None:
        architecture = architecture.with_layers(bench.num_layers)
    return architecture, [Shape.parse(text) for text in bench.shapes or architecture.shapes]


def choose_rows(bench: ModelsBench, rows: Mapping[str, Row] = ROWS) -> list[str]:
    """Row names in measuring order. Raises ``ConfigError`` for an unknown name."""
    check_names("row", (*bench.rows, *bench.without), rows)
    wanted = set(bench.rows or rows) - set(bench.without)
    return [name for name in rows if name in wanted]


def peak_tflops(bench: ModelsBench, device: torch.device) -> float:
    """Dense bf16 TFLOP/s of one GPU; NaN where neither the options nor the GPU's name tell."""
    if bench.peak_tflops is not None:
        return bench.peak_tflops
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for gpu, peak in _PEAKS.items() if gpu in name), math.nan)


def bench_models(
    bench: ModelsBench,
    ranks: Ranks,
    *,
    machine: str = "",
    rows: Mapping[str, Row] = ROWS,
    log: Callable[[str], None] = lambda _: None,
    save: Callable[[list[Measurement]], None] = lambda _: None,
) -> list[Measurement]:
    """Measure every chosen row at every shape, one after the other, each with process groups of its own.

    machine  text that is written into every measurement
    save     called after each row with all measurements so far, so that a stopped run leaves its results

    All ranks call this function with the same arguments and get the same list.
    """
    architecture, shapes = choose_architecture(bench)
    names = choose_rows(bench, rows)
    _warm_up(bench, ranks, compiled=any(rows[name].compiled for name in names))
    done: list[Measurement] = []
    for shape in shapes:
        case = _case(bench, architecture, shape, ranks)
        for name in names:
            done.append(_measure(bench, case, name, rows[name], ranks, machine, log))
            log(_line(done[-1]))
            save(done)
    return done


def _case(bench: ModelsBench, architecture: Architecture, shape: Shape, ranks: Ranks) -> Case:
    microbatches, backend = bench.num_microbatches, bench.backend
    return Case(architecture, shape, microbatches, ranks.rank, ranks.size, ranks.device, backend, bench.compile_loss)


def _warm_up(bench: ModelsBench, ranks: Ranks, *, compiled: bool) -> None:
    """Run a step of ours and one of FSDP2's on a very small model, for what is done once in a process.

    A process imports its compiler and traces the compiler's own patterns for its first graph, starts its communication,
    and loads kernels at their first launch. No row's first step should pay for it.
    """
    tiny = ARCHITECTURES["tiny"]
    case = _case(bench, tiny, Shape.parse(tiny.shapes[0]), ranks)
    once = replace(bench, num_steps=1, num_rounds=1, num_warmup_steps=1)
    for kind in ("zero1", "fsdp2_zero3"):
        name = f"{kind}_compiled" if compiled else kind
        _measure(once, case, name, ROWS[name], ranks, "", lambda _: None)


def _measure(
    bench: ModelsBench,
    case: Case,
    name: str,
    row: Row,
    ranks: Ranks,
    machine: str,
    log: Callable[[str], None],
) -> Measurement:
    about: dict[str, Any] = {
        "model": case.architecture.name,
        "shape": str(case.shape),
        "num_microbatches": case.num_microbatches,
        "num_ranks": case.num_ranks,
        "row": name,
        "label": row.label,
        "options": row.options,
        "backend": _backend(case) if row.compiled else "",
        "machine": machine,
    }
    problem, told = measure_row(ranks, partial(_time_row, bench, case, row), log, refusal=row.refuse(case))
    if problem:
        return Measurement(**about, problem=problem)
    numbers = told[0]
    tokens = case.shape.batch * case.shape.length * case.num_microbatches
    per_second = tokens / numbers["step_ms"] * 1e3
    peak = peak_tflops(bench, case.device)
    return Measurement(
        **about,
        **(numbers | worst_of(told, "peak_gib", "held_gib", "first_step_s")),
        tokens_per_second=per_second,
        mfu=per_second * case.architecture.flops_per_token(case.shape.length) / (peak * 1e12),
        peak_tflops=peak,
    )


def _backend(case: Case) -> str:
    return case.backend + (", the loss compiled too" if case.compile_loss else "")


def _time_row(bench: ModelsBench, case: Case, row: Row) -> dict[str, Any]:
    _counters.clear()
    numbers = time_row(bench, case.device, partial(row.build, case), close=reset_compiler)
    return numbers | {"num_graphs": int(_counters.get("stats", {}).get("unique_graphs", 0))}


def _line(measured: Measurement) -> str:
    return line_of(
        f"{measured.model} {measured.shape:8s} {measured.row:30s}",
        measured,
        f"{measured.tokens_per_second / 1e3:7.1f} ktok/s/GPU  MFU {measured.mfu:6.1%}",
        f"first step {measured.first_step_s:6.1f} s, {measured.num_graphs} graphs  ",
    )
