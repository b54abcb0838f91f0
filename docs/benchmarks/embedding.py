"""The weight gradient of an embedding into ``main_grad``: ours beside torch's dense gradient and its addition.

``python docs/benchmarks/embedding.py`` on one GPU. Writes embedding.csv, and prints the table. Each case is timed
alone, with the host ahead of the device: the first write of an iteration (torch: the gradient is copied) and a later
one (torch: it is added), ids drawn evenly or by Zipf's law, which has a few ids in many places, and one id in all
places. ``--sweep`` tries chunks and blocks of the kernel.

Bytes are those that must move: ``dy`` is read, the rows of ``main_grad`` that ids name are written, and read where they
are added to; the first write clears all of ``main_grad``.
"""

import csv
import statistics
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product

import torch
from harness import Options, run_script, time_calls, versions

from maingrad.kernels import embedding_wgrad_accumulate
from maingrad.kernels.compat import HAS_TRITON

if HAS_TRITON:
    from maingrad.kernels.permutation.embedding_triton import embedding_wgrad_triton

CHUNKS, BLOCKS = (8, 16, 32, 64), (512, 1024, 2048)


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(Options):
    """What is timed."""

    num_tokens: tuple[int, ...] = (4096, 16384)
    """Tokens of a microbatch."""
    vocabulary: int = 128256
    """Ids."""
    widths: tuple[int, ...] = (4096, 2048)
    """Features."""
    num_repetitions: int = 20
    """Timed repetitions of each; the median counts."""
    sweep: bool = False
    """Time the kernel with all chunks and blocks."""
    device: str = "cuda"
    """``cpu`` runs the references, and measures nothing of interest."""


def draw(kind, count, vocabulary, generator):
    """Ids [count] on the generator's device."""
    device = generator.device
    if kind == "one id":
        return torch.full((count,), 17, device=device)
    if kind == "even":
        return torch.randint(vocabulary, (count,), device=device, generator=generator)
    weights = 1 / torch.arange(1, vocabulary + 1, device=device)  # Zipf: the share of a rank falls as 1 / rank
    places = torch.randperm(vocabulary, device=device, generator=generator)
    return places[torch.multinomial(weights, count, replacement=True, generator=generator)]


def torch_path(dy, tokens, main_grad, *, overwrite):
    """autograd's gradient in the weight's dtype, and a hook's write."""
    grad = torch.ops.aten.embedding_dense_backward(dy, tokens, main_grad.shape[0], -1, False)
    if overwrite:
        main_grad.copy_(grad)
    else:
        main_grad.add_(grad)


def microseconds(run, batches, options):
    """Median of single calls; the batches take turns, so that no rows wait in the cache."""
    turns = cycle(batches)
    for _ in range(3):
        run(*next(turns))
    calls = [partial(run, *next(turns)) for _ in range(options.num_repetitions)]
    return time_calls(calls, options.device, ahead_cycles=3_000_000) * 1e3


def extra_mib(run, batch, options):
    """Peak of what one call allocates."""
    if options.device == "cpu":
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*batch)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def cases(options):
    """Name, batches, accumulator, overwrite and bytes of each case."""
    for width, count, kind in product(options.widths, options.num_tokens, ("even", "zipf", "one id")):
        generator = torch.Generator(options.device).manual_seed(count)
        main_grad = torch.zeros(options.vocabulary, width, device=options.device)
        batches = []
        for _ in range(4):
            dy = torch.randn(count, width, device=options.device, generator=generator, dtype=torch.bfloat16)
            batches.append((dy, draw(kind, count, options.vocabulary, generator)))
        used = statistics.mean(batch[1].unique().numel() for batch in batches)
        for overwrite in (True, False):
            rows = options.vocabulary + used if overwrite else 2 * used
            nbytes = count * (2 * width + 8) + rows * width * 4
            name = f"{count} x {width}, {kind}, {'first' if overwrite else 'later'}"
            yield name, batches, main_grad, overwrite, nbytes
        del main_grad, batches, dy


def sweep(name, batches, main_grad, overwrite, options):
    """Print the time of each chunk and block."""
    cells = []
    for chunk, block in product(CHUNKS, BLOCKS):

        def run(dy, tokens, chunk=chunk, block=block):
            embedding_wgrad_triton(dy, tokens.int(), main_grad, overwrite=overwrite, chunk=chunk, block=block)

        cells.append(f"{chunk}/{block}: {microseconds(run, batches, options):.1f}")
    print(f"  {name}: {'  '.join(cells)}", flush=True)


def run(options):
    rows = []
    print(f"{versions()}; vocabulary of {options.vocabulary:,}; median of {options.num_repetitions}; us")
    print(
        f"{'tokens x features, ids, write':32}{'MB':>9}{'ours':>9}{'GB/s':>8}{'torch':>9}{'of it':>7}{'sort':>7}  MiB"
    )
    for name, batches, main_grad, overwrite, nbytes in cases(options):
        ours = partial(embedding_wgrad_accumulate, main_grad=main_grad, overwrite=overwrite)
        theirs = partial(torch_path, main_grad=main_grad, overwrite=overwrite)
        time, torchs = (microseconds(each, batches, options) for each in (ours, theirs))
        sort = microseconds(lambda _, tokens: torch.sort(tokens.int(), stable=True), batches, options)
        beside = [extra_mib(each, batches[0], options) for each in (ours, theirs)]
        rate = nbytes / time / 1e3
        print(
            f"{name:32}{nbytes / 1e6:9.1f}{time:9.1f}{rate:8.0f}{torchs:9.1f}{time / torchs:7.2f}{sort:7.1f}  "
            f"{beside[0]:.1f}, torch's {beside[1]:.1f}",
            flush=True,
        )
        rows.append([name, nbytes, time, torchs, sort, *beside])
        if options.sweep:
            sweep(name, batches, main_grad, overwrite, options)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    with open(options.out_dir / "embedding.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "bytes", "us", "torch_us", "sort_us", "mib_beside", "torch_mib_beside", "machine"])
        writer.writerows([*row, versions()] for row in rows)


if __name__ == "__main__":
    raise SystemExit(run_script(EmbeddingOptions, run))
