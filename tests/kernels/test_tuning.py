"""Tuning tables: what a lookup finds and refuses, and tables that are loaded beside the shipped table."""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from maingrad.kernels import tuning
from maingrad.kernels.compat import HAS_TRITON
from maingrad.kernels.tuning import (
    COLUMNS,
    CUBLAS,
    Problem,
    TunedRow,
    gpu_name,
    load_tuning_table,
    nearest,
    parse_table,
    tuned_config,
)

HEADER = ",".join(COLUMNS) + "\n"
OP = "grouped_wgrad_accumulate"
GPU = "A GPU that nobody sells"
BLOCKS = "block_n=128 block_k=256 block_t=64 num_warps=8 num_stages=4"


def line(problem: Problem, config: str = BLOCKS, ms: str = "1.5", gpu: str = GPU) -> str:
    return ",".join([gpu, *map(str, problem), config, ms, "2026-11-21", "2.13.0", "3.7.0"]) + "\n"


def row(problem: Problem, config: str = BLOCKS, gpu: str = GPU) -> TunedRow:
    return TunedRow(gpu, problem, config, 1.5, "2026-11-21", "2.13.0", "3.7.0")


def sized(experts: int, rows: int, n: int, k: int, op: str = OP, dtype: str = "bfloat16") -> Problem:
    return Problem(op, dtype, experts, rows, n, k)


BASE = sized(64, 32768, 2048, 2048)


