"""What a backward leaves when it is over: all its reductions launched, and no gradient overwritten."""

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from watching import Watcher

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
)
from maingrad.ddp.buckets import iteration_ends
from maingrad.ddp.buckets.bucket import Phase
from maingrad.ddp.buckets.checks import ModelWatch, check_nothing_bypassed, check_same
from maingrad.ddp.contract.record import GradRecord
from maingrad.launch import simulate
from maingrad.te_integration import Linear, WgradQueue, delayed_wgrad

STEPS = 3


class Branches(nn.Module):
    """Each rank runs a branch of its own, so that ranks fill different buckets."""

    def __init__(self, linear: Callable[..., nn.Linear] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = linear(5, 7)
        self.branches = nn.ModuleList(linear(7, 7) for _ in range(3))
        self.last = linear(7, 2)
        self.double()

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.last(self.branches[branch](self.first(x).tanh()).tanh())  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    """Layers of which those from ``from_block`` on are one reentrant checkpoint."""

    def __init__(self, layers: nn.Sequential, from_block: int) -> None:
        super().__init__()
        self.before, self.block = layers[:from_block], layers[from_block:]

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return checkpoint(self.block, x, use_reentrant=True)  # type: ignore[no-any-return]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def plain(ranks: int) -> tuple[list[Tensor], list[float]]:
    model, losses = Branches(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        rows = [model(batch(rank, step), (rank + step) % 3).square().mean() for rank in range(ranks)]
        loss = torch.stack(rows).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()], losses


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.sampled(8)
def test_a_collective_of_the_program_comes_behind_all_reductions(ranks: int, sharded: bool, delays: bool) -> None:
    """A loss is averaged for a log between backward and step, on the wrapper's own group."""

    def train() -> tuple[list[Tensor], list[float]]:
        net = Branches(lambda *sizes: Linear(*sizes, fuse_wgrad_accumulation=True))
        config = {"use_distributed_optimizer": sharded, "overlap_grad_reduce": True, "bucket_size": 20}
        model = DistributedDataParallel(net, DistributedDataParallelConfig(**config))
        optimizer: Any = (
            DistributedOptimizer(model, lr=0.1, optimizer_class=torch.optim.SGD)
            if sharded
            else torch.optim.SGD(model.parameters(), lr=0.1)
        )
        losses, queue = [], WgradQueue()
        for step in range(STEPS):
            with delayed_wgrad(queue) if delays else nullcontext():
                loss = model(batch(dist.get_rank(), step), (dist.get_rank() + step) % 3).square().mean()
            loss.backward()
            queue.drain()
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            losses.append(mean.item())
            optimizer.step()
            optimizer.zero_grad()
        if sharded:
            optimizer.finish_param_sync()
        return [param.detach().clone() for param in net.parameters()], losses

    weights, losses = plain(ranks)
    for found, seen in simulate(train, ranks):
        torch.testing.assert_close(found, weights, rtol=1e-12, atol=1e-12)
        assert seen == pytest.approx(losses, rel=1e-12)


def test_what_a_failed_backward_has_reached_is_not_ready_in_the_next_iteration() -> None:
    """Parameters of a recomputed block get ready when the outermost backward ends."""
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7)).double()
    twin = copy.deepcopy(net)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=20)
    model = DistributedDataParallel(Recomputed(net, from_block=2), config)
    x = batch(0, 0)

    def fail(_: Tensor) -> None:
        raise KeyError

    hook = net[1].register_forward_hook(lambda _, args, output: output.register_hook(fail) and None)
    with pytest.raises(KeyError):
        model(x).square().mean().backward()
    hook.remove()
    model.zero_grad_buffer()
    for each in (model, twin):
        with model.no_sync() if each is model else nullcontext():
            each(x).square().mean().backward()
        each(x + 1).square().mean().backward()
    model.finish_grad_sync()
    for mine, plain in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.main_grad, plain.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_by_hand_of_what_no_backward_reaches_is_refused(overlap: bool) -> None:
    """It is no part of the reduction, and must not be lost under what the backward shows."""
    net = Branches()
    model = DistributedDataParallel(net, DistributedDataParallelConfig(overlap_grad_reduce=overlap))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net.branches[1].weight.grad = torch.ones(7, 7, dtype=torch.float64)
    model(batch(0, 0), 0).sum().backward()
    with pytest.raises(RuntimeError, match=r"'branches.1.weight' was put into .grad by hand.*maingrad.ddp.add_grad"):
        optimizer.step()
    assert torch.equal(net.branches[1].weight.grad, torch.ones(7, 7, dtype=torch.float64))


