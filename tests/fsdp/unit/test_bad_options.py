"""Meshes, options and placements that cannot be, and ranks that differ, are refused before anything is sharded."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_twin import Block, Net, batches_of, mean_loss, shard_blocks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.fsdp import (
    PLACEMENTS,
    AxisPlacement,
    MixedPrecisionPolicy,
    Placement,
    Placements,
    fully_shard,
)
from maingrad.kernels.compat import private_name
from maingrad.launch import simulate
from maingrad.te_integration import Linear

WHOLE, SHARDED = Placement.WHOLE, Placement.SHARDED


def step_of(model: nn.Module) -> None:
    mean_loss(model(batches_of(0, 1, dtype=torch.float32)[0])).backward()


# ---- Ranks. ----


def test_ranks_that_are_not_in_the_mesh() -> None:
    def on_each_rank() -> None:
        group = dist.new_group([0])
        if dist.get_rank() == 0:
            fully_shard(Block(), mesh=group)
        else:
            with pytest.raises(
                ValueError, match="rank 1 is not in mesh: give each rank a group or mesh that it belong"
            ):
                fully_shard(Block(), mesh=group)

    simulate(on_each_rank, 2)


def a_mesh_of_three_dims() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    match = r"mesh: a data-parallel mesh is \(inner\) or \(outer, inner\); this one has 3 dims \('pp', 'dp', 'tp'\)"
    with pytest.raises(ValueError, match=match):
        fully_shard(Block(), mesh=mesh)
    fully_shard(Block(), mesh=mesh["dp"])


def test_marks_of_parts_of_gradients_mean_nothing_on_frozen_parameters() -> None:
    """A trained one is refused: nobody would sum its parts over the other ranks."""

    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
        for freeze in (True, False):
            block = frozen(Block(), freeze=freeze)
            block.norm.weight.sequence_parallel = True
            if freeze:
                fully_shard(block, mesh=mesh)
                continue
            with pytest.raises(ValueError, match=r"parameter 'norm.weight' has sequence_parallel = True"):
                fully_shard(block, mesh=mesh)

    simulate(on_each_rank, 4)


def test_a_mesh_of_three_dims() -> None:
    simulate(a_mesh_of_three_dims, 8)


def test_what_is_no_mesh() -> None:
    with pytest.raises(TypeError, match=r"mesh is a ProcessGroup, a DeviceMesh, .* or None; got tuple"):
        fully_shard(Block(), mesh=(2, 2))


def a_mesh_of_another_device() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(
        ValueError, match="the mesh's group talks over cpu, and the unit is on cuda: give a group of that"
    ):
        fully_shard(Block(), mesh=mesh, device="cuda")
    with pytest.raises(ValueError, match="device is where the unit computes, and nothing does on meta"):
        fully_shard(Block(), device="meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="simulated ranks talk over GPUs too, where there are any")
def test_a_mesh_of_another_device() -> None:
    simulate(a_mesh_of_another_device, 2)


def test_a_mesh_whose_groups_are_of_different_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        served = {mesh.get_group(0): ["cuda"], mesh.get_group(1): ["cpu"]}
        monkeypatch.setattr("maingrad.fsdp.unit_checks.device_types_of", served.__getitem__)
        with pytest.raises(ValueError, match="the mesh's group talks over cuda, and the unit is on cpu"):
            fully_shard(Block(), mesh=mesh, placements="hsdp")

    simulate(on_rank, 4)


def test_placements_that_need_instances() -> None:
    def on_each_rank() -> None:
        for mesh in (None, init_device_mesh("cpu", (2,))):
            with pytest.raises(
                ValueError, match=r"shard across instances need a DeviceMesh of two dims, \(outer, inner"
            ):
                fully_shard(Block(), placements="hsdp_zero1", mesh=mesh)

    simulate(on_each_rank, 2)


def differs(name: str, make: Callable[[int], nn.Module], found: str, **options: Any) -> Any:
    return pytest.param(make, found, options, id=name)


def frozen(module: nn.Module, *, freeze: bool) -> nn.Module:
    module.norm.weight.requires_grad_(not freeze)
    return module


class OtherOrder(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(2)))

    def forward(self) -> None:
        return None


@pytest.mark.parametrize(
    ("make", "found", "options"),
    [
        differs("shape", lambda rank: nn.Linear(3, 4 + rank, bias=False), r"Linear's 'weight' torch.float32 \[4, 3\]"),
        differs("dtype", lambda rank: nn.Linear(3, 4, dtype=(torch.float64, torch.float32)[rank]), "torch.float64"),
        differs(
            "dtype at rest",
            lambda rank: nn.Linear(3, 4, dtype=(torch.float64, torch.float32)[rank]),
            "torch.float64",
            mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        ),
        differs("frozen", lambda rank: frozen(Block(), freeze=rank == 1), "Block's 'norm.weight' torch.float32"),
        differs("order", lambda rank: OtherOrder("ab" if rank else "ba"), "OtherOrder's 'a'"),
        differs("number", lambda rank: nn.Linear(3, 4, bias=rank == 0), "Linear's 'bias'"),
        differs("buffer", lambda rank: nn.BatchNorm1d(3, track_running_stats=rank == 0), "buffer 'running_mean'"),
        differs(
            "buffer's dtype",
            lambda rank: nn.BatchNorm1d(3, dtype=(torch.float64, torch.float32)[rank], affine=False),
            "buffer 'running_mean' torch.float64",
        ),
        differs(
            "buffer's shape", lambda rank: nn.BatchNorm1d(3 + rank, affine=False), r"buffer 'running_mean' .*\[3\]"
        ),
        differs(
            "buffer inside",
            lambda rank: nn.Sequential(nn.BatchNorm1d(3, affine=False, track_running_stats=rank == 0)),
            "buffer 'running_mean'",
        ),
        differs(
            "delayed", lambda rank: Linear(4, 4, delay_wgrad_compute=rank == 1), r"'weight' torch.float32 \[4, 4\]"
        ),
        differs("class", lambda rank: (nn.Linear, nn.Bilinear)[rank](*[3] * (2 + rank)), "Linear's 'bias'"),
    ],
)
def test_models_that_differ_between_ranks(make: Callable[[int], nn.Module], found: str, options: Any) -> None:
    def on_each_rank() -> None:
        with pytest.raises(ValueError, match=rf"the model differs between ranks .*rank 0 has .*{found}.* where rank 1"):
            fully_shard(make(dist.get_rank()), **options)

    simulate(on_each_rank, 2)


OPTIONS_OF_TWO_RANKS: dict[str, tuple[Any, Any]] = {
    "placements": ("zero2", "zero3"),
    "mixed_precision": (None, MixedPrecisionPolicy(cast_forward_inputs=False)),
    "reshard_after_forward": (True, False),
    "reduce_every_microbatch": (True, False),
    "bucket_size": (None, 1000),
    "shard_atoms": ("element", {"*": "element"}),
    "copy_engine_gather": ("auto", False),
    "init_sync": (True, False),
    "forward_writes": ("refused", "alike"),
    "distributed_weights": (True, False),
}


def test_options_that_differ_between_ranks() -> None:
    def on_each_rank() -> None:
        for name, values in OPTIONS_OF_TWO_RANKS.items():
            kept = {"placements": "placements", "mixed_precision": "policy"}.get(name, name)
            with pytest.raises(ValueError, match=rf"the call of fully_shard differs between ranks .*{kept}="):
                fully_shard(Block(), **{name: values[dist.get_rank()]})

    simulate(on_each_rank, 2)


# ---- Placements and options. ----

A_WHOLE = AxisPlacement(WHOLE, WHOLE, WHOLE)
A_SHARDED = AxisPlacement(SHARDED, SHARDED, SHARDED)


@pytest.mark.parametrize(
    ("placements", "match"),
    [
        ("zero4", "placements 'zero4' is none of ddp, zero1, hybrid, zero2, zero3, hsdp, hsdp_zero1"),
        ("ddp", "placements that shard nothing are plain data parallelism: use maingrad.ddp.DistributedDataParallel"),
        (
            Placements(AxisPlacement(SHARDED, WHOLE, SHARDED), A_WHOLE),
            "inner axis: parameter sharded, gradient whole, optimizer sharded: what shards the parameter must shard",
        ),
        (
            Placements(AxisPlacement(SHARDED, SHARDED, WHOLE), A_WHOLE),
            "inner axis: parameter sharded, gradient sharded, optimizer whole: .* and what shards the gradient",
        ),
        (
            Placements(AxisPlacement(WHOLE, SHARDED, WHOLE), A_WHOLE),
            "inner axis: parameter whole, gradient sharded, optimizer whole",
        ),
        (
            Placements(A_SHARDED, AxisPlacement(WHOLE, SHARDED, WHOLE)),
            "outer axis: parameter whole, gradient sharded, optimizer whole",
        ),
        (Placements(A_SHARDED, A_SHARDED), "sharded on both axes are sharded over all ranks: give a mesh of one dim"),
        (
            Placements(A_WHOLE, AxisPlacement(WHOLE, WHOLE, SHARDED)),
            "optimizer: whole on the inner axis and sharded on the outer one; swap the axes of the mesh",
        ),
    ],
)
def test_placements_that_cannot_be(placements: str | Placements, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fully_shard(Block(), placements=placements)


def test_placements_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"placements is a name or a Placements\(inner, outer\), got int"):
        fully_shard(Block(), placements=3)
    fully_shard(Block(), placements=PLACEMENTS["zero3"])


@pytest.mark.parametrize("placements", ["zero1", "zero2"])
def test_options_that_whole_parameters_and_gradients_do_not_need(placements: str) -> None:
    """What is whole at rest stays so: gradients of two microbatches are those without the options."""

    def grads(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = fully_shard(Net(), placements=placements, **options)
        if options:
            model.set_reshard_after_forward(True)
        with model.no_sync():
            step_of(model)
        step_of(model)
        return [param.grad.to_local() for param in model.parameters()]

    for found, expected in zip(grads(reshard_after_forward=True, reduce_every_microbatch=True), grads(), strict=True):
        assert torch.equal(found, expected) and expected.any()


def test_options_without_effect() -> None:
    with pytest.raises(ValueError, match="offload_to_cpu has no effect on cpu: shards are in host memory anyway"):
        fully_shard(Block(), offload_to_cpu=True)
    with pytest.raises(ValueError, match="copy_engine_gather needs parameters on CUDA"):
        fully_shard(Block(), copy_engine_gather=True)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("mp_policy", "write mixed_precision=maingrad.fsdp.MixedPrecisionPolicy("),
        ("offload_policy", "write offload_to_cpu=True"),
        ("shard_placement_fn", "write shard_atoms='row'"),
        ("process_group", "write mesh=..."),
        ("device_mesh", "write mesh=..."),
        ("device_id", "write device=..."),
        ("auto_wrap_policy", "call fully_shard on each block, then on the model"),
        ("sharding_strategy", "write placements='zero3'"),
        ("zero_dp_strategy", "write placements='zero1', 'zero2' or 'zero3'"),
        ("fsdp_unit_modules", "call fully_shard on each block, then on the model"),
        ("placement", "it has placements"),
    ],
)
def test_options_of_other_libraries(theirs: str, ours: str) -> None:
    module = Block()
    with pytest.raises(TypeError, match=re.escape(f"fully_shard has no argument {theirs!r}: {ours}")):
        fully_shard(module, **{theirs: None})
    assert type(module) is Block


def test_prefetch_lists_of_plain_modules() -> None:
    model = Net()
    shard_blocks(model)
    with pytest.raises(TypeError, match="set_modules_to_forward_prefetch takes fully sharded modules, and Linear is n"):
        model.set_modules_to_forward_prefetch([model.blocks[0], model.stem, model.blocks[1]])
    with pytest.raises(TypeError, match="set_modules_to_backward_prefetch takes fully sharded modules, and Linear is "):
        model.set_modules_to_backward_prefetch([model.head])


@pytest.mark.parametrize("name", ["ddp.torch_internals.current_backward", "fsdp.unit_checks.delivers_to_all"])
def test_a_torch_without_a_name_that_units_need(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of training wrongly: what all wrappers need, and what units need besides."""
    monkeypatch.setattr("maingrad.kernels.compat.requested_names", {})
    with pytest.warns(RuntimeWarning, match=r"has no torch\.gone"):
        monkeypatch.setattr(f"maingrad.{name}", private_name("torch.gone", loss="it trains wrongly"))
    with pytest.raises(RuntimeError, match=r"has no torch\.gone: it trains wrongly"):
        fully_shard(nn.Linear(1, 1))
