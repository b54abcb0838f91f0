"""The library replaces nothing in torch: what was there before its import is there after steps under each wrapper."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "support" / "nothing_replaced.py"


@pytest.mark.in_turn
def test_nothing_in_torch_is_replaced() -> None:
    """In a fresh process: a replacement would outlive the test that made it."""
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("equal: "), done.stdout
    assert int(done.stdout.split()[-1]) > 20_000, done.stdout
