"""Gathers of parameters by NCCL's kernels and by copy engines, alone and under the products of a forward.

    torchrun --nproc-per-node 2 docs/benchmarks/copy_engines.py

A bucket is one weight [N, K] in bf16, of which each rank holds a shard. A step gathers several buckets of one size on a
stream of their own, into two buffers in turn, while the current stream multiplies the tokens with the bucket before:
what sharded units do in forward. Products read plain memory in every row, so that rows differ in their gathers alone.

products   no gather
kernels    gathers by NCCL's kernels, which take multiprocessors from the products
engines    gathers by copy engines: a group with NCCL's zero-CTA policy, and memory that the ranks map

Times are of one bucket. ``host`` is what the host spends to issue a gather.
"""

import statistics
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import StepOptions, free_memory, host_seconds, log, run_script, take_turns, time_steps, versions
from ranks import Ranks
from tables import Column, Measurement, shown, table, write_table
from trace_digest import activities_of

from maingrad.ddp.buckets.buffer import MappedPool
from maingrad.ddp.collectives.in_flight import all_gather_shards
from maingrad.ddp.torch_internals.distributed import zero_cta_options

WAYS = ("kernels", "engines")
MIB = 2**20
NOT_SLOWER = 1.01
"""A way counts as no slower than another at up to this ratio of their times: runs differ by about as much."""


@dataclass(frozen=True, kw_only=True)
class CopyEnginesBench(StepOptions):
    """Sizes of the measurement."""

    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    """MiB of one whole bucket."""
    features: int = 4096
    """K: a bucket is a weight [N, K]."""
    num_tokens: int = 4096
    """Tokens of each product."""
    most_buckets: int = 32
    """Buckets of one step; fewer of large ones, 2 GiB together."""
    timeout: float = 120.0
    """Seconds after which a rank gives up on another."""


def _new_group(options) -> Any:
    """A group of all ranks, which this rank is in."""
    return dist.new_group(pg_options=options)


