"""Experts that not all ranks hold, trained, frozen or buffers, start equal on the ranks that share them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.ddp.collectives.failure_report import FailureReporter
from maingrad.ddp.collectives.rank_grid import make_grid
from maingrad.ddp.plan.owned_params import buffers_of_experts, is_marked_expert
from maingrad.ddp.wrapper.setup_checks import check_undeclared_parts
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

Ranks = Callable[[], Any]


def of_my_parity() -> dist.ProcessGroup:
    size = dist.get_world_size()
    return dist.new_group(list(range(dist.get_rank() % 2, size, 2)), use_local_synchronization=True)


class Mixture(nn.Module):
    """A dense layer, an expert drawn by ``variant`` and a buffer of the expert's; all else is drawn by ``rank``."""

    def __init__(self, variant: int, rank: int, *, frozen: bool, marked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.dense = nn.Linear(4, 4)
        self.register_buffer("seen", torch.rand(3))
        torch.manual_seed(100 + variant)
        self.expert = nn.Linear(4, 4)
        self.expert.register_buffer("load", torch.rand(2))
        self.expert.requires_grad_(not frozen)
        if marked:
            for tensor in self.of_expert().values():
                tensor.allreduce = False

    def of_expert(self) -> dict[str, Tensor]:
        return {**dict(self.expert.named_parameters()), **dict(self.expert.named_buffers())}

    def of_all(self) -> list[Tensor]:
        return [*self.dense.parameters(), self.seen]

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.dense(x) * self.seen.sum()) * self.expert.load.sum()


