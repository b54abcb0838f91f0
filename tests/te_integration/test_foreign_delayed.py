"""Modules that are not ours, and delay weight gradients as Transformer Engine's do, under our DDP."""

from contextlib import nullcontext

import pytest
import torch
from foreign import ForeignDelayedLinear, ForeignDelayedWithBias
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.fsdp import fully_shard
from maingrad.te_integration import Linear


def build(fused: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        ForeignDelayedLinear(6, 8, fused=fused),
        nn.LayerNorm(8),
        ForeignDelayedLinear(8, 8, fused=fused),
        Linear(8, 4, fuse_wgrad_accumulation=True),
    )


def batch(index: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(index))


def plain_gradients(model: nn.Sequential, batches: int) -> dict[str, torch.Tensor]:
    twin = nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
    twin.load_state_dict(model.state_dict())
    for index in range(batches):
        twin(batch(index)).square().sum().backward()
    return {name: p.grad for name, p in twin.named_parameters()}


def backward_dw(model: nn.Module) -> None:
    for module in reversed(list(model.modules())):
        if isinstance(module, ForeignDelayedLinear):
            module.backward_dw()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_their_delayed_gradients_count_and_hold_their_bucket(fused: bool, microbatches: int, lag: int) -> None:
    if lag >= microbatches:
        lag = microbatches - 1
    model = build(fused)
    expected = plain_gradients(model, microbatches)
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1))
    of = {record.name: bucket for bucket in ddp.buckets for record in bucket.records}
    assert [b.layout.delayed for b in ddp.buckets] == [False] * 4 + [True] * 2, "found without being told"
    for iteration in range(2):
        for index in range(microbatches):
            with nullcontext() if index == microbatches - 1 else ddp.no_sync():
                ddp(batch(index)).square().sum().backward()
            if index >= lag:
                backward_dw(model)
        for _ in range(lag):
            assert of["2.weight"].phase.value == of["0.weight"].phase.value == "accumulating", iteration
            with pytest.raises(RuntimeError, match=r"'2.weight' waits for \d of ForeignDelayedLinear"):
                ddp.finish_grad_sync()
            backward_dw(model)
        assert {bucket.phase.value for bucket in ddp.buckets} == {"reducing"}, "launched without finish_grad_sync"
        ddp.finish_grad_sync()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.main_grad, expected[name])
            assert parameter.grad is None
        ddp.zero_grad_buffer()


def with_biases(fused: bool, bias_in_backward: bool) -> nn.Sequential:
    torch.manual_seed(0)
    options = {"fused": fused, "bias_in_backward": bias_in_backward}
    return nn.Sequential(ForeignDelayedWithBias(6, 8, **options), nn.Tanh(), ForeignDelayedWithBias(8, 4, **options))


def train_with_biases(kind: str, model: nn.Sequential, microbatches: int, lag: int) -> list[torch.Tensor]:
    """Gradients of two iterations' microbatches, each W ``lag`` microbatches after its B."""
    wrapped = (
        fully_shard(model)
        if kind == "fsdp"
        else DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1))
    )
    for _ in range(2):
        for param in model.parameters() if kind == "fsdp" else ():
            param.grad = None
        for index in range(microbatches):
            with nullcontext() if index == microbatches - 1 else wrapped.no_sync():
                wrapped(batch(index)).square().sum().backward()
                for module in (model[2], model[0]) if index >= lag else ():
                    module.backward_dw()
        for _ in range(lag):
            for module in (model[2], model[0]):
                module.backward_dw()
        wrapped.finish_grad_sync()
        grads = [param.grad if kind == "fsdp" else param.main_grad.clone() for param in model.parameters()]
        if kind == "ddp":
            assert all(param.grad is None for param in model.parameters())
            wrapped.zero_grad_buffer()
    return [torch.as_tensor(grad) for grad in grads]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bias_in_backward", [True, False])
@pytest.mark.parametrize(("microbatches", "lag"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_their_biases_count_once_wherever_they_are_computed(
    kind: str, fused: bool, bias_in_backward: bool, microbatches: int, lag: int
) -> None:
    """Their ``backward_dw`` assigns a bias gradient where there is none in ``.grad``, of None where backward had it."""
    model = with_biases(fused, bias_in_backward)
    twin = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    twin.load_state_dict(model.state_dict())
    for index in range(microbatches):
        twin(batch(index)).square().sum().backward()
    found = train_with_biases(kind, model, microbatches, lag)
    for ours, (name, plain) in zip(found, twin.named_parameters(), strict=True):
        torch.testing.assert_close(ours.view_as(plain), plain.grad, msg=name)
