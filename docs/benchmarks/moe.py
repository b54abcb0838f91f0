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

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import (
    StepOptions,
    accumulate,
    in_rounds,
    log,
    mark,
    milliseconds,
    next_token_loss,
    peak_gib,
    random_tokens,
    reset_peak,
    run_script,
    synchronize,
    the_device,
)
from tables import machine, table, write_table
from torch import nn

from maingrad import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.kernels.compat import private_name
from maingrad.launch.config.run import ModelConfig
from maingrad.launch.model.gpt import build_model
from maingrad.launch.model.moe import MixtureOfExperts
from maingrad.te_integration import ScaledSwiGLU

_grouped_mm = private_name(
    "torch.nn.functional.grouped_mm", "torch._grouped_mm", loss="torch's grouped products cannot be measured"
)


@dataclass(frozen=True, kw_only=True)
class MoEBench(StepOptions):
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
    """Consecutive steps of one round."""
    num_rounds: int = 5
    """Rounds; the median counts."""

    def model_config(self, *, fused):
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


COLUMNS = [
    ("", "{row.variant}"),
    ("ms per step", "{row.step_ms:.1f}"),
    ("over fused", "{row.over_fused:.3f}"),
    ("ms without the optimizer", "{row.microbatches_ms:.1f}"),
    ("of it in the experts", "{row.experts_ms:.1f}"),
    ("spread of rounds, ms", "{row.spread_ms:.1f}"),
    ("peak GiB", "{row.peak_gib:.1f}"),
]


VARIANTS = {
    "fused": ("ours", "fp32"),
    "fused, bf16": ("ours", "bf16"),
    "autograd": ("eager", "grad"),
    "autograd, our activation": ("kernel", "grad"),
    "hook": ("eager", "fp32"),
    "hook, our activation": ("kernel", "fp32"),
}
"""Experts: "ours", or the activation between torch's ``grouped_mm`` products, "eager" or "kernel". And where gradients
accumulate: "fp32" or "bf16" main_grad, or "grad" for ``.grad``."""


class GroupedMMExperts(nn.Module):
    """A ``GroupedMLP`` written with torch's ``grouped_mm``, over the same packed parameters.

    x [R, D], splits [E], probs [R] -> [R, D]; ``activation`` None: torch's operations, in the dtype of x.
    """

    def __init__(self, experts, activation):
        super().__init__()
        weights = dict(experts.named_parameters())
        self.fc1_weight = weights["fc1_weight"]  # [E, 2F, D]
        self.fc2_weight = weights["fc2_weight"]  # [E, D, F]
        self.activation = activation

    def forward(self, x, splits, probs):
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

    accumulate: Any
    update: Any
    model: nn.Module


def bench_moe(bench, device):
    """Measure every variant.

    step_ms, microbatches_ms  time of a step, and of it without the optimizer
    experts_ms                the part of that in the experts: products, activations, gradients; one step a round
    """

    def measure(name):
        step = _training_step(bench, *VARIANTS[name], device)
        num_params = sum(parameter.numel() for parameter in step.model.parameters())
        first_loss = step.accumulate().item()
        step.update()
        if bench.num_warmup_steps:
            _time_steps(step, bench.num_warmup_steps, device)
        reset_peak(device)
        times = _time_steps(step, bench.num_steps, device)
        return times | {"peak_gib": peak_gib(device), "first_loss": first_loss, "num_params": num_params}

    return in_rounds(bench.num_rounds, VARIANTS, measure, device, "over_fused")


def write_report(rows, bench):
    """Write ``moe.csv`` and ``moe.md``; returns the Markdown."""
    fastest = min((row for row in rows if not row.variant.startswith("fused")), key=lambda row: row.step_ms)
    _, _, lines, remarks = __doc__.split("\n\n")
    return write_table(
        bench.out_dir,
        "moe",
        rows,
        "A training step of a mixture of experts",
        f"{machine()}. GPT of {rows[0].num_params / 1e9:.2f} B parameters: hidden {bench.dim}, {bench.num_layers} "
        f"blocks of {bench.num_experts} experts {bench.expert_ffn_dim} wide, {bench.top_k} for each token, "
        f"{bench.num_microbatches} microbatches of {bench.num_tokens} tokens, AdamW included, on one device. Median of "
        f"{bench.num_rounds} rounds of {bench.num_steps} consecutive steps between events. "
        f"Made by `docs/benchmarks/moe.py`.",
        f"The fastest rival, {fastest.variant}, takes {fastest.over_fused:.3f} times the fused row.",
        table(rows, COLUMNS),
        "\n".join(f"- {line}" for line in lines.splitlines()),
        remarks.strip(),
    )


def _training_step(bench, experts, sums, device):
    model = build_model(bench.model_config(fused=sums != "grad"), seed=0, device=device)
    if experts != "ours":
        for ffn in _mixtures(model):
            ffn.experts = GroupedMMExperts(ffn.experts, ScaledSwiGLU() if experts == "kernel" else None)
    tokens = random_tokens(bench, 0, device)
    return _plain_step(model, tokens) if sums == "grad" else _wrapped_step(model, tokens, fp32=sums == "fp32")


def _wrapped_step(model, tokens, *, fp32):
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(grad_reduce_in_fp32=fp32))
    adamw = DistributedOptimizer(ddp, lr=1e-4) if fp32 else torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run():
        loss = accumulate(next_token_loss(ddp), tokens, not_last=ddp.no_sync)
        ddp.finish_grad_sync()
        return loss

    def update():
        if not fp32:
            ddp.expose_grads()
        adamw.step()
        ddp.zero_grad_buffer()

    return _Step(run, update, model)


def _plain_step(model, tokens):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    return _Step(partial(accumulate, next_token_loss(model), tokens), update, model)


def _mixtures(model):
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


class _ExpertsClock:
    """Measures the device time of all experts' forwards and backwards, between CUDA events (on the CPU: host times)."""

    def __init__(self, model, device):
        self.device = device
        self.forwards = []
        self.backwards = []
        self.open = []
        self.hooks = []
        for ffn in _mixtures(model):
            self.hooks.append(ffn.experts.register_forward_pre_hook(self._enter))
            self.hooks.append(ffn.experts.register_forward_hook(self._leave))

    def _enter(self, _, args):
        # This hook runs once the experts' whole backward, weight gradients included, has been issued.
        args[0].register_hook(lambda _: self.backwards.append((self.open.pop(), mark(self.device))))
        self.open.append(mark(self.device))

    def _leave(self, _, args, output):
        self.forwards.append((self.open.pop(), mark(self.device)))
        output.register_hook(lambda _: self.open.append(mark(self.device)))

    def milliseconds(self):
        """Sum of all times since the clock was made. Ends the clock."""
        for hook in self.hooks:
            hook.remove()
        synchronize(self.device)
        return sum(milliseconds(start, end) for start, end in self.forwards + self.backwards)


def _time_steps(step, num_steps, device):
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


SMALL = MoEBench(dim=64, num_layers=1, num_heads=2, num_experts=4, top_k=2, expert_ffn_dim=32, num_tokens=64)
DEFAULT = MoEBench() if torch.cuda.is_available() else SMALL


def run(bench):
    log(write_report(bench_moe(bench, the_device()), bench))


main = partial(run_script, MoEBench, run, default=DEFAULT)

if __name__ == "__main__":
    sys.exit(main())