class _FailsOnce(torch.autograd.Function):
    """Raises in the first backward, behind which the layer above has its gradient already."""

    failed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if not _FailsOnce.failed:
            _FailsOnce.failed = True
            raise RuntimeError("the first backward fails")
        return grad


@pytest.mark.parametrize("sharded", [False, True])
def test_after_a_backward_that_failed_a_module_that_is_called_directly_shows_its_gradients(sharded: bool) -> None:
    """``model.compute_loss(x)`` is a method of the wrapped module, which calls the module and not its wrapper."""
    _FailsOnce.failed = False
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, overlap_grad_reduce=True)
    model = DistributedDataParallel(net, config)
    with pytest.raises(RuntimeError, match="the first backward fails"):
        net[1](_FailsOnce.apply(model.module[0](torch.ones(2, 3)))).sum().backward()
    model.zero_grad()
    net(torch.ones(2, 3)).sum().backward()
    expected = copy.deepcopy(net)
    expected(torch.ones(2, 3)).sum().backward()
    for param, other in zip(net.parameters(), expected.parameters(), strict=True):
        assert param.grad is not None and other.grad is not None
        torch.testing.assert_close(param.grad.norm(), other.grad.norm())


@pytest.mark.parametrize("overlap", [False, True])
def test_an_iteration_that_goes_on_after_a_read_and_is_discarded_leaves_nothing(overlap: bool) -> None:
    """What was reduced before the second backward waits to be added to it."""
    net = nn.Linear(5, 2).double()
    twin = copy.deepcopy(net)
    model = DistributedDataParallel(net, DistributedDataParallelConfig(overlap_grad_reduce=overlap))
    model(batch(0, 0)).square().mean().backward()
    assert net.weight.grad.norm() > 0
    model(batch(0, 1)).square().mean().backward()
    model.zero_grad()
    for each in (model, twin):
        each(batch(0, 2)).square().mean().backward()
    for mine, plain in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.norm(), plain.grad.norm(), rtol=1e-12, atol=1e-12)
    model(batch(0, 3)).square().mean().backward()
    assert net.weight.grad.norm() > 0
    assert all(bucket.carried is None for bucket in model.buckets), "memory that nothing is added from any more"


