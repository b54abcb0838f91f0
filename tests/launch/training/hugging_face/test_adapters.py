"""PEFT's adapters (LoRA): a frozen model whose adapters train fused, in maingrad's wrappers and in its ``Trainer``."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from hugging_face_runs import VOCABULARY, as_launched, build, import_trainers, language_model
from torch import Tensor, nn

import maingrad.fsdp as fsdp
from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.launch import simulate
from maingrad.te_integration import convert_linears

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow  # each process imports PEFT for six seconds

STEPS, MICROBATCHES, RANKS = 4, 2, 2


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", modules_to_save=["lm_head"], init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


def converted(model: Any) -> Any:
    assert convert_linears(model).fused_share == 1.0
    return model


def loss_of(model: nn.Module, step: int, microbatch: int, rank: int) -> Tensor:
    seed = (step * MICROBATCHES + microbatch) * RANKS + rank
    tokens = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss / MICROBATCHES


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


def plainly(model: nn.Module) -> dict[str, Tensor]:
    """One process that sees the rows of both ranks."""
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            for rank in range(RANKS):
                (loss_of(model, step, microbatch, rank) / RANKS).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return trained(model)


def under_zero1(model: nn.Module) -> dict[str, Tensor]:
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    wrapped = DistributedDataParallel(model, config)
    optimizer = DistributedOptimizer(wrapped, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            with nullcontext() if microbatch == MICROBATCHES - 1 else wrapped.no_sync():
                loss_of(wrapped, step, microbatch, dist.get_rank()).backward()
        wrapped.finish_grad_sync()
        optimizer.step()
        wrapped.zero_grad()
    with torch.no_grad():
        loss_of(wrapped, 0, 0, 0)  # waits for the gathers
    return trained(model)


def under_fsdp(model: Any) -> dict[str, Tensor]:
    for layer in model.base_model.model.model.layers:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            with nullcontext() if microbatch == MICROBATCHES - 1 else model.no_sync():
                loss_of(model, step, microbatch, dist.get_rank()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("train", [under_zero1, under_fsdp])
@pytest.mark.parametrize("adapters", ["before conversion", "after conversion"])
def test_adapters_train_as_in_plain_pytorch(train: Callable[[Any], dict[str, Tensor]], adapters: str) -> None:
    expected = plainly(adapted(language_model()))

    def run() -> dict[str, Tensor]:
        if adapters == "before conversion":
            return train(converted(adapted(language_model())))
        return train(adapted(converted(language_model())))

    for found in simulate(run, RANKS):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def train_adapters(kind: str, folder: Path, resume: str | None = None) -> list[tuple[float, float]]:
    """A job: losses and norms of gradients of each step."""
    with as_launched():
        trainer = build(kind, folder, {"save_strategy": "steps", "save_steps": 10}, adapted(language_model()))
        trainer.train(resume_from_checkpoint=resume)
    return [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
def test_the_trainer_saves_adapters_that_peft_loads_and_goes_on(form: str, tmp_path: Path) -> None:
    run_ranks(import_trainers, 2, timeout=300.0)
    plain, *_ = run_ranks(train_adapters, 2, "plain", tmp_path / "plain")
    assert plain[-1][0] < plain[0][0]
    ours, *_ = run_ranks(train_adapters, 2, form, tmp_path / form)
    for found, expected in zip(ours, plain, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    again, *_ = run_ranks(train_adapters, 2, form, tmp_path / "again", str(tmp_path / form / "checkpoint-10"))
    for found, expected in zip(again[-10:], plain[-10:], strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    tokens = torch.arange(8)[None]
    folders = [tmp_path / kind / "checkpoint-20" for kind in (form, "plain")]
    logits = [peft.PeftModel.from_pretrained(language_model(), folder)(tokens).logits for folder in folders]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)
