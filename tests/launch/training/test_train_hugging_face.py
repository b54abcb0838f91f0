"""Models of Hugging Face in ``maingrad train``: trained from ``config.json``, saved, loaded again, continued."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_run import tiny_config
from torch import nn

from maingrad.ddp import DistributedDataParallel, save_checkpoint
from maingrad.launch import simulate
from maingrad.launch.cli import main
from maingrad.launch.config.run import Config, ConfigError
from maingrad.launch.data.batches import load_corpus
from maingrad.launch.data.sequences import Sampler
from maingrad.launch.model.hugging_face import (
    HuggingFaceModel,
    build_language_model,
    check_documents,
    save_hugging_face,
)
from maingrad.launch.plan.plan import plan_run
from maingrad.launch.training import train as loop
from maingrad.launch.training.loading import check_model
from maingrad.launch.training.train import train
from maingrad.te_integration import Float8CurrentScaling, autocast

transformers = pytest.importorskip("transformers")

_COMMON = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _COMMON),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        _COMMON | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
@pytest.mark.parametrize("recompute", ["blocks", "attention", "operators"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(2)
def test_recomputing_changes_no_bit(name: str, recompute: str, parallel: str, tmp_path: Path):
    source = folder_of(name, tmp_path / "source")
    runs = [
        train(config_for(tmp_path, source, parallel=parallel, train={"steps": 3, "recompute": how})).losses
        for how in ("none", recompute)
    ]
    assert runs[0] == runs[1]


def folder_of(name: str, path: Path, *, layers: int = 2) -> Path:
    """A folder with ``config.json`` alone."""
    kind, sizes = MODELS[name]
    sizes = sizes | {"n_layer" if "n_layer" in sizes else "num_hidden_layers": layers}
    getattr(transformers, kind)(**sizes, architectures=[kind.replace("Config", "ForCausalLM")]).save_pretrained(path)
    return path


def config_for(tmp_path: Path, source: Path, *, model: dict[str, Any] | None = None, **sections: Any) -> Config:
    from tiny_run import tiny_document

    from maingrad.launch.config.file import structure

    document = tiny_document(tmp_path, **sections)
    document["model"] = {"hugging_face": str(source), "pretrained": False} | (model or {})
    return structure(document)


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.in_turn
@pytest.mark.parametrize(("name", "parallel"), [("llama", "zero1"), ("qwen3-moe", "fsdp"), ("gpt2", "fsdp")])
@pytest.mark.sampled(1)
def test_trains_on_two_ranks_and_is_saved_for_transformers(tmp_path: Path, name: str, parallel: str):
    config = config_for(tmp_path, folder_of(name, tmp_path / "source"), parallel=parallel)
    result, _ = simulate(train, 2, config)
    assert result.losses[-1] < result.losses[0] - 0.1
    tokens = torch.arange(24).view(1, 24) + 60
    saved = tmp_path / "run" / "hugging_face"
    assert {path.suffix for path in saved.iterdir()} >= {".json", ".safetensors"}
    # One process with whole parameters trains the same model.
    alone = train(config_for(tmp_path, tmp_path / "source", train={"out_dir": str(tmp_path / "alone")}))
    alone.model.eval()
    with torch.no_grad():
        expected = alone.model.model(tokens).logits
    torch.testing.assert_close(logits_of(tmp_path / "alone" / "hugging_face", tokens), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits_of(saved, tokens), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.in_turn
def test_pretrained_weights_begin_with_their_own_loss(tmp_path: Path):
    source = folder_of("llama", tmp_path / "source")
    train(config_for(tmp_path, source))
    trained = tmp_path / "run" / "hugging_face"
    (tmp_path / "run" / "hugging_face").rename(tmp_path / "trained")
    trained = tmp_path / "trained"
    config = config_for(tmp_path, trained, model={"pretrained": True})
    corpus = load_corpus(config.data, sequence_length=24)
    batch = Sampler(corpus.bodies, config.data, config.train).batch(0, slice(0, 24))
    expected = F.cross_entropy(logits_of(trained, batch.inputs).flatten(0, 1), batch.targets.flatten())
    assert train(config).losses[0] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.in_turn
@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
@pytest.mark.sampled(1)
def test_a_checkpoint_becomes_a_folder(tmp_path: Path, parallel: str, capsys: pytest.CaptureFixture[str]):
    """Of the last step: the folder that the run has written. Of an earlier one: what the model was then."""
    source = tmp_path / "source"
    transformers.LlamaConfig(**_COMMON, tie_word_embeddings=True).save_pretrained(source)
    transformers.GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=7).save_pretrained(source)
    for name in ("tokenizer_config.json", "vocab.txt", "spiece.model"):
        (source / name).write_text(name)
    settings = {"save_every": 3, "steps": 6}
    simulate(train, 2, config_for(tmp_path, tmp_path / "source", parallel=parallel, train=settings))
    checkpoints = tmp_path / "run" / "checkpoints"
    tokens = torch.arange(24).view(1, 24)
    for step in (3, 6):
        assert main(["export", str(checkpoints / f"step-{step:08d}"), str(tmp_path / str(step))]) == 0
    trained = logits_of(tmp_path / "run" / "hugging_face", tokens)
    assert torch.equal(logits_of(tmp_path / "6", tokens), trained)
    assert not torch.equal(logits_of(tmp_path / "3", tokens), trained)
    for folder in (tmp_path / "run" / "hugging_face", tmp_path / "3"):
        generation = transformers.GenerationConfig.from_pretrained(folder)
        assert (generation.temperature, generation.eos_token_id) == (0.7, 7)
        assert all(
            (folder / name).read_text() == name for name in ("tokenizer_config.json", "vocab.txt", "spiece.model")
        )
    assert main(["export", str(checkpoints / "step-00000006"), str(tmp_path / "3")]) == 2
    assert "name a folder that is empty or new" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_becomes_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(tiny_config(tmp_path, train={"steps": 3, "save_every": 3}))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    assert main(["export", str(checkpoint), str(tmp_path / "folder")]) == 2
    assert "is not of a run with model.hugging_face" in capsys.readouterr().err
    assert main(["export", str(checkpoint), str(tmp_path / "weights.safetensors")]) == 0
    for extra in (["notes"], None, {}, {"config": 3}, {"config": {"model": "own"}}):  # of a program of somebody else's
        save_checkpoint(tmp_path / "other", nn.Linear(2, 2), extra=extra)
        assert main(["export", str(tmp_path / "other"), str(tmp_path / "folder")]) == 2
        assert "is not of a run with model.hugging_face" in capsys.readouterr().err


@pytest.mark.in_turn
def test_bf16_parameters_and_tied_embeddings(tmp_path: Path):
    source = tmp_path / "source"
    transformers.LlamaConfig(**_COMMON, tie_word_embeddings=True).save_pretrained(source)
    config = config_for(tmp_path, source, model={"param_dtype": "bfloat16", "attention": "eager"})
    result = train(config)
    tied = result.model.model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert tied.config._attn_implementation == "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hugging_face")
    assert model.dtype is torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tied.lm_head.weight)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(1)
def test_plan_on_meta(tmp_path: Path, name: str):
    source = folder_of(name, tmp_path / "source")
    config = config_for(tmp_path, source)
    real = build_language_model(config.model, seed=0)
    assert isinstance(real, HuggingFaceModel)
    assert plan_run(config, 4).parameters.total == sum(parameter.numel() for parameter in real.parameters())
    deep = config_for(tmp_path, folder_of(name, tmp_path / "deep", layers=4), parallel="fsdp")
    plan = plan_run(deep, 4)
    real = build_language_model(deep.model, seed=0)
    names = {id(module): path for path, module in real.named_modules()}
    assert [unit.name for unit in plan.units] == ["", *(names[id(layer)] for layer in real.blocks)]
    assert plan.peak_params == plan.units[0].param_nbytes + 2 * plan.units[1].param_nbytes, "the root and two layers"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.sampled(1)
def test_a_recipe_leaves_the_head_as_it_is(tmp_path: Path, tied: bool, compiled: bool):
    """Under a recipe the layers' outputs change, and the head multiplies what it gets as without one."""
    transformers.LlamaConfig(**_COMMON, tie_word_embeddings=tied).save_pretrained(tmp_path / "source")
    config = config_for(tmp_path, tmp_path / "source", model={"param_dtype": "bfloat16"})
    model = build_language_model(config.model, seed=0)
    head, down = model.model.lm_head, model.blocks[0].mlp.down_proj
    if compiled:
        head.compile(fullgraph=True, backend="aot_eager")
        down.compile(fullgraph=True, backend="aot_eager")
    uses: dict[str, Any] = {}
    head.register_forward_hook(lambda _, args, out: uses.update(head=(args[0], out)))
    down.register_forward_hook(lambda _, args, out: uses.update(down=(args[0], out)))
    tokens = torch.arange(24).view(2, 12)
    wrapped = DistributedDataParallel(model)
    with autocast(recipe=Float8CurrentScaling()):
        loss = wrapped(tokens, tokens)
    (x, y), (x_down, y_down) = uses["head"], uses["down"]
    assert torch.equal(y, F.linear(x, head.weight))
    assert not torch.equal(y_down, F.linear(x_down, down.weight))
    x.retain_grad()
    y.retain_grad()
    loss.backward()
    assert x.grad is not None and y.grad is not None
    assert torch.equal(x.grad, y.grad @ head.weight)
    if not tied:  # the weight's gradient has no other part
        expected = y.grad.flatten(0, 1).float().T @ x.flatten(0, 1).float()
        torch.testing.assert_close(head.weight.main_grad, expected, rtol=1e-5, atol=1e-7)


