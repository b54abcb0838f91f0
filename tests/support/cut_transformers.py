"""Small models of transformers, whole and cut by their ``tp_plan``."""

from typing import Any

import torch
import transformers
from parallel_llama import batch

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "use_cache": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


def make(kind: str) -> Any:
    torch.manual_seed(0)
    more: dict[str, Any] = {"Llama": {}, "Qwen3": {"head_dim": 8}, "Qwen3Moe": {"head_dim": 8, **EXPERTS}}[kind]
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:
                param.mul_(torch.linspace(0.5, 1.5, param.numel()))
    return model


def cut(model: Any, mesh: Any) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh["tp"], model._expand_parallel_plan(model.tp_plan))


def loss_of(model: Any, index: int) -> torch.Tensor:
    tokens, _ = batch(index)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss
