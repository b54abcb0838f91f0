"""Foreign modules under our DDP that delay weight gradients as Transformer Engine's modules do."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from foreign import DELAYED_FORMS, ForeignDelayedLinear, ForeignProvider, LazyForeignProvider
from loops import has_no_own_grad
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.contract.module import listen_to_foreign_delays
from maingrad.ddp.contract.record import GradRecord
from maingrad.ddp.torch_grads.shown_grad import ShownGrad
from maingrad.ddp.torch_internals import refuses_storage_reads
from maingrad.fsdp import fully_shard
from maingrad.te_integration import GroupedLinear, Linear, WgradQueue, delayed_wgrad


def build(form: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        ForeignDelayedLinear(6, 8, **DELAYED_FORMS[form]),
        nn.LayerNorm(8),
        ForeignDelayedLinear(8, 8, **DELAYED_FORMS[form]),
        Linear(8, 4, fuse_wgrad_accumulation=True),
    )


def batch(index: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(index))


def plain_gradients(model: nn.Sequential, batches: int) -> dict[str, torch.Tensor]:
    bias = model[0].bias is not None
    twin = nn.Sequential(nn.Linear(6, 8, bias=bias), nn.LayerNorm(8), nn.Linear(8, 8, bias=bias), nn.Linear(8, 4))
    twin.load_state_dict(model.state_dict())
    for index in range(batches):
        twin(batch(index)).square().sum().backward()
    return {name: p.grad for name, p in twin.named_parameters()}


def backward_dw(model: nn.Module) -> None:
    for module in reversed(list(model.modules())):
        if isinstance(module, ForeignDelayedLinear):
            module.backward_dw()


@pytest.mark.parametrize("form", DELAYED_FORMS)
@pytest.mark.parametrize(("microbatches", "lag"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_their_delayed_gradients_count_and_hold_their_bucket(form: str, microbatches: int, lag: int) -> None:
    model = build(form)
    expected = plain_gradients(model, microbatches)
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1))
    of = {record.name: bucket for bucket in ddp.buckets for record in bucket.records}
    delayed = 2 if model[0].bias is None else 4
    assert [b.layout.delayed for b in ddp.buckets] == [False] * 4 + [True] * delayed, "found without being told"
    for iteration in range(2):
        for index in range(microbatches):
            with nullcontext() if index == microbatches - 1 else ddp.no_sync():
                ddp(batch(index)).square().sum().backward()
            if index >= lag:
                backward_dw(model)
        for _ in range(lag):
            assert of["2.weight"].phase.value == of["0.weight"].phase.value == "accumulating", iteration
            for number in (0, 2):  # what they work on themselves may be there
                assert not isinstance(model[number].weight.grad, ShownGrad), "shown before the last one has come"
            with pytest.raises(RuntimeError, match=r"'2.(weight|bias)' waits for \d of ForeignDelayedLinear"):
                ddp.finish_grad_sync()
            backward_dw(model)
        assert {bucket.phase.value for bucket in ddp.buckets} == {"reducing"}, "launched without finish_grad_sync"
        assert all(parameter.grad is not None for parameter in model.parameters()), "for who clips"
        ddp.finish_grad_sync()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.main_grad, expected[name])
            assert has_no_own_grad(parameter)
        ddp.zero_grad_buffer()


class UsedTwice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x))


@pytest.mark.parametrize("form", ["fused", "plain"])
def test_5_their_second_use_in_a_forward_is_refused_when_it_is_computed(form: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), UsedTwice(ForeignDelayedLinear(8, 8, **DELAYED_FORMS[form])))
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True))
    ddp(batch(0)).square().sum().backward()
    model[1].layer.backward_dw()
    with pytest.raises(RuntimeError, match=r"'1.layer.weight': ForeignDelayedLinear.backward_dw\(\) ran more often"):
        model[1].layer.backward_dw()


@pytest.mark.parametrize("provider", [ForeignProvider, LazyForeignProvider])
def test_weights_of_a_foreign_provider_are_not_delayed_by_a_block(provider: type[ForeignProvider]) -> None:
    """It has asked at its wrap what is delayed, and would reduce them in backward."""
    layer, queue = Linear(4, 4, bias=False, fuse_wgrad_accumulation=True), WgradQueue()
    provider(layer)
    with delayed_wgrad(queue), pytest.raises(RuntimeError, match="over a weight whose main_grad a foreign provider"):
        layer(torch.ones(1, 4))
    assert len(queue) == 0
    layer(torch.ones(1, 4)).sum().backward()
    experts = GroupedLinear(2, 4, 4, bias=False, fuse_wgrad_accumulation=True)
    provider(nn.ParameterList([experts.weight1]))  # of some experts alone
    with delayed_wgrad(queue), pytest.raises(RuntimeError, match="over a weight whose main_grad a foreign provider"):
        experts(torch.ones(2, 4), torch.tensor([1, 1]))


@pytest.mark.parametrize("fuse", [False, True])
def test_a_foreign_provider_gets_what_our_layer_delays(fuse: bool) -> None:
    """Its hook runs behind ``backward_dw``, and drops ``.grad`` where the flag says that main_grad was written."""
    layer = Linear(6, 4, bias=False, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
    ForeignProvider(layer)
    for times in (1, 2):
        layer(batch(0)).sum().backward()
        assert layer.weight.grad_added_to_main_grad is fuse
        layer.backward_dw()
        assert layer.weight.grad_added_to_main_grad is False
        torch.testing.assert_close(layer.weight.main_grad, times * batch(0).sum(0).expand(4, 6))


class Tied(nn.Module):
    def __init__(self, first: nn.Linear, second: nn.Linear, weight: nn.Parameter) -> None:
        super().__init__()
        self.first, self.second = first, second
        first.weight = second.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("theirs_first", [False, True])
def test_a_weight_that_another_layer_shares_gets_both_gradients(theirs_first: bool) -> None:
    """``backward_dw`` assigns ``.grad``, over what the other layer's backward has left there."""
    theirs, plain = ForeignDelayedLinear(6, 6, fused=False), nn.Linear(6, 6, bias=False)
    layers = (theirs, plain) if theirs_first else (plain, theirs)
    model = Tied(*layers, theirs.weight)  # which their layer has marked as delayed
    twin = Tied(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Parameter(torch.zeros(6, 6)))
    twin.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(model)
    ddp(batch(0)).square().sum().backward()
    backward_dw(model)
    ddp.finish_grad_sync()
    twin(batch(0)).square().sum().backward()
    torch.testing.assert_close(model.first.weight.main_grad, twin.first.weight.grad)


