"""What a run says, records, validates and saves, and after which step."""

import json
import math
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny_run import tiny_config
from torch import Tensor

from maingrad.ddp import save_checkpoint
from maingrad.ddp.checkpoint.background import PendingSave
from maingrad.ddp.checkpoint.files.folder import MARK_FILE
from maingrad.ddp.collectives.failure_report import FailureReporter
from maingrad.launch import simulate
from maingrad.launch.config.file import config_to_dict
from maingrad.launch.config.run import Config, ConfigError
from maingrad.launch.data.batches import DataError, load_corpus
from maingrad.launch.training import pipelined, run_state
from maingrad.launch.training import train as loop
from maingrad.launch.training.loading import validation_batch
from maingrad.launch.training.metrics import MetricsWriter, read_metrics
from maingrad.launch.training.pipelined import PipelinedTrainer
from maingrad.launch.training.run_state import (
    RunSaver,
    _check_no_link,
    resume_run,
    where_to_resume,
    write_resolved,
)
from maingrad.launch.training.signals import StopRequest
from maingrad.launch.training.train import Trainer, train
from maingrad.launch.training.watching.trackers import Tracker
from maingrad.te_integration.recipes import recipe_named

SMALL = {"num_layers": 1}


def config_of(folder: Path, **sections: Any) -> Config:
    settings = {"num_microbatches": 1, **sections.pop("train", {})}
    return tiny_config(folder, model=SMALL | sections.pop("model", {}), train=settings, **sections)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / "run" / "metrics.jsonl") if record["kind"] == kind]


class Heard:
    """A display that keeps what it is told, and may do something after a step."""

    def __init__(self, after: Any = lambda step: None) -> None:
        self.told, self.after = list[Any](), after

    def update(self, status: Any) -> None:
        self.told.append(status.step)
        self.after(status.step)

    def message(self, text: str) -> None:
        self.told.append(text)


# ---- Steps that are logged, recorded and validated. ----


def test_the_last_step_is_logged_and_saved_whatever_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "peak_nbytes", lambda device: {"cpu": 4321}[device.type])
    result = train(config_of(tmp_path, train={"steps": 5, "log_every": 2, "save_every": 4, "eval_every": 100}))
    assert [record["step"] for record in records(tmp_path, "step")] == [2, 4, 5]
    assert [record["step"] for record in records(tmp_path, "checkpoint")] == [4, 5]
    assert len(result.losses) == 3 and result.losses[-1] < result.losses[0]
    assert records(tmp_path, "final")[0]["peak_memory_bytes"] == 4321


@pytest.mark.in_turn
def test_a_recording_counts_from_the_first_step_of_the_process(tmp_path: Path):
    """The tenth step of a long run; of one that goes on, its own first step is observed."""
    settings = {"steps": 14, "save_every": 7, "eval_every": 100}
    train(config_of(tmp_path, train=settings))
    assert [records(tmp_path, kind)[0]["step"] for kind in ("observed", "timeline")] == [0, 10]
    train(config_of(tmp_path, train=settings | {"resume": str(tmp_path / "run/checkpoints/step-00000007")}))
    assert [records(tmp_path, kind)[-1]["step"] for kind in ("observed", "timeline")] == [7, 12]


def test_a_run_that_ends_with_its_first_step_has_been_observed(tmp_path: Path):
    stop = StopRequest()
    stop.receive(15, None)
    assert train(config_of(tmp_path), stop=stop).steps == 1
    assert len(records(tmp_path, "observed")) == 1


def test_an_interrupted_run_does_not_validate(tmp_path: Path):
    stop = StopRequest()
    config = config_of(tmp_path, train={"eval_every": 2, "steps": 9})
    heard = Heard(lambda step: stop.receive(2, None) if step == 3 else None)
    assert train(config, stop=stop, display=heard).steps == 4  # type: ignore[arg-type]
    assert [record["step"] for record in records(tmp_path, "validation")] == [2]


