"""Time of a training step of a mixture of experts on one device, for several ways to compute the experts.

Rows differ in the experts alone: router, permutation, attention and norms are the same modules with the same weights.

fused                      ``GroupedMLP``: one grouped product writes all experts' weight gradients into fp32 main_grad
fused, bf16                the same with main_grad in bf16, the bytes of ``.grad``
autograd                   torch's ``grouped_mm``; autograd sums weight gradients in ``.grad``, bf16
autograd, our activation   the same with our kernel for SwiGLU times probability instead of torch's operations
hook                       torch's ``grouped_mm``; a hook adds each weight gradient to main_grad, fp32
hook, our activation       the same with our kernel

Rows with fp32 main_grad step with ``DistributedOptimizer`` on fp32 masters, others with torch's fused AdamW in bf16.
In the rows named autograd the other linear layers accumulate by autograd as well: 5 of 100 parameters at default sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from ...kernels.compat import private_name
from ...te_integration import ScaledSwiGLU
from ..config.run import ModelConfig
from ..model.gpt import GPT, build_model
from ..model.moe import MixtureOfExperts
from ..report.table import Column, machine, write_table
from .steps import (
    accumulate,
    in_rounds,
    mark,
    milliseconds,
    peak_gib,
    random_tokens,
    reset_peak,
    synchronize,
)

__all__ = ["GroupedMMExperts", "MoEBench", "MoERow", "bench_moe", "write_moe_report"]

_grouped_mm: Callable[..., Tensor] = private_name(
    "torch.nn.functional.grouped_mm", "torch._grouped_mm", loss="torch's grouped products cannot be measured"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEBench:
    """Size of the measurement. The defaults are the published table's: blocks of OLMoE-1B-7B, a quarter of its 16
    blocks and a quarter of its vocabulary."""

    dim: int = 2048
    """Width of the model."""
    num_layers: int = 4
    """Number of blocks, each with experts."""
    num_heads: int = 16
    """Attention heads."""
    num_experts: int = 64
    """Number of experts in a block."""
    top_k: int = 8
    """Number of experts for each token."""
    expert_ffn_dim: int = 1024
    """Width of an expert."""
    vocab_size: int = 12576
    """Vocabulary."""
    num_tokens: int = 4096
    """Tokens of one microbatch (one sequence)."""
    num_microbatches: int = 4
    """Microbatches of one step."""
    num_steps: int = 5
    """Consecutive steps of one measurement."""
    num_rounds: int = 5
    """Rounds; the median counts. Each round measures all variants in turn, so that drift hits them alike."""
    num_warmup_steps: int = 3
    """Steps before each measurement."""

    def model_config(self, *, fused: bool) -> ModelConfig:
        """The GPT of one row."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_ffn_dim=self.expert_ffn_dim,
            context_length=self.num_tokens,
            param_dtype="bfloat16",
            fuse_wgrad_accumulation=fused,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MoERow:
    """One line of the table; times are medians over the rounds of a round's mean step."""

    variant: str
    step_ms: float
    """Time of a step, optimizer included."""
    microbatches_ms: float
    """Time of forward and backward of all microbatches, without the optimizer."""
    experts_ms: float
    """The part of ``microbatches_ms`` in the experts: products, activations, gradients; from one step of each round."""
    over_fused: float
    """Step time divided by the first row's."""
    spread_ms: float
    """Largest minus smallest round."""
    peak_gib: float
    """Peak of allocated device memory during the measured steps; 0 on the CPU."""
    first_loss: float
    last_loss: float
    num_params: int


class _Variant(NamedTuple):
    """One way to compute the experts and to accumulate their gradients."""

    name: str
    experts: str
    """"ours", or the activation between torch's ``grouped_mm`` products: "eager" or "kernel"."""
    sums: str
    """Where gradients accumulate: "fp32" or "bf16" main_grad, or "grad" for ``.grad``."""


