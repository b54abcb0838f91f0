"""Names that users of FSDP2, torch's DDP and Megatron write: the error has what to write in their place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch import nn

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
        lambda m: DistributedDataParallelConfig(overlap_grad_reduction=True),  # type: ignore[call-arg]
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


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_answered_with_the_name_that_is_meant(slip: str) -> None:
    call, message = SLIPS[slip]
    with pytest.raises(TypeError, match=message):
        call(nn.Linear(2, 2))
