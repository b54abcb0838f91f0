"""The global norm counts each logical parameter once, however shards, replicas and experts are spread.

The reference adds up every rank's gradients by hand and takes the norm of the model as it would be on one machine:
dense parameters once, every variant of the experts once, in fp64. Norms are equal to the bit.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from loops import assert_same, weights, wrap
from parity_models import Everything, backward, expert_group
from stock_steps import batch_of, loss_of, make_net, train
from summed_by_hand import alone, everyones_grads, tree_sum
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GradScaler,
    clip_grad_norm,
)
from maingrad.ddp.buckets import iteration_ends
from maingrad.ddp.buckets.iteration_ends import IterationWatcher
from maingrad.ddp.collectives.failure_report import FailureReporter, Watch
from maingrad.ddp.optimizer.grad_norm import clip_coefficient, global_grad_norm
from maingrad.launch import simulate


def norm_by_hand(variants: int, instances: int, microbatches: int) -> Tensor:
    """fp64 norm of the whole model's gradients; those of several instances are added inside them first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp = alone(Everything(fused=True, delayed=False, variant=rank % variants))
    backward(ddp, 0, microbatches)
    squares = torch.zeros((), dtype=torch.float64)

    def add(terms: list[Tensor]) -> None:
        scaled = [term * (1.0 / size) for term in terms]
        inner = max(1, len(scaled) // instances)
        total = tree_sum([tree_sum(scaled[i : i + inner]) for i in range(0, len(scaled), inner)])
        squares.add_(total.double().square().sum())

    for name, by_rank in everyones_grads(ddp).items():
        if name.startswith("experts"):
            for variant in range(variants):
                add(by_rank[variant::variants])
        else:
            add(by_rank)
    return squares.sqrt()


class Norms(NamedTuple):
    expected: Tensor
    norm: Tensor
    returned: Tensor
    coefficient: Tensor
    clipped: list[Tensor]
    before: list[Tensor]


def norms(variants: int, config: dict[str, Any], microbatches: int = 2) -> Norms:
    instances = config.get("num_distributed_optimizer_instances", 1)
    expected = norm_by_hand(variants, instances, microbatches)
    model = Everything(fused=True, delayed=False, variant=dist.get_rank() % variants)
    ddp = DistributedDataParallel(
        model,
        DistributedDataParallelConfig(**{"bucket_size": 300, **config}),
        expert_process_group=expert_group(variants),
    )
    backward(ddp, 0, microbatches)
    norm = global_grad_norm(ddp)
    before = [grad.clone() for grad in ddp.reduced_grads()]
    max_norm = 0.3 * norm.item()
    returned = clip_grad_norm(ddp, max_norm)
    return Norms(expected, norm, returned, clip_coefficient(norm, max_norm), ddp.reduced_grads(), before)


ZERO1: dict[str, Any] = {"use_distributed_optimizer": True}
PLACED: dict[str, dict[str, Any]] = {
    "whole": {},
    "sharded": ZERO1,
    "sharded in one bucket": {**ZERO1, "bucket_size": None},
    "whole parameters": {**ZERO1, "keep_params_whole": True},
    "two instances": {**ZERO1, "num_distributed_optimizer_instances": 2},
}


def check(ranks: int, variants: int, config: dict[str, Any]) -> None:
    results = simulate(norms, ranks, variants, config)
    for result in results:
        assert result.norm.dtype is torch.float32
        assert result.norm.shape == ()
        assert torch.equal(result.norm, result.expected.float()), (result.norm, result.expected)
        assert torch.equal(result.norm, results[0].norm)
        assert torch.equal(result.returned, result.norm)
        assert 0.29 < result.coefficient < 0.31
        for clipped, before in zip(result.clipped, result.before, strict=True):
            assert torch.equal(clipped, before * result.coefficient)
    assert torch.equal(results[0].expected, results[-1].expected)


@pytest.mark.parametrize(
    ("ranks", "variants", "placed"),
    [
        (1, 1, "sharded"),
        (2, 2, "sharded"),
        (3, 1, "sharded"),
        (3, 3, "sharded"),
        (4, 1, "two instances"),
        (4, 2, "whole"),
        (4, 2, "sharded in one bucket"),
        (4, 2, "whole parameters"),
        (4, 2, "two instances"),
        (4, 4, "sharded"),
    ],
)
@pytest.mark.sampled(2)
def test_the_norm_is_that_of_the_model_on_one_machine(ranks: int, variants: int, placed: str) -> None:
    check(ranks, variants, PLACED[placed])


MATRIX = [
    (ranks, variants, placed)
    for ranks in (2, 4, 6, 8)
    for variants in (1, 2, 4)
    for placed in PLACED
    if variants <= ranks and (placed != "two instances" or (ranks // 2) % variants == 0)
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "variants", "placed"), MATRIX)
def test_the_norm_is_that_of_the_model_on_one_machine_everywhere(ranks: int, variants: int, placed: str) -> None:
    """Also six ranks with four variants of experts: one rank holds each of two, two ranks hold each of the others."""
    check(ranks, variants, PLACED[placed])


def test_the_reference_tells_each_way_to_count_from_the_others() -> None:
    """Experts, and differences between their variants, change the norm visibly."""
    one, two = (simulate(norm_by_hand, 4, variants, 1, 1)[0] for variants in (1, 2))
    assert abs(one - two) > 1e-3 * one


def norm_on_meshes() -> tuple[Tensor, Tensor]:
    """Dense parameters on (2, 2); experts of ranks 0 and 2, and of 1 and 3, in one instance each."""
    rank = dist.get_rank()
    expected = norm_by_hand(2, 1, 1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ddp = DistributedDataParallel(
        Everything(fused=True, delayed=False, variant=rank % 2),
        DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=300),
        process_group=mesh,
        expert_process_group=mesh["replicate"],
    )
    backward(ddp, 0, 1)
    return global_grad_norm(ddp), expected


def test_experts_sharded_where_dense_parameters_are_replicated() -> None:
    for norm, expected in simulate(norm_on_meshes, 4):
        torch.testing.assert_close(norm.double(), expected, rtol=2**-23, atol=0)


# ---- Clipping. ----


def placements_agree(config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    ddp = wrap(make_net(torch.bfloat16), bucket_size=300, **config)
    loss_of(ddp, batch_of(0, dist.get_rank(), torch.bfloat16)).backward()
    ddp.finish_grad_sync()
    norm = global_grad_norm(ddp)
    return norm, clip_coefficient(norm, 0.05)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.sampled(1)
def test_the_coefficient_has_the_same_bits_under_every_placement(ranks: int) -> None:
    results = simulate(placements_agree, ranks, {}) + simulate(placements_agree, ranks, ZERO1)
    if ranks == 4:
        results += simulate(placements_agree, ranks, {**ZERO1, "num_distributed_optimizer_instances": 4})
    for norm, coefficient in results:
        assert torch.equal(norm, results[0][0])
        assert torch.equal(coefficient, results[0][1])
    assert results[0][1] < 1


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.05, 1e6])
@pytest.mark.sampled(1)
def test_clipped_training_is_bitwise_the_same_sharded(sharded: bool, max_grad_norm: float) -> None:
    options = {"lr": 0.02, "max_grad_norm": max_grad_norm}
    expected, reference = simulate(train, 3, torch.bfloat16, range(4), {}, options)[0]
    for history, optimizer in simulate(train, 3, torch.bfloat16, range(4), {**ZERO1, "bucket_size": 300}, options):
        for ours, theirs in zip(history, expected, strict=True):
            assert_same(ours, theirs)
        assert torch.equal(optimizer.grad_norm, reference.grad_norm)
        assert optimizer.grad_norm > 0.05


def one_step_each_way(max_norm: float | None, dtype: torch.dtype) -> tuple[dict[str, Tensor], ...]:
    """SGD's weights, clipped inside and outside the step; and the clipped gradients. None: clip to half the norm."""
    results, grads = [], {}
    for inside in (True, False):
        ddp = wrap(make_net(dtype), bucket_size=300)
        loss_of(ddp, batch_of(0, dist.get_rank(), dtype)).backward()
        ddp.finish_grad_sync()
        limit = float(global_grad_norm(ddp) + 1e-6) / 2 if max_norm is None else max_norm
        options = {"max_grad_norm": limit} if inside else {}
        optimizer = DistributedOptimizer(ddp, lr=1.0, optimizer_class=torch.optim.SGD, **options)
        if not inside:
            clip_grad_norm(ddp, limit)
            grads = {name: param.main_grad.clone() for name, param in ddp.module.named_parameters()}
        optimizer.step()
        results.append(weights(ddp))
    return results[0], results[1], grads


def test_inside_and_outside_of_the_step_are_the_same_where_the_coefficient_is_exact() -> None:
    """One half: the kernel divides by 2, ``clip_grad_norm`` multiplies by 0.5."""
    for inside, outside, grads in simulate(one_step_each_way, 2, None, torch.bfloat16):
        assert_same(inside, outside)
        assert any(grad.any() for grad in grads.values())


def test_inside_and_outside_of_the_step_are_roundings_apart() -> None:
    """Inside gradients are divided by 1/c: each of both roundings errs by 2^-24 of the value, as the product g c does;
    then lr g and the weight minus it are rounded, on either side.

        |difference| <= 2^-24 (3 |lr g| + 2 (|lr g| + |w|))
    """
    for inside, outside, grads in simulate(one_step_each_way, 2, 0.01, torch.float32):
        for name, weight in inside.items():
            change = grads[name].double().abs()
            bound = 2.0**-24 * (5 * change + 2 * outside[name].double().abs()) * (1 + 2.0**-20)
            assert ((weight.double() - outside[name].double()).abs() <= bound).all(), name


def test_one_rank_agrees_with_torch() -> None:
    model = make_net()
    loss_of(model, batch_of(0, 0, torch.float32)).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    ddp = wrap(make_net())
    loss_of(ddp, batch_of(0, 0, torch.float32)).backward()
    ddp.finish_grad_sync()
    torch.testing.assert_close(clip_grad_norm(ddp, 0.05), expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(ddp.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.main_grad, theirs.grad, rtol=1e-6, atol=0)


# ---- Dtypes and odd values. ----


class Constant(nn.Module):
    """A module whose gradient is a given value."""

    def __init__(self, grads: list[Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList([torch.zeros_like(grad) for grad in grads])
        self.grads = grads

    def forward(self) -> Tensor:
        return sum(((p * g).real.double().sum() for p, g in zip(self.params, self.grads, strict=True)), torch.zeros(()))


def norm_of(grads: list[Tensor], **config: Any) -> Tensor:
    ddp = wrap(Constant(grads), **config)
    ddp().backward()
    ddp.finish_grad_sync()
    return global_grad_norm(ddp)


@pytest.mark.in_turn
@pytest.mark.parametrize("config", [{}, ZERO1], ids=["whole", "sharded"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.sampled(4)
def test_the_norm_is_as_wide_as_the_widest_gradient(ranks: int, config: dict[str, Any]) -> None:
    three, four = torch.tensor([3.0, 0.0]), torch.tensor([[0.0], [4.0]])
    for grads, dtype in (
        ([three, four], torch.float32),
        ([three.bfloat16(), four.bfloat16()], torch.float32),
        ([three.half(), four], torch.float32),
        ([three.double(), four.bfloat16()], torch.float64),
    ):
        for norm in simulate(norm_of, ranks, grads, **config):
            torch.testing.assert_close(norm, torch.tensor(5.0, dtype=dtype), rtol=1e-6, atol=0)
        for norm in simulate(norm_of, ranks, grads, grad_reduce_in_fp32=False, **config):
            torch.testing.assert_close(norm, torch.tensor(5.0, dtype=dtype), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_the_norm_of_several_models_is_as_wide_as_the_widest(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    def on_each_rank() -> Tensor:
        models = [
            wrap(Constant([torch.tensor([value], dtype=dtype)]))
            for value, dtype in zip((3.0, 4.0), dtypes, strict=True)
        ]
        for model in models:
            model().backward()
        norm = clip_grad_norm(models, 1.0)
        clipped = [model.reduced_grads()[0][0].item() for model in models]
        torch.testing.assert_close(clipped, [0.6, 0.8], rtol=1e-6, atol=0)
        return norm

    for norm in simulate(on_each_rank, 2):
        torch.testing.assert_close(norm, torch.tensor(5.0, dtype=torch.float64), rtol=1e-12, atol=0)


def test_large_and_small_gradients_neither_overflow_nor_vanish() -> None:
    """Their squares would overflow and vanish in fp32."""
    for scale in (1e30, 1e-30):
        (norm,) = simulate(norm_of, 1, [torch.tensor([3.0, 4.0]) * scale], use_distributed_optimizer=True)
        torch.testing.assert_close(norm, torch.tensor(5.0 * scale), rtol=1e-6, atol=0)
        models = [wrap(Constant([torch.tensor([value * scale])])) for value in (3.0, 4.0)]
        for model in models:
            model().backward()
        clipped = clip_grad_norm(models, scale)
        torch.testing.assert_close(clipped, torch.tensor(5.0 * scale), rtol=1e-6, atol=0)


def test_the_widest_gradient_may_be_any() -> None:
    three, four = torch.tensor([3.0, 0.0]), torch.tensor([[0.0], [4.0]])
    for grads in ([three.double(), four], [three, four.double()]):
        assert norm_of(grads).dtype is torch.float64


def test_a_complex_gradients_norm_counts_both_parts() -> None:
    assert norm_of([torch.tensor([3.0 + 4.0j])]) == 5.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_inf_and_nan_reach_every_ranks_norm(value: float) -> None:
    def on_each_rank() -> Tensor:
        grads = [torch.ones(300), torch.ones(70)]
        if dist.get_rank() == 1:
            grads[0][-1] = value
        return norm_of(grads, use_distributed_optimizer=True)

    for norm in simulate(on_each_rank, 3):
        assert not norm.isfinite()


def norms_around_nan(config: dict[str, Any]) -> list[Tensor]:
    """The norms of three clipped iterations, of which the second has NaN on rank 0."""
    ddp = wrap(make_net(), **config)
    found = []
    for step in range(3):
        factor = math.nan if step == 1 and dist.get_rank() == 0 else 1.0
        (loss_of(ddp, batch_of(0, dist.get_rank(), torch.float32)) * factor).backward()
        ddp.finish_grad_sync()
        found.append(clip_grad_norm(ddp, 0.05))
        ddp.zero_grad_buffer()
    for bucket in ddp.buckets:
        assert not bucket.grad_data.any()
    return found


@pytest.mark.parametrize("bucket_size", [1, None])
@pytest.mark.parametrize("config", [{}, ZERO1, {**ZERO1, "keep_params_whole": True}], ids=str)
@pytest.mark.sampled(3)
def test_an_iteration_with_nan_leaves_nothing_behind(config: dict[str, Any], bucket_size: int | None) -> None:
    """Nor in padding, which clipping has multiplied by NaN."""
    for before, bad, after in simulate(norms_around_nan, 3, {**config, "bucket_size": bucket_size}):
        assert bad.isnan()
        assert torch.equal(before, after)
        assert before.isfinite()


def test_zero_gradients_are_left_as_they_are() -> None:
    ddp = wrap(make_net(), use_distributed_optimizer=True)
    ddp.finish_grad_sync()
    assert clip_grad_norm(ddp, 1.0) == 0
    assert not any(grad.any() for grad in ddp.reduced_grads())


def test_a_limit_of_zero_is_refused() -> None:
    ddp = wrap(make_net())
    loss_of(ddp, batch_of(0, 0, torch.float32)).backward()
    for limit in (0.0, -1.0):
        with pytest.raises(ValueError, match="max_norm must be positive"):
            clip_grad_norm(ddp, limit)


@pytest.mark.parametrize("config", [{}, {"overlap_grad_reduce": True}, ZERO1], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.sampled(6)
def test_a_norm_finishes_the_iteration(ranks: int, config: dict[str, Any]) -> None:
    """Ours as torch's: in fp64 that of plain PyTorch over all ranks' batches."""
    batches = [batch_of(0, rank, torch.float64) for rank in range(ranks)]

    def norms_of() -> list[Tensor]:
        found = []
        for clip in (clip_grad_norm, lambda ddp, max_norm: nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)):
            ddp = wrap(make_net(torch.float64), **config)
            loss_of(ddp, batches[dist.get_rank()]).backward()
            found.append(clip(ddp, 1.0))
        return found

    plain = make_net(torch.float64)
    sum(loss_of(plain, batch) / ranks for batch in batches).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for found in simulate(norms_of, ranks):
        torch.testing.assert_close(found, [expected.double()] * 2, rtol=1e-12, atol=0)


def raises_alike(config: dict[str, Any], value: float) -> tuple[str, bool]:
    ddp = DistributedDataParallel(nn.Linear(4, 4), DistributedDataParallelConfig(**config))
    ddp(torch.full((2, 4), value if dist.get_rank() == 1 else 1.0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"the norm of all ranks' gradients is (inf|nan): zero_grad") as raised:
        clip_grad_norm(ddp, 1.0, error_if_nonfinite=True)
    unscaled = bool(ddp.reduced_grads()[0].isfinite().logical_not().any())
    ddp.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()
    clip_grad_norm(ddp, 1.0, error_if_nonfinite=True)
    return str(raised.value), unscaled


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_norm_that_is_not_finite_raises_on_all_ranks_where_the_program_asks_for_it(
    sharded: bool, value: float
) -> None:
    (first, _), (second, _) = simulate(raises_alike, 2, {"use_distributed_optimizer": sharded}, value)
    assert first == second


SKIPPING: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "not fused": (torch.optim.Adagrad, {}),
}


def batches(step: int, ranks: list[int]) -> Tensor:
    rows = [torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
    return torch.cat(rows).double()


def skips_nan(
    name: str, config: dict[str, Any], max_norm: float | None, bad: int, *, late: bool = False
) -> tuple[list[Tensor], float]:
    """late  the program sets the option after it has built the optimizer"""
    cls, options = SKIPPING[name]
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(4, 4).double(), DistributedDataParallelConfig(**config))
    optimizer = DistributedOptimizer(
        ddp, lr=0.1, optimizer_class=cls, max_grad_norm=max_norm, skip_nonfinite=not late, **options
    )
    optimizer.skip_nonfinite = True
    for step in range(4):
        x = batches(step, [dist.get_rank()])
        if step == bad and dist.get_rank() == 1:
            x[0, 0] = math.nan
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish_param_sync()
    assert optimizer.num_skipped_steps is not None
    return [param.detach().clone() for param in ddp.parameters()], optimizer.num_skipped_steps.item()


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("config", [{}, {"use_distributed_optimizer": True, "overlap_grad_reduce": True}])
@pytest.mark.parametrize("name", SKIPPING)
def test_a_step_with_nan_on_one_rank_is_skipped_and_counted_on_all(
    name: str, config: dict[str, Any], max_norm: float | None, bad: int
) -> None:
    cls, options = SKIPPING[name]
    torch.manual_seed(0)
    plain = nn.Linear(4, 4).double()
    optimizer = cls(plain.parameters(), lr=0.1, **options)
    for step in range(4):
        if step != bad:
            plain(batches(step, [0, 1])).square().mean().backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    for found, skipped in simulate(skips_nan, 2, name, config, max_norm, bad):
        assert skipped == 1
        torch.testing.assert_close(found, [param.detach() for param in plain.parameters()], rtol=1e-6, atol=1e-6)


def test_watchers_of_iterations_hear_of_a_step_that_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes that keep a history do."""
    heard: list[bool] = []

    class Watcher(IterationWatcher):
        def ended(self, *_: Any) -> None: ...

        def discarded(self, *_: Any, **__: Any) -> None: ...

        def stepped(self, model: nn.Module, found_inf: Tensor | None) -> None:
            heard.append(found_inf is not None and bool(found_inf))

    monkeypatch.setattr(iteration_ends, "_watchers", [Watcher()])
    ddp = wrap(nn.Linear(2, 1))
    optimizer = DistributedOptimizer(ddp, lr=0.1, skip_nonfinite=True)
    for value in (1.0, math.nan, math.inf, 1.0):
        ddp(torch.full((1, 2), value)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert heard == [False, True, True, False]


def test_clipping_alone_skips_no_step() -> None:
    """A program that has not asked for it sees its NaN."""
    ddp = wrap(nn.Linear(2, 1))
    optimizer = DistributedOptimizer(ddp, lr=0.1, max_grad_norm=1.0)
    ddp(torch.full((1, 2), math.nan)).sum().backward()
    optimizer.step()
    assert optimizer.num_skipped_steps is None and all(param.isnan().all() for param in ddp.parameters())


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_a_step_that_unscales_clips_by_the_norm_of_unscaled_gradients(max_norm: float) -> None:
    """As torch's ``GradScaler`` steps with fused classes: it leaves gradients scaled, and tells the optimizer."""
    found, norms = [], []
    for scale in (None, 8.0):
        ddp = wrap(make_net())
        optimizer: Any = DistributedOptimizer(ddp, lr=1.0, optimizer_class=torch.optim.SGD, max_grad_norm=max_norm)
        (loss_of(ddp, batch_of(0, 0, torch.float32)) * (scale or 1.0)).backward()
        if scale is not None:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
        optimizer.step()
        found.append(weights(ddp))
        norms.append(optimizer.grad_norm)
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*norms)
    assert norms[0] > 0.01


def test_an_optimizer_may_be_told_later_to_skip() -> None:
    for (found, skipped), expected in zip(
        simulate(skips_nan, 2, "AdamW", {}, None, 2, late=True),
        simulate(skips_nan, 2, "AdamW", {}, None, 2),
        strict=True,
    ):
        assert skipped == 1
        torch.testing.assert_close((found, skipped), expected, rtol=0.0, atol=0.0)


def test_what_a_rank_waits_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another rank fails, the error says in what this one waited for it."""
    named: list[tuple[int, str]] = []

    def watch(reporter: Any, what: str, *args: Any, **options: Any) -> Any:
        named.append((dist.get_rank(), what))
        return Watch(reporter, what, *(args or (None,)), **options)

    monkeypatch.setattr(FailureReporter, "watch", watch)

    def on_each_rank(of_stages: bool) -> list[str]:
        group = dist.group.WORLD if of_stages else None
        model = make_net()
        ddp = DistributedDataParallel(
            model,
            DistributedDataParallelConfig(use_distributed_optimizer=not of_stages),
            process_group=WORLD_OF_ONE if of_stages else dist.group.WORLD,
        )
        optimizer = DistributedOptimizer(ddp)
        scaler = GradScaler("cpu", pipeline_group=group)
        scaler.scale(loss_of(ddp, batch_of(0, 0, torch.float32))).backward()
        ddp.finish_grad_sync()
        named.clear()
        dist.barrier()
        scaler.unscale_(optimizer)
        clip_grad_norm([ddp], 1.0, pipeline_group=group)
        dist.barrier()
        return [what for rank, what in named if rank == dist.get_rank()]

    for found in simulate(on_each_rank, 2, False):
        assert found == ["the search for Inf in scaled gradients", "the sum of the gradients' squares"]
    for found in simulate(on_each_rank, 2, True):
        assert found[-2:] == ["the search for Inf in the pipeline's other stages", "the sum of the stages' squares"]
