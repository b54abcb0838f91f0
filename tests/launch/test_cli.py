"""The command line end to end, in separate processes: one rank, torchrun, simulated ranks, interrupted runs."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from python_processes import python_process, run_python
from safetensors.torch import load_file
from tiny_run import tiny_toml

from maingrad.ddp import CollectiveError, save_checkpoint
from maingrad.launch.cli import main
from maingrad.launch.config.file import load_config
from maingrad.launch.data.indexed import read_indexed
from maingrad.launch.model.gpt import build_model
from maingrad.launch.simulation.simulate import SimulatedRankError
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.signals import stop_on_signals

MAINGRAD = ["-m", "maingrad"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "maingrad"]
LONG = ["--train.steps", "1000000"]


def records(folder: Path) -> dict[str, Any]:
    """The last record of each kind."""
    return {record["kind"]: record for record in read_metrics(folder / "run" / "metrics.jsonl")}


@pytest.mark.in_turn
def test_train_alone(tmp_path: Path):
    done = run_python(*MAINGRAD, "train", tiny_toml(tmp_path), "--train.steps", "4")
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step") and "ETA" in line] == [
        *("1/4", "2/4", "3/4", "4/4"),
    ]
    assert "bigram" not in done.stdout, "the yardstick of the demonstration alone"
    found = records(tmp_path)
    assert found["observed"]["world_size"] == 1
    assert found["final"]["step"] == 4
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "metrics.jsonl",
        "resolved_config.json",
        "loss.png",
        "overlap.png",
        "overlap.json",
    }
    assert json.loads((tmp_path / "run" / "resolved_config.json").read_text())["config"]["train"]["steps"] == 4


@pytest.mark.slow
def test_torchrun_and_simulated_ranks_end_with_the_same_weights(tmp_path: Path):
    path = tiny_toml(tmp_path, model={"param_dtype": "bfloat16", "dropout": 0.1}, train={"num_microbatches": 4})
    done = run_python(*TORCHRUN, "train", path)
    assert done.returncode == 0, done.stderr
    found = records(tmp_path)
    observed = found["observed"]
    assert (observed["world_size"], observed["backend"]) == (2, "gloo")
    assert (observed["microbatches_no_sync"], observed["microbatches_synced"]) == (3, 1)
    num_buckets = observed["num_buckets"]
    assert observed["collectives"] == {"all_gather": num_buckets, "reduce_scatter": num_buckets}
    assert observed["main_grad_dtypes"] == {"float32": 15}
    assert found["timeline"]["buckets"][0]["finished"] >= found["timeline"]["buckets"][0]["launched"]
    assert done.stdout.count("validation loss") == 2, "rank 0 alone speaks"

    simulated = run_python(
        *MAINGRAD, "simulate", path, "--ranks", "2", "--train.out-dir", tmp_path / "simulated" / "run"
    )
    assert simulated.returncode == 0, simulated.stderr
    assert records(tmp_path / "simulated")["final"]["weights_sha256"] == found["final"]["weights_sha256"]


@pytest.mark.in_turn
def test_torchrun_ends_with_the_cause(tmp_path: Path):
    done = run_python(*TORCHRUN, "train", tiny_toml(tmp_path), "--train.global-batch-size", "6", timeout=100.0)
    assert done.returncode != 0
    cause = "maingrad: error: train.global_batch_size = 6: must be a multiple of train.num_microbatches * ranks"
    assert (done.stdout + done.stderr).count(cause) == 1
    assert done.stderr.splitlines()[-2].strip().startswith(f"traceback : {cause}")


def test_an_error_file_that_a_cluster_names_gets_the_mistake_of_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without a launcher nobody makes a folder for each attempt: the file's folders are the cluster's."""
    file = tmp_path / "log" / "termination"
    file.parent.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for ranks in ("7", "11"):
        file.unlink(missing_ok=True)
        assert main(["plan", str(tiny_toml(tmp_path)), "--ranks", ranks]) == 2
        assert "must be a multiple of" in json.loads(file.read_text())["message"]["message"]
    assert [path.name for path in tmp_path.iterdir() if "error" in path.name] == []


