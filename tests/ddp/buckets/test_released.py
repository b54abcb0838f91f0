"""``release_grads``: a program has the same bits as without, and its buckets give their memory back."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reachable import live_nbytes
from stale_memory import stale_memory
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GradScaler,
    add_grad,
    clip_grad_norm,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.launch import simulate
from maingrad.te_integration import LayerNormMLP, Linear, WgradQueue, delayed_wgrad, make_graphed_callables

WIDTH, VOCAB, STEPS = 16, 32, 3


class WritesMainGrad(nn.Module):
    """A scale whose module writes main_grad by the contract, as Transformer Engine's do."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            ctx.weight = weight
            return x * weight

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            accumulator = ctx.weight.get_main_grad() if hasattr(ctx.weight, "__fsdp_param__") else ctx.weight.main_grad
            accumulator += (dy * x).float().flatten(0, -2).sum(0)
            ctx.weight.grad_added_to_main_grad = True
            return dy * weight, torch.empty_like(weight).fill_(torch.nan)  # a placeholder, which nobody may read

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.Function.apply(x, self.weight)
        return y


class Model(nn.Module):
    """Fused, plain and foreign layers, a tied embedding, a frozen layer, and one that some iterations do not use."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.first = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.mlp = LayerNormMLP(WIDTH, 2 * WIDTH, fuse_wgrad_accumulation=True)
        self.at_times = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.ones(3 * WIDTH))
        self.foreign = WritesMainGrad()
        self.recomputes, self.has_foreign = False, True
        self.to(dtype)

    def forward(self, tokens: Tensor, *, more: bool = True) -> Tensor:
        x = self.embedding(tokens)
        x = x + (checkpoint(self.block, x, use_reentrant=False) if self.recomputes else self.block(x))
        x = x + self.mlp(x)
        if more:
            x = x + self.at_times(x)
        return (self.foreign(x) if self.has_foreign else x) @ self.embedding.weight.t()

    def block(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.frozen(torch.tanh(self.first(x))))
        return y


def loss_of(model: nn.Module, step: int, microbatch: int = 0, *, more: bool = True) -> Tensor:
    draws = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank_of())
    tokens = torch.randint(0, VOCAB, (2, 5), generator=draws)
    loss: Tensor = (model(tokens, more=more).float() - 0.5).square().mean()
    return loss


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Run:
    """A model in its wrapper, its optimizer, and what a program has seen."""

    def __init__(
        self, *, released: bool, dtype: torch.dtype = torch.float32, options: Any = None, **config: Any
    ) -> None:
        given = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 600, **config}
        self.module = Model(dtype)
        self.model = DistributedDataParallel(
            self.module, DistributedDataParallelConfig(**given, release_grads=released)
        )
        self.optimizer = DistributedOptimizer(self.model, lr=2**-5, **(options or {}))
        self.seen: list[Any] = []

    def end(self) -> None:
        """A step, and the weights after it."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.record()

    def record(self) -> None:
        self.optimizer.finish_param_sync()
        self.seen += [param.detach().clone() for param in self.module.parameters()]


def microbatches(run: Run, step: int, count: int, **options: Any) -> None:
    for number in range(count - 1):
        with run.model.no_sync():
            loss_of(run.model, step, number, **options).backward()
    loss_of(run.model, step, count - 1, **options).backward()


# ---- Programs: each takes the options of wrapper and optimizer. ----


def plainly(*, num: int = 2, **options: Any) -> list[Any]:
    run = Run(**options)
    for step in range(STEPS):
        microbatches(run, step, num)
        run.end()
    return run.seen


def some_unused(**options: Any) -> list[Any]:
    run = Run(**options)
    for step in range(STEPS):
        microbatches(run, step, 2, more=step == 1)
        run.end()
    return run.seen


def reads_and_changes_grads(**options: Any) -> list[Any]:
    run = Run(**options)
    for step in range(STEPS):
        microbatches(run, step, 2)
        run.seen.append(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.125))
        run.seen += [param.grad.full_tensor() for param in run.model.parameters() if param.grad is not None]
        kept = run.module.norm.weight.grad
        run.module.first.weight.grad = None
        run.module.norm.bias.grad.mul_(0.5)
        run.end()
        assert kept is not None
        run.seen.append(kept.full_tensor())  # read before the iteration's end, so that it keeps its values
    return run.seen


