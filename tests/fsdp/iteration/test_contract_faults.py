"""Faults that systems with a main_grad contract have had, by their numbers in docs/main_grad.md, under full sharding.

Every placement runs each of them, in memory that holds NaN until it is written. Each test is named by a patch in
``tests/faults``, which brings the fault back and must make it fail.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import Experts
from sharded_training import mesh_of, shard
from sharded_twin import mean_loss, no_sync, train_beside
from stale_memory import stale_memory
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from maingrad.fsdp import PLACEMENTS as ROWS
from maingrad.fsdp import FSDPModule, MixedPrecisionPolicy, Placement, fully_shard
from maingrad.launch import simulate
from maingrad.launch.simulation.simulate import SimulatedRankError
from maingrad.te_integration import Linear, WgradQueue, delayed_wgrad
from maingrad.te_integration.wgrad_queue import drain_modules

pytestmark = pytest.mark.sampled(3)

HIDDEN = 8
PLACEMENTS = {"zero3": 1, "hsdp": 2, "zero1": 1, "zero2": 1, "hybrid": 2, "hsdp_zero1": 2}
"""And how many instances of two ranks each."""
every_placement = pytest.mark.parametrize("placements", PLACEMENTS)


@pytest.fixture(autouse=True)
def memory_is_stale() -> Iterator[None]:
    with stale_memory() as taken:
        yield
    assert taken


class Model(nn.Module):
    """A layer, the tested module in a unit of its own, and a head. The module gets the microbatch's number."""

    def __init__(self, tested: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(5, HIDDEN)
        self.tested = tested
        self.head = nn.Linear(HIDDEN, 3)
        self.microbatch = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        return self.head(x + self.tested(x, self.microbatch))


def run(model: Any, batches: Sequence[Tensor]) -> None:
    """The twin's gradients go through autograd. The model's delayed gradients are computed after each backward."""
    last = len(batches) - 1
    for module in model.modules():
        if not isinstance(model, FSDPModule) and hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = False
    for index, batch in enumerate(batches):
        model.microbatch = index
        if index < last:
            with no_sync(model):
                (mean_loss(model(batch)) / len(batches)).backward()
                drain_modules(model)
        else:
            (mean_loss(model(batch)) / len(batches)).backward()
            drain_modules(model)
        for unit in model.units if isinstance(model, FSDPModule) else ():
            for pair in unit.pairs:
                assert pair.whole.grad is None
                assert not getattr(pair.whole, "grad_added_to_main_grad", False)


def check(
    placements: str,
    make: Callable[[], nn.Module],
    *,
    around: type["Model"] | None = None,
    run: Callable[[Any, Sequence[Tensor]], None] = run,
    reshard: bool | None = None,
    **options: Any,
) -> None:
    """Gradients and weights of two steps beside the plain twin's.

    make     what is tested
    around   the model that it is put into; None: ``Model``
    options  of ``train_beside``
    """
    instances = PLACEMENTS[placements]

    def cut(model: nn.Module, **_: Any) -> None:
        mesh = mesh_of(instances, 2)
        shard(model, ["tested"], placements=placements, mesh=mesh, reshard_after_forward=reshard)

    train_beside(placements, lambda: (around or Model)(make()), cut, run, ranks=2 * instances, **options)


def linear(**options: Any) -> Linear:
    return Linear(HIDDEN, HIDDEN, **{"bias": False, "fuse_wgrad_accumulation": True, **options})


class _LazyForeignFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        if not hasattr(ctx.weight, "__fsdp_param__"):
            return dy @ weight, dy.t() @ x
        main_grad = ctx.weight.get_main_grad()
        main_grad += dy.t() @ x
        ctx.weight.grad_added_to_main_grad = True
        zeros = getattr(ctx.weight, "zero_out_wgrad", False)
        return dy @ weight, torch.full_like(weight, 0.0 if zeros else torch.nan)


class LazyForeignLinear(nn.Linear):
    """A foreign layer that asks for ``main_grad`` in backward, and returns uninitialised memory (NaN)."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return _LazyForeignFunction.apply(x, self.weight)


# ---- 3: tied weights. ----


class Tied(nn.Module):
    """Two modules over one weight."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        second.weight = first.weight

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        return self.first(x) + self.second(x.sin())


SECOND: dict[str, Callable[[], nn.Module]] = {
    "fused": linear,
    "plain": lambda: nn.Linear(HIDDEN, HIDDEN, bias=False),
    "foreign": LazyForeignLinear,
}


@every_placement
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.sampled(2)
def test_03_every_use_of_a_tied_weight_counts(placements: str, second: str) -> None:
    check(placements, lambda: Tied(linear(), SECOND[second]()))


@every_placement
def test_03_a_foreign_modules_use_and_a_plain_one_count(placements: str) -> None:
    check(placements, lambda: Tied(LazyForeignLinear(), SECOND["plain"]()))


# ---- 5 and 9: experts. ----


class Group(nn.Module):
    """Three experts, one of which never sees a token."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.experts = Experts(3, HIDDEN, HIDDEN, **options)

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        return self.experts(x)


@every_placement
@pytest.mark.parametrize("packed", [False, True], ids=["discrete", "packed"])
@pytest.mark.sampled(1)
def test_05_delayed_and_unfused_experts_return_nothing_before_their_turn(placements: str, packed: bool) -> None:
    options = {"single_grouped_weight": packed, "single_grouped_bias": packed}
    check(placements, lambda: Group(fuse_wgrad_accumulation=False, delay_wgrad_compute=True, **options))


@every_placement
@pytest.mark.parametrize("packed", [False, True], ids=["discrete", "packed"])
@pytest.mark.sampled(2)
def test_09_an_expert_without_tokens_has_zeros(placements: str, packed: bool) -> None:
    options = {"single_grouped_weight": packed, "single_grouped_bias": packed}
    check(placements, lambda: Group(fuse_wgrad_accumulation=True, **options))


class Leftovers(nn.Module):
    """A unit with parameters that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.plain = linear(), linear(), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        return self.used(x) if microbatch else self.used(x) + self.unused(x)


@every_placement
def test_09_what_no_backward_wrote_has_zeros(placements: str) -> None:
    """One parameter is used in no microbatch, and one in the first alone."""
    check(placements, Leftovers)


# ---- 8: a module used twice. ----


class Twice(nn.Module):
    """One layer, used twice. Each use is told whether this is the first microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(bias=True)

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        first = microbatch == 0
        return self.layer(self.layer(x, is_first_microbatch=first).tanh(), is_first_microbatch=first)


@every_placement
def test_08_the_first_microbatch_overwrites_once(placements: str) -> None:
    check(placements, Twice)


# ---- 10: what is left in .grad. ----


class ForeignThenPlain(nn.Module):
    """A foreign layer that is plain in the second microbatch: a NaN left in ``.grad`` would be added."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = LazyForeignLinear()

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        return nn.Linear.forward(self.layer, x) if microbatch == 1 else self.layer(x)


@every_placement
def test_10_the_hook_clears_a_foreign_placeholder(placements: str) -> None:
    check(placements, ForeignThenPlain, microbatches=3)


# ---- 12: a unit that does not run in every microbatch. ----


class FirstAlone(Model):
    """The tested module runs in the first microbatch alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        return self.head(x + self.tested(x, self.microbatch) if self.microbatch == 0 else x)


@every_placement
def test_12_a_unit_of_the_first_microbatch_alone_is_reduced(placements: str) -> None:
    check(placements, Twice, around=FirstAlone)


class Penalized(nn.Module):
    """Stores a penalty as an attribute, as routers of experts do. The penalty's gradient needs no parameter's value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        self.penalty = self.scale.sum() * (1 + microbatch)
        return x * self.scale


class PenaltyAlone(Model):
    """The loss does not use the unit's outputs. Backward enters the unit's graph at the stored penalty."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        self.tested(x, self.microbatch)
        return self.head(x) + self.tested.penalty


@every_placement
def test_12_a_unit_is_reduced_that_backward_enters_past_its_outputs(placements: str) -> None:
    """If the whole parameters are freed by then, that is an error."""
    if ROWS[placements].inner.parameter is Placement.SHARDED:
        with pytest.raises(
            SimulatedRankError, match=r"backward came to 'tested.scale' of unit 'tested' past the outputs"
        ):
            check(placements, Penalized, around=PenaltyAlone)
        return
    check(placements, Penalized, around=PenaltyAlone)


@pytest.mark.parametrize("placements", ["zero3", "hsdp", "hsdp_zero1"])
def test_12_parameters_that_stay_until_backward_may_be_reached_past_the_outputs(placements: str) -> None:
    check(placements, Penalized, around=PenaltyAlone, reshard=False)


def test_12_a_gather_ahead_of_use_that_has_not_arrived_does_not_stand_for_the_parameters() -> None:
    """Backward has issued the unit's gather, and nobody has waited for it, when it comes past the outputs."""

    def on_each_rank() -> None:
        model: Any = shard(PenaltyAlone(Penalized()), ["tested"])
        model.set_modules_to_backward_prefetch([model.tested])
        with pytest.raises(RuntimeError, match=r"backward came to 'tested.scale' of unit 'tested' past the outputs"):
            mean_loss(model(torch.ones(2, 5))).backward()

    with stale_memory():
        simulate(on_each_rank, 2)


# ---- 13: delayed weight gradients. ----


class DelayedPair(nn.Module):
    """Two layers with delayed weight gradients, and one without."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"fuse_wgrad_accumulation": fused, "delay_wgrad_compute": True, "bias": True}
        self.first, self.second, self.plain = linear(**options), linear(**options), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        return self.plain(self.second(self.first(x).tanh()).tanh())


@every_placement
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.sampled(2)
def test_13_no_reduction_comes_before_a_delayed_gradient(placements: str, fused: bool) -> None:
    check(placements, lambda: DelayedPair(fused))


def queued(model: Any, batches: Sequence[Tensor]) -> None:
    """Delayed by a queue alone. The last microbatch's gradients are computed after all backwards."""
    if not isinstance(model, FSDPModule):
        run(model, batches)
        return
    queue = WgradQueue()
    with no_sync(model), delayed_wgrad(queue):
        (mean_loss(model(batches[0])) / len(batches)).backward()
        queue.drain()
    with delayed_wgrad(queue):
        (mean_loss(model(batches[1])) / len(batches)).backward()
    assert len(queue)
    with pytest.raises(RuntimeError, match="pending"):
        model.finish_grad_sync()
    queue.drain()


@every_placement
def test_13_a_queue_that_nobody_was_told_of(placements: str) -> None:
    check(placements, Twice, run=queued)


# ---- 18: sums in fp32. ----


def sums_of_bf16(placements: str, fused: bool, low: bool) -> tuple[torch.dtype, list[float]]:
    """The gradient of a bf16 weight after 256, 1 and -256; ``low``: of the weight's fp32 master."""
    dtype = torch.float32 if low else torch.bfloat16
    layer = Linear(2, 3, bias=False, dtype=dtype, fuse_wgrad_accumulation=fused)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None)
    model = fully_shard(layer, mesh=mesh_of(PLACEMENTS[placements], 2), placements=placements, mixed_precision=policy)
    with model.no_sync():
        for gradient in (256.0, 1.0):
            model(torch.full((1, 2), gradient, dtype=dtype)).sum().backward()
    model(torch.full((1, 2), -256.0, dtype=dtype)).sum().backward()
    grad = layer.weight.grad
    assert grad is not None
    return grad.dtype, grad.to_local().flatten().tolist()


