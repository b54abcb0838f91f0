"""Bytes of one bucket on one rank, worked out by hand: the rows of ``rank_bytes.py``'s table. No ranks."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import tiny_config

from maingrad.ddp import DistributedDataParallelConfig
from maingrad.ddp.collectives.reduction import PLACEMENTS, placements_of
from maingrad.ddp.plan.layout import ParamSpec, plan_gradients
from maingrad.launch.plan.plan import plan_run
from maingrad.launch.plan.rank_bytes import PlacedBucket, RankBytes, rank_bytes

ZERO1 = placements_of(DistributedDataParallelConfig(use_distributed_optimizer=True))
DDP = placements_of(DistributedDataParallelConfig(use_distributed_optimizer=False))
BF16, FP32 = torch.bfloat16, torch.float32


def bucket(
    numel: int = 1024, *, degree: int = 4, params: torch.dtype = BF16, grads: torch.dtype = FP32, **fields: Any
) -> PlacedBucket:
    spec = ParamSpec(name="w", shape=(numel,), param_dtype=params, grad_dtype=grads)
    (layout,) = plan_gradients([spec], shard_degree=degree).buckets
    given: dict[str, Any] = {"placements": ZERO1, "inner_size": 4, "states": {"w": 2}, **fields}
    return PlacedBucket(layout=layout, **given)


def of(**fields: Any) -> tuple[int, ...]:
    """Parameters, gradients, masters and moments of a rank, of 1,024 elements in 4 shards unless ``fields`` say so."""
    return tuple(rank_bytes([bucket(**fields)]))


FSDP = {"own_shards": True, "placements": PLACEMENTS["zero3"]}
SHARD = 1024 // 4


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (2048, 4096, 4 * SHARD, 8 * SHARD)),
        ({"params": FP32}, (4096, 4096, 0, 8 * SHARD)),
        ({"placements": DDP, "degree": 1}, (2048, 4096, 4096, 8192)),
        ({"grads": BF16}, (2048, 2048, 4 * SHARD, 8 * SHARD)),
        ({"releases_grads": True}, (2048, 4 * SHARD, 4 * SHARD, 8 * SHARD)),
        ({"compact": BF16}, (2048, 4096, 2 * SHARD, 4 * SHARD)),
        ({"compact": BF16, "params": FP32}, (4096, 4096, 0, 4 * SHARD)),
        ({"compact": BF16, "params": torch.float16}, (2048, 4096, 4 * SHARD, 4 * SHARD)),
        ({"compact": torch.uint8}, (2048, 4096, 2 * SHARD, 2 * SHARD + 2 * 4)),
        ({"states": {"w": 1}}, (2048, 4096, 4 * SHARD, 4 * SHARD)),
        ({"trainable": False}, (2048, 0, 4 * SHARD, 8 * SHARD)),
        (FSDP, (0, 4 * SHARD, 4 * SHARD, 8 * SHARD)),
        ({**FSDP, "params": FP32}, (0, 4 * SHARD, 4 * SHARD, 8 * SHARD)),
        ({**FSDP, "grads": BF16}, (0, 2 * SHARD + 4 * SHARD, 4 * SHARD, 8 * SHARD)),
        ({**FSDP, "grads": BF16, "compact": BF16}, (0, 2 * SHARD, 2 * SHARD + 2 * SHARD, 4 * SHARD)),
        ({**FSDP, "compact": torch.uint8}, (0, 4 * SHARD, 2 * SHARD + 2 * SHARD, 2 * SHARD + 2 * 4)),
        ({**FSDP, "outer_size": 2}, (0, 4 * SHARD + 4 * SHARD, 4 * SHARD, 8 * SHARD)),
        ({**FSDP, "trainable": False}, (0, 0, 4 * SHARD, 0)),
        ({**FSDP, "placements": PLACEMENTS["zero2"]}, (2048, 4 * SHARD, 4 * SHARD, 8 * SHARD)),
        ({**FSDP, "placements": PLACEMENTS["zero1"]}, (2048, 4096 + 4 * SHARD, 4 * SHARD, 8 * SHARD)),
        (
            {**FSDP, "placements": PLACEMENTS["hsdp_zero1"], "outer_size": 2, "degree": 8},
            (2048 // 4, 4 * 128 + 4096 // 4, 4 * 128, 8 * 128),
        ),
        ({**FSDP, "placements": PLACEMENTS["hsdp_zero1"]}, (0, 4 * SHARD, 4 * SHARD, 8 * SHARD)),
    ],
)
def test_bytes_of_a_rank(fields: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert of(**fields) == expected


def test_padding_has_state_in_parts_of_whole_tensors_alone() -> None:
    """1,000 elements on 4 ranks; the padding is at the end, on the last rank."""
    whole, own = bucket(1000), bucket(1000, **FSDP)
    size = whole.layout.numel // 4
    assert whole.layout.padding > 0 and whole.held_numels == [size] * 4 and whole.moment_numels == [2 * size] * 4
    last = 1000 - 3 * size
    assert own.held_numels == [size, size, size, last] and own.moment_numels == [2 * size] * 3 + [2 * last]
    assert own.moment_blocks == [2 * -(-size // 256)] * 3 + [2 * -(-last // 256)]
    assert bucket(1000, trainable=False, **FSDP).held_numels == [0] * 4


def test_the_fullest_rank_counts() -> None:
    """Of moments and remainders together; slices have fewer shards, each of which lies on one rank of every slice."""
    two, four = bucket(512, degree=2, inner_size=2), bucket(1024, degree=4)
    assert rank_bytes([two, four]) == RankBytes(1024 + 2048, 2048 + 4096, 4 * 256 + 4 * 256, 8 * 256 + 8 * 256)
    uneven = bucket(1000, compact=torch.bfloat16, **FSDP)
    size = uneven.layout.numel // 4
    assert rank_bytes([uneven])[2:] == (2 * size + 2 * size, 4 * size)
    assert rank_bytes([]) == (0, 0, 0, 0) and rank_bytes([two]).total == 1024 + 2048 + 1024 + 2048
    # The first ranks have 2-state elements of w, the last ones of v with none: w's ranks are the fullest.
    specs = [ParamSpec(name=name, shape=(512,), param_dtype=BF16, grad_dtype=FP32) for name in ("w", "v")]
    (layout,) = plan_gradients(specs, shard_degree=2).buckets
    for states in ({"w": 2, "v": 0}, {"w": 0, "v": 2}):
        mixed = PlacedBucket(layout=layout, placements=ZERO1, inner_size=2, states=states)
        assert sorted(mixed.moment_numels) == [0, 1024] and mixed.held_numels == [512, 512]
        assert rank_bytes([mixed]).moments == 4 * 1024, "whichever rank it is"
    # One rank has 512 elements of w, and the other one 300 of v, whose state is larger: w's remainders count more.
    specs[1] = dataclasses.replace(specs[1], shape=(300,), atom=300)
    (layout,) = plan_gradients([dataclasses.replace(specs[0], atom=512), specs[1]], shard_degree=2).buckets
    of_both: dict[str, Any] = {**FSDP, "compact": BF16, "inner_size": 2, "states": {"w": 1, "v": 2}}
    beside = PlacedBucket(layout=layout, **of_both)
    assert sorted(zip(beside.held_numels, beside.moment_numels, strict=True)) == [(300, 600), (512, 512)]
    assert rank_bytes([beside])[2:] == (2 * 512 + 2 * 512, 2 * 512)


@pytest.mark.parametrize("grads", [FP32, BF16])
@pytest.mark.parametrize("placements", ["zero2", "zero3"])
def test_frozen_buckets_send_no_gradients(placements: str, grads: torch.dtype) -> None:
    frozen = bucket(placements=PLACEMENTS[placements], own_shards=True, trainable=False, grads=grads)
    assert (frozen.grad_nbytes, frozen.kept_grads, frozen.traffic.reduce_inside) == (0, 0, 0)
    assert frozen.traffic.gather == 2048 * 3 // 4
    assert bucket(wire_dtype=BF16, inner_size=1).traffic.scratch == 0


@pytest.mark.parametrize(
    ("parallel", "mesh", "wanted"),
    [
        ("ddp", {"ep": 2}, {"dense": (8, 1, 1, 1), "expert": (4, 1, 1, 1)}),
        ("zero1", {"ep": 2}, {"dense": (8, 1, 8, 1), "expert": (4, 1, 4, 1)}),
        ("hybrid", {"ep": 2}, {"dense": (4, 2, 4, 1), "expert": (2, 2, 2, 1)}),
        ("ddp", {"tp": 2}, {"slice": (4, 1, 1, 1), "dense": (8, 1, 1, 1)}),
        ("zero1", {"tp": 2}, {"slice": (4, 1, 4, 1), "dense": (8, 1, 8, 2)}),
        ("hybrid", {"tp": 2}, {"slice": (2, 2, 2, 1), "dense": (4, 2, 4, 2)}),
        ("zero1", {"tp": 2, "sequence_parallel": True}, {"slice": (4, 1, 4, 1), "partial": (8, 1, 8, 1)}),
        ("zero1", {"cp": 2}, {"dense": (8, 1, 8, 1)}),
    ],
)
def test_over_how_many_ranks_a_bucket_is_reduced_and_sharded(
    tmp_path: Path, parallel: str, mesh: dict[str, Any], wanted: dict[str, tuple[int, ...]]
):
    """Of eight ranks: inside and across instances, the shards, and the ranks that hold copies of one shard."""
    experts = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 16} if "ep" in mesh else {}
    config = tiny_config(tmp_path, parallel=parallel, mesh=mesh, model=experts, train={"global_batch_size": 16})
    plan = plan_run(config, 8)
    found = {
        (each.layout.grid_name, (each.inner_size, each.outer_size, each.layout.shard_degree, each.columns))
        for each in plan.buckets
    }
    assert found == set(wanted.items())
    assert plan.inner_size == 8 // config.num_instances // mesh.get("tp", 1)
