"""A model that is frozen, loaded, copied, moved or pickled after it was wrapped: right, or refused by name."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from loops import (
    FEATURES,
    assert_same,
    ddp_backward,
    loss_of,
    main_grads,
    make_batches,
    make_model,
    plain_backward,
    plain_grads,
    plain_twin,
    weights,
    wrap,
)
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.buckets.checks import check_same
from maingrad.launch import simulate
from maingrad.te_integration import Linear

# ---- requires_grad_. ----


def test_freezing_after_wrapping_is_refused_at_the_next_forward() -> None:
    ddp = wrap(make_model())
    ddp_backward(ddp, make_batches(1))
    ddp.module[0].weight.requires_grad_(False)
    ddp.zero_grad_buffer()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter '0.weight' was frozen .* freeze before wrapping, or unwrap"):
            ddp(make_batches(1)[0])
    ddp.module[0].weight.requires_grad_(True)
    ddp(make_batches(1)[0])


@pytest.mark.parametrize("options", [{}, {"overlap_grad_reduce": True, "find_unused_parameters": True}])
@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.sampled(6)
def test_a_model_that_is_frozen_meanwhile_is_gone_through(when: str, options: dict[str, bool]) -> None:
    """A generator's step through its discriminator: backward goes through, and adds nothing to the wrapped model."""
    ddp = wrap(make_model(), **options)
    plain = plain_twin(ddp)
    one, two = make_batches(2)

    def go_through() -> torch.Tensor:
        x = make_batches(1, seed=5)[0].requires_grad_()
        ddp.requires_grad_(False)
        loss_of(ddp, x).backward()
        ddp.requires_grad_(True)
        return x.grad

    through = go_through() if when == "before" else None
    with ddp.no_sync():
        (loss_of(ddp, one) / 2).backward()
    through = go_through() if when == "between" else through
    loss = loss_of(ddp, two) / 2
    through = go_through() if when == "after" else through
    loss.backward()
    ddp.finish_grad_sync()
    plain_backward(plain, [one, two])
    assert_same(main_grads(ddp), plain_grads(plain))
    x = make_batches(1, seed=5)[0].requires_grad_()
    loss_of(plain, x).backward()
    assert torch.equal(through, x.grad)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_that_is_frozen_between_microbatches_keeps_what_it_has(overlap: bool) -> None:
    """As in plain PyTorch, to the end of the iteration."""
    ddp = wrap(make_model(), overlap_grad_reduce=overlap)
    plain = plain_twin(ddp)
    first, second = make_batches(2)
    with ddp.no_sync():
        loss_of(ddp, first).backward()
    loss_of(plain, first).backward()
    for net in (ddp.module, plain):
        net[0].weight.requires_grad_(False)
    for net in (ddp, plain):
        loss_of(net, second).backward()
    assert torch.equal(ddp.module[0].weight.grad, plain[0].weight.grad)
    ddp.finish_grad_sync()
    assert_same(main_grads(ddp), plain_grads(plain))


def test_a_model_that_stays_frozen_is_not_reduced() -> None:
    """Its optimizer would move it by momentum and decay, with gradients of zero."""
    ddp = wrap(make_model())
    ddp.requires_grad_(False)
    ddp(make_batches(1)[0])
    with pytest.raises(RuntimeError, match=r"parameter '3.weight' was frozen .* unfreeze them before the step"):
        ddp.finish_grad_sync()
    ddp.requires_grad_(True)
    ddp.zero_grad_buffer()
    ddp_backward(ddp, make_batches(1))


@pytest.mark.parametrize("whole", [False, True])
def test_a_frozen_parameter_without_a_gradient_is_found_behind_one_that_has_its_own(whole: bool) -> None:
    ddp = wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with ddp.no_sync():
        ddp.module[1](torch.ones(1, 2)).sum().backward()
    (ddp.module if whole else ddp.module[0]).requires_grad_(False)
    with ddp.no_sync():
        ddp(torch.ones(1, 2))  # another look at the model
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter '0\.bias' was frozen"):
            ddp.finish_grad_sync()