def test_documents_of_a_packed_row_equal_documents_alone(tmp_path: Path):
    """A row of two documents has the logits of each, for Hugging Face's models and for the GPT."""
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(10), torch.arange(14)]).repeat(2, 1)
    sources = [config_for(tmp_path, folder_of(name, tmp_path / name)).model for name in MODELS]
    for settings in (*sources, tiny_config(tmp_path).model):
        model = build_language_model(settings, seed=0).eval()
        with torch.no_grad():
            packed = model(tokens, positions=positions)
            alone = torch.cat([model(tokens[:, :10]), model(tokens[:, 10:])], dim=1)
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_the_check_of_documents_leaves_the_mode(tmp_path: Path, training: bool):
    config = config_for(tmp_path, folder_of("llama", tmp_path / "source", layers=1))
    model = build_language_model(config.model, seed=0).train(training)
    check_documents(model, torch.device("cpu"))
    assert {module.training for module in model.modules()} == {training}


@pytest.mark.in_turn
@pytest.mark.parametrize("documents", ["join", "mask", "pad"])
def test_a_run_with_masks_checks_that_the_model_sees_documents(
    tmp_path: Path, documents: str, monkeypatch: pytest.MonkeyPatch
):
    """Before its first step; and the model is written behind the last one only if it is to be."""
    checked: list[Any] = []
    monkeypatch.setattr(loop, "check_documents", lambda model, device: checked.append(type(model)))
    source = folder_of("llama", tmp_path / "source", layers=1)
    settings = {"steps": 1, "global_batch_size": 4, "eval_sequences": 1, "num_microbatches": 1}
    data = {"documents": documents, "order": "epochs"}
    model = {"save_hugging_face": documents == "join"}
    train(config_for(tmp_path, source, model=model, train=settings, data=data, optimizer={"warmup_steps": 0}))
    assert checked == ([HuggingFaceModel] if documents == "mask" else [])
    assert (tmp_path / "run" / "hugging_face").exists() is (documents == "join")