@pytest.fixture
def nothing_loaded_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the tables that a test has loaded."""
    monkeypatch.setattr(tuning, "_added", [])
    tuned_config.cache_clear()
    yield
    tuned_config.cache_clear()


# ---- Distance. ----


def test_no_distance_to_itself() -> None:
    assert BASE.distance(BASE) == 0


@pytest.mark.parametrize(
    ("other", "distance"),
    [
        (sized(64, 65536, 2048, 2048), 1.0),
        (sized(64, 32768, 8192, 2048), 2.0),
        (sized(64, 32768, 2048, 1024), 1.0),
        (sized(64, 32768, 1024, 4096), 2.0),  # wide and flat are not alike, though they have one area
        (sized(128, 65536, 2048, 2048), 0.25),  # more experts of the same size
        (sized(128, 32768, 2048, 2048), 1.25),  # more experts with fewer rows each
    ],
)
def test_distance_is_in_powers_of_two(other: Problem, distance: float) -> None:
    assert BASE.distance(other) == pytest.approx(distance)
    assert other.distance(BASE) == pytest.approx(distance)


def test_experts_without_rows_have_a_distance() -> None:
    """A fraction of a row for each expert, and none at all, count as one."""
    assert sized(64, 0, 2048, 2048).distance(sized(64, 64, 2048, 2048)) == 0
    assert sized(64, 32, 2048, 2048).distance(sized(64, 64, 2048, 2048)) == 0


# ---- The nearest row. ----


def test_the_nearest_row_serves_a_shape_that_was_not_measured() -> None:
    near, far = row(sized(64, 16384, 2048, 2048)), row(sized(8, 16384, 4096, 4096))
    assert nearest(GPU, BASE, (far, near)) is near


def test_the_first_of_equals_serves() -> None:
    half, double = row(sized(64, 16384, 2048, 2048)), row(sized(64, 65536, 2048, 2048))
    assert nearest(GPU, BASE, (half, double)) is half
    assert nearest(GPU, BASE, (double, half)) is double


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(row(BASE, gpu="Another GPU"), id="another GPU"),
        pytest.param(row(BASE._replace(op="grouped_wgrad_overwrite")), id="another op"),
        pytest.param(row(BASE._replace(dtype="float32")), id="another dtype"),
    ],
)
def test_what_was_measured_of_something_else_serves_nothing(other: TunedRow) -> None:
    assert nearest(GPU, BASE, (other,)) is None


def test_a_far_shape_serves_nothing() -> None:
    assert nearest(GPU, BASE, (row(sized(64, 16 * 32768, 2048, 2048)),)) is not None  # four powers of two
    assert nearest(GPU, BASE, (row(sized(64, 32 * 32768, 2048, 2048)),)) is None


@pytest.mark.parametrize("op", ["wgrad_accumulate", "wgrad_overwrite"])
def test_of_dense_products_only_a_near_shape_serves(op: str) -> None:
    """cuBLAS, their default, is good everywhere."""
    dense = sized(1, 1024, 4096, 4096, op=op)
    assert nearest(GPU, dense, (row(dense._replace(rows=1448)),)) is not None  # half a power of two
    for sizes in ({"rows": 1449}, {"rows": 1300, "n": 3500}):
        assert nearest(GPU, dense, (row(dense._replace(**sizes)),)) is None


# ---- The file. ----


def test_a_table_is_read_as_it_was_written() -> None:
    dense = sized(1, 2048, 4096, 4096, op="wgrad_accumulate")
    rows = parse_table(HEADER + line(BASE) + line(dense, CUBLAS, ms="0.125"), "here")
    assert rows == [row(BASE), row(dense, CUBLAS)._replace(ms=0.125)]


def test_a_table_without_rows_has_none() -> None:
    assert parse_table(HEADER, "here") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "here: the columns must be gpu,op", id="empty"),
        pytest.param(HEADER.replace(",ms", ""), "here: the columns must be gpu,op", id="a column is missing"),
        pytest.param(
            HEADER + line(BASE) + line(BASE).replace("32768", "many"),
            "here, line 3: invalid literal.*many",
            id="a size that is no number",
        ),
        pytest.param(HEADER + line(BASE, ms="fast"), "here, line 2: could not convert.*fast", id="a time that is none"),
        pytest.param(HEADER + f"{GPU},{OP}\n", "here, line 2", id="a line that ends early"),
        *(
            pytest.param(
                HEADER + line(BASE._replace(**{name: size})),
                "line 2: sizes and ms must be positive",
                id=f"{size} {name}",
            )
            for name, size in (("experts", 0), ("rows", 0), ("n", -1), ("k", 0))
        ),
        pytest.param(HEADER + line(BASE, ms="0"), "line 2: sizes and ms must be positive", id="no time"),
        pytest.param(HEADER + line(BASE, ms="nan"), "line 2: sizes and ms must be positive", id="NaN for a time"),
        pytest.param(HEADER + line(BASE, config=""), "config must not be empty", id="no config"),
        pytest.param(HEADER + line(BASE, config=" "), "config must not be empty", id="a blank config"),
        pytest.param(HEADER + line(BASE, config="block_n"), "line 2: config must be name=number.*'block_n'", id="no ="),
        pytest.param(HEADER + line(BASE, config="tma=True"), "line 2: config must be.*'tma=True'", id="no number"),
    ],
)
def test_a_broken_table_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_table(text, "here")


# ---- Lookups. ----


@pytest.mark.usefixtures("nothing_loaded_stays")
def test_an_unknown_gpu_has_no_configuration() -> None:
    assert tuned_config(GPU, BASE) is None


@pytest.mark.usefixtures("nothing_loaded_stays")
def test_a_loaded_table_is_looked_up(tmp_path: Path) -> None:
    assert tuned_config(GPU, BASE) is None  # and this lookup must not be cached
    dense = sized(1, 2048, 4096, 4096, op="wgrad_accumulate")
    (tmp_path / "mine.csv").write_text(HEADER + line(BASE) + line(dense, CUBLAS))
    load_tuning_table(tmp_path / "mine.csv")
    expected = {"block_n": 128, "block_k": 256, "block_t": 64, "num_warps": 8, "num_stages": 4}
    assert tuned_config(GPU, BASE) == expected
    assert tuned_config(GPU, BASE._replace(rows=40000)) == expected
    assert tuned_config(GPU, dense) == CUBLAS
    assert tuned_config("Another GPU", BASE) is None


@pytest.mark.usefixtures("nothing_loaded_stays")
def test_the_table_that_was_loaded_last_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_shipped", lambda: [row(BASE, "num_warps=1")])
    assert tuned_config(GPU, BASE) == {"num_warps": 1}
    for warps in ("2", "4"):
        (tmp_path / "mine.csv").write_text(HEADER + line(BASE, f"num_warps={warps}"))
        load_tuning_table(str(tmp_path / "mine.csv"))
        assert tuned_config(GPU, BASE) == {"num_warps": int(warps)}
    dense = sized(1, 2048, 4096, 4096, op="wgrad_accumulate")
    (tmp_path / "other.csv").write_text(HEADER + line(dense, CUBLAS))
    load_tuning_table(tmp_path / "other.csv")
    assert (tuned_config(GPU, BASE), tuned_config(GPU, dense)) == ({"num_warps": 4}, CUBLAS), "both tables serve"


@pytest.mark.usefixtures("nothing_loaded_stays")
def test_a_broken_table_is_named_and_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(HEADER + line(BASE) + line(BASE, ms="-1"))
    with pytest.raises(ValueError, match=r"mine\.csv, line 3: sizes and ms must be positive"):
        load_tuning_table(tmp_path / "mine.csv")
    assert tuned_config(GPU, BASE) is None


# ---- What ships. ----


def shipped() -> list[TunedRow]:
    text = resources.files("maingrad.kernels").joinpath("tuned.csv").read_text()
    return parse_table(text, "tuned.csv")


def test_the_shipped_table_has_one_row_for_each_problem() -> None:
    measured = [(row.gpu, row.problem) for row in shipped()]
    assert len(measured) == len(set(measured))


@pytest.mark.skipif(not HAS_TRITON, reason="configurations are those of Triton kernels")
def test_every_shipped_row_is_a_configuration_of_its_kernel() -> None:
    from maingrad.kernels.grouped.gemm_triton import GemmConfig
    from maingrad.kernels.grouped.wgrad_config import WgradConfig

    kinds = {
        "grouped_linear": GemmConfig,
        "grouped_dgrad": GemmConfig,
        OP: WgradConfig,
        "grouped_wgrad_overwrite": WgradConfig,
        "wgrad_accumulate": WgradConfig,
        "wgrad_overwrite": WgradConfig,
    }
    for each in shipped():
        config = tuned_config(each.gpu, each.problem)
        if each.config == CUBLAS:
            assert config == CUBLAS
            assert each.problem.experts == 1, each
        else:
            assert isinstance(config, dict)
            kinds[each.problem.op](**config)


@pytest.mark.skipif(not HAS_TRITON, reason="configurations are those of Triton kernels")
def test_candidates_are_what_was_fastest_somewhere() -> None:
    from maingrad.kernels.grouped.gemm_triton import GEMM_CANDIDATES, GemmConfig, default_gemm_config
    from maingrad.kernels.grouped.wgrad_config import WGRAD_CANDIDATES, WgradConfig, default_wgrad_config

    fastest: set[Any] = set()
    for each in shipped():
        config = tuned_config(each.gpu, each.problem)
        if isinstance(config, dict):
            fastest.add((WgradConfig if "wgrad" in each.problem.op else GemmConfig)(**config))
    candidates: set[Any] = {*GEMM_CANDIDATES, *WGRAD_CANDIDATES}
    assert fastest <= candidates
    rows = 1, 512, 4096
    defaults: set[Any] = {default_gemm_config(torch.bfloat16, (9, 0), each) for each in rows}
    defaults |= {default_wgrad_config(torch.bfloat16, (9, 0), each) for each in rows}
    assert {each for each in candidates if each.tma} <= fastest | defaults
    assert sum(not each.tma for each in GEMM_CANDIDATES) == 3, "for GPUs before sm90"


@pytest.mark.skipif(not HAS_TRITON, reason="configurations are those of Triton kernels")
def test_what_was_not_measured_has_tiles_by_rows_and_gpu() -> None:
    from maingrad.kernels.grouped.gemm_triton import default_gemm_config, default_scaled_gemm_config
    from maingrad.kernels.grouped.wgrad_config import default_wgrad_config

    half, single, hopper = torch.bfloat16, torch.float32, (9, 0)
    for dtype, capability, rows, gemm, wgrad in (
        (half, hopper, 16, (64, 128, 64), (64, 128, 32)),
        (half, hopper, 64, (64, 128, 64), (64, 128, 32)),
        (half, hopper, 64.5, (128, 256, 64), (64, 128, 32)),
        (half, hopper, 256, (128, 256, 64), (64, 128, 32)),
        (half, hopper, 256.5, (128, 256, 64), (128, 128, 32)),
        (half, hopper, 1023.5, (128, 256, 64), (128, 128, 32)),
        (torch.float16, hopper, 1024, (128, 256, 64), (128, 256, 64)),
        (half, (10, 0), 4096, (128, 256, 64), (128, 256, 64)),
        (half, (8, 0), 4096, (128, 128, 32), (128, 128, 32)),
        (half, None, 4096, (128, 128, 32), (128, 128, 32)),
        (single, hopper, 4096, (64, 64, 32), (64, 64, 32)),
        (single, None, 16, (64, 64, 32), (64, 64, 32)),
    ):
        newer = dtype is not single and capability is not None and capability >= (9, 0)
        for found, tile in (
            (default_gemm_config(dtype, capability, rows), gemm),
            (default_wgrad_config(dtype, capability, rows), wgrad),
        ):
            assert found[:3] == tile and found.tma is newer, (found, rows)
            assert getattr(found, "parts", 1) in (1, 2, 4), "blocks of columns are halved"
    # More stages than 2 need the asynchronous copies of NVIDIA's.
    assert default_gemm_config(half, None, 1).num_stages == default_wgrad_config(half, None, 1).num_stages == 2
    for rows, blocks, tile in ((1024, False, 64), (1025, False, 128), (4096, True, 64)):
        config = default_scaled_gemm_config(rows, blocks=blocks)
        assert config.block_m == tile and config.block_c == 128, "after which a sum leaves the tensor cores"


def test_a_device_without_a_gpu_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_name(torch.device("cpu")) == "none"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU of kind {device.index}")
    for index in (1, 0):  # in one host they may differ
        assert gpu_name(torch.device("cuda", index)) == f"a GPU of kind {index}"
    gpu_name.cache_clear()
