"""The training loop: what it computes, on any number of ranks, and what it leaves behind."""

import dataclasses
import importlib.metadata
import json
import math
import re
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from tiny_run import tiny_config

from maingrad.launch import simulate
from maingrad.launch.config.file import load_config, structure
from maingrad.launch.config.run import Config, ConfigError, FsdpConfig, MeshConfig, ModelConfig, OptimizerConfig
from maingrad.launch.data.batches import DataError, load_corpus
from maingrad.launch.data.indexed import write_indexed
from maingrad.launch.model.gpt import GPT
from maingrad.launch.training.loading import validation_batch
from maingrad.launch.training.metrics import MetricsWriter, read_metrics
from maingrad.launch.training.pace import Pace, lr_factor
from maingrad.launch.training.run_state import write_resolved
from maingrad.launch.training.runtime import Runtime, process_group_from_env, versions
from maingrad.launch.training.signals import StopRequest
from maingrad.launch.training.train import TrainResult, train
from maingrad.launch.training.watching.progress import Status, format_duration, format_rate
from maingrad.launch.training.wrapping import units_of

STDLIB = Path(__file__).resolve().parents[3] / "launch" / "configs" / "stdlib.toml"


def records(config: Config, kind: str) -> list[dict[str, Any]]:
    return [r for r in read_metrics(Path(config.train.out_dir) / "metrics.jsonl") if r["kind"] == kind]


def weights_of(result: TrainResult) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in result.model.named_parameters()}


def losses_and_weights(config: Config) -> tuple[tuple[float, ...], dict[str, torch.Tensor]]:
    """A job for gloo processes."""
    result = train(config)
    return (*result.losses, result.validation_loss or math.nan), weights_of(result)


