"""Makes the plan of a model's gradients from its parameters and a configuration."""

from collections.abc import Mapping, Sequence

import torch

from ..config import DistributedDataParallelConfig
from .layout import GradPlan, ParamSpec, plan_gradients
from .owned_params import OwnedParam
from .parallel_marks import is_tied_across_stages

__all__ = ["grad_dtype_of", "plan_model"]


def plan_model(
    trainable: Sequence[OwnedParam],
    config: DistributedDataParallelConfig,
    *,
    shard_degree: int | Mapping[str, int],
    backward_order: Sequence[str] | None = None,
) -> GradPlan:
    """The plan for these parameters. A pure function: works on the meta device too, and for any number of ranks.

    backward_order  parameters' names in the order in which backward reaches them; None: reverse registration order
    """
    by_name = {owned.name: owned for owned in trainable}
    if backward_order is None:
        names = list(reversed(by_name))
    else:
        names = list(backward_order)
        if set(names) != set(by_name) or len(names) != len(by_name):
            missing, unknown = sorted(set(by_name) - set(names)), sorted(set(names) - set(by_name))
            raise ValueError(
                f"backward_order must name each trainable parameter once; missing {missing}, unknown {unknown}, "
                f"{len(names)} names for {len(by_name)} parameters"
            )
    specs = [
        ParamSpec(
            name=name,
            shape=tuple(by_name[name].param.shape),
            param_dtype=by_name[name].param.dtype,
            grad_dtype=grad_dtype_of(
                by_name[name].param.dtype, torch.float32 if config.grad_reduce_in_fp32 else by_name[name].param.dtype
            ),
            grid_name=by_name[name].grid_name,
            delayed=by_name[name].delayed,
            own_bucket=is_tied_across_stages(by_name[name].param),
            atom=config.shard_atom,
        )
        for name in names
    ]
    return plan_gradients(
        specs,
        shard_degree=shard_degree,
        bucket_numel=config.bucket_size,
        num_buckets=config.num_buckets,
        keep_params_whole=config.keep_params_whole,
        pad_for_bus_bandwidth=config.pad_buckets_for_high_nccl_busbw,
    )


def grad_dtype_of(param_dtype: torch.dtype, of_half: torch.dtype) -> torch.dtype:
    """Dtype of ``main_grad``: ``of_half`` for parameters in half precision, the parameter's own dtype for others."""
    return of_half if param_dtype in (torch.bfloat16, torch.float16) else param_dtype
