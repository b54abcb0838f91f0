"""``maingrad train`` over two GPUs: slices, parts of sequences, stages and experts train what one GPU trains."""

from pathlib import Path

import pytest
from python_processes import run_python

from maingrad.launch.training.metrics import read_metrics

CONFIGS = Path(__file__).parents[3] / "launch" / "configs"


def numbers(name: str, folder: Path, ranks: int, *options: str) -> list[float]:
    """Losses of steps and of validations, then norms."""
    settings = ["--train.device", "cuda", "--train.steps", "6", "--optimizer.warmup_steps", "2"]
    settings += ["--train.eval_every", "3", "--train.log_every", "1", "--model.param_dtype", "float32"]
    done = run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "maingrad", "train"),
        *(CONFIGS / name, *settings, *options, "--train.out_dir", folder),
        timeout=150.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = list(read_metrics(folder / "metrics.jsonl"))
    losses = [each["loss"] for kind in ("step", "validation") for each in records if each["kind"] == kind]
    return [*losses, *(each["grad_norm"] for each in records if each["kind"] == "step")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found = numbers("stdlib.toml", tmp_path_factory.mktemp("plain"), 1)
    assert len(found) == 14
    return found


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("parallel", "schedule"), [("ddp", "1F1B"), ("zero1", "InterleavedZeroBubble"), ("fsdp", "GPipe")]
)
def test_stages(tmp_path: Path, plain: list[float], parallel: str, schedule: str) -> None:
    options = ("--parallel", parallel, "--mesh.pp", "2", "--mesh.pp_schedule", schedule)
    assert numbers("stdlib.toml", tmp_path, 2, *options) == pytest.approx(plain, rel=1e-4)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("parallel", "mesh"),
    [
        ("zero1", {"mesh.tp": "2", "mesh.sequence_parallel": "True", "model.fused_loss": "True"}),
        ("fsdp", {"mesh.tp": "2"}),
        ("zero1", {"mesh.cp": "2"}),
    ],
)
def test_slices_and_parts_of_sequences(tmp_path: Path, parallel: str, mesh: dict[str, str]) -> None:
    options = [word for name, value in mesh.items() for word in (f"--{name}", value)]
    heads = ["--model.num_heads", "4", "--model.num_kv_heads", "2"]
    plain = numbers("stdlib.toml", tmp_path / "plain", 1, *heads)
    found = numbers("stdlib.toml", tmp_path / "cut", 2, "--parallel", parallel, *heads, *options)
    assert found == pytest.approx(plain, rel=1e-4)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", ["all_to_all", "symmetric"])
def test_experts(tmp_path: Path, transport: str) -> None:
    """A router's choice may turn with a last bit: later steps are near, and the first is equal."""
    plain = numbers("moe.toml", tmp_path / "plain", 1)
    found = numbers("moe.toml", tmp_path / "over ranks", 2, "--mesh.ep", "2", "--mesh.transport", transport)
    assert found[0] == pytest.approx(plain[0], rel=1e-5)
    assert found == pytest.approx(plain, rel=1e-2)
