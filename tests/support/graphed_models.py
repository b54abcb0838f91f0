"""Twenty architectures of Hugging Face, small, and the quick start's program over each."""

import os
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

import torch
import transformers
from torch import Tensor

import maingrad

__all__ = ["ARCHITECTURES", "Outcome", "train"]

VOCAB, WIDTH, LENGTH, STEPS, MICROBATCHES = 128, 64, 32, 6, 2

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 8, "num_key_value_heads": 2},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    "Gemma3Text": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    "GPT2": {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": LENGTH},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": WIDTH},
    "Falcon": {},
    "Phi3": {"pad_token_id": 0},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "Qwen3Moe": {"num_experts": 4, "num_key_value_heads": 2, "head_dim": 16, **_EXPERTS},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        **_EXPERTS,
        **_LATENT,
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 16},
    "T5": {"d_model": WIDTH, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "Bart": {
        "d_model": WIDTH,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
    "Mamba": {"state_size": 8},
    "Mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
}
"""Name of the config's class, without "Config", and what it has beside the common sizes."""


class Outcome(NamedTuple):
    """What a program has seen."""

    losses: list[Tensor]
    norms: list[Tensor]
    num_graphs: int
    why_eager: str | None


def make(name: str, device: torch.device) -> Any:
    """The model, in training mode, in bf16 on a GPU."""
    config: Any = getattr(transformers, f"{name}Config")(**{**_SIZES, **ARCHITECTURES[name], "use_cache": False})
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model: Any = auto.from_config(config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    return model.to(device).train()


def train(name: str, device: torch.device, *, graphed: bool, form: str = "zero1") -> Outcome:
    """The quick start's program. ``graphed``: on a CPU recorded operations stand in for CUDA graphs."""
    model = maingrad.parallelize(make(name, device), form)
    optimizer = maingrad.make_optimizer(model, torch.optim.AdamW, lr=2**-8, weight_decay=0.125)

    def train_step(batch: Tensor) -> tuple[Tensor, Tensor]:
        losses = []
        for tokens in batch[:-1]:
            with model.no_sync():
                loss = model(input_ids=tokens, labels=tokens).loss / MICROBATCHES
                loss.backward()
            losses.append(loss.detach())
        loss = model(input_ids=batch[-1], labels=batch[-1]).loss / MICROBATCHES
        loss.backward()
        losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses), norm

    step: Any = train_step
    if graphed:
        step = maingrad.graphed(train_step, model, optimizer, record_on_cpu=True)
    losses, norms = [], []
    for number in range(STEPS):
        torch.manual_seed(number)
        batch = torch.randint(1, VOCAB, (MICROBATCHES, 2, LENGTH)).to(device)
        loss, norm = step(batch)
        losses.append(loss.cpu())
        norms.append(norm.detach().cpu())
    if not graphed:
        return Outcome(losses, norms, 0, None)
    outcome = Outcome(losses, norms, step.num_graphs, step.why_eager)
    step.reset()
    return outcome
