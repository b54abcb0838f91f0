"""Configurations: files, overrides on the command line, and errors."""

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import tiny_config, tiny_toml

from maingrad.ddp import DistributedDataParallelConfig, Muon
from maingrad.ddp.optimizer.param_groups import is_elementwise
from maingrad.launch.config.file import config_to_dict, flat, load_config, print_keys, structure
from maingrad.launch.config.run import Config, ConfigError, ModelConfig, OptimizerConfig, TrainConfig

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "launch" / "configs").glob("*.toml"))
ALMOST_ONE = math.nextafter(1.0, 0.0)
TORCHS = [name for name, each in vars(torch.optim).items() if isinstance(each, type) and is_elementwise(each)]


def refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        structure(document)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_files_load(path: Path):
    config = load_config(path)
    assert config == structure(config_to_dict(config))
    assert config.parallel == ("fsdp" if path.stem.startswith("fsdp") else "zero1")
    sharded = load_config(path, ["--parallel", "zero1"])
    assert sharded.ddp.overlap_grad_reduce
    assert sharded.ddp.overlap_param_gather
    assert not load_config(path, ["--parallel", "ddp"]).ddp.use_distributed_optimizer, "one word is enough"
    assert load_config(path, ["--parallel", "fsdp"]).num_instances == 1
    assert load_config(path, ["--parallel", "hsdp"]).num_instances == 2


def test_shipped_files_are_there():
    assert "stdlib" in {path.stem for path in CONFIGS}


def test_file_and_overrides(tmp_path: Path):
    path = tiny_toml(tmp_path, model={"param_dtype": "bfloat16"})
    config = load_config(path, ["--ddp.bucket-size", "65536", "--train.steps=9", "--optimizer.betas", "0.8", "0.9"])
    assert config.ddp == DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=65536
    )
    assert (config.train.steps, config.optimizer.betas) == (9, (0.8, 0.9))
    assert config.model == load_config(path).model, "what is not overridden stays as the file says"
    assert load_config(path, ["--ddp.bucket-size", "None"]).ddp.bucket_size is None
    assert load_config(path, ["--ddp.no-overlap-grad-reduce"]).ddp.overlap_grad_reduce is False


def test_empty_file_is_the_defaults(tmp_path: Path):
    (tmp_path / "empty.toml").write_text("")
    assert load_config(tmp_path / "empty.toml") == Config()


