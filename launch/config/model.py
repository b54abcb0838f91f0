"""``[model]``: shape of the GPT, and how its weight gradients are computed."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from .table import Count, Natural, NotNegative, Positive, Range, Share, Table, at_most, require_defaults

__all__ = ["ModelConfig"]

# The largest sizes answer a slip of the keyboard before a model of that size is planned or built.
_Tokens = Annotated[Count, at_most(2**24)]
_Heads = Annotated[Count, at_most(2**16)]
_Width = Annotated[Natural, at_most(2**22)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(Table):
    """Shape of the GPT in ``launch/model/gpt.py``, or a model of Hugging Face."""

    hugging_face: str | None = None
    """Folder with the ``config.json`` of a causal language model of Hugging Face; it gives the shape, and ``[model]``
    may only have the next four keys, ``param_dtype``, ``fuse_wgrad_accumulation`` and ``fused_loss`` beside it. None:
    the GPT."""
    pretrained: bool = True
    """Load the weights in the folder ``hugging_face`` (safetensors). False: draw new ones."""
    attention: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = None
    """Implementation of attention in ``hugging_face``. None: what transformers chooses."""
    trust_remote_code: bool = False
    """Run the code that the ``config.json`` of ``hugging_face`` asks for. Of this key, nothing counts that checkpoints
    and records of runs say."""
    save_hugging_face: bool = True
    """After the last step, write the model to ``train.out_dir``/hugging_face, a folder that transformers loads."""
    vocab_size: _Tokens = 256
    """Number of token ids; 256 for bytes."""
    dim: Annotated[Count, at_most(2**20)] = 256
    """Width of the residual stream."""
    num_layers: Annotated[Count, at_most(10_000)] = 4
    """Number of blocks."""
    num_heads: _Heads = 4
    """Query heads; divides ``dim`` into heads of even width."""
    num_kv_heads: _Heads = 2
    """Key and value heads; divides ``num_heads``. Equal to it: ordinary multi-head attention."""
    ffn_dim: Annotated[Count, at_most(2**22)] = 704
    """Width of the SwiGLU feed-forward network; with ``num_experts``, of that in dense blocks."""
    context_length: _Tokens = 256
    """Longest sequence, in tokens."""
    dropout: Share = 0.0
    """Dropout on attention weights, on the embedding and on both residual branches, in [0, 1)."""
    tie_embeddings: bool = False
    """Tie the weight of the head to the embedding."""
    rotary_base: Annotated[float, Range(lambda value: value > 1.0, "must be greater than 1")] = 10_000.0
    """Base of the rotary frequencies."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights, before the scaling of residual projections."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters; their ``main_grad`` follows ``ddp.grad_reduce_in_fp32``."""
    fuse_wgrad_accumulation: bool = True
    """Write weight gradients to ``main_grad`` from the GEMM."""
    fused_loss: bool = False
    """Compute the loss by the head, chunk by chunk, without the logits in memory: for large vocabularies. Backward
    computes the logits again."""
    delay_wgrad_layers: Natural = 0
    """The head and the last ``delay_wgrad_layers`` blocks compute their weight gradients after each backward, in bucket
    order, while buckets are reduced. ``num_layers``: all blocks, so that backward computes input gradients only."""
    num_experts: Annotated[Natural, at_most(2**14)] = 0
    """Experts per mixture-of-experts block (``launch/model/moe.py``). 0: all blocks are dense; the keys below have no
    effect and are refused."""
    top_k: Natural = 0
    """Experts per token."""
    expert_ffn_dim: _Width = 0
    """Width of the SwiGLU feed-forward network of an expert."""
    shared_expert_ffn_dim: _Width = 0
    """Width of a dense SwiGLU feed-forward network whose output is added to that of the experts. 0: none."""
    moe_layer_freq: Count = 1
    """One in this many blocks has experts, beginning with the first block; 1: every block."""
    normalize_top_k: bool = False
    """Divide the probabilities of the chosen experts by their sum."""
    top_k_scaling_factor: Positive = 1.0
    """Multiply the probabilities of the chosen experts by this. With ``normalize_top_k``, the value ``top_k`` makes the
    output of an untrained block as large as that of a dense block with the width of the chosen experts together."""
    aux_loss_coefficient: NotNegative = 0.01
    """Weight of the load-balancing loss of each router in the training loss."""
    router_z_loss_coefficient: NotNegative = 0.0
    """Weight, in the training loss, of the mean square of the log-sum-exp of each router's logits."""
    router_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weight and the product of the router: fp32, or that of the other parameters."""
    single_grouped_weight: bool = True
    """True: one packed weight [experts, out, in] per product. False: one weight per expert."""

    def check(self) -> None:
        if self.hugging_face is None:
            remedy = "has no effect without model.hugging_face; leave it out"
            require_defaults(self, "model", _OF_HUGGING_FACE, remedy)
        else:
            remedy = "has no effect beside model.hugging_face, whose config.json has the shape; leave it out"
            require_defaults(self, "model", {entry.name for entry in fields(self)} - _BESIDE_HUGGING_FACE, remedy)
        remedy = f"must be a multiple of 2 * model.num_heads = {2 * self.num_heads} (rotary positions turn pairs)"
        self.require(self.dim % (2 * self.num_heads) == 0, "dim", remedy)
        remedy = f"must divide model.num_heads = {self.num_heads}"
        self.require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", remedy)
        remedy = f"must lie between 0 and model.num_layers = {self.num_layers}"
        self.require(self.delay_wgrad_layers <= self.num_layers, "delay_wgrad_layers", remedy)
        remedy = "has no effect on a head that delays its weight gradient, which takes the logits' gradient"
        self.require(not (self.fused_loss and self.delay_wgrad_layers), "fused_loss", remedy)
        remedy = "needs model.fuse_wgrad_accumulation beside model.hugging_face"
        converted = self.hugging_face is None or self.fuse_wgrad_accumulation
        self.require(converted or not self.fused_loss, "fused_loss", remedy)
        if self.num_experts:
            self._check_experts()
        else:
            require_defaults(self, "model", _OF_EXPERTS, "has no effect without model.num_experts")

    def _check_experts(self) -> None:
        for name in ("top_k", "expert_ffn_dim"):
            self.require(getattr(self, name) >= 1, name, "must be at least 1")
        self.require(self.top_k <= self.num_experts, "top_k", f"must be at most model.num_experts = {self.num_experts}")
        remedy = "makes the one probability 1 under model.top_k = 1, and the router learns nothing from the experts"
        self.require(not (self.normalize_top_k and self.top_k == 1), "normalize_top_k", remedy)
        remedy = f"must be at most model.num_layers = {self.num_layers}"
        self.require(self.moe_layer_freq <= self.num_layers, "moe_layer_freq", remedy)
        remedy = f'must be "float32" or model.param_dtype = "{self.param_dtype}"'
        self.require(self.router_dtype in ("float32", self.param_dtype), "router_dtype", remedy)

    def has_experts(self, block: int) -> bool:
        """Whether ``block``, counted from 0, is a mixture of experts."""
        return self.num_experts > 0 and block % self.moe_layer_freq == 0

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads


_OF_EXPERTS = (
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
_OF_HUGGING_FACE = frozenset({"pretrained", "attention", "trust_remote_code", "save_hugging_face"})
_BESIDE_HUGGING_FACE = _OF_HUGGING_FACE | {"hugging_face", "param_dtype", "fuse_wgrad_accumulation", "fused_loss"}
