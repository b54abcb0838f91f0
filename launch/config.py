"""What a run is made of: a TOML file, with any value overridden from the command line.

    [model]      -> ModelConfig       [optimizer] -> OptimizerConfig
    [data]       -> DataConfig        [ddp]       -> maingrad.ddp.DistributedDataParallelConfig itself
    [train]      -> TrainConfig

Impossible values are refused at construction, with the key and what it may be. ``config_file.py`` reads the file.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..ddp import DistributedDataParallelConfig

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "TrainConfig",
]


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the key and the remedy."""


def _require(condition: bool, key: str, value: object, remedy: str) -> None:
    if not condition:
        raise ConfigError(f"{key} = {value!r}: {remedy}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of the GPT in ``model.py``."""

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
    """Width of the SwiGLU feed-forward; of the dense blocks, where ``num_experts`` is set."""
    context_length: int = 256
    """Longest sequence, in tokens."""
    dropout: float = 0.0
    """Dropout on attention weights, on the embedding and on both residual branches, in [0, 1)."""
    tie_embeddings: bool = False
    """The head's matrix is the embedding's."""
    rotary_base: float = 10_000.0
    """Base of the rotary frequencies."""
    init_std: float = 0.02
    """Standard deviation of the initial weights, before the scaling of residual projections."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters; their ``main_grad`` follows ``ddp.grad_reduce_in_fp32``."""
    fuse_wgrad_accumulation: bool = True
    """Weight-gradient GEMMs write straight into ``main_grad``."""
    delay_wgrad_layers: int = 0
    """The head and the last so many blocks compute their weight gradients after each backward, in bucket order, while
    buckets reduce; ``num_layers``: all of them, so that backward computes input gradients only. 0: none."""
    num_experts: int = 0
    """Experts of a mixture-of-experts block (``moe.py``); 0: every block is dense, and no key below may be set."""
    top_k: int = 0
    """Experts that each token is sent to."""
    expert_ffn_dim: int = 0
    """Width of each expert's SwiGLU feed-forward."""
    shared_expert_ffn_dim: int = 0
    """Width of a dense SwiGLU feed-forward beside the experts, whose output is added to theirs; 0: none."""
    moe_layer_freq: int = 1
    """Every so many blocks have experts, the first one among them; 1: all."""
    normalize_top_k: bool = False
    """The probabilities of the chosen experts are divided by their sum."""
    top_k_scaling_factor: float = 1.0
    """The probabilities of the chosen experts are multiplied by this: ``top_k``, after ``normalize_top_k``, makes an
    untrained block's output as large as that of a dense one as wide as the chosen experts together."""
    aux_loss_coefficient: float = 0.01
    """Factor of each router's load-balancing loss in the training loss."""
    router_z_loss_coefficient: float = 0.0
    """Factor of the mean square of each router's log partition function in the training loss."""
    router_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the router's weight and product: fp32, or that of the other parameters."""
    single_grouped_weight: bool = True
    """Experts' weights are one packed parameter [experts, out, in] for each product, and not one for each expert."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "context_length"):
            _require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "must be at least 1")
        _require(
            self.dim % (2 * self.num_heads) == 0,
            "model.dim",
            self.dim,
            f"must be a multiple of 2 * model.num_heads = {2 * self.num_heads} (rotary positions turn pairs)",
        )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "model.num_kv_heads",
            self.num_kv_heads,
            f"must divide model.num_heads = {self.num_heads}",
        )
        _require(0.0 <= self.dropout < 1.0, "model.dropout", self.dropout, "must lie in [0, 1)")
        _require(
            0 <= self.delay_wgrad_layers <= self.num_layers,
            "model.delay_wgrad_layers",
            self.delay_wgrad_layers,
            f"must lie between 0 and model.num_layers = {self.num_layers}",
        )
        _require(self.rotary_base > 1.0, "model.rotary_base", self.rotary_base, "must be greater than 1")
        _require(self.init_std > 0.0, "model.init_std", self.init_std, "must be positive")
        if self.num_experts:
            self._check_experts()
        else:
            for name, neutral in _EXPERT_KEYS.items():
                value = getattr(self, name)
                _require(value == neutral, f"model.{name}", value, "has no effect without model.num_experts")

    def _check_experts(self) -> None:
        for name in ("num_experts", "top_k", "expert_ffn_dim", "moe_layer_freq"):
            _require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "must be at least 1")
        for name in ("shared_expert_ffn_dim", "aux_loss_coefficient", "router_z_loss_coefficient"):
            _require(getattr(self, name) >= 0, f"model.{name}", getattr(self, name), "must not be negative")
        _require(
            self.top_k <= self.num_experts,
            "model.top_k",
            self.top_k,
            f"must be at most model.num_experts = {self.num_experts}",
        )
        _require(
            not (self.normalize_top_k and self.top_k == 1),
            "model.normalize_top_k",
            self.normalize_top_k,
            "makes the one probability 1 under model.top_k = 1, and the router learns nothing from the experts",
        )
        _require(
            self.top_k_scaling_factor > 0.0,
            "model.top_k_scaling_factor",
            self.top_k_scaling_factor,
            "must be positive",
        )
        _require(
            self.moe_layer_freq <= self.num_layers,
            "model.moe_layer_freq",
            self.moe_layer_freq,
            f"must be at most model.num_layers = {self.num_layers}",
        )
        _require(
            self.router_dtype in ("float32", self.param_dtype),
            "model.router_dtype",
            self.router_dtype,
            f'must be "float32" or model.param_dtype = "{self.param_dtype}"',
        )

    def has_experts(self, block: int) -> bool:
        """Whether that block, counted from 0, is a mixture of experts."""
        return self.num_experts > 0 and block % self.moe_layer_freq == 0

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads

    @property
    def torch_dtype(self) -> torch.dtype:
        """``param_dtype`` as torch knows it."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.param_dtype]

    @property
    def torch_router_dtype(self) -> torch.dtype:
        """``router_dtype`` as torch knows it."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.router_dtype]


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
"""Keys that say how experts are, with the values they have where there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where tokens come from, and which of them are held back for validation."""

    source: Literal["stdlib", "text", "tokens"] = "stdlib"
    """``stdlib``: source of the Python standard library that runs this, as bytes. ``text``: any files, as bytes.
    ``tokens``: a memory-mapped file of token ids."""
    paths: tuple[str, ...] = ()
    """Files of a ``text`` source in their order, or the one file of a ``tokens`` source; relative to the working
    directory."""
    validation_paths: tuple[str, ...] = ()
    """Validation files. Without them ``text`` and ``tokens`` hold back the tail of the training data."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Little-endian integers of a ``tokens`` file."""
    validation_fraction: float = 0.05
    """Part of the data that is held back: of the files (``stdlib``), or of the tail."""
    max_tokens: int | None = None
    """Use only so many tokens of the training data, from the beginning; None: all."""

    def __post_init__(self) -> None:
        if self.source == "stdlib":
            _require(not self.paths, "data.paths", self.paths, 'source = "stdlib" finds its files itself; set "text"')
            _require(
                not self.validation_paths,
                "data.validation_paths",
                self.validation_paths,
                'need source = "text"/"tokens"',
            )
        else:
            _require(bool(self.paths), "data.paths", self.paths, f'source = "{self.source}" needs at least one file')
        _require(
            0.0 < self.validation_fraction < 1.0,
            "data.validation_fraction",
            self.validation_fraction,
            "must lie between 0 and 1: the validation loss needs data of its own",
        )
        _require(
            self.max_tokens is None or self.max_tokens >= 1, "data.max_tokens", self.max_tokens, "must be at least 1"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW on fp32 masters, with a cosine schedule."""

    lr: float = 1e-3
    """Learning rate after the warmup."""
    min_lr_ratio: float = 0.1
    """The cosine ends at this part of ``lr``."""
    warmup_steps: int = 20
    """Steps over which the rate grows linearly from ``lr / warmup_steps``."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm to this; None: never."""

    def __post_init__(self) -> None:
        _require(self.lr > 0.0, "optimizer.lr", self.lr, "must be positive")
        _require(0.0 <= self.min_lr_ratio <= 1.0, "optimizer.min_lr_ratio", self.min_lr_ratio, "must lie in [0, 1]")
        _require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "must not be negative")
        _require(all(0.0 <= beta < 1.0 for beta in self.betas), "optimizer.betas", self.betas, "must lie in [0, 1)")
        _require(self.eps > 0.0, "optimizer.eps", self.eps, "must be positive")
        _require(self.weight_decay >= 0.0, "optimizer.weight_decay", self.weight_decay, "must not be negative")
        _require(
            self.max_grad_norm is None or self.max_grad_norm > 0.0,
            "optimizer.max_grad_norm",
            self.max_grad_norm,
            "must be positive; --optimizer.max-grad-norm None turns clipping off",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length, batch and bookkeeping of a run."""

    steps: int = 100
    """Optimizer steps."""
    max_seconds: float | None = None
    """End after so many seconds of training, with the cosine brought to its end by then: a slower machine takes fewer
    steps of the same schedule. None: the steps alone count."""
    global_batch_size: int = 16
    """Sequences of one optimizer step, over all microbatches and ranks: the same on any number of ranks."""
    num_microbatches: int = 1
    """Forward and backward passes per step; all but the last run under ``no_sync``."""
    sequence_length: int = 256
    """Tokens of one sequence; at most ``model.context_length``."""
    eval_every: int = 100
    """Steps between validations; one more follows the last step."""
    eval_sequences: int = 64
    """Sequences of the fixed validation set, evenly spread over the validation data."""
    log_every: int = 1
    """Steps between records in ``metrics.jsonl``. Ranks agree then whether to stop, so Ctrl-C waits that long."""
    seed: int = 0
    """Seed of weights, data order and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is a GPU."""
    out_dir: str = "runs/default"
    """Folder for metrics, resolved configuration and pictures; an earlier run in it is replaced."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "global_batch_size",
            "num_microbatches",
            "sequence_length",
            "eval_every",
            "eval_sequences",
            "log_every",
        ):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "must be at least 1")
        _require(
            self.max_seconds is None or self.max_seconds > 0.0,
            "train.max_seconds",
            self.max_seconds,
            "must be positive",
        )
        _require(self.seed >= 0, "train.seed", self.seed, "must not be negative")
        _require(
            self.global_batch_size % self.num_microbatches == 0,
            "train.global_batch_size",
            self.global_batch_size,
            f"must be a multiple of train.num_microbatches = {self.num_microbatches}",
        )

    def sequences_per_microbatch(self, world_size: int) -> int:
        """Sequences of one microbatch on one rank; ``ConfigError`` where the batch does not divide."""
        parts = self.num_microbatches * world_size
        _require(
            self.global_batch_size % parts == 0,
            "train.global_batch_size",
            self.global_batch_size,
            f"must be a multiple of train.num_microbatches * ranks = {self.num_microbatches} * {world_size} = {parts}",
        )
        return self.global_batch_size // parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where tokens come from."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length and batch."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule."""
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    """Gradient buckets and their reduction."""

    def __post_init__(self) -> None:
        _require(
            self.train.sequence_length <= self.model.context_length,
            "train.sequence_length",
            self.train.sequence_length,
            f"must be at most model.context_length = {self.model.context_length}",
        )
        _require(
            self.optimizer.warmup_steps < self.train.steps,
            "optimizer.warmup_steps",
            self.optimizer.warmup_steps,
            f"must be less than train.steps = {self.train.steps}",
        )
        _require(
            self.data.source == "tokens" or self.model.vocab_size >= 256,
            "model.vocab_size",
            self.model.vocab_size,
            f'must be at least 256 for bytes (data.source = "{self.data.source}")',
        )
