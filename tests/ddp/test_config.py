"""Names that users of FSDP2, torch's DDP and Megatron write: the error has what to write in their place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import maingrad.ddp
from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.fsdp import MixedPrecisionPolicy, fully_shard

SLIPS: dict[str, tuple[Callable[[Any], object], str]] = {
    "FSDP2's precision": (
        lambda m: fully_shard(m, mp_policy=MixedPrecisionPolicy()),  # type: ignore[call-arg]
        "fully_shard has no argument 'mp_policy': write mixed_precision=",
    ),
    "FSDP2's policy class": (
        lambda m: fully_shard(m, mixed_precision=torch_fsdp.MixedPrecisionPolicy()),  # type: ignore[arg-type]
        "mixed_precision is a maingrad.fsdp.MixedPrecisionPolicy, got MixedPrecisionPolicy",
    ),
    "FSDP2's list": (lambda m: fully_shard([m, m]), "takes one nn.Module, got list: .*make one module that contains"),
    "a typo": (
        lambda m: fully_shard(m, reshard_after_foward=True),  # type: ignore[call-arg]
        "no argument 'reshard_after_foward': it has reshard_after_forward$",
    ),
    "torch's DDP": (
        lambda m: DistributedDataParallel(m, device_ids=[0]),  # type: ignore[call-arg]
        "DistributedDataParallel has no argument 'device_ids': move the model to its device",
    ),
    "torch's list": (lambda m: DistributedDataParallel([m]), "takes one nn.Module first, got list"),
    "a dict": (
        lambda m: DistributedDataParallel(m, {"overlap_grad_reduce": True}),  # type: ignore[arg-type]
        "config is a maingrad.ddp.DistributedDataParallelConfig, got dict",
    ),
    "a field with a typo": (
        lambda m: DistributedDataParallelConfig(bucket_size=1, overlap_grad_reduction=True),  # type: ignore[call-arg]
        "DistributedDataParallelConfig has no argument 'overlap_grad_reduction': it has overlap_grad_reduce$",
    ),
    "Megatron's field": (
        lambda m: DistributedDataParallelConfig(nccl_ub=True),  # type: ignore[call-arg]
        "no argument 'nccl_ub': write copy_engine_param_gather=True",
    ),
    "a name that is like none": (
        lambda m: DistributedDataParallelConfig(zzz=1),  # type: ignore[call-arg]
        "no argument 'zzz': it has grad_reduce_in_fp32, overlap_grad_reduce, .*check_replicas_every$",
    ),
}


NAMES_MEANT: dict[Any, dict[str, str]] = {
    DistributedDataParallelConfig: {
        "reduce_scatter_with_fp32_accumulation": "grad_reduce_wire_dtype=torch.bfloat16",
        "use_megatron_fsdp": "fully_shard",
        "data_parallel_sharding_strategy": "placements=",
        "bucket_cap_mb": "bucket_size",
        "delay_wgrad_compute": "leave it away",
    },
    DistributedDataParallel: {
        "output_device": "before wrapping",
        "broadcast_buffers": "copied once",
        "bucket_cap_mb": "bucket_size",
        "gradient_as_bucket_view": "leave it away",
        "find_unused_parameters": "config=",
        "static_graph": "leave it away",
        "device_mesh": "process_group=mesh",
        "mesh": "process_group=mesh",
        "ddp_config": "config=",
        "pg_collection": "tensor_parallel_group=pg_collection.tp",
    },
}


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls, names in NAMES_MEANT.items() for name in names])
def test_names_of_other_libraries_are_answered_with_what_to_write(cls: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"has no argument '{name}': (?!it has).*{NAMES_MEANT[cls][name]}"):
        cls(**{name: True})


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_answered_with_the_name_that_is_meant(slip: str) -> None:
    call, message = SLIPS[slip]
    with pytest.raises(TypeError, match=message):
        call(nn.Linear(2, 2))


SHARDS = {"use_distributed_optimizer": True}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"bucket_size": 0}, "bucket_size must be at least 1 element, got 0"),
    ({"num_buckets": 0}, "num_buckets must be at least 1, got 0"),
    ({"num_buckets": 1, "bucket_size": 1}, "both say where buckets end"),
    ({**SHARDS, "shard_atom": 0}, "shard_atom must be at least 1 element, got 0"),
    ({**SHARDS, "keep_matrices_whole": "0.weight"}, "keep_matrices_whole is a tuple of names"),
    ({**SHARDS, "keep_matrices_whole": (1,)}, "keep_matrices_whole is a tuple of names"),
    ({**SHARDS, "keep_params_whole": ("0.weight",)}, "keep_params_whole is True or False"),
    ({**SHARDS, "keep_params_whole": True, "keep_matrices_whole": ("*",)}, "no effect with keep_params_whole"),
    ({**SHARDS, "keep_params_whole": True, "shard_atom": 2}, "no effect with keep_params_whole"),
    ({**SHARDS, "num_distributed_optimizer_instances": 0}, "must be at least 1, got 0"),
    ({**SHARDS, "grad_reduce_wire_dtype": torch.float64}, "grad_reduce_wire_dtype is torch.bfloat16, torch.float16"),
    ({**SHARDS, "grad_reduce_wire_dtype": torch.float32}, "None for the accumulators' own dtype; got torch.float32"),
    ({"find_unused_parameters": True}, "no effect without overlap_grad_reduce"),
    ({"forward_writes": "never"}, "forward_writes is 'refused' or 'alike', got 'never'"),
    ({"check_replicas_every": 0}, "check_replicas_every must be at least 1, got 0"),
    ({**SHARDS, "copy_engine_param_gather": True}, "no effect without overlap_param_gather"),
    ({"average_in_collective": True, "calculate_per_token_loss": True}, "average_in_collective has no effect with"),
    ({**SHARDS, "average_in_collective": True, "grad_reduce_wire_dtype": torch.bfloat16}, "each rank sums by itself"),
    ({"overlap_param_gather": True}, "overlap_param_gather has no effect without use_distributed_optimizer"),
    ({"num_distributed_optimizer_instances": 2}, "instances has no effect without use_distributed_optimizer"),
    ({"grad_reduce_wire_dtype": torch.bfloat16}, "wire_dtype has no effect without use_distributed_optimizer"),
    ({"keep_params_whole": True}, "keep_params_whole has no effect without use_distributed_optimizer"),
    ({"keep_matrices_whole": ("*",)}, "keep_matrices_whole has no effect without use_distributed_optimizer"),
    ({"release_grads": True}, "release_grads has no effect without use_distributed_optimizer"),
    ({"shard_atom": 2}, "shard_atom has no effect without use_distributed_optimizer"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[",".join(options) for options, _ in REFUSED])
def test_options_that_cannot_take_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedDataParallelConfig(**options)


def test_the_least_values_are_taken() -> None:
    DistributedDataParallelConfig(bucket_size=1, check_replicas_every=1)
    DistributedDataParallelConfig(**SHARDS, keep_matrices_whole=["0.weight"])
    DistributedDataParallelConfig(num_buckets=1, shard_atom=1, num_distributed_optimizer_instances=1)
    DistributedDataParallelConfig(**SHARDS, keep_params_whole=True, shard_atom=1)
    DistributedDataParallelConfig(average_in_collective=False, calculate_per_token_loss=True)
    DistributedDataParallelConfig(average_in_collective=True)
    DistributedDataParallelConfig(find_unused_parameters=True, overlap_grad_reduce=True)
    for dtype in (torch.bfloat16, torch.float16):
        DistributedDataParallelConfig(**SHARDS, grad_reduce_wire_dtype=dtype, average_in_collective=False)


def test_a_step_waits_bucket_by_bucket_where_nothing_follows_on_all() -> None:
    options = {"check_for_nan_in_grad": True, "calculate_per_token_loss": True, "check_replicas_every": 3}
    for name, value in options.items():
        assert not DistributedDataParallelConfig(**{name: value}).can_wait_by_bucket, name
    assert DistributedDataParallelConfig(**SHARDS, overlap_grad_reduce=True).can_wait_by_bucket


def test_megatron_is_told_who_sums_over_other_ranks() -> None:
    config = DistributedDataParallelConfig()
    with pytest.raises(AttributeError, match=r"finalize_model_grads_func = maingrad\.te_integration\.pipeline"):
        _ = config.use_megatron_fsdp
    assert not hasattr(config, "use_megatron_fsdp")


@pytest.mark.parametrize("wanted", ["yes", 1, None])
def test_copy_engines_are_chosen_by_three_words(wanted: Any) -> None:
    config = DistributedDataParallelConfig(**SHARDS, overlap_param_gather=True, copy_engine_param_gather=wanted)
    with pytest.raises(ValueError, match='copy_engine_param_gather is True, False or "auto", got'):
        DistributedDataParallel(nn.Linear(2, 2), config)


def test_copy_engines_are_of_gpus() -> None:
    options = {**SHARDS, "overlap_param_gather": True}
    with pytest.raises(ValueError, match=r"copy_engine_param_gather needs parameters on CUDA.*got cpu and no process"):
        DistributedDataParallel(
            nn.Linear(2, 2), DistributedDataParallelConfig(**options, copy_engine_param_gather=True)
        )
    for wanted in (False, "auto"):
        config = DistributedDataParallelConfig(**options, copy_engine_param_gather=wanted)
        assert not DistributedDataParallel(nn.Linear(2, 2), config).copy_engines


def test_a_name_that_is_not_there_is_a_missing_attribute() -> None:
    """So that ``hasattr``, ``getattr`` with a default and ``inspect`` work on the package."""
    assert getattr(maingrad.ddp, "DistributedDataParalel", None) is None
    with pytest.raises(AttributeError, match=r"has no attribute 'DistributedDataParalel'$"):
        _ = maingrad.ddp.DistributedDataParalel
    assert {"DistributedDataParallel", "__name__"} <= set(dir(maingrad.ddp))
