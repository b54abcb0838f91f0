"""torch's clipping reads ``.grad``, which finishes the reduction: values and norms are plain PyTorch's."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import (
    assert_same,
    ddp_backward,
    loss_of,
    make_batches,
    make_model,
    plain_backward,
    plain_grads,
    plain_twin,
    weights,
    wrap,
)
from torch import Tensor, nn

# As most programs have it: by name, before the library is there.
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    clip_grad_norm,
)
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import Linear

Clip = Callable[[Iterable[Tensor]], object]

CLIPS: dict[str, Clip] = {
    "clip_grad_norm_": lambda params: clip_grad_norm_(params, 1e-3),
    "by keyword": lambda params: clip_grad_norm_(parameters=params, max_norm=1e-3, foreach=False),
    "clip_grad_value_": lambda params: clip_grad_value_(params, 1e-3),
    "clip_grads_with_norm_": lambda params: clip_grads_with_norm_(params, 1e-3, torch.tensor(7.0)),
    "by its module": lambda params: torch.nn.utils.clip_grad_norm_(params, 1e-3),
    "by its file": lambda params: torch.nn.utils.clip_grad.clip_grad_norm_(params, 1e-3),
}


def total_norm_first(params: Iterable[Tensor]) -> None:
    params = list(params)
    clip_grads_with_norm_(params, 1e-3, get_total_norm([param.grad for param in params if param.grad is not None]))


@pytest.mark.parametrize("clip", [*CLIPS.values(), total_norm_first], ids=[*CLIPS, "by its two halves"])
@pytest.mark.parametrize("config", [{}, {"use_distributed_optimizer": True}, {"overlap_grad_reduce": True}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.sampled(21)
def test_every_clip_is_plain_pytorchs(ranks: int, config: dict[str, Any], clip: Clip) -> None:
    """Of all parameters, of one alone, and of some among another model's."""
    batches = make_batches(2 * ranks, torch.float64)
    choices: list[Callable[[nn.Sequential, nn.Module], Iterable[Tensor]]] = [
        lambda model, other: model.parameters(),
        lambda model, other: [model[3].weight],
        lambda model, other: [*other.parameters(), model[3].weight, model[0].bias],
    ]

    def clipped(model: nn.Sequential, choose: Callable[[nn.Sequential, nn.Module], Iterable[Tensor]]) -> list[Tensor]:
        torch.manual_seed(2)
        other = nn.Linear(2, 2).double()
        other(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        clip(choose(model, other))
        both = [*model.parameters(), *other.parameters()]
        return [param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad for param in both]

    def run(choose: Any) -> list[Tensor]:
        model = make_model(torch.float64)
        ddp = wrap(model, **config)
        plain_backward(ddp, batches[dist.get_rank() :: ranks])
        return clipped(model, choose)

    for choose in choices:
        plain = make_model(torch.float64, fuse=False)
        plain_backward(plain, batches)
        expected = clipped(plain, choose)
        for found in simulate(run, ranks, choose):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-14)