def values(tensors: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


CONFIGS = [{}, {"use_distributed_optimizer": True, "overlap_param_gather": True}]


def wrapped_and_trained(config: dict[str, Any], ranks: Ranks, frozen: bool, explicit: bool) -> Any:
    """What the expert and the rest are after wrapping; a step must leave frozen ones alone."""
    rank = dist.get_rank()
    model = Mixture(rank % 2, rank, frozen=frozen)
    options = DistributedDataParallelConfig(**config)
    ddp = DistributedDataParallel(model, options, expert_process_group=ranks(), init_sync=not explicit)
    if explicit:
        ddp.broadcast_params()
    expert, rest = values(model.of_expert().values()), values(model.of_all())
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    ddp(torch.randn(2, 4)).sum().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    optimizer.finish_param_sync()
    if frozen:
        assert all(map(torch.equal, expert, model.of_expert().values()))
    else:
        assert not torch.equal(expert[0], model.expert.weight)
    assert not torch.equal(rest[0], model.dense.weight)
    return expert, rest


@pytest.mark.parametrize("explicit", [False, True], ids=["init_sync", "broadcast_params"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=["whole", "sharded"])
@pytest.mark.parametrize(("size", "ranks"), [(4, of_my_parity), (2, lambda: WORLD_OF_ONE)], ids=["two by two", "alone"])
def test_each_ranks_experts_stay_its_own(
    size: int, ranks: Ranks, config: dict[str, Any], frozen: bool, explicit: bool
) -> None:
    found = simulate(wrapped_and_trained, size, config, ranks, frozen, explicit)
    first_expert, first_rest = found[0]
    for rank, (expert, rest) in enumerate(found):
        drawn = values(Mixture(rank % 2, 0, frozen=frozen).of_expert().values())
        assert all(map(torch.equal, expert, drawn))
        assert all(map(torch.equal, rest, first_rest))
    assert not torch.equal(found[1][0][0], first_expert[0])


def named_for_all(frozen: bool) -> list[Tensor]:
    model = Mixture(dist.get_rank(), 0, frozen=frozen)
    DistributedDataParallel(model, expert_process_group=dist.group.WORLD)
    return values(model.of_expert().values())


@pytest.mark.parametrize("frozen", [False, True])
def test_experts_of_ranks_that_are_named_begin_as_the_first_ones(frozen: bool) -> None:
    """Where nobody names ranks, experts that differ are refused."""
    expected = values(Mixture(0, 0, frozen=frozen).of_expert().values())
    for found in simulate(named_for_all, 2, frozen):
        assert all(map(torch.equal, found, expected))


def only_a_buffer_is_marked() -> list[float]:
    model = nn.Linear(2, 2)
    model.register_buffer("load", torch.full((1,), float(dist.get_rank())))
    model.load.allreduce = False
    DistributedDataParallel(model, expert_process_group=WORLD_OF_ONE).unwrap()
    return model.load.tolist()


def test_a_marked_buffer_alone_is_an_experts() -> None:
    assert simulate(only_a_buffer_is_marked, 2) == [[0.0], [1.0]]


def with_buffer(*params: bool, **modules: nn.Module) -> nn.Module:
    """A module with a buffer, and a parameter of an expert for each True, of no expert for each False."""
    found = nn.Module()
    for index, of_expert in enumerate(params):
        found.register_parameter(f"param{index}", nn.Parameter(torch.zeros(1)))
        found.get_parameter(f"param{index}").allreduce = not of_expert  # type: ignore[attr-defined]
    found.register_buffer("buffer", torch.zeros(1))
    for name, module in modules.items():
        found.add_module(name, module)
    return found


def test_buffers_are_experts_as_the_parameters_beside_them_are() -> None:
    model = with_buffer(
        False,
        expert=with_buffer(True, True, inside=with_buffer()),
        mixed=with_buffer(True, False, inside=with_buffer()),
        around=with_buffer(expert=with_buffer(True)),
        around_both=with_buffer(expert=with_buffer(True), dense=with_buffer(False)),
    )
    model.expert.marked = nn.Module()  # type: ignore[union-attr]
    model.expert.marked.register_buffer("buffer", torch.zeros(1))  # type: ignore[union-attr]
    model.expert.marked.buffer.allreduce = True  # type: ignore[union-attr]
    found = buffers_of_experts(model, is_marked_expert)
    assert {name for name, buffer in model.named_buffers() if id(buffer) in found} == {
        "expert.buffer",
        "expert.inside.buffer",
        "around.buffer",
        "around.expert.buffer",
        "around_both.expert.buffer",
    }


def shared_within(frozen: bool) -> list[Tensor]:
    """Ranks 0 and 2 have drawn different experts, and both get those of rank 0."""
    rank = dist.get_rank()
    model = Mixture(rank, rank, frozen=frozen)
    ddp = DistributedDataParallel(model, expert_process_group=of_my_parity())
    assert ddp.records
    return values(model.of_expert().values())


@pytest.mark.parametrize("frozen", [False, True])
def test_ranks_that_share_experts_start_from_the_first_one_of_them(frozen: bool) -> None:
    for rank, expert in enumerate(simulate(shared_within, 4, frozen)):
        drawn = values(Mixture(rank % 2, 0, frozen=frozen).of_expert().values())
        assert all(map(torch.equal, expert, drawn))


# ---- Nobody says which ranks hold the same experts. ----


def wraps_without_a_group(kind: str, variants: int, frozen: bool, init_sync: bool, ranks: Ranks) -> list[Tensor]:
    rank = dist.get_rank()
    model: Any = Mixture(rank % variants, rank if init_sync else 0, frozen=frozen)
    if kind == "ddp":
        ddp = DistributedDataParallel(model, expert_process_group=ranks(), init_sync=init_sync)
        assert ddp.records
        return values(model.of_expert().values())
    fully_shard(model, ranks(), init_sync=init_sync)
    with model.unsharded():
        return values(model.of_expert().values())


def refused_without_a_group(kind: str, frozen: bool, init_sync: bool) -> None:
    remedy = "expert_process_group" if kind == "ddp" else "fully_shard on the experts first"
    expected = rf"'(expert\.)?(weight|load)' is an expert's.* differs.*{remedy}.*WORLD_OF_ONE.*group.WORLD"
    with pytest.raises(ValueError, match=expected):
        wraps_without_a_group(kind, 2, frozen, init_sync, lambda: None)


@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize(("kind", "frozen"), [("ddp", False), ("fully_shard", False), ("fully_shard", True)])
@pytest.mark.sampled(6)
def test_experts_that_differ_and_no_group_are_refused_on_all_ranks(kind: str, frozen: bool, init_sync: bool) -> None:
    """They would get the first rank's values, or, without init_sync, the mean of different experts' gradients."""
    simulate(refused_without_a_group, 2, kind, frozen, init_sync)


def test_experts_that_differ_are_refused_where_each_rank_is_an_instance() -> None:
    """Each instance has one rank, and gradients are averaged between instances."""

    def wraps() -> None:
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
        with pytest.raises(ValueError, match=r"'expert\.\w+' is an expert's.* differs between ranks"):
            DistributedDataParallel(Mixture(dist.get_rank(), 0, frozen=False), config)

    simulate(wraps, 2)


def test_experts_that_differ_are_refused_beside_slices_that_do_not() -> None:
    def wraps() -> None:
        model = Mixture(dist.get_rank(), 0, frozen=False)
        model.dense.weight.tensor_model_parallel = True  # type: ignore[assignment]
        model.dense.weight.partition_dim = 0  # type: ignore[assignment]
        with pytest.raises(ValueError, match=r"'expert\.\w+' is an expert's.* differs between ranks"):
            DistributedDataParallel(model)

    simulate(wraps, 2)


@pytest.mark.parametrize("frozen", [False, True])
def test_experts_that_a_rank_has_alone_may_have_a_shape_of_their_own(frozen: bool) -> None:
    def train() -> Tensor:
        rank = dist.get_rank()
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1 + rank, bias=False).requires_grad_(not frozen))
        model[1].weight.allreduce = False  # type: ignore[assignment]
        model[1].register_buffer("load", torch.zeros(1 + rank))
        ddp = DistributedDataParallel(model, expert_process_group=WORLD_OF_ONE)
        ddp(torch.ones(1, 2)).sum().backward()
        ddp.finish_grad_sync()
        assert frozen or model[1].weight.main_grad.shape == (1 + rank, 2)  # type: ignore[union-attr]
        return model[0].weight.main_grad.clone()  # type: ignore[operator]

    assert torch.equal(*simulate(train, 2))


