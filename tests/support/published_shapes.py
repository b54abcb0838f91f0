"""Parameters of four published models, by the units that fully sharded data parallelism gathers: layers and the root.

Names and sizes follow from each model's published ``config.json`` (on the Hugging Face hub: meta-llama/Llama-3.1-8B,
Qwen/Qwen3-0.6B, openai/gpt-oss-20b, deepseek-ai/DeepSeek-V3) as transformers' model classes read them. Without the
multi-token prediction layer of DeepSeek-V3 and without its router's correction bias, which is no trained parameter.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

Shapes = Mapping[str, tuple[int, ...]]


class PublishedUnit(NamedTuple):
    """One unit, of which the model has ``count`` alike."""

    name: str
    count: int
    dense: Shapes
    """In the order of registration."""
    experts: Shapes
    """Weights of routed experts, which may have ranks of their own."""


def dense_layer(hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int) -> Shapes:
    """Grouped-query attention and a gated MLP, as in Llama."""
    return {
        "self_attn.q_proj.weight": (heads * head_dim, hidden),
        "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def root(vocabulary: int, hidden: int, *, tied: bool = False) -> PublishedUnit:
    """Embedding, final norm, and the head where it is not the embedding."""
    head = {} if tied else {"lm_head.weight": (vocabulary, hidden)}
    dense = {"embed_tokens.weight": (vocabulary, hidden), "norm.weight": (hidden,), **head}
    return PublishedUnit("root", 1, dense, {})


def llama_8b() -> list[PublishedUnit]:
    return [root(128256, 4096), PublishedUnit("layer", 32, dense_layer(4096, 32, 8, 128, 14336), {})]


def qwen3_06b() -> list[PublishedUnit]:
    layer = {
        **dense_layer(1024, 16, 8, 128, 3072),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
    }
    return [root(151936, 1024, tied=True), PublishedUnit("layer", 28, layer, {})]


def gpt_oss_20b() -> list[PublishedUnit]:
    """2880 wide; experts are packed, as (experts, in, out)."""
    hidden, query, key_value, experts = 2880, 4096, 512, 32
    dense = {
        "self_attn.sinks": (64,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.q_proj.bias": (query,),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.k_proj.bias": (key_value,),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.v_proj.bias": (key_value,),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.o_proj.bias": (hidden,),
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    packed = {
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * hidden),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * hidden),
        "mlp.experts.down_proj": (experts, hidden, hidden),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }
    return [root(201088, hidden), PublishedUnit("layer", 24, dense, packed)]


def deepseek_v3(*, packed: bool) -> list[PublishedUnit]:
    """Latent attention; three dense layers, then layers of 256 experts, packed as (experts, out, in) or one by one."""
    hidden, heads, query_rank, key_value_rank, expert, experts = 7168, 128, 1536, 512, 2048, 256
    attention = {
        "self_attn.q_a_proj.weight": (query_rank, hidden),
        "self_attn.q_a_layernorm.weight": (query_rank,),
        "self_attn.q_b_proj.weight": (heads * (128 + 64), query_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (key_value_rank + 64, hidden),
        "self_attn.kv_a_layernorm.weight": (key_value_rank,),
        "self_attn.kv_b_proj.weight": (heads * (128 + 128), key_value_rank),
        "self_attn.o_proj.weight": (hidden, heads * 128),
    }
    norms = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    router = {"mlp.gate.weight": (experts, hidden)}
    if packed:
        routed: Shapes = {
            "mlp.experts.gate_up_proj": (experts, 2 * expert, hidden),
            "mlp.experts.down_proj": (experts, hidden, expert),
        }
    else:
        routed = {
            name: shape
            for index in range(experts)
            for name, shape in gated(f"mlp.experts.{index}", hidden, expert).items()
        }
    sparse = {**attention, **router, **gated("mlp.shared_experts", hidden, expert), **norms}
    return [
        root(129280, hidden),
        PublishedUnit("dense layer", 3, {**attention, **gated("mlp", hidden, 18432), **norms}, {}),
        PublishedUnit("sparse layer", 58, sparse, routed),
    ]


def gated(prefix: str, hidden: int, intermediate: int) -> Shapes:
    """The three weights of a gated MLP."""
    return {
        f"{prefix}.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.up_proj.weight": (intermediate, hidden),
        f"{prefix}.down_proj.weight": (hidden, intermediate),
    }


PUBLISHED: Mapping[str, Callable[[], list[PublishedUnit]]] = {
    "Llama-8B": llama_8b,
    "Qwen3-0.6B": qwen3_06b,
    "gpt-oss-20b": gpt_oss_20b,
    "DeepSeek-V3, packed": lambda: deepseek_v3(packed=True),
    "DeepSeek-V3, one by one": lambda: deepseek_v3(packed=False),
}
