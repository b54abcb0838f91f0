"""What a model of Hugging Face is made of, and what is refused while it is made."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.launch.config.model import ModelConfig
from maingrad.launch.config.run import ConfigError
from maingrad.launch.model import hugging_face
from maingrad.launch.model.hugging_face import HuggingFaceModel, build_language_model, check_documents
from maingrad.launch.model.hugging_face_folder import copy_tokenizer
from maingrad.te_integration.dense.linear import LinearModule

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama with values."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def build(folder: Path, **settings: Any) -> HuggingFaceModel:
    made = build_language_model(ModelConfig(hugging_face=str(folder), **settings), seed=0)
    assert isinstance(made, HuggingFaceModel)
    return made


@pytest.mark.parametrize("pretrained", [True, False])
def test_it_trains_whether_it_is_loaded_or_drawn(folder: Path, pretrained: bool):
    """transformers loads models in evaluation, where dropout does nothing."""
    assert all(module.training for module in build(folder, pretrained=pretrained).modules())


@pytest.mark.parametrize("fuse", [True, False])
def test_layers_are_converted_where_weight_gradients_are_fused(folder: Path, fuse: bool):
    made = build(folder, fuse_wgrad_accumulation=fuse)
    linears = [module for module in made.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 8 and {isinstance(each, LinearModule) for each in linears} == {fuse}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_is_the_one_that_was_asked_for(folder: Path, attention: str):
    for pretrained in (True, False):
        assert build(folder, attention=attention, pretrained=pretrained).model.config._attn_implementation == attention
    settings = ModelConfig(hugging_face=str(folder), attention=attention)
    placeholder: Any = build_language_model(settings, seed=0, placeholder=True)
    assert placeholder.model.config._attn_implementation == attention


def test_the_head_alone_is_never_quantised(folder: Path):
    linears: dict[str, Any] = {n: each for n, each in build(folder).named_modules() if isinstance(each, nn.Linear)}
    assert len(linears) == 8
    assert [name for name, each in linears.items() if each.ignores_recipes] == ["model.lm_head"]


def test_a_loss_that_cannot_be_fused_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    made = hugging_face._build

    def with_a_loss_of_its_own(*args: Any, **options: Any) -> Any:
        model = made(*args, **options)
        model.loss_function = lambda logits, labels, **others: logits.mean()
        return model

    monkeypatch.setattr(hugging_face, "_build", with_a_loss_of_its_own)
    with pytest.raises(ConfigError, match=r"model\.fused_loss = true: .*loss_function is"):
        build(folder, fused_loss=True)
    build(folder)


def test_a_fused_loss_makes_no_logits(folder: Path):
    """In training and in validation; without targets they are wanted."""
    model, made = build(folder, fused_loss=True), list[Any]()
    model.model.lm_head.register_forward_hook(
        lambda module, args, output: made.append((type(output).__name__, tuple(output.shape)))
    )
    tokens = torch.arange(24).view(2, 12)
    model(tokens, tokens)
    model.eval()(tokens, tokens)
    model(tokens)
    assert made == [*[("DeferredLogits", (2, 12, 96)), ("Tensor", ())] * 2, ("Tensor", (2, 12, 96))], (
        "the loss, and logits"
    )


@pytest.mark.parametrize(
    ("error", "trusts", "passes"),
    [
        (KeyError("x"), False, False),
        (AttributeError("x"), False, False),
        (AttributeError("x"), True, True),
        (RuntimeError("x"), False, True),
        (torch.OutOfMemoryError("x"), False, True),
    ],
)
def test_errors_of_the_device_and_of_a_trusted_folder_are_their_own(
    folder: Path, error: Exception, trusts: bool, passes: bool, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(hugging_face, "_build", fail)
    with pytest.raises(type(error) if passes else ConfigError, match="x"):
        build(folder, trust_remote_code=trusts)


def test_missing_weights_are_a_mistake_on_each_rank(folder: Path):
    """Those that get the first rank's values would wait for it; a plan needs no weights."""
    (folder / "model.safetensors").unlink()
    settings = ModelConfig(hugging_face=str(folder))
    for placeholder in (True, False):
        with pytest.raises(ConfigError, match="has no safetensors"):
            build_language_model(settings, seed=0, placeholder=placeholder)
    assert build_language_model(settings, seed=0, device=torch.device("meta")).vocab_size == 96


def test_the_placeholder_of_other_ranks_knows_what_stays_in_fp32(tmp_path: Path):
    """The router, as the class says."""
    sizes = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "n_group": 1}
    sizes |= {"first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    sizes |= {"qk_nope_head_dim": 4, "v_head_dim": 4, "topk_group": 1}
    transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**SIZES, **sizes)).save_pretrained(tmp_path)
    settings = ModelConfig(hugging_face=str(tmp_path), param_dtype="bfloat16")
    made = [build_language_model(settings, seed=0, placeholder=each) for each in (True, False)]
    found, expected = ({name: param.dtype for name, param in model.named_parameters()} for model in made)
    assert found == expected and set(expected.values()) == {torch.bfloat16, torch.float32}
    (tmp_path / "model.safetensors").unlink()
    drawn = ModelConfig(hugging_face=str(tmp_path), param_dtype="bfloat16", pretrained=False)
    placeholder = build_language_model(drawn, seed=0, placeholder=True)
    assert all(param.is_meta for param in placeholder.parameters()), "new weights need no files"


