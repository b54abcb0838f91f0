"""Runs tests in a process of their own that imports ``maingrad`` from a copy, with or without a fault.

Processes are forked from one that has imported torch, which takes seconds, and nothing of the library.
"""

import contextlib
import gc
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from changed_modules import VARIABLE
from fault import Fault, FaultError, changed_sources

__all__ = ["Case", "Trial", "copy_library", "is_case", "preload", "write_changed"]

HERE = Path(__file__).resolve().parent
WARM = multiprocessing.get_context("forkserver")
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "numpy",
    "pytest",
    "hypothesis",
)
PRELOADED_OF = {
    "hugging_face": (
        "transformers.models.mixtral.modeling_mixtral",
        "transformers.models.gpt_oss.modeling_gpt_oss",
        "transformers.trainer",
    ),
}
"""Part of a test's name -> what is imported as well where a fault has such a test."""

BROKEN_CODE = (AttributeError, ImportError, NameError, SyntaxError, TypeError)
"""What a change that only breaks the code raises: no test of behaviour noticed anything."""

NEEDLESS = "another case of this test has failed"


@dataclass(frozen=True)
class Case:
    """What became of one test, as the process that ran it reports."""

    nodeid: str
    outcome: str
    """``passed``, ``failed`` (in the test's body), ``broken`` (there, by broken code), ``timeout``, ``skipped`` or
    ``error`` (outside the body)."""
    exception: str = ""


def copy_library(root: Path, copy: Path) -> None:
    """Copy what git tracks below ``root``, as it stands in the working tree; the copy imports with a fault."""
    listing = subprocess.run(["git", "-C", root, "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    for name in filter(None, listing.split("\0")):
        source, target = root / name, copy / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    shutil.copy(HERE / "changed_modules.py", copy / "_known_fault.py")
    with (copy / "__init__.py").open("a") as package:
        package.write("\nfrom maingrad import _known_fault\n")


def write_changed(fault: Fault, copy: Path, folder: Path) -> None:
    """Make ``folder`` one that the hook takes the fault's modules from."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for module, source in changed_sources(fault, copy).items():
        (folder / f"{module}.py").write_text(source)


def is_case(nodeid: str, test: str) -> bool:
    return nodeid == test or nodeid.startswith((f"{test}[", f"{test}::"))


def preload(always: Sequence[str], tests: Sequence[str]) -> None:
    """What processes of trials begin with: ``always``, and what these tests need."""
    more = [name for part, names in PRELOADED_OF.items() if any(part in test for test in tests) for name in names]
    WARM.set_forkserver_preload([*always, *more])


@dataclass(frozen=True)
class Trial:
    """Where tests run, one call after the other."""

    copy: Path
    folder: Path
    """Its own: reports, output, and the changed modules."""
    timeout: float
    """Seconds for one test."""

    def run(self, tests: Sequence[str], fault: Fault | None = None) -> list[Case]:
        """What becomes of ``tests``. With a fault, the cases of a test end with the first that fails."""
        results, output, changed = self.folder / "results.json", self.folder / "output.txt", None
        self.folder.mkdir(exist_ok=True)
        results.unlink(missing_ok=True)
        output.write_text("")
        if fault is not None:
            changed = self.folder / "changed"
            write_changed(fault, self.copy, changed)
        process = WARM.Process(target=_run_here, args=(self, changed, results, output, tests))
        process.start()
        process.join(self.timeout * (1.5 + len(tests) / 10) + 30)  # each test has its own timeout in there
        if process.is_alive():
            assert process.pid is not None, "started"
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        said = "\n".join(output.read_text().splitlines()[-30:])
        if not results.exists():
            raise FaultError(f"the test process ended with status {process.exitcode} and no report:\n{said}")
        cases = [Case(**case) for case in json.loads(results.read_text())]
        if not cases:
            raise FaultError(f"no test ran (is its file tracked by git?):\n{said}")
        return cases


def _run_here(trial: Trial, changed: Path | None, results: Path, output: Path, tests: Sequence[str]) -> None:
    """In the new process: make it one that was started in the copy, and run the tests."""
    os.setsid()  # a session of its own, so that a test's own ranks end with it
    for path, flags, numbers in ((os.devnull, os.O_RDONLY, (0,)), (str(output), os.O_WRONLY, (1, 2))):
        opened = os.open(path, flags)
        for number in numbers:
            os.dup2(opened, number)
    os.chdir(trial.copy)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    package = str(trial.copy.parent)
    os.environ.update(PYTHONPATH=package, PYTHONSAFEPATH="1")
    if changed is not None:
        os.environ[VARIABLE] = str(changed)
    # Modules of the copy never change, so all processes share what the first has compiled.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    sys.path[:] = [package, *(each for each in sys.path if each not in ("", str(HERE), *inherited))]
    _serve_forks()
    _report(trial, results, tests, all_cases=changed is None)


def _serve_forks() -> None:
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


def _report(trial: Trial, results: Path, tests: Sequence[str], *, all_cases: bool) -> None:
    """Run ``tests`` here and write what became of each to ``results``."""
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
            if report.when != "call":
                if not report.passed:
                    self.record(item.nodeid, "skipped" if report.skipped else "error", f"{report.when}: {exception}")
                return report
            outcome = report.outcome
            if exception.startswith("Failed: Timeout"):
                outcome = "timeout"
            elif call.excinfo is not None and report.failed and _is_broken_code(call.excinfo, trial.copy):
                outcome = "broken"
            self.record(item.nodeid, outcome, exception)
            if outcome == "failed":
                self.noticed |= {test for test in tests if is_case(item.nodeid, test)}
            return report

    recorder = Recorder()
    # The signal method fails the one test that hangs; the default would end this process without a report.
    options = ["-p", "pytest_timeout", "--timeout", str(trial.timeout), "--timeout-method", "signal"]
    # Nobody reads more than a failure's first line.
    options += ["--assert=plain", "--tb=native", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    gc.freeze()  # what was there before
    pytest.main([*options, "-q", *tests], plugins=[recorder])
    results.write_text(json.dumps(recorder.cases))


def _is_broken_code(failure: Any, copy: Path) -> bool:
    """Whether broken code raised what a test failed with (a pytest ``ExceptionInfo``): no refusal of the library's."""
    error, last = failure.value, failure.traceback[-1]
    ours = copy in Path(last.path).parents and copy / "tests" not in Path(last.path).parents
    if ours and str(last.statement).lstrip().startswith(f"raise {type(error).__name__}"):
        return False
    while error is not None:
        if isinstance(error, BROKEN_CODE):
            return True
        error = error.__cause__
    return False
