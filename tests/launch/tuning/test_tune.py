"""`maingrad tune`: which configuration is chosen, and the table that is written."""

import csv
import operator
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="tuning chooses between Triton kernels")

from maingrad.kernels import grouped_wgrad_accumulate, tuning
from maingrad.kernels.grouped.gemm_triton import GEMM_CANDIDATES, GemmConfig, default_gemm_config
from maingrad.kernels.grouped.wgrad_config import WGRAD_CANDIDATES, WgradConfig, default_wgrad_config
from maingrad.kernels.tuning import CUBLAS, Problem, gpu_name, load_tuning_table, tuned_config
from maingrad.launch.config.error import ConfigError
from maingrad.launch.tuning import tune as tune_kernels
from maingrad.launch.tuning.problems import DENSE_OPS, GROUPED_OPS, GroupedOperands, error_of, triton_version
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
        assert return_mode == "median"
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
    # The library takes three more rounds also where it is among the fastest.
    clock |= {"first": [3.0] * 4, CUBLAS: [1.0] * 4}
    tune_kernels._time_all(DENSE, {name: runs[name] for name in ("first", CUBLAS)}, said.append)
    assert not any(clock.values())


@pytest.mark.parametrize("shape", ["4x64x32x16", "1x64x32x16"])
def test_a_wrong_candidate_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str) -> None:
    monkeypatch.setattr(tune_kernels, "grouped_wgrad_triton", lambda *_: None)
    monkeypatch.setattr(tune_kernels, "cublas_wgrad", lambda *_, overwrite: None)
    with pytest.raises(RuntimeError, match=r"overwrite \(\d, 64, 32, 16\) .*: relative error nan"):
        tune(plan_work(("grouped_wgrad_overwrite", "wgrad_overwrite"), (shape,)), CPU, tmp_path)