def test_one_process_leaves_what_it_observed(tmp_path: Path):
    config = tiny_config(tmp_path, model={"param_dtype": "bfloat16"}, train={"num_microbatches": 4})
    result = train(config)
    assert len(result.losses) == result.steps == 6
    assert result.losses[-1] < result.losses[0] - 0.2
    assert result.is_main
    assert not result.interrupted

    kinds = [record["kind"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert kinds == [
        *("step", "observed", "step", "step", "step", "validation"),  # recorded into the second step's first forward
        *("step", "timeline", "step", "validation", "final"),
    ]
    (observed,) = records(config, "observed")
    assert observed["parameter_dtypes"] == {"bfloat16": 15}
    assert observed["main_grad_dtypes"] == {"float32": 15}
    assert (observed["fused_weights"], observed["fused_writes"]) == (10, 40), "ten matrices, four microbatches each"
    assert observed["hook_written_parameters"] == 5, "five norms"
    assert (observed["microbatches_no_sync"], observed["microbatches_synced"]) == (3, 1)
    assert observed["num_buckets"] == len(observed["buckets"]) >= 3
    assert set(observed["collectives"]) == {"none"}, "a world of one"
    assert (observed["world_size"], observed["backend"], observed["unit"]) == (1, "none", "byte")
    assert (observed["device"], observed["num_parameters"]) == (
        "cpu",
        sum(p.numel() for p in result.model.parameters()),
    )
    assert sum(each["nbytes"] for each in observed["buckets"]) >= 4 * observed["num_parameters"], "fp32"
    assert observed["versions"]["torch"] == torch.__version__


@pytest.mark.in_turn
def test_records_say_what_the_settings_do(tmp_path: Path):
    """Observed, not configured: other settings, other facts."""
    config = tiny_config(
        tmp_path,
        model={"fuse_wgrad_accumulation": False},
        train={"num_microbatches": 1},
        ddp={"bucket_size": 10**6},
        parallel="ddp",
    )
    simulate(train, 2, config)
    (observed,) = records(config, "observed")
    assert (observed["fused_weights"], observed["fused_writes"], observed["hook_written_parameters"]) == (0, 0, 15)
    assert (observed["microbatches_no_sync"], observed["microbatches_synced"]) == (0, 1)
    assert observed["collectives"] == {"all_reduce": 1}
    assert (observed["world_size"], observed["backend"]) == (2, "simulated")
    assert observed["parameter_dtypes"] == observed["main_grad_dtypes"] == {"float32": 15}


def test_step_records_and_resolved_config(tmp_path: Path):
    config = tiny_config(tmp_path, train={"log_every": 2})
    result = train(config)
    steps = records(config, "step")
    assert [record["step"] for record in steps] == [2, 4, 6]
    assert tuple(record["loss"] for record in steps) == result.losses
    assert all(record["grad_norm"] > 0 and record["tokens_per_second"] > 0 for record in steps)
    assert all(record["seconds_per_step"] > 0 for record in steps)
    resolved = json.loads((tmp_path / "run" / "resolved_config.json").read_text())
    assert structure(resolved["config"]) == config
    assert set(resolved["versions"]) >= {"maingrad", "python", "torch", "triton", "platform"}
    assert "python" in resolved["command"]
    commit = resolved["git_commit"]  # None where the tests lie in no repository
    assert commit is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", commit)
    (final,) = records(config, "final")
    assert "bigram_loss" not in final, "the yardstick of the demonstration alone"
    assert final["validation_loss"] == result.validation_loss


class Clock:
    """Time that passes by milliseconds when it is asked for, and by 100 seconds with each line on the screen."""

    def __init__(self) -> None:
        self.now, self.shown = 1000.0, list[Status]()

    def monotonic(self) -> float:
        self.now += 0.001
        return self.now

    def message(self, text: str) -> None:
        self.now += 100.0

    def update(self, status: Status) -> None:
        self.shown.append(status)


def test_a_rate_is_that_of_steps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Validations and saves, which end with a line, are in no step's time, and are in that of the run."""
    clock = Clock()
    monkeypatch.setattr("maingrad.launch.training.train.time", clock)
    settings = {"steps": 8, "eval_every": 2, "save_every": 4, "log_every": 2}
    train(tiny_config(tmp_path, train=settings, checkpoint={"background": False}), display=clock)  # type: ignore[arg-type]
    config = tiny_config(tmp_path)
    steps = records(config, "step")
    assert all(0 < record["seconds_per_step"] < 0.1 for record in steps)
    assert all(record["tokens_per_second"] == pytest.approx(24 * 24 / record["seconds_per_step"]) for record in steps)
    assert [round(record["elapsed"], -2) for record in steps] == [0, 100, 300, 400], "without what comes before"
    assert [record["step"] for record in records(config, "checkpoint")] == [4, 8]
    assert all(record["seconds"] >= 0 for kind in ("checkpoint", "validation") for record in records(config, kind))
    assert round(records(config, "final")[0]["seconds"], -2) == 600
    assert [(each.step, each.steps, each.fraction) for each in clock.shown] == [(n, 8, n / 8) for n in (2, 4, 6, 8)]
    for shown, record in zip(clock.shown, steps, strict=True):
        names = ("loss", "lr", "tokens_per_second", "elapsed")
        assert [getattr(shown, name) for name in names] == [record[name] for name in names]


def test_what_a_person_sees():
    shown = Status(5, 20, 0.25, 20.0, 2.34567, 1e-3, 31234.5)
    assert str(shown) == "step     5/20  loss 2.3457  lr 1.00e-03  31.2k tokens/s  ETA 1:00"
    assert shown._replace(fraction=0.0).eta == math.inf and "ETA -" in str(shown._replace(fraction=0.0))
    durations = {0.4: "0:00", 59.6: "1:00", 75.2: "1:15", 3600: "1:00:00", 4000: "1:06:40", math.inf: "-"}
    assert {seconds: format_duration(seconds) for seconds in durations} == durations
    rates = {0: "0", 999: "999", 1000: "1.0k", 31234.5: "31.2k", 1e6: "1.0M", 2.5e9: "2.5G"}
    assert {rate: format_rate(rate) for rate in rates} == rates


def test_a_run_is_as_far_as_its_steps_or_its_time():
    assert [Pace(10, None, step, 1e9).fraction for step in (0, 5, 10, 11)] == [0.0, 0.5, 1.0, 1.0]
    assert [Pace(10, 100.0, 5, seconds).fraction for seconds in (20.0, 80.0, 1e9)] == [0.5, 0.8, 1.0]


def test_records_are_json_and_lines(tmp_path: Path):
    """NaN and infinity are null; trackers get them as they are; a rank without a file writes nothing."""
    added: list[Any] = []
    tracker: Any = types.SimpleNamespace(add=lambda *record: added.append(record), close=lambda: added.append("closed"))
    MetricsWriter(None).write("step", step=1)
    MetricsWriter(tmp_path / "a" / "new" / "metrics.jsonl").write("step", step=1)
    assert len(read_metrics(tmp_path / "a" / "new" / "metrics.jsonl")) == 1
    writer = MetricsWriter(tmp_path / "new" / "metrics.jsonl")
    writer.trackers = [tracker, tracker]
    writer.write("step", step=1, loss=math.nan, lr=-math.inf, of=[math.inf, 1.0])
    assert read_metrics(tmp_path / "new" / "metrics.jsonl") == [
        {"kind": "step", "step": 1, "loss": None, "lr": None, "of": [None, 1.0]}
    ]
    writer.close()
    (kind, fields), other, *closed = added
    assert (kind, fields["step"], math.isnan(fields["loss"]), closed) == ("step", 1, True, ["closed"] * 2)
    assert other == (kind, fields), "each tracker is told"
    path = tmp_path / "new" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "step"}\n{"kind": "st')
    assert [record["kind"] for record in read_metrics(path)] == ["step", "step"], "the last line is cut off"
    for line in ("[]", '{"step": 1}', '{"kind": 3}'):
        path.write_text(f'{{"kind": "step"}}\n{line}\n')
        with pytest.raises(ValueError, match=r"line 2: no record \(it has no kind\)"):
            read_metrics(path)
    path.write_text('{"kind": "step"}\n' + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"line 2: no record"):
        read_metrics(path)
    first = MetricsWriter(tmp_path / "of a run whose records are gone.jsonl")
    first.resumed_at = 3
    first.write("step", step=4)
    first.close()
    assert [record["step"] for record in read_metrics(tmp_path / "of a run whose records are gone.jsonl")] == [4]
    later = MetricsWriter(path)
    before = [("step", 3), ("note", None), ("step", 5), ("final", 5), ("interrupted", 2)]
    lines = [{"kind": kind} | ({} if step is None else {"step": step}) for kind, step in before]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    later.resumed_at = 3
    later.write("step", step=4)
    later.close()
    assert [(record["kind"], record.get("step")) for record in read_metrics(path)] == [
        *(("step", 3), ("note", None), ("step", 4)),
    ]


def test_learning_rate_is_the_schedule(tmp_path: Path):
    config = tiny_config(tmp_path)
    train(config)
    rates = [record["lr"] for record in records(config, "step")]
    wanted = [3e-3 * lr_factor(config.optimizer, step, step / 6) for step in range(6)]
    assert rates == pytest.approx(wanted)


def test_cosine_with_warmup_ends_where_it_should():
    schedule = OptimizerConfig(warmup_steps=4, min_lr_ratio=0.1)
    assert lr_factor(schedule, 0, 0.0) == 0.25
    assert lr_factor(schedule, 3, 0.0) == 1.0
    assert lr_factor(schedule, 50, 0.5) == pytest.approx(0.55)
    assert lr_factor(schedule, 100, 1.0) == pytest.approx(0.1)
    assert lr_factor(OptimizerConfig(warmup_steps=0), 0, 0.0) == 1.0


@pytest.mark.in_turn
def test_a_run_ends_on_time_with_the_schedule_at_its_end(tmp_path: Path):
    config = tiny_config(tmp_path, train={"steps": 10**6, "max_seconds": 1.5, "eval_every": 10**6})
    began = time.monotonic()
    result = train(config)
    assert time.monotonic() - began < 15
    assert not result.interrupted
    assert result.validation_loss is not None
    rates = [record["lr"] for record in records(config, "step")]
    assert rates[-1] < 0.2 * max(rates), "the cosine came down by the time the run ended"


@pytest.mark.in_turn
def test_same_seed_same_run_other_seed_another(tmp_path: Path):
    config = tiny_config(tmp_path, model={"dropout": 0.1})
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=1))
    losses = train(config).losses
    assert train(config).losses == losses
    assert train(other).losses != losses


