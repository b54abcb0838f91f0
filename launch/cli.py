"""The command line. Heavy imports wait until the command is known, so that help and mistakes answer at once."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .training.signals import EXIT_INTERRUPTED, StopRequest, stop_on_signals

__all__ = ["main"]

_USAGE_ERROR = 2
_OVERRIDES = (
    "Overrides of the file's values: --train.steps 10 --ddp.bucket-size 65536; --help after the file lists all."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0: done. 2: a configuration or data that cannot be used. 130: ended by Ctrl-C or SIGTERM.
    """
    parser = argparse.ArgumentParser(prog="maingrad", description="Train, plan and simulate main_grad runs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a GPT as a TOML file says; also under torchrun", epilog=_OVERRIDES)
    plan = commands.add_parser("plan", help="buckets, padding and bytes per rank, without training", epilog=_OVERRIDES)
    simulate = commands.add_parser("simulate", help="train on ranks simulated in this process", epilog=_OVERRIDES)
    for command, run in ((train, _train), (plan, _plan), (simulate, _simulate)):
        command.add_argument("config", type=Path, metavar="CONFIG.toml")
        command.set_defaults(run=run)
    for command in (plan, simulate):
        command.add_argument("--ranks", type=_positive, required=True, help="number of ranks")
    simulate.add_argument("--schedule-seed", type=int, default=0, help="order in which ranks take turns")
    report = commands.add_parser("report", help="draw a run's pictures again, or compare two runs")
    report.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="folders of runs")
    report.add_argument("--compare", type=Path, nargs=2, metavar=("BASE", "RUN"), help="two runs over the same tokens")
    report.add_argument("--out-dir", type=Path, default=Path("runs/compare"), help="where the comparison goes")
    report.add_argument("--stem", default="comparison", help="its files are STEM.csv, STEM.md and STEM.png")
    report.set_defaults(run=_report)
    export = commands.add_parser("export", help="weights of a checkpoint as one safetensors file")
    export.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a checkpoint")
    export.add_argument("target", type=Path, metavar="TARGET.safetensors", help="file to write")
    export.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of all weights, rounded from the fp32 masters where there are any; otherwise each one's own",
    )
    export.set_defaults(run=_export)
    bench = commands.add_parser("bench", help="measure on this machine", epilog="Sizes: --dim 1024 --num-layers 4 ...")
    bench.add_argument(
        "what",
        choices=["accumulation", "checkpoint", "data-parallel", "delayed", "host", "kernels", "moe", "tune"],
        help="fused, hook and autograd accumulation; checkpoints beside torch's (torchrun); "
        "data parallelism, ours and others' (torchrun, GPUs); reductions "
        "under delayed weight gradients (torchrun, GPUs); "
        "host time of one layer; kernels against their rooflines and rivals; a training step of a mixture of experts; "
        "the kernels' configurations by shape (GPU)",
    )
    bench.add_argument("--out-dir", type=Path, default=Path("runs/bench"), help="where the table goes")
    bench.set_defaults(run=_bench)

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    helps = {"-h", "--help"}
    if len(arguments) > 2 and arguments[1].endswith(".toml") and helps.intersection(arguments[2:]):
        known, overrides = argparse.Namespace(run=_help, config=Path(arguments[1])), list[str]()
    elif arguments[:1] == ["bench"] and arguments[1:2] != ["host"] and helps.intersection(arguments[2:]):
        known, _ = parser.parse_known_args(arguments[:2])
        overrides = ["--help"]  # of what is measured, and not of the command
    else:
        known, overrides = parser.parse_known_args(arguments)
    with stop_on_signals() as stop:
        return _refusing(known, overrides, stop)


