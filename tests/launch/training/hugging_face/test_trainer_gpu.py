"""Under torchrun on two GPUs, over NCCL: maingrad's ``Trainer`` logs what Hugging Face's logs, and resumes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
SUPPORT = Path(__file__).resolve().parents[3] / "support"
FORMS = ("ddp", "zero1", "fsdp")

# Each rank is a process that nobody forked: what the ranks share is what the program gives them.
PROGRAM = """\
import json, os, sys
from pathlib import Path
from hugging_face_runs import train

kind, folder, options, resume = json.loads(sys.argv[1])
logged = train(kind, Path(folder), {"use_cpu": False, **options}, resume=resume)
if os.environ["RANK"] == "0":
    print("logged", json.dumps(logged))
"""


def train(kind: str, folder: Path, options: dict[str, object], resume: str | None = None) -> dict[str, list[float]]:
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        [*launcher, str(program), json.dumps([kind, str(folder), options, resume])],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("logged ")]
    found: dict[str, list[float]] = json.loads(line.removeprefix("logged "))
    return found


def assert_alike(seen: dict[str, list[float]], expected: dict[str, list[float]], tolerance: float) -> None:
    for key, values in expected.items():
        assert seen[key] == pytest.approx(values, rel=tolerance, abs=tolerance), key


@pytest.mark.gpu(2)
@pytest.mark.timeout(600)
@pytest.mark.sampled(len(FORMS))
@pytest.mark.parametrize("form", FORMS)
def test_two_gpus_log_what_the_plain_trainer_logs_and_go_on(form: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 10}
    plain = train("plain", tmp_path / "plain", {})
    assert plain["loss"][-1] < plain["loss"][0] - 0.1
    whole = train(form, tmp_path / "whole", saving)
    assert_alike(whole, plain, 1e-4)
    rest = train(form, tmp_path / "rest", saving, resume=str(tmp_path / "whole/checkpoint-10"))
    assert_alike(rest, whole, 1e-5)