def test_delayed_gradients_that_are_pending_are_computed_first() -> None:
    layer = Linear(8, 4, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    ddp = wrap(layer)
    ddp(make_batches(1)[0]).sum().backward()
    plain = nn.Linear(8, 4, bias=False)
    plain.load_state_dict(layer.state_dict())
    plain(make_batches(1)[0]).sum().backward()
    assert plain.weight.grad is not None
    torch.testing.assert_close(clip_grad_norm_(ddp.parameters(), 1.0), plain.weight.grad.norm())
    stepped = Linear(8, 4, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    stepped.load_state_dict(plain.state_dict())
    ddp = wrap(stepped)
    optimizer = DistributedOptimizer(ddp, lr=1.0, optimizer_class=torch.optim.SGD)
    ddp(make_batches(1)[0]).sum().backward()
    optimizer.step()
    torch.testing.assert_close(stepped.weight.detach(), plain.weight.detach() - plain.weight.grad)


def test_our_own_ways_to_clip_are_torchs() -> None:
    batches = make_batches(2)
    plain = make_model(fuse=False)
    plain_backward(plain, batches)
    norm = clip_grad_norm_(plain.parameters(), 0.5)

    ddp = wrap(make_model())
    ddp_backward(ddp, batches)
    ddp.expose_grads()
    assert torch.equal(clip_grad_norm_(ddp.parameters(), 0.5), norm)
    assert_same(plain_grads(ddp.module), plain_grads(plain))

    for config in ({}, {"use_distributed_optimizer": True}):
        ddp = wrap(make_model(), **config)
        ddp_backward(ddp, batches)
        torch.testing.assert_close(clip_grad_norm(ddp, 0.5), norm)
        for grad in ddp.reduced_grads():
            grad.clamp_(-1e-3, 1e-3)
        clip_grad_value_(plain.parameters(), 1e-3)
        for name, param in ddp.module.named_parameters():
            torch.testing.assert_close(param.main_grad, plain.get_parameter(name).grad)

    ddp = wrap(make_model(), use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(ddp, max_grad_norm=0.5)
    ddp_backward(ddp, batches)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, norm)


@pytest.mark.parametrize("name", CLIPS)
def test_where_there_is_no_gradient_nothing_is_refused(name: str) -> None:
    """torch clips nothing then, and there is nothing to clip."""
    ddp = wrap(make_model())
    if name != "clip_grad_value_":  # torch's own error
        CLIPS[name](ddp.parameters())
    ddp_backward(ddp, make_batches(1))
    ddp.zero_grad_buffer()
    if name != "clip_grad_value_":
        CLIPS[name](ddp.parameters())


@pytest.mark.parametrize("name", CLIPS)
def test_other_models_and_those_whose_wrapper_is_gone_are_left_alone(name: str) -> None:
    ours = make_model(fuse=False)
    ddp = wrap(ours)
    ddp_backward(ddp, make_batches(1))
    other, twin = plain_twin(make_model()), plain_twin(make_model())
    for alive in (True, False):
        for model in (other, twin):
            plain_backward(model, make_batches(2))
        CLIPS[name](other.parameters())
        if not alive:
            plain_backward(ours, make_batches(2))
            CLIPS[name](ours.parameters())
            assert_same(plain_grads(ours), plain_grads(other))
        assert not torch.equal(other[0].weight.grad, twin[0].weight.grad)
        other.zero_grad()
        twin.zero_grad()
        if alive:
            del ddp


def test_torch_still_warns_of_an_empty_generator() -> None:
    ddp = wrap(make_model())
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((param for param in ()), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_grad_norm_([], 1.0)
    assert ddp.records


def test_a_compiled_clip_of_another_model_stays_one_graph() -> None:
    ddp = wrap(make_model())
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    twin = nn.Linear(2, 2)
    twin.load_state_dict(other.state_dict())
    twin(torch.ones(1, 2)).sum().backward()

    @torch.compile(backend="eager", fullgraph=True)
    def clip(params: list[Tensor]) -> Tensor:
        return clip_grad_norm_(params, 0.1, foreach=False)

    assert torch.equal(clip(list(other.parameters())), clip_grad_norm_(twin.parameters(), 0.1))
    assert_same(plain_grads(other), plain_grads(twin))
    assert ddp.records


@pytest.mark.xfail(strict=True, reason="the whole parameters have no .grad, and torch's clipping passes over them")
def test_whole_parameters_of_a_sharded_model_are_refused_and_shards_are_not() -> None:
    model: Any = fully_shard(make_model())
    model(make_batches(1)[0]).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    with model.unsharded(), pytest.raises(RuntimeError, match=r"parameter '0.weight' is whole.*outside of"):
        clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.sampled(4)
def test_values_are_clipped_in_this_ranks_parts(sharded: bool, overlap: bool) -> None:
    """The parts are reduced when a program takes them, though nothing has finished the reduction before."""

    def run() -> dict[str, Tensor]:
        ddp = wrap(make_model(), use_distributed_optimizer=sharded, overlap_grad_reduce=overlap)
        optimizer = DistributedOptimizer(ddp, lr=0.1, optimizer_class=torch.optim.SGD)
        loss_of(ddp, make_batches(2)[dist.get_rank()]).backward()
        for grad in ddp.reduced_grads():
            grad.clamp_(-0.01, 0.01)
        optimizer.step()
        optimizer.finish_param_sync()
        return weights(ddp)

    plain = make_model(fuse=False)
    for batch in make_batches(2):
        (loss_of(plain, batch) / 2).backward()
    nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for found in simulate(run, 2):
        for name, weight in weights(plain).items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-8)


def replaced(params: list[Any]) -> None:
    for param in params:
        grad = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
        param.grad = grad * 0.5


def replaced_after_a_read(params: list[Any]) -> None:
    assert all(param.grad.norm() > 0 for param in params)
    replaced(params)


def replaced_before_a_read_of_another(params: list[Any]) -> None:
    params[0].grad = torch.full_like(params[0], 0.25, requires_grad=False)
    assert params[1].grad.norm() > 0


def cancelled(params: list[Any]) -> None:
    params[0].grad = None


@pytest.mark.parametrize("change", [replaced, replaced_after_a_read, replaced_before_a_read_of_another, cancelled])
@pytest.mark.parametrize("sharded", [False, True, None])
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.sampled(24)
def test_what_is_put_into_grad_before_our_clipping_is_clipped(
    scales: bool, sharded: bool | None, change: Callable[[list[Any]], None]
) -> None:
    """``sharded`` None: a stock optimizer."""

    def step(model: Any, optimizer: torch.optim.Optimizer, clip: Callable[[], object]) -> None:
        change(list(model.parameters()))
        clip()
        optimizer.step()
        optimizer.zero_grad()

    def run() -> dict[str, Tensor]:
        ddp = wrap(make_model(), use_distributed_optimizer=bool(sharded))
        optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=1.0)
        if sharded is not None:
            optimizer = DistributedOptimizer(ddp, lr=1.0, optimizer_class=torch.optim.SGD)
        for seed in range(2):
            loss_of(ddp, make_batches(2, seed=seed)[dist.get_rank()]).backward()
            step(ddp, optimizer, partial(ddp.scale_gradients, 0.25) if scales else partial(clip_grad_norm, ddp, 0.05))
        if sharded is not None:
            optimizer.finish_param_sync()
        return weights(ddp)

    plain = make_model(fuse=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    params = list(plain.parameters())
    for seed in range(2):
        plain_backward(plain, make_batches(2, seed=seed))
        scale = partial(lambda: [param.grad.mul_(0.25) for param in params if param.grad is not None])
        step(plain, optimizer, scale if scales else partial(clip_grad_norm_, params, 0.05))
    for found in simulate(run, 2):
        for name, weight in weights(plain).items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def test_norms_are_those_of_the_wrappers_ranks_alone() -> None:
    """Two models train side by side, on two ranks each."""

    def run() -> None:
        pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        ddp = DistributedDataParallel(make_model(), config, process_group=pairs[dist.get_rank() // 2])
        (loss_of(ddp, make_batches(1)[0]) * (1 + dist.get_rank() // 2)).backward()
        for param in ddp.parameters():
            grad: Any = param.grad
            whole = grad.full_tensor()
            torch.testing.assert_close(grad.norm(torch.inf), whole.abs().max())
            torch.testing.assert_close(grad.norm(), whole.norm())

    simulate(run, 4)


def test_what_is_put_into_grad_is_shown_as_a_part_behind_our_clipping() -> None:
    def run() -> None:
        ddp = wrap(make_model(), use_distributed_optimizer=True)
        loss_of(ddp, make_batches(1)[0]).backward()
        params: list[Any] = list(ddp.parameters())
        replaced_after_a_read(params)
        put = [param.grad for param in params]
        assert clip_grad_norm(ddp, 1e9) > 0
        for param, expected in zip(params, put, strict=True):
            assert torch.equal(param.grad.full_tensor(), expected)

    simulate(run, 2)


def scaled_behind_a_read() -> tuple[float, float, float]:
    """``.grad`` of bf16 parameters is a copy of ``main_grad``, which our clipping and scaling change."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4).bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [param.detach().float() for param in model.parameters()]
    model(torch.full((2, 8), 1.0 + dist.get_rank(), dtype=torch.bfloat16)).float().square().sum().backward()
    read = [param.grad for param in model.parameters()]
    norm = torch.nn.utils.get_total_norm(read)  # for a log
    returned = clip_grad_norm(model, 0.5)
    assert returned.item() == pytest.approx(norm.item(), rel=0.02)
    clipped = torch.nn.utils.get_total_norm(read).item()
    model.scale_gradients(2.0)
    scaled = torch.nn.utils.get_total_norm(read).item()
    optimizer.step()
    moved = [old - param.detach().float() for old, param in zip(before, model.parameters(), strict=True)]
    return clipped, scaled, torch.nn.utils.get_total_norm(moved).item()


def test_copies_in_the_parameters_dtype_follow_our_clipping() -> None:
    for clipped, scaled, moved in simulate(scaled_behind_a_read, 2):
        assert clipped == pytest.approx(0.5, rel=0.02)
        assert scaled == pytest.approx(1.0, rel=0.02)
        assert moved == pytest.approx(1.0, rel=0.02)


def test_under_our_optimizer_a_bf16_parameters_gradient_is_read_as_it_is_summed() -> None:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).bfloat16())
    optimizer = DistributedOptimizer(model, lr=1.0, optimizer_class=torch.optim.SGD)
    weight = model.module.weight
    with model.no_sync():
        model(torch.tensor([[256.0]]).bfloat16()).sum().backward()
    model(torch.tensor([[1.0]]).bfloat16()).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 257 / 2) == 257  # 256 in bf16
    assert weight.grad.item() == pytest.approx(257 / 2)
    master = optimizer.param_groups[0]["params"][0]
    before = master[0].item()
    optimizer.step()
    assert master[0].item() == pytest.approx(before - 257 / 2)


def test_our_scaling_of_what_was_read_keeps_the_bits_of_the_sums() -> None:
    """``.grad`` of bf16 parameters is a rounded copy. That we have changed it is no change of the program's."""
    model = DistributedDataParallel(nn.Linear(8, 4).bfloat16())
    torch.manual_seed(0)
    for _ in range(2):
        with model.no_sync():
            model(torch.randn(2, 8).bfloat16()).float().square().sum().backward()
    model(torch.randn(2, 8).bfloat16()).float().square().sum().backward()
    torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])  # for a log
    sums = [grad.clone() for grad in model.reduced_grads()]
    assert any((grad != grad.bfloat16()).any() for grad in sums)
    model.scale_gradients(0.5)
    model.scale_gradients(2.0)
    clip_grad_norm(model, 1e6)
    assert all(map(torch.equal, model.reduced_grads(), sums))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", ["in place", "another tensor"])
@pytest.mark.sampled(4)
def test_behind_our_step_a_copy_shows_what_the_program_has_made_of_the_gradient(
    changed: str, dtype: torch.dtype
) -> None:
    """The copy keeps the dtype in which the program has asked for it, whatever the parameter's is."""
    model = DistributedDataParallel(nn.Linear(8, 4, dtype=dtype))
    optimizer = DistributedOptimizer(model, lr=0.1, optimizer_class=torch.optim.SGD)
    model(torch.ones(2, 8, dtype=dtype)).sum().backward()
    model.expose_grads(torch.bfloat16)
    weight = model.module.weight
    if changed == "in place":
        weight.grad.mul_(3.0)
    else:
        weight.grad = weight.grad * 3.0
    optimizer.step()
    assert weight.grad.dtype is torch.bfloat16
    assert torch.equal(weight.grad, torch.full((4, 8), 6.0).bfloat16())
    assert torch.equal(weight.main_grad, torch.full((4, 8), 6.0))
