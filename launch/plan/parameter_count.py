"""How many parameters a configured model has, and how many of them work on one token."""

from typing import NamedTuple

import torch

from ..config.run import ModelConfig
from ..model.gpt import GPT

__all__ = ["ParameterCount", "count_of", "count_parameters"]


class ParameterCount(NamedTuple):
    """Elements of a model's parameters, a shared one counted once."""

    total: int
    experts: int
    """Of all experts of all blocks."""
    routers: int
    shared_experts: int
    active: int
    """Those that work on one token: of the experts, the ones that it is sent to."""


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Of the model of ``config``, from shapes alone."""
    return count_of(GPT(config, torch.device("meta")))


def count_of(model: GPT) -> ParameterCount:
    """The same of a model that is there, on any device."""

    def below(path: str) -> int:
        return sum(parameter.numel() for name, parameter in model.named_parameters() if path in name)

    config = model.config
    experts = below(".ffn.experts.")
    idle = experts - experts * config.top_k // config.num_experts if config.num_experts else 0
    total = below("")
    return ParameterCount(total, experts, below(".ffn.router."), below(".ffn.shared."), total - idle)
