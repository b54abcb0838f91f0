"""What every benchmark is made of: the clock, rounds, rows of contenders, and one command line.

A benchmark is a script: ``torchrun --nproc-per-node N docs/benchmarks/NAME.py --help`` lists its options. It measures,
and writes NAME.csv (all that was measured) and NAME.md (the table) into ``--out-dir``.
"""

import gc
import importlib.metadata
import math
import os
import statistics
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from ranks import AnyRankFailed, Ranks
from tables import Measurement, machine

from maingrad.kernels.compat import private_name
from maingrad.launch.config.error import ConfigError
from maingrad.launch.training.runtime import peak_nbytes

# ---- The command line. ----


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of every benchmark."""

    out_dir: Path = Path("runs/bench")
    """Where the tables go."""


@dataclass(frozen=True, kw_only=True)
class StepOptions(Options):
    """How training steps are timed; the defaults are the published tables'."""

    num_steps: int = 10
    """Consecutive steps of one round."""
    num_rounds: int = 3
    """Rounds; the median counts."""
    num_warmup_steps: int = 3
    """Steps before a measurement, the first step of all among them."""


@dataclass(frozen=True, kw_only=True)
class RowOptions(StepOptions):
    """Which rows are measured, and where their table goes."""

    rows: tuple[str, ...] = ()
    """Rows by name; none: all."""
    without: tuple[str, ...] = ()
    """Rows to leave out."""
    timeout: float = 300.0
    """Seconds after which a rank gives up on a collective or on another rank."""
    stem: str = ""
    """Files are STEM.csv and STEM.md; sections of other settings and numbers of ranks in STEM.csv stay."""

    def chosen(self, rows):
        """The names of ``rows`` that are measured, in their order. Raises ``ConfigError`` for an unknown name."""
        check_names("row", (*self.rows, *self.without), rows)
        wanted = set(self.rows or rows) - set(self.without)
        return [name for name in rows if name in wanted]


def run_script(kind, run, arguments=None, default=None):
    """``run(options)``, with options of the dataclass ``kind`` from the command line; returns the exit status.

    default  options where the command line says nothing; None: those of ``kind``

    A mistake of the user's (``ConfigError``) is one line on stderr, and status 2.
    """
    prog = f"docs/benchmarks/{Path(str(sys.modules[run.__module__].__file__)).name}"
    try:
        return int(run(tyro.cli(kind, args=arguments, default=default or kind(), prog=prog)) or 0)
    except ConfigError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2


def check_names(kind, names, known):
    """Raises ``ConfigError`` for a name that is not known."""
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {kind} '{name}': it is one of {', '.join(known)}")


def log(line):
    """Print a line on rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(line, flush=True)


def versions(*others):
    """Device, versions of torch and of what contenders need, and the date: for a table."""
    found = [machine(), *others]
    for package in ("triton", "megatron-core", "megatron-fsdp"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    if torch.cuda.is_available():
        found.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    return ", ".join(found)


def the_device():
    """This process's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


# ---- Training steps. ----