def test_a_validation_is_in_evaluation_without_graph_and_sees_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of experts too: their routers' losses are those of training."""
    seen, loss = list[Any](), Trainer._loss

    def spied(self: Trainer, inputs: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        seen.append((torch.is_grad_enabled(), self.model.training, positions is not None))
        return loss(self, inputs, targets, positions)

    monkeypatch.setattr(Trainer, "_loss", spied)
    experts = {"num_experts": 2, "top_k": 1, "expert_ffn_dim": 8, "aux_loss_coefficient": 100.0}
    data = {"documents": "mask", "end_of_document": 10}
    result = train(config_of(tmp_path, model=experts, data=data, train={"steps": 3, "eval_every": 2}))
    assert set(seen) == {(True, True, True), (False, False, True)}
    assert [each for each, _, _ in seen] == [True, True, False, True, False]
    assert result.validation_loss is not None and result.validation_loss < 10.0


def test_a_validation_is_of_all_its_sequences_however_many_forwards_they_take(tmp_path: Path):
    """Two ranks with three and with two of them, and two in a forward: the second rank's last forward has none."""
    settings = {"steps": 1, "num_microbatches": 6, "eval_sequences": 5}
    config = config_of(tmp_path, model={"init_std": 0.2}, train=settings, optimizer={"warmup_steps": 0})
    result, _ = simulate(train, 2, config)
    windows = validation_batch(config, load_corpus(config.data, sequence_length=24))
    assert len(windows.inputs) == 5
    with torch.no_grad():
        expected = float(result.model.eval()(windows.inputs, windows.targets))
    assert result.validation_loss == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_a_target_is_a_step(tmp_path: Path):
    """Each token is a document: no first token is a target."""
    np.zeros(4000, np.uint16).tofile(tmp_path / "tokens")
    data = {"source": "tokens", "paths": [str(tmp_path / "tokens")], "documents": "mask", "end_of_document": 0}
    config = config_of(tmp_path, data=data, train={"steps": 1}, optimizer={"warmup_steps": 0})
    heard: Any = Heard()
    trainer = Trainer(config, loop.current_runtime("cpu", config.mesh), MetricsWriter(None), StopRequest(), heard)
    assert trainer._step(0).item() == 0.0


@pytest.mark.parametrize("named", [None, "float8_block", "mxfp8"])
def test_a_forward_is_under_the_recipe_of_the_run_and_sees_where_documents_begin(
    named: str | None, monkeypatch: pytest.MonkeyPatch
):
    """Of a stage too: its schedule runs all microbatches under the recipe."""
    under, seen = list[Any](), list[Any]()
    recipe: Any = None if named is None else recipe_named(named)

    def entered(enabled: bool, recipe: Any) -> Any:
        under.append((enabled, recipe))
        return nullcontext()

    for module in (loop, pipelined):
        monkeypatch.setattr(module, "autocast", entered)

    def model(*given: Any) -> Tensor:
        seen.append(given)
        return torch.ones(())

    one, two, three = (torch.full((1, 1, 2), value) for value in (1, 2, 3))
    trainer: Any = SimpleNamespace(recipe=recipe, model=model)
    for given in ((one, two), (one, two, three)):
        assert Trainer._loss(trainer, *given) == 1.0
        assert len(seen[-1]) == len(given) and all(got is each for got, each in zip(seen[-1], given, strict=True))
    trainer.runtime = SimpleNamespace(stage=SimpleNamespace(is_first=True), device="cpu", mesh=SimpleNamespace(pp=2))
    trainer.wrapped = SimpleNamespace(failures=None)
    trainer._schedule = SimpleNamespace(step=lambda *tokens, losses, **how: losses.append(torch.full((), 3.0)))
    assert PipelinedTrainer._run_microbatches(trainer, one, two, torch.ones(1), None) == 6.0
    assert under == [(recipe is not None, recipe)] * 3


def test_a_failure_of_the_loops_own_sums_would_be_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    watched: list[str] = []
    monkeypatch.setattr(FailureReporter, "watch", lambda self, what, bucket=None: watched.append(what) or nullcontext())
    train(config_of(tmp_path, train={"steps": 2, "eval_every": 1}, optimizer={"warmup_steps": 0}))
    assert [what for what in watched if "losses" in what] == ["the sum of losses", "the sum of validation losses"] * 2


def test_a_record_is_the_mean_of_its_steps(tmp_path: Path):
    """Its learning rate and its norm are those of the last one."""
    experts = {"num_experts": 2, "top_k": 1, "expert_ffn_dim": 8}
    found = {}
    for every in (1, 3):
        settings = {"steps": 6, "log_every": every, "num_microbatches": 2, "eval_every": 100}
        train(config_of(tmp_path, model=experts, train=settings))
        found[every] = records(tmp_path, "step")
    assert [record["step"] for record in found[3]] == [3, 6]
    for record, steps in zip(found[3], (found[1][:3], found[1][3:]), strict=True):
        for name in ("loss", "load_balancing_loss", "router_z_loss", "max_expert_load"):
            assert record[name] == pytest.approx(sum(each[name] for each in steps) / 3)
            assert record[name] != steps[-1][name]
        assert (record["lr"], record["grad_norm"]) == (steps[-1]["lr"], steps[-1]["grad_norm"])


class ByRank:
    """Clocks that go faster on later ranks: a second for each question on the first."""

    def __init__(self) -> None:
        self.asked: dict[int, int] = {}

    def monotonic(self) -> float:
        rank = dist.get_rank()
        self.asked[rank] = self.asked.get(rank, 0) + 1
        return self.asked[rank] * (1.0 + rank)


def test_ranks_whose_clocks_differ_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And have one learning rate: a run is as far as the mean of their clocks says."""
    monkeypatch.setattr(loop, "time", ByRank())
    settings = {"steps": 10**6, "max_seconds": 30.0, "eval_every": 10**6, "save_every": 10**6}
    first, second = simulate(train, 2, config_of(tmp_path, train=settings))
    assert first.steps == second.steps < 30
    times = [record["elapsed"] for record in records(tmp_path, "step")]
    assert times[-1] >= 30.0 > times[-2]
    assert [record["step"] for record in records(tmp_path, "checkpoint")] == [first.steps], "at the end of its time"


def test_a_record_is_in_the_file_at_once(tmp_path: Path):
    """A process that is killed leaves all it has written, but for the last line."""
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        writer.write("step", step=step)
        assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2][:step]
    writer.close()


def test_records_stay_up_to_where_a_run_goes_on_but_for_how_it_ended(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    written = [("observed", 0), ("step", 3), ("interrupted", 3), ("validation", 4), ("step", 4), ("final", 4)]
    for resumed_at, stays in (
        (4, ["observed", "step", "validation", "step"]),
        (3, ["observed", "step"]),
        (0, ["observed"]),
        (None, []),
    ):
        path.write_text("".join(json.dumps({"kind": kind, "step": step}) + "\n" for kind, step in written))
        writer = MetricsWriter(path)
        writer.resumed_at = resumed_at
        for value in (math.nan, math.inf, 0.5):
            writer.write("new", step=9, value=value)
        writer.close()
        *kept, nan, infinity, number = read_metrics(path)
        assert [record["kind"] for record in kept] == stays
        assert [each["value"] for each in (nan, infinity, number)] == [None, None, 0.5]


@pytest.mark.in_turn
def test_trackers_are_told_where_a_run_goes_on_and_closed_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    heard: list[Any] = []

    def trackers_of(config: Config, resumed_at: int | None) -> list[Tracker]:
        heard.append(resumed_at)
        return [Tracker(lambda numbers, step: heard.extend(numbers), lambda: heard.append("closed"))]

    monkeypatch.setattr(loop, "trackers_of", trackers_of)
    settings = {"steps": 3, "save_every": 3, "eval_every": 100}
    simulate(train, 2, config_of(tmp_path, train=settings))
    assert heard[0] is None and heard.count(None) == heard.count("closed") == 1, "of one rank"
    assert {"train/loss", "validation/loss", "final/validation_loss", "final/seconds"} <= set(heard)
    heard.clear()

    def fail(step: int) -> None:
        raise RuntimeError("at step 4")

    with pytest.raises(RuntimeError, match="at step 4"):
        train(config_of(tmp_path, train=settings | {"steps": 6, "resume": "auto"}), display=Heard(fail))  # type: ignore[arg-type]
    assert heard[0] == 3 and heard[-1] == "closed"


# ---- What is said. ----


def test_tokens_are_called_what_they_are_and_their_numbers_are_said(tmp_path: Path):
    tokens = tmp_path / "tokens"
    (np.arange(5000) % 200).astype(np.uint16).tofile(tokens)
    data = {"source": "tokens", "paths": [str(tokens)], "validation_fraction": 0.3}
    heard = Heard()
    train(config_of(tmp_path, data=data, train={"steps": 3}), display=heard)  # type: ignore[arg-type]
    assert any("nats per token" in str(line) for line in heard.told)
    assert f"data: {tokens}; 3.5k tokens to train on, 1.5k held back" in heard.told
    assert records(tmp_path, "observed")[0]["unit"] == "token"


def test_one_rank_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    simulate(train, 2, config_of(tmp_path, train={"steps": 3}))
    said = capsys.readouterr().out
    assert said.count("step     3/3 ") == 1 == said.count("held back")
    assert "2 rank(s) on cpu, 1 microbatches of 12 x 24 tokens each" in said
    observed = records(tmp_path, "observed")[0]
    size, buckets = observed["num_parameters"] / 1e6, observed["num_buckets"]
    assert f"{size:.2f}M parameters in float32, {buckets} buckets; " in said


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standard library of 40 files."""
    for number in range(40):
        (tmp_path / "lib").mkdir(exist_ok=True)
        (tmp_path / "lib" / f"{number}.py").write_text(f"def f{number}(x):\n    return x * {number}\n" * 3)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))


