"""``train.compile``: every block under ``torch.compile`` trains what the eager run trains."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import tiny_config
from torch._dynamo.utils import counters

from maingrad.launch import simulate
from maingrad.launch.config.file import structure
from maingrad.launch.config.run import Config, ConfigError
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import train

BF16 = {"param_dtype": "bfloat16"}
EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 16, "normalize_top_k": True, "moe_layer_freq": 2}
COMPILED = {"compile": True, "compile_backend": "aot_eager"}


def losses_of(config: Config) -> list[float]:
    result = train(config)
    return [*result.losses, result.validation_loss or math.nan]


def run(folder: Path, ranks: int, sections: dict[str, Any], train: dict[str, Any]) -> tuple[list[float], Any, Counter]:
    """Losses, rank 0's record of what was observed, and what the compiler counted: graphs, and breaks by reason."""
    if ranks > 1 and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 crashes where threads take turns in compiling, with nn.Linear too")
    config = tiny_config(folder, **sections, train={"num_microbatches": 3, "eval_sequences": 16} | train)
    torch._dynamo.reset()
    counters.clear()
    try:
        losses = simulate(losses_of, ranks, config)[0]
        breaks = Counter(counters["graph_break"])
        found = Counter({"graphs": counters["stats"]["unique_graphs"], "breaks": sum(breaks.values())})
    finally:
        torch._dynamo.reset()
    (observed,) = (r for r in read_metrics(Path(config.train.out_dir) / "metrics.jsonl") if r["kind"] == "observed")
    return losses, observed, found


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "ranks, sections",
    [
        (2, {"model": BF16}),
        pytest.param(2, {"model": BF16, "parallel": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(1, {"model": {"fuse_wgrad_accumulation": False}}, marks=pytest.mark.slow),
        pytest.param(2, {"model": {"delay_wgrad_layers": 1, "tie_embeddings": True}}, marks=pytest.mark.slow),
        pytest.param(2, {"model": BF16 | {"delay_wgrad_layers": 2}, "parallel": "hybrid"}, marks=pytest.mark.slow),
    ],
    ids=["zero1", "fsdp", "unfused", "delayed and tied", "delayed"],
)
def test_dense_blocks_compile_once_and_train_the_same(tmp_path: Path, ranks: int, sections: dict[str, Any]) -> None:
    """One graph for training and one for validation: no block, rank, microbatch or step compiles again."""
    if sections.get("parallel") == "hybrid":
        ranks = 4
    eager, observed_eager, none = run(tmp_path, ranks, sections, {})
    compiled, observed, found = run(tmp_path, ranks, sections, COMPILED)
    assert none["graphs"] == 0
    assert compiled == pytest.approx(eager, rel=1e-4)
    delayed = sections["model"].get("delay_wgrad_layers") == 1  # of two blocks one is delayed
    assert found == Counter(graphs=4 if delayed else 2)
    for key in ("fused_weights", "fused_writes", "hook_written_parameters", "collectives"):
        assert observed[key] == observed_eager[key], key
    assert compiled[-1] < compiled[0] - 0.2


@pytest.mark.slow
def test_blocks_with_experts_train_the_same(tmp_path: Path) -> None:
    eager, observed_eager, _ = run(tmp_path, 2, {"model": BF16 | EXPERTS}, {})
    compiled, observed, found = run(tmp_path, 2, {"model": BF16 | EXPERTS}, COMPILED)
    assert found["graphs"] > 0
    assert compiled == pytest.approx(eager, rel=1e-4)
    assert observed["fused_writes"] == observed_eager["fused_writes"]


@pytest.mark.slow
def test_a_compiled_run_goes_on_from_an_eager_checkpoint(tmp_path: Path) -> None:
    whole = losses_of(tiny_config(tmp_path))
    train(tiny_config(tmp_path, train={"steps": 6, "save_every": 3, "out_dir": str(tmp_path / "eager")}))
    kept = tmp_path / "eager" / "checkpoints" / "step-00000003"
    torch._dynamo.reset()
    try:
        resumed = losses_of(
            tiny_config(tmp_path, train={"resume": str(kept), "compile": True, "compile_backend": "eager"})
        )
    finally:
        torch._dynamo.reset()
    assert resumed == pytest.approx(whole[3:], rel=1e-4)


def test_a_backend_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.compile_backend = 'fast': must be one of 'inductor'"):
        structure({"train": {"compile_backend": "fast"}})
