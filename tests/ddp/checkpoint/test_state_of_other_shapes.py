"""State whose tensors have other shapes than their parameter: of Shampoo and SOAP as users write them."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Experts
from gloo import run_ranks
from loops import assert_same, weights, wrap
from preconditioned import Shampoo, Soap
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from uneven_cuts import Cut, loss_of

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.ddp.checkpoint.files.manifest import to_json
from maingrad.ddp.checkpoint.source import HeldSlice, Holding, ModelTensors
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.launch.safetensors_io import export_safetensors

WHOLE = {"use_distributed_optimizer": True, "keep_params_whole": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": WHOLE,
    "buckets": {**WHOLE, "bucket_size": 1, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "hybrid": {**WHOLE, "num_distributed_optimizer_instances": 2},
}
CLASSES: list[type[optim.Optimizer]] = [Shampoo, Soap]
FIRST, LAST = range(3), range(3, 6)


class Block(nn.Module):
    """Names with dots, a square matrix, whose preconditioners have its shape, and one of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(12, 12)
        self.row = nn.Linear(12, 1, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.square(inputs).tanh() * self.scale + self.row(inputs)


def make_net(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), Block(), nn.Linear(12, 20)).to(dtype)


def build(kind: str, cls: type[optim.Optimizer], dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Any:
    """A model and its optimizer: one of ``CONFIGS``, or fully sharded."""
    net = make_net(dtype, seed=seed)
    if kind in CONFIGS:
        ddp = wrap(net, **CONFIGS[kind])
        return ddp, DistributedOptimizer(ddp, optimizer_class=cls)
    mesh = None
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    for block in net:
        fully_shard(block, mesh=mesh, shard_atoms="whole")
    model = fully_shard(net, mesh=mesh, shard_atoms="whole")
    return model, cls(model.parameters())


def train(model: Any, optimizer: Any, steps: range, *, alike: bool = False) -> None:
    """alike: all ranks have the same batches, so that sums of gradients have the same bits on any of 2^N ranks."""
    rank = 0 if alike or not dist.is_initialized() else dist.get_rank()
    dtype = next(model.parameters()).dtype
    for step in steps:
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        (model(inputs.to(dtype)).float() - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: Any) -> dict[str, Tensor]:
    if not hasattr(model, "unsharded"):
        return weights(model)
    with torch.no_grad(), model.unsharded():
        return weights(model)


def straight(kind: str, cls: type[optim.Optimizer], dtype: torch.dtype, folder: Path) -> dict[str, Tensor]:
    """Weights of a run that saves on its way."""
    model, optimizer = build(kind, cls, dtype)
    train(model, optimizer, FIRST)
    save_checkpoint(folder, model, optimizer, extra="three")
    train(model, optimizer, LAST)
    return values(model)


def resumed(kind: str, cls: type[optim.Optimizer], dtype: torch.dtype, folder: Path) -> dict[str, Tensor]:
    model, optimizer = build(kind, cls, dtype, seed=1)
    assert load_checkpoint(folder, model, optimizer) == "three"
    train(model, optimizer, LAST)
    return values(model)


SAME = [("ddp", 1), ("ddp", 3), ("zero1", 1), ("zero1", 2), ("buckets", 3), ("zero1", 8), ("hybrid", 4), ("hybrid", 6)]
SHARDED = [("zero3", 1), ("zero3", 2), ("zero3", 3), ("zero3", 8), ("hsdp", 4)]


@pytest.mark.in_turn
@pytest.mark.parametrize(("kind", "ranks"), [*SAME, *SHARDED])
@pytest.mark.parametrize("cls", CLASSES)
def test_a_resumed_run_has_the_bits_of_one_without_interruption(
    tmp_path: Path, cls: type[optim.Optimizer], kind: str, ranks: int
) -> None:
    expected = simulate(straight, ranks, kind, cls, torch.float32, tmp_path / "c")
    for actual in simulate(resumed, ranks, kind, cls, torch.float32, tmp_path / "c"):
        assert_same(actual, expected[0])


@pytest.mark.parametrize("cls", [*CLASSES, optim.Adafactor])
def test_masters_of_half_precision_and_their_state(tmp_path: Path, cls: type[optim.Optimizer]) -> None:
    expected = simulate(straight, 2, "zero1", cls, torch.bfloat16, tmp_path / "c")
    for actual in simulate(resumed, 2, "zero1", cls, torch.bfloat16, tmp_path / "c"):
        assert_same(actual, expected[0])


# ---- On other ranks. ----


def alone(cls: type[optim.Optimizer], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """One process's weights when it saves and at the end, and the state when it saves, by parameter and place."""
    model, optimizer = build("ddp", cls)
    train(model, optimizer, FIRST, alike=True)
    save_checkpoint(folder, model, optimizer)
    before, state = values(model), state_of(model, optimizer)
    train(model, optimizer, LAST, alike=True)
    return before, values(model), state


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """All state of a rank's parameters that have elements here, copied."""
    if isinstance(optimizer, DistributedOptimizer):
        held = {part.name: {**part.state(), **part.scalars()} for part in optimizer.slices if part.segment is not None}
    else:
        held = {name: optimizer.state[param] for name, param in model.named_parameters() if param.numel()}
    return {
        f"{name}/{key}": copy.deepcopy(value)
        for name, state in held.items()
        for key, value in state.items()
        if value is not None
    }


def moved(
    kind: str, cls: type[optim.Optimizer], source: Path, target: Path
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """Weights and state after a load, saved again; and weights at the end of the run."""
    model, optimizer = build(kind, cls, seed=1)
    load_checkpoint(source, model, optimizer)
    loaded, state = values(model), state_of(model, optimizer)
    save_checkpoint(target, model, optimizer)
    train(model, optimizer, LAST, alike=True)
    return loaded, state, values(model)


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in actual.items():
        _assert_same_tree(value, expected[key], key)


def _assert_same_tree(one: Any, other: Any, key: str) -> None:
    assert type(one) is type(other), key
    if isinstance(one, list):
        assert len(one) == len(other), key
        for index, each in enumerate(one):
            _assert_same_tree(each, other[index], key)
    elif isinstance(one, Tensor):
        # Elementwise state is a view of flat memory here, and a shard there.
        assert one.numel() == other.numel() and torch.equal(one.flatten(), other.flatten()), key
    else:
        assert one == other, key


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("zero1", 3), ("zero1", 4), ("buckets", 8), ("hybrid", 6), ("zero3", 2), ("zero3", 5), ("hsdp", 4)],
)
@pytest.mark.parametrize("cls", CLASSES)
def test_other_ranks_and_wrappers_take_the_state_and_give_it_back(
    tmp_path: Path, cls: type[optim.Optimizer], kind: str, ranks: int
) -> None:
    before, after, state = alone(cls, tmp_path / "1")
    results = simulate(moved, ranks, kind, cls, tmp_path / "1", tmp_path / "2")
    for loaded, there, end in results:
        assert_same(loaded, before)
        assert_same_state(there, state)
        if ranks & (ranks - 1) == 0:  # else means of equal gradients round
            assert_same(end, after)
    assert {key for _, there, _ in results for key in there} == state.keys()
    (back, again, end), *_ = simulate(moved, 1, "ddp", cls, tmp_path / "2", tmp_path / "3")
    assert again.keys() == state.keys()
    assert_same(back, before)
    assert_same_state(again, state)
    assert_same(end, after)


def on_processes(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of a run that saves in the background, and of the run that goes on from there."""
    model, optimizer = build("zero1", Soap)
    train(model, optimizer, FIRST)
    pending = save_checkpoint(folder, model, optimizer, background=True)
    train(model, optimizer, LAST)  # while the thread writes what was there before
    pending.wait()
    other, its = build("zero1", Soap, seed=1)
    load_checkpoint(folder, other, its)
    train(other, its, LAST)
    return values(model), values(other)


def test_background_saves_of_processes(tmp_path: Path) -> None:
    for expected, actual in run_ranks(on_processes, 2, tmp_path / "c"):
        assert_same(actual, expected)


def with_experts(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Ranks of one parity share experts; weights of a run that saves on its way, and of the one that goes on there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(range(parity, size, 2)) for parity in range(2)]

    def built(seed: int) -> Any:
        config = DistributedDataParallelConfig(**WHOLE)
        model = Experts(seed, rank % 2, marked=True)
        ddp = DistributedDataParallel(model, config, expert_process_group=groups[rank % 2])
        return ddp, DistributedOptimizer(ddp, optimizer_class=Shampoo)

    def step(model: Any, optimizer: Any) -> None:
        model(torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = built(0)
    step(model, optimizer)
    save_checkpoint(folder, model, optimizer)
    other, its = built(5)
    load_checkpoint(folder, other, its)
    step(model, optimizer)
    step(other, its)
    return weights(model), weights(other)


def test_each_set_of_experts_has_its_own_state(tmp_path: Path) -> None:
    for expected, actual in simulate(with_experts, 4, tmp_path / "c"):
        assert_same(actual, expected)


# ---- The files. ----


def saved_by_two(folder: Path) -> Path:
    simulate(straight, 2, "zero1", Soap, torch.float32, folder)
    return folder


def test_each_tensor_has_an_entry_of_its_own_shape(tmp_path: Path) -> None:
    saved_by_two(tmp_path / "c")
    manifest = json.loads((tmp_path / "c" / "maingrad.json").read_text())
    files = [load_file(path) for path in sorted((tmp_path / "c").glob("*.safetensors"))]
    entry = manifest["tensors"]["GG.1@0.weight"]
    assert entry["shape"] == [8, 8] and entry["dtypes"] == {"state": "float32"}
    ((rank, offsets, sizes),) = entry["boxes"]
    assert (offsets, sizes) == ([0, 0], [8, 8])
    assert files[rank]["state.GG.1@0.weight"].shape == (8, 8)
    assert manifest["version"] == 4
    # A side of more than 12 has no matrix, and one of a single row has one of one element.
    assert manifest["tensors"]["2.weight"]["scalars"]["GG"][0] == []
    assert manifest["tensors"]["GG.0@1.row.weight"]["shape"] == [1, 1]


def test_weights_are_exported_and_loaded_without_the_state(tmp_path: Path) -> None:
    before, _, _ = alone(Shampoo, tmp_path / "c")
    export_safetensors(tmp_path / "c", tmp_path / "weights.safetensors", dtype=torch.float32)
    assert_same(load_file(tmp_path / "weights.safetensors"), before)
    net = make_net(seed=1)
    load_checkpoint(tmp_path / "c", net)
    assert_same(weights(net), before)


def load_in_one(folder: Path) -> None:
    model, optimizer = build("ddp", Soap, seed=1)
    load_checkpoint(folder, model, optimizer)


def test_damaged_bytes_are_found(tmp_path: Path) -> None:
    saved_by_two(tmp_path / "c")
    for path in (tmp_path / "c").glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        length = int.from_bytes(content[:8], "little")
        place = json.loads(content[8 : 8 + length]).get("state.Q.1@0.weight")
        if place is not None:
            content[8 + length + place["data_offsets"][0]] ^= 1
            path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged where 'state\.Q\.1@0\.weight' lies: its bytes have checksum"):
        load_in_one(tmp_path / "c")


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no entry": lambda tensors: tensors.pop("left@2.weight"),
    "another entry": lambda tensors: tensors["left@2.weight"].update(dtypes={"model": "float32"}),
    "no order": lambda tensors: tensors["2.weight"]["scalars"]["left"].update(order=[1, 1]),
    "fewer dims": lambda tensors: tensors["2.weight"]["scalars"]["left"].update(order=[0]),
    "an order of names": lambda tensors: tensors["2.weight"]["scalars"]["left"].update(order="ab"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_tensor_that_the_manifest_lacks_is_missing(tmp_path: Path, edit: str) -> None:
    alone(Shampoo, tmp_path / "c")
    path = tmp_path / "c" / "maingrad.json"
    manifest = json.loads(path.read_text())
    EDITS[edit](manifest["tensors"])
    manifest["checksum"] = None
    path.write_text(json.dumps(manifest))
    model, optimizer = build("ddp", Shampoo, seed=1)
    before = values(model)
    with pytest.raises(
        ValueError, match=r"is damaged \(ValueError: state of 'left' is missing, of parameter '2\.weight'"
    ):
        load_checkpoint(tmp_path / "c", model, optimizer)
    assert_same(values(model), before)


# ---- Parameters that are cut. ----


class Recalling(optim.SGD):
    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["norms"] = torch.zeros(5)
        return super().step(closure)


def test_state_of_a_cut_parameter_is_refused_by_name(tmp_path: Path) -> None:
    """A save of an elementwise class that keeps a tensor for each flat shard; a load before the first step."""

    def save() -> None:
        ddp = wrap(make_net(), use_distributed_optimizer=True)
        optimizer = DistributedOptimizer(ddp, optimizer_class=Recalling, lr=0.1)
        train(ddp, optimizer, FIRST)
        with pytest.raises(ValueError, match=r"state 'norms' of parameter '.*' is a Tensor.*keep_params_whole=True"):
            save_checkpoint(tmp_path / "not", ddp, optimizer)

    def load() -> None:
        model: Any = fully_shard(make_net(seed=1))
        before = values(model)
        whole = (
            r"'2\.weight', which is cut between ranks here.*keep_params_whole=True; shard_atoms='whole'\), or load the"
        )
        with pytest.raises(ValueError, match=whole):
            load_checkpoint(tmp_path / "c", model, Shampoo(model.parameters()))
        assert_same(values(model), before)

    simulate(save, 2)
    assert not (tmp_path / "not").exists()
    alone(Shampoo, tmp_path / "c")
    simulate(load, 4)


def test_state_of_a_part_that_tensor_parallel_ranks_hold_is_refused(tmp_path: Path) -> None:
    """A rank that updates all of its part as one tensor: the state is still not the whole parameter's."""

    def run(group: dist.ProcessGroup | None, action: Callable[..., None]) -> None:
        model: Any = fully_shard(Cut(group), WORLD_OF_ONE)
        optimizer = Recalling(model.parameters(), lr=0.1)
        loss_of(model, 0, range(4)).backward()
        optimizer.step()
        action(tmp_path / "c", model, optimizer)

    def save() -> None:
        with pytest.raises(ValueError, match=r"state 'norms' of parameter 'embed' is a Tensor.*keep_params_whole=True"):
            run(dist.group.WORLD, save_checkpoint)
        assert not (tmp_path / "c").exists()

    def load() -> None:
        with pytest.raises(ValueError, match=r"state 'norms' of the whole parameter 'embed', which is cut between"):
            run(dist.group.WORLD, load_checkpoint)

    simulate(save, 2)
    run(None, save_checkpoint)
    simulate(load, 2)


def test_a_tensor_that_has_as_many_elements_as_a_parameter_is_not_that_parameter() -> None:
    """It may hold another part of it, and parts of others."""

    def has_whole(shape: tuple[int, ...], here: int, updated: int | None) -> bool:
        master = torch.zeros(here)
        flat = None if updated is None else torch.zeros(updated)
        held = HeldSlice(0, shape, torch.float32, master, master, 0, flat, 0, {}, {})
        return Holding(ModelTensors({}, {}, {}, set(), {}), {"it": held}, None).has_whole("it")

    assert has_whole((2, 3), 6, 6) and has_whole((0, 3), 0, None)
    assert not has_whole((2, 3), 4, 6)
    assert not has_whole((2, 3), 4, 4)
    assert not has_whole((2, 3), 6, 8)
    assert not has_whole((2, 3), 6, None)


def test_two_tensors_of_state_that_would_have_one_name_are_refused() -> None:
    """One in a list, and one whose key is as the list's with the index."""
    others: dict[str, Tensor] = {}
    first, second = torch.zeros(2, 3), torch.ones(2, 3)
    assert to_json([5, first], "state 'a'", "a", others) == [5, {"beside": "a.1", "order": (0, 1)}]
    assert to_json(first, "state 'a.1'", "a.1", others) == {"beside": "a.1", "order": (0, 1)}
    with pytest.raises(ValueError, match=r"state 'a.1' is a Tensor, which a checkpoint cannot hold as JSON"):
        to_json(second, "state 'a.1'", "a.1", others)
    assert to_json(torch.ones(1, 1), "state 'a.1'", "a.1", others) == {"tensor": 1.0, "dtype": "float32"}
    assert list(others) == ["a.1"] and others["a.1"] is first


def test_a_group_of_its_own_beside_adamw(tmp_path: Path) -> None:
    """Matrices in Shampoo's group, and the rest in AdamW's, in half precision."""

    def build_mixed(seed: int) -> Any:
        matrices = ["0.weight", "1.square.weight", "2.weight"]
        ddp = wrap(make_net(torch.bfloat16, seed=seed), use_distributed_optimizer=True, keep_params_whole=True)
        groups: Any = [{"params": matrices, "optimizer": Shampoo, "lr": 0.1}]
        return ddp, DistributedOptimizer(ddp, lr=0.01, param_groups=groups)

    def on_each_rank() -> None:
        ddp, optimizer = build_mixed(0)
        train(ddp, optimizer, FIRST)
        save_checkpoint(tmp_path / "c", ddp, optimizer)
        train(ddp, optimizer, LAST)
        other, its = build_mixed(1)
        load_checkpoint(tmp_path / "c", other, its)
        train(other, its, LAST)
        assert_same(values(other), values(ddp))

    simulate(on_each_rank, 3)
