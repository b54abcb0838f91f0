"""The configuration of a run: a TOML file; the command line can override each value.

    parallel    -> "ddp", "zero1", "hybrid", "fsdp" or "hsdp"
    [model]     -> ModelConfig       [optimizer] -> OptimizerConfig
    [data]      -> DataConfig        [ddp]       -> DistributedDataParallelConfig
    [train]     -> TrainConfig       [fsdp]      -> FsdpConfig
    [logging]   -> LoggingConfig     [profile]   -> ProfileConfig
    [checkpoint] -> CheckpointConfig [mesh]     -> MeshConfig

The constructors raise ``ConfigError`` for impossible values, with the key and a remedy. ``file.py`` reads the file.
"""

from dataclasses import dataclass, field

from ...ddp import DistributedDataParallelConfig
from .data import DataConfig
from .ddp import FULLY_SHARDED, Parallel, check_ddp
from .error import ConfigError, require
from .fsdp import FsdpConfig
from .mesh import MeshConfig
from .model import ModelConfig
from .optimizer import OptimizerConfig
from .outputs import CheckpointConfig, LoggingConfig, ProfileConfig
from .train import TrainConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "FsdpConfig",
    "LoggingConfig",
    "MeshConfig",
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
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Which ranks compute one sample together; the others are data-parallel."""
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
    ddp: DistributedDataParallelConfig = field(
        default_factory=lambda: DistributedDataParallelConfig(use_distributed_optimizer=True)
    )
    """Gradient buckets, their reduction and gathers."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Units of ``parallel = "fsdp"`` and ``"hsdp"``: what is sharded, in which dtypes, and when."""

    def __post_init__(self) -> None:
        model, data, settings = self.model, self.data, self.train
        most = model.context_length
        fits = model.hugging_face is not None or settings.sequence_length <= most
        settings.require(fits, "sequence_length", f"must be at most model.context_length = {most}")
        remedy = f"must be less than train.steps = {settings.steps}"
        self.optimizer.require(self.optimizer.warmup_steps < settings.steps, "warmup_steps", remedy)
        remedy = f'must be at least 256 for bytes (data.source = "{data.source}")'
        model.require(not data.is_bytes or model.vocab_size >= 256, "vocab_size", remedy)
        remedy = 'quantises a model in bfloat16: set model.param_dtype to "bfloat16"'
        settings.require(settings.recipe == "none" or model.param_dtype == "bfloat16", "recipe", remedy)
        remedy = "does not go with model.num_experts: ranks have different experts; use another recipe"
        settings.require(settings.recipe != "float8_delayed" or not model.num_experts, "recipe", remedy)
        compact = self.optimizer.state == "compact"
        remedy = f'"compact" is for AdamW and Adam under parallel = "{self.parallel}": set "full"'
        self.optimizer.require(self.optimizer.fits_shards or not self.fully_sharded, "state", remedy)
        remedy = '"compact" steps on the GPU, and does not go with fsdp.offload_to_cpu: set "full", or leave that out'
        self.optimizer.require(not (compact and self.fsdp.offload_to_cpu), "state", remedy)
        on_host = self.optimizer.has_muon and self.fsdp.offload_to_cpu
        self.optimizer.require(not on_host, "name", "steps on the GPU, and does not go with fsdp.offload_to_cpu")
        across = self.optimizer.has_muon and self.fully_sharded and self.fsdp.row.outer.scatters
        remedy = "does not go with optimizer state that is sharded across instances: take other fsdp.placements"
        self.optimizer.require(not across, "name", remedy)
        if settings.cuda_graph is True:
            self._check_graph()
        self.mesh.check_model(model, settings.sequence_length)
        if self.mesh.pp > 1:
            self._check_pipeline()
        remedy = "would differ where tensor-parallel ranks have the same activations: set mesh.sequence_parallel = true"
        same = self.mesh.tp > 1 and not self.mesh.sequence_parallel
        model.require(not (same and model.dropout), "dropout", remedy)
        remedy = "looks at all of the model and its matrices: set mesh.tp = 1 and mesh.pp = 1, or another optimizer"
        self.optimizer.require(self.mesh.tp * self.mesh.pp == 1 or not self.optimizer.has_muon, "name", remedy)
        ring = self.mesh.cp_attention == "ring"
        remedy = 'has masks that mesh.cp_attention = "ring" does not know: set "join" or "pad", or "ulysses" there'
        data.require(not ring or data.documents != "mask", "documents", remedy)
        remedy = 'does not go with mesh.cp_attention = "ring": leave it out, or set "ulysses" there'
        settings.require(not (ring and settings.compile), "compile", remedy)
        # Raise for values that contradict ``parallel``.
        check_ddp(self.ddp, self.parallel)
        self.fsdp.check_parallel(self.parallel)

    def _check_graph(self) -> None:
        settings = self.train
        on_host = self.fsdp.offload_to_cpu or self.fsdp.copy_engine_gather is True
        remedy = (
            "does not go with fsdp.offload_to_cpu, whose update runs on the host, and fsdp.copy_engine_gather = true, "
            "whose memory is not the graph's"
        )
        settings.require(not on_host, "cuda_graph", remedy)
        remedy = f'does not go with optimizer.name = "muon" under parallel = "{self.parallel}"'
        settings.require(not (self.optimizer.has_muon and self.fully_sharded), "cuda_graph", remedy)
        reads = self.ddp.check_for_nan_in_grad or self.ddp.check_replicas_every
        remedy = (
            "does not go with ddp.check_for_nan_in_grad and ddp.check_replicas_every, which read results on the host"
        )
        settings.require(not reads, "cuda_graph", remedy)
        remedy = 'does not go with mesh.transport = "all_to_all", which waits for numbers of rows, and with mesh.pp'
        settings.require(not self.mesh.runs_eagerly, "cuda_graph", remedy)
        remedy = 'does not go with data.documents = "mask" and "pad": numbers of targets differ from step to step'
        settings.require(self.data.documents == "join", "cuda_graph", remedy)
        remedy = (
            "does not go with train.cuda_graph where the model may have dropout (model.dropout, model.hugging_face): "
            "a captured graph cannot draw a mask again"
        )
        settings.require(settings.recompute == "none" or not self.may_draw, "recompute", remedy)

    def _check_pipeline(self) -> None:
        mesh, count = self.mesh, self.train.num_microbatches
        remedy = f"must be at least mesh.pp = {mesh.pp}, so that all stages compute at a time"
        self.train.require(count >= mesh.pp, "num_microbatches", remedy)
        rounds = count // mesh.pp if mesh.pp_schedule == "InterleavedZeroBubble" else 1
        remedy = f"must be a multiple of {rounds}, the whole part of num_microbatches / mesh.pp, under mesh.pp_schedule"
        self.train.require(count % rounds == 0, "num_microbatches", remedy)
        remedy = "does not go with train.compile, whose graphs have no slots for weight gradients: set another"
        mesh.require(mesh.pp_schedule != "InterleavedZeroBubble" or not self.train.compile, "pp_schedule", remedy)
        remedy = f'does not go with mesh.pp under parallel = "{self.parallel}": take another, or leave it out'
        self.model.require(not (self.model.tie_embeddings and self.fully_sharded), "tie_embeddings", remedy)

    @property
    def may_draw(self) -> bool:
        """Whether the model's forward may draw random numbers."""
        return self.model.dropout > 0.0 or self.model.hugging_face is not None

    @property
    def fully_sharded(self) -> bool:
        """Whether ``maingrad.fsdp`` shards the model, instead of a ``DistributedDataParallel`` around it."""
        return self.parallel in FULLY_SHARDED

    @property
    def num_instances(self) -> int:
        """Number of instances: groups of ranks that together hold one copy of what is sharded."""
        if self.parallel == "hsdp":
            return self.fsdp.num_instances or 2
        return self.ddp.num_distributed_optimizer_instances  # 1 but under ``hybrid``

    def check_ranks(self, world_size: int) -> None:
        """Raise ``ConfigError`` if mesh, batch or instances do not divide evenly over ``world_size`` ranks."""
        data_ranks = self.mesh.data_ranks(world_size)
        self.train.sequences_per_microbatch(data_ranks)
        loss_ranks = data_ranks * self.mesh.cp
        require(
            loss_ranks % self.num_instances == 0,
            "fsdp.num_instances" if self.fully_sharded else "ddp.num_distributed_optimizer_instances",
            self.num_instances,
            f'must divide the {loss_ranks} rank(s), under parallel = "{self.parallel}"',
        )
        instance = loss_ranks // self.num_instances
        self.mesh.require(instance % self.mesh.ep == 0, "ep", f"must divide the {instance} rank(s) of an instance")
