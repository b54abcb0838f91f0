"""``[model]``: shape of the GPT, and how its weight gradients are computed."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from .error import require

__all__ = ["ModelConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of the GPT in ``launch/model/gpt.py``, or a model of Hugging Face."""

    hugging_face: str | None = None
    """Folder with the ``config.json`` of a causal language model of Hugging Face; it gives the shape, and ``[model]``
    may only have the next four keys, ``param_dtype`` and ``fuse_wgrad_accumulation`` beside it. None: the GPT."""
    pretrained: bool = True
    """Load the weights in the folder ``hugging_face`` (safetensors). False: draw new ones."""
    attention: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = None
    """Implementation of attention in ``hugging_face``. None: what transformers chooses."""
    trust_remote_code: bool = False
    """Run the code that the ``config.json`` of ``hugging_face`` asks for. Of this key, nothing counts that checkpoints
    and records of runs say."""
    save_hugging_face: bool = True
    """After the last step, write the model to ``train.out_dir``/hugging_face, a folder that transformers loads."""
    vocab_size: int = 256
    """Number of token ids; 256 for bytes."""
    dim: int = 256
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of blocks."""
    num_heads: int = 4
    """Query heads; divides ``dim`` into heads of even width."""
    num_kv_heads: int = 2
    """Key and value heads; divides ``num_heads``. Equal to it: ordinary multi-head attention."""
    ffn_dim: int = 704
    """Width of the SwiGLU feed-forward network; with ``num_experts``, of that in dense blocks."""
    context_length: int = 256
    """Longest sequence, in tokens."""
    dropout: float = 0.0
    """Dropout on attention weights, on the embedding and on both residual branches, in [0, 1)."""
    tie_embeddings: bool = False
    """Tie the weight of the head to the embedding."""
    rotary_base: float = 10_000.0
    """Base of the rotary frequencies."""
    init_std: float = 0.02
    """Standard deviation of the initial weights, before the scaling of residual projections."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters; their ``main_grad`` follows ``ddp.grad_reduce_in_fp32``."""
    fuse_wgrad_accumulation: bool = True
    """Write weight gradients to ``main_grad`` from the GEMM."""
    delay_wgrad_layers: int = 0
    """The head and the last ``delay_wgrad_layers`` blocks compute their weight gradients after each backward, in bucket
    order, while buckets are reduced. ``num_layers``: all blocks, so that backward computes input gradients only."""
    num_experts: int = 0
    """Experts per mixture-of-experts block (``launch/model/moe.py``). 0: all blocks are dense; the keys below have no
    effect and are refused."""
    top_k: int = 0
    """Experts per token."""
    expert_ffn_dim: int = 0
    """Width of the SwiGLU feed-forward network of an expert."""
    shared_expert_ffn_dim: int = 0
    """Width of a dense SwiGLU feed-forward network whose output is added to that of the experts. 0: none."""
    moe_layer_freq: int = 1
    """One in this many blocks has experts, beginning with the first block; 1: every block."""
    normalize_top_k: bool = False
    """Divide the probabilities of the chosen experts by their sum."""
    top_k_scaling_factor: float = 1.0
    """Multiply the probabilities of the chosen experts by this. With ``normalize_top_k``, the value ``top_k`` makes the
    output of an untrained block as large as that of a dense block with the width of the chosen experts together."""
    aux_loss_coefficient: float = 0.01
    """Weight of the load-balancing loss of each router in the training loss."""
    router_z_loss_coefficient: float = 0.0
    """Weight, in the training loss, of the mean square of the log-sum-exp of each router's logits."""
    router_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weight and the product of the router: fp32, or that of the other parameters."""
    single_grouped_weight: bool = True
    """True: one packed weight [experts, out, in] per product. False: one weight per expert."""

    def __post_init__(self) -> None:
        self._check_hugging_face()
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "context_length"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "must be at least 1")
        for name, most in _MOST.items():
            require(getattr(self, name) <= most, f"model.{name}", getattr(self, name), f"must be at most {most}")
        require(
            self.dim % (2 * self.num_heads) == 0,
            "model.dim",
            self.dim,
            f"must be a multiple of 2 * model.num_heads = {2 * self.num_heads} (rotary positions turn pairs)",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.num_kv_heads",
            self.num_kv_heads,
            f"must divide model.num_heads = {self.num_heads}",
        )
        require(0.0 <= self.dropout < 1.0, "model.dropout", self.dropout, "must lie in [0, 1)")
        require(
            0 <= self.delay_wgrad_layers <= self.num_layers,
            "model.delay_wgrad_layers",
            self.delay_wgrad_layers,
            f"must lie between 0 and model.num_layers = {self.num_layers}",
        )
        require(self.rotary_base > 1.0, "model.rotary_base", self.rotary_base, "must be greater than 1")
        require(self.init_std > 0.0, "model.init_std", self.init_std, "must be positive")
        if self.num_experts:
            self._check_experts()
        else:
            for name, neutral in _EXPERT_KEYS.items():
                value = getattr(self, name)
                require(value == neutral, f"model.{name}", value, "has no effect without model.num_experts")

    def _check_experts(self) -> None:
        for name in ("num_experts", "top_k", "expert_ffn_dim", "moe_layer_freq"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "must be at least 1")
        for name in ("shared_expert_ffn_dim", "aux_loss_coefficient", "router_z_loss_coefficient"):
            require(getattr(self, name) >= 0, f"model.{name}", getattr(self, name), "must not be negative")
        require(
            self.top_k <= self.num_experts,
            "model.top_k",
            self.top_k,
            f"must be at most model.num_experts = {self.num_experts}",
        )
        require(
            not (self.normalize_top_k and self.top_k == 1),
            "model.normalize_top_k",
            self.normalize_top_k,
            "makes the one probability 1 under model.top_k = 1, and the router learns nothing from the experts",
        )
        require(
            self.top_k_scaling_factor > 0.0,
            "model.top_k_scaling_factor",
            self.top_k_scaling_factor,
            "must be positive",
        )
        require(
            self.moe_layer_freq <= self.num_layers,
            "model.moe_layer_freq",
            self.moe_layer_freq,
            f"must be at most model.num_layers = {self.num_layers}",
        )
        require(
            self.router_dtype in ("float32", self.param_dtype),
            "model.router_dtype",
            self.router_dtype,
            f'must be "float32" or model.param_dtype = "{self.param_dtype}"',
        )

    def _check_hugging_face(self) -> None:
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if self.hugging_face is None and entry.name in _OF_HUGGING_FACE:
                remedy = "has no effect without model.hugging_face; leave it out"
                require(value == entry.default, f"model.{entry.name}", value, remedy)
            if self.hugging_face is not None and entry.name not in _BESIDE_HUGGING_FACE:
                remedy = "has no effect beside model.hugging_face, whose config.json has the shape; leave it out"
                require(value == entry.default, f"model.{entry.name}", value, remedy)

    def has_experts(self, block: int) -> bool:
        """Whether ``block``, counted from 0, is a mixture of experts."""
        return self.num_experts > 0 and block % self.moe_layer_freq == 0

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads

    @property
    def torch_dtype(self) -> torch.dtype:
        """``param_dtype`` as a torch dtype."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.param_dtype]

    @property
    def torch_router_dtype(self) -> torch.dtype:
        """``router_dtype`` as a torch dtype."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.router_dtype]


_MOST = {
    "vocab_size": 2**24,
    "dim": 2**20,
    "num_layers": 10_000,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "ffn_dim": 2**22,
    "context_length": 2**24,
    "num_experts": 2**14,
    "expert_ffn_dim": 2**22,
    "shared_expert_ffn_dim": 2**22,
}
"""Largest sizes: a slip of the keyboard is answered before a model of that size is planned or built."""

_EXPERT_KEYS = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.name
    in (
        "top_k",
        "expert_ffn_dim",
        "shared_expert_ffn_dim",
        "moe_layer_freq",
        "normalize_top_k",
        "top_k_scaling_factor",
        "aux_loss_coefficient",
        "router_z_loss_coefficient",
        "router_dtype",
        "single_grouped_weight",
    )
}
"""Keys that describe experts, with their values for a model without experts."""

_OF_HUGGING_FACE = frozenset({"pretrained", "attention", "trust_remote_code", "save_hugging_face"})
_BESIDE_HUGGING_FACE = _OF_HUGGING_FACE | {"hugging_face", "param_dtype", "fuse_wgrad_accumulation"}
