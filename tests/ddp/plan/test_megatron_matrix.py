"""Megatron-core's published test matrices for gradient sync, experts and whole-parameter optimizers, run on ours.

The parametrisations are facts from Megatron-LM's ``tests/unit_tests``: ``distributed/test_param_and_grad_buffer.py``
(sharded x overlap x average in the collective x optimizer instances; ten layers of 100 x 100 and biases in one bucket),
``distributed/test_grad_sync_with_expert_parallel.py`` (the same x expert parallelism 1, 2 x expert tensor parallelism
1, 2) and ``test_layer_wise_optimizer.py`` (a model of ten parameters, one of fewer parameters than ranks). Bucket sizes
are in ``test_layout_matrix.py``. Where Megatron refuses to look at gradients before all are in, so do we.
"""

import copy
import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
from maingrad.ddp.buckets.bucket import Phase
from maingrad.launch import simulate

# ---- Gradient sync. ----


class Parameters(nn.Module):
    """Parameters whose gradients are ``value``: the loss is the sum of all parameters, times ``value``."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], experts: dict[str, tuple[int, ...]] | None = None) -> None:
        super().__init__()
        for name, shape in {**shapes, **(experts or {})}.items():
            parameter = nn.Parameter(torch.zeros(shape))
            if name not in shapes:
                parameter.allreduce = False
            self.register_parameter(name, parameter)

    def forward(self, dense: float, expert: float = 0.0) -> Tensor:
        terms = [(getattr(p, "allreduce", True), p) for p in self.parameters()]
        return sum(((dense if is_dense else expert) * p.sum() for is_dense, p in terms), torch.zeros(()))


TEN_LAYERS = {
    f"{kind}{layer}": (100, 100) if kind == "weight" else (100,) for layer in range(10) for kind in ("weight", "bias")
}


class Synced(NamedTuple):
    phases: list[str]
    """Of the bucket, after each parameter's gradient came in."""
    before: float
    """The first element's gradient before the sync, where nothing was launched."""
    held: Tensor
    """The reduced gradients that this rank may read, in all buckets."""


def sync(**config: Any) -> Synced:
    """Reduce gradients that are r + 1 on rank r."""
    model = Parameters(TEN_LAYERS)
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(**config))
    (bucket,) = ddp.buckets
    phases: list[str] = []
    for param in model.parameters():  # runs behind the wrapper's own hook
        param.register_post_accumulate_grad_hook(lambda _: phases.append(bucket.phase.value))
    ddp(dist.get_rank() + 1.0).backward()
    before = bucket.grad_data[0].item() if bucket.phase is not Phase.REDUCING else float("nan")
    ddp.finish_grad_sync()
    held = torch.cat(ddp.reduced_grads())
    padding = torch.ones(bucket.layout.numel, dtype=torch.bool)
    for slot in bucket.layout.slots:
        padding[slot.start : slot.end] = False
    held = held[~padding[slice(*ddp.owned_range(bucket.layout))]]
    return Synced(phases, before, held)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("average_in_collective", [None, False])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_grad_sync(
    sharded: bool, overlap: bool, average_in_collective: bool | None, instances: int, ranks: int
) -> None:
    """The bucket launches with its last parameter, not before, and holds the average: 2.5 over four ranks."""
    config = {
        "use_distributed_optimizer": sharded,
        "overlap_grad_reduce": overlap,
        "average_in_collective": average_in_collective,
        "num_distributed_optimizer_instances": instances,
    }
    if instances > 1 and not sharded:
        with pytest.raises(ValueError, match="num_distributed_optimizer_instances has no effect without"):
            DistributedDataParallelConfig(**config)
        return
    if instances > ranks:
        with pytest.raises(RuntimeError, match="does not divide the 1 ranks"):
            simulate(sync, ranks, **config)
        return
    held = 0
    for rank, synced in enumerate(simulate(sync, ranks, **config)):
        assert len(synced.phases) == 20
        if overlap:
            assert synced.phases == ["accumulating"] * 19 + ["reducing"]
        else:
            assert synced.phases == ["accumulating"] * 20
            assert synced.before == rank + 1
        assert (synced.held == (ranks + 1) / 2).all()
        held += len(synced.held)
    copies = ranks if not sharded else instances
    assert held == copies * 10 * (100 * 100 + 100), "every gradient, once in each instance"


@pytest.mark.parametrize("sharded", [False, True])
def test_averaging_in_the_collective_needs_nccl(sharded: bool) -> None:
    with pytest.raises(RuntimeError, match="average_in_collective needs NCCL"):
        simulate(sync, 2, average_in_collective=True, use_distributed_optimizer=sharded)


# ---- Experts. ----

