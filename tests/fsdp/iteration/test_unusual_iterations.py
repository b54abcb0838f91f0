"""Iterations that take an odd course: nested ``no_sync``, sums that are cleared, backwards that fail."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from stale_memory import stale_empty
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from watching import Watcher

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.buckets import iteration_ends
from maingrad.ddp.torch_internals import current_backward
from maingrad.fsdp import fully_shard
from maingrad.fsdp.iteration.hooks import BackwardEnd
from maingrad.fsdp.iteration.rounds import State
from maingrad.launch import simulate


class Fails(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RuntimeError("in the middle")


class Net(nn.Module):
    """Three layers; backward can be made to fail between the last and the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if fails and index == 0:
                x = Fails.apply(x)
        return x.square().sum()


def batch(index: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * index + rank))


def sharded(**options: Any) -> Any:
    model = Net()
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole_grads(model: Any) -> list[Tensor]:
    """Whole gradients, assembled from all ranks' ranges of the flattened parameters."""
    grads = []
    for param in model.parameters():
        info = param.shard
        part = torch.zeros(info.shape).flatten()
        if param.grad is not None:
            part[info.start : info.end] = param.grad.to_local().flatten()
        dist.all_reduce(part)
        grads.append(part.view(info.shape) / info.num_replicas)
    return grads


def expected(ranks: int, *indices: int) -> list[Tensor]:
    """The mean over ranks of the sum over microbatches."""
    twin = Net()
    for index in indices:
        for rank in range(ranks):
            (twin(batch(index, rank)) / ranks).backward()
    return [param.grad for param in twin.parameters()]


def check(ranks: int, program: Callable[..., list[Tensor]], indices: tuple[int, ...], *args: Any) -> None:
    for grads in simulate(program, ranks, *args):
        for found, wanted in zip(grads, expected(ranks, *indices), strict=True):
            torch.testing.assert_close(found, wanted)


# ---- no_sync in no_sync. ----


def nested_under_ddp() -> list[Tensor]:
    model = Net()
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1))
    with ddp.no_sync():
        with ddp.no_sync():
            ddp(batch(0)).backward()
        assert not ddp.require_backward_grad_sync
        ddp(batch(1)).backward()  # as a helper's own no_sync leaves its caller's
        try:
            with ddp.no_sync():
                raise KeyError
        except KeyError:
            ddp(batch(2)).backward()
    assert ddp.require_backward_grad_sync
    ddp(batch(3)).backward()
    ddp.finish_grad_sync()
    return [param.main_grad.clone() for param in model.parameters()]


def nested_under_fully_shard(options: dict[str, Any]) -> list[Tensor]:
    model = sharded(**options)
    with model.no_sync():
        with model.no_sync():
            model(batch(0)).backward()
        model(batch(1)).backward()
        assert all(param.grad is None or not param.grad.to_local().any() for param in model.parameters()) or not options
        with model.layers[0].no_sync():
            pass
        model(batch(2)).backward()
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    model(batch(3)).backward()
    return whole_grads(model)


def test_no_sync_inside_no_sync() -> None:
    check(2, nested_under_ddp, (0, 1, 2, 3))
    for options in ({}, {"reduce_every_microbatch": False}):
        check(2, nested_under_fully_shard, (0, 1, 2, 3), options)


# ---- Sums that were cleared. ----


def cleared_in_the_middle(placements: str, every: bool) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2))
    model = sharded(mesh=mesh, placements=placements, reduce_every_microbatch=every)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with model.no_sync():
        model(batch(0)).backward()
    optimizer.zero_grad()
    with model.no_sync():
        model(batch(1)).backward()
    model(batch(2)).backward()
    return whole_grads(model)


@pytest.mark.parametrize("placements", ["hsdp", "hsdp_zero1"])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.sampled(2)
def test_sums_that_were_cleared_are_not_reduced_across_instances(placements: str, every: bool) -> None:
    check(4, cleared_in_the_middle, (1, 2), placements, every)


def cleared_in_one_bucket(placements: str) -> list[Tensor]:
    model = sharded(placements=placements, bucket_size=1, reduce_every_microbatch=False)
    with model.no_sync():
        model(batch(0)).backward()
    for layer in model.layers:
        layer.weight.grad = None  # of each unit's two buckets one
    model(batch(1)).backward()
    return whole_grads(model)


