"""A run that goes on from a checkpoint equals the one that never stopped, bit for bit."""

import dataclasses
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointed import left_by_a_save
from gloo import run_ranks
from tiny_run import tiny_config
from torch import nn

from maingrad.ddp.checkpoint.checkpoint import save_checkpoint
from maingrad.launch import simulate
from maingrad.launch.config.file import config_to_dict
from maingrad.launch.config.run import Config, ConfigError, ModelConfig
from maingrad.launch.data.batches import load_corpus
from maingrad.launch.data.indexed import write_indexed
from maingrad.launch.model.gpt import build_model
from maingrad.launch.training.metrics import MetricsWriter, read_metrics
from maingrad.launch.training.run_state import check_resume, where_to_resume
from maingrad.launch.training.signals import StopRequest
from maingrad.launch.training.train import train

Run = tuple[tuple[float, ...], float, dict[str, torch.Tensor]]


def config_of(folder: Path, out: str, parallel: str = "zero1", **train_settings: Any) -> Config:
    """With dropout, bf16 parameters, and weight decay in two groups; unclipped, so that sums have one order."""
    return tiny_config(
        folder,
        parallel=parallel,
        model={"param_dtype": "bfloat16", "dropout": 0.1},
        optimizer={"max_grad_norm": None, "decay_vectors": False},
        train={"out_dir": str(folder / out), "eval_every": 6, **train_settings},
    )


def outcome(config: Config) -> Run:
    """A job for simulated ranks and for processes."""
    result = train(config)
    weights = {name: parameter.detach().clone() for name, parameter in result.model.named_parameters()}
    return result.losses, result.validation_loss or math.nan, weights


def assert_same_end(whole: Run, rest: Run) -> None:
    losses, validation, weights = rest
    assert losses == whole[0][-len(losses) :]
    assert validation == whole[1]
    assert all(torch.equal(weights[name], whole[2][name]) for name in whole[2])


def checkpoint(folder: Path, out: str, step: int) -> str:
    return str(folder / out / "checkpoints" / f"step-{step:08d}")


