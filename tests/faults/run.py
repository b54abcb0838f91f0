"""Bring each known fault back and see that its tests notice.

A test that passes proves little until it has been seen to fail. Every fault of ``known/`` is one of the faults of
``docs/main_grad.md``: the tests that it names must pass on the library as it is, and fail with the fault. README.md
describes the form. A fault counts as noticed only when each named test fails in its own body, by an assertion or a
refusal: a snippet that is not found, a broken import, or a test that hangs or crashes is an error of the fault.

    python tests/faults/run.py [--only 03] [--jobs 2]
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # which PYTHONSAFEPATH leaves out

from fault import KNOWN, Fault, FaultError, listed_numbers, load_faults  # noqa: E402
from trial import PRELOADED, Case, Trial, copy_library, is_case, preload  # noqa: E402


@dataclass(frozen=True)
class Verdict:
    fault: Fault
    complaint: str
    """Empty when every named test noticed."""
    seconds: float


def cases_of(test: str, cases: Iterable[Case]) -> list[Case]:
    """The cases of one named test: itself, its parameters, or the tests of a class."""
    mine = [case for case in cases if is_case(case.nodeid, test)]
    if not mine:
        others = [f"{case.nodeid}: {case.exception}" for case in cases if case.outcome == "error"]
        raise FaultError("; ".join([f"{test} did not run", *others]))
    return mine


def complaint_without(test: str, cases: Iterable[Case]) -> str:
    wrong = [f"{case.outcome} {case.exception}".strip() for case in cases_of(test, cases) if case.outcome != "passed"]
    return f"{test} must pass without the fault: {wrong[0]}" if wrong else ""


def complaint_with(test: str, cases: Iterable[Case]) -> str:
    """Why the fault does not count as noticed by ``test``; empty when it does."""
    mine = cases_of(test, cases)
    for case in mine:
        if case.outcome in ("error", "timeout", "skipped"):
            return f"{case.nodeid}: {case.outcome} instead of a failure: {case.exception}"
    if any(case.outcome == "failed" for case in mine):
        return ""
    for case in mine:
        if case.outcome == "broken":
            return f"{case.nodeid}: the change broke the code: {case.exception}"
    return f"NOT NOTICED: {test} passes with the fault"


def judge(fault: Fault, trial: Trial) -> Verdict:
    began = time.perf_counter()
    try:
        cases = trial.run(fault.tests, fault)
        complaints = [complaint_with(test, cases) for test in fault.tests]
    except FaultError as error:
        complaints = [str(error)]
    return Verdict(fault, "\n".join(filter(None, complaints)), time.perf_counter() - began)


def check_unchanged(faults: Sequence[Fault], trials: Sequence[Trial]) -> list[str]:
    """Complaints about named tests that do not pass on the library as it is."""
    tests = sorted({test for fault in faults for test in fault.tests})
    shares = [share for share in (tests[index :: len(trials)] for index in range(len(trials))) if share]

    def complaints(share: Sequence[str], trial: Trial) -> list[str]:
        try:
            cases = trial.run(share)
            return [complaint for test in share if (complaint := complaint_without(test, cases))]
        except FaultError as error:
            return [str(error)]

    with ThreadPoolExecutor(len(trials)) as pool:
        return [each for found in pool.map(complaints, shares, trials[: len(shares)]) for each in found]


def judge_all(faults: Sequence[Fault], trials: Sequence[Trial]) -> list[Verdict]:
    free: SimpleQueue[Trial] = SimpleQueue()
    for trial in trials:
        free.put(trial)

    def in_a_free_trial(fault: Fault) -> Verdict:
        trial = free.get()
        try:
            verdict = judge(fault, trial)
        finally:
            free.put(trial)
        mark = "noticed" if not verdict.complaint else "WRONG"
        print(f"{mark:8} {verdict.seconds:6.1f} s  {fault.name:48} {' '.join(fault.tests)}", flush=True)
        return verdict

    with ThreadPoolExecutor(len(trials)) as pool:
        return list(pool.map(in_a_free_trial, faults))


def select(faults: Sequence[Fault], only: Sequence[str], required: Collection[int]) -> list[Fault]:
    if only:
        chosen = [fault for fault in faults if fault.name.startswith(tuple(only))]
        if not chosen:
            raise FaultError(f"no fault begins with {' or '.join(only)}")
        return chosen
    numbers = {fault.number for fault in faults}
    if missing := sorted(set(required) - numbers):
        raise FaultError(f"no fault has the number {', '.join(map(str, missing))}, which the table lists")
    if more := sorted(numbers - set(required)):
        raise FaultError(f"the table lists no fault {', '.join(map(str, more))}")
    return list(faults)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Bring each known fault back; its tests must notice.")
    parser.add_argument("--only", action="append", default=[], metavar="NN", help="only faults whose name begins so")
    parser.add_argument("--share", default="0/1", metavar="K/N", help="every N-th fault, from the K-th on (K from 0)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one test")
    parser.add_argument("--patched-only", action="store_true", help="where all tests run as well: they pass unchanged")
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="the checkout")
    parser.add_argument("--known", type=Path, default=KNOWN, help="the folder of the faults")
    parser.add_argument("--require", type=int, nargs="*", help="numbers that must have a fault, instead of the table's")
    parser.add_argument("--preload", nargs="*", default=PRELOADED, help="modules that all test processes begin with")
    options = parser.parse_args(arguments)
    # As tests/conftest.py has it: Triton is asked when it is imported, which torch._dynamo does.
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may download
    began, root = time.perf_counter(), options.root.resolve()
    try:
        required = options.require or listed_numbers(root / "docs/main_grad.md")
        first, step = map(int, options.share.split("/"))
        faults = select(load_faults(options.known.resolve()), options.only, required)[first::step]
    except FaultError as error:
        print(f"faults: {error}")
        return 1
    preload(options.preload, [test for fault in faults for test in fault.tests])
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        copy = Path(scratch, "maingrad")
        copy_library(root, copy)
        trials = [
            Trial(copy, Path(scratch, str(job)), options.timeout) for job in range(min(options.jobs, len(faults)))
        ]
        complaints = [] if options.patched_only else check_unchanged(faults, trials)
        if not complaints:
            verdicts = judge_all(faults, trials)
            complaints = [f"{each.fault.name}: {each.complaint}" for each in verdicts if each.complaint]
    for complaint in complaints:
        print(f"\n{complaint}")
    wrong = f"{len(complaints)} complaints" if complaints else "all noticed"
    print(f"\nfaults: {len(faults)}, {wrong}, {time.perf_counter() - began:.1f} s")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