@every_placement
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("low", [True, False], ids=["fp32 masters", "bf16"])
def test_18_small_bf16_gradients_survive_between_large_ones(placements: str, fused: bool, low: bool) -> None:
    found = simulate(sums_of_bf16, 2 * PLACEMENTS[placements], placements, fused, low)
    assert {dtype for dtype, _ in found} == {torch.float32 if low else torch.bfloat16}
    shards = [value for _, values in found for value in values]
    assert shards == [1.0] * (6 if placements in ("zero1", "zero2", "zero3", "hsdp_zero1") else 12)


# ---- 19: a backward that is split. ----


def split_by_torch(placements: str, fused: bool) -> str:
    """Two stages on each rank under a zero-bubble schedule and torch's own stage; returns the refusal."""
    torch.manual_seed(0)
    layers = [linear(name=f"layer {i}") if fused else nn.Linear(HIDDEN, HIDDEN) for i in range(2)]
    mesh, alone = mesh_of(PLACEMENTS[placements], 2), dist.new_subgroups(1)[0]
    modules = [fully_shard(layer, mesh=mesh, placements=placements) for layer in layers]
    stages = [
        pipelining.PipelineStage(module, i, 2, torch.device("cpu"), group=alone) for i, module in enumerate(modules)
    ]
    schedule = pipelining.ScheduleInterleavedZeroBubble(stages, 2, nn.functional.mse_loss, scale_grads=False)
    x, target = torch.randn(2, 4, HIDDEN).unbind()
    try:
        schedule.step(x, target=target, losses=[])
        for module in modules:
            module.finish_grad_sync()
    except RuntimeError as error:
        return str(error)
    return "not refused"


