"""Dtypes of parameters in computation and at rest. Buffers keep theirs, as under ``fully_shard``."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from ...fsdp import MixedPrecisionPolicy
from ...fsdp.unit.plan import cast_inputs

__all__ = ["compute_in", "policy_of", "store_in_fp32"]

_HALF = (torch.bfloat16, torch.float16)


def policy_of(model: nn.Module, param_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """The policy of every unit. A model in half precision computes in it, though its shards will be fp32.

    Raises ``ValueError`` where only some parameters are in half precision and nothing names the dtype.
    """
    if param_dtype is not None:
        return MixedPrecisionPolicy(param_dtype=param_dtype)
    half = {param.dtype for param in model.parameters() if param.requires_grad} & set(_HALF)
    if not half:
        return MixedPrecisionPolicy()
    dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
    if len(dtypes) > 1:
        raise ValueError(
            f"parameters have dtypes {', '.join(sorted(map(str, dtypes)))}, and trained ones in half precision would "
            f"have no fp32 masters: say param_dtype (bf16=True in TrainingArguments), in which all of them are used, "
            f'or use "zero1", which has masters'
        )
    return MixedPrecisionPolicy(param_dtype=half.pop())


@torch.no_grad()
def store_in_fp32(module: nn.Module, ignored: Collection[int]) -> None:
    """Make fp32 of the trained parameters that are in half precision: their shards are masters.

    ignored  ``id`` of parameters that stay as they are
    """
    for param in module.parameters():
        if param.requires_grad and param.dtype in _HALF and id(param) not in ignored:
            param.data = param.data.float()


@torch.no_grad()
def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Make ``dtype`` of floating-point parameters now, and of floating-point inputs in each forward of ``module``."""
    for param in module.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)

    def cast(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return cast_inputs(args, kwargs, dtype)

    module.register_forward_pre_hook(cast, with_kwargs=True)