def _refusing(known: argparse.Namespace, overrides: list[str], stop: StopRequest) -> int:
    """Run the command; what the user can mend is said in a line, without a traceback."""
    from ..ddp import CollectiveError
    from .config.run import ConfigError
    from .data.batches import DataError
    from .simulation.simulate import SimulatedRankError

    try:
        try:
            status: int = known.run(known, overrides, stop)
        except SimulatedRankError as error:  # a simulated rank's mistakes are answered as a real one's
            if isinstance(error.__cause__, ConfigError | DataError | CollectiveError):
                raise error.__cause__ from None
            raise
    except (ConfigError, DataError) as error:
        print(f"maingrad: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except CollectiveError as error:  # another rank is gone: its report is all there is to say
        print(f"maingrad: error: {error}", file=sys.stderr)
        return 1
    return status


def _train(known: argparse.Namespace, overrides: list[str], stop: StopRequest) -> int:
    from .config.file import load_config
    from .training.runtime import process_group_from_env
    from .training.train import train

    config = load_config(known.config, overrides)
    with process_group_from_env(config.train.device):
        result = train(config, stop=stop)
    return _finish(Path(config.train.out_dir), is_main=result.is_main, interrupted=result.interrupted)


def _simulate(known: argparse.Namespace, overrides: list[str], stop: StopRequest) -> int:
    from .config.file import load_config
    from .simulation.simulate import simulate
    from .training.train import train

    config = load_config(known.config, overrides)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, device="cpu"))
    results = simulate(train, known.ranks, config, seed=known.schedule_seed, stop=stop)
    return _finish(Path(config.train.out_dir), is_main=True, interrupted=results[0].interrupted)


def _plan(known: argparse.Namespace, overrides: list[str], stop: StopRequest) -> int:
    from rich.console import Console

    from .config.file import load_config
    from .plan.plan import plan_run, plan_units
    from .plan.tables import plan_tables

    config = load_config(known.config, overrides)
    plan = plan_units(config, known.ranks) if config.fully_sharded else plan_run(config, known.ranks)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file or a pipe has no width; names should stay on one line
    for table in plan_tables(plan):
        console.print(table)
    return 0


def _report(known: argparse.Namespace, overrides: list[str], stop: StopRequest) -> int:
    from .config.run import ConfigError
    from .report.compare import compare_runs

    if overrides or not (known.runs or known.compare):
        raise ConfigError(
            f"report takes folders of runs, or --compare BASE RUN; got {' '.join(overrides) or 'neither'}"
        )
    for run in known.runs:
        if not (run / "metrics.jsonl").exists():
            raise ConfigError(f"'{run}' is not the folder of a run: it has no metrics.jsonl")
        _draw(run)
    if known.compare:
        base, other = known.compare
        print(compare_runs(base, other, known.out_dir, known.stem))
    return 0


def _export(known: argparse.Namespace, overrides: list[str], stop: StopRequest) -> int:
    import torch

    from .config.run import ConfigError
    from .safetensors_io import export_safetensors

    if overrides:
        raise ConfigError(f"export takes a checkpoint, a file and --dtype; got {' '.join(overrides)}")
    try:
        export_safetensors(known.checkpoint, known.target, dtype=known.dtype and getattr(torch, known.dtype))
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    print(known.target)
    return 0


def _bench(known: argparse.Namespace, overrides: list[str], stop: StopRequest) -> int:
    import torch
    import tyro

    from .bench.accumulation import AccumulationBench, bench_accumulation, write_accumulation_report
    from .config.run import ConfigError
    from .training.runtime import process_group_from_env

    is_main = int(os.environ.get("RANK", "0")) == 0

    def log(line: str) -> None:
        if is_main:
            print(line, flush=True)

    on_cuda = torch.cuda.is_available()
    if known.what == "host":
        if overrides:
            raise ConfigError(f"bench host takes --out-dir alone; got {' '.join(overrides)}")
        from .bench.gathers import bench_gathers
        from .bench.hooks import bench_hooks
        from .bench.host import bench_host, write_host_report
        from .bench.units import bench_units

        here = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        tables = bench_host(here), bench_hooks(here), bench_gathers(here), bench_units(here)
        print(write_host_report(*tables, known.out_dir))
        return 0
    if known.what in ("kernels", "tune"):
        return _bench_kernels(known, overrides, log)
    if known.what == "data-parallel":
        return _bench_data_parallel(known, overrides, log)
    if known.what == "moe":
        from .bench.moe import MoEBench, bench_moe, write_moe_report

        few = MoEBench(dim=64, num_layers=1, num_heads=2, num_experts=4, top_k=2, expert_ffn_dim=32, num_tokens=64)
        sizes = tyro.cli(MoEBench, args=overrides, default=MoEBench() if on_cuda else few, prog="maingrad bench moe")
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        print(write_moe_report(bench_moe(sizes, device, log), sizes, known.out_dir))
        return 0
    if known.what == "checkpoint":
        from .bench.checkpoint import CheckpointBench, bench_checkpoint, write_checkpoint_report

        saved = tyro.cli(CheckpointBench, args=overrides, prog="maingrad bench checkpoint")
        with process_group_from_env("cpu"):
            checkpoint_rows = bench_checkpoint(saved, log)
            if is_main:
                print(write_checkpoint_report(checkpoint_rows, saved, known.out_dir))
        return 0
    # The published setting is for a GPU; what a CPU can do in a minute is much smaller.
    small = AccumulationBench(dim=256, num_layers=2, vocab_size=1024, num_tokens=256, num_steps=3, num_warmup_steps=1)
    default = AccumulationBench() if on_cuda else small
    bench = tyro.cli(AccumulationBench, args=overrides, default=default, prog=f"maingrad bench {known.what}")
    with process_group_from_env("auto"):
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        if known.what == "delayed":
            from .bench.delayed import bench_delayed, write_delayed_report

            delayed_rows = bench_delayed(bench, device, log)
            if is_main:
                print(write_delayed_report(delayed_rows, bench, known.out_dir))
        else:
            print(write_accumulation_report(bench_accumulation(bench, device, log), bench, known.out_dir))
    return 0


