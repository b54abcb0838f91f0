"""``[optimizer]``: other optimizers and schedules train what plain torch trains, and resumed runs go on with them."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import tiny_config

from maingrad.ddp import Muon
from maingrad.launch import simulate
from maingrad.launch.config.file import structure
from maingrad.launch.config.run import Config, ConfigError, ModelConfig, OptimizerConfig
from maingrad.launch.data.batches import load_corpus
from maingrad.launch.data.sequences import Sampler
from maingrad.launch.model.gpt import build_model
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.pace import lr_factor
from maingrad.launch.training.train import train

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "momentum": 0.8, "options": {"nesterov": True}},
    "plain sgd": {"name": "sgd", "momentum": 0.0},
    "nadam": {"name": "torch.optim.NAdam", "options": {"beta1": 0.8, "momentum_decay": 0.01}},
    "rprop": {"name": "torch.optim.Rprop", "weight_decay": 0.0},
    "muon": {"name": "muon", "muon_lr": 0.01, "options": {"momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}},
    "adagrad": {"name": "torch.optim.Adagrad", "weight_decay": 0.0, "options": {"initial_accumulator_value": 0.1}},
}


def config_of(folder: Path, out: str, optimizer: dict[str, Any], parallel: str = "zero1", **settings: Any) -> Config:
    """fp32, unclipped and in one microbatch, so that sums have one order."""
    return tiny_config(
        folder,
        parallel=parallel,
        optimizer={"max_grad_norm": None, "schedule": "linear", **optimizer},
        train={"out_dir": str(folder / out), "num_microbatches": 1, **settings},
    )


def losses(config: Config) -> tuple[float, ...]:
    return train(config).losses


def plain_losses(config: Config) -> list[float]:
    """The same run by torch alone."""
    model = build_model(dataclasses.replace(config.model, fuse_wgrad_accumulation=False), seed=config.train.seed)
    optimizers = _muon_and_adamw(model, config) if config.optimizer.name == "muon" else [_plain(model, config)]
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    sampler = Sampler(load_corpus(config.data, sequence_length=24).bodies, config.data, config.train)
    settings, found = config.train, []
    for step in range(settings.steps):
        warmup = min(1.0, (step + 1) / config.optimizer.warmup_steps)
        ratio = config.optimizer.min_lr_ratio
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * warmup * (ratio + (1 - ratio) * (1 - step / 6))
        batch = sampler.batch(step, slice(0, settings.global_batch_size))
        loss = model(batch.inputs, batch.targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.append(float(loss))
    return found


def _muon_and_adamw(model: torch.nn.Module, config: Config) -> list[torch.optim.Optimizer]:
    """Matrices by their names: all but the embedding and the head. Query, key and value are apart, and gate and up."""
    settings, split = config.optimizer, {"qkv": model.blocks[0].attention.split, "gate_up": 2}
    groups: dict[str, list[torch.nn.Parameter]] = {"qkv": [], "gate_up": [], "": [], "rest": []}
    for name, parameter in model.named_parameters():
        is_matrix = name.startswith("blocks") and parameter.ndim == 2
        groups[next(key for key in split | {"": 1} if key in name) if is_matrix else "rest"].append(parameter)
    rest = groups.pop("rest")
    assert all(groups.values())
    muon = Muon(
        [{"params": members, "split": split.get(key, 1)} for key, members in groups.items()],
        lr=settings.muon_lr,
        weight_decay=settings.weight_decay,
        **settings.options,
    )
    options = {"betas": settings.betas, "eps": settings.eps, "weight_decay": settings.weight_decay}
    return [muon, torch.optim.AdamW(rest, lr=settings.lr, **options)]


def _plain(model: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    kind = {"sgd": torch.optim.SGD}.get(config.optimizer.name)
    kind = kind or getattr(torch.optim, config.optimizer.name.removeprefix("torch.optim."))
    options = dict(config.optimizer.options)
    if "beta1" in options:
        options["betas"] = (options.pop("beta1"), 0.999)
    if config.optimizer.name == "sgd":
        options["momentum"] = config.optimizer.momentum
    if kind is not torch.optim.Rprop:
        options["weight_decay"] = config.optimizer.weight_decay
    return kind(model.parameters(), lr=config.optimizer.lr, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(3)
def test_each_trains_as_torch_does(name: str, tmp_path: Path):
    config = config_of(tmp_path, "run", OPTIMIZERS[name])
    assert losses(config) == pytest.approx(plain_losses(config), rel=1e-5)


@pytest.mark.in_turn
@pytest.mark.parametrize("parallel", ["zero1", "hybrid", "fsdp", "hsdp"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(1)
def test_every_parallel_trains_the_same(name: str, parallel: str, tmp_path: Path):
    ranks = 4 if parallel in ("hybrid", "hsdp") else 2
    runs = [simulate(losses, ranks, config_of(tmp_path, way, OPTIMIZERS[name], way))[0] for way in ("ddp", parallel)]
    exact = 0.0 if ranks == 2 else 1e-6  # instances sum in another order
    assert runs[1] == pytest.approx(runs[0], rel=exact, abs=0.0)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "warmup_stable_decay", "constant"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(1)
def test_a_resumed_run_goes_on_with_state_and_schedule(name: str, schedule: str, tmp_path: Path):
    optimizer = OPTIMIZERS[name] | {"schedule": schedule}
    whole = train(config_of(tmp_path, "run", optimizer, save_every=3))
    resume = str(tmp_path / "run" / "checkpoints" / "step-00000003")
    rest = train(config_of(tmp_path, "rest", optimizer, "fsdp", resume=resume))
    assert rest.losses == whole.losses[3:]
    rates = [record["lr"] for record in read_metrics(tmp_path / "rest" / "metrics.jsonl") if record["kind"] == "step"]
    of_whole = [record["lr"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "step"]
    assert rates == of_whole[3:]


@pytest.mark.parametrize(
    "schedule, at, wanted",
    [
        ("linear", (0.0, 0.5, 1.0), (1.0, 0.6, 0.2)),
        ("warmup_stable_decay", (0.0, 0.5, 0.6, 0.8, 1.0), (1.0, 1.0, 1.0, 0.6, 0.2)),
        ("constant", (0.0, 0.5, 1.0), (1.0, 1.0, 1.0)),
    ],
)
def test_shapes_of_schedules(schedule: Any, at: tuple[float, ...], wanted: tuple[float, ...]):
    config = OptimizerConfig(schedule=schedule, min_lr_ratio=0.2, decay_fraction=0.4, warmup_steps=4)
    assert [lr_factor(config, 100, fraction) for fraction in at] == pytest.approx(wanted)
    assert lr_factor(config, 1, 0.0) == 0.5, "in the warmup"


@pytest.mark.parametrize("schedule", ["linear", "warmup_stable_decay"])
@pytest.mark.sampled(1)
def test_a_schedule_ends_with_the_time(schedule: str, tmp_path: Path):
    config = tiny_config(
        tmp_path,
        optimizer={"schedule": schedule, "min_lr_ratio": 0.0, "warmup_steps": 0},
        train={"steps": 100_000, "max_seconds": 0.5},
    )
    assert 0 < train(config).steps < 100_000
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "step"]
    before_last = records[-2]["elapsed"] / 0.5  # the rate of a step follows from the time at its beginning
    wanted = 1.0 - before_last if schedule == "linear" else min(1.0, (1.0 - before_last) / 0.2)
    assert records[-1]["lr"] == pytest.approx(3e-3 * wanted, rel=1e-3)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"name": "torch.optim.Muon"}, "optimizer.name = 'torch.optim.Muon': does not update each element by itself"),
        ({"name": "torch.optim.LBFGS"}, "optimizer.name = 'torch.optim.LBFGS': does not update each element"),
        ({"name": "NAdam"}, 'must be "adamw", "muon", "sgd", "lion" or an optimizer of torch by its full name'),
        ({"name": "lamb"}, 'must be "adamw", "muon", "sgd", "lion" or an optimizer of torch by its full name'),
        ({"name": "torch.optim.lr_scheduler"}, 'must be "adamw", "muon", "sgd"'),
        ({"name": "sgd", "betas": (0.5, 0.9)}, 'optimizer.betas = (0.5, 0.9): is not read by name = "sgd"'),
        ({"muon_lr": 0.5}, 'optimizer.muon_lr = 0.5: is read by name = "muon" alone'),
        ({"muon_split": {"*qkv*": (1, 2)}}, 'is read by name = "muon" alone'),
        ({"name": "muon", "options": {"ns_stepz": 3}}, "Muon.__init__() got an unexpected keyword argument"),
        ({"momentum": 0.5}, 'optimizer.momentum = 0.5: is not read by name = "adamw"'),
        ({"name": "torch.optim.Rprop"}, "optimizer.weight_decay = 0.1: Rprop has none"),
        ({"options": {"amsgrda": True}}, "optimizer.options = {'amsgrda': True}: AdamW.__init__() got an unexpected"),
        ({"options": {"eps": 1e-6}}, "optimizer.options.eps = 1e-06: set optimizer.eps"),
        ({"options": {"lr": True}}, "got multiple values for keyword argument 'lr'"),
        ({"name": "sgd", "momentum": 0.0, "options": {"nesterov": True}}, "Nesterov momentum requires a momentum"),
    ],
)
def test_what_cannot_be_an_optimizer_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        OptimizerConfig(**given)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}),
        ({"name": "sgd", "momentum": 0.5}, {"momentum": 0.5, "weight_decay": 0.1}),
        ({"name": "lion", "betas": (0.5, 0.9)}, {"betas": (0.5, 0.9), "weight_decay": 0.1}),
        (
            {"name": "torch.optim.NAdam", "options": {"beta2": 0.5, "momentum_decay": 0.01}},
            {"weight_decay": 0.1, "betas": (0.9, 0.5), "momentum_decay": 0.01},
        ),
        ({"name": "torch.optim.NAdam"}, {"weight_decay": 0.1}),
        ({"name": "torch.optim.Rprop", "weight_decay": 0.0, "options": {"foreach": False}}, {"foreach": False}),
        ({"name": "muon", "options": {"momentum": 0.5}}, {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}),
    ],
)
def test_arguments_of_the_class_are_what_it_takes(given: dict[str, Any], wanted: dict[str, Any]):
    config = OptimizerConfig(**given)
    assert config.class_options == wanted
    if config.has_muon:
        assert config.muon_options == {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.5}


def test_a_pattern_of_muon_that_matches_nothing_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(4, 12))
    config = OptimizerConfig(name="muon", muon_split={"*qkv*": (4, 4, 4)})
    with pytest.raises(ConfigError, match=r"optimizer\.muon_split: .*qkv"):
        config.muon_of(model)
    (group,) = OptimizerConfig(name="muon", muon_split={"0.*": (4, 4, 4)}).muon_of(model).groups
    assert group["split"] == (4, 4, 4)
    sizes = ModelConfig(dim=32, num_heads=4, num_kv_heads=2, ffn_dim=64, num_layers=1)
    gpt = build_model(sizes, seed=0, device=torch.device("meta"))
    assert (32, 16, 16) in [group["split"] for group in OptimizerConfig(name="muon").muon_of(gpt).groups]


def test_a_record_has_the_rate_that_is_set_beside_muons(tmp_path: Path):
    config = config_of(tmp_path, "run", OPTIMIZERS["muon"])
    train(config)
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "step"]
    assert records[0]["lr"] == pytest.approx(config.optimizer.lr * lr_factor(config.optimizer, 0, 0.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parallel": "fsdp", "fsdp": {"offload_to_cpu": True}}, r"optimizer\.name = 'muon': steps on the GPU"),
        ({"parallel": "hsdp", "fsdp": {"placements": "hsdp_zero1"}}, r"optimizer\.name = 'muon': .* across instances"),
        ({"parallel": "fsdp", "train": {"cuda_graph": True}}, r"train\.cuda_graph = True: does not go with optimizer"),
        ({"parallel": "hsdp", "train": {"cuda_graph": True}}, r"train\.cuda_graph = True: does not go with optimizer"),
    ],
)
def test_what_does_not_go_with_muon(given: dict[str, Any], message: str) -> None:
    assert structure({"optimizer": {"name": "muon"}, "train": {"cuda_graph": True}}).optimizer.has_muon
    with pytest.raises(ConfigError, match=message):
        structure({"optimizer": {"name": "muon"}, **given})


def test_a_model_without_matrices_has_no_muon():
    with pytest.raises(ConfigError, match=r"optimizer.name = 'muon': finds no matrix for Muon, .* \(an embedding"):
        OptimizerConfig(name="muon").muon_of(torch.nn.Embedding(4, 4))


def test_another_optimizer_does_not_go_on(tmp_path: Path):
    train(config_of(tmp_path, "run", OPTIMIZERS["sgd"], save_every=6))
    resume = str(tmp_path / "run" / "checkpoints" / "step-00000006")
    with pytest.raises(ConfigError, match="has the state of SGD, and this optimizer is AdamW"):
        train(config_of(tmp_path, "rest", {}, resume=resume))
