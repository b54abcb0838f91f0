"""The configuration of a run: a TOML file; the command line can override each value.

    parallel    -> "ddp", "zero1", "hybrid", "fsdp" or "hsdp"
    [model]     -> ModelConfig       [optimizer] -> OptimizerConfig
    [data]      -> DataConfig        [ddp]       -> DdpConfig
    [train]     -> TrainConfig       [fsdp]      -> FsdpConfig

The constructors raise ``ConfigError`` for impossible values, with the key and a remedy. ``file.py`` reads the file.
"""

from dataclasses import dataclass, field
from typing import Literal

from ...ddp import DistributedDataParallelConfig
from .data import DataConfig
from .ddp import DdpConfig, Parallel
from .error import ConfigError, require
from .fsdp import FsdpConfig, is_fully_sharded
from .model import ModelConfig

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "DdpConfig",
    "FsdpConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Parallel",
    "TrainConfig",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW on fp32 masters, with a cosine schedule."""

    lr: float = 1e-3
    """Learning rate after the warmup."""
    min_lr_ratio: float = 0.1
    """The cosine ends at this fraction of ``lr``."""
    warmup_steps: int = 20
    """Steps over which the learning rate grows linearly from ``lr / warmup_steps``."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    decay_vectors: bool = True
    """True: decay also parameters with fewer than two dims (norms, biases, scalars). False: matrices only."""
    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm to this value. None: no clipping."""

    def __post_init__(self) -> None:
        require(self.lr > 0.0, "optimizer.lr", self.lr, "must be positive")
        require(0.0 <= self.min_lr_ratio <= 1.0, "optimizer.min_lr_ratio", self.min_lr_ratio, "must lie in [0, 1]")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "must not be negative")
        require(all(0.0 <= beta < 1.0 for beta in self.betas), "optimizer.betas", self.betas, "must lie in [0, 1)")
        require(self.eps > 0.0, "optimizer.eps", self.eps, "must be positive")
        require(self.weight_decay >= 0.0, "optimizer.weight_decay", self.weight_decay, "must not be negative")
        require(
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
    """End training after this many seconds. The cosine schedule then ends at this time: a slower machine takes fewer
    steps of the same schedule. None: only ``steps`` ends the run."""
    global_batch_size: int = 16
    """Sequences per optimizer step, over all microbatches and ranks."""
    num_microbatches: int = 1
    """Forward and backward passes per optimizer step; all but the last run under ``no_sync``."""
    sequence_length: int = 256
    """Tokens per sequence; at most ``model.context_length``."""
    eval_every: int = 100
    """Steps between validations. There is one more after the last step."""
    eval_sequences: int = 64
    """Sequences in the fixed validation set, evenly spread over the validation data."""
    log_every: int = 1
    """Steps between records in ``metrics.jsonl``. Ranks react to Ctrl-C only at these steps."""
    save_every: int | None = None
    """Steps between checkpoints in ``out_dir``, a multiple of ``log_every``. There is one more after the last step, or
    after Ctrl-C. None: no checkpoints."""
    resume: str | None = None
    """Folder of a checkpoint to resume from, with any number of ranks and any ``parallel``. ``auto``: the newest
    checkpoint in ``out_dir``, if any. None: start a new run."""
    resume_with_other_data: bool = False
    """Allow ``resume`` although ``data`` or the contents of its files have changed since the checkpoint."""
    seed: int = 0
    """Seed of weights, data order and dropout."""
    compile: bool = False
    """Compile each block of the model with ``torch.compile``. A dense block compiles whole; a block with experts may
    have graph breaks. Losses change by rounding, and with ``model.dropout`` by other random masks."""
    compile_backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of ``compile``. ``inductor`` makes fast code, and needs Triton on a GPU and a C++ compiler on a CPU. The
    other two are for tests and for the search of errors."""
    recipe: Literal["none", "float8_current", "float8_delayed", "float8_block", "mxfp8", "nvfp4"] = "none"
    """How the operands of linear layers are quantised (``docs/recipes.md``). Needs ``model.param_dtype = "bfloat16"``,
    and does not go with ``compile``. A router in fp32 stays in fp32, and a warning says so."""
    emulate_recipe: bool = False
    """On a GPU, where no recipe has kernels yet: quantise, and multiply in fp32."""
    cuda_graph: bool = False
    """Capture each step as one CUDA graph (``GraphedTrainingStep``), after two eager steps. Not with
    ``fsdp.offload_to_cpu``, ``fsdp.copy_engine_gather`` and ``ddp.check_for_nan_in_grad``. On a CPU recorded operations
    stand in for the graph, for tests."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA if there is a GPU."""
    out_dir: str = "runs/default"
    """Folder for metrics, resolved configuration, pictures and checkpoints. A new run replaces the files of an earlier
    run in it, except checkpoints."""

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
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "must be at least 1")
        require(
            self.max_seconds is None or self.max_seconds > 0.0,
            "train.max_seconds",
            self.max_seconds,
            "must be positive",
        )
        require(
            self.save_every is None or (self.save_every >= 1 and self.save_every % self.log_every == 0),
            "train.save_every",
            self.save_every,
            f"must be a multiple of train.log_every = {self.log_every}, so that a resumed run logs the same steps",
        )
        require(self.seed >= 0, "train.seed", self.seed, "must not be negative")
        require(
            self.global_batch_size % self.num_microbatches == 0,
            "train.global_batch_size",
            self.global_batch_size,
            f"must be a multiple of train.num_microbatches = {self.num_microbatches}",
        )

    def sequences_per_microbatch(self, world_size: int) -> int:
        """Sequences per microbatch and rank. Raises ``ConfigError`` if the batch does not divide evenly."""
        parts = self.num_microbatches * world_size
        require(
            self.global_batch_size % parts == 0,
            "train.global_batch_size",
            self.global_batch_size,
            f"must be a multiple of train.num_microbatches * ranks = {self.num_microbatches} * {world_size} = {parts}",
        )
        return self.global_batch_size // parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One run."""

    parallel: Parallel = "zero1"
    """What is sharded over ranks. ``ddp``: nothing. ``zero1``: optimizer state. ``hybrid``: like ``zero1``, inside each
    of ``ddp.num_distributed_optimizer_instances`` instances. ``fsdp``: parameters and gradients too. ``hsdp``: like
    ``fsdp``, inside each of ``fsdp.num_instances`` instances. The choice does not change what is trained."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where tokens come from."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length and batch."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule."""
    ddp: DdpConfig = field(default_factory=DdpConfig)
    """Gradient buckets, their reduction and gathers."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Units of ``parallel = "fsdp"`` and ``"hsdp"``: what is sharded, in which dtypes, and when."""

    def __post_init__(self) -> None:
        require(
            self.model.hugging_face is not None or self.train.sequence_length <= self.model.context_length,
            "train.sequence_length",
            self.train.sequence_length,
            f"must be at most model.context_length = {self.model.context_length}",
        )
        require(
            self.optimizer.warmup_steps < self.train.steps,
            "optimizer.warmup_steps",
            self.optimizer.warmup_steps,
            f"must be less than train.steps = {self.train.steps}",
        )
        require(
            self.data.source not in ("stdlib", "text")
            or self.data.tokenizer is not None
            or self.model.vocab_size >= 256,
            "model.vocab_size",
            self.model.vocab_size,
            f'must be at least 256 for bytes (data.source = "{self.data.source}")',
        )
        require(
            self.train.recipe == "none" or self.model.param_dtype == "bfloat16",
            "train.recipe",
            self.train.recipe,
            'quantises a model in bfloat16: set model.param_dtype to "bfloat16"',
        )
        require(
            self.train.recipe == "none" or not self.train.compile,
            "train.recipe",
            self.train.recipe,
            "does not go with train.compile",
        )
        require(
            not (self.train.cuda_graph and (self.fsdp.offload_to_cpu or self.fsdp.copy_engine_gather)),
            "train.cuda_graph",
            True,
            "does not go with fsdp.offload_to_cpu, whose update runs on the host, and fsdp.copy_engine_gather, whose "
            "memory is not the graph's",
        )
        require(
            not (self.train.cuda_graph and self.ddp.check_for_nan_in_grad),
            "train.cuda_graph",
            True,
            "does not go with ddp.check_for_nan_in_grad, which reads each step's result on the host",
        )
        require(
            not (self.train.cuda_graph and self.data.documents != "join"),
            "train.cuda_graph",
            True,
            'does not go with data.documents = "mask" and "pad": numbers of targets differ from step to step',
        )
        # Raise for values that contradict ``parallel``.
        self.fsdp.check(self.parallel)
        if self.fully_sharded:
            self.ddp.check_unused(self.parallel)
        else:
            self.ddp.wrapper_config(self.parallel)

    @property
    def fully_sharded(self) -> bool:
        """Whether ``maingrad.fsdp`` shards the model, instead of a ``DistributedDataParallel`` around it."""
        return is_fully_sharded(self.parallel)

    @property
    def wrapper_config(self) -> DistributedDataParallelConfig:
        """The configuration of ``DistributedDataParallel``, if ``parallel`` uses it."""
        return self.ddp.wrapper_config(self.parallel)

    @property
    def num_instances(self) -> int:
        """Number of instances: groups of ranks that together hold one copy of what is sharded."""
        if self.fully_sharded:
            return self.fsdp.instances(self.parallel)
        return self.wrapper_config.num_distributed_optimizer_instances

    def check_ranks(self, world_size: int) -> None:
        """Raise ``ConfigError`` if the batch or the instances do not divide evenly over ``world_size`` ranks."""
        self.train.sequences_per_microbatch(world_size)
        require(
            world_size % self.num_instances == 0,
            "fsdp.num_instances" if self.fully_sharded else "ddp.num_distributed_optimizer_instances",
            self.num_instances,
            f'must divide the {world_size} rank(s), under parallel = "{self.parallel}"',
        )
