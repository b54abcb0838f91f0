"""``maingrad train --dry-run``: what a run would hold and write, for any number of ranks, without one."""

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tiny_run import tiny_config, tiny_document, tiny_toml

from maingrad.launch import simulate
from maingrad.launch.cli import main
from maingrad.launch.config.file import structure
from maingrad.launch.config.run import ConfigError
from maingrad.launch.data.batches import DataError
from maingrad.launch.plan.dry_run import DryRun, _kept, dry_run, dry_run_tables
from maingrad.launch.plan.plan import plan_run
from maingrad.launch.plan.tables import format_bytes
from maingrad.launch.training.train import train


@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
@pytest.mark.parametrize("optimizer", [{}, {"name": "sgd"}, {"name": "sgd", "momentum": 0.0}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.sampled(1)
def test_a_checkpoint_has_so_many_bytes(parallel: str, optimizer: dict[str, Any], dtype: str, tmp_path: Path):
    config = tiny_config(
        tmp_path, parallel=parallel, optimizer=optimizer, model={"param_dtype": dtype}, train={"save_every": 6}
    )
    planned = dry_run(config, 2)
    simulate(train, 2, config)
    folder = tmp_path / "run" / "checkpoints" / "step-00000006"
    stored = sum(part.nbytes for file in folder.glob("rank-*.safetensors") for part in load_file(file).values())
    assert planned.checkpoint_bytes == stored
    assert planned.plan.rank_bytes.moments > 0 or optimizer.get("momentum") == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("optimizer", "states"), [("adamw", 2), ("lion", 1), ("muon", None)])
def test_bytes_of_a_checkpoint_by_hand(tmp_path: Path, optimizer: str, states: int | None, dtype: str):
    """Each element with its fp32 state, and with a master where it is in half precision itself."""
    config = tiny_config(tmp_path, optimizer={"name": optimizer}, model={"param_dtype": dtype})
    planned = dry_run(config, 2)
    count = planned.plan.parameters.total
    with_master = 2 + 4 if dtype == "bfloat16" else 4
    if states is None:  # one of each matrix in the blocks, two of what AdamW updates
        matrices = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
        assert planned.checkpoint_bytes == with_master * count + 4 * (2 * count - matrices)
    else:
        assert planned.checkpoint_bytes == (with_master + 4 * states) * count


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logging\.tensorboard = True: needs the package tensorboard"):
        dry_run(tiny_config(tmp_path, logging={"tensorboard": True}), 2)


def test_one_rank_is_planned_where_no_number_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(tiny_toml(tmp_path)), "--dry-run"]) == 0
    assert "the run: 6 steps on 1 rank(s)" in capsys.readouterr().out


