"""Models cut by tensor or pipeline parallelism, told by Megatron-core's marks alone: right, or refused by name."""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import uneven_cuts
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.pipelining.stage import PipelineStage
from torch.distributed.tensor import DTensor, Replicate

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GradScaler,
    clip_grad_norm,
    save_checkpoint,
)
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

WAYS = ("ddp", "zero1", "fully_shard")


class Cut(nn.Module):
    """Two layers: a slice for each tensor-parallel rank, marked as Megatron-core marks it, and a norm that all hold."""

    def __init__(self, slice_index: int) -> None:
        super().__init__()
        torch.manual_seed(slice_index)
        self.up = nn.Linear(4, 4, bias=False)
        torch.manual_seed(9)
        self.norm = nn.LayerNorm(4)
        self.up.weight.tensor_model_parallel = True  # type: ignore[assignment]
        self.up.weight.partition_dim = 0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x))


def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's data-parallel and tensor-parallel group, of 2 x 2 ranks."""
    rank = dist.get_rank()
    pairs = [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]]
    dp, tp = (dist.new_group(pair, use_local_synchronization=True) for pair in pairs)
    return dp, tp


def wrap(way: str, model: nn.Module, ranks: Any = None, **config: Any) -> Any:
    if way == "fully_shard":
        return fully_shard(model, ranks)
    options = DistributedDataParallelConfig(use_distributed_optimizer=way == "zero1", **config)
    return DistributedDataParallel(model, options, process_group=ranks)


def refusal(action: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as raised:
        action()
    return str(raised.value)


def all_texts(run: Callable[..., Any], *args: Any, ranks: int = 4) -> Iterator[str]:
    for texts in simulate(run, ranks, *args):
        yield from [texts] if isinstance(texts, str) else texts


# ---- Slices. ----


def forgets_the_group(way: str, frozen: bool) -> str:
    model = Cut(dist.get_rank() % 2)
    model.up.requires_grad_(not frozen)
    return refusal(lambda: wrap(way, model))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(6)
def test_a_forgotten_group_is_refused(way: str, frozen: bool) -> None:
    for text in all_texts(forgets_the_group, way, frozen):
        assert "'up.weight' is a slice of tensor parallelism" in text
        assert f"pass the data-parallel group as {'mesh' if way == 'fully_shard' else 'process_group'}" in text


def trains(way: str, name_it: bool) -> tuple[Tensor, Tensor]:
    """One step of a model that is cut in two, by the data-parallel group; or of one that is not cut after all."""
    dp, _ = groups()
    index = dist.get_rank() % 2 if name_it else 0
    model = Cut(index)
    wrapped = wrap(way, model, dp if name_it else None)
    optimizer: Any = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    if way != "fully_shard":
        optimizer = DistributedOptimizer(wrapped, lr=1.0, optimizer_class=torch.optim.SGD)
    wrapped(torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))).square().sum().backward()
    wrapped.finish_grad_sync()
    optimizer.step()
    if way == "fully_shard":
        with model.unsharded():
            return model.up.weight.detach(), Cut(index).up.weight.detach()
    optimizer.finish_param_sync()
    return model.up.weight.detach().clone(), Cut(index).up.weight.detach()


