"""``muon_groups`` finds hidden matrices, and says of each other parameter why it is none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, Muon, muon_groups
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.launch.config.model import ModelConfig
from maingrad.launch.model.gpt import GPT
from maingrad.te_integration import Embedding, GroupedLinear, GroupedMLP, LayerNormMLP, Linear, convert_linears


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = GroupedLinear(4, 16, 16, bias=False)
        self.packed = nn.Parameter(torch.zeros(4, 16, 16))
        self.register_parameter("decay", nn.Parameter(torch.zeros(16, 16)))


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.positions = nn.Embedding(32, 16)
        self.up = nn.Linear(16, 32)
        self.ours = Linear(32, 16)
        self.mlp = LayerNormMLP(16, 32)
        self.moe = Experts()
        self.patches = nn.Conv1d(16, 16, 3)
        self.narrow = nn.Linear(16, 1, bias=False)
        self.frozen = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.unembedding = nn.Linear(16, 100, bias=False)
        if tied:
            self.unembedding.weight = self.embed.weight

    def forward(self, inputs: Any) -> Any:
        return self.up(inputs)


MATRICES = {
    "up.weight",
    "ours.weight",
    "mlp.fc1_weight",
    "mlp.fc2_weight",
    "moe.packed",
    *(f"moe.experts.weight{index}" for index in range(4)),
}


def test_what_is_left_out_and_why() -> None:
    found = muon_groups(Model(), lr=0.5, momentum=0.9)
    assert set(found.matrices) == MATRICES
    (group,) = found.groups
    assert (group["optimizer"], group["lr"], group["momentum"], group["split"]) == (Muon, 0.5, 0.9, 1)
    why = found.left_out
    assert why["embed.weight"] == why["positions.weight"] == "an embedding, or tied to one"
    assert why["unembedding.weight"] == "of the head" and why["moe.gate.weight"].startswith("of a router")
    assert why["up.bias"] == why["narrow.weight"] == why["mlp.layer_norm_weight"] == "a vector"
    assert why["patches.weight"] == "of a convolution"
    assert why["moe.decay"] == "not of a linear layer, but of Experts"
    trained = {name for name, param in Model().named_parameters() if param.requires_grad}
    assert set(why) == trained - MATRICES

    tied = muon_groups(Model(tied=True))
    assert set(tied.matrices) == MATRICES and tied.left_out["embed.weight"] == "an embedding, or tied to one"


def test_a_sharded_model_has_the_groups_of_the_whole_one_on_all_ranks() -> None:
    def on_each_rank() -> None:
        model = Model()
        model.add_module("qkv", nn.Linear(16, 48))
        model.add_module("c_attn", nn.Linear(16, 48))
        expected = muon_groups(model, split={"c_attn*": [32, 8, 8]})
        fully_shard(model)
        assert muon_groups(model, split={"c_attn*": [32, 8, 8]}) == expected

    simulate(on_each_rank, 5)


def test_adapters_of_fused_layers() -> None:
    pair = nn.ModuleDict({"lora_A": nn.Linear(16, 3, bias=False), "lora_B": nn.Linear(3, 64, bias=False)})
    query = nn.ModuleDict({name: nn.Linear(16, 3, bias=False) for name in ("lora_A", "lora_down")})
    model = nn.ModuleDict({"qkv": query, "mlp": nn.ModuleDict({"gate_up_proj": pair})})
    parts = {name: group.get("split", 1) for group in muon_groups(model).groups for name in group["params"]}
    assert parts == {
        "qkv.lora_A.weight": 1,
        "qkv.lora_down.weight": 1,
        "mlp.gate_up_proj.lora_A.weight": 1,
        "mlp.gate_up_proj.lora_B.weight": 2,
    }


def test_routers_by_choice() -> None:
    assert set(muon_groups(Model(), routers=True).matrices) == MATRICES | {"moe.gate.weight"}


class Fused(nn.Module):
    def __init__(self, rows: int = 48) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(16, rows, bias=False)
        self.gate_up_proj = nn.Linear(16, 64, bias=False)
        self.o_proj = nn.Linear(16, 16, bias=False)


def test_fused_matrices_have_parts() -> None:
    parts = {name: group["split"] for group in muon_groups(Fused()).groups for name in group["params"]}
    assert parts == {"qkv_proj.weight": 3, "gate_up_proj.weight": 2, "o_proj.weight": 1}
    with pytest.raises(ValueError, match=r"'qkv_proj.weight' \[32, 16\] seems to be several matrices"):
        muon_groups(Fused(32))
    found = muon_groups(Fused(32), split={"*qkv*": [16, 8, 8]})
    parts = {name: group["split"] for group in found.groups for name in group["params"]}
    assert parts["qkv_proj.weight"] == (16, 8, 8) and parts["o_proj.weight"] == 1
    with pytest.raises(ValueError, match=r"split has '\*kqv\*', and no matrix is called so"):
        muon_groups(Fused(), split={"*kqv*": 3})


def test_layers_and_models_may_say_their_parts() -> None:
    """A layer by ``matrix_rows``, as ours of grouped-query attention; attention of transformers by its config."""
    fused = Fused(32)
    fused.qkv_proj.matrix_rows = [16, 8, 8]
    parts = {name: group["split"] for group in muon_groups(fused).groups for name in group["params"]}
    assert parts["qkv_proj.weight"] == (16, 8, 8)
    sizes: Any = {"dim": 16, "num_layers": 1, "num_heads": 4, "num_kv_heads": 1, "vocab_size": 64}
    model = GPT(ModelConfig(**sizes))
    parts = {name: group["split"] for group in muon_groups(model).groups for name in group["params"]}
    assert parts["blocks.0.attention.qkv.weight"] == (16, 4, 4) and parts["blocks.0.ffn.gate_up.weight"] == 2
    transformers = pytest.importorskip("transformers")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48}
    config = transformers.Phi3Config(num_hidden_layers=1, vocab_size=64, pad_token_id=0, **heads)
    parts = {
        name: group["split"]
        for group in muon_groups(transformers.Phi3ForCausalLM(config)).groups
        for name in group["params"]
    }
    assert parts["model.layers.0.self_attn.qkv_proj.weight"] == (32, 16, 16)
    assert parts["model.layers.0.mlp.gate_up_proj.weight"] == 2


def test_gated_weights_of_our_modules_have_halves() -> None:
    gated = nn.ModuleDict(
        {
            "plain": LayerNormMLP(16, 32),
            "gated": LayerNormMLP(16, 32, activation="swiglu"),
            "experts": GroupedMLP(2, 16, 32),
            "packed": GroupedMLP(2, 16, 32, single_grouped_weight=True),
        }
    )
    parts = {name: group["split"] for group in muon_groups(gated).groups for name in group["params"]}
    assert {name for name, each in parts.items() if each == 2} == {
        "gated.fc1_weight",
        "experts.fc1_weight0",
        "experts.fc1_weight1",
        "packed.fc1_weight",
    }
    assert parts["plain.fc1_weight"] == parts["packed.fc2_weight"] == 1


def test_routers_that_hold_a_linear_layer() -> None:
    sizes: Any = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "vocab_size": 64}
    experts: Any = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 32}
    model = GPT(ModelConfig(**sizes, **experts))
    split = {"*.qkv.*": [16, 8, 8]}
    found = muon_groups(model, split=split)
    (router,) = [name for name in found.left_out if "router" in name]
    assert found.left_out[router] == "of a router: routers=True takes it"
    assert router in muon_groups(model, split=split, routers=True).matrices


class Positions(nn.Module):
    """Few characters, and tables of positions: rows as many as a hidden layer's, and [1, tokens, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(10, 16)
        self.positions = nn.Embedding(32, 16)
        self.learned = nn.Parameter(torch.zeros(1, 32, 16))
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.to_characters = nn.Linear(16, 10)


