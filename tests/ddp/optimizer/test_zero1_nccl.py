"""ZeRO-1 and its forms of reduction over NCCL, against all-reduce DDP over NCCL: streams, delays, memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from host_syncs import cuda_waits_are_errors
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.collectives.reduction import GradReduction
from maingrad.ddp.gathers import param_gather as gathering
from maingrad.te_integration import Linear

STEPS = 20
SLEEP_CYCLES = 200_000_000  # about 100 ms
ZERO1 = {"use_distributed_optimizer": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "all-reduce, overlap": {"overlap_grad_reduce": True},
    "no overlap": ZERO1,
    "reduces overlap": {**ZERO1, "overlap_grad_reduce": True},
    "gathers overlap": {**ZERO1, "overlap_param_gather": True},
    "both overlap": {**ZERO1, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "ranks scale": {**ZERO1, "overlap_grad_reduce": True, "average_in_collective": False},
    "released": {**ZERO1, "overlap_grad_reduce": True, "overlap_param_gather": True, "release_grads": True},
    "one bucket": {**ZERO1, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10**9},
    "copy engines": {
        **ZERO1,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "copy_engine_param_gather": True,
    },
    "NaN check": {**ZERO1, "overlap_grad_reduce": True, "overlap_param_gather": True, "check_for_nan_in_grad": True},
}
DELAYED = {"gather": CONFIGS["both overlap"], "reduce": CONFIGS["both overlap"], "compute": CONFIGS["both overlap"]}

Run = tuple[list[float], dict[str, Tensor]]


class Model(nn.Module):
    """Fused and plain layers; a tied embedding read outside its module's forward; unused and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 48)
        self.up = Linear(48, 96, fuse_wgrad_accumulation=True)
        self.norm = nn.LayerNorm(96)
        self.down = nn.Linear(96, 48)
        self.unused = nn.Parameter(torch.ones(17, 5))
        self.frozen = nn.Parameter(torch.ones(48), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.down(self.norm(nn.functional.gelu(self.up(self.embedding(tokens))))) * self.frozen
        return nn.functional.linear(x, self.embedding.weight)


def batch(step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    return torch.randint(0, 50, (6, 9), generator=generator)


def train(config: dict[str, Any], group: Any, delay: Callable[[str], None] = lambda where: None) -> Run:
    """Losses of ``STEPS`` steps of two microbatches, and the weights at the end."""
    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    settings = DistributedDataParallelConfig(**{"bucket_size": 1500, **config})
    ddp = DistributedDataParallel(Model().to(device), settings, process_group=group)
    # A large eps keeps AdamW from turning rounding noise in tiny gradients into steps of full length.
    optimizer = DistributedOptimizer(ddp, lr=1e-2, eps=1e-3, max_grad_norm=0.5)
    losses = []
    for step in range(STEPS):
        for index in range(2):
            tokens = batch(step, index, rank).to(device)
            with nullcontext() if index else ddp.no_sync():
                delay("compute")
                loss = nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), tokens.flatten()) / 2
                loss.backward()
            losses.append(loss.detach())
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()
    return torch.stack(losses).tolist(), {name: p.detach().cpu() for name, p in ddp.module.named_parameters()}


@contextmanager
def delayed(where: str, rank: int) -> Iterator[Callable[[str], None]]:
    """Make the device sleep before every gather, reduction or forward, on one rank after the other."""
    count = 0

    def sleep(at: str) -> None:
        nonlocal count
        if at == where:
            count += 1
            if count % 7 == rank:
                torch.cuda._sleep(SLEEP_CYCLES)

    gather, reduce = gathering.all_gather_shards, GradReduction.start

    def slow_gather(*args: Any, **kwargs: Any) -> Any:
        sleep("gather")
        return gather(*args, **kwargs)

    def slow_reduce(*args: Any, **kwargs: Any) -> Any:
        sleep("reduce")
        return reduce(*args, **kwargs)

    gathering.all_gather_shards, GradReduction.start = slow_gather, slow_reduce  # type: ignore[method-assign]
    try:
        yield sleep
    finally:
        gathering.all_gather_shards, GradReduction.start = gather, reduce  # type: ignore[method-assign]
    assert count > 0


