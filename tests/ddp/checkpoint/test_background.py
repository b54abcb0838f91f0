"""``save_checkpoint(..., background=True)``: files are of the moment of the call, whatever training does next."""

import json
import os
import resource
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Everything, build, files_content, model_state, take_steps
from ending_ranks import run_to_the_end
from gloo import run_ranks
from loops import assert_same
from python_processes import run_python
from torch import nn
from torch.utils._pytree import tree_leaves

from maingrad.ddp import load_checkpoint, prepare_background_saves, save_checkpoint
from maingrad.ddp.checkpoint import background
from maingrad.ddp.checkpoint.background import PendingSave
from maingrad.ddp.checkpoint.source import CheckpointRanks
from maingrad.ddp.collectives.failure_report import CollectiveError
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.launch.simulation.simulate import SimulatedRankError

Take = Callable[[int], None]


def make(kind: str, rank: int) -> tuple[nn.Module, Any, Take]:
    """A model under ``kind``, its optimizer, and a function that takes one step."""
    if kind != "fsdp":
        ddp, optimizer = build(torch.bfloat16, use_distributed_optimizer=kind == "zero1")
        return ddp, optimizer, lambda step: take_steps(ddp, optimizer, [step], rank)
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))
    stock = torch.optim.AdamW(model.parameters(), lr=0.02)

    def take(step: int) -> None:
        model(torch.full((2, 7), float(step + rank))).sum().backward()
        stock.step()
        stock.zero_grad()

    return model, stock, take


def save_both_ways(folder: Path, kind: str) -> Any:
    model, optimizer, take = make(kind, dist.get_rank())
    take(0)
    prepare_background_saves(model, optimizer)
    save_checkpoint(folder / "waited", model, optimizer, extra={"step": 1})
    extra = {"step": 1}
    pending = save_checkpoint(folder / "beside", model, optimizer, extra=extra, background=True)
    extra["step"] = 2
    for step in range(1, 4):
        take(step)
    pending.wait()
    pending.wait()
    assert pending.done() and not pending.failed()
    again, others, _ = make(kind, dist.get_rank())
    return load_checkpoint(folder / "beside", again, others)


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ["ddp", "zero1", "fsdp"])
@pytest.mark.sampled(3)
def test_both_ways_write_the_same(kind: str, tmp_path: Path) -> None:
    assert run_ranks(save_both_ways, 2, tmp_path, kind) == [{"step": 1}] * 2
    names = [sorted(path.name for path in (tmp_path / way).iterdir()) for way in ("waited", "beside")]
    assert names[0] == names[1]
    (tensors, _), (others, _) = (files_content(tmp_path / way) for way in ("waited", "beside"))
    contents = [tree_leaves(tensors), tree_leaves(others)]
    assert len(contents[0]) == len(contents[1]) > 8
    assert all(torch.equal(*pair) for pair in zip(*contents, strict=True))
    manifests = [json.loads((tmp_path / way / "maingrad.json").read_text()) for way in ("waited", "beside")]
    of_the_save = ("save_id", "checksum")
    assert all(manifests[0][key] == manifests[1][key] for key in manifests[0] if key not in of_the_save)


def prepare_in_part() -> None:
    ddp, optimizer = build()
    prepare_background_saves(ddp, optimizer if dist.get_rank() == 0 else None)


def test_memory_is_prepared_by_all_ranks_alike() -> None:
    with pytest.raises(SimulatedRankError, match="some ranks give an optimizer and some do not"):
        simulate(prepare_in_part, 2)


def save_on_simulated_ranks(folder: Path) -> dict[str, torch.Tensor]:
    ddp, optimizer = build(use_distributed_optimizer=True)
    take_steps(ddp, optimizer, [0], dist.get_rank())
    saved = model_state(ddp)
    save_checkpoint(folder / "c", ddp, optimizer, background=True)
    take_steps(ddp, optimizer, [1], dist.get_rank())
    load_checkpoint(folder / "c", ddp, optimizer)  # waits for the save
    assert_same(model_state(ddp), saved)
    return saved


def test_a_load_waits_for_the_save_on_simulated_ranks(tmp_path: Path) -> None:
    saved = simulate(save_on_simulated_ranks, 3, tmp_path)[0]
    plain = Everything()
    load_checkpoint(tmp_path / "c", plain)
    assert all(torch.equal(saved[name], value) for name, value in plain.named_parameters())