class Ends(nn.Module):
    """Each rank's last layer is one of several: what one rank has trained, another has not."""

    def __init__(self, linear: Callable[..., nn.Linear] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = linear(5, 7)
        self.ends = nn.ModuleList(linear(7, 2) for _ in range(2))
        self.double()

    def forward(self, x: Tensor, end: int) -> Tensor:
        return self.ends[end](self.first(x).tanh())  # type: ignore[no-any-return]


def plain_ends(skipped: int = -1) -> list[Tensor]:
    """Weights after one step over two batches of two ranks, each with an end of its own."""
    model = Ends()
    for rank in range(2):
        for index in range(2):
            if index != skipped:
                (model(batch(rank, index), (rank + index) % 2).square().mean() / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [param.detach() for param in model.parameters()]


def wrapped_ends(sharded: bool, overlap: bool) -> tuple[Any, DistributedOptimizer]:
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, overlap_grad_reduce=overlap, num_buckets=3, find_unused_parameters=overlap
    )
    model = DistributedDataParallel(Ends(partial(Linear, fuse_wgrad_accumulation=True)), config)
    return model, DistributedOptimizer(model, lr=0.1, optimizer_class=torch.optim.SGD)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.sampled(4)
def test_a_second_backward_may_begin_with_what_the_first_has_not_reached(sharded: bool, overlap: bool) -> None:
    """Its accumulator holds what other ranks have brought, which no program has written by hand."""

    def train() -> list[Tensor]:
        model, optimizer = wrapped_ends(sharded, overlap)
        for index in range(2):
            model(batch(dist.get_rank(), index), (dist.get_rank() + index) % 2).square().mean().backward()
            dist.barrier()  # reductions have come to their end
        optimizer.step()
        optimizer.finish_param_sync()
        return [param.detach().clone() for param in model.parameters()]

    for found in simulate(train, 2):
        torch.testing.assert_close(found, plain_ends(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clears", ["model", "optimizer", "forward"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_backward_that_failed_after_other_launches_on_each_rank_is_given_up(sharded: bool, clears: str) -> None:
    """What a rank does not use is ready before the failure, and its bucket is launched there alone."""

    def train() -> list[Tensor]:
        model, optimizer = wrapped_ends(sharded, overlap=True)
        rank = dist.get_rank()
        output = model(batch(rank, 0), rank)
        output.register_hook(fails)
        with pytest.raises(KeyError):
            output.square().mean().backward()
        if clears != "forward":
            (model if clears == "model" else optimizer).zero_grad()
        model(batch(rank, 1), 1 - rank).square().mean().backward()
        optimizer.step()
        optimizer.finish_param_sync()
        return [param.detach().clone() for param in model.parameters()]

    for found in simulate(train, 2):
        torch.testing.assert_close(found, plain_ends(skipped=0), rtol=1e-12, atol=1e-12)


def fails(_: Tensor) -> None:
    raise KeyError


def test_a_backward_that_failed_on_one_rank_is_given_up_there_once() -> None:
    """The others hear of it by the program. A second time the rank would meet their next reductions."""

    def train() -> list[Tensor]:
        model, optimizer = wrapped_ends(sharded=False, overlap=True)
        rank = dist.get_rank()
        output = model(batch(rank, 0), rank)
        if rank == 0:
            output.register_hook(fails)
            with pytest.raises(KeyError):
                output.square().mean().backward()
            model.zero_grad()
        else:
            model.abandon_iteration()
        assert not model.has_failed
        model(batch(rank, 1), 1 - rank).square().mean().backward()
        optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    for found in simulate(train, 2):
        torch.testing.assert_close(found, plain_ends(skipped=0), rtol=1e-12, atol=1e-12)


def test_all_that_a_forward_has_not_reached_is_ready_when_its_backward_begins() -> None:
    """It holds no bucket back, though several layers are unused, and though an earlier microbatch has used another."""
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, find_unused_parameters=True, bucket_size=1)
    model = DistributedDataParallel(Branches(), config)
    ready: list[str] = []
    with model.no_sync():
        model(batch(0, 0), 0).sum().backward()
    output = model(batch(0, 0), 1)
    output.register_hook(lambda _: ready.extend(record.name for record in model.records if record.ready))
    output.sum().backward()
    assert sorted(ready) == [f"branches.{unused}.{name}" for unused in (0, 2) for name in ("bias", "weight")]


def test_what_one_forward_has_not_reached_waits_where_its_backward_is_under_no_sync() -> None:
    """The forward ran outside no_sync, so what it has not reached is known; a later microbatch reaches it."""
    net = Branches()
    twin = copy.deepcopy(net)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, find_unused_parameters=True, bucket_size=1)
    model = DistributedDataParallel(net, config)
    loss = model(batch(0, 0), 0).square().mean()
    with model.no_sync():
        loss.backward()
        assert {bucket.phase.value for bucket in model.buckets} <= {"idle", "accumulating"}
    model(batch(0, 1), 1).square().mean().backward()
    for step in range(2):
        twin(batch(0, step), step).square().mean().backward()
    for mine, plain in zip(net.parameters(), twin.parameters(), strict=True):
        if plain.grad is not None:
            torch.testing.assert_close(mine.grad.norm(), plain.grad.norm(), rtol=1e-12, atol=1e-12)


class Chosen(nn.Module):
    """Runs the layer that is asked for, once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(7, 7, dtype=torch.float64) for _ in range(3)])

    def forward(self, x: Tensor, index: int, recomputes: bool) -> Tensor:
        layer = self.layers[index]
        out: Tensor = checkpoint(layer, x, use_reentrant=True) if recomputes else layer(x)
        return out


@pytest.mark.parametrize(
    "forwards",
    [
        pytest.param([(0, False), (2, False)], id="of_two_layers"),
        pytest.param([(2, False), (0, False)], id="in_another_order"),
        pytest.param([(2, True)], id="recomputed"),
        pytest.param([(2, True), (2, False)], id="recomputed_and_not"),
        pytest.param([(2, True), (0, False)], id="recomputed_and_another"),
    ],
)
def test_forwards_that_share_a_backward_reach_what_any_of_them_reaches(forwards: list[tuple[int, bool]]) -> None:
    """Nothing is launched as unused that gets a gradient, by an earlier forward or inside a recompute."""
    net = Chosen()
    twin = copy.deepcopy(net)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, find_unused_parameters=True, bucket_size=1)
    model = DistributedDataParallel(net, config)
    x = torch.ones(2, 7, dtype=torch.float64, requires_grad=True)
    for each in (model, twin):
        sum(each(x, *forward).square().sum() for forward in forwards).backward()
    model.finish_grad_sync()
    for mine, plain in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.main_grad, torch.zeros_like(plain) if plain.grad is None else plain.grad)


def test_a_layer_that_is_called_directly_begins_an_iteration_and_shows_its_gradient() -> None:
    model = DistributedDataParallel(nn.Linear(3, 3, bias=False))
    for value in (1.0, 2.0):
        model.module(torch.full((1, 3), value)).sum().backward()
        assert torch.equal(model.module.weight.grad + 0, torch.full((3, 3), value))
        model.module.weight.grad = None


def test_a_backward_that_trains_nothing_reduces_nothing_behind_one_that_failed() -> None:
    """An attack on inputs, after a layer that was called directly has failed in its backward."""
    _FailsOnce.failed = False
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model = DistributedDataParallel(net, DistributedDataParallelConfig(overlap_grad_reduce=True))
    with pytest.raises(RuntimeError, match="the first backward fails"):
        net[1](_FailsOnce.apply(net[0](torch.ones(2, 3)))).sum().backward()
    x = torch.ones(2, 3, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    assert {bucket.phase.value for bucket in model.buckets} == {"accumulating"}
    assert net[1].weight.grad is None


def test_a_delayed_gradient_that_is_computed_in_the_backward_is_reduced_in_it() -> None:
    """As a schedule does between two layers: the bucket need not wait for the backward's end."""
    net = nn.Sequential(*[Linear(4, 4, bias=False, fuse_wgrad_accumulation=True) for _ in range(2)])
    model = DistributedDataParallel(net, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1))
    queue, phases = WgradQueue(), []

    def drain(grad: Tensor) -> None:
        queue.drain()
        phases.append({record.name: bucket.phase.value for bucket in model.buckets for record in bucket.records})

    net[0].register_forward_hook(lambda module, args, out: out.register_hook(drain) and None)
    with delayed_wgrad(queue):
        loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    assert phases == [{"1.weight": "reducing", "0.weight": "idle"}]
    queue.drain()


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_fused_layer_left_in_an_iteration_that_failed_is_gone_where_the_next_does_not_use_it(
    overlap: bool,
) -> None:
    """No write overwrites it. It is zeroed before anybody looks for NaN."""
    net = nn.ModuleList(Linear(4, 4, bias=False, fuse_wgrad_accumulation=True) for _ in range(2))
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, check_for_nan_in_grad=True)
    model = DistributedDataParallel(net, config)
    (first, second), x = net, torch.ones(2, 4)
    (first(x) + second(x) * torch.nan).sum().backward()
    with pytest.raises(FloatingPointError, match="NaN"):
        model.finish_grad_sync()
    model.zero_grad()
    first(x).sum().backward()
    model.finish_grad_sync()
    assert not second.weight.main_grad.any()
    assert torch.equal(first.weight.main_grad, torch.full((4, 4), 2.0))


