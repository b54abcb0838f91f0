"""Megatron-core's marks of model parallelism on parameters, and what is refused over them. No other file reads them.

``allreduce = False``                   an expert, which only some ranks hold
``tensor_model_parallel = True``        a slice: tensor-parallel ranks hold the whole parameter together
``sequence_parallel = True``            copies on tensor-parallel ranks, each of which has a part of the gradient
``average_gradients_across_tp_domain``  copies likewise; each rank has another gradient, and the mean counts
``shared_embedding = True``             copies on two pipeline stages, each of which has a part of the gradient
"""

from collections.abc import Iterable

from torch import Tensor, nn

from ..collectives.rank_grid import RankGrid
from ..config import DistributedDataParallelConfig

__all__ = [
    "check_marks",
    "grid_name_of",
    "is_marked_expert",
    "is_slice",
    "is_tied_across_stages",
    "mark_of_partial_grad",
    "refuse_slices",
]

_PARTIAL = ("sequence_parallel", "average_gradients_across_tp_domain", "shared_embedding")


def grid_name_of(param: Tensor) -> str:
    """Which ranks a parameter's gradient is reduced over: "dense" or "expert".

    "expert" is what Megatron-core marks ``allreduce = False``: only some ranks hold the same values.
    """
    return "dense" if getattr(param, "allreduce", True) else "expert"


def is_marked_expert(param: Tensor) -> bool:
    """Whether ``grid_name_of`` says "expert"."""
    return grid_name_of(param) == "expert"


def is_slice(param: Tensor) -> bool:
    """Whether tensor-parallel ranks hold the whole parameter together. Megatron-core marks experts alike, whole or cut:
    those have ranks of their own, and are none here."""
    return bool(getattr(param, "tensor_model_parallel", False)) and not is_marked_expert(param)


def is_tied_across_stages(param: Tensor) -> bool:
    """Whether another pipeline stage holds a copy."""
    return bool(getattr(param, "shared_embedding", False))


def mark_of_partial_grad(param: Tensor) -> str | None:
    """The mark of a parameter of which other ranks hold copies, with parts of its gradient; None: no such mark."""
    return next((name for name in _PARTIAL if getattr(param, name, False)), None)


# ---- A wrapper knows the data-parallel ranks alone. What covers all elements of a model, or needs a whole matrix,
# ---- would be computed from one rank's slices, and differ between the ranks that hold one model together.

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
