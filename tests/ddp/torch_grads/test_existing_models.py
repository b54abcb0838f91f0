"""Unusual parameters and models, under stock optimizers and our own, on several ranks."""

from collections.abc import Callable

import pytest
import torch
from loops import (
    assert_same,
    ddp_backward,
    loss_of,
    make_batches,
    make_model,
    plain_backward,
    plain_twin,
    weights,
    wrap,
)
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer, clip_grad_norm
from maingrad.launch import simulate
from maingrad.te_integration import Linear


class Odd(nn.Module):
    """Parameters without elements, without dims, and of several dtypes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.empty = nn.Parameter(torch.empty(0))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.weight = nn.Parameter(torch.randn(8, 3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * (x.to(self.weight.dtype) @ self.weight)).abs() + self.empty.sum()


class Convolution(nn.Sequential):
    """A channels-last convolution, and a linear layer whose weight is a transposed view."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.Flatten(), nn.Linear(36, 4))
        self.to(memory_format=torch.channels_last)
        self[3].weight = nn.Parameter(torch.randn(36, 4).t())
        assert not self[1].weight.is_contiguous()
        assert not self[3].weight.is_contiguous()


def check_stock_training(model: nn.Module, make_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    plain = plain_twin(model)
    ddp = wrap(model, overlap_grad_reduce=True, bucket_size=1)
    ours, theirs = make_optimizer(ddp.parameters()), make_optimizer(plain.parameters())
    for step in range(3):
        batches = make_batches(2, seed=step)
        ddp_backward(ddp, batches)
        ddp.expose_grads()
        norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        ours.step()
        ddp.zero_grad_buffer()
        plain_backward(plain, batches)
        assert norm == torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
    assert_same(weights(ddp), weights(plain))


@pytest.mark.parametrize("build", [Odd, lambda: Odd(torch.float64), lambda: Odd(torch.complex64), Convolution])
@pytest.mark.parametrize("foreach", [False, True])
def test_stock_adamw(build: Callable[[], nn.Module], foreach: bool) -> None:
    check_stock_training(build(), lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=foreach))


@pytest.mark.parametrize("build", [Odd, lambda: Odd(torch.float64), Convolution])
def test_stock_fused_adamw(build: Callable[[], nn.Module]) -> None:
    check_stock_training(build(), lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True))


def test_exposed_gradients_have_the_parameters_strides() -> None:
    """Fused optimizers go through both in memory order. A contiguous ``.grad`` is main_grad itself."""
    ddp = wrap(Convolution())
    ddp_backward(ddp, make_batches(1))
    ddp.expose_grads()
    for name, parameter in ddp.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name
        assert torch.equal(parameter.grad, parameter.main_grad), name
        assert (parameter.grad.data_ptr() == parameter.main_grad.data_ptr()) is parameter.is_contiguous(), name
    half = wrap(Convolution().bfloat16())
    ddp_backward(half, make_batches(1, torch.bfloat16))
    half.expose_grads(torch.float32)
    for name, parameter in half.named_parameters():
        assert parameter.grad.dtype is torch.float32 and parameter.grad.stride() == parameter.stride(), name


def test_gradients_have_the_parameters_strides_before_their_values_are_read() -> None:
    """As in plain PyTorch. Programs compare strides to see whether two tensors may share a kernel."""
    ddp = wrap(Convolution())
    loss_of(ddp, make_batches(1)[0]).backward()
    assert not all(parameter.is_contiguous() for parameter in ddp.parameters())
    for name, parameter in ddp.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name


@pytest.mark.parametrize("build", [Odd, lambda: Odd(torch.float64), Convolution])
def test_our_optimizer(build: Callable[[], nn.Module]) -> None:
    model = build()
    plain = plain_twin(model)
    ddp = wrap(model, bucket_size=1)
    ours = DistributedOptimizer(ddp, lr=0.05, max_grad_norm=0.5)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.05, fused=True)
    for step in range(3):
        batches = make_batches(2, seed=step)
        ddp_backward(ddp, batches)
        ours.step()
        ddp.zero_grad_buffer()
        plain_backward(plain, batches)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(ours.grad_norm, norm, rtol=1e-5, atol=0)
        theirs.step()
        theirs.zero_grad()
    for name, weight in weights(plain).items():
        assert (weights(ddp)[name] - weight).norm() <= 1e-5 * weight.norm(), name