def clips_by_megatrons_verbs(**options: Any) -> list[Any]:
    run = Run(**options)
    for step in range(STEPS):
        with run.model.no_sync():
            for number in range(2):
                loss_of(run.model, step, number).backward()
        run.model.scale_gradients(0.5)  # local sums
        run.model.start_grad_sync()
        run.model.finish_grad_sync()
        run.model.scale_gradients(4.0)  # shards
        run.seen.append(clip_grad_norm(run.model, 0.125))
        run.seen += [grads.clone() for grads in run.model.reduced_grads()]
        run.end()
    return run.seen


def scales_losses(**options: Any) -> list[Any]:
    run, scaler = Run(**options), GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for step in range(STEPS + 1):
        loss = loss_of(run.model, step) * (torch.inf if step == 1 and rank_of() == 0 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        run.record()
        run.seen.append(scaler.get_scale())
    return run.seen


def delays(**options: Any) -> list[Any]:
    run, queue = Run(**options), WgradQueue()
    for step in range(STEPS):
        with delayed_wgrad(queue):
            microbatches(run, step, 3)
        queue.drain()
        run.end()
    return run.seen


def second_backwards(**options: Any) -> list[Any]:
    run = Run(**options)
    run.module.has_foreign = False  # such a module writes main_grad past what reopens a bucket, and is refused
    for step in range(STEPS):
        microbatches(run, step, 2)
        if step == 1:
            run.seen.append(run.module.mlp.fc1_weight.grad.norm())
            run.module.norm.weight.grad = None
            run.module.at_times.bias.grad = None
        microbatches(run, step + 50, 1, more=step != 1)
        microbatches(run, step + 70, 2)
        run.end()
    return run.seen


def by_hand(**options: Any) -> list[Any]:
    run = Run(**options)
    for step in range(STEPS):
        for param in run.module.first.parameters():
            add_grad(param, torch.full_like(param, 0.25 * (1 + rank_of())))
        microbatches(run, step, step) if step else run.model.finish_grad_sync()
        run.end()
    return run.seen


def gives_up(**options: Any) -> list[Any]:
    run = Run(**options)
    run.module.has_foreign = False  # as above
    for step in range(STEPS + 2):
        with run.model.no_sync():
            loss_of(run.model, step, 5).backward()
        if step == 1:
            run.model.zero_grad()
            run.record()
            continue
        loss_of(run.model, step, 6).backward()
        if step == 2:  # a step that is skipped, after the reduction
            run.seen.append(run.module.norm.weight.grad.norm())
            run.optimizer.zero_grad()
            continue
        if step == 3:
            with pytest.raises(ArithmeticError), failing_layer(run.module.first):
                loss_of(run.model, step, 7).backward()
            run.model.abandon_iteration()
            microbatches(run, step, 2)
        run.end()
    return run.seen


@contextmanager
def failing_layer(layer: nn.Module) -> Iterator[None]:
    """The backward fails where it reaches this layer's output."""

    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError("in a backward")

    hook = layer.register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
    try:
        yield
    finally:
        hook.remove()


def recomputes(**options: Any) -> list[Any]:
    run = Run(**options)
    run.module.recomputes = True
    for step in range(STEPS):
        microbatches(run, step, 2)
        run.end()
    return run.seen


def counts_tokens(**options: Any) -> list[Any]:
    run = Run(**options, calculate_per_token_loss=True)
    for step in range(STEPS):
        run.model.set_num_tokens(torch.tensor(3 + rank_of()))
        microbatches(run, step, 2)
        run.end()
    return run.seen


def looks_aside(**options: Any) -> list[Any]:
    """Backwards that train nothing, an evaluation, and a checkpoint, in the middle of an iteration."""
    run = Run(**options)
    for step in range(STEPS):
        with run.model.no_sync():
            loss_of(run.model, step).backward()
        run.seen += torch.autograd.grad(loss_of(run.model, step, 3), [run.module.norm.weight])
        with torch.no_grad():
            run.seen.append(loss_of(run.model, step, 4))
        loss_of(run.model, step, 1).backward()
        run.end()
    return run.seen


PROGRAMS: dict[str, Callable[..., list[Any]]] = {
    "one microbatch": partial(plainly, num=1),
    "three microbatches": partial(plainly, num=3),
    "without overlap": partial(plainly, overlap_grad_reduce=False),
    "one bucket": partial(plainly, bucket_size=None),
    "bf16": partial(plainly, dtype=torch.bfloat16),
    "bf16 gradients": partial(plainly, dtype=torch.bfloat16, grad_reduce_in_fp32=False),
    "bf16 on the wire": partial(plainly, grad_reduce_wire_dtype=torch.bfloat16),
    "gathers overlap": partial(plainly, overlap_param_gather=True),
    "whole parameters": partial(plainly, keep_params_whole=True),
    "compact state": partial(plainly, dtype=torch.bfloat16, options={"state": "compact"}),
    "state on the host": partial(plainly, options={"offload_state": "host"}),
    "clips": partial(plainly, options={"max_grad_norm": 0.125, "skip_nonfinite": True}),
    "looks for NaN": partial(plainly, check_for_nan_in_grad=True, check_replicas_every=2),
    "SGD": partial(plainly, options={"optimizer_class": torch.optim.SGD, "momentum": 0.5}),
    "unused": some_unused,
    "unused, found": partial(some_unused, find_unused_parameters=True),
    "reads .grad": reads_and_changes_grads,
    "Megatron's verbs": clips_by_megatrons_verbs,
    "scales losses": scales_losses,
    "delays": delays,
    "delays, without overlap": partial(delays, overlap_grad_reduce=False),
    "second backwards": second_backwards,
    "second backwards, without overlap": partial(second_backwards, overlap_grad_reduce=False),
    "by hand": by_hand,
    "gives up": gives_up,
    "recomputes": recomputes,
    "counts tokens": counts_tokens,
    "looks aside": looks_aside,
}


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def check_same(program: Callable[..., list[Any]], ranks: int) -> None:
    def both() -> list[bool]:
        kept, released = program(released=False), program(released=True)
        assert len(kept) == len(released)
        return list(map(equal, kept, released))

    with stale_memory():  # what is taken holds NaN
        results = simulate(both, ranks)
    for found in results:
        assert found
        assert all(found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_the_same_bits(name: str) -> None:
    check_same(PROGRAMS[name], 2)


@pytest.mark.parametrize(
    "name", ["three microbatches", "second backwards", "unused", "reads .grad", "whole parameters"]
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_same_bits_on_other_numbers_of_ranks(name: str, ranks: int) -> None:
    check_same(PROGRAMS[name], ranks)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["three microbatches", "second backwards", "bf16 on the wire"])
@pytest.mark.sampled(2)
def test_the_same_bits_under_hybrid_sharding(name: str) -> None:
    check_same(partial(PROGRAMS[name], num_distributed_optimizer_instances=2), 4)


# ---- Experts. ----


def trains_experts(*, released: bool, own: bool) -> list[Tensor]:
    """Ranks hold the same experts in pairs, or each has its own."""
    torch.manual_seed(0)
    dense, size, rank = nn.Linear(WIDTH, WIDTH), dist.get_world_size(), dist.get_rank()
    torch.manual_seed(10 + (rank if own else rank % 2))
    expert = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True)
    for param in expert.parameters():
        param.allreduce = False
    groups = [dist.new_group(list(range(first, size, 2))) for first in range(2)]
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, release_grads=released
    )
    group = WORLD_OF_ONE if own else groups[rank % 2]
    model = DistributedDataParallel(nn.Sequential(dense, expert), config, expert_process_group=group)
    optimizer, seen = DistributedOptimizer(model, lr=2**-5, max_grad_norm=0.5), []
    for step in range(STEPS):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [optimizer.grad_norm, *(param.detach().clone() for param in model.parameters())]
    whole = {bucket.layout.grid_name for bucket in model.buckets if bucket.grad_data.untyped_storage().nbytes()}
    assert whole == ({"dense", "expert"} if not released else {"expert"} if own else set())
    return seen


