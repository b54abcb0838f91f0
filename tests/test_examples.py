"""The files of docs/examples train on two processes, and a resumed run goes on as if it had never stopped."""

import ast
import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from seeding import seed_as_in_a_new_process

import maingrad

FOLDER = Path(__file__).resolve().parents[1] / "docs/examples"
QUICK = ("accelerate_loop", "pipeline")
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
EXAMPLES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
STEPS, STOP = 40, 20
NEEDS = {"accelerate_loop": "accelerate", "lightning_manual": "lightning"}


@contextlib.contextmanager
def as_launched(*arguments: str) -> Iterator[None]:
    """Environment and arguments as torchrun gives them, but for the process group, which exists already."""
    rank, size, argv, before = str(dist.get_rank()), str(dist.get_world_size()), sys.argv, dict(os.environ)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # asked for, and not used
    makers = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = lambda *args, **kwargs: None
    sys.argv = list(arguments)
    try:
        yield
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(before)
        dist.init_process_group, dist.destroy_process_group = makers
        if "accelerate" in sys.modules:
            from accelerate.state import AcceleratorState, GradientState, PartialState

            for state in (AcceleratorState, GradientState, PartialState):
                state._shared_state.clear()


def run(name: str, *arguments: str) -> list[str]:
    """A job for gloo processes: the lines that the program prints of its steps."""
    path, printed = str(FOLDER / f"{name}.py"), io.StringIO()
    seed_as_in_a_new_process()
    with as_launched(path, *arguments), contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return steps_of(printed.getvalue())


def steps_of(printed: str) -> list[str]:
    return re.findall(r"^step \d+ loss .*$", printed, re.MULTILINE)


def losses_of(steps: list[str]) -> list[float]:
    assert [int(line.split()[1]) for line in steps] == list(range(1, len(steps) + 1))
    return [float(line.split()[3]) for line in steps]


def inputs_of(name: str, folder: Path) -> list[str]:
    """Arguments before the run's own folder: the base model for fine-tuning."""
    if name != "fine_tune":
        return []
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=32, **sizes)).save_pretrained(folder)
    return [str(folder)]


def assert_learnt(steps: list[str]) -> None:
    losses = losses_of(steps)
    assert len(losses) == STEPS
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0


@pytest.mark.in_turn
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.sampled(1)
def test_learns_and_resumes(name: str, tmp_path: Path) -> None:
    if name == "pipeline" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11's schedules in a V send to their own rank at first, which gloo refuses (NCCL does not)")
    inputs = inputs_of(name, tmp_path / "base")
    whole, others = run_ranks(run, 2, name, *inputs, str(tmp_path / "whole"))
    assert_learnt(whole)
    assert not others, "the first rank prints for all"
    first, _ = run_ranks(run, 2, name, *inputs, str(tmp_path / "parts"), "--stop-after", str(STOP))
    rest, _ = run_ranks(run, 2, name, *inputs, str(tmp_path / "parts"))
    assert len(first) == STOP
    assert first + rest == whole, "to the last printed digit"
    if name == "fine_tune":
        from transformers import AutoModelForCausalLM

        base, tuned, resumed = (
            AutoModelForCausalLM.from_pretrained(path).state_dict()
            for path in (inputs[0], tmp_path / "whole/model", tmp_path / "parts/model")
        )
        assert all(torch.equal(tuned[key], resumed[key]) and not torch.equal(tuned[key], base[key]) for key in base)


@pytest.mark.slow
def test_the_two_llamas_read_each_others_checkpoints(tmp_path: Path) -> None:
    """docs/examples/llama_fully_shard.py says so."""
    whole, _ = run_ranks(run, 2, "llama_zero1", str(tmp_path / "whole"))
    run_ranks(run, 2, "llama_zero1", str(tmp_path / "parts"), "--stop-after", str(STOP))
    rest, _ = run_ranks(run, 2, "llama_fully_shard", str(tmp_path / "parts"))
    expected = [float(line.split()[3]) for line in whole[STOP:]]
    assert [float(line.split()[3]) for line in rest] == pytest.approx(expected, abs=1e-4)


def torchrun(name: str, *arguments: str) -> list[str]:
    """The command of a user, on two processes: the lines that it prints of its steps."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(FOLDER / f"{name}.py"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    return steps_of(ended.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_torchrun_runs_the_file(name: str, tmp_path: Path) -> None:
    assert_learnt(torchrun(name, *inputs_of(name, tmp_path / "base"), str(tmp_path / "run")))


@pytest.mark.gpu(2)
@pytest.mark.timeout(360)
@pytest.mark.parametrize("name", NAMES)
def test_two_gpus_learn_and_resume(name: str, tmp_path: Path) -> None:
    """Over NCCL, in bf16. The stopped run leaves five steps unsaved, as a killed one does: they are repeated."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    inputs = inputs_of(name, tmp_path / "base")
    whole = torchrun(name, *inputs, str(tmp_path / "whole"))
    assert_learnt(whole)
    first = torchrun(name, *inputs, str(tmp_path / "parts"), "--stop-after", str(STOP + 5))
    rest = torchrun(name, *inputs, str(tmp_path / "parts"))
    assert first == whole[: STOP + 5]
    assert rest == whole[STOP:], "to the last printed digit"


# ---- The files themselves. ----


def test_the_page_lists_every_file_with_its_command() -> None:
    page = (FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\.py\]\((\w+)\.py\) \| .* \| `(.*)` \|$", page, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == NAMES
    for name, target, command in rows:
        docstring = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""
        assert target == name
        assert command in docstring, f"{name}.py says another command"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(len(NAMES))
def test_a_file_is_short_and_uses_public_names(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    tree = ast.parse(text)
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    around = [node.body[0] for node in documented if ast.get_docstring(node)]
    around += [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    outside = {line for each in around for line in range(each.lineno, (each.end_lineno or 0) + 1)}
    code = [line for number, line in enumerate(text.splitlines(), 1) if line.strip() and number not in outside]
    assert len(code) < 68, f"{len(code)} lines beside docstrings and imports"
    assert len(text.splitlines()) < 80
    rooms = {"maingrad.te_integration", "maingrad.te_integration.pipeline"}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {each.module for each in imports if str(each.module).startswith("maingrad")} <= rooms
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    ours = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "maingrad"}
    assert {"parallelize", "make_optimizer"} & ours
    assert ours <= set(maingrad.__all__)