@pytest.mark.in_turn
def test_validations_change_no_step(tmp_path: Path):
    """They are in evaluation, and dropout is drawn in the steps between them all the same."""
    found = []
    for eval_every in (1, 100):
        config = tiny_config(tmp_path, model={"dropout": 0.3}, train={"eval_every": eval_every})
        result = train(config)
        found.append((result.losses, weights_of(result)))
        assert len(records(config, "validation")) == (6 if eval_every == 1 else 1)
    assert found[0][0] == found[1][0]
    for name, weight in found[0][1].items():
        assert torch.equal(weight, found[1][1][name]), name


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.sampled(1)
def test_delayed_weight_gradients_train_the_same_model(tmp_path: Path, layers: int):
    """The last layer's, and all of them: bit for bit, and recorded after each backward.

    Without clipping: delayed parameters have buckets of their own, and the norm is summed bucket by bucket.
    """
    unclipped = {"max_grad_norm": None}
    now, later = (tiny_config(tmp_path, model={"delay_wgrad_layers": n}, optimizer=unclipped) for n in (0, layers))
    losses, weights = losses_and_weights(now)
    delayed_losses, delayed_weights = losses_and_weights(later)
    assert losses == delayed_losses
    assert all(torch.equal(weights[name], delayed_weights[name]) for name in weights)
    (observed,), (timeline,) = records(later, "observed"), records(later, "timeline")
    assert observed["delayed_weights"] == 4 * layers + 1
    assert [span["name"] for span in timeline["phases"]] == ["weight gradients"] * 2 + ["optimizer"]
    for backward, phase in zip(timeline["backwards"], timeline["phases"][:2], strict=True):
        assert backward["end"] <= phase["start"] < phase["end"]


