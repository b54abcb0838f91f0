"""docs/multi_node.md, and its batch script, run with programs in the places of SLURM's."""

import ast
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_toml

from maingrad.launch.cli import main
from maingrad.launch.config.file import load_config
from maingrad.launch.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "docs/examples/train.sbatch"

SRUN = """\
#!{python}
# One process for each node; a signal reaches every process below, as in a step of SLURM's.
import os, signal, subprocess, sys

command = sys.argv[2:]
assert command[:2] == ["bash", "-c"], command
nodes = [
    subprocess.Popen(command, env=os.environ | {{"SLURM_NODEID": str(node)}}, start_new_session=True)
    for node in range(2)
]

def below(parents):
    children = {{}}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{{name}}/stat") as stat:
                children.setdefault(int(stat.read().rpartition(")")[2].split()[1]), []).append(int(name))
        except OSError:
            pass
    found = list(parents)
    for process in found:
        found += children.get(process, [])
    return found

def forward(number, frame):
    for process in below([node.pid for node in nodes]):
        try:
            os.kill(process, number)
        except ProcessLookupError:
            pass

signal.signal(signal.SIGTERM, forward)
sys.exit(max(node.wait() for node in nodes))
"""

SCONTROL = """\
#!/bin/bash
case "$1" in
show) printf '127.0.0.1\\nanother\\n' ;;
requeue) echo "$2" >>requeued ;;
esac
"""


def cluster(folder: Path, *arguments: str | Path, torchrun: str = "", **variables: str) -> subprocess.Popen[str]:
    """Start the script as a job of two nodes, which are this machine.

    torchrun  a program in torchrun's place
    """
    python = Path(sys.executable)
    if torchrun:
        python = folder / "python"
        python.write_text(f"#!{sys.executable}\n{torchrun}\n")
    for name, text in {"srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
    for path in (folder / "srun", folder / "scontrol", *[python] * bool(torchrun)):
        path.chmod(0o755)
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
    }
    own = {"PYTHON": str(python), "MASTER_PORT": str(free_port()), "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", SCRIPT, *arguments],
        cwd=folder,
        env=os.environ | job | own | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def records(folder: Path) -> dict[str, Any]:
    return {record["kind"]: record for record in read_metrics(folder / "run" / "metrics.jsonl")}


@pytest.mark.slow
def test_the_script_trains_on_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "my runs").mkdir()
    config = tiny_toml(tmp_path, train={"save_every": 3, "steps": 3}).rename(tmp_path / "my runs/tiny.toml")
    job = cluster(tmp_path, config)
    said, _ = job.communicate(timeout=100)
    assert job.returncode == 0, said
    assert records(tmp_path)["observed"]["world_size"] == 2
    assert records(tmp_path)["final"]["step"] == 3
    assert not (tmp_path / "requeued").exists()


@pytest.mark.slow
def test_the_job_saves_and_queues_again_before_its_time_ends(tmp_path: Path) -> None:
    config = tiny_toml(tmp_path, train={"save_every": 1000, "steps": 1_000_000, "eval_every": 1_000_000})
    job = cluster(tmp_path, config)
    while not (tmp_path / "run/metrics.jsonl").exists() or "step" not in records(tmp_path):
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 0, said
    assert (tmp_path / "requeued").read_text() == "7\n"
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    step = json.loads((checkpoint / "maingrad.json").read_text())["extra"]["step"]

    again = cluster(tmp_path, config, "--train.steps", str(step + 2))
    said, _ = again.communicate(timeout=100)
    assert again.returncode == 0, said
    assert f"goes on from '{checkpoint}', after step {step}" in said
    assert records(tmp_path)["final"]["step"] == step + 2
    assert (tmp_path / "requeued").read_text() == "7\n", "a job that is done is not queued again"


@pytest.mark.in_turn
def test_each_node_starts_its_torchrun(tmp_path: Path) -> None:
    # One write a process: those of two would lie between each other.
    says = "import signal, sys; sys.stdout.write(repr([*sys.argv[1:], signal.getsignal(15).name]) + chr(10))"
    given = ["my runs/a.toml", "--train.seed", "3"]
    job = cluster(tmp_path, *given, torchrun=says, MASTER_PORT="12345", RANKS_PER_NODE="4")
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 0, said
    for node, line in enumerate(sorted(said.splitlines())):
        assert ast.literal_eval(line) == [
            *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=4", f"--node-rank={node}"),
            *("--master-addr=127.0.0.1", "--master-port=12345", "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT"),
            *("-m", "maingrad", "train", *given, "--train.resume", "auto", "SIG_IGN"),
        ]
    assert len(said.splitlines()) == 2


@pytest.mark.in_turn
def test_the_saved_job_is_queued_again_and_a_finished_one_is_not(tmp_path: Path) -> None:
    """With a program in torchrun's place that ends with the status it is told, as soon as SIGTERM comes."""
    waits = "import signal, sys; signal.signal(15, lambda *_: sys.exit({})); open(sys.argv[5][-1], 'w'); signal.pause()"
    for status, queued in ((0, False), (1, True)):
        job = cluster(tmp_path, "a.toml", torchrun=waits.format(status))
        while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        said, _ = job.communicate(timeout=60)
        assert job.returncode == 0, said
        assert (tmp_path / "requeued").exists() == queued
        (tmp_path / "0").unlink()
        (tmp_path / "1").unlink()


@pytest.mark.in_turn
def test_a_job_that_fails_does_not_queue_again(tmp_path: Path) -> None:
    job = cluster(tmp_path, "a.toml", torchrun="raise SystemExit(3)")
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 3, said
    assert not (tmp_path / "requeued").exists()


# ---- The page. ----

PAGE = (ROOT / "docs/multi_node.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.in_turn
def test_the_page_checks_and_queues_a_configuration_that_exists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    checks, queues = (shlex.split(line) for line in BLOCKS[0].replace("\\\n", " ").splitlines())
    assert main(checks[1:]) == 0
    assert "128" in capsys.readouterr().out
    script = queues.index("docs/examples/train.sbatch")
    assert Path(queues[script]).resolve() == SCRIPT
    header = re.findall(r"^#SBATCH (--[\w-]+)=", SCRIPT.read_text(), flags=re.MULTILINE)
    assert {word.partition("=")[0] for word in queues[1:script]} <= set(header)
    assert load_config(queues[script + 1], queues[script + 2 :]).train.save_every == 500
    for block in (SCRIPT.read_text(), *BLOCKS):
        assert subprocess.run(["bash", "-n"], input=block, text=True).returncode == 0


def test_the_page_starts_torchrun_over_ssh(tmp_path: Path) -> None:
    """With an ssh that runs the command here, in a shell of its own, and a torchrun that says how it was called."""
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "ssh").write_text('#!/bin/bash\nbash -c "$2" | sed "s/^/$1: /"\n')
    for path in (python, tmp_path / "ssh"):
        path.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", BLOCKS[1], "nodes.sh", "some.toml", "--train.steps", "3"],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for index, line in enumerate(sorted(done.stdout.splitlines())):
        assert line.startswith(f"node{index + 1}: -m torch.distributed.run --nnodes=2 --node-rank={index} ")
        assert "--master-addr=node1 --master-port=29500 " in line
        assert line.endswith("-m maingrad train some.toml --train.steps 3 --train.resume auto")
    assert len(done.stdout.splitlines()) == 2
