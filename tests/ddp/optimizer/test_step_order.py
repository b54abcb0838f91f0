"""A step updates reduced buckets while others are being reduced: the same weights, in another order."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import loss_of, make_batches, make_model, weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    Lion,
    Muon,
)
from maingrad.ddp.gathers.param_gather import ParamGather
from maingrad.ddp.optimizer.param_groups import counts_apart
from maingrad.ddp.optimizer.step_order import step_order
from maingrad.launch import simulate


def test_the_last_bucket_is_updated_under_the_reductions_and_gathered_under_the_rest() -> None:
    assert step_order(range(9), reduced=False, gathers=True) == [[0, 1, 2, 3, 4, 5], [8], [6, 7]]
    assert step_order(range(9), reduced=True, gathers=True) == [[8], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert step_order(range(9), reduced=False, gathers=False) == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert step_order(range(1), reduced=False, gathers=True) == [[0]]
    assert step_order(range(2), reduced=False, gathers=True) == [[1], [0]]
    for reduced, gathers in itertools.product([False, True], repeat=2):
        assert step_order(range(9), reduced=reduced, gathers=gathers, at_once=True) == [[*range(9)]]
    assert step_order(range(9), reduced=True, gathers=False) == [[*range(9)]], "nothing would be hidden"


def run(ends_by: str, config: dict[str, object], max_norm: float | None) -> list[torch.Tensor]:
    settings = DistributedDataParallelConfig(bucket_size=32, overlap_grad_reduce=True, **config)
    ddp = DistributedDataParallel(make_model(torch.bfloat16), settings)
    optimizer = DistributedOptimizer(ddp, lr=0.05, max_grad_norm=max_norm)
    for step in range(4):
        (batch,) = make_batches(1, torch.bfloat16, seed=10 * step + dist.get_rank())
        loss_of(ddp, batch).backward()
        if ends_by == "finish":
            ddp.finish_grad_sync()
        elif ends_by == "start":
            ddp.start_grad_sync()
        optimizer.step()
        assert ddp.is_reduced
        ddp.zero_grad_buffer()
    optimizer.finish_param_sync()
    return list(weights(ddp).values())


@pytest.mark.in_turn
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize(("sharded", "gathers"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.sampled(2)
def test_start_and_step_or_step_alone_is_finish_and_step(
    ranks: int, sharded: bool, gathers: bool, max_norm: float | None
) -> None:
    config: dict[str, object] = {"use_distributed_optimizer": sharded, "overlap_param_gather": gathers}
    for seed in range(2):
        started, alone, finished = (
            simulate(run, ranks, ends_by, config, max_norm, seed=seed) for ends_by in ("start", "step", "finish")
        )
        for mine, theirs in [*zip(started, finished, strict=True), *zip(alone, finished, strict=True)]:
            for one, other in zip(mine, theirs, strict=True):
                assert torch.equal(one, other)


class ByTurns(nn.Module):
    """Layers of two dtypes by turns; the last one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for dtype in (torch.bfloat16, torch.float32) * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self.layers)[:-1]:
            x = layer(x.to(layer.weight.dtype))
        return x