@pytest.mark.in_turn
@pytest.mark.parametrize("param_dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_every_kind_of_parallelism_trains_the_same_model(tmp_path: Path, param_dtype: str):
    """Bit for bit: sharding decides where a number is kept, overlapping when it is sent.

    Without clipping, since the global norm is summed shard by shard. Two of four ranks in each instance of the hybrid:
    its sums are those of pairs, as simulated ranks form them anyway.
    """
    alike = {"model": {"param_dtype": param_dtype}, "optimizer": {"max_grad_norm": None}, "train": {"steps": 3}}

    def run(parallel: str, **ddp: Any) -> tuple[tuple[float, ...], dict[str, torch.Tensor]]:
        config = tiny_config(tmp_path, parallel=parallel, ddp=ddp, **alike)
        return losses_and_weights_of(simulate(train, 4, config, seed=len(ddp))[0])

    losses, weights = run("ddp")
    for other in (run("zero1"), run("zero1", overlap_param_gather=False), run("hybrid")):
        assert other[0] == losses
        assert all(torch.equal(weights[name], other[1][name]) for name in weights)


@pytest.mark.slow
@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_hybrid_on_processes(tmp_path: Path, wire: str | None):
    """The second collective of a bucket follows the first one on a thread of the recording, and changes nothing."""
    config = tiny_config(
        tmp_path,
        parallel="hybrid",
        model={"param_dtype": "bfloat16"},
        ddp={"grad_reduce_wire_dtype": wire},
        optimizer={"max_grad_norm": None},
    )
    losses, weights = losses_and_weights_of(simulate(train, 4, config)[0])
    for other_losses, other_weights in run_ranks(losses_and_weights, 4, config):
        assert other_losses == losses
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert {span["collective"] for span in records(config, "timeline")[0]["buckets"]} == {
        "reduce_scatter" if wire is None else "all_to_all"
    }


@pytest.mark.in_turn
def test_the_recording_reaches_into_the_next_forward(tmp_path: Path):
    config = tiny_config(tmp_path, parallel="zero1")
    simulate(train, 2, config)
    (observed,), (timeline,) = records(config, "observed"), records(config, "timeline")
    assert observed["collectives"] == {"all_gather": observed["num_buckets"], "reduce_scatter": observed["num_buckets"]}
    assert [g["bucket"] for g in observed["gathers"]] == [b["bucket"] for b in reversed(observed["buckets"])]
    forwards, backwards = timeline["forwards"], timeline["backwards"]
    assert (len(forwards), len(backwards)) == (3, 2), "two microbatches, and the next step's first forward"
    assert forwards[-1]["start"] >= backwards[-1]["end"]
    (step,) = (phase for phase in timeline["phases"] if phase["name"] == "optimizer")
    assert all(step["start"] <= gather["launched"] <= step["end"] for gather in timeline["gathers"])
    assert all(bucket["finished"] <= step["start"] for bucket in timeline["buckets"]), "what it waits for is no step"
    waits = [wait for wait in timeline["waits"] if wait["collective"] == "all_gather"]
    assert {wait["bucket"] for wait in waits} == {gather["bucket"] for gather in timeline["gathers"]}
    assert all(forwards[-1]["start"] <= wait["start"] <= forwards[-1]["end"] for wait in waits)


def test_gathers_that_do_not_overlap_end_in_the_step(tmp_path: Path):
    config = tiny_config(tmp_path, parallel="zero1", ddp={"overlap_param_gather": False})
    simulate(train, 2, config)
    (timeline,) = records(config, "timeline")
    (step,) = (phase for phase in timeline["phases"] if phase["name"] == "optimizer")
    assert timeline["gathers"]
    assert all(gather["finished"] <= step["end"] for gather in timeline["gathers"])


@pytest.mark.in_turn
def test_all_gather_is_not_recorded_where_nothing_is_sharded(tmp_path: Path):
    config = tiny_config(tmp_path, parallel="ddp")
    simulate(train, 2, config)
    (observed,), (timeline,) = records(config, "observed"), records(config, "timeline")
    assert set(observed["collectives"]) == {"all_reduce"}
    assert timeline["gathers"] == observed["gathers"] == []


@pytest.mark.in_turn
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.sampled(2)
def test_short_runs_are_recorded_too(tmp_path: Path, steps: int):
    """One step has the validation's forward after it."""
    config = tiny_config(tmp_path, train={"steps": steps}, optimizer={"warmup_steps": 0})
    simulate(train, 2, config)
    (observed,), (timeline,) = records(config, "observed"), records(config, "timeline")
    assert len(timeline["forwards"]) == 3
    assert len(timeline["gathers"]) == observed["num_buckets"]
    assert timeline["step"] == (2 if steps == 4 else 0)


@pytest.mark.parametrize("decay_vectors", [False, True])
@pytest.mark.sampled(1)
def test_vectors_need_not_decay(tmp_path: Path, decay_vectors: bool):
    """A learning rate so small that weights move by decay alone: norms stay at 1, bit for bit, or do not."""
    optimizer = {"lr": 1e-4, "weight_decay": 1e3, "decay_vectors": decay_vectors, "warmup_steps": 0, "eps": 1e4}
    config = tiny_config(tmp_path, optimizer=optimizer, train={"steps": 2})
    weights = weights_of(simulate(train, 2, config)[0])
    shrunk = {name for name, weight in weights.items() if weight.ndim < 2 and weight.max() < 0.99}
    vectors = {name for name, weight in weights.items() if weight.ndim < 2}
    assert len(vectors) == 5
    assert shrunk == (vectors if decay_vectors else set())
    assert weights["head.weight"].std() < 0.019, "matrices decay in any case"


def losses_and_weights_of(result: TrainResult) -> tuple[tuple[float, ...], dict[str, torch.Tensor]]:
    return (*result.losses, result.validation_loss or math.nan), weights_of(result)


@pytest.mark.in_turn
def test_dropout_differs_between_ranks(tmp_path: Path):
    """Ranks that dropped the same units would halve the noise that dropout is for."""
    config = tiny_config(tmp_path, train={"steps": 3})

    def draw() -> torch.Tensor:
        train(config)
        return torch.rand(4)

    drawn = simulate(draw, 2)
    assert not torch.equal(drawn[0], drawn[1])
    again = simulate(draw, 2)
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))


