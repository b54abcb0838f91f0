"""A process is killed at any moment of a save: the previous or the new checkpoint loads; other ranks say why.

Kills come before operations on files and before collectives, which are found by the process's audit events.
"""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Everything, build, left_by_a_save, take_steps
from ending_ranks import assert_silent, run_to_the_end, the_report
from loops import assert_same
from torch import nn

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.fsdp import fully_shard
from maingrad.launch.safetensors_io import export_safetensors

FILES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
GATHERS = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list")


class Trap:
    """Kills this process (SIGKILL) right before an operation on the folder, or a collective of objects."""

    def __init__(self, folder: Path, springs: Callable[[int, str], bool]) -> None:
        self.events: list[str] = []
        self._folder = folder
        self._springs = springs

    def arm(self) -> None:
        sys.addaudithook(self._audit)
        os.fsync = self._before("fsync", os.fsync)
        for name in GATHERS:
            found = self._before(name, getattr(dist, name))
            setattr(dist, name, found)
            setattr(dist.distributed_c10d, name, found)

    def _audit(self, name: str, args: tuple[Any, ...]) -> None:
        if name in FILES and (name != "open" or args[2] & WRITING):
            path = Path(os.fsdecode(args[0])) if isinstance(args[0], str | bytes | os.PathLike) else None
            if path is not None and (not path.is_absolute() or path.is_relative_to(self._folder)):
                self._happens(f"{name} {path.name}")

    def _before(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self._happens(name)
            return fn(*args, **kwargs)

        return called

    def _happens(self, event: str) -> None:
        self.events.append(event)
        if self._springs(len(self.events), event):
            os.kill(os.getpid(), signal.SIGKILL)


# ---- One process, killed at every moment. ----


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def saved_by_a_child(folder: Path, extra: int, at: int) -> bool:
    """Save in a child process; returns whether the child was killed at its ``at``-th event."""
    child = os.fork()
    if child == 0:
        Trap(folder, lambda count, event: count == at).arm()
        save_checkpoint(folder / "c", make(extra), extra=extra)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def loaded(path: Path) -> int:
    """The number of the loaded checkpoint, whose weights are compared."""
    model = make(0)
    extra: int = load_checkpoint(path, model)
    assert_same(model.state_dict(), make(extra).state_dict())
    return extra


def nothing(folder: Path) -> None:
    pass


def an_empty_folder(folder: Path) -> None:
    (folder / "c").mkdir()


def one_before(folder: Path) -> None:
    save_checkpoint(folder / "c", make(1), extra=1)


def two_between_renames(folder: Path) -> None:
    """The folders after a save that died between its two renames."""
    one_before(folder)
    left_by_a_save(folder / "c", "c.replaced")
    save_checkpoint(folder / "d", make(2), extra=2)
    left_by_a_save(folder / "d", "c.incomplete")


def one_that_was_never_moved(folder: Path) -> None:
    """The folder after a first save that died before its rename."""
    one_before(folder)
    left_by_a_save(folder / "c", "c.incomplete")


def one_that_was_put_away(folder: Path) -> None:
    """The folder after a save that died between its renames, and whose new folder is lost."""
    one_before(folder)
    left_by_a_save(folder / "c", "c.replaced")


def half_a_leftover(folder: Path) -> None:
    """The folder after a save that died while it deleted the previous checkpoint."""
    one_before(folder)
    save_checkpoint(folder / "d", make(2), extra=2)
    left_by_a_save(folder / "d", "c.replaced")
    (folder / "c.replaced" / "maingrad.json").unlink()


BEFORE: dict[str, tuple[Callable[[Path], None], int | None]] = {
    "nothing": (nothing, None),
    "an empty folder": (an_empty_folder, None),
    "one": (one_before, 1),
    "two between renames": (two_between_renames, 2),
    "one that was never moved": (one_that_was_never_moved, 1),
    "one that was put away": (one_that_was_put_away, 1),
    "half a leftover": (half_a_leftover, 1),
}


def at_every_moment(folder: Path, before: str) -> list[tuple[int | None, int, list[str]]]:
    """For each moment: what loads then; what loads after the next save, and which files this leaves."""
    prepare, _ = BEFORE[before]
    found, at, killed = [], 0, True
    while killed:
        at += 1
        place = folder / f"{before}-{at}"
        place.mkdir()
        prepare(place)
        killed = saved_by_a_child(place, 7, at)
        try:
            there = loaded(place / "c")
        except (FileNotFoundError, ValueError):  # nothing, or an empty folder
            there = None
        save_checkpoint(place / "c", make(8), extra=8)
        found.append((there, loaded(place / "c"), sorted(path.name for path in place.iterdir())))
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "before",
    [pytest.param(name, marks=() if name in ("one", "two between renames") else pytest.mark.slow) for name in BEFORE],
)
@pytest.mark.sampled(1)
def test_whatever_the_moment_there_is_one_to_load(before: str, tmp_path: Path) -> None:
    (ended,) = run_to_the_end(at_every_moment, 1, tmp_path, before, limit=120.0)
    assert ended.exit_code == 0, ended.output
    moments = [there for there, _, _ in ended.returned]
    first = BEFORE[before][1]
    assert len(moments) > 4, "nothing was killed"
    assert moments[-1] == 7, "the last one was not killed"
    assert set(moments) == {first, 7}
    assert moments == sorted(moments, key=lambda there: there == 7), "and stays the one"
    for _, after, left in ended.returned:
        assert (after, left) == (8, ["c"])


