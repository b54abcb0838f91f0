"""The training loop that people already have, with stock optimizers: plain PyTorch's, mostly bitwise."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from loops import (
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
from torch import nn

from maingrad.ddp import clip_grad_norm

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.sampled(6)
def test_stock_optimizers_train_bitwise_as_in_plain_pytorch(
    called: bool,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    num_microbatches: int,
    overlap: bool,
) -> None:
    """``called``: with the calls that nobody needs."""
    model = make_model()
    plain = plain_twin(model)
    ddp = wrap(model, overlap_grad_reduce=overlap, bucket_size=64)
    ours, theirs = make_optimizer(ddp.parameters()), make_optimizer(plain.parameters())
    for step in range(4):
        batches = make_batches(num_microbatches, seed=step)
        if called:
            ddp_backward(ddp, batches)
            ddp.expose_grads()
        else:
            plain_backward(ddp, batches)
        ours.step()
        if called:
            ddp.zero_grad_buffer()
        else:
            ours.zero_grad()

        plain_backward(plain, batches)
        theirs.step()
        theirs.zero_grad()
    if called or not overlap:  # else what was reduced after the first microbatch is added last
        assert_same(weights(ddp), weights(plain))
    else:
        for name, weight in weights(plain).items():
            torch.testing.assert_close(weights(ddp)[name], weight)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["own_dtype", "fp32"])
def test_bf16_parameters_step_by_the_fp32_sum_of_their_microbatches(dtype: torch.dtype | None) -> None:
    """Plain PyTorch's own bf16 gradients, summed in fp32, are what a stock optimizer gets."""
    model = make_model(torch.bfloat16, fuse=False)
    plain = plain_twin(model)
    ddp = wrap(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, plain))
    for step in range(3):
        batches = make_batches(4, torch.bfloat16, seed=step)
        ddp_backward(ddp, batches)
        ddp.expose_grads(dtype)
        assert all(parameter.grad.dtype is (dtype or torch.bfloat16) for parameter in ddp.parameters())
        ours.step()
        ddp.zero_grad_buffer()

        sums = {name: torch.zeros(parameter.shape) for name, parameter in plain.named_parameters()}
        for batch in batches:
            (loss_of(plain, batch) / len(batches)).backward()
            for name, parameter in plain.named_parameters():
                sums[name] += parameter.grad
            plain.zero_grad()
        for name, parameter in plain.named_parameters():
            if dtype is not None:
                parameter.grad_dtype = dtype
            parameter.grad = sums[name].to(dtype or torch.bfloat16)
        theirs.step()
        for parameter in plain.parameters():
            parameter.grad = None
            parameter.grad_dtype = torch.bfloat16
    assert_same(weights(ddp), weights(plain))


def test_bf16_adamw_takes_gradients_of_the_parameters_dtype_and_says_so_itself() -> None:
    ddp = wrap(make_model(torch.bfloat16))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    for step, dtype in enumerate((torch.float32, None)):
        ddp_backward(ddp, make_batches(2, torch.bfloat16, seed=step))
        ddp.expose_grads(dtype)
        before = weights(ddp)
        if dtype is torch.float32:
            with pytest.raises(RuntimeError, match=r"expected (dtype|scalar type)"):
                optimizer.step()
            optimizer.state.clear()
        else:
            optimizer.step()
            assert all(not torch.equal(before[name], value) for name, value in weights(ddp).items())
        ddp.zero_grad_buffer()


def test_gradients_may_be_shown_in_fewer_bits_than_the_parameters() -> None:
    ddp = wrap(make_model())
    ddp_backward(ddp, make_batches(2))
    ddp.expose_grads(torch.bfloat16)
    for parameter in ddp.parameters():
        assert parameter.grad.dtype is torch.bfloat16
        assert torch.equal(parameter.grad, parameter.main_grad.bfloat16())


