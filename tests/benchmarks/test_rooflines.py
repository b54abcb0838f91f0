"""docs/benchmarks/rooflines.py: every timed kernel was checked, and its time is compared with the roofline."""

import csv
from pathlib import Path
from typing import Any

import pytest
import rivals as kernel_rivals
import rooflines
import torch
from rivals import product_work
from rooflines import OPS, Ceilings, KernelBench, bench_kernels, write_report

from maingrad.kernels import grouped_wgrad_accumulate
from maingrad.launch.config.run import ConfigError

GROUPED = "4x64x32x16"
BRIEF = ["--num-rounds", "1", "--measure-ms", "5"]


def measured(folder: Path) -> list[dict[str, str]]:
    with (folder / "kernels.csv").open() as file:
        return list(csv.DictReader(file))


def bench(folder: Path, *arguments: str) -> int:
    return rooflines.main(["--out-dir", str(folder), *BRIEF, *arguments])


@pytest.mark.slow
def test_every_operation_is_measured_beside_its_rivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--shapes", GROUPED, "1x32x16x24") == 0
    rows = measured(tmp_path)
    assert {row["op"] for row in rows} == set(OPS)
    for op in OPS:
        contenders = [row["contender"] for row in rows if row["op"] == op]
        assert contenders[0] == "ours"
        assert len(contenders) > 1, f"{op} has no rival here"
    for row in rows:
        ms, roofline = float(row["ms"]), float(row["roofline_ms"])
        assert ms > 0 < roofline
        assert float(row["over_roofline"]) == pytest.approx(ms / roofline)
        assert row["torch"] == torch.__version__
        assert row["date"]
        dense = row["op"] in kernel_rivals.DENSE_OPS
        assert [int(row[name]) for name in ("experts", "rows", "n", "k")] == (
            [1, 32, 16, 24] if dense else [4, 64, 32, 16]
        )
    assert {row["over_ours"] for row in rows if row["contender"] == "ours"} == {"1.0"}
    out = capsys.readouterr().out
    text = (tmp_path / "kernels.md").read_text()
    assert text in out
    for op in OPS:
        assert f"| {op} |" in text.partition("## ")[0], "its line in the summary"
    table = text.partition("## grouped_linear\n\n")[2].partition("\n\n")[0].splitlines()
    assert len(table) == 3, "headings, a rule, a line for the shape"
    cells = dict(zip(*([cell.strip() for cell in each.split("|")] for each in table[::2]), strict=True))
    of = {row["contender"]: row for row in rows if row["op"] == "grouped_linear"}
    assert cells["E, T, N, K"] == "4, 64, 32, 16"
    assert cells["**ours**"] == f"{float(of['ours']['over_roofline']):.2f}"
    assert cells["grouped_mm"] == f"{float(of['grouped_mm']['over_roofline']):.2f}"
    least = min(float(each["over_ours"]) for name, each in of.items() if name != "ours")
    assert cells["ours over the fastest rival"] == f"{1 / least:.2f}"
    assert "Ceilings measured in the same run" in text
    assert "Left out" not in text
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


# T, N, K and the published rooflines of accumulation at 720 TFLOP/s and 4,245 GB/s.
@pytest.mark.parametrize(
    ("shape", "milliseconds"),
    [
        ((8, 16384, 4096, 4096), 0.76),
        ((8, 16384, 14336, 4096), 2.67),
        ((64, 32768, 2048, 2048), 0.57),
        ((128, 32768, 1536, 4096), 1.60),
        ((32, 8192, 4096, 2048), 0.53),
    ],
)
def test_rooflines_of_accumulation(shape: tuple[int, int, int, int], milliseconds: float) -> None:
    ceilings = Ceilings(tflops=720, product_size=8192, gb_per_s=4245)
    assert ceilings.roofline_ms(*product_work("grouped_wgrad_accumulate", shape)) == pytest.approx(
        milliseconds, abs=0.006
    )


def test_the_bytes_of_each_product() -> None:
    experts, rows, n, k = shape = (3, 5, 7, 11)
    operands, matrices = 2 * rows * (n + k), experts * n * k
    assert product_work("grouped_wgrad_accumulate", shape) == (2 * rows * n * k, operands + 8 * matrices)
    assert product_work("grouped_wgrad_overwrite", shape) == (2 * rows * n * k, operands + 4 * matrices)
    assert product_work("wgrad_overwrite", shape) == (2 * rows * n * k, operands + 4 * matrices)
    for op in ("grouped_linear", "grouped_dgrad"):
        assert product_work(op, shape) == (2 * rows * n * k, operands + 2 * matrices)


def test_a_bound_is_the_larger_time() -> None:
    ceilings = Ceilings(tflops=1.0, product_size=1, gb_per_s=1.0)  # 1e9 operations or 1e6 bytes in a millisecond
    assert ceilings.roofline_ms(3e9, 2e6) == 3
    assert ceilings.bound(3e9, 2e6) == "products"
    assert ceilings.roofline_ms(1e9, 2e6) == 2
    assert ceilings.bound(1e9, 2e6) == "memory"


def nothing_written(*_: Any, **__: Any) -> None:
    """A kernel that does not write its result."""


def one_expert_forgotten(dy: Any, x: Any, main_grads: Any, offsets: Any, *, overwrite: bool) -> None:
    grouped_wgrad_accumulate(dy, x, main_grads, offsets, overwrite=overwrite)
    sizes = offsets.diff()
    main_grads[int(sizes.argmax())] += 1.0


