"""What does not fit is refused when the Trainer is built, by its name and with a remedy."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hugging_face_runs import Sentences, arguments, as_launched, build, language_model

from maingrad.ddp import DistributedDataParallelConfig
from maingrad.launch.training.hugging_face import Trainer
from maingrad.launch.training.hugging_face.refused import check_accelerator, check_optimizer

OPTIONS = [
    ({"fsdp": "full_shard"}, 'parallel="fsdp"'),
    ({"fp16": True}, "bf16=True"),
    ({"fp16_full_eval": True}, "use bf16"),
    ({"bf16_full_eval": True}, "use bf16"),
    ({"torch_compile": True}, r"layer.compile\(\)"),
    ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
    ({"save_on_each_node": True}, "file system"),
    ({"enable_jit_checkpoint": True}, "save_steps"),
    ({"ddp_static_graph": True}, "leave it None"),
    ({"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}, "reduced once a step"),
    ({"optim": "adafactor"}, "optim='adafactor': Adafactor is not known to be elementwise"),
]
SHARDING = DistributedDataParallelConfig(use_distributed_optimizer=True)
OURS = [
    ({"parallel": "zero3"}, "choose one of ddp, zero1, fsdp"),
    ({"parallel": "fsdp", "ddp_config": DistributedDataParallelConfig()}, "give fsdp_options"),
    ({"parallel": "ddp", "fsdp_options": {"placements": "zero2"}}, "drop them"),
    ({"parallel": "ddp", "fsdp_units": ["LlamaDecoderLayer"]}, "drop them"),
    ({"parallel": "zero1", "ddp_config": DistributedDataParallelConfig()}, "change one of them"),
    ({"parallel": "ddp", "ddp_config": SHARDING}, "change one of them"),
    ({"parallel": "ddp", "ddp_config": DistributedDataParallelConfig(calculate_per_token_loss=True)}, "leave it False"),
    ({"parallel": "fsdp", "fsdp_units": ["Nothing"]}, "no module of class Nothing"),
    ({"optimizer_cls_and_kwargs": (torch.optim.LBFGS, {})}, "optimizer_cls_and_kwargs: LBFGS is not known"),
    ({"optimizer_cls_and_kwargs": (torch.nn.Linear, {})}, "not one class of torch.optim.Optimizer"),
    ({"optimizer_cls_and_kwargs": (lambda params: None, {})}, "not one class of torch.optim.Optimizer"),
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


def test_optimizers_of_whole_parameters_need_whole_parameters() -> None:
    """Which a ``ddp_config`` keeps where it says so, and not by being there. Adafactor and users' own alike."""

    class Own(torch.optim.SGD):
        per_parameter = True

    whole = DistributedDataParallelConfig(use_distributed_optimizer=True, keep_params_whole=True)
    for cls in (Own, torch.optim.Adafactor):
        check_optimizer(cls, "zero1", whole, "optim")
        for parallel, config in (("zero1", SHARDING), ("zero1", None), ("fsdp", None)):
            with pytest.raises(ValueError, match=f"^optim: {cls.__name__} .* keep_params_whole=True") as raised:
                check_optimizer(cls, parallel, config, "optim")
            assert ('by parallel="zero1" and ddp_config=' in str(raised.value)) is (parallel == "fsdp")
    for cls in (torch.optim.AdamW, torch.optim.SGD):
        for parallel, config in (("zero1", SHARDING), ("ddp", None), ("fsdp", None)):
            check_optimizer(cls, parallel, config, "optim")


def test_options_of_torchs_wrapper_where_there_is_none(tmp_path: Path) -> None:
    for option in ("ddp_bucket_cap_mb", "ddp_find_unused_parameters"):
        with pytest.raises(ValueError, match=f'{option} has no effect with parallel="fsdp"'):
            build("fsdp", tmp_path, {option: 1}, language_model())
        with pytest.raises(ValueError, match=f"{option} is a field of ddp_config"):
            build("zero1", tmp_path, {option: 1}, language_model(), ddp_config=SHARDING)


@pytest.mark.parametrize(
    ("option", "message"), [("deepspeed", "maingrad shards"), ("parallelism_config", "takes process groups by itself")]
)
def test_other_libraries_are_refused_also_without_them(option: str, message: str, tmp_path: Path) -> None:
    given = arguments(tmp_path)
    object.__setattr__(given, option, {"stage": 2})
    with pytest.raises(ValueError, match=f"{option} does not work with maingrad: .*{message}"):
        Trainer(language_model(), given, train_dataset=Sentences(4))


def test_gpus_without_a_launcher(tmp_path: Path) -> None:
    given = arguments(tmp_path)
    assert given.n_gpu < 2
    given._n_gpu = 2
    with pytest.raises(ValueError, match="sees 2 GPUs and has no launcher"):
        Trainer(language_model(), given, train_dataset=Sentences(4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"mixed_precision": "bf16"}, None),
        ({"kind": "MULTI_GPU", "backend": None}, None),
        ({"kind": "MULTI_CPU", "backend": "no"}, None),
        ({"kind": "FSDP"}, "accelerate was configured for FSDP: start the program by torchrun"),
        ({"kind": "DEEPSPEED"}, "accelerate was configured for DEEPSPEED"),
        ({"processes": 2}, "started 1 processes, and accelerate knows of 2"),
        ({"mixed_precision": "fp16"}, "mixed_precision=fp16: use bf16=True"),
        ({"mixed_precision": "fp8"}, "mixed_precision=fp8: use bf16=True"),
        ({"backend": "INDUCTOR"}, "for torch.compile: compile layers in place"),
    ],
)
def test_what_accelerates_own_configuration_may_say(changes: dict[str, Any], message: str | None) -> None:
    said = {"kind": "NO", "mixed_precision": "no", "backend": "NO", "processes": 1, **changes}
    backend = SimpleNamespace(backend=SimpleNamespace(value=said["backend"]))
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(value=said["kind"]),
        num_processes=said["processes"],
        mixed_precision=said["mixed_precision"],
        state=SimpleNamespace(dynamo_plugin=backend),
    )
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_accelerator(accelerator)


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


@pytest.mark.parametrize("form", ["fsdp", "zero1", "ddp"])
@pytest.mark.sampled(2)
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
    cut, lies = language_model(), language_model()
    cut.__class__ = type("Cut", (type(cut),), {"tp_size": 2})
    for model, message in ((spread, "device_map"), (quantised, "quantised"), (sharded, "tp_plan"), (cut, "tp_plan")):
        with pytest.raises(ValueError, match=message):
            build("zero1", tmp_path, {}, model)
    lies.hf_device_map = {"model": "cpu", "lm_head": "cpu"}  # as device_map="auto" leaves it on one device
    lies.is_quantized, lies.__class__ = False, type("Whole", (type(lies),), {"tp_size": 1})
    build("zero1", tmp_path, {}, lies)


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