def on_nccl() -> dict[str, Run]:
    """On each of a job's gloo processes, with an NCCL group beside it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    results = {"reference": train({}, group)}
    for name, config in CONFIGS.items():
        results[name] = train(config, group)
    for where, config in DELAYED.items():
        with delayed(where, rank) as delay:
            results[f"delayed {where}"] = train(config, group, delay)
    for where in DELAYED:
        with delayed(where, rank) as delay:
            results[f"delayed {where}, released"] = train(CONFIGS["released"], group, delay)
    if size == 4:
        results["hybrid, released"] = train({**CONFIGS["released"], "num_distributed_optimizer_instances": 2}, group)
        results["hybrid"] = train({**CONFIGS["both overlap"], "num_distributed_optimizer_instances": 2}, group)
    results["bf16 on the wire"] = train({**CONFIGS["both overlap"], "grad_reduce_wire_dtype": torch.bfloat16}, group)
    return results


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.gpu(2)), pytest.param(4, marks=pytest.mark.gpu(4))]
)
def runs(request: pytest.FixtureRequest) -> list[dict[str, Run]]:
    return run_ranks(on_nccl, request.param, timeout=240.0)


def test_every_form_trains_like_all_reduce(runs: list[dict[str, Run]]) -> None:
    """Twenty steps: weights to 1e-5 of their norm, and with it every gradient that led there; rounded gradients to
    the rounding."""
    for results in runs:
        losses, weights = results["reference"]
        for name, (own_losses, own_weights) in results.items():
            bound = torch.finfo(torch.bfloat16).eps if name == "bf16 on the wire" else 1e-5
            torch.testing.assert_close(torch.tensor(own_losses), torch.tensor(losses), rtol=bound, atol=0)
            for param, value in weights.items():
                assert (own_weights[param] - value).norm() / value.norm() <= bound, (name, param)


def test_ranks_end_with_the_same_weights(runs: list[dict[str, Run]]) -> None:
    for name in runs[0]:
        for results in runs[1:]:
            for param, value in results[name][1].items():
                assert torch.equal(value, runs[0][name][1][param]), (name, param)


def test_delays_change_nothing(runs: list[dict[str, Run]]) -> None:
    for results in runs:
        for where in DELAYED:
            for param, value in results[f"delayed {where}"][1].items():
                assert torch.equal(value, results["both overlap"][1][param]), (where, param)
            for param, value in results[f"delayed {where}, released"][1].items():
                assert torch.equal(value, results["released"][1][param]), (where, param)


def reads_on_streams() -> bool:
    """Average a list of parameters on a side stream, right after a step with slow gathers."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    averages = []
    for overlap in (True, False):
        model = Model().cuda()
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=overlap)
        ddp = DistributedDataParallel(model, config, process_group=group)
        optimizer, kept = DistributedOptimizer(ddp, lr=0.1), list(model.parameters())
        side, average = torch.cuda.Stream(), [torch.zeros_like(p) for p in model.parameters()]
        with delayed("gather", rank):
            for step in range(8):
                tokens = batch(step, 0, rank).cuda()
                nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), tokens.flatten()).backward()
                ddp.finish_grad_sync()
                optimizer.step()
                ddp.zero_grad_buffer()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side), torch.no_grad():
                    torch._foreach_lerp_(average, kept, 0.5)
                torch.cuda.current_stream().wait_stream(side)
        averages.append([value.cpu() for value in average])
    return all(torch.equal(one, other) for one, other in zip(*averages, strict=True))


@pytest.mark.gpu(2)
def test_a_reader_on_a_side_stream_waits_too() -> None:
    assert all(run_ranks(reads_on_streams, 2, timeout=120.0))


