"""Every kernel against its roofline and its rivals.

    python docs/benchmarks/rooflines.py

The roofline of an operation is the larger of two times:

    floating-point operations / rate of an 8192^3 product in bf16
    bytes (operands read once, results written once) / rate of a device copy (bytes read plus bytes written)

Both rates are measured at the start of the same run.
"""

import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial

import torch
from harness import ConfigError, Options, check_names, log, run_script, take_turns, the_device
from matplotlib.figure import Figure
from rivals import DOES_LESS, OURS, POINTERS, STREAMING_OPS, make_case
from tables import Measurement, grouped, machine, table, write_table

from maingrad.launch.report.drawing import INK, save, styled
from maingrad.launch.tuning.problems import (
    DENSE_OPS,
    GROUPED_OPS,
    GroupedOperands,
    parse_shape,
    provenance,
    triton_version,
)

_PUBLISHED = (
    "8x16384x4096x4096",
    "8x16384x14336x4096",
    "64x32768x2048x2048",
    "128x32768x1536x4096",
    "32x8192x4096x2048",
    "64x32768x2048x1024",  # OLMoE's fc2
    "128x32768x1536x2048",  # Qwen3-30B-A3B's two layers
    "128x32768x2048x768",
    "1x2048x4096x4096",
    "1x2048x14336x4096",
    "1x2048x4096x14336",
    "1x2048x2048x2048",
    "1x2048x1024x4096",
    "1x2048x6144x2048",
    "1x4096x4096x4096",
    "1x8192x4096x4096",
    "1x8192x14336x4096",
    "1x16384x12288x4096",
)
_SMALL = ("4x128x48x32", "1x32x16x24")
"""Shapes that a CPU runs in seconds: they show that everything runs and agrees, and say nothing of speed."""
OPS = (*GROUPED_OPS, *DENSE_OPS, *STREAMING_OPS)


