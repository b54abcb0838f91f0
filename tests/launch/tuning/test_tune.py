"""`maingrad tune`: which configuration is chosen, and the table that is written."""

import csv
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="tuning chooses between Triton kernels")

from maingrad.kernels import grouped_wgrad_accumulate, tuning
from maingrad.kernels.grouped.gemm_triton import GEMM_CANDIDATES, GemmConfig, default_gemm_config
from maingrad.kernels.grouped.wgrad_config import WGRAD_CANDIDATES, WgradConfig, default_wgrad_config
from maingrad.kernels.tuning import CUBLAS, Problem, gpu_name, load_tuning_table, tuned_config
from maingrad.launch.tuning import tune as tune_kernels
from maingrad.launch.tuning.problems import GroupedOperands, error_of
from maingrad.launch.tuning.tune import Timing, describe, fastest, plan_work, tune, write_tuning

CPU = torch.device("cpu")
OP = "grouped_wgrad_accumulate"
SMALL, LARGE = Problem(OP, "bfloat16", 64, 32768, 2048, 2048), Problem(OP, "bfloat16", 64, 65536, 2048, 2048)
DENSE = Problem("wgrad_accumulate", "bfloat16", 1, 2048, 4096, 4096)
ONE, OTHER = describe(WGRAD_CANDIDATES[0]), describe(WGRAD_CANDIDATES[1])


@pytest.fixture
def nothing_loaded_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tuning, "_added", [])
    tuned_config.cache_clear()
    yield
    tuned_config.cache_clear()


@pytest.mark.usefixtures("nothing_loaded_stays")
@pytest.mark.parametrize("config", [*WGRAD_CANDIDATES, *GEMM_CANDIDATES], ids=describe)
def test_a_configuration_comes_back_from_the_table(config: WgradConfig | GemmConfig, tmp_path: Path) -> None:
    problem = SMALL if isinstance(config, WgradConfig) else SMALL._replace(op="grouped_linear")
    write_tuning([Timing(problem, describe(config), 0.5)], CPU, tmp_path)
    load_tuning_table(tmp_path / "tuned.csv")
    found = tuned_config(gpu_name(CPU), problem)
    assert isinstance(found, dict)
    assert type(config)(**found) == config


@pytest.mark.parametrize("candidates", [WGRAD_CANDIDATES, GEMM_CANDIDATES])
def test_no_candidate_is_there_twice(candidates: tuple[WgradConfig | GemmConfig, ...]) -> None:
    assert len({describe(config) for config in candidates}) == len(candidates)


@pytest.mark.parametrize("rows", [4.0, 512.0, 4096.0])
def test_defaults_are_candidates(rows: float) -> None:
    """The cost of a default is known only if tuning has timed it."""
    assert default_wgrad_config(torch.bfloat16, (9, 0), rows) in WGRAD_CANDIDATES
    assert default_gemm_config(torch.bfloat16, (9, 0), rows) in GEMM_CANDIDATES


# ---- The choice. ----


def test_the_fastest_of_each_problem_is_chosen() -> None:
    timings = [Timing(SMALL, ONE, 1.0), Timing(SMALL, OTHER, 0.98), Timing(LARGE, ONE, 2.0), Timing(LARGE, OTHER, 3.0)]
    assert fastest(timings) == {SMALL: timings[1], LARGE: timings[2]}


def test_of_two_that_are_as_fast_the_one_that_other_shapes_like_is_chosen() -> None:
    timings = [Timing(SMALL, ONE, 1.0), Timing(SMALL, OTHER, 0.999), Timing(LARGE, ONE, 2.0), Timing(LARGE, OTHER, 3.0)]
    assert fastest(timings) == {SMALL: timings[0], LARGE: timings[2]}


@pytest.mark.parametrize(
    ("kernel_ms", "chosen"),
    [
        pytest.param(1.1, CUBLAS, id="slower"),
        pytest.param(0.99, CUBLAS, id="within what repeats differ by"),
        pytest.param(0.9, ONE, id="clearly faster"),
    ],
)
def test_a_dense_product_stays_the_librarys_unless_a_kernel_is_clearly_faster(kernel_ms: float, chosen: str) -> None:
    timings = [Timing(DENSE, CUBLAS, 1.0), Timing(DENSE, ONE, kernel_ms), Timing(DENSE, OTHER, 2.0)]
    assert fastest(timings)[DENSE].config == chosen
    assert fastest(timings[::-1])[DENSE].config == chosen


# ---- The files. ----