def test_it_prints_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tiny_toml(tmp_path, train={"save_every": 2}, checkpoint={"keep_last": 1})
    assert main(["train", str(path), "--dry-run", "--ranks", "12", "--checkpoint.no-background"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for fact in (
        'parallel = "zero1" on 12 ranks',
        "the run: 6 steps on 12 rank(s)",
        "microbatches of a step │ 2 of 1 x 24",
        "tokens of a step │ 576",
        "steps of an epoch",
        "checkpoints on disk, at most │ 2:",
    ):
        assert fact in said, said
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_it_prints_the_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--mesh.tp", "2", "--mesh.cp", "2", "--mesh.dp", "3"]
    assert main(["train", str(tiny_toml(tmp_path)), "--dry-run", "--ranks", "12", *flags]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for fact in (
        'parallel = "zero1" on 12 ranks (tp 2, cp 2)',
        "at rest ┃ over 6 ranks",
        "of parameters that are not cut, over 2 times as many ranks",
        "sums and gathers of tensor-parallel ranks │ 2 │ 24",
        "parts of sequences for heads │ 2 │ 32",
        "the run: 6 steps on 12 rank(s)",
        "microbatches of a step │ 2 of 4 x 24",
        "tokens of a step │ 576",
    ):
        assert fact in said, said


def test_shards_of_what_is_not_cut_are_over_no_more_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", str(tiny_toml(tmp_path, parallel="fsdp")), "--ranks", "4", "--mesh.tp", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "not counted: the mean over tensor-parallel ranks of shards that are not cut" in said
    assert "times as many ranks" not in said


@pytest.mark.in_turn
def test_one_instance_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings: dict[str, Any] = {
        "ddp": {"num_distributed_optimizer_instances": 2},
        "train": {"steps": 2, "save_every": 2},
        "optimizer": {"warmup_steps": 0},
    }
    path = tiny_toml(tmp_path, parallel="hybrid", **settings)
    assert main(["train", str(path), "--dry-run", "--ranks", "4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    config = tiny_config(tmp_path, parallel="hybrid", **settings)
    planned = dry_run(config, 4)
    simulate(train, 4, config)
    files = list((tmp_path / "run/checkpoints/step-00000002").glob("rank-*.safetensors"))
    assert len(files) == 2, "parts of the first instance's ranks are all of the checkpoint"
    assert f"written by a rank │ {format_bytes(math.ceil(planned.checkpoint_bytes / 2))}" in said, said


def test_what_a_run_would_refuse_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match=r"train\.global_batch_size = 24: must be a multiple of .* = 2 \* 7 = 14"):
        dry_run(tiny_config(tmp_path), 7)
    with pytest.raises(ConfigError, match=r"profile\.ranks = \(3,\): names rank\(s\) \[3\] of 2"):
        dry_run(tiny_config(tmp_path, profile={"first_step": 1, "ranks": [3]}), 2)
    with pytest.raises(ConfigError, match="there is no such folder"):
        dry_run(tiny_config(tmp_path, train={"resume": str(tmp_path / "nowhere")}), 2)
    with pytest.raises(DataError):
        dry_run(tiny_config(tmp_path, data={"paths": [str(tmp_path / "missing.txt")]}), 2)
    with pytest.raises(ConfigError, match=r"profile\.memory = True: records CUDA's allocator"):
        dry_run(tiny_config(tmp_path, profile={"first_step": 1, "memory": True}), 2)
    few = {"max_tokens": 9, "order": "epochs", "paths": [str(tmp_path / "text.py")] * 5, "weights": [1] * 5}
    with pytest.raises(DataError, match=r"path 1 of data\.paths has no sequence: 9 training tokens"):
        dry_run(tiny_config(tmp_path, data=few), 2)
    np.full(400, 300, "<u2").tofile(tmp_path / "large.bin")
    with pytest.raises(DataError, match="token 300 is outside the vocabulary"):
        dry_run(tiny_config(tmp_path, data={"source": "tokens", "paths": [str(tmp_path / "large.bin")]}), 2)
    assert main(["train", str(tiny_toml(tmp_path)), "--ranks", "2"]) == 2
    assert "--ranks goes with --dry-run" in capsys.readouterr().err


@pytest.mark.in_turn
def test_a_resumption_that_a_run_would_refuse_is_refused(tmp_path: Path):
    train(tiny_config(tmp_path, train={"steps": 3, "save_every": 3}))
    again = {"resume": "auto", "save_every": 3}
    assert dry_run(tiny_config(tmp_path, train=again), 2).resumes_from is not None
    with pytest.raises(ConfigError, match=r"model\.dim = 64: the run in '.*' had 32"):
        dry_run(tiny_config(tmp_path, train=again, model={"dim": 64}), 2)
    masked = {
        "data": {"documents": "mask"},
        "train": {"steps": 3, "save_every": 3, "out_dir": str(tmp_path / "masked")},
    }
    train(tiny_config(tmp_path, **masked))
    assert dry_run(tiny_config(tmp_path, **masked | {"train": masked["train"] | again}), 2).resumes_from is not None
    text = tmp_path / "text.py"
    text.write_text(text.read_text().replace("x", "y", 1))
    with pytest.raises(ConfigError, match="the training data had other tokens"):
        dry_run(tiny_config(tmp_path, train=again), 2)


def test_a_model_of_hugging_face_is_checked(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaConfig(vocab_size=256, max_position_embeddings=20, **sizes).save_pretrained(tmp_path / "llama")
    model = {"hugging_face": str(tmp_path / "llama"), "pretrained": False}
    document = tiny_document(tmp_path)
    document["model"] = model
    with pytest.raises(ConfigError, match=r"sequence_length = 24: must be at most max_position_embeddings = 20"):
        dry_run(structure(document), 2)
    document["train"] = document["train"] | {"sequence_length": 16}
    assert dry_run(structure(document), 2).checkpoint_bytes > 0
    with pytest.raises(ConfigError, match=r"llama': has no safetensors; model\.pretrained = false draws"):
        dry_run(structure(document | {"model": model | {"pretrained": True}}), 2)
    with pytest.raises(ConfigError, match=r"there is no such folder \(working directory"):
        dry_run(structure(document | {"model": model | {"hugging_face": str(tmp_path / "lama")}}), 2)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
def test_eight_billion_parameters_on_1024_ranks_take_seconds(parallel: str, tmp_path: Path):
    model: dict[str, Any] = {"vocab_size": 128256, "dim": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8}
    model |= {"ffn_dim": 14336, "context_length": 8192, "param_dtype": "bfloat16"}
    train_settings = {"global_batch_size": 2048, "sequence_length": 500}
    config = tiny_config(
        tmp_path, parallel=parallel, model=model, train=train_settings, ddp={"bucket_size": 40_000_000}
    )
    began = time.process_time()
    planned = dry_run(config, 1024)
    assert time.process_time() - began < 10.0
    assert planned.plan.parameters.total == 8_030_261_248
    assert planned.checkpoint_bytes == 14 * planned.plan.parameters.total


@pytest.mark.parametrize(
    ("steps", "save_every", "keep", "count"),
    [
        (10, 3, {}, 4),
        (10, 5, {}, 2),
        (100, 5, {"keep_last": 2}, 3),
        (10, 5, {"keep_last": 4}, 2),
        (100, 5, {"keep_last": 2, "keep_every": 20}, 3 + 5),
        (100, 6, {"keep_last": 1, "keep_every": 20}, 2 + 1),
        (100, 6, {"keep_last": 1, "keep_every": 120}, 2),
    ],
)
def test_checkpoints_on_disk(tmp_path: Path, steps: int, save_every: int, keep: dict[str, int], count: int):
    config = tiny_config(tmp_path, train={"steps": steps, "save_every": save_every}, checkpoint=keep)
    run = DryRun(SimpleNamespace(config=config), 1000, 1024, None)  # type: ignore[arg-type]
    assert _kept(run) == f"{count}: {count}.0 KiB"


@pytest.mark.parametrize("save_every", [None, 4])
def test_figures_of_a_run_by_hand(tmp_path: Path, save_every: int | None):
    """24 sequences of 24 tokens a step, over four ranks in two instances and two microbatches."""
    config = tiny_config(tmp_path, parallel="hybrid", train={"steps": 1200, "save_every": save_every})
    plan = plan_run(config, 4)
    *_, table = dry_run_tables(DryRun(plan, 864, 3000, Path("a/folder") if save_every else None))
    assert table.title == "the run: 1,200 steps on 4 rank(s)"
    rows = dict(zip(*(list(column.cells) for column in table.columns), strict=True))
    expected = {
        "parameters": f"{plan.parameters.total:,}",
        "bytes on each rank, at rest": format_bytes(plan.rank_bytes.total),
        "microbatches of a step": "2 of 3 x 24",
        "tokens of a step": "576",
        "tokens of the training data": "864",
        "steps of an epoch": "1.5",
        "epochs of the run": "800.00",
        "bytes of a checkpoint": "2.9 KiB",
    }
    if save_every:
        expected |= {
            "written by a rank": "1.5 KiB",
            "checkpoints on disk, at most": f"300: {format_bytes(900_000)}",
            "goes on from": "a/folder",
        }
    assert rows == expected
