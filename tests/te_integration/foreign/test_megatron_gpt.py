"""Megatron-core's newest GPTModel under our wrapper beside its own: docs/benchmarks/megatron_gpt.py."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
SCRIPT = Path(__file__).resolve().parents[3] / "docs/benchmarks/megatron_gpt.py"


def run(*arguments: str) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--cpu",), ("--cpu", "--sequence-parallel")])
def test_a_gpt_trains_as_under_their_wrapper(arguments: tuple[str, ...]) -> None:
    assert "weights are at most 0.0e+00 apart\nequal\n" in run(*arguments)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("arguments", [(), ("--sequence-parallel",)])
def test_a_gpt_trains_as_under_their_wrapper_on_gpus(arguments: tuple[str, ...]) -> None:
    assert "equal\n" in run(*arguments)
