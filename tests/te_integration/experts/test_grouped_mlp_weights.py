"""Each of ``GroupedMLP``'s weights is frozen, tied, overwritten, fused or delayed by itself, with every provider."""

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from expert_mlp import HIDDEN, LAYOUTS, Batch, batch_of, exact_grads, make_experts
from foreign import ForeignProvider, LazyForeignProvider
from host_syncs import cuda_waits_are_errors
from loops import wrap
from modules import error
from torch import Tensor, nn

from maingrad.te_integration import GroupedMLP, WgradQueue, delayed_wgrad

ROUNDING = 2.0**-19
LAYOUT = pytest.mark.parametrize("layout", ["discrete", "packed"])
DELAYED_OR_NOT = pytest.mark.parametrize("delay", [False, True])
FUSED_OR_NOT = pytest.mark.parametrize("fuse", [False, True])
SPLITS = [3, 0, 5, 1]


def batch(seed: int = 1, splits: list[int] = SPLITS) -> Batch:
    return batch_of(splits, 2, seed=seed)


def loss_of(module: Any, source: Batch) -> Tensor:
    """The sum of all rows without padding."""
    return module(source.x, source.splits, source.probs)[: source.filled].sum()


def weight_of_loss(source: Batch) -> Tensor:
    ones = torch.ones_like(source.x)
    ones[source.filled :] = 0
    return ones


def expected(module: GroupedMLP, batches: list[Batch]) -> dict[str, Tensor]:
    return exact_grads(module, batches, [weight_of_loss(each) for each in batches])[3]


def assert_near(actual: Tensor, exact: Tensor, name: str) -> None:
    if exact.any():
        assert error(actual, exact) <= ROUNDING, name
    else:
        assert not actual.any(), name


def weights_of(module: GroupedMLP) -> list[str]:
    return [name for name, _ in module.named_parameters() if "weight" in name]


# ---- Frozen. ----


@LAYOUT
@DELAYED_OR_NOT
@FUSED_OR_NOT
@pytest.mark.parametrize("frozen", [("fc1_weight",), ("fc2_weight",), ("fc1_weight", "fc2_weight"), ("bias",), ()])
@pytest.mark.parametrize("input_needs_it", [False, True])
def test_07_what_is_frozen_takes_nothing_along(
    layout: str, delay: bool, fuse: bool, frozen: tuple[str, ...], input_needs_it: bool
) -> None:
    module = make_experts(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay, **LAYOUTS[layout])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    ddp, sources = wrap(module), [batch(1), batch(2)]
    for source in sources:
        source.x.requires_grad_(input_needs_it)
        loss_of(ddp, source).backward()
        module.backward_dw()
    ddp.finish_grad_sync()
    for source in sources:
        _, (dx,), (dprobs,), _ = exact_grads(module, [source], [weight_of_loss(source)])
        assert_near(source.probs.grad, dprobs, "probs")
        if input_needs_it:
            assert_near(source.x.grad, dx, "x")
        else:
            assert source.x.grad is None
    grads = expected(module, sources)
    assert {record.name for record in ddp.records} == grads.keys()
    for record in ddp.records:
        assert_near(record.view, grads[record.name], record.name)


@DELAYED_OR_NOT
@FUSED_OR_NOT
@pytest.mark.parametrize("frozen", ["fc1_weight0", "fc1_weight3", "fc2_weight2", "fc2_bias0"])
def test_one_expert_may_be_frozen(delay: bool, fuse: bool, frozen: str) -> None:
    module = make_experts(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay)
    getattr(module, frozen).requires_grad_(False)
    ddp, source = wrap(module), batch()
    loss_of(ddp, source).backward()
    module.backward_dw()
    ddp.finish_grad_sync()
    grads = expected(module, [source])
    for record in ddp.records:
        assert_near(record.view, grads[record.name], record.name)
    assert getattr(module, frozen).grad is None


# ---- Each its own overwrite bit. ----


