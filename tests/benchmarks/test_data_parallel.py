"""docs/benchmarks/data_parallel.py: every row does the same work; a row that fails stays with its reason."""

import csv
import dataclasses
import math
from pathlib import Path
from typing import Any

import data_parallel
import pytest
import torch
import torch.distributed as dist
from contenders import Row, wrap
from data_parallel import (
    FLOOR,
    OURS,
    PEER_FLOOR,
    ROWS,
    Case,
    DataParallelBench,
    bench_data_parallel,
    choose_rows,
    sections_of,
    write_report,
)
from gloo import run_ranks
from gpt import SETTINGS, AddmmLinear, make_model, plain_linear
from ranks import Ranks, make_mesh
from scripts_of_benchmarks import FOLDER, under_torchrun
from tables import Measurement, odd_losses, read_csv
from torch import nn
from torch.nn import Linear

from maingrad import parallelize
from maingrad.fsdp.module import root_of

TINY = ["--settings", "tiny", "--num-steps", "2", "--num-rounds", "1", "--num-warmup-steps", "1"]
BRIEF = DataParallelBench(settings=("tiny",), num_steps=2, num_rounds=1, num_warmup_steps=1)
CPU = torch.device("cpu")

# Rows on two ranks: one rank fails while the other rank waits for it in a collective.
FAILING = """
import sys
import torch
import torch.distributed as dist
from ranks import AnyRankFailed, Ranks

ranks = Ranks.from_env(timeout=30.0)

def attempt(raising):
    with ranks.attempt(with_groups=True):
        dist.all_reduce(torch.ones(2))
        if ranks.rank in raising:
            raise ValueError(f"as told, on {ranks.rank}")
        dist.all_reduce(torch.ones(2))

for raising in ({1}, {0}, {0, 1}, set(), {1}):
    told = "nothing"
    try:
        attempt(raising)
    except AnyRankFailed as failure:
        told = str(failure)
        assert "as told" in failure.details
    expected = [f"rank {rank}: ValueError: as told, on {rank}" for rank in raising] or ["nothing"]
    assert told in expected, (told, raising)
    assert not dist.is_initialized()
    assert ranks.exchange(told) == [told, told]
"""


def groups_of_meshes() -> list[list[int]]:
    """Ranks of this rank's groups, outermost dim first."""
    dims = ({"outer": 2, "inner": 2}, {"dp": 4, "tp": 1}, {"inner": 4})
    meshes = [make_mesh(CPU, sizes) for sizes in dims]
    return [dist.get_process_group_ranks(mesh[name].get_group()) for mesh in meshes for name in mesh.mesh_dim_names]