DENSE = {"router": (4, 512), "norm": (512,)}
EXPERTS = {"fc1": (512, 8), "fc2": (8, 512)}


def sync_experts(ep: int, etp: int, **config: Any) -> tuple[list[tuple[str, Tensor]], tuple[int, ...]]:
    """Dense gradients are 1. An expert sees the tokens of ep x etp ranks, so its gradient is as many times as large."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = tuple(range(rank % (ep * etp), size, ep * etp))  # those that hold the same slice of the same experts
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    model = Parameters(DENSE, EXPERTS)
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(**config), expert_process_group=group)
    ddp(1.0, float(ep * etp)).backward()
    ddp.finish_grad_sync()
    held = []
    for bucket in ddp.buckets:
        mask = torch.zeros(bucket.layout.numel, dtype=torch.bool)
        for slot in bucket.layout.slots:
            mask[slot.start - bucket.layout.start : slot.end - bucket.layout.start] = True
        owned = slice(*ddp.owned_range(bucket.layout))
        held.append((bucket.layout.grid_name, bucket.grad_data[owned][mask[owned]]))
    return held, ranks


@pytest.mark.in_turn
@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("average_in_collective", [None, False])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.sampled(4)
def test_grad_sync_of_experts(
    sharded: bool, overlap: bool, average_in_collective: bool | None, ep: int, etp: int, instances: int
) -> None:
    """All gradients are averaged over all ranks, those of experts too: all are 1 on eight ranks."""
    if instances > 1 and not sharded:
        return  # refused: see above
    results = simulate(
        sync_experts,
        8,
        ep,
        etp,
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=overlap,
        average_in_collective=average_in_collective,
        num_distributed_optimizer_instances=instances,
    )
    numels = {"dense": 0, "expert": 0}
    for held, ranks in results:
        assert len(ranks) == 8 // (ep * etp)
        for kind, values in held:
            assert (values == 1).all(), kind
            numels[kind] += len(values)
    dense, expert = 4 * 512 + 512, 2 * 512 * 8
    assert numels["dense"] == dense * (instances if sharded else 8)
    # Every kind of experts is held once in each instance of the ranks that have it.
    assert numels["expert"] == expert * (ep * etp * instances if sharded else 8)


# ---- Whole parameters. ----


class Small(nn.Sequential):
    """Ten parameters: 80 -> 48 -> 32 -> 24 -> 16 -> 10."""

    def __init__(self) -> None:
        sizes = (80, 48, 32, 24, 16, 10)
        layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        super().__init__(*layers[:-1])


class Tiny(nn.Sequential):
    """Two parameters, fewer than ranks: 10 -> 5."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 5))


MODELS = {"small": Small, "tiny": Tiny}