class TiedBefore(nn.Module):
    """Another use of one of the weights, which comes first in backward: a plain product with the output."""

    def __init__(self, mlp: GroupedMLP, name: str) -> None:
        super().__init__()
        self.mlp, self.name = mlp, name
        self.tied = getattr(mlp, name)

    def forward(self, x: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
        y = self.mlp(x, splits, probs)
        return y + y.sum() * self.tied.square().sum()


@DELAYED_OR_NOT
@pytest.mark.parametrize(
    ("layout", "name"),
    [("discrete", "fc1_weight2"), ("discrete", "fc2_weight0"), ("packed", "fc1_weight"), ("packed", "fc2_weight")],
)
@pytest.mark.sampled(4)
def test_15_what_was_written_already_is_added_to_and_nothing_else(layout: str, name: str, delay: bool) -> None:
    """All other memory starts as NaN and is overwritten: each weight has its own overwrite bit."""
    module = make_experts(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay, **LAYOUTS[layout])
    plain = TiedBefore(make_experts(**LAYOUTS[layout]), name)
    source = batch()
    loss_of(plain, batch()).backward()
    model = TiedBefore(module, name)
    ddp = wrap(model)
    for _ in range(2):
        ddp.zero_grad_buffer()
        for record in ddp.records:
            if record.first_write_overwrites:
                record.view.data.fill_(float("nan"))
        loss_of(ddp, source).backward()
        module.backward_dw()
        ddp.finish_grad_sync()
        for each, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.main_grad, getattr(plain.mlp, each).grad, rtol=1e-4, atol=1e-4)


@LAYOUT
@DELAYED_OR_NOT
@pytest.mark.parametrize("fresh", ["fc1_weight", "fc2_weight"])
def test_15_each_weight_obeys_its_own_foreign_bit(layout: str, delay: bool, fresh: str) -> None:
    """A lazy provider asks one of the linear layers to overwrite (its memory is NaN) and the other to add."""
    module = make_experts(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay, **LAYOUTS[layout])
    provider = LazyForeignProvider(module)
    for name in weights_of(module):
        weight = getattr(module, name)
        weight.get_main_grad()
        if fresh not in name:
            weight.overwrite_main_grad = False
            provider.allocated[name].fill_(2.0)
    loss_of(module, batch()).backward()
    module.backward_dw()
    grads = expected(module, [batch()])
    for name in weights_of(module):
        assert_near(provider.allocated[name], grads[name] + (0 if fresh in name else 2.0), name)


@LAYOUT
@DELAYED_OR_NOT
def test_09_an_expert_without_rows_overwrites_what_was_there(layout: str, delay: bool) -> None:
    module = make_experts(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay, **LAYOUTS[layout])
    ddp = wrap(module)
    for splits in ([3, 0, 5, 1], [0, 9, 0, 0]):
        ddp.zero_grad_buffer()
        for record in ddp.records:
            if record.first_write_overwrites:
                record.view.data.fill_(float("nan"))
        sources = [batch(3, splits), batch(4, splits)]
        for source in sources:
            loss_of(ddp, source).backward()
            module.backward_dw()
        ddp.finish_grad_sync()
        grads = expected(module, sources)
        for record in ddp.records:
            assert_near(record.view, grads[record.name], record.name)


# ---- Delayed. ----


