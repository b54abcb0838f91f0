"""What the Trainer makes of options, positional arguments, buffers and masks, seen without training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hugging_face_runs import Sentences, arguments, as_launched, build, language_model
from torch import nn

from maingrad.launch import simulate
from maingrad.launch.training.hugging_face import Trainer
from maingrad.launch.training.hugging_face.step_graph import _without_whole_mask
from maingrad.launch.training.hugging_face.wrapping import share_buffers, unit_names, whole_weights, written_buffers


@pytest.fixture(autouse=True)
def launched() -> Iterator[None]:
    with as_launched():
        yield


@pytest.mark.parametrize("form", ["ddp", "zero1"])
@pytest.mark.parametrize(
    ("options", "finds", "bucket_size"),
    [
        ({}, False, None),
        ({"ddp_bucket_cap_mb": 2}, False, 2 * 2**20 // 4),
        ({"ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 0.5}, True, 2**19 // 4),
        ({"ddp_find_unused_parameters": False}, False, None),
    ],
)
def test_options_of_torchs_wrapper_mean_what_they_mean_there(
    options: dict[str, Any], finds: bool, bucket_size: int | None, form: str, tmp_path: Path
) -> None:
    trainer = build(form, tmp_path, options, language_model())
    config = trainer.wrapped_model().ddp_config
    default = build(form, tmp_path, {}, language_model()).wrapped_model().ddp_config
    assert config.find_unused_parameters is finds
    assert config.bucket_size == (default.bucket_size if bucket_size is None else bucket_size)
    assert config.overlap_grad_reduce and config.overlap_param_gather is (form == "zero1")


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
def test_whole_state_dicts_by_accelerate(form: str, tmp_path: Path) -> None:
    model = language_model(tied=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = build(form, tmp_path, {}, model)
    wrapped = trainer.wrapped_model()
    found = trainer.accelerator.get_state_dict(wrapped)
    assert found.keys() == before.keys()
    assert all(type(value) is torch.Tensor and value.equal(before[name]) for name, value in found.items())
    assert found["lm_head.weight"] is found["model.embed_tokens.weight"]
    prefix = "" if form == "fsdp" else "module."
    assert set(trainer.accelerator.get_state_dict(wrapped, unwrap=False)) == {prefix + name for name in before}
    assert whole_weights(trainer.model, keep=False) == {}


def test_arguments_by_place_are_transformers(tmp_path: Path) -> None:
    def collate(rows: Any) -> Any:
        return rows

    trained = Sentences(4)
    trainer = Trainer(language_model(), arguments(tmp_path), collate, trained, parallel="ddp")
    assert trainer.data_collator is collate and trainer.train_dataset is trained


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
def test_smoothed_labels_are_shifted_in_every_form(form: str, tmp_path: Path) -> None:
    options = {"label_smoothing_factor": 0.1, "max_steps": 1}
    losses = []
    for kind in ("plain", form):
        trainer = build(kind, tmp_path, options, language_model())
        trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_names_of_units() -> None:
    model = language_model()
    assert unit_names(model, None) == {"LlamaDecoderLayer"}
    assert unit_names(model, ["LlamaMLP", "LlamaAttention"]) == {"LlamaMLP", "LlamaAttention"}
    with pytest.raises(ValueError, match="no module of class Other"):
        unit_names(model, ["LlamaMLP", "Other"])
    model._no_split_modules = ["LlamaDecoderLayer", "LayersOfAnotherVersion"]
    assert unit_names(model, None) == {"LlamaDecoderLayer"}
    for names in (None, [], ["Another"]):
        model._no_split_modules = names
        with pytest.raises(ValueError, match="does not say which of its modules are blocks"):
            unit_names(model, None)
    with pytest.raises(ValueError, match="does not say which of its modules are blocks"):
        unit_names(model, [])


def test_masks_without_padding_are_left_out_of_causal_models() -> None:
    ones = torch.ones(2, 3, dtype=torch.long)
    causal, other = language_model(), nn.Linear(2, 2)
    padded = ones.clone()
    padded[0, -1] = 0
    for model, mask, kept in (
        (causal, ones, False),
        (causal, padded, True),
        (causal, ones.view(2, 1, 3), True),
        (causal, None, True),
        (other, ones, True),
    ):
        given = {"input_ids": ones, "attention_mask": mask}
        found = _without_whole_mask(given, model)
        assert ("attention_mask" in found) is kept and found["input_ids"] is ones
        assert set(given) == {"input_ids", "attention_mask"}


def test_buffers_of_a_state_dict_are_the_first_ranks() -> None:
    def shared() -> list[Any]:
        rank = dist.get_rank()
        model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2))
        for norm in model:
            norm.running_mean.fill_(rank + 1)
            norm.num_batches_tracked.fill_(10 * (rank + 1))
        model[1].running_var.copy_(torch.tensor([5.0, 6.0]) + rank)
        model[0].register_buffer("own", torch.full((2, 2), float(rank)), persistent=False)
        model[0].register_buffer("none", None)
        share_buffers(written_buffers(model))
        tensors = [model[0].running_mean, model[1].running_var, model[1].num_batches_tracked, model[0].own]
        return [each.tolist() for each in tensors]

    for rank, found in enumerate(simulate(shared, 2)):
        assert found == [[1.0] * 3, [5.0, 6.0], 10, [[float(rank)] * 2] * 2]
