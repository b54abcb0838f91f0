"""``DistributedOptimizer`` is torch's AdamW on fp32 masters, whole or sharded, clipped, scheduled, saved and loaded."""

import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from loops import assert_same, ddp_backward, loss_of, main_grads, make_batches, make_model, weights, wrap
from torch import Tensor, nn
from torch.optim import lr_scheduler

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, DistributedOptimizer, clip_grad_norm
from maingrad.launch import simulate

DTYPES = [torch.float32, torch.bfloat16]
HYPER: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Reference:
    """torch.optim.AdamW over one fp32 master per parameter, fed with ``main_grad``."""

    def __init__(self, ddp: DistributedDataParallel, **hyper: Any) -> None:
        self.masters = {name: nn.Parameter(weight.float()) for name, weight in weights(ddp).items()}
        self.dtypes = {name: weight.dtype for name, weight in weights(ddp).items()}
        self.optimizer = torch.optim.AdamW(self.masters.values(), **{**HYPER, **hyper}, fused=True)

    def step(self, ddp: DistributedDataParallel, max_norm: float | None = None) -> Tensor | None:
        for name, grad in main_grads(ddp).items():
            self.masters[name].grad = grad.float()
        norm = None if max_norm is None else torch.nn.utils.clip_grad_norm_(self.masters.values(), max_norm)
        self.optimizer.step()
        return norm

    def weights(self) -> dict[str, Tensor]:
        return {name: master.detach().to(self.dtypes[name]) for name, master in self.masters.items()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], eps: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name].double() - value.double()).norm() <= eps * value.double().norm(), name


# ---- One rank. ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("bucket_size", [1, None])
@pytest.mark.sampled(4)
def test_one_rank_is_bitwise_adamw_on_fp32_masters(dtype: torch.dtype, sharded: bool, bucket_size: int | None) -> None:
    ddp = wrap(make_model(dtype), use_distributed_optimizer=sharded, bucket_size=bucket_size)
    reference = Reference(ddp)
    optimizer = DistributedOptimizer(ddp, **HYPER)
    for step in range(5):
        ddp_backward(ddp, make_batches(3, dtype, seed=step))
        reference.step(ddp)
        optimizer.step()
        assert optimizer.grad_norm is None
        ddp.zero_grad_buffer()
    assert_same(weights(ddp), reference.weights())


def test_half_gradients_of_bf16_parameters_step_too() -> None:
    ddp = wrap(make_model(torch.bfloat16), grad_reduce_in_fp32=False)
    reference = Reference(ddp)
    optimizer = DistributedOptimizer(ddp, **HYPER)
    for step in range(3):
        ddp_backward(ddp, make_batches(2, torch.bfloat16, seed=step))
        assert all(grad.dtype is torch.bfloat16 for grad in main_grads(ddp).values())
        reference.step(ddp)
        optimizer.step()
        ddp.zero_grad_buffer()
    assert_same(weights(ddp), reference.weights())


def test_parameters_of_several_dtypes_step_together() -> None:
    model = nn.Sequential(make_model(torch.bfloat16), nn.Linear(4, 16, dtype=torch.float32))
    model.forward = lambda x: model[1](model[0](x).float())
    ddp = wrap(model)
    reference = Reference(ddp)
    optimizer = DistributedOptimizer(ddp, **HYPER)
    for step in range(3):
        ddp_backward(ddp, make_batches(2, torch.bfloat16, seed=step))
        reference.step(ddp)
        optimizer.step()
        ddp.zero_grad_buffer()
    assert_same(weights(ddp), reference.weights())


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_weight_decay_moves_every_parameter_and_zero_gradients_move_nothing_else(weight_decay: float) -> None:
    ddp = wrap(make_model())
    before = weights(ddp)
    optimizer = DistributedOptimizer(ddp, lr=0.1, weight_decay=weight_decay)
    ddp.finish_grad_sync()
    optimizer.step()
    for name, value in weights(ddp).items():
        assert torch.equal(value, before[name] * (1 - 0.1 * weight_decay)), name


