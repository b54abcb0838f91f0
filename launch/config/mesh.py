"""``[mesh]`` of a configuration file: which ranks compute one sample together.

====  =================================================================================================================
key   what its ranks have
====  =================================================================================================================
dp    other samples
cp    other parts of the same sequences; attention exchanges parts for heads
tp    the same tokens, and parts of the weights of attention and feed-forwards
pp    other blocks of the same samples
ep    other experts, and other samples or parts of them: neighbours among dp x cp
====  =================================================================================================================

Ranks are numbered with tp changing fastest, then cp, dp and pp. Gradients are averaged over dp and cp.
"""

from dataclasses import dataclass
from typing import Literal

from .error import require
from .model import ModelConfig
from .table import Count, Table

__all__ = ["WHOLE", "MeshConfig", "Stage"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive blocks of a model, one part of a pipeline. By default the whole model."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the loss."""
        return self.index == self.count - 1

    def blocks(self, num_layers: int) -> range:
        """Indices of the stage's blocks. Where they do not divide, some have one more, the last not."""
        return range(-(-num_layers * self.index // self.count), -(-num_layers * (self.index + 1) // self.count))


WHOLE = Stage()


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig(Table):
    """Numbers of ranks along each axis; their product is the number of all ranks."""

    dp: Count | None = None
    """Data-parallel ranks. None: as many as the other axes leave."""
    tp: Count = 1
    """Tensor-parallel ranks: each has a part of the heads, of the width of feed-forwards and of the vocabulary. Divides
    ``num_heads``, ``num_kv_heads`` and ``ffn_dim``."""
    sequence_parallel: bool = False
    """Outside of attention, feed-forwards and head each tensor-parallel rank has a part of every sequence: activations
    take ``tp`` times less memory. ``tp`` divides ``sequence_length / cp``."""
    cp: Count = 1
    """Context-parallel ranks: each has a part of every sequence. Divides ``sequence_length``."""
    cp_attention: Literal["ulysses", "ring"] = "ulysses"
    """Ulysses: in attention each rank has a part of the heads that ``tp`` leaves, which ``cp`` divides. Ring: keys and
    values travel; a rank has a part of the front and one of the back of each sequence, which ``2 * cp`` divides."""
    pp: Count = 1
    """Pipeline stages: each has some of the blocks. At most ``num_layers``, and at most ``num_microbatches``."""
    pp_schedule: Literal["1F1B", "GPipe", "InterleavedZeroBubble"] = "1F1B"
    """The order of the stages' work, by the names of ``torch.distributed.pipelining``. 1F1B: a stage keeps the
    activations of at most ``pp`` microbatches. GPipe: all forwards, then all backwards. InterleavedZeroBubble: as 1F1B,
    and weight gradients are computed while a stage would wait."""
    ep: Count = 1
    """Ranks that share out the experts of each block, and send each other tokens; others hold the same experts.
    Divides dp x cp, and ``num_experts``."""

    transport: Literal["all_to_all", "symmetric"] = "all_to_all"
    """How tokens travel to experts of other ranks. "all_to_all": between any ranks; the host waits for each block's
    numbers of rows. "symmetric": between GPUs of one NVLink domain, by kernels; the host waits for nothing."""

    def check(self) -> None:
        remedy = "has no effect with mesh.pp = 1; leave it out"
        self.require(self.pp > 1 or self.pp_schedule == "1F1B", "pp_schedule", remedy)
        remedy = "has no effect with mesh.ep = 1; leave it out"
        self.require(self.ep > 1 or self.transport == "all_to_all", "transport", remedy)

    @property
    def runs_eagerly(self) -> bool:
        """Whether no step is a CUDA graph: the host waits for numbers of rows, or runs a pipeline's schedule."""
        return self.pp > 1 or (self.ep > 1 and self.transport == "all_to_all")

    @property
    def ranks_of_sample(self) -> int:
        """Number of ranks that compute one sample together."""
        return self.tp * self.cp * self.pp

    @property
    def said(self) -> str:
        """The mesh in words, behind a number of ranks."""
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "ep": self.ep}
        axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        return axes and f" ({axes})"

    def check_model(self, model: ModelConfig, sequence_length: int) -> None:
        """Raise ``ConfigError`` if the model or its sequences cannot be cut so."""
        remedy = (
            "must be 1 with model.hugging_face; in your own loop cut the model by transformers' tp_plan and give "
            "parallelize the group, or let its attention call maingrad.launch.ulysses"
        )
        for name in ("tp", "cp", "pp"):
            self.require(getattr(self, name) == 1 or model.hugging_face is None, name, remedy)
        remedy = "must be 1 with model.num_experts: share experts out by mesh.ep, or shard them by parallel"
        for name in ("tp", "pp"):
            self.require(getattr(self, name) == 1 or not model.num_experts, name, remedy)
        remedy = f"must be at most model.num_layers = {model.num_layers}"
        self.require(self.pp <= model.num_layers, "pp", remedy)
        remedy = 'must be 1 with model.delay_wgrad_layers: set mesh.pp_schedule = "InterleavedZeroBubble" in its place'
        self.require(self.pp == 1 or not model.delay_wgrad_layers, "pp", remedy)
        remedy = "must be 1 with model.hugging_face; in your own loop give parallelize(model, ..., ep=) the ranks"
        self.require(self.ep == 1 or model.hugging_face is None, "ep", remedy)
        remedy = f"must divide model.num_experts = {model.num_experts}"
        self.require(self.ep == 1 or (model.num_experts > 0 and model.num_experts % self.ep == 0), "ep", remedy)
        remedy = "must be 1 with model.single_grouped_weight = false: one packed weight is cut"
        self.require(self.ep == 1 or model.single_grouped_weight, "ep", remedy)
        for name in ("num_heads", "num_kv_heads", "ffn_dim"):
            remedy = f"must divide model.{name} = {getattr(model, name)}"
            self.require(getattr(model, name) % self.tp == 0, "tp", remedy)
        remedy = f"leaves a rank without words of model.vocab_size = {model.vocab_size}"
        self.require((self.tp - 1) * -(-model.vocab_size // self.tp) < model.vocab_size, "tp", remedy)
        remedy = (
            f"must divide model.num_heads / mesh.tp = {model.num_heads // self.tp}, for attention exchanges heads; "
            f'mesh.cp_attention = "ring" does not'
        )
        ring = self.cp_attention == "ring"
        self.require(ring or model.num_heads // self.tp % self.cp == 0, "cp", remedy)
        remedy = f"must divide train.sequence_length{' / 2' if ring else ''} = {sequence_length / (1 + ring):g}"
        self.require(sequence_length % (self.cp * (1 + ring)) == 0, "cp", remedy)
        remedy = "has no dropout inside attention, and needs model.dropout = 0 and mesh.cp above 1"
        self.require(not ring or (self.cp > 1 and not model.dropout), "cp_attention", remedy)
        remedy = f"needs mesh.tp, which divides train.sequence_length / mesh.cp = {sequence_length // self.cp}"
        shares = self.tp > 1 and sequence_length // self.cp % self.tp == 0
        self.require(shares or not self.sequence_parallel, "sequence_parallel", remedy)

    def data_ranks(self, world_size: int) -> int:
        """``dp`` of so many ranks. Raises ``ConfigError`` if they are no such mesh."""
        remedy = f"mesh.tp * mesh.cp * mesh.pp = {self.ranks_of_sample} must divide the {world_size} rank(s)"
        require(world_size % self.ranks_of_sample == 0, "mesh", f"{self.tp} x {self.cp} x {self.pp}", remedy)
        found = world_size // self.ranks_of_sample
        self.require(
            self.dp in (None, found),
            "dp",
            f"must be {found}: {world_size} rank(s), {self.ranks_of_sample} for a sample",
        )
        return found
