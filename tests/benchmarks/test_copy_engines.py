"""docs/benchmarks/copy_engines.py: gathers under products, and the size from which copy engines gain."""

import math
from pathlib import Path

import copy_engines
import pytest
import torch
from copy_engines import CopyEnginesBench, bench_copy_engines, gains_from, write_report
from ranks import Ranks
from scripts_of_benchmarks import under_torchrun
from tables import Measurement, read_csv

SMALL = ["--sizes", "1", "2", "--num-steps", "1", "--num-rounds", "1", "--num-warmup-steps", "1", "--most-buckets", "2"]
SMALL += ["--num-tokens", "4", "--features", "64"]


def row(mib: int, kernels: float, engines: float) -> Measurement:
    times = {"products_us": 1.0, "kernels_us": kernels, "engines_us": engines}
    others = dict.fromkeys(("alone_us", "host_us", "num_kernels"), math.nan)
    more = {f"{way}_{name}": value for way in copy_engines.WAYS for name, value in others.items()}
    return Measurement(mib=mib, num_buckets=2, num_ranks=2, **times, **more)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({4: 1.2, 8: 0.9, 16: 1.1, 32: 0.9, 64: 0.8}, 32),  # 8 alone gains by chance
        ({4: 1.0, 8: 1.005}, 4),
        ({4: 0.8, 8: 1.1}, None),
        ({4: math.nan}, None),
    ],
)
def test_the_size_from_which_copy_engines_gain(ratios: dict[int, float], expected: int | None, tmp_path: Path) -> None:
    rows = [row(mib, 100.0, 100.0 * ratio) for mib, ratio in ratios.items()]
    assert gains_from(rows) == expected
    text = write_report(rows, CopyEnginesBench(out_dir=tmp_path))
    assert (f"from {expected} MiB on" if expected else "do not gain") in text


def test_the_published_table_is_what_the_library_chooses_by() -> None:
    from maingrad.ddp.buckets.copy_engines import MIN_SHARD_NBYTES

    published = read_csv(Path(copy_engines.__file__).with_suffix(".csv"))
    assert gains_from(published) == 2 * MIN_SHARD_NBYTES // 2**20  # two ranks


def test_one_rank_without_a_gpu_measures_products_alone() -> None:
    bench = CopyEnginesBench(
        sizes=(1,), features=64, num_tokens=4, most_buckets=2, num_steps=1, num_rounds=1, num_warmup_steps=1
    )
    (found,) = bench_copy_engines(bench, Ranks.alone(torch.device("cpu")))
    assert found.products_us > 0
    assert "engines_us" not in found


@pytest.mark.slow
def test_two_ranks_gather(tmp_path: Path) -> None:
    done = under_torchrun("copy_engines.py", "--out-dir", str(tmp_path), *SMALL, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [found.mib for found in read_csv(tmp_path / "copy_engines.csv")] == [1, 2]
    assert "Copy engines need CUDA devices" in (tmp_path / "copy_engines.md").read_text()
