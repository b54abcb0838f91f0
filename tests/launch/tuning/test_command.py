"""`maingrad tune` as a whole: each shape with its operations, the files of a stopped run."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="tuning chooses between Triton kernels")

import triton
from triton.runtime.errors import OutOfResources

from maingrad.kernels import grouped_linear
from maingrad.kernels.tuning import Problem, parse_table
from maingrad.launch.cli import main
from maingrad.launch.tuning import problems
from maingrad.launch.tuning import tune as tune_kernels
from maingrad.launch.tuning.problems import DENSE_OPS, GROUPED_OPS, GroupedOperands
from maingrad.launch.tuning.tune import DENSE_SHAPES, GROUPED_SHAPES, Timing, plan_work

CPU = torch.device("cpu")
OP = "grouped_linear"


def timings_of(shape: tuple[int, ...], **milliseconds: float) -> list[Timing]:
    """Timings of configurations that differ in block_m; ``a=1.5``: the one with ``block_m=97`` takes 1.5 ms."""
    problem = Problem(OP, "bfloat16", *shape)
    return [Timing(problem, f"block_m={ord(name)}", ms) for name, ms in milliseconds.items()]


def test_by_default_every_shape_of_the_table_has_its_operations() -> None:
    work = plan_work((), ())
    assert [shape for shape, _ in work] == [*GROUPED_SHAPES, *DENSE_SHAPES]
    assert all(set(ops) == set(DENSE_OPS) for shape, ops in work if shape[0] == 1)
    assert all(OP in ops and not set(ops) & set(DENSE_OPS) for shape, ops in work if shape[0] > 1)


def test_given_shapes_replace_the_tables() -> None:
    work = plan_work((OP, "wgrad_overwrite"), ("4x64x32x16", "1x64x32x16"))
    assert work == [((4, 64, 32, 16), (OP,)), ((1, 64, 32, 16), ("wgrad_overwrite",))]


def test_a_run_that_is_stopped_leaves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stopped_at_the_second(problem: Problem, runs: Any, log: Any) -> list[Timing]:
        asked.append(problem)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return timings_of(problem[2:], a=2.0, b=1.0)

    monkeypatch.setattr(tune_kernels, "_checked", lambda op, operands, runs: runs)
    monkeypatch.setattr(tune_kernels, "_time_all", stopped_at_the_second)
    work = plan_work((OP, "wgrad_overwrite"), ("4x64x32x16", "1x128x32x16"))
    with pytest.raises(KeyboardInterrupt):
        tune_kernels.tune(work, CPU, tmp_path)
    assert asked == [Problem(OP, "bfloat16", 4, 64, 32, 16), Problem("wgrad_overwrite", "bfloat16", 1, 128, 32, 16)]
    (row,) = parse_table((tmp_path / "tuned.csv").read_text(), "tuned.csv")
    assert (row.problem, row.config, row.ms) == (Problem(OP, "bfloat16", 4, 64, 32, 16), "block_m=98", 1.0)


def test_configurations_that_do_not_fit_the_gpu_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large() -> None:
        raise OutOfResources(196608, 101376, "shared memory")

    def runs(op: str, operands: GroupedOperands) -> Any:
        yield "block_m=256", too_large
        yield "block_m=64", lambda: grouped_linear(operands.x, operands.weights, operands.offsets, out=operands.y)

    timed: list[list[str]] = []

    def time_all(problem: Problem, runs: Any, log: Any) -> list[Timing]:
        timed.append(list(runs))
        return timings_of(problem[2:], a=1.0)

    monkeypatch.setattr(tune_kernels, "_grouped_runs", runs)
    monkeypatch.setattr(tune_kernels, "_time_all", time_all)
    tune_kernels.tune(plan_work((OP,), ("4x64x32x16",)), CPU, tmp_path)
    assert timed == [["block_m=64"]]

    monkeypatch.setattr(tune_kernels, "_grouped_runs", lambda op, operands: [("block_m=256", too_large)])
    with pytest.raises(RuntimeError, match="no configuration fits"):
        tune_kernels.tune(plan_work((OP,), ("4x64x32x16",)), CPU, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ops", "scaled_glu"], "'scaled_glu' has no table; choose from grouped_linear"),
        (["--shapes", "4x64"], "'4x64' is not EXPERTSxROWSxNxK"),
        (["--shapes", "1x64x32x16", "--ops", "grouped_dgrad"], "leave nothing to tune"),
        ([], "torch sees no CUDA device"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "--out-dir", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_triton_a_measurement_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems.provenance(CPU)["triton"] == triton.__version__
    monkeypatch.setattr(problems, "HAS_TRITON", False)
    assert problems.provenance(CPU)["triton"] == "none"


def test_what_is_asked_for_is_measured_on_the_gpu_of_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(tune_kernels, "tune", lambda *given: measured.append(given))
    asked = ["--ops", OP, "--shapes", "2x32x16x16", "1x32x16x16", "--out-dir", str(tmp_path)]
    assert main(["tune", *asked]) == 0
    assert measured == [([((2, 32, 16, 16), (OP,))], torch.device("cuda", 3), tmp_path, print)]
    assert capsys.readouterr().out.strip() == str(tmp_path / "tuned.csv")


@pytest.mark.gpu
@pytest.mark.timeout(600)  # every configuration is compiled
def test_on_a_gpu_every_configuration_is_right_and_timed(tmp_path: Path) -> None:
    work = plan_work((), ("4x512x256x128", "4x1024x256x128", "1x512x256x128"))
    timings = tune_kernels.tune(work, torch.device("cuda"), tmp_path)
    rows = parse_table((tmp_path / "tuned.csv").read_text(), "tuned.csv")
    assert {row.gpu for row in rows} == {torch.cuda.get_device_name()}
    assert {row.problem for row in rows} == {timing.problem for timing in timings}
    assert {row.problem.op for row in rows} == {*GROUPED_OPS, *DENSE_OPS}
