"""docs/benchmarks/moe.py: six ways to compute experts and accumulate their gradients train the same model."""

import csv
import math
from pathlib import Path

import moe
import pytest
import torch
from moe import GroupedMMExperts

from maingrad.te_integration import GroupedMLP, ScaledSwiGLU

BRIEF = ["--num-steps", "2", "--num-rounds", "1", "--num-warmup-steps", "1"]


@pytest.mark.slow
def test_bench_moe_has_a_row_for_each_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--dim", "32", "--num-layers", "2", "--num-heads", "2", "--num-experts", "4", "--top-k", "2"]
    sizes += ["--expert-ffn-dim", "16", "--vocab-size", "64", "--num-tokens", "16", "--num-microbatches", "2"]
    assert moe.main(["--out-dir", str(tmp_path), *sizes, *BRIEF]) == 0
    with (tmp_path / "moe.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == [
        "fused",
        "fused, bf16",
        "autograd",
        "autograd, our activation",
        "hook",
        "hook, our activation",
    ]
    assert all(float(row["step_ms"]) > float(row["microbatches_ms"]) > 0 for row in rows)
    # One seed, one set of tokens: only rounding tells the first losses apart.
    losses = [float(row["first_loss"]) for row in rows]
    assert max(losses) - min(losses) < 0.01 * math.log(64)
    assert len({row["num_params"] for row in rows}) == 1
    text = capsys.readouterr().out
    assert "| fused |" in text
    assert "The fastest rival," in text
    assert "- hook, our activation       the same with our kernel" in text


def test_rivals_experts_are_ours_to_rounding() -> None:
    experts = GroupedMLP(4, 32, 16, bias=False, single_grouped_weight=True, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 32, generator=generator).bfloat16()
    probs, splits = torch.rand(12, generator=generator), torch.tensor([5, 0, 4, 3])
    expected = experts(x, splits, probs)
    for activation in (None, ScaledSwiGLU()):
        y = GroupedMMExperts(experts, activation)(x, splits, probs)
        # Intermediate roundings to bf16, 2^-9 each, of sums of 16 terms below the largest output.
        assert torch.allclose(y, expected, atol=8 * 2.0**-9 * expected.abs().max().item())
