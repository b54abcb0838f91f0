"""The program of docs/quick_start.md trains on two processes, and goes on as if it had never stopped."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

import pytest
import torch.distributed as dist
from gloo import run_ranks
from seeding import seed_as_in_a_new_process
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM  # noqa: F401  for the ranks

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/quick_start.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
STEP = re.compile(r"^step (\d+) loss (\d\.\d{4}) norm \d+\.\d{3}$", re.MULTILINE)


GPT2 = """model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=4))"""


def with_gpt2(program: str) -> str:
    """The page's program as its fourth section says: another model in the place of two lines, saved every 2 steps."""
    program = program.replace("import LlamaConfig, LlamaForCausalLM", "import GPT2Config, GPT2LMHeadModel")
    program, replaced = re.subn(r"^sizes = .*\nmodel = .*$", GPT2, program, flags=re.MULTILINE)
    assert replaced == 1, "two lines make the model"
    assert program.count("= model(") == 1, "and one calls it"
    assert program.count(", 2, 10\n") == 1
    return program.replace(", 2, 10\n", ", 2, 2\n")


def printed(own: str, *runs: tuple[str, int]) -> list[str]:
    """One rank's job: a program of the page in each folder, up to a step; what each run printed."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", lambda: None)  # the group is that of all runs
        for folder, steps in runs:
            assert own.count("\nSTEPS, MICROBATCHES, SAVE_EVERY = 40, ") == 1
            program = own.replace("SAVE_EVERY = 40, ", f"SAVE_EVERY = {steps}, ")
            seed_as_in_a_new_process()
            with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})
            said.append(out.getvalue())
    return said


@pytest.mark.in_turn
def test_the_program_trains_and_goes_on(tmp_path: Path) -> None:
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    for folder in (whole, parts):
        os.mkdir(folder)
    (expected, first, second), others = run_ranks(printed, 2, PROGRAM, (whole, 20), (parts, 10), (parts, 20))
    assert others == ["", "", ""], "rank 0 alone prints"
    steps = STEP.findall(expected)
    assert [int(step) for step, _ in steps] == list(range(1, 21))
    assert STEP.findall(first) + STEP.findall(second) == steps
    assert second.startswith("step 11 ")
    assert float(steps[-1][1]) < 3.5
    assert re.fullmatch(r"16 weight gradients are fused; 1 bucket\(s\)", expected.splitlines()[-1])
    # The data is a file of the running Python, and versions of it differ.
    for (step, promised), (number, loss) in zip(STEP.findall(PAGE), steps[:3], strict=True):
        assert step == number
        assert float(loss) == pytest.approx(float(promised), rel=0.1)


DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu(2))]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("device", DEVICES)
def test_the_printed_command_trains_and_goes_on(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that share nothing but what the program gives them; on GPUs over NCCL, in bf16."""
    if device == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, command = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    arguments = command.split()
    assert arguments[0] == "torchrun"
    launcher = [sys.executable, "-m", "torch.distributed.run", *arguments[1:]]

    def steps_in(folder: Path, steps: int) -> list[tuple[str, ...]]:
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(PROGRAM.replace("SAVE_EVERY = 40, ", f"SAVE_EVERY = {steps}, "))
        ended = subprocess.run(launcher, cwd=folder, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        return STEP.findall(ended.stdout)

    whole = steps_in(tmp_path / "whole", 40)
    assert [int(step) for step, _ in whole] == list(range(1, 41))
    assert float(whole[-1][1]) < 3.5
    assert steps_in(tmp_path / "parts", 20) + steps_in(tmp_path / "parts", 40) == whole


@pytest.mark.in_turn
def test_another_model_goes_on_too_with_tied_embeddings_and_dropout(tmp_path: Path) -> None:
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    for folder in (whole, parts):
        os.mkdir(folder)
    (expected, first, second, again), _ = run_ranks(
        printed, 2, with_gpt2(PROGRAM), (whole, 4), (parts, 2), (parts, 4), (parts, 4)
    )
    assert [int(step) for step, _ in STEP.findall(expected)] == [1, 2, 3, 4]
    assert STEP.findall(first) + STEP.findall(second) == STEP.findall(expected)
    assert "10 weight gradients are fused" in expected, "four of each layer, the tied embedding, and the positions"
    assert again == "", "nothing is left to do"


def test_the_commands_are_commands() -> None:
    install, run = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    for block in (install, run):
        assert subprocess.run(["bash", "-n"], input=block, text=True).returncode == 0
    assert "pip install . transformers\n" in install
    assert "--nproc-per-node 2 train.py" in run
    assert "Save this as `train.py`" in PAGE