@pytest.mark.parametrize("name_it", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(6)
def test_slices_train_over_their_own_ranks(way: str, name_it: bool) -> None:
    found = simulate(trains, 4, way, name_it)
    weights = [weight for weight, _ in found]
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(weights[1], weights[3])
    assert torch.equal(weights[0], weights[1]) is not name_it
    assert not any(torch.equal(weight, before) for weight, before in found)


def has_the_first_ranks(way: str) -> Tensor:
    model = Cut(dist.get_rank())
    wrapped = wrap(way, model, dist.group.WORLD)
    with wrapped.unsharded() if way == "fully_shard" else nullcontext():
        return model.up.weight.detach().clone()


@pytest.mark.parametrize("way", WAYS)
def test_slices_of_ranks_that_are_named_begin_as_the_first_ones(way: str) -> None:
    for weight in simulate(has_the_first_ranks, 2, way):
        assert torch.equal(weight, Cut(0).up.weight)


def test_classes_of_whole_parameters_update_what_all_ranks_have() -> None:
    """Beside slices, which take an elementwise class."""

    def on_each_rank() -> None:
        dp, tp = groups()
        model = Cut(dist.get_rank() % 2)
        ddp = DistributedDataParallel(model, process_group=dp, tensor_parallel_group=tp)
        before = model.norm.weight.detach().clone()
        ddp(torch.randn(2, 4)).square().sum().backward()
        text = "Adafactor updates whole parameters, and tensor-parallel ranks have slices of 'up.weight'"
        assert text in refusal(torch.optim.Adafactor(model.parameters(), lr=0.1).step, RuntimeError)
        torch.optim.Adafactor(model.norm.parameters(), lr=0.1).step()
        assert not torch.equal(model.norm.weight, before)

    simulate(on_each_rank, 4)


def norms_of(way: str) -> list[str]:
    dp, tp = groups()
    model = wrap(way, Cut(dist.get_rank() % 2), dp)
    model(torch.ones(2, 4)).square().sum().backward()
    model.finish_grad_sync()
    if way == "fully_shard":
        params = list(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        optimizer: Any = torch.optim.SGD(params, lr=1.0)
        whole = fully_shard(nn.Sequential(Cut(dist.get_rank() % 2).up), dp, shard_atoms="whole")
        whole(torch.ones(2, 4)).square().sum().backward()
        muon = torch.optim.Muon(whole.parameters())
        return [
            refusal(lambda: torch.nn.utils.clip_grad_norm_(params, 1.0), RuntimeError),
            refusal(lambda: torch.nn.utils.get_total_norm([param.grad for param in params[::-1]]), RuntimeError),
            refusal(lambda: model.up.weight.grad.norm(), RuntimeError),
            refusal(lambda: scaler.unscale_(optimizer), RuntimeError),
            refusal(muon.step, RuntimeError),
        ]
    assert model.module.norm.weight.grad.norm() > 0, "which all ranks have whole"
    optimizer = DistributedOptimizer(model, lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    found = [
        refusal(lambda: clip_grad_norm(model, 1.0)),
        refusal(lambda: clip_grad_norm(model, 1.0, pipeline_group=tp)),
        refusal(lambda: DistributedOptimizer(model, lr=1.0, max_grad_norm=1.0)),
        refusal(lambda: DistributedOptimizer(model, lr=1.0, skip_nonfinite=True)),
        refusal(lambda: scaler.unscale_(optimizer)),
        refusal(lambda: torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0), RuntimeError),
        refusal(lambda: wrap(way, Cut(dist.get_rank() % 2), dp, check_for_nan_in_grad=True)),
    ]
    if way == "zero1":
        whole = wrap(way, nn.Sequential(Cut(dist.get_rank() % 2).up), dp, keep_params_whole=True)
        found.append(refusal(lambda: DistributedOptimizer(whole, lr=1.0, optimizer_class=torch.optim.Muon)))
    else:
        stock = wrap(way, Cut(dist.get_rank() % 2), dp)
        stock(torch.ones(2, 4)).square().sum().backward()
        stock.finish_grad_sync()
        stock.expose_grads()
        params = list(stock.parameters())
        stock_scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        stock_scaler.scale(torch.ones(()))
        found.append(refusal(lambda: torch.nn.utils.clip_grad_norm_(params, 1.0), RuntimeError))
        sgd = torch.optim.SGD(params, lr=1.0)
        found.append(refusal(lambda: stock_scaler.unscale_(sgd), RuntimeError))
    return found


def test_slices_are_copied_among_the_ranks_that_hold_them() -> None:
    """``broadcast_params`` behind a load that only the first ranks have read."""

    def on_each_rank() -> None:
        dp, tp = groups()
        index = dist.get_rank() % 2
        ddp = DistributedDataParallel(Cut(index), process_group=dp, tensor_parallel_group=tp)
        with torch.no_grad():
            for param in ddp.parameters():
                param += 1 + dist.get_rank()
        ddp.broadcast_params()
        first = Cut(index)
        assert torch.equal(ddp.module.up.weight, first.up.weight + 1 + index)
        assert torch.equal(ddp.module.norm.weight, first.norm.weight + 1)

    simulate(on_each_rank, 4)


@pytest.mark.parametrize("way", WAYS)
def test_what_would_cover_one_ranks_slices_is_refused(way: str) -> None:
    for text in all_texts(norms_of, way):
        assert "up.weight" in text or "0.weight" in text, text
        assert "slice of tensor parallelism" in text


def test_without_data_parallel_ranks_a_norm_of_slices_is_refused_too() -> None:
    """The other slices are on other ranks then as well."""

    def on_each_rank() -> list[str]:
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        model = wrap("ddp", Cut(dist.get_rank()), alone)
        model(torch.ones(2, 4)).square().sum().backward()
        scaler = GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        optimizer = DistributedOptimizer(model, lr=1.0)
        return [
            refusal(lambda: clip_grad_norm(model, 1.0)),
            refusal(lambda: DistributedOptimizer(model, lr=1.0, max_grad_norm=1.0)),
            refusal(lambda: scaler.unscale_(optimizer)),
            refusal(lambda: wrap("ddp", Cut(dist.get_rank()), alone, check_for_nan_in_grad=True)),
        ]

    for text in all_texts(on_each_rank, ranks=2):
        assert "'up.weight' is a slice of tensor parallelism" in text


def after_setting_a_mark_to_false(way: str, mark: str) -> float:
    """The remedy where all ranks hold whole parameters after all, as at a tensor-parallel degree of 1. Megatron-core
    marks experts as slices too, whole or cut."""
    dp, _ = groups()
    model = Cut(0)
    setattr(model.up.weight, mark, False)
    wrapped = wrap(way, model, dp)
    wrapped(torch.ones(2, 4)).square().sum().backward()
    wrapped.finish_grad_sync()
    if way == "fully_shard":
        return torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0).item()
    return clip_grad_norm(wrapped, 1.0).item()


@pytest.mark.parametrize("mark", ["tensor_model_parallel", "allreduce"])
@pytest.mark.parametrize("way", WAYS)
def test_without_slices_norms_are_as_ever(way: str, mark: str) -> None:
    norms = simulate(after_setting_a_mark_to_false, 4, way, mark)
    assert len(set(norms)) == 1


def searched_for_nan() -> int:
    """Marks of a tensor-parallel degree of 1; and slices whose ranks are known."""
    alone = wrap("ddp", Cut(0), None, check_for_nan_in_grad=True)
    dp, tp = groups()
    config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
    known = DistributedDataParallel(Cut(dist.get_rank() % 2), config, process_group=dp, tensor_parallel_group=tp)
    return len(alone.records) + len(known.records)


def test_nan_is_looked_for_where_all_slices_are_known() -> None:
    assert all(simulate(searched_for_nan, 4))


def test_tensor_parallel_ranks_reduce_in_one_order() -> None:
    """What they have copies of comes behind the same slices on all of them."""

    def wraps() -> str:
        dp, tp = groups()
        index = dist.get_rank() % 2
        model = nn.ModuleDict({"up": Cut(index).up, "down": Cut(index).up})
        ranks = {"process_group": dp, "tensor_parallel_group": tp}
        order = ["down.weight", "up.weight"][:: 1 - 2 * index]
        config = DistributedDataParallelConfig(bucket_size=1)
        return refusal(lambda: DistributedDataParallel(model, config, backward_order=order, **ranks))

    for text in simulate(wraps, 4):
        assert "the cut model differs between ranks" in text
        assert re.search(r"rank \d has 'up.weight' \[8, 4\] .* in bucket 1 where rank \d has .* in bucket 0", text)


@pytest.mark.parametrize("bucket_size", [10, 30])
def test_uneven_slices_close_buckets_at_the_same_parameters(bucket_size: int) -> None:
    def names() -> list[list[str]]:
        config = DistributedDataParallelConfig(bucket_size=bucket_size)
        model = uneven_cuts.Cut(dist.group.WORLD)
        ddp = DistributedDataParallel(model, config, process_group=WORLD_OF_ONE)
        return [[record.name for record in bucket.records] for bucket in ddp.buckets]

    first, second = simulate(names, 2)
    assert first == second and len(first) > 1


def test_nan_in_one_ranks_slice_is_found_on_all() -> None:
    def on_each_rank() -> None:
        dp, tp = groups()
        config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
        model = Cut(dist.get_rank() % 2).up
        ddp = DistributedDataParallel(model, config, process_group=dp, tensor_parallel_group=tp)
        ddp(torch.full((1, 4), math.nan if dist.get_rank() == 3 else 1.0)).sum().backward()
        with pytest.raises(FloatingPointError, match="parameter 'weight' holds NaN or Inf on rank 3"):
            ddp.finish_grad_sync()

    simulate(on_each_rank, 4)


def test_tensor_parallel_ranks_take_the_same_steps() -> None:
    """Data-parallel ranks agree among themselves, and the slices would part."""

    def on_each_rank() -> None:
        dp, tp = groups()
        model = Cut(dist.get_rank() % 2)
        ddp = DistributedDataParallel(model, process_group=dp, tensor_parallel_group=tp)
        for step in range(2):
            for _ in range(1 + step * (dist.get_rank() % 2)):
                loss = ddp(torch.ones(1, 4)).square().sum()
            loss.backward()
            if step == 0:
                ddp.finish_grad_sync()
                ddp.zero_grad()
        with pytest.raises(RuntimeError, match=r"skipped different batches .*: 0 on ranks 0, 2, 1 on ranks 1, 3"):
            ddp.finish_grad_sync()

    simulate(on_each_rank, 4)


def with_a_marked_expert() -> float:
    """Megatron-core marks experts too, which have ranks of their own."""
    dp, _ = groups()
    model = Cut(0)
    model.up.weight.allreduce = False  # type: ignore[assignment]
    wrapped = DistributedDataParallel(model, process_group=dp, expert_process_group=dp)
    wrapped(torch.ones(2, 4)).square().sum().backward()
    wrapped.finish_grad_sync()
    return clip_grad_norm(wrapped, 1.0).item()


def test_an_expert_is_no_slice() -> None:
    norms = simulate(with_a_marked_expert, 4)
    assert len(set(norms)) == 1 and norms[0] > 0


def with_marks_at_a_degree_of_one(way: str, path: Path) -> float:
    """Megatron-core's layers mark whole parameters too: here all ranks are data-parallel."""
    model = wrap(way, Cut(0))
    model(torch.ones(2, 4)).square().sum().backward()
    model.finish_grad_sync()
    if way == "fully_shard":
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    else:
        norm = clip_grad_norm(model, 1.0)
    save_checkpoint(path, model)
    return norm.item()


@pytest.mark.parametrize("way", WAYS)
def test_marks_of_whole_parameters_change_nothing(way: str, tmp_path: Path) -> None:
    norms = simulate(with_marks_at_a_degree_of_one, 2, way, tmp_path / "saved")
    assert norms[0] == norms[1]


def logs_on_the_first_rank() -> float:
    model = wrap("ddp", Cut(0))
    model(torch.ones(2, 4)).square().sum().backward()
    grad = model.module.up.weight.grad
    return grad.norm().item() if dist.get_rank() == 0 else grad.pow(2).sum().sqrt().item()


def test_one_rank_may_take_a_norm_of_whole_parameters_with_marks() -> None:
    """Every rank has the whole gradient, so that no norm is a collective."""
    first, second = simulate(logs_on_the_first_rank, 2)
    assert first == pytest.approx(second)


def saves(way: str, path: Path) -> str:
    dp, _ = groups()
    model = wrap(way, Cut(dist.get_rank() % 2), dp)
    return refusal(lambda: save_checkpoint(path, model))


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_slices_is_refused(way: str, tmp_path: Path) -> None:
    for text in all_texts(saves, way, tmp_path / "saved"):
        assert "save_checkpoint would write this rank's slices" in text
        assert "'up.weight'" in text
    assert not (tmp_path / "saved").exists()


# ---- Gradients that other ranks have parts of. ----

PARTIAL = ("sequence_parallel", "average_gradients_across_tp_domain", "shared_embedding")


def has_parts(way: str, mark: str) -> str:
    dp, _ = groups()
    model = Cut(dist.get_rank() % 2)
    setattr(model.norm.weight, mark, True)
    text = refusal(lambda: wrap(way, model, dp))
    setattr(model.norm.weight, mark, False)
    wrap(way, model, dp)
    return text


@pytest.mark.parametrize("mark", PARTIAL)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(4)
def test_a_gradient_that_nobody_sums_is_refused(way: str, mark: str) -> None:
    for text in all_texts(has_parts, way, mark):
        assert f"'norm.weight' has {mark} = True" in text
        assert "set the mark to False" in text


def has_parts_among_all_ranks(way: str) -> str:
    model = Cut(0)
    model.norm.weight.sequence_parallel = True  # type: ignore[assignment]
    return refusal(lambda: wrap(way, model))


@pytest.mark.parametrize("way", WAYS)
def test_a_wrapper_around_all_ranks_averages_what_is_to_be_summed(way: str) -> None:
    for text in all_texts(has_parts_among_all_ranks, way, ranks=2):
        assert "'norm.weight' has sequence_parallel = True" in text


@pytest.mark.parametrize("mark", PARTIAL[1:])
def test_megatron_sets_the_other_marks_where_nobody_has_copies_too(mark: str) -> None:
    def on_each_rank() -> None:
        model = Cut(0)
        setattr(model.norm.weight, mark, True)
        wrap("ddp", model)

    simulate(on_each_rank, 2)


def test_a_frozen_parameter_has_no_gradient_to_sum() -> None:
    def on_each_rank() -> None:
        dp, _ = groups()
        model = Cut(dist.get_rank() % 2)
        model.norm.requires_grad_(False)
        model.norm.weight.sequence_parallel = True  # type: ignore[assignment]
        wrap("zero1", model, dp)

    simulate(on_each_rank, 4)


# ---- DTensors. ----


def frozen_dtensor() -> str:
    dp, _ = groups()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    grid = DTensor.from_local(model[1].weight.detach(), mesh, [Replicate(), Replicate()], run_check=False)
    model[1].weight = nn.Parameter(grid, requires_grad=False)
    return refusal(lambda: DistributedDataParallel(model, process_group=dp))


def test_a_frozen_dtensor_over_data_parallel_ranks_is_refused() -> None:
    for text in all_texts(frozen_dtensor):
        assert "'1.weight' is a DTensor on a mesh of 2 dims" in text


def ignored_dtensor(trained: bool) -> list[str]:
    dp, _ = groups()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    weight = DTensor.from_local(model[1].weight.detach(), mesh["tp"], [Replicate()], run_check=False)
    model[1].weight = nn.Parameter(weight, requires_grad=trained)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(model, dp, ignored_params=[model[1].weight])
    return [text for each in caught if "DTensor" in (text := str(each.message))]


def test_an_ignored_dtensor_that_nobody_reduces_is_said() -> None:
    for rank, texts in enumerate(simulate(ignored_dtensor, 4, True)):
        assert len(texts) == 1
        assert f"nobody averages its gradient over ranks [{(rank + 2) % 4}]" in texts[0]
    assert not any(simulate(ignored_dtensor, 4, False))


# ---- Tools of torch, Megatron-core and transformers. ----


def dcp_of_an_optimizer() -> list[str]:
    model = wrap("zero1", nn.Linear(4, 4))
    optimizer = DistributedOptimizer(model, lr=1.0)
    model(torch.ones(2, 4)).sum().backward()
    model.finish_grad_sync()
    optimizer.step()
    fresh = wrap("zero1", nn.Linear(4, 4))
    before = DistributedOptimizer(fresh, lr=1.0)
    pairs = ((model, optimizer), (fresh, before))
    return [refusal(lambda m=m, o=o: get_state_dict(m, o), Exception) for m, o in pairs]


def test_dcp_of_a_distributed_optimizer_never_returns_a_state() -> None:
    """docs/checkpoints.md says what to call in its place: torch tells the optimizer nothing of who asks."""
    for text in all_texts(dcp_of_an_optimizer, ranks=2):
        assert text


class Pretrained(nn.Linear):
    """As transformers' models: it writes what ``state_dict`` gives."""

    def save_pretrained(self, folder: Path, state_dict: Any = None) -> None:
        torch.save(self.state_dict() if state_dict is None else state_dict, folder)


def saves_pretrained(path: Path) -> str:
    torch.manual_seed(0)
    model: Any = fully_shard(Pretrained(4, 4))
    text = refusal(lambda: model.save_pretrained(path), RuntimeError)
    with model.unsharded():
        if dist.get_rank() == 0:
            model.save_pretrained(path)
    return text


def test_save_pretrained_of_shards_is_refused_by_name(tmp_path: Path) -> None:
    for text in all_texts(saves_pretrained, tmp_path / "weights", ranks=2):
        assert "save_pretrained of FSDPPretrained" in text
        assert "unsharded()" in text
    torch.manual_seed(0)
    expected = nn.Linear(4, 4).state_dict()
    for name, value in torch.load(tmp_path / "weights").items():
        assert torch.equal(value, expected[name])


def steps_by_torchs_stage(way: str) -> list[Tensor]:
    """Each rank runs a pipeline of one stage, alike on all ranks."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = module if way == "plain" else wrap(way, module)
    params = {"lr": 0.1, "momentum": 0.9}
    optimizer: Any = (
        DistributedOptimizer(model, optimizer_class=torch.optim.SGD, **params)
        if way == "zero1"
        else torch.optim.SGD(model.parameters(), **params)
    )
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=groups[dist.get_rank()])
    schedule = ScheduleGPipe(stage, 4, nn.functional.mse_loss)
    for step in range(2):
        draws = torch.Generator().manual_seed(step)
        x, target = torch.randn(8, 4, generator=draws), torch.randn(8, 4, generator=draws)
        schedule.step(x, target=target, losses=[])
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize("way", ["ddp", "zero1"])
def test_torchs_stage_divides_grad_by_the_microbatches(way: str) -> None:
    """As schedules do by default, ``scale_grads=True``."""
    expected = simulate(steps_by_torchs_stage, 2, "plain")[0]
    for found in simulate(steps_by_torchs_stage, 2, way):
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other)


def test_megatrons_argument_of_finish_grad_sync() -> None:
    for way in ("ddp", "zero1"):
        model = wrap(way, nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        if way == "zero1":
            with pytest.raises(RuntimeError, match=r"force_all_reduce=True\) needs whole gradients"):
                model.finish_grad_sync(force_all_reduce=True)
        model.finish_grad_sync(force_all_reduce=way == "ddp")
        assert model.module.weight.main_grad.eq(2).all()


def three_dims() -> str:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "context"))
    text = refusal(lambda: fully_shard(nn.Linear(4, 4), mesh))
    mesh["shard", "context"]._flatten("inner")
    model = fully_shard(nn.Linear(4, 4), mesh["replicate", "inner"])
    assert model.units[0].grid.inner_size == 4
    return text


def test_a_mesh_of_three_dims_says_how_to_flatten_it() -> None:
    for text in all_texts(three_dims, ranks=8):
        assert "this one has 3 dims" in text
        assert (
            "mesh['shard', 'cp']._flatten('inner'), and give the outer one beside it, mesh['replicate', 'inner']"
            in text
        )


def scales_in_a_pipeline(together: bool) -> tuple[float, bool]:
    """Two stages of one rank each; the second one's gradient overflows."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=alone)
    optimizer = DistributedOptimizer(model, lr=1.0, optimizer_class=torch.optim.SGD)
    before = model.module.weight.detach().clone()
    scaler = GradScaler("cpu", init_scale=2.0, pipeline_group=dist.group.WORLD if together else None)
    loss = model(torch.ones(2, 4)).sum() * (float("inf") if dist.get_rank() == 1 else 1.0)
    scaler.scale(loss).backward()
    model.finish_grad_sync()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), torch.equal(model.module.weight, before)


def test_a_scaler_covers_the_stages_that_the_norm_covers() -> None:
    assert simulate(scales_in_a_pipeline, 2, True) == [(1.0, True), (1.0, True)]
    assert simulate(scales_in_a_pipeline, 2, False) == [(2.0, False), (1.0, True)]
