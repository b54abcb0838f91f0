"""Forms of reduction: the collectives of a step, their results, and the error of bf16 on the wire."""

import re
from collections import Counter
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from parity_models import ROWS, Everything, backward, batch, expert_group, held_grads, train
from summed_by_hand import alone, everyones_grads, tree_sum
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.collectives import reduction as reduction_module
from maingrad.ddp.collectives.rank_grid import make_grid, make_grids
from maingrad.ddp.collectives.reduction import PLACEMENTS, GradReduction, make_reductions
from maingrad.ddp.torch_internals.distributed import premultiplied_sum
from maingrad.launch import simulate

BF16 = torch.bfloat16


# ---- Which collectives. ----


class Launch(NamedTuple):
    """One collective of a rank, from the simulation's record."""

    op: str
    ranks: tuple[int, ...]


OPS = ("all_reduce", "reduce_scatter_single", "all_to_all_single", "all_gather_single")
COMPARE = "compare"
"""The all-reduce of a few integers by which ranks compare their steps: one on each axis of the model's ranks."""


def launches(schedule: list[tuple[int, str]], rank: int) -> Counter[Launch]:
    """What ``rank`` launched of gradients and parameters; wrapping itself broadcasts and compares plans."""
    found: Counter[Launch] = Counter()
    for who, event in schedule:
        match = re.fullmatch(r"launch (\w+) (.*)\(ranks ([\d, ]+)\)", event)
        if who == rank and match and match[1] in OPS:
            op = COMPARE if match[2].startswith("MAX int64") else match[1]
            found[Launch(op, tuple(map(int, match[3].split(", "))))] += 1
    return found


def count(steps: int, microbatches: int, ranks: int, variants: int = 1, **config: Any) -> list[Counter[Launch]]:
    schedule: list[tuple[int, str]] = []
    simulate(
        train,
        ranks,
        "everything",
        fused=True,
        delayed=False,
        microbatches=microbatches,
        num_variants=variants,
        steps=steps,
        schedule=schedule,
        **config,
    )
    return [launches(schedule, rank) for rank in range(ranks)]