@pytest.mark.parametrize("make", [make_model, ByTurns])
def test_parameters_are_gathered_in_the_order_of_the_forward(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]
) -> None:
    """Each as soon as those before it are under way, in each step; over the buffers of all dtypes."""
    started: list[tuple[int, str]] = []
    start = ParamGather.start

    def note(gather: ParamGather, *args: Any, **options: Any) -> None:
        started.append((dist.get_rank(), gather.name))
        start(gather, *args, **options)

    monkeypatch.setattr(ParamGather, "start", note)

    def on_each_rank() -> None:
        config = {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True}
        ddp = DistributedDataParallel(make(), DistributedDataParallelConfig(bucket_size=32, **config))
        optimizer = DistributedOptimizer(ddp)
        for step in range(2):
            loss_of(ddp, make_batches(1, seed=step)[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        names = [bucket.name for bucket in reversed(ddp.buckets)]
        assert len(names) > 2
        assert [name for rank, name in started if rank == dist.get_rank()] == names * 2

    simulate(on_each_rank, 2)


def test_a_step_and_a_load_wait_for_gathers_that_no_forward_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would write into memory that is being sent."""

    def on_each_rank() -> None:
        config = {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 32}
        optimizer = DistributedOptimizer(DistributedDataParallel(ByTurns(), DistributedDataParallelConfig(**config)))
        update = optimizer._steps.update
        under_way = []

        def note(*args: Any) -> None:
            under_way.append([gather.under_way for gather in optimizer.param_sync.gathers])
            update(*args)

        monkeypatch.setattr(optimizer._steps, "update", note)
        for step in range(2):
            loss_of(optimizer.model, make_batches(1, seed=step)[0]).backward()
            assert any(gather.under_way for gather in optimizer.param_sync.gathers) is (step == 1)
            under_way.clear()
            optimizer.step()
            assert not any(under_way[0])
            optimizer.zero_grad()
        state = optimizer.state_dict()
        for call in (optimizer.state_dict, optimizer.finish_param_sync, partial(optimizer.load_state_dict, state)):
            optimizer.param_sync.start_again()
            assert any(gather.under_way for gather in optimizer.param_sync.gathers)
            call()
            assert not any(gather.under_way for gather in optimizer.param_sync.gathers)

    simulate(on_each_rank, 2)


def test_gathers_start_between_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass is followed by the gathers of all its buckets, in the second step too."""
    log: list[tuple[str, ...]] = []
    config = {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 32}

    def on_each_rank() -> None:
        optimizer = DistributedOptimizer(DistributedDataParallel(ByTurns(), DistributedDataParallelConfig(**config)))
        loss_of(optimizer.model, make_batches(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(optimizer.model, make_batches(1)[0]).backward()
        optimizer.model.finish_grad_sync()
        update, start = optimizer._steps.update, ParamGather.start

        def note_update(flats: Any, *args: Any) -> None:
            if dist.get_rank() == 0:
                log.append(("update", *(flat.bucket.name for flat in flats)))
            update(flats, *args)

        def note_start(gather: ParamGather, *args: Any, **options: Any) -> None:
            if dist.get_rank() == 0:
                log.append(("gather", gather.name))
            start(gather, *args, **options)

        monkeypatch.setattr(optimizer._steps, "update", note_update)
        if dist.get_rank() == 0:
            monkeypatch.setattr(ParamGather, "start", note_start)
        optimizer.step()

    simulate(on_each_rank, 2)
    expected: list[tuple[str, ...]] = []
    for each in log:
        if each[0] == "update":
            expected += [each, *(("gather", name) for name in reversed(each[1:]))]
    assert [each for each, *_ in log].count("update") == 3 and len(log) > 3 + 3
    assert log == expected


class OfAProgram(torch.optim.SGD):
    """It may count the steps of all parameters together."""

    elementwise = True


@pytest.mark.parametrize(
    ("options", "num_passes"),
    [
        ({}, 3),
        ({"optimizer_class": Lion}, 3),
        ({"optimizer_class": torch.optim.NAdam}, 3),
        ({"optimizer_class": OfAProgram, "lr": 0.1}, 1),
        ({"param_groups": [{"params": "layers.0.*", "optimizer": OfAProgram, "lr": 0.1}]}, 1),
        ({"skip_nonfinite": True}, 1),
    ],
    ids=str,
)
def test_classes_that_count_by_parameters_take_a_step_in_passes(
    options: dict[str, Any], num_passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for the first buckets of the forward, one for the last; and one for the rest."""

    def on_each_rank() -> int:
        config = {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 32}
        model = DistributedDataParallel(ByTurns(), DistributedDataParallelConfig(**config))
        optimizer = DistributedOptimizer(model, **options)
        loss_of(model, make_batches(1)[0]).backward()
        model.finish_grad_sync()
        passes: list[Any] = []
        update = optimizer._steps.update
        with monkeypatch.context() as noted:
            noted.setattr(optimizer._steps, "update", lambda *args: (passes.append(args), update(*args)))
            optimizer.step()
        return len(passes)

    assert simulate(on_each_rank, 2) == [num_passes] * 2


def test_classes_of_torch_and_ours_count_by_parameters() -> None:
    assert all(map(counts_apart, (torch.optim.AdamW, torch.optim.Muon, torch.optim.Adafactor, Lion, Muon)))
    assert not counts_apart(OfAProgram)


def test_gathers_that_run_are_over_before_they_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a capture, and behind a write into masters. Nobody has read since the step."""
    start = ParamGather.start

    def start_alone(gather: ParamGather, *args: Any, **options: Any) -> None:
        assert not gather.under_way
        start(gather, *args, **options)

    monkeypatch.setattr(ParamGather, "start", start_alone)

    def on_each_rank() -> None:
        config = {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 32}
        model = DistributedDataParallel(ByTurns(), DistributedDataParallelConfig(**config))
        optimizer = DistributedOptimizer(model)
        sync = optimizer.param_sync
        for _ in range(2):
            sync.start_again()
            assert all(gather.under_way for gather in sync.gathers)
        optimizer.mark_loaded()
        assert not any(gather.under_way for gather in sync.gathers)
        sync.start_again()
        for param in model.module.parameters():
            param.sum()  # which waits
        assert not any(gather.under_way for gather in sync.gathers)

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("alone", ["all", "experts"])
def test_ranks_that_have_whole_parameters_gather_nothing(alone: str) -> None:
    """Each rank's own experts are whole where it updates them."""

    def on_each_rank() -> set[str]:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for param in net[1].parameters():
            param.allreduce = False
        groups = {"expert_process_group": WORLD_OF_ONE, **({"process_group": WORLD_OF_ONE} if alone == "all" else {})}
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
        sync = DistributedOptimizer(DistributedDataParallel(net, config, **groups)).param_sync
        assert sync.overlaps is bool(sync.gathers)
        gathered = {id(param) for gather in sync.gathers for param in gather.live_params()}
        return {name for name, param in net.named_parameters() if id(param) in gathered}

    assert simulate(on_each_rank, 2) == [set() if alone == "all" else {"0.weight", "0.bias"}] * 2


def test_a_captured_step_notes_its_updates_and_gathers_nothing() -> None:
    """Gathers come behind each replay."""

    def on_each_rank() -> None:
        config = {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 32}
        model = DistributedDataParallel(ByTurns(), DistributedDataParallelConfig(**config))
        optimizer = DistributedOptimizer(model)
        sync, noted, left = optimizer.param_sync, [], []
        loss_of(model, make_batches(1)[0]).backward()
        for gather in sync.gathers:
            vars(gather)["leave_graph"] = lambda name=gather.name: left.append(name)
        with sync.captured() as updates:
            vars(updates)["note"] = noted.extend
            optimizer.step()
            assert sync.is_captured and not left
            with pytest.raises(RuntimeError, match="gathers of updated parameters come behind the graph"):
                model.module.layers[0].weight.sum()
        assert left == [gather.name for gather in sync.gathers]
        model.module.layers[0].weight.sum()
        assert {gather.name for gather in noted} == {gather.name for gather in sync.gathers}
        assert len(noted) == len(sync.gathers)
        assert not any(gather.under_way for gather in sync.gathers)
        assert not sync.is_captured

    simulate(on_each_rank, 2)


def test_reads_wait_for_each_replays_gathers_whatever_was_read_before() -> None:
    """Some parameters were read since the last replay, and others were not."""

    def on_each_rank() -> None:
        config = {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 32}
        model = DistributedDataParallel(ByTurns(), DistributedDataParallelConfig(**config))
        sync = DistributedOptimizer(model).param_sync
        with sync.captured() as updates:
            pass
        assert len(sync.gathers) > 2
        for number in range(len(sync.gathers) + 1):
            sync.start_replayed(updates)
            sync.publish_replayed(None)
            assert all(gather.under_way for gather in sync.gathers)
            for gather in sync.gathers[:number]:
                for param in gather.live_params():
                    param.sum()
                assert not gather.under_way

    simulate(on_each_rank, 2)


def test_what_all_ranks_have_written_alike_is_not_gathered() -> None:
    def on_each_rank() -> None:
        config = {"use_distributed_optimizer": True, "overlap_param_gather": True}
        ddp = DistributedDataParallel(make_model(), DistributedDataParallelConfig(bucket_size=32, **config))
        optimizer = DistributedOptimizer(ddp)
        timeline = {whole: [] for whole in (True, False)}
        for whole, started in timeline.items():
            for gather in optimizer.param_sync.gathers:
                vars(gather)["start"] = lambda *args, name=gather.name, start=gather.start, to=started, **options: (
                    to.append(name),
                    start(*args, **options),
                )
            optimizer.mark_loaded(whole=whole)
            assert not any(gather.under_way for gather in optimizer.param_sync.gathers)
            for gather in optimizer.param_sync.gathers:
                del vars(gather)["start"]
        assert timeline[True] == []
        assert timeline[False] == [gather.name for gather in optimizer.param_sync.gathers]

    simulate(on_each_rank, 2)


class Reads(TorchDispatchMode):
    """Counts how often the host reads a number of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("config", [{}, {"use_distributed_optimizer": True, "overlap_param_gather": True}], ids=str)
def test_the_host_looks_once_a_step_whether_to_skip_it(config: dict[str, Any]) -> None:
    """Where no fused kernel skips: however many buckets there are, and whatever is gathered under their updates."""

    def on_each_rank() -> int:
        ddp = DistributedDataParallel(make_model(), DistributedDataParallelConfig(bucket_size=32, **config))
        optimizer = DistributedOptimizer(ddp, optimizer_class=torch.optim.SGD, foreach=True, skip_nonfinite=True)
        loss_of(ddp, make_batches(1)[0]).backward()
        with Reads() as reads:
            optimizer.step()
        return reads.count

    assert simulate(on_each_rank, 2) == [1, 1]


def tokens_are_missing() -> str:
    ddp = DistributedDataParallel(make_model(), DistributedDataParallelConfig(calculate_per_token_loss=True))
    optimizer = DistributedOptimizer(ddp)
    loss_of(ddp, make_batches(1)[0]).backward()
    ddp.start_grad_sync()
    with pytest.raises(TypeError) as error:
        optimizer.step()
    return str(error.value)


def test_started_alone_says_that_tokens_are_missing() -> None:
    assert "set_num_tokens" in tokens_are_missing()


def run_in_instances(gathers: bool, *ends_by: str) -> list[torch.Tensor]:
    """Each rank ends its iterations in its own way."""
    config = {
        "use_distributed_optimizer": True,
        "overlap_param_gather": gathers,
        "num_distributed_optimizer_instances": 2,
    }
    return run(ends_by[dist.get_rank()], config, None)


@pytest.mark.in_turn
@pytest.mark.parametrize("gathers", [False, True])
def test_ranks_may_wait_at_once_and_by_bucket_where_waits_begin_collectives(gathers: bool) -> None:
    """On CPUs a reduction over several instances begins its second collective when a rank waits for the first."""
    ways = ["step", "finish", "finish", "step"]
    expected = simulate(run_in_instances, 4, gathers, *["finish"] * 4)
    for found in simulate(run_in_instances, 4, gathers, *ways):
        assert all(map(torch.equal, found, expected[0]))
