"""The process of a run: its group, its device, its memory; and what is known of a repository."""

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_run import tiny_config

from maingrad.launch import simulate
from maingrad.launch.config.run import MeshConfig
from maingrad.launch.training.run_state import write_resolved
from maingrad.launch.training.runtime import (
    Runtime,
    current_runtime,
    let_kernels_start_beside_host_memory,
    peak_nbytes,
    process_group_from_env,
    versions,
)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_half_of_what_a_launcher_sets_makes_no_group(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0" if name == "RANK" else "1")
    monkeypatch.delenv(missing)
    with process_group_from_env("cpu"):
        assert not dist.is_initialized()


@pytest.mark.parametrize("fails", [False, True])
def test_a_group_ends_with_its_context(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="within") if fails else nullcontext(), process_group_from_env("cpu"):
        assert dist.get_backend() == "gloo"
        if fails:
            raise RuntimeError("within")
    assert not dist.is_initialized()


def test_a_rank_on_a_gpu_has_a_group_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for CUDA and for the group. The device is chosen before the group is made."""
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: calls.append((backend, how)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("ended"))
    own = torch.device("cuda", 1)
    with process_group_from_env("auto"):
        assert calls == [own, ("nccl", {"device_id": own})]
    assert calls[2:] == ["ended"]
    calls.clear()
    with process_group_from_env("cpu"):
        assert calls == [("gloo", {})], "on request"


@pytest.mark.parametrize("there", [True, False])
def test_versions_are_those_of_cuda_and_the_gpu_too(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = versions()
    assert (found.get("gpu"), found.get("cuda")) == (("H100", "13.0") if there else (None, None))
    assert found["executable"] == sys.executable and found["torch"] == torch.__version__


def test_a_group_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    def within() -> int:
        with process_group_from_env("cpu"):
            pass
        return dist.get_world_size()

    assert simulate(within, 2) == [2, 2]


def test_ranks_of_gloo_train_on_the_cpu_whatever_is_asked_for() -> None:
    assert simulate(lambda: current_runtime("cuda", MeshConfig()).device.type, 1) == ["cpu"]


def test_a_rank_has_the_gpu_of_its_number_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for local, index in (("3", 3), (None, 0)):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local is not None:
            monkeypatch.setenv("LOCAL_RANK", local)
        assert current_runtime("auto", MeshConfig()).device == torch.device("cuda", index)
        assert current_runtime("cpu", MeshConfig()).device == torch.device("cpu")


def test_a_peak_of_memory_has_what_graphs_of_this_gpu_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pools other than the default one, what nothing is allocated in: replays use it."""
    segments = [
        {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": allocated}
        for device, pool, total, allocated in ((1, (0, 0), 64, 1), (1, (0, 7), 100, 30), (0, (0, 7), 1000, 0))
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5000)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device, peak in (("cuda:1", 5070), ("cuda", 5070), ("cuda:0", 6000), ("cpu", None)):
        assert peak_nbytes(torch.device(device)) == peak


@pytest.mark.parametrize("ring", [True, False])
def test_context_ranks_exchange_what_the_mesh_says(ring: bool) -> None:
    mesh = MeshConfig(cp=2, cp_attention="ring" if ring else "ulysses")
    assert simulate(lambda: current_runtime("cpu", mesh).context.ring, 2) == [ring] * 2


@pytest.mark.parametrize(
    ("cuda", "before", "after"),
    [
        ("13.0", {}, {"PYTORCH_ALLOC_CONF": "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"}),
        ("13.0", {"PYTORCH_ALLOC_CONF": "own:1"}, {"PYTORCH_ALLOC_CONF": "own:1"}),
        ("13.0", {"PYTORCH_CUDA_ALLOC_CONF": "own:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "own:1"}),
        (None, {}, {}),
    ],
)
def test_settings_of_allocators_that_are_there_stay(
    cuda: str | None, before: dict[str, str], after: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    let_kernels_start_beside_host_memory()
    assert {name: os.environ[name] for name in names if name in os.environ} == after


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 10)])
def test_without_an_answer_of_git_there_is_no_commit(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run

    def fail(command: Any, *args: Any, **options: Any) -> Any:
        if "git" not in command:  # Python asks for the machine's name once in a process
            return run(command, *args, **options)
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    write_resolved(tiny_config(tmp_path), 1)
    assert '"git_commit": null' in (tmp_path / "run" / "resolved_config.json").read_text()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_changes_beside_the_commit_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false"]
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"]):
        (tmp_path / "file").write_text("first")
        subprocess.run(["git", *own, *command], check=True)
    written = tmp_path / "run" / "resolved_config.json"
    for content, ending in (("first", '"'), ("second", '-dirty"')):
        (tmp_path / "file").write_text(content)
        write_resolved(tiny_config(tmp_path), 1)
        (line,) = (line for line in written.read_text().splitlines() if "git_commit" in line)
        assert line.endswith(ending) and len(line.split('"')[-2].removesuffix("-dirty")) == 40


def test_ranks_of_a_mesh_have_their_groups() -> None:
    """tp changes fastest, then cp, dp and pp. Losses are averaged over dp and cp."""

    def groups(mesh: MeshConfig) -> list[Any]:
        found = current_runtime("cpu", mesh)
        of_context = found.context.group if mesh.cp > 1 else None
        made = (found.tensor_group, of_context, found.loss_group, found.pipeline_group, found.embedding_group)
        return [None if each is None else dist.get_process_group_ranks(each) for each in made]

    for rank, found in enumerate(simulate(groups, 8, MeshConfig(tp=2, cp=2, pp=2))):
        stage, context, part = rank // 4 * 4, rank // 2 % 2 * 2, rank % 2
        tensor = [stage + context, stage + context + 1]
        own = [stage + part, stage + 2 + part]
        ends = [rank % 4, rank % 4 + 4]
        assert found == [tensor, own, own, ends, ends]
    for rank, found in enumerate(simulate(groups, 8, MeshConfig(pp=4))):
        stage, samples = rank // 2, rank % 2
        ends = [samples, samples + 6] if stage in (0, 3) else None
        assert found == [None, None, [2 * stage, 2 * stage + 1], [samples, samples + 2, samples + 4, samples + 6], ends]
    for rank, found in enumerate(simulate(groups, 4, MeshConfig(cp=2))):
        assert found == [None, [rank // 2 * 2, rank // 2 * 2 + 1], None, None, None], "all ranks have other losses"
    assert simulate(groups, 2, MeshConfig()) == [[None] * 5] * 2


def test_which_stage_and_which_part_of_a_batch_a_rank_of_a_pipeline_has() -> None:
    ranks = [Runtime(rank, 12, torch.device("cpu"), MeshConfig(pp=3, tp=2)) for rank in range(12)]
    assert [each.stage.index for each in ranks] == [0] * 4 + [1] * 4 + [2] * 4
    assert {each.stage.count for each in ranks} == {3} and {each.loss_ranks for each in ranks} == {2}
    assert [each.loss_rank for each in ranks] == [0, 0, 1, 1] * 3 == [each.data_rank for each in ranks]


def test_experts_are_shared_out_among_neighbours() -> None:
    def together() -> list[int]:
        mesh = current_runtime("cpu", MeshConfig(ep=2)).expert_mesh
        return [] if mesh is None else mesh.mesh.tolist()

    assert simulate(together, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert current_runtime("cpu", MeshConfig()).expert_mesh is None
