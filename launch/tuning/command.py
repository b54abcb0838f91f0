"""The command ``maingrad tune``."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ...kernels.compat import HAS_TRITON
from ..config.error import ConfigError

__all__ = ["run_tune"]


def run_tune(ops: Sequence[str], shapes: Sequence[str], folder: Path) -> None:
    """Tune ``ops`` at ``shapes``, all of the shipped table's if there are none, and print what cold starts cost.

    Raises ``ConfigError`` for options and machines that cannot be used.
    """
    if not HAS_TRITON:
        raise ConfigError("tune chooses between Triton kernels, and Triton is not installed: pip install triton")
    from .tune import Tuning, cold_rows, tune, write_cold_report

    tuning = Tuning(ops=tuple(ops) or Tuning().ops, shapes=tuple(shapes))
    tuning.work()
    if not torch.cuda.is_available():
        raise ConfigError("tune measures configurations of kernels on a GPU, and torch sees no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    rows = cold_rows(tune(tuning, device, folder, print), device)
    if rows:
        print(write_cold_report(rows, folder))
