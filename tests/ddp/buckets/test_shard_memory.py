"""Bytes at rest are exactly the formula's; a deleted model frees them without the garbage collector."""

import gc
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from loops import wrap
from reachable import live_nbytes, nbytes_of, reachable_tensors
from stock_steps import backward, batch_of, loss_of, make_net
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer, GradScaler, clip_grad_norm
from maingrad.ddp.buckets import reducer as reducer_module
from maingrad.ddp.buckets.bucket import Phase
from maingrad.ddp.buckets.buffer import Meter, ReleasableBuffer
from maingrad.ddp.collectives.streams import recording
from maingrad.ddp.gathers.param_gather import ParamGather
from maingrad.ddp.torch_internals import refuses_storage_reads
from maingrad.launch import simulate

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# make_net: 256 + 64 + 64 + 64 + 8192 + 128 elements, all multiples of 64. One bucket is padded to a multiple of
# lcm(ranks, 128), which for 1, 2, 3 and 4 ranks is 8832 = 69 x 128 = 23 x 384.
NUMEL, PADDED = 8768, 8832


def bytes_at_rest(config: dict[str, Any]) -> dict[str, int]:
    """Bytes that a rank keeps: before the first step, after it, and after the next iteration has begun."""
    dtype = config.pop("dtype")
    options = config.pop("options", {})
    ddp = wrap(make_net(dtype), **config)
    optimizer = DistributedOptimizer(ddp, **options)
    found = {"before": nbytes_of(reachable_tensors(ddp, optimizer))}
    for step in range(2):
        backward(ddp, step, dtype)
        if step == 0:
            found["reduced"] = nbytes_of(reachable_tensors(ddp, optimizer))
        optimizer.step()
        ddp.zero_grad_buffer()
    optimizer.finish_param_sync()
    found["after"] = nbytes_of(reachable_tensors(ddp, optimizer))
    found["runs"] = sum(len(group["params"]) for group in optimizer.param_groups)
    found["model alone"] = nbytes_of(reachable_tensors(ddp.module))
    return found