def test_fp32_gradients_of_bf16_parameters_are_main_grad_itself_until_the_next_iteration() -> None:
    ddp = wrap(make_model(torch.bfloat16))
    ddp_backward(ddp, make_batches(2, torch.bfloat16))
    ddp.expose_grads(torch.float32)
    assert all(parameter.grad.data_ptr() == parameter.main_grad.data_ptr() for parameter in ddp.parameters())
    ddp.zero_grad_buffer()
    assert all(parameter.grad is None for parameter in ddp.parameters())
    assert all(parameter.grad_dtype is torch.bfloat16 for parameter in ddp.parameters())


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "none": lambda param: None,
    "in place": lambda param: param.grad.mul_(3.0),
    "other memory": lambda param: setattr(param.grad, "data", param.grad.data * 3.0),
    "another tensor": lambda param: setattr(param, "grad", param.grad * 3.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.sampled(8)
def test_a_later_backward_adds_to_what_a_program_has_made_of_copies(change: str, overlap: bool) -> None:
    """Of copies in bf16 which are as they were the fp32 sum goes on, with all of its bits."""
    net = nn.Linear(8, 4).bfloat16()
    plain = plain_twin(net)
    ddp = wrap(net, overlap_grad_reduce=overlap)
    first, second, third = make_batches(3, torch.bfloat16)
    with ddp.no_sync():
        loss_of(ddp, first).backward()
    loss_of(ddp, second).backward()
    assert all(param.grad.norm() > 0 for param in net.parameters())
    expected = [param.main_grad.clone() for param in net.parameters()]
    assert any(not torch.equal(grad, grad.bfloat16()) for grad in expected)
    for param in net.parameters():
        CHANGES[change](param)
    if change != "none":
        expected = [(grad.bfloat16() * 3.0).float() for grad in expected]
    loss_of(ddp, third).backward()
    ddp.finish_grad_sync()
    loss_of(plain, third).backward()
    for param, grad, last in zip(net.parameters(), expected, plain.parameters(), strict=True):
        torch.testing.assert_close(param.main_grad, grad + last.grad.float(), rtol=0, atol=0)


@pytest.mark.parametrize("sharded", [False, True])
def test_where_no_backward_was_the_last_finish_grad_sync_has_the_step_taken(sharded: bool) -> None:
    """All microbatches were under ``no_sync``: nothing is in ``.grad`` before."""
    ddp = wrap(make_model(), use_distributed_optimizer=sharded)
    plain = plain_twin(ddp.module)
    batches = make_batches(2)
    with ddp.no_sync():
        plain_backward(ddp, batches)
    assert all(param.grad is None for param in ddp.parameters())
    ddp.finish_grad_sync()
    plain_backward(plain, batches)
    if sharded:
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e3)
        torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e3), norm)
        return
    for model in (ddp, plain):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_same(weights(ddp), weights(plain))


def test_an_optimizer_of_another_model_is_left_alone() -> None:
    ddp, other = wrap(make_model()), plain_twin(make_model())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    before = weights(other)
    plain_backward(other, make_batches(1))
    optimizer.step()
    assert all(not torch.equal(before[name], value) for name, value in weights(other).items())
    assert ddp.records


@pytest.mark.parametrize("max_norm", [1e-2, 1e3])
def test_clip_grad_norm_after_exposing_is_plain_pytorchs(max_norm: float) -> None:
    model = make_model()
    plain = plain_twin(model)
    ddp = wrap(model)
    batches = make_batches(3)
    ddp_backward(ddp, batches)
    ddp.expose_grads()
    plain_backward(plain, batches)
    norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm))
    assert_same(plain_grads(ddp.module), plain_grads(plain))


@pytest.mark.parametrize("scale", [lambda ddp: clip_grad_norm(ddp, 1e-3), lambda ddp: ddp.scale_gradients(0.5)])
def test_copies_that_were_exposed_follow_scaled_buckets(scale: Callable[[Any], object]) -> None:
    """bf16 ``.grad`` are copies of fp32 buckets, and the optimizer reads the copies."""
    ddp = wrap(make_model(torch.bfloat16))
    ddp_backward(ddp, make_batches(2, torch.bfloat16))
    ddp.expose_grads()
    before = {name: grad.clone() for name, grad in plain_grads(ddp.module).items()}
    scale(ddp)
    after = plain_grads(ddp.module)
    assert_same(after, {name: grad.bfloat16() for name, grad in main_grads(ddp).items()})
    assert all(not torch.equal(after[name], grad) for name, grad in before.items() if grad.any())
    ddp.expose_grads(torch.float32)  # no copies: .grad is the bucket
    scale(ddp)
    assert_same(plain_grads(ddp.module), main_grads(ddp))