def test_complex_parameters_are_clipped_and_left_to_stock_optimizers() -> None:
    ddp = wrap(Odd(torch.complex64))
    ddp_backward(ddp, make_batches(1))
    plain = plain_twin(Odd(torch.complex64))
    plain_backward(plain, make_batches(1))
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(clip_grad_norm(ddp, 0.5), expected)
    torch.testing.assert_close(ddp.module.weight.main_grad, plain.weight.grad)
    with pytest.raises(ValueError, match=r"parameter 'weight' is torch.complex64: .* use_distributed_optimizer=False"):
        DistributedOptimizer(ddp)


def test_a_model_that_returns_a_parameter_collects_no_hooks_on_it() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.weight

    ddp = wrap(Returns(), overlap_grad_reduce=True, find_unused_parameters=True)
    for _ in range(3):
        (ddp() * 2).sum().backward()
        ddp.finish_grad_sync()
        assert torch.equal(ddp.module.weight.main_grad, torch.full((3,), 2.0))
        ddp.zero_grad_buffer()
    assert not ddp.module.weight._backward_hooks


@pytest.mark.parametrize("shape", [(8,), (0, 8), (2, 0, 8), (2, 3, 4, 8)])
def test_any_leading_dims_of_a_fused_layers_input(shape: tuple[int, ...]) -> None:
    layer = Linear(8, 3, fuse_wgrad_accumulation=True)
    plain = plain_twin(layer)
    ddp = wrap(layer)
    batch = torch.randn(shape)
    for model in (ddp, plain):
        for _ in range(2):
            model(batch).square().sum().backward()
    ddp.finish_grad_sync()
    torch.testing.assert_close(layer.weight.main_grad, plain.weight.grad)
    torch.testing.assert_close(layer.bias.main_grad, plain.bias.grad)


def test_weights_from_functional_call_get_their_gradients_or_are_refused_by_name() -> None:
    ddp = wrap(nn.Sequential(Linear(8, 3, fuse_wgrad_accumulation=True)))
    batch = make_batches(1)[0]
    doubled = {name: 2 * parameter for name, parameter in ddp.module.named_parameters()}
    torch.func.functional_call(ddp.module, doubled, (batch,)).sum().backward()
    assert torch.equal(ddp.module[0].weight.main_grad, 2 * (torch.ones(3, 5) @ batch))

    others = {name: torch.zeros_like(parameter).requires_grad_() for name, parameter in ddp.module.named_parameters()}
    with pytest.raises(RuntimeError, match=r"Linear\(.*needs weight.main_grad, and nobody provided it"):
        torch.func.functional_call(ddp.module, others, (batch,)).sum().backward()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_detect_anomaly_and_in_place_outputs_change_nothing() -> None:
    model = nn.Sequential(make_model(), nn.ReLU(inplace=True))
    plain = plain_twin(model)
    ddp = wrap(model, overlap_grad_reduce=True)
    with torch.autograd.detect_anomaly():
        ddp_backward(ddp, make_batches(2))
    plain_backward(plain, make_batches(2))
    for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.main_grad, theirs.grad)


# ---- Ranks. ----


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_on_a_rank(num_ranks: int) -> dict[str, Tensor]:
    ddp = wrap(make_model(), overlap_grad_reduce=True, bucket_size=64)
    optimizer = make_sgd(ddp)
    for step in range(4):
        ddp_backward(ddp, make_batches(2 * num_ranks, seed=step)[torch.distributed.get_rank() :: num_ranks])
        ddp.expose_grads()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        ddp.zero_grad_buffer()
    assert isinstance(ddp, DistributedDataParallel)
    return weights(ddp)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_with_a_stock_optimizer_train_as_one_process_with_all_the_data(num_ranks: int) -> None:
    plain = plain_twin(make_model())
    optimizer = make_sgd(plain)
    for step in range(4):
        plain_backward(plain, make_batches(2 * num_ranks, seed=step))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ranks = simulate(train_on_a_rank, num_ranks, num_ranks)
    for rank in ranks:
        assert_same(rank, ranks[0])
    for name, weight in weights(plain).items():
        assert (ranks[0][name] - weight).norm() <= 1e-5 * weight.norm(), name
