"""Counts the parameters of a configured model, and those that are active per token."""

from typing import NamedTuple

from ..model.hugging_face import HuggingFaceModel, LanguageModel

__all__ = ["ParameterCount", "count_of"]


class ParameterCount(NamedTuple):
    """Numbers of parameter elements. A shared parameter counts once."""

    total: int
    experts: int
    """Elements of all experts of all blocks."""
    routers: int
    shared_experts: int
    active: int
    """Elements that are active for one token: of the experts, only ``top_k``."""


def count_of(model: LanguageModel) -> ParameterCount:
    """Count the parameters of an existing model, on any device. Those of Hugging Face's experts count as active."""
    if isinstance(model, HuggingFaceModel):
        total = sum(parameter.numel() for parameter in model.parameters())
        return ParameterCount(total, 0, 0, 0, total)

    def below(path: str) -> int:
        return sum(parameter.numel() for name, parameter in model.named_parameters() if path in name)

    config = model.config
    experts = below(".ffn.experts.")
    idle = experts - experts * config.top_k // config.num_experts if config.num_experts else 0
    total = below("")
    return ParameterCount(total, experts, below(".ffn.router."), below(".ffn.shared."), total - idle)
