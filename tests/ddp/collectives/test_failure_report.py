"""What a failed rank finds out about the other ranks from the store."""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from watching import Watcher

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.buckets import iteration_ends
from maingrad.ddp.collectives import failure_report
from maingrad.ddp.collectives.failure_report import (
    CollectiveError,
    FailureReporter,
    Watch,
    ask_others,
    gather,
    run_and_gather,
    run_on_all_ranks,
    with_more_text,
)
from maingrad.ddp.collectives.rank_grid import RankGrid
from maingrad.launch import simulate


def test_ranks_without_a_report_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_report, "PATIENCE", 0.1)
    silent, lines = ask_others(dist.HashStore(), 0, 3, "all_reduce of bucket 0")
    assert silent == [1, 2]
    assert lines == [
        "silent for 0.1 s: rank 1, rank 2: look whether it has ended, waits elsewhere, or takes another number of steps"
    ]


def test_ranks_that_report_are_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reports before the patience ends is heard, and the last report ends the inquiry."""
    monkeypatch.setattr(failure_report, "PATIENCE", 60.0)
    store = dist.HashStore()
    store.set("maingrad/failures/1", "all_gather of bucket 2")
    with ThreadPoolExecutor(1) as executor:
        asked = executor.submit(ask_others, store, 2, 3, "all_reduce of bucket 0")
        time.sleep(0.3)
        assert not asked.done()
        store.set("maingrad/failures/0", "all_reduce of bucket 0")
        silent, lines = asked.result(20)
    assert silent == []
    assert lines == ["failed too: rank 0, rank 1 in all_gather of bucket 2"]


def test_what_was_read_before_the_store_went_is_told() -> None:
    class Ends(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            if keys != ["maingrad/failures/0"]:
                raise RuntimeError("Connection reset by peer\nmore")
            return super().check(keys)

    store = Ends()
    store.set("maingrad/failures/0", "all_reduce of bucket 0")
    silent, (trouble, told) = ask_others(store, 1, 3, "all_reduce of bucket 0")
    assert silent == [2]
    assert "is out of reach (Connection reset by peer): look whether the process that serves it has ended" in trouble
    assert told == "failed too: rank 0"


class Mute(dist.Store):
    """A store whose host does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.over.wait(5.0)


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host is stopped, or its machine is cut off: a call to it waits for ever."""
    monkeypatch.setattr(failure_report, "PATIENCE", 0.1)
    store = Mute()
    start = time.monotonic()
    silent, lines = ask_others(store, 1, 2, "all_reduce of bucket 0")
    assert time.monotonic() - start < 4.0, "it waits for PATIENCE, not for the store"
    asking = [thread for thread in threading.enumerate() if thread.name == "maingrad-failure-report"]
    assert asking
    assert all(thread.daemon for thread in asking), "nor does the end of the process"
    store.over.set()
    assert silent == [0]
    assert lines == [
        "the store, through which ranks tell each other, is out of reach (it does not answer): look whether the "
        "process that serves it has ended (rank 0, where no launcher does)"
    ]


@pytest.mark.in_turn
def test_long_lists_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_report, "PATIENCE", 1.0)
    silent, (line,) = ask_others(dist.HashStore(), 0, 1000, "all_reduce of bucket 0")
    assert len(silent) == 999
    assert "rank 8 and 991 more: look whether" in line


@pytest.mark.parametrize(("world_size", "end"), [(9, "rank 7, rank 8: look"), (10, "rank 8 and 1 more: look")])
def test_a_list_that_fits_is_not_cut(world_size: int, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_report, "PATIENCE", 0.1)
    assert end in ask_others(dist.HashStore(), 1, world_size, "all_reduce of bucket 0")[1][0].replace("rank 0, ", "")


@pytest.mark.parametrize(
    ("backends", "active"), [("cpu:gloo,cuda:nccl", True), ("nccl", True), ("gloo", True), ("simulated", False)]
)
def test_ranks_report_where_processes_may_end(backends: str, active: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(failure_report, "_backends", lambda group: backends)
    monkeypatch.setattr(failure_report, "default_store", dist.HashStore)
    assert FailureReporter().active is active


def failing(backends: str, monkeypatch: pytest.MonkeyPatch) -> FailureReporter:
    """The reporter of rank 0 of 3, who hears of nobody."""

    def ask(store: object, rank: int, world_size: int, waited_for: str) -> tuple[list[int], list[str]]:
        others = [other for other in range(world_size) if other != rank]
        return others, [f"silent: {others}"]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(failure_report, "ask_others", ask)
    monkeypatch.setattr(failure_report, "_backends", lambda group: backends)
    monkeypatch.setattr(failure_report, "default_store", dist.HashStore)
    return FailureReporter()


@pytest.mark.parametrize("kind", [RuntimeError, dist.DistBackendError])
def test_the_first_failure_is_reported_and_later_ones_are_its_own(
    kind: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = failing("gloo", monkeypatch)
    found = []
    for what in ("all_reduce", "all_gather"):
        with pytest.raises(CollectiveError) as raised, reporter.watch(what, "bucket 0"):
            raise kind("a peer is gone\nmore")
        found.append(raised.value)
        assert isinstance(raised.value.__cause__, kind)
    assert found[0] is found[1]
    assert (found[0].rank, found[0].silent) == (0, (1, 2))
    assert "s for all_reduce of bucket 0, which failed: a peer is gone\n  silent: [1, 2]" in str(found[0])


def test_a_failure_closes_each_group_of_the_wrapper_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of gathers: ranks that wait there fail at once too."""
    reporter = failing("gloo", monkeypatch)
    closed: list[Any] = []
    monkeypatch.setattr(failure_report, "_close_connections", closed.append)
    inner, outer, gathers, experts = (dist.ProcessGroup(dist.HashStore(), 0, 2) for _ in range(4))
    reporter.grids = [RankGrid(inner, outer, gathers), RankGrid(inner, None, inner), RankGrid(experts, None, inner)]
    with pytest.raises(CollectiveError), reporter.watch("all_reduce"):
        raise RuntimeError("a peer is gone")
    assert len(closed) == 4
    assert all(any(each is group for each in closed) for group in (inner, outer, gathers, experts))


