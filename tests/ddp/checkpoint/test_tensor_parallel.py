"""Checkpoints of models that tensor-parallel ranks hold together: whole parameters, for any degree and placement."""

import functools
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import uneven_cuts
from checkpointed import assert_same_files, files_content
from cut_models import WAYS, CutModel, joined, ranks_of_mesh, train, wrapped
from gloo import run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
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
from maingrad.ddp.checkpoint.files.manifest import Manifest
from maingrad.ddp.plan.model_slice import ModelSlice, model_slice_of, set_model_slice
from maingrad.fsdp import MixedPrecisionPolicy, ShardedAdamW, fully_shard
from maingrad.launch import simulate
from maingrad.launch.safetensors_io import export_safetensors

BF16, FP32 = torch.bfloat16, torch.float32


class Layout(NamedTuple):
    """How many ranks hold what."""

    wrapper: str
    """"zero1", "ddp", "zero3"; with "hybrid": two instances."""
    dp: int
    tp: int

    @property
    def ranks(self) -> int:
        return self.dp * self.tp


ZERO1_TP2 = Layout("zero1", 2, 2)
LAYOUTS = {
    "tp 1": Layout("zero1", 2, 1),
    "tp 2": ZERO1_TP2,
    "tp 4": Layout("ddp", 1, 4),
    "tp 3 of zero1": Layout("zero1", 2, 3),
    "hybrid tp 2": Layout("hybrid", 4, 2),
    "compact tp 2": Layout("compact", 2, 2),
    "compact zero3 tp 2": Layout("compact zero3", 2, 2),
    "zero3": Layout("zero3", 2, 1),
    "zero3 tp 2": Layout("zero3", 2, 2),
    "hybrid zero3 tp 2": Layout("hybrid zero3", 4, 2),
    "hsdp_zero1 tp 2": Layout("hsdp_zero1", 4, 2),
}


SHARDED_FP32 = ("zero3", "zero3 tp 2", "hybrid zero3 tp 2", "hsdp_zero1 tp 2")
"""Their frozen parameters are fp32 at rest, which no wrapper of half-precision models keeps."""


def meshes(layout: Layout) -> tuple[Any, dist.ProcessGroup | None]:
    """The data-parallel ranks of this rank, and its tensor-parallel ones."""
    outer = 2 if "h" in layout.wrapper and layout.dp > 2 else 1
    mesh = init_device_mesh("cpu", (outer, layout.dp // outer, layout.tp), mesh_dim_names=("outer", "inner", "tp"))
    tp = mesh.get_group("tp") if layout.tp > 1 else None
    if layout.dp == 1:
        return WORLD_OF_ONE, tp
    return (mesh["inner"] if outer == 1 else mesh["outer", "inner"]), tp


def build(layout: Layout, dtype: torch.dtype, seed: int = 0, moment_dtype: torch.dtype = FP32) -> tuple[nn.Module, Any]:
    """The model in its wrapper, and its optimizer."""
    dp, tp = meshes(layout)
    module = Cut(tp, dtype, seed)
    if layout.wrapper.endswith("zero3") or layout.wrapper.startswith("hsdp"):
        placements = layout.wrapper if layout.wrapper.startswith("hsdp") else "zero3"
        policy = MixedPrecisionPolicy(param_dtype=None if dtype is FP32 else dtype)
        fully_shard(module.norm, dp, placements=placements)
        if layout.wrapper.startswith("compact"):
            fully_shard(module, dp, placements=placements)
            kept = {"state": "compact", "moment_dtype": moment_dtype}
            return module, ShardedAdamW(module.parameters(), lr=0.02, weight_decay=0.1, **kept)  # type: ignore[arg-type]
        fully_shard(module.float(), dp, placements=placements, mixed_precision=policy)
        return module, torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.1)
    atom = 256 if moment_dtype is torch.uint8 else 1
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.wrapper != "ddp", bucket_size=60, shard_atom=atom
    )
    ddp = DistributedDataParallel(module, config, process_group=dp)
    options = {"state": "compact", "moment_dtype": moment_dtype} if layout.wrapper == "compact" else {}
    return ddp, DistributedOptimizer(ddp, lr=0.02, weight_decay=0.1, **options)  # type: ignore[arg-type]


