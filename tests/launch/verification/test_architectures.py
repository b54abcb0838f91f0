"""Models of Hugging Face as they are, small, from their configurations: every way computes what plain PyTorch does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from maingrad.launch import verify
from maingrad.launch.verification.ways import WAYS

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES | {"num_key_value_heads": 2}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        SIZES | {"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", SIZES | {"num_key_value_heads": 2, "num_local_experts": 4}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", SIZES | {"embedding_size": 16}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 96,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        SIZES | {"image_size": 16, "patch_size": 8, "num_labels": 5},
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 96, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
    ),
}
DRAW = {"gpt2", "t5"}
"""Their default configurations have dropout."""
FEW = ("ddp_find_unused", "zero1_converted", "fsdp_recompute")


def make(name: str) -> tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]:
    model, config, sizes = MODELS[name]
    sizes = {key: value for key, value in sizes.items() if not (name == "vit" and key == "vocab_size")}
    torch.manual_seed(0)
    built = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    if name == "vit":
        return built, {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.randint(0, 5, (8,))}
    ids = torch.randint(3, 90, (8, 10))
    return built, {"input_ids": ids, "labels": ids}


def check(name: str, ways: tuple[str, ...]) -> None:
    found = verify(*make(name), ways=ways)
    assert found.ok, str(found)
    assert {str(finding.cause) for finding in found.findings} == ({"random"} if name in DRAW else set()), str(found)
    assert [result.way for result in found.results if result.ok] == list(ways)
    assert all(result.fused_writes > 0 for result in found.results if WAYS[result.way].converted)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.sampled(1)
def test_some_ways(name: str) -> None:
    check(name, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_all_ways(name: str) -> None:
    check(name, tuple(WAYS))


@pytest.mark.in_turn
def test_masked_tokens_make_another_mean() -> None:
    """The loss is a mean over labels that are not -100, and the rows of the ranks have different numbers of them."""
    model, batch = make("llama")
    labels = batch["labels"].clone()
    labels[:3, 4:] = -100
    found = verify(model, {**batch, "labels": labels}, ways=("ddp",))
    assert [str(finding.cause) for finding in found.findings] == ["weighted_mean"], str(found)


@pytest.mark.in_turn
def test_a_loss_of_the_balance_of_experts_compares_rows() -> None:
    model, batch = make("mixtral")
    model.config.output_router_logits = True
    found = verify(model, batch, ways=("ddp",))
    assert [str(finding.cause) for finding in found.findings] == ["mixed_rows"], str(found)