def test_unfreezing_after_wrapping_is_refused_at_the_next_forward() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    ddp = wrap(model)
    ddp(make_batches(1)[0])
    ddp_backward(ddp, make_batches(1))
    ddp.zero_grad_buffer()
    model[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter '0.weight' .* frozen .* wrapped: it has no main_grad"):
        ddp(make_batches(1)[0])


def test_a_module_added_after_wrapping_is_refused_at_the_next_forward() -> None:
    ddp = wrap(make_model())
    ddp.module.append(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"parameter '4.weight' .* not there when the model was wrapped"):
        ddp(make_batches(1)[0])


def test_a_parameter_added_to_the_last_layer_of_a_model_that_has_trained_is_refused() -> None:
    """Everything that was there is what it was."""
    ddp = wrap(make_model())
    ddp_backward(ddp, make_batches(1))
    ddp.zero_grad_buffer()
    ddp.module[3].more = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"parameter '3.more' .* not there when the model was wrapped"):
        ddp(make_batches(1)[0])


def test_a_parameter_of_a_scripted_module_that_is_replaced_is_refused() -> None:
    """TorchScript makes the tables of its modules anew with each read."""
    ddp = wrap(nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2)))
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
        ddp.zero_grad()
    ddp.module[0].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"parameter '0.weight' was replaced after wrapping"):
        ddp(torch.ones(1, 2))


def test_a_parameter_added_to_a_model_with_a_layer_frozen_meanwhile_is_refused() -> None:
    """What was frozen has a gradient already, and keeps it."""
    ddp = wrap(make_model())
    batch = make_batches(1)[0]
    with ddp.no_sync():
        loss_of(ddp, batch).backward()
    ddp.module[0].weight.requires_grad_(False)
    ddp(batch)
    ddp.module.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"parameter 'scale' requires a gradient, .* not there"):
        ddp(batch)


