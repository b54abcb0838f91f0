"""Model FLOPs and their utilisation (MFU), after Chowdhery et al., "PaLM", 2022, appendix B.

For one token, with N the weights that multiply it, L blocks, T tokens in a sequence, D the width of all query heads:

    FLOPs = 6 N + 12 L T D          2 for each weight in the forward, 4 in the backward; attention's two products alike
    MFU   = FLOPs * tokens per second / (ranks * peak FLOPs per second of a device)

N has the head, and of the experts those that a token is sent to; it has neither the embedding, which is a look-up, nor
the norms. Attention counts all T keys, although the mask hides half of them. Recomputed forwards count once.
"""

import re

import torch

from ...config.run import Config
from ...model.gpt import GPT
from ...plan.parameter_count import count_of

__all__ = ["flops_per_token", "peak_tflops"]

_PEAKS = (
    (r"A100", 312.0),
    (r"H100 PCIe", 756.0),
    (r"H(100|200) NVL", 835.0),
    (r"H100|H200|GH200|H800", 989.0),
    (r"H20", 148.0),
    (r"GB200", 2500.0),
    (r"B200", 2250.0),
    (r"L40S", 362.0),
    (r"L4", 121.0),
    (r"A10", 125.0),
    (r"RTX 4090", 165.0),
    (r"MI300X", 1307.0),
)
"""Part of a GPU's name, and its dense bf16 TFLOP/s by its maker's data sheet. The first match counts."""


def flops_per_token(config: Config) -> int:
    """FLOPs of the model's products for one token of training."""
    model = GPT(config.model, torch.device("meta"))
    settings = config.model
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim < 2)
    looked_up = 0 if settings.tie_embeddings else settings.vocab_size * settings.dim
    weights = count_of(model).active - vectors - looked_up
    return 6 * weights + 12 * settings.num_layers * config.train.sequence_length * settings.dim


def peak_tflops(gpu: str) -> float | None:
    """Dense bf16 TFLOP/s of the GPU that torch calls ``gpu``; None for an unknown one, and for a MIG slice of one."""
    if "MIG" in gpu:
        return None
    return next((peak for name, peak in _PEAKS if re.search(rf"\b({name})\b", gpu)), None)