_VARIANTS = (
    _Variant("fused", "ours", "fp32"),
    _Variant("fused, bf16", "ours", "bf16"),
    _Variant("autograd", "eager", "grad"),
    _Variant("autograd, our activation", "kernel", "grad"),
    _Variant("hook", "eager", "fp32"),
    _Variant("hook, our activation", "kernel", "fp32"),
)


class GroupedMMExperts(nn.Module):
    """A ``GroupedMLP`` written with torch's ``grouped_mm``, over the same packed parameters.

    x [R, D], splits [E], probs [R] -> [R, D]; ``activation`` None: torch's operations, in the dtype of x.
    """

    def __init__(self, experts: nn.Module, activation: nn.Module | None) -> None:
        super().__init__()
        weights = dict(experts.named_parameters())
        self.fc1_weight = weights["fc1_weight"]  # [E, 2F, D]
        self.fc2_weight = weights["fc2_weight"]  # [E, D, F]
        self.activation = activation

    def forward(self, x: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
        """See the class."""
        ends = splits.cumsum(0).to(torch.int32)
        h = _grouped_mm(x, self.fc1_weight.mT, offs=ends)
        if self.activation is None:
            gate, up = h.chunk(2, dim=-1)
            a = F.silu(gate) * up * probs.to(h.dtype)[:, None]
        else:
            a = self.activation(h, probs)
        return _grouped_mm(a, self.fc2_weight.mT, offs=ends)


class _Step(NamedTuple):
    """A training step in two halves: all microbatches, then the optimizer."""

    accumulate: Callable[[], Tensor]
    update: Callable[[], None]
    model: GPT


def bench_moe(bench: MoEBench, device: torch.device, log: Callable[[str], None]) -> list[MoERow]:
    """Measure every variant."""

    def measure(name: str) -> dict[str, Any]:
        step = _training_step(bench, variants[name], device)
        num_params = sum(parameter.numel() for parameter in step.model.parameters())
        first_loss = step.accumulate().item()
        step.update()
        if bench.num_warmup_steps:
            _time_steps(step, bench.num_warmup_steps, device)
        reset_peak(device)
        times = _time_steps(step, bench.num_steps, device)
        return times | {"peak_gib": peak_gib(device), "first_loss": first_loss, "num_params": num_params}

    variants = {variant.name: variant for variant in _VARIANTS}
    found = in_rounds(bench.num_rounds, variants, measure, device, log)
    fused = found["fused"]["step_ms"]
    return [MoERow(variant=name, over_fused=numbers["step_ms"] / fused, **numbers) for name, numbers in found.items()]


def write_moe_report(rows: list[MoERow], bench: MoEBench, folder: Path) -> str:
    """Write ``moe.csv`` and ``moe.md`` into ``folder``; returns the table."""
    rivals = [row for row in rows if not row.variant.startswith("fused")]
    fastest = min(rivals, key=lambda row: row.step_ms)
    setting = (
        f"{machine()}. GPT of {rows[0].num_params / 1e9:.2f} B parameters: hidden {bench.dim}, {bench.num_layers} "
        f"blocks of {bench.num_experts} experts {bench.expert_ffn_dim} wide, {bench.top_k} for each token, "
        f"{bench.num_microbatches} microbatches of {bench.num_tokens} tokens, AdamW included, on one device. Median of "
        f"{bench.num_rounds} rounds of {bench.num_steps} consecutive steps between events. "
        f"Made by `maingrad bench moe`.\n\n"
        f"The fastest rival, {fastest.variant}, takes {fastest.over_fused:.3f} times the fused row."
    )
    columns: list[Column] = [
        ("", "{row.variant}"),
        ("ms per step", "{row.step_ms:.1f}"),
        ("over fused", "{row.over_fused:.3f}"),
        ("ms without the optimizer", "{row.microbatches_ms:.1f}"),
        ("of it in the experts", "{row.experts_ms:.1f}"),
        ("spread of rounds, ms", "{row.spread_ms:.1f}"),
        ("peak GiB", "{row.peak_gib:.1f}"),
    ]
    _, _, lines, remarks = (__doc__ or "").split("\n\n")
    notes = "\n".join(f"- {line}" for line in lines.splitlines()) + "\n\n" + remarks.strip()
    title = "A training step of a mixture of experts"
    return write_table(folder, "moe", rows, title=title, setting=setting, columns=columns, notes=notes)


def _training_step(bench: MoEBench, variant: _Variant, device: torch.device) -> _Step:
    model = build_model(bench.model_config(fused=variant.sums != "grad"), seed=0, device=device)
    if variant.experts != "ours":
        for ffn in _mixtures(model):
            ffn.experts = GroupedMMExperts(ffn.experts, ScaledSwiGLU() if variant.experts == "kernel" else None)
    tokens = random_tokens(bench, 0, device)
    return (
        _plain_step(model, tokens)
        if variant.sums == "grad"
        else _wrapped_step(model, tokens, fp32=variant.sums == "fp32")
    )


def _wrapped_step(model: GPT, tokens: Tensor, *, fp32: bool) -> _Step:
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(grad_reduce_in_fp32=fp32))
    adamw = DistributedOptimizer(ddp, lr=1e-4) if fp32 else torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> Tensor:
        loss = accumulate(ddp, tokens, not_last=ddp.no_sync)
        ddp.finish_grad_sync()
        return loss

    def update() -> None:
        if not fp32:
            ddp.expose_grads()
        adamw.step()
        ddp.zero_grad_buffer()

    return _Step(run, update, model)


