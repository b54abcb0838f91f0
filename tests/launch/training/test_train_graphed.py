"""``train.cuda_graph``: steps that are replayed train what the eager run trains. On a CPU: recorded operations."""

from pathlib import Path
from typing import Any

import pytest
from python_processes import run_python
from tiny_run import tiny_config

from maingrad.launch import simulate
from maingrad.launch.config.run import Config, ConfigError
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import train

ROOT = Path(__file__).parents[3]


def losses_of(config: Config) -> list[float]:
    result = train(config)
    return [*result.losses, result.validation_loss or 0.0]


def run(folder: Path, *, graphed: bool, ranks: int = 2, **sections: dict[str, Any]) -> tuple[list[float], list[Any]]:
    folder.mkdir()
    settings = {"num_microbatches": 2, "eval_sequences": 16, "steps": 9, "eval_every": 3, "cuda_graph": graphed}
    config = tiny_config(folder, **{**sections, "train": settings | sections.get("train", {})})
    losses = simulate(losses_of, ranks, config)[0]
    return losses, list(read_metrics(Path(config.train.out_dir) / "metrics.jsonl"))


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"param_dtype": "bfloat16", "dropout": 0.1}},
        {"parallel": "ddp"},
        {"parallel": "fsdp", "ddp": {}},
        {"model": {"delay_wgrad_layers": 2}},
    ],
    ids=["bf16, dropout", "ddp", "fsdp", "delayed"],
)
@pytest.mark.sampled(1)
def test_trains_the_same(tmp_path: Path, sections: dict[str, Any]) -> None:
    eager, told = run(tmp_path / "eager", graphed=False, **sections)
    graphed, told_graphed = run(tmp_path / "graphed", graphed=True, **sections)
    # The schedule's learning rates are rounded to fp32 in a graph.
    assert graphed == pytest.approx(eager, rel=1e-4)
    assert [each["kind"] for each in told_graphed] == [each["kind"] for each in told]
    norms, graphed_norms = ([r["grad_norm"] for r in each if "grad_norm" in r] for each in (told, told_graphed))
    assert graphed_norms == pytest.approx(norms, rel=1e-2)
    assert len(set(graphed_norms)) == len(norms)


@pytest.mark.in_turn
def test_norms_of_a_sharded_graph_are_recorded(tmp_path: Path) -> None:
    settings = {"cuda_graph": True, "num_microbatches": 1, "eval_every": 9}
    train(tiny_config(tmp_path, parallel="fsdp", model={"num_layers": 1}, train=settings))
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    norms = [each["grad_norm"] for each in records if each["kind"] == "step"]
    assert len(set(norms)) == 6 and all(norm > 0.0 for norm in norms)


@pytest.mark.in_turn
def test_experts_on_a_cpu_are_refused_by_name(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 16, "moe_layer_freq": 2}
    with pytest.raises(RuntimeError, match="rows of each expert"):
        run(tmp_path / "graphed", graphed=True, model=experts)


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": "fsdp", "ddp": {}, "fsdp": {"offload_to_cpu": True}},
        {"parallel": "fsdp", "ddp": {}, "fsdp": {"copy_engine_gather": True}},
        {"ddp": {"check_for_nan_in_grad": True}},
        {"ddp": {"check_replicas_every": 10}},
    ],
)
def test_what_cannot_be_captured_is_refused_before_the_run(tmp_path: Path, sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"train\.cuda_graph"):
        tiny_config(tmp_path, **{**sections, "train": {"cuda_graph": True}})


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    options = {"device": "cuda", "num_microbatches": 2, "steps": 16}
    losses = []
    for graphed in (False, True):
        (tmp_path / str(graphed)).mkdir()
        config = tiny_config(
            tmp_path / str(graphed), model={"param_dtype": "bfloat16"}, train=options | {"cuda_graph": graphed}
        )
        losses.append(losses_of(config))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.gpu(count=2)
def test_a_graphed_run_of_two_gpus_ends(tmp_path: Path) -> None:
    """NCCL waits for ever for a communicator that a living graph has captured."""
    options = ["--train.device", "cuda", "--train.steps", "6", "--optimizer.warmup_steps", "2"]
    options += ["--train.cuda_graph", "True"]
    done = run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "maingrad", "train"),
        *(ROOT / "launch" / "configs" / "stdlib.toml", *options, "--train.out_dir", tmp_path / "run"),
        timeout=100.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
