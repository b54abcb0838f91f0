"""Checkpoints that do not fit, are incomplete or are none: one clear error on all ranks, and no hang."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Everything, build, model_state, take_steps
from gloo import run_ranks
from loops import assert_same, wrap
from torch import Tensor, nn
from torch.distributed.checkpoint import save as torchs_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from maingrad.ddp import DistributedOptimizer, load_checkpoint, save_checkpoint
from maingrad.ddp.checkpoint import background
from maingrad.ddp.checkpoint.background import PendingSave
from maingrad.ddp.checkpoint.checkpoint import Notes
from maingrad.ddp.checkpoint.files.boxes import Parts, parts_of_range
from maingrad.ddp.checkpoint.files.folder import Staging
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

ZERO1 = {"use_distributed_optimizer": True, "bucket_size": 300}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "step-3"

    def save() -> None:
        ddp, optimizer = build(torch.bfloat16, **ZERO1)
        take_steps(ddp, optimizer, range(1), dist.get_rank())
        save_checkpoint(folder, ddp, optimizer)

    simulate(save, 3)
    return folder


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "step-3")
    return tmp_path / "step-3"


# ---- Files. ----


def cut_data(folder: Path) -> None:
    path = folder / "rank-00001.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def lose_data(folder: Path) -> None:
    (folder / "rank-00002.safetensors").unlink()


def cut_manifest(folder: Path) -> None:
    os.truncate(folder / "maingrad.json", 100)


def lose_manifest(folder: Path) -> None:
    (folder / "maingrad.json").unlink()


def edit_manifest(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "maingrad.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def other_format(folder: Path) -> None:
    """A checkpoint of torch's, without this library's files."""
    shutil.rmtree(folder)
    torchs_save({"model": Everything().state_dict()}, checkpoint_id=folder, no_dist=True)


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"weights")


DAMAGE: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "data truncated": (
        cut_data,
        ValueError,
        r"data file '.*/rank-00001\.safetensors' is truncated",
    ),
    "data missing": (lose_data, ValueError, r"data file '.*/rank-00002\.safetensors' is missing"),
    "manifest truncated": (cut_manifest, ValueError, r"maingrad\.json' is truncated or damaged"),
    "manifest missing": (lose_manifest, ValueError, r"no complete checkpoint of maingrad: it has no maingrad\.json"),
    "manifest of another kind": (edit_manifest(format="x"), ValueError, "its format is not 'maingrad.checkpoint'"),
    "manifest to come": (
        edit_manifest(version=5),
        ValueError,
        "has version 5 of the format, and .* reads version 4: .*, a newer maingrad reads later",
    ),
    "manifest without tensors": (edit_manifest(tensors=None, checksum=None), ValueError, r"maingrad\.json' is damaged"),
    "an option of no dtype": (
        edit_manifest(
            checksum=None,
            optimizer={"optimizer_class": "AdamW", "groups": [{"lr": {"tensor": 1.0, "dtype": "x"}}]},
        ),
        ValueError,
        r"maingrad\.json' is damaged \(ValueError: .*'x' is no dtype\)",
    ),
    "torch's own": (other_format, ValueError, r"no complete checkpoint of maingrad"),
    "a file": (replace_by_file, ValueError, r"step-3' is a file, and a checkpoint is a folder"),
    "nothing": (shutil.rmtree, FileNotFoundError, r"there is no checkpoint at '.*/step-3'"),
}


def load_and_compare(folder: Path) -> None:
    """The error leaves the model as it was."""
    ddp, optimizer = build(torch.bfloat16, seed=1, **ZERO1)
    before = model_state(ddp)
    try:
        load_checkpoint(folder, ddp, optimizer)
    finally:
        assert_same(model_state(ddp), before)
        assert not any(part.state() for part in optimizer.slices)


def errors_of(fn: Callable[..., Any], *args: Any) -> str:
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("damage, kind, message", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_one_error_before_anything_changes(
    checkpoint: Path, damage: Callable[[Path], None], kind: type[Exception], message: str
) -> None:
    damage(checkpoint)
    with pytest.raises(kind, match=message):
        load_and_compare(checkpoint)
    errors = {re.sub(r" \(on rank \d\)$", "", each) for each in simulate(errors_of, 3, load_and_compare, checkpoint)}
    assert errors == {errors_of(load_and_compare, checkpoint)}


@pytest.mark.parametrize("ranks", [1, 3])
def test_damage_inside_a_data_file_is_found_while_reading(checkpoint: Path, ranks: int) -> None:
    path = checkpoint / "rank-00001.safetensors"
    content = path.read_bytes()
    behind_header = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:behind_header] + bytes(len(content) - behind_header))
    errors = simulate(errors_of, ranks, lambda: load_checkpoint(checkpoint, *build(torch.bfloat16, **ZERO1)))
    for error in errors:
        assert error == errors[0]
        assert error.startswith("ValueError: '")
        assert "rank-00001.safetensors' is damaged where '" in error
        assert "the model is partly overwritten, do not go on with it" in error


def test_damage_that_is_found_while_reading_keeps_the_error_that_found_it(checkpoint: Path) -> None:
    path = checkpoint / "rank-00001.safetensors"
    content = path.read_bytes()
    behind_header = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:behind_header] + bytes(len(content) - behind_header))
    with pytest.raises(ValueError, match=r"is damaged where .*the model is partly overwritten") as raised:
        load_checkpoint(checkpoint, *build(torch.bfloat16, **ZERO1))
    cause = raised.value.__cause__
    assert isinstance(cause, ValueError) and "is damaged where" in str(cause) and "partly" not in str(cause)


# ---- Models and optimizers that do not fit. ----


def with_changes(change: Callable[[nn.Module], None] | None = None, **optimizer: Any) -> tuple[Any, Any]:
    model = Everything(torch.bfloat16)
    if change is not None:
        change(model)
    ddp = wrap(model, **ZERO1)
    return ddp, DistributedOptimizer(ddp, lr=0.02, **optimizer)


def add_parameter(model: nn.Module) -> None:
    model.more = nn.Parameter(torch.zeros(3))


def drop_parameter(model: nn.Module) -> None:
    del model.cube


def reshape_parameter(model: nn.Module) -> None:
    model.cube = nn.Parameter(torch.zeros(3, 5, 14, dtype=torch.bfloat16))


def widen_parameter(model: nn.Module) -> None:
    model.cube = nn.Parameter(model.cube.detach().float())


def freeze_parameter(model: nn.Module) -> None:
    model.cube.requires_grad_(False)


def thaw_parameter(model: nn.Module) -> None:
    model.fixed.requires_grad_(True)


def add_buffer(model: nn.Module) -> None:
    model.register_buffer("more", torch.zeros(3))


MISFITS: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "missing": (
        lambda: with_changes(add_parameter),
        r"'more' is a parameter of float32 \[3\] in the model and missing in the checkpoint",
    ),
    "unknown": (
        lambda: with_changes(drop_parameter),
        r"'cube' is missing in the model and a parameter of bfloat16 \[3, 5, 2, 7\] in the checkpoint",
    ),
    "shape": (
        lambda: with_changes(reshape_parameter),
        r"'cube' is a parameter of bfloat16 \[3, 5, 14\] in the model and a parameter of bfloat16 \[3, 5, 2, 7\]",
    ),
    "dtype": (
        lambda: with_changes(widen_parameter),
        r"'cube' is a parameter of float32 \[3, 5, 2, 7\] in the model and a parameter of bfloat16",
    ),
    "frozen": (
        lambda: with_changes(freeze_parameter),
        "'cube' is frozen, or without an optimizer, and was in parameter group 0 of 1 when .*: load the weights",
    ),
    "thawed": (lambda: with_changes(thaw_parameter), "parameter 'fixed' is in parameter group 0 of 1 and was frozen"),
    "buffer": (
        lambda: with_changes(add_buffer),
        r"'more' is a buffer of float32 \[3\] in the model and missing in the checkpoint",
    ),
    "optimizer": (
        lambda: with_changes(optimizer_class=torch.optim.SGD, momentum=0.9),
        "the checkpoint has the state of AdamW, and this optimizer is SGD, which keeps other moments",
    ),
    "optimizer of a name like it": (
        lambda: with_changes(optimizer_class=torch.optim.Adam),
        "the checkpoint has the state of AdamW, and this optimizer is Adam, which keeps other moments",
    ),
    "groups": (
        lambda: with_changes(param_groups=[{"params": "cube", "lr": 0.0}]),
        r"'\S+' is in parameter group \d of 2 and was in parameter group 0 of 1 when the checkpoint was saved",
    ),
}


def load_misfit(folder: Path, name: str) -> str:
    return errors_of(lambda: load_checkpoint(folder, *MISFITS[name][0]()))


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named(pristine: Path, name: str) -> None:
    with pytest.raises(ValueError, match=MISFITS[name][1]):
        load_checkpoint(pristine, *MISFITS[name][0]())
    errors = simulate(load_misfit, 2, pristine, name)
    assert errors[0] == errors[1]
    assert "on rank" not in errors[0]


def test_a_checkpoint_of_another_model_is_named_with_the_remedy(tmp_path: Path) -> None:
    """A program that was changed, and still saves to the folder of its former model."""
    save_checkpoint(tmp_path / "run", torch.nn.Linear(4, 4))
    other = torch.nn.Linear(4, 6)
    before = other.weight.clone()
    named = f"checkpoint '{tmp_path}/run' does not fit this model: 'weight' is a parameter of "
    remedy = "load it into a model that is built as the saved one was, or begin a new run in another folder"
    with pytest.raises(ValueError, match=f"^{named}.*; {remedy}$"):
        load_checkpoint(tmp_path / "run", other)
    assert torch.equal(other.weight, before)


def test_the_first_misfits_are_named_and_a_slice_that_fits_is_none(tmp_path: Path) -> None:
    """A mark of Megatron's does not say that there are other slices."""

    def make(*more: str) -> nn.Module:
        model = nn.Linear(4, 4)
        model.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        for name in more:
            model.register_buffer(name, torch.zeros(3))
        return model

    def save() -> None:
        save_checkpoint(tmp_path / "c", wrap(make()))

    simulate(save, 2)
    load_checkpoint(tmp_path / "c", make())
    lacks = "'{}' is a buffer of float32 [3] in the model and missing in the checkpoint"
    with pytest.raises(ValueError, match="does not fit this model") as raised:
        load_checkpoint(tmp_path / "c", make("one", "two", "three", "four"))
    named = "; ".join(lacks.format(name) for name in ("one", "two", "three"))
    assert f"does not fit this model: {named}; load it into a model that is built as" in str(raised.value)


