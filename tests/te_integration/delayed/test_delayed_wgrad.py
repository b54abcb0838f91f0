"""Delayed weight gradients: the same numbers, in the requested order, and no bucket reduced early."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.launch import simulate
from maingrad.te_integration import Linear, WgradQueue, delayed_wgrad
from maingrad.te_integration.wgrad_queue import drain_modules

STEPS = 3


class Net(nn.Module):
    """Two ways to delay can be switched on; the head may be tied to the first layer."""

    def __init__(
        self, *, fused: bool, delay: bool, bias: bool = True, tied: bool = False, frozen: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"fuse_wgrad_accumulation": fused, "delay_wgrad_compute": delay}
        self.first = Linear(12, 16, bias, **options)
        self.norm = nn.LayerNorm(16)
        self.middle = Linear(16, 16, bias, **options)
        self.last = Linear(12, 16, bias, **options) if tied else Linear(16, 12, bias, **options)
        if tied:
            self.last.weight = self.first.weight
            self.last.mark_delayed_weights()
        if frozen:
            self.middle.weight.requires_grad_(False)
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.first(x)))
        y = torch.relu(self.middle(y) + self.middle(y * 0.5))  # one module twice in one forward
        return self.last(y[..., :12] if self.tied else y)


def batch(step: int, index: int, rank: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    return torch.randn(5, 12, generator=generator)


def drain(model: nn.Module) -> None:
    """Call every module's backward_dw until no module needs it."""
    for module in reversed(list(model.modules())):
        while getattr(module, "need_backward_dw", bool)():
            module.backward_dw()


def train(
    make: Callable[[], nn.Module], microbatches: int, how: str, config: dict[str, object] | None = None
) -> tuple[list[float], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Losses, every step's reduced gradients (this rank's part), and the weights.

    how  "now"; "module": backward_dw of each module; "modules": their queues together, in bucket order; "queue": one
         queue, in bucket order; "lag": all at the step's end
    """
    config = config or {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
    ddp = DistributedDataParallel(make(), DistributedDataParallelConfig(bucket_size=150, **config))
    optimizer = DistributedOptimizer(ddp, lr=1e-2, max_grad_norm=1.0)
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses, gradients, queue = [], [], WgradQueue()
    for step in range(STEPS):
        for index in range(microbatches):
            with nullcontext() if index == microbatches - 1 else ddp.no_sync():
                with delayed_wgrad(queue) if how in ("queue", "lag") else nullcontext():
                    loss = ddp(batch(step, index, rank)).square().mean() / microbatches
                loss.backward()
                if how == "module":
                    drain(ddp)
                elif how == "modules":
                    drain_modules(ddp)
                elif how == "queue":
                    queue.drain()
            losses.append(loss.item())
        queue.drain()
        queue.check_empty()
        ddp.finish_grad_sync()
        gradients.append({b.name: b.grad_data[slice(*ddp.owned_range(b.layout))].clone() for b in ddp.buckets})
        optimizer.step()
        ddp.zero_grad_buffer()
    return losses, gradients, {name: p.detach().clone() for name, p in ddp.module.named_parameters()}


def by_param(model: nn.Module, microbatches: int, how: str) -> dict[str, torch.Tensor]:
    """One iteration's gradient of each parameter."""
    ddp = DistributedDataParallel(model)
    queue = WgradQueue()
    for index in range(microbatches):
        with ddp.no_sync(), delayed_wgrad(queue) if how == "queue" else nullcontext():
            ddp(batch(0, index)).square().mean().backward()
        if how == "module":
            drain(ddp)
    queue.drain()
    ddp.finish_grad_sync()
    return {record.name: record.view.clone() for record in ddp.records}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("how", ["module", "modules", "queue", "lag"])
@pytest.mark.parametrize("variant", [{}, {"bias": False}, {"tied": True}, {"frozen": True}], ids=str)
@pytest.mark.sampled(4)
def test_delayed_is_bitwise_undelayed(fused: bool, microbatches: int, how: str, variant: dict[str, bool]) -> None:
    if how == "lag" and microbatches > 1 and variant.get("tied"):
        how = "queue"  # across microbatches the two uses of a tied weight would be added in another order
    plain = train(lambda: Net(fused=fused, delay=False, **variant), microbatches, "now")
    delayed = train(lambda: Net(fused=fused, delay=how.startswith("module"), **variant), microbatches, how)
    assert plain[0] == delayed[0], "losses"
    for name, weight in plain[2].items():
        assert torch.equal(weight, delayed[2][name]), name


