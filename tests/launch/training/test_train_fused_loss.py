"""``model.fused_loss``: the GPT and models of Hugging Face in ``maingrad train``, without logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_run import tiny_config, tiny_document

from maingrad.launch import simulate
from maingrad.launch.config.file import structure
from maingrad.launch.config.model import ModelConfig
from maingrad.launch.config.run import ConfigError
from maingrad.launch.model.gpt import build_model
from maingrad.launch.training.train import train

EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 32}
GPTS: dict[str, dict[str, Any]] = {"untied": {}, "tied": {"tie_embeddings": True}, "experts": EXPERTS}


@pytest.mark.in_turn
@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("gpt", GPTS)
@pytest.mark.sampled(3)
def test_the_gpts_losses_are_those_of_logits(gpt: str, parallel: str, tmp_path: Path) -> None:
    """Training and validation losses, to rounding that AdamW carries on over six steps."""
    expected, seen = (
        simulate(lambda fused=fused: result_of(tmp_path, parallel, GPTS[gpt] | {"fused_loss": fused}), 2)[0]
        for fused in (False, True)
    )
    assert seen == pytest.approx(expected, rel=1e-4)


def result_of(folder: Path, parallel: str, model: dict[str, Any]) -> list[float]:
    result = train(tiny_config(folder, parallel=parallel, model=model, train={"steps": 4}))
    assert result.validation_loss is not None
    return [*result.losses, result.validation_loss]


def test_targets_that_do_not_count() -> None:
    sizes = {"dim": 32, "num_layers": 1, "ffn_dim": 32, "context_length": 16}
    plain, model = (build_model(ModelConfig(**sizes, fused_loss=fused), seed=0) for fused in (False, True))
    assert list(plain.state_dict()) == list(model.state_dict())
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[:, 9:] = -100
    torch.testing.assert_close(model(tokens, targets), plain(tokens, targets))
    assert model(tokens, torch.full_like(targets, -100)).item() == 0.0
    assert torch.equal(model(tokens), plain(tokens))


@pytest.mark.in_turn
@pytest.mark.parametrize("documents", ["join", "mask"])
@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen3MoeConfig"])
@pytest.mark.sampled(2)
def test_a_model_of_hugging_face(kind: str, documents: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if kind == "Qwen3MoeConfig":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    architecture = kind.replace("Config", "ForCausalLM")
    getattr(transformers, kind)(**sizes, architectures=[architecture]).save_pretrained(tmp_path / "source")
    found = []
    for fused in (False, True):
        document = tiny_document(tmp_path, train={"steps": 3, "eval_every": 3}, data={"documents": documents})
        model = {"hugging_face": str(tmp_path / "source"), "pretrained": False, "fused_loss": fused}
        if documents == "mask":
            model["attention"] = "sdpa"
        result = train(structure(document | {"model": model}))
        found.append([*result.losses, result.validation_loss])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hugging_face") is not None


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.fused_loss = True: has no effect on a head that delays"):
        tiny_config(tmp_path, model={"fused_loss": True, "delay_wgrad_layers": 1})
    given = {"hugging_face": "folder", "fused_loss": True, "fuse_wgrad_accumulation": False}
    with pytest.raises(ConfigError, match=r"model\.fused_loss = True: needs model\.fuse_wgrad_accumulation"):
        structure(tiny_document(tmp_path) | {"model": given})