def save_among_the_last_ranks(folder: Path) -> dict[str, torch.Tensor] | None:
    """Ranks 1 and 2 of three have a model of their own, whose group's first rank is not the world's."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    model = fully_shard(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), mesh=group)
    save_checkpoint(folder / "c", model, background=True).wait()
    with model.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_ranks_that_are_not_all_save_among_themselves(tmp_path: Path) -> None:
    _, saved, other = simulate(save_among_the_last_ranks, 3, tmp_path)
    assert_same(saved, other)
    plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    load_checkpoint(tmp_path / "c", plain)
    assert_same(dict(plain.named_parameters()), saved)


def filled(model: nn.Module, value: float) -> nn.Module:
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Python's own answer to Ctrl-C, which a shell switches off for what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """What Ctrl-C does: the signal comes to the program's own thread."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_ctrl_c_ends_a_save_and_leaves_the_checkpoint_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = filled(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), 1.0)
    save_checkpoint(tmp_path / "c", model, extra=1)
    threads = set(threading.enumerate())
    original, calls = zlib.crc32, []

    def interrupted(*args: Any) -> int:
        calls.append(args)
        if len(calls) == 2:
            interrupt()
        time.sleep(0.02)  # a slow disk
        return original(*args)

    monkeypatch.setattr(zlib, "crc32", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "c", filled(model, 2.0), extra=2)
    filled(model, 3.0)
    for thread in set(threading.enumerate()) - threads:
        thread.join(5.0)
    monkeypatch.undo()
    assert load_checkpoint(tmp_path / "c", model) == 1
    assert all((param == 1.0).all() for param in model.parameters())


def test_after_ctrl_c_in_a_save_the_program_saves_to_the_same_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, original = filled(nn.Linear(7, 5), 1.0), os.fsync

    def interrupted(descriptor: int) -> None:
        monkeypatch.undo()
        interrupt()
        time.sleep(0.2)  # a slow disk
        original(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "c", model)
    save_checkpoint(tmp_path / "c", filled(model, 2.0), extra=2)
    assert load_checkpoint(tmp_path / "c", filled(model, 3.0)) == 2
    assert all((param == 2.0).all() for param in model.parameters())


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written in the background before this is set: a busy file system."""
    event, run = threading.Event(), threading.Thread.run

    def run_when_released(thread: threading.Thread) -> None:
        if thread.name.startswith("save of "):
            event.wait(20.0)
        run(thread)

    monkeypatch.setattr(threading.Thread, "run", run_when_released)
    return event


def save_and_go_on(path: Path, released: threading.Event) -> tuple[Any, ...]:
    """What a checkpoint must hold that is written two steps later; and weights after those steps."""
    ddp, optimizer = build(use_distributed_optimizer=True)
    take_steps(ddp, optimizer, [0], dist.get_rank())
    saved, extra = model_state(ddp), {"step": 1, "seen": ["a"]}
    pending = save_checkpoint(path, ddp, optimizer, extra=extra, background=True)
    extra["step"] = 3
    extra["seen"].append("b")
    take_steps(ddp, optimizer, [1, 2], dist.get_rank())
    assert not pending.failed() and not pending.done() and not path.exists()  # neither of them waits
    # Python waits at its end for threads that are no daemons.
    assert [each.daemon for each in threading.enumerate() if each.name.startswith("save of ")] == [False] * 2
    dist.barrier()
    released.set()
    pending.wait()
    return saved, model_state(ddp)


def go_on(path: Path) -> tuple[Any, ...]:
    ddp, optimizer = build(torch.float32, use_distributed_optimizer=True)
    extra = load_checkpoint(path, ddp, optimizer)
    loaded = model_state(ddp)
    take_steps(ddp, optimizer, [1, 2], dist.get_rank())
    return extra, loaded, model_state(ddp)


def test_what_is_written_late_is_of_the_moment_of_the_call(tmp_path: Path, released: threading.Event) -> None:
    """Weights, masters and moments, and ``extra`` with all that is in it."""
    saved, later = simulate(save_and_go_on, 2, tmp_path / "c", released)[0]
    for extra, loaded, trained in simulate(go_on, 2, tmp_path / "c"):
        assert extra == {"step": 1, "seen": ["a"]}
        assert_same(loaded, saved)
        assert_same(trained, later)


def test_after_ctrl_c_the_next_save_waits_for_the_one_in_the_background(
    tmp_path: Path, released: threading.Event
) -> None:
    model = nn.Linear(7, 5)
    pending = save_checkpoint(tmp_path / "c", filled(model, 1.0), background=True)
    threading.Timer(0.2, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(tmp_path / "c", model)  # waits for the save
    threading.Timer(0.2, released.set).start()
    save_checkpoint(tmp_path / "c", filled(model, 2.0), extra=2)
    assert pending.done() and load_checkpoint(tmp_path / "c", filled(model, 3.0)) == 2


FORKS = """
import os, sys, torch
from maingrad.ddp import load_checkpoint, save_checkpoint

