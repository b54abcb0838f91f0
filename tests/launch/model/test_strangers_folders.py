"""A Hugging Face folder, a run and a checkpoint of a stranger's: no code runs, and no link leads out of them."""

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_pages import leave_pictures_empty
from tiny_run import tiny_toml

from maingrad.launch.cli import main
from maingrad.launch.config.error import ConfigError
from maingrad.launch.model.hugging_face_folder import _check_no_code, check_weight_files, stays_inside

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({ran!r}).touch()

class StrangeConfig(LlamaConfig):
    model_type = "strange"

class Strange(LlamaForCausalLM):
    config_class = StrangeConfig
"""


@pytest.fixture(autouse=True)
def somebody_says_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    """``yes |`` in front of each command."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 1000))


@pytest.fixture(autouse=True)
def empty_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and links count here, and not what is drawn."""
    leave_pictures_empty(monkeypatch)


def folder_of(path: Path, **changes: Any) -> Path:
    """A folder with ``config.json`` alone."""
    transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | changes))
    return path


def plan_of(folder: Path) -> int:
    """Exit status of a plan of the model in ``folder``."""
    toml = folder.with_suffix(".toml")
    toml.write_text(f'[model]\nhugging_face = "{folder}"\npretrained = false\n')
    return main(["plan", str(toml), "--ranks", "1"])


@pytest.mark.parametrize(
    "key, size",
    [("hidden_size", 2**40), ("num_hidden_layers", 10**8), ("vocab_size", 2**62), ("intermediate_size", 2**23)],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])  # the second lists its layers when it is read
def test_a_size_of_which_no_model_is_built_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, size: int, model_type: str
) -> None:
    folder = folder_of(tmp_path / "hf", model_type=model_type, **{key: size})
    assert plan_of(folder) == 2
    assert f"its config.json has {key} = {size}: must be at most " in capsys.readouterr().err


def test_a_size_of_a_part_is_named_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_of(folder_of(tmp_path / "hf", text_config={"num_hidden_layers": 10**8})) == 2
    assert "its config.json has text_config.num_hidden_layers = 100000000: must be at" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[" * 100_000, "[1]", "{"])
def test_a_config_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    folder = folder_of(tmp_path / "hf")
    (folder / "config.json").write_text(content)
    assert plan_of(folder) == 2
    assert "its config.json cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", [{"num_attention_heads": 0}, {"hidden_size": "many"}, {"layer_types": 5}, {"rope_scaling": 3}], ids=str
)
@pytest.mark.sampled(4)
def test_values_that_make_no_model_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    folder = folder_of(tmp_path / "hf", **change)
    assert plan_of(folder) == 2
    said = capsys.readouterr().err
    assert f"model.hugging_face = '{folder}': transformers makes no model of its config.json: " in said


def a_strangers(path: Path, ran: Path) -> None:
    """Let the folder ask for code of its own, which leaves a trace where it runs."""
    (path / "strange.py").write_text(CODE.format(ran=str(ran)))
    settings = json.loads((path / "config.json").read_text())
    code = {"AutoConfig": "strange.StrangeConfig", "AutoModelForCausalLM": "strange.Strange"}
    (path / "config.json").write_text(json.dumps(settings | {"model_type": "strange", "auto_map": code}))


def toml_of(tmp_path: Path, source: Path, **model: Any) -> Path:
    toml = tiny_toml(tmp_path, train={"steps": 3, "save_every": 3})
    text = toml.read_text()
    begin, end = text.index("[model]"), text.index("[data]")
    keys = {"hugging_face": str(source), "pretrained": False, **model}
    lines = [f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in keys.items()]
    toml.write_text(text[:begin] + "[model]\n" + "\n".join(lines) + "\n" + text[end:])
    return toml


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run, whose folder of Hugging Face asks for code now."""
    assert main(["train", str(toml_of(tmp_path, folder_of(tmp_path / "source")))]) == 0
    a_strangers(tmp_path / "source", tmp_path / "ran")
    return tmp_path / "run"