def take_steps(model: nn.Module, optimizer: Any, steps: range, layout: Layout) -> list[Tensor]:
    """Each data-parallel rank takes its batches of four; returns losses."""
    index = dist.get_rank() // layout.tp
    losses = []
    for step in steps:
        share = 4 // layout.dp
        loss = loss_of(model, step, range(index * share, (index + 1) * share))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def train_and_save(folder: Path, layout: Layout, dtype: torch.dtype, steps: range = range(3)) -> None:
    model, optimizer = build(layout, dtype)
    take_steps(model, optimizer, steps, layout)
    save_checkpoint(folder, model, optimizer, extra={"step": steps.stop})


def load_and_save(source: Path, target: Path, layout: Layout, dtype: torch.dtype) -> None:
    model, optimizer = build(layout, dtype, seed=1)
    extra = load_checkpoint(source, model, optimizer)
    save_checkpoint(target, model, optimizer, extra=extra)


def load_train_and_save(source: Path, target: Path, layout: Layout, dtype: torch.dtype, steps: range) -> None:
    model, optimizer = build(layout, dtype, seed=2)
    load_checkpoint(source, model, optimizer)
    take_steps(model, optimizer, steps, layout)
    save_checkpoint(target, model, optimizer, extra={"step": steps.stop})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Path]:
    """What 2 x 2 ranks of ZeRO-1 saved after three steps; beside it ``later``, after five."""
    root = tmp_path_factory.mktemp("saved")

    @functools.cache
    def save(dtype: torch.dtype) -> Path:
        folder = root / str(dtype) / "three"
        simulate(train_and_save, 4, folder, ZERO1_TP2, dtype)
        simulate(train_and_save, 4, folder.with_name("later"), ZERO1_TP2, dtype, range(5))
        return folder

    return save


def assert_close_files(first: Path, second: Path) -> None:
    """Up to the order of sums."""
    (tensors, _), (others, _) = files_content(first), files_content(second)
    for kind in ("model", *tensors["optimizer"]["state"]):
        one, other = ((side["optimizer"]["state"] if kind != "model" else side)[kind] for side in (tensors, others))
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


# ---- Any degree to any other. ----


def test_a_checkpoint_of_two_ranks_has_the_whole_parameters(tmp_path: Path) -> None:
    """As a model that one rank holds has them, and packed blocks in their order."""
    folder = tmp_path / "saved"

    def save() -> None:
        model, optimizer = build(ZERO1_TP2, FP32)
        save_checkpoint(folder, model, optimizer)

    simulate(save, 4)
    tensors, _ = files_content(folder)
    whole = Cut(None)
    expected = dict([*whole.named_parameters(), *whole.named_buffers()])
    assert tensors["model"].keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors["model"][name], tensor), name


