"""Apply each known fault to a copy of the library and see that its test notices.

A test that passes proves little until it has been seen to fail. Every ``NN-name.patch`` beside this file brings one
fault of ``docs/main_grad.md`` back; the tests it names must pass without the patch and fail with it. README.md
describes the format. A fault counts as noticed only when each named test fails in its own body: a patch that does not
apply, breaks an import, or makes the test hang or crash is an error of the patch.

    python tests/faults/run.py [--only 03] [--jobs 2]
"""

import argparse
import compileall
import contextlib
import gc
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

HERE = Path(__file__).resolve().parent

# The faults of docs/main_grad.md that must have a patch here.
REQUIRED = (*range(1, 30), *range(33, 42))

# A patch that only breaks the code raises one of these: no test of behaviour noticed anything.
BROKEN_CODE = (
    "ImportError",
    "ModuleNotFoundError",
    "SyntaxError",
    "IndentationError",
    "NameError",
    "UnboundLocalError",
)


class HarnessError(Exception):
    """The fault, or the harness around it, is wrong; says what to mend."""


@dataclass(frozen=True)
class Fault:
    """One patch file: the fault it brings back and the tests that must notice."""

    path: Path
    number: int
    sentence: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """What became of one test, as the process that ran it reports."""

    nodeid: str
    outcome: str
    """``passed``, ``failed`` (in the test's body), ``timeout``, ``skipped`` or ``error`` (outside the body)."""
    exception: str = ""


@dataclass(frozen=True)
class Verdict:
    fault: Fault
    complaint: str
    """Empty when every named test noticed."""
    seconds: float


def read_fault(path: Path) -> Fault:
    """The header of a patch: ``Fault:``, ``Sentence:`` and one ``Test:`` line per test, before the first hunk."""
    fields: dict[str, list[str]] = {"Fault": [], "Sentence": [], "Test": []}
    header, found, _ = path.read_text().partition("\ndiff --git ")
    if not found:
        raise HarnessError(f"{path.name}: no 'diff --git' line; make the patch with git diff")
    for line in header.splitlines():
        key, colon, value = line.partition(":")
        if colon and key in fields:
            fields[key].append(value.strip())
    if len(fields["Fault"]) != 1 or not fields["Fault"][0].isdigit():
        raise HarnessError(f"{path.name}: the header needs one line 'Fault: <number in docs/main_grad.md>'")
    if len(fields["Sentence"]) != 1 or not fields["Test"]:
        raise HarnessError(f"{path.name}: the header needs one 'Sentence:' line and at least one 'Test:' line")
    number = int(fields["Fault"][0])
    prefix = re.match(r"(\d\d)[a-z]{0,2}-", path.name)
    if prefix is None or int(prefix[1]) != number:
        raise HarnessError(f"{path.name}: the name must begin with the fault's number, {number:02d}-")
    return Fault(path=path, number=number, sentence=fields["Sentence"][0], tests=tuple(fields["Test"]))


def copy_tracked(root: Path, target: Path) -> None:
    """Copy what git tracks below ``root``, as it stands in the working tree, to ``target``."""
    listing = subprocess.run(["git", "-C", root, "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    for name in filter(None, listing.split("\0")):
        source, copy = root / name, target / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)


def compile_copy(copy: Path) -> None:
    """Cache the copy's modules by what is in them: a patched one has other contents, and its cache is passed over."""
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(copy, quiet=2, rx=re.compile("/tests/"), invalidation_mode=mode)


def apply_patch(copy: Path, patch: Path, *, reverse: bool = False) -> None:
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}
    command = ["git", "apply", *(["--reverse"] if reverse else []), str(patch)]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise HarnessError(f"{patch.name} does not apply to the library as it is:\n{done.stderr.strip()}")


def run_tests(copy: Path, tests: Sequence[str], timeout: float, *, all_cases: bool) -> list[Case]:
    """Run ``tests`` in a process of their own that imports ``maingrad`` from ``copy``.

    Without ``all_cases``, those of a test end with the first that fails.
    """
    results, output = copy.parent / "results.json", copy.parent / "output.txt"
    results.unlink(missing_ok=True)
    output.write_text("")
    process = WARM.Process(target=run_here, args=(copy, results, output, timeout, tests, all_cases))
    process.start()
    process.join(timeout * 1.5 + 30)
    if process.is_alive():
        assert process.pid is not None, "started"
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    if not results.exists():
        raise HarnessError(
            f"the test process ended with status {process.exitcode} and no report:\n{tail(output.read_text())}"
        )
    cases = [Case(**case) for case in json.loads(results.read_text())]
    if not cases:
        raise HarnessError(f"no test ran (is its file tracked by git?):\n{tail(output.read_text())}")
    return cases


NEEDLESS = "another case of this test has failed"

