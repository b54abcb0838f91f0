"""``parallel = "fsdp"`` and ``"hsdp"``: the run that the others train, and what is recorded of it."""

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from tiny_run import tiny_config

from maingrad.fsdp import FSDPModule
from maingrad.launch import simulate
from maingrad.launch.config.run import Config, ConfigError
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import train
from maingrad.launch.training.wrapping import _digest

Run = tuple[tuple[float, ...], dict[str, torch.Tensor]]

EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 16, "normalize_top_k": True}
UNCLIPPED = {"max_grad_norm": None}


def outcome(config: Config) -> Run:
    """Losses, validation loss and whole weights: a job for simulated ranks and for processes."""
    result = train(config)
    model = result.model
    losses = (*result.losses, result.validation_loss or math.nan)
    if not isinstance(model, FSDPModule):
        return losses, {name: param.detach().clone() for name, param in model.named_parameters()}
    with model.unsharded():
        return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def run(folder: Path, ranks: int = 2, **sections: Any) -> Run:
    return simulate(outcome, ranks, tiny_config(folder, **sections))[0]


def unclipped(ranks: int, model: dict[str, Any], *, num_microbatches: int) -> dict[str, Any]:
    """What two runs that are compared to the bit have in common: clipping would sum in orders of their own."""
    return {
        "ranks": ranks,
        "model": {"param_dtype": "bfloat16"} | model,
        "train": {"num_microbatches": num_microbatches},
        "optimizer": UNCLIPPED | {"decay_vectors": False},
    }


def assert_same(run: Run, other: Run) -> None:
    assert run[0] == other[0]
    assert run[1].keys() == other[1].keys()
    assert all(torch.equal(weight, other[1][name]) for name, weight in run[1].items())