def _plain_step(model: GPT, tokens: Tensor) -> _Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return _Step(partial(accumulate, model, tokens), update, model)


def _mixtures(model: GPT) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


class _ExpertsClock:
    """Measures the device time of all experts' forwards and backwards, between CUDA events (on the CPU: host times)."""

    def __init__(self, model: GPT, device: torch.device) -> None:
        self.device = device
        self.forwards: list[tuple[Any, Any]] = []
        self.backwards: list[tuple[Any, Any]] = []
        self.open: list[Any] = []
        self.hooks = []
        for ffn in _mixtures(model):
            self.hooks.append(ffn.experts.register_forward_pre_hook(self._enter))
            self.hooks.append(ffn.experts.register_forward_hook(self._leave))

    def _mark(self) -> Any:
        return mark(self.device)

    def _enter(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        # This hook runs once the experts' whole backward, weight gradients included, has been issued.
        args[0].register_hook(lambda _: self.backwards.append((self.open.pop(), self._mark())))
        self.open.append(self._mark())

    def _leave(self, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.forwards.append((self.open.pop(), self._mark()))
        output.register_hook(lambda _: self.open.append(self._mark()))

    def milliseconds(self) -> float:
        """Sum of all times since the clock was made. Ends the clock."""
        for hook in self.hooks:
            hook.remove()
        synchronize(self.device)
        return sum(milliseconds(start, end) for start, end in self.forwards + self.backwards)


def _time_steps(step: _Step, num_steps: int, device: torch.device) -> dict[str, float]:
    """Mean milliseconds of consecutive steps, of their first halves, of the experts in one more step; the last loss.

    The device is idle at the start and the end.
    """
    loss = torch.zeros(())
    halves = []
    synchronize(device)
    for _ in range(num_steps):
        start = mark(device)
        loss = step.accumulate()
        halves.append((start, mark(device)))
        step.update()
    synchronize(device)  # work that other streams still have belongs to these steps
    end = mark(device)
    synchronize(device)
    clock = _ExpertsClock(step.model, device)
    step.accumulate()
    step.update()
    return {
        "step_ms": milliseconds(halves[0][0], end) / num_steps,
        "microbatches_ms": sum(milliseconds(*half) for half in halves) / num_steps,
        "experts_ms": clock.milliseconds(),
        "last_loss": loss.item(),
    }