def test_each_rank_of_a_node_makes_one_mistake_and_torchrun_prints_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """torchrun prints the texts of all files there are, and takes the earliest whole second for the cause."""
    for rank in ("1", "0", "2"):
        file = tmp_path / "attempt_0" / rank / "error.json"
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main(["plan", str(tiny_toml(tmp_path)), "--ranks", "7"]) == 2
    (found,) = (tmp_path / "attempt_0").rglob("error.json")
    assert found.parent.name == "1", "the first that has ended"
    said = json.loads(found.read_text())["message"]
    assert "maingrad: error: train.global_batch_size = 24: must be" in said["message"]
    assert said["extraInfo"]["py_callstack"] == said["message"]
    assert time.time() - 60 < int(said["extraInfo"]["timestamp"]) < int(time.time())


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_a_run_is_given_and_how_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interrupted: bool
):
    """The loop is replaced: the command's own part is seen."""
    given: list[Any] = []

    def train(config: Any, *, stop: Any) -> Any:
        given.append((config, stop))
        return types.SimpleNamespace(interrupted=interrupted, is_main=len(given) < 3)

    def simulate(job: Any, ranks: int, config: Any, **options: Any) -> Any:
        given.append((ranks, options["seed"]))
        return [job(config, stop=options["stop"]), None]

    def draw(folder: Path) -> None:
        given.append(folder)

    @contextmanager
    def group(device: str) -> Iterator[None]:
        before.append(device)
        yield

    before: list[str] = []
    runtime = "maingrad.launch.training.runtime"
    monkeypatch.setattr(f"{runtime}.let_kernels_start_beside_host_memory", lambda: before.append("memory"))
    monkeypatch.setattr(f"{runtime}.process_group_from_env", group)
    monkeypatch.setattr("maingrad.launch.training.train.train", train)
    monkeypatch.setattr("maingrad.launch.simulation.simulate.simulate", simulate)
    monkeypatch.setattr("maingrad.launch.report.page.print_report", draw)
    toml = str(tiny_toml(tmp_path, train={"device": "cuda"}))
    wanted, drawn = (130, []) if interrupted else (0, [tmp_path / "run"])
    assert main(["simulate", toml, "--ranks", "2", "--schedule-seed", "5", "--train.steps", "9"]) == wanted
    assert given[0] == (2, 5)
    (config, stop), *rest = given[1:]
    assert (config.train.steps, config.train.device, stop.requested) == (9, "cpu", False)
    assert rest == drawn
    given[:] = []
    assert main(["train", toml, "--train.device", "cpu", "--train.steps", "9"]) == wanted
    (config, stop), *rest = given
    assert (config.train.steps, config.train.device, stop.requested) == (9, "cpu", False)
    assert rest == drawn
    given[:] = [None, None]
    assert main(["train", toml, "--train.device", "cpu"]) == wanted
    assert given[3:] == [], "rank 0 alone draws"
    assert main(["train", toml]) in (0, 130)
    assert before == ["memory", "cpu", "memory", "cpu", "memory", "cuda"], "memory is taken before CUDA is used"


@pytest.mark.in_turn
def test_a_checkpoint_of_a_run_becomes_a_file_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = ["--train.save-every", "3", "--train.steps", "3", "--model.param-dtype", "bfloat16"]
    assert main(["simulate", str(tiny_toml(tmp_path)), "--ranks", "2", *settings]) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    capsys.readouterr()
    for name, arguments, dtype in (("own", [], torch.bfloat16), ("masters", ["--dtype", "float32"], torch.float32)):
        target = tmp_path / f"{name}.safetensors"
        assert main(["export", str(checkpoint), str(target), *arguments]) == 0
        assert capsys.readouterr().out.strip() == str(target)
        weights = load_file(target)
        assert {tensor.dtype for tensor in weights.values()} == {dtype}
        model = build_model(load_config(tiny_toml(tmp_path), settings).model, seed=0)
        assert {key: tensor.shape for key, tensor in weights.items()} == {
            key: parameter.shape for key, parameter in model.named_parameters()
        }
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "x.safetensors")]) == 2
    assert str(tmp_path / "run") in capsys.readouterr().err
    assert main(["export", str(checkpoint), str(tmp_path / "x.safetensors"), "--train.steps", "3"]) == 2


@pytest.mark.parametrize("simulated", [False, True])
def test_a_rank_that_is_left_alone_says_so_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], simulated: bool
):
    """It is no mistake of the configuration, which has status 2. An error of the program keeps its traceback."""

    def fail(*_: Any, **__: Any) -> Any:
        if simulated:
            raise SimulatedRankError(1, error) from error
        raise error

    monkeypatch.setattr("maingrad.launch.training.train.train", fail)
    monkeypatch.setattr("maingrad.launch.simulation.simulate.simulate", fail)
    toml = str(tiny_toml(tmp_path))
    command = ["simulate", toml, "--ranks", "2"] if simulated else ["train", toml]
    error: Exception = CollectiveError("rank 1 is gone")
    assert main(command) == 1
    assert capsys.readouterr().err == "maingrad: error: rank 1 is gone\n"
    error = KeyError("of the loop")
    with pytest.raises(SimulatedRankError if simulated else KeyError):
        main(command)


def test_what_an_export_refuses_is_answered_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_checkpoint(tmp_path / "c", torch.nn.Linear(2, 2))
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "c/rank-00000.safetensors")]) == 2
    assert "is a file of a checkpoint: write to another" in capsys.readouterr().err