@pytest.mark.parametrize("placements", ["zero2", "zero3"])
def test_sums_of_one_bucket_of_a_unit_may_be_cleared_alone(placements: str) -> None:
    weights, biases = expected(2, 1)[::2], expected(2, 0, 1)[1::2]
    for grads in simulate(cleared_in_one_bucket, 2, placements):
        torch.testing.assert_close(grads[::2], weights)
        torch.testing.assert_close(grads[1::2], biases)


def cleared_before_the_end(placements: str) -> list[Tensor]:
    model = sharded(mesh=init_device_mesh("cpu", (2, 2)), placements=placements)
    with model.no_sync():
        model(batch(0)).backward()
    model.zero_grad()
    model.finish_grad_sync()
    return whole_grads(model)


@pytest.mark.parametrize("placements", ["hsdp", "hsdp_zero1"])
def test_an_iteration_that_ends_after_its_sums_were_cleared_has_none(placements: str) -> None:
    for grads in simulate(cleared_before_the_end, 4, placements):
        assert not any(grad.any() for grad in grads)


def test_backwards_whose_sums_were_cleared_are_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of ``DelayedScaling`` follow the backwards that an iteration counts."""
    watcher = Watcher()
    monkeypatch.setattr(iteration_ends, "_watchers", [watcher])
    model = sharded()
    for indices, cleared_before in (((0, 1), None), ((0, 1, 2), 2)):
        for index in indices:
            if index == cleared_before:
                model.zero_grad()
            with model.no_sync() if index != indices[-1] else nullcontext():
                model(batch(index, 0)).backward()
        model.zero_grad()
    assert [count for what, _, count in watcher.told if what == "ended"] == [2, 1]


def told_by(watcher: Watcher, model: nn.Module) -> list[tuple[Any, ...]]:
    """What it was told since the last call. Each forward outside an iteration says that nothing is left of before."""
    told, watcher.told = watcher.told, []
    assert all(of is model for _, of, _ in told)
    found = [(what, value) for what, _, value in told]
    return [each for each, before in zip(found, [None, *found], strict=False) if each != before]


def test_watchers_are_told_of_each_end_step_and_discard(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher()
    monkeypatch.setattr(iteration_ends, "_watchers", [watcher])
    model = sharded()
    with model.no_sync():
        model(batch(0, 0)).backward()
    model(batch(1, 0)).backward()
    assert told_by(watcher, model) == [("discarded", False), ("ended", 2)]
    model.zero_grad()
    model(batch(0, 0)).backward()
    assert told_by(watcher, model) == [("discarded", False), ("ended", 1)], "nobody trains it, so far"
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    optimizer.found_inf = torch.zeros(())  # as a scaler sets it
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="in the middle"):
        model(batch(0, 0), fails=True).backward()
    model(batch(0, 0)).backward()
    assert told_by(watcher, model) == [("stepped", optimizer.found_inf), ("discarded", True), ("ended", 1)]


def test_backwards_of_an_iteration_that_was_given_up_have_trained_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration_ends, "_watchers", [Watcher()])
    model, numbers = sharded(), list[int]()
    with model.no_sync():
        loss = model(batch(0, 0))
        loss.register_hook(lambda grad: numbers.append(current_backward()))
        loss.backward()
    assert iteration_ends.was_trained_in(numbers[0])
    with pytest.raises(RuntimeError, match="in the middle"):
        model(batch(1, 0), fails=True).backward()
    model(batch(2, 0))
    assert not iteration_ends.was_trained_in(numbers[0])


def test_modules_are_told_that_they_run_in_one_forward_of_a_wrapper() -> None:
    """The recipes of ``te_integration`` ask it."""
    model = sharded()
    assert iteration_ends.is_in_wrapper(model.layers[0]) and not iteration_ends.is_in_wrapper(Net())
    numbers: list[int] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: numbers.append(iteration_ends.forward_number()))
    for index in range(2):
        model(batch(index, 0)).backward()
    assert len(numbers) == 6
    assert numbers[0] == numbers[2] < numbers[3] == numbers[5]


def test_a_step_that_a_scaler_skips_is_one_of_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are discarded as those of a skipped step, though no step was ever seen."""
    watcher = Watcher()
    monkeypatch.setattr(iteration_ends, "_watchers", [watcher])
    model = sharded()
    model(batch(0, 0)).backward()
    grads = [param.grad for param in model.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.ones(1))
    model.zero_grad()
    model(batch(0, 0))
    assert told_by(watcher, model) == [("discarded", False), ("ended", 1), ("discarded", True)]