def test_every_field_says_what_it_is(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        print_keys(Config(train=TrainConfig(steps=4321)))
    text = capsys.readouterr().out
    assert end.value.code == 0
    sections = [field for field in dataclasses.fields(Config) if field.name != "parallel"]
    assert "--parallel {ddp,zero1,hybrid,fsdp,hsdp}" in text
    for section in sections:
        for field in dataclasses.fields(getattr(Config(), section.name)):
            assert f"--{section.name}.{field.name.replace('_', '-')}" in text
    assert "Elements after which a bucket is closed" in text, "field docstrings are the help"
    assert "4321" in text, "the file's values are the defaults"


def test_round_trip_through_json(tmp_path: Path):
    config = tiny_config(tmp_path, train={"max_seconds": 5.0})
    assert structure(json.loads(json.dumps(config_to_dict(config)))) == config


@pytest.mark.parametrize(
    "document, message",
    [
        ({"ddp": {"bucket_sise": 3}}, "unknown key 'ddp.bucket_sise': did you mean 'ddp.bucket_size'?"),
        ({"optimiser": {}}, "unknown key 'optimiser': did you mean 'optimizer'?"),
        ({"model": {"num_layer": 2}}, "unknown key 'model.num_layer': did you mean 'model.num_layers'?"),
        ({"train": {"keep_last": 2}}, "unknown key 'train.keep_last': it is 'checkpoint.keep_last'"),
        ({"data": {"zzz": 2}}, "unknown key 'data.zzz': valid keys: column, documents, end_of_document, "),
        ({"model": 3}, "model = 3: must be a table, [model]"),
        ({"ddp": 3}, "ddp = 3: must be a table, [ddp]"),
        (
            {"parallel": "fsdp", "optimizer": {"state": "compact", "moment_dtype": "uint8"}, "fsdp": 3},
            "fsdp = 3: must be a table, [fsdp]",
        ),
        ({"optimizer": {"options": 3}}, "optimizer.options = 3: must be a table, { key = value }"),
        ({"optimizer": {"options": {"eps": None}}}, "optimizer.options.eps: must be bool, not NoneType"),
        ({"model": {"dim": "64"}}, "model.dim: must be int, not str"),
        ({"model": {"dim": 64.0}}, "model.dim: must be int, not float"),
        ({"train": {"steps": True}}, "train.steps: must be int, not bool"),
        ({"optimizer": {"weight_decay": True}}, "optimizer.weight_decay: must be float, not bool"),
        ({"ddp": {"overlap_grad_reduce": "false"}}, "ddp.overlap_grad_reduce: must be bool, not str"),
        ({"ddp": {"bucket_size": "big"}}, "ddp.bucket_size: must be int, not str"),
        ({"optimizer": {"betas": [0.9, "x"]}}, "optimizer.betas.1: must be float, not str"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas = [0.9]: must have 2 values"),
        ({"data": {"source": "text", "paths": "a.txt"}}, "data.paths = 'a.txt': must be a list, ['a.txt']"),
        ({"parallel": "zero2"}, "parallel = 'zero2': must be one of 'ddp', 'zero1', 'hybrid', 'fsdp', 'hsdp'"),
        (
            {"train": {"parallel": "ddp"}},
            "unknown key 'train.parallel': it is 'parallel'",
        ),
        (
            {"parallel": "ddp", "ddp": {"use_distributed_optimizer": True}},
            'ddp.use_distributed_optimizer = True: contradicts parallel = "ddp"',
        ),
        ({"ddp": {"calculate_per_token_loss": True}}, "ddp.calculate_per_token_loss = True: maingrad train averages"),
        ({"ddp": {"overlap_param_gather": 1}}, "ddp.overlap_param_gather: must be bool, not int"),
        ({"ddp": {"grad_reduce_wire_dtype": "fp8"}}, "ddp.grad_reduce_wire_dtype = 'fp8': must be a dtype of torch"),
        ({"ddp": {"grad_reduce_wire_dtype": "nn"}}, "ddp.grad_reduce_wire_dtype = 'nn': must be a dtype of torch"),
        ({"ddp": {"grad_reduce_wire_dtype": 16}}, "ddp.grad_reduce_wire_dtype = 16: must be a dtype of torch"),
        ({"ddp": {"grad_reduce_wire_dtype": "float64"}}, "ddp.grad_reduce_wire_dtype is torch.bfloat16, torch.float16"),
        ({"fsdp": {"copy_engine_gather": 1}}, "fsdp.copy_engine_gather = 1: must be one of 'auto', True, False"),
        ({"model": {"param_dtype": "fp8"}}, "model.param_dtype = 'fp8': must be one of 'float32', 'bfloat16'"),
    ],
)
def test_refuses_unknown_keys_and_wrong_types(document: dict[str, Any], message: str):
    refused(document, message)


@pytest.mark.parametrize(
    "document, message",
    [
        ({"model": {"dim": 0}}, "model.dim = 0: must be at least 1"),
        ({"model": {"dim": 36, "num_heads": 8}}, "model.dim = 36: must be a multiple of 2 * model.num_heads = 16"),
        ({"model": {"num_heads": 4, "num_kv_heads": 3}}, "model.num_kv_heads = 3: must divide model.num_heads = 4"),
        ({"model": {"dropout": 1.0}}, "model.dropout = 1.0: must lie in [0, 1)"),
        (
            {"model": {"delay_wgrad_layers": 5}},
            "model.delay_wgrad_layers = 5: must lie between 0 and model.num_layers = 4",
        ),
        ({"model": {"vocab_size": 100}}, "model.vocab_size = 100: must be at least 256 for bytes"),
        (
            {"model": {"vocab_size": 100}, "data": {"source": "text", "paths": ["a"]}},
            'must be at least 256 for bytes (data.source = "text")',
        ),
        ({"data": {"documents": "mask"}}, 'source = "stdlib" does not know where documents end'),
        ({"model": {"init_std": 0.0}}, "model.init_std = 0.0: must be positive"),
        ({"model": {"rotary_base": 1.0}}, "model.rotary_base = 1.0: must be greater than 1"),
        ({"data": {"source": "text"}}, 'data.paths = (): source = "text" needs at least one file'),
        ({"data": {"paths": ["a"]}}, "data.paths = ('a',): source = \"stdlib\" finds its files itself"),
        ({"data": {"validation_fraction": 0.0}}, "data.validation_fraction = 0.0: must lie between 0 and 1"),
        ({"data": {"max_tokens": 0}}, "data.max_tokens = 0: must be at least 1"),
        ({"train": {"steps": 0}}, "train.steps = 0: must be at least 1"),
        ({"train": {"max_seconds": 0.0}}, "train.max_seconds = 0.0: must be positive"),
        ({"train": {"seed": -1}}, "train.seed = -1: must not be negative"),
        (
            {"train": {"global_batch_size": 6, "num_microbatches": 4}},
            "train.global_batch_size = 6: must be a multiple of train.num_microbatches = 4",
        ),
        (
            {"train": {"sequence_length": 512}},
            "train.sequence_length = 512: must be at most model.context_length = 256",
        ),
        ({"train": {"steps": 5}, "optimizer": {"warmup_steps": 5}}, "optimizer.warmup_steps = 5: must be less than"),
        ({"optimizer": {"lr": 0.0}}, "optimizer.lr = 0.0: must be positive"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas = (0.9, 1.0): must lie in [0, 1)"),
        ({"optimizer": {"max_grad_norm": -1.0}}, "optimizer.max_grad_norm = -1.0: must be positive"),
        (
            {"optimizer": {"name": "torch.optim.NAdam", "state": "compact"}},
            'optimizer.state = \'compact\': is for name = "adamw", "muon", "sgd", "lion" and',
        ),
        (
            {"optimizer": {"moment_dtype": "uint8"}},
            "optimizer.moment_dtype = 'uint8': is for state = \"compact\" alone",
        ),
        ({"optimizer": {"moment_dtype": "float32"}}, "moment_dtype = 'float32': is for state = \"compact\" alone"),
        (
            {"optimizer": {"name": "torch.optim.Adam", "options": {"amsgrad": True}, "state": "compact"}},
            "optimizer.state = 'compact': \"compact\" does not go with optimizer.options amsgrad",
        ),
        (
            {"parallel": "fsdp", "optimizer": {"state": "compact"}, "fsdp": {"offload_to_cpu": True}},
            "optimizer.state = 'compact': \"compact\" steps on the GPU, and does not go with fsdp.offload_to_cpu",
        ),
        ({"optimizer": {"min_lr_ratio": 2.0}}, "optimizer.min_lr_ratio = 2.0: must lie in [0, 1]"),
        ({"ddp": {"bucket_size": 0}}, "ddp.bucket_size must be at least 1 element, got 0"),
        ({"ddp": {"find_unused_parameters": True}}, "ddp.find_unused_parameters has no effect"),
        (
            {"train": {"log_every": 2, "save_every": 5}},
            "train.save_every = 5: must be a multiple of train.log_every = 2",
        ),
        ({"data": {"validation_paths": ["a"]}}, 'data.validation_paths = (\'a\',): need source = "text"/"tokens"'),
        ({"data": {"column": "ids"}}, "data.column = 'ids': has no effect without source = \"hugging_face\""),
        ({"model": {"save_hugging_face": False}}, "model.save_hugging_face = False: has no effect without model.hugg"),
        ({"model": {"pretrained": False}}, "model.pretrained = False: has no effect without model.hugging_face"),
        ({"model": {"trust_remote_code": True}}, "model.trust_remote_code = True: has no effect without model.hugg"),
        ({"model": {"router_dtype": "bfloat16"}}, "model.router_dtype = 'bfloat16': has no effect without model.num_e"),
        ({"model": {"single_grouped_weight": False}}, "single_grouped_weight = False: has no effect without model.num"),
        ({"model": {"normalize_top_k": True}}, "model.normalize_top_k = True: has no effect without model.num_experts"),
        (
            {"optimizer": {"name": "lion", "eps": 1e-6}},
            'optimizer.eps = 1e-06: is not read by name = "lion"',
        ),
        (
            {"optimizer": {"state": "compact", "options": {"maximize": True}}},
            "optimizer.state = 'compact': \"compact\" does not go with optimizer.options maximize",
        ),
        (
            {"optimizer": {"state": "compact", "options": {"differentiable": True, "foreach": False}}},
            "optimizer.state = 'compact': \"compact\" does not go with optimizer.options differentiable",
        ),
        (
            {"parallel": "hsdp", "optimizer": {"name": "sgd", "state": "compact"}},
            'optimizer.state = \'compact\': "compact" is for AdamW and Adam under parallel = "hsdp"',
        ),
        (
            {"parallel": "fsdp", "optimizer": {"name": "muon", "state": "compact"}},
            'optimizer.state = \'compact\': "compact" is for AdamW and Adam under parallel = "fsdp"',
        ),
        (
            {"optimizer": {"name": "torch.optim.Optimizer"}},
            'optimizer.name = \'torch.optim.Optimizer\': must be "adamw", "muon"',
        ),
        ({"logging": {"wandb_project": ""}}, "logging.wandb_project = '': must name a project"),
        (
            {"logging": {"wandb_mode": "offline"}},
            "logging.wandb_mode = 'offline': has no effect without logging.wandb_project",
        ),
        ({"profile": {"first_step": 1, "ranks": []}}, "profile.ranks = (): must name different ranks, from 0 on"),
        ({"profile": {"ranks": [1]}}, "profile.ranks = (1,): has no effect without profile.first_step"),
        ({"profile": {"memory": True}}, "profile.memory = True: has no effect without profile.first_step"),
        ({"profile": {"trace": False}}, "profile.trace = False: has no effect without profile.first_step"),
        (
            {"train": {"cuda_graph": True}, "data": {"documents": "mask", "end_of_document": 0}},
            'train.cuda_graph = True: does not go with data.documents = "mask" and "pad"',
        ),
        (
            {"train": {"cuda_graph": True}, "data": {"documents": "pad", "end_of_document": 0, "order": "epochs"}},
            'train.cuda_graph = True: does not go with data.documents = "mask" and "pad"',
        ),
        (
            {"train": {"cuda_graph": True, "recompute": "blocks"}, "model": {"hugging_face": "somewhere"}},
            "train.recompute = 'blocks': does not go with train.cuda_graph where the model may have dropout",
        ),
    ],
)
def test_refuses_impossible_values(document: dict[str, Any], message: str):
    refused(document, message)


@pytest.mark.parametrize(
    "document",
    [
        {"checkpoint": {"keep_last": 2, "keep_every": 4}, "train": {"log_every": 2, "save_every": 4}},
        {"profile": {"first_step": 1, "trace": False, "memory": True, "ranks": [1, 0]}},
        {"model": {"hugging_face": "somewhere"}, "train": {"sequence_length": 512}},
        {"model": {"dropout": 0.1}, "train": {"compile": True, "cuda_graph": True}},
        {"mesh": {"tp": 2, "sequence_parallel": True}, "model": {"dropout": 0.1}, "train": {"cuda_graph": False}},
        {"mesh": {"tp": 2}, "train": {"compile": True, "cuda_graph": True}},
        {
            "mesh": {"ep": 2, "transport": "symmetric"},
            "model": {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 8},
            "train": {"cuda_graph": True},
        },
        {"model": {"vocab_size": 100}, "data": {"source": "tokens", "paths": ["a"]}},
        {"model": {"param_dtype": "bfloat16"}, "train": {"recipe": "float8_delayed", "recompute": "attention"}},
        {"optimizer": {"name": "sgd", "state": "compact"}},
        {"optimizer": {"state": "compact", "options": {"amsgrad": False}}},
        {"parallel": "fsdp", "optimizer": {"name": "torch.optim.Adam", "state": "compact"}},
        {"parallel": "fsdp", "fsdp": {"offload_to_cpu": True, "num_instances": 1}},
        {"parallel": "fsdp", "train": {"cuda_graph": True, "recompute": "blocks", "recompute_every": 2}},
        {"model": {"hugging_face": "somewhere", "fuse_wgrad_accumulation": False}, "train": {"cuda_graph": True}},
        {"optimizer": {"options": {"amsgrad": True}}},
        {"model": {"dim": 2**20, "delay_wgrad_layers": 4}},
        {"model": {"fused_loss": True, "fuse_wgrad_accumulation": False}},
        {"model": {"hugging_face": "somewhere", "fused_loss": True, "param_dtype": "bfloat16"}},
        {"optimizer": {"name": "lion", "betas": [0.5, 0.9]}, "train": {"compile": True, "recompute": "blocks"}},
    ],
    ids=str,
)
def test_what_goes_together_is_not_refused(document: dict[str, Any]):
    found = flat(config_to_dict(structure(document)))
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in flat(document).items()}
    assert {key: found[key] for key in given} == given


ONE_COPY = "has no effect without use_distributed_optimizer: there are no shards"
SAID = "turn it on, or drop the option (parallel decides on that)"
INSTANCES = "ddp.num_distributed_optimizer_instances"


@pytest.mark.parametrize(
    "parallel, ddp, message",
    [
        ("ddp", {"overlap_param_gather": True}, f"ddp.overlap_param_gather {ONE_COPY}"),
        ("ddp", {"keep_params_whole": True}, SAID),
        ("ddp", {"grad_reduce_wire_dtype": "bfloat16"}, f"ddp.grad_reduce_wire_dtype {ONE_COPY}"),
        ("ddp", {"num_distributed_optimizer_instances": 2}, f"{INSTANCES} {ONE_COPY}"),
        (
            "zero1",
            {"use_distributed_optimizer": False},
            'distributed_optimizer = False: contradicts parallel = "zero1"',
        ),
        ("zero1", {"num_distributed_optimizer_instances": 2}, f'{INSTANCES} = 2: contradicts parallel = "zero1"'),
        ("hybrid", {"num_distributed_optimizer_instances": 1}, f'{INSTANCES} = 1: contradicts parallel = "hybrid"'),
        ("zero1", {"num_buckets": 3, "bucket_size": 9}, "ddp.bucket_size and num_buckets both say where buckets end"),
    ],
)
def test_contradictions_are_refused_by_name(parallel: str, ddp: dict[str, Any], message: str):
    refused({"parallel": parallel, "ddp": ddp}, message)


@pytest.mark.parametrize(
    "parallel, ddp, sharded, gathers_overlap, instances",
    [
        ("ddp", {"overlap_grad_reduce": True}, False, False, 1),
        ("zero1", {}, True, False, 1),
        ("zero1", {"overlap_grad_reduce": True}, True, True, 1),
        ("zero1", {"overlap_grad_reduce": True, "overlap_param_gather": False}, True, False, 1),
        ("zero1", {"overlap_param_gather": True}, True, True, 1),
        ("hybrid", {}, True, False, 2),
        ("hybrid", {"num_distributed_optimizer_instances": 3}, True, False, 3),
        ("hybrid", {"overlap_grad_reduce": True}, True, True, 2),
    ],
)
def test_parallel_decides_the_rest(
    parallel: str, ddp: dict[str, Any], sharded: bool, gathers_overlap: bool, instances: int
):
    config = structure({"parallel": parallel, "ddp": ddp})
    wrapper = config.ddp
    assert wrapper.use_distributed_optimizer is sharded
    assert wrapper.overlap_param_gather is gathers_overlap
    assert wrapper.num_distributed_optimizer_instances == instances
    assert structure(json.loads(json.dumps(config_to_dict(config)))) == config


@pytest.mark.parametrize("parallel", ["zero1", "fsdp", "hsdp"])
def test_moments_in_8_bits_decide_what_shards_may_cut(parallel: str):
    optimizer = {"state": "compact", "moment_dtype": "uint8"}
    config = structure({"parallel": parallel, "optimizer": optimizer})
    assert (config.ddp.shard_atom, config.fsdp.shard_atoms) == (
        (256, "element") if parallel == "zero1" else (1, "block")
    )
    assert structure(json.loads(json.dumps(config_to_dict(config)))) == config
    if parallel != "zero1":
        own = structure({"parallel": parallel, "optimizer": optimizer, "fsdp": {"shard_atoms": "whole"}})
        assert own.fsdp.shard_atoms == "whole"
    plain = structure({"parallel": parallel, "optimizer": {"state": "compact"}})
    assert (plain.ddp.shard_atom, plain.fsdp.shard_atoms) == (1, "element")
    for form, ddp, atom in (("hybrid", {}, 256), ("zero1", {"keep_params_whole": True}, 1)):
        assert structure({"parallel": form, "ddp": ddp, "optimizer": optimizer}).ddp.shard_atom == atom


@pytest.mark.parametrize(
    "fsdp",
    [
        {"reshard_after_forward": True, "reduce_every_microbatch": True},
        {"placements": "zero1", "reshard_after_forward": False, "reduce_every_microbatch": False},
    ],
)
def test_what_placements_shard_may_be_resharded_and_reduced(fsdp: dict[str, Any]):
    assert structure({"parallel": "fsdp", "fsdp": fsdp}).fsdp.placements == fsdp.get("placements", "zero3")


def test_dtypes_are_words():
    config = structure({"ddp": {"grad_reduce_wire_dtype": "bfloat16"}})
    assert config.ddp.grad_reduce_wire_dtype is torch.bfloat16
    assert structure(json.loads(json.dumps(config_to_dict(config)))) == config


@pytest.mark.parametrize(
    "document, message",
    [
        (
            {"parallel": "zero1", "fsdp": {"placements": "zero2"}},
            "fsdp.placements = 'zero2': contradicts parallel = \"z",
        ),
        ({"parallel": "fsdp", "fsdp": {"num_instances": 2}}, 'fsdp.num_instances = 2: contradicts parallel = "fsdp"'),
        ({"parallel": "hsdp", "fsdp": {"num_instances": 1}}, 'fsdp.num_instances = 1: contradicts parallel = "hsdp"'),
        ({"parallel": "fsdp", "fsdp": {"placements": "hsdp_zero1"}}, "shards across instances, and parallel = "),
        ({"parallel": "fsdp", "fsdp": {"placements": "ddp"}}, "must be one of 'zero1', 'zero2', 'zero3', 'hsdp_zero1'"),
        (
            {"parallel": "fsdp", "fsdp": {"placements": "zero2", "reshard_after_forward": True}},
            "fsdp.reshard_after_forward = True: has no effect where placements keep parameters whole",
        ),
        (
            {"parallel": "fsdp", "fsdp": {"placements": "zero1", "reduce_every_microbatch": True}},
            "fsdp.reduce_every_microbatch = True: has no effect where placements keep gradients whole",
        ),
        ({"parallel": "fsdp", "fsdp": {"bucket_size": 0}}, "fsdp.bucket_size = 0: must be at least 1"),
        ({"parallel": "zero1", "fsdp": {"bucket_size": 8}}, 'fsdp.bucket_size = 8: contradicts parallel = "zero1"'),
        (
            {"parallel": "fsdp", "ddp": {"grad_reduce_wire_dtype": "bfloat16"}},
            'ddp.grad_reduce_wire_dtype = torch.bfloat16: has no effect under parallel = "fsdp"; [fsdp] has grad_dtype',
        ),
        (
            {"parallel": "hsdp", "ddp": {"check_for_nan_in_grad": True}},
            "ddp.check_for_nan_in_grad = True: has",
        ),
    ],
)
def test_contradictions_of_units_are_refused_by_name(document: dict[str, Any], message: str):
    refused(document, message)


def test_each_other_key_of_the_wrapper_is_refused_beside_units():
    """Overlap and buckets may stay, so that ``parallel`` is the only value to change."""
    stay = {"use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "bucket_size", "num_buckets"}
    stay |= {"pad_buckets_for_high_nccl_busbw", "num_distributed_optimizer_instances", "calculate_per_token_loss"}
    others = {"keep_matrices_whole": ["a"], "forward_writes": "alike", "grad_reduce_wire_dtype": "bfloat16"}
    others |= {"shard_atom": 2, "check_replicas_every": 2}
    for field in dataclasses.fields(DistributedDataParallelConfig):
        if field.name not in stay:
            value = others.get(field.name, field.default is not True)
            given = {"overlap_grad_reduce": True, field.name: value}
            refused({"parallel": "fsdp", "ddp": given}, f"ddp.{field.name} = ")


@pytest.mark.parametrize("parallel", ["ddp", "zero1", "hybrid", "fsdp", "hsdp"])
def test_parallel_from_the_command_line(tmp_path: Path, parallel: str):
    config = load_config(tiny_toml(tmp_path), ["--parallel", parallel])
    assert config == tiny_config(tmp_path, parallel=parallel)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "auto"),
        (["--fsdp.copy-engine-gather"], True),
        (["--fsdp.no-copy-engine-gather"], False),
        (["--fsdp.copy-engine-gather", "auto"], "auto"),
    ],
)
def test_a_switch_with_a_third_value(tmp_path: Path, flags: list[str], expected: object):
    path = tmp_path / "config.toml"
    path.write_text('parallel = "fsdp"')
    assert load_config(path, flags).fsdp.copy_engine_gather is expected