def test_the_text_of_a_line_may_have_another_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jsonl").write_text('{"content": "one", "text": "not this"}\n')
    prefix, file = str(tmp_path / "set"), str(tmp_path / "a.jsonl")
    assert main(["tokenize", prefix, file, "--key", "content"]) == 0
    assert bytes(read_indexed(tmp_path / "set").tokens[:].tolist()) == b"one"
    for suffix in (".bin", ".idx"):
        capsys.readouterr()
        assert main(["tokenize", prefix + suffix, file]) == 2
        assert f"set{suffix}' is to be a prefix" in capsys.readouterr().err


def test_tuning_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("maingrad.kernels.compat.HAS_TRITON", False)
    assert main(["tune"]) == 2
    assert "Triton is not installed" in capsys.readouterr().err


def test_plan_prints_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", str(tiny_toml(tmp_path)), "--ranks", "3", "--ddp.bucket-size", "None"]) == 0
    out = " ".join(capsys.readouterr().out.split())  # a title is as wide as its table
    assert "1 buckets in launch order" in out
    assert gc.isenabled(), "imports are done"
    assert "reduce-scatter" in out and "over 3 ranks" in out
    assert "head.weight .. embedding.weight (15)" in out
    assert main(["plan", str(tiny_toml(tmp_path)), "--ranks", "3", "--parallel", "fsdp"]) == 0
    out = capsys.readouterr().out
    assert "3 units in the order of a forward" in out
    assert "reduce-scatter" in out