model = torch.nn.Linear(2000, 2000)
pending = save_checkpoint(sys.argv[1], model, background=True)
assert not pending.done()
child = os.fork()
if not child:
    save_checkpoint(sys.argv[1] + "-of-the-child", model)
    load_checkpoint(sys.argv[1] + "-of-the-child", model)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
pending.wait()
load_checkpoint(sys.argv[1], model)
"""


@pytest.mark.in_turn
def test_a_process_that_is_forked_meanwhile_saves_by_itself(tmp_path: Path) -> None:
    assert run_python("-c", FORKS, tmp_path / "c", timeout=60.0).returncode == 0


def test_a_load_reads_what_is_still_being_written(tmp_path: Path, released: threading.Event) -> None:
    """And not the checkpoint that it replaces, which is whole all that time."""
    model = Everything()
    released.set()
    save_checkpoint(tmp_path / "c", model, extra="before")
    released.clear()
    save_checkpoint(tmp_path / "c", model, extra="after", background=True)
    timer = threading.Timer(0.2, released.set)
    timer.start()
    assert load_checkpoint(tmp_path / "c", model) == "after"
    timer.join()


def test_memory_is_prepared_when_the_save_before_is_over(tmp_path: Path, released: threading.Event) -> None:
    """Else what comes next would wait for the memory alone, and read what the save has not written yet."""
    model = Everything()
    pending = save_checkpoint(tmp_path / "c", model, extra="it", background=True)
    threading.Timer(0.1, released.set).start()
    prepare_background_saves(model)
    assert pending.done()
    assert load_checkpoint(tmp_path / "c", model) == "it"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_next_save_waits_for_the_memory_that_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where there is none, it says so itself."""
    happened = []

    def takes_long(_: object) -> Iterator[None]:
        happened.append("begins")
        time.sleep(0.1)
        happened.append("ends")
        raise RuntimeError("no memory")
        yield

    monkeypatch.setattr(background, "_host_memory", takes_long)
    model = nn.Linear(2, 2)
    prepare_background_saves(model)
    save_checkpoint(tmp_path / "c", model)
    assert happened == ["begins", "ends"]
    with pytest.raises(RuntimeError, match="no memory"):
        save_checkpoint(tmp_path / "c", model, background=True)


def test_the_memory_that_is_prepared_is_what_a_save_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For weights, masters and moments."""
    taken: dict[str, list[int]] = {}
    original = background._host_memory

    def noted(parts: Any) -> Iterator[Any]:
        sizes = taken.setdefault(threading.current_thread().name, [])
        for each in original(parts):
            sizes.append(each[2].nbytes)
            yield each

    monkeypatch.setattr(background, "_host_memory", noted)
    model, optimizer = build(torch.bfloat16, use_distributed_optimizer=True)
    take_steps(model, optimizer, [0], 0)
    prepare_background_saves(model, optimizer)
    save_checkpoint(tmp_path / "c", model, optimizer, background=True).wait()
    assert taken["memory of saves"] == taken[threading.current_thread().name]
    assert len(taken["memory of saves"]) > 3 * len([*model.module.parameters()])


def test_a_save_that_is_given_up_is_completed_by_ranks_that_soon_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at once, as after an error: the other ranks may be slower, and are not asked."""
    write = background.write_rank_file

    def late(path: Path, *rest: Any) -> None:
        if path.name.startswith("rank-00001"):
            time.sleep(0.1)
        write(path, *rest)

    monkeypatch.setattr(background, "write_rank_file", late)

    def save() -> None:
        ddp, optimizer = build(use_distributed_optimizer=True)
        pending = save_checkpoint(tmp_path / "c", ddp, optimizer, extra="it", background=True)
        pending.give_up()
        pending.wait()

    simulate(save, 2)
    assert load_checkpoint(tmp_path / "c", Everything()) == "it"


