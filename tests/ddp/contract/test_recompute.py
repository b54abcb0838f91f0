"""Activation recompute under overlap: each bucket is reduced once, after its last contribution, whatever ran twice.

``torch.utils.checkpoint`` with ``use_reentrant=True`` runs a nested backward, in which hooks fire a second time and in
another order; without it, a parameter's hook fires once. Most cases run in a world of one, where buckets are launched
as ever and a late contribution raises; two gloo ranks then show that nothing is lost where the reduction is real.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from delayed_group import delayed_group
from gloo import run_ranks
from plain_grads import assert_reduced_to, plain_grads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, torch_internals
from maingrad.ddp.buckets.bucket import Phase
from maingrad.ddp.contract import delay_blocks as delay_blocks_module
from maingrad.ddp.contract.delay_blocks import check_recompute_delays, delay_blocks
from maingrad.ddp.torch_internals.distributed import gathered_by_fsdp2
from maingrad.te_integration import Linear, WgradQueue, delayed_wgrad

WIDTH = 8
BATCHES = torch.randn(2, 4, 3, WIDTH, generator=torch.Generator().manual_seed(5))  # [iterations, microbatches, rows, K]


class Model(nn.Module):
    """first -> a segment that ``body`` builds from ``inner``, recomputed or not -> head."""

    def __init__(self, segment: str, *, fused: bool, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.segment = SEGMENTS[segment]
        self.reentrant = reentrant
        """None: nothing is recomputed."""
        self.first = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=fused)
        self.inner = nn.Sequential(
            Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=fused), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        )
        self.head = Linear(WIDTH, WIDTH, bias=False, fuse_wgrad_accumulation=fused)
        if segment == "tied":
            self.head.weight = self.inner[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.segment(self, self.first(x).tanh()))

    def recompute(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.reentrant)


SEGMENTS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "once": lambda m, x: m.recompute(m.inner, x),
    "inside_then_outside": lambda m, x: m.inner(m.recompute(m.inner, x)),
    "outside_then_inside": lambda m, x: m.recompute(m.inner, m.inner(x)),
    "twice_in_one_segment": lambda m, x: m.recompute(lambda y: m.inner(m.inner(y)), x),
    "in_two_segments": lambda m, x: m.recompute(m.inner, m.recompute(m.inner, x)),
    "tied": lambda m, x: m.recompute(m.inner, x),
    "nested": lambda m, x: m.recompute(lambda y: m.inner[0](m.recompute(m.inner, y)), x),
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def run_iteration(ddp: DistributedDataParallel, batches: Tensor) -> None:
    """All microbatches [n, rows, K] of one iteration, all but the last under no_sync; not yet finished."""
    ddp.zero_grad_buffer()
    for i, batch in enumerate(batches):
        with ddp.no_sync() if i < len(batches) - 1 else nullcontext():
            (loss_of(ddp, batch) / len(batches)).backward()


RECOMPUTES = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])


class Contribution(NamedTuple):
    """One call of a parameter's hook, and the buckets whose collective had been launched before it."""

    param: str
    launched: frozenset[int]


def wrap(model: nn.Module, config: DistributedDataParallelConfig) -> tuple[DistributedDataParallel, list[Contribution]]:
    """The wrapped model, and a list that notes every contribution just before the wrapper's own hook sees it."""
    contributions: list[Contribution] = []

    def note(name: str) -> None:
        launched = frozenset(bucket.index for bucket in ddp.buckets if bucket.phase is Phase.REDUCING)
        contributions.append(Contribution(name, launched))

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
    ddp = DistributedDataParallel(model, config)
    return ddp, contributions


@RECOMPUTES
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "hooks"])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("segment", SEGMENTS)
def test_gradients_are_the_plain_models_and_buckets_launch_once_and_last(
    segment: str, find_unused: bool, num_microbatches: int, fused: bool, reentrant: bool
) -> None:
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, find_unused_parameters=find_unused, bucket_size=WIDTH
    )
    ddp, contributions = wrap(Model(segment, fused=fused, reentrant=reentrant), config)
    bucket_of = {record.name: bucket for bucket in ddp.buckets for record in bucket.records}
    for batches in BATCHES[:, :num_microbatches]:
        contributions.clear()
        with ddp.record_timeline() as timeline:
            run_iteration(ddp, batches)
            assert {bucket.phase for bucket in ddp.buckets} == {Phase.REDUCING}, "left to finish_grad_sync"
            ddp.finish_grad_sync()
        plain = Model(segment, fused=False, reentrant=None)
        assert_reduced_to(ddp, plain_grads(plain, batches, loss_of, scale=1 / num_microbatches))
        assert [span.bucket for span in timeline.buckets] == [bucket.name for bucket in ddp.buckets]
        assert {param for param, _ in contributions} == set(bucket_of)
        for param, launched in contributions:
            assert bucket_of[param].index not in launched, f"{param} came after {bucket_of[param].name} was launched"


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "hooks"])
def test_recompute_without_reentrance_keeps_the_overlap(fused: bool) -> None:
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    ddp, contributions = wrap(Model("once", fused=fused, reentrant=False), config)
    run_iteration(ddp, BATCHES[0, :1])
    last = contributions[-1]
    assert last.param.startswith("first")
    assert len(last.launched) >= len(ddp.buckets) - 2, "only the first layer's two buckets may still be open"


