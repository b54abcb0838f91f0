"""Model FLOPs and their utilisation (MFU), after Chowdhery et al., "PaLM", 2022, appendix B.

For one token, with N the weights that multiply it, L blocks, T tokens in a sequence, D the width of all query heads:

    FLOPs = 6 N + 12 L T D          2 for each weight in the forward, 4 in the backward; attention's two products alike
    MFU   = FLOPs * tokens per second / (ranks * peak FLOPs per second of a device)

N has the head, and of the experts those that a token is sent to; it has neither the embedding, which is a look-up, nor
the norms. Attention counts all T keys, although the mask hides half of them. Recomputed forwards count once.
"""

import re

import torch

from ..config.run import Config, ConfigError
from ..model.hugging_face import HuggingFaceModel, build_language_model
from .parameter_count import count_of

__all__ = ["flops_per_token", "peak_tflops"]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys by which a configuration of transformers says that a token meets a part of the weights only."""

_PEAKS = {
    r"A100": 312.0,
    r"H100 PCIe": 756.0,
    r"H(100|200) NVL": 835.0,
    r"H100|H200|GH200|H800": 989.0,
    r"H20": 148.0,
    r"GB200": 2500.0,
    r"B200": 2250.0,
    r"L40S": 362.0,
    r"L4": 121.0,
    r"A10": 125.0,
    r"RTX 4090": 165.0,
    r"MI300X": 1307.0,
}
"""Part of a GPU's name, and its dense bf16 TFLOP/s by its maker's data sheet. The first match counts."""


def flops_per_token(config: Config) -> int:
    """FLOPs of the model's products for one token of training.

    Raises ``ConfigError`` for a model of Hugging Face that cannot be built, or whose products are not known from the
    shapes of its weights.
    """
    model = build_language_model(config.model, seed=0, device=torch.device("meta"))
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim < 2)
    if isinstance(model, HuggingFaceModel):
        looked_up, attention = _of_hugging_face(model)
    else:
        settings = config.model
        looked_up = 0 if settings.tie_embeddings else settings.vocab_size * settings.dim
        attention = settings.num_layers * settings.dim
    weights = count_of(model).active - vectors - looked_up
    return 6 * weights + 12 * attention * config.train.sequence_length


def _of_hugging_face(model: HuggingFaceModel) -> tuple[int, int]:
    """Elements of an embedding that is not the head's weight too, and blocks times the width of all query heads."""
    shape, name = model.model.config.get_text_config(), type(model.model).__name__
    if any(parameter.ndim > 2 for parameter in model.parameters()) or any(hasattr(shape, key) for key in _EXPERTS):
        raise ConfigError(f"which weights of {name} multiply a token does not follow from their shapes")
    heads = getattr(shape, "num_attention_heads", None)
    if not heads:
        raise ConfigError(f"the configuration of {name} has no num_attention_heads")
    width = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    embedding, head = model.model.get_input_embeddings(), model.model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    return 0 if is_tied else int(embedding.weight.numel()), len(model.blocks) * int(heads) * int(width)


def peak_tflops(gpu: str) -> float | None:
    """Dense bf16 TFLOP/s of the GPU that torch calls ``gpu``; None for an unknown one, and for a MIG slice of one."""
    if "MIG" in gpu:
        return None
    return next((peak for name, peak in _PEAKS.items() if re.search(rf"\b({name})\b", gpu)), None)