def test_a_parameter_in_another_group_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", *with_changes(param_groups=[{"params": "cube", "lr": 0.0}]))
    with pytest.raises(
        ValueError, match="parameter 'cube' is in parameter group 1 of 2 and was in parameter group 0 of 2 when"
    ):
        load_checkpoint(tmp_path / "c", *with_changes(param_groups=[{"params": "scale", "lr": 0.0}]))


def test_weights_alone_are_not_an_optimizers_state(tmp_path: Path) -> None:
    model, optimizer = with_changes()
    save_checkpoint(tmp_path / "c", model)
    with pytest.raises(
        ValueError, match="saved without an optimizer: load_checkpoint\\(path, model\\) takes its weights"
    ):
        load_checkpoint(tmp_path / "c", model, optimizer)


def test_optimizers_that_cannot_be_saved_are_named(tmp_path: Path) -> None:
    model, optimizer = with_changes()
    with pytest.raises(TypeError, match="the state of a DistributedOptimizer, got SGD"):
        save_checkpoint(tmp_path / "c", model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="this optimizer belongs to another model"):
        save_checkpoint(tmp_path / "c", with_changes()[0], optimizer)
    optimizer.param_groups[0]["note"] = {"not": "a number"}
    with pytest.raises(ValueError, match="option 'note' of parameter group 0 is a dict"):
        save_checkpoint(tmp_path / "c", model, optimizer)
    assert not list(tmp_path.iterdir())