@pytest.mark.parametrize("config", [{"overlap_grad_reduce": True}, {"use_distributed_optimizer": True}], ids=str)
@pytest.mark.parametrize("how", ["module", "queue", "lag"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.sampled(3)
def test_delayed_is_bitwise_undelayed_on_simulated_ranks(config: dict[str, object], how: str, ranks: int) -> None:
    plain = simulate(lambda: train(lambda: Net(fused=True, delay=False), 2, "now", config), ranks)
    delayed = simulate(lambda: train(lambda: Net(fused=True, delay=how == "module"), 2, how, config), ranks)
    for one, other in zip(plain, delayed, strict=True):
        assert one[0] == other[0]
        for name, weight in one[2].items():
            assert torch.equal(weight, other[2][name]), name


@pytest.mark.parametrize("fused", [True, False])
def test_without_a_provider_it_adds_to_grad(fused: bool) -> None:
    """Unfused, it needs no provider: two microbatches and a tied use add up in .grad. Fused, it is refused by name."""
    layer = Linear(4, 4, fuse_wgrad_accumulation=fused, delay_wgrad_compute=True)
    plain = nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 4)
    if fused:
        with pytest.raises(RuntimeError, match=r"Linear\(in_features=4.*needs weight.main_grad"):
            layer(x).sum().backward()
        return
    for _ in range(2):
        layer(layer(x)).sum().backward()
        plain(plain(x)).sum().backward()
    layer.backward_dw()
    assert layer.need_backward_dw(), "the second microbatch is still pending"
    layer.backward_dw()
    assert not layer.need_backward_dw()
    layer.backward_dw()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
    assert torch.equal(layer.bias.grad, plain.bias.grad)


def test_backward_dw_runs_the_oldest_microbatch() -> None:
    layer = Linear(4, 4, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    ddp = DistributedDataParallel(layer)
    for scale in (1.0, 10.0, 100.0):
        with ddp.no_sync():
            ddp(torch.full((1, 4), scale)).sum().backward()
    seen = []
    while layer.need_backward_dw():
        layer.backward_dw()
        seen.append(layer.weight.main_grad[0, 0].item())
    assert seen == [1.0, 11.0, 111.0]


def test_buckets_launch_as_they_drain_and_not_before() -> None:
    """Each bucket launches right after its last W: bucket k is reduced under the GEMMs of bucket k + 1."""
    model = nn.Sequential(*(Linear(8, 8, bias=False, fuse_wgrad_accumulation=True) for _ in range(4)))
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=64))
    queue = WgradQueue()
    queue.log = []
    phases = []
    for record in ddp.records:
        told = record.on_delayed_wgrad

        def note(told: Callable[[], None] = told, name: str = record.name) -> None:
            told()
            phases.append((name, [bucket.phase.value for bucket in ddp.buckets]))

        record.on_delayed_wgrad = note
    with delayed_wgrad(queue):
        y = ddp(torch.randn(2, 8))
    y.sum().backward()
    assert {bucket.phase.value for bucket in ddp.buckets} == {"accumulating"}
    queue.drain()
    assert [entry.bucket for entry in queue.log] == [0, 1, 2, 3]
    for position, (_, seen) in enumerate(phases):
        assert seen == ["reducing"] * (position + 1) + ["accumulating"] * (3 - position)
    ddp.finish_grad_sync()


class LastFirst(nn.Sequential):
    """A model whose backward reaches the first layer first, while its buckets expect the last layer first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def test_a_queue_drains_in_bucket_order_whatever_order_backward_took() -> None:
    model = LastFirst(*(Linear(8, 8, bias=False, fuse_wgrad_accumulation=True) for _ in range(4)))
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=64))
    queue = WgradQueue()
    queue.log = []
    with delayed_wgrad(queue):
        y = ddp(torch.randn(2, 8))
    y.sum().backward()
    queue.drain()
    assert [entry.bucket for entry in queue.log] == [0, 1, 2, 3]
    ddp.finish_grad_sync()


DRAINS: dict[str, tuple[Callable[[WgradQueue, nn.Module], None], list[int]]] = {
    "drain_microbatch": (lambda queue, _: queue.drain_microbatch(0), [0, 1, 2, 3]),
    "drain_oldest_microbatch": (lambda queue, _: queue.drain_oldest_microbatch(), [3, 2, 1, 0]),
    "drain_module": (lambda queue, model: queue.drain_module(model), [3, 2, 1, 0]),
}
"""How to drain -> the buckets in the order in which they are computed."""


@pytest.mark.parametrize("verb", DRAINS)
def test_a_part_of_a_queue_drains_in_the_order_that_its_verb_names(verb: str) -> None:
    """A microbatch that is named completes buckets early; the oldest one and a module's come as they were queued."""
    names = ["d", "b", "c", "a"]
    options = {"bias": False, "fuse_wgrad_accumulation": True}
    model = LastFirst(*(Linear(8, 8, name=name, **options) for name in names))
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(bucket_size=64))
    queue = WgradQueue()
    queue.log = []
    with delayed_wgrad(queue):
        y = ddp(torch.randn(2, 8))
    y.sum().backward()
    assert queue.pending_owners == names
    drain, order = DRAINS[verb]
    drain(queue, model)
    assert [entry.bucket for entry in queue.log] == order
    ddp.finish_grad_sync()


