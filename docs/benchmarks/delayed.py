"""Delayed weight gradients: their effect on step time, and how much of the reduction runs under their products.

overlapped     weight gradients in backward; each bucket is reduced while backward goes on
delayed        backward computes input gradients only; then weight gradients in bucket order, each bucket's reduction
               under the products of the next
mixed          the head and the last half of the blocks are delayed

All rows train the same GPT on the same tokens over the ranks of the default group, with sharded AdamW. A profiler's
trace of one step gives the shares: how long the reduce-scatter kernels of all buckets but the last ran at the same time
as matrix products.
"""

import dataclasses
import sys
from functools import partial

import torch.distributed as dist
from accumulation import DEFAULT, AccumulationBench
from contenders import train
from harness import (
    ConfigError,
    in_rounds,
    log,
    next_token_loss,
    random_tokens,
    run_script,
    the_device,
    time_variant,
)
from tables import machine, table, write_table
from trace_digest import activities_of

import maingrad
from maingrad.launch.model.gpt import build_model
from maingrad.launch.report.intervals import clip, length, union
from maingrad.launch.training.runtime import process_group_from_env
from maingrad.te_integration.wgrad_queue import drain_modules

_PRODUCTS = ("gemm", "nvjet", "cutlass", "cublas", "xmma")
"""A kernel whose name contains one of these is a matrix product."""


COLUMNS = [
    ("", "{row.variant}"),
    ("ms per step", "{row.step_ms:.1f}"),
    ("over overlapped", "{row.over_overlapped:.3f}"),
    ("reduce-scatter under products", "{row.share_under_products:.1%}"),
    ("under any kernel", "{row.share_under_kernels:.1%}"),
    ("peak GiB", "{row.peak_gib:.1f}"),
]


def bench_delayed(bench, device):
    """Measure every row; on CUDA only, with a default NCCL group of two or more ranks."""
    if device.type != "cuda" or not dist.is_initialized() or dist.get_world_size() < 2:
        raise ConfigError("delayed.py measures reductions between GPUs: run it under torchrun with two or more")
    variants = {"overlapped": 0, "delayed": bench.num_layers, "mixed": bench.num_layers // 2}
    shares = {}

    def measure(variant):
        step = _training_step(bench, variants[variant], device)
        timed = time_variant(bench, step, device)
        if variant not in shares:
            shares[variant] = _profile_shares(step)
        under_products, under_kernels = shares[variant]
        return {**timed, "share_under_products": under_products, "share_under_kernels": under_kernels}

    return in_rounds(bench.num_rounds, variants, measure, device, "over_overlapped")


def covered(spans, cover):
    """Part of the time of ``spans`` during which some interval of ``cover`` runs, in [0, 1]; 0 without spans."""
    total, joined = length(spans), union(cover)
    return sum(length(clip(joined, span)) for span in spans) / total if total else 0.0


def write_report(rows, bench):
    """Write ``delayed.csv`` and ``delayed.md``; returns the Markdown."""
    return write_table(
        bench.out_dir,
        "delayed",
        rows,
        "Delayed weight gradients and the reductions under them",
        f"{dist.get_world_size()} x {machine()}. GPT: hidden {bench.dim}, {bench.num_layers} layers, "
        f"{bench.num_microbatches} microbatches of {bench.num_tokens} tokens, reduce-scatter averaged by NCCL, sharded "
        f"AdamW. Median of {bench.num_rounds} rounds of {bench.num_steps} consecutive steps between two events; shares "
        f"from a profiler's trace of one step. Made by `docs/benchmarks/delayed.py`.",
        table(rows, COLUMNS),
    )


def _training_step(bench, delay_wgrad_layers, device):
    config = dataclasses.replace(bench.model_config("fused"), delay_wgrad_layers=delay_wgrad_layers)
    model = build_model(config, seed=0, device=device)
    ddp = maingrad.parallelize(model, "zero1", fuse=False, overlap_param_gather=False, average_in_collective=True)
    drain = partial(drain_modules, ddp) if delay_wgrad_layers else lambda: None
    return train(ddp, next_token_loss, random_tokens(bench, dist.get_rank(), device), after=drain)


def _profile_shares(step):
    """``share_under_products`` and ``share_under_kernels`` from a trace of one step."""
    # Copies and memsets are no kernels, and count as neither.
    kernels = [each for each in activities_of(step) if not each.name.startswith(("Memcpy", "Memset"))]
    computing = [each for each in kernels if not each.is_nccl]
    products = [each for each in computing if any(part in each.name.lower() for part in _PRODUCTS)]
    reductions = sorted((each.start, each.end) for each in kernels if "reducescatter" in each.name.lower())[:-1]
    return tuple(covered(reductions, [(each.start, each.end) for each in cover]) for cover in (products, computing))


def run(bench):
    with process_group_from_env("auto"):
        rows = bench_delayed(bench, the_device())
        if dist.get_rank() == 0:
            log(write_report(rows, bench))


main = partial(run_script, AccumulationBench, run, default=DEFAULT)

if __name__ == "__main__":
    sys.exit(main())