ZERO1: dict[str, Any] = {"use_distributed_optimizer": True}
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
# With bucket_size=None the model has three buckets: dense fp32, dense bf16, and the experts, fp32.
FORMS: dict[str, tuple[dict[str, Any], dict[int, dict[Launch, int]]]] = {
    "all-reduce": ({}, {0: {Launch("all_reduce", (0, 1, 2, 3)): 3}}),
    "all-reduce, overlapped": ({"overlap_grad_reduce": True}, {2: {Launch("all_reduce", (0, 1, 2, 3)): 3}}),
    "reduce-scatter": (
        ZERO1,
        {
            rank: {Launch("reduce_scatter_single", (0, 1, 2, 3)): 3, Launch("all_gather_single", (0, 1, 2, 3)): 3}
            for rank in (0, 3)
        },
    ),
    "reduce-scatter, overlapped": (
        {**ZERO1, **OVERLAP},
        {0: {Launch("reduce_scatter_single", (0, 1, 2, 3)): 3, Launch("all_gather_single", (0, 1, 2, 3)): 3}},
    ),
    "bf16 on the wire": (
        {**ZERO1, **OVERLAP, "grad_reduce_wire_dtype": BF16},
        {0: {Launch("all_to_all_single", (0, 1, 2, 3)): 3, Launch("all_gather_single", (0, 1, 2, 3)): 3}},
    ),
    "hybrid": (
        {**ZERO1, **OVERLAP, "num_distributed_optimizer_instances": 2},
        {
            0: {
                Launch("reduce_scatter_single", (0, 1)): 3,
                Launch("all_reduce", (0, 2)): 3,
                Launch("all_gather_single", (0, 1)): 3,
            },
            3: {
                Launch("reduce_scatter_single", (2, 3)): 3,
                Launch("all_reduce", (1, 3)): 3,
                Launch("all_gather_single", (2, 3)): 3,
            },
        },
    ),
    "hybrid, bf16 on the wire": (
        {**ZERO1, "num_distributed_optimizer_instances": 2, "grad_reduce_wire_dtype": BF16},
        {
            1: {
                Launch("all_to_all_single", (0, 1)): 3,
                Launch("all_reduce", (1, 3)): 3,
                Launch("all_gather_single", (0, 1)): 3,
            }
        },
    ),
    "four instances of one rank": (
        {**ZERO1, "num_distributed_optimizer_instances": 4},
        {0: {Launch("all_reduce", (0, 1, 2, 3)): 3}},
    ),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(1)
def test_every_bucket_has_its_collectives_once_a_step(form: str) -> None:
    """For any number of microbatches, inside and across instances."""
    config, expected = FORMS[form]
    for microbatches in (1, 3):
        two = count(2, microbatches, 4, bucket_size=None, **config)
        three = count(3, microbatches, 4, bucket_size=None, **config)
        for rank, launched in expected.items():
            comparisons = {Launch(COMPARE, each.ranks): 1 for each in launched}
            one_step = Counter({**launched, **comparisons})
            assert three[rank] - two[rank] == one_step, f"rank {rank}, {microbatches} microbatches"


@pytest.mark.in_turn
def test_experts_have_collectives_of_their_own_ranks() -> None:
    everyone, same_experts = (0, 1, 2, 3), (1, 3)

    def per_step(**config: Any) -> Counter[Launch]:
        two, three = (count(steps, 3, 4, variants=2, bucket_size=None, **config)[1] for steps in (2, 3))
        return three - two

    assert per_step() == Counter(
        {Launch("all_reduce", everyone): 2, Launch("all_reduce", same_experts): 1, Launch(COMPARE, everyone): 1}
    )
    assert per_step(**ZERO1, **OVERLAP) == Counter(
        {
            Launch("reduce_scatter_single", everyone): 2,
            Launch("all_gather_single", everyone): 2,
            Launch("reduce_scatter_single", same_experts): 1,
            Launch("all_gather_single", same_experts): 1,
            Launch(COMPARE, everyone): 1,
        }
    )
    # Two instances: of the experts' two ranks each is one, so that nothing is left to scatter or to gather.
    assert per_step(**ZERO1, num_distributed_optimizer_instances=2) == Counter(
        {
            Launch("reduce_scatter_single", (0, 1)): 2,
            Launch("all_gather_single", (0, 1)): 2,
            Launch("all_reduce", same_experts): 2 + 1,
            Launch(COMPARE, (0, 1)): 1,
            Launch(COMPARE, same_experts): 1,  # the ranks across instances
        }
    )


def test_a_timeline_names_what_has_run() -> None:
    def names(config: dict[str, Any]) -> set[str]:
        model = DistributedDataParallel(nn.Linear(4, 4), DistributedDataParallelConfig(**config))
        with model.record_timeline() as timeline:
            model(torch.ones(2, 4)).sum().backward()
            model.finish_grad_sync()
        return {span.collective for span in timeline.buckets}

    assert simulate(names, 2, {}) == [{"all_reduce"}] * 2
    assert simulate(names, 2, ZERO1) == [{"reduce_scatter"}] * 2
    assert simulate(names, 2, {**ZERO1, "grad_reduce_wire_dtype": BF16}) == [{"all_to_all"}] * 2


class Backwards(nn.Module):
    """Layers that run in the order against which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def test_a_timeline_shows_a_bucket_that_waits_for_its_turn() -> None:
    def waits() -> bool:
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
        model = DistributedDataParallel(Backwards(), config)
        with model.record_timeline() as timeline:
            model(torch.ones(2, 4)).sum().backward()
            model.finish_grad_sync()
        first, last = timeline.buckets  # as they are launched: against the order of registration
        assert "first" in first.bucket and "last" in last.bucket
        return last.ready < first.ready <= first.launched <= last.launched

    assert simulate(waits, 2) == [True, True]


# ---- What they compute. ----


def reduce_alone(form: str, instances: int, factor: float, in_collective: bool) -> tuple[list[Tensor], Tensor, int]:
    """One reduction of 16 numbers, without a model: all ranks' numbers, this rank's part of the result, its start."""
    size = dist.get_world_size()
    grads = torch.randn(16 * size, generator=torch.Generator().manual_seed(dist.get_rank()))
    everyones = [torch.empty_like(grads) for _ in range(size)]
    dist.all_gather(everyones, grads)
    grid = make_grid(None, num_instances=instances)
    reduction = GradReduction(
        grid, PLACEMENTS[form], factor=factor, in_collective=in_collective, device=torch.device("cpu")
    )
    reduction.start(grads).wait()
    start, end = reduction.owned_range(grads.numel())
    return everyones, grads[start:end], start


@pytest.mark.parametrize("in_collective", [False, True])
@pytest.mark.parametrize(("form", "instances"), [("ddp", 1), ("zero1", 1), ("hybrid", 2), ("hybrid", 4)])
def test_averages_inside_a_collective_and_before_it(form: str, instances: int, in_collective: bool) -> None:
    """NCCL scales inside the collective, other backends before it: both are exact on four ranks."""
    if in_collective and not (premultiplied_sum and hasattr(premultiplied_sum(0.25), "factor")):
        pytest.skip("this version of torch hides the factor of NCCL's operation, which simulated ranks need")
    for everyones, mine, start in simulate(reduce_alone, 4, form, instances, 0.25, in_collective):
        expected = tree_sum([values * 0.25 for values in everyones])[start : start + len(mine)]
        assert torch.equal(mine, expected)


@pytest.mark.parametrize(
    ("backends", "wire", "scales"),
    [
        ({"nccl"}, None, True),
        ({"nccl"}, BF16, False),  # each rank sums what it has received
        ({"nccl", "gloo"}, None, False),
        ({"gloo"}, None, False),
        (set(), None, False),  # alone: there is no collective
    ],
)
def test_nccl_scales_where_all_of_the_sum_is_its(
    backends: set[str], wire: torch.dtype | None, scales: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction_module, "backends_of", lambda groups, device: backends)
    options: Any = {"factor": 0.25, "wire_dtype": wire, "device": torch.device("cpu")}
    for operation in (lambda factor: None, None):  # None: this version of torch hides the operation
        monkeypatch.setattr(reduction_module, "premultiplied_sum", operation)
        found = GradReduction(make_grid(None), PLACEMENTS["hybrid"], **options).in_collective
        assert found is (scales and operation is not None)


@pytest.mark.parametrize("asked", [True, False, None])
def test_a_config_may_say_who_scales(asked: bool | None) -> None:
    config = DistributedDataParallelConfig(average_in_collective=asked)
    reduction = DistributedDataParallel(nn.Linear(2, 2), config).reductions["dense"]
    assert reduction.in_collective is bool(asked)


def test_a_version_of_torch_that_cannot_scale_inside_a_collective_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction_module, "premultiplied_sum", None)

    def refuse() -> None:
        with pytest.raises(RuntimeError, match=r"average_in_collective: torch .* does not show NCCL's scaled sum"):
            reduce_alone("ddp", 1, 0.375, True)

    simulate(refuse, 2)


def reduce_inside_into(
    form: str, instances: int, wire: torch.dtype | None, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The stages inside an instance alone, into memory of mine: what is summed for me, the memory as it was left, and
    what was returned."""
    rank, size = dist.get_rank(), dist.get_world_size()
    grads = torch.randn(16 * size, generator=torch.Generator().manual_seed(rank))
    everyones = [torch.empty_like(grads) for _ in range(size)]
    dist.all_gather(everyones, grads)
    grid = make_grid(None, num_instances=instances)
    reduction = GradReduction(grid, PLACEMENTS[form], factor=0.25, wire_dtype=wire, device=torch.device("cpu"))
    start, end = reduction.range_inside(grads.numel())
    into = torch.full((end - start,), torch.nan, dtype=dtype)
    stages = reduction.inside(grads, into)
    while True:
        try:
            work = next(stages)
        except StopIteration as over:
            mine = over.value
            break
        work.wait()
    first = rank // grid.inner_size * grid.inner_size
    return [values[start:end] for values in everyones[first : first + grid.inner_size]], into, mine


@pytest.mark.parametrize(
    ("form", "instances", "ranks", "wire", "dtype", "used"),
    [
        ("zero1", 1, 4, None, torch.float32, True),
        ("zero1", 1, 3, None, torch.float32, True),
        ("zero1", 1, 4, BF16, torch.float32, True),
        ("hybrid", 2, 4, None, torch.float32, True),
        ("hybrid", 2, 4, BF16, torch.float32, True),
        ("hsdp_zero1", 2, 4, None, torch.float32, True),
        ("zero1", 1, 4, None, torch.float64, False),  # sums of another dtype: a collective cannot write them
        ("ddp", 1, 4, None, torch.float32, False),  # all-reduced in place
        ("zero1", 1, 1, None, torch.float32, False),  # alone: there is no collective
        ("hybrid", 2, 2, None, torch.float32, False),  # so are instances of one rank
    ],
)
def test_a_collective_may_write_into_other_memory(
    form: str, instances: int, ranks: int, wire: torch.dtype | None, dtype: torch.dtype, used: bool
) -> None:
    """Reduce-scatters and sums of received shards write all of that memory, and no other memory."""
    for terms, into, mine in simulate(reduce_inside_into, ranks, form, instances, wire, dtype):
        assert (mine is into) is used
        assert into.isnan().all() if not used else into.isfinite().all()
        if wire is None:
            assert torch.equal(mine, tree_sum([term * 0.25 for term in terms]))
        elif len(terms) > 1:
            sent = torch.stack([(term * 0.25).to(wire) for term in terms])
            assert torch.equal(mine, torch.sum(sent, dim=0, dtype=torch.float32))


@pytest.mark.parametrize(("form", "instances"), [("ddp", 1), ("zero1", 1), ("hybrid", 2)])
def test_a_sum_is_not_scaled(form: str, instances: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No version of torch need show an operation that scales."""
    monkeypatch.setattr(reduction_module, "premultiplied_sum", None)
    for everyones, mine, start in simulate(reduce_alone, 4, form, instances, 1.0, True):
        assert torch.equal(mine, tree_sum(everyones)[start : start + len(mine)])


def reduced_beside_tensor_ranks(per_token: bool) -> dict[str, float]:
    """Of each kind, what two data ranks of two tensor-parallel ranks each get of gradients 1 and 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    options: dict[str, Any] = {"has_experts": False, "num_instances": 1, "separate_gather": False}
    grids = make_grids(mesh["dp"], None, tensor_ranks=mesh["tp"].get_group(), **options)
    config = DistributedDataParallelConfig(calculate_per_token_loss=per_token)
    found = {}
    for kind, reduction in make_reductions(config, grids, torch.device("cpu")).items():
        grads = torch.tensor([mesh["dp"].get_local_rank() + 1.0])
        reduction.start(grads).wait()
        found[kind] = grads.item()
    return found


@pytest.mark.parametrize("per_token", [False, True])
def test_a_sum_beside_tensor_ranks_counts_data_ranks_alone(per_token: bool) -> None:
    """Copies of a gradient count once, slices and parts of one as they are; averages are half of the sums."""
    sums = {"slice": 3.0, "dense": 3.0, "mean": 3.0, "partial": 6.0}
    for found in simulate(reduced_beside_tensor_ranks, 4, per_token):
        assert {kind: found[kind] for kind in sums} == {
            kind: value if per_token else value / 2 for kind, value in sums.items()
        }


def sync_per_token(instances: int, *, sharded: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a mean over all ranks' tokens, and what they should be. Rank r has r + 1 microbatches."""
    rank = dist.get_rank()
    model = nn.Linear(7, 5)
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(3))
    model.features = 7
    config = DistributedDataParallelConfig(
        calculate_per_token_loss=True,
        use_distributed_optimizer=sharded,
        num_distributed_optimizer_instances=instances,
        overlap_grad_reduce=True,
    )
    ddp = DistributedDataParallel(model, config)
    exact = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    tokens = torch.zeros((), dtype=torch.int64)
    for index in range(rank + 1):
        x = batch(0, index, 7)
        with ddp.no_sync() if index < rank else nullcontext():
            ddp(x).square().sum().backward()
        tokens += ROWS
    copy = nn.Linear(7, 5).double()
    copy.load_state_dict(model.state_dict())
    for index in range(rank + 1):
        copy(batch(0, index, 7).double()).square().sum().backward()
    for name, param in copy.named_parameters():
        exact[name] = param.grad
        dist.all_reduce(exact[name])
        exact[name] /= ROWS * sum(range(1, dist.get_world_size() + 1))
    ddp.finish_grad_sync(tokens)
    held = {}
    for name, piece in held_grads(ddp).items():
        held[name] = piece.values
        exact[name] = exact[name].flatten()[piece.start : piece.start + len(piece.values)]
    return held, exact


@pytest.mark.parametrize(("sharded", "instances"), [(False, 1), (True, 1), (True, 2)])
def test_per_token_loss_with_different_numbers_of_microbatches(sharded: bool, instances: int) -> None:
    covered: Counter[str] = Counter()
    for held, exact in simulate(sync_per_token, 4, instances, sharded=sharded):
        for name, values in held.items():
            torch.testing.assert_close(values.double(), exact[name], rtol=1e-5, atol=1e-6)
            covered[name] += values.numel()
    assert covered == {"weight": 35 * (2 if instances == 2 else 1 if sharded else 4), "bias": covered["bias"]}


# ---- bf16 on the wire. ----


def wire_bound(terms: list[Tensor]) -> Tensor:
    """How far a sum of ``terms``, rounded to bf16 each and added in fp32, may lie from the exact sum; fp64.

    bf16 has 8 significant bits: rounding to nearest errs by at most 2^-8 of the value (half of 2^-7, the spacing from
    1 to 2), or by 2^-134 below the normal range. A term is first the fp32 product of gradient and 1/ranks: 2^-24 more.
    n terms are added by n - 1 fp32 additions, each of which errs by at most 2^-24 of a partial sum, and that by at most
    (1 + 2^-8) times the sum of magnitudes. Together, with a little room for products of the errors:

        |error| <= (2^-8 + n 2^-24) (1 + 2^-7) sum |term| + n 2^-134
    """
    magnitude = torch.stack([term.double().abs() for term in terms]).sum(0)
    n = len(terms)
    return (2**-8 + n * 2**-24) * (1 + 2**-7) * magnitude + n * 2.0**-134


def wire_errors(microbatches: int, variants: int, **config: Any) -> list[tuple[str, Tensor, Tensor]]:
    """For each parameter of this rank's shard: the errors of its gradient, and their bound."""
    rank, size = dist.get_rank(), dist.get_world_size()
    same_experts = list(range(rank % variants, size, variants))
    ddp = alone(Everything(fused=True, delayed=False, variant=rank % variants))
    backward(ddp, 0, microbatches)
    terms = {name: [(1 / size) * grad for grad in grads] for name, grads in everyones_grads(ddp).items()}
    del ddp

    model = Everything(fused=True, delayed=False, variant=rank % variants)
    wire = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_wire_dtype=BF16, bucket_size=300, **config
    )
    ddp = DistributedDataParallel(model, wire, expert_process_group=expert_group(variants))
    backward(ddp, 0, microbatches)
    found = []
    for name, piece in held_grads(ddp).items():
        ranks = same_experts if name.startswith("experts") else range(size)
        held = slice(piece.start, piece.start + len(piece.values))
        parts = [terms[name][r].flatten()[held] for r in ranks]
        error = (piece.values.double() - torch.stack([part.double() for part in parts]).sum(0)).abs()
        found.append((name, error, wire_bound(parts)))
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("ranks", "microbatches", "config"),
    [
        (2, 1, {}),
        (3, 3, {"overlap_grad_reduce": True}),
        (4, 1, {"num_distributed_optimizer_instances": 2}),
        (8, 1, {"overlap_grad_reduce": True}),
    ],
)
@pytest.mark.sampled(2)
def test_bf16_on_the_wire_is_within_its_tolerance(ranks: int, microbatches: int, config: dict[str, Any]) -> None:
    rounded = 0
    for found in simulate(wire_errors, ranks, microbatches, 2 if ranks % 2 == 0 else 1, **config):
        for name, error, bound in found:
            assert (error <= bound).all(), f"{name}: {(error / bound).max()} of the tolerance"
            rounded += int((error > 1e-5 * bound).sum())
    assert rounded > 1000, "nothing was rounded: this was not bf16 on the wire"


