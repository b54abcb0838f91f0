"""``[fsdp]`` of a configuration file: what ``parallel = "fsdp"`` and ``"hsdp"`` shard, in which dtypes, and when.

==========  ==========================================================================================================
parallel    what ranks hold, and what they send
==========  ==========================================================================================================
``fsdp``    parameters, gradients, masters and moments are sharded over all ranks; a block's parameters are gathered for
            its forward and backward; its gradients are reduce-scattered during the backward of the block before it
``hsdp``    the same inside each of several instances; gradient shards are all-reduced across instances
==========  ==========================================================================================================
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from ...fsdp import PLACEMENTS, AxisPlacement, Placement, Placements
from .ddp import Parallel
from .error import ConfigError, require

__all__ = ["FsdpConfig", "is_fully_sharded"]


def is_fully_sharded(parallel: Parallel) -> bool:
    """Whether ``[fsdp]`` applies instead of ``[ddp]``."""
    return parallel in ("fsdp", "hsdp")


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpConfig:
    """Placements, dtypes and schedule of the units: one per block, and one for all other parameters."""

    placements: Literal["zero1", "zero2", "zero3", "hsdp_zero1"] = "zero3"
    """What is sharded over the ranks of an instance. ``zero1``: optimizer state. ``zero2``: gradients too. ``zero3``:
    parameters too. ``hsdp_zero1``: like ``zero3``, and the optimizer state also across instances."""
    inner: tuple[str, ...] = ()
    """Instead of ``placements``: ``whole`` or ``sharded`` for parameter, gradient and optimizer state, over the ranks
    of an instance."""
    outer: tuple[str, ...] = ()
    """The same across instances. Default with ``inner``: all three are whole."""
    num_instances: int | None = None
    """Number of instances of ``parallel = "hsdp"``: groups of consecutive ranks, usually one per node. None: 2."""
    reshard_after_forward: bool | None = None
    """Free the whole parameters of a block between its forward and backward. None: if placements shard parameters."""
    reduce_every_microbatch: bool | None = None
    """False: keep whole gradients in memory between microbatches, and reduce them once per iteration. None: as
    ``placements`` says."""
    bucket_size: int | None = None
    """Elements at which a bucket of a unit is closed. Memory for gradients is allocated and freed by buckets. None:
    max(40e6, 1e6 x number of shards), which uses the full bandwidth."""
    shard_atoms: Literal["element", "row", "whole"] = "element"
    """What the border between two shards must not cut. ``row`` and ``whole`` need padding."""
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients of bf16 parameters are accumulated and summed."""
    reduce_dtype: Literal["bfloat16", "float16"] | None = None
    """Send gradients in this dtype. None: in the dtype of accumulation."""
    offload_to_cpu: bool = False
    """Keep shards, gradient shards and optimizer state in host memory (CUDA only)."""
    copy_engine_gather: bool = False
    """Run gathers on the copy engines of the GPU; computation keeps all multiprocessors (NCCL 2.28 or newer)."""

    def __post_init__(self) -> None:
        for name in ("inner", "outer"):
            kinds = getattr(self, name)
            require(
                not kinds or (len(kinds) == 3 and all(kind in ("whole", "sharded") for kind in kinds)),
                f"fsdp.{name}",
                kinds,
                'must be three of "whole" and "sharded": of parameter, gradient and optimizer',
            )
        require(bool(self.inner) or not self.outer, "fsdp.outer", self.outer, "needs fsdp.inner beside it")
        require(
            not self.inner or self.placements == "zero3",
            "fsdp.placements",
            self.placements,
            "is what fsdp.inner says in full; leave one of them out",
        )
        require(
            self.bucket_size is None or self.bucket_size >= 1,
            "fsdp.bucket_size",
            self.bucket_size,
            "must be at least 1",
        )
        self._check_row()

    def _check_row(self) -> None:
        key = "fsdp.inner" if self.inner else "fsdp.placements"
        try:
            self.row.check()
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
        require(
            self.row.inner.scatters,
            key,
            self.inner,
            'shards nothing: that is parallel = "ddp"',
        )
        require(
            not self.reshard_after_forward or self.row.inner.parameter is Placement.SHARDED,
            "fsdp.reshard_after_forward",
            self.reshard_after_forward,
            "has no effect where placements keep parameters whole; leave it out",
        )
        require(
            not self.reduce_every_microbatch or self.row.inner.gradient is Placement.SHARDED,
            "fsdp.reduce_every_microbatch",
            self.reduce_every_microbatch,
            "has no effect where placements keep gradients whole; leave it out",
        )

    @property
    def row(self) -> Placements:
        """Placements on both axes."""
        if not self.inner:
            return PLACEMENTS[self.placements]
        outer = self.outer or ("whole", "whole", "whole")
        return Placements(*(AxisPlacement(*map(Placement, kinds)) for kinds in (self.inner, outer)))

    @property
    def reduces_once(self) -> bool:
        """Whether whole gradients stay from one microbatch to the next, and an iteration reduces them once."""
        return self.row.inner.reduces_once(self.reduce_every_microbatch)

    def instances(self, parallel: Parallel) -> int:
        """Number of instances; 1 but under ``hsdp``."""
        if parallel != "hsdp":
            return 1
        return 2 if self.num_instances is None else self.num_instances

    @property
    def torch_grad_dtype(self) -> torch.dtype:
        """``grad_dtype`` as a torch dtype."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.grad_dtype]

    @property
    def torch_reduce_dtype(self) -> torch.dtype | None:
        """``reduce_dtype`` as a torch dtype."""
        names = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        return None if self.reduce_dtype is None else names[self.reduce_dtype]

    def check(self, parallel: Parallel) -> None:
        """Raise ``ConfigError`` if a value contradicts ``parallel``."""
        if not is_fully_sharded(parallel):
            for entry in dataclasses.fields(self):
                value = getattr(self, entry.name)
                require(
                    value == entry.default,
                    f"fsdp.{entry.name}",
                    value,
                    f'contradicts parallel = "{parallel}"; set parallel = "fsdp" or "hsdp", or leave it out',
                )
            return
        instances = self.instances(parallel)
        if parallel == "hsdp":
            require(
                instances >= 2,
                "fsdp.num_instances",
                instances,
                'contradicts parallel = "hsdp", which has at least 2; one instance is parallel = "fsdp"',
            )
            return
        require(
            self.num_instances in (None, 1),
            "fsdp.num_instances",
            self.num_instances,
            'contradicts parallel = "fsdp"; set parallel = "hsdp", or leave it out',
        )
        require(
            not self.row.outer.scatters,
            "fsdp.outer" if self.outer else "fsdp.placements",
            self.outer or self.placements,
            'shards across instances, and parallel = "fsdp" has one; set parallel = "hsdp"',
        )
