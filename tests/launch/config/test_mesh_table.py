"""``[mesh]``: what is refused, with the remedy."""

from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_config

from maingrad.launch.config.run import Config, ConfigError, MeshConfig, ModelConfig

EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 8}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"mesh": {"pp": 3}, "train": {"num_microbatches": 3}}, r"mesh\.pp = 3: .* at most model\.num_layers = 2"),
        ({"mesh": {"pp": 2}, "model": EXPERTS}, r"mesh\.pp = 2: must be 1 with model\.num_experts: .* mesh\.ep"),
        (
            {"mesh": {"pp": 2}, "model": {"delay_wgrad_layers": 1}},
            r"mesh\.pp = 2: must be 1 with model\.delay_wgrad_layers: set mesh\.pp_schedule = .InterleavedZeroBubble",
        ),
        (
            {"mesh": {"pp": 2}, "train": {"num_microbatches": 1}},
            r"train\.num_microbatches = 1: must be at least mesh\.pp = 2",
        ),
        (
            {
                "mesh": {"pp": 2, "pp_schedule": "InterleavedZeroBubble"},
                "train": {"num_microbatches": 5, "global_batch_size": 20},
            },
            r"train\.num_microbatches = 5: must be a multiple of 2",
        ),
        ({"mesh": {"pp": 2}, "train": {"cuda_graph": True}}, r"train\.cuda_graph = True: does not go with .* mesh\.pp"),
        (
            {"mesh": {"pp": 2, "pp_schedule": "InterleavedZeroBubble"}, "train": {"compile": True}},
            r"mesh\.pp_schedule = 'InterleavedZeroBubble': does not go with train\.compile",
        ),
        ({"mesh": {"pp_schedule": "GPipe"}}, r"mesh\.pp_schedule = 'GPipe': has no effect with mesh\.pp = 1"),
        ({"mesh": {"ep": 2}}, r"mesh\.ep = 2: must divide model\.num_experts = 0"),
        ({"mesh": {"ep": 3}, "model": EXPERTS}, r"mesh\.ep = 3: must divide model\.num_experts = 4"),
        (
            {"mesh": {"ep": 2}, "model": EXPERTS | {"single_grouped_weight": False}},
            r"mesh\.ep = 2: must be 1 with model\.single_grouped_weight = false: one packed weight is cut",
        ),
        (
            {"mesh": {"ep": 2}, "model": EXPERTS, "train": {"cuda_graph": True}},
            r"train\.cuda_graph = True: does not go with mesh\.transport",
        ),
        ({"mesh": {"transport": "symmetric"}}, r"mesh\.transport = 'symmetric': has no effect with mesh\.ep = 1"),
        ({"mesh": {"tp": 3}}, r"mesh\.tp = 3: must divide model\.num_heads = 4"),
        ({"mesh": {"tp": 4}}, r"mesh\.tp = 4: must divide model\.num_kv_heads = 2"),
        ({"mesh": {"tp": 2}, "model": {"ffn_dim": 63}}, r"mesh\.tp = 2: must divide model\.ffn_dim = 63"),
        ({"mesh": {"sequence_parallel": True}}, r"mesh\.sequence_parallel = True: needs mesh\.tp, .* = 24"),
        (
            {"mesh": {"tp": 2, "cp": 2, "sequence_parallel": True}, "train": {"sequence_length": 22}},
            r"mesh\.sequence_parallel = True: needs mesh\.tp, which divides .* = 11",
        ),
        ({"mesh": {"cp_attention": "ring"}}, r"mesh\.cp_attention = 'ring': .* mesh\.cp above 1"),
        (
            {"mesh": {"cp": 2, "cp_attention": "ring"}, "model": {"dropout": 0.1}},
            r"mesh\.cp_attention = .* model\.dropout = 0",
        ),
        ({"mesh": {"cp": 8, "cp_attention": "ring"}}, r"mesh\.cp = 8: must divide train\.sequence_length / 2 = 12"),
        (
            {"mesh": {"cp": 2, "cp_attention": "ring"}, "data": {"documents": "mask", "end_of_document": 10}},
            r"data\.documents = 'mask': has masks that mesh\.cp_attention",
        ),
        (
            {"mesh": {"cp": 2, "cp_attention": "ring"}, "train": {"compile": True}},
            r"train\.compile = True: does not go with mesh",
        ),
        ({"mesh": {"tp": 2, "cp": 4}}, r"mesh\.cp = 4: must divide model\.num_heads / mesh\.tp = 2"),
        (
            {"mesh": {"cp": 4}, "train": {"sequence_length": 22}},
            r"mesh\.cp = 4: must divide train\.sequence_length = 22",
        ),
        (
            {"mesh": {"tp": 2}, "model": {"num_experts": 2, "top_k": 1, "expert_ffn_dim": 8}},
            r"mesh\.tp = 2: must be 1 with model\.num_experts",
        ),
        (
            {"mesh": {"tp": 2}, "model": {"dropout": 0.1}},
            r"model\.dropout = 0\.1: .* set mesh\.sequence_parallel = true",
        ),
        ({"mesh": {"tp": 2}, "optimizer": {"name": "muon"}}, r"optimizer\.name = 'muon': .* set mesh\.tp = 1"),
        ({"mesh": {"pp": 2}, "optimizer": {"name": "muon"}}, r"optimizer\.name = 'muon': .* and mesh\.pp = 1"),
    ],
)
def test_what_cannot_be_cut_is_refused(tmp_path: Path, sections: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        tiny_config(tmp_path, **sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"mesh": {"pp": 2}, "train": {"num_microbatches": 5, "global_batch_size": 20, "compile": True}},
        {"mesh": {"cp": 2, "cp_attention": "ring"}, "train": {"recompute": "blocks"}},
        {
            "mesh": {"cp": 2, "cp_attention": "ring"},
            "data": {"documents": "pad", "end_of_document": 10, "order": "epochs"},
        },
        {"mesh": {"cp": 2}, "train": {"compile": True}, "data": {"documents": "mask", "end_of_document": 10}},
        {"mesh": {"cp": 2}, "model": {"dropout": 0.1}},
        {"mesh": {"cp": 8, "cp_attention": "ring"}, "train": {"sequence_length": 32}},
        {"mesh": {"tp": 2, "pp": 2}, "parallel": "zero1", "model": {"tie_embeddings": True}},
        {"parallel": "fsdp", "mesh": {"pp": 2}},
        {"parallel": "fsdp", "model": {"tie_embeddings": True}},
        {"mesh": {"ep": 2}, "model": EXPERTS | {"single_grouped_weight": True, "dropout": 0.1}},
        {"model": EXPERTS | {"single_grouped_weight": False, "delay_wgrad_layers": 2}},
        {"optimizer": {"name": "muon"}, "mesh": {"cp": 2}},
    ],
    ids=str,
)
def test_what_goes_with_a_mesh_is_not_refused(tmp_path: Path, sections: dict[str, Any]):
    """Of conditions that are for one kind of mesh, each other kind is free."""
    assert isinstance(tiny_config(tmp_path, **sections), Config)