# ---- Trouble on one rank alone. ----


def save_with_trouble_on_rank_1(folder: Path, trouble: str) -> str:
    ddp, optimizer = build(**ZERO1)
    rank = dist.get_rank()
    if trouble == "path" and rank == 1:
        folder = folder.parent / "elsewhere" / folder.name
    if trouble == "optimizer" and rank == 1:
        optimizer = None
    if trouble == "value" and rank == 1:
        optimizer.param_groups[0]["note"] = object()
    extra = object() if trouble == "extra" and rank == 0 else None
    return errors_of(lambda: save_checkpoint(folder, ddp, optimizer, extra=extra))


TROUBLE = {
    "path": r"all ranks save to and load from one folder, and were given \['.*/c', '.*/elsewhere/c'\]",
    "optimizer": "ValueError: some ranks give an optimizer and some do not",
    "value": r"ValueError: option 'note' of parameter group 0 is a object, .* \(on rank 1\)",
    "extra": r"TypeError: extra must be something that JSON holds .* \(on rank 0\)",
}


@pytest.mark.parametrize(
    "run, trouble",
    [
        *((simulate, trouble) for trouble in TROUBLE),
        *(
            pytest.param(run_ranks, trouble, marks=() if trouble == "value" else pytest.mark.slow)
            for trouble in TROUBLE
        ),
    ],
)
def test_trouble_on_one_rank_is_an_error_on_all(tmp_path: Path, run: Callable[..., list[str]], trouble: str) -> None:
    errors = run(save_with_trouble_on_rank_1, 2, tmp_path / "c", trouble)
    assert errors[0] == errors[1]
    assert re.search(TROUBLE[trouble], errors[0]), errors[0]
    assert not (tmp_path / "c").exists()


