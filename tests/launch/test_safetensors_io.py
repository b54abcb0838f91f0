"""Weights exported from a checkpoint: the parameters, or the masters rounded once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Everything, build, model_state, take_steps
from loops import assert_same
from preconditioned import Soap
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.launch import safetensors_io, simulate
from maingrad.launch.safetensors_io import export_safetensors, read_weights

ZERO1 = {"use_distributed_optimizer": True, "bucket_size": 300}
WRAPPERS = {
    "zero1": (3, ZERO1),
    "overlapping": (2, {**ZERO1, "overlap_param_gather": True}),
    "hybrid": (4, {**ZERO1, "num_distributed_optimizer_instances": 2}),
    "all-reduce": (2, {}),
    "whole": (3, {"use_distributed_optimizer": True, "keep_params_whole": True}),
}
DTYPES = [None, torch.float32, torch.bfloat16, torch.float16]


def save(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, tuple[int, Tensor]]]:
    """The model's state, and this rank's parts of the masters with their places."""
    ddp, optimizer = build(torch.bfloat16, **config)
    take_steps(ddp, optimizer, range(2), dist.get_rank())
    save_checkpoint(folder, ddp, optimizer)
    return model_state(ddp), {part.name: (part.start, part.master.clone()) for part in optimizer.full_slices()}


@pytest.mark.parametrize(
    "wrapper", [pytest.param(n, marks=pytest.mark.slow if n in ("overlapping", "whole") else ()) for n in WRAPPERS]
)
@pytest.mark.sampled(1)
def test_an_export_has_the_masters_of_all_ranks(tmp_path: Path, wrapper: str) -> None:
    ranks, config = WRAPPERS[wrapper]
    saved = simulate(save, ranks, tmp_path / "checkpoint", config)
    state = saved[0][0]
    masters = {name: state[name].float().flatten() for name in saved[0][1]}
    for _, parts in saved:
        for name, (start, part) in parts.items():
            masters[name][start : start + len(part)] = part
    halves = {name for name in masters if state[name].dtype is torch.bfloat16}
    for dtype in DTYPES:
        export_safetensors(tmp_path / "checkpoint", tmp_path / str(dtype), dtype=dtype)
        tensors = load_file(tmp_path / str(dtype))
        assert set(tensors) == set(state) - {"scratch"}
        assert tensors["seen"].dtype is torch.int64
        for name in halves:
            expected = state[name] if dtype is None else masters[name].view(state[name].shape).to(dtype)
            assert tensors[name].dtype is expected.dtype and torch.equal(tensors[name], expected), name
        assert_same(
            {n: tensors[n].to(state[n].dtype) for n in ("seen", "fixed")}, {n: state[n] for n in ("seen", "fixed")}
        )
    moved = [name for name in halves if not torch.equal(masters[name], masters[name].bfloat16().float())]
    assert len(moved) > 4, "masters hold bits that parameters do not"
    with safe_open(tmp_path / "None", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert json.loads(file.metadata()["maingrad.tied"]) == {"head.weight": "embed.weight"}
    assert not list(tmp_path.glob("*.incomplete"))


def test_a_module_reads_an_export_by_safetensors_alone(tmp_path: Path) -> None:
    model, other = Everything(torch.bfloat16), Everything(torch.bfloat16, seed=1)
    save_checkpoint(tmp_path / "c", model)
    export_safetensors(tmp_path / "c", tmp_path / "sub" / "file")
    load_model(other, tmp_path / "sub" / "file")
    assert_same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["maingrad.json", "rank-00000.safetensors"])
def test_a_checkpoint_is_not_exported_onto_itself(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path / "c", Everything(), extra=1)
    (tmp_path / "link").symlink_to(tmp_path / "c")
    (tmp_path / f"also {name}").symlink_to(tmp_path / "c" / name)
    for target in (tmp_path / "c" / name, tmp_path / "link" / name, tmp_path / f"also {name}"):
        with pytest.raises(ValueError, match=rf"{name}' is a file of a checkpoint: write to another"):
            export_safetensors(tmp_path / "c", target)
    assert load_checkpoint(tmp_path / "c", Everything()) == 1


def test_targets_and_dtypes_that_are_none_are_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", Everything())
    for target in ("", tmp_path):
        with pytest.raises(ValueError, match="is no file to write weights to"):
            export_safetensors(tmp_path / "c", target)
    with pytest.raises(ValueError, match=r"dtype = torch\.int8: weights are rounded to a floating-point type"):
        export_safetensors(tmp_path / "c", tmp_path / "file", dtype=torch.int8)


def test_buffers_and_integers_keep_their_dtype(tmp_path: Path) -> None:
    """``dtype`` is of the floating-point parameters, whose masters it rounds."""
    model = nn.Linear(3, 2)
    model.register_buffer("table", torch.rand(2))
    model.register_buffer("scratch", torch.rand(2), persistent=False)
    model.codes = nn.Parameter(torch.arange(3), requires_grad=False)
    save_checkpoint(tmp_path / "c", model)
    for dtype in (torch.bfloat16, None):
        export_safetensors(tmp_path / "c", tmp_path / "sub" / "folder" / "file", dtype=dtype)
        found = load_file(tmp_path / "sub" / "folder" / "file")
        wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if dtype is not None:
            wanted |= {name: wanted[name].to(dtype) for name in ("weight", "bias")}
        assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in wanted.items()}
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_matrices_of_an_optimizers_state_are_no_weights(tmp_path: Path) -> None:
    """SOAP's, which have entries of their own in a checkpoint, beside a parameter's name."""
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, keep_params_whole=True)
    ddp = DistributedDataParallel(nn.Linear(3, 2), config)
    optimizer = DistributedOptimizer(ddp, optimizer_class=Soap)
    ddp(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c", ddp, optimizer)
    assert any("@weight" in name for name in json.loads((tmp_path / "c" / "maingrad.json").read_text())["tensors"])
    for dtype in (None, torch.bfloat16):
        weights = read_weights(tmp_path / "c", dtype=dtype)
        assert_same(
            weights.tensors, {n: t if dtype is None else t.to(dtype) for n, t in ddp.module.state_dict().items()}
        )
        assert weights.extra is None and weights.tied == {}


def test_files_beside_a_checkpoint_and_of_its_names_elsewhere_are_written(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_checkpoint(tmp_path / "c", model)
    for target in (tmp_path / "c" / "own.safetensors", tmp_path / "rank-00000.safetensors"):
        export_safetensors(tmp_path / "c", target)
        assert_same(load_file(target), model.state_dict())
    assert load_checkpoint(tmp_path / "c", nn.Linear(3, 2)) is None


@pytest.mark.parametrize("error", [OSError, SafetensorError])
def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_text("the first half")
        raise error("the disk is full")

    save_checkpoint(tmp_path / "c", nn.Linear(3, 2))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").write_text("of before")
    monkeypatch.setattr(safetensors_io, "save_file", fail)
    with pytest.raises(OSError, match=r"file' could not be written \(the disk is full\)"):
        export_safetensors(tmp_path / "c", tmp_path / "new" / "file")
    assert {path.name: path.read_text() for path in (tmp_path / "new").iterdir()} == {"file": "of before"}
    monkeypatch.setattr(safetensors_io, "save_file", lambda tensors, path, metadata: Path("").rename(path))
    with pytest.raises(OSError, match="could not be written"):
        export_safetensors(tmp_path / "c", tmp_path / "new" / "file")


def test_an_expanded_buffer_is_as_large_in_files_as_it_is_and_takes_none(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("table", torch.arange(26.0).view(26, 1).expand(26, 100))
    save_checkpoint(tmp_path / "c", model)
    export_safetensors(tmp_path / "c", tmp_path / "file")
    assert 26 * 100 * 4 < (tmp_path / "file").stat().st_size < 26 * 100 * 4 + 2000
    with pytest.raises(ValueError, match="'table' is expanded: several of its elements are one place"):
        load_checkpoint(tmp_path / "c", model)
    model.table = torch.zeros(26, 100)
    load_checkpoint(tmp_path / "c", model)
    assert torch.equal(model.table, torch.arange(26.0).view(26, 1).expand(26, 100))


def test_ranks_with_other_experts_have_no_one_model(tmp_path: Path) -> None:
    def save() -> None:
        model = nn.Linear(3, 2)
        model.weight.allreduce = False  # type: ignore[attr-defined]
        save_checkpoint(tmp_path / "c", DistributedDataParallel(model, expert_process_group=WORLD_OF_ONE))

    simulate(save, 2)
    with pytest.raises(ValueError, match="ranks have 2 different sets of experts: there is no one model"):
        export_safetensors(tmp_path / "c", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint at '.*/nothing'"):
        export_safetensors(tmp_path / "nothing", tmp_path / "x")
    assert not (tmp_path / "x").exists()