def test_a_model_that_names_no_longest_sequence_takes_any(tmp_path: Path):
    transformers.BloomConfig(vocab_size=256, hidden_size=16, n_layer=1, n_head=2).save_pretrained(tmp_path / "source")
    config = config_for(tmp_path, tmp_path / "source", train={"sequence_length": 10**6})
    check_model(config, build_language_model(config.model, seed=0, device=torch.device("meta")))


def test_mistakes(tmp_path: Path):
    source = folder_of("llama", tmp_path / "source")
    with pytest.raises(ConfigError, match=r"model\.dim = 64: has no effect beside model\.hugging_face"):
        config_for(tmp_path, source, model={"dim": 64})
    with pytest.raises(ConfigError, match=r"model\.attention = 'eager': has no effect without model\.hugging_face"):
        tiny_config(tmp_path, model={"attention": "eager"})
    with pytest.raises(ConfigError, match=r"model\.hugging_face = .*model\.pretrained = false draws"):
        train(config_for(tmp_path, source, model={"pretrained": True}))
    with pytest.raises(ConfigError, match=r"train\.sequence_length = 65: must be at most max_position_embeddings = 64"):
        train(config_for(tmp_path, source, train={"sequence_length": 65}))
    fits = config_for(tmp_path, source, train={"sequence_length": 64})
    check_model(fits, build_language_model(fits.model, seed=0, device=torch.device("meta")))