def test_a_record_knows_the_place_of_its_bucket_in_the_order_of_launches() -> None:
    config = DistributedDataParallelConfig(bucket_size=1)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(3, 3) for _ in range(2)]), config)
    assert len(model.buckets) > 2
    for bucket in model.buckets:
        assert {record.bucket_index for record in bucket.records} == {bucket.index}


def test_a_model_is_checked_once_before_an_iterations_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several buckets, each of which is launched in the backward."""
    launched: list[bool] = []
    check = ModelWatch.check_launch

    def noted(watch: ModelWatch) -> None:
        launched.append(any(bucket.phase is Phase.REDUCING for bucket in model.buckets))
        check(watch)

    monkeypatch.setattr(ModelWatch, "check_launch", noted)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), config)
    assert len(model.buckets) > 1
    for number in (1, 2):
        model(torch.ones(1, 3)).sum().backward()
        model.finish_grad_sync()
        model.zero_grad()
        assert launched == [False] * number


def test_gradients_are_not_scaled_in_a_backward_that_adds_to_them() -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    model(torch.ones(1, 3)).sum().backward()
    assert model.module.weight.grad.norm() > 0
    out = model(torch.ones(1, 3))
    out.register_hook(lambda grad: model.scale_gradients(2.0))
    with pytest.raises(RuntimeError, match=r"scale_gradients\(\) in a hook, while a backward is under way"):
        out.sum().backward()


def test_no_step_comes_in_the_backward_of_a_module_that_was_called_directly() -> None:
    """No output of the wrapper tells of that backward: the first gradient does."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = DistributedDataParallel(net)
    optimizer = DistributedOptimizer(model)
    refused: list[bool] = []

    def step(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"optimizer.step\(\) in a hook, while a backward is under way"):
            optimizer.step()
        refused.append(True)

    hidden = net[0](torch.ones(1, 3))
    hidden.register_hook(step)
    net[1](hidden).sum().backward()
    assert refused == [True]
    optimizer.step()