def records(config: Config, kind: str) -> list[dict[str, Any]]:
    return [r for r in read_metrics(Path(config.train.out_dir) / "metrics.jsonl") if r["kind"] == kind]


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "parallel, fsdp, model, ranks",
    [
        pytest.param("fsdp", {}, {}, 2, marks=pytest.mark.slow),
        ("fsdp", {"placements": "zero2"}, {"delay_wgrad_layers": 2}, 3),
        pytest.param("hsdp", {}, {"tie_embeddings": True, "param_dtype": "float32"}, 4, marks=pytest.mark.slow),
        ("hsdp", {"placements": "hsdp_zero1"}, EXPERTS, 4),
        pytest.param("fsdp", {"placements": "zero1"}, EXPERTS, 2, marks=pytest.mark.slow),
        pytest.param("fsdp", {"reshard_after_forward": False}, {"delay_wgrad_layers": 1}, 4, marks=pytest.mark.slow),
        pytest.param("hsdp", {"num_instances": 4}, {}, 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_trains_what_zero1_trains(tmp_path: Path, parallel: str, fsdp: dict[str, Any], model: dict, ranks: int):
    """Bit for bit, with one microbatch and unclipped: then all sums have one order. Half of the ranks are an instance,
    whose sums are those of pairs, as simulated ranks form them anyway."""
    alike = unclipped(ranks, model, num_microbatches=1)
    sharded = run(tmp_path, parallel=parallel, fsdp=fsdp, **alike)
    assert_same(run(tmp_path, parallel="zero1", **alike), sharded)
    assert len(sharded[0]) == 7


@pytest.mark.parametrize(
    "parallel, fsdp, model, ranks",
    [
        ("fsdp", {"reduce_every_microbatch": False, "bucket_size": 4000}, {"num_layers": 3}, 3),
        pytest.param("hsdp", {"reduce_every_microbatch": False}, {"delay_wgrad_layers": 1}, 4, marks=pytest.mark.slow),
        pytest.param("fsdp", {"placements": "zero1", "bucket_size": 4000}, EXPERTS, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_gradients_that_are_reduced_once_are_those_of_zero1(
    tmp_path: Path, parallel: str, fsdp: dict[str, Any], model: dict, ranks: int
):
    """Bit for bit with several microbatches: each rank sums its own first, as ZeRO-1 does."""
    alike = unclipped(ranks, model, num_microbatches=2)
    reduced_once = run(tmp_path, parallel=parallel, fsdp=fsdp, **alike)
    config = tiny_config(tmp_path, parallel=parallel, fsdp=fsdp)
    spans = records(config, "timeline")[0]["buckets"]
    assert set(Counter(span["bucket"] for span in spans).values()) == {1}
    assert_same(run(tmp_path, parallel="zero1", **alike), reduced_once)


@pytest.mark.in_turn
@pytest.mark.parametrize("eval_sequences", [1, 3])
@pytest.mark.sampled(1)
def test_validates_on_sequences_that_ranks_cannot_share_evenly(tmp_path: Path, eval_sequences: int):
    """Ranks with fewer sequences, or none, take part in the gathers of all forwards, and count nothing."""
    losses = {}
    for parallel in ("zero1", "fsdp"):
        train = {"steps": 3, "eval_every": 3, "global_batch_size": 4, "eval_sequences": eval_sequences}
        losses[parallel] = run(tmp_path, parallel=parallel, train=train)[0]
    assert losses["fsdp"] == pytest.approx(losses["zero1"], rel=1e-5)


@pytest.mark.in_turn
@pytest.mark.parametrize("placements", [pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_microbatches_and_clipping(tmp_path: Path, placements: str):
    """Gradients are summed over ranks microbatch by microbatch: another order of the same sums."""
    fsdp = tiny_config(tmp_path, parallel="fsdp", train={"out_dir": str(tmp_path / placements)})
    fsdp = dataclasses.replace(fsdp, fsdp=dataclasses.replace(fsdp.fsdp, placements=placements))
    zero1 = tiny_config(tmp_path, parallel="zero1")
    (losses, weights), (others, other_weights) = (simulate(outcome, 2, config)[0] for config in (fsdp, zero1))
    assert losses == pytest.approx(others, rel=1e-6)
    for name, weight in weights.items():
        assert (weight - other_weights[name]).norm() <= 1e-4 * weight.norm(), name
    norms = [[record["grad_norm"] for record in records(config, "step")] for config in (fsdp, zero1)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert len(norms[0]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2])
def test_delayed_weight_gradients_train_the_same_model(tmp_path: Path, layers: int):
    now = run(tmp_path, parallel="fsdp", optimizer=UNCLIPPED)
    config = tiny_config(tmp_path, parallel="fsdp", optimizer=UNCLIPPED, model={"delay_wgrad_layers": layers})
    delayed = simulate(outcome, 2, config)[0]
    # Delayed gradients are summed over microbatches, then reduced; the others are reduced in every microbatch.
    assert delayed[0] == pytest.approx(now[0], rel=1e-5)
    for name, weight in now[1].items():
        assert (weight - delayed[1][name]).norm() <= 1e-4 * weight.norm(), name
    (observed,) = records(config, "observed")
    assert (observed["delayed_weights"], observed["fused_writes"]) == (4 * layers + 1, 20)


@pytest.mark.parametrize(
    "parallel, ranks", [("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.slow)], ids=["fsdp", "hsdp"]
)
@pytest.mark.slow
def test_processes_and_simulated_ranks_agree(tmp_path: Path, parallel: str, ranks: int):
    config = tiny_config(tmp_path, parallel=parallel, optimizer=UNCLIPPED, model={"param_dtype": "bfloat16"})
    simulated = simulate(outcome, ranks, config)[0]
    for other in run_ranks(outcome, ranks, config):
        assert_same(simulated, other)


@pytest.mark.in_turn
def test_one_rank_needs_no_process_group(tmp_path: Path):
    alike = {"optimizer": UNCLIPPED, "train": {"num_microbatches": 1}}
    alone, wrapped = (outcome(tiny_config(tmp_path, parallel=parallel, **alike)) for parallel in ("fsdp", "zero1"))
    assert_same(wrapped, alone)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "before, after, ranks", [("fsdp", "zero1", 2), pytest.param("zero1", "hsdp", 4, marks=pytest.mark.slow)]
)
def test_goes_on_from_the_other_s_checkpoint(tmp_path: Path, before: str, after: str, ranks: int):
    def run_from(out: str, parallel: str, **settings: Any) -> Run:
        return run(
            tmp_path,
            ranks,
            parallel=parallel,
            model={"param_dtype": "bfloat16", "dropout": 0.1},
            optimizer=UNCLIPPED | {"decay_vectors": False},
            train={"out_dir": str(tmp_path / out), "eval_every": 6, "num_microbatches": 1, **settings},
        )

    whole = run_from("whole", before, save_every=4)
    losses, weights = run_from("rest", after, resume=str(tmp_path / "whole" / "checkpoints" / "step-00000004"))
    assert losses == whole[0][4:]
    assert_same((losses, weights), (losses, whole[1]))


# ---- Records. ----


@pytest.mark.in_turn
def test_what_is_observed_and_recorded(tmp_path: Path):
    config = tiny_config(tmp_path, parallel="fsdp", model={"param_dtype": "bfloat16", "num_layers": 3})
    simulate(train, 2, config)
    (observed,), (timeline,) = records(config, "observed"), records(config, "timeline")
    assert observed["parameter_dtypes"] == {"bfloat16": 21}
    assert observed["main_grad_dtypes"] == {"float32": 21}
    assert (observed["fused_weights"], observed["num_buckets"]) == (14, 4), "three blocks, and what is around them"
    assert len(timeline["backwards"]) == 2
    reduced = Counter(span["bucket"] for span in timeline["buckets"])
    assert set(reduced.values()) == {2}, "each microbatch's gradients are reduced"
    assert len(reduced) == 4
    # Blocks are gathered for a backward too, but for the last, with which it begins.
    begins, ends = timeline["backwards"][1]["start"], timeline["backwards"][1]["end"]
    in_backward = [span["bucket"] for span in timeline["gathers"] if begins <= span["launched"] <= ends]
    assert [name.split(".")[1] for name in in_backward] == ["1", "0"]
    next_forward = timeline["forwards"][-1]
    assert next_forward["start"] >= ends
    gathered = [s["bucket"] for s in timeline["gathers"] if next_forward["start"] <= s["launched"]]
    assert len(gathered) == 4, "the step has changed all shards"
    assert {span["collective"] for span in timeline["gathers"]} == {"all_gather"}


@pytest.mark.in_turn
def test_same_weights_same_digest(tmp_path: Path):
    digests = []
    for parallel in ("zero1", "fsdp"):
        config = tiny_config(tmp_path, parallel=parallel, optimizer=UNCLIPPED, train={"num_microbatches": 1})
        simulate(train, 2, config)
        digests += [records(config, "final")[0]["weights_sha256"]]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 64


def test_a_digest_is_of_a_name_and_of_values_however_they_lie():
    values = torch.arange(6.0).view(2, 3)
    assert _digest("w", values.t()) == _digest("w", values.t().contiguous())
    others = (("w", values), ("v", values), ("w", values.t()), ("w", values.double()), ("w", values.bfloat16()))
    assert len({_digest(name, each) for name, each in others}) == len(others)


def test_what_cannot_be_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"fsdp\]: offload_to_cpu has no effect on cpu"):
        train(tiny_config(tmp_path, parallel="fsdp", fsdp={"offload_to_cpu": True}))
    with pytest.raises(ConfigError, match=r"fsdp\]: copy_engine_gather needs parameters on CUDA"):
        train(tiny_config(tmp_path, parallel="fsdp", fsdp={"copy_engine_gather": True}))
    with pytest.raises(ConfigError, match=r"fsdp\.num_instances = 2: must divide the 1 rank"):
        train(tiny_config(tmp_path, parallel="hsdp"))
