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
    return subprocess.run([*command, "--preload", "--timeout", "3", *arguments], capture_output=True, text=True)


def test_a_fault_that_its_tests_notice_passes(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        tripled=patch("    return 3 * x", "test_double"),
        squared=patch("    return x * x", "test_double", "test_parameters"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 patches, all noticed" in done.stdout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (patch("    return x + x", "test_double"), "NOT NOTICED: tests/test_maths.py::test_double"),
        (patch("    return 3 * x", "test_double", "test_sign"), "NOT NOTICED: tests/test_maths.py::test_sign"),
        (patch("    return 3 * x", "test_double", old="    return x"), "does not apply"),
        (patch("    return 3 *", "test_double"), "did not run"),
        (patch("    return missing", "test_double"), "broke the code: NameError"),
        (patch("    raise ValueError", "test_fixture"), "error instead of a failure"),
        (patch("    return 3 * x", "test_patient"), "timeout instead of a failure"),
        (patch("    return 3 * x", "test_wrong"), "must pass without the patch: failed"),
        (patch("    return 3 * x", "test_skipped"), "must pass without the patch: skipped"),
        (patch("    return 3 * x", "test_nowhere"), "no test ran"),
        (patch("    return 3 * x"), "at least one 'Test:' line"),
        (patch("    return 3 * x", "test_double", number=2), "must begin with the fault's number, 02-"),
    ],
)
@pytest.mark.sampled(1)
def test_anything_else_is_reported(tmp_path: Path, text: str, complaint: str) -> None:
    done = run(tmp_path, fault=text)
    assert done.returncode == 1, done.stdout + done.stderr
    assert complaint in done.stdout


def test_a_required_fault_without_a_patch_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path, "--require", "1", "7", tripled=patch("    return 3 * x", "test_double"))
    assert done.returncode == 1
    assert "no patch for fault 7" in done.stdout


def test_one_patch_can_be_chosen(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "--only",
        "01-tripled",
        tripled=patch("    return 3 * x", "test_double"),
        broken=patch("", "test_double"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 patch, all noticed" in done.stdout
