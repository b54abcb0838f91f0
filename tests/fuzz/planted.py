"""Tests the tester: brings known faults back, one at a time, and sees whether drawn programs end otherwise with them.

    python tests/fuzz/planted.py [--only 03] [--seeds 0:150] [--jobs 2]

The faults are those of ``tests/faults``. A fault is noticed by the first seed whose program ends otherwise than
without it: a finding where there was none, another finding, or a refusal of what was right.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "faults"))

from changed_modules import VARIABLE  # noqa: E402
from fault import Fault, load_faults  # noqa: E402
from trial import copy_library, write_changed  # noqa: E402

OUT_OF_REACH = {
    "02b": "another library's provider",
    "03c": "another library's provider",
    "03d": "another library's modules",
    "04a": "modules without a provider",
    "05": "modules without a provider",
    "05b": "modules without a provider",
    "06a": "another library's provider",
    "08b": "another library's provider",
    "10a": "another library's modules",
    "10b": "another library's provider",
    "13b": "another library's provider",
    "13c": "another library's provider",
    "13d": "torch's FSDP2",
    "14": "another library's provider",
    "14b": "another library's provider",
    "14c": "another library's provider",
    "17a": "CUDA streams",
    "17b": "CUDA streams",
    "34l": "files of a run that change",
    "34x": "a run's folder of checkpoints",
    "38c": "a report",
    "39a": "a run beside the same run",
    "39b": "a run beside the same run",
    "40a": "another library's trainer",
    "40b": "another library's trainer",
    "40c": "another library's trainer",
    "41a": "a tool that compares",
    "41b": "a tool that compares",
    "41c": "a tool that compares",
    "41d": "a tool that compares",
}
"""Faults of what programs here have not: CUDA, other libraries, tools."""


@dataclass(frozen=True)
class Verdict:
    """What came of one fault."""

    fault: Fault
    noticed: str
    """The line of the first seed that ended otherwise; empty where none did."""
    seconds: float


def number_of(fault: Fault) -> str:
    """ "03b" of 03b-second-fused-use-overwrites."""
    return fault.name.partition("-")[0]


def faults(only: Sequence[str] = ()) -> list[Fault]:
    """Those that drawn programs can show."""
    return [
        fault
        for fault in load_faults()
        if number_of(fault) not in OUT_OF_REACH and fault.name.startswith(tuple(only) or "")
    ]


def run_fuzz(copy: Path, changed: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The fuzzer of a copy, over the library of that copy, with changed modules."""
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "PYTHONSAFEPATH": "1"}
    if changed is not None:
        environment[VARIABLE] = str(changed)
    command = [sys.executable, str(copy / "tests" / "fuzz"), "--workers", "1", *arguments]
    return subprocess.run(command, env=environment, cwd=copy, capture_output=True, text=True)


def judge(fault: Fault, copy: Path, seeds: str, usual: Path) -> Verdict:
    """One fault."""
    began, changed = time.monotonic(), usual.with_name(fault.name)
    write_changed(fault, copy, changed)
    done = run_fuzz(copy, changed, "--seeds", seeds, "--unlike", str(usual), "--limit", "120", "--no-shrink")
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr)
    lines = re.findall(r"^seed \d+: .*", done.stdout, re.MULTILINE)
    verdict = Verdict(fault, lines[0] if done.returncode and lines else "", time.monotonic() - began)
    mark = "noticed" if verdict.noticed else "NOT"
    print(f"{mark:8} {verdict.seconds:6.1f} s  {fault.name:56} {verdict.noticed[:120]}", flush=True)
    return verdict


def judge_all(found: Sequence[Fault], seeds: str, jobs: int) -> list[Verdict]:
    """All of them, side by side."""
    with tempfile.TemporaryDirectory(prefix="planted-") as scratch:
        copy, usual = Path(scratch, "maingrad"), Path(scratch, "usual.json")
        copy_library(ROOT, copy)
        done = run_fuzz(copy, None, "--seeds", seeds, "--no-shrink", "--outcomes", str(usual))
        if not usual.exists():
            raise RuntimeError(done.stderr)
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(lambda fault: judge(fault, copy, seeds, usual), found))


def main() -> int:
    parser = argparse.ArgumentParser(description="Known faults under drawn programs.")
    parser.add_argument("--only", action="append", default=[], metavar="NN", help="faults whose name begins so")
    parser.add_argument("--seeds", default="0:150", help="FIRST:END")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    verdicts = judge_all(faults(options.only), options.seeds, options.jobs)
    noticed = sum(bool(verdict.noticed) for verdict in verdicts)
    print(f"{noticed} of {len(verdicts)} noticed; out of reach: {', '.join(OUT_OF_REACH)}")
    return int(noticed < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
