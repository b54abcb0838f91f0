"""What does not fit is refused when the Trainer is built, by its name and with a remedy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_runs import Sentences, arguments, as_launched, build, language_model

from maingrad.ddp import DistributedDataParallelConfig
from maingrad.launch.training.hugging_face import Trainer

OPTIONS = [
    ({"fsdp": "full_shard"}, 'parallel="fsdp"'),
    ({"fp16": True}, "bf16=True"),
    ({"bf16_full_eval": True}, "use bf16"),
    ({"torch_compile": True}, r"layer.compile\(\)"),
    ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
    ({"save_on_each_node": True}, "file system"),
    ({"enable_jit_checkpoint": True}, "save_steps"),
    ({"ddp_static_graph": True}, "leave it None"),
    ({"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}, "reduced once a step"),
    ({"optim": "adafactor"}, "optim='adafactor': Adafactor is not known to be elementwise"),
]
OURS = [
    ({"parallel": "zero3"}, "choose one of ddp, zero1, fsdp"),
    ({"parallel": "fsdp", "ddp_config": DistributedDataParallelConfig()}, "give fsdp_options"),
    ({"parallel": "ddp", "fsdp_options": {"placements": "zero2"}}, "drop them"),
    ({"parallel": "zero1", "ddp_config": DistributedDataParallelConfig()}, "change one of them"),
    ({"parallel": "ddp", "ddp_config": DistributedDataParallelConfig(calculate_per_token_loss=True)}, "leave it False"),
    ({"parallel": "fsdp", "fsdp_units": ["Nothing"]}, "no module of class Nothing"),
    ({"optimizer_cls_and_kwargs": (torch.optim.LBFGS, {})}, "optimizer_cls_and_kwargs: LBFGS is not known"),
]


@pytest.fixture(autouse=True)
def launched() -> Iterator[None]:
    with as_launched():
        yield


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=lambda value: next(iter(value), "") if value else "")
@pytest.mark.sampled(len(OPTIONS))
def test_training_arguments(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        build("zero1", tmp_path, options, language_model())
    name = next(iter(options))
    assert name in str(raised.value)


@pytest.mark.parametrize(("ours", "message"), OURS)
@pytest.mark.sampled(len(OURS))
def test_own_options(ours: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(language_model(), arguments(tmp_path), train_dataset=Sentences(4), **ours)


def test_options_of_torchs_wrapper_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='ddp_bucket_cap_mb has no effect with parallel="fsdp"'):
        build("fsdp", tmp_path, {"ddp_bucket_cap_mb": 1}, language_model())
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    with pytest.raises(ValueError, match="ddp_find_unused_parameters is a field of ddp_config"):
        build("zero1", tmp_path, {"ddp_find_unused_parameters": True}, language_model(), ddp_config=config)


def test_processes_that_accelerate_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs without ``use_cpu=True`` each process that torchrun has started would train alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="started 2 processes, and accelerate knows of 1: on CPUs set use_cpu=True"):
        build("zero1", tmp_path, {"use_cpu": False}, language_model())


def test_optimizers_of_before(tmp_path: Path) -> None:
    model = language_model()
    with pytest.raises(ValueError, match="give optimizer_cls_and_kwargs"):
        build("ddp", tmp_path, {}, model, optimizers=(torch.optim.AdamW(model.parameters()), None))


class EarlyOptimizer(Trainer):
    """As one gives groups of one's own to the plain Trainer."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        return self.optimizer


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
@pytest.mark.sampled(1)
def test_an_optimizer_over_the_model_before_it_is_wrapped(form: Any, tmp_path: Path) -> None:
    model = language_model()
    before = model.lm_head.weight.clone()
    trainer = EarlyOptimizer(model, arguments(tmp_path), train_dataset=Sentences(4), parallel=form)
    with pytest.raises(ValueError, match=r"EarlyOptimizer made its optimizer, AdamW, .*self.wrapped_model\(\)"):
        trainer.train()
    torch.testing.assert_close(model.lm_head.weight, before, rtol=0, atol=0)


def test_models_that_something_else_distributes(tmp_path: Path) -> None:
    spread, quantised, sharded = language_model(), language_model(), language_model()
    spread.hf_device_map = {"model": 0, "lm_head": 1}
    quantised.is_quantized = True
    sharded.__class__ = type("Sharded", (type(sharded),), {"is_distributed_loading_by_transformers": True})
    for model, message in ((spread, "device_map"), (quantised, "quantised"), (sharded, "tp_plan")):
        with pytest.raises(ValueError, match=message):
            build("zero1", tmp_path, {}, model)


def test_muon_without_matrices(tmp_path: Path) -> None:
    model = language_model()
    for name, param in model.named_parameters():
        param.requires_grad_("embed" in name or "norm" in name)
    trainer = build("zero1", tmp_path, {}, model, muon={"lr": 0.02})
    with pytest.raises(
        ValueError, match=r"muon=\{'lr': 0.02\}: finds no matrix for Muon, .* \(an embedding, .*vector\)"
    ):
        trainer.train()


def test_a_model_without_named_blocks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fsdp_units="):
        build("fsdp", tmp_path, {}, torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_a_checkpoint_of_another_trainer(tmp_path: Path) -> None:
    plain = build("plain", tmp_path, {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}, language_model())
    plain.train()
    ours = build("zero1", tmp_path, {"max_steps": 2}, language_model())
    with pytest.raises(ValueError, match="from_pretrained"):
        ours.train(resume_from_checkpoint=True)