@pytest.mark.parametrize("own", [False, True])
def test_experts_of_other_groups(own: bool) -> None:
    """Where each rank has experts of its own, the reduced gradient is the whole one, and stays."""

    def both() -> bool:
        kept, released = (trains_experts(released=each, own=own) for each in (False, True))
        return all(map(torch.equal, kept, released))

    assert simulate(both, 4) == [True] * 4


# ---- Memory. ----


def held(model: DistributedDataParallel) -> int:
    """Bytes of gradients that are not reduced to shards."""
    storages = {
        bucket.grad_data.untyped_storage()._cdata: bucket.grad_data.untyped_storage() for bucket in model.buckets
    }
    return sum(storage.nbytes() for storage in storages.values())


def memory_of_an_iteration(num: int) -> None:
    layers = [Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=index % 2 == 0) for index in range(12)]
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=260, release_grads=True
    )
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)), config)
    optimizer = DistributedOptimizer(model)
    size, count = 384 * 4, 13  # bytes of 272 elements with padding for 2 or 3 ranks
    assert [bucket.layout.numel * 4 for bucket in model.buckets] == [size] * count
    assert held(model) == 0
    seen: list[int] = []
    for layer in model.module:
        layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(held(model)))
    for _ in range(2):
        loss = model(torch.ones(2, WIDTH)).square().mean()
        assert held(model) == 0, "during the forward"
        if num > 1:
            with model.no_sync():
                loss.backward()
            assert held(model) == size * count, "sums stay until the last microbatch"
            loss = model(torch.ones(2, WIDTH)).square().mean()
        seen.clear()
        loss.backward()
        if num == 1:
            assert seen == [size, 2 * size, *[3 * size] * (count - 2)], "one is written, two are reduced"
            assert held(model) == 3 * size, "after the backward"
        optimizer.step()
        assert held(model) == 0, "after the step"
        optimizer.zero_grad()
    assert sum(bucket.reduced.untyped_storage().nbytes() for bucket in model.buckets) * dist.get_world_size() == (
        size * count
    )


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_memory_goes_back(num: int, ranks: int) -> None:
    simulate(partial(memory_of_an_iteration, num), ranks)