def test_dropout_differs_between_steps(tmp_path: Path):
    """And between seeds."""
    drawn = set()
    for steps, seed in ((1, 0), (2, 0), (1, 7)):
        train(tiny_config(tmp_path, train={"steps": steps, "seed": seed}, optimizer={"warmup_steps": 0}))
        drawn.add(float(torch.rand(())))
    assert len(drawn) == 3


def test_each_target_counts_alike_in_a_validation(tmp_path: Path):
    """Whatever the number of targets in a row of padding, and of rows on a rank."""
    generator = np.random.default_rng(0)
    documents = [generator.integers(1, 90, length) for length in generator.integers(2, 25, 60)]
    write_indexed(tmp_path / "set", documents, dtype="uint8")
    data = {"source": "megatron", "paths": [str(tmp_path / "set")], "order": "epochs", "documents": "pad"}
    model = {"init_std": 0.2}  # so that tokens differ in their losses
    config = tiny_config(tmp_path, model=model, data=data, train={"steps": 1}, optimizer={"warmup_steps": 0})
    alone = train(config).validation_loss
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, out_dir=str(tmp_path / "four")))
    for result in simulate(train, 4, config):
        assert result.validation_loss == pytest.approx(alone, rel=1e-4)


def test_interrupted_run_leaves_whole_records(tmp_path: Path):
    config = tiny_config(tmp_path, train={"steps": 50})
    stop = StopRequest()

    class StopsAtThree:
        def update(self, status: Any) -> None:
            if status.step == 3:
                stop.receive(2, None)

        def message(self, text: str) -> None: ...

        def close(self) -> None: ...

    result = train(config, stop=stop, display=StopsAtThree())
    assert result.interrupted
    assert result.steps == 4, "asked for during step 3's record, taken up with step 4's"
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (last["kind"], last["step"], last["signal"]) == ("interrupted", 4, "SIGINT")