PLACED: dict[str, tuple[dict[str, Any], Callable[[int], int]]] = {
    # config, and ranks that share the optimizer's state
    "ddp": ({}, lambda ranks: 1),
    "zero1": ({"use_distributed_optimizer": True}, lambda ranks: ranks),
    "zero1, overlapped": (
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        lambda ranks: ranks,
    ),
    "hybrid": ({"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}, lambda ranks: ranks // 2),
}
# bytes of a parameter, of its gradient, of its master; moments are 8 everywhere
DTYPES: dict[str, tuple[torch.dtype, dict[str, Any], tuple[int, int, int]]] = {
    "fp32": (FP32, {}, (4, 4, 0)),
    "bf16": (BF16, {}, (2, 4, 4)),
    "fp16": (FP16, {}, (2, 4, 4)),
    "bf16, gradients too": (BF16, {"grad_reduce_in_fp32": False}, (2, 2, 4)),
}


def check_bytes(placed: str, dtype: str, ranks: int) -> None:
    config, share = PLACED[placed]
    torch_dtype, more, (of_param, of_grad, of_master) = DTYPES[dtype]
    owned = PADDED // share(ranks)
    for found in simulate(lambda: bytes_at_rest({**config, **more, "dtype": torch_dtype}), ranks):
        weights_and_grads = PADDED * (of_param + of_grad)
        assert found["before"] == weights_and_grads + owned * of_master
        assert found["reduced"] == found["before"]
        assert found["runs"] == 1
        steps = 4 * found["runs"]  # how many steps it took, one fp32 number for each run
        assert found["after"] == weights_and_grads + owned * (of_master + 8) + steps
        assert found["model alone"] == weights_and_grads, "main_grad is reached through the parameters"


@pytest.mark.parametrize(
    ("placed", "dtype", "ranks"),
    [
        ("ddp", "fp32", 1),
        ("ddp", "bf16", 2),
        ("zero1", "fp32", 3),
        ("zero1", "bf16", 4),
        ("zero1, overlapped", "bf16", 3),
        ("zero1", "bf16, gradients too", 2),
        ("hybrid", "bf16", 4),
    ],
)
@pytest.mark.sampled(3)
def test_bytes_at_rest_are_the_formulas(placed: str, dtype: str, ranks: int) -> None:
    """parameter + gradient + (master if half + 8) / ranks that share, times padded elements."""
    check_bytes(placed, dtype, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("placed", PLACED)
def test_bytes_at_rest_are_the_formulas_everywhere(placed: str, dtype: str, ranks: int) -> None:
    if placed == "hybrid" and ranks % 2:
        ranks *= 2
    check_bytes(placed, dtype, ranks)


def mixed_bytes() -> tuple[int, int]:
    """Several dtypes, buckets, groups, a frozen layer, buffers, a scalar: bytes measured, and bytes by the plan.

    Padding has moments where a parameter lies in the same shard.
    """
    model = nn.Sequential(make_net(BF16), nn.BatchNorm1d(128), nn.Linear(128, 5).requires_grad_(False))
    model.scale = nn.Parameter(torch.tensor(1.5))
    model.forward = lambda x: model[2](model[1](model[0](x).float() * model.scale))
    ddp = wrap(model, use_distributed_optimizer=True, bucket_size=100, overlap_param_gather=True)
    optimizer = DistributedOptimizer(ddp, param_groups=[{"params": "*.bias", "weight_decay": 0.0}], max_grad_norm=1.0)
    for step in range(2):
        backward(ddp, step, BF16)
        optimizer.step()
        ddp.zero_grad_buffer()
    optimizer.finish_param_sync()
    frozen, running, grad_norm = 5 * 4 + 5 * 128 * 4, 2 * 128 * 4 + 8, 4
    expected = frozen + running + grad_norm
    for bucket in ddp.plan.buckets:
        spec = bucket.slots[0].spec
        half = spec.param_dtype is BF16
        owned = bucket.numel // dist.get_world_size()
        first = dist.get_rank() * owned + bucket.start
        padding_alone = not any(slot.start < first + owned and first < slot.end for slot in bucket.slots)
        expected += bucket.numel * (spec.param_dtype.itemsize + 4) + owned * (4 * half + (0 if padding_alone else 8))
    expected += 4 * sum(len(group["params"]) for group in optimizer.param_groups)
    return nbytes_of(reachable_tensors(ddp, optimizer)), expected


@pytest.mark.parametrize("ranks", [1, 3])
def test_buckets_groups_and_frozen_layers_add_nothing_to_it(ranks: int) -> None:
    for kept, expected in simulate(mixed_bytes, ranks):
        assert kept == expected


@pytest.mark.parametrize(
    ("options", "of_state"),
    [
        ({"optimizer_class": torch.optim.SGD}, 0),
        ({"optimizer_class": torch.optim.SGD, "momentum": 0.9}, 4),
        ({"optimizer_class": torch.optim.RMSprop}, 4),
        ({"amsgrad": True}, 12),
    ],
    ids=str,
)
def test_other_classes_keep_their_own_state_alone(options: dict[str, Any], of_state: int) -> None:
    for found in simulate(
        lambda: bytes_at_rest({"dtype": BF16, "use_distributed_optimizer": True, "options": options}), 2
    ):
        steps = 0 if options.get("optimizer_class") is torch.optim.SGD else 4
        assert found["after"] == PADDED * 6 + PADDED // 2 * (4 + of_state) + steps


def test_nothing_else_is_alive() -> None:
    """The sum of all live tensors in a process that does nothing else. Calls leave no tensor behind."""
    run_ranks(count_all_tensors, 1)


def count_all_tensors() -> None:
    gc.collect()
    before = live_nbytes()
    ddp = wrap(make_net(BF16), use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(ddp, max_grad_norm=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        scaler.scale(loss_of(ddp, batch_of(step, 0, BF16))).backward()
        ddp.finish_grad_sync()
        scaler.unscale_(optimizer)
        clip_grad_norm(ddp, 1.0)
        scaler.step(optimizer)
        scaler.update()
        ddp.zero_grad_buffer()
    optimizer.load_state_dict(optimizer.state_dict())
    kept = live_nbytes() - before
    numbers = 4 * len(("scale", "its tracker", "step", "norm"))
    assert kept == PADDED * (2 + 4 + 4 + 8) + numbers
    del ddp, optimizer, scaler
    assert live_nbytes() == before


def test_masters_see_the_gradients_themselves() -> None:
    """In fp32 the fused step reads the bucket's memory; converted gradients exist only during the step."""
    for dtype, config, shared in ((BF16, {}, True), (FP32, {}, True), (BF16, {"grad_reduce_in_fp32": False}, False)):
        ddp = wrap(make_net(dtype), use_distributed_optimizer=True, bucket_size=300, **config)
        optimizer = DistributedOptimizer(ddp)
        buckets = {bucket.grad_data.untyped_storage().data_ptr() for bucket in ddp.buckets}
        seen: list[bool] = []

        def look(inner: Any, args: Any, kwargs: Any, seen: list[bool] = seen, buckets: set[int] = buckets) -> None:
            for group in inner.param_groups:
                grads = [param.grad for param in group["params"] if param.grad is not None]
                seen.extend(grad.untyped_storage().data_ptr() in buckets for grad in grads)

        optimizer._inners[0].register_step_pre_hook(look)
        backward(ddp, 0, dtype)
        optimizer.step()
        assert seen == [shared] * len(seen)
        assert len(seen) == len(ddp.buckets)
        if not shared:
            masters = [param for group in optimizer.param_groups for param in group["params"]]
            assert not any(param.has_own_grad for param in masters)


# ---- Freed without the collector. ----


class Watched:
    """Weak references to all memory and parameters of a model and its optimizer, by their role."""

    def __init__(self, ddp: DistributedDataParallel, optimizer: DistributedOptimizer) -> None:
        self._objects: dict[str, weakref.ref[Any]] = {
            "wrapper": weakref.ref(ddp),
            "model": weakref.ref(ddp.module),
            "optimizer": weakref.ref(optimizer),
        }
        for name, param in ddp.module.named_parameters():
            self._objects[f"parameter {name}"] = weakref.ref(param)
        self._memory = [
            (f"{tuple(tensor.shape)} {tensor.dtype}", StorageWeakRef(tensor.untyped_storage()))
            for tensor in reachable_tensors(ddp, optimizer)
        ]
        assert len(self._memory) > len(self._objects)

    def alive(self) -> list[str]:
        objects = [name for name, reference in self._objects.items() if reference() is not None]
        return objects + [name for name, storage in self._memory if not storage.expired()]


class _Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("the model's own mistake")


def after_steps(ddp: DistributedDataParallel, optimizer: DistributedOptimizer, dtype: torch.dtype) -> None:
    for step in range(2):
        backward(ddp, step, dtype)
        optimizer.step()
        ddp.zero_grad_buffer()


def in_flight(ddp: DistributedDataParallel, optimizer: DistributedOptimizer, dtype: torch.dtype) -> None:
    backward(ddp, 0, dtype)
    optimizer.step()
    assert all(gather.under_way is ddp.ddp_config.overlap_param_gather for gather in optimizer.param_sync.gathers)


def after_a_forward_that_raised(
    ddp: DistributedDataParallel, optimizer: DistributedOptimizer, dtype: torch.dtype
) -> None:
    in_flight(ddp, optimizer, dtype)
    ddp.module.append(_Breaks())
    with pytest.raises(ArithmeticError, match="own mistake"):
        ddp(batch_of(0, 0, dtype))


def after_a_step_that_raised(ddp: DistributedDataParallel, optimizer: DistributedOptimizer, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match=r"step\(\) before a backward"):
        optimizer.step()
    backward(ddp, 0, dtype)
    name = optimizer.param_groups[0]
    name["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()


def after_a_scaled_step(ddp: DistributedDataParallel, optimizer: DistributedOptimizer, dtype: torch.dtype) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(ddp, batch_of(0, 0, dtype))).backward()
    ddp.finish_grad_sync()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def between_backward_and_reduction(
    ddp: DistributedDataParallel, optimizer: DistributedOptimizer, dtype: torch.dtype
) -> None:
    loss_of(ddp, batch_of(0, 0, dtype)).backward()


LIVES = [
    after_steps,
    in_flight,
    after_a_forward_that_raised,
    after_a_step_that_raised,
    after_a_scaled_step,
    between_backward_and_reduction,
]


def live_and_let_go(
    live: Callable[..., None], config: dict[str, Any], dtype: torch.dtype, patience: float = 0.0
) -> list[str]:
    """What is still alive after deletion. ``patience``: seconds in which gloo's threads may release their tensors."""
    ddp = wrap(make_net(dtype), bucket_size=300, **config)
    optimizer = DistributedOptimizer(
        ddp, max_grad_norm=1.0, param_groups=[{"params": lambda name, param: "bias" in name, "weight_decay": 0.0}]
    )
    live(ddp, optimizer, dtype)
    watched = Watched(ddp, optimizer)
    assert {"wrapper", "model", "optimizer", "parameter 0.weight"} <= set(watched.alive())
    del ddp, optimizer
    if dist.is_initialized():
        dist.barrier()  # a collective under way keeps its memory until all ranks have joined it
    deadline = time.monotonic() + patience
    while watched.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    return watched.alive()


@pytest.mark.usefixtures("no_garbage_collector")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("live", LIVES)
def test_all_memory_goes_with_the_last_name(live: Callable[..., None], overlap: bool, dtype: torch.dtype) -> None:
    config = {"use_distributed_optimizer": True, "overlap_param_gather": overlap, "overlap_grad_reduce": overlap}
    assert simulate(live_and_let_go, 2, live, config, dtype) == [[], []]


@pytest.mark.usefixtures("no_garbage_collector")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("live", LIVES)
def test_all_memory_goes_on_one_rank(live: Callable[..., None], overlap: bool) -> None:
    config = {"use_distributed_optimizer": True, "overlap_param_gather": overlap, "overlap_grad_reduce": overlap}
    assert live_and_let_go(live, config, BF16) == []


def live_and_let_go_in_a_process(name: str, overlap: bool) -> list[str]:
    live = {live.__name__: live for live in LIVES}[name]
    config = {"use_distributed_optimizer": True, "overlap_param_gather": overlap, "overlap_grad_reduce": overlap}
    gc.disable()
    try:
        return live_and_let_go(live, config, BF16, patience=2.0)
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("live", LIVES)
def test_all_memory_goes_in_processes_too(live: Callable[..., None], overlap: bool) -> None:
    assert run_ranks(live_and_let_go_in_a_process, 2, live.__name__, overlap) == [[], []]


class _Stream:
    """Stands in for a CUDA stream."""

    def __init__(self) -> None:
        self.waited_for: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited_for.append(event)


def test_memory_that_a_gather_still_writes_is_not_reused_before_it_ends() -> None:
    """On CUDA, freed memory returns to the stream that allocated it: this stream must wait for the gather."""
    ddp = wrap(make_net())
    gather = ParamGather("bucket 0", torch.zeros(8), [], ddp.grids["dense"], ddp.failures)
    stream, event = _Stream(), object()
    gather._flight, gather._event = SimpleNamespace(home=stream), event
    del gather
    assert stream.waited_for == [event]


def test_memory_that_a_reduction_still_writes_is_not_reused_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, events = _Stream(), [object(), object(), object()]
    monkeypatch.setattr(reducer_module, "current_stream", lambda device: stream)
    ddp = wrap(make_net(), bucket_size=300)
    launcher = ddp._launcher
    launcher._reduced, launcher._in_flight = events, {0: None, 2: None}
    del launcher
    assert stream.waited_for == []
    del ddp
    assert stream.waited_for == [events[0], events[2]]


@pytest.mark.usefixtures("no_garbage_collector")
def test_a_model_may_be_let_go_in_the_middle_of_another_optimizers_step() -> None:
    """The garbage collector may run at any time, also while torch iterates over hooks that run before a step."""
    handle = register_optimizer_step_pre_hook(lambda *_: gc.collect() and None)
    ddp = wrap(make_net())
    ddp.itself = [ddp]
    reference = weakref.ref(ddp)
    del ddp
    other = make_net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    loss_of(other, batch_of(0, 0, FP32)).backward()
    try:
        assert reference() is not None
        optimizer.step()
    finally:
        handle.remove()
    assert reference() is None


# ---- What lies in buckets, and memory that is freed and taken again. ----


@pytest.mark.parametrize(
    "config", [{}, {"pad_buckets_for_high_nccl_busbw": True}, {"bucket_size": 1}, {"keep_params_whole": True}], ids=str
)
def test_padding_is_zero_when_an_iteration_begins(config: dict[str, Any]) -> None:
    """Clipping multiplies whole buckets, and a NaN would stay there."""

    def on_each_rank() -> int:
        layers = [nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2)]
        ddp = wrap(nn.Sequential(*layers), **{"use_distributed_optimizer": True, **config})
        ddp(torch.ones(2, 5)).sum().backward()
        ddp.finish_grad_sync()
        for bucket in ddp.buckets:
            bucket.grad_data.fill_(torch.nan)
        ddp.zero_grad()
        found = 0
        for bucket in ddp.buckets:
            outside = torch.ones(bucket.layout.numel, dtype=torch.bool)
            for slot in bucket.layout.slots:
                outside[slot.start - bucket.layout.start : slot.end - bucket.layout.start] = False
            assert not bucket.grad_data[outside].any()
            found += int(outside.sum())
        return found

    assert all(simulate(on_each_rank, 2))


def test_buckets_come_in_the_order_of_their_launches() -> None:
    """Whatever buffers they lie in: gradients of two dtypes take turns."""
    layers = [nn.Linear(4, 4, bias=False, dtype=dtype) for dtype in (torch.float64, FP32, torch.float64, FP32)]
    ddp = wrap(nn.Sequential(*layers), bucket_size=1, overlap_grad_reduce=True)
    assert [bucket.index for bucket in ddp.buckets] == [0, 1, 2, 3]
    assert [bucket.records[0].name for bucket in ddp.buckets] == ["3.weight", "2.weight", "1.weight", "0.weight"]


LEGAL = {
    Phase.IDLE: {Phase.ACCUMULATING, Phase.READY, Phase.REDUCING},
    Phase.ACCUMULATING: {Phase.READY, Phase.REDUCING, Phase.IDLE},
    Phase.READY: {Phase.REDUCING, Phase.IDLE},
    Phase.REDUCING: {Phase.REDUCED},
    Phase.REDUCED: {Phase.IDLE},
}


def test_a_bucket_goes_from_phase_to_phase_as_an_iteration_does() -> None:
    ways = {Phase.IDLE: [], Phase.ACCUMULATING: [Phase.ACCUMULATING], Phase.READY: [Phase.READY]}
    ways |= {Phase.REDUCING: [Phase.REDUCING], Phase.REDUCED: [Phase.REDUCING, Phase.REDUCED]}
    for before, way in ways.items():
        for after in Phase:
            (bucket,) = wrap(nn.Linear(2, 2)).buckets
            for phase in way:
                bucket.phase = phase
            if after in LEGAL[before]:
                bucket.phase = after
                assert bucket.idle is (after is Phase.IDLE)
            else:
                with pytest.raises(RuntimeError, match=rf"bucket 0 .* from {before.value} to {after.value}"):
                    bucket.phase = after
                assert bucket.phase is before


@pytest.mark.skipif(not refuses_storage_reads, reason="this torch has no storages that refuse reads")
def test_a_view_that_outlives_its_memory_says_so() -> None:
    def on_each_rank() -> None:
        ddp = wrap(nn.Linear(16, 16), use_distributed_optimizer=True, release_grads=True)
        kept: Any = ddp.module.weight.get_main_grad()  # type: ignore[operator]
        ddp(torch.ones(1, 16)).sum().backward()
        assert kept.sum() == 256
        ddp.finish_grad_sync()
        with pytest.raises(
            RuntimeError, match=r"main_grad \(bucket 0 .* was freed after its reduction \(release_grads\)"
        ):
            kept.sum()
        ddp.zero_grad()
        ddp(torch.ones(1, 16)).sum().backward()
        assert kept.sum() == 256, "the same view is valid again"

    simulate(on_each_rank, 2)


def test_ranks_that_keep_whole_gradients_keep_their_memory() -> None:
    """Instances of one rank each have no shards."""

    def on_each_rank() -> None:
        config = {"use_distributed_optimizer": True, "release_grads": True, "num_distributed_optimizer_instances": 2}
        ddp = wrap(nn.Linear(16, 16), **config)
        ddp(torch.ones(1, 16)).sum().backward()
        ddp.finish_grad_sync()
        assert ddp.module.weight.main_grad.sum() == 256  # type: ignore[operator]

    simulate(on_each_rank, 2)


def test_the_meter_keeps_the_most_that_was_held_at_once() -> None:
    meter = Meter()
    for nbytes in (5, 3, -5, 4, -7):
        meter.add(nbytes)
    assert (meter.held_nbytes, meter.peak_nbytes) == (0, 8)


def test_a_buffer_of_nothing_has_nothing_to_free() -> None:
    memory = ReleasableBuffer(0, FP32, torch.device("cpu"))
    memory.release()
    assert memory.resident
    assert memory.data.sum() == 0


def test_replays_of_what_a_cpu_records_free_and_take_the_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[[], None]] = []
    memory = ReleasableBuffer(4, FP32, torch.device("cpu"))
    monkeypatch.setattr(recording, "graph", SimpleNamespace(calls=calls), raising=False)
    memory.release()
    memory.take()
    monkeypatch.undo()
    free, take = calls
    free()
    assert memory.data.untyped_storage().nbytes() == 0
    take()
    assert memory.data.zero_().sum() == 0
