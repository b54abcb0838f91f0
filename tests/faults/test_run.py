"""The fault harness accepts a fault that its test notices, and nothing else."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from fault import Change, Fault

HARNESS = Path(__file__).with_name("run.py")

LIBRARY = """\
def double(x):
    return 2 * x

def triple(x):
    if type(x) is str:
        raise TypeError("a number is tripled")
    return 3 * x

def adder(y):
    def add(x):
        return x + y
    return add

class Counter:
    def __init__(self):
        self.count = 0
    @property
    def next(self):
        return self.count + 1
    @next.setter
    def next(self, value):
        self.count = value - 1
"""
USER = """\
from maingrad.maths import double

def put_double(results):
    results.put(double(3))
"""
KERNEL = """\
import triton
import triton.language as tl

@triton.jit
def double(x, out):
    tl.store(out, tl.load(x) * 2)
"""
TESTS = """\
import inspect
import multiprocessing
import subprocess
import sys
import time
import pytest
from maingrad.maths import Counter, adder, double, triple
from maingrad.user import put_double

@pytest.fixture
def four():
    return double(2)

def test_double():
    assert double(3) == 6

def test_sign():
    assert double(1) > 0

@pytest.mark.parametrize("x", [0, 5])
def test_parameters(x):
    assert double(x) == x + x

def test_fixture(four):
    assert four == 4

def test_wrong():
    assert double(3) == 7

def test_skipped():
    pytest.skip("not here")

def test_patient():
    time.sleep(60 if double(1) == 3 else 0)

def test_refused():
    assert triple(1) == 3

def test_nested():
    assert adder(1)(1) == 2

def test_counter():
    counter = Counter()
    counter.next = 5
    assert counter.next == 5

def test_source():
    assert "2 * x" in open(inspect.getfile(double)).read(), "a module keeps its file"
    assert "2 * x" in inspect.getsource(double)

def test_a_program():
    code = "from maingrad.maths import double; print(double(3))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout == b"6\\n"

@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_processes(method):
    context = multiprocessing.get_context(method)
    results = context.Queue()
    process = context.Process(target=put_double, args=(results,))
    process.start()
    process.join()
    assert results.get() == 6

def test_what_triton_compiles():
    triton = pytest.importorskip("triton")
    from maingrad.kernel import double
    assert "* 2" in triton.JITFunction(double.fn).src