def test_a_load_is_alike_on_all_ranks_too(pristine: Path) -> None:
    def load() -> str:
        ddp, optimizer = build(torch.bfloat16, **ZERO1)
        return errors_of(load_checkpoint, pristine, ddp, optimizer if dist.get_rank() == 0 else None)

    for said in simulate(load, 2):
        assert said.startswith("ValueError: some ranks give an optimizer and some do not: all of them, or none")


def load_damaged_on_real_ranks(folder: Path, name: str) -> str:
    if name == "optimizer of rank 1" and dist.get_rank() == 1:
        return errors_of(lambda: load_checkpoint(folder, *MISFITS["optimizer"][0]()))
    if name in MISFITS:
        return load_misfit(folder, name)
    return errors_of(lambda: load_checkpoint(folder, *with_changes()))


@pytest.mark.parametrize("name", ["shape", "optimizer of rank 1", "damaged"])
def test_real_ranks_raise_alike_and_go_on(checkpoint: Path, name: str) -> None:
    if name == "damaged":
        cut_data(checkpoint)
    errors = run_ranks(load_damaged_on_real_ranks, 2, checkpoint, name)
    assert errors[0] == errors[1] != "nothing was raised"
    assert ("(on rank 1)" in errors[0]) == (name == "optimizer of rank 1")


# ---- Saves that are interrupted, and saves onto something. ----


def test_a_checkpoint_is_replaced_when_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, Everything(seed=1), extra=1)
    save_checkpoint(path, Everything(seed=2), extra=2)
    model = Everything()
    assert load_checkpoint(path, model) == 2
    assert_same(dict(model.named_parameters()), dict(Everything(seed=2).named_parameters()))
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


STAGES = {
    "tensors": "maingrad.ddp.checkpoint.background.PendingSave._complete",
    "manifest": "maingrad.ddp.checkpoint.background.write_manifest",
    "move": "maingrad.ddp.checkpoint.files.folder.Staging.complete",
}