def test_frozen_parameters_stay_plain_and_their_biases_train() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    plain = plain_twin(model)
    ddp = wrap(model, overlap_grad_reduce=True)
    batches = make_batches(3)
    ddp_backward(ddp, batches)
    plain_backward(plain, batches)
    trained = {name: parameter.main_grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert_same(trained, {name: p.grad for name, p in plain.named_parameters() if p.requires_grad})
    assert sorted(trained) == ["0.bias", "3.weight"]
    assert not hasattr(model[0].weight, "main_grad")


# ---- load_state_dict. ----


def load_at_the_wrapper(ddp: DistributedDataParallel, donor: nn.Module) -> set[str]:
    ddp.load_state_dict({f"module.{name}": tensor for name, tensor in donor.state_dict().items()})
    return {"0.weight", "0.bias", "2.weight", "2.bias", "3.weight"}


def load_at_the_model(ddp: DistributedDataParallel, donor: nn.Module) -> set[str]:
    ddp.module.load_state_dict(donor.state_dict())
    return {"0.weight", "0.bias", "2.weight", "2.bias", "3.weight"}


def load_at_a_layer(ddp: DistributedDataParallel, donor: nn.Module) -> set[str]:
    ddp.module[0].load_state_dict(donor[0].state_dict())
    return {"0.weight", "0.bias"}


def copy_one_parameter(ddp: DistributedDataParallel, donor: nn.Module) -> set[str]:
    with torch.no_grad():
        ddp.module[2].weight.copy_(donor[2].weight + 3)
    return {"2.weight"}


@pytest.mark.parametrize("load", [load_at_the_wrapper, load_at_the_model, load_at_a_layer, copy_one_parameter])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.sampled(8)
def test_loading_refreshes_the_masters(
    load: Callable[[DistributedDataParallel, nn.Module], set[str]], dtype: torch.dtype
) -> None:
    """Load, step with lr 0, weights unchanged; and what was not loaded keeps its master."""
    ddp = wrap(make_model(dtype))
    optimizer = DistributedOptimizer(ddp, lr=0.01, weight_decay=0.1)
    ddp_backward(ddp, make_batches(2, dtype))
    optimizer.step()
    ddp.zero_grad_buffer()
    before, masters = weights(ddp), copy.deepcopy(optimizer.state_dict()["masters"])
    loaded = load(ddp, make_model(dtype, seed=7))
    expected = weights(ddp)
    assert {name for name in expected if not torch.equal(expected[name], before[name])} <= loaded

    optimizer.param_groups[0]["lr"] = 0.0
    ddp_backward(ddp, make_batches(2, dtype))
    optimizer.step()
    assert_same(weights(ddp), expected)
    if dtype is torch.bfloat16:
        changed = torch.cat([m != n for m, n in zip(masters, optimizer.state_dict()["masters"], strict=True)]).sum()
        assert 0 < changed <= sum(expected[name].numel() for name in loaded)


def test_loading_the_model_after_its_optimizer_loses_no_bits_of_the_masters() -> None:
    ddp = wrap(make_model(torch.bfloat16))
    optimizer = DistributedOptimizer(ddp, lr=1e-4)
    for step in range(3):
        ddp_backward(ddp, make_batches(2, torch.bfloat16, seed=step))
        optimizer.step()
        ddp.zero_grad_buffer()
    saved = copy.deepcopy((optimizer.state_dict(), ddp.state_dict()))
    assert any(not torch.equal(m, m.bfloat16().float()) for m in saved[0]["masters"]), "the masters hold more than bf16"

    other = wrap(make_model(torch.bfloat16, seed=3))
    resumed = DistributedOptimizer(other, lr=1e-4)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for trained, stepped in ((ddp, optimizer), (other, resumed)):
        ddp_backward(trained, make_batches(2, torch.bfloat16, seed=9))
        stepped.step()
    assert all(map(torch.equal, optimizer.state_dict()["masters"], resumed.state_dict()["masters"]))


def test_loading_with_assign_is_refused_at_the_next_forward() -> None:
    ddp = wrap(make_model())
    ddp.module.load_state_dict(make_model(seed=7).state_dict(), assign=True)
    with pytest.raises(RuntimeError, match=r"parameter '\d.\w+' was replaced after wrapping \(load_state_dict\(assign"):
        ddp(make_batches(1)[0])


def test_a_state_dict_has_the_models_own_keys_behind_one_prefix_and_no_wiring() -> None:
    model = make_model()
    keys = [f"module.{name}" for name in model.state_dict()]
    ddp = wrap(model)
    assert list(ddp.state_dict()) == keys
    buffer = io.BytesIO()
    torch.save(ddp.state_dict(), buffer)
    buffer.seek(0)
    assert_same(torch.load(buffer), ddp.state_dict())


# ---- Copies. ----


@pytest.mark.parametrize("which", ["wrapper", "module"])
@pytest.mark.parametrize("optimizer", [False, True])
def test_deepcopy_gives_a_plain_model(which: str, optimizer: bool) -> None:
    ddp = wrap(make_model(torch.bfloat16, fuse=False), overlap_grad_reduce=True)
    if optimizer:
        DistributedOptimizer(ddp)
    batches = make_batches(2, torch.bfloat16)
    ddp_backward(ddp, batches)
    ddp.expose_grads(torch.float32)
    copied = copy.deepcopy(ddp if which == "wrapper" else ddp.module)
    assert type(copied) is nn.Sequential
    for parameter in copied.parameters():
        assert not {"main_grad", "grad_added_to_main_grad"} & set(parameter.__dict__)
        assert not parameter._post_accumulate_grad_hooks
        parameter.grad = None
    before = main_grads(ddp)
    plain_backward(copied, batches)
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert_same(main_grads(ddp), before)
    torch.optim.AdamW(copied.parameters(), lr=0.1).step()
    assert any(not torch.equal(a, b) for a, b in zip(copied.parameters(), ddp.parameters(), strict=True))


def test_a_copy_of_fused_layers_asks_for_a_wrapper_of_its_own() -> None:
    ddp = wrap(make_model())
    copied = copy.deepcopy(ddp)
    with torch.no_grad():
        assert torch.equal(copied(make_batches(1)[0]), ddp(make_batches(1)[0]))
    with pytest.raises(
        RuntimeError, match=r"Linear\(in_features=16, out_features=4\).*wrap the model in .*Distributed"
    ):
        loss_of(copied, make_batches(1)[0]).backward()
    again = wrap(copied)
    again.zero_grad()
    ddp_backward(again, make_batches(2))
    ddp_backward(ddp, make_batches(2))
    assert_same(main_grads(again), main_grads(ddp))


@pytest.mark.parametrize("pick", [lambda ddp: ddp, lambda ddp: ddp.module, lambda ddp: ddp.module[0].weight])
def test_pickling_is_refused_by_name(pick: Callable[[DistributedDataParallel], object]) -> None:
    ddp = wrap(make_model())
    for dump in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(
            TypeError, match=r"parameter '0.weight' is wired to gradient buckets .* save state_dict\(\)"
        ):
            dump(pick(ddp))


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_of_the_optimizer_are_refused(copier: Callable[[object], object]) -> None:
    optimizer = DistributedOptimizer(wrap(make_model()))
    with pytest.raises(TypeError, match=r"DistributedOptimizer is tied to its model's buckets.*use state_dict\(\)"):
        copier(optimizer)


def test_deleting_the_wrapper_gives_the_parameters_back() -> None:
    model = make_model(torch.bfloat16, fuse=False)
    plain = plain_twin(model)
    ddp = wrap(model)
    batches = make_batches(2, torch.bfloat16)
    ddp_backward(ddp, batches)
    ddp.expose_grads(torch.float32)
    del ddp
    for parameter in model.parameters():
        assert not parameter.__dict__
        assert parameter.grad is None
        assert parameter.grad_dtype is torch.bfloat16
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        plain_backward(each, batches)
        optimizer.step()
    assert_same(plain_grads(model), plain_grads(plain))
    assert_same(weights(model), weights(plain))


def test_a_tied_weight_is_given_back_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    ddp = wrap(model)
    assert model[0].weight.__dict__
    ddp.unwrap()
    assert not model[0].weight.__dict__


def test_a_model_can_be_wrapped_again_once_its_wrapper_is_gone() -> None:
    model = make_model()
    plain = plain_twin(model)
    ddp = wrap(model)
    ddp_backward(ddp, make_batches(1, seed=4))
    del ddp
    again = wrap(model, overlap_grad_reduce=True, bucket_size=1)
    ddp_backward(again, make_batches(2))
    plain_backward(plain, make_batches(2))
    assert_same(main_grads(again), plain_grads(plain))


# ---- Moved, cast, given other storage. ----


def cast_the_model(model: nn.Module) -> None:
    model.to(torch.float16)


def cast_one_layer(model: nn.Module) -> None:
    model[3].half()


def cast_through_data(model: nn.Module) -> None:
    model[3].weight.data = model[3].weight.data.half()


def move_the_model(model: nn.Module) -> None:
    model.to("meta")


def take_a_parameter_away(model: nn.Module) -> None:
    model[3].weight = None


def replace_a_parameter(model: nn.Module) -> None:
    model[3].weight = nn.Parameter(model[3].weight.detach().clone())


@pytest.mark.parametrize(
    "move",
    [cast_the_model, cast_one_layer, cast_through_data, move_the_model, take_a_parameter_away, replace_a_parameter],
)
def test_a_parameter_that_changed_its_place_or_dtype_is_refused_at_the_next_forward(
    move: Callable[[nn.Module], None],
) -> None:
    ddp = wrap(make_model())
    ddp_backward(ddp, make_batches(2))
    ddp.zero_grad_buffer()
    move(ddp.module)
    with pytest.raises(
        RuntimeError, match=r"parameter '\d.\w+' (is torch.* call .to\(\) before|was replaced|requires)"
    ):
        ddp(make_batches(1)[0])
    with pytest.raises(RuntimeError, match=r"parameter '\d.\w+' (is torch.* call .to\(\) before|was replaced)"):
        DistributedOptimizer(ddp, lr=0.1)


def test_a_parameter_that_was_moved_is_refused_by_its_devices() -> None:
    entry = wrap(make_model()).bucket_params[0]
    check_same(entry)
    with pytest.raises(RuntimeError, match=r"is torch.float32 on cpu, and was torch.float32 on meta when"):
        check_same(entry._replace(device=torch.device("meta")))


def test_other_storage_of_the_same_kind_is_right_without_our_optimizer_and_refused_with_it() -> None:
    model = make_model()
    plain = plain_twin(model)
    ddp = wrap(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    ddp_backward(ddp, make_batches(2))
    plain_backward(plain, make_batches(2))
    assert_same(main_grads(ddp), plain_grads(plain))

    optimizer = DistributedOptimizer(ddp)
    model[2].weight.data = model[2].weight.data.clone()
    with pytest.raises(RuntimeError, match=r"parameter '2.weight' was given other storage .* before wrapping"):
        optimizer.step()


def test_a_second_optimizer_takes_the_parameters_over_and_the_first_one_says_so() -> None:
    ddp = wrap(make_model())
    first = DistributedOptimizer(ddp)
    DistributedOptimizer(ddp)
    ddp_backward(ddp, make_batches(1))
    with pytest.raises(RuntimeError, match=r"this DistributedOptimizer was replaced: another one was built over its"):
        first.step()


def test_a_replaced_main_grad_is_refused_by_the_layer_that_would_write_it() -> None:
    ddp = wrap(nn.Sequential(Linear(FEATURES, 3, fuse_wgrad_accumulation=True)))
    ddp.module[0].weight.main_grad = torch.zeros(3, FEATURES)
    with pytest.raises(RuntimeError, match=r"weight.main_grad was replaced after wrapping.*parameter '0.weight'"):
        ddp(make_batches(1)[0]).sum().backward()


def test_functional_call_goes_over_the_wrapped_module() -> None:
    """``torch.func.functional_call`` replaces parameters, which the wrapper refuses and says where to call it."""
    ddp, (x,) = wrap(make_model()), make_batches(1)
    given = {name: torch.randn_like(param, requires_grad=True) for name, param in ddp.module.named_parameters()}
    through = {f"module.{name}": param for name, param in given.items()}
    with pytest.raises(
        RuntimeError, match=r"was replaced after wrapping .*functional_call, call it on wrapper\.module"
    ):
        torch.func.functional_call(ddp, through, (x,))
    grads = torch.autograd.grad(torch.func.functional_call(ddp.module, given, (x,)).sum(), list(given.values()))
    plain = make_model()
    plain.load_state_dict(given)
    expected = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
    for grad, wanted in zip(grads, expected, strict=True):
        assert torch.equal(grad, wanted)


def test_ranks_begin_with_the_first_ranks_values_of_strided_parameters_too() -> None:
    """NCCL sends contiguous memory: a copy is sent, and what arrives goes back to the parameter."""

    def on_rank() -> Tensor:
        torch.manual_seed(dist.get_rank())
        model = nn.Linear(3, 5)
        model.weight = nn.Parameter(torch.randn(3, 5).t())
        DistributedDataParallel(model)
        return model.weight.detach().clone()

    first, second = simulate(on_rank, 2)
    assert torch.equal(first, second) and first.stride() == (1, 5)


def test_scaling_beside_a_reduction_is_refused() -> None:
    def on_rank() -> None:
        ddp = DistributedDataParallel(nn.Linear(3, 5), DistributedDataParallelConfig(overlap_grad_reduce=True))
        with ddp.no_sync():
            ddp(torch.ones(2, 3)).sum().backward()
        ddp.start_grad_sync()
        with pytest.raises(RuntimeError, match=r"scale_gradients\(\) while bucket .* is being reduced"):
            ddp.scale_gradients(0.5)
        ddp.finish_grad_sync()
        ddp.scale_gradients(0.5)
        assert ddp.module.bias.grad.tolist() == [1.0] * 5

    simulate(on_rank, 2)