class Stepped(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[Tensor]
    owned: dict[str, int]
    """Elements of each parameter that this rank updates."""


def build(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]().to(dtype)


def input_of(model: nn.Module, step: int, rank: int) -> Tensor:
    weight = next(model.parameters())
    x = torch.randn(16, weight.shape[1], generator=torch.Generator().manual_seed(100 * step + rank))
    return x.to(weight.dtype)


def step_whole(name: str, dtype: torch.dtype, max_grad_norm: float | None, restore: bool, **config: Any) -> Stepped:
    """Four steps of AdamW; ``restore``: load the state into a new optimizer after two steps."""
    ddp = DistributedDataParallel(build(name, dtype), DistributedDataParallelConfig(**config))

    def optimizer_of(model: DistributedDataParallel) -> DistributedOptimizer:
        return DistributedOptimizer(model, lr=0.01, weight_decay=0.01, max_grad_norm=max_grad_norm, fused=False)

    optimizer = optimizer_of(ddp)
    norms = []
    for step in range(4):
        if restore and step == 2:
            state = copy.deepcopy(optimizer.state_dict())
            weights = copy.deepcopy(ddp.module.state_dict())
            del optimizer, ddp
            ddp = DistributedDataParallel(build(name, dtype), DistributedDataParallelConfig(**config))
            ddp.module.load_state_dict(weights)
            optimizer = optimizer_of(ddp)
            optimizer.load_state_dict(state)
        ddp(input_of(ddp.module, step, dist.get_rank())).float().square().sum().backward()
        ddp.finish_grad_sync()
        optimizer.step()
        if optimizer.grad_norm is not None:
            norms.append(optimizer.grad_norm.clone())
        ddp.zero_grad_buffer()
    owned = {held.name: held.end - held.start for held in optimizer.slices}
    return Stepped({name: p.detach().clone() for name, p in ddp.module.named_parameters()}, norms, owned)


WHOLE: dict[str, Any] = {"use_distributed_optimizer": True, "keep_params_whole": True}


@pytest.mark.in_turn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.sampled(2)
def test_whole_parameters_step_as_all_reduce_does(ranks: int, name: str, dtype: torch.dtype) -> None:
    """Weights are bitwise those of all-reduce; one rank updates each parameter; of eight ranks some update nothing."""
    whole = simulate(step_whole, ranks, name, dtype, None, False, **WHOLE)
    reference = simulate(step_whole, ranks, name, dtype, None, False)
    initial = dict(build(name, dtype).named_parameters())
    for ours, theirs in zip(whole, reference, strict=True):
        for parameter, weight in theirs.weights.items():
            assert torch.equal(ours.weights[parameter], weight)
            assert not torch.equal(weight, initial[parameter])
    for parameter, weight in initial.items():
        held = sorted(ours.owned[parameter] for ours in whole)
        assert held == [0] * (ranks - 1) + [weight.numel()], "one rank has it, whole"
    if name == "tiny" and ranks == 8:
        assert [sum(ours.owned.values()) for ours in whole].count(0) == 6


@pytest.mark.parametrize("max_grad_norm", [1.0, 1e6])
@pytest.mark.sampled(1)
def test_the_norm_over_whole_parameters_is_the_norm(max_grad_norm: float) -> None:
    whole = simulate(step_whole, 4, "small", torch.bfloat16, max_grad_norm, False, **WHOLE)
    reference = simulate(step_whole, 4, "small", torch.bfloat16, max_grad_norm, False)
    for ours, theirs in zip(whole, reference, strict=True):
        assert len(ours.norms) == 4
        torch.testing.assert_close(ours.norms[0], theirs.norms[0], rtol=1e-5, atol=0.0)
        assert all(torch.equal(mine, first) for mine, first in zip(ours.norms, whole[0].norms, strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(1)
def test_whole_parameters_are_saved_and_loaded(name: str) -> None:
    through = simulate(step_whole, 4, name, torch.bfloat16, 1.0, True, **WHOLE)
    without = simulate(step_whole, 4, name, torch.bfloat16, 1.0, False, **WHOLE)
    for ours, theirs in zip(through, without, strict=True):
        for parameter, weight in theirs.weights.items():
            assert torch.equal(ours.weights[parameter], weight)


def step_scaled(fused: bool, unscale: bool) -> tuple[list[float], Tensor, Tensor | None]:
    """Steps with a loss scale and clipping, where most ranks update nothing; the second gradient is infinite."""
    ddp = DistributedDataParallel(build("tiny", torch.float16), DistributedDataParallelConfig(**WHOLE))
    optimizer = DistributedOptimizer(ddp, lr=0.01, max_grad_norm=1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=100)
    scales = []
    for step in range(3):
        loss = ddp(input_of(ddp.module, step, dist.get_rank())).float().square().mean()
        if step == 1 and dist.get_rank() == 2:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        ddp.finish_grad_sync()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        ddp.zero_grad_buffer()
        scales.append(scaler.get_scale())
    return scales, ddp.module[0].weight.detach().clone(), optimizer.grad_norm


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_ranks_that_update_nothing_scale_and_clip_with_the_others(fused: bool, unscale: bool) -> None:
    results = simulate(step_scaled, 8, fused, unscale)
    for scales, weight, norm in results:
        assert scales == [64.0, 32.0, 32.0]
        assert torch.equal(weight, results[0][1])
        assert weight.isfinite().all()
        assert norm is not None and torch.equal(norm, results[0][2])


class Matrices(nn.Sequential):
    """Matrices only: Muon takes no other parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(80, 48, bias=False), nn.Tanh(), nn.Linear(48, 10, bias=False), nn.Tanh())
        self.append(nn.Linear(10, 16, bias=False))


def step_muon(overlap: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after three steps of Muon: sharded by whole parameters, and by torch's own class on one rank."""
    torch.manual_seed(2)
    model = Matrices()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.9}
    config = DistributedDataParallelConfig(**WHOLE, overlap_param_gather=overlap)
    ddp = DistributedDataParallel(model, config)
    optimizer = DistributedOptimizer(ddp, lr=0.02, optimizer_class=torch.optim.Muon, **options)
    reference = torch.optim.Muon(plain.parameters(), lr=0.02, **options)
    size = dist.get_world_size()
    for step in range(3):
        ddp(input_of(model, step, dist.get_rank())).square().sum().backward()
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()
        for rank in range(size):
            (plain(input_of(plain, step, rank)).square().sum() / size).backward()
        reference.step()
        reference.zero_grad()
    return (
        {name: p.detach().clone() for name, p in model.named_parameters()},
        {name: p.detach().clone() for name, p in plain.named_parameters()},
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_muon_sees_whole_matrices(overlap: bool) -> None:
    for ours, theirs in simulate(step_muon, 3, overlap):
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-4)