@pytest.mark.parametrize("form", ["fused", "plain"])
def test_a_weight_that_two_of_them_delay_is_refused(form: str) -> None:
    """Gradients count once a backward: that of the second module to be heard would be lost."""
    first, second = (ForeignDelayedLinear(6, 6, **DELAYED_FORMS[form]) for _ in range(2))
    model = Tied(first, second, first.weight)
    ddp = DistributedDataParallel(model)
    ddp(batch(0)).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"'first.weight': .* ran more often .* not tied to another that delays"):
        backward_dw(model)


@pytest.mark.parametrize("lost", ["tied later", "copied"])
@pytest.mark.parametrize("form", DELAYED_FORMS)
@pytest.mark.parametrize("provider", ["DistributedDataParallel", "fully_shard"])
def test_a_weight_that_has_lost_its_mark_is_refused_by_name(provider: str, form: str, lost: str) -> None:
    """Nobody waits for its gradient, which may be reduced without what ``backward_dw`` adds.

    Fused under ``fully_shard``, its module may find the memory of ``main_grad`` freed.
    """
    if provider == "fully_shard" and form.startswith("fused") and not refuses_storage_reads:
        pytest.skip("this torch writes to freed memory, and the process may end")
    freed = "|the memory of the whole gradients .* was freed" if provider == "fully_shard" else ""
    bias = DELAYED_FORMS[form].get("bias_when", "no") != "no"
    model = nn.Sequential(nn.Linear(6, 6, bias=bias), ForeignDelayedLinear(6, 6, **DELAYED_FORMS[form]))
    if lost == "copied":
        model = copy.deepcopy(model)
    else:
        model[1].weight = model[0].weight
    wrapped = DistributedDataParallel(model) if provider == "DistributedDataParallel" else fully_shard(model)
    wrapped(batch(0)).square().sum().backward()
    refused = r"parameter '[01].weight': .* of ForeignDelayedLinear.weight, .*skip_backward_post_hook = True"
    with pytest.raises(RuntimeError, match=refused + freed):
        model[1].backward_dw()


class ForeignGroup:
    """Keeps what is to be called after its ``backward_dw``."""

    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        self.hooks.append(hook)


@pytest.mark.parametrize(
    ("local", "shape", "watched"),
    [
        ("weight", (2, 2), True),
        ("weight0", (2, 2), True),
        ("fc1_weight", (2, 2), True),
        ("layer_norm_weight", (2,), False),
        ("bias0", (2,), False),
        ("table", (2, 2), False),
    ],
)
def test_weights_without_a_mark_are_watched_whatever_their_names(
    local: str, shape: tuple[int, ...], watched: bool
) -> None:
    """Those of groups and of several layers in one; norms, biases and tables are not delayed."""
    module, param = ForeignGroup(), nn.Parameter(torch.zeros(shape))
    record = GradRecord(local, torch.zeros(shape), first_write_overwrites=False, shared=False)
    listen_to_foreign_delays(param, record, [(nn.Linear(2, 2), local), (module, local)])
    assert len(module.hooks) == watched


@pytest.mark.parametrize("form", DELAYED_FORMS)
def test_they_report_to_the_wrapper_that_came_last(form: str) -> None:
    """What an earlier one has registered stays with the module, and the program may have kept that wrapper."""
    model = copy.deepcopy(build(form))
    unmarked = DistributedDataParallel(model)
    unmarked.unwrap()
    for module in (model[0], model[2]):
        for param in module.parameters():
            param.skip_backward_post_hook = True
    marked = DistributedDataParallel(model)
    marked.unwrap()
    ddp = DistributedDataParallel(model)
    expected = plain_gradients(model, 1)
    ddp(batch(0)).square().sum().backward()
    backward_dw(model)
    ddp.finish_grad_sync()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.main_grad, expected[name])