def test_contradiction_on_the_command_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"tiny\.toml: ddp\.overlap_param_gather has no effect"):
        load_config(tiny_toml(tmp_path), ["--parallel", "ddp", "--ddp.overlap-param-gather", "True"])


def test_the_table_of_the_wrapper_is_its_configuration():
    """A field that the wrapper gets is a key at once: the file has no list of its own."""
    fields = {field.name: field.default for field in dataclasses.fields(DistributedDataParallelConfig)}
    decided = {"use_distributed_optimizer": True}
    assert structure({"ddp": fields | decided}).ddp == DistributedDataParallelConfig(**decided)
    with pytest.raises(ConfigError, match=r"unknown key 'ddp\.bucket_sise'"):
        structure({"ddp": fields | {"bucket_sise": 3}})


@pytest.mark.parametrize("ranks, instances", [(1, 2), (4, 3), (6, 4)])
def test_instances_that_do_not_divide_the_ranks(tmp_path: Path, ranks: int, instances: int):
    config = tiny_config(tmp_path, parallel="hybrid", ddp={"num_distributed_optimizer_instances": instances})
    with pytest.raises(ConfigError, match=rf"instances = {instances}: must divide the {ranks} rank\(s\)"):
        config.check_ranks(ranks)
    config.check_ranks(instances * (1 + (instances == 2)))


