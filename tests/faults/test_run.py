"""The fault harness accepts a fault that its test notices, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("run.py")

LIBRARY = "def double(x):\n    return 2 * x\n"
TESTS = """\
import time
import pytest
from maingrad.maths import double

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
"""


def project(root: Path) -> Path:
    """A package of one function with its tests, tracked by git."""
    (root / "tests").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "maths.py").write_text(LIBRARY)
    (root / "tests/test_maths.py").write_text(TESTS)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\n')
    subprocess.run(["git", "init", "--quiet", root], check=True)
    subprocess.run(["git", "-C", root, "add", "--all"], check=True)
    return root


def patch(line: str, *tests: str, number: int = 1, old: str = "    return 2 * x") -> str:
    named = "".join(f"Test: tests/test_maths.py::{test}\n" for test in tests)
    hunk = f"--- a/maths.py\n+++ b/maths.py\n@@ -1,2 +1,2 @@\n def double(x):\n-{old}\n+{line}\n"
    return f"Fault: {number}\nSentence: It is wrong.\n{named}\ndiff --git a/maths.py b/maths.py\n{hunk}"


def run(tmp_path: Path, *arguments: str, **patches: str) -> subprocess.CompletedProcess[str]:
    folder = tmp_path / "patches"
    folder.mkdir()
    for name, text in patches.items():
        (folder / f"01-{name}.patch").write_text(text)
    command = [sys.executable, HARNESS, "--root", project(tmp_path / "a-b.c"), "--patches", folder, "--require", "1"]
    return subprocess.run(
        [*command, "--preload", "pytest", "--timeout", "2", *arguments], capture_output=True, text=True
    )


def test_a_fault_that_its_tests_notice_passes(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "--only",
        "01-tripled",
        "--only",
        "01-squared",
        tripled=patch("    return 3 * x", "test_double"),
        squared=patch("    return x * x", "test_double", "test_parameters"),
        not_chosen=patch("", "test_double"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 patches, all noticed" in done.stdout


WRONG = {
    "missed": (patch("    return x + x", "test_double"), "NOT NOTICED: tests/test_maths.py::test_double"),
    "half_missed": (
        patch("    return 3 * x", "test_double", "test_sign"),
        "NOT NOTICED: tests/test_maths.py::test_sign",
    ),
    "other_line": (patch("    return 3 * x", "test_double", old="    return x"), "does not apply"),
    "no_python": (patch("    return 3 *", "test_double"), "did not run"),
    "no_name": (patch("    return missing", "test_double"), "broke the code: NameError"),
    "raises": (patch("    raise ValueError", "test_fixture"), "error instead of a failure"),
    "hangs": (patch("    return 3 * x", "test_patient"), "timeout instead of a failure"),
    "no_test": (patch("    return 3 * x", "test_nowhere"), "no test ran"),
}


def test_anything_else_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path, "--patched-only", **{name: text for name, (text, _) in WRONG.items()})
    assert done.returncode == 1, done.stdout + done.stderr
    for name, (_, complaint) in WRONG.items():
        said = done.stdout.partition(f"\n01-{name}.patch: ")[2].partition("\n\n")[0]
        assert complaint in said, done.stdout


def test_a_test_must_pass_unpatched(tmp_path: Path) -> None:
    names = {"wrong": "failed", "skipped": "skipped"}
    done = run(tmp_path, **{name: patch("    return 3 * x", f"test_{name}") for name in names})
    assert done.returncode == 1, done.stdout + done.stderr
    for name, outcome in names.items():
        assert f"test_{name} must pass without the patch: {outcome}" in done.stdout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (patch("    return 3 * x"), "at least one 'Test:' line"),
        (patch("    return 3 * x", "test_double", number=2), "must begin with the fault's number, 02-"),
        (patch("    return 3 * x", "test_double"), "no patch for fault 7"),
    ],
)
def test_headers_are_read_first(tmp_path: Path, text: str, complaint: str) -> None:
    done = run(tmp_path, "--require", "1", "7", fault=text)
    assert done.returncode == 1
    assert complaint in done.stdout
