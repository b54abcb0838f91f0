"""Routers and experts leave out padding: a document has one loss and one gradient, whatever the length of its row."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import tiny_config, tiny_document
from torch import Tensor, nn

from maingrad.launch.config.file import structure
from maingrad.launch.config.run import ConfigError, ModelConfig
from maingrad.launch.data.indexed import write_indexed
from maingrad.launch.model.gpt import GPT, build_model
from maingrad.launch.model.hugging_face import HuggingFaceModel, build_language_model
from maingrad.launch.training.loading import check_model
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import train
from maingrad.te_integration import GroupedMLP

DOCUMENT = torch.randint(1, 90, (13,), generator=torch.Generator().manual_seed(3))
DOCUMENT[-1] = 0  # a token as others are
EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 24}
SHAPE = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "context_length": 96}


def gpt(**changes: Any) -> GPT:
    """Weights are large, so that the router prefers some experts."""
    losses = {"aux_loss_coefficient": 0.5, "router_z_loss_coefficient": 0.1, "init_std": 0.2}
    settings = SHAPE | EXPERTS | losses | {"fuse_wgrad_accumulation": False} | changes
    return build_model(ModelConfig(**settings), seed=0)


def row_of(width: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [1, width]: the document, and padding."""
    inputs, targets = torch.zeros(1, width, dtype=torch.long), torch.full((1, width), -100)
    inputs[0, :12], targets[0, :12] = DOCUMENT[:-1], DOCUMENT[1:]
    return inputs, targets


def loss_and_gradients(model: nn.Module, width: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    loss: Tensor = model(*row_of(width))
    loss.backward()
    return loss.detach(), {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_equal_for_all_rows(model: nn.Module, widths: tuple[int, int]) -> None:
    (loss, gradients), (padded_loss, padded) = (loss_and_gradients(model, width) for width in widths)
    torch.testing.assert_close(padded_loss, loss, rtol=1e-5, atol=0.0)
    for name, gradient in gradients.items():
        if gradient is not None:
            difference = (padded[name] - gradient).norm()
            assert difference <= 1e-5 * gradient.norm() + 1e-9, f"{name}: off by {difference / gradient.norm():.1e}"


@pytest.mark.parametrize(
    "changes", [{}, {"single_grouped_weight": False}, {"shared_expert_ffn_dim": 16, "moe_layer_freq": 2}], ids=str
)
def test_a_document_in_rows_of_12_and_96(changes: dict[str, Any]):
    assert_equal_for_all_rows(gpt(**changes), (12, 96))


@pytest.mark.in_turn
def test_compiled_blocks_leave_out_padding():
    model = gpt()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="eager")
    assert_equal_for_all_rows(model, (12, 96))


def test_experts_compute_no_row_of_padding():
    model, rows = gpt(), []
    for module in model.modules():
        if isinstance(module, GroupedMLP):
            module.register_forward_pre_hook(lambda _, inputs: rows.append(int(inputs[1].sum())))
    model(*row_of(96))
    model.eval()(*row_of(96))
    assert rows == [2 * 12] * 4, "twelve tokens, two experts each, two blocks, in training and in validation"
    assert model.train()(*row_of(96)).isfinite() and model.loss_parts.max_load <= 4.0
    model(row_of(12)[0], torch.full((1, 12), -100))  # padding alone: there is no fullest expert
    assert model.loss_parts.max_load == 0.0 == model.loss_parts.load_balancing


def test_a_row_of_padding_alone_adds_nothing():
    model, (inputs, targets) = gpt(), row_of(12)
    nothing = torch.full_like(targets, -100)
    loss = model(inputs, nothing)
    loss.backward()
    assert loss.item() == 0.0 and all(parameter.grad.isfinite().all() for parameter in model.parameters())
    both = model(inputs.repeat(2, 1), torch.cat([targets, nothing]))
    torch.testing.assert_close(both, model(inputs, targets), rtol=1e-5, atol=0.0)


def test_a_prompt_without_targets_is_no_padding():
    model = gpt().eval()
    inputs, targets = row_of(16)
    targets[0, :5] = -100
    expected = torch.nn.functional.cross_entropy(model(inputs)[0, :12], targets[0, :12])
    torch.testing.assert_close(model(inputs, targets), expected)


@pytest.mark.in_turn
def test_a_run_records_the_same_routers_whatever_the_length_of_rows(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, 256, (13,), generator=generator).numpy() for _ in range(60)]
    write_indexed(tmp_path / "set", documents, dtype="uint8")
    data = {"source": "megatron", "paths": [str(tmp_path / "set")], "order": "epochs", "documents": "pad"}
    found = []
    for length in (12, 96):
        out_dir = tmp_path / str(length)
        settings = {"sequence_length": length, "steps": 1, "eval_every": 1, "out_dir": str(out_dir)}
        model = EXPERTS | {"context_length": 96, "router_z_loss_coefficient": 0.1}
        train(tiny_config(tmp_path, model=model, data=data, train=settings, optimizer={"warmup_steps": 0}))
        found.append(
            [each for each in read_metrics(out_dir / "metrics.jsonl") if each["kind"] in ("step", "validation")]
        )
    for name in ("load_balancing_loss", "router_z_loss", "max_expert_load", "grad_norm"):
        assert found[1][0][name] == pytest.approx(found[0][0][name], rel=1e-5), name
    assert found[1][1]["loss"] == pytest.approx(found[0][1]["loss"], rel=1e-4)


# ---- Models of Hugging Face. ----


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe"])
def test_auxiliary_losses_of_transformers_leave_out_padding(name: str):
    tiny = pytest.importorskip("expert_models").tiny
    model = HuggingFaceModel(tiny(name, output_router_logits=True, router_aux_loss_coef=0.5), pads=True)
    assert not model.counts_padding
    assert_equal_for_all_rows(model, (12, 60))
    inputs, targets = row_of(12)
    auxiliary = 0.5 * model.model(input_ids=inputs).aux_loss
    torch.testing.assert_close(model(inputs, targets) - model.eval()(inputs, targets), auxiliary, rtol=1e-4, atol=1e-6)


def test_an_auxiliary_loss_that_would_count_padding_is_refused(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    experts = {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2, "output_router_logits": True}
    transformers.DogeConfig(**shape, **experts, vocab_size=96).save_pretrained(tmp_path / "doge")
    document = tiny_document(tmp_path, data={"source": "megatron", "paths": ["x"], "order": "epochs"})
    document["model"] = {"hugging_face": str(tmp_path / "doge"), "pretrained": False}
    for documents in ("mask", "join", "pad"):
        document["data"]["documents"] = documents
        config = structure(document)
        model = build_language_model(config.model, seed=0, device=torch.device("meta"))
        if documents == "pad":
            with pytest.raises(ConfigError, match=r"data\.documents = 'pad'.*output_router_logits to false"):
                check_model(config, model)
        else:
            check_model(config, model)