"""
MATHS = "maingrad.maths"
RIGHT = "return 2 * x"


def project(root: Path) -> Path:
    """A package of a few functions with its tests, tracked by git."""
    (root / "tests").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "maths.py").write_text(LIBRARY)
    (root / "kernel.py").write_text(KERNEL)
    (root / "user.py").write_text(USER)
    (root / "tests/test_maths.py").write_text(TESTS)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\n')
    subprocess.run(["git", "init", "--quiet", root], check=True)
    subprocess.run(["git", "-C", root, "add", "--all"], check=True)
    return root


def fault(name: str, new: str, *tests: str, old: str = RIGHT, function: str = "double", module: str = MATHS) -> Fault:
    nodeids = [f"tests/test_maths.py::{test}" for test in tests]
    return Fault(name, "It is wrong.", nodeids, [Change(module, function, old, new)])


def run(tmp_path: Path, faults: Sequence[Fault], *arguments: str) -> subprocess.CompletedProcess[str]:
    folder = tmp_path / "known"
    folder.mkdir()
    (folder / "of_this_test.py").write_text(f"from fault import Change, Fault\n\nFAULTS = {list(faults)!r}\n")
    command = [sys.executable, HARNESS, "--root", project(tmp_path / "a-b.c"), "--known", folder, "--require", "1"]
    return subprocess.run(
        [*command, "--preload", "pytest", "--timeout", "2", *arguments], capture_output=True, text=True
    )


def said_of(done: subprocess.CompletedProcess[str], name: str) -> str:
    return done.stdout.partition(f"\n{name}: ")[2].partition("\n\n")[0]


@pytest.mark.in_turn
def test_a_fault_that_its_tests_notice_passes(tmp_path: Path) -> None:
    faults = [
        fault("01-tripled", "return 3 * x", "test_double"),
        fault("01a-squared", "x * x", "test_double", "test_parameters", old="2 * x"),
        # Broken code in one case does not hide what another case notices.
        fault("01b-broken-for-none", "return 3 * x if x else x.twice", "test_parameters"),
        fault("01c-not-chosen", "", "test_double"),
    ]
    done = run(tmp_path, faults, "--only", "01-tripled", "--only", "01a", "--only", "01b")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults: 3, all noticed" in done.stdout


@pytest.mark.in_turn
def test_shares_together_are_all(tmp_path: Path) -> None:
    names = ["01-tripled", "01a-cubed", "01b-squared"]
    faults = [fault(name, f"return {index + 3} * x", "test_double") for index, name in enumerate(names)]
    for share, chosen in (("0/2", names[::2]), ("1/2", names[1::2])):
        (tmp_path / share[0]).mkdir()
        done = run(tmp_path / share[0], faults, "--share", share, "--patched-only")
        assert done.returncode == 0, done.stdout + done.stderr
        assert [name for name in names if name in done.stdout] == chosen


PROCESSES = ("test_processes[spawn]", "test_processes[forkserver]", "test_processes[fork]")
NOTICED = [
    fault("01-nested", "return x - y", "test_nested", function="adder.add", old="return x + y"),
    fault("01-setter", "= value", "test_counter", function="Counter.next", old="= value - 1"),
    fault("01-refusal", "if True:", "test_refused", function="triple", old="if type(x) is str:"),
    fault("01-source", "return 3 * x", "test_source"),
    fault("01-program", "return 3 * x", "test_a_program"),
    fault("01-processes", "return 3 * x", *PROCESSES),
]
if importlib.util.find_spec("triton"):
    NOTICED.append(fault("01-kernel", "* 3", "test_what_triton_compiles", module="maingrad.kernel", old="* 2"))


@pytest.mark.in_turn
def test_whoever_imports_the_library_has_the_fault(tmp_path: Path) -> None:
    done = run(tmp_path, NOTICED, "--timeout", "60", "--preload", "pytest", "triton")
    assert done.returncode == 0, done.stdout + done.stderr


WRONG = {
    "01-missed": (fault("01-missed", "return x + x", "test_double"), "NOT NOTICED: tests/test_maths.py::test_double"),
    "01-half-missed": (
        fault("01-half-missed", "return 3 * x", "test_double", "test_sign"),
        "NOT NOTICED: tests/test_maths.py::test_sign",
    ),
    "01-missing": (
        fault("01-missing", "return 3 * x", "test_double", old="return x"),
        "maingrad.maths: 'double' has the snippet 0 times, not once: 'return x'",
    ),
    "01-ambiguous": (
        fault("01-ambiguous", "z", "test_double", old="x"),
        "maingrad.maths: 'double' has the snippet 2 times, not once: 'x'",
    ),
    "01-no-function": (
        fault("01-no-function", "return 3 * x", "test_double", function="Counter.double"),
        "maingrad.maths: there is no 'Counter.double'",
    ),
    "01-no-module": (
        fault("01-no-module", "return 3 * x", "test_double", module="maingrad.sums"),
        "maingrad.sums: no such module",
    ),
    "01-no-python": (fault("01-no-python", "return 3 *", "test_double"), "maingrad.maths: invalid syntax"),
    "01-no-name": (fault("01-no-name", "return missing", "test_double"), "broke the code: NameError"),
    "01-no-import": (fault("01-no-import", "import missing", "test_double"), "broke the code: ModuleNotFoundError"),
    "01-no-attribute": (fault("01-no-attribute", "return x.twice", "test_double"), "broke the code: AttributeError"),
    "01-no-number": (fault("01-no-number", "return 2 + None", "test_parameters"), "broke the code: TypeError"),
    "01-caused": (
        fault(
            "01-caused",
            """
            try:
                return x.twice
            except AttributeError as error:
                raised = ValueError("later")
                raised.__cause__ = error
                sorted([1, 2], key=lambda _: (_ for _ in ()).throw(raised))
            """,
            "test_double",
        ),
        "broke the code: ValueError",
    ),
    "01-at-import": (
        fault("01-at-import", "def other(x):", "test_double", function="", old="def double(x):"),
        "did not run",
    ),
    "01-raises": (fault("01-raises", "raise ValueError", "test_fixture"), "error instead of a failure"),
    "01-hangs": (fault("01-hangs", "return 3 * x", "test_patient"), "timeout instead of a failure"),
    "01-ends": (fault("01-ends", "import os; os._exit(3)", "test_double"), "the test process ended with status 3"),
    "01-skips": (fault("01-skips", "return 3 * x", "test_skipped"), "skipped instead of a failure"),
    "01-no-test": (fault("01-no-test", "return 3 * x", "test_nowhere"), "no test ran"),
}  # fmt: skip


@pytest.mark.in_turn
def test_anything_else_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path, [wrong for wrong, _ in WRONG.values()], "--patched-only")
    assert done.returncode == 1, done.stdout + done.stderr
    for name, (_, complaint) in WRONG.items():
        assert complaint in said_of(done, name), done.stdout + done.stderr


@pytest.mark.in_turn
def test_a_test_must_pass_without_the_fault(tmp_path: Path) -> None:
    names = {"wrong": "failed", "skipped": "skipped"}
    done = run(tmp_path, [fault(f"01-{name}", "return 3 * x", f"test_{name}") for name in names])
    assert done.returncode == 1, done.stdout + done.stderr
    for name, outcome in names.items():
        assert f"test_{name} must pass without the fault: {outcome}" in done.stdout


def test_the_table_and_the_faults_have_the_same_numbers(tmp_path: Path) -> None:
    done = run(tmp_path, [fault("02-tripled", "return 3 * x", "test_double")], "--require", "1", "2")
    assert done.returncode == 1
    assert "no fault has the number 1, which the table lists" in done.stdout