def test_tables_of_positions() -> None:
    found = muon_groups(Positions())
    assert set(found.matrices) == {"up.weight", "down.weight"}
    assert found.left_out["to_characters.weight"] == "of the head"
    assert found.left_out["learned"] == "not of a linear layer, but of Positions"


def test_parameters_with_three_dims_that_are_no_experts() -> None:
    model = nn.ModuleDict({"mixed": nn.Bilinear(8, 8, 4), "up": nn.Linear(8, 8)})
    model.register_parameter("bias_by_head", nn.Parameter(torch.zeros(2, 16, 16)))
    found = muon_groups(model)
    assert found.left_out["mixed.weight"] == "not of a linear layer, but of Bilinear"
    assert found.left_out["bias_by_head"] == "not of a linear layer, but of ModuleDict"
    assert found.matrices == ("up.weight",)


def test_rows_of_a_known_head_are_those_of_other_matrices_too() -> None:
    """No other matrix is the head, though it has as many rows as the vocabulary."""
    model = nn.ModuleDict({"embedding": nn.Embedding(48, 16), "qkv": nn.Linear(16, 48), "lm_head": nn.Linear(16, 48)})
    assert muon_groups(model).matrices == ("qkv.weight",)
    tied = nn.ModuleDict({"embedding": nn.Embedding(48, 16), "qkv": nn.Linear(16, 48), "last": nn.Linear(16, 48)})
    tied["last"].weight = tied["embedding"].weight
    assert muon_groups(tied).matrices == ("qkv.weight",)