def test_instances_of_ranks_that_share_sequences():
    config = structure({"parallel": "hybrid", "mesh": {"cp": 2}})
    config.check_ranks(2)
    sharded = structure({"parallel": "hsdp", "fsdp": {"num_instances": 3}})
    with pytest.raises(ConfigError, match=r"fsdp\.num_instances = 3: must divide the 2 rank\(s\)"):
        sharded.check_ranks(2)


def test_integers_are_numbers_where_floats_are_wanted():
    assert structure({"optimizer": {"lr": 1}}).optimizer.lr == 1.0


def test_construction_validates_too():
    with pytest.raises(ConfigError, match=r"model\.num_layers = 0"):
        ModelConfig(num_layers=0)


def test_batch_that_does_not_divide_between_ranks(tmp_path: Path):
    train = tiny_config(tmp_path).train
    assert train.sequences_per_microbatch(3) == 4
    with pytest.raises(ConfigError, match=r"num_microbatches \* ranks = 2 \* 5 = 10, such as 30"):
        train.sequences_per_microbatch(5)


@pytest.mark.parametrize("content, message", [(None, "does not exist"), ("model = [", "not valid TOML")])
def test_unreadable_files(tmp_path: Path, content: str | None, message: str):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"run\.toml.*{message}"):
        load_config(path)