class WithAuxiliary(nn.Module):
    """A model in transformers' form, with ``config`` and an auxiliary loss of 2."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.layers = config, nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        logits = F.one_hot(input_ids, 8).float()
        return SimpleNamespace(logits=logits, aux_loss=self.layers[0].bias.sum() * 0 + 2.0)


@pytest.mark.parametrize(
    ("whole", "of_text", "weight"),
    [
        ({"router_aux_loss_coef": 0.25}, {}, 0.25),
        ({"aux_loss_coef": 0.5}, {}, 0.5),
        ({"router_aux_loss_coef": None}, {"aux_loss_coef": 0.125}, 0.125),
        ({}, {}, 0.0),
    ],
)
def test_the_auxiliary_loss_has_the_weight_that_config_json_names(whole: Any, of_text: Any, weight: float):
    text = SimpleNamespace(**of_text)
    model = HuggingFaceModel(WithAuxiliary(SimpleNamespace(**whole, get_text_config=lambda: text)))
    assert model.context_length is None, "config.json says none"
    text.max_position_embeddings = 7
    assert model.context_length == 7
    tokens = torch.arange(8).view(2, 4)
    trained, evaluated = (model.train(mode)(tokens, tokens).item() for mode in (True, False))
    assert trained - evaluated == pytest.approx(2 * weight, abs=1e-6)


def test_a_model_without_layers_in_a_list_is_refused():
    with pytest.raises(ConfigError, match=r"Linear has no nn\.ModuleList of decoder layers"):
        HuggingFaceModel(nn.Linear(2, 2))


def test_a_folder_that_would_be_overwritten_is_refused_only_where_it_is(tmp_path: Path):
    source = folder_of("llama", tmp_path / "run" / "hugging_face")
    for save, out, message in ((True, "run", "would be overwritten"), (False, "run", None), (True, "other", None)):
        settings = {"out_dir": str(tmp_path / out)}
        config = config_for(tmp_path, source, model={"save_hugging_face": save}, train=settings)
        with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
            check_model(config, build_language_model(config.model, seed=0, device=torch.device("meta")))


def test_a_folder_that_is_none_and_files_that_are_missing_are_named(tmp_path: Path):
    config = config_for(tmp_path, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"nowhere': there is no such folder"):
        build_language_model(config.model, seed=0)
    (tmp_path / "empty").mkdir()
    for pretrained in (True, False):
        config = config_for(tmp_path, tmp_path / "empty", model={"pretrained": pretrained})
        with pytest.raises(ConfigError) as raised:
            build_language_model(config.model, seed=0)
        assert "empty': " in str(raised.value)
        assert ("model.pretrained = false draws new weights" in str(raised.value)) is pretrained


def test_weights_that_are_missing_are_not_written(tmp_path: Path):
    source, target = folder_of("llama", tmp_path / "source", layers=1), tmp_path / "target"
    model = build_language_model(config_for(tmp_path, source).model, seed=0)
    weights = {name: tensor for name, tensor in model.state_dict().items() if "mlp.down_proj" not in name}
    with pytest.raises(ValueError, match=r"no weights of '.*mlp\.down_proj\.weight' are there to write"):
        save_hugging_face(weights, str(source), target, print)
    assert not target.exists()