def cleared_after_the_end() -> list[Tensor]:
    model = sharded(mesh=init_device_mesh("cpu", (2, 2)), placements="hsdp")
    model(batch(0)).backward()
    for param in model.parameters():
        param.grad = None
    model(batch(1)).backward()
    model(batch(2)).backward()  # another iteration without a step: sums go on
    return whole_grads(model)


def test_cleared_sums_of_an_iteration_that_is_over() -> None:
    check(4, cleared_after_the_end, (1, 2))


# ---- Gradients by hand. ----


class Halves(nn.Module):
    """Two layers, each used on its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, index: int) -> Tensor:
        return self.layers[index](x).square().sum()


def by_hand_and_unreached() -> None:
    model: Any = fully_shard(Halves())
    wholes: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda layer, _: wholes.extend(layer.parameters()))
    with model.no_sync():
        model(batch(0), 0).backward()
    wholes[0].grad, wholes[1].grad = torch.ones(4, 4), torch.ones(4)
    with pytest.raises(RuntimeError, match=r"a gradient of parameter 'layers.0.\w+' was put into .grad by hand"):
        model(batch(1), 1).backward()
    assert wholes[0].grad is None and wholes[1].grad is None
    model.zero_grad()
    model(batch(2), 0).backward()
    twin = Halves()
    for rank in range(2):
        (twin(batch(2, rank), 0) / 2).backward()
    for found, param in zip(whole_grads(model), twin.parameters(), strict=True):
        torch.testing.assert_close(found, torch.zeros_like(param) if param.grad is None else param.grad)


def test_a_gradient_by_hand_that_no_backward_takes_is_refused_when_the_last_backward_ends() -> None:
    """A loop without ``finish_grad_sync`` would step without it."""
    simulate(by_hand_and_unreached, 2)


def test_a_gradient_by_hand_goes_with_its_iteration_if_that_fails() -> None:
    model: Any = sharded()
    wholes: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda layer, _: wholes.append(layer.weight))
    loss = model(batch(0, 0), fails=True)
    wholes[0].grad = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="in the middle"):
        loss.backward()
    model.zero_grad()
    model(batch(1, 0)).backward()
    for param, wanted in zip(model.parameters(), expected(1, 1), strict=True):
        torch.testing.assert_close(param.grad.to_local(), wanted)


# ---- Forwards that train nothing, on one rank alone. ----


@pytest.mark.parametrize("how", ["frozen", "eval"])
@pytest.mark.sampled(2)
def test_ranks_may_differ_in_forwards_that_no_backward_is_to_follow(how: str) -> None:
    """Whole parameters are at rest, so that such a forward is no collective; its graph is for a gradient of inputs."""

    def looks(model: Any) -> None:
        if how == "frozen":
            model.requires_grad_(False)
        else:
            model.eval()
        assert model(batch(9).requires_grad_()).grad_fn is not None
        model.requires_grad_(True).train()

    def program() -> list[Tensor]:
        model = sharded(placements="zero1")
        model(batch(0)).backward()
        if dist.get_rank() == 0:
            for _ in range(2):
                looks(model)
        model(batch(1)).backward()
        return whole_grads(model)

    check(2, program, (0, 1))


# ---- Backwards that fail. ----


def after_a_failure(kept: bool, cleared: bool) -> list[Tensor]:
    """As in plain autograd, ``.grad`` has what backward has reached. Gradients that are not reduced are lost."""
    model = sharded()
    if kept:
        model(batch(0)).backward()
    first = list(model.layers[0].parameters())
    before = [None if param.grad is None else param.grad.clone() for param in first]
    with pytest.raises(RuntimeError, match="in the middle"):
        model(batch(1), fails=True).backward()
    with torch.no_grad():
        model(batch(2))  # the next forward has forgotten what failed
    for param, then in zip(first, before, strict=True):
        assert param.grad is None if then is None else torch.equal(param.grad.to_local(), then.to_local())
    if cleared:
        model.zero_grad()
    model(batch(3)).backward()
    return whole_grads(model)[: None if cleared else len(first)]


@pytest.mark.parametrize("cleared", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_grad_after_a_backward_that_failed(kept: bool, cleared: bool) -> None:
    indices = (0, 3) if kept and not cleared else (3,)
    wanted = expected(2, *indices)
    for grads in simulate(after_a_failure, 2, kept, cleared):
        for found, each in zip(grads, wanted, strict=False):
            torch.testing.assert_close(found, each)


def after_a_refused_end(cleared: bool) -> list[Tensor]:
    """``.grad`` was changed between microbatches, and the end of the iteration has refused to add to it."""
    model = sharded(reduce_every_microbatch=False)
    model(batch(0)).backward()
    with model.no_sync():
        model(batch(1)).backward()
    for param in model.parameters():
        param.grad = param.grad * 2
    with pytest.raises(RuntimeError, match="was changed in the middle of an iteration"):
        model.finish_grad_sync()
    with pytest.raises(RuntimeError, match="gradients are not complete"):
        model.finish_grad_sync()
    if cleared:
        model.zero_grad()
    model(batch(3)).backward()
    return whole_grads(model)


def test_after_a_backward_that_failed_inside_a_unit_the_model_has_its_shards() -> None:
    def fail() -> None:
        model: Any = fully_shard(Net())
        before = dict(model.named_parameters())
        with pytest.raises(RuntimeError, match="in the middle"):
            model(batch(0), fails=True).backward()
        for name, param in model.named_parameters():
            assert param is before[name]
        assert all(value.full_tensor().isfinite().all() for value in model.state_dict().values())
        model(batch(1))  # gives the iteration up
        model.finish_grad_sync()
        assert all(param.grad is None for param in model.parameters())

    simulate(fail, 2)


def test_after_a_backward_that_failed_a_microbatch_of_bf16_shows_zeros_again() -> None:
    """The first microbatch has left placeholders in ``.grad``, which nobody cleared; the sums' memory is new."""
    model: Any = fully_shard(Net().bfloat16(), reduce_every_microbatch=False)
    x = batch(0, 0).bfloat16()
    with stale_empty():
        for fails in (False, True, False):
            with model.no_sync(), pytest.raises(RuntimeError, match="in the middle") if fails else nullcontext():
                model(x, fails).backward()
        assert not any(param.grad.to_local().any() for param in model.parameters())
        model(x).backward()
    twin = Net().bfloat16()
    (twin(x) * 2).backward()
    for param, plain in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad.to_local(), plain.grad, rtol=0.02, atol=1e-3)


