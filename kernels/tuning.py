"""Looks up the configuration of a kernel for a shape in measured tables that ship with the library.

Nothing is measured at run time. A lookup is a pure function of shapes, so runs are reproducible, and a CUDA graph
capture needs no warm-up for it. An unmeasured shape gets the configuration of the nearest measured one. A GPU without
a table gets the default of the kernel. ``maingrad tune`` measures and writes a table.

The products of experts and the dense weight gradient have rows: their callers ask ``config_of``. Every other kernel has
a few constant configurations beside it. One that is to be tuned needs a name of an operation, whose sizes fit
``Problem``, and candidates and operands in ``launch/tuning``.
"""

import csv
import functools
import math
from collections.abc import Callable
from importlib import resources
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from .compat import capability_of

__all__ = [
    "COLUMNS",
    "CUBLAS",
    "Problem",
    "TunedRow",
    "config_of",
    "gpu_name",
    "load_tuning_table",
    "nearest",
    "parse_table",
    "tuned_config",
]

COLUMNS = ("gpu", "op", "dtype", "experts", "rows", "n", "k", "config", "ms", "date", "torch", "triton")
CUBLAS = "cublas"
"""The ``config`` of a row where cuBLAS was faster than the kernel."""
_SHIPPED = "tuned.csv"
_FARTHEST = {"wgrad_accumulate": 0.5, "wgrad_overwrite": 0.5}
"""Largest distance to a measured shape whose configuration is used, in powers of two over all sizes; ``_FAR`` for other
operations. Beyond this limit the default is used. The limit is small for dense products, because their default, cuBLAS,
is always good.
"""
_FAR = 4.0


class Problem(NamedTuple):
    """One product: op, dtype (torch's name without ``torch.``), experts (1: dense), total rows, N and K."""

    op: str
    dtype: str
    experts: int
    rows: int
    n: int
    k: int

    def distance(self, other: "Problem") -> float:
        """In powers of two: rows per expert, N and K count fully, the number of experts a quarter."""
        return (
            abs(_log2(self.rows / self.experts) - _log2(other.rows / other.experts))
            + abs(_log2(self.n) - _log2(other.n))
            + abs(_log2(self.k) - _log2(other.k))
            + 0.25 * abs(_log2(self.experts) - _log2(other.experts))
        )


class TunedRow(NamedTuple):
    """A measurement: the fastest configuration for one problem on one kind of GPU."""

    gpu: str
    problem: Problem
    config: str
    """Space-separated ``name=value`` for each field that differs from its default; or ``CUBLAS``."""
    ms: float
    date: str
    torch: str
    triton: str


def _log2(value: float) -> float:
    return math.log2(max(value, 1.0))


def parse_table(text: str, source: str) -> list[TunedRow]:
    """Rows of a CSV with ``COLUMNS``. Raises ``ValueError`` that names ``source`` and the line."""
    reader = csv.DictReader(StringIO(text))
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{source}: the columns must be {','.join(COLUMNS)}; got {','.join(reader.fieldnames or ())}")
    rows = []
    for line, cells in enumerate(reader, start=2):
        try:
            sizes = [int(cells[name]) for name in ("experts", "rows", "n", "k")]
            problem = Problem(cells["op"], cells["dtype"], *sizes)
            row = TunedRow(
                cells["gpu"],
                problem,
                cells["config"],
                float(cells["ms"]),
                cells["date"],
                cells["torch"],
                cells["triton"],
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source}, line {line}: {error}") from None
        if min(sizes) < 1 or not row.ms > 0 or not row.config.split():
            raise ValueError(f"{source}, line {line}: sizes and ms must be positive, and config must not be empty")
        _parse_config(row.config, f"{source}, line {line}")
        rows.append(row)
    return rows


@functools.cache
def _parse_config(config: str, source: str) -> dict[str, int] | None:
    if config == CUBLAS:
        return None
    values = {}
    for item in config.split():
        name, _, value = item.partition("=")
        if not value.isdigit():
            raise ValueError(f"{source}: config must be name=number with blanks between, or {CUBLAS}; got '{item}'")
        values[name] = int(value)
    return values


_Config = TypeVar("_Config")
_Default = TypeVar("_Default")

_added: list[TunedRow] = []


def load_tuning_table(path: str | Path) -> None:
    """Add a table that ``maingrad tune`` wrote. Its rows take precedence over shipped rows of the same problem.

    Call it before the first product: earlier lookups are cached. Raises ``ValueError`` for an invalid table.
    """
    _added[:0] = parse_table(Path(path).read_text(), str(path))
    tuned_config.cache_clear()


@functools.cache
def _shipped() -> list[TunedRow]:
    return parse_table(resources.files(__package__).joinpath(_SHIPPED).read_text(), _SHIPPED)


@functools.lru_cache(maxsize=4096)
def tuned_config(gpu: str, problem: Problem) -> dict[str, Any] | str | None:
    """Fields of the kernel's configuration, or ``CUBLAS``; None if no near shape was measured on this kind of GPU."""
    row = nearest(gpu, problem, (*_added, *_shipped()))
    if row is None:
        return None
    return _parse_config(row.config, _SHIPPED) or CUBLAS


def nearest(gpu: str, problem: Problem, rows: tuple[TunedRow, ...]) -> TunedRow | None:
    """The nearest row of the same op and dtype, the first of equals; None if no row is near."""
    alike = [row for row in rows if row.gpu == gpu and row.problem[:2] == problem[:2]]
    if not alike:
        return None
    best = min(alike, key=lambda row: row.problem.distance(problem))
    return best if best.problem.distance(problem) <= _FARTHEST.get(problem.op, _FAR) else None


@functools.cache
def gpu_name(device: torch.device) -> str:
    """Name of the GPU, by which tables are keyed."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "none"


@functools.lru_cache(maxsize=4096)
def config_of(
    kind: Callable[..., _Config],
    default: Callable[[torch.dtype, tuple[int, int] | None, float], _Default],
    device: torch.device,
    dtype: torch.dtype,
    op: str,
    experts: int,
    rows: int,
    n: int,
    k: int,
) -> _Config | _Default:
    """The configuration that was measured for this shape or a near one, or ``default`` of dtype, capability, rows."""
    # fp16 takes the same time as bf16, and tables have bf16 only.
    name = "bfloat16" if dtype is torch.float16 else str(dtype).removeprefix("torch.")
    found = tuned_config(gpu_name(device), Problem(op, name, experts, rows, n, k))
    return kind(**found) if isinstance(found, dict) else default(dtype, capability_of(device), rows / experts)