def test_padding_never_moves() -> None:
    ddp = wrap(make_model(torch.bfloat16), bucket_size=1, pad_buckets_for_high_nccl_busbw=True)
    optimizer = DistributedOptimizer(ddp, **HYPER, max_grad_norm=0.1)
    for step in range(3):
        ddp_backward(ddp, make_batches(2, torch.bfloat16, seed=step))
        optimizer.step()
        ddp.zero_grad_buffer()
    for bucket, master in zip(ddp.buckets, optimizer.state_dict()["masters"], strict=True):
        padding = torch.ones(bucket.layout.numel, dtype=torch.bool)
        for slot in bucket.layout.slots:
            padding[slot.start - bucket.layout.start : slot.end - bucket.layout.start] = False
        assert padding.sum() == bucket.layout.padding > 0
        assert not master[padding].any()
        assert not bucket.grad_data[padding].any()


def test_parameters_keep_their_identity_values_and_ties() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), make_model(), nn.Linear(4, 8), nn.Linear(8, 10, bias=False))
    model[3].weight = model[0].weight
    objects, before = list(model.parameters()), weights(model)
    ddp = wrap(model)
    DistributedOptimizer(ddp)
    assert all(now is then for now, then in zip(model.parameters(), objects, strict=True))
    assert model[3].weight is model[0].weight
    assert_same(weights(model), before)


def test_parameters_that_share_memory_without_being_one_object_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(ValueError, match=r"parameters '1.weight' and '0.weight' share memory.*one nn.Parameter"):
        DistributedOptimizer(wrap(model))


def test_zero_grad_starts_a_new_iteration() -> None:
    model = make_model()
    ddp = wrap(model, overlap_grad_reduce=True)
    reference = Reference(ddp)
    optimizer = DistributedOptimizer(ddp, **HYPER)
    for step in range(3):
        optimizer.zero_grad(set_to_none=bool(step % 2))
        ddp_backward(ddp, make_batches(2, seed=step))
        reference.step(ddp)
        optimizer.step()
    assert_same(weights(ddp), reference.weights())


# ---- Clipping. ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_norm", [1e-3, 0.3, 1e3])
@pytest.mark.sampled(6)
def test_clipping_is_torchs(dtype: torch.dtype, max_norm: float) -> None:
    """Ours divides by the inverse coefficient, torch multiplies: one rounding apart, which AdamW does not amplify."""
    models = [wrap(make_model(dtype)) for _ in range(2)]
    reference = Reference(models[0])
    inside = DistributedOptimizer(models[0], **HYPER, max_grad_norm=max_norm)
    outside = DistributedOptimizer(models[1], **HYPER)
    for step in range(3):
        for ddp in models:
            ddp_backward(ddp, make_batches(2, dtype, seed=step))
        expected = reference.step(models[0], max_norm)
        inside.step()
        norm = clip_grad_norm(models[1], max_norm)
        outside.step()
        for each in (inside.grad_norm, norm):
            torch.testing.assert_close(each, expected, rtol=1e-6, atol=0)
        for ddp in models:
            ddp.zero_grad_buffer()
    eps = 1e-5 if dtype is torch.float32 else 2.0**-8
    assert_close(weights(models[0]), reference.weights(), eps)
    assert_close(weights(models[1]), reference.weights(), eps)


# ---- Schedulers. ----

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=6, eta_min=1e-4),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
    "warmup": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.filterwarnings("error")  # schedulers warn where they see no step of their optimizer
def test_schedulers_drive_it_as_they_drive_adamw(
    schedule: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler],
) -> None:
    ddp = wrap(make_model())
    reference = Reference(ddp)
    optimizer = DistributedOptimizer(ddp, **HYPER)
    ours, theirs = schedule(optimizer), schedule(reference.optimizer)
    rates = []
    for step in range(7):
        ddp_backward(ddp, make_batches(2, seed=step))
        reference.step(ddp)
        optimizer.step()
        ddp.zero_grad_buffer()
        ours.step()
        theirs.step()
        assert ours.get_last_lr() == theirs.get_last_lr() == [optimizer.param_groups[0]["lr"]]
        assert optimizer.param_groups[0]["betas"] == reference.optimizer.param_groups[0]["betas"]
        rates += ours.get_last_lr()
    assert len(set(rates)) > 3
    assert_same(weights(ddp), reference.weights())