def test_a_step_may_come_in_the_backward_of_another_model() -> None:
    model, other = DistributedDataParallel(nn.Linear(3, 3)), nn.Linear(3, 3)
    optimizer = DistributedOptimizer(model)
    before = model.module.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    out = other(torch.ones(1, 3))
    out.register_hook(lambda grad: optimizer.step() and None)
    out.sum().backward()
    assert not torch.equal(model.module.weight, before)


@pytest.mark.parametrize("used", [0, 1])
def test_a_delayed_gradient_that_comes_last_is_reduced_beside_what_was_not_used(used: int) -> None:
    """The backward is over, so that the bucket waits for nothing else."""
    net = nn.ModuleList(Linear(4, 4, bias=False, fuse_wgrad_accumulation=True) for _ in range(2))
    model = DistributedDataParallel(net, DistributedDataParallelConfig(overlap_grad_reduce=True))
    (bucket,) = model.buckets
    queue = WgradQueue()
    model.module.forward = net[used].forward
    with delayed_wgrad(queue):
        loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    assert bucket.phase.value == "accumulating"
    queue.drain()
    assert bucket.phase.value == "reducing"


def test_a_refused_reduction_leaves_nothing_that_zero_grad_would_not_clear() -> None:
    """No gradient was reduced, and one was put into .grad by hand."""
    net = nn.Linear(3, 3)
    model = DistributedDataParallel(net)
    net.weight.grad = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"put into \.grad by hand"):
        model.finish_grad_sync()
    model.zero_grad()
    assert net.weight.grad is None
    model.finish_grad_sync()


@pytest.mark.parametrize("bucket_size", [1, None], ids=["buckets of their own", "one bucket"])
def test_what_one_part_does_not_use_waits_for_the_part_that_does(bucket_size: int | None) -> None:
    """Two stages of a pipeline have an end each. The last forward of the first stage does not reach the other end."""
    net = Ends()
    twin = copy.deepcopy(net)
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, find_unused_parameters=True, bucket_size=bucket_size
    )
    model = DistributedDataParallel(net, config)
    for end in net.ends:
        model.grad_parts.begin(end, [*net.first.parameters(), *end.parameters()])
    for index, end in enumerate(net.ends):
        with model.grad_parts.backward(end, final=True):
            model(batch(0, index), index).square().mean().backward()
        model.grad_parts.end(end)
        twin(batch(0, index), index).square().mean().backward()
    for mine, plain in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.norm(), plain.grad.norm(), rtol=1e-12, atol=1e-12)


def test_what_was_reduced_before_a_second_backward_is_freed_when_it_is_added() -> None:
    """Else a second copy of all gradients would be there during the step."""
    others = {id(each): each for each in gc.get_objects() if type(each) is Tensor}  # of tests before
    net = nn.Linear(37, 37)
    model = DistributedDataParallel(net)

    def train() -> int:
        """Returns the number of memories as large as the weight."""
        model(torch.ones(2, 37)).sum().backward()
        assert net.weight.grad.norm() > 0
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is Tensor and id(each) not in others]
        return len({each.data_ptr() for each in tensors if 37 * 37 <= each.numel() < 2 * 37 * 37})

    once = train()
    assert train() == once


