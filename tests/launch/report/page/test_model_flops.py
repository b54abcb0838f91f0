"""Model FLOPs against weights counted by hand, and peaks by the names that torch gives GPUs."""

from pathlib import Path

import pytest
from tiny_run import tiny_config

from maingrad.launch.report.page.model_flops import flops_per_token, peak_tflops

ATTENTION = 12 * 2 * 24 * 32
BLOCK = 32 * 32 + 2 * 16 * 32 + 32 * 32  # queries, keys and values of two of four heads, output
DENSE = 3 * 64 * 32
HEAD = 256 * 32
EXPERTS = {"num_experts": 4, "top_k": 1, "expert_ffn_dim": 48, "shared_expert_ffn_dim": 16, "moe_layer_freq": 2}


@pytest.mark.parametrize(
    "model, weights",
    [
        ({}, 2 * (BLOCK + DENSE) + HEAD),
        # The embedding is the head's weight, and counts for the head.
        ({"tie_embeddings": True}, 2 * (BLOCK + DENSE) + HEAD),
        # The first of two blocks: a router, one of four experts, and the shared one.
        (EXPERTS, 2 * BLOCK + 4 * 32 + 3 * 48 * 32 + 3 * 16 * 32 + DENSE + HEAD),
    ],
)
def test_flops_of_a_token(tmp_path: Path, model: dict[str, object], weights: int) -> None:
    assert flops_per_token(tiny_config(tmp_path, model=model)) == 6 * weights + ATTENTION


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