def random_tokens(sizes, seed, device):
    """[M, 1, T + 1] int64: M microbatches of one sequence of T tokens and its last target. The same for every step."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (sizes.num_microbatches, 1, sizes.num_tokens + 1)
    return torch.randint(0, sizes.vocab_size, shape, device=device, generator=generator)


def next_token_loss(model):
    """The loss of tokens [B, T + 1], by a model that takes tokens and targets."""
    return lambda tokens: model(tokens[:, :-1], tokens[:, 1:])


def accumulate(loss_of, microbatches, *, not_last=nullcontext, before=None, after=lambda: None):
    """Forward and backward of all microbatches; returns the last one's loss, detached.

    not_last  the context of every microbatch but the last (``no_sync``)
    before    called before each microbatch; its argument says whether this microbatch is the last
    after     called after each backward
    """
    num_microbatches = len(microbatches)
    for index, microbatch in enumerate(microbatches):
        is_last = index == num_microbatches - 1
        if before is not None:
            before(is_last)
        with nullcontext() if is_last else not_last():
            loss = loss_of(microbatch)
            (loss / num_microbatches).backward()
            after()
    return loss.detach()


def stepping(accumulated, optimizer):
    """A training step. ``accumulated`` computes the gradients of all microbatches, and returns the loss."""

    def step(*args):
        loss = accumulated(*args)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# ---- The clock, and memory. ----


def synchronize(device):
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark(device):
    """This moment: an event on the current stream; on the CPU the clock's time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start, end):
    """Between two of ``mark``, which the device has passed."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def time_calls(calls, device, *, ahead_cycles=0):
    """Median milliseconds of single calls, by events around each; NaN on the CPU.

    calls         functions without arguments, each called once
    ahead_cycles  the device waits so long before each call: the host is ahead, so that launches are not measured
    """
    times = []
    for call in calls:
        if device == "cpu":
            call()
            times.append(math.nan)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if ahead_cycles:
            torch.cuda._sleep(ahead_cycles)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def time_steps(step, num_steps, device):
    """Mean milliseconds of consecutive steps, and the last loss. The device is idle at the start and at the end."""
    loss = torch.zeros(())
    synchronize(device)
    start = mark(device)
    for _ in range(num_steps):
        loss = step()
    synchronize(device)  # work that other streams still have belongs to these steps
    end = mark(device)
    synchronize(device)
    return milliseconds(start, end) / num_steps, loss.item()


def host_seconds(call, device=None):
    """Host seconds of a call without garbage collection, and its result; first ``device`` finishes its work."""
    if device is not None:
        synchronize(device)
    gc.disable()
    began = time.perf_counter()
    result = call()
    ended = time.perf_counter()
    gc.enable()
    return ended - began, result


def reset_peak(device):
    """Begin to measure what ``peak_gib`` returns."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device):
    """Peak of allocated device memory since ``reset_peak`` in GiB; 0 on the CPU."""
    return (peak_nbytes(device) or 0) / 2**30


def free_memory(device):
    """Give back the memory of a model that nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_variant(bench, step, device):
    """Warm up and time a step: a round of ``in_rounds``."""
    first_loss = step().item()
    for _ in range(bench.num_warmup_steps - 1):
        step()
    reset_peak(device)
    _barrier()
    step_ms, last_loss = time_steps(step, bench.num_steps, device)
    return {"step_ms": step_ms, "peak_gib": peak_gib(device), "first_loss": first_loss, "last_loss": last_loss}


def take_turns(num_rounds, names, measure) -> dict[str, list[Any]]:
    """What ``measure(name)`` returns in each round, by name. Each round measures all in turn: drift hits all alike."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    for _ in range(num_rounds):
        for name, measured in found.items():
            measured.append(measure(name))
    return found


def in_rounds(num_rounds, names, measure, device, over):
    """Measurements by ``measure(name)``, in several rounds, each of which measures all in turn: drift hits all alike.

    Numbers whose name ends with "_ms" are medians over the rounds; others are the last round's. "spread_ms" is the
    largest minus the smallest "step_ms", and ``over`` names a column for "step_ms" over the first variant's. Only the
    measured name's model exists, so that the peak memory is its own.
    """

    def logged(name):
        found = measure(name)
        log(f"{name:25s} {', '.join(f'{key} {value:.6g}' for key, value in found.items())}")
        free_memory(device)
        return found

    rows = []
    for name, measured in take_turns(num_rounds, names, logged).items():
        by_key = {key: [each[key] for each in measured] for key in measured[0]}
        found = {key: statistics.median(of) if key.endswith("_ms") else of[-1] for key, of in by_key.items()}
        spread_ms = max(by_key["step_ms"]) - min(by_key["step_ms"])
        rows.append(Measurement(variant=name, **found, spread_ms=spread_ms))
    return [Measurement(**row, **{over: row.step_ms / rows[0].step_ms}) for row in rows]


_counters = private_name(
    "torch._dynamo.utils.counters", loss="measurements of compiled models count no graphs", fallback={}
)


# ---- Rows: contenders that are measured one after the other, on ranks that fail together. ----


def measure_and_write(bench, measure, write_report, about):
    """Measure on all ranks of torchrun's; rank 0 writes the report after each row. Returns the rows and the report.

    measure  like ``measure_rows``, with ``bench`` and ranks
    """
    ranks = Ranks.from_env(bench.timeout)
    save = partial(write_report, folder=bench.out_dir, stem=bench.stem) if ranks.rank == 0 else lambda rows: ""
    rows = measure(bench, ranks, about=about, save=save)
    return rows, save(rows)