def test_errors_name_the_file(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("[train]\nstep = 3\n")
    with pytest.raises(ConfigError, match=r"run\.toml: unknown key 'train\.step': did you mean 'train\.steps'\?"):
        load_config(path)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--train.stepz", "3"], "unknown key 'train.stepz': did you mean 'train.steps'?"),
        (["--train.steps", "x"], "train.steps: must be int, not str"),
        (["--train.steps", "3", "4"], "train.steps = ['3', '4']: must be one value"),
        (["--train.steps"], "train.steps: must be int, not bool"),
        (["--train.steps", "-3"], "train.steps = -3: must be at least 1"),
        (["--logging.wandb-project="], "logging.wandb_project = '': must name a project"),
        (["--train.steps", "1" * 5000], "train.steps: must be int, not str"),
        (["--train.no-steps"], "train.steps: must be int, not bool"),
        (["--optimizer.betas", "0.9"], "optimizer.betas = [0.9]: must have 2 values"),
        (["--steps", "3"], "unknown key 'steps': it is 'train.steps'"),
        (["--parallel.zero", "3"], "parallel = 'zero1': must be a table"),
        (["3"], "'3' is no flag; flags are --TABLE.KEY VALUE"),
    ],
)
def test_wrong_flags_are_answered_as_the_file_is(tmp_path: Path, flags: list[str], said: str):
    with pytest.raises(ConfigError, match=rf"tiny\.toml: {re.escape(said)}"):
        load_config(tiny_toml(tmp_path), flags)


