"""Checkpoints of fully sharded models: bit for bit what any placement, any number of ranks and DDP load, and back."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Everything, Experts, assert_same_files, batch, build, files_content
from gloo import run_ranks
from loops import assert_same, weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from maingrad.ddp import WORLD_OF_ONE, load_checkpoint, save_checkpoint
from maingrad.ddp.checkpoint.files.manifest import Manifest
from maingrad.fsdp import MixedPrecisionPolicy, fully_shard
from maingrad.launch import simulate
from maingrad.launch.safetensors_io import export_safetensors

ZERO1 = {"use_distributed_optimizer": True, "bucket_size": 300}
ALL_REDUCE = {"bucket_size": 1000}
HYBRID = {**ZERO1, "num_distributed_optimizer_instances": 2}
BF16 = torch.bfloat16

Options = dict[str, Any]


def shard_everything(
    placement: str = "zero3", computing: torch.dtype | None = BF16, *, seed: int = 0, kept: torch.dtype = torch.float32
) -> nn.Module:
    """Make units of two layers and of the rest. With several instances, half of the ranks are in each.

    Values are those of a model in bf16 where that is computed in; the norm computes in fp32, as that model's does.
    """
    model = Everything(kept if computing is None else computing, seed=seed)
    if kept is torch.float32:
        model.float()
    mesh = None
    if placement.startswith("h"):
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    policy = MixedPrecisionPolicy(param_dtype=computing)
    fully_shard(model.norm, mesh=mesh, placements=placement)
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh, placements=placement, mixed_precision=policy)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int], rank: int) -> None:
    for step in steps:
        tokens = batch(step, rank)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten()).backward()
        model.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()


def train_and_save(folder: Path, placement: str, computing: torch.dtype | None, steps: range = range(3)) -> None:
    model = shard_everything(placement, computing)
    optimizer = adamw(model)
    take_steps(model, optimizer, steps, dist.get_rank())
    save_checkpoint(folder, model, optimizer, extra={"step": steps.stop})


def load_and_save(source: Path, target: Path, placement: str, computing: torch.dtype | None) -> None:
    model = shard_everything(placement, computing, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    assert load_checkpoint(source, model, optimizer) == {"step": 3}
    save_checkpoint(target, model, optimizer, extra={"step": 3})


def load_and_save_ddp(source: Path, target: Path, dtype: torch.dtype, config: Options) -> None:
    ddp, optimizer = build(dtype, seed=2, **config)
    assert load_checkpoint(source, ddp, optimizer) == {"step": 3}
    save_checkpoint(target, ddp, optimizer, extra={"step": 3})


def load_train_and_save(source: Path, target: Path, placement: str, computing: torch.dtype | None) -> None:
    model = shard_everything(placement, computing, seed=3)
    optimizer = adamw(model)
    load_checkpoint(source, model, optimizer)
    take_steps(model, optimizer, range(3, 5), dist.get_rank())
    save_checkpoint(target, model, optimizer, extra={"step": 5})


def assert_same_but_for_frozen(sharded: Path, wrapped: Path) -> None:
    """Bitwise. A fully sharded model keeps the fp32 values of frozen parameters, which DDP has in bf16 alone."""
    (tensors, manifest), (others, other_manifest) = files_content(sharded), files_content(wrapped)
    frozen = tensors["master"].pop("fixed")
    assert torch.equal(frozen.bfloat16(), tensors["model"]["fixed"])
    del manifest["tensors"]["fixed"]["dtypes"]["master"]
    assert manifest == other_manifest
    for kind in ("model", "master"):
        assert_same(tensors[kind], others[kind])
    assert tensors["optimizer"]["state"].keys() == others["optimizer"]["state"].keys()
    for name, moments in tensors["optimizer"]["state"].items():
        assert_same(moments, others["optimizer"]["state"][name])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype | None], Path]:
    """A checkpoint of four ranks after three steps, and beside it ``NAME-later``, after five steps."""
    root = tmp_path_factory.mktemp("saved")

    @functools.cache
    def save(placement: str, computing: torch.dtype | None) -> Path:
        folder = root / f"{placement}-{computing}"
        simulate(train_and_save, 4, folder, placement, computing)
        simulate(train_and_save, 4, Path(f"{folder}-later"), placement, computing, range(5))
        return folder

    return save


PLACEMENTS = ["zero1", "zero2", "zero3", "hybrid", "hsdp", "hsdp_zero1"]


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "placement", [p if p in ("zero3", "hsdp_zero1") else pytest.param(p, marks=pytest.mark.slow) for p in PLACEMENTS]
)
@pytest.mark.sampled(1)
def test_through_zero1_and_ddp_and_back_no_bit_changes(
    tmp_path: Path, saved: Callable[[str, torch.dtype | None], Path], placement: str
) -> None:
    """Four ranks -> three of ZeRO-1 -> six of DDP -> four, and on as if nothing had happened. fp32 masters, bf16."""
    start = saved(placement, BF16)
    zero1, ddp, back, later = (tmp_path / name for name in ("zero1", "ddp", "back", "later"))
    simulate(load_and_save_ddp, 3, start, zero1, BF16, ZERO1)
    simulate(load_and_save_ddp, 6, zero1, ddp, BF16, ALL_REDUCE)
    simulate(load_and_save, 4, ddp, back, placement, BF16)
    assert_same_but_for_frozen(start, zero1)
    assert_same_files(zero1, ddp)
    assert_same_files(start, back)
    simulate(load_train_and_save, 4, back, later, placement, BF16)
    assert_same_files(later, Path(f"{start}-later"))


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "placement, ranks",
    [
        ("hsdp", 6),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("zero3", 1),
                ("zero3", 3),
                ("zero3", 8),
                ("zero2", 3),
                ("hsdp", 4),
                ("hsdp_zero1", 6),
                ("hsdp_zero1", 2),
            ]
        ),
    ],
)
def test_what_zero1_saved_loads_into_any_placement(tmp_path: Path, placement: str, ranks: int) -> None:
    """Three ranks of ZeRO-1 -> these -> hybrid DDP -> these."""
    simulate(train_ddp_and_save, 3, tmp_path / "zero1", BF16)
    simulate(load_and_save, ranks, tmp_path / "zero1", tmp_path / "sharded", placement, BF16)
    simulate(load_and_save_ddp, 4, tmp_path / "sharded", tmp_path / "hybrid", BF16, HYBRID)
    assert_same_but_for_frozen(tmp_path / "sharded", tmp_path / "zero1")
    assert_same_files(tmp_path / "hybrid", tmp_path / "zero1")


def train_ddp_and_save(folder: Path, dtype: torch.dtype) -> None:
    from checkpointed import take_steps as take_ddp_steps

    ddp, optimizer = build(dtype, **ZERO1)
    take_ddp_steps(ddp, optimizer, range(3), dist.get_rank())
    save_checkpoint(folder, ddp, optimizer, extra={"step": 3})


@pytest.mark.slow
def test_fp32_models_share_one_file_with_either_kind_of_sharding(
    tmp_path: Path, saved: Callable[[str, torch.dtype | None], Path]
) -> None:
    """fp32 models have no separate masters. Ranks that compute in bf16 read such a file, and write both."""
    start = saved("zero3", None)
    simulate(load_and_save_ddp, 3, start, tmp_path / "zero1", torch.float32, ZERO1)
    assert_same_files(start, tmp_path / "zero1")
    simulate(load_and_save, 2, tmp_path / "zero1", tmp_path / "rounded", "zero3", BF16)
    simulate(load_and_save, 3, tmp_path / "rounded", tmp_path / "again", "zero3", BF16)
    assert_same_files(tmp_path / "rounded", tmp_path / "again")
    (exact, _), (rounded, _) = files_content(start), files_content(tmp_path / "rounded")
    for name, value in exact["model"].items():
        master = rounded["master"].get(name, rounded["model"][name])  # the norm's and buffers are not rounded
        assert torch.equal(master, value), name
        assert torch.equal(rounded["model"][name], value.to(rounded["model"][name].dtype)), name


def test_real_ranks_save_what_simulated_ones_save(
    tmp_path: Path, saved: Callable[[str, torch.dtype | None], Path]
) -> None:
    simulated = saved("zero3", BF16)
    run_ranks(load_and_save, 2, simulated, tmp_path / "real", "zero3", BF16)
    assert_same_files(simulated, tmp_path / "real")


@pytest.mark.in_turn
@pytest.mark.parametrize("placement", ["zero3", "hsdp", "hsdp_zero1"])
def test_every_element_is_written_once_and_work_is_shared(
    saved: Callable[[str, torch.dtype | None], Path], placement: str
) -> None:
    """Under hsdp the first instance writes. If optimizer state is sharded across instances as well, all ranks write."""
    folder = saved(placement, BF16)
    writers = set(Manifest.read(folder).nbytes)  # this checks that boxes tile each tensor
    assert writers == set(range(2 if placement == "hsdp" else 4))
    tensors, manifest = files_content(folder)
    assert manifest["tied"] == {"head.weight": "embed.weight"}
    assert manifest["tensors"]["fixed"]["group"] is None
    assert tensors["model"]["embed.weight"].dtype is BF16
    assert torch.equal(tensors["master"]["embed.weight"].bfloat16(), tensors["model"]["embed.weight"])
    reference = Everything(BF16)
    for name, moments in tensors["optimizer"]["state"].items():
        assert {key: value.shape for key, value in moments.items()} == dict.fromkeys(
            ("exp_avg", "exp_avg_sq"), reference.get_parameter(name).shape
        )
        assert manifest["tensors"][name]["scalars"]["step"]["tensor"] == 3.0


# ---- Optimizers and their groups. ----

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.02, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.02, fused=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.02),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.02),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.02),
}


def grouped(model: nn.Module, *, biases_first: bool) -> list[Options]:
    named = list(model.named_parameters())
    groups: list[Options] = [
        {"params": [param for name, param in named if name.endswith("bias")], "weight_decay": 0.0, "lr": 0.1},
        {"params": [param for name, param in named if not name.endswith("bias")]},
    ]
    return groups if biases_first else groups[::-1]


def resume_with(folder: Path, kind: str) -> None:
    rank = dist.get_rank()

    def start(seed: int, biases_first: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = shard_everything(seed=seed)
        return model, OPTIMIZERS[kind](grouped(model, biases_first=biases_first))

    straight, optimizer = start(0, True)
    take_steps(straight, optimizer, range(4), rank)
    expected = local_values(straight)

    model, optimizer = start(0, True)
    take_steps(model, optimizer, range(2), rank)
    save_checkpoint(folder, model, optimizer)
    model, optimizer = start(1, False)
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    load_checkpoint(folder, model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.1]
    take_steps(model, optimizer, range(2, 4), rank)
    assert_same(local_values(model), expected)


def local_values(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "kind", [k if k in ("fused", "nadam") else pytest.param(k, marks=pytest.mark.slow) for k in OPTIMIZERS]
)
@pytest.mark.sampled(1)
def test_every_optimizer_resumes_with_its_groups_known_by_name(tmp_path: Path, kind: str) -> None:
    """The groups are loaded in another order than they were saved in."""
    simulate(resume_with, 3, tmp_path / "c", kind)


def test_groups_of_the_distributed_optimizer_are_the_users(tmp_path: Path) -> None:
    """In ``DistributedOptimizer`` the remaining parameters form one more group, perhaps an empty one."""
    options = {"param_groups": [{"params": "*.bias", "lr": 0.25}, {"params": lambda name, _: name[-5:] != ".bias"}]}

    def save() -> None:
        ddp, optimizer = build(BF16, optimizer=options, **ZERO1)
        save_checkpoint(tmp_path / "c", ddp, optimizer)

    def load() -> list[float]:
        model = shard_everything(seed=1)
        optimizer = torch.optim.AdamW(grouped(model, biases_first=False), lr=0.5)
        load_checkpoint(tmp_path / "c", model, optimizer)
        return [group["lr"] for group in optimizer.param_groups]

    simulate(save, 2)
    assert simulate(load, 3) == [[0.02, 0.25]] * 3


def test_before_the_first_step_there_are_no_moments_to_keep(tmp_path: Path) -> None:
    def save_and_load() -> int:
        model = shard_everything()
        save_checkpoint(tmp_path / "c", model, adamw(model))
        model = shard_everything(seed=1)
        optimizer = adamw(model)
        take_steps(model, optimizer, range(1), dist.get_rank())
        load_checkpoint(tmp_path / "c", model, optimizer)
        return sum(len(state) for name, state in named_state(model, optimizer).items() if name != "nothing")

    assert simulate(save_and_load, 2) == [0, 0]
    assert set(files_content(tmp_path / "c")[0]) == {"model", "master"}


def test_moments_of_a_parameter_that_is_frozen_now_are_kept(tmp_path: Path) -> None:
    """Layers are frozen for a while, and the run resumes where all are trained."""

    def save_and_load() -> None:
        model = shard_everything()
        optimizer = adamw(model)
        take_steps(model, optimizer, range(1), dist.get_rank())
        expected = {name: dict(state) for name, state in named_state(model, optimizer).items()}
        model.up.weight.requires_grad_(False)
        save_checkpoint(tmp_path / "c", model, optimizer)
        model = shard_everything(seed=1)
        optimizer = adamw(model)
        load_checkpoint(tmp_path / "c", model, optimizer)
        found = named_state(model, optimizer)
        assert found["up.weight"]["exp_avg"].any() or not found["up.weight"]["exp_avg"].numel()
        for name, state in expected.items():
            for key, value in state.items():
                assert torch.equal(found[name][key], value), (name, key)

    simulate(save_and_load, 2)


def moments_in_place(folder: Path) -> None:
    model = shard_everything()
    optimizer = adamw(model)
    take_steps(model, optimizer, range(1), dist.get_rank())
    save_checkpoint(folder, model, optimizer)
    before = {name: state["exp_avg"].data_ptr() for name, state in named_state(model, optimizer).items()}
    load_checkpoint(folder, model, optimizer)
    after = {name: state["exp_avg"].data_ptr() for name, state in named_state(model, optimizer).items()}
    assert before == after
    assert all(state["step"] == 1 for state in named_state(model, optimizer).values())


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Options]:
    return {name: optimizer.state[param] for name, param in model.named_parameters() if param in optimizer.state}


def test_moments_stay_where_they_are(tmp_path: Path) -> None:
    simulate(moments_in_place, 2, tmp_path / "c")


# ---- Weights alone. ----


def test_weights_go_into_plain_modules_and_come_back(
    tmp_path: Path, saved: Callable[[str, torch.dtype | None], Path]
) -> None:
    folder = saved("zero3", BF16)
    tensors, _ = files_content(folder)
    plain = Everything(BF16, seed=4)
    load_checkpoint(folder, plain)
    assert_same(weights(plain), {name: tensors["model"][name] for name, _ in plain.named_parameters()})
    save_checkpoint(tmp_path / "plain", plain)

    def load_into_units() -> None:
        model = shard_everything(seed=5)
        load_checkpoint(tmp_path / "plain", model)
        save_checkpoint(tmp_path / "sharded", model)

    simulate(load_into_units, 3)
    sharded, _ = files_content(tmp_path / "sharded")
    assert_same(sharded["model"], {**tensors["model"], "seen": plain.seen})
    assert torch.equal(sharded["master"]["cube"], tensors["model"]["cube"].float())


@pytest.mark.in_turn
def test_loaded_weights_are_used_at_once(tmp_path: Path) -> None:
    """Also if whole parameters stay gathered."""

    def outputs(placement: str) -> list[Tensor]:
        tokens = batch(0, 0)
        first = shard_everything(placement)
        save_checkpoint(tmp_path / "c", first)
        second = shard_everything(placement, seed=1)
        second.set_reshard_after_forward(False)
        before = second(tokens)
        load_checkpoint(tmp_path / "c", second)
        return [first(tokens).detach(), second(tokens).detach(), before.detach()]

    for placement, ranks in [("zero3", 2), ("zero2", 2), ("hsdp_zero1", 4)]:
        for expected, actual, before in simulate(outputs, ranks, placement):
            assert torch.equal(actual, expected)
            assert not torch.equal(before, expected)


def test_safetensors_are_made_from_the_checkpoint(
    tmp_path: Path, saved: Callable[[str, torch.dtype | None], Path]
) -> None:
    export_safetensors(saved("zero3", BF16), tmp_path / "w.safetensors", dtype=torch.float32)
    assert (tmp_path / "w.safetensors").exists()


# ---- Ranks and models of other kinds. ----


def with_experts(folder: Path, load: bool) -> dict[str, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(range(parity, size, 2)) for parity in range(2)]
    model = Experts(5 if load else 0, rank % 2)
    fully_shard(model.expert, mesh=groups[rank % 2])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if load:
        load_checkpoint(folder, model, optimizer)
        assert all(optimizer.state[param]["step"] == 1 for param in model.parameters())
    else:
        model(torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        model.finish_grad_sync()
        optimizer.step()
        save_checkpoint(folder, model, optimizer)
    with model.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_each_set_of_experts_comes_back_to_its_own_ranks(tmp_path: Path) -> None:
    trained = simulate(with_experts, 4, tmp_path / "c", False)
    assert not torch.equal(trained[0]["expert.weight"], trained[1]["expert.weight"])
    for rank, loaded in enumerate(simulate(with_experts, 6, tmp_path / "c", True)):
        assert_same(loaded, trained[rank % 2])


def with_experts_on_some_ranks(folder: Path, load: bool) -> dict[str, Tensor]:
    """The last rank has no expert; each other has one of its own."""
    rank = dist.get_rank()
    torch.manual_seed(100 * load + rank)
    own = [nn.Linear(5, 5)] if rank < 2 else []
    torch.manual_seed(100 * load + 9)
    model = nn.Sequential(nn.Linear(5, 5), *own)
    for expert in own:
        fully_shard(expert, mesh=WORLD_OF_ONE)
    fully_shard(model)
    (load_checkpoint if load else save_checkpoint)(folder, model)
    with model.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_ranks_without_experts_save_and_load_beside_those_that_have_some(tmp_path: Path) -> None:
    saved = simulate(with_experts_on_some_ranks, 3, tmp_path / "c", False)
    assert not torch.equal(saved[0]["1.weight"], saved[1]["1.weight"])
    for loaded, expected in zip(simulate(with_experts_on_some_ranks, 3, tmp_path / "c", True), saved, strict=True):
        assert_same(loaded, expected)


def with_stages(folder: Path, seed: int) -> dict[str, Tensor]:
    """Two pipeline stages, each a model of its own on half of the ranks, with process groups smaller than the world."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "outer", "inner"))
    stage = mesh.get_local_rank("stage")
    torch.manual_seed(10 * stage + seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    fully_shard(model[0], mesh=mesh["outer", "inner"], placements="hsdp_zero1")
    fully_shard(model, mesh=mesh["outer", "inner"], placements="hsdp_zero1")
    optimizer = adamw(model)
    (save_checkpoint if seed == 0 else load_checkpoint)(folder / f"stage-{stage}", model, optimizer)
    with model.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.in_turn
def test_ranks_that_are_not_all_save_among_themselves(tmp_path: Path) -> None:
    trained = simulate(with_stages, 8, tmp_path, 0)
    assert not torch.equal(trained[0]["0.weight"], trained[7]["0.weight"])
    for loaded, expected in zip(simulate(with_stages, 8, tmp_path, 1), trained, strict=True):
        assert_same(loaded, expected)


def with_units_of_two_meshes(folder: Path, seed: int, other: dict[str, Any]) -> dict[str, Tensor]:
    """One unit over all ranks, one inside instances; ``other``: the placements of the first one, perhaps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    fully_shard(model[0], mesh=mesh, placements="hsdp")
    fully_shard(model, **({"mesh": mesh} if other else {}), **other)
    (save_checkpoint if seed == 0 else load_checkpoint)(folder, model, adamw(model))
    with model.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("placements", [{}, {"placements": "hsdp_zero1"}], ids=["another mesh", "hsdp_zero1"])
def test_units_may_have_meshes_of_their_own(tmp_path: Path, placements: dict[str, Any]) -> None:
    """Or the same, over whose instances one unit is sharded, and the other is not."""
    expected = simulate(with_units_of_two_meshes, 4, tmp_path / "c", 0, placements)
    found = simulate(with_units_of_two_meshes, 4, tmp_path / "c", 1, placements)
    for actual, other in zip(found, expected, strict=True):
        assert_same(actual, other)
    assert json.loads((tmp_path / "c" / "maingrad.json").read_text())["num_expert_sets"] == 1


def with_experts_of_one_instance_each(folder: Path, seed: int) -> dict[str, Tensor]:
    """The ranks of an instance are replicas of its experts, and other instances have other experts."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    ranks = [torch.tensor([[first], [first + 1]]) for first in (0, 2)]
    copies = [DeviceMesh("cpu", each, mesh_dim_names=("outer", "inner")) for each in ranks][rank // 2]
    torch.manual_seed(10 * seed + rank // 2)
    expert = nn.Linear(7, 7)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), expert)
    fully_shard(model[1], mesh=copies, placements="hsdp")
    fully_shard(model, mesh=mesh, placements="hsdp")
    (save_checkpoint if seed == 0 else load_checkpoint)(folder, model, adamw(model))
    with model.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_experts_that_one_instance_alone_has_are_saved(tmp_path: Path) -> None:
    """Each set of experts has as many replicas as there are instances."""
    expected = simulate(with_experts_of_one_instance_each, 4, tmp_path / "c", 0)
    assert not torch.equal(expected[0]["1.weight"], expected[2]["1.weight"])
    for actual, other in zip(simulate(with_experts_of_one_instance_each, 4, tmp_path / "c", 1), expected, strict=True):
        assert_same(actual, other)


def with_units_of_three_sets_of_ranks(folder: Path) -> None:
    """One unit over all ranks, one over two, and one that each rank has alone."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 5))
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    fully_shard(model[0], mesh=WORLD_OF_ONE)
    fully_shard(model[1], mesh=pairs[dist.get_rank() // 2])
    fully_shard(model)
    with pytest.raises(ValueError, match="a checkpoint knows two such sets"):
        save_checkpoint(folder, model)


def test_three_sets_of_ranks_are_refused(tmp_path: Path) -> None:
    simulate(with_units_of_three_sets_of_ranks, 4, tmp_path / "c")


def ignoring(folder: Path, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    fully_shard(model, ignored_params=[model[1].weight])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if seed:
        load_checkpoint(folder, model, optimizer)
    else:
        model(torch.ones(3, 5)).square().sum().backward()
        model.finish_grad_sync()
        optimizer.step()
        save_checkpoint(folder, model, optimizer)
    return local_values(model), optimizer.state[model[1].weight]["exp_avg"].clone()


def test_ignored_parameters_are_whole_and_saved_as_such(tmp_path: Path) -> None:
    for (saved_values, saved_moment), (values, moment) in zip(
        simulate(ignoring, 2, tmp_path / "c", 0), simulate(ignoring, 2, tmp_path / "c", 1), strict=True
    ):
        assert values["1.weight"].shape == (5, 7)
        assert_same(values, saved_values)
        assert torch.equal(moment, saved_moment)


def test_without_any_ranks_it_is_a_model_like_any(tmp_path: Path) -> None:
    """A world of one, no process group."""
    model = shard_everything()
    optimizer = adamw(model)
    take_steps(model, optimizer, range(3), 0)
    save_checkpoint(tmp_path / "c", model, optimizer, extra={"step": 3})
    load_and_save(tmp_path / "c", tmp_path / "again", "zero3", BF16)
    assert_same_files(tmp_path / "c", tmp_path / "again")


def test_a_unit_may_have_nothing_to_shard(tmp_path: Path) -> None:
    """All of its parameters are ignored."""
    torch.manual_seed(0)
    model, other = nn.Linear(3, 4), nn.Linear(3, 4)
    for each in (model, other):
        fully_shard(each, ignored_params=each.parameters())
    save_checkpoint(tmp_path / "c", model)
    load_checkpoint(tmp_path / "c", other)
    assert_same(other.state_dict(), model.state_dict())


# ---- What is refused. ----


def refusals(folder: Path) -> None:
    model = shard_everything()
    built_before = [nn.Parameter(torch.zeros(3, 4))]
    with pytest.raises(ValueError, match=r"a parameter of shape \[3, 4\] in its group 0 is not in this one; build it"):
        save_checkpoint(folder, model, torch.optim.SGD(built_before))
    with pytest.raises(TypeError, match=r"a torch.optim.Optimizer over the sharded parameters, got dict"):
        save_checkpoint(folder, model, {})
    for module in (model, model.up):
        with module.unsharded(), pytest.raises(ValueError, match=r"is whole now: save and load outside forwards and"):
            save_checkpoint(folder, model)
    around = nn.ModuleDict({"inside": model})
    with pytest.raises(ValueError, match=r"module 'inside' is sharded, and the model around it is not"):
        save_checkpoint(folder, around)
    assert not folder.exists()


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    simulate(refusals, 2, tmp_path / "c")


def misfits(folder: Path) -> None:
    frozen = shard_everything()
    frozen.cube.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'cube' is frozen, or without an optimizer, and was in parameter group 0"):
        load_checkpoint(folder, frozen, adamw(frozen))
    whole = shard_everything()
    with pytest.raises(ValueError, match=r"has the state of AdamW, and this optimizer is SGD"):
        load_checkpoint(folder, whole, torch.optim.SGD(whole.parameters()))
    half = shard_everything(kept=BF16)
    with pytest.raises(ValueError, match=r"updates parameter '\S+' in bfloat16, and the saved one did in float32"):
        load_checkpoint(folder, half, adamw(half))
    load_checkpoint(folder, half)


def test_what_does_not_fit_is_named(saved: Callable[[str, torch.dtype | None], Path]) -> None:
    simulate(misfits, 2, saved("zero3", BF16))


class OfTwoDtypes(nn.Module):
    """Parameters of two dtypes, of which one kind has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.bfloat16))

    def forward(self) -> Tensor:
        return self.weight.square().sum() + self.nothing.float().sum()