def steps_of(folder: Path, out: str) -> list[int]:
    return [record["step"] for record in read_metrics(folder / out / "metrics.jsonl") if record["kind"] == "step"]


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "before, after, ranks",
    [("zero1", "zero1", 2), ("zero1", "ddp", 2), pytest.param("ddp", "hybrid", 4, marks=pytest.mark.slow)],
)
@pytest.mark.sampled(1)
def test_resumed_run_is_the_uninterrupted_one(tmp_path: Path, before: str, after: str, ranks: int):
    whole = simulate(outcome, ranks, config_of(tmp_path, "whole", before))[0]
    saved = simulate(outcome, ranks, config_of(tmp_path, "saved", before, save_every=2))[0]
    assert_same_end(whole, saved)
    assert sorted(path.name for path in (tmp_path / "saved" / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]
    resume = {"resume": checkpoint(tmp_path, "saved", 2)}
    rest = simulate(outcome, ranks, config_of(tmp_path, "rest", after, **resume))[0]
    assert len(rest[0]) == 4
    assert_same_end(whole, rest)


@pytest.mark.slow
def test_processes_go_on_where_simulated_ranks_stopped(tmp_path: Path):
    whole = simulate(outcome, 2, config_of(tmp_path, "whole"))[0]
    simulate(outcome, 2, config_of(tmp_path, "saved", save_every=4))
    rest = run_ranks(outcome, 2, config_of(tmp_path, "rest", resume=checkpoint(tmp_path, "saved", 4)))
    assert_same_end(whole, rest[0])


class StopsAt:
    """A display that asks the run to stop."""

    def __init__(self, step: int, stop: StopRequest) -> None:
        self.step, self.stop, self.said = step, stop, list[str]()

    def update(self, status: Any) -> None:
        if status.step == self.step:
            self.stop.receive(2, None)

    def message(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None: ...


@pytest.mark.in_turn
def test_an_interrupted_run_goes_on_by_itself(tmp_path: Path):
    """The same command again: its records become those of one run."""
    config = config_of(tmp_path, "run", save_every=100, resume="auto")
    stop = StopRequest()
    interrupted = train(config, stop=stop, display=StopsAt(2, stop))
    assert interrupted.interrupted
    assert interrupted.steps == 3
    display = StopsAt(0, StopRequest())
    rest = train(config, display=display)
    whole = train(config_of(tmp_path, "whole"))
    assert rest.losses == whole.losses[3:]
    assert any("goes on from" in line and "after step 3" in line for line in display.said)
    assert steps_of(tmp_path, "run") == [1, 2, 3, 4, 5, 6]
    kinds = [record["kind"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert kinds.count("final") == 1
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    times = [record["elapsed"] for record in records if record["kind"] == "step"]
    assert times == sorted(times), "the time of the whole run"
    assert "interrupted" not in kinds
    display = StopsAt(0, StopRequest())
    assert train(config, display=display).losses == (), "nothing is left to do"
    assert any(line.startswith("no step is left: train.steps = 6, ") for line in display.said), display.said


def records_of_the_run(folder: Path, out: str) -> list[tuple[Any, ...]]:
    """Steps and validations, with their losses."""
    return [
        (record["kind"], record["step"], record["loss"])
        for record in read_metrics(folder / out / "metrics.jsonl")
        if record["kind"] in ("step", "validation")
    ]


@pytest.mark.in_turn
@pytest.mark.parametrize("at", [4, 3, 6])
@pytest.mark.sampled(1)
def test_wherever_it_was_interrupted_no_validation_is_lost(tmp_path: Path, at: int):
    """After an evaluation's step, after the last step, and after neither; and not twice."""
    whole = train(config_of(tmp_path, "whole", eval_every=2))
    config = config_of(tmp_path, "run", eval_every=2, save_every=100, resume="auto")
    stop = StopRequest()
    interrupted = train(config, stop=stop, display=StopsAt(at - 1, stop))
    assert (interrupted.interrupted, interrupted.steps) == (True, at)
    rest = train(config)
    assert rest.validation_loss == whole.validation_loss
    assert records_of_the_run(tmp_path, "run") == records_of_the_run(tmp_path, "whole")
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (last["kind"], last["validation_loss"]) == ("final", whole.validation_loss)


@pytest.mark.in_turn
@pytest.mark.parametrize("cut", [1, 5, 30])
@pytest.mark.sampled(1)
def test_a_last_line_that_was_cut_does_not_stop_a_resume(tmp_path: Path, cut: int):
    train(config_of(tmp_path, "run", save_every=2))
    before = records_of_the_run(tmp_path, "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    train(config_of(tmp_path, "run", save_every=2, resume=checkpoint(tmp_path, "run", 4)))
    assert records_of_the_run(tmp_path, "run") == before


def test_a_line_in_the_middle_that_is_no_record_is_named(tmp_path: Path):
    train(config_of(tmp_path, "run"))
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1][:-10] + b"\n", *lines[2:]]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl', line 2: no record"):
        read_metrics(path)


def resume_and_die(folder: Path, at: int) -> bool:
    """In a child, which is killed before its ``at``-th operation on the records; whether it was."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    left = [at]

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        if name in ("open", "os.rename", "os.truncate") and "metrics.jsonl" in str(arguments[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    writer = MetricsWriter(folder / "metrics.jsonl")
    writer.resumed_at = 4
    writer.write("step", step=5, loss=0.5)
    os._exit(0)


@pytest.mark.in_turn
def test_a_kill_while_records_are_written_anew_loses_none(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(1, 7):
        writer.write("step", step=step, loss=1.0 / step)
    writer.close()
    at = 1
    while resume_and_die(tmp_path, at):
        assert [record["step"] for record in read_metrics(path)][:4] == [1, 2, 3, 4]
        at += 1
    assert at > 3, "nothing was killed"
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_records_after_the_checkpoint_are_those_of_the_resumed_run(tmp_path: Path):
    train(config_of(tmp_path, "run", save_every=2))
    train(config_of(tmp_path, "run", save_every=2, resume=checkpoint(tmp_path, "run", 4)))
    assert steps_of(tmp_path, "run") == [1, 2, 3, 4, 5, 6]
    train(config_of(tmp_path, "run"))
    assert steps_of(tmp_path, "run") == [1, 2, 3, 4, 5, 6], "a run that is not resumed begins anew"


@pytest.mark.in_turn
def test_a_new_run_does_not_mix_its_checkpoints_with_an_old_one_s(tmp_path: Path):
    train(config_of(tmp_path, "run", save_every=3))
    with pytest.raises(ConfigError, match=r"step-00000006' of an earlier run is there.*train\.resume = 'auto'"):
        train(config_of(tmp_path, "run", save_every=3))


def test_auto_takes_the_newest_complete_one(tmp_path: Path):
    config = config_of(tmp_path, "run", resume="auto")
    assert where_to_resume(config) is None
    for name in ("step-00000002", "step-00000010", "step-00000020.incomplete"):
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / name / "maingrad.json").touch()
    (tmp_path / "run" / "checkpoints" / "step-00000030").mkdir()  # the last that is left of one that was deleted
    (tmp_path / "run" / "checkpoints" / "step-00000010").rename(tmp_path / "run" / "checkpoints" / "step-00000011")
    shutil.copytree(tmp_path / "run/checkpoints/step-00000002", tmp_path / "run/checkpoints/step-best")  # the user's
    assert where_to_resume(config) == tmp_path / "run" / "checkpoints" / "step-00000011"
    for name in ("step-99999999", "step-100000000"):  # by their numbers, not their names
        (tmp_path / "run" / "checkpoints" / name).mkdir()
        (tmp_path / "run" / "checkpoints" / name / "maingrad.json").touch()
    assert where_to_resume(config) == tmp_path / "run" / "checkpoints" / "step-100000000"


@pytest.mark.in_turn
def test_a_checkpoint_that_a_save_left_beside_its_place_is_gone_on_from(tmp_path: Path):
    train(config_of(tmp_path, "run", save_every=3))
    newest = Path(checkpoint(tmp_path, "run", 6))
    left_by_a_save(newest, f"{newest.name}.incomplete")
    assert where_to_resume(config_of(tmp_path, "run", resume="auto")) == newest
    assert len(train(config_of(tmp_path, "run", resume=str(newest), steps=8)).losses) == 2


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "section, changed, message",
    [
        ("optimizer", {"lr": 1e-4}, "optimizer.lr = 0.0001: the run in '.*' had 0.003"),
        ("train", {"seed": 3}, "train.seed = 3: the run in '.*' had 0"),
        ("model", {"dropout": 0.2}, "model.dropout = 0.2: the run in '.*' had 0.1"),
        ("data", {"max_tokens": 1000}, "data.max_tokens = 1000: the run in '.*' had None"),
    ],
)
@pytest.mark.sampled(1)
def test_another_run_is_refused(tmp_path: Path, section: str, changed: dict[str, Any], message: str):
    train(config_of(tmp_path, "run", save_every=6))
    config = config_of(tmp_path, "rest", resume=checkpoint(tmp_path, "run", 6))
    config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **changed)})
    with pytest.raises(ConfigError, match=message):
        train(config)


@pytest.mark.parametrize("part, at", [("training", 10), ("validation", -10)])
@pytest.mark.sampled(1)
def test_other_data_are_refused_by_name(tmp_path: Path, part: str, at: int):
    config = config_of(tmp_path, "run", save_every=6)
    text = Path(config.data.paths[0])
    assert train(config).steps == 6
    resumed = config_of(tmp_path, "rest", resume=checkpoint(tmp_path, "run", 6), steps=8)
    content = bytearray(text.read_bytes())
    content[at] ^= 1
    text.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"step-00000006': when it was written the {part} data had other tokens"):
        train(resumed)
    text.write_bytes(content[:-100])
    with pytest.raises(ConfigError, match=r"the training data had \d+ tokens, and now \d+: .*resume_with_other_data"):
        train(resumed)
    accepted = {"resume": resumed.train.resume, "steps": 8, "resume_with_other_data": True}
    assert len(train(config_of(tmp_path, "rest", **accepted)).losses) == 2


@pytest.mark.in_turn
def test_other_borders_of_documents_are_refused_where_they_matter(tmp_path: Path):
    """The same tokens, cut into other documents: rows under "mask" are others, and those of "join" are not."""
    ids = np.arange(2600) % 250

    def cut(*places: int) -> None:
        write_indexed(tmp_path / "ids", np.split(ids, places), dtype="uint8")

    def config(out: str, documents: str, **settings: Any) -> Config:
        data = {"source": "megatron", "paths": [str(tmp_path / "ids")], "documents": documents}
        train = {"steps": 3, "eval_every": 3, "out_dir": str(tmp_path / out), **settings}
        return tiny_config(tmp_path, data=data, train=train, optimizer={"warmup_steps": 1})

    for documents in ("join", "mask"):
        cut(1000, 2000)
        train(config(documents, documents, save_every=2, steps=2))
    resume = {name: str(tmp_path / name / "checkpoints/step-00000002") for name in ("join", "mask")}
    assert len(train(config("same", "mask", resume=resume["mask"])).losses) == 1
    cut(1000, 2001)
    assert len(train(config("rest", "join", resume=resume["join"])).losses) == 1
    with pytest.raises(ConfigError, match=r"the training data had other borders of documents"):
        train(config("other", "mask", resume=resume["mask"]))


@pytest.mark.in_turn
def test_a_longer_run_goes_on_with_its_own_schedule(tmp_path: Path):
    """Half a cosine over the new number of steps, from the first step on that is taken again."""
    train(config_of(tmp_path, "run", save_every=6))
    train(config_of(tmp_path, "run", save_every=6, resume="auto", steps=12))
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    rates = {record["step"]: record["lr"] for record in records if record["kind"] == "step"}
    for taken in range(6, 12):
        assert rates[taken + 1] == pytest.approx(3e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * taken / 12)) / 2))


@pytest.mark.slow
def test_a_longer_run_may_follow(tmp_path: Path):
    train(config_of(tmp_path, "run", save_every=6))
    longer = config_of(tmp_path, "rest", resume=checkpoint(tmp_path, "run", 6), steps=8)
    assert (train(longer).steps, len(train(longer).losses)) == (8, 2)


def test_what_is_no_checkpoint_of_a_run(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"train\.resume = '.*nowhere': there is no such folder"):
        train(config_of(tmp_path, "run", resume=str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=re.escape(f"train.resume = '{tmp_path / 'empty'}': ")):
        train(config_of(tmp_path, "run", resume=str(tmp_path / "empty")))
    config = config_of(tmp_path, "run", resume=str(tmp_path / "weights"))
    plain: nn.Module = build_model(config.model, seed=0)
    save_checkpoint(tmp_path / "weights", plain)
    with pytest.raises(ConfigError, match=r"train\.resume = '.*weights': "):
        train(config)


def test_each_key_of_the_model_and_the_data_stays_and_others_may_change(tmp_path: Path):
    """Of a checkpoint with the state of a run, whose manifest is read alone."""
    config = config_of(tmp_path, "run")
    saved = config_to_dict(config)
    del saved["model"]["rotary_base"]  # as a checkpoint of before this key was added
    extra = {"step": 3, "seconds": 1.0, "schedule": {}, "config": saved}
    path = tmp_path / "saved"
    save_checkpoint(path, nn.Linear(2, 2), extra=extra)

    def check(section: str, changed: dict[str, Any], *, other_data: bool = False) -> None:
        tables = {"train": dataclasses.replace(config.train, resume_with_other_data=other_data)}
        tables[section] = dataclasses.replace(tables.get(section, getattr(config, section)), **changed)
        check_resume(path, dataclasses.replace(config, **tables), {})

    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("model", {"num_layers": 3}),
        ("model", {"rotary_base": 5e5}),
        ("model", {"param_dtype": "float32"}),
        ("optimizer", {"betas": (0.8, 0.9)}),
        ("train", {"global_batch_size": 48}),
        ("train", {"sequence_length": 12}),
        ("train", {"seed": 7}),
    )
    for section, changed in changes:
        for other_data in (False, True):
            with pytest.raises(ConfigError, match=f"{section}.{next(iter(changed))} = .* cannot go on with another"):
                check(section, changed, other_data=other_data)
    with pytest.raises(ConfigError, match=r"data\.documents = 'mask': .* cannot go on with another"):
        check("data", {"documents": "mask"})
    check("data", {"documents": "mask"}, other_data=True)
    check("model", {"fuse_wgrad_accumulation": False})
    check("model", {"fused_loss": True})
    check("model", {"delay_wgrad_layers": 1})
    for key, value in (("save_hugging_face", False), ("trust_remote_code", True)):
        config = dataclasses.replace(config, model=ModelConfig(hugging_face="somewhere"))
        save_checkpoint(path, nn.Linear(2, 2), extra=extra | {"config": config_to_dict(config)})
        check("model", {key: value})
    check("train", {"steps": 60, "num_microbatches": 4, "eval_every": 1, "out_dir": "elsewhere", "compile": True})


@pytest.mark.parametrize("part", ["training", "validation"])
def test_each_part_of_the_data_is_compared(part: str, tmp_path: Path):
    config = config_of(tmp_path, "run")
    data = load_corpus(config.data, sequence_length=24).digests("join")
    assert data.keys() == {"training", "validation"}
    saved = {name: digest._asdict() for name, digest in data.items()}
    extra = {"step": 3, "seconds": 1.0, "schedule": {}, "config": config_to_dict(config), "data": saved}
    save_checkpoint(tmp_path / "saved", nn.Linear(2, 2), extra=extra)
    check_resume(tmp_path / "saved", config, data)
    others = data | {part: data[part]._replace(sha256="0")}
    with pytest.raises(ConfigError, match=f"when it was written the {part} data had other tokens"):
        check_resume(tmp_path / "saved", config, others)
    check_resume(tmp_path / "saved", config_of(tmp_path, "run", resume_with_other_data=True), others)


@pytest.mark.parametrize("left_out", ["step", "seconds", "schedule", "config", None])
def test_state_without_one_part_is_none_of_a_run(left_out: str | None, tmp_path: Path):
    config = config_of(tmp_path, "run")
    extra = {"step": 3, "seconds": 1.0, "schedule": {}, "config": config_to_dict(config)}
    kept = {key: value for key, value in extra.items() if key != left_out}
    save_checkpoint(tmp_path / "saved", nn.Linear(2, 2), extra=kept if left_out else list(extra))
    with pytest.raises(ConfigError, match="a checkpoint of a model, but not one of maingrad train"):
        check_resume(tmp_path / "saved", config, {})
