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
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ...te_integration.wgrad_queue import drain_modules
from ..model.gpt import build_model
from ..parallelizing.make_optimizer import make_optimizer
from ..parallelizing.parallelize import parallelize
from ..report.intervals import Interval, clip, length, union
from ..report.table import Column, machine, write_table
from .accumulation import AccumulationBench
from .steps import in_rounds, peak_gib, random_tokens, reset_peak, time_steps

__all__ = ["DelayedRow", "bench_delayed", "covered", "write_delayed_report"]

_PRODUCTS = ("gemm", "nvjet", "cutlass", "cublas", "xmma")
"""A kernel whose name contains one of these is a matrix product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayedRow:
    """One line of the table."""

    variant: str
    step_ms: float
    """Median over the rounds of a round's mean step time, optimizer included."""
    over_overlapped: float
    """Step time divided by the first row's."""
    share_under_products: float
    """Part of the reduce-scatter kernels' time during which a matrix product ran; all buckets but the last."""
    share_under_kernels: float
    """Part of the same time during which any computing kernel ran."""
    peak_gib: float


def bench_delayed(bench: AccumulationBench, device: torch.device, log: Callable[[str], None]) -> list[DelayedRow]:
    """Measure every row; on CUDA only, with a default NCCL group of two or more ranks."""
    if device.type != "cuda" or not dist.is_initialized() or dist.get_world_size() < 2:
        raise ValueError("bench delayed measures reductions between GPUs: run it under torchrun with two or more")
    variants = {"overlapped": 0, "delayed": bench.num_layers, "mixed": bench.num_layers // 2}
    shares: dict[str, tuple[float, float]] = {}

    def measure(variant: str) -> dict[str, Any]:
        step = _training_step(bench, variants[variant], device)
        for _ in range(bench.num_warmup_steps):
            step()
        reset_peak(device)
        dist.barrier()
        milliseconds, _ = time_steps(step, bench.num_steps, device)
        peak = peak_gib(device)
        if variant not in shares:
            shares[variant] = _profile_shares(step, device)
        under_products, under_kernels = shares[variant]
        return {
            "step_ms": milliseconds,
            "share_under_products": under_products,
            "share_under_kernels": under_kernels,
            "peak_gib": peak,
        }

    found = in_rounds(bench.num_rounds, variants, measure, device, log)
    first = found["overlapped"]["step_ms"]
    for numbers in found.values():
        del numbers["spread_ms"]
    return [
        DelayedRow(variant=variant, over_overlapped=numbers["step_ms"] / first, **numbers)
        for variant, numbers in found.items()
    ]


def covered(spans: list[Interval], cover: list[Interval]) -> float:
    """Part of the time of ``spans`` during which some interval of ``cover`` runs, in [0, 1]; 0 without spans."""
    total, joined = length(spans), union(cover)
    return sum(length(clip(joined, span)) for span in spans) / total if total else 0.0


def write_delayed_report(rows: list[DelayedRow], bench: AccumulationBench, folder: Path) -> str:
    """Write ``delayed.csv`` and ``delayed.md`` into ``folder``; returns the table."""
    setting = (
        f"{dist.get_world_size()} x {machine()}. GPT: hidden {bench.dim}, {bench.num_layers} layers, "
        f"{bench.num_microbatches} microbatches of {bench.num_tokens} tokens, reduce-scatter averaged by NCCL, sharded "
        f"AdamW. Median of {bench.num_rounds} rounds of {bench.num_steps} consecutive steps between two events; shares "
        f"from a profiler's trace of one step. Made by `maingrad bench delayed`."
    )
    columns: list[Column] = [
        ("", "{row.variant}"),
        ("ms per step", "{row.step_ms:.1f}"),
        ("over overlapped", "{row.over_overlapped:.3f}"),
        ("reduce-scatter under products", "{row.share_under_products:.1%}"),
        ("under any kernel", "{row.share_under_kernels:.1%}"),
        ("peak GiB", "{row.peak_gib:.1f}"),
    ]
    title = "Delayed weight gradients and the reductions under them"
    return write_table(folder, "delayed", rows, title=title, setting=setting, columns=columns)


def _training_step(bench: AccumulationBench, delay_wgrad_layers: int, device: torch.device) -> Callable[[], Tensor]:
    config = dataclasses.replace(bench.model_config("fused"), delay_wgrad_layers=delay_wgrad_layers)
    model = build_model(config, seed=0, device=device)
    ddp = parallelize(model, "zero1", fuse=False, overlap_param_gather=False, average_in_collective=True)
    optimizer = make_optimizer(ddp, lr=1e-4)
    tokens = random_tokens(bench, dist.get_rank(), device)

    def step() -> Tensor:
        ddp.zero_grad_buffer()
        for index, microbatch in enumerate(tokens):
            with nullcontext() if index == len(tokens) - 1 else ddp.no_sync():
                loss: Tensor = ddp(microbatch[:, :-1], microbatch[:, 1:])
                (loss / len(tokens)).backward()
                if delay_wgrad_layers:
                    drain_modules(ddp)
        ddp.finish_grad_sync()
        optimizer.step()
        return loss.detach()

    return step


def _profile_shares(step: Callable[[], Tensor], device: torch.device) -> tuple[float, float]:
    """``share_under_products`` and ``share_under_kernels`` of `DelayedRow`, from a trace of one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize(device)
    reductions: list[Interval] = []
    products: list[Interval] = []
    computing: list[Interval] = []
    for event in trace.events() or ():
        name, span = event.name.lower(), (event.time_range.start, event.time_range.end)
        if event.device_type.name != "CUDA" or "memcpy" in name or "memset" in name:
            continue
        if "nccl" in name:
            if "reducescatter" in name:
                reductions.append(span)
            continue
        computing.append(span)
        if any(part in name for part in _PRODUCTS):
            products.append(span)
    but_last = sorted(reductions)[:-1]
    return covered(but_last, products), covered(but_last, computing)