@pytest.mark.parametrize(
    ("is_main", "source", "documents", "compared"),
    [
        (True, "stdlib", "join", True),
        (False, "stdlib", "join", False),
        (True, "text", "join", False),
        (True, "stdlib", "mask", False),
        (True, "stdlib", "pad", False),
    ],
)
def test_the_bigram_model_is_of_the_demonstration_alone(
    is_main: bool, source: str, documents: str, compared: bool, monkeypatch: pytest.MonkeyPatch
):
    """On one rank, and where it sees what the model sees."""
    said: list[str] = []
    monkeypatch.setattr(loop, "bigram_loss", lambda train, windows: {("tokens", "windows"): 2.5}[train, windows])
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(data=SimpleNamespace(source=source, documents=documents)),
        runtime=SimpleNamespace(is_main=is_main),
        corpus=SimpleNamespace(train="tokens"),
        windows="windows",
        display=SimpleNamespace(message=said.append),
    )
    assert Trainer._bigram_loss(trainer) == (2.5 if compared else None)
    assert said == ["byte-bigram model on the same data: 2.5000 nats per byte"] * compared


@pytest.mark.in_turn
@pytest.mark.usefixtures("library")
def test_the_demonstration_is_compared_with_the_bigram_model(tmp_path: Path):
    heard = Heard()
    data = {"source": "stdlib", "paths": []}
    config = config_of(tmp_path, data=data, train={"steps": 2}, optimizer={"warmup_steps": 0})
    result = train(config, display=heard)  # type: ignore[arg-type]
    (final,) = records(tmp_path, "final")
    assert result.bigram_loss is not None and result.validation_loss is not None
    gap = result.bigram_loss - result.validation_loss
    assert final["nats_below_bigram"] == pytest.approx(gap) and gap < 0, "two steps teach nothing"
    assert final["bigram_loss"] == result.bigram_loss
    assert f"{-gap:.4f} above the byte-bigram model's {result.bigram_loss:.4f}" in heard.told[-1]
    for other in (
        {"documents": "mask", "end_of_document": 10},
        {"source": "text", "paths": [str(tmp_path / "text.py")]},
    ):
        config = config_of(tmp_path, data=data | other, train={"steps": 1}, optimizer={"warmup_steps": 0})
        assert train(config, display=Heard()).bigram_loss is None  # type: ignore[arg-type]
        assert "nats_below_bigram" not in records(tmp_path, "final")[0]
    config = config_of(
        tmp_path, data=data, train={"steps": 1, "save_every": 1, "resume": "auto"}, optimizer={"warmup_steps": 0}
    )
    assert train(config, display=Heard()).validation_loss is not None  # type: ignore[arg-type]
    nothing_left = train(config, display=Heard())  # type: ignore[arg-type]
    assert (nothing_left.validation_loss, nothing_left.bigram_loss) == (None, result.bigram_loss)
    assert records(tmp_path, "final")[0]["bigram_loss"] == result.bigram_loss
    of_another_rank: Any = SimpleNamespace(
        runtime=SimpleNamespace(is_main=False), config=config_of(tmp_path, data=data)
    )
    assert Trainer._bigram_loss(of_another_rank) is None


