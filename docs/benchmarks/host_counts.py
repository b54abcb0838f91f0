"""Python calls and bytecode instructions of one layer, and of one unit, in a training step.

Clocks of one process differ by a tenth from run to run, and counts are exact: two commits that count alike run the same
Python. C++ does not count, so frameworks are not compared by these numbers.
"""

import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from harness import Options, log, run_script
from tables import Measurement, machine, table, write_table
from torch import nn

from maingrad import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, Linear, fully_shard
from maingrad.ddp import WORLD_OF_ONE

_PARTS = ("forward, not the last", "and backward", "last forward", "and its backward", "step", "zero_grad")


class _Counter:
    """Counts while it traces: every call of a Python function, and every instruction in it."""

    def __init__(self) -> None:
        self.calls = self.instructions = 0

    def __call__(self, frame, event, _):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.calls += event == "call"
        self.instructions += event == "opcode"
        return self

    def of(self, call):
        """What ``call`` returns; it is counted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return call()
        finally:
            sys.settrace(before)


def count_parts(make, wrap, depth):
    """Counts of each part of the third iteration, in which nothing is new: part -> (calls, instructions).

    make   one layer, called ``depth`` times
    wrap   nn.Module -> (model, optimizer)
    """
    torch.manual_seed(0)
    model, optimizer = wrap(nn.Sequential(*[make() for _ in range(depth)]))
    x, found = torch.randn(4, 16), {}

    def count(part, call):
        counter = _Counter()
        result = counter.of(call)
        found[part] = counter.calls, counter.instructions
        return result

    for _ in range(3):
        with model.no_sync():
            count(_PARTS[1], count(_PARTS[0], lambda: model(x)).sum().backward)
        count(_PARTS[3], count(_PARTS[2], lambda: model(x)).sum().backward)
        count(_PARTS[4], optimizer.step)
        count(_PARTS[5], optimizer.zero_grad)
    return found


def _replicated(model):
    config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    wrapped = DistributedDataParallel(model, config, process_group=WORLD_OF_ONE)
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)


def _zero1(model):
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model, config, process_group=WORLD_OF_ONE)
    return wrapped, DistributedOptimizer(wrapped, lr=0.1, max_grad_norm=1.0)


def _sharded(model, placements):
    for layer in model:
        fully_shard(layer, WORLD_OF_ONE, placements=placements)
    return fully_shard(model, WORLD_OF_ONE, placements=placements), torch.optim.SGD(model.parameters(), lr=0.1)


class _Case(NamedTuple):
    make: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], Any]


_PLAIN = partial(nn.Linear, 16, 16)
_FUSED = partial(Linear, 16, 16, fuse_wgrad_accumulation=True)
CASES = {
    "`nn.Linear`, DDP": _Case(_PLAIN, _replicated),
    "`Linear`, DDP": _Case(_FUSED, _replicated),
    "`Linear`, ZeRO-1": _Case(_FUSED, _zero1),
    "`nn.Linear` as a unit, ZeRO-2": _Case(_PLAIN, partial(_sharded, placements="zero2")),
    "`nn.Linear` as a unit, ZeRO-3": _Case(_PLAIN, partial(_sharded, placements="zero3")),
}


def bench_counts():
    """Two rows of counts for each case: of a layer, an eighth of what 16 have more than 8, and of all the rest."""
    rows = []
    gc.disable()  # what it finalises would count
    try:
        for name, case in CASES.items():
            few, many = (count_parts(*case, depth) for depth in (8, 16))
            layer, rest = Measurement(name=name, of="a layer"), Measurement(name=name, of="the rest")
            for part in _PARTS:
                of_layer = [(more - less) / 8 for more, less in zip(many[part], few[part], strict=True)]
                layer[part] = _both(of_layer)
                rest[part] = _both(less - 8 * each for less, each in zip(few[part], of_layer, strict=True))
            rows += [layer, rest]
    finally:
        gc.enable()
    return rows


def _both(counts):
    return " / ".join(f"{count:g}" for count in counts)


def write_report(rows, folder):
    """Write ``host_counts.csv`` and ``host_counts.md``; returns the Markdown."""
    columns = [("", "{row.name}"), ("of", "{row.of}"), *((part, f"{{row[{part}]}}") for part in _PARTS)]
    about = (
        "Python calls / bytecode instructions of one layer of 16 x 16 with a bias, and of the rest of the model, in an "
        "iteration with two microbatches; reductions overlap; one rank, on a CPU. Made by "
        "`docs/benchmarks/host_counts.py`."
    )
    parts = f"{machine()}. {about}", table(rows, columns)
    return write_table(folder, "host_counts", rows, "Python of one layer", *parts)


def run(options):
    log(write_report(bench_counts(), options.out_dir))


main = partial(run_script, Options, run)

if __name__ == "__main__":
    sys.exit(main())
