"""Tests the tester: brings known faults back, one at a time, and sees whether drawn programs end otherwise with them.

    python tests/fuzz/planted.py [--only 03] [--seeds 0:150] [--jobs 2]

The patches are those of ``tests/faults``. A fault is noticed by the first seed whose program ends otherwise than
without the patch: a finding where there was none, another finding, or a refusal of what was right.
"""

import argparse
import importlib.util
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
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "tests" / "faults"

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
    """What came of one patch."""

    patch: Path
    noticed: str
    """The line of the first seed that ended otherwise; empty where none did."""
    seconds: float


def name_of(patch: Path) -> str:
    """ "03b" of 03b-second-fused-use-overwrites.patch."""
    return patch.name.partition("-")[0]


def patches(only: Sequence[str] = ()) -> list[Path]:
    """Those that drawn programs can show."""
    found = sorted(PATCHES.glob("*.patch"))
    return [patch for patch in found if name_of(patch) not in OUT_OF_REACH and patch.name.startswith(tuple(only) or "")]


def _harness() -> Any:
    spec = importlib.util.spec_from_file_location("faults_run", PATCHES / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # which dataclasses look their annotations up in
    spec.loader.exec_module(module)
    return module


def run_fuzz(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The fuzzer of a copy, over the library of that copy."""
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(copy / "tests" / "fuzz"), "--workers", "1", *arguments]
    return subprocess.run(command, env=environment, cwd=copy, capture_output=True, text=True)


def judge(patch: Path, copy: Path, seeds: str, usual: Path) -> Verdict:
    """One patch."""
    harness, began = _harness(), time.monotonic()
    harness.apply_patch(copy, patch)
    try:
        done = run_fuzz(copy, "--seeds", seeds, "--unlike", str(usual), "--limit", "120", "--no-shrink")
    finally:
        harness.apply_patch(copy, patch, reverse=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr)
    lines = re.findall(r"^seed \d+: .*", done.stdout, re.MULTILINE)
    return Verdict(patch, lines[0] if done.returncode and lines else "", time.monotonic() - began)


def judge_all(found: Sequence[Path], seeds: str, jobs: int) -> list[Verdict]:
    """All of them, in copies side by side."""
    harness = _harness()
    with tempfile.TemporaryDirectory(prefix="planted-") as scratch:
        copies = [Path(scratch, str(index), "maingrad") for index in range(jobs)]
        for copy in copies:
            harness.copy_tracked(ROOT, copy)
            harness.compile_copy(copy)
        usual = Path(scratch, "usual.json")
        done = run_fuzz(copies[0], "--seeds", seeds, "--no-shrink", "--outcomes", str(usual))
        if not usual.exists():
            raise RuntimeError(done.stderr)

        def share(index: int) -> list[Verdict]:
            return [_told(judge(patch, copies[index], seeds, usual)) for patch in found[index::jobs]]

        with ThreadPoolExecutor(jobs) as pool:
            return [verdict for verdicts in pool.map(share, range(jobs)) for verdict in verdicts]


def _told(verdict: Verdict) -> Verdict:
    mark = "noticed" if verdict.noticed else "NOT"
    print(f"{mark:8} {verdict.seconds:6.1f} s  {verdict.patch.stem:56} {verdict.noticed[:120]}", flush=True)
    return verdict


def main() -> int:
    parser = argparse.ArgumentParser(description="Known faults under drawn programs.")
    parser.add_argument("--only", action="append", default=[], metavar="NN", help="patches whose name begins so")
    parser.add_argument("--seeds", default="0:150", help="FIRST:END")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    verdicts = judge_all(patches(options.only), options.seeds, options.jobs)
    noticed = sum(bool(verdict.noticed) for verdict in verdicts)
    print(f"{noticed} of {len(verdicts)} noticed; out of reach: {', '.join(OUT_OF_REACH)}")
    return int(noticed < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