def _bench_data_parallel(known: argparse.Namespace, overrides: list[str], log: Callable[[str], None]) -> int:
    """Status 1: a loss of one of our rows is not the others', which the table says."""
    import tyro

    from .bench.data_parallel.fsdp_rows import FSDP
    from .bench.data_parallel.measure import (
        DataParallelBench,
        Measurement,
        bench_data_parallel,
        choose_rows,
        choose_settings,
    )
    from .bench.data_parallel.peers import peer_versions
    from .bench.data_parallel.ranks import Ranks
    from .bench.data_parallel.report import read_measurements, sections_of, write_data_parallel_report
    from .bench.data_parallel.rows import OURS
    from .config.run import ConfigError
    from .report.table import machine

    bench = tyro.cli(DataParallelBench, args=overrides, prog="maingrad bench data-parallel")
    choose_settings(bench.settings)
    choose_rows(bench)
    out_dir: Path = known.out_dir
    csv = out_dir / f"{bench.stem}.csv"
    if bench.redraw:
        measured = read_measurements(csv)
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
        from .bench.data_parallel.plot import draw_data_parallel
    except ImportError as error:
        print(f"no picture: {error}; `maingrad bench data-parallel --redraw` makes it from the CSV elsewhere")
    else:
        print(draw_data_parallel(read_measurements(csv), csv.with_suffix(".png")))
    return int(
        any(row.row in OURS or row.row in FSDP for section in sections_of(measured) for row in section.odd_losses())
    )


def _bench_kernels(known: argparse.Namespace, overrides: list[str], log: Callable[[str], None]) -> int:
    """Status 1: one of our own kernels was wrong, which the table says."""
    import torch
    import tyro

    from ..kernels.compat import HAS_TRITON
    from .bench.kernels.measure import KernelBench, bench_kernels
    from .bench.kernels.report import write_kernel_report
    from .config.run import ConfigError

    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    if known.what == "kernels":
        bench = tyro.cli(KernelBench, args=overrides, prog="maingrad bench kernels")
        table = bench_kernels(bench, device, log)
        print(write_kernel_report(table, known.out_dir))
        return int(table.wrong)
    if not HAS_TRITON:
        raise ConfigError("bench tune chooses between Triton kernels, and Triton is not installed: pip install triton")
    from .bench.kernels.tune_report import TuneBench, bench_tune, cold_rows, write_cold_report

    choice = tyro.cli(TuneBench, args=overrides, prog="maingrad bench tune")
    if not on_cuda:
        raise ConfigError("bench tune measures configurations of kernels on a GPU, and torch sees no CUDA device")
    rows = cold_rows(bench_tune(choice, device, known.out_dir, log), device)
    if rows:
        print(write_cold_report(rows, known.out_dir))
    return 0


def _help(known: argparse.Namespace, overrides: list[str], stop: StopRequest) -> int:
    """Help that is asked for after the file lists every key, with the file's own values as defaults."""
    from .config.file import load_config

    load_config(known.config, ["--help"])
    return 0


def _finish(out_dir: Path, *, is_main: bool, interrupted: bool) -> int:
    """Draw the pictures of a run that went to its end."""
    if interrupted:
        return EXIT_INTERRUPTED
    if is_main:
        _draw(out_dir)
    return 0


def _draw(out_dir: Path) -> None:
    """The pictures of a run, and what its recorded step says of overlap."""
    from .report.overlap import overlap_lines
    from .report.report import draw_report, last_timeline

    for line in overlap_lines(last_timeline(out_dir)):
        print(line)
    for path in draw_report(out_dir):
        print(path, flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