def reads_late_on_a_stream() -> bool:
    """The same after the forward has read the parameters: the side stream has waited only for the step before."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    averages = []
    for overlap in (True, False):
        model = Model().cuda()
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=overlap)
        ddp = DistributedDataParallel(model, config, process_group=group)
        optimizer, kept = DistributedOptimizer(ddp, lr=0.1), list(model.parameters())
        side, average = torch.cuda.Stream(), [torch.zeros_like(p) for p in model.parameters()]
        with delayed("gather", rank):
            for step in range(8):
                tokens = batch(step, 0, rank).cuda()
                nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), tokens.flatten()).backward()
                ddp.finish_grad_sync()
                optimizer.step()
                ddp.zero_grad_buffer()
                side.wait_stream(torch.cuda.current_stream())
                with torch.no_grad():
                    model(tokens)
                with torch.cuda.stream(side), torch.no_grad():
                    optimizer.finish_param_sync()
                    torch._foreach_lerp_(average, kept, 0.5)
                torch.cuda.current_stream().wait_stream(side)
        averages.append([value.cpu() for value in average])
    return all(torch.equal(one, other) for one, other in zip(*averages, strict=True))


@pytest.mark.gpu(2)
def test_finish_param_sync_holds_for_the_stream_that_calls_it() -> None:
    assert all(run_ranks(reads_late_on_a_stream, 2, timeout=120.0))


def steps_without_a_host_wait() -> bool:
    torch.cuda.set_device(dist.get_rank())
    group = dist.new_group(backend="nccl")
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1500,
        calculate_per_token_loss=True,
    )  # fmt: skip
    ddp = DistributedDataParallel(Model().cuda(), config, process_group=group)
    optimizer = DistributedOptimizer(ddp, lr=1e-2, max_grad_norm=1.0)
    tokens = batch(0, 0, dist.get_rank()).cuda()
    count = torch.tensor(54.0, device="cuda")

    def step() -> None:
        nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), tokens.flatten(), reduction="sum").backward()
        ddp.finish_grad_sync(count)
        optimizer.step()
        ddp.zero_grad_buffer()

    step()
    with cuda_waits_are_errors():
        step()
        step()
    return True


@pytest.mark.gpu(2)
def test_no_step_waits_on_the_host() -> None:
    assert all(run_ranks(steps_without_a_host_wait, 2, timeout=120.0))


def bytes_at_rest() -> list[tuple[int, int]]:
    """(measured, formula) of allocated bytes that the wrapper and the optimizer add, for bf16 parameters."""
    torch.cuda.set_device(dist.get_rank())
    group = dist.new_group(backend="nccl")
    found = []
    sharded = {"use_distributed_optimizer": True}
    mapped = {**sharded, "overlap_param_gather": True, "copy_engine_param_gather": True}
    # The first two leave the libraries' workspaces and NCCL's barrier.
    for settings in ({}, mapped, {}, sharded, mapped):
        before = torch.cuda.memory_allocated()
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(4)]).cuda()
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, **settings)
        ddp = DistributedDataParallel(model, config, process_group=group)
        optimizer = DistributedOptimizer(ddp)
        for _ in range(2):
            ddp(torch.ones(8, 1024, dtype=torch.bfloat16, device="cuda")).sum().backward()
            ddp.finish_grad_sync()
            optimizer.step()
            ddp.zero_grad_buffer()
        optimizer.finish_param_sync()
        torch.cuda.synchronize()
        shards = dist.get_world_size() if settings else 1
        numel = ddp.plan.numel
        # parameters, gradients, then masters and two moments of this rank's part; a step count for each run; the row
        # of integers by which ranks compare their steps
        formula = 2 * numel + 4 * numel + 12 * (numel // shards) + 512 * len(optimizer.param_groups[0]["params"]) + 512
        found.append((torch.cuda.memory_allocated() - before, formula))
        del ddp, optimizer, model
        assert len(found) <= 2 or torch.cuda.memory_allocated() == before  # without the garbage collector
    return found[2:]


@pytest.mark.gpu(2)
def test_bytes_at_rest_on_a_gpu() -> None:
    for found in run_ranks(bytes_at_rest, 2, timeout=120.0):
        for measured, formula in found:
            # AdamW's kernel reads addresses and options from tables: 12 integers for each run of a parameter, and
            # 8 bytes for 2,048 elements.
            assert formula <= measured <= formula + 2**16


def weights_outlive_the_optimizer() -> bool:
    """Parameters in memory that NCCL has mapped keep their values after the optimizer is deleted."""
    torch.cuda.set_device(dist.get_rank())
    group = dist.new_group(backend="nccl")
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, copy_engine_param_gather=True
    )
    model = Model().cuda()
    ddp = DistributedDataParallel(model, config, process_group=group)
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    tokens = batch(0, 0, dist.get_rank()).cuda()
    nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), tokens.flatten()).backward()
    ddp.finish_grad_sync()
    optimizer.step()
    optimizer.finish_param_sync()
    before = [p.detach().clone() for p in model.parameters()]
    expected = model(tokens).detach().clone()
    del ddp, optimizer
    torch.cuda.empty_cache()
    filler = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]  # where freed memory would be
    same = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    with torch.no_grad():  # it does not train without its wrapper
        again = model(tokens)
    return same and torch.equal(again, expected) and len(filler) == 64


@pytest.mark.gpu(2)
def test_weights_in_mapped_memory_outlive_the_optimizer() -> None:
    assert all(run_ranks(weights_outlive_the_optimizer, 2, timeout=120.0))


def test_copy_engines_need_nccl() -> None:
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, copy_engine_param_gather=True
    )
    with pytest.raises(ValueError, match="copy_engine_param_gather needs parameters on CUDA"):
        DistributedDataParallel(Model(), config)
    with pytest.raises(ValueError, match="copy_engine_param_gather has no effect without overlap_param_gather"):
        DistributedDataParallelConfig(use_distributed_optimizer=True, copy_engine_param_gather=True)
