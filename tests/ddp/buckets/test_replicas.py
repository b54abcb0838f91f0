"""Forwards that write parameters under ``DistributedDataParallel``, and the comparison of replicas on demand."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from writing_modules import ActNorm, ClampedLinear, Codebook, WritingModel

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GraphedTrainingStep,
)
from maingrad.ddp.buckets.replicas import bits_of, find_parted
from maingrad.ddp.collectives.failure_report import FailureReporter
from maingrad.launch import simulate

WAYS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "ZeRO-1": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
}
ways = pytest.mark.parametrize("way", WAYS)


def make(**options: Any) -> WritingModel:
    torch.manual_seed(3)
    return WritingModel(**options).double()


def data_of(rank: int, size: int) -> list[Tensor]:
    """This rank's part of three batches."""
    batches = torch.randint(0, 11, (3, 8), generator=torch.Generator().manual_seed(5))
    return [batch.chunk(size)[rank] for batch in batches]


def wrap(module: nn.Module, way: str, **options: Any) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**WAYS[way], **options))
    return model, DistributedOptimizer(model, 0.125, optimizer_class=torch.optim.SGD, momentum=0.9)


def step(model: DistributedDataParallel, optimizer: DistributedOptimizer, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    model.finish_grad_sync()
    optimizer.step()
    model.zero_grad_buffer()
    return loss.detach()


def plain_training(model: WritingModel) -> WritingModel:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.125, momentum=0.9)
    for batch in data_of(0, 1):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_equal(model: DistributedDataParallel, plain: nn.Module, tolerance: float) -> None:
    for (name, param), wanted in zip(model.module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, wanted, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@ways
def test_one_rank_writes_without_an_option(way: str) -> None:
    plain = plain_training(make())

    def on_the_rank() -> None:
        model, optimizer = wrap(make(), way)
        for batch in data_of(0, 1):
            step(model, optimizer, batch)
        assert_equal(model, plain, 0.0)

    simulate(on_the_rank, 1)


@ways
def test_writes_of_reduced_statistics_are_declared_alike(way: str) -> None:
    """Each rank has its own data. What ranks write follows from sums over all ranks, and from weights."""
    plain = plain_training(make(max_norm=None))

    def on_each_rank() -> None:
        model, optimizer = wrap(make(max_norm=None, reduces=True), way, forward_writes="alike", check_replicas_every=1)
        for batch in data_of(dist.get_rank(), 2):
            step(model, optimizer, batch)
        optimizer.finish_param_sync()
        assert_equal(model, plain, 1e-12)

    simulate(on_each_rank, 2)


def test_masters_of_bf16_parameters_follow_a_write_in_the_forward() -> None:
    """Each rank owns a part of the weight, which it has clamped itself."""

    def on_each_rank() -> None:
        layer = ClampedLinear(6, 5).bfloat16()
        model, optimizer = wrap(layer, "ZeRO-1", forward_writes="alike")
        step(model, optimizer, torch.zeros(2, 6, dtype=torch.bfloat16))  # the gradient of the weight is zero
        optimizer.finish_param_sync()
        assert layer.weight.abs().max() <= 0.3
        for held in optimizer.slices:
            if held.name == "weight":
                assert torch.equal(held.master, held.param.float())
                assert held.master.numel() == 0 or held.master.abs().max() > 0.2

    simulate(on_each_rank, 2)


def max_norm() -> tuple[nn.Module, str, Any]:
    return nn.Embedding(11, 4, max_norm=0.5), "weight", lambda rank: torch.arange(4) + rank


MODULES = {
    "max_norm": max_norm,
    "codebook": lambda: (nn.Sequential(nn.Linear(4, 4), Codebook(4, reduces=False)), "1.codes", rows_of),
    "first batch": lambda: (nn.Sequential(nn.Linear(4, 4), ActNorm(4, reduces=False)), "1.scale", rows_of),
    "clamp_": lambda: (ClampedLinear(4, 4), "weight", rows_of),
}


def rows_of(rank: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("kind", MODULES)
@ways
@pytest.mark.sampled(8)
def test_writes_that_are_not_declared_are_refused_by_name(kind: str, way: str) -> None:
    def on_each_rank() -> None:
        module, name, data = MODULES[kind]()
        model, _ = wrap(module, way)
        match = rf"parameter '{name}' was written in the forward.*declare it by .*\(forward_writes=\"alike\"\)"
        with pytest.raises(RuntimeError, match=match):
            model(data(dist.get_rank()))

    simulate(on_each_rank, 2)


def test_an_evaluation_that_writes_is_refused_as_well() -> None:
    def on_each_rank() -> None:
        model, _ = wrap(nn.Embedding(11, 4, max_norm=0.5), "all-reduce")
        model.eval()
        with torch.no_grad(), pytest.raises(RuntimeError, match="parameter 'weight' was written in the forward"):
            model(torch.arange(4) + dist.get_rank())

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("goes", [False, True])
@pytest.mark.parametrize("name", ["bias", "scale"])
def test_a_frozen_parameter_that_a_forward_replaces_is_refused(name: str, goes: bool) -> None:
    class Replacing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            setattr(self, name, None if goes else nn.Parameter(x.detach().mean(0), requires_grad=False))
            return super().forward(x)

    def on_each_rank() -> None:
        layer = Replacing(4, 4)
        layer.bias.requires_grad_(False)
        layer.scale = nn.Parameter(torch.ones(4), requires_grad=False)
        model, _ = wrap(layer, "all-reduce")
        with pytest.raises(RuntimeError, match=f"parameter '{name}' was written in the forward"):
            model(rows_of(dist.get_rank()))

    simulate(on_each_rank, 2)


def test_experts_without_replicas_may_write() -> None:
    def on_each_rank() -> None:
        model = nn.Sequential(nn.Linear(4, 4), ClampedLinear(4, 4))
        for param in model[1].parameters():
            param.allreduce = False
        wrapped = DistributedDataParallel(model, expert_process_group=WORLD_OF_ONE)
        wrapped(rows_of(dist.get_rank())).sum().backward()
        wrapped.finish_grad_sync()

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("stock", [False, True])
def test_a_forward_that_holds_whole_iterations_updates_its_parameters(stock: bool) -> None:
    """As Lightning's ``training_step`` does with manual optimization, which the wrapper's forward calls."""

    class Manual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.run: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if self.run is None else self.run(x)

    def on_each_rank() -> None:
        module = Manual()
        model = DistributedDataParallel(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if stock else DistributedOptimizer(model, lr=0.1)
        before = module.layer.weight.detach().clone()

        def iteration(x: Tensor) -> Tensor:
            loss = module.layer(x).square().mean()
            loss.backward()
            model.finish_grad_sync()
            optimizer.step()
            model.zero_grad_buffer()
            return loss.detach()

        module.run = iteration
        model(rows_of(dist.get_rank()))
        assert not torch.equal(module.layer.weight, before)

    simulate(on_each_rank, 2)


def test_writes_between_forwards_are_no_writes_of_a_forward() -> None:
    def on_each_rank() -> None:
        model, optimizer = wrap(nn.Linear(4, 4), "ZeRO-1")
        for _ in range(3):
            step(model, optimizer, rows_of(dist.get_rank()))
            with torch.no_grad():
                model.module.weight.mul_(0.9)

    simulate(on_each_rank, 2)


def test_a_graphed_step_replays_declared_writes() -> None:
    plain = plain_training(make())

    def on_each_rank() -> None:
        model, optimizer = wrap(make(), "ZeRO-1", forward_writes="alike")
        graphed = GraphedTrainingStep(lambda batch: step(model, optimizer, batch), model, optimizer, num_warmup_steps=1)
        for batch in data_of(0, 1):
            graphed(batch)
        optimizer.finish_param_sync()
        assert_equal(model, plain, 1e-12)

    simulate(on_each_rank, 2)


# ---- The comparison of replicas. ----


def drifting(rank: int, iteration: int) -> nn.Module:
    """A layer whose weight one rank writes through ``.data``, which raises no version."""

    class Drifting(nn.Linear):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.count == iteration and dist.get_rank() == rank:
                self.weight.data[2, 1] += 2**-20
            self.count += 1
            return super().forward(x)

    return nn.Sequential(nn.Linear(4, 4), Drifting(4, 4))


@pytest.mark.parametrize(
    ("way", "iteration", "every", "found"),
    [
        ("all-reduce", 0, 5, 0),
        ("all-reduce", 1, 2, 2),
        ("ZeRO-1", 0, 5, 0),
        ("ZeRO-1", 2, 2, 2),  # in the same iteration: the gather after the update makes replicas equal again
    ],
)
def test_replicas_that_part_are_found_in_their_turn(way: str, iteration: int, every: int, found: int) -> None:
    def on_each_rank() -> None:
        model, optimizer = wrap(drifting(1, iteration), way, check_replicas_every=every)
        for number in range(found):
            step(model, optimizer, torch.ones(2, 4))
            assert number < found
        match = r"replicas have parted: parameter '1.weight' has other values on rank 1 than on rank 0\. Something"
        with pytest.raises(RuntimeError, match=match):
            step(model, optimizer, torch.ones(2, 4))

    simulate(on_each_rank, 3)


def test_a_step_without_a_wait_compares_before_the_update() -> None:
    """Under ZeRO-1 each rank has updated its own shard when the last bucket is reduced."""

    def on_each_rank() -> None:
        layers = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)])  # the step updates buckets in two passes
        model, optimizer = wrap(layers, "ZeRO-1", check_replicas_every=1, bucket_size=1000)
        for _ in range(2):
            model(torch.ones(2, 40)).square().mean().backward()
            model.start_grad_sync()
            optimizer.step()
            model.zero_grad_buffer()

    simulate(on_each_rank, 2)