class Gathers:
    """Two buffers in turn, and the group that gathers them.

    device   of this rank
    nbytes   of the largest bucket
    engines  by copy engines; collective
    """

    def __init__(self, device, nbytes, *, engines):
        self.group: Any = _new_group(zero_cta_options() if engines else None)
        pool = MappedPool(self.group, device) if engines else None
        with nullcontext() if pool is None else pool.allocating():
            self.buffers = [torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device) for _ in range(2)]
        if pool is not None:
            pool.share()
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.free = [None, None]

    def start(self, index, numel):
        """Gather bucket ``index``; returns what to wait for."""
        flat = self.buffers[index % 2][:numel]
        if self.stream is None:
            return all_gather_shards(flat, self.group)
        if self.free[index % 2] is not None:
            self.stream.wait_event(self.free[index % 2])
        with torch.cuda.stream(self.stream):
            all_gather_shards(flat, self.group, on_stream=True)
            return self.stream.record_event()

    def wait(self, arrived):
        """Order the current stream, or this thread, behind a gather."""
        if self.stream is None:
            arrived.wait()
        else:
            torch.cuda.current_stream().wait_event(arrived)

    def release(self, index):
        """The current stream has read bucket ``index``."""
        if self.stream is not None:
            self.free[index % 2] = torch.cuda.current_stream().record_event()

    def check(self, numel):
        """Raise ``RuntimeError`` if a gather does not bring every rank's shard."""
        flat = self.buffers[0][:numel]
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        flat.fill_(-1.0)
        flat.view(size, -1)[rank].fill_(rank + 1.0)
        if self.stream is not None:
            torch.cuda.synchronize()
        self.wait(self.start(0, numel))
        expected = torch.arange(1, size + 1, device=flat.device, dtype=flat.dtype)
        if not torch.equal(flat.view(size, -1), expected[:, None].expand(size, numel // size)):
            raise RuntimeError(f"a gather of {2 * numel} bytes did not bring every rank's shard")


class Work:
    """The buckets and products of one size.

    bench   the options
    device  of this rank
    mib     MiB of one bucket
    """

    def __init__(self, bench, device, mib):
        self.numel = mib * MIB // 2
        rows = max(1, self.numel // bench.features)
        self.weight = torch.randn(rows, bench.features, device=device, dtype=torch.bfloat16)
        self.tokens = torch.randn(bench.num_tokens, bench.features, device=device, dtype=torch.bfloat16)
        self.output = torch.empty(bench.num_tokens, rows, device=device, dtype=torch.bfloat16)
        self.count = max(2, min(bench.most_buckets, 2048 // mib))

    def step(self, gathers=None, *, products=True):
        """Gathers, each ahead of the product that would read it; returns an element to wait for."""
        arrived = None if gathers is None else gathers.start(0, self.numel)
        for index in range(self.count):
            if gathers is not None:
                gathers.wait(arrived)
                if index + 1 < self.count:
                    arrived = gathers.start(index + 1, self.numel)
            if products:
                torch.mm(self.tokens, self.weight.t(), out=self.output)
            if gathers is not None:
                gathers.release(index)
        return self.output[0, 0]

    def issue(self, gathers):
        """Issue the gathers alone."""
        for index in range(self.count):
            gathers.start(index, self.numel)


def measure_size(bench, device, mib, ways):
    """A row: one size, by ``ways``, which are ``Gathers`` by name."""
    work = Work(bench, device, mib)
    steps = {"products": work.step}
    for name, gathers in ways.items():
        steps[name] = partial(work.step, gathers)
        steps[f"{name} alone"] = partial(work.step, gathers, products=False)
    for step in steps.values():
        for _ in range(bench.num_warmup_steps):
            step()
    row = Measurement(mib=mib, num_buckets=work.count, num_ranks=dist.get_world_size())

    def measure(name):
        dist.barrier()
        return time_steps(steps[name], bench.num_steps, device)[0] * 1e3 / work.count

    for name, found in take_turns(bench.num_rounds, steps, measure).items():
        row[f"{name.replace(' ', '_')}_us"] = statistics.median(found)
    for name, gathers in ways.items():
        gathers.check(work.numel)
        issue = partial(work.issue, gathers)
        seconds = [host_seconds(issue, device)[0] for _ in range(5)] if gathers.stream is not None else [float("nan")]
        row[f"{name}_host_us"] = statistics.median(seconds) * 1e6 / work.count
        row[f"{name}_num_kernels"] = num_nccl_kernels(gathers, work.numel)
    return row


def num_nccl_kernels(gathers, numel):
    """NCCL's kernels in one gather: 0 where copy engines run it. NaN without a GPU."""
    if gathers.stream is None:
        return float("nan")

    def gather():
        gathers.wait(gathers.start(0, numel))
        torch.cuda.synchronize()

    return sum(each.is_nccl and "memcpy" not in each.name.lower() for each in activities_of(gather))


def gains_from(rows):
    """The smallest size in MiB from which on no row with copy engines is slower; None without such a size."""
    found = None
    for row in sorted(rows, key=lambda row: -row.mib):
        if not row["engines_us"] <= NOT_SLOWER * row["kernels_us"]:
            break
        found = row.mib
    return found


def bench_copy_engines(bench, ranks):
    """A row for each size."""
    rows = []
    with ranks.attempt(with_groups=True):
        largest = max(bench.sizes) * MIB
        ways = {"kernels": Gathers(ranks.device, largest, engines=False)}
        if ranks.device.type == "cuda" and zero_cta_options() is not None:
            ways["engines"] = Gathers(ranks.device, largest, engines=True)
        for mib in bench.sizes:
            rows.append(measure_size(bench, ranks.device, mib, ways))
            log(", ".join(f"{key} {value:.5g}" for key, value in rows[-1].items()))
            free_memory(ranks.device)
        del ways
        free_memory(ranks.device)
    return rows


def columns_of(rows):
    """Headings and cells; copy engines have columns where they were measured."""
    columns: list[Column] = [("MiB", "{row.mib}"), ("products, us", shown("products_us", ".1f"))]
    for name in WAYS:
        if f"{name}_us" in rows[0]:
            columns += [
                (f"{name}: with products", shown(f"{name}_us", ".1f")),
                ("alone", shown(f"{name}_alone_us", ".1f")),
                ("host", shown(f"{name}_host_us", ".1f")),
                ("NCCL kernels", shown(f"{name}_num_kernels", ".0f")),
            ]
    if "engines_us" in rows[0]:
        columns.append(("engines over kernels", lambda row: f"{row['engines_us'] / row['kernels_us']:.3f}"))
    return columns


def write_report(rows, bench):
    """Write ``copy_engines.csv`` and ``copy_engines.md``; returns the Markdown."""
    found = gains_from(rows) if "engines_us" in rows[0] else None
    told = f"Copy engines are no slower than kernels from {found} MiB on." if found else "Copy engines do not gain."
    return write_table(
        bench.out_dir,
        "copy_engines",
        rows,
        "Gathers by copy engines and by kernels",
        f"{rows[0].num_ranks} x {versions()}. Microseconds of one bucket: products of {bench.num_tokens} tokens with "
        f"the bucket's weight, {bench.features} features, bf16; median of {bench.num_rounds} rounds of "
        f"{bench.num_steps} steps. Made by `torchrun --nproc-per-node N docs/benchmarks/copy_engines.py`.",
        table(rows, columns_of(rows)),
        told if "engines_us" in rows[0] else "Copy engines need CUDA devices, and a torch that knows the policy.",
    )


def run(bench):
    ranks = Ranks.from_env(bench.timeout)
    rows = bench_copy_engines(bench, ranks)
    if ranks.rank == 0:
        log(write_report(rows, bench))


main = partial(run_script, CopyEnginesBench, run)

if __name__ == "__main__":
    sys.exit(main())