@pytest.mark.parametrize(
    ("op", "name", "broken"),
    [
        ("grouped_linear", "grouped_linear", nothing_written),
        ("grouped_dgrad", "grouped_dgrad", nothing_written),
        ("grouped_wgrad_overwrite", "grouped_wgrad_accumulate", nothing_written),
        ("grouped_wgrad_accumulate", "grouped_wgrad_accumulate", nothing_written),
        ("grouped_wgrad_accumulate", "grouped_wgrad_accumulate", one_expert_forgotten),
        ("scaled_glu", "scaled_glu", lambda h, probs: h.new_empty(h.shape[0], h.shape[1] // 2)),
        ("scaled_glu_backward", "scaled_glu_backward", lambda da, h, probs: (torch.zeros_like(h), None)),
        ("grouped_bias_grad", "grouped_bias_grad", lambda dy, offsets: dy.new_zeros(len(offsets) - 1, dy.shape[1])),
        ("permute_rows", "permute_rows", lambda x, places: x.repeat_interleave(8, 0)),
        ("unpermute_rows", "unpermute_rows", lambda rows, places: rows.view(-1, 8, rows.shape[1]).sum(1)),
    ],
)
@pytest.mark.sampled(1)
def test_a_wrong_kernel_has_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, name: str, broken: Any
) -> None:
    monkeypatch.setattr(kernel_rivals, name, broken)
    assert bench(tmp_path, "--shapes", GROUPED, "--ops", op) == 1
    assert "ours" not in {row["contender"] for row in measured(tmp_path)}
    assert f"- {op} {GROUPED}, ours: wrong by" in (tmp_path / "kernels.md").read_text()


@pytest.mark.in_turn
def test_what_does_less_is_no_rival(tmp_path: Path) -> None:
    assert bench(tmp_path, "--shapes", GROUPED, "--ops", "grouped_wgrad_overwrite") == 0
    of = {row["contender"]: float(row["over_ours"]) for row in measured(tmp_path)}
    assert list(of) == ["ours", "grouped_mm, then copy", "grouped_mm, bf16 result"]
    table = (tmp_path / "kernels.md").read_text().splitlines()
    last = next(each for each in reversed(table) if each.startswith("| 4, 64, 32, 16 |"))
    assert last.endswith(f"| {1 / of['grouped_mm, then copy']:.2f} |")


@pytest.mark.in_turn
def test_a_rival_that_cannot_run_is_said_to_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("grouped_mm is not for this device\nand more lines")

    monkeypatch.setattr(kernel_rivals, "_grouped_mm", missing)
    assert bench(tmp_path, "--shapes", GROUPED, "--ops", "grouped_dgrad") == 0, "ours was right"
    assert [row["contender"] for row in measured(tmp_path)] == ["ours", "loop of mm"]
    left_out = f"- grouped_dgrad {GROUPED}, grouped_mm: grouped_mm is not for this device\n"
    assert left_out in (tmp_path / "kernels.md").read_text()


def test_ours_failing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a kernel's own mistake")

    monkeypatch.setattr(kernel_rivals, "grouped_dgrad", fails)
    with pytest.raises(RuntimeError, match="own mistake"):
        bench(tmp_path, "--shapes", GROUPED, "--ops", "grouped_dgrad")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ops", "grouped_lineer"], "unknown operation 'grouped_lineer': it is one of grouped_linear"),
        (["--shapes", "64x2048x2048"], "'64x2048x2048' is not EXPERTSxROWSxNxK"),
        (["--shapes", "4x64x0x16"], "'4x64x0x16' is not EXPERTSxROWSxNxK"),
        (["--shapes", "4x60x32x16"], "needs rows and N in multiples of 16"),
        (["--num-rounds", "0"], "--num-rounds and --measure-ms must be positive"),
        (["--ops", "wgrad_accumulate", "--shapes", GROUPED], "leave nothing to measure"),
    ],
)
@pytest.mark.sampled(4)
def test_mistakes_are_answered_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    try:
        status: Any = rooflines.main(["--out-dir", str(tmp_path), *arguments])
    except SystemExit as end:
        status = end.code
    assert status == 2
    # tyro draws a box around what it says, and breaks lines in it.
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_published_shapes_are_for_gpus() -> None:
    on_cuda, on_cpu = (KernelBench().parsed_shapes(on_cuda=each) for each in (True, False))
    assert on_cuda[0] == (8, 16384, 4096, 4096)
    assert {shape[1] for shape in on_cuda if shape[0] == 1} >= {2048, 4096, 8192, 16384}
    assert max(shape[1] for shape in on_cpu) < 1000
    with pytest.raises(ConfigError):
        KernelBench(shapes=("nothing",))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["5x512x256x128", "1x512x256x128"])
def test_on_a_gpu_ours_and_the_pointer_variant_are_right(tmp_path: Path, shape: str) -> None:
    grouped = not shape.startswith("1x")
    table = bench_kernels(KernelBench(shapes=(shape,), num_rounds=1, measure_ms=5), torch.device("cuda"))
    assert not table.wrong
    assert table.left_out == []
    by_op = {op: [row.contender for row in table.rows if row.op == op] for op in OPS}
    for op in OPS:
        if (op in kernel_rivals.DENSE_OPS) == (not grouped):
            assert by_op[op][0] == kernel_rivals.OURS
            assert (kernel_rivals.POINTERS in by_op[op]) == (op in kernel_rivals.GROUPED_OPS)
    assert ("loop of addmm" if grouped else "addmm in place") in {row.contender for row in table.rows}
    assert torch.cuda.get_device_name() in write_report(table, tmp_path)