def test_the_comparison_names_all_ranks_that_differ_and_counts_parameters() -> None:
    def on_each_rank() -> None:
        model, optimizer = wrap(nn.Linear(4, 4), "all-reduce", check_replicas_every=1)
        with torch.no_grad():
            model.module.weight += dist.get_rank() // 2
            model.module.bias -= dist.get_rank() // 2
        match = "parameter 'weight' has other values on rank 2, 3 than on rank 0, and so have 1 other parameters"
        with pytest.raises(RuntimeError, match=match):
            step(model, optimizer, torch.ones(2, 4))

    simulate(on_each_rank, 4)


def test_frozen_parameters_are_compared() -> None:
    def on_each_rank() -> None:
        model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
        wrapped, optimizer = wrap(model, "all-reduce", check_replicas_every=1)
        model[0].weight.data += dist.get_rank()
        with pytest.raises(RuntimeError, match=r"replicas have parted: parameter '0.weight'"):
            step(wrapped, optimizer, torch.ones(2, 4))

    simulate(on_each_rank, 2)


def test_experts_that_ranks_share_are_compared() -> None:
    """Among the ranks that hold them, which are others than those of the dense parameters."""

    def on_each_rank() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight.allreduce = False
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        config = DistributedDataParallelConfig(check_replicas_every=1)
        own = pairs[dist.get_rank() // 2]
        wrapped = DistributedDataParallel(model, config, expert_process_group=own)
        model[1].weight.data += dist.get_rank() % 2
        wrapped(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError, match=r"replicas have parted: parameter '1.weight' has other values on rank"):
            wrapped.finish_grad_sync()

    simulate(on_each_rank, 4)


@pytest.mark.parametrize("dim", ["replicate", "shard"])
def test_replicas_are_compared_along_each_dim_of_a_mesh(dim: str) -> None:
    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, check_replicas_every=1)
        model = DistributedDataParallel(nn.Linear(4, 4), config, process_group=mesh)
        model.module.weight.data += mesh.get_local_rank(dim)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError, match="replicas have parted: parameter 'weight'"):
            model.finish_grad_sync()

    simulate(on_each_rank, 4)