def sends_zeros() -> None:
    """One rank uses a layer, and the other does not."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=260, release_grads=True)
    model, used = DistributedDataParallel(layers, config), layers[dist.get_rank()]
    assert len(model.buckets) == 2
    with model.no_sync():
        used(torch.ones(2, WIDTH)).sum().backward()
    assert sum(bucket.grad_data.untyped_storage().nbytes() > 0 for bucket in model.buckets) == 1
    model.finish_grad_sync()
    for layer in layers:
        assert torch.equal(layer.bias.grad.full_tensor(), torch.ones(WIDTH))  # the mean of 2 and 0


def test_a_bucket_that_nobody_uses_sends_zeros() -> None:
    with stale_memory():
        simulate(sends_zeros, 2)


def under_a_schedule() -> None:
    """Stages of other ranks may be behind, and wait for what this rank sends after its backward."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=260, release_grads=True
    )
    model = DistributedDataParallel(net, config)
    parts = model.grad_parts
    parts.begin(net, net.parameters())
    with parts.backward(net, final=True):
        net(torch.ones(2, WIDTH)).sum().backward()
    assert held(model) == 6 * 384 * 4
    parts.end(net)
    net[0].weight.grad.norm()
    assert held(model) == 0


def test_under_a_schedule_no_bucket_waits() -> None:
    simulate(under_a_schedule, 2)


class SumOverRanks(torch.autograd.Function):
    """Sums its gradient over ranks, as the backward of ``nn.SyncBatchNorm`` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dx = dy.clone()
        dist.all_reduce(dx, group=ctx.group)
        return dx, None


class UsesOthersOnEachRank(nn.Module):
    """The second rank leaves the last layer out. Ranks communicate in backward, behind four buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))
        self.group = dist.new_group()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: 7 - rank_of()]:
            x = layer(SumOverRanks.apply(x, self.group) if layer is self.layers[1] else x)
        return x


def uses_others_on_each_rank(released: bool) -> list[Tensor]:
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        bucket_size=260,
        release_grads=released,
        find_unused_parameters=released,
    )
    model = DistributedDataParallel(UsesOthersOnEachRank(), config)
    optimizer = DistributedOptimizer(model)
    for step in range(STEPS):
        model(torch.full((2, WIDTH), float(step + rank_of()))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.module.parameters()]


def test_a_rank_that_waits_in_backward_lets_others_come_where_unused_parameters_are_found() -> None:
    """Without ``find_unused_parameters`` the first rank waits for a bucket that the second would launch at the end of
    its backward, which waits for the first: the reference warns of it."""
    kept, released = (simulate(partial(uses_others_on_each_rank, each), 2) for each in (False, True))
    assert all(map(torch.equal, kept[0], released[0]))
    assert all(map(torch.equal, kept[0], released[1]))


def in_flight_without_a_step() -> None:
    gc.collect()
    before = live_nbytes()
    run = Run(released=True)
    loss_of(run.model, 0).backward()
    watched = [weakref.ref(run.model), weakref.ref(run.module), *map(weakref.ref, run.model.buckets)]
    gc.disable()
    try:
        del run
        assert [each() for each in watched] == [None] * len(watched)
    finally:
        gc.enable()
    if dist.get_world_size() == 1:  # ranks are threads, and others have models too
        assert live_nbytes() == before


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dropped_model_is_freed_without_the_collector(ranks: int) -> None:
    simulate(in_flight_without_a_step, ranks)


