"""Models of Hugging Face whose tensors get values part by part."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from tiny_run import tiny_document
from torch import nn

from maingrad.launch import simulate
from maingrad.launch.config.error import ConfigError
from maingrad.launch.config.file import structure
from maingrad.launch.config.model import ModelConfig
from maingrad.launch.config.run import Config
from maingrad.launch.model.deferred import DeferredValues
from maingrad.launch.model.hugging_face import HuggingFaceModel, build_language_model
from maingrad.launch.training.loading import load_model
from maingrad.launch.training.train import train
from maingrad.launch.training.wrapping import wrap

transformers = pytest.importorskip("transformers")

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "tied": ("LlamaConfig", _SIZES | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "qwen3-moe": ("Qwen3MoeConfig", _SIZES | _EXPERTS),
}


def config_of(name: str) -> Any:
    kind, sizes = CONFIGS[name]
    return getattr(transformers, kind)(**sizes)


def build(folder: Path, *, pretrained: bool = False, deferred: bool = False, dtype: Any = "float32") -> Any:
    settings = ModelConfig(hugging_face=str(folder), pretrained=pretrained, param_dtype=dtype)
    found = build_language_model(settings, seed=3, deferred=deferred)
    assert isinstance(found, HuggingFaceModel)
    return found


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are in no state dict among them."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    there, wanted = tensors(found), tensors(expected)
    assert there.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(there[name], tensor, rtol=0, atol=0, msg=name)


def test_values_do_not_depend_on_the_parts(tmp_path: Path):
    for name in CONFIGS:
        config_of(name).save_pretrained(tmp_path / name)
        whole, parts = build(tmp_path / name), build(tmp_path / name, deferred=True)
        assert all(tensor.is_meta for tensor in parts.parameters())
        for block in reversed(parts.blocks):
            parts.values.fill(block.modules())
        parts.values.fill(parts.modules())
        assert_same(parts, whole)
        # Buffers and the spread of weights are those of transformers' own initialisation.
        plain = transformers.AutoModelForCausalLM.from_config(config_of(name))
        for key, buffer in plain.named_buffers():
            torch.testing.assert_close(whole.model.get_buffer(key), buffer, rtol=0, atol=0)
        for key, parameter in plain.named_parameters():
            ours = whole.model.get_parameter(key)
            torch.testing.assert_close(ours.std(), parameter.std(), rtol=0.2, atol=1e-6)
            assert ours.requires_grad
    assert (whole.model.lm_head.weight is whole.model.get_input_embeddings().weight) is False
    tied = build(tmp_path / "tied")
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight


_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
OTHERS: dict[str, dict[str, Any]] = {
    "Gemma3Text": _SIZES | {"head_dim": 8},  # embeddings have a scale
    "GPTNeo": {
        "vocab_size": 256,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["local"], 2]],
    },
    "DeepseekV3": _SIZES | _MOE | _LATENT | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    "Mamba": {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "Bloom": {"vocab_size": 256, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "GptOss": _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.sampled(len(OTHERS))
def test_what_is_not_drawn_is_as_in_transformers(tmp_path: Path, name: str):
    """Buffers, masks and tables among them, and parameters of one value."""
    config = getattr(transformers, f"{name}Config")(**OTHERS[name])
    config.save_pretrained(tmp_path)
    plain, found = transformers.AutoModelForCausalLM.from_config(config), build(tmp_path)
    for key, buffer in plain.named_buffers():
        assert torch.equal(found.model.get_buffer(key), buffer), key
    constants = [key for key, parameter in plain.named_parameters() if parameter.std() == 0]
    assert constants
    for key in constants:
        assert torch.equal(found.model.get_parameter(key), plain.get_parameter(key)), key


class Counting(transformers.LlamaForCausalLM):
    """Has a table of integers, which ``_init_weights`` sets if ``sets`` says so."""

    sets: int | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("table", torch.arange(4), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.sets is not None:
            self.table.fill_(self.sets)


@pytest.mark.parametrize("sets", [None, 0, 3])
@pytest.mark.sampled(3)
def test_integers_that_nobody_sets_are_refused(sets: int | None):
    with torch.device("meta"):
        model = Counting(config_of("llama"))
    model.sets = sets
    values = DeferredValues(model, None, seed=0, device=torch.device("cpu"))
    if sets is None:
        with pytest.raises(ConfigError, match="Counting leaves 'table' without a value in _init_weights"):
            values.fill(model.modules())
        return
    values.fill(model.modules())
    assert model.table.tolist() == [sets] * 4


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "qwen3-moe"])
@pytest.mark.sampled(4)
def test_stored_values_are_those_of_from_pretrained(tmp_path: Path, name: str):
    """In several files, and rounded to bf16. transformers loads experts that are stored one by one, and say so."""
    transformers.AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for dtype in ("float32", "bfloat16"):
        found = build(tmp_path, pretrained=True, dtype=dtype, deferred=True)
        if name == "qwen3-moe":
            assert found.values is None and "transformers converts" in found.whole_because
        else:
            found.values.fill(found.modules())
        expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
        assert_same(found.model, expected)
        assert (found.model.lm_head.weight is found.model.get_input_embeddings().weight) is (name in ("tied", "gpt2"))


def run_config(folder: Path, source: Path, parallel: str, out: str, **model: Any) -> Config:
    sections: dict[str, Any] = {"ddp": {}} if parallel != "fsdp" else {}
    train_section = {"steps": 3, "out_dir": str(folder / out)}
    document = tiny_document(folder, parallel=parallel, train=train_section, **sections)
    document["model"] = {"hugging_face": str(source), **model}
    return structure(document)


@pytest.mark.parametrize("name", ["tied", "qwen3-moe"])
@pytest.mark.sampled(1)
def test_ranks_and_ways_begin_with_the_same_model(tmp_path: Path, name: str):
    """New weights, then those in a folder, which for experts is loaded whole."""
    config_of(name).save_pretrained(tmp_path / "new")
    transformers.AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(tmp_path / "stored")
    for source, pretrained in (("new", False), ("stored", True)):
        losses = []
        for ranks, parallel in ((1, "ddp"), (2, "fsdp"), (3, "fsdp")):
            config = run_config(tmp_path, tmp_path / source, parallel, f"{source}{ranks}", pretrained=pretrained)
            losses.append(simulate(train, ranks, config)[0].losses)
        for others in losses[1:]:
            assert others == pytest.approx(losses[0], rel=1e-5)


def test_documents_are_checked_once_the_model_has_values(tmp_path: Path):
    config_of("llama").save_pretrained(tmp_path / "source")
    document = tiny_document(tmp_path, parallel="fsdp", data={"documents": "mask"}, train={"steps": 3})
    document["model"] = {"hugging_face": str(tmp_path / "source"), "pretrained": False}
    assert len(simulate(train, 2, structure(document))[0].losses) == 3


def import_transformers(config: Config) -> None:
    """A job of its own: imports take seconds, and longer than a job may where many processes share few cores."""
    build_language_model(config.model, seed=0, device=torch.device("meta"))


def peaks(config: Config) -> tuple[float, float]:
    """MiB by which the peak of this process rises while it loads and shards, and of its shards."""

    def status(key: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = status("VmRSS")
    wrapped = wrap(load_model(config, torch.device("cpu"), print), config, torch.device("cpu"))
    shards = sum(parameter.numel() * 4 for parameter in wrapped.model.parameters())
    return status("VmHWM") - before, shards / 2**20


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.sampled(1)
def test_no_rank_holds_the_whole_model(tmp_path: Path, pretrained: bool):
    """Beside its shards a rank holds two copies of the largest unit; the whole model takes 157 MiB."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not reset the peak of a process (/proc/self/clear_refs)")
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 13}
    source = transformers.LlamaConfig(**_SIZES | sizes, torch_dtype="float32")
    source.save_pretrained(tmp_path)
    if pretrained:
        transformers.AutoModelForCausalLM.from_config(source).save_pretrained(tmp_path)
    config = run_config(tmp_path, tmp_path, "fsdp", "run", pretrained=pretrained)
    run_ranks(import_transformers, 2, config, timeout=300.0)
    for peak, shards in run_ranks(peaks, 2, config):
        assert 78 < shards < 79
        assert peak < shards + 50, peak