def test_tools_find_the_one_beside_its_place_too(tmp_path: Path) -> None:
    two_between_renames(tmp_path)
    export_safetensors(tmp_path / "c", tmp_path / "weights.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.incomplete", "c.replaced", "weights.safetensors"]


def test_of_two_complete_ones_the_newer_is_loaded(tmp_path: Path) -> None:
    two_between_renames(tmp_path)
    assert loaded(tmp_path / "c") == 2


def test_a_save_whose_last_rename_fails_leaves_the_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that is away for a moment: the previous checkpoint was moved out of the way before."""
    one_before(tmp_path)
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        if self.name == "c.incomplete":
            raise OSError("the server is away")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", renamed)
        with pytest.raises(OSError, match="the server is away"):
            save_checkpoint(tmp_path / "c", make(2), extra=2)
    assert loaded(tmp_path / "c") == 2
    save_checkpoint(tmp_path / "c", make(3), extra=3)
    assert loaded(tmp_path / "c") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_what_is_not_complete_is_not_loaded(tmp_path: Path) -> None:
    two_between_renames(tmp_path)
    for name in ("c.incomplete", "c.replaced"):
        (tmp_path / name / "maingrad.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at '\S+/c': a save was interrupted, and '"):
        load_checkpoint(tmp_path / "c", make(0))


# ---- One of several ranks. ----


def sharded() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def replicated(**config: Any) -> tuple[Any, Any]:
    ddp, optimizer = build(**config)
    take_steps(ddp, optimizer, range(1), dist.get_rank())
    return ddp, optimizer


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "all-reduced": replicated,
    "ZeRO-1": lambda: replicated(use_distributed_optimizer=True, bucket_size=300),
    "hybrid": lambda: replicated(use_distributed_optimizer=True, num_distributed_optimizer_instances=2),
    "fully sharded": sharded,
}


def one_is_killed(folder: Path, kind: str, verb: str, victim: int, at: int, event: str) -> list[str]:
    """Kill a rank before the ``at``-th event of this name in its second save, or its load."""
    model, optimizer = MODELS[kind]()
    save_checkpoint(folder / "c", model, optimizer, extra=1)
    if kind != "fully sharded":
        take_steps(model, optimizer, range(1, 2), dist.get_rank())
    left = [at]

    def springs(count: int, name: str) -> bool:
        left[0] -= event in name
        return left[0] == 0 and event in name

    trap = Trap(folder, springs if dist.get_rank() == victim else lambda count, name: False)
    trap.arm()
    if verb == "load":
        load_checkpoint(folder / "c", model, optimizer)
    else:
        save_checkpoint(folder / "c", model, optimizer, extra=2)
    return trap.events


def weights_alone(path: Path, kind: str) -> int:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) if kind == "fully sharded" else Everything()
    extra: int = load_checkpoint(path, model)
    save_checkpoint(path, model, extra=3)
    assert load_checkpoint(path, model) == 3
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    return extra


KILLS = [
    # (kind, ranks, victim, at which event, what can be loaded)
    ("ZeRO-1", 2, 0, (1, "all_gather_object"), 1),
    ("ZeRO-1", 3, 1, (2, "all_gather_object"), 1),
    ("ZeRO-1", 3, 1, (3, "all_gather_object"), 1),
    ("ZeRO-1", 2, 1, (1, "open rank-00001.safetensors.tmp"), 1),
    ("ZeRO-1", 2, 0, (1, "os.rename rank-00000.safetensors.tmp"), 1),
    ("ZeRO-1", 3, 0, (1, "open maingrad.json.tmp"), 1),
    ("ZeRO-1", 2, 0, (1, "os.rename maingrad.json.tmp"), 1),
    ("ZeRO-1", 2, 0, (1, "os.rename c"), 1),
    ("ZeRO-1", 3, 0, (1, "os.rename c.incomplete"), 2),
    ("ZeRO-1", 2, 0, (1, "os.remove maingrad.json"), 2),
    ("ZeRO-1", 2, 1, (4, "all_gather_object"), 1),
    ("ZeRO-1", 2, 1, (5, "all_gather_object"), 2),
    ("all-reduced", 2, 1, (2, "all_gather_object"), 1),
    ("hybrid", 4, 3, (1, ".safetensors"), None),
    ("hybrid", 4, 2, (3, "all_gather_object"), 1),
    ("hybrid", 4, 0, (1, ".safetensors"), 1),
    ("fully sharded", 3, 2, (3, "all_gather_object"), 1),
    ("fully sharded", 3, 0, (1, "os.rename c.incomplete"), 2),
]


@pytest.mark.in_turn
@pytest.mark.parametrize("kind, ranks, victim, at, there", KILLS)
@pytest.mark.sampled(1)
def test_a_rank_that_is_killed_in_a_save_is_named(
    kind: str, ranks: int, victim: int, at: tuple[int, str], there: int | None, tmp_path: Path
) -> None:
    all_ended = run_to_the_end(one_is_killed, ranks, tmp_path, kind, "save", victim, *at, collective_timeout=60.0)
    if there is None:  # this rank writes nothing
        assert [ended.exit_code for ended in all_ended] == [0] * ranks
        assert weights_alone(tmp_path / "c", kind) == 2
        return
    assert all_ended[victim].exit_code == -signal.SIGKILL, all_ended[victim].output
    for rank, ended in enumerate(all_ended):
        if rank != victim:
            report = the_report(rank, ended)
            assert (
                "save_checkpoint" in report["what"]
                or f"checkpoint '{tmp_path}/c'" in report["what"]
                or (report["what"] == "the comparison of experts between ranks")
            )
            assert_silent(report, victim)
    assert weights_alone(tmp_path / "c", kind) == there


@pytest.mark.slow
@pytest.mark.parametrize("kind, ranks", [("ZeRO-1", 2), ("fully sharded", 3)])
@pytest.mark.parametrize("victim", [0, 1])
def test_whatever_the_moment_it_is_named(kind: str, ranks: int, victim: int, tmp_path: Path) -> None:
    whole = run_to_the_end(one_is_killed, ranks, tmp_path / "whole", kind, "save", -1, 0, "")
    events = whole[victim].returned
    assert len(events) > 4
    for at in range(1, len(events) + 1):
        place = tmp_path / str(at)
        all_ended = run_to_the_end(one_is_killed, ranks, place, kind, "save", victim, at, "", collective_timeout=60.0)
        assert all_ended[victim].exit_code == -signal.SIGKILL, all_ended[victim].output
        for rank, ended in enumerate(all_ended):
            if rank != victim:
                assert_silent(the_report(rank, ended), victim)
        # The first rank completes the checkpoint when all ranks have said that they have written.
        said = [number for number, event in enumerate(events, 1) if "all_gather_object" in event]
        moved = said[4] if victim else events.index("os.rename c.incomplete") + 1
        assert weights_alone(place / "c", kind) == (2 if at >= moved else 1), events[at - 1]


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "kind, victim, at",
    [
        ("ZeRO-1", 1, (1, "all_gather_object")),
        ("ZeRO-1", 0, (2, "all_gather_object")),
        ("ZeRO-1", 0, (3, "all_gather_object")),
        ("fully sharded", 1, (3, "all_gather_object")),
    ],
)
@pytest.mark.sampled(1)
def test_a_rank_that_is_killed_in_a_load_is_named(kind: str, victim: int, at: tuple[int, str], tmp_path: Path) -> None:
    all_ended = run_to_the_end(one_is_killed, 2, tmp_path, kind, "load", victim, *at, collective_timeout=60.0)
    assert all_ended[victim].exit_code == -signal.SIGKILL, all_ended[victim].output
    report = the_report(1 - victim, all_ended[1 - victim])
    assert re.search(r"load_checkpoint|the (opening|reading) of checkpoint '", report["what"]), report["what"]
    assert_silent(report, victim)
    overwritten = "the reading of" in report["what"]
    assert ("the model is partly overwritten, do not go on with it\n" in report["fates"]) == overwritten


def another_is_killed(folder: Path, victim: int) -> None:
    """The first rank kills another one between the two renames of the second save."""
    model, optimizer = replicated(use_distributed_optimizer=True, bucket_size=300)
    save_checkpoint(folder / "c", model, optimizer, extra=1)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    take_steps(model, optimizer, range(1, 2), dist.get_rank())

    def kills(count: int, event: str) -> bool:
        if dist.get_rank() == 0 and event == "os.rename c.incomplete":
            assert not (folder / "c").exists()
            os.kill(pids[victim], signal.SIGKILL)
        return False

    Trap(folder, kills).arm()
    save_checkpoint(folder / "c", model, optimizer, extra=2)


@pytest.mark.in_turn
@pytest.mark.parametrize("ranks, victim", [(2, 1), (3, 2)])
@pytest.mark.sampled(1)
def test_another_rank_that_is_killed_between_the_renames_is_named(ranks: int, victim: int, tmp_path: Path) -> None:
    all_ended = run_to_the_end(another_is_killed, ranks, tmp_path, victim, collective_timeout=60.0)
    assert all_ended[victim].exit_code == -signal.SIGKILL, all_ended[victim].output
    for rank, ended in enumerate(all_ended):
        if rank != victim:
            report = the_report(rank, ended)
            assert f"the completion of checkpoint '{tmp_path}/c'" in report["what"], report["what"]
            assert_silent(report, victim)
    assert weights_alone(tmp_path / "c", "ZeRO-1") == 2, "the first rank went on"
