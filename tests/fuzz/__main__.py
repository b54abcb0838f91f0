"""Draws programs, runs them, shrinks what is found.

    python tests/fuzz --seconds 600         new seeds until the time is over
    python tests/fuzz --seeds 0:100         these
    python tests/fuzz --seed 1234           this one: prints its script, and the shrunk one where it finds something
    python tests/fuzz --seconds 600 --having iteration.graphed=True
                                            only programs in which this dimension has this value
    python tests/fuzz --seeds 0:100 --unlike FILE
                                            until one ends otherwise than ``--outcomes FILE`` has noted it

Exit status 1 where something was found.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a replay
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
os.environ.setdefault("OMP_NUM_THREADS", "1")

from apart import Child, finished, run_apart, shrink_apart, start, warm_up
from drawing import draw_any
from mesh_programs import Meshes
from pipeline_programs import Pipeline
from programs import Block, Model, Program, dimensions
from recipe_programs import Recipes
from run_programs import Run
from running import Outcome, run_program
from scripts import script
from tally import Tally

SHRUNK_OF_A_KIND = 2
"""Findings of one kind that are made simple and printed; of the others, the seeds."""
SHRINKING_SECONDS = 120.0
"""That a finding is made simple for."""


def report(seed: int, program: Program | Pipeline | Run | Recipes | Meshes, outcome: Outcome, simple: bool) -> str:
    """A finding in full."""
    title = f"{outcome.kind}: {'made simple from ' if simple else ''}seed {seed}"
    source = script(program, title, compares=outcome.kind.startswith("differs"))
    bar = "=" * 120
    return f"\n{bar}\n{title}\n{outcome.message}\n{outcome.details}\n{source}{bar}"


class Run:
    """Programs in processes side by side."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tally = Tally()
        self.outcomes: dict[str, str] = {}
        """What became of each seed."""
        self.stopped = False
        self._told = time.monotonic()
        self._wanted = json.loads(options.unlike.read_text()) if options.unlike else None
        self._shrinking: Counter[str] = Counter()
        self._children: list[Child] = []
        self._to_shrink: list[tuple[int, Program, Outcome]] = []

    def of(self, seeds: Iterator[int]) -> None:
        """All of the seeds, or as many as there is time for."""
        ends = time.monotonic() + (self.options.seconds or float("inf"))
        more = True
        while more or self._children or self._to_shrink:
            more = more and time.monotonic() < ends and not self.stopped
            while len(self._children) < self.options.workers and self._start(seeds if more else iter(())):
                pass
            more = more and bool(self._children)
            for child, result in finished(self._children) if self._children else ():
                self._take(child, result)

    def _start(self, seeds: Iterator[int]) -> bool:
        limit = self.options.limit
        if self._to_shrink:
            seed, program, outcome = self._to_shrink.pop(0)
            task = lambda: shrink_apart(program, outcome.kind, limit, SHRINKING_SECONDS)  # noqa: E731
            self._children.append(start(task, 3 * limit + 2 * SHRINKING_SECONDS, (seed, program, outcome)))
            return True
        seed = next(seeds, None)
        if seed is None:
            return False
        program = draw_any(seed)
        self._children.append(start(lambda: run_program(program), limit, (seed, program, None)))
        return True

    def _take(self, child: Child, result: object) -> None:
        seed, program, before = child.what
        if before is not None:
            program, outcome = result if isinstance(result, tuple) else (program, before)
            print(report(seed, program, outcome, simple=True), flush=True)
            return
        self.tally.add(seed, program, result)
        self.outcomes[str(seed)] = result.kind
        if time.monotonic() > self._told + 60:
            self._told = time.monotonic()
            print(f"{self.tally.count} programs: {dict(self.tally.outcomes)}", file=sys.stderr, flush=True)
        if self._wanted is not None and result.kind != self._wanted[str(seed)]:
            print(f"seed {seed}: {result.kind}: {result.message[:200]!r}", flush=True)
            self.stopped = True
        elif result.is_finding and self._wanted is None:
            self._shrinking[result.kind] += 1
            print(f"seed {seed}: {result.kind}: {result.message[:200]!r}", flush=True)
            if self.options.shrink and self._shrinking[result.kind] <= SHRUNK_OF_A_KIND:
                self._to_shrink.append((seed, program, result))


def replay(seed: int, options: argparse.Namespace) -> int:
    """One seed, in full."""
    program = draw_any(seed)
    outcome = run_apart(lambda: run_program(program), options.limit)
    print(report(seed, program, outcome, simple=False), flush=True)
    if outcome.is_finding and options.shrink:
        small, again = shrink_apart(program, outcome.kind, options.limit, SHRINKING_SECONDS)
        print(report(seed, small, again, simple=True))
    return int(outcome.is_finding)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Programs as users write them, beside plain PyTorch.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seconds", type=float, help="draw new seeds for so long")
    which.add_argument("--seeds", help="FIRST:END")
    which.add_argument("--seed", type=int, help="this one, in full")
    parser.add_argument("--having", help="DIMENSION=VALUE: only programs that have it, as the table names both")
    parser.add_argument("--workers", type=int, default=2, help="processes at once")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one program")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false")
    parser.add_argument("--outcomes", type=Path, help="a JSON file that gets what became of each seed")
    parser.add_argument(
        "--unlike", type=Path, help="one of an earlier run: stops at the first seed that ends otherwise"
    )
    options = parser.parse_args(arguments)
    warm_up(Program())
    if options.seconds is not None:  # transformers takes seconds to import
        warm_up(Program(Model((Block("mixtral experts"), Block("gpt-oss experts")))))
    if options.seed is not None:
        return replay(options.seed, options)
    first = int.from_bytes(os.urandom(4), "little") * 1000
    seeds = count(first) if options.seeds is None else iter(range(*map(int, options.seeds.split(":"))))
    if options.seeds is None:
        print(f"seeds from {first} on", flush=True)
    if options.having is not None:
        wanted = tuple(options.having.split("=", 1))
        seeds = (seed for seed in seeds if wanted in dimensions(draw_any(seed)))
    run = Run(options)
    run.of(seeds)
    gc.unfreeze()
    if options.outcomes is not None:
        options.outcomes.write_text(json.dumps(run.outcomes))
    if options.unlike is not None:
        return int(run.stopped)
    print(run.tally.table())
    return int(bool(run.tally.outcomes["found"]))


if __name__ == "__main__":
    sys.exit(main())
