"""One job on simulated ranks, on gloo processes and alone: the same numbers, bit for bit where they must be."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks

from maingrad.ddp import DistributedDataParallelConfig
from maingrad.launch import simulate
from maingrad.launch.config.run import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from maingrad.launch.training.train import train

STEPS = 20
SHARDED: dict[str, Any] = {"use_distributed_optimizer": True, "bucket_size": 4000}
FORMS: dict[str, dict[str, Any]] = {
    "reduce-scatter, overlap": {
        "parallel": "zero1",
        "ddp": DistributedDataParallelConfig(overlap_grad_reduce=True, overlap_param_gather=True, **SHARDED),
    },
    "all-reduce, overlap": {
        "parallel": "ddp",
        "ddp": DistributedDataParallelConfig(bucket_size=4000, overlap_grad_reduce=True),
    },
    "reduce-scatter": {"parallel": "zero1", "ddp": DistributedDataParallelConfig(**SHARDED)},
}


class Outcome(NamedTuple):
    losses: list[float]
    weights: dict[str, torch.Tensor]


def config(folder: Path, ranks: int, *, dtype: str, dropout: float, form: str, microbatches: int = 2) -> Config:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{n} squared is {n * n}, cubed {n**3}.\n" for n in range(2000)))
    return Config(
        model=ModelConfig(
            dim=32,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            ffn_dim=48,
            context_length=24,
            dropout=dropout,
            param_dtype=dtype,
            tie_embeddings=True,
        ),
        data=DataConfig(source="text", paths=(str(text),)),
        train=TrainConfig(
            steps=STEPS,
            global_batch_size=24,
            num_microbatches=microbatches,
            sequence_length=16,
            eval_every=STEPS,
            eval_sequences=8,
            device="cpu",
            out_dir=str(folder / "out"),
        ),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=4),
        **FORMS[form],
    )


def run(job: Config) -> Outcome:
    result = train(job)
    return Outcome(list(result.losses), {name: p.detach().clone() for name, p in result.model.named_parameters()})


def run_on_each_rank(job: Config) -> Outcome:
    """With files of its own for every rank, real or simulated."""
    return run(job)


def assert_bitwise_equal(first: Outcome, second: Outcome) -> None:
    assert len(first.losses) == STEPS
    assert first.losses == second.losses
    assert first.weights.keys() == second.weights.keys()
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name


@pytest.mark.in_turn
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.sampled(1)
def test_two_simulated_ranks_are_two_gloo_processes(tmp_path: Path, form: str, dtype: str) -> None:
    job = config(tmp_path, 2, dtype=dtype, dropout=0.2, form=form)
    torch.manual_seed(0)
    simulated = simulate(run_on_each_rank, 2, job)
    real = run_ranks(run_on_each_rank, 2, job)
    for rank in range(2):
        assert_bitwise_equal(simulated[rank], real[rank])
        assert_bitwise_equal(simulated[rank], simulated[0])


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_more_ranks_repeat_bitwise(tmp_path: Path, ranks: int) -> None:
    job = config(tmp_path, ranks, dtype="bfloat16", dropout=0.2, form="reduce-scatter, overlap", microbatches=1)
    runs = [simulate(run_on_each_rank, ranks, job, seed=seed) for seed in range(3)]
    for outcomes in runs:
        for outcome in outcomes:
            assert_bitwise_equal(outcome, runs[0][0])


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.slow
def test_more_gloo_processes_repeat_bitwise(tmp_path: Path, ranks: int) -> None:
    job = config(tmp_path, ranks, dtype="bfloat16", dropout=0.2, form="reduce-scatter, overlap", microbatches=1)
    first, again = run_ranks(run_on_each_rank, ranks, job), run_ranks(run_on_each_rank, ranks, job)
    for outcome in (*first, *again):
        assert_bitwise_equal(outcome, first[0])


@pytest.mark.in_turn
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.sampled(1)
def test_ranks_train_like_one_process_with_the_same_global_batch(tmp_path: Path, ranks: int, form: str) -> None:
    assert not dist.is_initialized()
    job = config(tmp_path, ranks, dtype="float32", dropout=0.0, form=form, microbatches=1)
    alone = run(job)
    for outcome in simulate(run_on_each_rank, ranks, job):
        for loss, expected in zip(outcome.losses, alone.losses, strict=True):
            assert abs(loss - expected) / expected < 1e-5
        for name, weight in outcome.weights.items():
            difference = (weight - alone.weights[name]).norm() / alone.weights[name].norm()
            assert difference < 1e-5, name
