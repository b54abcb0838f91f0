"""Scripts as torchrun starts them, on two gloo processes."""

import os
import subprocess
from pathlib import Path

from python_processes import run_python

FOLDER = Path(__file__).resolve().parents[2] / "docs/benchmarks"


def under_torchrun(script: str, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """``torchrun --nproc-per-node 2 SCRIPT``; a relative name is that of a benchmark.

    As for a user: the script's folder is on its path.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run_python(*launcher, FOLDER / script, *arguments, timeout=timeout, environment=environment)