class Other(nn.Module):
    """No linear layer."""

    def __init__(self, *shape: int, name: str = "weight") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def reasons(**modules: nn.Module) -> dict[str, str]:
    """Why matrices are left out; "" for those that are not."""
    found = muon_groups(nn.ModuleDict(modules))
    return found.left_out | dict.fromkeys(found.matrices, "")


def test_what_makes_a_head_or_a_router() -> None:
    table, last, up = nn.Embedding(48, 16), nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
    # Of a module that is no linear layer, and in a router, the name of a head says nothing: it is found by its rows.
    assert reasons(table=table, score=Other(4, 16), last=last)["last.weight"] == "of the head"
    router = nn.ModuleDict({"output": nn.Linear(16, 4, bias=False)})
    found = reasons(table=table, router=router, last=last)
    assert found["last.weight"] == "of the head"
    assert found["router.output.weight"].startswith("of a router")
    assert reasons(subrouter=up)["subrouter.weight"] == "", "a part of the path says it, and no part of a name"
    # A fused table is a linear layer neither.
    assert reasons(table=Embedding(48, 16), last=last)["last.weight"] == "of the head"
    # A gate without experts beside it is a linear layer as another.
    assert reasons(gate=up)["gate.weight"] == ""


def test_the_first_owner_of_a_tied_matrix_says_what_it_is() -> None:
    for names, why in (({"layer", "other"}, ""), ({"other"}, "not of a linear layer, but of Other")):
        layer, other = nn.Linear(16, 16, bias=False), Other(16, 16)
        other.weight = layer.weight
        modules = {"layer": layer, "other": other} if "layer" in names else {"other": other, "layer": layer}
        (found,) = reasons(**modules).values()
        assert found == why


def test_matrices_of_other_kinds() -> None:
    assert reasons(complex=nn.Linear(4, 4, bias=False, dtype=torch.complex64)) == {"complex.weight": "a vector"}
    assert reasons(block=Experts())["block.packed"] == "", "the name of the class says it"
    layer = nn.Linear(4, 4, bias=False)
    layer.kernel = nn.Parameter(torch.zeros(2, 2, 4, 4))
    found = reasons(layer=layer, sparse_moe=Other(3, 4, 4), experts=Other(1, 4, 4))
    assert found == {
        "layer.weight": "",
        "layer.kernel": "not of a linear layer, but of Linear",
        "sparse_moe.weight": "",
        "experts.weight": "",
    }


@pytest.mark.parametrize("name", ["qkv", "query_key_value", "c_attn", "wqkv_fused", "gate_up_1"])
def test_fused_matrices_of_unknown_parts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'experts\.{name}' \[12, 4, 8\] seems to be several matrices in one"):
        muon_groups(nn.ModuleDict({"experts": Other(12, 4, 8, name=name)}))
    for rows in (40, 16, 24, 96) if "gate" not in name else ():
        linear = nn.Linear(16, rows, bias=False)
        with pytest.raises(ValueError, match="seems to be several matrices in one"):
            muon_groups(nn.ModuleDict({name: linear}))