# ---- Saves. ----


@pytest.mark.in_turn
@pytest.mark.parametrize(("cuda_graph", "after"), [(False, 1), ("auto", 4)])
def test_memory_of_saves_is_taken_once_steps_run_as_they_will(
    tmp_path: Path, cuda_graph: Any, after: int, monkeypatch: pytest.MonkeyPatch
):
    """Nothing may stop the device while a step is captured."""
    told: list[Any] = []
    monkeypatch.setattr(RunSaver, "prepare", lambda self: told.append("memory"))
    heard: Any = Heard(told.append)
    for save_every in (None, 6):
        train(config_of(tmp_path, train={"save_every": save_every, "cuda_graph": cuda_graph}), display=heard)
    steps = [1, 2, 3, 4, 5, 6]
    assert told == [*steps, *steps[: after - 1], "memory", *steps[after - 1 :]]
    if cuda_graph is False:
        told.clear()
        again = {"save_every": 6, "cuda_graph": False, "steps": 8, "resume": "auto"}
        train(config_of(tmp_path, train=again), display=heard)
        assert told[-3:] == ["memory", 7, 8], "counted from the first step of the process"


@pytest.mark.parametrize(("background", "on_gpu"), [(True, True), (True, False), (False, True)])
def test_memory_of_saves_is_taken_where_they_are_in_the_background_of_a_gpu(
    tmp_path: Path, background: bool, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
):
    prepared: list[Any] = []
    monkeypatch.setattr(
        run_state, "prepare_background_saves", lambda *given, **options: prepared.append((*given, options))
    )
    params = [SimpleNamespace(is_cuda=each) for each in (False, on_gpu)]
    stages: Any = object()
    model = SimpleNamespace(parameters=lambda: params)
    wrapped: Any = SimpleNamespace(model=model, optimizer="optimizer", pipeline=stages)
    config = config_of(tmp_path, checkpoint={"background": background})
    RunSaver(config, wrapped, is_main=True, say=print).prepare()
    assert prepared == ([(model, "optimizer", {"pipeline_group": stages})] if background and on_gpu else [])


