"""``maingrad slurm``: what is rendered, what is refused, and the script run with programs in the places of SLURM's."""

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
from maingrad.launch.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[3]

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


def render(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["slurm", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def cluster(folder: Path, script: str) -> subprocess.Popen[str]:
    """Start the script as a job of two nodes, which are this machine."""
    for name, text in {"srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL, "job.sh": script}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", folder / "job.sh"],
        cwd=folder,
        env=os.environ | job,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def options(**others: object) -> list[str]:
    given = {"nodes": 2, "gpus-per-node": 1, "master-port": free_port()} | others
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def records(folder: Path) -> dict[str, Any]:
    return {record["kind"]: record for record in read_metrics(folder / "run" / "metrics.jsonl")}


def test_the_header_asks_for_what_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_toml(tmp_path, train={"device": "auto", "save_every": 2, "global_batch_size": 512})
    wanted = ["--partition", "gpu", "--account", "physics", "--time", "02:00:00", "--seconds-to-save", "90"]
    script = render(capsys, config, "--nodes", "16", "--cpus-per-node", "64", *wanted, "--train.seed", "3")
    header = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, flags=re.MULTILINE))
    assert header == {
        "job-name": "maingrad",
        "nodes": "16",
        "ntasks-per-node": "1",
        "gpus-per-node": "8",
        "cpus-per-task": "64",
        "time": "02:00:00",
        "partition": "gpu",
        "account": "physics",
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": "B:USR1@90",
    }
    assert "\nsrun --kill-on-bad-exit=0 --cpus-per-task=64 bash -c " in script
    assert "# 128 ranks, 2 sequence(s) a rank in each of 2 microbatch(es)." in script
    assert f"maingrad train {config} --train.seed 3 --train.resume auto\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "5"], "train.global_batch_size = 24: must be a multiple of"),
        (["--nodes", "0"], "--nodes must be at least 1, got 0"),
        (["--nodes", "1", "--gpus-per-node", "3", "--parallel", "hybrid"], "must divide the 3 rank(s)"),
        (["--nodes", "2", "--train.save-every", "None"], "train.save_every = None: a job that is queued again"),
        (["--nodes", "2", "--train.resume", "runs/old"], "train.resume = 'runs/old'"),
        (["--nodes", "2", "--master-port", "99999"], "--master-port must be at most 65535, got 99999"),
        (["--nodes", "2", "--seconds-to-save", "86400"], "--seconds-to-save must be at most 65535, got 86400"),
        (["--nodes", "2", "--partition", "a b"], "--partition 'a b': must be one word"),
    ],
)
def test_is_refused(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_toml(tmp_path, train={"save_every": 2})
    assert main(["slurm", str(config), "--gpus-per-node", "1", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_path_with_spaces_arrives_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    script = render(capsys, tiny_toml(folder, train={"save_every": 2}), *options())
    assert f"maingrad train '{folder}/tiny.toml' --train.resume auto\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.slow
def test_the_script_trains_on_two_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = render(capsys, tiny_toml(tmp_path, train={"save_every": 3, "steps": 3}), *options())
    job = cluster(tmp_path, script)
    said, _ = job.communicate(timeout=100)
    assert job.returncode == 0, said
    assert records(tmp_path)["observed"]["world_size"] == 2
    assert records(tmp_path)["final"]["step"] == 3
    assert not (tmp_path / "requeued").exists()


@pytest.mark.slow
def test_the_job_saves_and_queues_again_before_its_time_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_toml(tmp_path, train={"save_every": 1000, "steps": 1_000_000, "eval_every": 1_000_000})
    job = cluster(tmp_path, render(capsys, config, *options()))
    while not (tmp_path / "run/metrics.jsonl").exists() or "step" not in records(tmp_path):
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 0, said
    assert (tmp_path / "requeued").read_text() == "7\n"
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    step = json.loads((checkpoint / "maingrad.json").read_text())["extra"]["step"]

    script = render(capsys, config, *options(), "--train.steps", str(step + 2))
    again = cluster(tmp_path, script)
    said, _ = again.communicate(timeout=100)
    assert again.returncode == 0, said
    assert f"goes on from '{checkpoint}', after step {step}" in said
    assert records(tmp_path)["final"]["step"] == step + 2
    assert (tmp_path / "requeued").read_text() == "7\n", "a job that is done is not queued again"


def test_each_node_starts_its_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a program that says how it was called in torchrun's place."""
    script = render(capsys, tiny_toml(tmp_path, train={"save_every": 3}), *options(**{"master-port": 12345}))
    # One write a process: those of two would lie between each other.
    says = "import signal, sys; sys.stdout.write(' '.join([*sys.argv[1:], signal.getsignal(15).name]) + chr(10))"
    job = cluster(tmp_path, script.replace("-m torch.distributed.run", f'-c "{says}"'))
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 0, said
    given = "--nnodes=2 --nproc-per-node=1 --node-rank={} --master-addr=127.0.0.1 --master-port=12345"
    train = (
        f"--signals-to-handle=SIGINT,SIGHUP,SIGQUIT -m maingrad train {tmp_path}/tiny.toml --train.resume auto SIG_IGN"
    )
    assert sorted(said.splitlines()) == [f"{given.format(node)} {train}" for node in (0, 1)]


def test_the_saved_job_is_queued_again_and_a_finished_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a program in torchrun's place that ends with the status it is told, as soon as SIGTERM comes."""
    script = render(capsys, tiny_toml(tmp_path, train={"save_every": 3}), *options())
    waits = "import signal, sys; signal.signal(15, lambda *_: sys.exit({})); open(sys.argv[3][-1], 'w'); signal.pause()"
    for status, queued in ((0, False), (1, True)):
        job = cluster(tmp_path, script.replace("-m torch.distributed.run", f'-c "{waits.format(status)}"'))
        while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        said, _ = job.communicate(timeout=60)
        assert job.returncode == 0, said
        assert (tmp_path / "requeued").exists() == queued
        (tmp_path / "0").unlink()
        (tmp_path / "1").unlink()


def test_a_job_that_fails_does_not_queue_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = render(capsys, tiny_toml(tmp_path, train={"save_every": 3}), *options())
    job = cluster(tmp_path, re.sub(r"-m torch.distributed.run \\\n", "-c 'raise SystemExit(3)' \\\\\n", script))
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 3, said
    assert not (tmp_path / "requeued").exists()


# ---- The page. ----

PAGE = (ROOT / "docs/multi_node.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_has_the_script_that_is_rendered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    call, script, _ = BLOCKS
    words = shlex.split(call.replace("\\\n", " ").partition(">job.sh")[0])
    assert words[0] == "maingrad"
    assert "#SBATCH --nodes=16" in render(capsys, *words[2:])
    small = ["--nodes", "2", "--gpus-per-node", "4", "--train.device", "auto", "--train.save-every", "500"]
    rendered = render(capsys, "launch/configs/fsdp.toml", *small)
    assert rendered.replace(shlex.quote(sys.executable), ".venv/bin/python") == script
    for block in BLOCKS:
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
        ["bash", "-c", BLOCKS[2], "nodes.sh", "some.toml", "--train.steps", "3"],
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
