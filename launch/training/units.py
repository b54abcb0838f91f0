"""The units of a language model under ``parallel = "fsdp"``: one per block, and one for the rest of the model."""

import dataclasses
from collections.abc import Iterator

from torch import nn

from ...fsdp import MixedPrecisionPolicy
from ..config.run import FsdpConfig, ModelConfig
from ..model.hugging_face import LanguageModel
from ..model.moe import MixtureOfExperts

__all__ = ["units_of"]


def units_of(
    model: LanguageModel, settings: ModelConfig, fsdp: FsdpConfig
) -> Iterator[tuple[nn.Module, MixedPrecisionPolicy]]:
    """The module and the policy of each ``fully_shard`` call, inner units first, the model last.

    Parameters are stored in fp32 and used in ``model.param_dtype``. Inputs are not cast: activations have the dtype of
    the parameters, and rotary tables stay in fp32. A router with another dtype than its block is a unit of its own,
    and so are experts of which other ranks hold the rest.
    """
    keeps_router = settings.num_experts > 0 and settings.router_dtype != settings.param_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=settings.dtype("param_dtype"),
        grad_dtype=fsdp.dtype("grad_dtype"),
        reduce_dtype=fsdp.dtype("reduce_dtype"),
        cast_forward_inputs=False,
    )
    of_router = dataclasses.replace(policy, param_dtype=settings.dtype("router_dtype"))
    for block in model.blocks:
        if settings.num_experts and isinstance(block.ffn, MixtureOfExperts):
            if keeps_router:
                yield block.ffn.router, of_router
            if block.ffn.has_part:
                yield block.ffn.experts, policy
        yield block, policy
    yield model, policy