DTYPES = [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.int16, torch.bfloat16, torch.float32, torch.int64]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.complex64, torch.complex128])
def test_values_of_every_dtype_and_stride_are_compared(dtype: torch.dtype) -> None:
    """Frozen parameters may be quantised."""

    def on_each_rank(apart: bool) -> list[str]:
        values = torch.zeros(5, 3)
        values[4, 1] = apart * dist.get_rank()
        tensors = [("whole", values.to(dtype)), ("transposed", values.to(dtype).t())]
        return [*find_parted([*tensors, ("none", values.to(dtype)[:0])], [dist.group.WORLD], FailureReporter())]

    assert simulate(on_each_rank, 2, False) == [[]] * 2
    assert simulate(on_each_rank, 2, True) == [["whole", "transposed"]] * 2


def test_a_slice_that_a_rank_has_alone_may_be_written() -> None:
    """It is no replica, though tensor-parallel ranks have others of the same parameter."""

    def on_each_rank() -> None:
        layer = Clamped()
        layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, 0
        ranks = {"process_group": WORLD_OF_ONE, "tensor_parallel_group": dist.group.WORLD}
        wrapped = DistributedDataParallel(layer, DistributedDataParallelConfig(check_replicas_every=1), **ranks)
        layer.weight.data += dist.get_rank()
        wrapped(torch.ones(1, 2)).sum().backward()
        wrapped.finish_grad_sync()  # nor are slices compared

    class Clamped(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    simulate(on_each_rank, 2)


def test_elements_that_have_changed_places_are_found() -> None:
    def on_each_rank() -> None:
        model, optimizer = wrap(nn.Linear(40, 40), "all-reduce", check_replicas_every=1)
        weight = model.module.weight.data
        if dist.get_rank() == 1:
            weight.copy_(weight.roll(1, dist.get_world_size() - 2))
        with pytest.raises(RuntimeError, match="parameter 'weight' has other values on rank 1 than on rank 0"):
            step(model, optimizer, torch.ones(2, 40))

    for ranks in (2, 3):  # rows, and columns
        simulate(on_each_rank, ranks)


@pytest.mark.parametrize("distance", [1, 1024, 1025])
def test_two_elements_that_have_changed_places_are_found(distance: int) -> None:
    def on_each_rank() -> list[str]:
        values = torch.arange(3000.0)
        if dist.get_rank() == 1:
            values[0], values[distance] = distance, 0
        return [*find_parted([("values", values)], [dist.group.WORLD], FailureReporter())]

    assert simulate(on_each_rank, 2) == [["values"]] * 2
    assert bits_of([]) == []


def test_parameters_that_have_changed_places_are_found() -> None:
    def on_each_rank() -> None:
        model, optimizer = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "all-reduce", check_replicas_every=1)
        first, second = (layer.weight.data for layer in model.module)
        if dist.get_rank() == 1:
            before = first.clone()
            first.copy_(second)
            second.copy_(before)
        with pytest.raises(RuntimeError, match=r"parameter '0.weight' has .* and so have 1 other parameters"):
            step(model, optimizer, torch.ones(2, 4))

    simulate(on_each_rank, 2)


