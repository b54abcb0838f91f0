"""``maingrad bench kernels``: every kernel against its roofline and its rivals.

The roofline of an operation is the larger of two times:

    floating-point operations / rate of an 8192^3 product in bf16
    bytes (operands read once, results written once) / rate of a device copy (bytes read plus bytes written)

Both rates are measured at the start of the same run.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...config.run import ConfigError
from .problems import GROUPED_OPS, GroupedOperands, Shape, parse_shape, provenance
from .rivals import DENSE_OPS, OURS, POINTERS, STREAMING_OPS, Case, make_case

__all__ = [
    "Ceilings",
    "KernelBench",
    "KernelRow",
    "KernelTable",
    "bench_kernels",
]

_PUBLISHED: tuple[str, ...] = (
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
_SMALL: tuple[str, ...] = ("4x128x48x32", "1x32x16x24")
"""Shapes that a CPU runs in seconds: they show that everything runs and agrees, and say nothing of speed."""
OPS = (*GROUPED_OPS, *DENSE_OPS, *STREAMING_OPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelBench:
    """Size of the measurement; the defaults are the published table's."""

    ops: tuple[str, ...] = OPS
    """Operations. Those whose names begin with wgrad_ take shapes of one expert, the others shapes of several."""
    shapes: tuple[str, ...] = ()
    """Shapes as EXPERTSxROWSxNxK, like 64x32768x2048x2048. None: the published shapes, or two tiny ones on a CPU."""
    num_rounds: int = 3
    """Rounds; the median counts. Each round measures all contenders in turn, so that drift hits them alike."""
    measure_ms: int = 40
    """Device time of one measurement, which is the median of single runs. L2 is cold before each run."""

    def __post_init__(self) -> None:
        for op in self.ops:
            if op not in OPS:
                raise ConfigError(f"--ops: there is no '{op}'; choose from {', '.join(OPS)}")
        if self.num_rounds < 1 or self.measure_ms < 1:
            raise ConfigError(f"--num-rounds and --measure-ms must be positive: {self.num_rounds}, {self.measure_ms}")
        self.parsed_shapes(on_cuda=False)

    def parsed_shapes(self, *, on_cuda: bool) -> tuple[Shape, ...]:
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

    def roofline_ms(self, flops: float, nbytes: float) -> float:
        """Milliseconds that an operation takes at the peak rates. Only a run with operands in cache can be faster."""
        return max(self._times(flops, nbytes))

    def bound(self, flops: float, nbytes: float) -> str:
        """Which of the two rates limits the operation."""
        products, memory = self._times(flops, nbytes)
        return "products" if products > memory else "memory"

    def _times(self, flops: float, nbytes: float) -> tuple[float, float]:
        return flops / self.tflops / 1e9, nbytes / self.gb_per_s / 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRow:
    """One contender of one operation at one shape."""

    op: str
    experts: int
    rows: int
    n: int
    k: int
    contender: str
    ms: float
    """Milliseconds of one run, median over the rounds."""
    spread_ms: float
    """Largest minus smallest round."""
    roofline_ms: float
    over_roofline: float
    over_ours: float
    bound: str
    """What limits the roofline: products or memory."""
    tflops: float
    gb_per_s: float
    relative_error: float
    """Error of the checked part of the result against fp64, relative, in the Frobenius norm."""
    gpu: str
    torch: str
    triton: str
    date: str

    @property
    def shape(self) -> Shape:
        """E, T, N, K."""
        return self.experts, self.rows, self.n, self.k


@dataclass(kw_only=True, slots=True)
class KernelTable:
    """The measured rows, and the contenders without a row."""

    ceilings: Ceilings
    rows: list[KernelRow] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """One line for each contender that gave wrong results or could not run; the line gives no time."""
    wrong: bool = False
    """Whether one of maingrad's kernels gave a wrong result."""


def bench_kernels(bench: KernelBench, device: torch.device, log: Callable[[str], None] = lambda _: None) -> KernelTable:
    """Check every contender, then time it. A contender with wrong results gets no row."""
    ceilings = measure_ceilings(device)
    log(f"ceilings: {ceilings.tflops:.3g} TFLOP/s, {ceilings.gb_per_s:.4g} GB/s")
    table = KernelTable(ceilings=ceilings)
    for shape in bench.parsed_shapes(on_cuda=device.type == "cuda"):
        ops = [op for op in bench.ops if (op in DENSE_OPS) == (shape[0] == 1)]
        if not ops:
            continue
        operands = GroupedOperands(*shape, torch.bfloat16, device)
        for op in ops:
            _measure_case(bench, op, shape, make_case(op, operands), device, table, log)
        del operands
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not table.rows:
        raise ConfigError("--ops and --shapes leave nothing to measure: dense operations need shapes of one expert")
    return table


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure the two rates. On a CPU the sizes are too small for meaningful rates."""
    size, nbytes = (8192, 1 << 30) if device.type == "cuda" else (256, 1 << 20)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    source = torch.empty(nbytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    # Long enough for the GPU's clocks to settle at their rate under load.
    product, copy = _milliseconds(lambda: a @ b, 300, device), _milliseconds(lambda: target.copy_(source), 100, device)
    return Ceilings(tflops=2 * size**3 / product / 1e9, product_size=size, gb_per_s=2 * nbytes / copy / 1e6)


def _measure_case(
    bench: KernelBench, op: str, shape: Shape, case: Case, device: torch.device, table: KernelTable,
    log: Callable[[str], None],
) -> None:  # fmt: skip
    errors = dict(_checked(op, shape, case, table, log))
    times: dict[str, list[float]] = {name: [] for name in errors}
    for _ in range(bench.num_rounds):
        for name in errors:
            times[name].append(_milliseconds(case.contenders[name].run, bench.measure_ms, device))
    medians = {name: statistics.median(values) for name, values in times.items()}
    sizes: dict[str, Any] = dict(zip(("experts", "rows", "n", "k"), shape, strict=True))
    roofline = table.ceilings.roofline_ms(case.flops, case.nbytes)
    for name, ms in medians.items():
        row = KernelRow(
            op=op,
            **sizes,
            contender=name,
            ms=ms,
            spread_ms=max(times[name]) - min(times[name]),
            roofline_ms=roofline,
            over_roofline=ms / roofline,
            over_ours=ms / medians.get(OURS, float("nan")),
            bound=table.ceilings.bound(case.flops, case.nbytes),
            tflops=case.flops / ms / 1e9,
            gb_per_s=case.nbytes / ms / 1e6,
            relative_error=errors[name],
            **provenance(device),
        )
        table.rows.append(row)
        log(f"{op:25s} {_named(shape):22s} {name:24s} {ms:8.4f} ms  {row.over_roofline:6.2f} x roofline")


def _checked(
    op: str, shape: Shape, case: Case, table: KernelTable, log: Callable[[str], None]
) -> Iterable[tuple[str, float]]:
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
            table.left_out.append(f"{op} {_named(shape)}, {name}: {said}")
            table.wrong |= ours
            log(f"left out: {table.left_out[-1]}")
        else:
            yield name, error


def _milliseconds(run: Callable[[], object], measure_ms: int, device: torch.device) -> float:
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


def _named(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
