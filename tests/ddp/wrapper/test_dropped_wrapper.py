"""A wrapper that was freed reduces nothing: among several ranks, its model refuses to train on."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import assert_same, ddp_backward, main_grads, make_batches, make_model, plain_backward, plain_grads, wrap
from torch import Tensor, nn

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, DistributedOptimizer
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import Linear

REFUSED = r"parameter '(\d\.)?weight' was wrapped in maingrad.ddp.DistributedDataParallel, and the wrapper was let go"


def my_batches(count: int = 1) -> list[Tensor]:
    return make_batches(count, seed=dist.get_rank())


def forgets_the_result(model: nn.Module) -> None:
    DistributedDataParallel(model)


def keeps_it_in_a_function(model: nn.Module) -> None:
    ddp = wrap(model, overlap_grad_reduce=True)
    ddp_backward(ddp, my_batches(2))


def trains_and_lets_go(model: nn.Module) -> None:
    ddp = wrap(model, use_distributed_optimizer=True, overlap_param_gather=True)
    optimizer = DistributedOptimizer(ddp)
    ddp_backward(ddp, my_batches(2))
    optimizer.step()


LETS_GO = [forgets_the_result, keeps_it_in_a_function, trains_and_lets_go]


def test_a_model_with_experts_of_each_rank_refuses_too() -> None:
    """Its other parameters are shared."""

    def on_each_rank() -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        for param in model[1].parameters():
            param.allreduce = False  # type: ignore[attr-defined]
        DistributedDataParallel(model, expert_process_group=WORLD_OF_ONE)
        for part in (model, model[0]):
            with pytest.raises(RuntimeError, match=REFUSED):
                part(torch.ones(1, 8))
        assert [len(layer._forward_pre_hooks) for layer in model] == [1, 1], "one hook, of weight and bias"

    simulate(on_each_rank, 2)


def trains_on(let_go: Callable[[nn.Module], None]) -> None:
    model = make_model(fuse=False)
    let_go(model)
    for part, features in ((model, 8), (model[0], 8), (model[3], 16)):
        with pytest.raises(RuntimeError, match=rf"{REFUSED}.*keep the wrapper.*wrap again.*unwrap\(\)"):
            part(torch.ones(1, features))
        with torch.no_grad():
            part(torch.ones(1, features))
    # Frozen, it is nobody's business; but for a bias that still trains.
    model.requires_grad_(False)
    model[0].bias.requires_grad_()
    with pytest.raises(RuntimeError, match=r"parameter '(\d\.)?bias' was wrapped"):
        model[0](torch.ones(1, 8))
    model[0].bias.requires_grad_(False)
    model(torch.ones(1, 8, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("let_go", LETS_GO)
def test_a_model_whose_wrapper_is_gone_refuses_to_train(let_go: Callable[[nn.Module], None]) -> None:
    simulate(trains_on, 2, let_go)


def test_each_layer_with_a_tied_weight_refuses_to_train() -> None:
    def trains_on_one_of_them() -> None:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
        model[2].weight = model[0].weight
        forgets_the_result(model)
        for layer in (model[0], model[2]):
            with pytest.raises(RuntimeError, match=REFUSED):
                layer(torch.ones(1, 8))

    simulate(trains_on_one_of_them, 2)


@pytest.mark.parametrize("let_go", LETS_GO)
def test_a_world_of_one_goes_on(let_go: Callable[[nn.Module], None]) -> None:
    def alone() -> None:
        model = make_model(fuse=False)
        let_go(model)
        plain_backward(model, my_batches())
        assert all(not module._forward_pre_hooks for module in model.modules())

    simulate(alone, 1)


def goes_on_after_the_group() -> None:
    model = make_model(fuse=False)
    forgets_the_result(model)
    dist.destroy_process_group()
    plain_backward(model, make_batches(1))


def test_after_the_ranks_have_parted_it_trains() -> None:
    simulate(goes_on_after_the_group, 2)


# ---- The way back. ----


def unwrapped(config: dict[str, Any], live: bool) -> None:
    model = make_model(fuse=False)
    before = {id(module): dict(vars(module)) for module in model.modules()}
    ddp = wrap(model, **config)
    if live:
        ddp_backward(ddp, my_batches(2))
        if config.get("overlap_param_gather"):
            DistributedOptimizer(ddp).step()
    assert ddp.unwrap() is model
    for param in model.parameters():
        assert type(param) is nn.Parameter
        assert not param.__dict__
        assert not param._post_accumulate_grad_hooks
        assert param.grad is None
    plain_backward(model, my_batches())  # the wrapper is still there
    with pytest.raises(RuntimeError, match=r"forward after unwrap\(\).*wrap the module again"):
        ddp(my_batches()[0])
    with pytest.raises(RuntimeError, match=r"finish_grad_sync\(\) after unwrap\(\)"):
        ddp.finish_grad_sync()
    with torch.no_grad():
        ddp(my_batches()[0])
    assert ddp.unwrap() is model
    del ddp
    model.zero_grad()
    plain_backward(model, my_batches())
    assert {id(module): vars(module).keys() for module in model.modules()} == {
        key: found.keys() for key, found in before.items()
    }
    assert all(not module._forward_pre_hooks for module in model.modules())
    twin = make_model(fuse=False)
    twin.load_state_dict(model.state_dict())
    plain_backward(twin, my_batches())
    assert_same(plain_grads(model), plain_grads(twin))


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    "config", [{}, {"overlap_grad_reduce": True}, {"use_distributed_optimizer": True, "overlap_param_gather": True}]
)
@pytest.mark.sampled(6)
def test_unwrap_gives_a_plain_module_back(config: dict[str, Any], live: bool) -> None:
    simulate(unwrapped, 2, config, live)


@pytest.mark.parametrize("release_grads", [False, True])
def test_unwrap_leaves_nothing_on_parameters(release_grads: bool) -> None:
    def nothing_is_left() -> None:
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        second.weight = first.weight
        ddp = wrap(nn.Sequential(first, second), use_distributed_optimizer=True, release_grads=release_grads)
        ddp(my_batches()[0]).sum().backward()
        model = ddp.unwrap()
        assert [vars(param) for param in model.parameters()] == [{}] * 3

    simulate(nothing_is_left, 2)


def test_unwrap_leaves_a_gradient_that_the_program_has_put_there() -> None:
    """Before any backward of the iteration: no wrapper has seen it."""
    model = make_model(fuse=False)
    ddp = wrap(model)
    model[0].weight.grad = grad = torch.ones_like(model[0].weight)
    ddp.unwrap()
    assert model[0].weight.grad is grad


def test_unwrap_gives_up_what_is_under_way_but_for_delayed_gradients() -> None:
    def early() -> None:
        kept = []
        for read in (False, True):
            model = make_model(fuse=False)
            ddp = wrap(model, overlap_grad_reduce=True)
            ddp(my_batches()[0]).sum().backward()
            kept.append(model[0].weight.grad)
            if read:
                kept.append(model[0].weight.grad.clone())
            ddp.unwrap()
            assert all(param.grad is None for param in model.parameters())
            plain_backward(model, my_batches())
        with pytest.raises(RuntimeError, match=r"parameter '0\.weight' was kept over its iteration's end"):
            kept[0].norm()
        assert torch.equal(kept[1], kept[2])
        delayed = wrap(Linear(8, 4, fuse_wgrad_accumulation=True, delay_wgrad_compute=True))
        delayed(my_batches()[0]).sum().backward()
        with pytest.raises(RuntimeError, match=r"delayed weight gradients .* are pending"):
            delayed.unwrap()
        delayed.module.backward_dw()
        delayed.unwrap()

    simulate(early, 2)


def test_the_optimizer_of_an_unwrapped_model_refuses() -> None:
    def steps() -> None:
        ddp = wrap(make_model(), use_distributed_optimizer=True)
        optimizer = DistributedOptimizer(ddp)
        ddp_backward(ddp, my_batches())
        ddp.unwrap()
        with pytest.raises(RuntimeError, match=r"step\(\) before a backward: there are no"):
            optimizer.step()

    simulate(steps, 2)


# ---- Wrapped again. ----


def wrap_again(let_go: Callable[[nn.Module], None], part: bool) -> None:
    model = make_model()
    let_go(model)
    target = model[3] if part else model
    ddp = wrap(target)
    assert all(not module._forward_pre_hooks for module in target.modules()), "nothing that a compiler would see"
    features = 16 if part else 8
    ddp(torch.ones(2, features)).sum().backward()
    ddp.finish_grad_sync()
    main_grads(ddp)
    if part:  # the rest of it is still nobody's
        with pytest.raises(RuntimeError, match=REFUSED):
            model(my_batches()[0])
        model[:3].requires_grad_(False)
        with torch.no_grad():
            model(my_batches()[0])


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("let_go", LETS_GO)
def test_wrapping_again_works(let_go: Callable[[nn.Module], None], part: bool) -> None:
    simulate(wrap_again, 2, let_go, part)


def wrapped_another_way(how: str) -> None:
    model = make_model(fuse=False)
    forgets_the_result(model)
    if how == "torch":
        nn.parallel.DistributedDataParallel(model)(my_batches()[0]).sum().backward()
    elif how == "sharded":
        fully_shard(model)(my_batches()[0]).sum().backward()
        assert not any(module._forward_pre_hooks for module in model.modules())
    else:
        from torch.distributed.fsdp import fully_shard as shard_by_torch

        shard_by_torch(model)(my_batches()[0]).sum().backward()


@pytest.mark.parametrize("how", ["torch", "sharded", "sharded by torch"])
def test_another_wrapper_is_as_good(how: str) -> None:
    simulate(wrapped_another_way, 2, how)


def copies() -> None:
    model = make_model(fuse=False)
    forgets_the_result(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        plain_backward(twin, my_batches())
        assert not any(module._forward_pre_hooks for module in twin.modules())
    with pytest.raises(RuntimeError, match=REFUSED):
        model(my_batches()[0])


def test_a_copy_is_a_plain_model() -> None:
    simulate(copies, 2)


def test_a_live_wrapper_puts_nothing_in_the_way() -> None:
    def wrapped() -> None:
        ddp = wrap(make_model())
        ddp_backward(ddp, my_batches())
        assert not any(module._forward_pre_hooks for module in ddp.modules())
        ddp.module(my_batches()[0])

    simulate(wrapped, 2)