def reduced(values: Tensor, accumulators: torch.dtype, wire: torch.dtype | None) -> Tensor:
    """The average over ranks of ``values`` [ranks, n]: all ranks' shards of it in one tensor [n]."""
    rank, size = dist.get_rank(), dist.get_world_size()
    grads = values[rank].to(accumulators, copy=True)
    reduction = GradReduction(
        make_grid(None), PLACEMENTS["zero1"], factor=1 / size, wire_dtype=wire, device=torch.device("cpu")
    )
    reduction.start(grads).wait()
    start, end = reduction.owned_range(grads.numel())
    return grads[start:end].double()


def reduction_errors(values: Tensor, accumulators: torch.dtype, wire: torch.dtype | None = None) -> Tensor:
    shards = simulate(reduced, len(values), values, accumulators, wire)
    return (torch.cat(shards) - values.double().mean(0)).abs()


def test_fp32_sums_keep_what_bf16_sums_lose() -> None:
    """Gradients 256, 1, ..., -256: each is exact in bf16, and so is their sum, but not the sums on the way to it."""
    values = torch.tensor([256.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -256.0])[:, None].expand(8, 64).contiguous()
    assert (reduction_errors(values, torch.float32, BF16) == 0).all()
    assert (reduction_errors(values, BF16) >= 0.125).all(), "a bf16 reduction drops a 1 beside 256"