def test_a_flag_mends_what_is_wrong_in_the_file(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('[train]\nsteps = "many"\nseed = -1\n[data]\nsource = "text"\n')
    flags = ["--train.steps", "30", "--train.seed=7", "--data.paths", "a", "5", "--train.out-dir", "12"]
    config = load_config(path, flags)
    assert (config.train.steps, config.train.seed, config.train.out_dir) == (30, 7, "12")
    assert config.data.paths == ("a", "5"), "words, for words are wanted"
    assert load_config(path, [*flags, "--train.out-dir=None"]).train.out_dir == "None"
    assert load_config(path, [*flags, "--train.resume", "7"]).train.resume == "7"
    options = ["--optimizer.name", "torch.optim.NAdam", "--optimizer.options.momentum-decay", "0.01", "--train.compile"]
    config = load_config(path, [*flags, *options, "--optimizer.max-grad-norm", "None"])
    assert config.optimizer.options == {"momentum_decay": 0.01}
    assert config.optimizer.max_grad_norm is None and config.train.compile


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr = inf: must be finite"),
        ({"optimizer": {"betas": [0.9, float("nan")]}}, "optimizer.betas.1 = nan: must be finite"),
        ({"optimizer": {"name": "torch.optim.NAdam", "options": {"eps": float("inf")}}}, "optimizer.options.eps = inf"),
        ({"train": {"seed": 2**64}}, "train.seed = 18446744073709551616: must have at most 63 bits"),
        ({"train": {"seed": -(2**63)}}, "train.seed = -9223372036854775808: must have at most 63 bits"),
        ({"train": {"seed": 2**63}}, "train.seed = 9223372036854775808: must have at most 63 bits"),
        ({"train": {"out_dir": "runs/\0"}}, "train.out_dir = 'runs/\\x00': must not hold the character NUL"),
        ({"data": {"source": "text", "paths": ["a\0"]}}, "data.paths.0 = 'a\\x00': must not hold"),
        ({"model": {"dim": 2**40}}, "model.dim = 1099511627776: must be at most 1048576"),
        ({"model": {"num_layers": 10**8}}, "model.num_layers = 100000000: must be at most 10000"),
        ({"model": {"ffn_dim": 2**22 + 1}}, "model.ffn_dim = 4194305: must be at most 4194304"),
        ({"model": {"vocab_size": 2**24 + 1}}, "model.vocab_size = 16777217: must be at most 16777216"),
        ({"model": {"num_experts": 2**14 + 1}}, "model.num_experts = 16385: must be at most 16384"),
        ({"model": {"num_experts": 4, "expert_ffn_dim": 2**22 + 1}}, "expert_ffn_dim = 4194305: must be at most"),
    ],
)
def test_impossible_values_are_refused_when_the_file_is_read(document: dict[str, Any], message: str):
    refused(document, message)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("adamw", {"betas": (0.0, ALMOST_ONE), "eps": 5e-324}),
        ("muon", {"betas": (ALMOST_ONE, 0.0), "eps": 1e300, "muon_lr": 1e300}),
        ("sgd", {"momentum": ALMOST_ONE}),
        ("lion", {"betas": (0.0, ALMOST_ONE)}),
        *((f"torch.optim.{each}", {}) for each in TORCHS),
    ],
)
def test_a_class_takes_what_the_ranges_of_the_keys_allow(name: str, own: dict[str, Any]):
    """A file is checked without an optimizer of the class, where it has no ``optimizer.options``."""
    for lr, decay in (5e-324, 1e300), (1e300, 0.0):
        decays = decay if name != "torch.optim.Rprop" else 0.0
        config = OptimizerConfig(name=name, lr=lr, weight_decay=decays, **own)
        matrix = torch.nn.Parameter(torch.zeros(1, 1))
        config.optimizer_class([matrix], lr=config.lr, **config.class_options)
        if config.has_muon:
            Muon([matrix], **config.muon_options)