def test_there_is_one_group_with_adamws_own_keys() -> None:
    optimizer = DistributedOptimizer(wrap(make_model()), **HYPER)
    (group,) = optimizer.param_groups
    (expected,) = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **HYPER, fused=True).param_groups
    assert {key: value for key, value in group.items() if key != "params"} == {
        key: value for key, value in expected.items() if key != "params"
    }


# ---- Ranks. ----


class Run(NamedTuple):
    weights: dict[str, Tensor]
    masters: list[Tensor]
    norms: list[Tensor | None]


def train(dtype: torch.dtype, sharded: bool, steps: int = 4, max_norm: float | None = 0.2) -> Run:
    rank = torch.distributed.get_rank()
    ddp = wrap(make_model(dtype), use_distributed_optimizer=sharded, bucket_size=64, overlap_grad_reduce=bool(sharded))
    optimizer = DistributedOptimizer(ddp, **HYPER, max_grad_norm=max_norm)
    norms = []
    for step in range(steps):
        ddp_backward(ddp, make_batches(2, dtype, seed=100 * rank + step))
        optimizer.step()
        norms.append(optimizer.grad_norm)
        ddp.zero_grad_buffer()
    return Run(weights(ddp), copy.deepcopy(optimizer.state_dict()["masters"]), norms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.sampled(2)
def test_sharded_equals_whole(ranks: int, dtype: torch.dtype) -> None:
    whole = simulate(train, ranks, dtype, False)
    sharded = simulate(train, ranks, dtype, True)
    for run in sharded:
        assert_same(run.weights, sharded[0].weights)
        # The squares are summed in another order, so that the clipped gradients differ by a rounding.
        torch.testing.assert_close(run.norms, whole[0].norms, rtol=1e-6, atol=0)
        assert_close(run.weights, whole[0].weights, 1e-5 if dtype is torch.float32 else 2.0**-8)
    assert sum(m.numel() for m in sharded[0].masters) * ranks >= sum(m.numel() for m in whole[0].masters)
    assert sum(m.numel() for m in sharded[0].masters) < sum(m.numel() for m in whole[0].masters)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.sampled(1)
def test_without_clipping_sharded_is_bitwise_whole(ranks: int) -> None:
    whole = simulate(train, ranks, torch.bfloat16, False, max_norm=None)
    for run in simulate(train, ranks, torch.bfloat16, True, max_norm=None):
        assert_same(run.weights, whole[0].weights)


@pytest.mark.parametrize("config", [{}, {"use_distributed_optimizer": True}], ids=str)
def test_gradients_of_slices_are_reduced_when_they_are_read(config: dict[str, Any]) -> None:
    """A program that reads ``slice.grad`` right after its backward, as an optimizer by hand does."""

    def on_rank() -> list[Tensor]:
        ddp = wrap(nn.Linear(8, 32, bias=False), bucket_size=1, **config)
        optimizer = DistributedOptimizer(ddp)
        ddp(torch.full((2, 8), 1.0 + dist.get_rank())).sum().backward()
        return [held.grad.clone() for held in optimizer.slices]

    for (grad,) in simulate(on_rank, 2):
        assert grad.numel() == (128 if config else 256)
        assert (grad == 3.0).all()  # two rows of 1, and of 2


def test_gradients_of_slices_that_nobody_has_are_not_read() -> None:
    """Released memory holds no sums between microbatches."""

    def on_rank() -> None:
        ddp = wrap(nn.Linear(8, 32), use_distributed_optimizer=True, release_grads=True)
        (held, *_) = DistributedOptimizer(ddp).slices
        with ddp.no_sync():
            ddp(torch.ones(2, 8)).sum().backward()
        with pytest.raises(RuntimeError, match=r"a read of the gradient of '\w+' before the reduction"):
            _ = held.grad
        ddp(torch.ones(2, 8)).sum().backward()
        assert held.grad.any() or not held.grad.numel()

    simulate(on_rank, 2)


def test_a_model_that_is_loaded_behind_its_optimizer_loses_no_bits() -> None:
    """Equal bf16 weights leave the fp32 masters, whose steps are far below a rounding of theirs."""
    found = []
    for reloads in (False, True):
        ddp = wrap(make_model(torch.bfloat16), use_distributed_optimizer=True)
        optimizer = DistributedOptimizer(ddp, lr=1e-4)
        for step in range(12):
            ddp_backward(ddp, make_batches(1, torch.bfloat16, seed=step))
            optimizer.step()
            ddp.zero_grad_buffer()
            if reloads:
                ddp.module.load_state_dict(copy.deepcopy(ddp.module.state_dict()))
        found.append(weights(ddp))
    assert_same(*found)


def load_on_rank_0_and_step() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    ddp = wrap(make_model(torch.bfloat16), use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(ddp, lr=0.0)
    if torch.distributed.get_rank() == 0:
        ddp.module.load_state_dict(make_model(torch.bfloat16, seed=7).state_dict())
    ddp.broadcast_params()
    ddp_backward(ddp, make_batches(1, torch.bfloat16))
    optimizer.step()
    return weights(ddp), weights(make_model(torch.bfloat16, seed=7))


@pytest.mark.parametrize("run", [simulate, run_ranks])
def test_a_load_on_rank_0_and_a_broadcast_reach_every_ranks_masters(run: Callable[..., list[Any]]) -> None:
    """Real collectives write without incrementing the tensor's version, by which masters are refreshed."""
    for got, expected in run(load_on_rank_0_and_step, 2):
        assert_same(got, expected)


# ---- Saving and loading. ----


def resume(dtype: torch.dtype, sharded: bool, max_norm: float | None) -> None:
    """Four steps in one run, and two steps, a file, two steps: the same bits."""
    rank = torch.distributed.get_rank()

    def run(steps: range, state: io.BytesIO | None) -> tuple[io.BytesIO, dict[str, Tensor]]:
        ddp = wrap(make_model(dtype, seed=3 if state else 0), use_distributed_optimizer=sharded, bucket_size=64)
        optimizer = DistributedOptimizer(ddp, **HYPER, max_grad_norm=max_norm)
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        if state:
            saved = torch.load(state)
            optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
        for step in steps:
            ddp_backward(ddp, make_batches(2, dtype, seed=100 * rank + step))
            optimizer.step()
            schedule.step()
            ddp.zero_grad_buffer()
        saved_to = io.BytesIO()
        torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, saved_to)
        saved_to.seek(0)
        return saved_to, weights(ddp)

    _, expected = run(range(4), None)
    state, _ = run(range(2), None)
    _, resumed = run(range(2, 4), state)
    assert_same(resumed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sharded, ranks", [(False, 1), (False, 2), (True, 3)])
@pytest.mark.sampled(3)
def test_a_saved_and_loaded_run_continues_bitwise(dtype: torch.dtype, sharded: bool, ranks: int) -> None:
    simulate(resume, ranks, dtype, sharded, 0.2)


def test_a_loaded_optimizer_still_reads_the_groups_that_schedulers_write() -> None:
    ddp = wrap(make_model())
    optimizer = DistributedOptimizer(ddp, **HYPER)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.0
    before = weights(ddp)
    ddp_backward(ddp, make_batches(1))
    optimizer.step()
    assert_same(weights(ddp), before)
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_a_state_from_before_the_first_step_begins_anew() -> None:
    ddp = wrap(make_model())
    optimizer = DistributedOptimizer(ddp, **HYPER)
    fresh, begin = copy.deepcopy(optimizer.state_dict()), weights(ddp)
    ends = []
    for _ in range(2):
        for step in range(2):
            ddp_backward(ddp, make_batches(1, seed=step))
            optimizer.step()
            ddp.zero_grad_buffer()
        ends.append(weights(ddp))
        optimizer.load_state_dict(fresh)
        assert not optimizer.state_dict()["state"]
        assert_same(weights(ddp), begin)
    assert_same(*ends)


class FailsOnce(torch.optim.SGD):
    """Its first step finds no memory."""

    failed = False
    elementwise = True

    def step(self, closure: Any = None) -> Any:
        if not FailsOnce.failed:
            FailsOnce.failed = True
            raise MemoryError
        return super().step(closure)


@pytest.mark.parametrize("optimizer_class", [FailsOnce, type("FailsWithoutAFusedKernel", (FailsOnce,), {})])
def test_a_step_that_raised_may_be_taken_again(optimizer_class: type[FailsOnce]) -> None:
    """Its gradients are those of before, for torch's clipping too."""
    FailsOnce.failed = False
    ddp = wrap(make_model(), use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(ddp, lr=0.1, optimizer_class=optimizer_class)
    ddp_backward(ddp, make_batches(1))
    expected = {name: weight - 0.1 * main_grads(ddp)[name] for name, weight in weights(ddp).items()}
    norm = torch.nn.utils.get_total_norm([main_grads(ddp)[name] for name in expected])
    with pytest.raises(MemoryError):
        optimizer.step()
    own = [param for group in optimizer.param_groups for param in group["params"]]
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(own, 1e9), norm)
    optimizer.step()
    assert_close(weights(ddp), expected, 1e-6)


class CountsSteps(torch.optim.SGD):
    """Counts its steps for all parameters together, and divides no gradient itself, as torch's fused kernels do."""

    elementwise = True
    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"])


def test_a_class_of_the_programs_own_steps_once_on_clipped_gradients() -> None:
    """Also where buckets are updated while others are reduced or gathered, and though torch has a fused kernel for its
    base."""

    def on_each_rank() -> None:
        options = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 64}
        ddp = wrap(make_model(), use_distributed_optimizer=True, **options)
        optimizer = DistributedOptimizer(ddp, lr=1.0, optimizer_class=CountsSteps)
        (batch,) = make_batches(1)

        def moved() -> Tensor:
            before = weights(ddp)
            ddp(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack([(weights(ddp)[name] - weight).norm() for name, weight in before.items()]).norm()

        for steps in (1, 2):
            assert moved() > 0.1
            assert optimizer._inners[0].steps == steps  # type: ignore[attr-defined]
        optimizer.max_grad_norm = 1e-3
        torch.testing.assert_close(moved(), torch.tensor(1e-3), rtol=1e-2, atol=0)

    simulate(on_each_rank, 2)


def test_gradients_that_were_exposed_by_hand_are_stepped() -> None:
    """After backwards under ``no_sync`` alone, which leave nothing in ``.grad``."""
    ddp = wrap(make_model())
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    before = weights(ddp)
    with ddp.no_sync():
        ddp(make_batches(1)[0]).square().sum().backward()
    ddp.finish_grad_sync()
    ddp.expose_grads()
    optimizer.step()
    assert not torch.equal(weights(ddp)["0.weight"], before["0.weight"])


def test_a_scale_of_a_step_that_was_forgotten_is_forgotten_too() -> None:
    """After a capture that failed."""
    ddp = wrap(make_model(), use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(ddp, lr=0.1, optimizer_class=torch.optim.SGD)
    ddp_backward(ddp, make_batches(1))
    expected = {name: weight - 0.1 * main_grads(ddp)[name] for name, weight in weights(ddp).items()}
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.forget_step()
    optimizer.step()
    assert_close(weights(ddp), expected, 1e-6)


def test_parameters_without_elements_share_no_memory() -> None:
    model = nn.ParameterList([torch.ones(3), torch.empty(0), torch.empty(0, 4)])
    assert len(DistributedOptimizer(wrap(model)).slices) == 3


def test_the_number_of_steps_is_no_state_of_an_element() -> None:
    """Though a parameter of one element has one number of each."""
    ddp = wrap(nn.ParameterList([torch.ones(1)]), keep_params_whole=True, use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(ddp)
    ddp.finish_grad_sync()
    optimizer.step()
    (held,) = optimizer.slices
    assert set(held.state()) == {"exp_avg", "exp_avg_sq"}
    assert set(held.scalars()) == {"step"}


def saved_state(sharded: bool, bucket_size: int | None) -> dict[str, Any]:
    ddp = wrap(make_model(), use_distributed_optimizer=sharded, bucket_size=bucket_size)
    return copy.deepcopy(DistributedOptimizer(ddp).state_dict())


@pytest.mark.parametrize(
    "ranks, bucket_size, key, message",
    [
        (2, None, 0, r"that of shard 1 of 2, and this rank has shard 1 of 1"),
        (1, 1, 0, r"saved with another bucket plan, rank or number of ranks"),
        (2, 64, 1, r"that of shard 2 of 2, and this rank has shard 1 of 2: each rank loads what it saved itself"),
    ],
    ids=["other_number_of_ranks", "other_buckets", "other_rank"],
)
def test_a_state_of_another_layout_is_refused(ranks: int, bucket_size: int | None, key: int, message: str) -> None:
    states = simulate(saved_state, ranks, True, bucket_size)

    def load() -> None:
        rank = torch.distributed.get_rank()
        ddp = wrap(make_model(), use_distributed_optimizer=True, bucket_size=64)
        with pytest.raises(ValueError, match=message):
            DistributedOptimizer(ddp).load_state_dict(states[(rank + key) % ranks])

    simulate(load, 2 if key else 1)


def test_each_rank_without_shards_has_the_one_state() -> None:
    for state in simulate(saved_state, 2, False, None):
        assert state["shard"] == "1 of 1"


@pytest.mark.parametrize("key", ["masters", "param_groups", "state"])
def test_a_state_that_was_cut_is_refused(key: str) -> None:
    state = saved_state(True, 64)
    optimizer = DistributedOptimizer(wrap(make_model(), use_distributed_optimizer=True, bucket_size=64))
    cuts = [{name: value for name, value in state.items() if name != key}]
    if key != "state":
        cuts.append({**state, key: state[key][:-1]})
    for cut in cuts:
        with pytest.raises(ValueError, match=rf"not as it was saved: '{key}' is missing, or cut"):
            optimizer.load_state_dict(cut)
    optimizer.load_state_dict(state)


def test_a_state_of_another_rank_is_refused_where_all_shards_are_cut_alike() -> None:
    def made() -> DistributedOptimizer:
        return DistributedOptimizer(wrap(nn.ParameterList([torch.ones(256)]), use_distributed_optimizer=True))

    states = simulate(lambda: copy.deepcopy(made().state_dict()), 2)

    def load() -> None:
        with pytest.raises(ValueError, match=r"that of shard \d of 2, and this rank has shard \d of 2"):
            made().load_state_dict(states[1 - torch.distributed.get_rank()])

    simulate(load, 2)


def test_a_state_of_another_tensor_parallel_rank_is_refused() -> None:
    """Its slices have the same shapes."""

    def made() -> DistributedOptimizer:
        layer = nn.Linear(4, 4, bias=False)
        layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, 0
        ddp = DistributedDataParallel(layer, process_group=WORLD_OF_ONE, tensor_parallel_group=dist.group.WORLD)
        return DistributedOptimizer(ddp)

    states = simulate(lambda: copy.deepcopy(made().state_dict()), 2)

    def load() -> None:
        rank, optimizer = dist.get_rank(), made()
        with pytest.raises(
            ValueError, match=r"that of shard 1 of 1 on tensor-parallel rank \d of 2, and this rank has"
        ):
            optimizer.load_state_dict(states[1 - rank])
        optimizer.load_state_dict(states[rank])

    simulate(load, 2)


def test_a_state_that_does_not_fit_on_one_rank_is_refused_on_all() -> None:
    states = simulate(saved_state, 2, True, 64)

    def load() -> None:
        rank = torch.distributed.get_rank()
        ddp = wrap(make_model(seed=1), use_distributed_optimizer=True, bucket_size=64)
        before = weights(ddp)
        given = {**states[rank], "masters": states[rank]["masters"][rank:]}
        with pytest.raises(ValueError, match=r"'masters' is missing, or cut.*\(on rank 1\)"):
            DistributedOptimizer(ddp).load_state_dict(given)
        assert_same(weights(ddp), before)

    simulate(load, 2)


def test_a_state_of_a_stock_optimizer_is_refused() -> None:
    ddp = wrap(make_model())
    stock = torch.optim.AdamW(make_model().parameters())
    with pytest.raises(ValueError, match=r"saved with another bucket plan.*it has layout None"):
        DistributedOptimizer(ddp).load_state_dict(stock.state_dict())
    assert loss_of(ddp, make_batches(1)[0]).isfinite()