class Interrupted(BaseException):
    """An error that no code handles."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_save_that_dies_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, Everything(seed=1), extra=1)

    def die(*args: Any, **kwargs: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(STAGES[stage], die)
        with pytest.raises(Interrupted):
            save_checkpoint(path, Everything(seed=2), extra=2)
    assert (tmp_path / "c.incomplete").is_dir()
    assert load_checkpoint(path, Everything()) == 1
    if stage != "move":
        with pytest.raises(ValueError, match=r"c\.incomplete' is no complete checkpoint"):
            load_checkpoint(tmp_path / "c.incomplete", Everything())
    save_checkpoint(path, Everything(seed=3), extra=3)
    assert load_checkpoint(path, Everything()) == 3
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_between_the_two_renames_both_checkpoints_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, Everything(seed=1), extra=1)
    original = Path.rename

    def die_at_the_second(self: Path, target: Path) -> Path:
        if self.name == "c.incomplete":
            raise Interrupted
        return original(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die_at_the_second)
        with pytest.raises(Interrupted):
            save_checkpoint(path, Everything(seed=2), extra=2)
    assert not path.exists()
    assert load_checkpoint(path, Everything()) == 2
    assert load_checkpoint(tmp_path / "c.replaced", Everything()) == 1
    assert load_checkpoint(tmp_path / "c.incomplete", Everything()) == 2
    save_checkpoint(path, Everything(seed=3), extra=3)
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("name", ["c", "c.incomplete", "c.replaced"])
def test_a_save_never_deletes_what_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("years of work")
    if name == "c":
        (tmp_path / name / "maingrad.json").write_text("{}")
    with pytest.raises(FileExistsError, match=rf"'{tmp_path / name}' is (there and is not just|in the way and is no)"):
        save_checkpoint(tmp_path / "c", Everything())
    assert (tmp_path / name / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_is_a_fine_place(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, Everything(), extra="here")
    assert load_checkpoint(tmp_path, Everything()) == "here"
    assert not tmp_path.with_name(f"{tmp_path.name}.replaced").exists()


@pytest.mark.parametrize("path", ["", "."])
def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileExistsError), match=r"name a folder|save to a folder in it"):
        save_checkpoint(path, Everything())
    assert Path.cwd() == tmp_path
    save_checkpoint("c", Everything())


def test_a_missing_parent_is_made(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "runs" / "today" / "c", Everything())
    load_checkpoint(tmp_path / "runs" / "today" / "c", Everything())


def save_where_rank_1_cannot_write(folder: Path) -> str:
    ddp, optimizer = build(seed=1, **ZERO1)
    return errors_of(lambda: save_checkpoint(folder, ddp, optimizer))


def test_a_rank_that_cannot_write_is_named_and_nothing_is_replaced(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PendingSave._write

    def full(pending: PendingSave) -> None:
        if dist.get_rank() == 1:
            raise OSError("No space left on device")
        original(pending)

    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(PendingSave, "_write", full)
        errors = simulate(save_where_rank_1_cannot_write, 3, checkpoint)
    assert set(errors) == {"OSError: No space left on device (on rank 1)"}
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_files_on_disks_of_their_own_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank does not see the files of the other ranks."""
    original = PendingSave._write

    def elsewhere(pending: PendingSave) -> None:
        if dist.get_rank() == 1:
            pending._staging = Staging(tmp_path / "disk of rank 1")
            pending._staging.folder.mkdir()
        original(pending)

    monkeypatch.setattr(PendingSave, "_write", elsewhere)
    monkeypatch.setattr(background, "_DELAY", 0.1)
    errors = simulate(save_where_rank_1_cannot_write, 2, tmp_path / "c")
    assert errors[0] == errors[1]
    assert "rank-00001.safetensors' is missing" in errors[0]
    assert "a checkpoint lies on a file system that all ranks share" in errors[0]
    assert not (tmp_path / "c").exists()


# ---- Models that no wrapper here holds, on many ranks. ----


def save_a_bare_model(path: Path, kind: str) -> str:
    model: nn.Module = nn.Linear(4, 4)
    if kind == "torch's":
        model = TorchDDP(model)
    return errors_of(save_checkpoint, path, model)


def test_a_model_in_torchs_wrapper_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for error in run_ranks(save_a_bare_model, 2, tmp_path / "c", "torch's"):
        assert error.startswith("ValueError: the model is in torch's DistributedDataParallel"), error
        assert "save_checkpoint(path, model.module)" in error
    assert not (tmp_path / "c").exists()


def save_while_another_rank_does(path: Path) -> str:
    """Rank 1 starts its save while rank 0 is saving."""
    original = PendingSave._write

    def slow(pending: PendingSave) -> None:
        dist.barrier()
        dist.barrier()
        original(pending)

    if dist.get_rank() == 0:
        PendingSave._write = slow  # type: ignore[method-assign]
        try:
            return save_a_bare_model(path, "plain")
        finally:
            PendingSave._write = original  # type: ignore[method-assign]
    dist.barrier()
    said = save_a_bare_model(path, "plain")
    dist.barrier()
    return said


def test_ranks_that_save_one_bare_model_are_told_to_save_it_once(tmp_path: Path) -> None:
    first, second = run_ranks(save_while_another_rank_does, 2, tmp_path / "c")
    assert first == "nothing was raised"
    assert second.startswith("FileExistsError: another save is writing into")
    assert "each rank saves by itself: save it on one (if torch.distributed.get_rank() == 0)" in second
    load_checkpoint(tmp_path / "c", nn.Linear(4, 4))


