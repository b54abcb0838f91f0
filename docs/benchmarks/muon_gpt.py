"""Muon for matrices with AdamW for the rest, beside AdamW alone: validation losses of a small GPT on the CPU.

``python docs/benchmarks/muon_gpt.py`` trains the byte-level GPT of ``launch/configs/stdlib.toml``, made smaller, on the
Python standard library's source. AdamW has five learning rates and Muon three, with the first seed; the best of each
has all three seeds. AdamW beside Muon has AdamW's best rate. Writes muon_gpt.csv, a row for each validation.
"""

import csv
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import Options, run_script

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, muon_groups
from maingrad.launch.config.file import load_config
from maingrad.launch.config.run import Config
from maingrad.launch.data.batches import load_corpus, validation_windows
from maingrad.launch.data.sequences import Sampler
from maingrad.launch.model.hugging_face import build_language_model
from maingrad.launch.training.pace import lr_factor

SHIPPED = Path(__file__).parents[2] / "launch" / "configs" / "stdlib.toml"
SHAPE = ["--model.dim", "96", "--model.num_layers", "3", "--model.num_heads", "3", "--model.ffn_dim", "256"]
BATCH = ["--train.global_batch_size", "16", "--train.num_microbatches", "1", "--optimizer.warmup_steps", "25"]


@dataclass(frozen=True, kw_only=True)
class MuonOptions(Options):
    """What is trained."""

    adamw_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
    """Learning rates of AdamW alone."""
    muon_rates: tuple[float, ...] = (0.01, 0.02, 0.04)
    """Learning rates of Muon."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and of the order of the data."""
    num_steps: int = 300
    """Steps of a run."""


def losses(config: Config, rate: float, muon_rate: float | None) -> list[tuple[int, float]]:
    """Steps and validation losses of one run."""
    torch.manual_seed(config.train.seed)
    corpus = load_corpus(config.data, sequence_length=config.train.sequence_length)
    windows = validation_windows(corpus.validation_bodies[0], count=128, sequence_length=config.train.sequence_length)
    sampler = Sampler(corpus.bodies, config.data, config.train)
    module = build_language_model(config.model, seed=config.train.seed, device=torch.device("cpu"))
    muon = muon_groups(module, lr=muon_rate) if muon_rate else None
    model = DistributedDataParallel(module, DistributedDataParallelConfig())
    optimizer = DistributedOptimizer(
        model,
        rate,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        max_grad_norm=1.0,
        param_groups=muon.groups if muon else (),
    )
    settings = dataclasses.replace(config.optimizer, min_lr_ratio=0.05)
    steps = config.train.steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(settings, step, step / steps))
    found = []
    for step in range(steps):
        batch = sampler.batch(step, slice(0, config.train.global_batch_size))
        model(batch.inputs, batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            with torch.no_grad():
                parts = zip(windows.inputs.split(32), windows.targets.split(32), strict=True)
                validation = [float(module(*part)) for part in parts]
            found.append((step + 1, sum(validation) / len(validation)))
    return found


def main(options: MuonOptions) -> int:
    """Run all, and write the table."""
    rows: list[dict[str, float | str]] = []
    options.out_dir.mkdir(parents=True, exist_ok=True)

    def run(seed: int, rate: float, muon_rate: float | None = None) -> float:
        flags = [*SHAPE, *BATCH, "--train.steps", str(options.num_steps), "--train.seed", str(seed)]
        found = losses(load_config(SHIPPED, flags), rate, muon_rate)
        for step, loss in found:
            rows.append({"seed": seed, "adamw_lr": rate, "muon_lr": muon_rate or "", "step": step, "loss": loss})
        print(f"seed {seed}, AdamW {rate:g}, Muon {muon_rate}: {found[-1][1]:.4f}", flush=True)
        with (options.out_dir / "muon_gpt.csv").open("w") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return found[-1][1]

    first, *others = options.seeds
    best = min(options.adamw_rates, key=lambda rate: run(first, rate))
    muon_rate = min(options.muon_rates, key=lambda rate: run(first, best, rate))
    for seed in others:
        run(seed, best)
        run(seed, best, muon_rate)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(MuonOptions, main))
