"""Hugging Face models with experts, from configs alone: the published sizes (for the meta device), and tiny ones."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

from typing import Any

import torch
import transformers
from torch import nn

__all__ = ["EXPERT_MODELS", "published", "tiny"]

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}

EXPERT_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": (
        "MixtralConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
        },
        _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 151936,
        },
        _SMALL | {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "vocab_size": 129280,
        },
        _SMALL
        | _LATENT
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
        },
        _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "olmoe": (
        "OlmoeConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "vocab_size": 50304,
        },
        _SMALL | {"num_experts": 8, "num_experts_per_tok": 2},
    ),
}
"""Name -> class of the config, the sizes of Mixtral-8x7B, Qwen3-30B-A3B, DeepSeek-V3, GPT-OSS-20B and OLMoE-1B-7B, and
sizes of a tiny model."""


def published(name: str, *, tiny: bool = False) -> nn.Module:
    """The model of the published sizes on the meta device, or of the tiny ones."""
    config, sizes, smaller = EXPERT_MODELS[name]
    sizes = smaller if tiny else sizes
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes))
    return model


def tiny(name: str, *, layers: int = 2, **options: Any) -> nn.Module:
    """A model of 30 thousand parameters whose matrices and biases are random, in training mode."""
    config, _, sizes = EXPERT_MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**sizes | {"num_hidden_layers": layers} | options)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 or parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    return model.train()