@pytest.mark.in_turn
def test_a_mesh_has_groups_along_each_dim() -> None:
    found = run_ranks(groups_of_meshes, 4)
    for rank, groups in enumerate(found):
        mine, everyone = [rank // 2 * 2, rank // 2 * 2 + 1], [0, 1, 2, 3]
        assert groups == [[rank % 2, rank % 2 + 2], mine, everyone, [rank], everyone]


def measured(row: str, step_ms: float, losses: tuple[float, float] = (10.0, 8.0), **fields: object) -> Measurement:
    known = {
        "setting": "tiny",
        "num_ranks": 2,
        "label": f"the row {row}",
        "slowest_rank_ms": step_ms,
        "spread_ms": 0.5,
        "tokens_per_second": 64 / step_ms * 1e3,
        "peak_gib": 1.25,
        "trains": row not in (FLOOR, PEER_FLOOR),
        "problem": "",
        "machine": "a machine",
    }
    return Measurement(row=row, step_ms=step_ms, first_loss=losses[0], last_loss=losses[1], **(known | fields))


@pytest.mark.slow
def test_on_one_rank_it_writes_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--rows", "zero1", "megatron_zero1", "hybrid"]
    assert data_parallel.main(["--out-dir", str(tmp_path), *TINY, *chosen, "--trace", "zero1"]) == 0
    with (tmp_path / "data_parallel.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == [
        *(FLOOR, PEER_FLOOR, "zero1", "hybrid", "megatron_zero1", FLOOR, PEER_FLOOR)
    ]
    problems = {row["row"]: row["problem"] for row in rows}
    assert "4 ranks" in problems["hybrid"]
    assert "not installed" in problems["megatron_zero1"] or "CUDA only" in problems["megatron_zero1"]
    assert not problems["zero1"] and not problems[FLOOR]
    assert all(float(row["step_ms"]) > 0 for row in rows if not row["problem"])
    assert all(math.isnan(float(row["step_ms"])) for row in rows if row["problem"])
    # One seed and one set of tokens give one first loss; only rows that train get better.
    first = {float(row["first_loss"]) for row in rows if not row["problem"]}
    assert max(first) - min(first) < 0.01
    assert all((row["last_loss"] < row["first_loss"]) == (row["row"] == "zero1") for row in rows if not row["problem"])
    assert (tmp_path / "data_parallel.png").stat().st_size > 1000
    assert "No activity of a GPU" in (tmp_path / "trace_tiny_zero1.txt").read_text()
    assert not (tmp_path / "trace_tiny_zero1.json.gz").exists()
    table = (tmp_path / "data_parallel.md").read_text()
    assert "| maingrad ZeRO-1 |" in table
    assert table.rstrip() in capsys.readouterr().out

    (tmp_path / "data_parallel.png").unlink()
    (tmp_path / "data_parallel.md").unlink()
    assert data_parallel.main(["--out-dir", str(tmp_path), "--redraw"]) == 0
    assert (tmp_path / "data_parallel.md").read_text() == table
    assert (tmp_path / "data_parallel.png").exists()


@pytest.mark.slow
def test_a_row_that_fails_is_a_row_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(case: Case) -> None:
        raise RuntimeError("out of\nluck")

    closed: list[str] = []
    rows = {
        "broken": Row("broken", broken, close=lambda: closed.append("broken")),
        "ddp": OURS["ddp"],
        "fsdp_zero3_reduced_once": OURS["fsdp_zero3_reduced_once"],
    }
    bench = dataclasses.replace(BRIEF, out_dir=tmp_path, bucket_size=3000)
    saved: list[int] = []
    ranks = Ranks.from_env()
    done = bench_data_parallel(bench, ranks, rows, save=lambda rows: saved.append(len(rows)))
    problems = [(row.row, row.problem) for row in done]
    assert problems == [("broken", "RuntimeError: out of luck"), ("ddp", ""), ("fsdp_zero3_reduced_once", "")]
    assert done[1].label == "maingrad DDP, bucket_size=3000"
    assert done[2].label == "maingrad FSDP, ZeRO-3, gradients reduced once a step, bucket_size=3000"
    assert done[2].last_loss < done[2].first_loss == pytest.approx(done[1].first_loss, rel=1e-3)
    assert saved == [1, 2, 3]
    assert closed == ["broken"]
    assert "in broken" in capsys.readouterr().out  # the traceback


@pytest.mark.parametrize(
    "arguments, known",
    [(["--rows", "zero7"], "zero1"), (["--settings", "huge"], "large"), (["--trace", "x"], "zero1")],
)
def test_an_unknown_name_is_told_with_those_that_exist(
    arguments: list[str], known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data_parallel.main(arguments) == 2
    error = capsys.readouterr().err
    assert arguments[1] in error and known in error


def test_floors_come_first_and_last() -> None:
    some = choose_rows(DataParallelBench(rows=("torch_ddp", "zero1")))
    assert some == [FLOOR, PEER_FLOOR, "zero1", "torch_ddp", FLOOR, PEER_FLOOR]
    every = choose_rows(DataParallelBench(without=(PEER_FLOOR, "ddp")))
    assert every[0] == every[-1] == FLOOR
    assert set(ROWS) - set(every) == {PEER_FLOOR, "ddp"}


def test_what_keeps_memory_comes_behind_all_others() -> None:
    *others, closing = choose_rows(DataParallelBench(without=(PEER_FLOOR,)))
    assert closing == FLOOR
    keeps = [name.startswith("megatron_fsdp") for name in others]
    assert sum(keeps) == 6
    assert keeps == sorted(keeps)


def test_ratios_are_over_the_mean_of_a_floor_and_drift_is_told(tmp_path: Path) -> None:
    rows = [
        measured(FLOOR, 100.0, (10.0, 10.0)),
        measured(PEER_FLOOR, 80.0, (10.0, 10.0)),
        measured("zero1", 126.0),
        measured("ddp", math.nan, (math.nan, math.nan), problem="it broke", peak_gib=math.nan),
        measured(FLOOR, 110.0, (10.0, 10.0)),
        measured(PEER_FLOOR, 80.0, (10.0, 10.0)),
    ]
    table = write_report(rows, tmp_path)
    assert "| the row zero1 | 126.0 | 1.200 | 1.200 | 1.575 | 1.2 | 0.5 | 10.000 to 8.000 |" in table
    assert "| the row ddp | - | - | - | - | - | - | it broke |" in table
    assert "our floor +10.0%, the peers' floor +0.0%" in table
    assert "**Losses" not in table
    # Compared as text, because NaN is not equal to itself.
    assert list(map(str, read_csv(tmp_path / "data_parallel.csv"))) == list(map(str, rows))


def test_another_run_replaces_its_own_sections_only(tmp_path: Path) -> None:
    four = measured("zero1", 90.0, num_ranks=4)
    small = measured("zero1", 50.0, setting="small")
    write_report([measured("zero1", 100.0), measured("ddp", 120.0), four, small], tmp_path)
    table = write_report([measured("zero1", 95.0)], tmp_path)
    rows = read_csv(tmp_path / "data_parallel.csv")
    assert {(row.setting, row.num_ranks, row.step_ms) for row in rows} == {
        ("tiny", 2, 95.0), ("tiny", 4, 90.0), ("small", 2, 50.0)
    }  # fmt: skip
    headings = [line for line in table.splitlines() if line.startswith("## ")]
    assert headings == ["## small, 2 ranks", "## tiny, 2 ranks", "## tiny, 4 ranks"]


@pytest.mark.parametrize(
    "losses, is_odd",
    [((10.0, 8.0), False), ((10.05, 8.3), False), ((10.2, 8.0), True), ((10.0, 8.5), True), ((10.0, 10.0), True),
     ((10.0, 7.5), True), ((10.0, math.nan), True)],
)  # fmt: skip
def test_a_row_that_does_other_work_is_told(losses: tuple[float, float], is_odd: bool) -> None:
    others = [measured(name, 100.0) for name in ("zero1", "ddp", "torch_ddp")]
    floor = measured(FLOOR, 90.0, (10.0, 10.0))
    section = [floor, *others, measured("fsdp2_zero2", 1.0, losses)]
    assert [row.row for row in odd_losses(section)] == ["fsdp2_zero2"] * is_odd


def test_rows_that_learn_nothing_are_told_also_where_most_do_not() -> None:
    stuck = [measured(name, 100.0, (10.0, 10.0002)) for name in ("fsdp_zero3", "fsdp_zero2", "ddp")]
    floor = measured(FLOOR, 90.0, (10.0, 10.0))
    section = [floor, *stuck, measured("fsdp2_zero2", 100.0), measured("zero1", 100.0, (10.0, 7.9))]
    assert [row.row for row in odd_losses(section)] == ["fsdp_zero3", "fsdp_zero2", "ddp"]


def test_units_are_made_as_their_row_says() -> None:
    def made(**options: Any) -> list[tuple[str, int, bool]]:
        """Name, number of buckets and whether gradients are held, of each unit."""
        ours = {"bucket_size": options.pop("bucket_size", None)}
        with Ranks.alone(CPU).attempt(with_groups=True):
            units = root_of(wrap(Case(SETTINGS["tiny"], 0, 1, CPU, ours), "zero3", **options)).units
        return [(unit.name, len(unit.buckets), all(bucket.reduces_once for bucket in unit.buckets)) for unit in units]

    assert made() == [("", 1, False), ("blocks.0", 1, False), ("blocks.1", 1, False)]
    assert {name for name, _, _ in made(split_ends=True)} == {"", "blocks.0", "blocks.1", "embedding", "head"}
    reduced_once = made(reduce_every_microbatch=False, bucket_size=3000)
    assert all(num_buckets > 1 and holds for _, num_buckets, holds in reduced_once)


def test_the_number_of_parameters_and_the_weights_are_the_same_for_every_layer() -> None:
    setting = SETTINGS["tiny"]
    models = [make_model(setting, torch.bfloat16, CPU, linear) for linear in (plain_linear, AddmmLinear.make)]
    assert sum(parameter.numel() for parameter in models[0].parameters()) == setting.num_params
    for model in models[1:]:
        for mine, other in zip(models[0].parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, other)
    # 1.88 and 0.94 billion, as the tables say.
    assert round(SETTINGS["large"].num_params / 1e9, 2) == 1.88
    assert round(SETTINGS["small"].num_params / 1e9, 2) == 0.94


def test_the_peers_layer_writes_the_gradient_that_ours_writes() -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(3, 5, 8).bfloat16(), torch.randn(3, 5, 4).bfloat16()
    weight = torch.randn(4, 8).bfloat16()
    sums = []
    for linear in (AddmmLinear, Linear):
        layer = linear(8, 4, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(weight)
        ddp = parallelize(nn.Sequential(layer), "ddp", overlap_grad_reduce=False)
        inputs = x.clone().requires_grad_()
        with ddp.no_sync():
            ddp(inputs).backward(dy)
        ddp(inputs).backward(dy)
        ddp.finish_grad_sync()
        (record,) = ddp.records
        sums.append((record.view.clone(), inputs.grad))
    expected = 2 * dy.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
    torch.testing.assert_close(sums[0][0].double(), expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-6, atol=1e-5)


@pytest.mark.slow
def test_a_failure_of_one_rank_ends_the_row_on_all(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\n{FAILING}")
    done = under_torchrun(str(script), timeout=90)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_everything_that_runs_on_cpu_trains_alike_on_two_ranks(tmp_path: Path) -> None:
    compiled = [name for name in ROWS if name.endswith("compiled")]
    bench = ["data_parallel.py", "--out-dir", str(tmp_path), *TINY]
    done = under_torchrun(*bench, "--without", *compiled, "--trace", "zero1", timeout=240)
    assert done.returncode == 0, done.stderr
    rows = {row.row: row for row in read_csv(tmp_path / "data_parallel.csv")}
    reasons = {name: row.problem for name, row in rows.items() if row.problem}
    assert all(
        any(known in why for known in ("4 ranks", "CUDA", "not installed", "overwrite")) for why in reasons.values()
    ), reasons
    assert {
        "zero1",
        "zero1_bf16_wire",
        "ddp",
        *("fsdp_zero3", "fsdp_zero3_split", "fsdp_zero3_kept", "fsdp_zero3_unfused", "fsdp_zero2", "fsdp_zero1"),
        "torch_ddp",
        "fsdp2_zero2",
        "fsdp2_zero3",
        *("fsdp_zero3_reduced_once", "fsdp2_zero3_split"),
    } <= rows.keys() - reasons.keys()
    (section,) = sections_of(list(rows.values()))
    assert not odd_losses(section)
