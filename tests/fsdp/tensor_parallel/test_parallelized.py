"""torch's ``parallelize_module`` under ``fully_shard``: a Llama against plain PyTorch over all data."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gloo import run_ranks
from parallel_llama import Llama, assert_grads, batch, full, llama, make_mesh, parallelize, plain_grads
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import convert_linears

PLANS = ["tp", "tp and sequence"]
ORDERS = ["convert first", "tp first", "not converted"]


def mesh_of(row: str) -> Any:
    """(dp, tp); with hybrid sharding (outer, dp, tp)."""
    if row != "hsdp":
        return make_mesh()
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "dp", "tp"))


def ranks_of(row: str) -> tuple[Any, int, int]:
    """The mesh to shard over, this rank's index in it, and their number."""
    mesh = mesh_of(row)
    if row != "hsdp":
        return mesh["dp"], mesh["dp"].get_local_rank(), 2
    return mesh["outer", "dp"], mesh["outer"].get_local_rank() * 2 + mesh["dp"].get_local_rank(), 4


def build(row: str, plan: str, order: str, *, seed: int = 0, **options: Any) -> Any:
    model = llama(seed)
    if order == "convert first":
        assert not convert_linears(model).skipped
    parallelize(model, mesh_of(row)["tp"], sequence=plan != "tp")
    if order == "tp first":
        assert not convert_linears(model).skipped
    return sharded(model, row, **options)


def sharded(model: Llama, row: str, **options: Any) -> Any:
    mesh, _, _ = ranks_of(row)
    for block in model.blocks:
        fully_shard(block, mesh, row, **options)
    return fully_shard(model, mesh, row, **options)


def iterate(model: Any, first: int, micro: int) -> None:
    for index in range(micro):
        with nullcontext() if index == micro - 1 else model.no_sync():
            (model(*batch(first + index)) / micro).backward()


def gradients(row: str, plan: str, order: str, micro: int) -> None:
    _, index, count = ranks_of(row)
    model = build(row, plan, order)
    iterate(model, index * micro, micro)
    found = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    assert_grads(found, plain_grads(llama(), [batch(each) for each in range(count * micro)]))


