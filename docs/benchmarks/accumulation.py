"""What the fused weight gradient gains on one device: step time and peak memory of four ways to accumulate gradients.

fused         main_grad in fp32, written by the weight-gradient GEMM
hook          main_grad in fp32; autograd makes each weight gradient in bf16 and a hook adds it
autograd      plain PyTorch, gradients summed in bf16 (less exact, the same bytes as the parameters), AdamW in bf16
autograd fp32 plain PyTorch over fp32 parameters under bf16 autocast, gradients summed in fp32

All rows train the same GPT on the same tokens; the first two with ``DistributedOptimizer`` on fp32 masters.
"""

import sys
from dataclasses import dataclass
from functools import partial

import torch
from contenders import LEARNING_RATE, train
from harness import (
    StepOptions,
    accumulate,
    in_rounds,
    log,
    next_token_loss,
    random_tokens,
    run_script,
    stepping,
    the_device,
    time_variant,
)
from tables import machine, table, write_table

from maingrad import DistributedDataParallel
from maingrad.launch.config.run import ModelConfig
from maingrad.launch.model.gpt import build_model
from maingrad.launch.training.runtime import process_group_from_env

_VARIANTS = ("fused", "hook", "autograd", "autograd fp32")
COLUMNS = [
    ("", "{row.variant}"),
    ("ms per step", "{row.step_ms:.1f}"),
    ("over fused", "{row.over_fused:.3f}"),
    ("spread of rounds, ms", "{row.spread_ms:.1f}"),
    ("peak GiB", "{row.peak_gib:.1f}"),
]


@dataclass(frozen=True, kw_only=True)
class AccumulationBench(StepOptions):
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

    def model_config(self, variant):
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


def bench_accumulation(bench, device):
    """Measure every variant."""

    def measure(variant):
        step, num_params = _training_step(bench, variant, device)
        return {**time_variant(bench, step, device), "num_params": num_params}

    return in_rounds(bench.num_rounds, _VARIANTS, measure, device, "over_fused")


def write_report(rows, bench):
    """Write ``accumulation.csv`` and ``accumulation.md``; returns the Markdown."""
    return write_table(
        bench.out_dir,
        "accumulation",
        rows,
        "Accumulating gradients: fused, by a hook, by autograd",
        f"{machine()}. GPT of {rows[0].num_params / 1e9:.2f} B parameters: hidden {bench.dim}, {bench.num_layers} "
        f"layers, {bench.num_microbatches} microbatches of {bench.num_tokens} tokens, AdamW included, on one device. "
        f"Median of {bench.num_rounds} rounds of {bench.num_steps} consecutive steps between two events. "
        f"Made by `docs/benchmarks/accumulation.py`.",
        table(rows, COLUMNS),
        "\n".join(f"- {line}" for line in __doc__.split("\n\n")[1].splitlines()),
    )


def _training_step(bench, variant, device):
    model = build_model(bench.model_config(variant), seed=0, device=device)
    tokens = random_tokens(bench, 0, device)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    if variant in ("fused", "hook"):
        return train(DistributedDataParallel(model), next_token_loss, tokens), num_params
    return _plain_step(model, tokens, variant), num_params


def _plain_step(model, tokens, variant):
    loss_of = next_token_loss(model)

    def autocast_loss(row):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=variant == "autograd fp32"):
            return loss_of(row)

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return stepping(partial(accumulate, autocast_loss, tokens), optimizer)


# The published sizes are for a GPU. A CPU gets sizes that take a minute.
SMALL = AccumulationBench(dim=256, num_layers=2, vocab_size=1024, num_tokens=256, num_steps=3, num_warmup_steps=1)
DEFAULT = AccumulationBench() if torch.cuda.is_available() else SMALL


def run(bench):
    with process_group_from_env("auto"):
        log(write_report(bench_accumulation(bench, the_device()), bench))


main = partial(run_script, AccumulationBench, run, default=DEFAULT)

if __name__ == "__main__":
    sys.exit(main())
