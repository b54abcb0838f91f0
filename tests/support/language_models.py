"""Twenty-odd Hugging Face architectures from configs, small, with losses of every kind."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

from typing import Any

import torch
import transformers

__all__ = ["ARCHITECTURES", "VOCABULARY", "batch", "language_model"]

VOCABULARY = 96
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_GPT = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False} | {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_CODERS = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "use_cache": False,
    "pad_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4} | {
    "dropout_rate": 0.0,
    "use_cache": False,
    "decoder_start_token_id": 0,
}
_EXPERTS = _SMALL | {"num_experts_per_tok": 2, "output_router_logits": True}
_GEMMA = _SMALL | {"head_dim": 8}
_STATES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "use_cache": False}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _SMALL),
    "llama, tied": ("LlamaForCausalLM", _SMALL | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", _SMALL | {"head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", _GEMMA | {"final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3ForCausalLM", _GEMMA | {"final_logit_softcapping": 2.0}),
    "granite": ("GraniteForCausalLM", _SMALL | {"logits_scaling": 8.0}),
    "cohere": ("CohereForCausalLM", _SMALL | {"logit_scale": 0.25}),
    "olmo2": ("Olmo2ForCausalLM", _SMALL),
    "phi": ("PhiForCausalLM", _SMALL | {"resid_pdrop": 0.0}),
    "gpt2": ("GPT2LMHeadModel", _GPT),
    "gpt_neox": ("GPTNeoXForCausalLM", _SMALL),
    "opt": (
        "OPTForCausalLM",
        _SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
    "bloom": ("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "bert": (
        "BertLMHeadModel",
        _SMALL | {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "mixtral": ("MixtralForCausalLM", _EXPERTS | {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}),
    "granitemoe": ("GraniteMoeForCausalLM", _EXPERTS | {"num_local_experts": 4, "logits_scaling": 4.0}),
    "gpt_oss": ("GptOssForCausalLM", _EXPERTS | {"num_local_experts": 4, "head_dim": 8}),
    "mamba": ("MambaForCausalLM", _STATES),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        _SMALL | {"num_hidden_layers": 3, "logits_soft_cap": 3.0, "lru_width": 32},
    ),
    "bart": ("BartForConditionalGeneration", _CODERS),
    "marian": ("MarianMTModel", _CODERS | {"decoder_vocab_size": VOCABULARY}),
    "t5": ("T5ForConditionalGeneration", _T5),
    "switch": ("SwitchTransformersForConditionalGeneration", _T5 | {"num_experts": 2, "router_jitter_noise": 0.0}),
}
"""Name -> class and config: plain heads, tied ones, capped and scaled logits, biases, experts with a loss of routers,
state spaces, encoders with decoders."""


def language_model(name: str, **changed: Any) -> Any:
    """The model in training mode; its weights are the same in each call."""
    kind, sizes = ARCHITECTURES[name]
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    model = cls(cls.config_class(**sizes | changed)).train()
    if "num_experts_per_tok" in sizes:
        model.set_experts_implementation("eager")  # others refuse fp64 on CPUs
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()  # zeros, in a new model of Bart
    return model


def batch(seed: int = 0, length: int = 12) -> dict[str, torch.Tensor]:
    """Two rows, the first of which begins with five tokens that the loss leaves out."""
    tokens = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels}