def test_a_change_of_a_copy_is_in_a_copy_of_another_dtype() -> None:
    net = nn.Linear(8, 4).bfloat16()
    ddp = wrap(net)
    ddp_backward(ddp, make_batches(2, torch.bfloat16))
    ddp.expose_grads()
    net.weight.grad.mul_(2.0)
    expected = net.weight.grad.float()
    ddp.expose_grads(torch.float32)
    assert torch.equal(net.weight.grad, expected)


# ---- GradScaler. ----


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.sampled(4)
def test_grad_scaler_skips_a_step_with_inf_and_trains_as_in_plain_pytorch(fused: bool, called: bool) -> None:
    model = make_model()
    plain = plain_twin(model)
    ddp = wrap(model)
    runs = [
        (m, torch.optim.AdamW(m.parameters(), lr=0.05, fused=fused), torch.amp.GradScaler("cpu")) for m in (ddp, plain)
    ]
    for step in range(4):
        batches = make_batches(2, seed=step)
        if step == 1:
            batches[0][0, 0] = torch.inf
        for trained, optimizer, scaler in runs:
            before = weights(trained)
            for index, batch in enumerate(batches):
                if trained is ddp and index + 1 < len(batches):
                    with ddp.no_sync():
                        scaler.scale(loss_of(ddp, batch)).backward()
                else:
                    scaler.scale(loss_of(trained, batch)).backward()
            if trained is ddp and called:
                ddp.finish_grad_sync()
                ddp.expose_grads()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            ddp.zero_grad_buffer() if trained is ddp and called else optimizer.zero_grad()
            changed = any(not torch.equal(before[name], value) for name, value in weights(trained).items())
            assert changed is (step != 1)
        assert_same(weights(ddp), weights(plain))
        assert runs[0][2].get_scale() == runs[1][2].get_scale()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_zero_grad_in_the_middle_of_an_iteration_discards(name: str) -> None:
    """An adversarial example needs the input's gradient alone: the parameters' must not stay in main_grad."""
    model = make_model()
    plain = plain_twin(model)
    ddp = wrap(model)
    for trained in (ddp, plain):
        optimizer = OPTIMIZERS[name](trained.parameters())
        for step in range(2):
            inputs = make_batches(1)[0].requires_grad_()
            loss_of(trained, inputs).backward()
            optimizer.zero_grad()
            loss_of(trained, make_batches(2)[step]).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(trained, make_batches(1)[0]).backward()
    ddp.finish_grad_sync()
    assert_same(main_grads(ddp), plain_grads(plain))


# ---- What differs from a simple loop. ----


def test_an_unused_parameter_has_the_gradient_zero() -> None:
    """Not None as in PyTorch since 2.0: another rank may have used it. AdamW therefore decays it like any other."""
    model = nn.ModuleDict({"used": make_model(), "unused": nn.Linear(2, 2)})
    plain = plain_twin(model)
    ddp = wrap(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (ddp, plain))
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for step in range(2):
        batches = make_batches(2, seed=step)
        for batch in batches:
            loss_of(model["used"], batch).backward()
            loss_of(plain["used"], batch).backward()
        ddp.finish_grad_sync()
        ddp.expose_grads()
        ours.step()
        ddp.zero_grad_buffer()
        theirs.step()
        theirs.zero_grad(set_to_none=False)
    assert_same(weights(ddp), weights(plain))


def test_a_read_of_an_earlier_iterations_gradient_finishes_nothing() -> None:
    """One rank alone may have kept it: a collective would wait for the others."""
    ddp = wrap(make_model())
    kept = []
    for batch in make_batches(2):
        ddp.zero_grad()
        loss_of(ddp, batch).backward()
        kept += [param.grad for param in ddp.parameters()]
    with pytest.raises(RuntimeError, match="was kept over its iteration's end"):
        kept[0].norm()
    assert not ddp.is_reduced
    assert kept[-1].norm() > 0 and ddp.is_reduced


def test_a_read_past_torchs_python_functions_says_what_to_do() -> None:
    """As of a C++ extension, which adds a gradient to a sum of its own."""
    ddp = wrap(make_model())
    loss_of(ddp, make_batches(1)[0]).backward()
    grad, total = next(ddp.parameters()).grad, torch.zeros_like(next(ddp.parameters()), requires_grad=False)
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="past torch's Python functions"):
        total.add_(grad)
    total.add_(grad)
    assert total.norm() == next(ddp.parameters()).grad.norm() > 0