def test_bf16_grad_after_a_backward_that_failed_behind_the_model() -> None:
    """Its reduction had come: as fp32 ``.grad`` does, the copy shows it from the next forward on."""
    model: Any = fully_shard(nn.Linear(4, 4, dtype=torch.bfloat16))
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with stale_empty():
        with pytest.raises(RuntimeError, match="in the middle"):
            model(Fails.apply(x.clone().requires_grad_())).sum().backward()
        model(x)
    assert torch.equal(model.bias.grad.to_local(), torch.full((4,), 2.0, dtype=torch.bfloat16))


def test_bf16_grad_of_a_unit_that_no_backward_reaches_is_zeros() -> None:
    """``.grad`` is a copy of the sums, in memory that had other contents."""
    model: Any = Halves().bfloat16()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    with stale_empty():
        model(torch.ones(2, 4, dtype=torch.bfloat16), 0).backward()
    assert model.layers[0].weight.grad.to_local().any()
    for param in model.layers[1].parameters():
        assert torch.equal(param.grad.to_local(), torch.zeros_like(param.grad.to_local()))


class FailsInside(nn.Linear):
    """Its backward fails in the middle, once."""

    fails = True

    def forward(self, x: Tensor) -> Tensor:
        x, self.fails = Fails.apply(x) if self.fails else x, False
        return super().forward(x)


