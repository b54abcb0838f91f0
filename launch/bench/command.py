"""``maingrad bench WHAT``: reads the sizes of one benchmark from the command line, measures, and writes the table."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro

from ...kernels.compat import HAS_TRITON
from ..config.error import ConfigError
from ..training.runtime import process_group_from_env

__all__ = ["BENCHES", "run_bench"]

Log = Callable[[str], None]
Read = Callable[..., Any]
"""Takes a dataclass of options, and ``default``, an instance of it; returns the options of the command line."""


def run_bench(what: str, out_dir: Path, arguments: list[str]) -> int:
    """Run the benchmark ``what``; returns the exit status.

    arguments  the benchmark's own options

    Raises ``ConfigError`` for options and machines that the benchmark cannot use.
    """

    def log(line: str) -> None:
        if _is_main():
            print(line, flush=True)

    if what == "host" and arguments:
        raise ConfigError(f"bench host takes --out-dir alone; got {' '.join(arguments)}")
    return BENCHES[what](out_dir, partial(tyro.cli, args=arguments, prog=f"maingrad bench {what}"), log)


def _is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _sizes_of_steps(read: Read) -> Any:
    from .accumulation import AccumulationBench

    # The published sizes are for a GPU. A CPU gets sizes that take a minute.
    small = AccumulationBench(dim=256, num_layers=2, vocab_size=1024, num_tokens=256, num_steps=3, num_warmup_steps=1)
    return read(AccumulationBench, default=AccumulationBench() if torch.cuda.is_available() else small)


def _accumulation(out_dir: Path, read: Read, log: Log) -> int:
    from .accumulation import bench_accumulation, write_accumulation_report

    bench = _sizes_of_steps(read)
    with process_group_from_env("auto"):
        print(write_accumulation_report(bench_accumulation(bench, _device(), log), bench, out_dir))
    return 0


def _delayed(out_dir: Path, read: Read, log: Log) -> int:
    from .delayed import bench_delayed, write_delayed_report

    bench = _sizes_of_steps(read)
    with process_group_from_env("auto"):
        rows = bench_delayed(bench, _device(), log)
        if _is_main():
            print(write_delayed_report(rows, bench, out_dir))
    return 0


def _checkpoint(out_dir: Path, read: Read, log: Log) -> int:
    from .checkpoint import CheckpointBench, bench_checkpoint, write_checkpoint_report

    bench = read(CheckpointBench)
    with process_group_from_env("cpu"):
        rows = bench_checkpoint(bench, log)
        if _is_main():
            print(write_checkpoint_report(rows, bench, out_dir))
    return 0


def _host(out_dir: Path, read: Read, log: Log) -> int:
    from .host.gathers import bench_gathers
    from .host.hooks import bench_hooks
    from .host.layers import bench_host, write_host_report
    from .host.units import bench_units

    device = _device()
    tables = bench_host(device), bench_hooks(device), bench_gathers(device), bench_units(device)
    print(write_host_report(*tables, out_dir))
    return 0


def _moe(out_dir: Path, read: Read, log: Log) -> int:
    from .moe import MoEBench, bench_moe, write_moe_report

    small = MoEBench(dim=64, num_layers=1, num_heads=2, num_experts=4, top_k=2, expert_ffn_dim=32, num_tokens=64)
    bench = read(MoEBench, default=MoEBench() if torch.cuda.is_available() else small)
    print(write_moe_report(bench_moe(bench, _device(), log), bench, out_dir))
    return 0


def _kernels(out_dir: Path, read: Read, log: Log) -> int:
    """Returns status 1 if one of maingrad's kernels computed a wrong result; the table names the kernel."""
    from .kernels.measure import KernelBench, bench_kernels
    from .kernels.report import write_kernel_report

    bench = read(KernelBench)
    table = bench_kernels(bench, _device(), log)
    print(write_kernel_report(table, out_dir))
    return int(table.wrong)


def _recipes(out_dir: Path, read: Read, log: Log) -> int:
    from .recipes import RecipesBench, bench_recipes, write_recipes_report

    bench = read(RecipesBench)
    print(write_recipes_report(*bench_recipes(bench, _device(), log), bench, out_dir))
    return 0