# ---- What programs see of main_grad. ----


def asks_first() -> None:
    layer = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, release_grads=True)
    model = DistributedDataParallel(layer, config)
    assert not layer.weight.get_main_grad().any()
    assert held(model)
    model.zero_grad()
    assert held(model) == 0, "given up"


def test_who_asks_for_main_grad_before_a_backward_gets_zeros() -> None:
    with stale_memory():
        simulate(asks_first, 2)


def reads_main_grad() -> None:
    run = Run(released=True)
    weight = run.module.first.weight
    with run.model.no_sync():
        loss_of(run.model, 0).backward()
        once = weight.get_main_grad().clone()
        loss_of(run.model, 0).backward()
    assert once.any()
    assert torch.equal(weight.get_main_grad(), 2 * once)
    weight.get_main_grad().mul_(0.5)
    assert not hasattr(weight, "main_grad")
    with pytest.raises(RuntimeError, match=r"reduced_grads\(\) before the reduction.*finish_grad_sync\(\)"):
        run.model.reduced_grads()
    run.model.start_grad_sync()
    shards = run.model.reduced_grads()  # the memory that the reductions under way write
    run.model.finish_grad_sync()
    assert [each.data_ptr() for each in run.model.reduced_grads()] == [each.data_ptr() for each in shards]
    dist.all_reduce(once)
    assert torch.equal(weight.grad.full_tensor(), once / dist.get_world_size())
    with pytest.raises(RuntimeError, match=r"'first.weight' received a gradient after bucket \d"):
        weight.get_main_grad()
    assert held(run.model) == 0, "a write that is refused takes no memory"
    run.end()
    with pytest.raises(RuntimeError, match="before the reduction"):
        run.model.reduced_grads()


def test_main_grad_is_there_until_the_reduction() -> None:
    simulate(reads_main_grad, 2)


class WritesPastTheContract(nn.Module):
    """As ``WritesMainGrad``, and takes ``main_grad`` where it should ask ``get_main_grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        def add(grad: Tensor) -> None:
            self.weight.main_grad += 1

        y = x * self.weight
        y.register_hook(add)
        return y


def writes_past_the_contract() -> None:
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, release_grads=True)
    model = DistributedDataParallel(WritesPastTheContract(), config)
    with pytest.raises(AttributeError, match="no attribute 'main_grad'"):
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()


def test_a_module_that_writes_what_is_not_there_is_told_so() -> None:
    simulate(writes_past_the_contract, 2)


def graphs_of_layers() -> None:
    run = Run(released=True)
    with pytest.raises(ValueError, match=r"release_grads\), and graphs need memory that stays.*release_grads=False"):
        make_graphed_callables([run.module.first], [(torch.zeros(2, WIDTH, requires_grad=True),)])


def test_graphs_of_layers_are_refused_by_name() -> None:
    simulate(graphs_of_layers, 2)


def test_whole_gradients_cannot_be_released() -> None:
    with pytest.raises(ValueError, match="release_grads has no effect without use_distributed_optimizer"):
        DistributedDataParallelConfig(release_grads=True)


def saves_in_the_middle(folder: Path) -> bool:
    run, other = Run(released=True), Run(released=False)
    microbatches(run, 0, 2)
    run.end()
    with run.model.no_sync():
        loss_of(run.model, 1).backward()
    save_checkpoint(folder, run.model, run.optimizer)
    load_checkpoint(folder, other.model, other.optimizer)
    with other.model.no_sync():
        loss_of(other.model, 1).backward()
    for each in (run, other):
        loss_of(each.model, 1, 1).backward()
        each.end()
    return all(map(torch.equal, run.module.parameters(), other.module.parameters()))


def test_a_checkpoint_in_the_middle_of_an_iteration(tmp_path: Path) -> None:
    """Either form reads the other's, and the sums of the iteration stay."""
    assert simulate(partial(saves_in_the_middle, tmp_path / "saved"), 2) == [True, True]


def unwraps() -> None:
    run = Run(released=True)
    loss_of(run.model, 0).backward()
    module = run.model.unwrap()
    assert not any(hasattr(param, "main_grad") or hasattr(param, "get_main_grad") for param in module.parameters())
    again = DistributedDataParallel(module.requires_grad_(False).norm.requires_grad_(True))
    again(torch.randn(2, WIDTH)).sum().backward()
    assert again.module.weight.grad.any()


def test_unwrap_takes_everything_back() -> None:
    simulate(unwraps, 2)
