"""Models whose ``save_pretrained`` reads the live model, on the one rank that saves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from hugging_face_runs import as_launched, build, import_trainers, language_model
from safetensors.torch import load_file, save_file

from maingrad.fsdp.tensors.parameter import ShardedParameter
from maingrad.launch import simulate


def save_with_head(folder: Path) -> tuple[bool, bool]:
    """A job: a part of the model is saved in a file of its own. Whether it is whole, and whether training stopped."""
    with as_launched():
        model: Any = language_model()
        save_pretrained, shape = model.save_pretrained, model.lm_head.weight.shape

        def save(target: str, **options: Any) -> None:
            save_pretrained(target, **options)
            save_file(model.lm_head.state_dict(), f"{target}/head.safetensors")

        model.save_pretrained = save
        trainer = build("fsdp", folder, {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}, model)
        trainer.train()
    heads = [load_file(folder / f"checkpoint-{step}/head.safetensors")["weight"] for step in (2, 4)]
    whole = load_file(folder / "checkpoint-4/model.safetensors")["lm_head.weight"]
    return heads[0].shape == shape and torch.equal(heads[1], whole), torch.equal(*heads)


@pytest.mark.in_turn
def test_a_part_that_is_saved_by_itself_is_whole(tmp_path: Path) -> None:
    """Its state dict would be collective, and the other ranks would not take part."""
    run_ranks(import_trainers, 2, timeout=300.0)
    assert run_ranks(save_with_head, 2, tmp_path) == [(True, False)] * 2


def weights_after_a_save_that_failed(folder: Path) -> list[bool]:
    """Whether each is the sharded parameter of before."""
    with as_launched():
        whole = language_model()
        whole.model.embed_tokens.requires_grad_(False)
        trainer = build("fsdp", folder, {}, whole)
        model: Any = trainer.wrapped_model()
        before = dict(model.named_parameters())

        def save(target: str, **options: Any) -> None:
            assert not isinstance(model.lm_head.weight, ShardedParameter)
            assert model.lm_head.weight.requires_grad and not model.model.embed_tokens.weight.requires_grad
            raise OSError("no space left")

        model.save_pretrained = save
        with pytest.raises(OSError, match="no space left"):
            trainer.save_model()
        return [param is before[name] for name, param in model.named_parameters()]


def test_a_save_that_fails_leaves_the_model_sharded(tmp_path: Path) -> None:
    """A program may catch the error, and go on training."""
    (found,) = simulate(weights_after_a_save_that_failed, 1, tmp_path)
    assert found and all(found)
