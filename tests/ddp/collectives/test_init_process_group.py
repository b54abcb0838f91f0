"""``init_process_group``: one line for a program under torchrun, which also runs without a launcher."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from python_processes import run_python

from maingrad.ddp import init_process_group
from maingrad.ddp.collectives.rank_grid import backends_of, device_types_of

PROGRAM = """
import torch, torch.distributed as dist
from maingrad.ddp import init_process_group
device, rank, ranks = init_process_group()
total = torch.tensor([rank + 1.0], device=device)
dist.all_reduce(total)
same = init_process_group() == (device, rank, ranks)
print(f"{device.type} {rank} of {ranks}, sum {total.item():g}, {dist.get_backend()}, {same}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def printed(tmp_path: Path, *launcher: str) -> list[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    if launcher:
        ended = subprocess.run([sys.executable, *launcher, str(program)], capture_output=True, text=True, timeout=110)
    else:
        ended = run_python(program, timeout=110)
    assert ended.returncode == 0, ended.stderr
    return sorted(line for line in ended.stdout.splitlines() if " of " in line)


def test_without_a_launcher_the_process_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert printed(tmp_path) == ["cpu 0 of 1, sum 1, gloo, True"]


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lines = printed(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert lines == [f"cpu {rank} of 2, sum 3, gloo, True" for rank in range(2)]


@pytest.mark.gpu(2)
def test_under_torchrun_on_two_gpus(tmp_path: Path) -> None:
    lines = printed(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert lines == [f"cuda {rank} of 2, sum 3, nccl, True" for rank in range(2)]


@pytest.mark.parametrize(
    ("config", "device", "backend", "devices"),
    [
        ("cpu:gloo,cuda:nccl", "cpu", "gloo", ["cpu", "cuda"]),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl", ["cpu", "cuda"]),
        ("gloo", "cpu", "gloo", []),
        ("cuda:nccl", "cuda", "nccl", ["cuda"]),
    ],
)
def test_a_group_has_a_backend_for_each_type_of_device(
    config: str, device: str, backend: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    assert backends_of([group], torch.device(device)) == {backend}
    assert device_types_of(group) == devices


def existing() -> tuple[str, int, int]:
    device, rank, ranks = init_process_group()
    assert (rank, ranks) == (dist.get_rank(), dist.get_world_size())
    return device.type, rank, ranks


def test_a_group_that_exists_stays() -> None:
    assert run_ranks(existing, 2) == [("cpu", 0, 2), ("cpu", 1, 2)]


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RuntimeError, match="LOCAL_RANK=2, and this process sees 2 GPU"):
        init_process_group()


@pytest.mark.parametrize(("name", "missing"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_of_a_launchers_environment_is_not_taken_for_none(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of several ranks would train alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for each in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=f"environment variable {missing} expected"):
        init_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize("alone", [False, True])
def test_with_gpus_the_process_has_its_own_before_nccl_begins(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher it is alone there too."""
    called: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: called.append(("set_device", device)))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: called.append((backend, options)))
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
        if alone:
            monkeypatch.delenv(name)
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = torch.device("cuda", 1)
    assert init_process_group() == (device, 3, 4)
    (first, current), (backend, options) = called
    assert (first, current) == ("set_device", device)
    assert (backend, options.pop("device_id")) == ("nccl", device)
    assert {name: options.get(name) for name in ("rank", "world_size")} == (
        {"rank": 0, "world_size": 1} if alone else {"rank": None, "world_size": None}
    )


@pytest.mark.parametrize(("backend", "kind"), [("gloo", "cpu"), ("nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda")])
def test_the_backend_of_a_group_that_exists_says_where_the_process_computes(
    backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever GPUs the machine has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    assert init_process_group().device.type == kind