@pytest.mark.usefixtures("nothing_loaded_stays")
def test_the_table_and_every_timing_are_written(tmp_path: Path) -> None:
    timings = [
        Timing(SMALL, ONE, 1.0),
        Timing(SMALL, OTHER, 1.25),
        Timing(LARGE, ONE, 3.0),
        Timing(LARGE, OTHER, 2.0),
        Timing(DENSE, CUBLAS, 0.125),
    ]
    write_tuning(timings, CPU, tmp_path / "new")
    with (tmp_path / "new/timings.csv").open() as file:
        assert [(row["config"], float(row["ms"])) for row in csv.DictReader(file)] == [
            (timing.config, timing.ms) for timing in timings
        ]
    load_tuning_table(tmp_path / "new/tuned.csv")
    assert tuned_config("none", DENSE) == CUBLAS
    assert WgradConfig(**_fields(SMALL)) == WGRAD_CANDIDATES[0]
    assert WgradConfig(**_fields(LARGE)) == WGRAD_CANDIDATES[1]


def _fields(problem: Problem) -> dict[str, int]:
    found = tuned_config("none", problem)
    assert isinstance(found, dict)
    return found


# ---- The check of results, on which both benchmarks rely. ----


def test_an_experts_gradient_without_rows_is_compared_with_zeros() -> None:
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    assert error_of(torch.zeros(2, 3), zeros) == 0.0
    assert error_of(torch.full((2, 3), 2.0), zeros) == pytest.approx(24**0.5)
    assert error_of(torch.full((2, 3), float("nan")), zeros) != 0.0


def test_an_element_that_nobody_writes_is_an_error() -> None:
    operands = GroupedOperands(4, 64, 32, 16, torch.bfloat16, CPU)

    def right() -> None:
        grouped_wgrad_accumulate(operands.dy, operands.x, operands.grads, operands.offsets, overwrite=True)

    def leaves_one_out() -> None:
        before = operands.grads[:, -1, -1].clone()
        right()
        operands.grads[:, -1, -1] = before

    assert operands.check("grouped_wgrad_overwrite", right) < 1e-6
    assert not operands.check("grouped_wgrad_overwrite", leaves_one_out) < 1e-4


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_loaded_stays")
def test_tuning_times_the_candidates_and_its_table_is_used(tmp_path: Path) -> None:
    device = torch.device("cuda")
    lines: list[str] = []
    ops = ("grouped_linear", OP, "wgrad_overwrite")
    timings = tune(plan_work(ops, ("4x1024x256x128", "1x512x256x128")), device, tmp_path, lines.append)
    timed = {op: [timing for timing in timings if timing.problem.op == op] for op in ops}
    for op, candidates in zip(ops, (GEMM_CANDIDATES, WGRAD_CANDIDATES), strict=False):
        # Fewer where a GPU's shared memory is too small for some.
        assert {timing.config for timing in timed[op]} <= {describe(config) for config in candidates}
        assert len(timed[op]) > 1
    assert CUBLAS in {timing.config for timing in timed["wgrad_overwrite"]}
    assert len(lines) == len(ops)
    assert all(timing.ms > 0 for timing in timings)
    load_tuning_table(tmp_path / "tuned.csv")
    best = fastest(timings)
    problem = timed[OP][0].problem
    assert WgradConfig(**_parsed(gpu_name(device), problem)) in WGRAD_CANDIDATES
    assert describe(WgradConfig(**_parsed(gpu_name(device), problem))) == best[problem].config


def _parsed(gpu: str, problem: Problem) -> dict[str, int]:
    found = tuned_config(gpu, problem)
    assert isinstance(found, dict)
    return found


def test_the_three_fastest_and_the_library_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that is given: of three more rounds the median counts, and the others keep their first time."""
    clock = {
        "first": [1.0, 7.0, 1.0, 6.0],
        "second": [2.0, 2.0, 3.0, 2.5],
        "third": [3.0, 3.0, 3.0, 3.0],
        "fourth": [4.0],
        CUBLAS: [9.0, 8.0, 9.0, 7.0],
    }
    running: list[str] = []

    def do_bench(run: Callable[[], None], *, warmup: int, rep: int, return_mode: str) -> float:
        run()
        return clock[running[-1]].pop(0)

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    said: list[str] = []
    runs = {name: partial(running.append, name) for name in ("third", "first", CUBLAS, "fourth", "second")}
    timings = tune_kernels._time_all(DENSE, runs, said.append)
    assert {timing.config: timing.ms for timing in timings} == {
        "first": 6.0,
        "second": 2.5,
        "third": 3.0,
        "fourth": 4.0,
        CUBLAS: 8.0,
    }
    assert not any(clock.values()) and {timing.problem for timing in timings} == {DENSE}
    assert len(said) == 1 and said[0].endswith("2.5000 ms, second")


@pytest.mark.parametrize("shape", ["4x64x32x16", "1x64x32x16"])
def test_a_wrong_candidate_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str) -> None:
    monkeypatch.setattr(tune_kernels, "grouped_wgrad_triton", lambda *_: None)
    monkeypatch.setattr(tune_kernels, "cublas_wgrad", lambda *_, overwrite: None)
    with pytest.raises(RuntimeError, match=r"overwrite \(\d, 64, 32, 16\) .*: relative error nan"):
        tune(plan_work(("grouped_wgrad_overwrite", "wgrad_overwrite"), (shape,)), CPU, tmp_path)
