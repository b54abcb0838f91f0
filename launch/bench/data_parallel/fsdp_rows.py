"""Rows of ``bench data-parallel`` over sharded parameters: ours, in the placements that ``fully_shard`` offers.

The units are the same as the peers': each block, then the model, whose own unit holds the embedding, the last norm and
the head. The optimizer updates fp32 shards; forward and backward compute in bf16.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ....fsdp import GraphedTrainingStep, MixedPrecisionPolicy, fully_shard
from ..steps import accumulate
from .model import GPT, fused_linear, make_model, plain_linear
from .ranks import make_mesh
from .rows import LEARNING_RATE, Case, Row, Step, refuse_copy_engines, refuse_graphs, refuse_instances, reset_compiler

__all__ = ["FSDP", "shard_model"]


def shard_model(
    model: GPT,
    placements: str,
    mesh: DeviceMesh | None,
    *,
    split_ends: bool = False,
    keep_params: bool = False,
    reduced_once: bool = False,
    copy_engines: bool = False,
    bucket_size: int | None = None,
) -> GPT:
    """Shard the model into units, in place.

    split_ends    the embedding and the head are units of their own: neither is whole while the other is used
    keep_params   parameters stay whole from forward to backward
    reduced_once  whole gradients stay until the last microbatch
    copy_engines  gathers run on the GPU's copy engines
    bucket_size   elements at which all units close a bucket; None: the library's own rule
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    shard = partial(
        fully_shard,
        mesh=mesh,
        placements=placements,
        mixed_precision=policy,
        reshard_after_forward=False if keep_params else None,
        reduce_every_microbatch=False if reduced_once else None,
        bucket_size=bucket_size,
    )
    for unit in model.units(split_ends=split_ends):
        shard(unit)
    return shard(model, copy_engine_gather=copy_engines)


def _build(
    case: Case,
    *,
    placements: str,
    fused: bool = True,
    split_ends: bool = False,
    keep_params: bool = False,
    reduced_once: bool = False,
    copy_engines: bool = False,
    num_instances: int = 1,
    compiled: bool = False,
    graphed: bool = False,
) -> Step:
    module = make_model(case.setting, fused_linear if fused else plain_linear, torch.float32, case.device)
    if compiled:
        module.compile_parts()
    outer = {} if num_instances == 1 else {"outer": num_instances}
    mesh = make_mesh(case.device, {**outer, "inner": case.num_ranks // num_instances})
    model: Any = shard_model(
        module,
        placements,
        mesh,
        split_ends=split_ends,
        keep_params=keep_params,
        reduced_once=reduced_once,
        copy_engines=copy_engines,
        bucket_size=case.ours.get("bucket_size"),
    )
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    tokens = case.tokens()

    def train_step(tokens: Tensor) -> Tensor:
        loss = accumulate(model, tokens, not_last=model.no_sync)
        adamw.step()
        adamw.zero_grad()
        return loss

    return partial(GraphedTrainingStep(train_step, model, adamw) if graphed else train_step, tokens)


FSDP: Mapping[str, Row] = {
    "fsdp_zero3": Row("maingrad FSDP, ZeRO-3", partial(_build, placements="zero3")),
    "fsdp_zero3_split": Row(
        "maingrad FSDP, ZeRO-3, embedding and head units of their own",
        partial(_build, placements="zero3", split_ends=True),
    ),
    "fsdp_zero3_copy_engines": Row(
        "maingrad FSDP, ZeRO-3, gathers on copy engines",
        partial(_build, placements="zero3", copy_engines=True),
        refuse=refuse_copy_engines,
    ),
    "fsdp_zero3_split_copy_engines": Row(
        "maingrad FSDP, ZeRO-3, embedding and head units of their own, gathers on copy engines",
        partial(_build, placements="zero3", split_ends=True, copy_engines=True),
        refuse=refuse_copy_engines,
    ),
    "fsdp_zero3_reduced_once": Row(
        "maingrad FSDP, ZeRO-3, gradients reduced once a step",
        partial(_build, placements="zero3", reduced_once=True),
    ),
    "fsdp_zero3_reduced_once_copy_engines": Row(
        "maingrad FSDP, ZeRO-3, gradients reduced once a step, gathers on copy engines",
        partial(_build, placements="zero3", reduced_once=True, copy_engines=True),
        refuse=refuse_copy_engines,
    ),
    "fsdp_zero3_split_reduced_once_copy_engines": Row(
        "maingrad FSDP, ZeRO-3, embedding and head units of their own, gradients reduced once a step, gathers on copy "
        "engines",
        partial(_build, placements="zero3", split_ends=True, reduced_once=True, copy_engines=True),
        refuse=refuse_copy_engines,
    ),
    "fsdp_zero3_kept": Row(
        "maingrad FSDP, ZeRO-3, parameters kept until backward", partial(_build, placements="zero3", keep_params=True)
    ),
    "fsdp_zero3_unfused": Row("maingrad FSDP, ZeRO-3, nn.Linear", partial(_build, placements="zero3", fused=False)),
    "fsdp_zero3_compiled": Row(
        "maingrad FSDP, ZeRO-3, blocks under torch.compile",
        partial(_build, placements="zero3", compiled=True),
        close=reset_compiler,
    ),
    **{
        f"fsdp_zero3{name}_graphed": Row(
            f"maingrad FSDP, ZeRO-3{label}, one CUDA graph",
            partial(_build, placements="zero3", compiled=bool(name), graphed=True),
            close=reset_compiler,
            refuse=refuse_graphs,
        )
        for name, label in (("", ""), ("_compiled", ", blocks under torch.compile"))
    },
    "fsdp_zero2": Row("maingrad FSDP, ZeRO-2", partial(_build, placements="zero2")),
    "fsdp_zero2_copy_engines": Row(
        "maingrad FSDP, ZeRO-2, gathers on copy engines",
        partial(_build, placements="zero2", copy_engines=True),
        refuse=refuse_copy_engines,
    ),
    "fsdp_zero1": Row("maingrad FSDP, ZeRO-1", partial(_build, placements="zero1")),
    "fsdp_hsdp": Row(
        "maingrad FSDP, two instances (HSDP)",
        partial(_build, placements="hsdp", num_instances=2),
        refuse=refuse_instances,
    ),
}
"""By name, in the order in which they are measured."""