def test_a_flag_is_checked_as_the_file_is(tmp_path: Path):
    for flag, message in (
        ("--optimizer.lr=inf", "optimizer.lr = inf"),
        ("--train.seed=18446744073709551616", "63 bits"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(tiny_toml(tmp_path), [flag])


@pytest.mark.timeout(20)
def test_what_is_no_configuration_file_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "endless.toml").symlink_to("/dev/zero")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "deep.toml").write_text(f"x = {'[' * 100_000}{']' * 100_000}")
    (tmp_path / "latin.toml").write_bytes("[train]\nout_dir = 'läufe'".encode("latin-1"))
    with (tmp_path / "long.toml").open("wb") as file:
        file.truncate(2**40)
    for name, message in {
        "pipe.toml": "cannot be read: it is no regular file",
        "endless.toml": "cannot be read: it is no regular file",
        "latin.toml": "is not valid TOML: 'utf-8' codec",
        "deep.toml": "is not valid TOML: it nests too deep",
        "long.toml": "cannot be read: it has 1099511627776 bytes",
        "absent.toml": "does not exist",
        "latin.toml/run.toml": "cannot be read: .*Not a directory",
    }.items():
        with pytest.raises(ConfigError, match=f"configuration file '.*{name}' {message}"):
            load_config(tmp_path / name)
    with pytest.raises(
        ConfigError, match=r"is a folder, and cannot be read: name a configuration file in it: '.*deep\.toml'"
    ):
        load_config(tmp_path)


def test_parameters_that_are_kept_whole_by_name() -> None:
    given: dict[str, Any] = {"parallel": "zero1", "ddp": {"keep_matrices_whole": ["layers.*_proj.weight"]}}
    assert structure(given).ddp.keep_matrices_whole == ("layers.*_proj.weight",)
    with pytest.raises(ConfigError, match=r"ddp\.keep_matrices_whole"):
        structure({"parallel": "zero1", "ddp": {"keep_matrices_whole": [1]}})
