"""The command line. Heavy imports wait until the command is known, so that help and mistakes answer at once.

A command reads its configuration, or the records of its runs, before it imports what trains.
"""

import dataclasses
import difflib
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional, arg

from .config.error import ConfigError
from .training.signals import EXIT_INTERRUPTED, StopRequest, stop_on_signals

if TYPE_CHECKING:
    from rich.table import Table

    from .config.run import Config

__all__ = ["main"]

_USAGE_ERROR = 2

_ConfigFile = Annotated[Positional[Path], arg(metavar="CONFIG.toml", help="configuration file")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0: done. 1: `maingrad verify` has found an error. 2: a configuration, data or a program that cannot be used. 130:
    ended by Ctrl-C or SIGTERM.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    meant = difflib.get_close_matches(arguments[0], _COMMANDS, n=1) if arguments else []
    if meant and meant[0] != arguments[0]:
        return _say(f"there is no command '{arguments[0]}': did you mean '{meant[0]}'?", _USAGE_ERROR)
    try:
        command, flags = _parse(arguments)
    except ConfigError as error:
        return _say(error, _USAGE_ERROR)
    if flags and not hasattr(command, "config"):
        return _say(
            f"{arguments[0]} has no '{flags[0]}': maingrad {arguments[0]} --help lists what it has", _USAGE_ERROR
        )
    ranks = getattr(command, "ranks", None)
    if ranks is not None and ranks < 1:
        return _say(f"--ranks must be at least 1, got {ranks}", _USAGE_ERROR)
    with stop_on_signals() as stop:
        return _run(command, flags, stop)


@dataclass(frozen=True)
class Train:
    """train a language model as a TOML file says; also under torchrun

    Flags in place of the file's values: --train.steps 10 --ddp.bucket-size 65536; --help after the file lists all.
    """

    config: _ConfigFile
    dry_run: bool = False
    """check everything, print what the run would hold and write, and end"""
    ranks: int | None = None
    """with --dry-run: number of ranks; 1 if not given"""

    def run(self, flags: list[str], stop: StopRequest) -> int:
        if self.ranks is not None and not self.dry_run:
            raise ConfigError("--ranks goes with --dry-run; a run has as many ranks as torchrun starts")
        config = _load(self.config, flags)
        if self.dry_run:
            with _importing():
                from .plan.dry_run import dry_run, dry_run_tables
            _print_tables(dry_run_tables(dry_run(config, self.ranks or 1)))
            return 0
        with _importing():
            from .training.runtime import let_kernels_start_beside_host_memory, process_group_from_env
            from .training.train import train
        let_kernels_start_beside_host_memory()
        with process_group_from_env(config.train.device):
            result = train(config, stop=stop)
        return _finish(config, interrupted=result.interrupted, is_main=result.is_main)


@dataclass(frozen=True)
class Plan:
    """buckets, padding and bytes per rank, without training

    Flags in place of the file's values: --train.steps 10 --ddp.bucket-size 65536; --help after the file lists all.
    """

    config: _ConfigFile
    ranks: int
    """number of ranks"""

    def run(self, flags: list[str], stop: StopRequest) -> int:
        config = _load(self.config, flags)
        with _importing():
            from .plan.plan import plan_run
            from .plan.tables import plan_tables
        _print_tables(plan_tables(plan_run(config, self.ranks)))
        return 0


@dataclass(frozen=True)
class Simulate:
    """train on ranks simulated in this process

    Flags in place of the file's values: --train.steps 10 --ddp.bucket-size 65536; --help after the file lists all.
    """

    config: _ConfigFile
    ranks: int
    """number of ranks"""
    schedule_seed: int = 0
    """order in which ranks take turns"""

    def run(self, flags: list[str], stop: StopRequest) -> int:
        config = _load(self.config, flags)
        with _importing():
            from .simulation.simulate import simulate
            from .training.train import train
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, device="cpu"))
        results = simulate(train, self.ranks, config, seed=self.schedule_seed, stop=stop)
        return _finish(config, interrupted=results[0].interrupted)