def test_a_save_that_has_been_waited_for_is_over(tmp_path: Path) -> None:
    """Who asks finds nothing to do, whether or not it was in the background."""
    for background_save in (False, True):
        pending = save_checkpoint(tmp_path / "c", nn.Linear(2, 2), background=background_save)
        pending.wait()
        assert pending.done() and pending.is_over and not pending.failed()
        pending.wait()


def next_save_waits(folder: Path) -> list[bool]:
    """Whether each of three checkpoints was complete when the next save returned."""
    ddp, optimizer = build(use_distributed_optimizer=True)
    complete = []
    for step in range(4):
        take_steps(ddp, optimizer, [step], dist.get_rank())
        pending = save_checkpoint(folder / f"{step}", ddp, optimizer, extra=step, background=True)
        if step:
            complete.append((folder / f"{step - 1}" / "maingrad.json").exists())
    pending.wait()
    return complete


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    assert run_ranks(next_save_waits, 2, tmp_path) == [[True] * 3] * 2


def one_cannot_write(folder: Path, full: int) -> list[str]:
    """What this rank is told of a save during which the disk of rank ``full`` is full."""
    ddp, optimizer = build(use_distributed_optimizer=True)
    take_steps(ddp, optimizer, [0], dist.get_rank())
    save_checkpoint(folder / "c", ddp, optimizer, extra="before")
    if dist.get_rank() == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    pending = save_checkpoint(folder / "c", ddp, optimizer, extra="after", background=True)
    take_steps(ddp, optimizer, [1], dist.get_rank())  # training goes on until it asks
    said = []
    for _ in range(2):
        try:
            pending.wait()
        except OSError as error:
            said.append(str(error))
    failed = pending.failed()
    if dist.get_rank() == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert failed
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["c"], left
    assert load_checkpoint(folder / "c", ddp, optimizer) == "before"
    save_checkpoint(folder / "c", ddp, optimizer, extra="later", background=True).wait()
    assert load_checkpoint(folder / "c", ddp, optimizer) == "later"
    return said


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.sampled(1)
def test_all_ranks_hear_of_one_that_could_not_write(full: int, tmp_path: Path) -> None:
    for said in run_ranks(one_cannot_write, 2, tmp_path, full):
        assert len(said) == 2, said
        assert said[0] == said[1]
        assert f"File too large: '{tmp_path}/c.incomplete/rank-0000{full}.safetensors.tmp'" in said[0], said
        assert f"on rank {full}" in said[0], said