@dataclass(frozen=True, kw_only=True)
class KernelBench(Options):
    """Size of the measurement; the defaults are the published table's."""

    ops: tuple[str, ...] = OPS
    """Operations. Those whose names begin with wgrad_ take shapes of one expert, the others shapes of several."""
    shapes: tuple[str, ...] = ()
    """Shapes as EXPERTSxROWSxNxK, like 64x32768x2048x2048. None: the published shapes, or two tiny ones on a CPU."""
    num_rounds: int = 3
    """Rounds; the median counts. Each round measures all contenders in turn, so that drift hits them alike."""
    measure_ms: int = 40
    """Device time of one measurement, which is the median of single runs. L2 is cold before each run."""

    def __post_init__(self):
        check_names("operation", self.ops, OPS)
        if self.num_rounds < 1 or self.measure_ms < 1:
            raise ConfigError(f"--num-rounds and --measure-ms must be positive: {self.num_rounds}, {self.measure_ms}")
        self.parsed_shapes(on_cuda=False)

    def parsed_shapes(self, *, on_cuda: bool) -> tuple[tuple[int, int, int, int], ...]:
        """The shapes as numbers. Raises ``ConfigError`` for a text that is no shape."""
        return tuple(map(parse_shape, self.shapes or (_PUBLISHED if on_cuda else _SMALL)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Measured peak rates of this machine."""

    tflops: float
    """Rate of a bf16 product of two square matrices, in 1e12 floating-point operations per second."""
    product_size: int
    """Rows and columns of these matrices."""
    gb_per_s: float
    """Rate of a device copy: bytes read plus bytes written, in 1e9 per second."""

    def roofline_ms(self, flops, nbytes):
        """Milliseconds that an operation takes at the peak rates. Only a run with operands in cache can be faster."""
        return max(self._times(flops, nbytes))

    def bound(self, flops, nbytes):
        """Which of the two rates limits the operation."""
        products, memory = self._times(flops, nbytes)
        return "products" if products > memory else "memory"

    def _times(self, flops, nbytes):
        return flops / self.tflops / 1e9, nbytes / self.gb_per_s / 1e6


@dataclass(kw_only=True, slots=True)
class KernelTable:
    """The measured rows, and the contenders without a row."""

    ceilings: Ceilings
    rows: list[Measurement] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """One line for each contender that gave wrong results or could not run; the line gives no time."""
    wrong: bool = False
    """Whether one of maingrad's kernels gave a wrong result."""


def bench_kernels(bench: KernelBench, device):
    """Check every contender, then time it. A contender with wrong results gets no row."""
    ceilings = measure_ceilings(device)
    log(f"ceilings: {ceilings.tflops:.3g} TFLOP/s, {ceilings.gb_per_s:.4g} GB/s")
    kernels = KernelTable(ceilings=ceilings)
    for shape in bench.parsed_shapes(on_cuda=device.type == "cuda"):
        ops = [op for op in bench.ops if (op in DENSE_OPS) == (shape[0] == 1)]
        if not ops:
            continue
        operands = GroupedOperands(*shape, torch.bfloat16, device)
        for op in ops:
            _measure_case(bench, op, shape, make_case(op, operands), device, kernels)
        del operands
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not kernels.rows:
        raise ConfigError("--ops and --shapes leave nothing to measure: dense operations need shapes of one expert")
    return kernels


def measure_ceilings(device):
    """Measure the two rates. On a CPU the sizes are too small for meaningful rates."""
    size, nbytes = (8192, 1 << 30) if device.type == "cuda" else (256, 1 << 20)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    source = torch.empty(nbytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    # Long enough for the GPU's clocks to settle at their rate under load.
    product, copy = _milliseconds(lambda: a @ b, 300, device), _milliseconds(lambda: target.copy_(source), 100, device)
    return Ceilings(tflops=2 * size**3 / product / 1e9, product_size=size, gb_per_s=2 * nbytes / copy / 1e6)


def _measure_case(bench, op, shape, case, device, kernels):
    errors = dict(_checked(op, shape, case, kernels))

    def measure(name):
        return _milliseconds(case.contenders[name].run, bench.measure_ms, device)

    times = take_turns(bench.num_rounds, errors, measure)
    medians = {name: statistics.median(values) for name, values in times.items()}
    sizes = dict(zip(("experts", "rows", "n", "k"), shape, strict=True))
    roofline = kernels.ceilings.roofline_ms(case.flops, case.nbytes)
    for name, ms in medians.items():
        row = Measurement(
            op=op,
            **sizes,
            contender=name,
            ms=ms,
            spread_ms=max(times[name]) - min(times[name]),
            roofline_ms=roofline,
            over_roofline=ms / roofline,
            over_ours=ms / medians.get(OURS, float("nan")),
            bound=kernels.ceilings.bound(case.flops, case.nbytes),
            tflops=case.flops / ms / 1e9,
            gb_per_s=case.nbytes / ms / 1e6,
            relative_error=errors[name],
            **provenance(device),
        )
        kernels.rows.append(row)
        log(f"{op:25s} {'x'.join(map(str, shape)):22s} {name:24s} {ms:8.4f} ms  {row.over_roofline:6.2f} x roofline")


def _checked(op, shape, case, kernels):
    """The contenders whose results are right, with their relative errors."""
    for name, contender in case.contenders.items():
        ours = name in (OURS, POINTERS)
        try:
            error = case.error(contender.run)
            said = "" if error <= contender.tolerance else f"wrong by {error:.1e}, above {contender.tolerance:.0e}"
        except (RuntimeError, ValueError) as failure:
            if ours:
                raise
            said = (str(failure).splitlines() or [type(failure).__name__])[0]
        if said:
            kernels.left_out.append(f"{op} {'x'.join(map(str, shape))}, {name}: {said}")
            kernels.wrong |= ours
            log(f"left out: {kernels.left_out[-1]}")
        else:
            yield name, error


def _milliseconds(run, measure_ms, device):
    """Median milliseconds of single runs."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, warmup=max(10, measure_ms // 4), rep=measure_ms, return_mode="median"))
    run()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


# ---- The table. ----


def shape_of(row):
    """E, T, N, K."""
    return row.experts, row.rows, row.n, row.k


_NOTES = f"""\
Columns of contenders are times over the roofline, which is the larger of the floating-point operations over the first
ceiling and the bytes over the second, operands read once and results written once; what is accumulated into counts
twice. Time over the fastest rival is ours over the least of the others: below 1, ours is faster.

- `{POINTERS}`: the same kernels without the tensor memory accelerator, as GPUs before sm90 run them.
- Loops over experts are given the split sizes on the host for nothing.
- `{DOES_LESS}` writes half the bytes, rounded: it is shown, and is no rival.
- Of `scaled_glu` and its backward N is both halves; of permutations K is the width, and T the rows, 8 a token."""


def write_report(kernels, folder):
    """Write ``kernels.csv``, ``kernels.md`` and ``kernels.png`` into ``folder``; returns the Markdown."""
    ceilings = kernels.ceilings
    parts = [
        f"{machine()}, Triton {triton_version()}. Ceilings measured in the same run: {ceilings.tflops:.3g} TFLOP/s "
        f"(bf16 product of {ceilings.product_size}^3), {ceilings.gb_per_s:.4g} GB/s (device copy, read and written). "
        f"E experts, T rows of all of them (uneven splits from a seed), N output and K input features, bf16 operands; "
        f"weight gradients into fp32. Medians of single runs from a cold L2, over rounds in which all contenders take "
        f"turns. Every contender was compared with fp64 before it was timed. Made by `docs/benchmarks/rooflines.py`.",
        "![Time over roofline](kernels.png)",
        _summary(kernels.rows),
        _NOTES,
    ]
    for op, rows in grouped(kernels.rows, lambda row: row.op).items():
        parts += [f"## {op}", table_of(rows)]
    if kernels.left_out:
        parts += ["## Left out", "\n".join(f"- {line}" for line in kernels.left_out)]
    text = write_table(folder, "kernels", kernels.rows, "Kernels against their rooflines and rivals", *parts)
    draw(kernels.rows, folder / "kernels.png", machine())
    return text


def over_fastest_rival(rows):
    """Our time divided by the fastest rival's, for one operation at one shape; None where either has no row."""
    ours = [row.ms for row in rows if row.contender == OURS]
    rivals = [row.ms for row in rows if row.contender not in (OURS, POINTERS, DOES_LESS)]
    return ours[0] / min(rivals) if ours and rivals else None


def _summary(rows):
    columns = [
        ("", lambda rows: rows[0].op),
        ("ours over roofline, median", lambda rows: _number(_middle(_ours(rows)))),
        ("worst", lambda rows: _number(max(_ours(rows), default=None))),
        ("ours over the fastest rival, median", lambda rows: _number(_middle(_against(rows)))),
        ("best", lambda rows: _number(min(_against(rows), default=None))),
        ("worst", lambda rows: _number(max(_against(rows), default=None))),
    ]
    return table(list(grouped(rows, lambda row: row.op).values()), columns)


def _ours(rows):
    return [row.over_roofline for row in rows if row.contender == OURS]


def _against(rows):
    return [ratio for each in grouped(rows, shape_of).values() if (ratio := over_fastest_rival(each)) is not None]


def table_of(rows):
    def of(contender):
        return (
            f"**{contender}**" if contender == OURS else contender,
            lambda rows: _number(next((row.over_roofline for row in rows if row.contender == contender), None)),
        )

    columns = [
        ("E, T, N, K", lambda rows: ", ".join(map(str, shape_of(rows[0])))),
        ("roofline, ms", lambda rows: f"{rows[0].roofline_ms:.3f}"),
        ("bound by", lambda rows: rows[0].bound),
        ("ours, ms", lambda rows: next((f"{row.ms:.3f}" for row in rows if row.contender == OURS), "")),
        *(of(contender) for contender in dict.fromkeys(row.contender for row in rows)),
        ("ours over the fastest rival", lambda rows: _number(over_fastest_rival(rows))),
    ]
    return table(list(grouped(rows, shape_of).values()), columns)


def _middle(values):
    return statistics.median(values) if values else None


def _number(value):
    return "" if value is None else f"{value:.2f}"


# ---- The picture: a panel for each operation, a group for each shape, a bar for each contender. ----

_CLIPPED = 5.0
"""Longer bars end here, with their value on top: a rival at 15 would leave the other bars too short to compare."""
_COLOURS = {OURS: "#1f77a4", POINTERS: "#9bb8cc"}
_OF_RIVALS = ("#e07b39", "#8a97a3", "#2a9d5c", "#efe3c8")


@styled
def draw(rows, path, machine):
    """Draw times over the roofline into ``path``, with ``machine`` below the panels."""
    ops = grouped(rows, lambda row: row.op)
    columns = 1 if len(ops) == 1 else 2
    height = math.ceil(len(ops) / columns)
    figure = Figure(figsize=(8.5 * columns, 3.6 * height + 0.4))
    panels = figure.subplots(height, columns, squeeze=False).flat
    for panel, (op, its_rows) in zip(panels, ops.items(), strict=False):
        _draw_op(panel, op, its_rows)
    for panel in panels:
        panel.set_visible(False)
    figure.supxlabel(f"{machine}; experts x rows x N x K", fontsize=8)
    return save(figure, path)


def _draw_op(axes, op, rows):
    shapes = list(grouped(rows, shape_of))
    contenders = grouped(rows, lambda row: row.contender)
    width = 0.8 / len(contenders)
    rivals = iter(_OF_RIVALS * len(contenders))
    for place, (name, mine) in enumerate(contenders.items()):
        at = [shapes.index(shape_of(row)) + (place + 0.5) * width - 0.4 for row in mine]
        ratios = [row.over_roofline for row in mine]
        colour = _COLOURS.get(name) or next(rivals)
        bars = axes.bar(at, [min(ratio, _CLIPPED) for ratio in ratios], width * 0.92, color=colour, label=name)
        turned = 90 if len(shapes) * len(contenders) > 16 else 0
        axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=2, fontsize=6.5, rotation=turned)
    axes.set_title(f"{op}: time over roofline")
    axes.axhline(1.0, color=INK, linewidth=1.2, linestyle=(0, (5, 4)))
    axes.set_ylim(0, min(_CLIPPED, max(row.over_roofline for row in rows)) * 1.25)
    names = ["x".join(map(str, shape)) for shape in shapes]
    axes.set_xticks(range(len(shapes)), names, fontsize=7, rotation=20 if len(shapes) > 4 else 0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(ncols=len(contenders), loc="upper left", bbox_to_anchor=(0, 1.02))


def run(bench):
    """Returns status 1 if one of maingrad's kernels computed a wrong result; the table names the kernel."""
    kernels = bench_kernels(bench, the_device())
    log(write_report(kernels, bench.out_dir))
    return kernels.wrong


main = partial(run_script, KernelBench, run)

if __name__ == "__main__":
    sys.exit(main())
