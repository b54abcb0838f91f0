"""Configuration of ``DistributedDataParallel``, in Megatron-core's field names."""

from dataclasses import dataclass

__all__ = ["DistributedDataParallelConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedDataParallelConfig:
    """How gradients are stored and reduced. A field that cannot take effect is an error, not a no-op."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce in fp32 under bf16 and fp16 parameters; otherwise in the parameter's dtype."""
    overlap_grad_reduce: bool = False
    """Launch a bucket's collective from backward as soon as it is ready, instead of in ``finish_grad_sync``."""
    use_distributed_optimizer: bool = False
    """Reduce-scatter: each rank gets the gradients of its shard, for ``DistributedOptimizer``. Otherwise all-reduce."""
    bucket_size: int | None = None
    """Elements at which a bucket is closed; None: max(40,000,000, 1,000,000 x ranks)."""
    average_in_collective: bool = False
    """Let the collective divide by the number of ranks (NCCL only); otherwise each rank divides before it."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """End every bucket at a multiple of 2^16 elements, on which NCCL's rings are fastest."""
    find_unused_parameters: bool = False
    """Walk the final microbatch's graph, so that unused parameters hold no bucket back. Needs overlap."""

    def __post_init__(self) -> None:
        if self.bucket_size is not None and self.bucket_size < 1:
            raise ValueError(f"bucket_size must be at least 1 element, got {self.bucket_size}")
        if self.find_unused_parameters and not self.overlap_grad_reduce:
            raise ValueError(
                "find_unused_parameters has no effect without overlap_grad_reduce: finish_grad_sync reduces zeros for "
                "unused parameters anyway; turn overlap on, or drop the option"
            )