@pytest.mark.parametrize("step", ["write_rank_file", "write_manifest"])
def test_an_error_is_raised_once_and_holds_no_memory(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space")

    model = nn.Linear(2, 2)
    with monkeypatch.context() as broken:
        broken.setattr(background, step, fail)
        pending = save_checkpoint(tmp_path / "c", model, background=True)
        with pytest.raises(OSError, match="no space"):
            pending.wait()
        unheard = save_checkpoint(tmp_path / "c", model, background=True)  # the program knows the error
        with pytest.raises(OSError, match="no space"):
            save_checkpoint(tmp_path / "c", model)
    for each in (pending, unheard):
        assert each.done() and each.failed() and not each._parts
        with pytest.raises(OSError, match="no space"):
            each.wait()
    save_checkpoint(tmp_path / "c", model, extra="later")
    assert load_checkpoint(tmp_path / "c", model) == "later"


@pytest.mark.parametrize(("error", "stays"), [(CollectiveError("a rank is gone"), True), (OSError("no space"), False)])
def test_files_of_a_background_save_stay_where_a_rank_is_gone(
    error: Exception, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may still be writing into the folder then."""

    def fails(*_: Any) -> None:
        raise error

    def give_up(self: PendingSave, **options: float) -> None:
        gives_up(self, **options)
        time.sleep(0.1)  # the save's thread looks meanwhile

    gives_up = PendingSave.give_up
    monkeypatch.setattr(PendingSave, "give_up", give_up)
    monkeypatch.setattr(background, "write_rank_file", lambda *_: None)  # the file comes too late
    pending = save_checkpoint(tmp_path / "c", nn.Linear(2, 2), background=True)
    monkeypatch.setattr(CheckpointRanks, "run_on_all_ranks", fails)
    with pytest.raises(type(error), match=str(error)):
        pending.wait()
    assert pending.done() and pending.failed()
    assert (tmp_path / "c.incomplete").exists() is stays


def test_a_save_whose_thread_is_ended_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is no error, as ``sys.exit`` in a callback. Else who waits for it would wait for ever."""
    monkeypatch.setattr(background, "write_rank_file", lambda *_: sys.exit(3))
    pending = save_checkpoint(tmp_path / "c", nn.Linear(2, 2), background=True)
    (thread,) = [each for each in threading.enumerate() if each.name == "save of c"]
    pending.give_up(after=0.0)
    thread.join(5.0)
    assert pending.done() and pending.failed()
    with pytest.raises(SystemExit):
        pending.wait()


def test_a_program_that_ends_gives_up_a_save_that_not_all_ranks_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first rank's thread, and with it the process, would wait for ever for a file of a rank that is gone."""
    monkeypatch.setitem(background.PendingSave.give_up.__kwdefaults__, "after", 3 * background._PATIENCE)

    write = background.write_rank_file

    def fail_on_one(path: Path, *rest: Any) -> None:
        if path.name.startswith("rank-00001"):
            raise OSError("no space")
        write(path, *rest)

    monkeypatch.setattr(background, "write_rank_file", fail_on_one)

    def end_without_waiting() -> background.PendingSave:
        ddp, optimizer = build(use_distributed_optimizer=True)
        return save_checkpoint(tmp_path / "c", ddp, optimizer, background=True)

    first, second = simulate(end_without_waiting, 2)
    try:
        until = time.monotonic() + 10
        while not first.done() and time.monotonic() < until:
            time.sleep(0.01)
        assert first.done() and first.failed()
        assert second.done() and second.failed()
    finally:
        first.give_up()  # where the test fails: no thread is left
    assert not (tmp_path / "c").exists()
    assert (tmp_path / "c.incomplete" / "rank-00000.safetensors").exists(), "for all it knows the others go on writing"


PROGRAM = """
import sys, torch
from maingrad.ddp import save_checkpoint
torch.manual_seed(0)
save_checkpoint(sys.argv[1], torch.nn.Linear(300, 300), extra=1, background=True)
{end}
"""


@pytest.mark.in_turn
@pytest.mark.parametrize("end", ["", "raise KeyError('a mistake elsewhere')"])
def test_a_program_that_ends_without_waiting_leaves_a_whole_checkpoint(end: str, tmp_path: Path) -> None:
    done = run_python("-c", PROGRAM.format(end=end), tmp_path / "c")
    assert done.returncode == (1 if end else 0), done.stderr
    assert load_checkpoint(tmp_path / "c", nn.Linear(300, 300)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def die_with_a_save_under_way(folder: Path, victim: int) -> str:
    ddp, optimizer = build(use_distributed_optimizer=True)
    take_steps(ddp, optimizer, [0], dist.get_rank())
    save_checkpoint(folder / "c", ddp, optimizer, extra="before")
    dist.barrier()
    if dist.get_rank() == victim:
        os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)  # before its part is on the disk
    pending = save_checkpoint(folder / "c", ddp, optimizer, extra="after", background=True)
    pending.wait()
    return "waited"


@pytest.mark.in_turn
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.sampled(2)
def test_a_rank_that_dies_leaves_the_checkpoint_of_before(victim: int, tmp_path: Path) -> None:
    ended = run_to_the_end(die_with_a_save_under_way, 2, tmp_path, victim)
    assert ended[victim].exit_code == -signal.SIGKILL
    survivor = ended[1 - victim]
    assert survivor.exit_code == 1 and "CollectiveError" in survivor.output, survivor.output
    assert f"silent for 3 s: rank {victim}" in survivor.output, survivor.output
    model = Everything()
    assert load_checkpoint(tmp_path / "c", model) == "before"
    save_checkpoint(tmp_path / "c", model, extra="next")  # over what is left
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