def test_experts_that_ranks_share_have_the_same_shapes() -> None:
    """The dense parameters, which are compared first, are alike."""

    def on_each_rank() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + dist.get_rank()))
        for param in model[1].parameters():
            param.allreduce = False
        with pytest.raises(ValueError, match=r"the model differs between ranks .*'1\.(weight|bias)'"):
            DistributedDataParallel(model, expert_process_group=dist.group.WORLD)

    simulate(on_each_rank, 2)


def test_a_refusal_names_the_callers_option_and_remedy() -> None:
    """``fully_shard`` has a mesh in place of process groups."""

    def compare() -> None:
        part = nn.Parameter(torch.full((2, 2), float(dist.get_rank())))
        part.tensor_model_parallel, part.partition_dim = True, 0  # type: ignore[attr-defined]
        everyone, failures = make_grid(None), FailureReporter()
        with pytest.raises(ValueError, match=r"'p' is a slice .* pass the data-parallel group as mesh, or"):
            check_undeclared_parts([("p", part)], [], everyone, failures, option="mesh")
        with pytest.raises(ValueError, match=r"'p' is an expert's .* hold the same experts: shard them first$"):
            check_undeclared_parts([], [("p", part)], everyone, failures, remedy="shard them first")
        check_undeclared_parts([("p", part.detach())], [], everyone, failures)  # has no mark

    simulate(compare, 2)


def test_frozen_experts_may_differ_where_nothing_touches_them() -> None:
    simulate(refused_without_a_group, 2, "ddp", True, True)
    first, second = simulate(wraps_without_a_group, 2, "ddp", 2, True, False, lambda: None)
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_experts_that_are_the_same_need_no_group(kind: str) -> None:
    first, second = simulate(wraps_without_a_group, 2, kind, 1, False, True, lambda: None)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_experts_that_all_ranks_are_to_share_start_from_the_first(kind: str) -> None:
    first, second = simulate(wraps_without_a_group, 2, kind, 2, False, True, lambda: dist.group.WORLD)
    assert all(map(torch.equal, first, second))
    assert torch.equal(first[0], Mixture(0, 0, frozen=False).expert.weight)


# ---- Sharded. ----


def frozen_experts_in_a_unit_of_their_own(path: str, ranks: Ranks) -> None:
    rank = dist.get_rank()

    def build(variant: int) -> Any:
        model: Any = Mixture(variant, rank, frozen=True)
        fully_shard(model.expert, mesh=ranks())
        return fully_shard(model)

    def seen(model: Any) -> list[Tensor]:
        with model.unsharded():
            return values(model.of_expert().values())

    drawn = values(Mixture(rank % 2, 0, frozen=True).of_expert().values())
    model = build(rank % 2)
    model(torch.randn(2, 4)).sum().backward()
    assert all(map(torch.equal, seen(model), drawn))
    save_checkpoint(path, model)
    read = build(10 + rank % 2)
    load_checkpoint(path, read)
    assert all(map(torch.equal, seen(read), drawn))


@pytest.mark.parametrize(("size", "ranks"), [(4, of_my_parity), (2, lambda: WORLD_OF_ONE)], ids=["two by two", "alone"])
@pytest.mark.sampled(1)
def test_a_unit_of_frozen_experts_keeps_each_ranks(size: int, ranks: Ranks, tmp_path: Path) -> None:
    simulate(frozen_experts_in_a_unit_of_their_own, size, str(tmp_path / "step"), ranks)


# ---- Checkpoints. ----


def saved_and_read(path: str, frozen: bool) -> None:
    rank = dist.get_rank()

    def build(variant: int) -> Any:
        model = Mixture(variant, rank, frozen=frozen)
        return DistributedDataParallel(model, expert_process_group=of_my_parity())

    saved = build(rank % 2)
    save_checkpoint(path, saved)
    read = build(10 + rank % 2)
    load_checkpoint(path, read)
    for name, tensor in saved.module.of_expert().items():
        assert torch.equal(read.module.of_expert()[name], tensor), name


@pytest.mark.in_turn
@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_keeps_what_each_rank_has_of_experts(frozen: bool, tmp_path: Path) -> None:
    simulate(saved_and_read, 4, str(tmp_path / "step"), frozen)