WARM = multiprocessing.get_context("forkserver")
"""Makes processes that have imported what takes seconds, and nothing of the library."""
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "numpy", "pytest", "hypothesis")
PRELOADED_OF = {
    "hugging_face": (
        "transformers.models.mixtral.modeling_mixtral",
        "transformers.models.gpt_oss.modeling_gpt_oss",
        "transformers.trainer",
    ),
}
"""Part of a test's name -> what is imported as well where a fault has such a test."""


def run_here(copy: Path, results: Path, output: Path, timeout: float, tests: Sequence[str], all_cases: bool) -> None:
    """In such a process: make it one that was started in ``copy``, and run the tests."""
    os.setsid()  # a session of its own, so that a test's own ranks end with it
    for path, flags, numbers in ((os.devnull, os.O_RDONLY, (0,)), (str(output), os.O_WRONLY, (1, 2))):
        opened = os.open(path, flags)
        for number in numbers:
            os.dup2(opened, number)
    os.chdir(copy)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.update(
        PYTHONPATH=str(copy.parent),
        PYTHONSAFEPATH="1",
        # Patches come and go within one second: a cached module could be older than it looks. See ``compile_copy``.
        PYTHONDONTWRITEBYTECODE="1",
    )
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy.parent), *(each for each in sys.path if each not in ("", str(HERE), *inherited))]
    serve_forks()
    report_tests(results, timeout, tests, all_cases)


def serve_forks() -> None:
    """Let the ranks that tests start be forked from this process as it is, instead of from a new one."""

    def fork(path: Any, arguments: Sequence[Any], inherited: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        # What ``exec`` would have closed: an open end of a pipe of the test process keeps this one for ever.
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in inherited:
                with contextlib.suppress(OSError):
                    os.close(number)
        exec(arguments[-1])  # python -c, which does not return
        os._exit(0)

    executed, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, fork
    try:
        multiprocessing.forkserver.set_forkserver_preload([])
        multiprocessing.forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = executed


def tail(output: str, lines: int = 30) -> str:
    return "\n".join(output.splitlines()[-lines:])


def is_case(nodeid: str, test: str) -> bool:
    return nodeid == test or nodeid.startswith((f"{test}[", f"{test}::"))


def cases_of(test: str, cases: Iterable[Case]) -> list[Case]:
    """The cases of one named test: itself, its parameters, or the tests of a class."""
    mine = [case for case in cases if is_case(case.nodeid, test)]
    if not mine:
        others = [f"{case.nodeid}: {case.exception}" for case in cases if case.outcome == "error"]
        raise HarnessError("; ".join([f"{test} did not run", *others]))
    return mine


def complaint_unpatched(test: str, cases: Iterable[Case]) -> str:
    wrong = [f"{case.outcome} {case.exception}".strip() for case in cases_of(test, cases) if case.outcome != "passed"]
    return f"{test} must pass without the patch: {wrong[0]}" if wrong else ""


def complaint_patched(test: str, cases: Iterable[Case]) -> str:
    """Why the fault does not count as noticed by ``test``; empty when it does."""
    mine = cases_of(test, cases)
    for case in mine:
        if case.outcome in ("error", "timeout", "skipped"):
            return f"{case.nodeid}: {case.outcome} instead of a failure: {case.exception}"
        if case.exception.split(":")[0] in BROKEN_CODE:
            return f"{case.nodeid}: the patch broke the code: {case.exception}"
    return "" if any(case.outcome == "failed" for case in mine) else f"NOT NOTICED: {test} passes with the fault"


def judge(fault: Fault, copy: Path, timeout: float) -> Verdict:
    began = time.perf_counter()
    try:
        apply_patch(copy, fault.path)
        try:
            cases = run_tests(copy, fault.tests, timeout, all_cases=False)
        finally:
            apply_patch(copy, fault.path, reverse=True)
        complaints = [complaint_patched(test, cases) for test in fault.tests]
    except HarnessError as error:
        complaints = [str(error)]
    return Verdict(fault, "\n".join(filter(None, complaints)), time.perf_counter() - began)


def check_unpatched(faults: Sequence[Fault], copies: Sequence[Path], timeout: float) -> list[str]:
    """Complaints about named tests that do not pass on the library as it is."""
    tests = sorted({test for fault in faults for test in fault.tests})
    shares = [share for share in (tests[index :: len(copies)] for index in range(len(copies))) if share]

    def complaints(share: Sequence[str], copy: Path) -> list[str]:
        try:
            cases = run_tests(copy, share, timeout, all_cases=True)
            return [complaint for test in share if (complaint := complaint_unpatched(test, cases))]
        except HarnessError as error:
            return [str(error)]

    with ThreadPoolExecutor(len(copies)) as pool:
        return [each for found in pool.map(complaints, shares, copies[: len(shares)]) for each in found]


def judge_all(faults: Sequence[Fault], copies: Sequence[Path], timeout: float) -> list[Verdict]:
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def on_a_free_copy(fault: Fault) -> Verdict:
        copy = free.get()
        try:
            verdict = judge(fault, copy, timeout)
        finally:
            free.put(copy)
        mark = "noticed" if not verdict.complaint else "WRONG"
        print(f"{mark:8} {verdict.seconds:6.1f} s  {fault.path.stem:48} {' '.join(fault.tests)}", flush=True)
        return verdict

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(on_a_free_copy, faults))


