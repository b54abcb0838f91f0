"""Orthogonalisation of Muon's updates: ours beside torch's loop, on the shapes of Llama-8B and Qwen3-30B-A3B.

``python docs/benchmarks/orthogonalize.py`` on one GPU. Writes orthogonalize.csv, and prints the table: milliseconds of
a batch of equal matrices, TFLOP/s (half of each symmetric product counts), and the largest error of the first matrix
against fp64. torch's loop runs one matrix after the other, as ``torch.optim.Muon`` does.
"""

import csv
from dataclasses import dataclass

import torch
from harness import Options, run_script, time_calls, versions
from torch.optim import _muon as torch_muon

from maingrad.kernels.optimizer.orthogonal.orthogonalize import orthogonalize, orthogonalize_flops
from maingrad.kernels.optimizer.orthogonal.reference import COEFFICIENTS, newton_schulz_reference

BATCHES = [(8, 4096, 4096), (8, 1024, 4096), (4, 14336, 4096), (4, 4096, 14336), (64, 768, 2048), (64, 1536, 2048)]
"""Matrices, rows, columns. The first four with twice the third are one rank's share of 8 layers of Llama-8B on two."""


@dataclass(frozen=True, kw_only=True)
class OrthogonalizeOptions(Options):
    """How it is timed."""

    num_repetitions: int = 8
    """Timed repetitions; the median counts."""
    divide: int = 1
    """Divides rows and columns, for a try on CPUs."""
    device: str = "cuda"
    """``cpu`` shows that the script runs."""


def milliseconds(run, options):
    """Median of single calls."""
    run()
    return time_calls([run] * options.num_repetitions, options.device)


def torch_loop(matrices):
    """As ``torch.optim.Muon``."""
    return [torch_muon._zeropower_via_newtonschulz(each, (3.4445, -4.7750, 2.0315), 5, 1e-7) for each in matrices]


def measured(count, rows, columns, options):
    """One row of the table."""
    matrices = torch.randn(count, rows, columns, device=options.device)
    exact = newton_schulz_reference(matrices[:1].double(), COEFFICIENTS["simple"], torch.float64)

    def error(found):
        return float((found.double() - exact).norm() / exact.norm())

    ours, theirs = (milliseconds(lambda run=run: run(matrices), options) for run in (orthogonalize, torch_loop))
    return {
        "matrices": count,
        "rows": rows,
        "columns": columns,
        "ms": ours,
        "torch_ms": theirs,
        "tflops": count * orthogonalize_flops(rows, columns) / ours / 1e9,
        "error": error(orthogonalize(matrices)[:1]),
        "torch_error": error(torch_loop(matrices[:1])[0][None]),
    }


def main(options):
    """Measure, write the file, print the table."""
    rows = [measured(b, m // options.divide, n // options.divide, options) for b, m, n in BATCHES]
    options.out_dir.mkdir(parents=True, exist_ok=True)
    with open(options.out_dir / "orthogonalize.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(versions())
    print("| matrices | ms | torch's loop, ms | ratio | TFLOP/s | error | torch's |\n|---|---|---|---|---|---|---|")
    for row in rows:
        name = f"{row['matrices']} of {row['rows']} x {row['columns']}"
        times = f"{row['ms']:.2f} | {row['torch_ms']:.2f} | {row['ms'] / row['torch_ms']:.2f} | {row['tflops']:.0f}"
        print(f"| {name} | {times} | {row['error']:.4f} | {row['torch_error']:.4f} |")


if __name__ == "__main__":
    raise SystemExit(run_script(OrthogonalizeOptions, main))
