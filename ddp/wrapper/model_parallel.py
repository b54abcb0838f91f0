"""Refusals for models that are cut by tensor or pipeline parallelism, which only Megatron-core's marks tell.

A wrapper knows the data-parallel ranks alone. What covers all elements of a model, or needs a whole matrix, would be
computed from this rank's slices, and would differ between the ranks that hold one model together.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from ..collectives.rank_grid import RankGrid
from ..config import DistributedDataParallelConfig
from ..contract.parallel_marks import is_slice, mark_of_partial_grad

__all__ = ["check_forced_all_reduce", "check_marks", "refuse_slices"]

_REMEDY_FOR_SUMS = {
    "sequence_parallel": "all-reduce its reduced gradient over the tensor-parallel ranks",
    "average_gradients_across_tp_domain": "average its reduced gradient over the tensor-parallel ranks",
    "shared_embedding": "all-reduce its gradient over the stages that hold the copies",
}


def check_marks(
    trainable: Iterable[tuple[str, nn.Parameter]], grid: RankGrid, config: DistributedDataParallelConfig | None = None
) -> None:
    """Raise ``ValueError`` for marked parameters whose gradients nobody would complete, and for options that would
    look at this rank's slices alone.

    grid    all data-parallel ranks
    config  of the wrapper; None: a wrapper without such options
    """
    trainable = list(trainable)
    for name, param in trainable:
        mark = mark_of_partial_grad(param)
        # Megatron-core sets the first mark only where there are other tensor-parallel ranks.
        if mark is not None and (grid.leaves_ranks_out or (mark == "sequence_parallel" and grid.in_larger_world)):
            raise ValueError(
                f"parameter '{name}' has {mark} = True: other ranks hold copies of it, and parts of its gradient, "
                f"which this wrapper does not sum; {_REMEDY_FOR_SUMS[mark]} yourself, and set the mark to False before "
                f"wrapping"
            )
    if config is not None and config.check_for_nan_in_grad and grid.leaves_ranks_out:
        refuse_slices(
            trainable,
            "check_for_nan_in_grad",
            "would raise on some of the ranks that hold one model together, while the others wait for them",
            "leave it False, and look at the loss on all ranks",
        )


def refuse_slices(params: Iterable[tuple[str, Tensor]], what: str, consequence: str, remedy: str) -> None:
    """Raise ``ValueError`` if a parameter is a slice. The caller knows that other ranks may hold the rest.

    what         the option or function, for the error
    consequence  what it would do, after ``what``
    remedy       what the user can do instead
    """
    name = next((name for name, param in params if is_slice(param)), None)
    if name is not None:
        raise ValueError(
            f"{what} {consequence}: parameter '{name}' is a slice of tensor parallelism (tensor_model_parallel = "
            f"True), whose other slices are on ranks outside the data-parallel group; {remedy}. If every rank holds "
            f"the whole parameter, set the mark to False"
        )


def check_forced_all_reduce(config: DistributedDataParallelConfig) -> None:
    """Megatron-core's ``finish_grad_sync(force_all_reduce=True)`` wants whole gradients on every rank. Raises
    ``ValueError`` where they are sharded."""
    if config.use_distributed_optimizer:
        raise ValueError(
            "finish_grad_sync(force_all_reduce=True): gradients are reduced as they become ready, each rank's shard "
            "alone; wrap with use_distributed_optimizer=False for whole gradients"
        )