@every_placement
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_19_a_backward_split_by_torch_is_refused(placements: str, fused: bool) -> None:
    """torch's stage looks for the shards in the graph, which has the whole parameters, and gets an error."""
    for message in simulate(split_by_torch, 2 * PLACEMENTS[placements], placements, fused):
        if fused and "_input_metadata" in message:
            continue  # torch's split cannot run any autograd function in Python before 2.13
        assert "uses the parameter 'weight' outside the forward" in message


def split_by_hand(placements: str, fused: bool) -> tuple[Tensor, Tensor, str]:
    """Input gradients first, then the weights', with hooks and without: returns what is missing, and the error."""
    torch.manual_seed(0)
    mesh = mesh_of(PLACEMENTS[placements], 2)
    layer = fully_shard(linear(fuse_wgrad_accumulation=fused), mesh=mesh, placements=placements)
    wholes: list[Tensor] = []
    layer.register_forward_pre_hook(lambda module, _: wholes.append(module.weight))
    x = torch.randn(4, HIDDEN, requires_grad=True)  # the same on all ranks
    y = layer(x)
    with layer.no_sync():
        y.sum().backward(inputs=[x], retain_graph=True)
    y.sum().backward(inputs=wholes, retain_graph=True)
    expected = (torch.ones_like(y).t() @ x.detach()).flatten()
    shard = layer.weight.shard
    found = layer.weight.grad.to_local().flatten() - expected[shard.start : shard.end]

    (wholes[0].grad,) = torch.autograd.grad(y.sum(), wholes)
    with pytest.raises(RuntimeError, match="not reduced yet"):
        torch.optim.SGD(layer.parameters()).step()
    with pytest.raises(RuntimeError) as refusal:
        layer.finish_grad_sync()
    assert wholes[0].grad is None
    layer.finish_grad_sync()
    return found, x.grad, str(refusal.value)