def test_one_rank_that_is_asked_stops_all(tmp_path: Path):
    config = tiny_config(tmp_path, train={"steps": 50})

    def rank_of_many() -> int:
        stop = StopRequest()
        if dist.get_rank() == 1:
            stop.receive(15, None)
        return train(config, stop=stop).steps

    assert simulate(rank_of_many, 3) == [1, 1, 1]
    assert records(config, "interrupted")[0]["signal"] == "another rank's"


def test_batch_that_does_not_divide(tmp_path: Path):
    with pytest.raises(Exception, match="must be a multiple of") as caught:
        simulate(train, 5, tiny_config(tmp_path))
    assert isinstance(caught.value.__cause__, ConfigError)


def test_token_outside_the_vocabulary(tmp_path: Path):
    path = tmp_path / "tokens.bin"
    np.arange(2000, dtype=np.uint16).tofile(path)
    config = tiny_config(tmp_path, data={"source": "tokens", "paths": [str(path)]}, model={"vocab_size": 300})
    with pytest.raises(ValueError, match=r"outside the vocabulary: model\.vocab_size = 300; raise it to at least"):
        train(config)


@pytest.mark.parametrize("outside", [slice(-1, None), slice(0, 1000)])
def test_a_token_outside_the_vocabulary_that_is_a_target_or_to_be_trained_on(tmp_path: Path, outside: slice):
    """The last token of all is nobody's input; and those of the training data are not in the validation."""
    path, tokens = tmp_path / "tokens.bin", np.arange(2001, dtype=np.uint16) % 300
    tokens[outside] = 300
    tokens.tofile(path)
    config = tiny_config(tmp_path, data={"source": "tokens", "paths": [str(path)]}, model={"vocab_size": 300})
    with pytest.raises(DataError, match=r"token 300 is outside the vocabulary: model\.vocab_size = 300"):
        train(config)


def test_cuda_without_a_gpu_is_refused(tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match=r'train\.device = "cuda": torch sees no CUDA device'):
        train(tiny_config(tmp_path, train={"device": "cuda"}))


def test_which_part_of_a_batch_a_rank_has():
    """tp changes fastest, then cp, then dp."""
    mesh = MeshConfig(tp=2, cp=3)
    ranks = [Runtime(rank, 12, torch.device("cpu"), mesh) for rank in range(12)]
    assert [each.loss_rank for each in ranks] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [each.data_rank for each in ranks] == [0] * 6 + [1] * 6
    assert (ranks[0].loss_ranks, ranks[0].data_ranks) == (6, 2)
    assert [each.is_main for each in ranks] == [True] + [False] * 11