@pytest.mark.in_turn
def test_no_command_runs_code_of_a_folder(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml, checkpoint = str(tmp_path / "tiny.toml"), trained / "checkpoints/step-00000003"
    recorded = json.loads((trained / "resolved_config.json").read_text())
    recorded["config"]["model"]["trust_remote_code"] = True  # a stranger may write so
    (trained / "resolved_config.json").write_text(json.dumps(recorded))
    for command in (
        ["train", toml, "--train.out-dir", str(tmp_path / "other")],
        ["train", toml, "--dry-run", "--train.out-dir", str(tmp_path / "other")],
        ["simulate", toml, "--ranks", "2", "--train.out-dir", str(tmp_path / "other")],
        ["plan", toml, "--ranks", "2"],
        ["export", str(checkpoint), str(tmp_path / "exported")],
    ):
        assert main(command) == 2, command
        said = capsys.readouterr().err
        assert "none runs unless you say so" in said and "model.trust_remote_code = true" in said, command
    assert main(["report", str(trained)]) == 0
    assert "MFU are left out: model.hugging_face" in (trained / "report.html").read_text()
    assert not (tmp_path / "ran").exists()
    assert sys.stdin.read(4) == "y\ny\n", "nobody has asked"


@pytest.mark.in_turn
def test_a_user_may_trust_a_folder(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source")
    a_strangers(source, tmp_path / "ran")
    assert main(["train", str(toml_of(tmp_path, source, trust_remote_code=True))]) == 0
    assert (tmp_path / "ran").exists()
    checkpoint, target = tmp_path / "run/checkpoints/step-00000003", tmp_path / "exported"
    assert main(["export", str(checkpoint), str(target)]) == 2, "the checkpoint cannot say so"
    assert main(["export", str(checkpoint), str(target), "--trust-remote-code"]) == 0
    assert (target / "config.json").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
def test_a_folder_names_no_kernels_of_strangers(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path / "source", **{key: "stranger/kernels"})
    assert main(["plan", str(toml_of(tmp_path, source)), "--ranks", "2"]) == 2
    assert f"not transformers' own ({key})" in capsys.readouterr().err


@pytest.mark.in_turn
def test_links_out_of_the_folder_are_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, secret = folder_of(tmp_path / "source"), tmp_path / "secret.json"
    secret.write_text('{"password": "x"}')
    for name in ("tokenizer.json", "generation_config.json", "vocab.json"):
        (source / name).symlink_to(secret)
    (source / "merges.txt").write_text("own")
    (source / "tokenizer_config.json").symlink_to("merges.txt")
    assert main(["train", str(toml_of(tmp_path, source))]) == 0
    checkpoint = tmp_path / "run/checkpoints/step-00000003"
    assert main(["export", str(checkpoint), str(tmp_path / "exported")]) == 0
    said = capsys.readouterr().err
    for name in ("tokenizer.json", "generation_config.json", "vocab.json"):
        assert f"'{name}' is a link out of '{source}' and was not copied" in said
    for folder in (tmp_path / "run/hugging_face", tmp_path / "exported"):
        files = {path.name: path.read_text() for path in folder.glob("*.*") if path.suffix != ".safetensors"}
        assert not any("password" in text for text in files.values())
        assert files["merges.txt"] == files["tokenizer_config.json"] == "own"
        assert not {"tokenizer.json", "vocab.json"} & set(files)


@pytest.mark.in_turn
def test_a_snapshot_of_the_cache_keeps_its_files(tmp_path: Path) -> None:
    """There, files are links to ``blobs``."""
    repository = tmp_path / "models--somebody--model"
    source, blobs = folder_of(repository / "snapshots" / "0123"), repository / "blobs"
    blobs.mkdir()
    (blobs / "abcd").write_text("own")
    (source / "merges.txt").symlink_to("../../blobs/abcd")
    (tmp_path / "secret").write_text("password")
    (blobs / "ef").symlink_to(tmp_path / "secret")
    (source / "vocab.json").symlink_to("../../blobs/ef")
    assert main(["train", str(toml_of(tmp_path, source))]) == 0
    assert (tmp_path / "run/hugging_face/merges.txt").read_text() == "own"
    assert not (tmp_path / "run/hugging_face/vocab.json").exists()


def test_a_list_of_weights_names_files_of_its_folder(tmp_path: Path) -> None:
    files = {str(number): f"model-{number}.safetensors" for number in range(20)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files | {"x": "../other/model.safetensors"}}))
    with pytest.raises(ConfigError, match="has no safetensors"):
        check_weight_files(tmp_path)
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(ConfigError, match="which is no file of its folder"):
        check_weight_files(tmp_path)
    index.write_text(json.dumps({"weight_map": files}))
    check_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("folder", "inside"),
    [("models--a--b/snapshots/01", True), ("own/snapshots/01", False), ("models--a--b/other/01", False)],
)
def test_links_to_blobs_are_a_caches_alone(folder: str, inside: bool, tmp_path: Path) -> None:
    source = tmp_path / folder
    blobs = source.parents[1] / "blobs"
    for each in (source, blobs):
        each.mkdir(parents=True)
    (blobs / "ab").write_text("{}")
    (source / "tokenizer.json").symlink_to("../../blobs/ab")
    assert stays_inside(source / "tokenizer.json") is inside


