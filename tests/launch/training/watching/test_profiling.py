"""``[profile]``: traces of chosen steps and ranks, and snapshots of CUDA's memory."""

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import tiny_config
from torch.profiler import ProfilerActivity

from maingrad.launch import simulate
from maingrad.launch.config.run import Config, ConfigError
from maingrad.launch.training.runtime import Runtime
from maingrad.launch.training.train import train
from maingrad.launch.training.watching import profiling
from maingrad.launch.training.watching.profiling import StepProfiler


def config_of(folder: Path, profile: dict[str, Any], **train_settings: Any) -> Config:
    return tiny_config(folder, model={"num_layers": 1}, train=train_settings, profile=profile)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "profile").iterdir())


def count_of(path: Path, operator: str) -> int:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(event.get("name") == operator for event in events)


@pytest.mark.parametrize(("ranks", "names"), [([0], ["trace-step-0-rank-0.json.gz"]), ([1], [])])
def test_steps_are_counted_from_0(ranks: list[int], names: list[str], tmp_path: Path):
    runtime = Runtime(0, 2, torch.device("cpu"))
    profiler = StepProfiler(config_of(tmp_path, {"first_step": 0, "num_steps": 1, "ranks": ranks}), runtime)
    for step in range(2):
        with profiler.step(step):
            torch.ones(2).cos()
    folder = tmp_path / "run" / "profile"
    assert [path.name for path in folder.glob("*")] == names
    assert [count_of(folder / name, "aten::cos") for name in names] == [1] * len(names)


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.sampled(1)
def test_a_trace_has_the_steps_that_were_asked_for(num_steps: int, tmp_path: Path):
    train(config_of(tmp_path, {"first_step": 2, "num_steps": num_steps}, eval_every=100))
    assert files(tmp_path) == ["trace-step-2-rank-0.json.gz"]
    attentions = count_of(tmp_path / "run/profile/trace-step-2-rank-0.json.gz", "aten::scaled_dot_product_attention")
    assert attentions == num_steps * 2, "one block, two microbatches"
    assert b"Input Dims" in gzip.decompress((tmp_path / "run/profile/trace-step-2-rank-0.json.gz").read_bytes())


@pytest.mark.in_turn
def test_each_rank_that_was_named_writes_a_trace(tmp_path: Path):
    simulate(train, 3, config_of(tmp_path, {"first_step": 1, "num_steps": 1, "ranks": [2]}))
    assert files(tmp_path) == ["trace-step-1-rank-2.json.gz"]
    with pytest.raises(ConfigError, match=r"profile\.ranks = \(2,\): names rank\(s\) \[2\] of 1"):
        train(config_of(tmp_path, {"first_step": 1, "ranks": [2]}))


@pytest.mark.in_turn
@pytest.mark.parametrize("saved, names", [(3, ["2", "3"]), (4, ["2"])])
@pytest.mark.sampled(1)
def test_a_resumed_run_profiles_the_steps_that_were_asked_for(saved: int, names: list[str], tmp_path: Path):
    """And neither other steps under their name, nor once more in the place of those that were recorded."""
    profile = {"first_step": 2, "num_steps": 2}
    train(config_of(tmp_path, profile, steps=saved, save_every=saved, eval_every=100))
    path = tmp_path / "run/profile/trace-step-2-rank-0.json.gz"
    before = path.read_bytes()
    train(config_of(tmp_path, profile, steps=6, save_every=saved, eval_every=100, resume="auto"))
    assert files(tmp_path) == [f"trace-step-{name}-rank-0.json.gz" for name in names]
    assert path.read_bytes() == before


class Fails:
    def update(self, status: Any) -> None:
        if status.step == 3:
            raise RuntimeError("at step 3")

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


def test_a_run_that_fails_leaves_the_trace_so_far(tmp_path: Path):
    with pytest.raises(RuntimeError, match="at step 3"):
        train(config_of(tmp_path, {"first_step": 1, "num_steps": 5}), display=Fails())
    assert files(tmp_path) == ["trace-step-1-rank-0-failed.json.gz"]


