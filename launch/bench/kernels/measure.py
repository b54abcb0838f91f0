"""``maingrad bench kernels``: every kernel against its roofline and its rivals.

The roofline of an operation is the larger of its floating-point operations over the rate of an 8192^3 product in bf16,
and of its bytes, operands read once and results written once, over the rate of a device copy (read and written). Both
rates are measured in the same run, before anything else.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ....kernels.compat import HAS_TRITON
from ...config.run import ConfigError
from .problems import GROUPED_OPS, GroupedOperands, Shape, parse_shape
from .rivals import DENSE_OPS, OURS, POINTERS, STREAMING_OPS, Case, make_case

__all__ = [
    "Ceilings",
    "KernelBench",
    "KernelRow",
    "KernelTable",
    "bench_kernels",
    "triton_version",
]

_PUBLISHED: tuple[Shape, ...] = (
    (8, 16384, 4096, 4096),
    (8, 16384, 14336, 4096),
    (64, 32768, 2048, 2048),
    (128, 32768, 1536, 4096),
    (32, 8192, 4096, 2048),
    (64, 32768, 2048, 1024),  # OLMoE's second layer
    (128, 32768, 1536, 2048),  # Qwen3-30B-A3B's two
    (128, 32768, 2048, 768),
    (1, 2048, 4096, 4096),
    (1, 2048, 14336, 4096),
    (1, 2048, 4096, 14336),
    (1, 2048, 2048, 2048),
    (1, 2048, 1024, 4096),
    (1, 2048, 6144, 2048),
    (1, 4096, 4096, 4096),
    (1, 8192, 4096, 4096),
    (1, 8192, 14336, 4096),
    (1, 16384, 12288, 4096),
)
_SMALL: tuple[Shape, ...] = ((4, 128, 48, 32), (1, 32, 16, 24))
"""What a CPU does in seconds: that everything runs and agrees, no more."""
OPS = (*GROUPED_OPS, *DENSE_OPS, *STREAMING_OPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelBench:
    """What is measured; the defaults are the published table's."""

    ops: tuple[str, ...] = OPS
    """Operations: those with wgrad_ in front take shapes of one expert, the others of several."""
    shapes: tuple[str, ...] = ()
    """EXPERTSxROWSxNxK, like 64x32768x2048x2048; none: the published ones, on a CPU two tiny ones."""
    num_rounds: int = 3
    """Measurements of each contender; the median counts. Rounds go over all contenders in turn, so that drift hits them
    alike."""
    measure_ms: int = 40
    """Device time of one measurement, in which the median of single runs is taken; a cold L2 before each."""

    def __post_init__(self) -> None:
        unknown = [op for op in self.ops if op not in OPS]
        if unknown:
            raise ConfigError(f"--ops: there is no '{unknown[0]}'; choose from {', '.join(OPS)}")
        if self.num_rounds < 1 or self.measure_ms < 1:
            raise ConfigError(f"--num-rounds and --measure-ms must be positive: {self.num_rounds}, {self.measure_ms}")
        self.parsed_shapes(on_cuda=False)

    def parsed_shapes(self, *, on_cuda: bool) -> tuple[Shape, ...]:
        """The shapes as numbers. Raises ``ConfigError`` for one that is none."""
        if not self.shapes:
            return _PUBLISHED if on_cuda else _SMALL
        return tuple(parse_shape(text) for text in self.shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """What this machine does at best, measured."""

    tflops: float
    """bf16 product of two square matrices."""
    product_size: int
    """Their size."""
    gb_per_s: float
    """Device copy, bytes read plus bytes written."""

    def roofline_ms(self, flops: float, nbytes: float) -> float:
        """No run can be faster, but for what a cache holds."""
        return max(flops / self.tflops / 1e9, nbytes / self.gb_per_s / 1e6)

    def bound(self, flops: float, nbytes: float) -> str:
        """By what."""
        return "products" if flops / self.tflops / 1e9 > nbytes / self.gb_per_s / 1e6 else "memory"


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
    """Median over the rounds."""
    spread_ms: float
    """Largest minus smallest round."""
    roofline_ms: float
    over_roofline: float
    over_ours: float
    bound: str
    """By what the roofline is: products or memory."""
    tflops: float
    gb_per_s: float
    relative_error: float
    """Against fp64, Frobenius norm, of the part that is checked."""
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
    """What was measured, and what was not and why."""

    ceilings: Ceilings
    rows: list[KernelRow] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Contenders that gave wrong results or could not run, a line each; nothing is said of their time."""
    wrong: bool = False
    """One of ours is among them."""


def bench_kernels(bench: KernelBench, device: torch.device, log: Callable[[str], None] = lambda _: None) -> KernelTable:
    """Check every contender and then time it; one that is wrong has no row."""
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
    """The two rates; on a CPU at sizes that say little."""
    size, nbytes = (8192, 1 << 30) if device.type == "cuda" else (256, 1 << 20)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    source = torch.empty(nbytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    # Long enough for the clocks to settle where they stay under load.
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
    roofline, (gpu, *versions) = table.ceilings.roofline_ms(case.flops, case.nbytes), _provenance()
    for name, ms in medians.items():
        row = KernelRow(
            op=op,
            experts=shape[0],
            rows=shape[1],
            n=shape[2],
            k=shape[3],
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
            gpu=gpu,
            torch=versions[0],
            triton=versions[1],
            date=versions[2],
        )
        table.rows.append(row)
        log(f"{op:25s} {_named(shape):22s} {name:24s} {ms:8.4f} ms  {row.over_roofline:6.2f} x roofline")


def _checked(
    op: str, shape: Shape, case: Case, table: KernelTable, log: Callable[[str], None]
) -> Iterable[tuple[str, float]]:
    """The contenders that are right, with their errors."""
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
    """Median of single runs."""
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


def _provenance() -> tuple[str, str, str, str]:
    """GPU, torch, Triton, date."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return gpu, torch.__version__, triton_version(), time.strftime("%Y-%m-%d")


def triton_version() -> str:
    """Or "none"."""
    if not HAS_TRITON:
        return "none"
    import triton

    return str(triton.__version__)


def _named(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