@pytest.mark.in_turn
def test_a_report_replaces_links_and_not_what_they_link_to(tmp_path: Path) -> None:
    assert main(["train", str(tiny_toml(tmp_path, train={"steps": 3}))]) == 0
    run, names = tmp_path / "run", ("report.html", "loss.png", "overlap.png", "overlap.json")
    for name in names:
        (tmp_path / f"mine-{name}").write_text("mine")
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(tmp_path / f"mine-{name}")
    assert main(["report", str(run)]) == 0
    assert [(tmp_path / f"mine-{name}").read_bytes() for name in names] == [b"mine"] * len(names)
    assert not (run / "report.html").is_symlink() and "<html" in (run / "report.html").read_text()
    assert not list(run.glob(".*")), "nothing is left beside"


@pytest.mark.in_turn
def test_a_copied_run_writes_through_no_link(tmp_path: Path) -> None:
    run, toml = tmp_path / "run", tiny_toml(tmp_path, train={"steps": 3})
    run.mkdir()
    for name in ("resolved_config.json", "metrics.jsonl", "metrics.jsonl.incomplete"):
        (tmp_path / f"mine-{name}").write_text("mine")
        (run / name).symlink_to(tmp_path / f"mine-{name}")
    assert main(["train", str(toml)]) == 0
    assert {path.read_text() for path in tmp_path.glob("mine-*")} == {"mine"}
    shutil.rmtree(run)


def test_code_and_kernels_of_parts_are_refused_too() -> None:
    """A class that transformers has no causal model for, and kernels that only a part's configuration names."""
    code = {"AutoModelForCausalLM": "strange.Strange"}
    parts = {"text_config": SimpleNamespace, "vision_config": SimpleNamespace}
    for settings, what in (
        (SimpleNamespace(sub_configs={}, auto_map=code), "auto_map"),
        (SimpleNamespace(sub_configs=parts, text_config=SimpleNamespace(_attn_implementation="a/b")), "attn"),
        (SimpleNamespace(sub_configs=parts, vision_config=SimpleNamespace(_experts_implementation="a/b")), "experts"),
    ):
        with pytest.raises(ConfigError, match=rf"not transformers' own \({what}"):
            _check_no_code("folder", settings)
    own = SimpleNamespace(_attn_implementation="sdpa", _experts_implementation=None)
    _check_no_code("folder", SimpleNamespace(sub_configs=parts, text_config=own, auto_map={"AutoConfig": "a.B"}))
    known = transformers.LlamaConfig(auto_map=code)
    _check_no_code("folder", known)  # transformers' own class is taken
