"""Configuration of ``DistributedDataParallel``, in Megatron-core's field names where it has the field."""

import difflib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

import torch

__all__ = ["DistributedDataParallelConfig", "with_names_meant"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def with_names_meant(**meant: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """For a function that users of other libraries call: a keyword that it lacks raises a ``TypeError`` that helps.

    meant  name in another library -> what to write here. For any other name the error has the nearest of the function's
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for name in kwargs:
                if name not in known:
                    nearest = difflib.get_close_matches(name, known, 1) or known
                    instead = meant.get(name, f"it has {', '.join(nearest)}")
                    whose = function.__qualname__.removesuffix(".__init__")
                    raise TypeError(f"{whose} has no argument {name!r}: {instead}")
            return function(*args, **kwargs)

        return checked

    return decorate


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedDataParallelConfig:
    """How gradients are stored and reduced. Raises ``ValueError`` for a field that cannot take effect."""

    grad_reduce_in_fp32: bool = True
    """Gradients of bf16 and fp16 parameters are accumulated and reduced in fp32. False: in the parameter's dtype."""
    overlap_grad_reduce: bool = False
    """Launch a bucket's collective from backward as soon as it is ready, instead of at the step."""
    use_distributed_optimizer: bool = False
    """Reduce-scatter: each rank gets its shard's gradients, for ``DistributedOptimizer``. False: all-reduce."""
    overlap_param_gather: bool = False
    """All-gather updated parameters under the next forward, instead of in ``DistributedOptimizer.step``."""
    copy_engine_param_gather: Literal["auto", True, False] = "auto"
    """Overlapped all-gathers run on the GPU's copy engines and take no multiprocessor from the forward. Needs NCCL 2.28
    or newer. NCCL falls back to kernels where ranks cannot map each other's memory (several nodes). The process keeps
    the parameters' memory until it ends, as torch 2.11 cannot unmap it. "auto": for the first model of a process, where
    they gain by its sizes and on all ranks (``model.copy_engines`` tells), and otherwise by kernels."""
    num_distributed_optimizer_instances: int = 1
    """Hybrid sharding: number of instances of consecutive ranks; shards inside an instance, replicas across."""
    bucket_size: int | None = None
    """Elements after which a bucket is closed; None: max(40,000,000, 1,000,000 x ranks of an instance)."""
    num_buckets: int | None = None
    """Approximate number of buckets in each buffer, instead of ``bucket_size``."""
    keep_params_whole: bool = False
    """No parameter is split between shards, for optimizers that need whole parameters. Shards are less even."""
    keep_matrices_whole: tuple[str, ...] = ()
    """No matrix of the parameters with these names or patterns is split between shards, for ``Muon``: a stack [experts,
    rows, columns] only between its matrices, any other parameter nowhere. They have buckets of their own."""
    release_grads: bool = False
    """A bucket has memory from an iteration's first gradient to the end of its reduction, and each rank keeps its shard
    of the reduced gradients. Programs read ``.grad``, not ``main_grad``. Needs ``use_distributed_optimizer``. Where
    ranks use different parameters and communicate in backward, needs ``find_unused_parameters`` too."""
    shard_atom: int = 1
    """Elements of a parameter, counted from its start, that no border between shards cuts. 256: for optimizer moments
    in 8 bits. Shards get a little longer."""
    average_in_collective: bool | None = None
    """True: the collective scales gradients (NCCL only). False: each rank scales before it. None: True under NCCL."""
    calculate_per_token_loss: bool = False
    """Gradients are summed over ranks, and divided by all ranks' tokens: see ``model.set_num_tokens``."""
    grad_reduce_wire_dtype: torch.dtype | None = None
    """dtype in which gradients are sent, bf16 or fp16; they are summed in fp32. Needs ``use_distributed_optimizer``."""
    check_for_nan_in_grad: bool = False
    """The reduction's end raises for NaN or Inf and names rank, bucket and parameter. The host waits for the GPU."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """Every bucket ends at a multiple of 2^16 elements, at which NCCL's ring algorithms are fastest."""
    find_unused_parameters: bool = False
    """Walk the final microbatch's graph, so that buckets with unused parameters launch in backward. Needs overlap."""
    forward_writes: Literal["refused", "alike"] = "refused"
    """Parameters written in place in a forward (``nn.Embedding(max_norm=...)``, a codebook, ActNorm's first batch).
    "refused": a forward that has written one raises, if other ranks hold the parameter too. "alike": all ranks write
    the same values, and nothing is checked."""
    check_replicas_every: int | None = None
    """Compare the bits of all parameters between ranks in every such iteration and in the first, before the update.
    The error names parameter and ranks. The host waits for the GPU. None: never."""

    @property
    def use_megatron_fsdp(self) -> bool:
        """Megatron-core asks for it where it sums gradients over other ranks, which this wrapper has summed already."""
        raise AttributeError(
            "gradients over tensor-parallel ranks and pipeline stages are summed already: set "
            "config.finalize_model_grads_func = maingrad.te_integration.pipeline.finalize_model_grads"
        )

    def __post_init__(self) -> None:
        if self.bucket_size is not None and self.bucket_size < 1:
            raise ValueError(f"bucket_size must be at least 1 element, got {self.bucket_size}")
        if self.num_buckets is not None and self.num_buckets < 1:
            raise ValueError(f"num_buckets must be at least 1, got {self.num_buckets}")
        if self.num_buckets is not None and self.bucket_size is not None:
            raise ValueError("bucket_size and num_buckets both say where buckets end: set one of them")
        if self.shard_atom < 1:
            raise ValueError(f"shard_atom must be at least 1 element, got {self.shard_atom}")
        selected: object = self.keep_matrices_whole
        if not (isinstance(selected, list | tuple) and all(isinstance(name, str) for name in selected)):
            raise ValueError(f"keep_matrices_whole is a tuple of names and patterns of parameters; got {selected!r}")
        if not isinstance(self.keep_params_whole, bool):
            raise ValueError(
                f"keep_params_whole is True or False, got {self.keep_params_whole!r}: keep_matrices_whole takes names"
            )
        if self.keep_params_whole and selected:
            raise ValueError("keep_matrices_whole has no effect with keep_params_whole: drop one of the options")
        if self.shard_atom > 1 and self.keep_params_whole:
            raise ValueError(
                "shard_atom has no effect with keep_params_whole: no border cuts any parameter; drop one of the options"
            )
        if self.num_distributed_optimizer_instances < 1:
            raise ValueError(
                f"num_distributed_optimizer_instances must be at least 1, got "
                f"{self.num_distributed_optimizer_instances}"
            )
        if self.grad_reduce_wire_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                f"grad_reduce_wire_dtype is torch.bfloat16, torch.float16, or None for the accumulators' own dtype; "
                f"got {self.grad_reduce_wire_dtype}"
            )
        if self.find_unused_parameters and not self.overlap_grad_reduce:
            raise ValueError(
                "find_unused_parameters has no effect without overlap_grad_reduce: the step reduces zeros for unused "
                "parameters anyway; turn overlap on, or drop the option"
            )
        if self.forward_writes not in ("refused", "alike"):
            raise ValueError(f"forward_writes is 'refused' or 'alike', got {self.forward_writes!r}")
        if self.check_replicas_every is not None and self.check_replicas_every < 1:
            raise ValueError(f"check_replicas_every must be at least 1, got {self.check_replicas_every}")
        if self.copy_engine_param_gather is True and not self.overlap_param_gather:
            raise ValueError(
                "copy_engine_param_gather has no effect without overlap_param_gather: turn it on, or drop the option"
            )
        if not self.use_distributed_optimizer:
            self._refuse_without_shards()
        if self.average_in_collective and (self.calculate_per_token_loss or self.grad_reduce_wire_dtype):
            raise ValueError(
                "average_in_collective has no effect with calculate_per_token_loss (gradients are summed) or "
                "grad_reduce_wire_dtype (each rank sums by itself); leave it None"
            )

    @property
    def can_wait_by_bucket(self) -> bool:
        """Whether nothing follows on the waits for buckets, so that a step may wait for them one by one."""
        return not (self.check_for_nan_in_grad or self.calculate_per_token_loss or self.check_replicas_every)

    def _refuse_without_shards(self) -> None:
        for name, neutral in (
            ("overlap_param_gather", False),
            ("num_distributed_optimizer_instances", 1),
            ("grad_reduce_wire_dtype", None),
            ("keep_params_whole", False),
            ("keep_matrices_whole", ()),
            ("release_grads", False),
            ("shard_atom", 1),
        ):
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"{name} has no effect without use_distributed_optimizer: there are no shards; turn it on, or "
                    f"drop the option"
                )


DistributedDataParallelConfig.__init__ = with_names_meant(  # type: ignore[method-assign]
    reduce_scatter_with_fp32_accumulation="write grad_reduce_wire_dtype=torch.bfloat16",
    nccl_ub="write copy_engine_param_gather=True",
    use_megatron_fsdp="call maingrad.fsdp.fully_shard in place of the wrapper",
    data_parallel_sharding_strategy="call maingrad.fsdp.fully_shard(module, placements=...) in place of the wrapper",
    bucket_cap_mb="write bucket_size, which counts elements",
    delay_wgrad_compute="leave it away; the wrapper finds parameters whose gradients are delayed",
)(DistributedDataParallelConfig.__init__)