@pytest.mark.parametrize(("weights", "rows"), [((3.0, 1.0), [6, 2]), ((1e6, 1.0), [8, 1]), ((), [8])])
def test_each_path_has_its_share_of_a_validation(tmp_path: Path, weights: tuple[float, ...], rows: list[int]):
    paths = [tmp_path / "low", tmp_path / "high"]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([100 * number + place % 100 for place in range(4000)]))
    data = {"paths": [str(path) for path in paths], "weights": weights, "order": "epochs"}
    config = tiny_config(tmp_path, data=data)
    found = validation_batch(config, load_corpus(config.data, sequence_length=24))
    of_each = [int((found.inputs[:, 0] < 100).sum()), int((found.inputs[:, 0] >= 100).sum())]
    assert [number for number in of_each if number] == rows


def test_a_router_of_another_dtype_is_a_unit_of_its_own():
    experts = {"num_experts": 2, "top_k": 1, "expert_ffn_dim": 8, "moe_layer_freq": 2}
    for router_dtype, wanted in (
        ("float32", ["blocks.0.ffn.router", "blocks.0", "blocks.1", ""]),
        ("bfloat16", ["blocks.0", "blocks.1", ""]),
    ):
        model = ModelConfig(
            num_layers=2,
            param_dtype="bfloat16",
            router_dtype=router_dtype,
            **experts,  # type: ignore[arg-type]
        )
        gpt = GPT(model, torch.device("meta"))
        found = list(units_of(gpt, model, FsdpConfig(grad_dtype="bfloat16", reduce_dtype="float16")))
        names = {id(module): name for name, module in gpt.named_modules()}
        assert [names[id(module)] for module, _ in found] == wanted
        for module, policy in found:
            kind = getattr(torch, router_dtype) if names[id(module)].endswith("router") else torch.bfloat16
            assert (policy.param_dtype, policy.grad_dtype, policy.reduce_dtype) == (
                *(kind, torch.bfloat16, torch.float16),
            )
            assert not policy.cast_forward_inputs


def test_all_reduce_sum_without_a_group_is_the_identity():
    assert Runtime(0, 1, torch.device("cpu")).all_reduce_sum([1.5, 2.0]) == [1.5, 2.0]


@pytest.mark.slow
def test_a_real_training_beats_the_bigram_model(tmp_path: Path):
    """The shipped configuration on the standard library's source, smaller and shorter: ten seconds of one core.

    In fp32: a core without instructions for bf16 multiplies it ten times slower.
    """
    size = ["--model.dim", "128", "--model.num-layers", "2", "--model.num-heads", "2", "--model.ffn-dim", "352"]
    size += ["--model.param-dtype", "float32"]
    batch = ["--train.global-batch-size", "16", "--train.sequence-length", "64", "--optimizer.lr", "6e-3"]
    length = ["--train.steps", "160", "--train.max-seconds", "None", "--train.eval-every", "160"]
    result = train(load_config(STDLIB, [*size, *batch, *length, "--train.out-dir", str(tmp_path)]))
    assert result.validation_loss is not None
    assert result.bigram_loss is not None
    assert 2.1 < result.bigram_loss < 2.7
    assert result.validation_loss < result.bigram_loss - 0.05


ENVIRONMENTS = {
    "a launcher of one": {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    "its size alone": {"WORLD_SIZE": "1"},
    "several, and nobody says which this is": {"WORLD_SIZE": "2"},
}


@pytest.mark.in_turn
@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
@pytest.mark.parametrize("said", ENVIRONMENTS)
@pytest.mark.sampled(1)
def test_what_a_launcher_says_of_ranks_is_heard(
    said: str, parallel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, parallel=parallel, train={"steps": 3, "eval_every": 3})
    expected = train(config).losses
    for name, value in ENVIRONMENTS[said].items():
        monkeypatch.setenv(name, value)
    with process_group_from_env("cpu"):
        assert dist.is_initialized() is ("RANK" in ENVIRONMENTS[said])
        if ENVIRONMENTS[said]["WORLD_SIZE"] == "1":
            assert train(config).losses == expected
            return
        with pytest.raises(ValueError, match=r"WORLD_SIZE=2.*init_process_group.*unset WORLD_SIZE"):
            train(config)


def test_what_is_not_installed_is_recorded_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert versions()["triton"] == "not installed"


def test_outside_of_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    write_resolved(tiny_config(tmp_path), 1)
    assert json.loads((tmp_path / "run" / "resolved_config.json").read_text())["git_commit"] is None
