"""Orthogonalisation of Muon's updates: ours beside torch's and peers', on the shapes of Llama-8B and Qwen3-30B-A3B.

``python docs/benchmarks/orthogonalize.py`` on one GPU. Writes orthogonalize.csv, and prints a table: milliseconds of
a batch of equal matrices, TFLOP/s (half of each symmetric product counts) and the largest error of the first matrix
against fp64; and all matrices of one rank. torch's loop runs one matrix after the other, as ``torch.optim.Muon`` does.

Peers are measured where their packages are: ``emerging-optimizers`` and ``gram-newton-schulz``, which install without
their dependencies. A peer that is not there, or that fails, has its reason in the table.
"""

import csv
from dataclasses import dataclass
from functools import partial

import torch
from harness import Options, check_names, run_script, time_calls, versions
from torch.optim import _muon as torch_muon

from maingrad.ddp.torch_grads.muon import alike
from maingrad.kernels.optimizer.orthogonal.flops import orthogonalize_flops
from maingrad.kernels.optimizer.orthogonal.orthogonalize import orthogonalize
from maingrad.kernels.optimizer.orthogonal.reference import COEFFICIENTS, newton_schulz_reference

BATCHES = [(8, 4096, 4096), (8, 1024, 4096), (4, 14336, 4096), (4, 4096, 14336), (64, 768, 2048), (64, 1536, 2048)]
"""Matrices, rows, columns. The first four with twice the third are one rank's share of 8 layers of Llama-8B on two."""
SIMPLE = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, kw_only=True)
class OrthogonalizeOptions(Options):
    """How it is timed."""

    contenders: tuple[str, ...] = ()
    """ours, torch, torch_compiled, emerging, emerging_cublas, gram_torch; none: all."""
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


# ---- The contenders: each makes a function of a batch, whose result has a tensor for each matrix. ----


def ours():
    """In batches as ``maingrad.ddp.Muon`` makes them."""

    def run(matrices):
        parts = matrices.split([len(batch) for batch in alike(matrices.split(1))])
        return [each for part in parts for each in orthogonalize(part)]

    return run


def torch_loop(compiled=False):
    """As ``torch.optim.Muon``."""
    one = torch_muon._zeropower_via_newtonschulz
    if compiled:
        one = torch.compile(one, dynamic=False)
    return lambda matrices: [one(each, SIMPLE, 5, 1e-7) for each in matrices]


def emerging(syrk=False):
    """emerging-optimizers' function; with its Triton kernel of symmetric products, one matrix after the other.

    Its kernel tries 162 forms for each shape, which takes minutes: here it tries those of 128 x 128 and 128 x 256.
    """
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    torch.set_float32_matmul_precision("medium")  # bf16, which its kernel needs
    if not syrk:
        return lambda matrices: newton_schulz(matrices, 5, "simple")
    from emerging_optimizers.triton_kernels.syrk import syrk_kernel_bf16

    syrk_kernel_bf16.configs = [
        form
        for form in syrk_kernel_bf16.configs
        if (form.kwargs["TILE_M"], form.kwargs["TILE_K"], form.kwargs["GROUP_SIZE_M"]) == (128, 64, 8)
        and (form.kwargs["TILE_N"], form.num_warps) in ((128, 4), (128, 8), (256, 8))
        and form.num_stages in (3, 4)
    ]
    return lambda matrices: [newton_schulz(each, 5, "simple", use_syrk=True) for each in matrices]


def gram():
    """gram-newton-schulz by torch's products. Its kernels need quack, and that nvidia-cutlass-dsl."""
    from gram_newton_schulz import GramNewtonSchulz

    return GramNewtonSchulz(
        ns_use_kernels=False, ns_coefficients=[list(SIMPLE)] * 5, gram_newton_schulz_reset_iterations=[2]
    )


CONTENDERS = {
    "ours": ours,
    "torch": torch_loop,
    "torch_compiled": partial(torch_loop, compiled=True),
    "emerging": partial(emerging, syrk=True),
    "emerging_cublas": emerging,
    "gram_torch": gram,
}


# ---- The measurement. ----


@torch.no_grad()
def measured(name, make, batches, options):
    """Rows of one contender: one for each batch, and one for all matrices of a rank."""
    about = {"contender": name, "ms": "", "tflops": "", "error": "", "problem": ""}
    rows = []
    try:
        run = make()
        for count, m, n in batches:
            matrices = torch.randn(count, m, n, device=options.device)
            exact = newton_schulz_reference(matrices[:1].double(), COEFFICIENTS["simple"], torch.float64)[0]
            error = float((run(matrices[:1])[0].double() - exact).norm() / exact.norm())
            ms = milliseconds(partial(run, matrices), options)
            tflops = count * orthogonalize_flops(m, n) / ms / 1e9
            rows.append({**about, "matrices": f"{count} of {m} x {n}", "ms": ms, "tflops": tflops, "error": error})
        square, few_rows, gate, down = batches[:4]
        rank = [torch.randn(*each, device=options.device) for each in (square, few_rows, gate, gate, down)]
        ms = milliseconds(lambda: [run(each) for each in rank], options)
        rows.append({**about, "matrices": "one rank's", "ms": ms})
    except Exception as error:  # a peer's own, or a package that is not installed
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        rows.append({**about, "matrices": "the others", "problem": problem})
    return rows


def main(options):
    """Measure, write the file, print the table."""
    check_names("contenders", options.contenders, CONTENDERS)
    batches = [(b, m // options.divide, n // options.divide) for b, m, n in BATCHES]
    chosen = {name: CONTENDERS[name] for name in options.contenders or CONTENDERS}
    rows = [row for name, make in chosen.items() for row in measured(name, make, batches, options)]
    options.out_dir.mkdir(parents=True, exist_ok=True)
    with open(options.out_dir / "orthogonalize.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["contender", "matrices", "ms", "tflops", "error", "problem"])
        writer.writeheader()
        writer.writerows(rows)
    print(versions())
    print("| | matrices | ms | TFLOP/s | error |\n|---|---|---|---|---|")
    for row in rows:
        ms = f"{row['ms']:.2f}" if row["ms"] else row["problem"]
        others = f"{row['tflops']:.0f} | {row['error']:.4f}" if row["tflops"] else " | "
        print(f"| {row['contender']} | {row['matrices']} | {ms} | {others} |")


if __name__ == "__main__":
    raise SystemExit(run_script(OrthogonalizeOptions, main))