@LAYOUT
@FUSED_OR_NOT
def test_the_second_linear_layers_weights_come_first(layout: str, fuse: bool) -> None:
    module = make_experts(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=True, **LAYOUTS[layout])
    if fuse:
        ddp = wrap(module)
    loss_of(module, batch()).backward()
    entries = list(module.wgrad_queue)
    first, second = (
        [any(entry.serves(getattr(module, name)) for entry in entries[half]) for name in weights_of(module)]
        for half in (slice(0, len(entries) // 2), slice(len(entries) // 2, None))
    )
    is_fc2 = ["fc2" in name for name in weights_of(module)]
    assert first == is_fc2 and second == [not fc2 for fc2 in is_fc2]
    assert module.need_backward_dw()
    module.backward_dw()
    assert not module.need_backward_dw()
    grads = expected(module, [batch()])
    for name in weights_of(module):
        weight = getattr(module, name)
        assert_near(weight.main_grad if fuse else weight.grad, grads[name], name)
    if fuse:
        ddp.finish_grad_sync()


@LAYOUT
@FUSED_OR_NOT
def test_microbatches_wait_for_their_turns(layout: str, fuse: bool) -> None:
    module = make_experts(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=True, **LAYOUTS[layout])
    ddp, sources = wrap(module), [batch(seed) for seed in range(3)]
    with ddp.no_sync():
        for source in sources[:-1]:
            loss_of(ddp, source).backward()
        module.backward_dw()
    loss_of(ddp, sources[-1]).backward()
    assert len(module.wgrad_queue.pending_microbatches) == 2
    module.backward_dw()
    module.backward_dw()
    ddp.finish_grad_sync()
    grads = expected(module, sources)
    for record in ddp.records:
        assert_near(record.view, grads[record.name], record.name)


@LAYOUT
@FUSED_OR_NOT
def test_a_queue_from_outside_serves_it_too(layout: str, fuse: bool) -> None:
    module, queue = make_experts(fuse_wgrad_accumulation=fuse, **LAYOUTS[layout]), WgradQueue()
    ddp, source = wrap(module), batch()
    with delayed_wgrad(queue):
        loss = loss_of(ddp, source)
    loss.backward()
    assert len(queue) > 0
    queue.drain()
    ddp.finish_grad_sync()
    grads = expected(module, [source])
    for record in ddp.records:
        assert_near(record.view, grads[record.name], record.name)


# ---- Whoever provides. ----


@LAYOUT
@DELAYED_OR_NOT
@FUSED_OR_NOT
@pytest.mark.parametrize("flag", [False, True])
def test_under_a_foreign_provider(layout: str, delay: bool, fuse: bool, flag: bool) -> None:
    module = make_experts(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay, **LAYOUTS[layout])
    provider = ForeignProvider(module, flag=flag)
    sources = [batch(1), batch(2)]
    for source in sources:
        loss_of(module, source).backward()
        module.backward_dw()
    grads = expected(module, sources)
    for name, parameter in module.named_parameters():
        if flag or (fuse and "weight" in name):
            actual = parameter.main_grad
        else:
            actual = parameter.grad
        assert_near(actual, grads[name], name)
    if flag and fuse:
        assert {name for name, _ in provider.placeholders} == set(weights_of(module))


@LAYOUT
def test_without_a_provider_fusing_is_an_error_that_names_the_module(layout: str) -> None:
    module = make_experts(fuse_wgrad_accumulation=True, name="layers.3.experts", **LAYOUTS[layout])
    loss = loss_of(module, batch())
    with pytest.raises(RuntimeError, match=r"layers\.3\.experts.*main_grad"):
        loss.backward()


@LAYOUT
@pytest.mark.parametrize(("fuse", "delay"), [*itertools.product([False, True], repeat=2)])
def test_a_model_is_freed_by_its_references(layout: str, fuse: bool, delay: bool) -> None:
    module = make_experts(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay, **LAYOUTS[layout])
    ddp = wrap(module)
    loss_of(ddp, batch()).backward()
    module.backward_dw()
    ddp.finish_grad_sync()
    alive = weakref.ref(getattr(module, weights_of(module)[0]))
    gc.disable()
    try:
        del module, ddp
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.gpu
@LAYOUT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_wait_for_the_device_and_a_graph_takes_other_splits(layout: str, dtype: torch.dtype) -> None:
    """Captured once, replayed with other splits: outputs, gradients and accumulated main_grads are eager's bits."""
    module = make_experts(fuse_wgrad_accumulation=True, params_dtype=dtype, device="cuda", **LAYOUTS[layout])
    ddp = wrap(module)
    source = batch_of([100, 0, 28, 50], 22, dtype=dtype, device="cuda")
    upstream = torch.randn(200, HIDDEN, device="cuda").to(dtype)

    def step() -> Tensor:
        y = module(source.x, source.splits, source.probs)
        y.backward(upstream)
        return y

    with torch.no_grad():
        source.x.nan_to_num_(0)
    with ddp.no_sync():
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    with cuda_waits_are_errors():
        with ddp.no_sync():
            step()
    source.x.grad = source.probs.grad = None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), ddp.no_sync():
        step()
    torch.cuda.current_stream().wait_stream(stream)
    source.x.grad = source.probs.grad = None
    graph = torch.cuda.CUDAGraph()
    with ddp.no_sync(), torch.cuda.graph(graph):
        captured = step()
    for splits in ([100, 0, 28, 50], [0, 170, 30, 0], [1, 2, 3, 4]):
        source.splits.copy_(torch.tensor(splits, device="cuda"))
        before = [record.view.clone() for record in ddp.records]
        graph.replay()
        replayed = [captured.clone(), source.x.grad.clone(), source.probs.grad.clone()]
        replayed += [record.view.clone() for record in ddp.records]
        for record, kept in zip(ddp.records, before, strict=True):
            record.view.data.copy_(kept)
        other = Batch(source.x.detach().requires_grad_(), source.splits, source.probs.detach().requires_grad_())
        with ddp.no_sync():
            y = module(other.x, other.splits, other.probs)
            y.backward(upstream)
        eager = [y.detach(), other.x.grad, other.probs.grad, *(record.view for record in ddp.records)]
        for one, two in zip(replayed, eager, strict=True):
            assert torch.equal(one, two)