@pytest.mark.parametrize(
    "arguments, status, said",
    [
        ([], 2, "Expected one of {train, plan, simulate"),
        (["trian"], 2, "there is no command 'trian': did you mean 'train'?"),
        (["frobnicate"], 2, "Expected one of {train, plan, simulate"),
        (["train", "FOLDER"], 2, "is a folder, and cannot be read: name a configuration file in it"),
        (["train"], 2, "CONFIG.toml"),
        (["train", "CONFIG", "--ranks", "2"], 2, "--ranks goes with --dry-run; a run has as many ranks as torchrun"),
        (["train", "CONFIG", "--ranks", "0", "--dry-run"], 2, "--ranks must be at least 1, got 0"),
        (["plan", "CONFIG", "--ranks", "1"], 0, "over 1 rank"),
        (["tokenize", "prefix"], 2, "tokenize takes a prefix and files; got no files"),
        (["report"], 2, "report takes folders of runs; got none"),
        (["report", "--help", "x.toml"], 0, "folders of runs"),
        (["plan", "CONFIG", "--ranks", "0"], 2, "must be at least 1, got 0"),
        (["plan", "CONFIG", "--ranks", "7"], 2, "must be a multiple of train.num_microbatches * ranks"),
        (["plan", "CONFIG", "--ranks", "3", "--parallel", "hybrid"], 2, "instances = 2: must divide the 3 rank(s)"),
        (["plan", "CONFIG", "--ranks", "3", "--parallel", "zero3"], 2, "parallel = 'zero3': must be one of 'ddp'"),
        (["train", "CONFIG", "--train.resume", "nowhere"], 2, "train.resume = 'nowhere': there is no such folder"),
        (["export", "nowhere", "x.safetensors"], 2, "nowhere"),
        (["train", "CONFIG", "--ddp.bucket-sise", "3"], 2, "did you mean 'ddp.bucket_size'?"),
        (["train", "nowhere.toml"], 2, "configuration file 'nowhere.toml' does not exist"),
        (["train", "CONFIG", "--data.paths", "nowhere.txt"], 2, "data file 'nowhere.txt' does not exist"),
        (["train", "CONFIG", "--help"], 0, "--ddp.bucket-size"),
        (["train", "nowhere.toml", "--help"], 2, "configuration file 'nowhere.toml' does not exist"),
        (["verify", "program.py:made", "--help"], 0, "--num-microbatches"),
        (["plan", "CONFIG", "-h"], 0, "Elements after which a bucket is closed"),
        (["--help"], 0, "simulate"),
        (["tune", "--help"], 0, "tuned.csv"),
        (["tune", "--dim", "3"], 2, "tune has no '--dim': maingrad tune --help lists what it has"),
        (
            ["simulate", "CONFIG", "--ranks", "2", "--data.source", "tokens", "--data.paths", "TOKENS"],
            2,
            "token 60000 is outside the vocabulary: model.vocab_size = 256; raise it to at least 60001",
        ),
        (["simulate", "CONFIG", "--ranks", "5"], 2, "must be a multiple of"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
):
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(b"\x60\xea" * 4000)
    paths = {"CONFIG": str(tiny_toml(tmp_path)), "TOKENS": str(tokens), "FOLDER": str(tmp_path)}
    try:
        ended: Any = main([paths.get(argument, argument) for argument in arguments])
    except SystemExit as end:
        ended = end.code
    captured = capsys.readouterr()
    assert ended == status
    assert said in (captured.err if status else captured.out)
    assert "Traceback" not in captured.err
    if status and arguments[:1] == ["simulate"]:
        assert captured.err.count("\n") == 1


@pytest.mark.in_turn
def test_help_and_mistakes_do_not_wait_for_torch():
    for argument, status in (("--help", 0), ("trian", 2)):
        code = f"""
import sys
from maingrad.launch.cli import main
try:
    main([{argument!r}])
except SystemExit as end:
    assert end.code == {status}, end.code
assert "torch" not in sys.modules
"""
        # A new interpreter: ``run_python``'s processes start with torch imported.
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.in_turn
def test_a_refusal_imports_nothing_that_trains(tmp_path: Path):
    """What trains takes longer to import than torch."""
    os.mkfifo(tmp_path / "pipe.toml")
    toml, nothing = str(tiny_toml(tmp_path)), tmp_path / "nothing"
    for name, text in {"nothing": "", "cut_off": '{"kind": "st'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
    refused = [
        ["train", toml, "--train.stepz", "3"],
        ["train", "--dry-run", str(tmp_path / "pipe.toml")],
        ["train", "--dry-run", "/dev/zero"],
        ["plan", toml, "--ranks", "2", "--model.num-layers", "100000000"],
        ["simulate", toml, "--ranks", "2", "--optimizer.lr", "inf"],
        ["report", str(tmp_path)],
        ["report", str(nothing), str(nothing)],
        ["report", str(tmp_path / "cut_off")],
    ]
    code = f"""
import sys
from maingrad.launch.cli import main
for arguments in {refused!r}:
    assert main(arguments) == 2, arguments
    heavy = {{"torch._dynamo", "maingrad.ddp.wrapper", "maingrad.te_integration", "jinja2", "matplotlib"}}
    assert heavy.isdisjoint(sys.modules), (arguments, heavy & set(sys.modules))
    print(arguments[0])
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.count("\n") == len(refused) == done.stderr.count("maingrad: error: "), done.stderr


def interrupt(command: list[str | Path], folder: Path, number: signal.Signals, *, group: bool) -> tuple[int, str]:
    """Start a long run, send it a signal once it trains, and return its exit status and output."""
    with python_process(*command) as started:
        metrics, pid = folder / "run" / "metrics.jsonl", started.process.pid
        assert pid is not None
        deadline = time.monotonic() + 60
        while not metrics.exists() or '"step"' not in metrics.read_text():
            assert started.process.is_alive(), started.ended(0)
            assert time.monotonic() < deadline, "the run never began"
            time.sleep(0.05)
        if group:  # what a terminal does: every process of the group gets the signal
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
        ended = started.ended(20)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.sampled(1)
def test_a_signal_ends_a_run_cleanly(tmp_path: Path, number: signal.Signals):
    status, output = interrupt([*MAINGRAD, "train", tiny_toml(tmp_path), *LONG], tmp_path, number, group=False)
    assert status == 130
    assert "Traceback" not in output
    assert f"interrupted after step {records(tmp_path)['interrupted']['step']}" in output
    assert records(tmp_path)["interrupted"]["signal"] == number.name


@pytest.mark.parametrize("group", [True, False], ids=["terminal", "torchrun-alone"])
@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_cleanly(tmp_path: Path, group: bool):
    """From a terminal every process gets the signal; ``kill`` reaches torchrun alone, which passes it on."""
    # torchrun itself ends with a traceback, so the ranks' output goes to separate files.
    logs = ["--redirects", "3", "--log-dir", tmp_path / "logs"]
    command = [*TORCHRUN[:-2], *logs, *TORCHRUN[-2:], "train", tiny_toml(tmp_path), *LONG]
    status, _ = interrupt(command, tmp_path, signal.SIGINT, group=group)
    assert status != 0
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["kind"] == "interrupted"
    said = {path: path.read_text() for path in (tmp_path / "logs").rglob("std*.log")}
    assert len(said) == 4, "two ranks, stdout and stderr each"
    assert not [path for path, text in said.items() if "Traceback" in text or "terminate called" in text]
    assert any("interrupted after step" in text for text in said.values())


def test_a_second_ctrl_c_insists(monkeypatch: pytest.MonkeyPatch):
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # torchrun sends the first signal again
        assert stop.requested
        assert stop.signal_name == "SIGINT"
        monkeypatch.setattr("maingrad.launch.training.signals._INSIST_AFTER", -1.0)
        signal.raise_signal(signal.SIGTERM)  # a scheduler repeats what it has said
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_are_put_back(fails: bool):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="of a run") if fails else nullcontext(), stop_on_signals():
        assert signal.getsignal(signal.SIGINT) is not before[0]
        if fails:
            raise RuntimeError("of a run")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