@every_placement
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_19_gradients_that_are_asked_for_one_after_the_other(placements: str, fused: bool) -> None:
    for missing, dx, message in simulate(split_by_hand, 2 * PLACEMENTS[placements], placements, fused):
        assert missing.norm() < 1e-5
        assert dx.any()
        assert "a gradient of parameter 'weight' was put into .grad by hand" in message
        assert "use maingrad.te_integration.pipeline.PipelineStage" in message


# ---- 21: reentrant recompute. ----


class Recomputed(nn.Module):
    """A layer that runs in a recomputed segment, and again outside of it."""

    def __init__(self, fused: bool, outside: str) -> None:
        super().__init__()
        self.layer = linear(bias=True, fuse_wgrad_accumulation=fused)
        self.plain = nn.Linear(HIDDEN, HIDDEN)
        self.outside = outside

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        if self.outside == "before":
            x = self.layer(x)
        x = checkpoint(lambda y: self.plain(self.layer(y).tanh()), x, use_reentrant=True)
        return self.layer(x) if self.outside == "after" else x


@every_placement
@pytest.mark.parametrize("outside", ["before", "after", "not at all"])
@pytest.mark.sampled(2)
def test_21_reentrant_recompute_inside_a_unit_loses_nothing(placements: str, outside: str) -> None:
    check(placements, lambda: Recomputed(outside != "after", outside))


class RecomputedUnit(Model):
    """The whole unit in a recomputed segment, and again outside of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        x = x + checkpoint(self.tested, x, self.microbatch, use_reentrant=True)
        return self.head(x + self.tested(x, self.microbatch))


@every_placement
def test_21_a_unit_that_is_recomputed_and_runs_again_loses_nothing(placements: str) -> None:
    check(placements, Twice, around=RecomputedUnit)


# ---- 23: parameters of before a step. ----


def by_hand(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """A step without torch's optimizers, so that no hook sees it: values are written through ``data``."""

    class ByHand(torch.optim.Optimizer):
        elementwise = True

        def __init__(self) -> None:
            super().__init__(params, {})
            self.mine = [param for group in self.param_groups for param in group["params"]]

        def step(self) -> None:  # type: ignore[override]
            for param in self.mine:
                if param.grad is not None:
                    param.data.sub_(0.1 * param.grad.detach())

    return ByHand()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "fused adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "by hand": lambda model: by_hand(model.parameters()),
}


@every_placement
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.sampled(2)
def test_23_a_step_is_seen_by_the_next_forward(placements: str, optimizer: str) -> None:
    """Whole parameters at rest are gathered again, whatever has changed the shards or ran after backward."""

    def validated(model: nn.Module, batches: Sequence[Tensor]) -> None:
        run(model, batches)
        with torch.no_grad():
            model(batches[0])

    check(placements, Twice, run=validated, steps=3, optimizer=OPTIMIZERS[optimizer])
