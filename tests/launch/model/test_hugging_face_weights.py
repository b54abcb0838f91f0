"""Models of Hugging Face: which values they begin with, and which rank holds them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import tiny_document
from torch import nn

from maingrad.ddp import save_checkpoint
from maingrad.launch import simulate
from maingrad.launch.config.file import structure
from maingrad.launch.config.model import ModelConfig
from maingrad.launch.config.run import Config, ConfigError
from maingrad.launch.model.exporting import export
from maingrad.launch.model.hugging_face import HuggingFaceModel, build_language_model
from maingrad.launch.training.loading import check_model, load_model
from maingrad.launch.training.runtime import current_runtime
from maingrad.launch.training.train import train

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


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are in no state dict among them."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.in_turn
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sampled(4)
def test_stored_values_are_those_of_from_pretrained(tmp_path: Path, name: str):
    """In several files, and rounded to bf16. The placeholder of other ranks has the same tensors, on meta."""
    transformers.AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for dtype in ("float32", "bfloat16"):
        settings = ModelConfig(hugging_face=str(tmp_path), param_dtype=dtype)  # type: ignore[arg-type]
        found = build_language_model(settings, seed=3)
        assert isinstance(found, HuggingFaceModel)
        expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
        there, wanted = tensors(found.model), tensors(expected)
        assert there.keys() == wanted.keys()
        assert all(torch.equal(there[key], tensor) for key, tensor in wanted.items())
        is_tied = found.model.lm_head.weight is found.model.get_input_embeddings().weight
        assert is_tied is (name in ("tied", "gpt2"))
        placeholder = tensors(build_language_model(settings, seed=3, placeholder=True).model)  # type: ignore[arg-type]
        assert all(tensor.is_meta for tensor in placeholder.values())
        shapes = [{key: (each.shape, each.dtype) for key, each in group.items()} for group in (placeholder, wanted)]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_new_values_follow_from_the_seed(tmp_path: Path, name: str):
    config_of(name).save_pretrained(tmp_path)
    settings = ModelConfig(hugging_face=str(tmp_path), pretrained=False)
    models = []
    for seed in (3, 3, 4):
        torch.rand(seed)  # the state of the default generator does not count
        models.append(tensors(build_language_model(settings, seed=seed)))
    assert all(torch.equal(models[0][key], tensor) for key, tensor in models[1].items())
    assert not all(torch.equal(models[0][key], tensor) for key, tensor in models[2].items())


def test_a_folder_out_of_a_checkpoint(tmp_path: Path):
    """In the dtype that is asked for; into an empty folder, and over nothing that is there."""
    source, target = tmp_path / "source", tmp_path / "target"
    config_of("llama").save_pretrained(source)
    model = build_language_model(ModelConfig(hugging_face=str(source), pretrained=False), seed=0)
    extra = {"config": {"model": {"hugging_face": str(source), "trust_remote_code": True}}}
    save_checkpoint(tmp_path / "c", model, extra=extra)
    target.mkdir()
    export(tmp_path / "c", target, dtype=torch.bfloat16)
    stored = load_file(target / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        name.removeprefix("model."): torch.bfloat16 for name, _ in model.named_parameters()
    }
    export(tmp_path / "c", tmp_path / "own.safetensors", dtype=torch.float16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "own.safetensors").values()} == {torch.float16}
    (tmp_path / "file").write_text("mine")
    for there in (target, tmp_path / "file"):
        with pytest.raises(ValueError, match="is there already; name a folder that is empty or new"):
            export(tmp_path / "c", there)
    assert (tmp_path / "file").read_text() == "mine"
    (source / "config.json").unlink()
    with pytest.raises(ValueError, match=r"the model\.hugging_face of .*, has no config\.json \(any more\)"):
        export(tmp_path / "c", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "extra", [None, "a text", ["config"], {"config": ["model"]}, {"config": {"model": {}}}], ids=str
)
def test_a_checkpoint_of_another_program_makes_no_folder(tmp_path: Path, extra: Any):
    save_checkpoint(tmp_path / "c", nn.Linear(2, 2), extra=extra)
    with pytest.raises(ValueError, match=r"c' is not of a run with model\.hugging_face; name a file"):
        export(tmp_path / "c", tmp_path / "target")
    export(tmp_path / "c", tmp_path / "target.safetensors")
    assert set(load_file(tmp_path / "target.safetensors")) == {"weight", "bias"}


def run_config(folder: Path, source: Path, parallel: str, out: str, **model: Any) -> Config:
    sections: dict[str, Any] = {"ddp": {}} if parallel != "fsdp" else {}
    train_section = {"steps": 3, "out_dir": str(folder / out)}
    document = tiny_document(folder, parallel=parallel, train=train_section, **sections)
    document["model"] = {"hugging_face": str(source), **model}
    return structure(document)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["tied", "qwen3-moe"])
@pytest.mark.sampled(1)
def test_ranks_and_ways_begin_with_the_same_model(tmp_path: Path, name: str):
    """New weights, then those in a folder."""
    config_of(name).save_pretrained(tmp_path / "new")
    transformers.AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(tmp_path / "stored")
    for source, pretrained in (("new", False), ("stored", True)):
        losses = []
        for ranks, parallel in ((1, "ddp"), (2, "fsdp"), (3, "fsdp")):
            config = run_config(tmp_path, tmp_path / source, parallel, f"{source}{ranks}", pretrained=pretrained)
            losses.append(simulate(train, ranks, config)[0].losses)
        for others in losses[1:]:
            assert others == pytest.approx(losses[0], rel=1e-5)


def test_a_run_does_not_write_over_the_model_that_it_begins_with(tmp_path: Path):
    source = tmp_path / "run" / "hugging_face"
    config_of("llama").save_pretrained(source)
    (tmp_path / "link").symlink_to(source)
    for name in (source, tmp_path / "link"):
        config = run_config(tmp_path, name, "ddp", "run", pretrained=False)
        model = build_language_model(config.model, seed=0, device=torch.device("meta"))
        with pytest.raises(ConfigError, match=r"model\.hugging_face = .*would be overwritten by the trained model"):
            check_model(config, model)
        check_model(run_config(tmp_path, name, "ddp", "run", pretrained=False, save_hugging_face=False), model)
        check_model(run_config(tmp_path, name, "ddp", "other", pretrained=False), model)


@pytest.mark.in_turn
def test_documents_are_checked_once_the_model_has_values(tmp_path: Path):
    config_of("llama").save_pretrained(tmp_path / "source")
    document = tiny_document(tmp_path, parallel="fsdp", data={"documents": "mask"}, train={"steps": 3})
    document["model"] = {"hugging_face": str(tmp_path / "source"), "pretrained": False}
    assert len(simulate(train, 2, structure(document))[0].losses) == 3


def where_tensors_are(config: Config) -> set[str]:
    model = load_model(config, current_runtime("cpu", config.mesh))
    return {tensor.device.type for tensor in tensors(model).values()}


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sampled(2)
def test_the_first_rank_alone_loads_a_model_that_is_sharded(tmp_path: Path, name: str, pretrained: bool):
    transformers.AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(tmp_path)
    config = run_config(tmp_path, tmp_path, "fsdp", "run", pretrained=pretrained)
    assert simulate(where_tensors_are, 3, config) == [{"cpu"}, {"meta"}, {"meta"}]
    replicated = run_config(tmp_path, tmp_path, "zero1", "run", pretrained=pretrained)
    assert simulate(where_tensors_are, 2, replicated) == [{"cpu"}, {"cpu"}]