def test_a_failed_save_ends_the_run_at_the_next_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And not at the next save."""

    def finish(self: RunSaver) -> None:
        if self._pending is not None:
            raise OSError("disk is full")

    monkeypatch.setattr(RunSaver, "failed", lambda self: self._pending is not None)
    monkeypatch.setattr(RunSaver, "finish", finish)
    heard = Heard()
    with pytest.raises(OSError, match="disk is full"):
        train(config_of(tmp_path, train={"save_every": 4, "steps": 20}), display=heard)  # type: ignore[arg-type]
    assert [told for told in heard.told if isinstance(told, int)] == [1, 2, 3, 4]


@pytest.mark.in_turn
def test_a_save_is_said_to_be_complete_at_the_next_record(tmp_path: Path):
    """It is written in the background; the next save would tell late."""
    place = tmp_path / "run" / "checkpoints" / "step-00000002"

    def wait(step: int) -> None:
        while step == 3 and not place.is_dir():
            time.sleep(0.005)
        time.sleep(0.02 * (step == 3))

    heard = Heard(wait)
    train(config_of(tmp_path, train={"save_every": 2, "log_every": 1, "steps": 4}), display=heard)  # type: ignore[arg-type]
    line = f"step     2  checkpoint in '{place}'"
    assert heard.told.count(line) == 1
    assert heard.told.index(line) < heard.told.index(4)


@pytest.mark.in_turn
@pytest.mark.parametrize("background", [True, False])
def test_saves_are_written_in_the_background_or_not(tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch):
    threads, run = list[str](), threading.Thread.run
    monkeypatch.setattr(threading.Thread, "run", lambda thread: threads.append(thread.name) or run(thread))
    train(config_of(tmp_path, train={"save_every": 2, "steps": 3}, checkpoint={"background": background}))
    assert [name for name in threads if name.startswith("save of ")] == [
        f"save of step-0000000{step}" for step in (2, 3) if background
    ]


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize(("done", "failed"), [(True, False), (True, True), (False, False)])
def test_the_first_rank_says_and_deletes_once_a_save_has_succeeded(
    tmp_path: Path, is_main: bool, done: bool, failed: bool, monkeypatch: pytest.MonkeyPatch
):
    deleted, said = list[int](), list[str]()
    monkeypatch.setattr(RunSaver, "_delete", lambda self, newest: deleted.append(newest))
    wrapped: Any = None  # nothing of the model is needed
    pending: Any = SimpleNamespace(done=lambda: done, failed=lambda: failed, wait=lambda: None)
    saver = RunSaver(config_of(tmp_path), wrapped, is_main=is_main, say=said.append)
    assert not saver.failed(), "nothing is under way"
    saver._pending, saver._step = pending, 7
    assert saver.failed() is failed
    for _ in range(2):
        saver.look()
    saver.finish()
    assert not saver.failed()
    once = 1 if is_main and done and not failed else 0
    assert (deleted, len(said)) == ([7] * once, once)


def test_a_save_under_way_does_not_hold_up_a_run_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given_up: list[Any] = []

    def fail(step: int) -> None:
        if step == 3:
            raise RuntimeError("at step 3")

    monkeypatch.setattr(PendingSave, "give_up", lambda save, **how: given_up.append((save.path.name, how)))
    with pytest.raises(RuntimeError, match="at step 3"):
        train(config_of(tmp_path, train={"save_every": 2}), display=Heard(fail))  # type: ignore[arg-type]
    assert given_up == [("step-00000002", {"after": 10.0})]


def test_a_run_ends_when_older_checkpoints_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    deleted: list[int] = []

    def delete(self: RunSaver, newest: int) -> None:
        time.sleep(0.05)
        deleted.append(newest)

    monkeypatch.setattr(RunSaver, "_delete", delete)
    train(config_of(tmp_path, train={"save_every": 3, "steps": 3, "eval_every": 100}))
    assert deleted == [3]


def test_what_a_killed_deletion_has_left_goes_though_its_number_stays(tmp_path: Path):
    """Of the checkpoints that are whole, those stay that ``[checkpoint]`` says."""
    folder = tmp_path / "run" / "checkpoints"
    for step in (2, 3, 4):
        save_checkpoint(folder / f"step-0000000{step}", torch.nn.Linear(2, 2))
    (folder / "step-00000002" / MARK_FILE).touch()
    (folder / "step-00000002" / "maingrad.json").unlink()
    config = config_of(tmp_path, train={"save_every": 1}, checkpoint={"keep_last": 1, "keep_every": 2})
    wrapped: Any = None  # nothing of the model is needed
    RunSaver(config, wrapped, is_main=True, say=print)._delete(4)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004"]


def test_a_run_that_saves_nothing_may_begin_beside_checkpoints(tmp_path: Path):
    folder = tmp_path / "run" / "checkpoints"
    save_checkpoint(folder / "step-00000004", torch.nn.Linear(2, 2))
    assert where_to_resume(config_of(tmp_path)) is None
    with pytest.raises(ConfigError, match="of an earlier run is there"):
        where_to_resume(config_of(tmp_path, train={"save_every": 1}))
    (folder / "step-00000009").symlink_to(folder / "step-00000004")
    _check_no_link(config_of(tmp_path), 4)
    with pytest.raises(ConfigError, match=r"step-00000009' is a link"):
        _check_no_link(config_of(tmp_path, train={"save_every": 1}), 4)


@pytest.mark.parametrize("model", [{}, {"num_experts": 2, "top_k": 1, "expert_ffn_dim": 8}], ids=["dense", "experts"])
def test_what_is_summed_for_a_record_keeps_no_graph(
    tmp_path: Path, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """It would grow with each step until the next record."""
    graphs, step_of = list[bool](), Trainer._step

    def spied(self: Trainer, step: int) -> Tensor:
        loss = step_of(self, step)
        graphs.append(loss.requires_grad or self.router_sums.requires_grad)
        return loss

    monkeypatch.setattr(Trainer, "_step", spied)
    train(config_of(tmp_path, model=model, train={"steps": 4, "log_every": 4}))
    assert graphs == [False] * 4


def test_a_run_that_is_refused_leaves_the_files_of_an_earlier_one(tmp_path: Path):
    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}

    train(config_of(tmp_path, train={"steps": 3}))
    before = files()
    with pytest.raises(DataError, match="does not exist"):
        train(config_of(tmp_path, train={"steps": 4}, data={"paths": [str(tmp_path / "absent")]}))
    assert files() == before and len(before) == 2


def test_what_is_resolved_names_the_number_of_ranks(tmp_path: Path):
    folder = tmp_path / "a" / "new" / "folder"
    write_resolved(config_of(tmp_path, train={"out_dir": str(folder)}), 3)
    assert '"world_size": 3' in (folder / "resolved_config.json").read_text()


def test_a_checkpoint_of_before_validations_were_noted_was_validated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_of(tmp_path)
    model = torch.nn.Linear(2, 2)
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters()), lambda step: 1.0)
    schedule.optimizer.step()
    for validated in (None, True, False):
        extra = {"step": 3, "seconds": 1.0, "schedule": schedule.state_dict(), "config": config_to_dict(config)}
        extra |= {} if validated is None else {"validated": validated}
        monkeypatch.setattr(run_state, "load_checkpoint", lambda *_, extra=extra, **options: extra)
        wrapped: Any = type("Wrapped", (), {"model": model, "optimizer": schedule.optimizer, "pipeline": None})
        pace = loop.Pace(6, None)
        assert resume_run(tmp_path, config, pace, wrapped, schedule, {}) is (validated is not False)
        assert (pace.step, pace.seconds) == (3, 1.0)
    corpus = load_corpus(config.data, sequence_length=24)
    digests = corpus.digests("join")
    assert resume_run(tmp_path, config, pace, wrapped, schedule, digests) is False, "nor the data"