@pytest.mark.parametrize("ranks", [4, 8])  # two numbers of bf16 that nearly cancel have an exact sum
def test_bf16_on_the_wire_is_more_exact_than_a_bf16_reduction(ranks: int) -> None:
    """Large gradients that nearly cancel between ranks, where a sum in bf16 is worst: on average and at most."""
    generator = torch.Generator().manual_seed(ranks)
    large = 100 * torch.randn(ranks // 2, 4096, generator=generator)
    values = torch.cat([large, torch.randn(ranks // 2, 4096, generator=generator) - large.flip(0)])
    wire, half = reduction_errors(values, torch.float32, BF16), reduction_errors(values, BF16)
    assert wire.mean() < half.mean()
    assert wire.max() < half.max()
    full = reduction_errors(values, torch.float32)
    assert full.max() < 1e-3 * wire.max()


@pytest.mark.slow
def test_training_with_bf16_on_the_wire_stays_near() -> None:
    """Twenty steps: the loss falls as with fp32 on the wire."""
    common: dict[str, Any] = {"fused": True, "delayed": False, "microbatches": 1, **ZERO1, **OVERLAP}
    exact = simulate(train, 4, "everything", **common)
    wire = simulate(train, 4, "everything", grad_reduce_wire_dtype=BF16, **common)
    for ours, theirs in zip(wire, exact, strict=True):
        assert ours.losses != theirs.losses
        torch.testing.assert_close(ours.losses[-1], theirs.losses[-1], rtol=0.05, atol=0.0)


def test_a_complex_number_is_two_on_the_wire() -> None:
    for wire, nbytes in ((None, 8 * 10), (BF16, 2 * 2 * 10)):
        reduction = GradReduction(
            make_grid(None), PLACEMENTS["zero1"], factor=1.0, wire_dtype=wire, device=torch.device("cpu")
        )
        assert reduction.wire_nbytes(10, torch.complex64) == nbytes


def test_complex_shards_are_sent_as_two_numbers_each() -> None:
    def on_each_rank() -> list[complex]:
        reduction = GradReduction(
            make_grid(None), PLACEMENTS["zero1"], factor=0.5, wire_dtype=BF16, device=torch.device("cpu")
        )
        grads = torch.tensor([complex(n, 2 * n + dist.get_rank()) for n in range(4)], dtype=torch.complex64)
        reduction.start(grads).wait()
        return grads[slice(*reduction.owned_range(4))].tolist()

    assert simulate(on_each_rank, 2) == [[0.5j, 1 + 2.5j], [2 + 4.5j, 3 + 6.5j]]