def test_one_modules_gradients_can_be_drained_alone() -> None:
    """Modules of one size have the same description; only their weights tell them apart."""
    model = nn.Sequential(*(Linear(8, 8, bias=False, fuse_wgrad_accumulation=True) for _ in range(3)))
    ddp = DistributedDataParallel(model)
    queue = WgradQueue()
    for _ in range(2):
        with delayed_wgrad(queue):
            loss = ddp(torch.randn(2, 8)).sum()
        loss.backward()
    queue.drain_module(model[1])
    assert {record.name: record.num_fused_writes for record in ddp.records} == {
        "0.weight": 0,
        "1.weight": 2,
        "2.weight": 0,
    }
    queue.drain_module(model)
    assert {record.num_fused_writes for record in ddp.records} == {2}
    assert len(queue) == 0
    ddp.finish_grad_sync()


def test_modules_with_queues_of_their_own_drain_in_bucket_order_too() -> None:
    model = nn.Sequential(
        *(Linear(8, 8, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=True) for _ in range(4))
    )
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=64))
    ddp(torch.randn(2, 8)).sum().backward()
    order = []
    for module in model:
        module.wgrad_queue.log = order
    drain_modules(ddp)
    assert [entry.bucket for entry in order] == [0, 1, 2, 3]
    assert {bucket.phase.value for bucket in ddp.buckets} == {"reducing"}
    ddp.finish_grad_sync()


@pytest.mark.parametrize("lag", range(5))
def test_w_may_lag_b_by_any_number_of_microbatches(lag: int) -> None:
    microbatches = 6
    plain = by_param(Net(fused=True, delay=False), microbatches, "now")
    ddp = DistributedDataParallel(
        Net(fused=True, delay=False), DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=150)
    )
    queue = WgradQueue()
    for index in range(microbatches):
        with nullcontext() if index == microbatches - 1 else ddp.no_sync(), queue.microbatch(index):
            with delayed_wgrad(queue):
                loss = ddp(batch(0, index)).square().mean()
            loss.backward()
            if index >= lag:
                queue.drain_microbatch(index - lag)
    for index in range(microbatches - lag, microbatches):
        assert not any(b.phase.value == "reducing" for b in ddp.buckets if any(r.pending for r in b.records))
        queue.drain_microbatch(index)
    ddp.finish_grad_sync()
    for record in ddp.records:
        assert torch.equal(record.view, plain[record.name]), record.name