@pytest.mark.in_turn
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in SHARDED_FP32])
def test_masters_and_moments_go_through_any_degree(
    name: str, saved: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    simulate(load_and_save, layout.ranks, saved(BF16), tmp_path / "there", layout, BF16)
    assert_same_files(saved(BF16), tmp_path / "there")
    simulate(load_and_save, 4, tmp_path / "there", tmp_path / "back", ZERO1_TP2, BF16)
    assert_same_files(saved(BF16), tmp_path / "back")


@pytest.mark.in_turn
@pytest.mark.parametrize("name", SHARDED_FP32)
def test_and_through_sharded_models(name: str, saved: Callable[[torch.dtype], Path], tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    simulate(load_and_save, layout.ranks, saved(FP32), tmp_path / "there", layout, FP32)
    assert_same_files(saved(FP32), tmp_path / "there")
    simulate(load_and_save, 4, tmp_path / "there", tmp_path / "back", ZERO1_TP2, FP32)
    assert_same_files(saved(FP32), tmp_path / "back")


@pytest.mark.in_turn
def test_two_to_one_to_four_to_zero3_with_masters(saved: Callable[[torch.dtype], Path], tmp_path: Path) -> None:
    folders = [saved(BF16), *(tmp_path / str(index) for index in range(3))]
    for (source, target), name in zip(itertools.pairwise(folders), ("tp 1", "tp 4", "zero3"), strict=True):
        simulate(load_and_save, LAYOUTS[name].ranks, source, target, LAYOUTS[name], BF16)
    (tensors, _), (sharded, _) = files_content(folders[0]), files_content(folders[-1])
    for section in ("model", "master"):
        for parameter, value in tensors[section].items():
            assert torch.equal(sharded[section][parameter], value), parameter
    for parameter, state in tensors["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(sharded["optimizer"]["state"][parameter][key], value), (parameter, key)


def load_and_save_8_bits(source: Path, target: Path, layout: Layout) -> None:
    model, optimizer = build(layout, BF16, 1, torch.uint8)
    load_checkpoint(source, model, optimizer)
    save_checkpoint(target, model, optimizer, extra={"step": 3})


@pytest.mark.in_turn
def test_moments_in_8_bits_are_rounded_again_at_another_degree(
    saved: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    compact = Layout("compact", 2, 2)
    simulate(load_and_save_8_bits, 4, saved(BF16), tmp_path / "first", compact)
    simulate(load_and_save_8_bits, 4, tmp_path / "first", tmp_path / "same", compact)
    assert_same_files(tmp_path / "first", tmp_path / "same")
    simulate(load_and_save_8_bits, 2, tmp_path / "first", tmp_path / "tp 1", Layout("compact", 2, 1))
    (tensors, _), (others, _) = files_content(tmp_path / "first"), files_content(tmp_path / "tp 1")
    for name, master in tensors["master"].items():
        assert torch.equal(others["master"][name], master), name
    for name, state in tensors["optimizer"]["state"].items():
        for key, value in state.items():
            found = others["optimizer"]["state"][name][key]
            torch.testing.assert_close(found, value, rtol=0.0, atol=0.01 * value.abs().max().item())


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_training_goes_on_bit_for_bit(dtype: torch.dtype, saved: Callable[[torch.dtype], Path], tmp_path: Path) -> None:
    simulate(load_train_and_save, 4, saved(dtype), tmp_path / "later", ZERO1_TP2, dtype, range(3, 5))
    assert_same_files(saved(dtype).with_name("later"), tmp_path / "later")


@pytest.mark.parametrize("name", ["tp 1", "tp 4", "zero3", "zero3 tp 2"])
def test_training_goes_on_at_another_degree(name: str, saved: Callable[[torch.dtype], Path], tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    simulate(load_train_and_save, layout.ranks, saved(FP32), tmp_path / "later", layout, FP32, range(3, 5))
    assert_close_files(saved(FP32).with_name("later"), tmp_path / "later")


# ---- What is written, and by whom. ----


def steps_and_save(folder: Path, layout: Layout) -> None:
    model, optimizer = build(layout, BF16)
    take_steps(model, optimizer, range(1), layout)
    save_checkpoint(folder, model, optimizer)


@pytest.mark.parametrize("wrapper", ["zero1", "ddp", "zero3"])
def test_each_element_is_written_once(wrapper: str, tmp_path: Path) -> None:
    """Those of slices by a rank that holds them, and those of copies by one of all ranks."""
    simulate(steps_and_save, 4, tmp_path / "c", Layout(wrapper, 2, 2))
    manifest = Manifest.read(tmp_path / "c")  # this checks that boxes tile each tensor
    assert sorted(manifest.nbytes) == [0, 1, 2, 3]
    whole = Cut(None, BF16)
    for name, param in [*whole.named_parameters(), *whole.named_buffers()]:
        assert manifest.tensors[name].shape == tuple(param.shape)
    written = sum(
        tensor.nbytes for path in (tmp_path / "c").glob("*.safetensors") for tensor in load_file(path).values()
    )
    assert written == sum(manifest.nbytes.values())


@pytest.mark.in_turn
@pytest.mark.parametrize("wrapper", ["zero1", "ddp", "zero3"])
def test_weights_alone_and_without_a_wrapper(wrapper: str, tmp_path: Path) -> None:
    """A cut module without a wrapper is saved and loaded by its tensor-parallel ranks together."""
    layout = Layout(wrapper, 2, 2)

    def save() -> None:
        model, _ = build(layout, FP32)
        save_checkpoint(tmp_path / "wrapped", model)

    def cut_alone() -> None:
        module = Cut(dist.group.WORLD, seed=1)
        module.down.tensor_model_parallel = True  # type: ignore[attr-defined] # Megatron marks them too
        load_checkpoint(tmp_path / "wrapped", module)
        save_checkpoint(tmp_path / "alone", module)

    simulate(save, 4)
    simulate(cut_alone, 3)
    assert_same_files(tmp_path / "wrapped", tmp_path / "alone")
    module, expected = Cut(None, seed=2), Cut(None)
    load_checkpoint(tmp_path / "alone", module)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    simulate(load_weights, 4, tmp_path / "alone", layout)


def load_weights(folder: Path, layout: Layout) -> None:
    model, _ = build(layout, FP32, seed=3)
    load_checkpoint(folder, model)
    save_checkpoint(folder.with_name("again"), model)
    assert_same_files(folder, folder.with_name("again"))


def test_an_export_is_one_file_of_whole_parameters(saved: Callable[[torch.dtype], Path], tmp_path: Path) -> None:
    export_safetensors(saved(BF16), tmp_path / "masters.safetensors", dtype=FP32)
    exported, (tensors, _) = load_file(tmp_path / "masters.safetensors"), files_content(saved(BF16))
    for name, tensor in tensors["model"].items():
        assert torch.equal(exported[name], tensors["master"].get(name, tensor).float()), name


def saves_both_ways(folder: Path) -> None:
    model, optimizer = build(ZERO1_TP2, FP32)
    take_steps(model, optimizer, range(3), ZERO1_TP2)
    save_checkpoint(folder / "in front", model, optimizer)
    pending = save_checkpoint(folder / "behind", model, optimizer, background=True)
    take_steps(model, optimizer, range(3, 4), ZERO1_TP2)
    pending.wait()


@pytest.mark.in_turn
def test_a_save_in_the_background(tmp_path: Path) -> None:
    run_ranks(saves_both_ways, 4, tmp_path)
    assert_same_files(tmp_path / "in front", tmp_path / "behind")


def saves_marked(folder: Path, way: str) -> dict[str, Tensor]:
    ranks = ranks_of_mesh(WAYS[way].mesh)
    model = wrapped(way, ranks, sp=True)
    optimizer = DistributedOptimizer(model, lr=0.1, max_grad_norm=1.0)
    train(model, optimizer, ranks, 1)
    save_checkpoint(folder, model, optimizer)
    return joined(model, dict(model.module.named_parameters()))


@pytest.mark.parametrize("way", ["ddp", "zero1", "hybrid"])
def test_slices_by_megatrons_marks(way: str, tmp_path: Path) -> None:
    """Of a model with sequence parallelism, into one that is not cut."""
    replicas, shards, tp = WAYS[way].mesh
    expected = simulate(saves_marked, replicas * shards * tp, tmp_path / "c", way)[-1]
    model = CutModel()
    load_checkpoint(tmp_path / "c", model)
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name]), name


# ---- Errors, on all ranks alike. ----


def refusals(run: Callable[[], Any], expected: str, ranks: int = 4) -> list[str]:
    def on_each_rank() -> str:
        with pytest.raises(ValueError, match=expected) as raised:
            run()
        return str(raised.value)

    return simulate(on_each_rank, ranks)


def test_damage_in_one_slice_is_noticed(saved: Callable[[torch.dtype], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved(BF16), tmp_path / "damaged"))
    path = folder / "rank-00003.safetensors"
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # of the first entry: a master
    path.write_bytes(content)
    for layout in (ZERO1_TP2, LAYOUTS["tp 1"]):
        run = functools.partial(load_and_save, folder, tmp_path / "no", layout, BF16)
        for text in refusals(run, f"'{path}' is damaged where", layout.ranks):
            assert "the model is partly overwritten" in text


def test_a_model_of_another_shape_is_told_of_whole_shapes(
    saved: Callable[[torch.dtype], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(FP32)
    monkeypatch.setattr(uneven_cuts, "HIDDEN", 9)
    expected = (
        "'gate_up' is a parameter of float32 [18, 6] in the model and a parameter of float32 [14, 6] in the "
        "checkpoint; 'gate_up_bias' is a parameter of float32 [18]"
    )
    refusals(lambda: load_and_save(saved(FP32), saved(FP32), ZERO1_TP2, FP32), re.escape(expected))


def saves(change: Callable[[nn.Module, ModelSlice], None], folder: Path) -> None:
    module = Cut(dist.group.WORLD)
    found = model_slice_of(module.down)
    assert found is not None
    change(module, found)
    save_checkpoint(folder, module)


CHANGES: dict[str, tuple[Callable[[Any, ModelSlice], None], str]] = {
    "two ranks hold one column": (
        lambda module, found: set_model_slice(
            module.down, found._replace(boxes=(found.boxes[0]._replace(offsets=(0, 3 * found.group.rank())),))
        ),
        "'down' of shape [6, 7] is not held by all ranks together: elements are there twice, and as many are missing",
    ),
    "ranks disagree on the whole": (
        lambda module, found: set_model_slice(module.down, found._replace(shape=(6, 7 + found.group.rank()))),
        "ranks disagree on 'down': its shapes are (6, 7) on one, and (6, 8) on another",
    ),
    "a rank has a parameter that others lack": (
        lambda module, found: module.register_parameter(f"more_{found.group.rank()}", nn.Parameter(torch.ones(1))),
        "'more_0' of shape [1] is not held by all ranks together: a tensor is not stored",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_ranks_that_do_not_fit_each_other_are_refused(name: str, tmp_path: Path) -> None:
    change, expected = CHANGES[name]
    refusals(lambda: saves(change, tmp_path / "c"), re.escape(expected), 2)
    assert not (tmp_path / "c").exists()


def test_slices_of_two_groups_are_refused(tmp_path: Path) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module = Cut(mesh["tp"].get_group())
        found = model_slice_of(module.mix)
        assert found is not None
        set_model_slice(module.mix, found._replace(group=mesh["dp"].get_group()))
        save_checkpoint(tmp_path / "c", module)

    expected = [
        r"\[0, 2\], .* are \[0, 1\]",
        r"\[1, 3\], .* are \[0, 1\]",
        r"\[0, 2\], .* are \[2, 3\]",
        r"\[1, 3\], .* are \[2, 3\]",
    ]
    for text, ranks in zip(refusals(run, "cut all parameters over one group"), expected, strict=True):
        assert re.match(f"parameter 'mix' is a slice over ranks {ranks}", text)
    assert not (tmp_path / "c").exists()


def test_a_slice_of_which_nobody_says_the_ranks_is_refused(tmp_path: Path) -> None:
    """Also in a model whose other slices are known."""

    def forget() -> None:
        module = Cut(dist.group.WORLD)
        del module.down._maingrad_model_slice
        module.down.tensor_model_parallel = True  # type: ignore[attr-defined]
        save_checkpoint(tmp_path / "c", module)

    for text in refusals(forget, "save_checkpoint would write this rank's slices"):
        assert "'down'" in text
        assert "tensor_parallel_group" in text


def test_a_load_into_such_a_slice_says_what_is_missing(tmp_path: Path) -> None:
    def forget() -> None:
        module = Cut(dist.group.WORLD)
        save_checkpoint(tmp_path / "c", module)
        del module.down._maingrad_model_slice
        module.down.tensor_model_parallel = True  # type: ignore[attr-defined]
        load_checkpoint(tmp_path / "c", module)

    for text in refusals(forget, "does not fit this model"):
        assert "'down' is a slice (tensor_model_parallel = True), and nobody says which ranks" in text
        assert "tensor_parallel_group" in text


# ---- Experts, whose packed parameters tell which ones a rank has. ----

NUM_EXPERTS = 6


class Layers(nn.Module):
    """Of experts, each of which takes all rows."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.again = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


class Packed(nn.Module):
    """Six experts in one parameter of ``ep`` ranks, beside a dense layer."""

    def __init__(self, ep: int, seed: int, *, placed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.dense = nn.Linear(3, 3)
        whole = torch.randn(NUM_EXPERTS, 4, 3)
        local, found = uneven_cuts.part_of(whole, 0, 1, 0 if ep == 1 else dist.get_rank() % ep, ep)
        self.experts = Layers(local)
        if ep > 1:
            self.experts.weight.allreduce = False  # type: ignore[attr-defined]
            if placed:
                set_model_slice(self.experts.weight, found)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.dense(x)).square().mean()


def build_packed(ep: int, sharded: bool, seed: int, *, placed: bool = True) -> tuple[nn.Module, Any]:
    """Over six ranks, of which those of one remainder hold the same experts."""
    mesh = init_device_mesh("cpu", (6 // ep, ep), mesh_dim_names=("edp", "ep"))
    module = Packed(ep, seed, placed=placed)
    if sharded:
        fully_shard(module.experts, mesh["edp"])
        fully_shard(module, init_device_mesh("cpu", (6,)))
        return module, torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.1)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(module, config, expert_process_group=mesh["edp"] if ep > 1 else None)
    return ddp, DistributedOptimizer(ddp, lr=0.02, weight_decay=0.1)


def step_and_save_packed(folder: Path, ep: int, sharded: bool, placed: bool = True) -> None:
    model, optimizer = build_packed(ep, sharded, 0, placed=placed)
    model(torch.randn(5, 3, generator=torch.Generator().manual_seed(dist.get_rank()))).backward()
    optimizer.step()
    optimizer.zero_grad()
    save_checkpoint(folder, model, optimizer)


def load_and_save_packed(source: Path, target: Path, ep: int, sharded: bool, placed: bool = True) -> None:
    model, optimizer = build_packed(ep, sharded, 1, placed=placed)
    load_checkpoint(source, model, optimizer)
    save_checkpoint(target, model, optimizer)


@pytest.mark.in_turn
@pytest.mark.parametrize("sharded", [False, True])
def test_experts_move_between_ranks(sharded: bool, tmp_path: Path) -> None:
    simulate(step_and_save_packed, 6, tmp_path / "2", 2, sharded)
    assert Manifest.read(tmp_path / "2").tensors["experts.weight"].shape == (NUM_EXPERTS, 4, 3)
    folders = [tmp_path / name for name in ("2", "3", "6", "1", "2 again")]
    for (source, target), ep in zip(itertools.pairwise(folders), (3, 6, 1, 2), strict=True):
        simulate(load_and_save_packed, 6, source, target, ep, sharded)
        assert_same_files(folders[0], target)
    module = Packed(1, 5)
    load_checkpoint(folders[0], module)
    tensors, manifest = files_content(folders[0])
    assert torch.equal(module.experts.weight, tensors["model"]["experts.weight"])
    assert (manifest["num_expert_sets"], manifest["tied"]) == (1, {"experts.again": "experts.weight"})


@pytest.mark.in_turn
@pytest.mark.parametrize("sharded", [False, True])
def test_sets_of_experts_of_an_earlier_checkpoint_are_read(sharded: bool, tmp_path: Path) -> None:
    """By ranks of as many sets, which then save the parameter of all experts."""
    simulate(step_and_save_packed, 6, tmp_path / "sets", 2, sharded, False)
    simulate(load_and_save_packed, 6, tmp_path / "sets", tmp_path / "boxes", 2, sharded)
    (sets, manifest), (boxes, _) = (files_content(tmp_path / name) for name in ("sets", "boxes"))
    assert manifest["num_expert_sets"] == 2
    stored = [f"experts.weight@expert_set_{index}_of_2" for index in range(2)]
    assert manifest["tied"] == {name.replace("weight", "again"): name for name in stored}
    assert torch.equal(torch.cat([sets["model"][name] for name in stored]), boxes["model"]["experts.weight"])
    before, after = (each["optimizer"]["state"] for each in (sets, boxes))
    for key, value in after["experts.weight"].items():
        assert torch.equal(torch.cat([before[name][key] for name in stored]), value), key
    expected = "saved by ranks with 2 different set.s. of experts, and these ranks have 3: experts do not move"
    refusals(lambda: load_and_save_packed(tmp_path / "sets", tmp_path / "no", 3, sharded), expected, 6)
    expected = "saved by ranks with 1 different set.s. of experts, and these ranks have 2: experts do not move"
    run = functools.partial(load_and_save_packed, tmp_path / "boxes", tmp_path / "no", 2, sharded, False)
    refusals(run, expected, 6)


class ExpertsFirst(nn.Module):
    """Packed experts, whose slices say no ranks, and a layer that is cut over tensor-parallel ranks."""

    def __init__(self, group: dist.ProcessGroup | None, seed: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.experts, self.layer = nn.Linear(3, 4, bias=False), nn.Linear(3, 7, bias=False)
        for layer, known in ((self.experts, None), (self.layer, group)):
            whole = layer.weight.detach()
            local, found = (whole, None) if group is None else uneven_cuts.cut(whole, 0, 1, group)
            layer.weight = nn.Parameter(local.clone())
            if found is not None:
                set_model_slice(layer.weight, found._replace(group=known))
        self.experts.weight.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_experts_that_say_no_ranks_may_come_first(tmp_path: Path) -> None:
    def saves_shards() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = ExpertsFirst(mesh.get_group("tp"))
        fully_shard(model.experts, mesh["dp"])
        save_checkpoint(tmp_path / "c", fully_shard(model, mesh["dp"]))

    simulate(saves_shards, 4)
    model, expected = ExpertsFirst(None, seed=5), ExpertsFirst(None).state_dict()
    load_checkpoint(tmp_path / "c", model)
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name])