def save_dtensors(path: Path) -> list[str]:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)]))
    return [errors_of(save_checkpoint, path, model), errors_of(load_checkpoint, path, model)]


def test_dtensors_are_refused_by_name(tmp_path: Path) -> None:
    for errors in simulate(save_dtensors, 2, tmp_path / "c"):
        assert all(error.startswith("ValueError: parameter 'weight' is a DTensor") for error in errors), errors
    assert not (tmp_path / "c").exists()


# ---- What does not fit together. ----


@pytest.mark.parametrize("lost, missing", [("end", 7), ("middle", 2)])
def test_elements_that_no_rank_holds_are_missed_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, missing: int
) -> None:
    """A wrapper's mistake."""

    def incomplete(*args: Any) -> tuple[Parts, Notes]:
        rank, data = dist.get_rank(), torch.arange(12.0)
        start, end = (0, 5) if rank == 0 else (5, 5) if lost == "end" else (7, 12)
        parts = parts_of_range("w", (3, 4), start, {"model": data[start:end]})
        return parts, Notes([*parts], None, {}, {})

    monkeypatch.setattr("maingrad.ddp.checkpoint.checkpoint._look_at", incomplete)
    errors = simulate(errors_of, 2, lambda: save_checkpoint(tmp_path / "c", wrap(nn.Linear(2, 2))))
    assert errors[0] == errors[1]
    assert f"'w' of shape [3, 4] is not held by all ranks together: {missing} elements are missing" in errors[0]
    assert not list(tmp_path.iterdir())


def test_an_entry_of_another_dtype_is_refused_by_name(tmp_path: Path) -> None:
    """The same bytes under another dtype, in the data file or in the manifest."""
    save_checkpoint(tmp_path / "c", nn.Linear(4, 4, bias=False))
    data, path = tmp_path / "c" / "rank-00000.safetensors", tmp_path / "c" / "maingrad.json"
    content = data.read_bytes()
    data.write_bytes(content.replace(b'"F32"', b'"I32"'))
    with pytest.raises(ValueError, match=r"rank-00000\.safetensors' is damaged where 'model\.weight' lies \(.*I32"):
        load_checkpoint(tmp_path / "c", nn.Linear(4, 4, bias=False))
    data.write_bytes(content)
    path.write_text(re.sub("float32", "int32", re.sub(r'm": \d+', 'm": null', path.read_text())))
    with pytest.raises(
        ValueError, match=r"'weight' is a parameter of float32 \[4, 4\] in the model and a parameter of int32 \[4, 4\]"
    ):
        load_checkpoint(tmp_path / "c", nn.Linear(4, 4, bias=False))


def test_extra_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    extra: Any = []
    for _ in range(100_000):
        extra = [extra]
    with pytest.raises(TypeError, match=r"extra must be something that JSON holds .*recursion"):
        save_checkpoint(tmp_path / "c", nn.Linear(2, 2), extra=extra)
    assert not list(tmp_path.iterdir())


def test_extra_that_is_too_long_to_be_read_again_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maingrad.ddp.checkpoint.files.manifest.MOST_BYTES", 10_000)
    save_checkpoint(tmp_path / "c", nn.Linear(2, 2), extra="x" * 5_000)
    with pytest.raises(ValueError, match=r"the manifest has \d+ bytes, and 10000 at most are read again: keep less in"):
        save_checkpoint(tmp_path / "c", nn.Linear(2, 2), extra="x" * 20_000)
    assert load_checkpoint(tmp_path / "c", nn.Linear(2, 2)) == "x" * 5_000
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


CIRCULAR: list[Any] = [1]
CIRCULAR.append(CIRCULAR)


@pytest.mark.parametrize("extra", [torch.bfloat16, {"dtype": [torch.float32]}, Path("x"), nn.Identity(), CIRCULAR])
def test_extra_comes_back_as_it_was_or_is_refused(tmp_path: Path, extra: Any) -> None:
    with pytest.raises(TypeError, match="extra must be something that JSON holds"):
        save_checkpoint(tmp_path / "c", nn.Linear(2, 2), extra=extra)
    assert not list(tmp_path.iterdir())


class SometimesUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def sharded_and_stepped(first_alone: int, together: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = SometimesUsed()
    for unit in (model.first, model.second):
        fully_shard(unit)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(first_alone + together):
        (model.first if step < first_alone else model)(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("together", [0, 1])
def test_a_unit_that_was_used_later_or_never_goes_on_sharded_and_is_refused_elsewhere(
    tmp_path: Path, together: int
) -> None:
    def save() -> None:
        save_checkpoint(tmp_path / "c", *sharded_and_stepped(2, together), extra="it")

    def load_sharded() -> Any:
        return load_checkpoint(tmp_path / "c", *sharded_and_stepped(0, 0))

    def load_wrapped(sharding: bool, whole: bool = False) -> str:
        model = wrap(SometimesUsed(), use_distributed_optimizer=sharding, keep_params_whole=whole)
        said = errors_of(load_checkpoint, tmp_path / "c", model, DistributedOptimizer(model))
        assert load_checkpoint(tmp_path / "c", model) == "it", "as the error says"
        return said

    simulate(save, 2)
    assert simulate(load_sharded, 3) == ["it"] * 3
    # On two ranks of ZeRO-1 the border between shards is the border between the two: that loads.
    assert simulate(load_wrapped, 2, True) == ["nothing was raised"] * 2
    # Parameters that are kept whole are updated one by one, by elementwise classes too.
    assert simulate(load_wrapped, 1, True, True) == ["nothing was raised"]
    for ranks, sharding in ((1, True), (2, False)):
        for said in simulate(load_wrapped, ranks, sharding):
            assert re.search(r"ValueError: parameters '\S+' and '\S+' are updated together here", said), said
            assert (
                "some steps left one of them out. A fully sharded model goes on from it; here, load the weights" in said
            )


def test_a_model_on_the_meta_device_is_refused_by_name(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", nn.Linear(3, 2))
    model = nn.Linear(3, 2, device="meta")
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(ValueError, match="'weight' is on the meta device, which keeps no values"):
            call(tmp_path / "c", model)
    model.to_empty(device="cpu")
    load_checkpoint(tmp_path / "c", model)
    model.register_buffer("table", torch.empty(3, device="meta"))
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(ValueError, match="'table' is on the meta device, which keeps no values"):
            call(tmp_path / "c", model)


def test_a_module_around_sharded_ones_is_refused_by_name(tmp_path: Path) -> None:
    """What a rank holds of them would be saved as all."""

    def refuse() -> None:
        around = nn.Sequential(nn.Tanh(), fully_shard(nn.Linear(3, 2)), nn.Tanh())
        for call in (save_checkpoint, load_checkpoint):
            with pytest.raises(ValueError, match="module '1' is sharded, and the model around it is not"):
                call(tmp_path / "c", around)

    simulate(refuse, 2)
    assert not (tmp_path / "c").exists()


def test_the_default_device_is_none_of_its_business(tmp_path: Path) -> None:
    """Temporary memory is on the CPU: for chunks of which ranks need parts, and for transposed tensors."""

    def make() -> tuple[nn.Module, DistributedOptimizer]:
        inner = nn.Linear(64, 64).bfloat16()
        inner.fixed = nn.Parameter(torch.arange(15.0).view(3, 5).t(), requires_grad=False)
        model = wrap(inner, use_distributed_optimizer=True)
        assert not inner.fixed.is_contiguous()
        return model, DistributedOptimizer(model)

    def save() -> None:
        save_checkpoint(tmp_path / "c", *make())

    def load(device: str) -> dict[str, Tensor]:
        model, optimizer = make()
        with torch.device(device):
            load_checkpoint(tmp_path / "c", model, optimizer)
        return dict(model.state_dict())

    simulate(save, 3)
    for other, plain in zip(simulate(load, 2, "meta"), simulate(load, 2, "cpu"), strict=True):
        assert_same(other, plain)


def test_saves_and_loads_leave_no_file_open(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)

    def save_and_load() -> int:
        save_checkpoint(tmp_path / "checkpoint", model)
        load_checkpoint(tmp_path / "checkpoint", model)
        return len(os.listdir("/proc/self/fd"))

    assert save_and_load() == save_and_load()
