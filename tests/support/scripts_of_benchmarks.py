"""Scripts as torchrun starts them, on two gloo processes."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs/benchmarks"


def under_torchrun(script: str, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """``torchrun --nproc-per-node 2 SCRIPT``; a relative name is that of a benchmark.

    As for a user: the script's folder is on its path.
    """
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    return subprocess.run(
        [*command, str(FOLDER / script), *arguments], capture_output=True, text=True, timeout=timeout, env=environment
    )