def measure_rows(options, ranks, cases, rows, names, *, about="", save=lambda done: None, after=lambda *_: None):
    """Measure the rows ``names`` for every case, each with process groups of its own; returns the measurements.

    cases  what rows are built for (``contenders.Case``)
    about  device, versions and date, for every measurement
    save   called after each row with all measurements so far, so that a stopped run leaves its results
    after  called after a row's last round with the case, the row's name and its step

    A row that cannot be measured, or that fails on any rank, stays with its reason. All ranks call this function with
    the same arguments and get the same list.
    """
    done = []
    for case in cases:
        for name in names:
            problem, told = _measure_row(options, ranks, case, rows[name], partial(after, case, name))
            fields = {"num_ranks": case.num_ranks, "row": name, **case.about(name, rows[name])}
            if not problem:
                worst = {key: max(each[key] for each in told) for key in ("peak_gib", "held_gib", "first_step_s")}
                fields |= told[0] | worst
                fields |= case.rates([each["step_ms"] for each in told])
            done.append(Measurement(**fields, problem=problem, machine=about))
            log(_line(case.name, done[-1]))
            save(done)
    return done


def _measure_row(options, ranks, case, row, after):
    """Why there are no numbers ("" if there are), and every rank's numbers. One rank's failure counts for all."""
    problem, mine = row.refuse(case), {}
    if problem is None:
        try:
            with ranks.attempt(with_groups=row.with_groups):
                mine = _time_row(options, case, row, after)
                free_memory(ranks.device)  # memory that a process group has mapped is freed before the group ends
        except AnyRankFailed as failure:
            problem = str(failure)
            log(failure.details)
    free_memory(ranks.device)  # a failure's traceback holds frames, and the frames hold a model
    told = ranks.exchange((problem, mine))
    problem = next((each for each, _ in told if each), "")
    return " ".join(problem.split())[:400], [numbers for _, numbers in told]


def _time_row(options, case, row, after):
    """Build, warm up, time and close one row on this rank.

    step_ms   mean step of the median round
    peak_gib  peak of allocated memory during the measured steps, pools of graphs included, less ``held_gib``, which
              earlier rows did not free
    first_step_s, num_graphs  seconds of the first step, compilation included; graphs that were compiled
    """
    device = case.device
    reset_peak(device)
    held = peak_gib(device)
    _counters.clear()
    try:
        step = row.build(case)
        synchronize(device)
        began = time.perf_counter()
        first_loss = step().item()
        synchronize(device)
        first_step_s = time.perf_counter() - began
        for _ in range(options.num_warmup_steps - 1):
            step()
        synchronize(device)
        reset_peak(device)
        times, last_loss = [], first_loss
        for _ in range(options.num_rounds):
            _barrier()
            step_ms, last_loss = time_steps(step, options.num_steps, device)
            times.append(step_ms)
        peak = peak_gib(device)
        _barrier()
        num_graphs = int(_counters.get("stats", {}).get("unique_graphs", 0))
        after(step)
        del step
    finally:
        row.close()
    return {
        "step_ms": statistics.median(times),
        "spread_ms": max(times) - min(times),
        "peak_gib": peak - held,
        "held_gib": held,
        "first_step_s": first_step_s,
        "num_graphs": num_graphs,
        "first_loss": first_loss,
        "last_loss": last_loss,
    }


def _barrier():
    if dist.is_initialized():
        dist.barrier()


def _line(case, row):
    head = f"{case:24s} {row.row:28s}"
    if row.problem:
        return f"{head} not measured: {row.problem}"
    held = f"  ({row.held_gib:.1f} GiB held by earlier rows)" if row.held_gib > 0.1 else ""
    return (
        f"{head} {row.step_ms:8.1f} ms  spread {row.spread_ms:5.1f}  {row.tokens_per_second / 1e3:8.1f} ktok/s  "
        f"peak {row.peak_gib:5.1f} GiB  first step {row.first_step_s:6.1f} s  "
        f"loss {row.first_loss:.4f} -> {row.last_loss:.4f}{held}"
    )