def test_watchers_are_told_of_each_end_step_and_discard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration_ends, "_watchers", [])
    model, watcher, other = nn.Sequential(nn.Sequential(nn.Linear(5, 2))), Watcher(), Watcher()
    before = iteration_ends.num_changes()
    assert not iteration_ends.is_watched()
    for each in (watcher, other, watcher):
        iteration_ends.watch_iterations(each)
    assert iteration_ends.is_watched()
    assert not iteration_ends.is_in_wrapper(model[0])
    beside = DistributedDataParallel(nn.Linear(1, 1))  # no backward reaches this one
    ddp = DistributedDataParallel(model)
    assert iteration_ends.num_changes() > before
    behind = DistributedDataParallel(nn.Linear(1, 1))
    assert all(map(iteration_ends.is_in_wrapper, model.modules()))
    x = torch.ones(3, 5)
    with ddp.no_sync():
        ddp(x).sum().backward()
    ddp(x).sum().backward()
    ddp.finish_grad_sync()
    ddp.finish_grad_sync()
    assert watcher.told == [("ended", model, 2)]
    trained = set(ddp.readiness.trained)
    assert all(map(iteration_ends.was_trained_in, trained))
    ddp.zero_grad()
    assert not any(map(iteration_ends.was_trained_in, trained))
    ddp.zero_grad()
    assert watcher.told[1:] == [("discarded", model, False)], "nobody trains it, as far as one knows"
    assert other.told == watcher.told
    watcher.told.clear()
    other.told.clear()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    first = iteration_ends.forward_number()
    ddp(x).sum().backward()
    assert iteration_ends.forward_number() > first
    optimizer.step()
    optimizer.zero_grad()
    ddp(x)
    assert watcher.told == [("ended", model, 1), ("stepped", model, None), ("discarded", model, True)]
    assert other.told == watcher.told
    watcher.told.clear()
    ddp(x).sum().backward()
    ddp.finish_grad_sync()
    ddp(x).sum().backward()  # goes on, and is reduced as well
    ddp.finish_grad_sync()
    assert [kind for kind, *_ in watcher.told] == ["ended"]
    ddp.zero_grad()
    watcher.told.clear()
    ddp(x).sum().backward()
    ddp.zero_grad()  # before anything was reduced
    assert watcher.told == []
    ddp(x).sum().backward()
    before = iteration_ends.num_changes()
    ddp.unwrap()
    assert iteration_ends.num_changes() > before
    assert not any(map(iteration_ends.is_in_wrapper, model.modules()))
    assert iteration_ends.is_in_wrapper(beside.module) and iteration_ends.is_in_wrapper(behind.module)
    watcher.told.clear()
    again = DistributedDataParallel(model)
    again(x).sum().backward()
    again.finish_grad_sync()
    again.zero_grad()
    assert watcher.told == [("ended", model, 1), ("discarded", model, False)], "its optimizer went with its wrapper"