def test_a_window_beyond_the_end_is_closed_at_the_end(tmp_path: Path):
    train(config_of(tmp_path, {"first_step": 5, "num_steps": 5}))
    assert files(tmp_path) == ["trace-step-5-rank-0.json.gz"]


@pytest.mark.parametrize(
    "profile, message",
    [
        ({"first_step": 1, "memory": True}, "profile.memory = True: records CUDA's allocator, and this run is on cpu"),
        ({"num_steps": 2}, "profile.num_steps = 2: has no effect without profile.first_step"),
        ({"first_step": 1, "ranks": [0, 1]}, r"profile.ranks = .*: names rank\(s\) \[1\] of 1"),
        ({"first_step": 1, "ranks": [0, 0]}, "must name different ranks"),
        ({"first_step": 1, "trace": False}, "profile.trace = False: records nothing without profile.memory"),
    ],
)
def test_what_cannot_be_profiled_is_refused(profile: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        train(config_of(tmp_path, profile))


@pytest.mark.parametrize("ending", ["", "-failed"])
def test_a_recording_of_memory_ends_with_its_file(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stand-ins for CUDA's recorder: history is recorded from the first step on, written once, and recorded no more."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: calls.append(how))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(Path(path).name))
    config = config_of(tmp_path, {"first_step": 2, "num_steps": 2, "memory": True, "trace": False})
    profiler = StepProfiler(config, Runtime(0, 1, torch.device("cuda", 0)))
    for step in range(3 if ending else 5):
        with profiler.step(step):
            assert len(calls) == (0 if step < 2 else 1 if step < 4 else 3)
    profiler.stop(ending)
    profiler.stop()
    assert calls == [{"max_entries": 1_000_000}, f"memory-step-2-rank-0{ending}.pickle", {"enabled": None}]


@pytest.mark.parametrize(("device", "ending"), [("cuda", ""), ("cuda", "-failed"), ("cpu", "")])
def test_a_trace_has_the_kernels_of_a_gpu_to_their_end(
    device: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Stand-ins for torch's profiler and for CUDA, which a run that has failed cannot wait for."""
    calls: list[Any] = []

    class Profile:
        def __init__(self, activities: list[ProfilerActivity], record_shapes: bool) -> None:
            calls.append((activities, record_shapes))

        def start(self) -> None:
            calls.append("start")

        def stop(self) -> None:
            calls.append("stop")

        def export_chrome_trace(self, path: str) -> None:
            calls.append(Path(path).name)

    monkeypatch.setattr(profiling, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    profiler = StepProfiler(config_of(tmp_path, {"first_step": 1}), Runtime(0, 1, torch.device(device)))
    with profiler.step(1):
        assert calls.pop() == "start"
    profiler.stop(ending)
    (activities, record_shapes), *rest = calls
    on_gpu = device == "cuda"
    assert activities == [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu and record_shapes
    assert rest == ["wait"] * (on_gpu and not ending) + ["stop", f"trace-step-1-rank-0{ending}.json.gz"]


@pytest.mark.gpu
@pytest.mark.parametrize("fails", [False, True])
def test_a_snapshot_of_cuda_s_memory(fails: bool, tmp_path: Path):
    config = config_of(tmp_path, {"first_step": 1, "num_steps": 5, "memory": True, "trace": False}, device="cuda")
    try:
        train(config, display=Fails() if fails else None)
    except RuntimeError:
        assert fails
    (name,) = files(tmp_path)
    assert name == ("memory-step-1-rank-0-failed.pickle" if fails else "memory-step-1-rank-0.pickle")
    snapshot = pickle.loads((tmp_path / "run" / "profile" / name).read_bytes())
    assert any(snapshot["device_traces"][torch.cuda.current_device()])