class Branches(nn.Module):
    """Two units, of which a forward runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([Net(), Net()])

    def forward(self, x: Tensor, which: int, fails: bool = False) -> Tensor:
        return self.nets[which](x, fails)  # type: ignore[no-any-return]


@pytest.mark.parametrize("inside", [False, True])
def test_a_failed_backward_whose_end_is_told_late(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs an engine's thread may delete the callback behind the error: the next forward may run other units."""
    monkeypatch.delattr(BackwardEnd, "__del__")

    def fail() -> None:
        model: Any = Branches()
        if inside:  # a unit, in which backward fails, inside another one
            model.nets[0].layers[1] = fully_shard(FailsInside(4, 4))
        for net in model.nets:
            fully_shard(net)
        fully_shard(model)
        before = dict(model.named_parameters())
        with pytest.raises(RuntimeError, match="in the middle"):
            model(batch(0), 0, fails=not inside).backward()
        model(batch(1), 1).backward()
        for name, param in model.named_parameters():
            assert param is before[name]
        assert all(value.full_tensor().isfinite().all() for value in model.state_dict().values())

    simulate(fail, 2)


def ended_after_a_failure(inside: bool) -> list[Tensor]:
    model = fully_shard(Net(), reduce_every_microbatch=False) if inside else sharded(reduce_every_microbatch=False)
    with model.no_sync():
        model(batch(0)).backward()
    with pytest.raises(RuntimeError, match="in the middle"):
        model(batch(1), fails=True).backward()
    refused = rf"after a backward that raised an exception{' in the outermost unit' if inside else ''}: gradients"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=refused):
            model.finish_grad_sync()
    model.zero_grad()
    model(batch(2)).backward()
    return whole_grads(model)


@pytest.mark.parametrize("inside", [False, True])
def test_an_iteration_is_not_ended_after_a_backward_that_failed(inside: bool) -> None:
    """Inside of a unit, or between two of them."""
    check(2, ended_after_a_failure, (2,), inside)


@pytest.mark.parametrize("cleared", [False, True])
def test_an_iteration_after_one_whose_end_was_refused(cleared: bool) -> None:
    """Gradients that were not reduced are lost; what is in ``.grad`` stays."""
    before, after = expected(2, 0), expected(2, 3)
    for grads in simulate(after_a_refused_end, 2, cleared):
        for found, old, new in zip(grads, before, after, strict=True):
            torch.testing.assert_close(found, new if cleared else 2 * old + new)


class FlagAndFail(torch.autograd.Function):
    """A foreign fused layer whose backward fails after it has set the flag that ``main_grad`` is written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        ctx.weight.get_main_grad()
        ctx.weight.grad_added_to_main_grad = True
        raise RuntimeError("in a foreign layer")


class Foreign(nn.Linear):
    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        if fails:
            return FlagAndFail.apply(x, self.weight).sum()
        return F.linear(x, self.weight, self.bias).square().sum()


def foreign_failure() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    twin = Foreign(4, 4)
    torch.manual_seed(0)
    model: Any = fully_shard(Foreign(4, 4), mesh=None)
    with pytest.raises(RuntimeError, match="in a foreign layer"):
        model(batch(0), fails=True).backward()
    model(batch(1)).backward()
    for rank in range(2):
        (twin(batch(1, rank)) / 2).backward()
    assert twin.weight.grad is not None
    return whole_grads(model)[0], twin.weight.grad


def test_a_plain_use_after_a_foreign_backward_that_failed() -> None:
    """The flag of the failed backward is not taken for the flag of the next backward."""
    for found, wanted in simulate(foreign_failure, 2):
        torch.testing.assert_close(found, wanted)


def test_a_move_that_the_table_of_states_lacks() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 3)))
    model(torch.ones(2, 3))
    reference = model.units[0].buckets[0].round
    assert reference is not None
    grads = reference()
    with pytest.raises(RuntimeError, match="gradients of the outermost unit cannot go from idle to sent"):
        grads.move(State.SENT)
    model(torch.ones(2, 3)).sum().backward()
    assert grads.state is State.IDLE