@pytest.mark.parametrize(
    "missing", ["num_attention_heads", "num_key_value_heads", "head_dim", "rows", "linear", "nothing"]
)
def test_attention_says_its_rows_by_its_config_where_all_of_it_fits(missing: str) -> None:
    rows = 40 if missing == "rows" else 32
    layer = nn.Linear(16, rows, bias=False) if missing != "linear" else Other(rows, 4, 16)
    attention = nn.ModuleDict({"qkv_proj": layer})
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    sizes.pop(missing, None)
    attention.config, attention.head_dim = SimpleNamespace(**sizes), sizes.get("head_dim")
    model = nn.ModuleDict({"experts": attention})
    if missing == "nothing":
        assert muon_groups(model).groups[0]["split"] == (16, 8, 8)
        return
    with pytest.raises(ValueError, match="seems to be several matrices in one"):
        muon_groups(model)


@pytest.mark.parametrize(
    "name", ["lm_head", "head", "output", "output_layer", "score", "classifier", "unembed", "embed_out"]
)
def test_names_of_heads(name: str) -> None:
    """Also inside of another module, and where the rows are not those of the table."""
    decoder = nn.ModuleDict({name: nn.Linear(16, 40, bias=False)})
    found = reasons(table=nn.Embedding(48, 16), decoder=decoder, last=nn.Linear(16, 48, bias=False))
    assert found[f"decoder.{name}.weight"] == "of the head"
    assert found["last.weight"] == ""


def test_each_reason_is_said_once_where_nothing_is_a_matrix() -> None:
    found = muon_groups(nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4), nn.Conv1d(4, 4, 3, bias=False)))
    assert "would update all (a vector; of a convolution)" in found.why_nothing
    assert "(nothing is trained)" in muon_groups(nn.Identity()).why_nothing


def test_matrices_with_rows_of_inputs() -> None:
    """Parts of these lie beside each other: halves of rows would cut each part."""
    transformers = pytest.importorskip("transformers")
    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts: Any = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **heads, **experts))
    for converted in (False, True):
        if converted:
            convert_linears(model)
        with pytest.raises(ValueError, match=r"gate_up_proj' \[4, 16, 32\] seems to be several matrices"):
            muon_groups(model)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=64))
    assert muon_groups(model).left_out["transformer.h.0.mlp.c_fc.weight"].startswith("of transformers' Conv1D")


def test_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    found = muon_groups(model)
    assert len(found.matrices) == 7 and all("_proj" in name for name in found.matrices)
    assert found.left_out["lm_head.weight"] == "of the head"


@pytest.mark.parametrize("sharded", [False, True])
def test_groups_go_to_the_optimizer(sharded: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    muon = muon_groups(net, lr=0.02)
    kept: Any = {"use_distributed_optimizer": True, "keep_matrices_whole": muon.matrices} if sharded else {}
    model = DistributedDataParallel(net, DistributedDataParallelConfig(**kept))
    assert muon_groups(model, lr=0.02) == muon
    optimizer = DistributedOptimizer(model, lr=0.01, param_groups=muon.groups)
    before = [param.detach().clone() for param in net.parameters()]
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(param, old) for param, old in zip(net.parameters(), before, strict=True))
    assert optimizer.classes_of_groups == [Muon, torch.optim.AdamW]


def test_each_model_of_hugging_face_inside_of_a_model_says_its_head() -> None:
    """Their names and rows say nothing."""

    class Says(nn.Module):
        def __init__(self, head: bool) -> None:
            super().__init__()
            self.up, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 40, bias=False)
            self.head_of = self.last if head else None

        def get_output_embeddings(self) -> nn.Module | None:
            return self.head_of

    found = reasons(encoder=Says(False), decoder=Says(True), other=Says(True))
    heads = {name for name, why in found.items() if why == "of the head"}
    assert heads == {"decoder.last.weight", "other.last.weight"} | {
        name for name in heads if name.endswith("head_of.weight")
    }
    assert found["encoder.last.weight"] == ""
