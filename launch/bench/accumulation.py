"""What the fused weight gradient gains on one device: step time and peak memory of four ways to accumulate gradients.

fused         main_grad in fp32, written by the weight-gradient GEMM
hook          main_grad in fp32; autograd makes each weight gradient in bf16 and a hook adds it
autograd      plain PyTorch, gradients summed in bf16 (less exact, the same bytes as the parameters), AdamW in bf16
autograd fp32 plain PyTorch over fp32 parameters under bf16 autocast, gradients summed in fp32

All rows train the same GPT on the same tokens; the first two with ``DistributedOptimizer`` on fp32 masters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from ..config.run import ModelConfig
from ..model.gpt import build_model
from ..report.table import Column, machine, write_table
from .steps import accumulate, in_rounds, peak_gib, random_tokens, reset_peak, time_steps

__all__ = ["AccumulationBench", "AccumulationRow", "bench_accumulation", "write_accumulation_report"]

_VARIANTS = ("fused", "hook", "autograd", "autograd fp32")


@dataclass(frozen=True, kw_only=True, slots=True)
class AccumulationBench:
    """Size of the measurement; the defaults are the setting of the published table."""

    dim: int = 4096
    """Width of the model."""
    num_layers: int = 8
    """Number of blocks."""
    vocab_size: int = 32000
    """Vocabulary."""
    num_tokens: int = 4096
    """Tokens of one microbatch (one sequence)."""
    num_microbatches: int = 4
    """Microbatches of one step."""
    num_steps: int = 10
    """Consecutive steps of one measurement."""
    num_rounds: int = 3
    """Rounds; the median counts. Each round measures all variants in turn, so that drift hits them alike."""
    num_warmup_steps: int = 3
    """Steps before each measurement."""

    def model_config(self, variant: str) -> ModelConfig:
        """The GPT of one row."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=max(1, self.dim // 128),
            num_kv_heads=max(1, self.dim // 128),
            ffn_dim=int(self.dim * 2.6875) // 128 * 128 or 128,
            context_length=self.num_tokens,
            param_dtype="float32" if variant == "autograd fp32" else "bfloat16",
            fuse_wgrad_accumulation=variant == "fused",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AccumulationRow:
    """One line of the table."""

    variant: str
    step_ms: float
    """Median over the rounds of a round's mean step time, optimizer included."""
    spread_ms: float
    """Largest minus smallest round."""
    over_fused: float
    """Step time divided by the fused row's."""
    peak_gib: float
    """Peak of allocated device memory during the measured steps; 0 on the CPU."""
    first_loss: float
    last_loss: float
    num_params: int


def bench_accumulation(
    bench: AccumulationBench, device: torch.device, log: Callable[[str], None]
) -> list[AccumulationRow]:
    """Measure every variant."""

    def measure(variant: str) -> dict[str, Any]:
        step, num_params = _training_step(bench, variant, device)
        first = step().item()
        for _ in range(bench.num_warmup_steps - 1):
            step()
        reset_peak(device)
        milliseconds, last = time_steps(step, bench.num_steps, device)
        return {
            "step_ms": milliseconds,
            "peak_gib": peak_gib(device),
            "first_loss": first,
            "last_loss": last,
            "num_params": num_params,
        }

    found = in_rounds(bench.num_rounds, _VARIANTS, measure, device, log)
    fused = found["fused"]["step_ms"]
    return [
        AccumulationRow(variant=variant, over_fused=numbers["step_ms"] / fused, **numbers)
        for variant, numbers in found.items()
    ]


def write_accumulation_report(rows: list[AccumulationRow], bench: AccumulationBench, folder: Path) -> str:
    """Write ``accumulation.csv`` and ``accumulation.md`` into ``folder``; returns the table."""
    setting = (
        f"{machine()}. GPT of {rows[0].num_params / 1e9:.2f} B parameters: hidden {bench.dim}, {bench.num_layers} "
        f"layers, {bench.num_microbatches} microbatches of {bench.num_tokens} tokens, AdamW included, on one device. "
        f"Median of {bench.num_rounds} rounds of {bench.num_steps} consecutive steps between two events. "
        f"Made by `maingrad bench accumulation`."
    )
    columns: list[Column] = [
        ("", "{row.variant}"),
        ("ms per step", "{row.step_ms:.1f}"),
        ("over fused", "{row.over_fused:.3f}"),
        ("spread of rounds, ms", "{row.spread_ms:.1f}"),
        ("peak GiB", "{row.peak_gib:.1f}"),
    ]
    return write_table(
        folder,
        "accumulation",
        rows,
        title="Accumulating gradients: fused, by a hook, by autograd",
        setting=setting,
        columns=columns,
        notes="\n".join(f"- {line}" for line in (__doc__ or "").split("\n\n")[1].splitlines()),
    )


def _training_step(bench: AccumulationBench, variant: str, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    model = build_model(bench.model_config(variant), seed=0, device=device)
    tokens = random_tokens(bench, 0, device)
    step = _wrapped_step(model, tokens) if variant in ("fused", "hook") else _plain_step(model, tokens, variant)
    return step, sum(parameter.numel() for parameter in model.parameters())


def _wrapped_step(model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig())
    optimizer = DistributedOptimizer(ddp, lr=1e-4)

    def step() -> Tensor:
        ddp.zero_grad_buffer()
        loss = accumulate(ddp, tokens, not_last=ddp.no_sync)
        ddp.finish_grad_sync()
        optimizer.step()
        return loss

    return step


def _plain_step(model: nn.Module, tokens: Tensor, variant: str) -> Callable[[], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    device_type = tokens.device.type

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device_type, torch.bfloat16, enabled=variant == "autograd fp32"):
            loss: Tensor = model(tokens, targets)
        return loss

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = accumulate(forward, tokens)
        optimizer.step()
        return loss

    return step