def test_a_parameter_without_elements_of_another_dtype_steps_after_a_load(tmp_path: Path) -> None:
    def run() -> Tensor:
        model = fully_shard(OfTwoDtypes())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                save_checkpoint(tmp_path / "c", model, optimizer)
                load_checkpoint(tmp_path / "c", model, optimizer)
        with model.unsharded():
            return model.weight.detach().clone()

    plain = OfTwoDtypes()
    optimizer = torch.optim.AdamW(plain.parameters())
    for _ in range(2):
        plain().backward()
        optimizer.step()
        optimizer.zero_grad()
    for loaded in simulate(run, 2):
        assert torch.equal(loaded, plain.weight)


class RoundedCopies(TorchDispatchMode):
    """Counts tensors of another dtype that exist at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[StorageWeakRef] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.found = [each for each in self.found if not each.expired()]
            self.found.append(StorageWeakRef(made.untyped_storage()))
            self.most = max(self.most, len(self.found))
        return made


def test_a_save_rounds_one_tensor_at_a_time(tmp_path: Path) -> None:
    def most() -> int:
        layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        model = fully_shard(layers, mixed_precision=MixedPrecisionPolicy(param_dtype=BF16))
        with RoundedCopies() as copies:
            save_checkpoint(tmp_path / "c", model)
        return copies.most

    assert simulate(most, 2) == [1, 1]


def load_what_one_rank_cannot_open(folder: Path) -> str:
    """The state of Adagrad is there before the first step, and a load compares it between ranks."""
    model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    optimizer = torch.optim.Adagrad(model.parameters())
    with pytest.raises(ValueError, match="a file system of its own") as error:
        load_checkpoint(folder, model, optimizer)
    return str(error.value)


def test_all_ranks_hear_of_one_that_cannot_open_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "c", nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    original = Manifest.read

    def read(folder: Path) -> Manifest:
        if dist.get_rank() == 0:
            raise ValueError("a file system of its own")
        return original(folder)

    monkeypatch.setattr(Manifest, "read", read)
    said = simulate(load_what_one_rank_cannot_open, 3, tmp_path / "c")
    assert said == ["a file system of its own (on rank 0)"] * 3