def select(paths: Iterable[Path], only: Sequence[str], required: Iterable[int]) -> list[Fault]:
    faults = [read_fault(path) for path in sorted(paths)]
    if only:
        chosen = [fault for fault in faults if fault.path.name.startswith(tuple(only))]
        if not chosen:
            raise HarnessError(f"no patch begins with {' or '.join(only)}")
        return chosen
    missing = sorted(set(required) - {fault.number for fault in faults})
    if missing:
        raise HarnessError(f"no patch for fault {', '.join(map(str, missing))}")
    return faults


def report_tests(results: Path, timeout: float, tests: Sequence[str], all_cases: bool) -> None:
    """The child's side: run ``tests`` here and write what became of each to ``results``."""
    import pytest

    class Recorder:
        def __init__(self) -> None:
            self.cases: list[dict[str, str]] = []
            self.noticed: set[str] = set()

        def record(self, nodeid: str, outcome: str, exception: str) -> None:
            self.cases.append({"nodeid": nodeid, "outcome": outcome, "exception": exception})

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                self.record(report.nodeid, "error", report.longreprtext.splitlines()[-1])

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_setup(self, item: pytest.Item) -> None:
            if not all_cases and any(is_case(item.nodeid, test) for test in self.noticed):
                pytest.skip(NEEDLESS)

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
            report = yield
            if call.excinfo is not None and NEEDLESS in str(call.excinfo.value):
                return report
            exception = "" if call.excinfo is None else call.excinfo.exconly().splitlines()[0]
            if report.when == "call":
                outcome = "timeout" if exception.startswith("Failed: Timeout") else report.outcome
                self.record(item.nodeid, outcome, exception)
                if outcome == "failed":
                    self.noticed |= {test for test in tests if is_case(item.nodeid, test)}
            elif not report.passed:
                self.record(item.nodeid, "skipped" if report.skipped else "error", f"{report.when}: {exception}")
            return report

    recorder = Recorder()
    # The signal method fails the one test that hangs; the default would end this process without a report.
    options = ["-p", "pytest_timeout", "--timeout", str(timeout), "--timeout-method", "signal"]
    # Nobody reads more than a failure's first line.
    options += ["--assert=plain", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    gc.freeze()  # what was there before
    pytest.main([*options, "-q", *tests], plugins=[recorder])
    results.write_text(json.dumps(recorder.cases))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Apply each known fault to a copy; its test must notice.")
    parser.add_argument("--only", action="append", default=[], metavar="NN", help="only patches whose name begins so")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one test")
    parser.add_argument("--patched-only", action="store_true", help="where all tests run as well: they pass unpatched")
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="the checkout")
    parser.add_argument("--patches", type=Path, default=HERE, help="the folder of the patches")
    parser.add_argument("--require", type=int, nargs="*", default=REQUIRED, help="faults that must have a patch")
    parser.add_argument("--preload", nargs="*", default=PRELOADED, help="modules that all test processes begin with")
    options = parser.parse_args(arguments)
    # As tests/conftest.py has it: Triton is asked when it is imported, which torch._dynamo does.
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may download
    began = time.perf_counter()
    try:
        faults = select(options.patches.resolve().glob("*.patch"), options.only, options.require)
    except HarnessError as error:
        print(f"faults: {error}")
        return 1
    tests = [test for fault in faults for test in fault.tests]
    more = [name for part, names in PRELOADED_OF.items() if any(part in test for test in tests) for name in names]
    WARM.set_forkserver_preload([*options.preload, *more])
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        copies = [Path(scratch, str(index), "maingrad") for index in range(min(options.jobs, len(faults)))]
        for copy in copies:
            copy_tracked(options.root.resolve(), copy)
            compile_copy(copy)
        complaints = [] if options.patched_only else check_unpatched(faults, copies, options.timeout)
        if not complaints:
            verdicts = judge_all(faults, copies, options.timeout)
            complaints = [f"{each.fault.path.name}: {each.complaint}" for each in verdicts if each.complaint]
    for complaint in complaints:
        print(f"\n{complaint}")
    wrong = f"{len(complaints)} complaints" if complaints else "all noticed"
    print(f"\nfaults: {len(faults)} patch{'es' * (len(faults) > 1)}, {wrong}, {time.perf_counter() - began:.1f} s")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
