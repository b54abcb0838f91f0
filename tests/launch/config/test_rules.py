"""Conditions on several keys together: each refuses its case, and lets the nearest permitted one through."""

from typing import Any

import pytest
import torch

from maingrad.launch.config.file import config_to_dict, structure, structure_of_run
from maingrad.launch.config.mesh import Stage
from maingrad.launch.config.run import ConfigError, ModelConfig, OptimizerConfig

EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 8}
BFLOAT16 = {"param_dtype": "bfloat16"}
NADAM = "torch.optim.NAdam"
GRAPH = {"cuda_graph": True}
FILES: dict[str, Any] = {"source": "tokens", "paths": ["a", "b"]}


@pytest.mark.parametrize(
    ("document", "start"),
    [
        ({"model": {"dim": 40, "num_heads": 8}}, "model.dim = 40: must be a multiple of 2 * model.num_heads = 16"),
        ({"model": {"fused_loss": True, "delay_wgrad_layers": 1}}, "model.fused_loss = True: has no effect on a head"),
        (
            {"model": {"hugging_face": "a", "fused_loss": True, "fuse_wgrad_accumulation": False}},
            "model.fused_loss = True: needs model.fuse_wgrad_accumulation",
        ),
        ({"model": {"hugging_face": "a", "num_layers": 3}}, "model.num_layers = 3: has no effect beside"),
        ({"model": EXPERTS | {"top_k": 0}}, "model.top_k = 0: must be at least 1"),
        ({"model": EXPERTS | {"expert_ffn_dim": 0}}, "model.expert_ffn_dim = 0: must be at least 1"),
        ({"model": EXPERTS | {"top_k": 5}}, "model.top_k = 5: must be at most model.num_experts = 4"),
        ({"model": EXPERTS | {"top_k": 1, "normalize_top_k": True}}, "model.normalize_top_k = True: makes the one"),
        ({"model": EXPERTS | {"num_layers": 3, "moe_layer_freq": 4}}, "model.moe_layer_freq = 4: must be at most"),
        ({"model": EXPERTS | {"router_dtype": "bfloat16"}}, "model.router_dtype = 'bfloat16': must be \"float32\" or"),
        ({"model": {"top_k_scaling_factor": 2.0}}, "model.top_k_scaling_factor = 2.0: has no effect without model.num"),
        ({"model": {"aux_loss_coefficient": 0.5}}, "model.aux_loss_coefficient = 0.5: has no effect without model.num"),
        ({"data": FILES | {"weights": [1.0], "order": "epochs"}}, "data.weights = (1.0,): must be one number for each"),
        ({"data": FILES | {"weights": [1.0] * 3, "order": "epochs"}}, "data.weights = (1.0, 1.0, 1.0): must be one"),
        ({"data": FILES | {"weights": [1.0, 2.0]}}, "data.weights = (1.0, 2.0): are kept sequence by sequence"),
        ({"data": {"documents": "pad", "end_of_document": 0}}, "data.documents = 'pad': makes sequences of documents"),
        ({"data": FILES | {"documents": "pad", "order": "epochs"}}, "data.documents = 'pad': source = \"tokens\" does"),
        ({"data": {"source": "tokens"}}, 'data.paths = (): source = "tokens" needs at least one file'),
        ({"optimizer": {"name": "sgd", "betas": [0.8, 0.9]}}, "optimizer.betas = (0.8, 0.9): is not read by name"),
        ({"optimizer": {"name": "sgd", "eps": 1e-6}}, "optimizer.eps = 1e-06: is not read by name"),
        ({"optimizer": {"name": "lion", "momentum": 0.5}}, "optimizer.momentum = 0.5: is not read by name"),
        ({"optimizer": {"momentum": 0.5}}, "optimizer.momentum = 0.5: is not read by name"),
        ({"optimizer": {"name": NADAM, "eps": 1e-6}}, "optimizer.eps = 1e-06: is not read by name"),
        ({"optimizer": {"muon_lr": 0.5}}, 'optimizer.muon_lr = 0.5: is read by name = "muon" alone'),
        ({"optimizer": {"muon_split": {"a": [1, 1]}}}, "optimizer.muon_split = {'a': (1, 1)}: is read by name"),
        ({"optimizer": {"name": "torch.optim.Rprop"}}, "optimizer.weight_decay = 0.1: Rprop has none: set 0.0"),
        ({"optimizer": {"name": "torch.optim.LBFGS"}}, "optimizer.name = 'torch.optim.LBFGS': does not update each"),
        ({"optimizer": {"name": "NAdam"}}, 'optimizer.name = \'NAdam\': must be "adamw", "muon"'),
        ({"optimizer": {"options": {"eps": 1e-6}}}, "optimizer.options.eps = 1e-06: set optimizer.eps"),
        ({"optimizer": {"name": NADAM, "options": {"decay": 0.1}}}, "optimizer.options = {'decay': 0.1}: "),
        ({"optimizer": {"name": NADAM, "options": {"momentum_decay": -1.0}}}, "optimizer.options = {'momentum_decay':"),
        ({"optimizer": {"name": "torch.optim.RMSprop", "options": {"beta1": 0.5}}}, "optimizer.options = {'beta1': 0"),
        ({"optimizer": {"name": "muon", "options": {"foreach": True}}}, "optimizer.options = {'foreach': True}: "),
        ({"optimizer": {"name": "muon", "options": {"momentum": 2.0}}}, "optimizer.options = {'momentum': 2.0}: "),
        (
            {"parallel": "fsdp", "optimizer": {"name": "muon"}, "fsdp": {"offload_to_cpu": True}},
            "optimizer.name = 'muon': steps on the GPU, and does not go with fsdp.offload_to_cpu",
        ),
        (
            {"parallel": "hsdp", "optimizer": {"name": "muon"}, "fsdp": {"placements": "hsdp_zero1"}},
            "optimizer.name = 'muon': does not go with optimizer state that is sharded across instances",
        ),
        ({"train": {"recompute_every": 2}}, "train.recompute_every = 2: has no effect without train.recompute"),
        ({"train": {"recompute": "attention", "compile": True}}, "train.recompute = 'attention': does not go with"),
        (
            {"model": BFLOAT16, "train": {"recipe": "mxfp8", "compile": True}},
            "train.recipe = 'mxfp8': does not go",
        ),
        ({"train": {"recipe": "mxfp8"}}, "train.recipe = 'mxfp8': quantises a model in bfloat16"),
        ({"model": EXPERTS | BFLOAT16, "train": {"recipe": "float8_delayed"}}, "train.recipe = 'float8_delayed': does"),
        (
            {"parallel": "fsdp", "train": GRAPH, "fsdp": {"offload_to_cpu": True}},
            "train.cuda_graph = True: does not",
        ),
        (
            {"parallel": "fsdp", "train": GRAPH, "fsdp": {"copy_engine_gather": True}},
            "train.cuda_graph = True: does not go with fsdp.offload_to_cpu, whose update runs on the host, and",
        ),
        (
            {"parallel": "hsdp", "train": GRAPH, "optimizer": {"name": "muon"}},
            'train.cuda_graph = True: does not go with optimizer.name = "muon" under parallel = "hsdp"',
        ),
        (
            {"train": GRAPH, "ddp": {"check_for_nan_in_grad": True}},
            "train.cuda_graph = True: does not go with ddp",
        ),
        (
            {"train": GRAPH, "ddp": {"check_replicas_every": 3}},
            "train.cuda_graph = True: does not go with ddp",
        ),
        ({"train": GRAPH | {"recompute": "blocks"}, "model": {"dropout": 0.1}}, "train.recompute = 'blocks': does not"),
        (
            {
                "parallel": "fsdp",
                "mesh": {"pp": 2},
                "model": {"tie_embeddings": True},
                "train": {"num_microbatches": 2},
            },
            'model.tie_embeddings = True: does not go with mesh.pp under parallel = "fsdp"',
        ),
        ({"checkpoint": {"keep_every": 4}}, "checkpoint.keep_every = 4: says which older checkpoints stay"),
        ({"logging": {"wandb_name": "a"}}, "logging.wandb_name = 'a': has no effect without logging.wandb_project"),
        ({"profile": {"num_steps": 4}}, "profile.num_steps = 4: has no effect without profile.first_step"),
        ({"profile": {"first_step": 1, "trace": False}}, "profile.trace = False: records nothing without"),
        ({"profile": {"first_step": 1, "ranks": [1, 1]}}, "profile.ranks = (1, 1): must name different ranks"),
        ({"profile": {"first_step": 1, "ranks": [-1]}}, "profile.ranks = (-1,): must not be negative"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(document: dict[str, Any], start: str):
    with pytest.raises(ConfigError) as error:
        structure(document)
    assert str(error.value).startswith(start)


@pytest.mark.parametrize(
    "document",
    [
        {"model": {"dim": 48, "num_heads": 8}},
        {"model": EXPERTS | {"top_k": 4, "normalize_top_k": True}},
        {"model": EXPERTS | {"num_layers": 3, "moe_layer_freq": 3}},
        {"model": EXPERTS | BFLOAT16 | {"router_dtype": "bfloat16"}, "train": {"recipe": "float8_current"}},
        {"model": EXPERTS | BFLOAT16 | {"router_dtype": "float32"}},
        {"data": FILES | {"weights": [1.0, 2.0], "order": "epochs"}},
        {"data": {"documents": "mask", "end_of_document": 0}},
        {"data": {"source": "megatron", "paths": ["a"], "documents": "mask"}},
        {"data": {"source": "hugging_face", "paths": ["a"], "documents": "mask", "column": "ids"}},
        {"optimizer": {"name": "torch.optim.Rprop", "weight_decay": 0.0}},
        {"optimizer": {"name": NADAM, "options": {"beta1": 0.5, "eps": 1e-6}}},
        {"optimizer": {"name": "muon", "muon_lr": 0.5, "muon_split": {"a": [1, 1]}, "options": {"momentum": 0.5}}},
        {"parallel": "fsdp", "optimizer": {"name": "muon"}},
        {"parallel": "hsdp", "optimizer": {"name": "adamw"}, "fsdp": {"placements": "hsdp_zero1"}},
        {"optimizer": {"name": "muon"}, "train": GRAPH},
        {"parallel": "fsdp", "train": GRAPH, "fsdp": {"copy_engine_gather": "auto"}},
        {"parallel": "fsdp", "train": GRAPH, "fsdp": {"copy_engine_gather": False}},
        {"train": GRAPH | {"recompute": "blocks"}},
        {"train": {"cuda_graph": "auto", "recompute": "blocks"}, "model": {"dropout": 0.1}},
        {"train": {"recompute": "operators", "compile": True}},
        {"train": {"log_every": 4, "save_every": 8}},
        {"train": {"steps": 5}, "optimizer": {"warmup_steps": 4}},
        {"train": {"sequence_length": 256}, "model": {"context_length": 256}},
        {"logging": {"wandb_project": "a", "wandb_name": "b", "wandb_mode": "offline"}},
        {"profile": {"first_step": 0, "num_steps": 1, "ranks": [2, 0]}},
    ],
    ids=str,
)
def test_the_nearest_that_goes_together_is_read(document: dict[str, Any]):
    assert structure(config_to_dict(structure(document))) == structure(document)


def test_blocks_with_experts_come_every_so_many():
    model = ModelConfig(**EXPERTS, num_layers=5, moe_layer_freq=2)
    assert [model.has_experts(block) for block in range(5)] == [True, False, True, False, True]
    assert not any(ModelConfig(num_layers=2).has_experts(block) for block in range(2))


@pytest.mark.parametrize(
    ("layers", "sizes"), [(4, [2, 2]), (5, [3, 2]), (7, [2, 2, 2, 1]), (10, [3, 2, 3, 2]), (3, [1, 1, 1])]
)
def test_the_last_stage_has_no_block_more(layers: int, sizes: list[int]):
    stages = [Stage(index, len(sizes)).blocks(layers) for index in range(len(sizes))]
    assert [len(stage) for stage in stages] == sizes
    assert [block for stage in stages for block in stage] == list(range(layers))


def test_the_record_of_a_run_lets_no_code_run():
    document = {"model": {"hugging_face": "somewhere", "trust_remote_code": True}}
    assert structure(document).model.trust_remote_code
    assert not structure_of_run(document).model.trust_remote_code


def test_options_are_arguments_of_the_class_they_are_for():
    muon = OptimizerConfig(name="muon", betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, options={"momentum": 0.5})
    assert muon.class_options == {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    assert muon.muon_options == {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.5}
    nadam = OptimizerConfig(name=NADAM, weight_decay=0.2, options={"beta2": 0.5, "momentum_decay": 0.1})
    for _ in range(2):  # the configuration stays as it is
        assert nadam.class_options == {"weight_decay": 0.2, "momentum_decay": 0.1, "betas": (0.9, 0.5)}
    assert nadam.options == {"beta2": 0.5, "momentum_decay": 0.1}
    own = OptimizerConfig(name=NADAM, weight_decay=0.2, options={"weight_decay": 0.5})
    assert own.class_options == {"weight_decay": 0.5}, "what is said of the class itself comes last"
    rprop = OptimizerConfig(name="torch.optim.Rprop", weight_decay=0.0)
    assert rprop.class_options == {}


@pytest.mark.parametrize(
    ("name", "options", "elements"),
    [
        ("adamw", {}, 2),
        ("muon", {}, 2),
        ("sgd", {"momentum": 0.5}, 1),
        ("sgd", {"momentum": 0.0}, 0),
        ("lion", {}, 1),
        ("torch.optim.Adagrad", {}, 1),
        ("torch.optim.RMSprop", {"options": {"centered": True}}, 2),
        ("torch.optim.Adam", {"options": {"amsgrad": True}}, 3),
    ],
)
def test_the_state_of_an_element_is_counted_by_a_step(name: str, options: dict[str, Any], elements: int):
    assert OptimizerConfig(name=name, **options).state_per_element() == elements


def test_matrices_of_muon_have_its_options():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4))
    muon = OptimizerConfig(name="muon", muon_lr=0.5, muon_split={"0.*": (2, 4)}, options={"momentum": 0.25})
    groups = {tuple(group["params"]): group for group in muon.muon_of(model).groups}
    assert {names: tuple(group["split"]) for names, group in groups.items() if names == ("0.weight",)} == {
        ("0.weight",): (2, 4)
    }
    assert {(group["lr"], group["momentum"]) for group in groups.values()} == {(0.5, 0.25)}
    assert OptimizerConfig().muon_of(model) == ([], {})
    with pytest.raises(ConfigError, match=r"^optimizer\.muon_split: .*no matrix is called so"):
        OptimizerConfig(name="muon", muon_split={"none": (2, 4)}).muon_of(model)
    with pytest.raises(ConfigError, match=r"^optimizer\.name = 'muon': finds no matrix for Muon"):
        OptimizerConfig(name="muon").muon_of(torch.nn.LayerNorm(4))
