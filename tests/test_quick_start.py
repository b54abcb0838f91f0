"""The program of docs/quick_start.md trains on two processes, and goes on as if it had never stopped."""

import contextlib
import io
import os
import re
import subprocess
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

import pytest
import torch.distributed as dist
from gloo import run_ranks

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/quick_start.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
STEP = re.compile(r"^step (\d+) loss (\d\.\d{4}) norm \d+\.\d{3}$", re.MULTILINE)


def printed(folder: str, *steps: int) -> list[str]:
    """One rank's job: the page's program in ``folder``, once for each number of steps; what each printed."""
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(dist.get_world_size()))
    dist.init_process_group = dist.destroy_process_group = lambda *args, **kwargs: None  # there is a group already
    said = []
    for number in steps:
        program = PROGRAM.replace("STEPS, MICROBATCHES, SAVE_EVERY = 40, 2, 10", f"STEPS, MICROBATCHES, SAVE_EVERY = {number}, 2, 10")
        assert f"= {number}, 2, 10" in program
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})
        said.append(out.getvalue())
    return said


def test_the_program_trains_and_goes_on(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    (expected,), nothing = run_ranks(printed, 2, str(whole), 40)
    assert nothing == [""], "rank 0 alone prints"
    (first, second), _ = run_ranks(printed, 2, str(parts), 20, 40)
    steps = STEP.findall(expected)
    assert [int(step) for step, _ in steps] == list(range(1, 41))
    assert STEP.findall(first) + STEP.findall(second) == steps
    assert second.startswith("step 21 ")
    assert float(steps[-1][1]) < 3.5
    assert expected.splitlines()[-1] == "15 weight gradients are fused; 1 bucket(s)"
    promised = STEP.findall(PAGE)
    assert [step for step, _ in promised] == ["1", "2", "3"]
    for (_, said), (_, loss) in zip(promised, steps, strict=False):
        assert float(loss) == pytest.approx(float(said), rel=0.02)


def test_the_commands_are_commands() -> None:
    install, run = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    for block in (install, run):
        assert subprocess.run(["bash", "-n"], input=block, text=True).returncode == 0
    assert "pip install . transformers\n" in install
    assert "--nproc-per-node 2 train.py" in run
    assert "Save this as `train.py`" in PAGE