@pytest.mark.parametrize(("numel", "element"), [(1, 0), (1030, 0), (1030, 1024), (1030, 1029)])
def test_a_difference_in_one_element_is_found(numel: int, element: int) -> None:
    def on_each_rank() -> None:
        model, optimizer = wrap(nn.Linear(numel, 1, bias=False), "all-reduce", check_replicas_every=1)
        if dist.get_rank() == 1:
            model.module.weight.data[0, element] += 1
        with pytest.raises(RuntimeError, match="replicas have parted: parameter 'weight'"):
            step(model, optimizer, torch.ones(2, numel))

    simulate(on_each_rank, 2)


def test_an_iteration_that_goes_on_after_a_read_is_compared_once() -> None:
    def on_each_rank() -> None:
        model, optimizer = wrap(nn.Linear(4, 4), "all-reduce", check_replicas_every=2)
        model(torch.ones(2, 4)).square().mean().backward()
        assert model.module.weight.grad.norm() > 0
        step(model, optimizer, torch.ones(2, 4))
        if dist.get_rank() == 1:
            model.module.weight.data[2, 1] += 2**-20
        step(model, optimizer, torch.ones(2, 4))  # every second iteration: not this one
        with pytest.raises(RuntimeError, match="replicas have parted: parameter 'weight'"):
            step(model, optimizer, torch.ones(2, 4))

    simulate(on_each_rank, 2)


def test_buffers_and_experts_of_each_rank_may_differ() -> None:
    def on_each_rank() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        for param in model[2].parameters():
            param.allreduce = False
            param.data += dist.get_rank()
        config = DistributedDataParallelConfig(check_replicas_every=1)
        wrapped = DistributedDataParallel(model, config, expert_process_group=WORLD_OF_ONE)
        for _ in range(2):
            wrapped(rows_of(dist.get_rank())).sum().backward()
            wrapped.finish_grad_sync()
            wrapped.zero_grad_buffer()

    simulate(on_each_rank, 2)


def test_what_the_options_cannot_be() -> None:
    with pytest.raises(ValueError, match="forward_writes is 'refused' or 'alike', got 'same'"):
        DistributedDataParallelConfig(forward_writes="same")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="check_replicas_every must be at least 1, got 0"):
        DistributedDataParallelConfig(check_replicas_every=0)
    model, optimizer = wrap(nn.Linear(4, 4), "all-reduce", check_replicas_every=1)
    with pytest.raises(ValueError, match="check_replicas_every compares parameters on the host"):
        GraphedTrainingStep(copy.copy, model, optimizer)
