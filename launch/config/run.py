"""The configuration of a run: a TOML file; the command line can override each value.

    parallel    -> "ddp", "zero1", "hybrid", "fsdp" or "hsdp"
    [model]     -> ModelConfig       [optimizer] -> OptimizerConfig
    [data]      -> DataConfig        [ddp]       -> DdpConfig
    [train]     -> TrainConfig       [fsdp]      -> FsdpConfig
    [logging]   -> LoggingConfig     [profile]   -> ProfileConfig
    [checkpoint] -> CheckpointConfig

The constructors raise ``ConfigError`` for impossible values, with the key and a remedy. ``file.py`` reads the file.
"""

from dataclasses import dataclass, field

from ...ddp import DistributedDataParallelConfig
from .data import DataConfig
from .ddp import DdpConfig, Parallel
from .error import ConfigError, require
from .fsdp import FsdpConfig, is_fully_sharded
from .model import ModelConfig
from .optimizer import OptimizerConfig
from .outputs import CheckpointConfig, LoggingConfig, ProfileConfig
from .train import TrainConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DdpConfig",
    "FsdpConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Parallel",
    "ProfileConfig",
    "TrainConfig",
]


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
    """The optimizer and its schedule."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """How checkpoints are written, and which ones stay."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """TensorBoard, and Weights & Biases."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Steps that are profiled."""
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
            not (self.train.cuda_graph and (self.ddp.check_for_nan_in_grad or self.ddp.check_replicas_every)),
            "train.cuda_graph",
            True,
            "does not go with ddp.check_for_nan_in_grad and ddp.check_replicas_every, which read results on the host",
        )
        require(
            not (self.train.cuda_graph and self.data.documents != "join"),
            "train.cuda_graph",
            True,
            'does not go with data.documents = "mask" and "pad": numbers of targets differ from step to step',
        )
        self._check_recompute()
        # Raise for values that contradict ``parallel``.
        self.fsdp.check(self.parallel)
        if self.fully_sharded:
            self.ddp.check_unused(self.parallel)
        else:
            self.ddp.wrapper_config(self.parallel)

    def _check_recompute(self) -> None:
        settings = self.train
        require(
            settings.recompute != "attention" or not settings.compile,
            "train.recompute",
            settings.recompute,
            'does not go with train.compile, which would compile each block anew; use "blocks" or "operators"',
        )
        require(
            settings.recompute == "none"
            or not settings.cuda_graph
            or (self.model.dropout == 0.0 and self.model.hugging_face is None),
            "train.recompute",
            settings.recompute,
            "does not go with train.cuda_graph where the model may have dropout (model.dropout, model.hugging_face): "
            "a captured graph cannot draw a mask again",
        )

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