def test_a_number_is_formatted_as_in_plain_pytorch() -> None:
    net = nn.Linear(1, 1)
    net.scale = nn.Parameter(torch.tensor(2.0))
    ddp = wrap(net)
    total = ddp(torch.ones(2, 1)).sum()
    (total * net.scale).backward()
    assert f"{net.scale.grad:.1f}" == f"{total.item():.1f}"


def test_evaluation_between_microbatches_leaves_gradients_alone() -> None:
    model = make_model()
    plain = plain_twin(model)
    ddp = wrap(model, overlap_grad_reduce=True, find_unused_parameters=True)
    batches = make_batches(3)
    with ddp.no_sync():
        loss_of(ddp, batches[0]).backward()
    ddp.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(ddp(batches[1]), model(batches[1]))
    ddp.train()
    with ddp.no_sync():
        loss_of(ddp, batches[1]).backward()
    loss = loss_of(ddp, batches[2])
    loss_of(ddp, batches[0])  # an evaluation that forgot no_grad()
    loss.backward()
    ddp.finish_grad_sync()
    for batch in batches:
        loss_of(plain, batch).backward()
    assert_same(main_grads(ddp), plain_grads(plain))


def test_calling_the_inner_module_gives_the_same_gradients() -> None:
    """The wrapper does not see that forward: what it knows comes from the parameters' own hooks."""
    model = nn.ModuleDict({"a": make_model(), "b": nn.Linear(4, 8), "c": make_model()})
    model["c"][0].weight = model["a"][0].weight
    plain = plain_twin(model)
    ddp = wrap(model, overlap_grad_reduce=True, find_unused_parameters=True, bucket_size=1)

    def backward(trained: nn.Module, batch: torch.Tensor) -> None:
        trained["c"](trained["b"](trained["a"](batch))).square().mean().backward()

    first, second = make_batches(2)
    for _ in range(2):
        with ddp.no_sync():
            backward(ddp.module, first)
        backward(ddp.module, second)
        ddp.finish_grad_sync()
        backward(plain, first)
        backward(plain, second)
        for name, grad in plain_grads(plain).items():
            torch.testing.assert_close(main_grads(ddp)[name], grad)
        ddp.zero_grad_buffer()
        plain.zero_grad()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.sampled(4)
def test_the_inner_module_goes_backward_twice_or_says_why_not(reads: bool, sharded: bool) -> None:
    """A read between two backwards that the wrapper does not see would be the last that is right."""
    model = make_model(fuse=False)
    plain = plain_twin(model)
    ddp = wrap(model, use_distributed_optimizer=sharded)
    first, second = make_batches(2)
    for trained in (model, plain):
        loss_of(trained, first).backward()
        if reads:
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1e3)
        if reads and trained is model:
            with pytest.raises(RuntimeError, match=r"received a gradient after bucket 0 .* was reduced.*no_sync\(\)"):
                loss_of(trained, second).backward()
            return
        loss_of(trained, second).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e3)
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e3), norm)


class _HeadOutside(nn.Module):
    """A head that the program calls itself, behind the wrapper's forward. Backward reaches it before the wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = make_model(), nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.body(batch)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.sampled(8)
def test_a_head_that_is_called_outside_of_the_wrapper_goes_backward_twice(
    overlap: bool, sharded: bool, frozen: bool
) -> None:
    """Its hooks have left None in ``.grad`` when backward comes to the wrapper's output: the program has not.

    frozen  the body: then all gradients have come
    """
    model = _HeadOutside()
    model.body.requires_grad_(not frozen)
    plain = plain_twin(model)
    ddp = wrap(model, overlap_grad_reduce=overlap, use_distributed_optimizer=sharded, bucket_size=64)
    for batch in make_batches(2):
        batch.requires_grad_()
        for trained, forward in ((model, ddp), (plain, plain)):
            trained.head(forward(batch)).square().mean().backward()
    ddp.finish_grad_sync()
    assert ddp.iteration == 0
    for param, expected in zip(ddp.parameters(), plain.parameters(), strict=True):
        if param.requires_grad:
            torch.testing.assert_close(param.main_grad, expected.grad)