@pytest.mark.in_turn
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("row", ["zero3", "zero1", "hsdp"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sampled(6)
def test_gradients_are_those_of_the_whole_model(plan: str, row: str, order: str, micro: int) -> None:
    simulate(gradients, 8 if row == "hsdp" else 4, row, plan, order, micro)


def trained(row: str, plan: str, order: str) -> dict[str, Tensor]:
    _, index, count = ranks_of(row)
    model = build(row, plan, order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        iterate(model, count * step + index, 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(value).clone() for name, value in model.state_dict().items()}


def trained_plainly(count: int) -> dict[str, Tensor]:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        for index in range(count):
            (model(*batch(count * step + index)) / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.in_turn
@pytest.mark.parametrize("row", ["zero3", "zero1", "hsdp"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sampled(3)
def test_five_clipped_steps_leave_equal_copies_of_the_plain_model(plan: str, row: str) -> None:
    first, *others = simulate(trained, 8 if row == "hsdp" else 4, row, plan, "tp first")
    for name, expected in trained_plainly(4 if row == "hsdp" else 2).items():
        torch.testing.assert_close(first[name], expected, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(first[name], other[name]) for other in others)


def compiled() -> None:
    _, index, count = ranks_of("zero3")
    model = llama()
    convert_linears(model)
    # Without sequence parallelism torch 2.14 cannot compile these blocks, alone neither.
    parallelize(model, mesh_of("zero3")["tp"], sequence=True)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    sharded(model, "zero3")
    iterate(model, index, 1)
    found = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    assert_grads(found, plain_grads(llama(), [batch(each) for each in range(count)]))


@pytest.mark.slow
def test_blocks_may_be_compiled() -> None:
    """On processes: a compiler's lock stops simulated ranks, which take turns inside a compiled forward."""
    run_ranks(compiled, 4, timeout=300.0)


# ---- State dicts. ----


def saves(path: Path) -> dict[str, Tensor]:
    model, whole = build("zero3", "tp and sequence", "tp first"), llama().state_dict()
    found = model.state_dict()
    assert found.keys() == whole.keys()
    for name, value in found.items():
        assert torch.equal(full(value), whole[name]), name
    assert list(found["blocks.0.mlp.w1.weight"].placements) == [_StridedShard(0, split_factor=2), Shard(0)]
    assert list(found["blocks.0.mlp.w2.weight"].placements) == [Shard(0), Shard(1)]
    with model.unsharded():
        inside = {name: value for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    assert list(inside["blocks.0.mlp.w1.weight"].placements) == [Shard(0)]
    for name, value in inside.items():
        assert torch.equal(full(value), whole[name]), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    iterate(model, ranks_of("zero3")[1], 1)
    optimizer.step()
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    iterate(model, 4 + ranks_of("zero3")[1], 1)
    optimizer.step()
    return {name: full(value).clone() for name, value in model.state_dict().items()}


def resumes(path: Path, cut: bool) -> dict[str, Tensor]:
    """By 2 x 2 ranks again, in another order of wrapping; or by 2 ranks that hold whole parameters."""
    model: Any = build("zero3", "tp", "convert first", seed=1) if cut else fully_shard(llama(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    index = ranks_of("zero3")[1] if cut else torch.distributed.get_rank()
    iterate(model, index, 1)
    optimizer.step()
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    iterate(model, 4 + index, 1)
    optimizer.step()
    return {name: full(value).clone() for name, value in model.state_dict().items()}


@pytest.mark.in_turn
@pytest.mark.parametrize("cut", [True, False])
def test_dcp_resumes_on_other_ranks(cut: bool, tmp_path: Path) -> None:
    expected, *_ = simulate(saves, 4, tmp_path / "saved")
    for found in simulate(resumes, 4 if cut else 2, tmp_path / "saved", cut):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def loads_whole() -> None:
    model, other = build("zero3", "tp", "tp first"), llama(1).state_dict()
    set_model_state_dict(model, other, options=StateDictOptions(full_state_dict=True))
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), other[name]), name
    with model.unsharded():
        model.load_state_dict(llama(2).state_dict())
        assert torch.equal(full(model.state_dict()["head.weight"]), llama(2).state_dict()["head.weight"])


@pytest.mark.in_turn
def test_whole_tensors_load() -> None:
    simulate(loads_whole, 4)


def forgotten() -> str:
    model = parallelize(llama(), make_mesh()["tp"], sequence=False)
    with pytest.raises(ValueError, match="are in mesh and among the tensor-parallel ranks") as raised:
        fully_shard(model)
    return str(raised.value)


def test_a_mesh_with_tensor_parallel_ranks_is_refused() -> None:
    assert all("mesh['dp']" in text for text in simulate(forgotten, 4))


def on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Llama()
    parallelize(model, make_mesh()["tp"], sequence=False)
    fully_shard(model, make_mesh()["dp"], init_fn=fill)
    assert {full(value).unique().numel() for value in model.state_dict().values()} == {1}


def fill(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.constant_(param, 2.0)


def test_a_model_may_come_from_the_meta_device() -> None:
    simulate(on_the_meta_device, 4)


def drawn(tied: bool) -> dict[str, Tensor]:
    mesh = make_mesh()
    with torch.device("meta"):
        model = Llama()
    parallelize(model, mesh["tp"], sequence=True)
    if tied:
        model.head.weight = model.embedding.weight
    torch.manual_seed(3)
    fully_shard(model, mesh["dp"], init_fn=draw)
    return {name: full(value) for name, value in model.state_dict().items()}


def draw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        module.reset_parameters()
    else:
        fill(module)


@pytest.mark.in_turn
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_of_one_seed_draw_slices_of_one_whole(tied: bool) -> None:
    """Slices that each rank draws for itself would be equal, and as wide as a smaller layer's."""
    torch.manual_seed(3)
    whole = Llama()
    if tied:
        whole.head.weight = whole.embedding.weight
    torch.manual_seed(3)
    with torch.no_grad():
        for module in whole.modules():
            draw(module)
    for found in simulate(drawn, 4, tied):
        for name, value in whole.state_dict().items():
            assert torch.equal(found[name], value), name


def all_but_the_head(tied: bool) -> str:
    mesh = make_mesh()
    with torch.device("meta"):
        model = Llama()
    parallelize(model, mesh["tp"], sequence=True)
    if tied:
        model.head.weight = model.embedding.weight

    def init_fn(module: nn.Module) -> None:
        if module is not model.head:
            fill(module)

    if not tied:
        with pytest.raises(ValueError, match="has no value") as raised:
            fully_shard(model, mesh["dp"], init_fn=init_fn)
        return str(raised.value)
    fully_shard(model, mesh["dp"], init_fn=init_fn)
    assert (full(model.state_dict()["head.weight"]) == 2).all()
    return ""


@pytest.mark.in_turn
def test_a_slice_is_initialised_by_one_of_its_modules_at_least() -> None:
    for _, text in simulate(lambda: [all_but_the_head(tied) for tied in (True, False)], 4):
        assert "'head.weight' of Llama was on the meta device" in text


def test_an_ignored_dtensor_of_one_instance_is_said() -> None:
    """The other instance has other batches."""

    def on_each_rank() -> list[str]:
        mesh = make_mesh(2, 2)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        whole = distribute_tensor(model[0].weight.detach(), mesh["tp"], [Replicate()])
        model[0].weight = nn.Parameter(whole)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fully_shard(model, mesh, "hsdp", ignored_params=[*model[0].parameters()][::-1])
        return [str(each.message) for each in caught if "ignored" in str(each.message)]

    for rank, (text,) in enumerate(simulate(on_each_rank, 4)):
        assert f"nobody averages its gradient over ranks [{(rank + 2) % 4}]" in text


def test_an_ignored_dtensor_that_nobody_averages_is_said() -> None:
    """Its mesh looks as if somebody did. One that is frozen, or over all these ranks, is no trouble."""

    def on_each_rank() -> list[list[str]]:
        mesh = make_mesh(2, 2)
        said = []
        for over, trained in (("tp", True), ("tp", False), ("dp", True)):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            whole = distribute_tensor(model[0].weight.detach(), mesh[over], [Replicate()])
            model[0].weight = nn.Parameter(whole, requires_grad=trained)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fully_shard(model, mesh["dp"], ignored_params=[model[0].weight])
            said.append([str(each.message) for each in caught if "ignored" in str(each.message)])
        return said

    for rank, ((text,), *others) in enumerate(simulate(on_each_rank, 4)):
        assert f"nobody averages its gradient over ranks [{(rank + 2) % 4}]" in text
        assert not any(others)
