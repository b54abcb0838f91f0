"""Model FLOPs against weights counted by hand, and peaks by the names that torch gives GPUs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_run import tiny_config, tiny_document
from transformers import GPT2Config, LlamaConfig, MambaConfig, MixtralConfig, PretrainedConfig

from maingrad.launch.config.file import structure
from maingrad.launch.config.run import ConfigError
from maingrad.launch.plan.model_flops import _of_hugging_face, flops_per_token, peak_tflops

ATTENTION = 12 * 2 * 24 * 32
BLOCK = 32 * 32 + 2 * 16 * 32 + 32 * 32  # queries, keys and values of two of four heads, output
DENSE = 3 * 64 * 32
HEAD = 256 * 32
EXPERTS = {"num_experts": 4, "top_k": 1, "expert_ffn_dim": 48, "shared_expert_ffn_dim": 16, "moe_layer_freq": 2}


@pytest.mark.parametrize(
    "model, weights",
    [
        ({}, 2 * (BLOCK + DENSE) + HEAD),
        # The embedding is the head's weight, and counts for the head.
        ({"tie_embeddings": True}, 2 * (BLOCK + DENSE) + HEAD),
        # The first of two blocks: a router, one of four experts, and the shared one.
        (EXPERTS, 2 * BLOCK + 4 * 32 + 3 * 48 * 32 + 3 * 16 * 32 + DENSE + HEAD),
    ],
)
def test_flops_of_a_token(tmp_path: Path, model: dict[str, object], weights: int) -> None:
    assert flops_per_token(tiny_config(tmp_path, model=model)) == 6 * weights + ATTENTION


SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def of_hugging_face(folder: Path, config: PretrainedConfig) -> int:
    config.save_pretrained(folder / "model")
    document = {**tiny_document(folder), "model": {"hugging_face": str(folder / "model"), "pretrained": False}}
    return flops_per_token(structure(document))


@pytest.mark.parametrize("tied", [False, True])
def test_flops_of_a_hugging_face_model(tmp_path: Path, tied: bool) -> None:
    """Heads are together twice as wide as the model."""
    weights = 3 * (2 * 64 * 32 + 2 * 32 * 32 + 3 * 48 * 32) + 96 * 32
    found = of_hugging_face(tmp_path, LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    assert found == 6 * weights + 12 * 3 * 24 * 64


def test_heads_are_as_wide_as_the_model_where_nothing_is_said(tmp_path: Path) -> None:
    """Positions are a look-up as well, and GPT-2's head is its embedding. Its matrices lie the other way round."""
    config = GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=3, n_head=4)
    weights = 3 * 12 * 32 * 32 + 96 * 32 + 32 * 32  # positions are counted: they are a weight of two dims
    assert of_hugging_face(tmp_path, config) == 6 * weights + 12 * 3 * 24 * 32


def test_experts_of_hugging_face_are_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which weights of MixtralForCausalLM multiply a token"):
        of_hugging_face(tmp_path, MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2))
    named = LlamaConfig(**SHAPE)
    named.n_routed_experts = 4  # of a model that has a linear layer for each expert
    with pytest.raises(ConfigError, match="which weights of LlamaForCausalLM multiply a token"):
        of_hugging_face(tmp_path, named)


def test_models_of_other_layers_are_not_guessed(tmp_path: Path) -> None:
    """A convolution's weight has three dims."""
    mamba = MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(ConfigError, match="which weights of MambaForCausalLM multiply a token"):
        of_hugging_face(tmp_path, mamba)


def test_a_model_that_names_no_heads_is_not_guessed() -> None:
    named: Any = SimpleNamespace(model=SimpleNamespace(), parameters=lambda: [torch.zeros(2, 2)])
    named.model.config = SimpleNamespace(get_text_config=SimpleNamespace)
    with pytest.raises(ConfigError, match="the configuration of SimpleNamespace has no num_attention_heads"):
        _of_hugging_face(named)


def test_a_model_without_a_head_multiplies_no_embedding() -> None:
    embedding = torch.nn.Embedding(7, 4)
    shape = SimpleNamespace(num_attention_heads=2, hidden_size=4)
    named: Any = SimpleNamespace(blocks=[1, 2, 3], parameters=embedding.parameters, model=SimpleNamespace())
    named.model.config = SimpleNamespace(get_text_config=lambda: shape)
    named.model.get_input_embeddings = lambda: embedding
    for head, looked_up in ((None, 28), (torch.nn.Linear(4, 7), 28), (SimpleNamespace(weight=embedding.weight), 0)):
        named.model.get_output_embeddings = lambda found=head: found
        assert _of_hugging_face(named) == (looked_up, 3 * 4)


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    document = {**tiny_document(tmp_path), "model": {"hugging_face": str(tmp_path / "gone"), "pretrained": False}}
    with pytest.raises(ConfigError, match="gone"):
        flops_per_token(structure(document))


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA H1000", None),
        ("NVIDIA H200X", None),
        ("NVIDIA XH800", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