# ---- Where the reduction is real. ----


def reduced_on_ranks(segment: str, reentrant: bool, sharded: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=sharded, bucket_size=WIDTH
    )
    # The delay leaves a late contribution the time to come in while its bucket is under way.
    with delayed_group(0.005) as group:
        ddp = DistributedDataParallel(Model(segment, fused=True, reentrant=reentrant), config, process_group=group)
        for batches in BATCHES[:, : 2 * size].unflatten(1, (size, 2)):
            run_iteration(ddp, batches[rank])
            ddp.finish_grad_sync()
            plain = Model(segment, fused=False, reentrant=None)
            expected = plain_grads(plain, batches.flatten(0, 1), loss_of, scale=1 / (2 * size))
            assert_reduced_to(ddp, expected)


@dataclass
class Output:
    """What a model of today's libraries returns."""

    states: Tensor
    note: str = "not a tensor"


class ReturnsOutput(Model):
    """The outputs, in a dataclass."""

    def forward(self, x: Tensor) -> Output:  # type: ignore[override]
        return Output(super().forward(x))


def test_a_segment_behind_outputs_in_a_dataclass_is_seen() -> None:
    """What both use, the segment and the outside, is not launched before the segment's nested backward."""
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    ddp = DistributedDataParallel(ReturnsOutput("inside_then_outside", fused=True, reentrant=True), config)
    ddp(BATCHES[0, 0]).states.square().mean().backward()
    ddp.finish_grad_sync()
    plain = Model("inside_then_outside", fused=False, reentrant=None)
    assert_reduced_to(ddp, plain_grads(plain, BATCHES[0, :1], loss_of, scale=1.0))


def test_a_class_among_the_outputs_is_no_output() -> None:
    class ReturnsItsClass(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"states": super().forward(x), "kind": Output}

    ddp = DistributedDataParallel(ReturnsItsClass(2, 2), DistributedDataParallelConfig(overlap_grad_reduce=True))
    outputs = ddp(torch.ones(1, 2))
    assert outputs["kind"] is Output
    outputs["states"].sum().backward()
    assert ddp.module.weight.grad.sum() == 4


@pytest.mark.in_turn
@RECOMPUTES
@pytest.mark.parametrize("sharded", [False, True], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.sampled(1)
def test_no_contribution_is_lost_on_two_ranks(reentrant: bool, sharded: bool) -> None:
    for segment in SEGMENTS:
        run_ranks(reduced_on_ranks, 2, segment, reentrant, sharded)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("forward_in_block", [False, True])
def test_a_recompute_delays_as_its_first_forward(forward_in_block: bool, fused: bool) -> None:
    """It must save the same tensors, whatever block is around the backward."""
    model, queue = Model("once", fused=fused, reentrant=False), WgradQueue()
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1))
    with delayed_wgrad(queue) if forward_in_block else nullcontext():
        loss = loss_of(ddp, BATCHES[0, 0])
    with nullcontext() if forward_in_block else delayed_wgrad(queue):
        loss.backward()
    assert len(queue) == (3 if forward_in_block else 0)
    queue.drain()
    ddp.finish_grad_sync()
    plain = Model("once", fused=False, reentrant=None)
    assert_reduced_to(ddp, plain_grads(plain, BATCHES[0, :1], loss_of, scale=1.0))


def test_a_recompute_delays_by_a_block_inside_its_segment() -> None:
    """Which is entered again."""
    layer, queue = Linear(WIDTH, WIDTH, bias=False), WgradQueue()
    before = delay_blocks.num_entered

    def segment(x: Tensor) -> Tensor:
        with delayed_wgrad(queue):
            check_recompute_delays("layer")
            return layer(x).tanh()  # type: ignore[no-any-return]

    x = BATCHES[0, 0].clone().requires_grad_()
    checkpoint(segment, x, use_reentrant=False).sum().backward()
    assert delay_blocks.num_entered == before + 2
    assert layer.weight.grad is None
    assert len(queue) == 1
    queue.drain()
    (expected,) = torch.autograd.grad(layer(x).tanh().sum(), layer.weight)
    assert torch.equal(layer.weight.grad, expected)


@pytest.mark.parametrize("block_around", [True, False])
def test_behind_a_block_inside_its_segment_a_recompute_delays_as_its_first_forward(block_around: bool) -> None:
    first, second = (Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    around, inside = WgradQueue(), WgradQueue()

    def segment(x: Tensor) -> Tensor:
        with delayed_wgrad(inside):
            x = first(x).tanh()
        return second(x).tanh()  # type: ignore[no-any-return]

    x = BATCHES[0, 0].clone().requires_grad_()
    with delayed_wgrad(around) if block_around else nullcontext():
        loss = checkpoint(segment, x, use_reentrant=False).sum()
    loss.backward()
    assert (len(around), len(inside)) == (int(block_around), 1)
    around.drain()
    inside.drain()
    expected = torch.autograd.grad(second(first(x).tanh()).tanh().sum(), (first.weight, second.weight))
    assert torch.equal(first.weight.grad, expected[0])
    assert torch.equal(second.weight.grad, expected[1])


def test_a_block_around_a_segment_is_refused_where_the_recompute_would_not_see_it() -> None:
    """Of a compiled layer, which asks."""

    def segment(x: Tensor) -> Tensor:
        check_recompute_delays("layer")
        return x.tanh()

    check_recompute_delays("layer")
    with (
        delayed_wgrad(WgradQueue()),
        pytest.raises(RuntimeError, match=r"layer: a compiled layer under delayed_wgrad\(queue\) in a checkpointed"),
    ):
        checkpoint(segment, BATCHES[0, 0], use_reentrant=False)


def test_a_version_of_torch_that_hides_its_segments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> None:
        raise LookupError

    monkeypatch.setattr(delay_blocks_module, "checkpointed_region", hidden)
    with (
        pytest.raises(RuntimeError, match=r"torch .* does not show which checkpointed region a forward belongs to"),
        delayed_wgrad(WgradQueue()),
    ):
        pass


class TiedLast(nn.Module):
    """Two layers with one weight, which is registered last: backward's first bucket. One is in a segment."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(WIDTH)
        self.inside, self.head = (Linear(WIDTH, WIDTH, bias=False, fuse_wgrad_accumulation=fused) for _ in range(2))
        self.head.weight = self.inside.weight
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        def segment(x: Tensor) -> Tensor:
            return self.norm(self.inside(x)).tanh()  # type: ignore[no-any-return]

        return self.head(checkpoint(segment, x, use_reentrant=True) if self.recomputes else segment(x))


def test_a_tied_weight_waits_for_a_recompute_that_begins_later() -> None:
    """The head's use of the weight comes first in backward; the segment's comes in a nested backward."""
    model = TiedLast(fused=True)
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1))
    for model.recomputes in (False, True, True):
        batches = BATCHES[0, :2].clone().requires_grad_()
        run_iteration(ddp, batches)
        ddp.finish_grad_sync()
        assert_reduced_to(ddp, plain_grads(TiedLast(fused=False), batches.detach(), loss_of, scale=0.5))


# ---- What cannot be right is refused. ----


def test_reentrant_recompute_that_begins_later_is_right_or_refused() -> None:
    """The graph is walked once for reentrant segments: one that appears later shows itself by its nested backward,
    before which a parameter used outside as well may have been launched. Then the write raises; it is never lost."""
    model = Model("inside_then_outside", fused=True, reentrant=None)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    ddp = DistributedDataParallel(model, config)
    run_iteration(ddp, BATCHES[0, :1])
    ddp.finish_grad_sync()
    model.reentrant = True
    with pytest.raises(RuntimeError, match=r"'inner\.3\.bias' received a gradient after .* non-reentrant recompute"):
        run_iteration(ddp, BATCHES[0, :1])


def test_hooks_of_others_hide_the_innermost_region_alone() -> None:
    found: list[tuple[bool, int]] = []

    def forward(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
            found.append((torch_internals.checkpointed_region() is None, len(torch_internals.checkpointed_regions())))
        assert torch_internals.checkpointed_region() is not None
        return x * x

    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert found == [(True, 1)]


def test_functions_that_read_no_values_are_those_of_torch_too() -> None:
    functions = torch_internals.reads_no_values()
    assert None not in functions
    assert {torch.is_complex, Tensor.is_complex, Tensor.grad.__delete__, Tensor.shape.__get__} <= functions  # type: ignore


def test_a_version_of_torch_that_hides_prehooks_is_named() -> None:
    torch_internals._warn_of_prehooks.cache_clear()
    with pytest.warns(match="no _backward_cls.register_prehook of autograd functions"):
        torch_internals.watch_prehooks(object())


def test_other_wrappers_in_torchs_table_gather_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = SimpleNamespace(_module_state_mapping={1: SimpleNamespace, 2: lambda: None})
    monkeypatch.setitem(sys.modules, "torch.distributed._composable_state", table)  # type: ignore[arg-type]
    assert list(gathered_by_fsdp2()) == []