@dataclass(frozen=True)
class Verify:
    """compare a model of yours in every way of the library with plain PyTorch, on ranks simulated in this process

    Status 0: gradients, norms and weights agree. 1: an error is found; the report names its cause.
    """

    target: Annotated[Positional[str], arg(metavar="FILE.py:FUNCTION")]
    """FUNCTION() returns (model, batch), (model, batch, loss), or a dict of arguments of maingrad.launch.verify"""
    ranks: int = 2
    """number of ranks"""
    num_microbatches: int = 2
    """of each rank"""
    ways: tuple[str, ...] = ()
    """names of ways, such as ddp zero1_converted fsdp; all by default"""
    accept: tuple[str, ...] = ()
    """causes that are no errors, such as batch_statistics"""
    seed: int = 0
    """of everything random"""

    def run(self, flags: list[str], stop: StopRequest) -> int:
        with _importing():
            from .verification.program import load_arguments
            from .verification.verify import verify
        options = [field for field in dataclasses.fields(self) if field.name != "target"]
        given = {each.name: getattr(self, each.name) for each in options if getattr(self, each.name) != each.default}
        try:
            found = verify(**{**load_arguments(self.target), **given})
        except (TypeError, ValueError) as error:
            # The program's own errors keep their traceback.
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
                raise ConfigError(str(error)) from None
            raise
        print(found)
        return 0 if found.ok else 1


@dataclass(frozen=True)
class Report:
    """one HTML page of a run or of several side by side, and their pictures"""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="[RUN ...]")] = ()
    """folders of runs"""
    page: Path | None = None
    """the HTML page; without it RUN/report.html, or OUT_DIR/report.html of several runs"""
    peak_tflops: float | None = None
    """peak TFLOP/s of a device, for MFU; without it dense bf16 of known GPUs"""
    out_dir: Path = Path("runs/compare")
    """where the page of several runs goes"""

    def run(self, flags: list[str], stop: StopRequest) -> int:
        if not self.runs:
            raise ConfigError("report takes folders of runs; got none")
        with _importing():
            from .report.run_folder import read_runs
        runs = read_runs(self.runs)
        with _importing():
            from .report.page import print_report, write_page
        folder = self.runs[0] if len(self.runs) == 1 else self.out_dir
        print(write_page(runs, self.page or folder / "report.html", peak_tflops=self.peak_tflops))
        for run in self.runs:
            print_report(run)
        return 0


