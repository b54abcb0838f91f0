"""The library replaces nothing in torch: what was there before its import is there after steps under each wrapper."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "support" / "nothing_replaced.py"


NUM_RANKS = 2


def test_nothing_in_torch_is_replaced(tmp_path: Path) -> None:
    """In fresh processes: a replacement would outlive the test that made it."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(NUM_RANKS), str(tmp_path / "store")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0, said
        assert said.splitlines()[-1].startswith("equal: "), said
        assert int(said.split()[-1]) > 20_000, said
