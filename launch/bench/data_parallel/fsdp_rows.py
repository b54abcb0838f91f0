"""Rows of ``bench data-parallel`` over sharded parameters: ours, in the placements that ``fully_shard`` offers.

The units are the same as the peers': each block, then the model, whose own unit holds the embedding, the last norm and
the head. The optimizer updates fp32 shards; forward and backward compute in bf16.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ....fsdp import FSDPModule, GraphedTrainingStep, MixedPrecisionPolicy
from ...parallelizing.make_optimizer import make_optimizer
from ...parallelizing.parallelize import shard_units
from ..steps import accumulate, stepping
from .model import GPT, fused_linear, make_model, plain_linear
from .ranks import make_mesh
from .rows import LEARNING_RATE, Case, Row, Step, refuse_copy_engines, refuse_graphs, refuse_instances, row_of

__all__ = ["FSDP", "shard_model"]


def shard_model(
    model: GPT, placements: str, mesh: DeviceMesh | None, *, split_ends: bool = False, **options: Any
) -> FSDPModule:
    """Shard the model into units, in place.

    split_ends  the embedding and the head are units of their own: neither is whole while the other is used
    options     arguments of ``fully_shard``
    """
    units, policy = model.units(split_ends=split_ends), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return shard_units(model, units, placements, mesh, policy, options)


def _build(
    case: Case,
    *,
    placements: str = "zero3",
    fused: bool = True,
    num_instances: int = 1,
    compiled: bool = False,
    graphed: bool = False,
    **options: Any,
) -> Step:
    """options  arguments of ``shard_model``"""
    module = make_model(case.setting, fused_linear if fused else plain_linear, torch.float32, case.device)
    if compiled:
        module.compile_parts()
    outer = {} if num_instances == 1 else {"outer": num_instances}
    mesh = make_mesh(case.device, {**outer, "inner": case.num_ranks // num_instances})
    model = shard_model(module, placements, mesh, bucket_size=case.ours.get("bucket_size"), **options)
    adamw = make_optimizer(model, lr=LEARNING_RATE)
    train_step = stepping(partial(accumulate, model, not_last=model.no_sync), adamw)
    return partial(GraphedTrainingStep(train_step, model, adamw) if graphed else train_step, case.tokens())


FSDP: Mapping[str, Row] = {
    "fsdp_zero3": Row("maingrad FSDP, ZeRO-3", _build),
    "fsdp_zero3_split": row_of(
        "maingrad FSDP, ZeRO-3, embedding and head units of their own",
        _build,
        split_ends=True,
    ),
    "fsdp_zero3_copy_engines": row_of(
        "maingrad FSDP, ZeRO-3, gathers on copy engines",
        _build,
        copy_engine_gather=True,
        refuse=refuse_copy_engines,
    ),
    "fsdp_zero3_split_copy_engines": row_of(
        "maingrad FSDP, ZeRO-3, embedding and head units of their own, gathers on copy engines",
        _build,
        split_ends=True,
        copy_engine_gather=True,
        refuse=refuse_copy_engines,
    ),
    "fsdp_zero3_reduced_once": row_of(
        "maingrad FSDP, ZeRO-3, gradients reduced once a step",
        _build,
        reduce_every_microbatch=False,
    ),
    "fsdp_zero3_reduced_once_copy_engines": row_of(
        "maingrad FSDP, ZeRO-3, gradients reduced once a step, gathers on copy engines",
        _build,
        reduce_every_microbatch=False,
        copy_engine_gather=True,
        refuse=refuse_copy_engines,
    ),
    "fsdp_zero3_split_reduced_once_copy_engines": row_of(
        "maingrad FSDP, ZeRO-3, embedding and head units of their own, gradients reduced once a step, gathers on copy "
        "engines",
        _build,
        split_ends=True,
        reduce_every_microbatch=False,
        copy_engine_gather=True,
        refuse=refuse_copy_engines,
    ),
    "fsdp_zero3_kept": row_of(
        "maingrad FSDP, ZeRO-3, parameters kept until backward", _build, reshard_after_forward=False
    ),
    "fsdp_zero3_unfused": row_of("maingrad FSDP, ZeRO-3, nn.Linear", _build, fused=False),
    "fsdp_zero3_compiled": row_of(
        "maingrad FSDP, ZeRO-3, blocks under torch.compile",
        _build,
        compiled=True,
    ),
    **{
        f"fsdp_zero3{name}_graphed": row_of(
            f"maingrad FSDP, ZeRO-3{label}, one CUDA graph",
            _build,
            compiled=bool(name),
            graphed=True,
            refuse=refuse_graphs,
        )
        for name, label in (("", ""), ("_compiled", ", blocks under torch.compile"))
    },
    "fsdp_zero2": row_of("maingrad FSDP, ZeRO-2", _build, placements="zero2"),
    "fsdp_zero2_copy_engines": row_of(
        "maingrad FSDP, ZeRO-2, gathers on copy engines",
        _build,
        placements="zero2",
        copy_engine_gather=True,
        refuse=refuse_copy_engines,
    ),
    "fsdp_zero1": row_of("maingrad FSDP, ZeRO-1", _build, placements="zero1"),
    "fsdp_hsdp": row_of(
        "maingrad FSDP, two instances (HSDP)",
        _build,
        placements="hsdp",
        num_instances=2,
        refuse=refuse_instances,
    ),
}
"""By name, in the order in which they are measured."""