def test_what_is_left_at_the_end_of_a_step_is_an_error_that_names_it() -> None:
    ddp = DistributedDataParallel(Net(fused=True, delay=True))
    ddp(batch(0, 0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"finish_grad_sync|start_grad_sync") as error:
        ddp.finish_grad_sync()
    assert "'last.weight' waits for 1 of Linear(in_features=16, out_features=12)" in str(error.value)
    with pytest.raises(RuntimeError, match=r"zero_grad_buffer\(\) while delayed"):
        ddp.zero_grad_buffer()
    with pytest.raises(
        RuntimeError, match=r"1 delayed weight gradients were never computed, of Linear\(in_features=12"
    ):
        ddp.module.first.wgrad_queue.check_empty()
    drain(ddp)
    ddp.finish_grad_sync()


def test_an_abandoned_iteration_can_be_cleared() -> None:
    queue = WgradQueue()
    ddp = DistributedDataParallel(Net(fused=True, delay=False))
    with delayed_wgrad(queue):
        loss = ddp(batch(0, 0)).sum()
    loss.backward()
    assert len(queue) == 4
    queue.clear()
    ddp.zero_grad_buffer()
    ddp(batch(0, 0)).sum().backward()
    ddp.finish_grad_sync()


def test_a_weight_that_died_is_named() -> None:
    """The queue holds the weight by a weak reference."""
    queue = WgradQueue()
    layer = Linear(4, 4, bias=False, name="gone", delay_wgrad_compute=False)
    with delayed_wgrad(queue):
        y = layer(torch.randn(2, 4))
    y.sum().backward()
    del y, layer
    with pytest.raises(RuntimeError, match="gone, weight: the weight was freed"):
        queue.drain()
    assert len(queue) == 0, "what nobody can compute blocks nobody"


def test_delayed_parameters_get_buckets_of_their_own() -> None:
    ddp = DistributedDataParallel(Net(fused=True, delay=True))
    delayed = {slot.spec.name for bucket in ddp.plan.buckets if bucket.delayed for slot in bucket.slots}
    assert delayed == {"first.weight", "middle.weight", "last.weight"}
    kinds = [bucket.delayed for bucket in ddp.plan.buckets]
    assert kinds == sorted(kinds), "undelayed buckets launch first"


def test_copies_and_materialised_modules_keep_delaying() -> None:
    layer = Linear(4, 4, fuse_wgrad_accumulation=True, delay_wgrad_compute=True, device="meta")
    layer.to_empty(device="cpu")
    twin = copy.deepcopy(layer)
    assert twin.wgrad_queue is not layer.wgrad_queue
    for module in (layer, twin):
        assert module.weight.skip_backward_post_hook
        ddp = DistributedDataParallel(module)
        ddp(torch.randn(2, 4)).sum().backward()
        assert module.need_backward_dw()
        module.backward_dw()
        ddp.finish_grad_sync()


def test_split_parameters_get_their_slices() -> None:
    torch.manual_seed(0)
    whole = Linear(6, 12, fuse_wgrad_accumulation=True)
    split = Linear(6, 12, fuse_wgrad_accumulation=True, parameters_split={"query_": 6, "key_": 4, "value_": 2})
    assert list(split.state_dict()) == [
        "query_weight",
        "key_weight",
        "value_weight",
        "query_bias",
        "key_bias",
        "value_bias",
    ]
    with torch.no_grad():
        for part, rows in zip(("query", "key", "value"), whole.weight.split([6, 4, 2]), strict=True):
            getattr(split, f"{part}_weight").copy_(rows)
        for part, rows in zip(("query", "key", "value"), whole.bias.split([6, 4, 2]), strict=True):
            getattr(split, f"{part}_bias").copy_(rows)
    split.key_weight.requires_grad_(False)
    x = torch.randn(3, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    ddp_whole, ddp_split = DistributedDataParallel(whole), DistributedDataParallel(split)
    ddp_whole(x).square().sum().backward()
    ddp_split(y).square().sum().backward()
    ddp_whole.finish_grad_sync()
    ddp_split.finish_grad_sync()
    torch.testing.assert_close(x.grad, y.grad)
    rows = dict(zip(("query", "key", "value"), whole.weight.main_grad.split([6, 4, 2]), strict=True))
    assert {record.name: record.num_fused_writes for record in ddp_split.records if "weight" in record.name} == {
        "query_weight": 1,
        "value_weight": 1,
    }
    for part in ("query", "value"):
        torch.testing.assert_close(getattr(split, f"{part}_weight").main_grad, rows[part])
    assert split.key_weight.grad is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tp_size": 2}, ValueError, "Linear: tp_size=2, and tp_group, of the tensor-parallel ranks, has 1 rank"),
        ({"ub_overlap_ag": True}, ValueError, "does not support ub_overlap_ag=True"),
        ({"sequence_parallel": True}, ValueError, "sequence_parallel say how a layer is cut"),
        ({"no_such": 1}, TypeError, "Linear has no argument 'no_such'"),
        ({"dtype": torch.float16, "params_dtype": torch.bfloat16}, ValueError, "they are one argument"),
        ({"parameters_split": ("q", "k", "v", "w", "z")}, ValueError, "8 output features do not divide into 5"),
        ({"parameters_split": {"q": 3, "k": 4}}, ValueError, "do not add up to 8"),
        ({"parameters_split": ("q", "q")}, ValueError, "name each slice differently"),
        ({"parameters_split": ("q", "q_")}, ValueError, "name each slice differently"),
        ({"parameters_split": ("q_", "q__")}, ValueError, "name each slice differently"),
        ({"parameters_split": "qkv"}, ValueError, "must name one or more slices"),
        ({"parameters_split": ()}, ValueError, "must name one or more slices"),
        ({"parameters_split": ("q", "_")}, ValueError, "name each slice differently"),
        ({"parameters_split": {"q": 5, "k": 4}}, ValueError, "do not add up to 8"),
        ({"parameters_split": {"q": 8, "k": 0}}, ValueError, "do not add up to 8"),
    ],
)
def test_arguments_that_cannot_take_effect_are_refused(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Linear(4, 8, **arguments)
    Linear(4, 8, tp_size=1, sequence_parallel=False, dtype=torch.float16, params_dtype=torch.float16)


def test_init_method_and_return_bias() -> None:
    layer = Linear(3, 2, init_method=lambda weight: nn.init.constant_(weight, 2.0), return_bias=True)
    output, bias = layer(torch.ones(1, 3))
    assert output.tolist() == [[6.0, 6.0]]
    assert bias is layer.bias
    assert bias.tolist() == [0.0, 0.0]