@pytest.mark.parametrize("op", DENSE_OPS)
def test_a_dense_product_that_is_right_is_timed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is added to what is there, or written over it."""

    def product(dy: Tensor, x: Tensor, grad: Tensor, *, overwrite: bool) -> None:
        found = dy.float().t() @ x.float()
        grad.copy_(found if overwrite else grad + found)

    monkeypatch.setattr(tune_kernels, "cublas_wgrad", product)
    monkeypatch.setattr(tune_kernels, "WGRAD_CANDIDATES", ())
    monkeypatch.setattr(tune_kernels, "_time_all", lambda problem, runs, log: [Timing(problem, *runs, 1.0)])
    (timing,) = tune_kernels._tune_shape((1, 64, 32, 16), (op,), CPU, print)
    assert timing == Timing(Problem(op, "bfloat16", 1, 64, 32, 16), CUBLAS, 1.0)


# ---- The runs that are measured. ----


def operands_of(*shape: int) -> GroupedOperands:
    return GroupedOperands(*(shape or (4, 64, 32, 16)), torch.bfloat16, CPU)


def test_split_sizes_are_uneven_and_use_all_rows() -> None:
    operands = operands_of(8, 1024, 16, 8)
    assert sum(operands.sizes) == 1024 and not any(size % 16 for size in operands.sizes)
    assert len(set(operands.sizes)) > 1 and operands.sizes == operands_of(8, 1024, 16, 8).sizes
    assert operands.offsets.tolist() == [sum(operands.sizes[:expert]) for expert in range(9)]
    assert [part.stop - part.start for part in operands.slices] == operands.sizes
    assert operands.problem("an_op") == Problem("an_op", "bfloat16", 8, 1024, 16, 8)
    assert operands_of(1, 512, 16, 8).sizes == [512]
    many = operands_of(64, 64 * 1024, 16, 8).sizes
    assert 0.1 * 1024 < min(many) < 0.5 * 1024 and max(many) > 1.5 * 1024, "none is nearly idle"
    few = operands_of(64, 32, 16, 8).sizes
    assert len(few) == 64 and sum(few) == 32, "most experts have no row"


def test_each_operation_runs_its_kernel_on_its_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    made = operands_of()
    ran: list[tuple[Any, ...]] = []
    for name in ("grouped_gemm_triton", "grouped_wgrad_triton", "cublas_wgrad"):
        monkeypatch.setattr(
            tune_kernels, name, lambda *given, _name=name, **how: ran.append((_name, given, how)), raising=True
        )

    def runs(op: str) -> list[str]:
        found = dict((tune_kernels._dense_runs if op in DENSE_OPS else tune_kernels._grouped_runs)(op, made))
        ran.clear()
        for run in found.values():
            run()
        return list(found)

    for op, transposed in (("grouped_linear", True), ("grouped_dgrad", False)):
        assert runs(op) == [describe(config) for config in GEMM_CANDIDATES]
        source, result = (made.x, made.y) if transposed else (made.dy, made.dx)
        for (name, given, how), config in zip(ran, GEMM_CANDIDATES, strict=True):
            assert name == "grouped_gemm_triton" and how == {"transposed": transposed} and given[4] == config
            assert all(map(operator.is_, given[:4], (source, made.weights, made.offsets, result)))
    for op, overwrite in (("grouped_wgrad_accumulate", False), ("grouped_wgrad_overwrite", True)):
        assert runs(op) == [describe(config) for config in WGRAD_CANDIDATES]
        for (_, given, _), config in zip(ran, WGRAD_CANDIDATES, strict=True):
            assert all(map(operator.is_, given[:4], (made.dy, made.x, made.grads, made.offsets)))
            assert given[4:] == (overwrite, config)
    for op, overwrite in (("wgrad_accumulate", False), ("wgrad_overwrite", True)):
        loaded = [config for config in WGRAD_CANDIDATES if config.tma]
        assert runs(op) == [CUBLAS, *map(describe, loaded)]
        assert ran[0][0] == "cublas_wgrad" and ran[0][2] == {"overwrite": overwrite}
        assert torch.equal(ran[0][1][2], made.grads[0]) and ran[0][1][2].data_ptr() == made.grads.data_ptr()
        assert [given[3:] for _, given, _ in ran[1:]] == [(None, overwrite, config) for config in loaded]


def test_configurations_that_do_not_fit_are_left_out_and_wrong_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    errors: dict[str, Any] = {"fits": 3e-3, "large": OutOfResources(2, 1, "shared memory"), "exact": 0.0}

    def check(self: GroupedOperands, op: str, run: Callable[[], None]) -> float:
        error = errors[run]  # type: ignore[index]
        if isinstance(error, Exception):
            raise error
        return float(error)

    monkeypatch.setattr(GroupedOperands, "check", check)
    runs: Any = {name: name for name in errors}
    assert list(tune_kernels._checked("grouped_linear", operands_of(), runs)) == ["fits", "exact"]
    assert list(tune_kernels._checked("grouped_dgrad", operands_of(), runs)) == ["fits", "exact"]
    with pytest.raises(RuntimeError, match=r"grouped_wgrad_overwrite \(4, 64, 32, 16\) fits: relative error 0.003"):
        tune_kernels._checked("grouped_wgrad_overwrite", operands_of(), runs)
    with pytest.raises(RuntimeError, match="no configuration fits the shared memory of none"):
        tune_kernels._checked("grouped_linear", operands_of(), {"large": "large"})  # type: ignore[dict-item]


def test_results_are_checked_against_fp64_over_what_was_there() -> None:
    """Sums are added to ones, all else is written over NaN; the largest and the smallest expert are looked at."""
    made = operands_of()
    order = sorted(range(4), key=made.sizes.__getitem__)

    def forward(of: str) -> None:
        for expert, rows in enumerate(made.slices):
            weight = made.weights[expert]
            made.y[rows], made.dx[rows] = made.x[rows] @ weight.t(), made.dy[rows] @ weight

    assert made.check("grouped_linear", lambda: forward("y")) < 1e-2
    assert made.check("grouped_dgrad", lambda: forward("dx")) < 1e-2
    assert made.check("grouped_linear", lambda: None) != made.check("grouped_linear", lambda: None), "NaN"

    def accumulate(twice: int | None = None) -> None:
        grouped_wgrad_accumulate(made.dy, made.x, made.grads, made.offsets)
        if twice is not None:
            made.grads[twice] *= 2

    assert made.check("grouped_wgrad_accumulate", accumulate) < 1e-6
    for expert in (order[0], order[-1]):
        assert made.check("grouped_wgrad_accumulate", lambda: accumulate(expert)) == pytest.approx(1.0)  # noqa: B023
    assert not made.check("grouped_wgrad_overwrite", accumulate) < 1


@pytest.mark.usefixtures("nothing_loaded_stays")
def test_a_run_that_is_stopped_leaves_the_shapes_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(shape: Any, ops: Any, device: Any, log: Any) -> list[Timing]:
        if shape[0] == 2:
            raise KeyboardInterrupt
        return [Timing(DENSE._replace(op=op), CUBLAS, 1.0) for op in ops]

    monkeypatch.setattr(tune_kernels, "_tune_shape", measure)
    with pytest.raises(KeyboardInterrupt):
        tune([((1, 16, 16, 8), DENSE_OPS), ((2, 16, 16, 8), ("grouped_linear",))], CPU, tmp_path)
    load_tuning_table(tmp_path / "tuned.csv")
    assert tuned_config("none", DENSE) == CUBLAS
    with (tmp_path / "tuned.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["op"] for row in rows} == set(DENSE_OPS)
    assert {(row["gpu"], row["torch"], row["triton"]) for row in rows} == {
        ("none", torch.__version__, triton_version())
    }
    assert rows[0]["date"] == time.strftime("%Y-%m-%d")


def test_shapes_and_operations_that_go_together() -> None:
    assert plan_work((), ("1x16x16x8", "2x32x48x24")) == [((1, 16, 16, 8), DENSE_OPS), ((2, 32, 48, 24), GROUPED_OPS)]
    assert plan_work(("grouped_dgrad",), ("1x16x16x8", "2x32x48x24")) == [((2, 32, 48, 24), ("grouped_dgrad",))]
    assert {len(ops) for _, ops in plan_work((), ())} == {2, 4}
    with pytest.raises(ConfigError, match="leave nothing to tune"):
        plan_work(DENSE_OPS, ("2x32x48x24",))
    with pytest.raises(ConfigError, match="'gemm' has no table; choose from grouped_linear"):
        plan_work(("gemm",), ())
    for text in ("1x16x16", "1x16x16x8x8", "0x16x16x8", "1x16x16x-8", "axbxcxd"):
        with pytest.raises(ConfigError, match=r"is not EXPERTSxROWSxNxK"):
            plan_work((), (text,))
    for text in ("1x17x16x8", "1x16x24x8", "1x16x16x12"):
        with pytest.raises(ConfigError, match=f"'{text}' needs rows and N in multiples of 16, and K of 8"):
            plan_work((), (text,))


def test_a_configuration_is_liked_by_the_problems_of_its_operation_alone() -> None:
    other = SMALL._replace(op="grouped_linear")
    timings = [Timing(SMALL, ONE, 1.0), Timing(SMALL, OTHER, 0.999)]
    timings += [Timing(other._replace(n=n), ONE, 1.0) for n in (16, 32, 64)]
    assert fastest(timings)[SMALL].config == OTHER
    far = [Timing(SMALL, ONE, 1.02), Timing(SMALL, OTHER, 1.0), Timing(LARGE, ONE, 1.0)]
    assert fastest(far)[SMALL].config == OTHER, "2 % are no noise"