@pytest.mark.parametrize("words", [2, 4])  # of four, two ranks have two each
def test_each_rank_has_a_word(words: int):
    sizes = {"num_heads": 3, "num_kv_heads": 3, "dim": 12, "ffn_dim": 3}
    MeshConfig(tp=3).check_model(ModelConfig(**sizes, vocab_size=5), 24)
    model = ModelConfig(**sizes, vocab_size=words)
    message = rf"mesh\.tp = 3: leaves a rank without words of model\.vocab_size = {words}"
    with pytest.raises(ConfigError, match=message):
        MeshConfig(tp=3).check_model(model, 24)


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "ep"])
def test_a_model_of_hugging_face_is_not_cut(axis: str):
    with pytest.raises(ConfigError, match=rf"mesh\.{axis} = 2: must be 1 with model\.hugging_face; .*parallelize"):
        Config(model=ModelConfig(hugging_face="somewhere"), mesh=MeshConfig(**{axis: 2}))


@pytest.mark.parametrize(
    ("mesh", "ranks", "message"),
    [
        ({"cp": 2}, 3, r"mesh = '1 x 2 x 1': mesh\.tp \* mesh\.cp \* mesh\.pp = 2 must divide the 3 rank\(s\)"),
        (
            {"pp": 2, "cp": 2},
            6,
            r"mesh = '1 x 2 x 2': mesh\.tp \* mesh\.cp \* mesh\.pp = 4 must divide the 6 rank\(s\)",
        ),
        ({"tp": 2, "dp": 2}, 2, r"mesh\.dp = 2: must be 1: 2 rank\(s\), 2 for a sample"),
        ({"tp": 2, "dp": 1}, 4, r"mesh\.dp = 1: must be 2: 4 rank\(s\), 2 for a sample"),
        ({"cp": 2}, 10, r"num_microbatches \* ranks = 2 \* 5 = 10"),
    ],
)
def test_ranks_that_are_no_such_mesh(tmp_path: Path, mesh: dict[str, int], ranks: int, message: str):
    with pytest.raises(ConfigError, match=message):
        tiny_config(tmp_path, mesh=mesh).check_ranks(ranks)


def test_instances_divide_the_ranks_whose_losses_are_averaged(tmp_path: Path):
    config = tiny_config(tmp_path, parallel="hybrid", mesh={"tp": 2})
    with pytest.raises(ConfigError, match=r"instances = 2: must divide the 1 rank\(s\)"):
        config.check_ranks(2)
    config.check_ranks(4)


def test_experts_are_shared_out_within_an_instance(tmp_path: Path):
    config = tiny_config(tmp_path, parallel="hybrid", mesh={"ep": 4}, model=EXPERTS)
    with pytest.raises(ConfigError, match=r"mesh\.ep = 4: must divide the 2 rank\(s\) of an instance"):
        config.check_ranks(4)


def test_a_mesh_is_said_where_there_is_one():
    axes = ({}, {"tp": 2}, {"cp": 3, "pp": 2}, {"cp": 2, "ep": 4})
    assert [MeshConfig(**sizes).said for sizes in axes] == ["", " (tp 2)", " (cp 3, pp 2)", " (cp 2, ep 4)"]