def test_the_placeholder_knows_what_stays_in_fp32_under_any_dtype(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"mlp"})
    settings = ModelConfig(hugging_face=str(folder), param_dtype="bfloat16")
    made = [build_language_model(settings, seed=0, placeholder=each) for each in (True, False)]
    found, expected = ({name: param.dtype for name, param in model.named_parameters()} for model in made)
    assert found == expected and {name for name in expected if expected[name] is torch.float32} == {
        name for name in expected if ".mlp." in name
    }


# ---- Documents. ----


class Running(nn.Module):
    """A model in transformers' form, whose logits depend on all tokens before."""

    def __init__(self, restarts: bool) -> None:
        super().__init__()
        self.layers, self.restarts = nn.ModuleList([nn.Linear(1, 1)]), restarts
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())

    def get_input_embeddings(self) -> nn.Embedding:
        return nn.Embedding(8, 2)

    def forward(self, input_ids: Tensor, position_ids: Tensor, **others: Any) -> Any:
        weights = (input_ids + 1.0) * (1 + torch.arange(8))  # which depend on the order too
        summed = weights.cumsum(1)
        before = summed.gather(1, torch.arange(8) - position_ids) - weights.gather(1, torch.arange(8) - position_ids)
        return SimpleNamespace(logits=(summed - before if self.restarts else summed)[..., None])


def test_a_model_that_does_not_see_where_documents_begin_is_refused():
    check_documents(HuggingFaceModel(Running(restarts=True)), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r'data\.documents = "mask": .* set model\.attention = "sdpa"'):
        check_documents(HuggingFaceModel(Running(restarts=False)), torch.device("cpu"))


def test_a_vocabulary_may_be_smaller_than_the_rows_of_the_check(tmp_path: Path):
    transformers.LlamaConfig(**SIZES | {"vocab_size": 5}).save_pretrained(tmp_path)
    check_documents(build(tmp_path, pretrained=False), torch.device("cpu"))


@pytest.mark.parametrize("training", [True, False])
def test_the_check_leaves_the_mode_of_the_model(folder: Path, training: bool):
    model = build(folder).train(training)
    check_documents(model, torch.device("cpu"))
    assert all(module.training is training for module in model.modules())


def test_only_rows_that_end_with_padding_have_a_mask():
    given: list[Any] = []

    class Asked(Running):
        def forward(self, input_ids: Tensor, **others: Any) -> Any:
            given.append(others["attention_mask"])
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 8), aux_loss=torch.tensor(2.0))

    tokens, targets = torch.zeros(1, 3, dtype=torch.long), torch.tensor([[1, 2, -100]])
    for pads in (False, True):
        model = HuggingFaceModel(Asked(restarts=True), pads=pads)
        model(tokens, targets)
        model(tokens)
    assert given[:2] == [None, None] and given[2].tolist() == [[1, 1, 0]] and given[3] is None


@pytest.mark.parametrize(
    ("own", "text", "weight"),
    [
        ({"router_aux_loss_coef": 0.5}, {"router_aux_loss_coef": 0.25}, 0.5),
        ({"router_aux_loss_coef": 0.0}, {"router_aux_loss_coef": 0.25}, 0.0),
        ({}, {"router_aux_loss_coef": 0.25}, 0.25),
        ({}, {"aux_loss_coef": 0.125}, 0.125),
        ({"aux_loss_coef": 0.5, "router_aux_loss_coef": None}, {}, 0.5),
        ({}, {}, 0.0),
    ],
)
def test_an_auxiliary_loss_counts_as_the_configuration_says(own: dict[str, Any], text: dict[str, Any], weight: float):
    """Of the whole model, or else of its part for text; in training alone."""

    class Balanced(Running):
        def forward(self, input_ids: Tensor, **others: Any) -> Any:
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 8), aux_loss=torch.tensor(2.0))

    made = Balanced(restarts=True)
    made.config = SimpleNamespace(**own, get_text_config=lambda: SimpleNamespace(**text))
    model, tokens = HuggingFaceModel(made), torch.zeros(1, 3, dtype=torch.long)
    loss = model.train()(tokens, tokens) - model.eval()(tokens, tokens)
    assert float(loss) == pytest.approx(2.0 * weight)


def test_dropout_does_not_count_in_the_check(tmp_path: Path):
    config = transformers.GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5)
    config.save_pretrained(tmp_path)
    check_documents(build(tmp_path, pretrained=False), torch.device("cpu"))


def test_compiled_blocks_stay_compiled_behind_the_check(folder: Path):
    model = build(folder)
    calls: list[Any] = []
    compiled: list[Any] = [model.blocks[0], model.model.lm_head]
    for module in compiled:
        module._compiled_call_impl = lambda *args, **options: calls.append(args)  # as ``compile`` sets it
    before = [module._compiled_call_impl for module in compiled]
    check_documents(model, torch.device("cpu"))
    assert calls == [] and [module._compiled_call_impl for module in compiled] == before


# ---- Tokenizers. ----


def test_each_file_of_a_tokenizer_is_copied(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "target"
    for each in (source, target):
        each.mkdir()
    names = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"}
    names |= {"added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "vocab.txt"}
    names |= {"merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json"}
    for name in (*names, "README.md", "model.safetensors", "config.json"):
        (source / name).write_text(name)
    (source / "tokenizer").mkdir()
    assert copy_tokenizer(source, target) == []
    assert {path.name for path in target.iterdir()} == names
    assert all(path.read_text() == path.name for path in target.iterdir())