@pytest.mark.parametrize(("backends", "tried"), [("cpu:gloo,cuda:nccl", [0, 2, 3]), ("nccl", [])])
def test_every_connection_of_gloo_is_closed_though_one_is_closed_already(
    backends: str, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for this one over another connection would wait until the timeout."""
    monkeypatch.setattr(failure_report, "_backends", lambda group: backends)
    asked = []

    class Group:
        def size(self) -> int:
            return 4

        def rank(self) -> int:
            return 1

        def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
            asked.append(rank)
            if rank == 0:
                raise RuntimeError("connection closed by peer")
            return self

        def wait(self, timeout: timedelta) -> None:
            assert timeout < timedelta(seconds=1)
            raise RuntimeError("timed out")

    group: Any = Group()
    failure_report._close_connections(group)
    assert asked == tried


def test_errors_of_others_and_of_simulated_ranks_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for backends, error in (("gloo", NotImplementedError()), ("gloo", ValueError()), ("simulated", RuntimeError())):
        with pytest.raises(type(error)) as raised, failing(backends, monkeypatch).watch("all_reduce"):
            raise error
        assert raised.value is error


def test_a_gather_that_fails_says_of_what(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = failing("gloo", monkeypatch)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a peer is gone")

    monkeypatch.setattr(dist, "all_gather_object", fail)
    group = dist.ProcessGroup(dist.HashStore(), 0, 2)
    with pytest.raises(CollectiveError, match=r"for the answers, which failed: a peer is gone"):
        gather("mine", [group], reporter, "the answers")


def test_more_text_leaves_an_error_what_it_is() -> None:
    """A program catches it by its class, and asks a failed collective which ranks are silent."""
    report = with_more_text(CollectiveError("rank 3 waited", rank=3, silent=[1]), "; the model is overwritten")
    assert isinstance(report, CollectiveError)
    assert (str(report), report.rank, report.silent) == ("rank 3 waited\n  the model is overwritten", 3, (1,))
    error = with_more_text(FileNotFoundError("no file"), "; more")
    assert (type(error), str(error)) == (FileNotFoundError, "no file; more")
    interrupt = KeyboardInterrupt()
    assert with_more_text(interrupt, "; more") is interrupt


def test_an_agreement_is_watched_and_says_what_it_is_about() -> None:
    def on_each_rank() -> list[str]:
        watched: list[str] = []
        failures: Any = SimpleNamespace(watch=lambda what: watched.append(what) or nullcontext())
        assert run_and_gather(dist.get_rank, str, [dist.group.WORLD], failures, "a check") == (
            dist.get_rank(),
            ["0", "1"],
        )
        run_on_all_ranks(dist.get_rank, [dist.group.WORLD], failures, "another")
        return watched

    assert simulate(on_each_rank, 2) == [["word from all ranks after a check", "word from all ranks after another"]] * 2


COLLECTIVES = (
    "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast", "all_gather_object",
    "all_to_all_single", "new_group",
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "all-reduce": {"check_for_nan_in_grad": True, "check_replicas_every": 1},
    "ZeRO-1": {"use_distributed_optimizer": True, "calculate_per_token_loss": True},
    "ZeRO-1, overlapped": {
        "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True,
        "num_distributed_optimizer_instances": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_every_collective_of_a_training_is_watched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one fails, its error says what this rank has waited for, and the other ranks are told."""
    watched = threading.local()
    seen: set[str] = set()

    def enter(watch: Watch) -> None:
        watched.depth = getattr(watched, "depth", 0) + 1

    def leave(watch: Watch, *_: object) -> None:
        watched.depth -= 1

    def checked(collective: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(watched, "trains", False):
                assert getattr(watched, "depth", 0), f"{collective} is not watched"
                seen.add(collective)
            return function(*args, **kwargs)

        return call

    class Agrees(Watcher):
        def ended(self, model: nn.Module, axes: Sequence[dist.ProcessGroup], trained: Collection[int]) -> None:
            for group in axes:
                dist.all_reduce(torch.zeros(1), group=group)

    def train() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        ends = mesh.get_group("pp")
        model = nn.ModuleDict({"word": nn.Linear(4, 4, bias=False), "expert": nn.Linear(4, 4)})
        model["word"].weight.shared_embedding = True
        for param in model["expert"].parameters():
            param.allreduce = False
        config = DistributedDataParallelConfig(**CONFIGS[name])
        watched.trains = True
        ranks = {"process_group": mesh.get_group("dp"), "expert_process_group": mesh.get_group("dp")}
        ddp = DistributedDataParallel(model, config, embedding_group=ends, **ranks)
        optimizer = DistributedOptimizer(ddp, lr=0.1)
        for _ in range(2):
            model["expert"](model["word"](torch.ones(2, 4))).sum().backward()
            ddp.finish_grad_sync(2 if config.calculate_per_token_loss else None)
            optimizer.step()
            ddp.zero_grad()
        ddp.broadcast_params()
        watched.trains = False

    for collective in COLLECTIVES:
        monkeypatch.setattr(dist, collective, checked(collective, getattr(dist, collective)))
    monkeypatch.setattr(iteration_ends, "_watchers", [Agrees()])
    monkeypatch.setattr(Watch, "__enter__", enter)
    monkeypatch.setattr(Watch, "__exit__", leave)
    simulate(train, 4)
    assert seen >= {"all_reduce", "broadcast", "all_gather_object"}