def _tune(out_dir: Path, read: Read, log: Log) -> int:
    if not HAS_TRITON:
        raise ConfigError("bench tune chooses between Triton kernels, and Triton is not installed: pip install triton")
    from .kernels.tune_report import TuneBench, bench_tune, cold_rows, write_cold_report

    bench = read(TuneBench)
    if not torch.cuda.is_available():
        raise ConfigError("bench tune measures configurations of kernels on a GPU, and torch sees no CUDA device")
    device = _device()
    rows = cold_rows(bench_tune(bench, device, out_dir, log), device)
    if rows:
        print(write_cold_report(rows, out_dir))
    return 0


def _data_parallel(out_dir: Path, read: Read, log: Log) -> int:
    """Returns status 1 if the loss of a maingrad row differs from the other rows'; the table names the row."""
    from ..report.table import machine
    from .data_parallel.fsdp_rows import FSDP
    from .data_parallel.measure import (
        DataParallelBench,
        Measurement,
        bench_data_parallel,
        choose_rows,
        choose_settings,
    )
    from .data_parallel.peers import peer_versions
    from .data_parallel.ranks import Ranks
    from .data_parallel.report import sections_of, write_data_parallel_report
    from .data_parallel.rows import OURS
    from .data_parallel.sections import read_rows

    bench = read(DataParallelBench)
    choose_settings(bench.settings)
    choose_rows(bench)
    csv = out_dir / f"{bench.stem}.csv"
    if bench.redraw:
        measured = read_rows(csv, Measurement)
        is_main = True
        if not measured:
            raise ConfigError(f"'{csv}' holds no measurements that could be drawn again")
    else:
        ranks = Ranks.from_env(bench.timeout)
        is_main = ranks.rank == 0

        def save(rows: list[Measurement]) -> None:
            if is_main:
                write_data_parallel_report(rows, out_dir, bench.stem)

        about = f"{machine()}, {peer_versions()}"
        measured = bench_data_parallel(bench, ranks, out_dir, machine=about, log=log, save=save)
    if not is_main:
        return 0
    print(write_data_parallel_report(measured, out_dir, bench.stem))
    try:
        from .data_parallel.plot import draw_data_parallel
    except ImportError as error:
        print(f"no picture: {error}; `maingrad bench data-parallel --redraw` makes it from the CSV elsewhere")
    else:
        print(draw_data_parallel(read_rows(csv, Measurement), csv.with_suffix(".png")))
    odd = [row.row for section in sections_of(measured) for row in section.odd_losses()]
    return int(any(row in OURS or row in FSDP for row in odd))


def _models(out_dir: Path, read: Read, log: Log) -> int:
    """Returns status 1 if the loss of a row differs from the first row's; the table names the row."""
    from ..report.table import machine
    from .data_parallel.peers import peer_versions
    from .data_parallel.ranks import Ranks
    from .models.architectures import transformers_version
    from .models.measure import Measurement, ModelsBench, bench_models, choose_architecture, choose_rows
    from .models.report import odd_losses, sections_of, write_models_report

    bench = read(ModelsBench)
    choose_architecture(bench)
    choose_rows(bench)
    about = ", ".join(filter(None, (machine(), transformers_version(), peer_versions())))
    ranks = Ranks.from_env(bench.timeout)

    def save(rows: list[Measurement]) -> None:
        if ranks.rank == 0:
            write_models_report(rows, out_dir, bench.stem)

    measured = bench_models(bench, ranks, machine=about, log=log, save=save)
    if ranks.rank == 0:
        print(write_models_report(measured, out_dir, bench.stem))
    return int(any(odd_losses(section) for section in sections_of(measured)))


BENCHES: Mapping[str, Callable[[Path, Read, Log], int]] = {
    "accumulation": _accumulation,
    "checkpoint": _checkpoint,
    "data-parallel": _data_parallel,
    "delayed": _delayed,
    "host": _host,
    "kernels": _kernels,
    "models": _models,
    "moe": _moe,
    "recipes": _recipes,
    "tune": _tune,
}