@dataclass(frozen=True)
class Export:
    """weights of a checkpoint as one safetensors file, or as a folder of Hugging Face"""

    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """folder of a checkpoint"""
    target: Annotated[Positional[Path], arg(metavar="TARGET")]
    """file to write, which ends with .safetensors; otherwise a new folder, of a run with model.hugging_face"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """of all weights, rounded from the fp32 masters where there are any; otherwise each weight keeps its dtype"""
    trust_remote_code: bool = False
    """run the code that the config.json of the run's model.hugging_face asks for"""

    def run(self, flags: list[str], stop: StopRequest) -> int:
        import torch

        from .model.exporting import export

        try:
            dtype = self.dtype and getattr(torch, self.dtype)
            export(self.checkpoint, self.target, dtype=dtype, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from None
        print(self.target)
        return 0


@dataclass(frozen=True)
class Tokenize:
    """text as token files of Megatron: PREFIX.bin and PREFIX.idx

    A file is a document; in a .jsonl file each line is one.
    """

    prefix: Annotated[Positional[Path], arg(metavar="PREFIX")]
    """where the two files go"""
    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE ...")]
    """UTF-8 text"""
    tokenizer: Path | None = None
    """tokenizer.json of Hugging Face; otherwise tokens are bytes"""
    end_of_document: int | None = None
    """token id after each document"""
    key: str = "text"
    """of the text in a line of a .jsonl file"""

    def run(self, flags: list[str], stop: StopRequest) -> int:
        if not self.files:
            raise ConfigError("tokenize takes a prefix and files; got no files")
        if self.prefix.suffix in (".bin", ".idx"):
            raise ConfigError(f"'{self.prefix}' is to be a prefix: {self.prefix.with_suffix('')}, of .bin and .idx")
        if self.end_of_document is not None and self.end_of_document < 0:
            raise ConfigError(f"--end-of-document {self.end_of_document}: must not be negative; leave it out for none")
        from .data.tokenizing import tokenize_files

        count = tokenize_files(self.prefix, self.files, self.tokenizer, self.end_of_document, self.key)
        print(f"{self.prefix}.bin, {self.prefix}.idx: {count.documents} documents, {count.tokens} tokens")
        return 0


@dataclass(frozen=True)
class Tune:
    """time every configuration of the kernels on this GPU, and write the table of the fastest"""

    ops: tuple[str, ...] = ()
    """operations such as grouped_linear; all by default. Those that begin with wgrad_ take shapes of one expert"""
    shapes: tuple[str, ...] = ()
    """as EXPERTSxROWSxNxK, such as 64x32768x2048x2048; one expert is a dense layer. By default those of the shipped
    table"""
    out_dir: Path = Path("runs/tune")
    """where tuned.csv goes, which load_tuning_table reads, beside all timings"""

    def run(self, flags: list[str], stop: StopRequest) -> int:
        from ..kernels.compat import HAS_TRITON

        if not HAS_TRITON:
            raise ConfigError("tune chooses between Triton kernels, and Triton is not installed: pip install triton")
        from .tuning.tune import run_tune

        run_tune(self.ops, self.shapes, self.out_dir)
        return 0


_Command = Train | Plan | Simulate | Verify | Report | Export | Tokenize | Tune
"""Each has ``run(flags, stop)``. ``flags`` take the place of values in the configuration file, where it has one."""
_COMMANDS = ("train", "plan", "simulate", "verify", "report", "export", "tokenize", "tune")


def _parse(arguments: list[str]) -> tuple[_Command, list[str]]:
    """The command, and the flags that take the place of values in its configuration file."""
    if not {"-h", "--help"}.isdisjoint(arguments[2:]) and arguments[1].endswith(".toml"):
        from .config.file import load_config, print_keys

        print_keys(load_config(arguments[1]))
    return tyro.cli(
        _Command,
        args=arguments,
        prog="maingrad",
        description="Train, plan, simulate and verify main_grad runs.",
        return_unknown_args=True,
    )


def _run(command: _Command, flags: list[str], stop: StopRequest) -> int:
    """Run the command. Mistakes that the user can mend are one line, without a traceback."""
    try:
        return command.run(flags, stop)
    except ConfigError as error:
        return _end(error, _USAGE_ERROR)
    except Exception as error:
        from ..ddp import CollectiveError
        from .data.tokens import DataError
        from .simulation.simulate import SimulatedRankError

        # A mistake on a simulated rank is answered like a mistake on a real rank.
        mistake = error.__cause__ if isinstance(error, SimulatedRankError) else error
        if isinstance(mistake, ConfigError | DataError):
            return _end(mistake, _USAGE_ERROR)
        if isinstance(mistake, CollectiveError):  # another rank is gone; this rank has nothing else to report
            return _end(mistake, 1)
        raise


def _end(error: Exception, status: int) -> int:
    """Report the error: on stderr, and under torchrun in the file whose text torchrun prints last."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return _say(error, status)
    text = f"maingrad: error: {error}"
    # torchrun takes the failure of the earliest whole second for the cause, and a rank without a file fails when seen.
    earlier = int(time.time()) - 1
    found = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(earlier)}}
    Path(path).write_text(json.dumps({"message": found}), encoding="utf-8")
    if Path(path).parent.name != os.environ.get(
        "LOCAL_RANK"
    ):  # no launcher's folder of this rank: a cluster's own file
        return status
    # All ranks of a node make the same mistake, and torchrun prints the text of each: the first rank's stays. It is
    # whole before another rank can end, since torchrun ends all ranks when one has ended.
    try:
        (Path(path).parent.parent / "maingrad_error").open("x").close()
    except FileExistsError:
        Path(path).unlink()
    return status


def _say(error: object, status: int) -> int:
    print(f"maingrad: error: {error}", file=sys.stderr)
    return status


@contextmanager
def _importing() -> Iterator[None]:
    """Imports make 350,000 objects that stay, and collections among them took 1.4 of 3.6 seconds."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _load(path: Path, flags: list[str]) -> "Config":
    with _importing():
        from .config.file import load_config
    return load_config(path, flags)


def _print_tables(tables: "Iterable[Table]") -> None:
    from rich.console import Console

    # A file or a pipe has no width; names should stay on one line.
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in tables:
        console.print(table)


def _finish(config: "Config", *, interrupted: bool, is_main: bool = True) -> int:
    """Draw the pictures of a run that reached its last step."""
    if interrupted:
        return EXIT_INTERRUPTED
    if is_main:
        from .report.page import print_report

        print_report(Path(config.train.out_dir))
    return 0
