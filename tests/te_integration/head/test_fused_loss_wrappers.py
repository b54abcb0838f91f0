"""``parallelize(model, form, fused_loss=...)``: the loss without logits on simulated ranks, under every form."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from language_models import batch, language_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import maingrad
from maingrad.launch import simulate

FORMS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "zero3, the head alone")
STEPS, MICROBATCHES = 3, 2


def parallel(model: nn.Module, form: str, **options: Any) -> Any:
    if form == "zero3, the head alone":
        units = [*model.model.layers, model.lm_head]
        return maingrad.parallelize(model, "zero3", units=units, **options)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner")) if form == "hsdp" else None
    return maingrad.parallelize(model, form, mesh=mesh, **options)


def train(name: str, form: str, fused_loss: Any, **options: Any) -> list[float]:
    """Losses and norms of the steps; each rank has other microbatches."""
    model = parallel(language_model(name), form, fused_loss=fused_loss, **options)
    optimizer = maingrad.make_optimizer(model, torch.optim.AdamW, lr=1e-2)
    announced = {"grad_scale": 1 / MICROBATCHES} if fused_loss == "in_forward" else {}
    found = []
    for step in range(STEPS):
        for number in range(MICROBATCHES):
            arguments = batch(100 * dist.get_rank() + 10 * step + number)
            with model.no_sync() if number < MICROBATCHES - 1 else nullcontext():
                loss = model(**arguments, **announced).loss
                (loss / MICROBATCHES).backward()
            found.append(loss.item())
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize("fused_loss", [True, "in_forward"])
@pytest.mark.parametrize("name", ["llama", "llama, tied", "mixtral"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(8)
def test_losses_and_norms_are_those_of_logits(form: str, name: str, fused_loss: Any) -> None:
    """Over three steps of two microbatches, clipped: AdamW carries roundings on."""
    if form == "zero3, the head alone" and name == "llama, tied":
        form = "zero3"  # a tied head is in the outermost unit
    seen, expected = (simulate(lambda fused=fused: train(name, form, fused), 2) for fused in (fused_loss, False))
    for one, other in zip(seen, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-4)


@pytest.mark.in_turn
def test_evaluation_and_refusal_under_sharded_parameters() -> None:
    """Evaluation gives logits. In training they cannot be read outside the forward, unless the call asked for them."""

    def run() -> None:
        model = maingrad.parallelize(language_model("llama"), "zero3", fused_loss=True)
        plain = language_model("llama")
        asked = model(**batch(), skip_logits=False)
        assert torch.equal(asked.logits, plain(**batch()).logits)
        outputs = model(**batch())
        with pytest.raises(RuntimeError, match=r"outside the forward.*skip_logits=False"):
            outputs.logits.argmax(-1)
        (asked.loss + outputs.loss).backward()
        model.eval(), plain.eval()
        with torch.no_grad():
            one, other = model(**batch()), plain(**batch())
        assert torch.equal(one.logits, other.logits) and torch.equal(one.loss, other.loss)

    simulate(run, 2)


def test_a_loss_of_transformers_that_reads_logits_gets_them() -> None:
    """Also where the head is a unit of its own, which gathers for each of its calls."""

    def of_logits(logits: Any, labels: Tensor, **others: Any) -> Tensor:
        return logits.float().logsumexp(-1).mean()

    of_logits.__module__ = "transformers.loss.of_a_later_version"

    def run() -> list[float]:
        found = []
        for form in ("ddp", "zero3", "zero3, the head alone"):
            model = parallel(language_model("llama"), form, fused_loss=True)
            model.loss_function = of_logits
            if form == "ddp":
                model.module.loss_function = of_logits
            loss = model(**batch()).loss
            loss.backward()
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            assert loss.item() == pytest.approx(expected.item())
        return found

    plain = language_model("llama")
    expected = plain(**batch()).logits.logsumexp(-1).mean()
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
    assert simulate(run, 2) == [pytest.approx([norm] * 3, rel=1e-5)] * 2


def test_what_parallelize_refuses() -> None:
    with pytest.raises(ValueError, match="fused_loss needs fuse=True"):
        maingrad.parallelize(language_model("llama"), "ddp", fuse=False, fused_loss=True)
    with pytest.raises(ValueError, match="Sequential has no language model of Hugging Face"):
        maingrad.parallelize(nn.Sequential(nn.Linear(2, 2)), "ddp", fused_loss=True)
    model = language_model("llama")
    model.loss_function = nn.functional.cross_entropy
    with pytest.raises(ValueError, match="fused_loss has no effect: LlamaForCausalLM's loss_function is cross_entropy"):
        maingrad.parallelize(model, "ddp", fused_loss=True)
    assert type(model.lm_head) is nn.Linear  # nothing was changed