@pytest.mark.parametrize(
    "look",
    [
        lambda ddp: ddp.module.weight.grad.norm(),
        lambda ddp: ddp.expose_grads(),
        lambda ddp: [piece.grad for piece in DistributedOptimizer(ddp).slices],
        lambda ddp: nn.utils.clip_grad_norm_(ddp.parameters(), 1.0),
    ],
    ids=["reads", "exposes", "reads slices", "clips"],
)
def test_who_looks_at_gradients_and_steps_not_has_skipped_a_step(
    look: Callable[[DistributedDataParallel], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss scaler that has found Inf: its optimizer calls nothing of the wrapper."""
    monkeypatch.setattr(iteration_ends, "_watchers", [watcher := Watcher()])
    model = nn.Linear(5, 2)
    ddp = DistributedDataParallel(model)
    ddp(torch.full((3, 5), torch.inf)).sum().backward()
    look(ddp)
    ddp.zero_grad()
    assert watcher.told == [("ended", model, 1), ("discarded", model, True)]


def test_an_iteration_ends_when_all_buckets_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for them one by one, and updates the first while others are reduced."""
    phases = []

    class Looks(Watcher):
        def ended(self, *args: Any) -> None:
            phases.append({bucket.phase.value for bucket in ddp.buckets})

    monkeypatch.setattr(iteration_ends, "_watchers", [Looks()])
    layers = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)])
    ddp = DistributedDataParallel(layers, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1000))
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    ddp(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    assert phases == [{"reduced"}]


def test_watchers_agree_inside_an_instance_and_then_across(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, list[list[int]]] = {}

    class Axes(Watcher):
        def ended(self, model: nn.Module, axes: Any, trained: Any) -> None:
            told[dist.get_rank()] = [dist.get_process_group_ranks(group) for group in axes]

    monkeypatch.setattr(iteration_ends, "_watchers", [Axes()])

    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(nn.Linear(2, 2), config, process_group=mesh)
        model(torch.ones(1, 2)).sum().backward()
        model.finish_grad_sync()

    simulate(on_each_rank, 4)
    assert told == {0: [[0, 1], [0, 2]], 1: [[0, 1], [1, 3]], 2: [[2, 3], [0, 2]], 3: [[2, 3], [1, 3]]}


def test_a_parameter_that_has_moved_is_named() -> None:
    """To another device, or to another dtype: its accumulator stays where it was."""
    model = DistributedDataParallel(nn.Linear(3, 3))
    entry = model.bucket_params[0]
    check_same(entry)
    for was in ({"device": torch.device("meta")}, {"dtype": torch.float64}):
        before = " on ".join(map(str, (was.get("dtype", torch.float32), was.get("device", "cpu"))))
        with pytest.raises(RuntimeError, match=f"'bias' is torch.float32 on cpu, and was {before} when it was wrapped"):
            check_same(entry._replace(**was))


def add_a_layer(net: nn.Sequential) -> None:
    net.append(nn.Linear(3, 3))


def exchange_a_layer(net: nn.Sequential) -> None:
    net[1][0] = nn.Linear(3, 3)


def exchange_a_weight(net: nn.Sequential) -> None:
    net[0].weight = nn.Parameter(torch.ones(3, 3))


def cast_a_layer(net: nn.Sequential) -> None:
    net[0].double()


def freeze_a_weight(net: nn.Sequential) -> None:
    net[1][0].weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (add_a_layer, "parameter '2.weight' requires a gradient, and was frozen or not there"),
        (exchange_a_layer, "parameter '1.0.weight' requires a gradient, and was frozen or not there"),
        (exchange_a_weight, "parameter '0.weight' was replaced after wrapping"),
        (cast_a_layer, "parameter '0.bias' is torch.float64 on cpu, and was torch.float32 on cpu"),
        (freeze_a_weight, "parameter '1.0.weight' was frozen"),
    ],
)
def test_a_change_behind_forwards_that_found_none_is_seen(change: Callable[[nn.Sequential], None], why: str) -> None:
    """In the next forward, and where the change comes behind that, before the first reduction."""
    for late in (False, True):
        net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
        model = DistributedDataParallel(net)
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            model.finish_grad_sync()
            model.zero_grad()
        out = model(torch.ones(1, 3)) if late else None
        change(net)
        with pytest.raises(RuntimeError, match=why):
            model(torch.ones(1, 3)) if out is None else model.finish_grad_sync()


@pytest.mark.parametrize(
    ("state", "refusal"),
    [
        (
            "wrapped",
            r"here: .* '1.bias' was put into .grad by hand.* Where it was you .*add_grad\(param, grad\) in its",
        ),
        ("of a unit", r"here: .* by hand.* Gradients made by hand go into .grad of model.parameters\(\), after"),
        ("exposed", None),
        ("pending", None),
        ("none", None),
    ],
)
def test_a_gradient_that_no_hook_has_seen_is_refused_with_the_callers_remedy(state: str, refusal: str | None) -> None:
    param, record = (
        nn.Parameter(torch.zeros(2)),
        GradRecord("1.bias", torch.zeros(2), first_write_overwrites=False, shared=False),
    )
    param.grad = None if state == "none" else torch.ones(2)
    record.make_room = (lambda: None) if state == "of a unit" else None
    record.exposed = state == "exposed"
    record.pending = [object()] if state == "pending" else []  # type: ignore[list-item]
    clean = GradRecord("1.weight", torch.zeros(2), first_write_overwrites=False, shared=False)
    with nullcontext() if refusal is None else pytest.raises(RuntimeError, match=refusal):
        check_nothing_bypassed([(nn.Parameter(torch.zeros(2)), clean), (param, record)], "here")
